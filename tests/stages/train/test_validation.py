"""Validation: which pairs, the loss of each dataset against a loss by hand, captions and their score."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

from m3diff.models import FAMILIES
from m3diff.models.attention import KERNELS
from m3diff.models.device import Device
from m3diff.stages.train import validation
from m3diff.stages.train.batches import open_image
from m3diff.stages.train.job import Runtime
from m3diff.stages.train.samples import SCHEMA, Samples, read_samples
from m3diff.stages.train.validation import Validation, cider, sample_pairs
from tests.stages.train.toy import REFERENCES, recipe
from tests.tiny import tiny_settings, tiny_trained


def samples(**pairs: int) -> Samples:
    """Datasets one after another, two rows a pair."""
    rows = [(dataset, f"{dataset}/{n}") for dataset, count in pairs.items() for n in range(count) for _ in range(2)]
    other = ["x"] * len(rows)
    columns = {"dataset": [dataset for dataset, _ in rows], "pair": [pair for _, pair in rows]}
    return Samples(pa.table({name: columns.get(name, other) for name in SCHEMA.names}))


def test_pairs_come_from_all_of_each_dataset_by_the_seed_alone() -> None:
    held = samples(big=100, small=3)
    chosen = sample_pairs(held, 10, seed=1)
    assert {name: len(pairs) for name, pairs in chosen.items()} == {"big": 10, "small": 3}
    firsts = [int(rows[0]) for rows in chosen["big"]]
    assert firsts == sorted(set(firsts))
    assert max(firsts) > 100, "not the first ten"
    assert all(len(rows) == 2 and held.dataset[rows[0]] == name for name, pairs in chosen.items() for rows in pairs)
    again = [int(rows[0]) for rows in sample_pairs(held, 10, seed=1)["big"]]
    other = [int(rows[0]) for rows in sample_pairs(held, 10, seed=2)["big"]]
    assert again == firsts != other


def test_a_smaller_count_is_part_of_a_larger_and_other_datasets_change_nothing() -> None:
    def first_rows(held: Samples, count: int) -> set[int]:
        return {int(rows[0]) for rows in sample_pairs(held, count, seed=1)["big"]}

    assert first_rows(samples(big=100), 5) < first_rows(samples(big=100), 20)
    assert first_rows(samples(big=100, more=50), 5) == first_rows(samples(big=100), 5)
    assert sample_pairs(samples(big=3), 0, seed=1) == {"big": []}


@pytest.fixture(scope="module")
def model(base: Path) -> torch.nn.Module:
    trained = tiny_trained(base, tiny_settings()).eval()
    trained.set_attn_implementation(KERNELS)
    return trained


def validator(base: Path, mixture: Path, ranks: int = 1, rank: int = 0, **compute: int) -> Validation:
    family, made = FAMILIES["m3diff"], recipe(base, val_pairs=3, micro_batch=2).changed(**compute)
    held = read_samples(mixture / "val", base.parent / "samples")
    return Validation(
        held, family.load_processor(base), family, made.compute, 3, Runtime(rank, ranks), Device(False, "fp32")
    )


def losses_by_hand(model: torch.nn.Module, found: Validation) -> dict[str, list[float]]:
    """(sum, tokens) of each dataset, every reference in a sequence of its own."""
    from m3diff.stages.train.batches import Loader

    loader = Loader(found.samples, found.processor, threads=1, device=found.device)
    sums: dict[str, list[float]] = {"toy": [0.0, 0], "second": [0.0, 0]}
    for row in range(len(found.samples)):
        batch = loader.build([(np.array([row]), 1)])
        with torch.no_grad():
            logits = model(
                input_ids=batch.packed.input_ids, logits_to_keep=batch.packed.supervised,
                **found.processor.image_inputs(batch.images),
            ).logits  # fmt: skip
        chosen = logits.log_softmax(-1)[torch.arange(len(batch.packed.labels)), batch.packed.labels]
        sums[found.samples.dataset[row]][0] -= float(chosen.sum())
        sums[found.samples.dataset[row]][1] += len(chosen)
    return sums


def test_val_loss_is_the_mean_per_token_over_all_and_of_each_dataset(
    base: Path, mixture: Path, model: torch.nn.Module
) -> None:
    found = validator(base, mixture)
    want = losses_by_hand(model, found)
    got = found.losses(model)
    assert list(got) == ["val_loss", "val_loss_second", "val_loss_toy"]
    for name, (total, tokens) in want.items():
        assert got[f"val_loss_{name}"] == pytest.approx(total / tokens, rel=1e-5)
    assert got["val_loss"] == pytest.approx(
        sum(total for total, _ in want.values()) / sum(tokens for _, tokens in want.values()), rel=1e-5
    )
    assert model.training, "training goes on"


def test_batches_are_dealt_to_the_workers_each_once_and_filled_up_with_weight_zero(base: Path, mixture: Path) -> None:
    parts = [validator(base, mixture, 2, rank, micro_batch=1) for rank in range(2)]
    assert [len(part.batches) for part in parts] == [3, 3]
    alone = validator(base, mixture)
    tokens = sum(batch.supervised_tokens for part in parts for _, batch in part.batches)
    assert tokens == sum(batch.supervised_tokens for _, batch in alone.batches)
    assert [batch.supervised_tokens for _, batch in parts[1].batches].count(0) == 1


def test_nothing_to_validate_is_no_score(base: Path, mixture: Path, model: torch.nn.Module) -> None:
    found = validator(base, mixture, val_pairs=0, caption_val_pairs=0)
    assert (found.losses(model), found.cider(SimpleNamespace(module=model))) == ({}, {})


def test_captions_are_scored_by_dataset_against_the_references_of_their_own_pair(
    base: Path, mixture: Path, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = validator(base, mixture, caption_val_pairs=9)
    seen: list[tuple[list[list[str]], list[str]]] = []

    def scored(references: list[list[str]], predictions: list[str]) -> float:
        seen.append((references, predictions))
        return float(len(seen))

    monkeypatch.setattr(validation, "cider", scored)
    monkeypatch.setattr(Validation, "_captions", lambda self, engine, rows: {row: f"caption {row}" for row in rows})
    assert found.cider(None) == {"val_cider": 1.5}
    # the split has pairs of 1, 2, 3 references (toy: rows 0, 1, 3), then of 1, 2 (second: rows 6, 7)
    assert seen[0] == ([list(REFERENCES[:1]), list(REFERENCES[:2])], ["caption 6", "caption 7"])
    assert seen[1] == ([list(REFERENCES[: n + 1]) for n in range(3)], ["caption 0", "caption 1", "caption 3"])


def test_captions_are_the_deployed_captioner_s_for_each_question(
    base: Path, mixture: Path, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "MAX_NEW_TOKENS", 4)
    monkeypatch.setattr(validation, "CAPTION_BATCH", 2)
    found = validator(base, mixture)
    questions = ["Describe the difference." if row == 7 else "What changed?" for row in range(len(found.samples))]
    found.samples.question = questions  # type: ignore[assignment]
    rows = [0, 1, 3, 6, 7]
    asked: list[tuple[str, int]] = []
    original = validation.Captioner.caption

    def caption(self: validation.Captioner, pairs: list, question: str) -> list[str]:
        asked.append((question, len(pairs)))
        return original(self, pairs, question)

    monkeypatch.setattr(validation.Captioner, "caption", caption)
    engine = SimpleNamespace(module=model, eval=model.eval, train=model.train)
    got = found._captions(engine, rows)
    assert asked == [("What changed?", 2), ("What changed?", 2), ("Describe the difference.", 1)]
    assert list(got) == rows
    captioner = validation.Captioner(model.get_base_model(), found.processor, found.family, 4)
    for row in rows:
        assert (
            got[row]
            == original(
                captioner, [tuple(open_image(*file) for file in found.samples.images(row))], found.samples.question[row]
            )[0]
        )
    assert model.train().training


def test_cider_is_ten_for_the_only_reference_and_ignores_case_and_stops() -> None:
    gold = [["the red ball moved"], ["a blue cube is gone"], ["nothing has changed here"]]
    assert cider(gold, ["The red ball moved.", "A blue cube is gone", "Nothing, has changed here!"]) == pytest.approx(
        10
    )
    worse = cider(gold, ["the red ball moved", "the red ball moved", "nothing has changed here"])
    assert 0 < worse < 9
    assert cider(gold, ["a blue cube is gone", "nothing has changed here", "the red ball moved"]) == pytest.approx(0)

"""Validation: which pairs, the loss of each dataset against a loss by hand, captions and their score."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from m3diff.images.open import load_image
from m3diff.models import FAMILIES
from m3diff.models.device import Device
from m3diff.models.fused import KERNELS
from m3diff.stages.train import loop
from m3diff.stages.train.batches import SCHEMA, Samples, read_samples
from m3diff.stages.train.job import Runtime
from m3diff.stages.train.loop import Validation, cider, sample_pairs
from tests.stages.train.toy import REFERENCES, job, recipe
from tests.tiny import tiny_settings, tiny_trained


def samples(**pairs: int) -> Samples:
    """Datasets one after another, two rows a pair."""
    rows = [(dataset, f"{dataset}/{n}") for dataset, count in pairs.items() for n in range(count) for _ in range(2)]
    columns = {"dataset": [dataset for dataset, _ in rows], "pair": [pair for _, pair in rows]}
    return Samples(pl.DataFrame({name: columns.get(name, ["x"] * len(rows)) for name in SCHEMA}))


def test_pairs_come_from_all_of_each_dataset_by_the_seed_alone_and_fewer_are_part_of_more():
    held = samples(big=100, small=3)

    def firsts(count: int, seed: int = 1, of: Samples = held) -> list[int]:
        return [int(rows[0]) for rows in sample_pairs(of, count, seed)["big"]]

    chosen = sample_pairs(held, 10, seed=1)
    assert {name: len(pairs) for name, pairs in chosen.items()} == {"big": 10, "small": 3}
    assert firsts(10) == sorted(set(firsts(10)))
    assert max(firsts(10)) > 100, "not the first ten"
    assert all(
        len(rows) == 2 and held.value("dataset", rows[0]) == name for name, pairs in chosen.items() for rows in pairs
    )
    assert firsts(10) == firsts(10, of=samples(big=100, more=50)) != firsts(10, seed=2)
    assert set(firsts(5)) < set(firsts(20))
    assert sample_pairs(samples(big=3), 0, seed=1) == {}


@pytest.fixture(scope="module")
def model(base: Path) -> torch.nn.Module:
    trained = tiny_trained(base, tiny_settings()).eval()
    trained.set_attn_implementation(KERNELS)
    return trained


def validator(base: Path, mixture: Path, ranks: int = 1, rank: int = 0, **compute: int) -> Validation:
    made = recipe(base, **{"val_pairs": 3, "micro_batch": 2, **compute})
    held, processor = read_samples(mixture / "val"), FAMILIES["m3diff"].load_processor(base)
    return Validation(job(made, mixture, base), held, Runtime(rank, ranks), processor, Device(False, "fp32"))


def test_val_loss_is_the_mean_per_token_over_all_and_of_each_dataset(base, mixture, model):
    found = validator(base, mixture)
    sums: dict[str, list[float]] = {"toy": [0.0, 0], "second": [0.0, 0]}
    for row in range(len(found.samples)):  # by hand, every reference in a sequence of its own
        batch = found.loader.build([(np.array([row]), 1)])
        inputs = {"input_ids": batch.packed.input_ids, "logits_to_keep": batch.packed.supervised}
        with torch.no_grad():
            logits = model(**inputs, **found.processor.image_inputs(batch.images)).logits
        chosen = logits.log_softmax(-1)[torch.arange(len(batch.packed.labels)), batch.packed.labels]
        sums[found.samples.value("dataset", row)][0] -= float(chosen.sum())
        sums[found.samples.value("dataset", row)][1] += len(chosen)
    got = found.losses(model)
    assert list(got) == ["val_loss", "val_loss_second", "val_loss_toy"]
    total, tokens = (sum(parts) for parts in zip(*sums.values(), strict=True))
    want = {f"val_loss_{name}": of[0] / of[1] for name, of in sums.items()} | {"val_loss": total / tokens}
    assert got == pytest.approx(want, rel=1e-5)
    assert model.training, "training goes on"
    nothing = validator(base, mixture, val_pairs=0, caption_val_pairs=0)
    assert (nothing.losses(model), nothing.cider(SimpleNamespace(module=model))) == ({}, {})


def test_batches_are_dealt_to_the_workers_each_once_and_filled_up_with_weight_zero(base, mixture):
    parts = [validator(base, mixture, 2, rank, micro_batch=1) for rank in range(2)]
    tokens = [[batch.supervised_tokens for _, batch in part.batches] for part in parts]
    assert [len(part) for part in tokens] == [3, 3]
    assert sum(map(sum, tokens)) == sum(batch.supervised_tokens for _, batch in validator(base, mixture).batches)
    assert tokens[1].count(0) == 1


def test_captions_are_scored_by_dataset_against_the_references_of_their_own_pair(base, mixture, monkeypatch):
    found, seen = validator(base, mixture, caption_val_pairs=9), []
    monkeypatch.setattr(loop, "cider", lambda *given: float(seen.append(given) or len(seen)))
    monkeypatch.setattr(Validation, "_captions", lambda self, engine, rows: {row: f"caption {row}" for row in rows})
    assert found.cider(None) == {"val_cider": 1.5}
    # the split has pairs of 1, 2, 3 references (toy: rows 0, 1, 3), then of 1, 2 (second: rows 6, 7)
    assert seen[0] == ([list(REFERENCES[:1]), list(REFERENCES[:2])], ["caption 6", "caption 7"])
    assert seen[1] == ([list(REFERENCES[: n + 1]) for n in range(3)], ["caption 0", "caption 1", "caption 3"])


def test_captions_are_the_deployed_captioner_s_for_each_question(base, mixture, model, monkeypatch):
    monkeypatch.setattr(loop, "MAX_NEW_TOKENS", 4)
    monkeypatch.setattr(loop, "CAPTION_BATCH", 2)
    found, rows, asked = validator(base, mixture), [0, 1, 3, 6, 7], []
    questions = ["Describe the difference." if row == 7 else "What changed?" for row in range(len(found.samples))]
    found.samples = Samples(found.samples.table.with_columns(question=pl.Series(questions)))
    original = loop.Captioner.caption

    def caption(self: Any, pairs: list, question: str) -> list[str]:
        asked.append((question, len(pairs)))
        return original(self, pairs, question)

    monkeypatch.setattr(loop.Captioner, "caption", caption)
    got = found._captions(SimpleNamespace(module=model, eval=model.eval, train=model.train), rows)
    assert asked == [("What changed?", 2), ("What changed?", 2), ("Describe the difference.", 1)]
    captioner = loop.Captioner(model.get_base_model(), found.processor, found.family, 4)
    want = {}
    for row in rows:
        pair = tuple(load_image(*file) for file in found.samples.images(row))
        (want[row],) = original(captioner, [pair], questions[row])
    assert list(got.items()) == list(want.items())
    assert model.train().training


def test_cider_is_ten_for_the_only_reference_and_ignores_case_and_stops():
    gold = [["the red ball moved"], ["a blue cube is gone"], ["nothing has changed here"]]
    (ball,), (cube,), (nothing,) = gold
    said = ["The red ball moved.", "A blue cube is gone", "Nothing, has changed here!"]
    assert cider(gold, said) == pytest.approx(10)
    assert 0 < cider(gold, [ball, ball, nothing]) < 9
    assert cider(gold, [cube, nothing, ball]) == pytest.approx(0)

"""Validation: sampled pairs, the loss of each dataset compared with a loss by hand, captions and their score."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from m3diff.images.open import load_image
from m3diff.models import FAMILIES, generation
from m3diff.models.device import Device
from m3diff.models.fused import register_kernels
from m3diff.stages.train import validation
from m3diff.stages.train.batches import SCHEMA, Samples, read_samples
from m3diff.stages.train.job import WorkerContext
from m3diff.stages.train.validation import Validation, cider, sample_pairs
from tests.stages.train.toy import REFERENCES, job, recipe
from tests.tiny import tiny_settings, tiny_trained


def samples(**pairs: int) -> Samples:
    """Return samples of several datasets, one after another, with two rows per pair."""
    rows = [(dataset, f"{dataset}/{n}") for dataset, count in pairs.items() for n in range(count) for _ in range(2)]
    names = [pair for _, pair in rows]
    columns = {"dataset": [dataset for dataset, _ in rows], "record": names, "image_set": names}
    return Samples(pl.DataFrame({name: columns.get(name, ["x"] * len(rows)) for name in SCHEMA}))


@pytest.fixture
def two_datasets() -> Samples:
    return samples(big=100, small=3)


def rows_of_big(two_datasets: Samples, count: int, seed: int = 1) -> list[int]:
    """Return the first row of each sampled pair of the dataset big."""
    return [int(rows[0]) for rows in sample_pairs(two_datasets, count, seed)["big"]]


def test_each_dataset_has_as_many_pairs_as_asked_for_or_all(two_datasets):
    chosen = sample_pairs(two_datasets, 10, seed=1)
    assert {name: len(pairs) for name, pairs in chosen.items()} == {"big": 10, "small": 3}
    for name, pairs in chosen.items():
        for rows in pairs:
            assert len(rows) == 2
            assert two_datasets.value("dataset", rows[0]) == name
    assert sample_pairs(samples(big=3), 0, seed=1) == {}


def test_pairs_come_from_the_whole_split_in_its_order(two_datasets):
    rows = rows_of_big(two_datasets, 10)
    assert rows == sorted(set(rows))
    assert max(rows) > 100, "not the first ten"


def test_the_choice_follows_from_the_seed_and_not_from_other_datasets(two_datasets):
    assert rows_of_big(two_datasets, 10) == rows_of_big(samples(big=100, more=50), 10)
    assert rows_of_big(two_datasets, 10) != rows_of_big(two_datasets, 10, seed=2)


def test_fewer_pairs_are_part_of_more(two_datasets):
    assert set(rows_of_big(two_datasets, 5)) < set(rows_of_big(two_datasets, 20))


@pytest.fixture(scope="module")
def model(base: Path) -> torch.nn.Module:
    trained = tiny_trained(base, tiny_settings()).eval()
    trained.set_attn_implementation(register_kernels())
    return trained


def validator(base: Path, mixture: Path, ranks: int = 1, rank: int = 0, **compute: int) -> Validation:
    run_recipe = recipe(base, **{"val_pairs": 3, "micro_batch": 2, **compute})
    validation_samples = read_samples(mixture / "val")
    processor = FAMILIES["m3diff"].load_processor(base)
    return Validation(
        job(run_recipe, mixture, base), validation_samples, WorkerContext(rank, ranks), processor, Device(False, "fp32")
    )


def test_val_loss_is_the_mean_per_token_over_all_and_of_each_dataset(base, mixture, model):
    scorer = validator(base, mixture)
    sums: dict[str, list[float]] = {"toy": [0.0, 0], "second": [0.0, 0]}
    for row in range(len(scorer.samples)):  # by hand, every reference in a sequence of its own
        batch = scorer.loader.build([(np.array([row]), 1)])
        inputs = {"input_ids": batch.packed.input_ids, "logits_to_keep": batch.packed.supervised}
        with torch.no_grad():
            images = scorer.processor.image_inputs(batch.images, torch.device("cpu"))
            logits = model(**inputs, **images).logits
        chosen = logits.log_softmax(-1)[torch.arange(len(batch.packed.labels)), batch.packed.labels]
        sums[scorer.samples.value("dataset", row)][0] -= float(chosen.sum())
        sums[scorer.samples.value("dataset", row)][1] += len(chosen)
    actual = scorer.losses(model)
    assert list(actual) == ["val_loss", "val_loss_second", "val_loss_toy"]
    total, tokens = (sum(parts) for parts in zip(*sums.values(), strict=True))
    expected = {f"val_loss_{name}": loss_sum / count for name, (loss_sum, count) in sums.items()}
    expected["val_loss"] = total / tokens
    assert actual == pytest.approx(expected, rel=1e-5)
    assert model.training, "training goes on"


def test_a_validation_without_pairs_has_no_scores(base, mixture, model):
    nothing = validator(base, mixture, val_pairs=0, caption_val_pairs=0)
    assert nothing.losses(model) == {}
    assert nothing.score_answers(SimpleNamespace(module=model)) == {}


def supervised_tokens(scorer: Validation) -> list[int]:
    """Return the number of tokens of each batch that count in the loss."""
    batches = [scorer.packing.batch(sequences, scorer.processor, scorer.device) for _, sequences in scorer.batches]
    return [int(batch.weights.sum()) for batch in batches]


def test_batches_are_dealt_to_the_workers_each_once_and_filled_up_with_weight_zero(base, mixture):
    tokens = [supervised_tokens(validator(base, mixture, 2, rank, micro_batch=1)) for rank in range(2)]
    assert [len(part) for part in tokens] == [3, 3]
    assert sum(map(sum, tokens)) == sum(supervised_tokens(validator(base, mixture)))
    assert tokens[1].count(0) == 1


def test_captions_are_scored_by_dataset_against_the_references_of_their_own_pair(base, mixture, monkeypatch):
    scorer = validator(base, mixture, caption_val_pairs=9)
    scored = []

    def score(references: Any, predictions: Any) -> float:
        scored.append((references, predictions))
        return float(len(scored))

    monkeypatch.setattr(validation, "cider", score)
    monkeypatch.setattr(Validation, "_answers", lambda self, engine, rows: {row: f"caption {row}" for row in rows})
    assert scorer.answer_scores == []
    assert scorer.score_answers(None) == {"val_cider": 1.5}
    # the split has pairs of 1, 2, 3 references (toy: rows 0, 1, 3), then of 1, 2 (second: rows 6, 7)
    assert scored[0] == ([list(REFERENCES[:1]), list(REFERENCES[:2])], ["caption 6", "caption 7"])
    assert scored[1] == ([list(REFERENCES[: n + 1]) for n in range(3)], ["caption 0", "caption 1", "caption 3"])


def test_answers_to_the_questions_of_a_dataset_are_scored_by_exact_matches(base, mixture, monkeypatch):
    """Of the dataset second, the first pair has two questions, with one and two right answers."""
    validation_samples = read_samples(mixture / "val")
    records = validation_samples.table["record"].to_list()
    second_pair = records[-1]
    first_rows = [row for row, record in enumerate(records) if record == second_pair]
    records[first_rows[0]] += "?0"
    records[first_rows[1]] += "?1"
    own_questions = Samples(validation_samples.table.with_columns(record=pl.Series(records)))
    run_recipe = recipe(base, val_pairs=3, micro_batch=2, caption_val_pairs=9)
    worker = WorkerContext(0, 1)
    processor = FAMILIES["m3diff"].load_processor(base)
    scorer = Validation(job(run_recipe, mixture, base), own_questions, worker, processor, Device(False, "fp32"))
    answered_rows: list[int] = []

    def answer(self: Validation, engine: Any, rows: list[int]) -> dict[int, str]:
        answered_rows.extend(rows)
        return {row: own_questions.value("answer", row).upper() + "." if row != first_rows[1] else "?" for row in rows}

    monkeypatch.setattr(Validation, "_answers", answer)
    monkeypatch.setattr(validation, "cider", lambda references, predictions: 7.0)
    assert scorer.answer_scores == ["val_match"]
    scores = scorer.score_answers(None)
    assert scores == {"val_cider": 7.0, "val_match": pytest.approx(2 / 3)}
    assert answered_rows[-3:] == [first_rows[0] - 1, *first_rows], "each question is asked, not only the first"


@pytest.mark.parametrize(("most_bytes", "sizes"), [(1 << 30, [2, 2]), (1, [1] * 4)], ids=["small", "large images"])
def test_captions_are_the_deployed_captioner_s_for_each_question(most_bytes, sizes, base, mixture, model, monkeypatch):
    monkeypatch.setattr(generation, "MAX_PREPARED_BYTES", most_bytes)
    monkeypatch.setattr(validation, "MAX_NEW_TOKENS", 4)
    monkeypatch.setattr(validation, "CAPTION_BATCH", 2)
    scorer = validator(base, mixture)
    rows = [0, 1, 3, 6, 7]
    batches = []
    questions = ["Describe the difference." if row == 7 else "What changed?" for row in range(len(scorer.samples))]
    scorer.samples = Samples(scorer.samples.table.with_columns(question=pl.Series(questions)))
    original = validation.Captioner.answer

    def answer(self: Any, prepared: list, dialogues: list) -> Any:
        (question,) = {turns[-1].question for turns in dialogues}
        batches.append((question, len(prepared)))
        return original(self, prepared, dialogues)

    monkeypatch.setattr(validation.Captioner, "answer", answer)
    actual = scorer._answers(SimpleNamespace(module=model, eval=model.eval, train=model.train), rows)
    assert batches == [*(("What changed?", size) for size in sizes), ("Describe the difference.", 1)]
    captioner = validation.Captioner(model.get_base_model(), scorer.processor, scorer.family, 4)
    expected = {}
    for row in rows:
        pair = tuple(load_image(*file) for file in scorer.samples.images(row))
        (expected[row],) = captioner.caption([pair], questions[row])
    assert list(actual.items()) == list(expected.items())
    assert model.train().training


def test_each_worker_answers_its_share_and_gets_the_answers_of_all(base, mixture, monkeypatch):
    scorer = validator(base, mixture, ranks=2, rank=1)

    class Answerer:
        def __init__(self, *_: Any) -> None: ...

        def encode_prompt(self, turns: Any, marks: Any) -> list[int]:
            return [0]

        def answer_in_parts(self, prepared: Any, dialogues: Any) -> list[str]:
            return [f"answer to {turns[-1].answer}" for turns in dialogues]

    def gather(answers_by_rank: list[Any], answers: dict[int, str]) -> None:
        answers_by_rank[:] = [{0: "of the first", 6: "too"}, answers]

    monkeypatch.setattr(validation, "Captioner", Answerer)
    monkeypatch.setattr(validation.dist, "all_gather_object", gather)
    modes: list[str] = []
    model: Any = SimpleNamespace(
        module=torch.nn.Module(), eval=lambda: modes.append("eval"), train=lambda: modes.append("train")
    )
    answers = scorer._answers(model, [0, 1, 6, 7])
    own_answers = {row: f"answer to {scorer.samples.value('answer', row)}" for row in (1, 7)}
    assert answers == {0: "of the first", 6: "too"} | own_answers
    assert modes == ["eval", "train"]


def test_cider_is_ten_for_the_only_reference_and_ignores_case_and_stops():
    gold = [["the red ball moved"], ["a blue cube is gone"], ["nothing has changed here"]]
    (ball,), (cube,), (nothing,) = gold
    predictions = ["The red ball moved.", "A blue cube is gone", "Nothing, has changed here!"]
    assert cider(gold, predictions) == pytest.approx(10)
    assert 0 < cider(gold, [ball, ball, nothing]) < 9
    assert cider(gold, [cube, nothing, ball]) == pytest.approx(0)

"""Training on pairs, single images and text: what a run trains on, with one worker and with two."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from m3diff.models import FAMILIES
from m3diff.models.checkpoint import read_manifest
from m3diff.models.contract import Takes
from m3diff.records.errors import ParamsError
from m3diff.records.sample import Turn
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.stages.train.batches import SCHEMA, Samples, Schedule, read_training_samples
from m3diff.stages.train.sample_checks import check_samples
from tests.errors import raises
from tests.stages.train.test_loop import workers
from tests.stages.train.toy import assert_same, pair_rows, read_curve, recipe, run
from tests.tiny import tiny_base

IMAGE_SETS = 8
COMPUTE: dict[str, Any] = {"global_batch": 4, "micro_batch": 1, "epochs": 2, "val_pairs": 0, "max_grad_norm": None}


def mixed_rows(folder: Path, split: str, number: int) -> list[dict[str, Any]]:
    """Return the samples of a pair, of its first image, or of no image, by turns. Every third has earlier turns."""
    rows = pair_rows(folder, split, "toy", number)
    for row in rows:
        row["images"] = row["images"][: (2, 0, 1, 0)[number % 4]]
        row["question"] = f"Question {number}?"
        if number % 3 == 0:
            row["history"] = [{"question": "Is the ball gone?", "answer": "yes"}]
    return rows


@pytest.fixture(scope="module")
def mixed_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed") / "mixture"
    for split, count in (("train", IMAGE_SETS), ("val", 2), ("test", 1)):
        rows = [row for number in range(count) for row in mixed_rows(folder, split, number)]
        (folder / split).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows, SAMPLE_SCHEMA), folder / split / "00000.parquet")
    return folder


def test_a_run_trains_on_all_of_them_and_its_manifest_says_so(mixed_mixture, base, tmp_path):
    trained = run(recipe(base, **COMPUTE), mixed_mixture, tmp_path)
    assert trained.report.rows_out == 2 * len(read_training_samples(mixed_mixture))
    trained_on = read_manifest(tmp_path / "out" / "checkpoint")["trained_on"]
    assert trained_on == {"question": "Question 4?", "own_questions": False, "images": [0, 1, 2], "turns": 2}


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_two_workers_of_which_one_has_no_image_train_as_one(stage, mixed_mixture, tmp_path):
    """A worker that skipped the module would stop the other one at its first collective operation."""
    base = tiny_base(tmp_path / "base")
    run_recipe = recipe(base, **COMPUTE, zero_stage=stage)
    plan = Schedule(read_training_samples(mixed_mixture), None, run_recipe.cfg.seed, 4, 1, 2, ranks=2)
    images = []  # images of each worker's micro-batches, one sequence each, that are computed at the same time
    for step in range(plan.steps):
        for batches in zip(plan.micro_batches(step, 0), plan.micro_batches(step, 1), strict=True):
            images.append([len(plan.samples.images(rows[0])) for batch in batches for rows, _ in batch])
    assert any(0 in counts and 2 in counts for counts in images)
    assert any(set(counts) == {0} for counts in images)
    workers(2, run_recipe, mixed_mixture, tmp_path / "two")
    workers(1, run_recipe, mixed_mixture, tmp_path / "one")
    losses, losses_of_one = ([float(row["loss"]) for row in read_curve(tmp_path / name)] for name in ("two", "one"))
    assert losses == pytest.approx(losses_of_one, rel=1e-5)
    weights, weights_of_one = (
        load_file(tmp_path / name / "checkpoint" / "model.safetensors") for name in ("two", "one")
    )
    assert_same(weights, weights_of_one, atol=2e-5)


def test_a_sample_that_is_too_long_ends_the_run_before_its_first_step(mixed_mixture, base, tmp_path):
    samples = read_training_samples(mixed_mixture)
    processor = FAMILIES["m3diff"].load_processor(base)
    lengths: dict[str, int] = {}  # of the longest sample of each record
    for row in range(len(samples)):
        *history, turn = samples.turns(row)
        marks = processor.marks(len(samples.images(row)))
        tokens = len(processor.encode_prompt((*history, Turn(turn.question)), marks))
        tokens += len(processor.encode_answer(turn.answer))
        record = samples.value("record", row)
        lengths[record] = max(tokens, lengths.get(record, 0))
    longest = max(lengths.values())
    run(recipe(base, **COMPUTE, max_tokens=longest), mixed_mixture, tmp_path / "long enough")
    limit = longest - 1
    name = next(record for record, tokens in lengths.items() if tokens == longest)
    fields = {"key": "train.max_tokens", "value": longest, "limit": limit, "dataset": "toy", "name": name}
    with raises(ParamsError, "train.sample_too_long", **fields):
        run(recipe(base, **COMPUTE, max_tokens=limit), mixed_mixture, tmp_path / "too short")


@pytest.mark.parametrize("split", ["test", "retention"])
def test_samples_that_only_predict_would_refuse_end_the_run_before_its_first_step(split, mixed_mixture, base, tmp_path):
    shutil.copytree(mixed_mixture / "train", tmp_path / "mixture" / "train")
    marked = samples_of((2, "toy/2?1", "Is <image> older?", None)).table
    (tmp_path / "mixture" / split).mkdir(parents=True)
    marked.write_parquet(tmp_path / "mixture" / split / "00000.parquet")
    with raises(ParamsError, "train.marks_not_taken", split=split, name="toy/2?1"):
        run(recipe(base, **COMPUTE), tmp_path / "mixture", tmp_path / "out")


def samples_of(*rows: tuple[int, str, str, str | None]) -> Samples:
    """Return samples of one dataset, given as (number of images, record, question, earlier question)."""
    table = []
    for images, record, question, earlier_question in rows:
        history = [] if earlier_question is None else [{"question": earlier_question, "answer": "yes"}]
        table.append(
            {
                "record": record,
                "image_set": record.partition("?")[0],
                "dataset": "toy",
                "question": question,
                "answer": "two",
                "images": [{"uri": "a.png", "sha256": b""}] * images,
                "history": history,
            }
        )
    return Samples(pl.DataFrame(table, SCHEMA))


PAIR_ROW = (2, "toy/1", "What changed?", None)


@pytest.mark.parametrize(
    ("family", "row", "code", "fields"),
    [
        ("blip2idc", (1, "toy/2", "What changed?", None), "train.images_not_taken", {"images": 1, "expected": [2]}),
        ("blip2idc", (0, "toy/2", "What changed?", None), "train.images_not_taken", {"images": 0, "expected": [2]}),
        ("m3diff", (3, "toy/2", "What changed?", None), "train.images_not_taken", {"images": 3, "expected": [0, 1, 2]}),
        ("blip2idc", (2, "toy/2?1", "How many?", None), "train.questions_not_taken", {}),
        ("blip2idc", (2, "toy/2", "What changed?", "Did it?"), "train.turns_not_taken", {}),
        ("onediff", (2, "toy/2?1", "Is <image> older?", None), "train.marks_not_taken", {"mark": "<image>"}),
        ("m3diff", (2, "toy/2?1", "Why?", "Is <image> older?"), "train.marks_not_taken", {"mark": "<image>"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_family_refuses_samples_that_it_cannot_take(family, row, code, fields):
    processor = SimpleNamespace(places_images=False)
    takes = FAMILIES[family].takes
    check_samples(samples_of(PAIR_ROW), "test", family, takes, processor)
    fields = fields | {"value": 1, "split": "test", "family": family, "names": ["toy"], "name": row[1]}
    with raises(ParamsError, code, **fields):
        check_samples(samples_of(PAIR_ROW, row), "test", family, takes, processor)


def test_a_family_that_places_images_takes_marks_in_texts():
    processor = SimpleNamespace(places_images=True)
    check_samples(samples_of((2, "toy/2?1", "Is <image> older?", None)), "train", "m3diff", Takes(), processor)

"""Couples of single images: which samples convert marks, with which question, and what it refuses."""

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from m3diff.records.errors import ParamsError
from m3diff.records.schemas import COUPLE_QUESTION, COUPLED_SAMPLE_SCHEMA, SAMPLE_SCHEMA
from m3diff.settings.load import load_params
from m3diff.stages.convert.params import Convert
from m3diff.stages.convert.stage import ConvertReport, convert, load_questions
from m3diff.stages.train.batches import read_training_samples
from tests.errors import raises
from tests.layouts import make_entry, write_record_table
from tests.stages.convert.test_convert import QUESTIONS, record

HISTORY = [{"question": "Is it day?", "answer": "yes"}]


def single(name: str, split: str = "train", dataset: str = "singles", **changes: Any) -> dict[str, Any]:
    """Return a record of one image with a question of its own."""
    row = record(name, split, (f"a {name}",), (), dataset)
    fields = {"id": f"{dataset}/{name}", "image_set": f"{dataset}/{name}.png", "question": "What is it?"}
    return row | {"images": row["images"][:1]} | fields | changes


def pair(name: str, split: str = "train") -> dict[str, Any]:
    return record(name, split, dataset="pairs")


def run(folder: Path, records: list[dict[str, Any]], **source: Any) -> Path:
    """Convert records of the datasets `singles`, which is coupled, and `pairs`. Return the mixture."""
    write_record_table(folder / "clean/records", records)
    entries = {name: make_entry("pairs", folder) for name in ("singles", "pairs")}
    cfg = Convert(questions=QUESTIONS, sources={"singles": {"couple": "also", **source}})
    convert(cfg, entries, folder / "clean", folder / "mixture")
    return folder / "mixture"


SINGLES = [single(str(number), split) for split in ("train", "val", "test") for number in range(6)]


def test_only_training_samples_of_a_coupled_dataset_are_marked(tmp_path):
    mixture = run(tmp_path, [*SINGLES, pair("a"), pair("b", "val")])
    samples = pl.read_parquet(mixture / "train/*.parquet")
    assert pq.read_schema(mixture / "train/00000.parquet").equals(COUPLED_SAMPLE_SCHEMA)
    assert samples.filter(pl.col(COUPLE_QUESTION).is_not_null())["dataset"].unique().to_list() == ["singles"]
    assert samples.filter(dataset="pairs")[COUPLE_QUESTION].to_list() == [None]
    assert samples.filter(dataset="singles")["question"].unique().to_list() == ["What is it?"]
    for split in ("val", "test"):
        assert pq.read_schema(mixture / split / "00000.parquet").equals(SAMPLE_SCHEMA)


@pytest.mark.parametrize(
    ("source", "couples"),
    [({}, 3), ({"max_pairs": 5}, 2), ({"max_pairs": 1}, 0), ({"couple": None}, 0)],
    ids=["all", "a limit", "one image", "no couples"],
)
def test_the_report_counts_couples_as_training_makes_them(tmp_path, source, couples):
    mixture = run(tmp_path, [single(str(number)) for number in range(7)], **source)
    report = ConvertReport.model_validate_json((mixture / "report.json").read_text())
    assert report.datasets["singles"].couples == couples
    assert read_training_samples(mixture).couples_per_epoch == couples


def test_the_questions_about_couples_are_those_of_the_task(tmp_path):
    records = [single(str(number)) for number in range(40)]
    questions = load_questions(QUESTIONS)
    for task, source in (("describe", {}), ("detail", {"task": "detail"})):
        mixture = run(tmp_path, records, **source)
        marked = pl.read_parquet(mixture / "train/*.parquet")[COUPLE_QUESTION]
        assert set(marked) == set(questions[task])


def test_a_mixture_without_couples_has_the_same_bytes_as_before(tmp_path):
    records = [pair("a"), pair("b", "val"), *SINGLES[6:]]
    mixture = run(tmp_path, records)
    coupled_bytes = {path.relative_to(mixture): path.read_bytes() for path in mixture.rglob("*.parquet")}
    mixture = run(tmp_path, records, couple=None)
    assert coupled_bytes == {path.relative_to(mixture): path.read_bytes() for path in mixture.rglob("*.parquet")}


def test_weights_and_limits_apply_before_the_samples_are_marked(tmp_path):
    records = [single(str(number)) for number in range(40)]
    samples = pl.read_parquet(run(tmp_path, records, max_pairs=10) / "train/*.parquet")
    assert samples.height == 10
    assert samples[COUPLE_QUESTION].null_count() == 0


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"images": pair("x")["images"]}, ["2 images and 1 turn (1)"]),
        ({"images": []}, ["0 images and 1 turn (1)"]),
        ({"history": HISTORY}, ["1 image and 2 turns (1)"]),
        ({"history": HISTORY, "images": []}, ["0 images and 2 turns (1)"]),
    ],
    ids=["a pair", "text alone", "a dialogue", "a dialogue without an image"],
)
def test_records_that_are_no_single_images_with_one_turn_are_refused(tmp_path, changes, kinds):
    bad_record = single("bad", **changes)
    fields = {"key": "convert.sources.singles.couple", "value": 1, "total": 7, "kinds": kinds, "name": "singles/bad"}
    with raises(ParamsError, "convert.records_cannot_be_coupled", **fields):
        run(tmp_path, [*SINGLES[:6], bad_record])
    assert not (tmp_path / "mixture").exists()
    run(tmp_path, [*SINGLES, bad_record | {"split": "val"}])  # no couples are made of other splits


def test_a_task_without_questions_is_refused_by_its_key(tmp_path):
    (tmp_path / "questions.yaml").write_text("difference:\n- What changed?\n")
    profile = Path("profiles/embedded.yaml").resolve()
    (tmp_path / "mine.yaml").write_text(
        f"extends: {profile.with_suffix('')}\n"
        f"convert: {{questions: {tmp_path}/questions.yaml, sources: {{minichange: {{couple: also}}}}}}\n"
    )
    with raises(ParamsError, "settings.faults") as refused:
        load_params(tmp_path / "mine.yaml")
    codes = {fault.code: fault.fields["key"] for fault in refused.value.fields["faults"]}
    assert codes["settings.task_without_questions"] == "convert.sources.minichange.couple"

"""ChangeChat-105k: captions, questions of five kinds and dialogues in the form of its annotation files.

`hanlinwu/DeltaVLM:readme.md` describes the form. The fixed questions are copied from the generator of its authors, and
the other texts are ours.
"""

import json
from pathlib import Path

import polars as pl
import pytest
import yaml

from m3diff.datasets import changechat
from m3diff.datasets.conversations import Conversation
from m3diff.datasets.spec import Row
from m3diff.settings.rules import faults_of_options
from m3diff.stages.convert.params import Convert
from m3diff.stages.convert.stage import convert
from tests import layouts
from tests.layouts import edit_json, judge_by_polars_alone, make_entry, run_ingest, run_validate, write_json

TRAIN = "annotations/changechat_105k_train.json"
QUESTIONS = layouts.CHANGECHAT_QUESTIONS


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return layouts.write_changechat(tmp_path / "raw")


def read_rows(root: Path, **options) -> list[Row]:
    return list(changechat.read(root, **options))


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        *((question, kind) for kind, question in QUESTIONS.items()),
        ("What number of buildings and roads were built?", "count"),
        ("How many houses appeared?", "open"),
        ("Have the roads and buildings changed?", "open"),
        ("Please judge whether the trees have changed.", "open"),
    ],
)
def test_the_words_of_a_question_of_train_tell_its_kind(question, kind):
    assert changechat.kind_of_question(Conversation((), question, "x")) == kind


def test_a_question_after_other_turns_is_of_a_dialogue():
    conversation = Conversation((("Is it?", "yes"),), QUESTIONS["caption"], "x")
    assert changechat.kind_of_question(conversation) == "dialogue"


def test_the_file_tells_the_kind_of_a_question_of_test(root):
    file = root / "annotations/changechat_105k_test_open.json"
    edit_json(file, lambda rows: rows[0]["conversations"][0].update(value=f"<image> <image> {QUESTIONS['count']}"))
    (row,) = [row for row in read_rows(root) if row.name == "test_000004.png?open-0"]
    assert row.kind == "open"
    assert row.question == QUESTIONS["count"]


def test_captions_of_a_pair_are_one_record_without_a_question_in_train_and_in_test(root):
    rows = [row for row in read_rows(root) if row.kind == "caption"]
    assert [row.name for row in rows] == ["train_000001.png", "train_000002.png", "test_000004.png", "test_000005.png"]
    assert [len(row.references) for row in rows] == [5, 5, 5, 5]
    assert {row.question for row in rows} == {None}
    assert [row.raw_rows for row in rows] == [5, 5, 1, 1]
    assert rows[0].source.startswith(f"{TRAIN}, record 3 and record 4 and ")


def test_the_task_of_the_captions_asks_the_authors_question():
    questions = yaml.safe_load(Path("profiles/questions.yaml").read_text())
    assert questions[changechat.SPEC.task] == [QUESTIONS["caption"]]


def test_a_dialogue_has_its_turns_without_image_marks(root):
    (row,) = [row for row in read_rows(root) if row.name == "train_000001.png?dialogue-0"]
    counts = "There are 2 new roads and 10 new buildings."
    assert row.history == ((QUESTIONS["binary"], "Yes"), ("How many?", counts))
    assert row.question == "Describe them."


def test_the_flag_of_any_row_is_the_change_type_of_all_records_of_its_pair(root):
    types = {(row.scene, *row.change_types) for row in read_rows(root)}
    assert types == {
        ("train_000001.png", "change"),
        ("train_000002.png", "none"),
        ("test_000004.png", "change"),
        ("test_000005.png", "none"),
    }


def test_a_pair_without_a_flag_has_no_change_type(root):
    edit_json(root / TRAIN, lambda rows: [row.pop("changeflag", None) for row in rows])
    assert {tuple(row.change_types) for row in read_rows(root) if row.split == "train"} == {()}


def test_equal_open_questions_are_records_of_their_own(root):
    edit_json(root / TRAIN, lambda rows: rows.append(layouts.changechat_record("train", 2, 0, "Is it?", "no")))
    edit_json(root / TRAIN, lambda rows: rows.append(layouts.changechat_record("train", 2, 0, "Is it?", "no")))
    names = [row.name for row in read_rows(root) if row.kind == "open" and row.scene == "train_000002.png"]
    assert names == [f"train_000002.png?open-{number}" for number in range(3)]


def test_one_of_the_two_train_files_is_read(root):
    rows = json.loads((root / TRAIN).read_text())
    rows[2]["conversations"][1]["value"] = "roads [] buildings []"
    write_json(root / "annotations/changechat_105k_train_loc.json", rows)
    answers = {}
    for train in ("train", "train_loc"):
        (row,) = [row for row in read_rows(root, train=train) if row.name == "train_000001.png?localisation-0"]
        answers[train] = row.references
    assert answers == {
        "train": ["roads ['top-left'] buildings ['center-center', 'top-left']"],
        "train_loc": ["roads [] buildings []"],
    }
    (fault,) = faults_of_options("own", "changechat", {"train": ["train", "train_loc"]})
    assert fault.fields["key"] == "own.options.train"


def test_only_the_chosen_kinds_are_read_and_need_files(root):
    for part in ("loc", "dialog", "open", "count"):
        (root / f"annotations/changechat_105k_test_{part}.json").unlink()
    rows = read_rows(root, kinds=["caption", "binary"])
    assert {row.kind for row in rows} == {"caption", "binary"}
    assert len(rows) == 8


def test_a_kind_that_some_pairs_of_train_lack_is_noted(root):
    reading = changechat.read(root)
    list(reading)
    assert reading.notes == []
    edit_json(root / TRAIN, lambda rows: rows[1]["conversations"][0].update(value="Count everything!"))
    reading = changechat.read(root)
    list(reading)
    (note,) = reading.notes
    assert note.startswith("train: 1 question of the kind count about 2 pairs")


def test_published_counts_are_those_of_the_rows_of_the_files():
    pairs = changechat.PUBLISHED.train.pairs
    open_questions = 26_600
    assert 5 * pairs == 34_075
    assert changechat.PUBLISHED.train.records == 5 * pairs + 3 * pairs + open_questions + pairs == 87_935
    assert changechat.PUBLISHED.train.references == changechat.PUBLISHED.train.records, "a row has one answer"
    assert changechat.PUBLISHED.train.questions == pairs + 3 * pairs + open_questions + pairs
    pairs = changechat.PUBLISHED.test.pairs
    open_questions = 7_527
    assert changechat.PUBLISHED.test.records == pairs + 3 * pairs + open_questions + pairs == 17_172
    turns = 3 * pairs
    assert changechat.PUBLISHED.test.questions == pairs + 3 * pairs + open_questions + turns
    assert changechat.PUBLISHED.test.references == 5 * pairs + 3 * pairs + open_questions + turns
    assert 87_935 + 17_172 == 105_107


@pytest.fixture
def mixture(root, tmp_path, monkeypatch) -> Path:
    """Return the folder of the mixture. The clean records are in a folder beside it."""
    judge_by_polars_alone(monkeypatch)
    run_ingest(root, "changechat", "changechat")
    report = run_validate(tmp_path, near_duplicate_max_diff=None)
    assert report.rows_out == report.rows_in == 7 + 6 + 9 + 8
    convert(
        Convert(),
        {"changechat": make_entry("changechat", root)},
        tmp_path / "clean",
        tmp_path / "mixture",
    )
    return tmp_path / "mixture"


def test_each_turn_of_a_test_dialogue_is_a_record_with_the_true_turns_before_it(mixture):
    samples = pl.read_parquet(mixture / "test/*.parquet").filter(
        pl.col("record").str.contains("4.png?dialogue", literal=True)
    )
    assert samples["record"].to_list() == [f"changechat/test_000004.png?dialogue-0@{number}" for number in range(3)]
    assert samples["history"].list.len().to_list() == [0, 1, 2]
    assert samples["answer"][0] == "Yes"


def test_all_records_of_a_pair_are_one_image_set_and_a_dialogue_is_one_sample(mixture):
    samples = pl.read_parquet(mixture / "train/*.parquet")
    (pair, _) = samples["image_set"].unique(maintain_order=True).sort()
    of_pair = samples.filter(image_set=pair)
    assert of_pair.height == 5 + 3 + 2 + 1
    captions = of_pair.filter(question=QUESTIONS["caption"])
    assert sorted(captions["answer"]) == [f"{number} villas are built along the road." for number in range(5)]
    assert of_pair["history"].list.len().sort().to_list()[-2:] == [0, 2]


def test_unchanged_pairs_are_left_out_with_all_their_questions(root, tmp_path, mixture):
    convert(
        Convert(no_change_share=0.0),
        {"changechat": make_entry("changechat", root)},
        tmp_path / "clean",
        tmp_path / "changed",
    )
    samples = pl.read_parquet(tmp_path / "changed/train/*.parquet")
    assert set(samples["image_set"]) == {"changechat/train_000001.png"}

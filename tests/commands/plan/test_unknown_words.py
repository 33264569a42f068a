"""Plan and train warn if the base does not know the words of the references."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.commands.plan.unknown_words import WordCount, count_words
from m3diff.records.errors import DataError
from tests.errors import raises
from tests.toy import REPOSITORY

BASE = REPOSITORY / "data/00_base"
KNOWN_TEXTS = ["the red ball moved", "a big star moved"]


def mixture(folder: Path, references: list[str], split: str = "train") -> Path:
    (folder / split).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"answer": references}), folder / split / "00000.parquet")
    return folder


def test_words_of_the_base_s_own_scenes_are_known(tmp_path):
    words = count_words(BASE, mixture(tmp_path, [*KNOWN_TEXTS, ""]))
    assert words.words == 8
    assert words.spelled == 0
    assert words.warning() is None


def test_other_words_count_as_often_as_they_occur_and_the_commonest_are_named(tmp_path):
    references = [*KNOWN_TEXTS, "the villa", "the villa and the crosswalk", "villa 1234"]
    words = count_words(BASE, mixture(tmp_path, references))
    assert words.words == 16
    assert words.spelled == 4
    assert words.examples == ("villa", "crosswalk")
    assert words.spelled_share == 0.25
    warning = words.warning()
    assert warning.code == "plan.unknown_words"
    assert warning.fields["share"] == 0.25
    assert warning.fields["names"] == ("villa", "crosswalk")


@pytest.mark.parametrize(
    ("words", "spelled", "warns"),
    [
        pytest.param(100, 15, False, id="few"),
        pytest.param(100, 16, True, id="too many"),
        pytest.param(0, 0, False, id="no word"),
    ],
)
def test_a_few_rare_words_are_no_matter(words, spelled, warns):
    count = WordCount(vocabulary=1000, words=words, spelled=spelled, examples=("villa",))
    assert (count.warning() is not None) == warns


def test_only_what_trains_is_read(tmp_path):
    assert count_words(BASE, mixture(tmp_path, ["villa"], "test")) is None


def test_a_base_without_a_tokenizer_is_not_judged(tmp_path):
    assert count_words(tmp_path, mixture(tmp_path / "mixture", KNOWN_TEXTS)) is None


def test_a_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with raises(DataError, "files.unreadable", path=tmp_path / "tokenizer.json"):
        count_words(tmp_path, mixture(tmp_path / "mixture", KNOWN_TEXTS))


REAL = REPOSITORY.parent / "shared" / "real" / "spot_the_diff" / "val.json"


@pytest.mark.skipif(not REAL.is_file(), reason="the real annotations are not in the repository")
def test_the_embedded_base_does_not_know_a_third_of_a_real_dataset_s_words(tmp_path):
    references = [text for pair in json.loads(REAL.read_text()) for text in pair["sentences"]]
    words = count_words(BASE, mixture(tmp_path, references))
    assert 0.25 < words.spelled_share < 0.4

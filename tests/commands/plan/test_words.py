"""Whether the base knows the references' words, said before a training begins."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.commands.plan.words import Words, count_words
from tests.tiny import BASE
from tests.toy import REPOSITORY

KNOWN = ["the red ball moved", "a big star moved"]


def mixture(folder: Path, references: list[str], split: str = "train") -> Path:
    (folder / split).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"reference": references}), folder / split / "00000.parquet")
    return folder


def test_words_of_the_base_s_own_scenes_are_known(tmp_path: Path) -> None:
    words = count_words(BASE, mixture(tmp_path, [*KNOWN, ""]))
    assert words is not None
    assert (words.words, words.spelled, words.warning()) == (8, 0, None)


def test_other_words_are_counted_as_often_as_they_occur_and_the_commonest_are_named(tmp_path: Path) -> None:
    references = [*KNOWN, "the villa", "the villa and the crosswalk", "villa 1234"]
    words = count_words(BASE, mixture(tmp_path, references))
    assert words is not None
    assert (words.words, words.spelled, words.examples) == (16, 4, ("villa", "crosswalk"))
    assert words.share == 0.25
    warning = words.warning()
    assert warning is not None
    assert "does not know 25% of the words of the references (villa, crosswalk)" in warning
    assert f"vocabulary of {words.vocabulary:,} tokens" in warning
    assert "train.base" in warning


def test_a_few_rare_words_are_no_matter() -> None:
    assert Words(1000, 100, 15, ("villa",)).warning() is None
    assert Words(1000, 100, 16, ("villa",)).warning() is not None
    assert Words(1000, 0, 0, ()).warning() is None


def test_only_what_trains_is_read_and_a_base_without_a_tokenizer_is_not_judged(tmp_path: Path) -> None:
    assert count_words(BASE, mixture(tmp_path / "a", ["villa"], "test")) is None
    assert count_words(tmp_path, mixture(tmp_path / "b", KNOWN)) is None


REAL = REPOSITORY.parent / "shared" / "real" / "spot_the_diff" / "val.json"


@pytest.mark.skipif(not REAL.is_file(), reason="the real annotations are not in the repository")
def test_the_embedded_base_does_not_know_a_third_of_a_real_dataset_s_words(tmp_path: Path) -> None:
    references = [text for pair in json.loads(REAL.read_text()) for text in pair["sentences"]]
    words = count_words(BASE, mixture(tmp_path, references))
    assert words is not None
    assert 0.25 < words.share < 0.4

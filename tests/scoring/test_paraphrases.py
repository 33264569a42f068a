"""The kept index of METEOR's paraphrase table, and work of the caller while Java programs run."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from m3diff.scoring.metrics import paraphrases
from m3diff.scoring.metrics.paraphrases import matching_paraphrases, read_paraphrases

ENTRIES = "0.5\nred cube\ncrimson block\n0.5\nmoved\nshifted\n0.5\nmov\u00e9d\nx\n"
ITEMS = [("a crimson block shifted", ("the red cube moved",))]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(paraphrases, "MIN_STORED_ENTRIES", 1)
    file = tmp_path / "paraphrase-en.gz"
    file.write_bytes(gzip.compress(ENTRIES.encode()))
    return file


def kept_index(folder: Path) -> Path:
    [file] = folder.joinpath("cache", "m3diff").iterdir()
    return file


def test_the_second_read_takes_the_kept_index(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = read_paraphrases(table)
    monkeypatch.setattr(paraphrases, "index_table", lambda text: pytest.fail("indexed again"))
    stored_table = read_paraphrases(table)
    for name in ("starts", "keys", "odd_entries"):
        assert np.array_equal(getattr(stored_table, name), getattr(computed, name)), name
    assert matching_paraphrases(stored_table, ITEMS) == matching_paraphrases(computed, ITEMS) == ENTRIES.encode()


def set_byte(content: bytes, position: int, value: int) -> bytes:
    return content[:position] + bytes([value]) + content[position + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut short": lambda content: content[:-9],
    "a changed byte": lambda content: set_byte(content, 300, content[300] ^ 1),
    "text": lambda content: b"no arrays",
    "marked as encrypted": lambda content: set_byte(content, content.index(b"PK\1\2") + 8, 1),
    "marked as compressed in another way": lambda content: set_byte(content, content.index(b"PK\1\2") + 10, 99),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_index_is_computed_again(damage, table: Path, tmp_path: Path) -> None:
    computed = read_paraphrases(table)
    file = kept_index(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    assert np.array_equal(read_paraphrases(table).keys, computed.keys)


def test_an_index_with_other_numbers_is_computed_again(table: Path, tmp_path: Path) -> None:
    computed = read_paraphrases(table)
    file = kept_index(tmp_path)
    with np.load(file) as arrays:
        np.savez(file, **{**arrays, "keys": computed.keys + 1})
    assert np.array_equal(read_paraphrases(table).keys, computed.keys)


def test_another_table_has_an_index_of_its_own(table: Path, tmp_path: Path) -> None:
    read_paraphrases(table)
    table.write_bytes(gzip.compress(ENTRIES.replace("cube", "ball").encode()))
    assert matching_paraphrases(read_paraphrases(table), ITEMS) == "0.5\nmoved\nshifted\n0.5\nmov\u00e9d\nx\n".encode()


def test_an_index_of_a_longer_text_is_not_taken(table: Path, tmp_path: Path) -> None:
    read_paraphrases(table)
    assert paraphrases.read_index(kept_index(tmp_path), ENTRIES.encode()[:20]) is None


def test_a_small_table_is_not_kept(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paraphrases, "MIN_STORED_ENTRIES", 4)
    read_paraphrases(table)
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_changes_nothing(table: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    assert len(read_paraphrases(table).keys) == 3

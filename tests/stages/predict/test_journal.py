"""What is kept of a run: each answer once, whole lines alone, one process at a time."""

from pathlib import Path

import numpy as np
import pytest

from m3diff.stages.predict.journal import Answer, Journal

MAP = np.array([[0.25, 0.5], [0.125, 0.0], [0.0625, 0.0625]], np.float16)
ANSWERS = {
    ("predictions", "toy/0"): Answer("a größer\ncube\u2028 \ud800", MAP),
    ("predictions", "toy/1"): Answer("", MAP + 1),
    ("control", "toy/0"): Answer("nothing", None),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "journal.jsonl"
    with Journal(path) as journal:
        journal.add(ANSWERS.items())
    return path


def kept(path: Path) -> dict:
    with Journal(path) as journal:
        return {
            key: (caption, None if found is None else found.tolist())
            for key, (caption, found) in journal.answers.items()
        }


WANT = {key: (caption, None if found is None else found.tolist()) for key, (caption, found) in ANSWERS.items()}


def test_answers_are_read_back_as_they_were_given(file: Path) -> None:
    assert kept(file) == WANT
    with Journal(file) as journal:
        found = journal.answers["predictions", "toy/0"].saliency
        assert found is not None
        assert (found.dtype, found.shape) == (np.float16, (3, 2))
    assert file.read_bytes().count(b"\n") == 3, "a line each, whatever the text"


def test_a_torn_last_line_is_dropped_and_does_not_spoil_the_next(file: Path) -> None:
    whole = file.read_bytes()
    second = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    last = ("control", "toy/0")
    for cut in (len(whole) - 1, second + 1, second):
        file.write_bytes(whole[:cut])
        assert kept(file) == {key: answer for key, answer in WANT.items() if key != last}
        with Journal(file) as journal:
            journal.add([(last, ANSWERS[last])])
        assert file.read_bytes() == whole


def test_what_follows_a_damaged_line_is_dropped(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"\0" * 40 + b"\n" + lines[2])
    assert list(kept(file)) == [("predictions", "toy/0")]
    assert file.read_bytes() == lines[0]


def test_an_answer_that_is_there_is_not_written_again(file: Path) -> None:
    before = file.read_bytes()
    with Journal(file) as journal:
        journal.add([(("predictions", "toy/1"), Answer("another", MAP))])
        assert journal.answers["predictions", "toy/1"].caption == ""
    assert file.read_bytes() == before


def test_answers_are_on_disk_before_the_next_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "journal.jsonl", []
    monkeypatch.setattr("os.fsync", lambda number: synced.append(path.read_bytes().count(b"\n")))
    with Journal(path) as journal:
        journal.add(list(ANSWERS.items())[:2])
        journal.add(list(ANSWERS.items())[2:])
    assert synced == [2, 3]


def test_a_second_process_is_refused_until_the_first_has_ended(file: Path) -> None:
    with Journal(file), pytest.raises(BlockingIOError, match=r"journal.jsonl: another process captions the same pairs"):
        Journal(file).__enter__()
    assert kept(file) == WANT


def test_a_journal_is_deleted_at_the_end(file: Path) -> None:
    with Journal(file) as journal:
        journal.delete()
    assert not file.exists()

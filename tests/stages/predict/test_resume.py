"""A prediction that was cut off goes on with what is missing, to the same bytes; what names a run; and its journal."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from m3diff.provenance import code
from m3diff.stages.predict.params import Predict
from m3diff.stages.predict.stage import Answer, Journal, predict, run_key
from tests.stages.predict.conftest import Killed, compute, settings

FILES = ("predictions.json", "predictions_shuffled.json", "predictions_reversed.json", "saliency.npz", "report.json")
BATCHES = 9  # three of the pairs, three of each control


def same_bytes(one: Path, other: Path) -> None:
    for name in FILES:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.fault("04")
@pytest.mark.parametrize(("done", "torn"), [(0, 0), (8, 0), (3, 5)])
def test_a_killed_run_captions_each_batch_once(done, torn, mixture, model, written, counted, tmp_path, capsys):
    """Also with other workers, and where the last answer is torn: then its batch of two pairs is captioned again."""
    out, counted["end"] = tmp_path / "out", done
    with pytest.raises(Killed):
        predict(settings(), compute(out), mixture, model, out)
    assert not (out / "predictions.json").exists()
    (journal,) = (tmp_path / "out_runs" / "predict").iterdir()
    journal.write_bytes(journal.read_bytes()[: -torn or None])
    counted["end"] = None
    predict(settings(), compute(out, workers=2, cpus_per_worker=2), mixture, model, out)
    assert [size for size, _ in counted["calls"]] == ([2, 1, 2, 2, 1, 2, 2, 1, 2] if not torn else
                                                      [2, 1, 2, 2, 2, 1, 2, 2, 1, 2])  # fmt: skip
    kept = {0: 0, 3: 4, 8: 13}[done]
    assert (f"resumed; {kept} captions of an earlier run are kept" in capsys.readouterr().out) == (kept > 0)
    same_bytes(out, written[0])
    assert list(journal.parent.iterdir()) == [], "nothing is kept of a run that ended"


def test_what_decides_the_captions_names_a_run_and_places_do_not(mixture, model, tmp_path, monkeypatch):
    shutil.copytree(mixture, tmp_path / "mixture")
    shutil.copytree(model, tmp_path / "model")
    checkpoint = tmp_path / "model" / "checkpoint"
    first = run_key(settings(), mixture, model / "checkpoint")
    assert run_key(settings(), tmp_path / "mixture", checkpoint) == first
    keys = [run_key(settings(**{name: 3}), mixture, checkpoint) for name in Predict.model_fields]
    (tmp_path / "mixture" / "test" / "00001.parquet").unlink()
    keys.append(run_key(settings(), tmp_path / "mixture", checkpoint))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = "another"
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    keys.append(run_key(settings(), mixture, checkpoint))
    monkeypatch.setattr(code, "digests", lambda module, named: {module.name: "another meaning"})
    keys.append(run_key(settings(), mixture, model / "checkpoint"))
    assert len({first, *keys}) == 1 + len(keys) == 1 + len(Predict.model_fields) + 3


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


def listed(answers: dict) -> dict:
    return {key: (caption, None if found is None else found.tolist()) for key, (caption, found) in answers.items()}


def kept(path: Path) -> dict:
    with Journal(path) as journal:
        return listed(journal.answers)


def test_answers_are_read_back_as_they_were_given_each_once_on_disk_before_the_next(file, monkeypatch):
    assert kept(file) == listed(ANSWERS)
    whole, synced = file.read_bytes(), []
    assert whole.count(b"\n") == 3, "a line each, whatever the text"
    with Journal(file) as journal:
        found = journal.answers["predictions", "toy/0"].saliency
        assert (found.dtype, found.shape) == (np.float16, (3, 2))
        journal.add([(("predictions", "toy/1"), Answer("another", MAP))])
        assert journal.answers["predictions", "toy/1"].caption == ""
    assert file.read_bytes() == whole
    monkeypatch.setattr("os.fsync", lambda number: synced.append(file.read_bytes().count(b"\n")))
    with Journal(file) as journal:
        for number in "45":
            journal.add([(("control", number), Answer("more", None))])
    assert synced == [4, 5]


def test_a_torn_last_line_is_dropped_and_does_not_spoil_the_next(file):
    whole, last = file.read_bytes(), ("control", "toy/0")
    second = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    for cut in (len(whole) - 1, second + 1, second):
        file.write_bytes(whole[:cut])
        assert kept(file).keys() == ANSWERS.keys() - {last}
        with Journal(file) as journal:
            journal.add([(last, ANSWERS[last])])
        assert file.read_bytes() == whole
    lines = whole.splitlines(keepends=True)
    file.write_bytes(lines[0] + b"\0" * 40 + b"\n" + lines[2])
    assert list(kept(file)) == [("predictions", "toy/0")], "what follows a damaged line is dropped"
    assert file.read_bytes() == lines[0]


def test_a_second_process_is_refused_until_the_first_has_ended(file):
    with Journal(file), pytest.raises(BlockingIOError, match=r"journal.jsonl: another process captions the same pairs"):
        Journal(file).__enter__()
    assert kept(file) == listed(ANSWERS)

"""A prediction that was cut off goes on with what is missing, to the same bytes; and what names a run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from m3diff.models.generation import Captioner
from m3diff.records.errors import DataError
from m3diff.stages.predict.params import Predict
from m3diff.stages.predict.stage import predict, run_key
from tests.stages.predict.test_stage import ORDER, compute, settings, write_test_split
from tests.tiny import tiny_base, tiny_checkpoint

FILES = ("predictions.json", "predictions_shuffled.json", "predictions_reversed.json", "saliency.npz", "report.json")
BATCHES = 9  # three of the pairs, three of each control


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("resume")
    tiny_checkpoint(tiny_base(folder / "base"), folder / "model" / "checkpoint")
    return write_test_split(folder / "mixture"), folder / "model"


@pytest.fixture(scope="module")
def undisturbed(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("resume") / "out"
    predict(settings(), compute(out), *folders, out)
    return out


class Killed(BaseException):
    pass


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Calls of the model, and after how many it is killed."""
    told: dict[str, Any] = {"calls": 0, "end": None, "pairs": []}
    original = Captioner.answer

    def answer(self: Captioner, images: list, question: str, saliency: bool) -> tuple[list[str], Any]:
        if told["calls"] == told["end"]:
            raise Killed
        told["calls"] += 1
        told["pairs"].append(len(images) // 2)
        return original(self, images, question, saliency)

    monkeypatch.setattr(Captioner, "answer", answer)
    return told


def same_bytes(one: Path, other: Path) -> None:
    for name in FILES:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.fault("04")
@pytest.mark.parametrize("done", [0, 3, 8])
def test_a_killed_run_captions_each_batch_once_and_writes_what_an_undisturbed_one_does(
    done: int, folders: tuple[Path, Path], undisturbed: Path, counted: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    counted["end"] = done
    with pytest.raises(Killed):
        predict(settings(), compute(out), *folders, out)
    assert not (out / "predictions.json").exists()
    counted["end"] = None
    predict(settings(), compute(out), *folders, out)
    assert counted["calls"] == BATCHES
    same_bytes(out, undisturbed)


def journal_of(out: Path) -> Path:
    (file,) = (out.parent / f"{out.name}_runs" / "predict").glob("*.jsonl")
    return file


def test_a_batch_of_which_a_part_was_written_is_captioned_whole_again(
    folders: tuple[Path, Path], undisturbed: Path, counted: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    counted["end"] = 3
    with pytest.raises(Killed):
        predict(settings(), compute(out), *folders, out)
    file = journal_of(out)
    file.write_bytes(file.read_bytes()[:-5])  # the last of the third batch's two pairs
    counted.update(end=None, pairs=[])
    predict(settings(), compute(out), *folders, out)
    assert counted["pairs"] == [2, *(2, 1, 2), *(2, 1, 2)]
    same_bytes(out, undisturbed)


def test_a_run_goes_on_with_other_workers_and_says_what_it_kept(
    folders: tuple[Path, Path],
    undisturbed: Path,
    counted: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    counted["end"] = 2
    with pytest.raises(Killed):
        predict(settings(), compute(out), *folders, out)
    counted["end"] = None
    predict(settings(), compute(out, workers=2, cpus_per_worker=2), *folders, out)
    assert counted["calls"] == BATCHES
    assert "resumed; 3 captions of an earlier run are kept" in capsys.readouterr().out
    same_bytes(out, undisturbed)


def test_nothing_is_kept_of_a_run_that_ended(folders: tuple[Path, Path], counted: dict, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for times in (1, 2):
        predict(settings(), compute(out), *folders, out)
        assert counted["calls"] == times * BATCHES
    assert list((tmp_path / "out_runs" / "predict").iterdir()) == []


def test_a_run_killed_before_its_last_file_captions_nothing_again(
    folders: tuple[Path, Path],
    undisturbed: Path,
    counted: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from m3diff.stages.predict import stage

    out, write = tmp_path / "out", stage._write_saliency

    def killed(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(stage, "_write_saliency", killed)
    with pytest.raises(Killed):
        predict(settings(), compute(out), *folders, out)
    monkeypatch.setattr(stage, "_write_saliency", write)
    monkeypatch.setattr("m3diff.stages.predict.workers.load", killed)  # not even the model is loaded
    predict(settings(), compute(out), *folders, out)
    assert counted["calls"] == BATCHES
    same_bytes(out, undisturbed)


def test_what_decides_the_captions_names_a_run_and_places_do_not(folders: tuple[Path, Path], tmp_path: Path) -> None:
    mixture, model = folders
    shutil.copytree(mixture, tmp_path / "mixture")
    shutil.copytree(model, tmp_path / "model")
    checkpoint = tmp_path / "model" / "checkpoint"
    first = run_key(settings(), mixture, model / "checkpoint")
    assert run_key(settings(), tmp_path / "mixture", checkpoint) == first
    changed = [settings(**{name: 3}) for name in Predict.model_fields]
    keys = [run_key(cfg, mixture, model / "checkpoint") for cfg in changed]
    assert len({first, *keys}) == 1 + len(changed)
    (tmp_path / "mixture" / "test" / "00001.parquet").unlink()
    assert run_key(settings(), tmp_path / "mixture", checkpoint) not in (first, *keys)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = "another"
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert run_key(settings(), mixture, checkpoint) not in (first, *keys)


def test_the_code_names_a_run(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from m3diff.provenance import code
    from m3diff.stages.predict import stage

    mixture, model = folders
    first = run_key(settings(), mixture, model / "checkpoint")
    monkeypatch.setattr(code, "closure", lambda module, named, root: [Path(stage.__file__)])
    assert run_key(settings(), mixture, model / "checkpoint") != first


def test_an_image_that_is_refused_costs_no_caption_that_was_made(
    folders: tuple[Path, Path], counted: dict[str, Any], tmp_path: Path
) -> None:
    mixture = write_test_split(tmp_path / "mixture")
    image, out = mixture / f"{ORDER[3]}_after.png", tmp_path / "out"  # the only one of its question's second batch
    sound = image.read_bytes()
    image.write_bytes(b"no image")
    with pytest.raises(DataError, match=image.name):
        predict(settings(), compute(out), mixture, folders[1], out)
    made = counted["calls"]
    image.write_bytes(sound)
    predict(settings(), compute(out), mixture, folders[1], out)
    assert 0 < made < BATCHES
    assert counted["calls"] == BATCHES

"""What is asked of DVC, what a run trained on, and the epochs of as many steps."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.hydra import apply_overrides, to_hydra_overrides

from benchmarks.experiments import runs
from m3diff.settings.load import load_params
from tests.stages.train.toy import write_mixture
from tests.toy import REPOSITORY

PATHS = load_params(REPOSITORY / "params.yaml").paths
ALIGN = {"datasets": ["minichange"], "epochs": 1, "global_batch": 4}
ALIGN |= {"rates": {"vision": None, "projector": 0.001, "module": 0.001, "llm": None}}
SMALL = {"train.global_batch": 4, "compute.micro_batch": 1, "compute.workers": 1}


def experiment(changes: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment `name` with these changes, whose files stand in the folder."""
    file = folder / "params.yaml"
    shutil.copy(REPOSITORY / "params.yaml", file)
    apply_overrides(file, [runs.setting(key, value) for key, value in changes.items()])

    def read(name: str, path: Path) -> bytes:
        assert name == "name"
        return (folder / path).read_bytes()

    def copy(name: str, path: Path, to: Path) -> None:
        assert name == "name"
        shutil.copytree(folder / path, to)

    monkeypatch.setattr(runs, "read", read)
    monkeypatch.setattr(runs, "copy", copy)


def write_reports(folder: Path, alignment: dict[str, float]) -> None:
    pairs = {"minichange": 30, "minichange_free": 500, "minichange_shifted": 0}
    mixed = {"datasets": {name: {"pairs": {"train": count, "val": 7, "test": 8}} for name, count in pairs.items()}}
    trained = {"steps": 90, "rows_in": 1000, "rows_out": 2700, "alignment": alignment}
    for path, report in ((PATHS.mixture, mixed), (PATHS.model, trained)):
        (folder / path).mkdir(parents=True)
        (folder / path / "report.json").write_text(json.dumps(report))


@pytest.mark.parametrize(
    ("changes", "alignment", "want"),
    [
        ({"train.epochs": 2.5}, {}, (530, 2.5, 90, 2700, 0, 0)),
        (
            {"train.model": "onediff", "+models.onediff.align": ALIGN},
            {"steps": 8.0, "captions": 60, "loss": 0.5},
            (500, 2.7, 90, 2700, 30, 8),
        ),
    ],
    ids=["fine-tuning", "alignment"],
)
def test_a_budget_is_of_the_fine_tuning_and_beside_it_of_the_alignment(
    changes: dict[str, Any], alignment: dict[str, float], want: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment(changes, tmp_path, monkeypatch)
    write_reports(tmp_path, alignment)
    found = runs.budget_of("name", PATHS)
    assert found == want
    assert isinstance(found.alignment_steps, int)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 5),  # 11 pairs and 6, in fours
        ({"train.max_captions_per_sequence": 1}, 10),  # their 26 references and 13
        ({"train.model": "onediff", "+models.onediff.align": ALIGN}, 2),  # 6 pairs
    ],
)
def test_steps_are_counted_as_the_training_loop_does(
    changes: dict[str, Any], steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment(SMALL | changes, tmp_path, monkeypatch)
    write_mixture(tmp_path / PATHS.mixture, {"train": {"minichange": 11, "minichange_free": 6}, "val": {}, "test": {}})
    assert runs.steps_per_epoch("name", PATHS) == steps


@pytest.mark.parametrize("per_epoch", [1, 3, 10, 406, 566, 681, 841, 99_991])
def test_in_these_epochs_the_loop_takes_so_many_steps(per_epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    def run(name: str, changes: dict[str, Any], given: Sequence[Path], targets: Sequence[str]) -> None:
        said.append((name, changes, given, targets))

    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr(runs, "steps_per_epoch", lambda name, paths: per_epoch)
    monkeypatch.setattr(runs, "remove", said.append)
    for steps in (1, 11, 1097, 4060, 123_457):
        epochs = runs.epochs_for(steps, "name", {"a": 1}, [Path("b")], PATHS)
        assert math.ceil(epochs * per_epoch) == steps
    assert said[:2] == [("name", {"a": 1}, [Path("b")], ["convert"]), "name"]


@pytest.mark.parametrize(
    ("value", "written"), [(None, "null"), ([1, 2], "[1, 2]"), ("no_module", "no_module"), (2.5, "2.5"), (True, "true")]
)
def test_changes_folders_and_stages_are_given_to_dvc(value: object, written: str, monkeypatch) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(runs, "dvc", lambda *arguments, check=True: calls.append(arguments))
    runs.run("name", {"train.seed": 3, "a.b": value}, [Path("data/x")], ["convert"])
    wanted = ("--copy-paths", "data/x", "-S", "train.seed=3", "-S", f"a.b={written}", "convert")
    assert calls == [("exp", "remove", "--quiet", "name"), ("exp", "run", "--temp", "--name", "name", *wanted)]


@pytest.mark.parametrize(
    "value",
    [
        {"kind": "edits", "source": {"root": "data/01_raw/x", "splits": ["train"]}, "band": [0.75, -1], "none": None},
        {"separator": "; ", "words": ['say "no"', "a, b", "it's", "x: {y}", "", "null", "3"], "on": True, "empty": {}},
        [[], [1e-05, 2.0, 3]],
    ],
)
def test_a_mapping_is_written_as_hydra_reads_it(value: Any) -> None:
    (read,) = to_hydra_overrides([runs.setting("+some.key", value)])
    assert read.value() == value
    assert not read.is_sweep_override()

"""Runs of DVC, their budgets, the epochs of as many steps, and targets on new scenes."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.hydra import apply_overrides, to_hydra_overrides

from benchmarks.experiments import runs
from benchmarks.experiments.__main__ import read_experiment
from benchmarks.experiments.runs import Targets, compare, score_of
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
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
    monkeypatch.setattr(runs, "run", lambda *given: said.append(given))
    monkeypatch.setattr(runs, "steps_per_epoch", lambda name, paths: per_epoch)
    monkeypatch.setattr(runs, "remove", said.append)
    for steps in (1, 11, 1097, 4060, 123_457):
        epochs = runs.epochs_for(steps, "name", {"a": 1}, [Path("b")], PATHS)
        assert math.ceil(epochs * per_epoch) == steps
    assert said[:2] == [("name", {"a": 1}, [Path("b")], ["convert"]), "name"]


def test_changes_folders_and_stages_are_given_to_dvc(monkeypatch) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(runs, "dvc", lambda *arguments, check=True: calls.append(arguments))
    runs.run("name", {"train.seed": 3, "a.b": None, "c": "no_module"}, [Path("data/x")], ["convert"])
    wanted = ("--copy-paths", "data/x", "-S", "train.seed=3", "-S", "a.b=null", "-S", "c=no_module", "convert")
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


SCORES = {
    "CIDEr": 2.0,
    "CIDEr_shuffled": 0.5,
    "exact": 0.75,
    "by_type": {"size": {"exact": 0.25}, "color": {"exact": 0.5}, "ocr": {"pairs": 3}},
}


def test_a_score_is_plain_or_that_of_the_worst_type_or_a_ratio():
    assert score_of(SCORES, "exact") == 0.75
    assert score_of(SCORES, "by_type/*/exact") == 0.25
    assert score_of(SCORES, "CIDEr_shuffled/CIDEr") == 0.25
    with pytest.raises(ParamsError, match=r"^CIDER: no score of evaluate has this name$"):
        score_of(SCORES, "CIDER")
    with pytest.raises(ParamsError, match=r"^reversal: no swapped images$"):
        score_of(SCORES | {"reversal": None, "absent": {"reversal": "no swapped images"}}, "reversal")
    with pytest.raises(ParamsError, match=r"by_type/\*/right: no type of change has this score"):
        score_of(SCORES, "by_type/*/right")


def test_the_mean_over_the_seeds_reaches_a_target_or_does_not():
    wanted = Targets(
        profile=Path("p.yaml"),
        at_least={"d/total": {"exact": 0.7, "CIDEr": 3.0}},
        at_most={"d/total": {"exact": 0.7, "CIDEr_shuffled": 0.5}},
    )
    rows = list(compare(wanted, [{"d/total": SCORES}, {"d/total": SCORES | {"exact": 0.65}}]))
    assert [(row["score"], row["mean"], row["reached"]) for row in rows] == [
        ("exact", pytest.approx(0.7), True),
        ("CIDEr", 2.0, False),
        ("exact", pytest.approx(0.7), True),
        ("CIDEr_shuffled", 0.5, True),
    ]


def test_the_fresh_scenes_are_of_seeds_that_the_embedded_run_does_not_use():
    embedded, fresh = (load_params(REPOSITORY / name) for name in ("params.yaml", "benchmarks/fresh.yaml"))
    used = {each.seed for each in embedded.synthesize.values()} | {embedded.pretrain.seed}
    drawn = fresh.synthesize.values()
    assert len({each.seed for each in drawn}) == len(drawn) == 2
    assert not used & {each.seed for each in drawn}
    assert {each.level for each in drawn} == {"grid", "free"}
    assert {(each.scenes["train"], each.scenes["val"]) for each in drawn} == {(0, 0)}
    wanted = read_experiment("targets").targets
    assert {name for bound in (wanted.at_least, wanted.at_most) for name in bound} <= {
        f"{name}/total" for name in fresh.ingest.datasets
    }

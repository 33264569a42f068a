"""`make seeds`: the figures by hand, what is asked of DVC, and two seeds of the toy project in earnest."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from infra import seeds
from tests import toy
from tests.toy import REPOSITORY


def test_mean_deviation_and_each_value_of_the_scores_that_every_seed_has():
    whole = {"pairs": 9, "published_pairs": None, "SPICE": None, "intervals": {}, "absent": {}}
    runs = [whole | {"CIDEr": value, "METEOR": other} for value, other in ((1.0, 0.5), (2.0, None), (4.5, 0.5))]
    assert seeds.spread({seed: {"d/p": run} for seed, run in enumerate(runs)}) == {
        "d/p": {
            "pairs": 9,
            "scores": {"CIDEr": {"mean": 2.5, "sd": pytest.approx(3.25**0.5), "values": [1.0, 2.0, 4.5]}},
        }
    }


def test_the_table_has_a_line_for_each_score():
    scores = {"d/p": {"pairs": 9, "scores": {"CIDEr": {"mean": 2.5, "sd": 1.8, "values": [1.0, 4.0]}}}}
    assert list(seeds.table(scores, [7, 8])) == [
        "2 seeds: 7, 8",
        "d/p, 9 pairs: mean, standard deviation, each seed's",
        "  CIDEr                      2.5000   1.8000   1.0000  4.0000",
    ]


def test_of_one_seed_there_is_no_deviation(capsys):
    with pytest.raises(SystemExit):
        seeds.main(["1"])
    assert "of 1 seed there is no standard deviation; give 2 or more" in capsys.readouterr().err


class Experiments:
    """DVC's experiments, whose score is their seed; `fails` names the one that fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: int = 0) -> None:
        self.calls: list[Any] = []
        self.fails = fails
        for name in ("run_experiment", "copy", "read"):
            monkeypatch.setattr(seeds, name, getattr(self, name))

    def run_experiment(self, name: str, changes: Mapping[str, Any]) -> None:
        self.calls.append((name, changes))
        if changes["train.seed"] == self.fails:
            raise subprocess.CalledProcessError(75, ["dvc", "exp", "run"])

    def copy(self, name: str, path: Path, to: Path) -> None:
        self.calls.append((name, path, to))

    def read(self, name: str, path: Path) -> bytes:
        assert path == Path("data/07_report/metrics.json")
        cider = float(name.removeprefix("seed-"))
        return json.dumps({"protocols": {"d/p": {"pairs": 2, "CIDEr": cider}}}).encode()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(REPOSITORY / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_seed_is_an_experiment_whose_model_is_kept(folder, monkeypatch, capsys):
    experiments = Experiments(monkeypatch)
    assert seeds.main(["2", "--out", "seeds.json"]) == 0
    checkpoint = Path("data/05_model/checkpoint")
    assert experiments.calls == [
        call
        for seed in (7407, 7408)
        for call in (
            (f"seed-{seed}", {"train.seed": seed}),
            (f"seed-{seed}", checkpoint, Path(f"runs/seeds/{seed}/model/checkpoint")),
        )
    ]
    written = json.loads(Path("seeds.json").read_text())
    assert (written["seeds"], written["model"], written["command"]) == ([7407, 7408], "m3diff", "make seeds N=2")
    assert written["protocols"]["d/p"]["scores"]["CIDEr"]["values"] == [7407.0, 7408.0]
    assert "d/p, 2 pairs: mean, standard deviation, each seed's\n  CIDEr " in capsys.readouterr().out


def test_a_seed_that_fails_ends_it_with_its_code_and_nothing_is_written(folder, monkeypatch, capsys):
    Experiments(monkeypatch, fails=7408)
    assert seeds.main(["3", "--out", "seeds.json"]) == 75
    assert capsys.readouterr().err == "make seeds: `dvc exp run` ended with 75\n"
    assert not Path("seeds.json").exists()


@pytest.mark.slow(60)
def test_two_seeds_are_run_beside_the_project_and_their_models_kept(toy_that_ran, tmp_path, capfd):
    root = toy_that_ran
    assert seeds.main(["2", "--out", str(tmp_path / "seeds.json")]) == 0
    written = json.loads((tmp_path / "seeds.json").read_text())
    assert written["protocols"][toy.TOTAL]["scores"]["CIDEr"]["values"][0] == pytest.approx(1.24)
    said = capfd.readouterr().out
    assert said.count("Running stage 'train'") == 1, "the parameters' own seed is restored"
    kept = [Path(f"runs/seeds/{seed}/model/checkpoint/manifest.json").read_text() for seed in (7407, 7408)]
    assert kept[0] == Path("data/05_model/checkpoint/manifest.json").read_text()
    assert toy.run(root, "git", "status", "--porcelain") == ""

"""`make seeds`: the figures by hand, what a run reads and writes, and two seeds of a small model in earnest."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.__main__ import main as m3diff
from components.params import load_params
from components.profiles import differences, resolve
from infra import seeds
from tests.tiny import tiny_base
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


def test_a_seeds_run_differs_by_its_seed_and_writes_into_its_own_folder_alone(tmp_path):
    file = seeds.write_params(REPOSITORY / "profiles" / "embedded-gpu.yaml", tmp_path / "9", 9)
    found = differences(resolve(REPOSITORY / "profiles" / "embedded-gpu.yaml")[0], resolve(file)[0])
    assert found == [
        f"paths.model: data/05_model -> {tmp_path}/9/model",
        f"paths.predictions: data/06_predictions -> {tmp_path}/9/predictions",
        f"paths.report: data/07_report -> {tmp_path}/9/report",
        "train.seed: 7407 -> 9",
        f"compute.scratch: runs -> {tmp_path}/9/scratch",
    ]
    assert load_params(file).train.seed == 9


def test_of_one_seed_there_is_no_deviation(capsys):
    with pytest.raises(SystemExit):
        seeds.main(["1"])
    assert "of 1 seed there is no standard deviation; give 2 or more" in capsys.readouterr().err


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Parameters of a small model on a few scenes, its mixture made."""
    monkeypatch.chdir(tmp_path)
    mdp = {"vision_feature_layers": [1, 2], "layers": 1, "heads": 2}
    profile = {
        "extends": str(REPOSITORY / "profiles" / "embedded"),
        "models": {"m3diff": {"module": mdp}},
        "synthesize": {
            "minichange": {
                "root": "data/01_raw/minichange",
                "seed": 1,
                "scenes": {"train": 8, "val": 2, "test": 12},
                "image_px": 64,
                "references": 2,
                "multi_change_share": 0.2,
                "oversample_types": [],
            }
        },
        "ingest": {"datasets": {"minichange": {"reader": "minichange", "root": "data/01_raw/minichange"}}},
        "validate": {"near_duplicate_max_diff": None, "max_quarantined_share": 0.5},
        "convert": {"questions": str(REPOSITORY / "profiles" / "questions.yaml")},
        "train": {"base": str(tiny_base(tmp_path / "base")), "epochs": 1, "global_batch": 8},
        "predict": {"max_new_tokens": 4, "control_pairs": 0},
        "evaluate": {"metrics": ["CIDEr", "change_accuracy"]},
        "compute": {"workers": 0, "micro_batch": 4, "val_pairs": 2, "caption_val_pairs": 0},
    }
    Path("params.yaml").write_text(yaml.safe_dump(profile))
    for command in (["synthesize", "minichange"], ["ingest"], ["validate"], ["convert"]):
        assert m3diff(command) == 0
    return tmp_path


@pytest.fixture
def one_seed_in_processes(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of stages. Those after the first three run in this process: to import takes longer than to run."""
    ran: list[list[str]] = []
    start = subprocess.run

    def run(command: list[str], **given: Any) -> Any:
        if command[:3] != [sys.executable, "-m", "components"]:
            return start(command, **given)
        ran.append(command)
        if len(ran) > 3:
            assert m3diff(command[3:]) == 0
            return subprocess.CompletedProcess(command, 0)
        return start(command, **given)

    monkeypatch.setattr(subprocess, "run", run)
    return ran


@pytest.mark.slow
def test_two_seeds_are_trained_captioned_and_scored_beside_the_project_and_not_trained_twice(
    small, one_seed_in_processes, capfd
):
    assert seeds.main(["2", "--out", "seeds.json"]) == 0
    written = json.loads(Path("seeds.json").read_text())
    assert (written["seeds"], written["model"], written["command"]) == ([7407, 7408], "m3diff", "make seeds N=2")
    total = written["protocols"]["minichange/total"]
    assert total["pairs"] == 24
    for seed, cider in zip(written["seeds"], total["scores"]["CIDEr"]["values"], strict=True):
        found = json.loads(Path(f"runs/seeds/{seed}/report/metrics.json").read_text())
        assert found["protocols"]["minichange/total"]["CIDEr"] == cider
    weights = [Path(f"runs/seeds/{seed}/model/checkpoint/model.safetensors").read_bytes() for seed in (7407, 7408)]
    assert weights[0] != weights[1]
    assert not Path("data/05_model").exists()
    said = capfd.readouterr().out
    assert "seed 7407: train\n" in said
    assert "minichange/total, 24 pairs: mean, standard deviation, each seed's\n  CIDEr " in said

    seeds.main(["2", "--out", "again.json"])
    assert "seed 7407: train\n" not in capfd.readouterr().out
    assert json.loads(Path("again.json").read_text())["protocols"] == written["protocols"]
    stages = ["train", "predict", "evaluate"]
    assert [command[-1] for command in one_seed_in_processes] == [*stages, *stages, *stages[1:], *stages[1:]]


def test_a_seed_whose_training_fails_is_trained_again_and_the_code_is_passed_on(small, monkeypatch, capsys):
    ran: list[str] = []

    def run(command: list[str], check: bool) -> None:
        ran.append(command[-1])
        if len(ran) == 1:
            raise subprocess.CalledProcessError(75, command)
        if command[-1] == "evaluate":
            report = load_params(Path(command[-2])).paths.report
            report.mkdir(parents=True, exist_ok=True)
            (report / "metrics.json").write_text('{"protocols": {"d/p": {"pairs": 2, "CIDEr": 1.0}}}')

    monkeypatch.setattr(subprocess, "run", run)
    assert seeds.main(["2", "--out", "seeds.json"]) == 75
    assert "train` ended with 75" in capsys.readouterr().err
    assert not Path("seeds.json").exists()
    assert seeds.main(["2", "--out", "seeds.json"]) == 0
    stages = ["train", "predict", "evaluate"]
    assert ran == ["train", *stages, *stages]
    changed = Path("params.yaml").read_text().replace("epochs: 1", "epochs: 2")
    Path("params.yaml").write_text(changed)
    assert seeds.main(["2", "--out", "seeds.json"]) == 0
    assert ran[7:] == [*stages, *stages], "other parameters are another training"
    assert seeds.main(["2", "--out", "seeds.json"]) == 0
    assert ran[13:] == [*stages[1:], *stages[1:]]

"""`make targets`: the figures by hand, the scenes that nothing else uses, and two small models in earnest."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.__main__ import main as m3diff
from components.params import ParamsError, load_params
from components.profiles import differences, resolve
from infra import targets
from infra.targets import Targets, compare, table, value_of
from tests.tiny import tiny_base, tiny_checkpoint
from tests.toy import REPOSITORY

SCORES = {
    "CIDEr": 2.0,
    "CIDEr_shuffled": 0.5,
    "exact": 0.75,
    "by_type": {"size": {"exact": 0.25}, "color": {"exact": 0.5}, "ocr": {"pairs": 3}},
}


def test_a_score_is_plain_or_that_of_the_worst_type_or_a_ratio():
    assert value_of(SCORES, "exact") == 0.75
    assert value_of(SCORES, "by_type/*/exact") == 0.25
    assert value_of(SCORES, "CIDEr_shuffled/CIDEr") == 0.25
    with pytest.raises(ParamsError, match=r"^CIDER: no score of evaluate has this name$"):
        value_of(SCORES, "CIDER")
    with pytest.raises(ParamsError, match=r"^reversal: no swapped images$"):
        value_of(SCORES | {"reversal": None, "absent": {"reversal": "no swapped images"}}, "reversal")
    with pytest.raises(ParamsError, match=r"by_type/\*/right: no type of change has this score"):
        value_of(SCORES, "by_type/*/right")


def test_the_mean_over_the_seeds_reaches_a_target_or_does_not():
    wanted = Targets(
        profile=Path("p.yaml"),
        at_least={"d/total": {"exact": 0.7, "CIDEr": 3.0}},
        at_most={"d/total": {"exact": 0.7, "CIDEr_shuffled": 0.5}},
    )
    runs = [{"d/total": SCORES}, {"d/total": SCORES | {"exact": 0.65}}]
    rows = list(compare(wanted, runs))
    assert [(row["score"], row["mean"], row["reached"]) for row in rows] == [
        ("exact", pytest.approx(0.7), True),
        ("CIDEr", 2.0, False),
        ("exact", pytest.approx(0.7), True),
        ("CIDEr_shuffled", 0.5, True),
    ]
    heading, first, second, third, _ = table(rows, [7, 8])
    assert heading == "fresh scenes, 2 seeds: 7, 8"
    assert first.split() == ["d/total", "exact", "0.700", "(sd", "0.071)", "at", "least", "0.70:", "reached"]
    assert second.endswith("at least 3.00: not reached")
    assert third.endswith("at most 0.70: reached")


def test_the_fresh_scenes_are_of_seeds_that_the_embedded_run_does_not_use():
    embedded, fresh = load_params(REPOSITORY / "params.yaml"), load_params(REPOSITORY / "infra" / "fresh.yaml")
    used = {each.seed for each in embedded.synthesize.values()} | {embedded.pretrain.seed}
    drawn = fresh.synthesize.values()
    assert len({each.seed for each in drawn}) == len(drawn) == 2
    assert not used & {each.seed for each in drawn}
    assert {each.level for each in drawn} == {"grid", "free"}
    for each in drawn:
        assert each.scenes["train"] == each.scenes["val"] == 0
        assert round(each.scenes["test"] * (1 - each.multi_change_share)) == 1200
    assert set(fresh.ingest.datasets) == set(fresh.synthesize)
    wanted = Targets.model_validate(yaml.safe_load(targets.TARGETS.read_text()))
    assert {name for bound in (wanted.at_least, wanted.at_most) for name in bound} == {
        "fresh_grid/total",
        "fresh_free/total",
    }
    assert load_params(REPOSITORY / wanted.profile) == fresh


def test_a_seeds_run_differs_by_its_seed_and_writes_into_its_own_folder_alone(tmp_path):
    file = targets.write_params(REPOSITORY / "profiles" / "embedded-gpu.yaml", tmp_path / "9", 9, Path("of/9"))
    found = differences(resolve(REPOSITORY / "profiles" / "embedded-gpu.yaml")[0], resolve(file)[0])
    assert found == [
        "paths.model: data/05_model -> of/9",
        f"paths.predictions: data/06_predictions -> {tmp_path}/9/predictions",
        f"paths.report: data/07_report -> {tmp_path}/9/report",
        "train.seed: 7407 -> 9",
        f"compute.scratch: runs -> {tmp_path}/9/scratch",
    ]
    assert load_params(file).train.seed == 9


def test_without_models_it_is_said_how_to_make_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert targets.main() == 1
    assert capsys.readouterr().err.endswith("runs/seeds: no trained model; run `make seeds N=3` first\n")


@pytest.mark.slow(30)
def test_the_models_of_two_seeds_caption_the_same_fresh_scenes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scenes = {"scenes": {"train": 0, "val": 0, "test": 12}, "image_px": 64, "references": 2}
    roots = {"fresh_grid": "raw/grid", "fresh_free": "raw/free"}
    profile: dict[str, Any] = yaml.safe_load((REPOSITORY / "infra" / "fresh.yaml").read_text())
    profile["extends"] = str(REPOSITORY / "profiles" / "embedded")
    profile["synthesize"] = {name: of | scenes | {"root": roots[name]} for name, of in profile["synthesize"].items()}
    profile["ingest"]["datasets"] = {name: {"reader": "minichange", "root": root} for name, root in roots.items()}
    profile["convert"]["questions"] = str(REPOSITORY / "profiles" / "questions.yaml")
    profile["validate"] = {"max_quarantined_share": 0.5, "near_duplicate_max_diff": None}
    profile["predict"] = {"max_new_tokens": 4}
    Path("fresh.yaml").write_text(yaml.safe_dump(profile))
    wanted = {
        "at_least": {"fresh_grid/total": {"unreadable": 0.0}},
        "at_most": {"fresh_free/total": {"CIDEr": 9}},
    }
    Path("targets.yaml").write_text(yaml.safe_dump({"profile": "fresh.yaml"} | wanted))
    for seed in (8, 7):
        model = Path(f"runs/seeds/{seed}/model")
        tiny_checkpoint(tiny_base(tmp_path / f"base{seed}", seed), model / "checkpoint")
    ran: list[list[str]] = []

    start = subprocess.run

    def run(command: list[str], **given: Any) -> Any:
        if command[:3] != [sys.executable, "-m", "components"]:
            return start(command, **given)
        ran.append(command[3:])
        assert m3diff(command[3:]) == 0
        return None

    monkeypatch.setattr(subprocess, "run", run)
    assert targets.main(Path("targets.yaml"), Path("targets.json")) == 0
    first = [command[2:] for command in ran]
    drawn = [[stage, name] for name in sorted(roots) for stage in ("synthesize", "ingest")]
    assert first == [*drawn, ["validate"], ["convert"], *[["predict"], ["evaluate"]] * 2]
    written = json.loads(Path("targets.json").read_text())
    assert written["seeds"] == [7, 8]
    assert [row["reached"] for row in written["scores"]] == [True, True]
    assert "fresh_free/total   CIDEr" in capsys.readouterr().out
    predicted = [Path(f"runs/fresh/{seed}/predictions/predictions.json").read_bytes() for seed in (7, 8)]
    assert predicted[0] != predicted[1]
    ran.clear()
    assert targets.main(Path("targets.yaml"), Path("targets.json")) == 0
    assert [command[2:] for command in ran] == [["predict"], ["evaluate"]] * 2, "drawn once"
    ran.clear()
    profile["synthesize"]["fresh_grid"]["seed"] = 5
    Path("fresh.yaml").write_text(yaml.safe_dump(profile))
    assert targets.main(Path("targets.yaml"), Path("targets.json")) == 0
    assert [command[2:] for command in ran][:6] == [*drawn, ["validate"], ["convert"]], "other scenes are drawn"

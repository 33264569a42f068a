"""Targets on new scenes: the figures, the scenes that nothing else uses, and two small models scored on them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.experiments import fresh, page
from benchmarks.experiments.__main__ import read_experiment
from benchmarks.experiments.fresh import Targets, compare, score_of
from m3diff.__main__ import main as m3diff
from m3diff.settings.load import load_params
from m3diff.settings.profiles import differences, resolve
from m3diff.settings.section import ParamsError
from tests.tiny import tiny_base, tiny_checkpoint
from tests.toy import REPOSITORY

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
    runs = [{"d/total": SCORES}, {"d/total": SCORES | {"exact": 0.65}}]
    rows = list(compare(wanted, runs))
    assert [(row["score"], row["mean"], row["reached"]) for row in rows] == [
        ("exact", pytest.approx(0.7), True),
        ("CIDEr", 2.0, False),
        ("exact", pytest.approx(0.7), True),
        ("CIDEr_shuffled", 0.5, True),
    ]
    assert list(page.targets(rows))[2:5] == [
        "| d/total | `exact` | 0.700 ± 0.071 | at least 0.70 | yes |",
        "| d/total | `CIDEr` | 2.000 ± 0.000 | at least 3.00 | no |",
        "| d/total | `exact` | 0.700 ± 0.071 | at most 0.70 | yes |",
    ]


def test_the_fresh_scenes_are_of_seeds_that_the_embedded_run_does_not_use():
    embedded, fresh = load_params(REPOSITORY / "params.yaml"), load_params(REPOSITORY / "benchmarks" / "fresh.yaml")
    used = {each.seed for each in embedded.synthesize.values()} | {embedded.pretrain.seed}
    drawn = fresh.synthesize.values()
    assert len({each.seed for each in drawn}) == len(drawn) == 2
    assert not used & {each.seed for each in drawn}
    assert {each.level for each in drawn} == {"grid", "free"}
    for each in drawn:
        assert each.scenes["train"] == each.scenes["val"] == 0
        assert round(each.scenes["test"] * (1 - each.multi_change_share)) == 1200
    assert set(fresh.ingest.datasets) == set(fresh.synthesize)
    wanted = read_experiment("targets").targets
    assert {name for bound in (wanted.at_least, wanted.at_most) for name in bound} == {
        "fresh_grid/total",
        "fresh_free/total",
    }
    assert load_params(REPOSITORY / wanted.profile) == fresh


def test_a_seeds_run_differs_by_its_seed_and_its_own_folder_alone(tmp_path):
    profile = REPOSITORY / "profiles" / "embedded-gpu.yaml"
    file = fresh.write_params(profile, tmp_path / "9", 9)
    assert differences(resolve(profile)[0], resolve(file)[0]) == [
        f"paths.model: data/05_model -> {tmp_path}/9/model",
        f"paths.predictions: data/06_predictions -> {tmp_path}/9/predictions",
        f"paths.report: data/07_report -> {tmp_path}/9/report",
        "train.seed: 7407 -> 9",
        f"compute.scratch: runs -> {tmp_path}/9/scratch",
    ]
    assert load_params(file).train.seed == 9


@pytest.mark.slow(30)
def test_the_models_of_two_seeds_caption_the_same_fresh_scenes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scenes = {"scenes": {"train": 0, "val": 0, "test": 12}, "image_px": 64, "references": 2}
    roots = {"fresh_grid": "raw/grid", "fresh_free": "raw/free"}
    profile: dict[str, Any] = yaml.safe_load((REPOSITORY / "benchmarks" / "fresh.yaml").read_text())
    profile["extends"] = str(REPOSITORY / "profiles" / "embedded")
    profile["synthesize"] = {name: of | scenes | {"root": roots[name]} for name, of in profile["synthesize"].items()}
    profile["ingest"]["datasets"] = {name: {"reader": "minichange", "root": root} for name, root in roots.items()}
    profile["convert"]["questions"] = str(REPOSITORY / "profiles" / "questions.yaml")
    profile["validate"] = {"max_quarantined_share": 0.5, "near_duplicate_max_diff": None}
    profile["predict"] = {"max_new_tokens": 4}
    Path("fresh.yaml").write_text(yaml.safe_dump(profile))
    cfg = Targets(
        profile=Path("fresh.yaml"),
        at_least={"fresh_grid/total": {"unreadable": 0.0}},
        at_most={"fresh_free/total": {"CIDEr": 9}},
    )
    bases = {f"seed-{seed}": tiny_base(tmp_path / f"base{seed}", seed) for seed in (7, 8)}
    monkeypatch.setattr(fresh, "copy", lambda experiment, path, to: tiny_checkpoint(bases[experiment], to))
    ran: list[list[str]] = []
    start = subprocess.run

    def run(command: list[str], **given: Any) -> Any:
        if command[:3] != [sys.executable, "-m", "m3diff"]:
            return start(command, **given)
        ran.append(command[5:])
        assert m3diff(command[3:]) == 0
        return None

    monkeypatch.setattr(subprocess, "run", run)
    found = fresh.reached(cfg, {7: "seed-7", 8: "seed-8"}, load_params(Path("fresh.yaml")).paths)
    drawn = [[stage, name] for name in sorted(roots) for stage in ("synthesize", "ingest")]
    assert ran == [*drawn, ["validate"], ["convert"], *[["predict"], ["evaluate"]] * 2]
    assert [row["reached"] for row in found] == [True, True]
    predicted = [Path(f"runs/fresh/{seed}/predictions/predictions.json").read_bytes() for seed in (7, 8)]
    assert predicted[0] != predicted[1]

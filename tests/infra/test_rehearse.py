"""`make rehearse`: what of a profile is rehearsed, and a small rehearsal."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from components.__main__ import main as m3diff
from components.models.family import Rates
from components.params import ParamsError, load_params
from components.train.batches import Schedule
from components.train.samples import Samples
from infra import rehearse
from infra.rehearse import Settings, recipes, scaled
from tests.tiny import tiny_base
from tests.toy import REPOSITORY

PAPER, EMBEDDED = REPOSITORY / "profiles" / "paper.yaml", REPOSITORY / "params.yaml"
SETTINGS = Settings(PAPER, EMBEDDED, heads=4, llm_rate=1e-3, lora_alpha=640, seed=1, steps=4, caption_every=4, pairs=2)


def test_the_profiles_module_start_and_ratio_of_rates_are_rehearsed_on_the_embedded_base(tmp_path: Path):
    profile, embedded = load_params(PAPER), load_params(EMBEDDED)
    (tmp_path / "config.json").write_text('{"vision_config": {"num_hidden_layers": 6}}')
    embedded = embedded.model_copy(update={"train": embedded.train.model_copy(update={"base": tmp_path})})
    full = profile.models["m3diff"]
    made = recipes(profile, embedded, SETTINGS)
    module = made["module"].module
    assert module == replace(full.module, vision_feature_layers=(3, 4, 5, 6), heads=4)
    assert made["module"].lora == replace(embedded.models["m3diff"].lora, alpha=640)
    assert made["no module"].lora == made["module"].lora
    for part, rate in full.rates.items():
        assert made["module"].rates[part] / 1e-3 == pytest.approx(rate / full.rates.llm)
    assert made["no module"].module is None
    assert made["no module"].rates == replace(made["module"].rates, module=None)

    (tmp_path / "config.json").write_text('{"vision_config": {"num_hidden_layers": 3}}')
    with pytest.raises(ParamsError, match="4 levels, but .* has 3 layers"):
        recipes(profile, embedded, SETTINGS)
    without = profile.model_copy(update={"train": profile.train.model_copy(update={"model": "no_module"})})
    with pytest.raises(ParamsError, match="no_module has no module to rehearse"):
        recipes(without, embedded, SETTINGS)


def test_rates_keep_their_ratio_and_what_is_frozen_stays_so():
    made = scaled(Rates(vision=2e-6, projector=None, module=3e-5, llm=1e-5), 5e-3)
    assert dict(made) == {
        "vision": pytest.approx(1e-3),
        "projector": None,
        "module": pytest.approx(1.5e-2),
        "llm": 5e-3,
    }
    with pytest.raises(ParamsError, match=r"rates.llm: null"):
        scaled(Rates(vision=1e-3, projector=1e-3, module=1e-3, llm=None), 1e-3)


@pytest.mark.parametrize(("pairs", "steps"), [(5785, 61), (5785, 182), (5785, 724), (33, 7), (16, 5)])
def test_a_rehearsal_takes_exactly_as_many_steps_as_it_says(pairs: int, steps: int):
    samples = object.__new__(Samples)
    samples.offsets = np.arange(pairs + 1, dtype=np.int32)
    schedule = Schedule(samples, None, seed=1, global_batch=16, micro_batch=16, epochs=2)
    assert rehearse.with_steps(schedule, steps).steps == steps


def test_the_settings_of_the_file_are_read_and_wrong_ones_are_named(tmp_path: Path):
    written = yaml.safe_load(rehearse.SETTINGS.read_text())
    found = Settings.read(rehearse.SETTINGS)
    assert (found.profile, found.llm_rate) == (Path(written["profile"]), written["llm_rate"])
    file = tmp_path / "rehearse.yaml"
    for changed, said in (
        ({"steps": 0}, "steps: expected int above 0 .* found 0"),
        ({"llm_rate": "fast"}, "llm_rate: expected float"),
        ({"profile": 3}, "profile: expected str .* a path, found 3"),
        ({"warmup": 3}, "expected the fields profile, embedded"),
    ):
        file.write_text(yaml.safe_dump(written | changed))
        with pytest.raises(ParamsError, match=f"rehearse.yaml: {said}"):
            Settings.read(file)


@pytest.mark.slow
def test_a_small_rehearsal_starts_at_zero_trains_both_models_and_writes_curves_and_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    scenes = {"train": 8, "val": 2, "test": 8}
    made = {"seed": 1, "scenes": scenes, "image_px": 64, "references": 2, "multi_change_share": 0.2}
    root = "data/01_raw/minichange"
    embedded = {
        "extends": str(REPOSITORY / "profiles" / "embedded"),
        "synthesize": {"minichange": made | {"root": root, "oversample_types": [], "domain": "standard"}},
        "ingest": {"datasets": {"minichange": {"reader": "minichange", "root": root}}},
        "validate": {"near_duplicate_max_diff": None, "max_quarantined_share": 0.5},
        "convert": {"questions": str(REPOSITORY / "profiles" / "questions.yaml")},
        "models": {"m3diff": {"module": {"vision_feature_layers": [1, 2], "heads": 2}}},
        "train": {"base": str(tiny_base(tmp_path / "base")), "global_batch": 4},
        "compute": {"workers": 0, "micro_batch": 4},
    }
    Path("params.yaml").write_text(yaml.safe_dump(embedded))
    for command in (["synthesize", "minichange"], ["ingest"], ["validate"], ["convert"]):
        assert m3diff(command) == 0
    profile = {
        "extends": str(PAPER.with_suffix("")),
        "models": {"m3diff": {"module": {"vision_feature_layers": [5, 9], "init_gain": 0.0}}},
    }
    Path("small.yaml").write_text(yaml.safe_dump(profile))
    settings = {
        "profile": str(PAPER),
        "embedded": "params.yaml",
        "heads": 2,
        "llm_rate": 1e-2,
        "lora_alpha": 256,
        "seed": 3,
        "steps": 9,
    }
    Path("rehearse.yaml").write_text(yaml.safe_dump(settings | {"caption_every": 4, "pairs": 3}))

    wanted = ["--profile", "small.yaml", "--steps", "5", "--settings", "rehearse.yaml"]
    assert rehearse.main([*wanted, "--out", "out/rehearse.json"]) == 0
    runs = json.loads(Path("out/rehearse.json").read_text())["runs"]
    assert list(runs) == ["module", "no module"]
    for name, run in runs.items():
        assert [row["step"] for row in run["rows"]] == [1, 4, 5]
        assert [len(row["levels"]) for row in run["rows"]] == ([2, 0, 2] if name == "module" else [0, 0, 0])
        assert [("change_type_accuracy" in row) for row in run["rows"]] == [False, True, True]
    first, *_, last = runs["module"]["rows"]
    assert [level["update"] for level in first["levels"]] == [0, 0]
    assert all(level["update"] > 0 for level in last["levels"])
    assert first["loss"] == pytest.approx(runs["no module"]["rows"][0]["loss"]), "a module at zero is none"
    assert runs["module"]["rates"]["vision"] == pytest.approx(2e-3)
    assert Path("out/rehearse.svg").read_text().startswith("<?xml")
    assert "no module: vision 0.002, projector 0.01, llm 0.01\n  step 1  loss" in capsys.readouterr().out

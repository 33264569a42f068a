"""The stage around the loop: what names a run, what locks it, what is refused, what is left behind."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m3diff.provenance import code
from m3diff.records.files import sha256_of_folder
from m3diff.settings.section import ParamsError
from m3diff.stages.train import on_ray, runtimes, stage
from m3diff.stages.train.stage import RunLockedError, _only_trainer, run_key, train
from tests.stages.train.test_alignment import ALIGN
from tests.stages.train.toy import Recipe, recipe
from tests.tiny import tiny_settings
from tests.toy import REPOSITORY


def key(made: Recipe, mixture: Path) -> str:
    return run_key(made.cfg, made.model, mixture, sha256_of_folder(made.cfg.base))


@pytest.mark.fault("27")
def test_what_decides_the_weights_names_a_run_and_no_path_or_test_sample(
    base: Path, mixture: Path, tmp_path: Path
) -> None:
    made, moved = recipe(base), tmp_path / "moved"
    shutil.copytree(base, moved / "base")
    shutil.copytree(mixture, moved / "mixture")
    (moved / "mixture" / "note.txt").write_text("a note")
    (moved / "mixture" / "test" / "00000.parquet").write_bytes(b"other test samples")
    assert key(recipe(moved / "base"), moved / "mixture") == key(made, mixture)
    (moved / "base" / "config.json").write_text("{}")
    keys = {
        "as it is": key(made, mixture),
        "seed": key(made.changed(seed=4), mixture),
        "rate": key(made.changed(model=tiny_settings(vision=0.5)), mixture),
        "rank": key(made.changed(model=tiny_settings(rank=4)), mixture),
        "module": key(made.changed(model=tiny_settings(None)), mixture),
        "align": key(made.changed(model=replace(made.model, align=ALIGN)), mixture),
        "base": key(recipe(moved / "base"), mixture),
        "export": key(made.changed(export="best"), mixture),
    }
    for split in ("train", "val"):
        shutil.copytree(mixture, tmp_path / split)
        shutil.copy(mixture / "test" / "00000.parquet", tmp_path / split / split / "00000.parquet")
        keys[split] = key(made, tmp_path / split)
    assert len(set(keys.values())) == len(keys), keys


@pytest.mark.fault("27")
def test_the_meaning_of_its_code_names_a_run(
    base: Path, mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, components = key(recipe(base), mixture), tmp_path / "components"
    shutil.copytree(REPOSITORY / "components", components, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(stage, "__file__", str(components / "stages" / "train" / "stage.py"))
    monkeypatch.setattr(code, "ROOT", tmp_path)
    for other in ("commands/plan/plan.py", "__main__.py", "models/onediff.py"):
        (components / other).write_text("# another")
    loop, model = components / "stages" / "train" / "loop.py", components / "models" / "m3diff_model.py"
    loop.write_text(loop.read_text() + "# a comment\n")
    assert key(recipe(base), mixture) == before, "a killed training goes on after such an edit"
    model.write_text(model.read_text() + "ADDED = 1\n")
    assert key(recipe(base), mixture) != before


def test_training_imports_neither_other_stages_nor_all_parameters() -> None:
    found = code.digests(Path(stage.__file__), ["m3diff.models.m3diff"])
    needed = ("stages/train/loop.py", "models/m3diff_model.py", "settings/compute.py")
    assert {f"components/{name}" for name in needed} <= found.keys()
    folders = {name.split("/")[1] for name in found}
    assert not folders & {"params.py", "plan", "predict", "evaluate", "convert", "register", "tracking.py"}


@pytest.mark.fault("02")
def test_a_second_trainer_of_the_same_run_is_turned_away(tmp_path: Path) -> None:
    held = r"run.lock: another training of this run is alive \(pid \d+\)"
    with _only_trainer(tmp_path / "run"), pytest.raises(RunLockedError, match=held), _only_trainer(tmp_path / "run"):
        pass
    with _only_trainer(tmp_path / "run"):
        pass


def test_best_without_captions_is_refused_before_anything_runs(base: Path, tmp_path: Path) -> None:
    made = recipe(base, export="best", scratch=tmp_path / "runs")
    with pytest.raises(ParamsError, match="compute.caption_val_pairs above 0"):
        train(made.cfg, made.model, made.compute, tmp_path / "no mixture", tmp_path / "out")
    assert not (tmp_path / "runs").exists()


COUNTS = {"rows_in": 23, "rows_out": 46, "steps": 6, "parameters_trainable": 30, "parameters_frozen": 5}
LOSSES = {"loss": 0.12346, "val_loss": 0.76543, "val_loss_by_dataset": {"toy": 0.76543}, "val_cider": None}
MODULE = {"module": {"module_update_ratio/2": 0.000123}, "warnings": ["the module changes nothing"]}
FIGURES: dict[str, Any] = {**COUNTS, "parameters": {"vision": 10, "llm": 20}, **LOSSES, "exported_step": 4, **MODULE}
SPEED = {"seconds": 2.0, "captions_per_s": 23.0, "waiting_share": 0.12345, "device": "cpu", "devices": 2}


@pytest.mark.parametrize(("workers", "runtime"), [(0, (runtimes, "run_local")), (2, (on_ray, "run_on_ray"))])
def test_the_stage_runs_the_loop_where_asked_and_writes_its_report(
    workers: int, runtime: tuple[Any, str], base: Path, mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, followed, out = [], [], tmp_path / "out"

    @contextmanager
    def follow(key: str, curves: Path) -> Iterator[None]:
        yield
        assert curves.parent.is_dir(), "its end reads what is there"
        assert (out / "report.json").is_file()
        followed.append((key, curves))

    def loop(job: Any) -> dict[str, Any]:
        assert job.run_dir.is_dir()
        assert not followed
        jobs.append(job)
        return FIGURES | SPEED | {"device_hours": 4 / 3600}

    monkeypatch.setattr(*runtime, loop)
    made = recipe(base, workers=workers, micro_batch=2, scratch=tmp_path / "runs")
    train(made.cfg, made.model, made.compute, mixture, out, follow)
    assert json.loads((out / "report.json").read_text()) == FIGURES | {"stage": "train", "alignment": {}}
    speed = json.loads((tmp_path / "runs" / "train_speed.json").read_text())
    assert speed == SPEED | {"waiting_share": 0.1235, "device_hours": 0.0011}
    (job,) = jobs
    assert job.cfg.base.is_absolute()
    assert (job.mixture, job.out, job.base_sha256) == (mixture, out, sha256_of_folder(base))
    assert job.run_dir == tmp_path / "runs" / "train" / run_key(job.cfg, job.model, mixture, job.base_sha256)
    assert followed == [(job.run_dir.name, job.run_dir / "curves.csv")]
    assert not job.run_dir.exists(), "nothing is left of a run that ended"

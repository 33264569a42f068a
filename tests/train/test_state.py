"""Checkpoints of a run: which is taken, which is kept, which is exported; and that every tensor comes back."""

import logging
from pathlib import Path

import pytest
import torch

from components.models.checkpoint import CheckpointError, write_manifest
from components.train import state
from components.train.loop import Job, Run, Runtime, start, train_step
from components.train.state import (
    MOMENTS,
    MasterState,
    best_first,
    checkpoint_to_export,
    checkpoints,
    latest_valid_checkpoint,
    load_state,
    read_validation,
    remove_older,
    save_state,
    write_validation,
)
from tests.train.toy import Recipe, recipe


def folder(run_dir: Path, step: int, cider: float | None = None, damaged: bool = False) -> Path:
    """A checkpoint in name and manifest."""
    made = run_dir / f"step-{step:08d}"
    made.mkdir(parents=True)
    (made / "weights.safetensors").write_text(f"weights of {step}")
    write_manifest(made, step=step)
    if damaged:
        (made / "weights.safetensors").write_text("half")
    if cider is not None:
        write_validation(made, {"val_loss": 1.0, "val_cider": cider})
    return made


def test_no_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    assert latest_valid_checkpoint(tmp_path) is None


def test_the_newest_is_taken_by_its_step(tmp_path: Path) -> None:
    for step in (400, 1200, 800):
        folder(tmp_path, step)
    found = latest_valid_checkpoint(tmp_path)
    assert found is not None
    assert found.name == "step-00001200"
    assert [state.step_of(path) for path in checkpoints(tmp_path)] == [400, 800, 1200]


def test_damaged_ones_are_removed_and_the_warning_names_both(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = folder(tmp_path, 4)
    for step in (6, 8):
        folder(tmp_path, step, damaged=True)
    half = folder(tmp_path, 10)
    (half / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert latest_valid_checkpoint(tmp_path) == good
    assert checkpoints(tmp_path) == [good]
    for step in (6, 8, 10):
        (line,) = (text for text in caplog.messages if f"step-{step:08d}" in text)
        assert "is damaged" in line
        assert "going on from step-00000004" in line


def test_where_all_are_damaged_the_run_starts_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder(tmp_path, 4, damaged=True)
    assert latest_valid_checkpoint(tmp_path) is None
    assert "the run starts over" in caplog.text


def test_the_newest_two_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, cider in ((2, 0.1), (4, 0.9), (6, None), (8, 0.2), (10, None)):
        folder(tmp_path, step, cider)
    remove_older(tmp_path)
    assert [state.step_of(path) for path in checkpoints(tmp_path)] == [4, 8, 10]


def test_of_equal_scores_the_earlier_is_the_best_and_none_is_no_score(tmp_path: Path) -> None:
    for step, cider in ((2, None), (4, 0.0), (6, 0.5), (8, 0.5)):
        folder(tmp_path, step, cider)
    assert [state.step_of(path) for path in best_first(tmp_path)] == [6, 8, 4]


def test_export_takes_the_last_or_the_best_that_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step, cider, damaged in ((2, 0.5, False), (4, 0.9, True), (6, 0.1, False)):
        folder(tmp_path, step, cider, damaged)
    assert checkpoint_to_export(tmp_path, "last") is None
    found = checkpoint_to_export(tmp_path, "best")
    assert found is not None
    assert found.name == "step-00000002"
    assert "step-00000004 is damaged" in caplog.text


def test_without_a_score_the_last_is_exported_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder(tmp_path, 2)
    assert checkpoint_to_export(tmp_path, "best") is None
    assert "no checkpoint has a CIDEr" in caplog.text


def test_scores_of_a_validation_lie_beside_the_checkpoint_and_do_not_damage_it(tmp_path: Path) -> None:
    made = folder(tmp_path, 2)
    assert read_validation(made) is None
    write_validation(made, {"val_loss": 0.25, "val_cider": 1.5})
    assert read_validation(made) == {"val_loss": 0.25, "val_cider": 1.5}
    assert latest_valid_checkpoint(tmp_path) == made


def started(made: Recipe, mixture: Path, run_dir: Path) -> Run:
    return start(Job(made.cfg, made.model, made.compute, mixture, run_dir, run_dir, ""), Runtime())


def take(run: Run, step: int) -> None:
    train_step(run, step, [run.loader.build(batch) for batch in run.schedule.micro_batches(step, 0)])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("stage", "precision", "after"), [(0, "fp32", 1), (1, "fp32", 2), (2, "bf16", 2), (0, "bf16", 0)]
)
def test_every_weight_and_moment_comes_back_and_the_next_step_is_the_same(
    stage: int, precision: str, after: int, mixture: Path, base: Path, tmp_path: Path
) -> None:
    made = recipe(base, zero_stage=stage, precision=precision, val_pairs=0)
    first = started(made, mixture, tmp_path)
    for step in (0, 1):
        take(first, step)
    saved = save_state(first.engine, tmp_path, 2, 0, first.curve)
    other = started(made.changed(zero_stage=after), mixture, tmp_path)
    assert load_state(other.engine, saved) == 2
    want, got = MasterState(first.engine), MasterState(other.engine)
    assert want.parameters.keys() == got.parameters.keys()
    for name, parameter in want.parameters.items():
        for moment in (None, *MOMENTS):
            assert torch.equal(got.get(got.parameters[name], moment), want.get(parameter, moment)), (name, moment)
        assert torch.equal(got.parameters[name], parameter), f"{name}: the weight that the model computes with"
    if stage == after:
        for run in (first, other):
            take(run, 2)
        for name, parameter in want.parameters.items():
            assert torch.equal(got.parameters[name], parameter), name


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_that_does_not_read_back_removes_no_older_one(
    mixture: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(recipe(base, val_pairs=0), mixture, tmp_path)
    take(run, 0)
    older = [folder(tmp_path, step) for step in (1, 2)]

    def refuse(checkpoint: Path) -> None:
        raise CheckpointError(f"{checkpoint}: a bad disk")

    monkeypatch.setattr(state, "verify_manifest", refuse)
    with pytest.raises(CheckpointError, match="a bad disk"):
        save_state(run.engine, tmp_path, 3, 0, run.curve)
    assert all(path.is_dir() for path in older)


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_of_other_parameters_is_refused(mixture: Path, base: Path, tmp_path: Path) -> None:
    from tests.tiny import tiny_settings

    run = started(recipe(base, val_pairs=0), mixture, tmp_path)
    take(run, 0)
    saved = save_state(run.engine, tmp_path, 1, 0, run.curve)
    other = started(recipe(base, val_pairs=0, model=tiny_settings(vision=None)), mixture, tmp_path)
    with pytest.raises(CheckpointError, match="parameters are not those that train"):
        load_state(other.engine, saved)

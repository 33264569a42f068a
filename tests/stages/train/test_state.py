"""Checkpoints of a run: which is taken, kept and exported; that every tensor comes back; and a full disk."""

import errno
import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from m3diff.models import checkpoint
from m3diff.models.checkpoint import CheckpointError, write_manifest
from m3diff.stages.train import loop, state
from m3diff.stages.train.job import Runtime
from m3diff.stages.train.stage import is_disk_full
from m3diff.stages.train.state import Curve
from tests.stages.train.toy import run_dir_of, take
from tests.tiny import tiny_settings


def folder(run_dir: Path, step: int, cider: float | None = None, damaged: bool = False) -> Path:
    """A checkpoint in name and manifest."""
    made = run_dir / f"step-{step:08d}"
    made.mkdir(parents=True)
    (made / "weights.safetensors").write_text(f"weights of {step}")
    write_manifest(made, step=step)
    if damaged:
        (made / "weights.safetensors").write_text("half")
    if cider is not None:
        (made / state.VALIDATION).write_text(json.dumps({"val_loss": 1.0, "val_cider": cider}))
    return made


def steps_of(run_dir: Path) -> list[int]:
    return [state.step_of(path) for path in state.checkpoints(run_dir)]


def test_the_newest_whole_checkpoint_is_taken_the_damaged_removed_with_a_warning(tmp_path, caplog):
    assert state.latest_valid_checkpoint(tmp_path) is None
    good = folder(tmp_path, 4, cider=0.5)
    for step in (6, 12):
        folder(tmp_path, step, damaged=True)
    (folder(tmp_path, 10) / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert state.latest_valid_checkpoint(tmp_path) == good, "scores do not damage a checkpoint"
        assert state.checkpoints(tmp_path) == [good]
        for step in (6, 10, 12):
            (line,) = (text for text in caplog.messages if f"step-{step:08d}" in text)
            assert "is damaged" in line
            assert "it is removed, and the run goes on from an older one" in line
        (good / "weights.safetensors").write_text("half")
        assert state.latest_valid_checkpoint(tmp_path) is None
    assert state.checkpoints(tmp_path) == []


def test_export_takes_the_last_or_the_earliest_best_that_is_whole(tmp_path, caplog):
    for step, cider, damaged in ((2, 0.5, False), (4, 0.9, True), (6, 0.1, False), (8, 0.5, False), (10, None, False)):
        folder(tmp_path, step, cider, damaged)
    assert state.checkpoint_to_export(tmp_path, "last") is None
    assert state.checkpoint_to_export(tmp_path, "best") == tmp_path / "step-00000002"
    assert [state.step_of(path) for path in state.best_first(tmp_path)] == [4, 2, 8, 6]
    assert "step-00000004 is damaged" in caplog.text
    folder(tmp_path / "unscored", 4)
    assert state.checkpoint_to_export(tmp_path / "unscored", "best") is None
    assert "no checkpoint has a CIDEr" in caplog.text


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("stage", "precision", "after"), [(0, "fp32", 1), (1, "fp32", 2), (2, "bf16", 2), (0, "bf16", 0)]
)
def test_every_weight_and_moment_comes_back_and_the_next_step_is_the_same(stage, precision, after, place):
    first = place.started(2, val_pairs=0, zero_stage=stage, precision=precision)
    saved = first.save(2)
    other = place.started(0, val_pairs=0, zero_stage=after, precision=precision)
    assert state.load_state(other.engine, saved) == 2
    assert {float(each["step"]) for each in other.engine.basic_optimizer.state.values()} == {2}
    want, got = state.MasterState(first.engine), state.MasterState(other.engine)
    assert want.parameters.keys() == got.parameters.keys()
    for name, parameter in want.parameters.items():
        for moment in (None, *state.MOMENTS):
            assert torch.equal(got.get(got.parameters[name], moment), want.get(parameter, moment)), (name, moment)
        assert torch.equal(got.parameters[name], parameter), f"{name}: the weight that the model computes with"
    if stage == after:
        for training in (first, other):
            take(training, 2)
        for name, parameter in want.parameters.items():
            assert torch.equal(got.parameters[name], parameter), name


@pytest.mark.fault("05", "B2")
@pytest.mark.usefixtures("alone")
def test_a_checkpoint_of_which_any_file_is_not_whole_is_passed_over(place, caplog):
    training = place.started(1, val_pairs=0, zero_stage=1)
    before = training.save(1)
    files = sorted(path.name for path in before.iterdir())
    assert files == sorted([*state.FILES, "curves.csv", "manifest.json"])
    for file, cut in ((file, cut) for file in files for cut in (None, 0, 100)):
        newest = training.save(2)
        if cut is None:
            (newest / file).unlink()
        else:
            os.truncate(newest / file, min(cut, (newest / file).stat().st_size // 2))
        caplog.clear()
        assert state.latest_valid_checkpoint(place.folder) == before, (file, cut)
        (line,) = caplog.messages
        assert "step-00000002 is damaged (" in line


@pytest.mark.fault("05", "28", "B2")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_checkpoint_that_does_not_read_back_removes_no_older_one(stage, place):
    training = place.started(1, val_pairs=0, zero_stage=stage)
    older = [folder(place.folder, step) for step in (1, 2)]

    def refuse(checkpoint: Path) -> None:
        raise CheckpointError(f"{checkpoint}: a bad disk")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "verify_manifest", refuse)
        with pytest.raises(CheckpointError, match="a bad disk"):
            training.save(3)
    assert all(path.is_dir() for path in older)


@pytest.mark.fault("27")
@pytest.mark.usefixtures("alone")
def test_the_first_worker_alone_writes_and_a_run_of_other_parameters_takes_none(place):
    training = place.started(1, val_pairs=0)
    training.runtime = Runtime(rank=1, ranks=1)
    training.save(1)
    training.export()
    assert state.checkpoints(place.folder) == []
    assert not (place.folder / "checkpoint").exists()
    assert not (place.folder / "curves.csv").exists()
    training.runtime = Runtime()
    saved, other = training.save(1), place.started(0, val_pairs=0, model=tiny_settings(vision=None))
    with pytest.raises(CheckpointError, match="parameters are not those that train"):
        state.load_state(other.engine, saved)


def test_older_checkpoints_but_the_best_are_removed_after_the_new_one_was_read_back(tmp_path, monkeypatch):
    for step, cider in ((2, 0.1), (4, 0.9), (6, None), (8, 0.2)):
        folder(tmp_path, step, cider)
    seen: list[Any] = []
    monkeypatch.setattr(state, "verify_manifest", lambda *given: seen.append((*given, steps_of(tmp_path))))
    write_one(tmp_path, 10)
    assert seen == [(tmp_path / "step-00000010", [2, 4, 6, 8, 10])]
    assert steps_of(tmp_path) == [4, 8, 10], "the best and the newest two"


def write_one(run_dir: Path, step: int) -> None:
    """A state of one tensor, which holds the step."""
    tensors = {file: {"a": torch.full((1000,), float(step))} for file in state.FILES}
    state.write_state(run_dir, step, tensors, Curve(("step",)))


def killed(run_dir: Path, at: str) -> None:
    """Write two checkpoints, and die of signal 9 within a third: after `at`, a function of `state`."""
    for step in (2, 4):
        write_one(run_dir, step)
    original = getattr(state, at)

    def die(*given: Any, **named: Any) -> None:
        original(*given, **named)
        if at == "save_file":
            os.truncate(given[1], 900)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(state, at, die)
    write_one(run_dir, 6)


@pytest.mark.fault("04", "05")
@pytest.mark.parametrize(("at", "step"), [("save_file", 4), ("verify_manifest", 6)])
def test_a_run_killed_while_writing_goes_on_from_the_newest_whole_checkpoint(at, step, tmp_path):
    process = multiprocessing.get_context("fork").Process(target=killed, args=(tmp_path, at))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    found = state.latest_valid_checkpoint(tmp_path)
    assert found == tmp_path / f"step-{step:08d}"
    assert set(load_file(found / "weights.safetensors")["a"].tolist()) == {float(step)}
    write_one(tmp_path, 8)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [found.name, "step-00000008"], "what the killed run left half written is gone"


FULL = (
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
)
OTHER = (OSError(errno.EIO, "a bad disk"), SafetensorError("File too large (os error 27)"), ValueError("28"))


def full_after(original: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """The function, and after so many calls a full disk after its work."""
    made: list[int] = []

    def full(*given: Any, **named: Any) -> None:
        original(*given, **named)
        made.append(1)
        if len(made) > calls:
            raise FULL[0]

    return full


@pytest.mark.fault("10")
def test_a_full_disk_is_known_in_every_form_and_a_checkpoint_that_meets_it_leaves_the_older_ones(tmp_path):
    assert [is_disk_full(error) for error in (*FULL, *OTHER)] == [True] * 3 + [False] * 3
    for step in (1, 2):
        write_one(tmp_path, step)
    for at in ("save_file", "write_manifest", "_flush"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state, at, full_after(getattr(state, at), 0))
            with pytest.raises(OSError, match="No space left"):
                write_one(tmp_path, 3)
        assert steps_of(tmp_path) == [1, 2]
    write_one(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.fault("10")
@pytest.mark.parametrize(
    ("module", "name", "calls", "step"),
    [(state, "save_file", 4, 2), (loop, "write_atomic", 3, 4), (checkpoint, "merge", 0, 6)],
    ids=["checkpoint", "scores", "export"],
)
def test_a_run_that_finds_the_disk_full_goes_on_when_there_is_room(module, name, calls, step, place, capfd):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, full_after(getattr(module, name), calls))
        with pytest.raises(BlockingIOError, match=r"a disk is full \([\d,]+ bytes are free .* run again"):
            place.run()
    assert capfd.readouterr().out.count("starts at step 1 of 6") == 1, "tried again, though the disk is full"
    found = state.latest_valid_checkpoint(run_dir_of(place.folder))
    assert found is not None
    assert state.step_of(found) == step
    got = place.run()
    assert f"resumed after step {step} of 6" in capfd.readouterr().out
    assert len(got.curve) == got.report.steps == 6

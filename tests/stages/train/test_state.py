"""Checkpoints of a run: which is taken, kept and exported; that every tensor comes back; and a disk without room."""

import errno
import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from m3diff.models import checkpoint
from m3diff.models.checkpoint import CheckpointError, write_manifest
from m3diff.stages.train import loop, state
from m3diff.stages.train.attempts import NotWrittenError, full_disk_explained, is_disk_full, require_room
from m3diff.stages.train.job import Runtime
from m3diff.stages.train.progress import Curve
from tests.stages.train.toy import Place, run_dir_of, take
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


def test_damaged_ones_are_removed_and_the_warning_names_both(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert state.latest_valid_checkpoint(tmp_path) is None
    good = folder(tmp_path, 4)
    for step in (6, 8):
        folder(tmp_path, step, damaged=True)
    (folder(tmp_path, 10) / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert state.latest_valid_checkpoint(tmp_path) == good
        assert state.checkpoints(tmp_path) == [good]
        for step in (6, 8, 10):
            (line,) = (text for text in caplog.messages if f"step-{step:08d}" in text)
            assert "is damaged" in line
            assert "going on from step-00000004" in line
        (good / "weights.safetensors").write_text("half")
        assert state.latest_valid_checkpoint(tmp_path) is None
    assert "the run starts over" in caplog.text


def test_export_takes_the_last_or_the_best_that_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step, cider, damaged in ((2, 0.5, False), (4, 0.9, True), (6, 0.1, False)):
        folder(tmp_path, step, cider, damaged)
    assert state.checkpoint_to_export(tmp_path, "last") is None
    assert state.checkpoint_to_export(tmp_path, "best") == tmp_path / "step-00000002"
    assert "step-00000004 is damaged" in caplog.text
    folder(tmp_path / "unscored", 4)
    assert state.checkpoint_to_export(tmp_path / "unscored", "best") is None
    assert "no checkpoint has a CIDEr" in caplog.text


def test_the_newest_is_taken_by_its_step_and_of_equal_scores_the_earlier_is_the_best(tmp_path: Path) -> None:
    for step, cider in ((4, 0.0), (12, None), (6, 0.5), (8, 0.5)):
        folder(tmp_path, step, cider)
    assert state.latest_valid_checkpoint(tmp_path) == tmp_path / "step-00000012", "scores do not damage a checkpoint"
    assert steps_of(tmp_path) == [4, 6, 8, 12]
    assert [state.step_of(path) for path in state.best_first(tmp_path)] == [6, 8, 4]


def save(training: Any, step: int) -> Path:
    """The checkpoint after `step` steps, written."""
    saved = training.save(step)
    training.writer.finish()
    return saved


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("stage", "precision", "after"), [(0, "fp32", 1), (1, "fp32", 2), (2, "bf16", 2), (0, "bf16", 0)]
)
def test_every_weight_and_moment_comes_back_and_the_next_step_is_the_same(
    stage: int, precision: str, after: int, place: Place
) -> None:
    first = place.started(2, val_pairs=0, zero_stage=stage, precision=precision)
    saved = save(first, 2)
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
def test_a_checkpoint_of_which_any_file_is_not_whole_is_passed_over(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    training = place.started(1, val_pairs=0, zero_stage=1)
    before = save(training, 1)
    files = sorted(path.name for path in before.iterdir())
    assert files == sorted([*state.FILES, "curves.csv", "manifest.json"])
    for file, cut in ((file, cut) for file in files for cut in (None, 0, 100)):
        newest = save(training, 2)
        if cut is None:
            (newest / file).unlink()
        else:
            os.truncate(newest / file, min(cut, (newest / file).stat().st_size // 2))
        caplog.clear()
        assert state.latest_valid_checkpoint(place.folder) == before, (file, cut)
        (line,) = caplog.messages
        assert "step-00000002 is damaged and removed" in line
        assert "going on from step-00000001" in line


@pytest.mark.fault("05", "28", "B2")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_checkpoint_that_does_not_read_back_or_leaves_out_what_trains_removes_no_older_one(
    stage: int, place: Place
) -> None:
    training = place.started(1, val_pairs=0, zero_stage=stage)
    older = [folder(place.folder, step) for step in (1, 2)]

    def refuse(checkpoint: Path) -> None:
        raise CheckpointError(f"{checkpoint}: a bad disk")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "verify_manifest", refuse)
        with pytest.raises(CheckpointError, match="a bad disk"):
            save(training, 3)
    shutil.rmtree(place.folder / "step-00000003")
    training.writer = state.Writer()
    name, parameter = next((n, p) for n, p in training.engine.module.named_parameters() if n in training.trained)
    parameter.requires_grad = False
    with pytest.raises(CheckpointError, match=rf"weights\.safetensors: 1 parameters .*{name}"):
        save(training, 3)
    assert all(path.is_dir() for path in older)


@pytest.mark.fault("27")
@pytest.mark.usefixtures("alone")
def test_each_file_has_the_names_of_what_trains_and_a_run_of_other_parameters_takes_none(place: Place) -> None:
    saved = save(place.started(1, val_pairs=0), 1)
    other = place.started(0, val_pairs=0, model=tiny_settings(vision=None))
    with pytest.raises(CheckpointError, match="parameters are not those that train"):
        state.load_state(other.engine, saved)
    write_one(place.folder / "run", 1)
    with pytest.raises(CheckpointError, match=r"1 parameters are not those that train: \['b'\]"):
        write_one(place.folder / "run", 2, trained="ab")
    save_file({"a": torch.ones(1), "c": torch.ones(1)}, place.folder / "run" / "step-00000001" / "exp_avg.safetensors")
    with pytest.raises(CheckpointError, match=r"exp_avg\.safetensors: 1 parameters .*\['c'\]"):
        state._check_names(place.folder / "run" / "step-00000001", {"a"})


@pytest.mark.usefixtures("alone")
def test_the_first_worker_alone_writes(place: Place) -> None:
    training = place.started(1, val_pairs=0)
    training.runtime = Runtime(rank=1, ranks=1)
    save(training, 1)
    training.export()
    assert state.checkpoints(place.folder) == []
    assert not (place.folder / "checkpoint").exists()
    assert not (place.folder / "curves.csv").exists()


def test_the_writer_keeps_the_order_and_waits_at_the_end() -> None:
    done, slow = [], threading.Event()
    with state.Writer() as writer:
        writer.submit(lambda: (slow.wait(10), done.append("checkpoint")))
        writer.submit(done.append, "its validation")
        assert done == [], "what is submitted is not waited for"
        slow.set()
        writer.finish()
        assert done == ["checkpoint", "its validation"]
        writer.submit(lambda: (time.sleep(0.05), done.append("the next")))
    assert done[2:] == ["the next"]


def refuse() -> None:
    raise OSError("the disk is full")


def test_an_error_of_the_writer_surfaces_at_the_next_call_and_nothing_more_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[str] = []
    writer, slow = state.Writer(), threading.Event()
    writer.submit(lambda: (slow.wait(10), refuse()))
    writer.submit(done.append, "a validation without its checkpoint")
    slow.set()
    for call in (writer.finish, lambda: writer.submit(done.append, "the next")):
        with pytest.raises(OSError, match="the disk is full"):
            call()
    assert done == []
    with pytest.raises(OSError, match="the disk is full"), state.Writer() as writer:
        writer.submit(refuse)
    with pytest.raises(KeyError, match="the run's own"), state.Writer() as writer:
        raise KeyError(writer.submit(refuse) or "the run's own")
    assert "nor was the newest checkpoint written (the disk is full)" in caplog.text


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp32"), (0, "bf16")])
def test_a_checkpoint_written_beside_the_next_steps_is_the_one_written_at_once(
    stage: int, precision: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = place.started(1, val_pairs=0, zero_stage=stage, precision=precision)
    saved = save(training, 1)
    want = {path.name: path.read_bytes() for path in saved.iterdir()}
    shutil.rmtree(saved)
    begin, original = threading.Event(), state.save_file
    monkeypatch.setattr(state, "save_file", lambda *given: (begin.wait(60), original(*given)))
    training.save(1)
    training.curve.fill({"val_loss": 7})
    take(training, 1)
    with torch.no_grad():
        for parameter in state.MasterState(training.engine).parameters.values():
            parameter.zero_()
    assert not saved.exists()
    begin.set()
    training.writer.finish()
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == want


@pytest.mark.usefixtures("alone")
def test_the_next_checkpoint_waits_for_the_one_before(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    training, held = place.started(1, val_pairs=0), []
    get, original = state.MasterState.get, state.save_file
    monkeypatch.setattr(state, "save_file", lambda *given: (time.sleep(0.1), original(*given)))
    monkeypatch.setattr(state.MasterState, "get", lambda *given: (held.append(steps_of(place.folder)), get(*given))[1])
    for step in (1, 2):
        held.clear()
        training.save(step)
        assert held[0] == held[-1] == [1][: step - 1], "a second state was taken while the first was held"
    training.writer.finish()


def test_older_checkpoints_but_the_best_are_removed_after_the_new_one_was_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, cider in ((2, 0.1), (4, 0.9), (6, None), (8, 0.2)):
        folder(tmp_path, step, cider)
    seen: list[Any] = []
    monkeypatch.setattr(state, "_check_names", lambda *given: seen.append((*given, steps_of(tmp_path))))
    write_one(tmp_path, 10)
    assert seen == [(tmp_path / "step-00000010", {"a"}, [2, 4, 6, 8, 10])]
    assert steps_of(tmp_path) == [4, 8, 10], "the best and the newest two"


def write_one(run_dir: Path, step: int, trained: str = "a") -> None:
    """A state of one tensor, which holds the step."""
    tensors = {file: {"a": torch.full((1000,), float(step))} for file in state.FILES}
    state.write_state(run_dir, step, frozenset(trained), tensors, Curve(("step",)))


def killed(run_dir: Path, at: str) -> None:
    """Write two checkpoints, and die of signal 9 within a third: after `at`, a function of `state`."""
    with state.Writer() as writer:
        for step in (2, 4):
            writer.submit(write_one, run_dir, step)
        writer.finish()
        original = getattr(state, at)

        def die(*given: Any, **named: Any) -> None:
            original(*given, **named)
            if at == "save_file":
                os.truncate(given[1], 900)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(state, at, die)
        writer.submit(write_one, run_dir, 6)


@pytest.mark.fault("04", "05")
@pytest.mark.parametrize(("at", "step"), [("save_file", 4), ("write_manifest", 4), ("verify_manifest", 6)])
def test_a_run_killed_while_writing_goes_on_from_the_newest_whole_checkpoint(
    at: str, step: int, tmp_path: Path
) -> None:
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
TRAINABLE = 21657


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size))


@pytest.mark.parametrize(("there", "needed"), [(0, 4800), (1, 3600), (3, 1200), (7, 1200)])
def test_room_for_what_is_kept_and_what_is_written_is_asked_for_first(
    there: int, needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, needed)
    require_room(tmp_path, 100, 3, there)
    free(monkeypatch, needed - 1)
    with pytest.raises(NotWrittenError, match=f"{tmp_path}: .*{needed:,} bytes more .*, {needed - 1:,} are free"):
        require_room(tmp_path, 100, 3, there)


def half_written(folder: Path, fault: Exception) -> None:
    with full_disk_explained(folder, 2000):
        folder.mkdir()
        (folder / "half").write_text("half")
        raise fault


def test_where_the_disk_is_full_the_part_is_removed_and_the_error_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tmp_path / "new"
    free(monkeypatch, 1000)
    for fault in FULL:
        with pytest.raises(NotWrittenError, match=f"{new}: the disk is full: 2,000 bytes are needed, 1,000 are free"):
            half_written(new, fault)
        assert not new.exists()
    assert not any(map(is_disk_full, OTHER))
    with pytest.raises(OSError, match="a bad disk"):
        half_written(new, OTHER[0])
    assert new.exists()


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
@pytest.mark.parametrize("at", ["save_file", "write_manifest", "_flush"])
def test_a_checkpoint_that_finds_the_disk_full_leaves_the_older_ones(at: str, tmp_path: Path) -> None:
    for step in (1, 2):
        write_one(tmp_path, step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, at, full_after(getattr(state, at), 0))
        with pytest.raises(NotWrittenError, match=r"writing: the disk is full: 12,000 bytes are needed"):
            write_one(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    write_one(tmp_path, 3)
    assert steps_of(tmp_path) == [2, 3]


@pytest.mark.fault("10")
def test_a_run_is_refused_before_its_first_step_where_its_checkpoints_have_no_room(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(loop.Training, "step", lambda *given: pytest.fail("a step was taken"))
    for kept, pairs in ((2, 0), (3, 1)):
        needed = (kept + 1) * TRAINABLE * 12
        free(monkeypatch, needed - 1)
        with pytest.raises(NotWrittenError, match=f"keeps {kept} checkpoints .*{needed:,} bytes more are needed"):
            place.run(caption_val_pairs=pairs)
    assert "goes on from the newest checkpoint" not in capfd.readouterr().out, "tried again, though the disk is full"


@pytest.mark.fault("10")
@pytest.mark.parametrize(
    ("module", "name", "calls", "step"),
    [(state, "save_file", 4, 2), (loop, "write_atomic", 3, 4), (checkpoint, "merge", 0, 6)],
    ids=["checkpoint", "scores", "export"],
)
def test_a_run_that_finds_the_disk_full_ends_at_once_and_goes_on_when_there_is_room(
    module: Any, name: str, calls: int, step: int, place: Place, capfd: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, full_after(getattr(module, name), calls))
        with pytest.raises(NotWrittenError, match="disk is full"):
            place.run()
    assert capfd.readouterr().out.count("starts at step 1 of 6") == 1, "tried again, though the disk is full"
    found = state.latest_valid_checkpoint(run_dir_of(place.folder))
    assert found is not None
    assert state.step_of(found) == step
    assert not (place.folder / "out" / "checkpoint").exists()
    got = place.run()
    assert f"resumed after step {step} of 6" in capfd.readouterr().out
    assert len(got.curve) == got.report.steps == 6

"""Checkpoints of a run: which is taken, which is kept, which is exported; and that every tensor comes back."""

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from m3diff.models.checkpoint import CheckpointError, verify_manifest, write_manifest
from m3diff.stages.train import state
from m3diff.stages.train.job import Job, Runtime
from m3diff.stages.train.loop import Training
from m3diff.stages.train.progress import Curve
from m3diff.stages.train.state import (
    MOMENTS,
    VALIDATION,
    MasterState,
    Writer,
    best_first,
    checkpoint_to_export,
    checkpoints,
    latest_valid_checkpoint,
    load_state,
    save_state,
)
from tests.stages.train.toy import Recipe, recipe


def folder(run_dir: Path, step: int, cider: float | None = None, damaged: bool = False) -> Path:
    """A checkpoint in name and manifest."""
    made = run_dir / f"step-{step:08d}"
    made.mkdir(parents=True)
    (made / "weights.safetensors").write_text(f"weights of {step}")
    write_manifest(made, step=step)
    if damaged:
        (made / "weights.safetensors").write_text("half")
    if cider is not None:
        (made / VALIDATION).write_text(json.dumps({"val_loss": 1.0, "val_cider": cider}))
    return made


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


def test_export_takes_the_last_or_the_best_that_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step, cider, damaged in ((2, 0.5, False), (4, 0.9, True), (6, 0.1, False)):
        folder(tmp_path, step, cider, damaged)
    assert checkpoint_to_export(tmp_path, "last") is None
    found = checkpoint_to_export(tmp_path, "best")
    assert found is not None
    assert found.name == "step-00000002"
    assert "step-00000004 is damaged" in caplog.text


def test_without_a_whole_checkpoint_the_run_starts_over_and_without_a_score_the_last_is_exported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert latest_valid_checkpoint(tmp_path) is None
    folder(tmp_path, 4, damaged=True)
    assert checkpoint_to_export(tmp_path, "best") is None
    assert "no checkpoint has a CIDEr" in caplog.text
    assert latest_valid_checkpoint(tmp_path) is None
    assert "the run starts over" in caplog.text


def test_the_newest_is_taken_by_its_step_and_of_equal_scores_the_earlier_is_the_best(tmp_path: Path) -> None:
    for step, cider in ((4, 0.0), (12, None), (6, 0.5), (8, 0.5)):
        folder(tmp_path, step, cider)
    assert latest_valid_checkpoint(tmp_path) == tmp_path / "step-00000012", "its scores do not damage a checkpoint"
    assert [state.step_of(path) for path in checkpoints(tmp_path)] == [4, 6, 8, 12]
    assert [state.step_of(path) for path in best_first(tmp_path)] == [6, 8, 4]


def started(made: Recipe, mixture: Path, run_dir: Path) -> Training:
    return Training(Job(made.cfg, made.model, made.compute, mixture, run_dir, run_dir, ""), Runtime())


def take(run: Training, step: int) -> None:
    run.step(step, [run.loader.build(batch) for batch in run.schedule.micro_batches(step, 0)])


def save(run: Training, run_dir: Path, step: int) -> Path:
    """The checkpoint after `step` steps, written."""
    saved = save_state(run.engine, run.trained, run_dir, step, 0, run.curve, run.writer)
    run.writer.finish()
    return saved


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
    saved = save(first, tmp_path, 2)
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


@pytest.mark.fault("05", "B2")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("cut", [None, 0, 100], ids=["missing", "empty", "cut"])
def test_a_checkpoint_of_which_any_file_is_not_whole_is_passed_over(
    cut: int | None, mixture: Path, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = started(recipe(base, zero_stage=1, val_pairs=0), mixture, tmp_path)
    take(run, 0)
    before = save(run, tmp_path, 1)
    files = sorted(path.name for path in before.iterdir())
    assert files == [
        "curves.csv",
        "exp_avg.safetensors",
        "exp_avg_sq.safetensors",
        "manifest.json",
        "optimizer.json",
        "weights.safetensors",
    ]
    for file in files:
        newest = save(run, tmp_path, 2)
        if cut is None:
            (newest / file).unlink()
        else:
            os.truncate(newest / file, min(cut, (newest / file).stat().st_size // 2))
        caplog.clear()
        assert latest_valid_checkpoint(tmp_path) == before, file
        (line,) = caplog.messages
        assert "step-00000002 is damaged and removed" in line
        assert "going on from step-00000001" in line


@pytest.mark.fault("05", "B2")
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
        save(run, tmp_path, 3)
    assert all(path.is_dir() for path in older)


@pytest.mark.fault("28")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_checkpoint_that_leaves_out_a_weight_that_trains_is_an_error_and_removes_no_older_one(
    stage: int, mixture: Path, base: Path, tmp_path: Path
) -> None:
    run = started(recipe(base, val_pairs=0, zero_stage=stage), mixture, tmp_path)
    take(run, 0)
    older = [folder(tmp_path, step) for step in (1, 2)]
    name, parameter = next((n, p) for n, p in run.engine.module.named_parameters() if n in run.trained)
    parameter.requires_grad = False
    with pytest.raises(CheckpointError, match=rf"weights\.safetensors: 1 parameters .*{name}"):
        save(run, tmp_path, 3)
    assert all(path.is_dir() for path in older)


def test_each_file_of_a_checkpoint_has_the_names_of_what_trains(tmp_path: Path) -> None:
    write_one(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"1 parameters are not those that train: \['b'\]"):
        write_one(tmp_path, 2, trained="ab")
    (tmp_path / "step-00000001" / "exp_avg.safetensors").unlink()
    save_file({"a": torch.ones(1), "c": torch.ones(1)}, tmp_path / "step-00000001" / "exp_avg.safetensors")
    with pytest.raises(CheckpointError, match=r"exp_avg\.safetensors: 1 parameters .*\['c'\]"):
        state._check_names(tmp_path / "step-00000001", {"a"})


@pytest.mark.fault("27")
@pytest.mark.usefixtures("alone")
def test_a_checkpoint_of_other_parameters_is_refused(mixture: Path, base: Path, tmp_path: Path) -> None:
    from tests.tiny import tiny_settings

    run = started(recipe(base, val_pairs=0), mixture, tmp_path)
    take(run, 0)
    saved = save(run, tmp_path, 1)
    other = started(recipe(base, val_pairs=0, model=tiny_settings(vision=None)), mixture, tmp_path)
    with pytest.raises(CheckpointError, match="parameters are not those that train"):
        load_state(other.engine, saved)


@pytest.mark.usefixtures("alone")
def test_adamw_s_count_of_steps_comes_back_and_a_change_of_it_is_noticed(
    mixture: Path, base: Path, tmp_path: Path
) -> None:
    run = started(recipe(base, val_pairs=0), mixture, tmp_path)
    take(run, 0)
    take(run, 1)
    saved = save(run, tmp_path, 2)
    other = started(recipe(base, val_pairs=0), mixture, tmp_path)
    load_state(other.engine, saved)
    assert MasterState(other.engine).optimizer_steps() == MasterState(run.engine).optimizer_steps() == 2
    (saved / "optimizer.json").write_text('{"steps": 3.0}\n')
    with pytest.raises(CheckpointError, match=r"optimizer\.json: sha256"):
        verify_manifest(saved)
    (saved / "optimizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no optimizer.json.*an earlier version of m3diff wrote it"):
        load_state(other.engine, saved)


@pytest.mark.usefixtures("alone")
def test_the_first_worker_alone_writes(mixture: Path, base: Path, tmp_path: Path) -> None:
    run = started(recipe(base, val_pairs=0), mixture, tmp_path)
    take(run, 0)
    run.runtime = Runtime(rank=1, ranks=1)
    save_state(run.engine, run.trained, tmp_path, 1, 1, run.curve, run.writer)
    run.export()
    assert checkpoints(tmp_path) == []
    assert not (tmp_path / "checkpoint").exists()
    assert not (tmp_path / "curves.csv").exists()


def test_the_writer_keeps_the_order_and_waits_at_the_end() -> None:
    done, slow = [], threading.Event()
    with Writer() as writer:
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


def test_an_error_of_the_writer_surfaces_at_the_next_call_and_nothing_more_is_written() -> None:
    done: list[str] = []
    writer, slow = Writer(), threading.Event()
    writer.submit(lambda: (slow.wait(10), refuse()))
    writer.submit(done.append, "a validation without its checkpoint")
    slow.set()
    with pytest.raises(OSError, match="the disk is full"):
        writer.finish()
    with pytest.raises(OSError, match="the disk is full"):
        writer.submit(done.append, "the next")
    assert done == []


def test_an_error_of_the_writer_ends_a_run_that_had_none_and_hides_none(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match="the disk is full"), Writer() as writer:
        writer.submit(refuse)
    with pytest.raises(KeyError, match="the run's own"), Writer() as writer:
        raise KeyError(writer.submit(refuse) or "the run's own")
    assert "nor was the newest checkpoint written (the disk is full)" in caplog.text


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp32"), (0, "bf16")])
def test_a_checkpoint_written_beside_the_next_steps_is_the_one_written_at_once(
    stage: int, precision: str, mixture: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(recipe(base, zero_stage=stage, precision=precision, val_pairs=0), mixture, tmp_path)
    take(run, 0)
    want = save(run, tmp_path / "at once", 1)
    begin, original = threading.Event(), state.save_file
    monkeypatch.setattr(state, "save_file", lambda *given: (begin.wait(60), original(*given)))
    folder = save_state(run.engine, run.trained, tmp_path / "beside", 1, 0, run.curve, run.writer)
    run.curve.fill({"val_loss": 7})
    take(run, 1)
    with torch.no_grad():
        for parameter in MasterState(run.engine).parameters.values():
            parameter.zero_()
    assert not folder.exists()
    begin.set()
    run.writer.finish()
    for file in sorted(path.name for path in want.iterdir()):
        assert (folder / file).read_bytes() == (want / file).read_bytes(), file


@pytest.mark.usefixtures("alone")
def test_the_next_checkpoint_waits_for_the_one_before(
    mixture: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(recipe(base, val_pairs=0), mixture, tmp_path)
    take(run, 0)
    held: list[int] = []
    get = MasterState.get

    def count(self: MasterState, *given: Any) -> torch.Tensor:
        held.append(len(checkpoints(tmp_path)))
        return get(self, *given)

    original = state.save_file
    monkeypatch.setattr(state, "save_file", lambda *given: (time.sleep(0.1), original(*given)))
    monkeypatch.setattr(MasterState, "get", count)
    for step in (1, 2):
        held.clear()
        save_state(run.engine, run.trained, tmp_path, step, 0, run.curve, run.writer)
        assert set(held) == {step - 1}, "a second state was taken while the first was held"
    run.writer.finish()


def test_older_checkpoints_but_the_best_are_removed_after_the_new_one_was_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, cider in ((2, 0.1), (4, 0.9), (6, None), (8, 0.2)):
        folder(tmp_path, step, cider)
    seen: list[list[int]] = []

    def verify(checkpoint: Path, trained: frozenset[str]) -> None:
        assert trained == {"a"}
        assert checkpoint.name == "step-00000010"
        seen.append([state.step_of(path) for path in checkpoints(tmp_path)])

    monkeypatch.setattr(state, "_check_names", verify)
    write_one(tmp_path, 10)
    assert seen == [[2, 4, 6, 8, 10]]
    assert [state.step_of(path) for path in checkpoints(tmp_path)] == [4, 8, 10], "the best and the newest two"


FILES = ("weights.safetensors", *(f"{moment}.safetensors" for moment in MOMENTS))


def write_one(run_dir: Path, step: int, trained: str = "a") -> None:
    """A state of one tensor, which holds the step."""
    tensors = {file: {"a": torch.full((1000,), float(step))} for file in FILES}
    state.write_state(run_dir, step, frozenset(trained), tensors, Curve(("step",)), float(step))


def write(writer: Writer, run_dir: Path, step: int) -> None:
    writer.submit(write_one, run_dir, step)


def killed(run_dir: Path, at: str) -> None:
    """Write two checkpoints, and die of signal 9 within a third: after `at`, a function of `state`."""
    with Writer() as writer:
        write(writer, run_dir, 2)
        write(writer, run_dir, 4)
        writer.finish()
        original = getattr(state, at)

        def die(*given: Any, **named: Any) -> None:
            original(*given, **named)
            if at == "save_file":
                os.truncate(given[1], 900)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(state, at, die)
        write(writer, run_dir, 6)


@pytest.mark.fault("04", "05")
@pytest.mark.parametrize(("at", "step"), [("save_file", 4), ("write_manifest", 4), ("verify_manifest", 6)])
def test_a_run_killed_while_writing_goes_on_from_the_newest_whole_checkpoint(
    at: str, step: int, tmp_path: Path
) -> None:
    process = multiprocessing.get_context("fork").Process(target=killed, args=(tmp_path, at))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    found = latest_valid_checkpoint(tmp_path)
    assert found is not None
    assert found.name == f"step-{step:08d}"
    assert set(load_file(found / "weights.safetensors")["a"].tolist()) == {float(step)}
    with Writer() as writer:
        write(writer, tmp_path, 8)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [found.name, "step-00000008"], "what the killed run left half written is gone"

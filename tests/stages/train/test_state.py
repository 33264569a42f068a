"""Checkpoints of a run: selection, removal and export, restored tensors, and full disks."""

import errno
import json
import logging
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from m3diff.models import checkpoint
from m3diff.models.checkpoint import CheckpointError, write_manifest
from m3diff.stages.train import loop, state
from m3diff.stages.train.job import DiskFullError, Job, WorkerContext, is_disk_full, name_full_disk
from m3diff.stages.train.stage import fullest_folder
from m3diff.stages.train.state import Curve
from tests.errors import raises
from tests.stages.train.toy import run_dir_of, take
from tests.tiny import tiny_settings


def folder(run_dir: Path, step: int, cider: float | None = None, damaged: bool = False) -> Path:
    """Write a checkpoint that has only a manifest and a small weights file."""
    checkpoint_folder = run_dir / f"step-{step:08d}"
    checkpoint_folder.mkdir(parents=True)
    (checkpoint_folder / "weights.safetensors").write_text(f"weights of {step}")
    write_manifest(checkpoint_folder, step=step)
    if damaged:
        (checkpoint_folder / "weights.safetensors").write_text("half")
    if cider is not None:
        (checkpoint_folder / state.VALIDATION_FILE).write_text(json.dumps({"val_loss": 1.0, "val_cider": cider}))
    return checkpoint_folder


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
            assert sum(f"step-{step:08d}" in text for text in caplog.messages) == 1
        (good / "weights.safetensors").write_text("half")
        assert state.latest_valid_checkpoint(tmp_path) is None
    assert state.checkpoints(tmp_path) == []


def test_export_takes_the_last_or_the_earliest_best_that_is_whole(tmp_path, caplog):
    for step, cider, damaged in ((2, 0.5, False), (4, 0.9, True), (6, 0.1, False), (8, 0.5, False), (10, None, False)):
        folder(tmp_path, step, cider, damaged)
    assert state.checkpoint_to_export(tmp_path, "last") is None
    assert state.checkpoint_to_export(tmp_path, "best") == tmp_path / "step-00000002"
    assert [state.step_of(path) for path in state.checkpoints_by_score(tmp_path)] == [4, 2, 8, 6]
    assert "step-00000004" in caplog.text
    caplog.clear()
    folder(tmp_path / "unscored", 4)
    assert state.checkpoint_to_export(tmp_path / "unscored", "best") is None
    (line,) = caplog.messages
    assert "no checkpoint has a score" in line


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("stage", "precision", "after"), [(0, "fp32", 1), (1, "fp32", 2), (2, "bf16", 2), (0, "bf16", 0)]
)
def test_every_weight_and_moment_comes_back_and_the_next_step_is_the_same(stage, precision, after, workspace):
    original = workspace.started(2, val_pairs=0, zero_stage=stage, precision=precision)
    saved = original.save(2)
    restored = workspace.started(0, val_pairs=0, zero_stage=after, precision=precision)
    assert state.load_state(restored.engine, saved) == 2
    assert {float(moments["step"]) for moments in restored.engine.basic_optimizer.state.values()} == {2}
    expected = state.MasterState(original.engine)
    actual = state.MasterState(restored.engine)
    assert expected.parameters.keys() == actual.parameters.keys()
    for name, parameter in expected.parameters.items():
        for moment in (None, *state.MOMENTS):
            assert torch.equal(
                actual.get_tensor(actual.parameters[name], moment), expected.get_tensor(parameter, moment)
            ), (
                name,
                moment,
            )
        assert torch.equal(actual.parameters[name], parameter), f"{name}: the weight that the model computes with"
    if stage == after:
        for training in (original, restored):
            take(training, 2)
        for name, parameter in expected.parameters.items():
            assert torch.equal(actual.parameters[name], parameter), name


@pytest.mark.parametrize("rank", [0, 1])
def test_a_restored_weight_is_the_one_that_each_worker_computes_with(rank, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    master = torch.zeros(2)
    weights = state.MasterState.__new__(state.MasterState)
    weights.masters = {parameter: master}
    weights.set_tensor(parameter, torch.tensor([0.5, 1.001]))
    assert master.tolist() == pytest.approx([0.5, 1.001])
    assert parameter.tolist() == [0.5, 1.0]


@pytest.mark.fault("05", "B2")
@pytest.mark.usefixtures("alone")
def test_a_checkpoint_of_which_any_file_is_not_whole_is_passed_over(workspace, caplog):
    training = workspace.started(1, val_pairs=0, zero_stage=1)
    before = training.save(1)
    files = sorted(path.name for path in before.iterdir())
    assert files == sorted([*state.MOMENT_BY_FILE, "curves.csv", "manifest.json"])
    for file, cut in ((file, cut) for file in files for cut in (None, 0, 100)):
        newest = training.save(2)
        if cut is None:
            (newest / file).unlink()
        else:
            os.truncate(newest / file, min(cut, (newest / file).stat().st_size // 2))
        caplog.clear()
        assert state.latest_valid_checkpoint(workspace.folder) == before, (file, cut)
        (line,) = caplog.messages
        assert "step-00000002" in line


@pytest.mark.fault("05", "28", "B2")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_checkpoint_that_does_not_read_back_removes_no_older_one(stage, workspace):
    training = workspace.started(1, val_pairs=0, zero_stage=stage)
    older = [folder(workspace.folder, step) for step in (1, 2)]

    def refuse(checkpoint: Path) -> None:
        raise CheckpointError("models.manifest_without_files", path=checkpoint)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "verify_manifest", refuse)
        with raises(CheckpointError, "models.manifest_without_files"):
            training.save(3)
    assert all(path.is_dir() for path in older)


@pytest.mark.fault("27")
@pytest.mark.usefixtures("alone")
def test_the_first_worker_alone_writes_and_a_run_of_other_parameters_takes_none(workspace):
    training = workspace.started(1, val_pairs=0)
    training.worker = WorkerContext(rank=1, ranks=1)
    training.save(1)
    training.export()
    assert state.checkpoints(workspace.folder) == []
    assert not (workspace.folder / "checkpoint").exists()
    assert not (workspace.folder / "curves.csv").exists()
    training.worker = WorkerContext()
    saved = training.save(1)
    restored = workspace.started(0, val_pairs=0, model=tiny_settings(vision=None))
    with raises(CheckpointError, "train.other_parameters"):
        state.load_state(restored.engine, saved)


@pytest.mark.parametrize(("rank", "part"), [(0, [1.0, 2.0, 3.0]), (1, [4.0, 5.0, 0.0])], ids=["first", "last"])
def test_with_zero_3_each_worker_gets_its_part_of_a_tensor_padded_with_zeros(rank, part, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    parts: list[Any] = []
    optimizer = SimpleNamespace(set_local_hp_param=lambda *arguments: parts.append(arguments))
    parameter: Any = torch.nn.Parameter(torch.zeros(0))
    parameter.ds_id = 0
    parameter.ds_tensor = torch.zeros(3)
    engine: Any = SimpleNamespace(optimizer=optimizer, module=torch.nn.Module())
    state.MasterState(engine).set_tensor(parameter, torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]), "exp_avg")
    ((own_part, own_parameter, moment),) = parts
    assert own_part.tolist() == part
    assert own_parameter is parameter
    assert moment == "exp_avg"


def test_a_checkpoint_leaves_no_file_open(tmp_path):
    write_one(tmp_path, 2)
    before = len(os.listdir("/dev/fd"))
    write_one(tmp_path, 4)
    assert len(os.listdir("/dev/fd")) == before


def test_older_checkpoints_but_the_best_are_removed_after_the_new_one_was_read_back(tmp_path, monkeypatch):
    for step, cider in ((2, 0.1), (4, 0.9), (6, None), (8, 0.2)):
        folder(tmp_path, step, cider)
    verified: list[Any] = []
    monkeypatch.setattr(state, "verify_manifest", lambda *arguments: verified.append((*arguments, steps_of(tmp_path))))
    write_one(tmp_path, 10)
    assert verified == [(tmp_path / "step-00000010", [2, 4, 6, 8, 10])]
    assert steps_of(tmp_path) == [4, 8, 10], "the best and the newest two"


def write_one(run_dir: Path, step: int) -> None:
    """Write a checkpoint with one tensor, whose values are the step."""
    tensors = {file: {"a": torch.full((1000,), float(step))} for file in state.MOMENT_BY_FILE}
    state.write_state(run_dir, step, tensors, Curve(("step",)))


def killed(run_dir: Path, at: str) -> None:
    """Write two checkpoints, and die of SIGKILL while writing a third, after the function `at` of `state`."""
    for step in (2, 4):
        write_one(run_dir, step)
    original = getattr(state, at)

    def die(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        if at == "save_file":
            os.truncate(arguments[1], 900)
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
    checkpoint_folder = state.latest_valid_checkpoint(tmp_path)
    assert checkpoint_folder == tmp_path / f"step-{step:08d}"
    assert set(load_file(checkpoint_folder / "weights.safetensors")["a"].tolist()) == {float(step)}
    write_one(tmp_path, 8)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [checkpoint_folder.name, "step-00000008"], "what the killed run left half written is gone"


FULL = (
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
)
NOT_FULL = (OSError(errno.EIO, "a bad disk"), SafetensorError("File too large (os error 27)"), ValueError("28"))


def full_after(original: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Return the function with an error of a full disk added at the end of each call after the first `calls` calls."""
    calls_made: list[int] = []

    def full(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        calls_made.append(1)
        if len(calls_made) > calls:
            raise FULL[0]

    return full


@pytest.mark.fault("10")
@pytest.mark.parametrize("error", FULL, ids=["disk", "quota", "safetensors"])
def test_a_full_disk_is_known_in_every_form(error):
    assert is_disk_full(error)


@pytest.mark.parametrize("error", NOT_FULL, ids=["disk", "safetensors", "number in a text"])
def test_other_errors_are_no_full_disk(error):
    assert not is_disk_full(error)


@pytest.mark.fault("10")
@pytest.mark.parametrize("function", ["save_file", "write_manifest", "_flush"])
def test_a_checkpoint_that_meets_a_full_disk_leaves_the_older_ones(function, tmp_path, monkeypatch):
    for step in (1, 2):
        write_one(tmp_path, step)
    with monkeypatch.context() as patch:
        patch.setattr(state, function, full_after(getattr(state, function), 0))
        with pytest.raises(OSError, match="No space left"):
            write_one(tmp_path, 3)
    assert steps_of(tmp_path) == [1, 2]
    write_one(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.fault("10")
@pytest.mark.parametrize(
    ("module", "name", "calls", "step", "has_full_output"),
    [
        pytest.param(state, "save_file", 4, 2, False, id="checkpoint"),
        pytest.param(loop, "write_atomic", 3, 4, False, id="scores", marks=pytest.mark.slow(8)),
        pytest.param(checkpoint, "merge_adapters", 0, 6, True, id="export", marks=pytest.mark.slow(8)),
    ],
)
def test_a_run_that_finds_the_disk_full_goes_on_when_there_is_room(
    module, name, calls, step, has_full_output, workspace, capfd
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, full_after(getattr(module, name), calls))
        with raises(DiskFullError, "train.disk_full") as refused:
            workspace.run()
    run_dir = run_dir_of(workspace.folder)
    assert refused.value.fields["path"] == (workspace.folder / "out" if has_full_output else run_dir)
    assert capfd.readouterr().out.count("starts at step 1 of 6") == 1, "tried again, though the disk is full"
    checkpoint_folder = state.latest_valid_checkpoint(run_dir)
    assert checkpoint_folder is not None
    assert state.step_of(checkpoint_folder) == step
    actual = workspace.run()
    assert f"resumed after step {step} of 6" in capfd.readouterr().out
    assert len(actual.curve) == actual.report.steps == 6


@pytest.mark.fault("10")
@pytest.mark.parametrize("error", FULL, ids=["disk", "quota", "safetensors"])
def test_the_error_of_a_full_disk_names_the_folder_that_was_written_to(error, tmp_path):
    with raises(DiskFullError, "train.disk_full", path=tmp_path / "out"), name_full_disk(tmp_path / "out"):
        raise error


@pytest.mark.fault("10")
def test_the_error_of_a_full_disk_names_the_file_that_the_system_names(tmp_path):
    file = tmp_path / "elsewhere" / "file"
    with raises(DiskFullError, "train.disk_full", path=file), name_full_disk(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device", str(file))


def test_an_error_that_names_its_folder_is_not_changed_by_an_outer_block(tmp_path):
    with (
        raises(DiskFullError, "train.disk_full", path=tmp_path / "out"),
        name_full_disk(tmp_path),
        name_full_disk(tmp_path / "out"),
    ):
        raise FULL[2]


@pytest.mark.fault("10")
def test_a_full_disk_that_no_error_names_is_the_fullest_that_the_run_writes_to(workspace, monkeypatch):
    run = workspace.recipe()
    out = workspace.folder / "out"
    out.mkdir()
    free_bytes = {out: 7}
    usage = shutil.disk_usage(out)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: usage._replace(free=free_bytes.get(Path(folder), usage.free))
    )

    def meet_full_disk(attempt_job: Job) -> dict[str, Any]:
        raise FULL[0]

    monkeypatch.setattr("m3diff.stages.train.stage.run_local", meet_full_disk)
    with raises(DiskFullError, "train.disk_full", path=out, value=7):
        workspace.run(run)


def test_an_output_folder_that_does_not_exist_yet_is_not_the_fullest(tmp_path):
    job: Any = SimpleNamespace(run_dir=tmp_path, out=tmp_path / "out")
    assert fullest_folder(job).is_dir()

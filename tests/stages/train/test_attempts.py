"""Retries after failures, out-of-memory errors, SIGTERM, and superseded attempts."""

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
import ray.train
import torch
from ray.train.v2._internal import exceptions

from flows.dvc import GRACE_S as FLOW_GRACE_S
from m3diff.cluster import NoRoomError
from m3diff.records.errors import DataError, ValueFault
from m3diff.settings.section import ParamsError
from m3diff.stages.train import engine, job, stage, state
from m3diff.stages.train.job import Job
from tests.errors import Message, raises
from tests.stages.train import toy
from tests.stages.train.toy import Trained, assert_same, assert_same_run, recipe, run, run_dir_of, started, take

OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"),
    ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory."),
    MemoryError(),
)


def on_ray(*raised: BaseException) -> Exception:
    """Return the error that `trainer.fit()` raises if workers raise these errors."""
    wrapped = {rank: exceptions.UserExceptionWithTraceback(error, "a traceback") for rank, error in enumerate(raised)}
    return ray.train.WorkerGroupError("a worker failed", wrapped)  # type: ignore[arg-type]


def raised_from(error: BaseException) -> Exception:
    """Return an error that was raised from this error."""
    outer_error = RuntimeError("the loader failed")
    outer_error.__cause__ = error
    return outer_error


def raised_while_handling(error: BaseException) -> Exception:
    """Return an error that was raised while this error was handled."""
    outer_error = RuntimeError("the loader could not be closed")
    outer_error.__context__ = error
    return outer_error


class Attempts:
    """A run whose first attempts raise `faults`. The next attempt succeeds. `jobs` has the job of each."""

    def __init__(self, *faults: Exception) -> None:
        self.faults = list(faults)
        self.jobs = []

    def __call__(self, job: Job) -> dict[str, Any]:
        self.jobs.append(job)
        if self.faults:
            raise self.faults.pop(0)
        return {"steps": 6}


@pytest.fixture
def work(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    monkeypatch.setattr(stage.gc, "collect", lambda: 0)  # a second after each of these failures
    return lambda **changes: toy.job(recipe(base, **changes), tmp_path / "mixture", tmp_path)


def test_an_error_that_may_not_recur_is_followed_by_another_attempt(work, capfd):
    first_job = work(max_failures=2)
    tried = Attempts(OSError("the network is gone\nfor now"), on_ray(ray.exceptions.WorkerCrashedError()))
    assert stage.run_with_retries(tried, first_job) == {"steps": 6}
    assert tried.jobs == [replace(first_job, attempt=number) for number in (1, 2, 3)]
    first_line, second_line = capfd.readouterr().out.splitlines()
    assert first_line.startswith(
        "train: OSError: the network is gone; continues from the newest checkpoint (failure 1 of 2 "
    )
    assert second_line.startswith("train: WorkerCrashedError: ")
    assert "(failure 2 of 2 that compute.max_failures allows)" in second_line


@pytest.mark.parametrize("max_failures", [0, 2])
def test_there_are_as_many_attempts_as_max_failures_allows(max_failures, work):
    tried = Attempts(*(OSError(f"attempt {number}") for number in range(max_failures + 2)))
    with pytest.raises(OSError, match=f"attempt {max_failures}"):
        stage.run_with_retries(tried, work(max_failures=max_failures))
    assert len(tried.jobs) == max_failures + 1


@pytest.mark.parametrize(("workers", "emptied"), [(0, 1), (2, 0)], ids=["in this process", "in workers"])
def test_memory_of_a_failed_attempt_is_freed_in_the_process_that_used_it(workers, emptied, work, monkeypatch):
    """The process that starts workers does not touch the GPU, which it would otherwise share with them."""
    calls = []
    accelerator = SimpleNamespace(empty_cache=lambda: calls.append(1))
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    stage.run_with_retries(Attempts(OSError("the network is gone")), work(max_failures=1, workers=workers))
    assert len(calls) == emptied


GRAPHS = torch._dynamo.exc.FailOnRecompileLimitHit("of flex_attention")
FINAL = (DataError("images.video", path="a.png"), ParamsError("train.best_without_captions"), GRAPHS)


@pytest.mark.parametrize("fault", FINAL, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda error: error,
        on_ray,
        lambda error: on_ray(OSError("reset by peer"), error),
        raised_from,
        raised_while_handling,
        lambda error: on_ray(raised_from(error)),
    ],
    ids=["itself", "worker", "second worker", "cause", "context", "cause in a worker"],
)
def test_what_another_attempt_would_meet_again_ends_the_run_as_itself(wrap, fault, work, capfd):
    tried = Attempts(wrap(fault))
    with pytest.raises(ParamsError if fault is GRAPHS else type(fault)) as met:
        stage.run_with_retries(tried, work())
    assert met.value is fault or met.value.code == "train.graph_for_each_length"
    assert len(tried.jobs) == 1
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("fault", OUT_OF_MEMORY, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("wrap", [lambda error: error, lambda error: on_ray(OSError("reset by peer"), error)])
def test_out_of_memory_is_tried_again_at_half_the_micro_batch_and_is_no_failure(wrap, fault, work, capfd):
    tried = Attempts(wrap(fault), wrap(fault))
    assert stage.run_with_retries(tried, work(max_failures=0, micro_batch=4)) == {"steps": 6}
    assert [reference.compute for reference in tried.jobs] == [
        work(max_failures=0, micro_batch=n).compute for n in (4, 2, 1)
    ]
    first_line, _ = capfd.readouterr().out.splitlines()
    assert (
        "out of memory with micro-batches of 4; continues from the newest checkpoint with micro-batches" in first_line
    )
    assert "the same global batch of 4" in first_line
    assert "set compute.micro_batch to 2" in first_line


@pytest.mark.fault("12")
def test_one_sequence_that_does_not_fit_is_refused_with_what_to_change(work):
    first_job = work(micro_batch=1, zero_stage=1, activation_checkpointing="selective", max_captions_per_sequence=5)
    fields = {"zero_stage": 1, "activation_checkpointing": "selective", "max_captions_per_sequence": 5}
    with raises(ParamsError, "train.out_of_memory", **fields):
        stage.run_with_retries(Attempts(OUT_OF_MEMORY[0]), first_job)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), OSError("no space left on device")],
    ids=["shapes", "disk"],
)
def test_other_errors_are_no_lack_of_memory(error):
    assert not stage.is_out_of_memory(error)


@pytest.mark.parametrize(
    ("micro", "workers", "batch", "smaller"),
    [(3, 0, 12, 1), (6, 2, 12, 3), (5, 0, 10, 2), (7, 0, 14, 2), (10, 2, 20, 5)],
)
def test_the_smaller_micro_batch_divides_what_a_worker_has_of_a_step(micro, workers, batch, smaller, work):
    first_job = work(micro_batch=micro, workers=workers, global_batch=batch)
    actual = stage.with_smaller_micro_batch(first_job, OUT_OF_MEMORY[0])
    assert actual == work(micro_batch=smaller, workers=workers, global_batch=batch)


@pytest.mark.fault("P11")
@pytest.mark.parametrize("wrap", [ray.train.ControllerError, lambda error: error])
@pytest.mark.parametrize(
    "error", [exceptions.WorkerGroupStartupTimeoutError(2), exceptions.WorkerGroupStartupFailedError("gone")]
)
def test_workers_that_do_not_start_here_are_no_failure_to_go_on_from(error, wrap, work, monkeypatch):
    """On a cluster, a node may have died and be replaced, so the run is retried."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    tried = Attempts(wrap(error))
    with raises(NoRoomError, "train.workers_do_not_start") as refused:
        stage.run_with_retries(tried, work(max_failures=2))
    assert refused.value.fields["logs"].endswith("session_latest/logs")
    assert len(tried.jobs) == 1
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert stage.run_with_retries(Attempts(wrap(error)), work(max_failures=2)) == {"steps": 6}


def test_a_base_that_does_not_fit_ends_the_run_at_once_as_a_fault_of_parameters(workspace, monkeypatch, capfd):
    cause = ValueFault("models.no_linear_for_adapters", part="llm", value="none")

    def refuse(*_: Any) -> None:
        raise cause

    monkeypatch.setattr("m3diff.stages.train.loop.prepare_for_training", refuse)
    with raises(ParamsError, "train.base_does_not_fit", key="models.tiny", cause=cause.fault):
        workspace.run()
    assert "failure" not in capfd.readouterr().out


@pytest.mark.fault("12")
def test_a_run_that_is_out_of_memory_ends_with_the_weights_of_one_that_is_not(workspace, monkeypatch, capfd):
    expected = workspace.run(part="want", micro_batch=2)
    original = engine.take_step
    sizes = []
    failed = []

    def take_step(model: Any, *arguments: Any, **options: Any) -> Any:
        assert all(reference() is None for reference in failed), "the first attempt's model is still held"
        size = model.train_micro_batch_size_per_gpu()
        if size > 2 and len(sizes) == 3:
            failed.append(weakref.ref(model.module))
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append((size, model.gradient_accumulation_steps()))
        return original(model, *arguments, **options)

    monkeypatch.setattr(engine, "take_step", take_step)
    capfd.readouterr()
    actual = workspace.run(part="got", micro_batch=4, max_failures=0)
    assert sizes == [(4, 1)] * 3 + [(2, 2)] * 4, "from the checkpoint after the second step"
    assert failed
    output = capfd.readouterr().out
    assert "out of memory with micro-batches of 4" in output
    assert "resumed after step 2 of 6" in output
    assert actual.report.rows_out == expected.report.rows_out
    assert_same(actual.weights, expected.weights, atol=2e-5)


@pytest.fixture(scope="module")
def undisturbed(mixture: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(recipe(base, export="best", caption_val_pairs=1), mixture, tmp_path_factory.mktemp("whole"))


@pytest.mark.slow(15)
@pytest.mark.fault("03", "S3", "T17")
@pytest.mark.parametrize(
    ("module", "name", "call"),
    [*((engine, "take_step", step) for step in (1, 3, 4, 6)),
     *((state, name, 1) for name in ("save_file", "write_manifest", "verify_manifest"))],
)  # fmt: skip
def test_a_run_that_sigterm_reaches_saves_its_step_and_goes_on_from_it(
    module, name, call, workspace, undisturbed, capfd
):
    """The signal arrives in a step or while a checkpoint is written."""
    run_recipe = workspace.recipe(export="best", caption_val_pairs=1)
    terminate_handler = signal.getsignal(signal.SIGTERM)
    alarm_handler = signal.getsignal(signal.SIGALRM)
    original = getattr(module, name)
    calls = []

    def call_and_terminate(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, call_and_terminate)
        with pytest.raises(SystemExit) as ended:
            workspace.run(run_recipe)
    assert ended.value.code == job.TERMINATED == 143
    assert signal.getsignal(signal.SIGTERM) == terminate_handler
    assert signal.getsignal(signal.SIGALRM) == alarm_handler
    assert not (workspace.folder / "out" / "report.json").exists()
    newest = state.checkpoints(run_dir_of(workspace.folder))[-1]
    assert state.latest_valid_checkpoint(run_dir_of(workspace.folder)) == newest
    step = state.step_of(newest)
    assert step == call or module is state
    assert Message("train.stopped", step=step).in_text(capfd.readouterr().out)
    actual = workspace.run(run_recipe)
    assert f"resumed after step {step} of 6" in capfd.readouterr().out
    assert_same_run(actual, undisturbed)


@pytest.mark.fault("03")
def test_a_step_that_takes_longer_than_the_grace_time_is_not_waited_for(workspace, monkeypatch):
    def take_step(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    assert job.GRACE_S < FLOW_GRACE_S, "it ends before a flow kills what is left"
    monkeypatch.setattr(engine, "take_step", take_step)
    monkeypatch.setattr(stage, "stop_on_sigterm", lambda run_dir: job.stop_on_sigterm(run_dir, grace_s=0.3))
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        workspace.run()
    assert ended.value.code == 143, "as a shell reports a process that SIGTERM has ended"
    assert time.monotonic() - began < 50


def test_what_asked_an_earlier_run_to_end_does_not_ask_the_next(tmp_path):
    (tmp_path / job.STOP_FILE).touch()
    with job.stop_on_sigterm(tmp_path, grace_s=10):
        assert not (tmp_path / job.STOP_FILE).exists()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (tmp_path / job.STOP_FILE).exists()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 9.95, "a second signal gives no more time"
    assert not (tmp_path / job.STOP_FILE).exists()
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


WAITS = """
import sys, time
from pathlib import Path
from m3diff.stages.train import job
from m3diff.stages.train.job import begin_attempt, end_when_superseded
job.CHECK_INTERVAL_S = 0.2
run_dir, how = Path(sys.argv[1]), sys.argv[2]
begin_attempt(run_dir)
try:
    with end_when_superseded(run_dir, 1):
        print("waits", flush=True)
        if how == "waits":
            time.sleep(600)
        if how == "superseded":
            begin_attempt(run_dir)
        raise RuntimeError("the other worker is gone")
except RuntimeError:
    print("lives on")
"""


@pytest.mark.fault("T15")
@pytest.mark.parametrize(
    ("scenario", "supersede", "code", "last_line"),
    [
        ("waits", job.begin_attempt, 1, Message("train.superseded", attempt=1, newest=2)),
        ("waits", lambda folder: (folder / job.ATTEMPT_FILE).unlink(), 1, Message("train.run_has_ended", attempt=1)),
        ("superseded", None, 1, Message("train.superseded", attempt=1, newest=2)),
        ("", None, 0, "lives on"),
    ],
    ids=["a later attempt", "the run is over", "an operation fails after it", "an operation fails"],
)
def test_a_worker_of_a_superseded_attempt_ends_whatever_it_does(scenario, supersede, code, last_line, tmp_path):
    worker: Any = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(tmp_path), scenario], stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout.readline() == "waits\n"
    if supersede:
        time.sleep(0.7)
        assert worker.poll() is None, "it is the newest"
        supersede(tmp_path)
    assert worker.wait(60) == code
    *_, line = worker.stdout.read().splitlines()
    assert line.removeprefix("train: ") == last_line


@pytest.mark.usefixtures("alone")
def test_the_loop_of_an_older_attempt_writes_neither_a_state_nor_the_output(base, mixture, tmp_path):
    older = started(recipe(base), mixture, tmp_path, attempt=job.begin_attempt(tmp_path))
    take(older, 0)
    saved = older.save(1)
    job.begin_attempt(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for write in (lambda: older.save(2), lambda: older.validate(saved), older.export):
        with raises(job.SupersededError, "train.superseded", attempt=1, newest=2):
            write()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

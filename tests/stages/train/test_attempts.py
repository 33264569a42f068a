"""Retries after a failure, how often and with what; an attempt that is asked to end, or is superseded."""

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions
import ray.train
import torch
from ray.train.v2._internal import exceptions

from flows.dvc import GRACE_S as FLOW_GRACE_S
from m3diff.cluster import NoRoomError
from m3diff.records.errors import DataError
from m3diff.settings.section import ParamsError
from m3diff.stages.train import engine, job, stage, state
from m3diff.stages.train.job import Job
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
    """The error that `trainer.fit()` raises where workers raised these."""
    wrapped = {rank: exceptions.UserExceptionWithTraceback(error, "a traceback") for rank, error in enumerate(raised)}
    return ray.train.WorkerGroupError("a worker failed", wrapped)  # type: ignore[arg-type]


class Attempts:
    """A run whose attempts meet what they are given, and after these end well. `jobs` of all of them."""

    def __init__(self, *faults: Exception) -> None:
        self.faults, self.jobs = list(faults), []

    def __call__(self, job: Job) -> dict[str, Any]:
        self.jobs.append(job)
        if self.faults:
            raise self.faults.pop(0)
        return {"steps": 6}


@pytest.fixture
def work(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    monkeypatch.setattr(stage.gc, "collect", lambda: 0)  # a second after each of these failures
    return lambda **changes: toy.job(recipe(base, **changes), tmp_path / "mixture", tmp_path)


def test_what_another_attempt_may_not_meet_is_tried_again_as_often_as_said(work, capfd):
    made = work(max_failures=2)
    tried = Attempts(OSError("the network is gone\nfor now"), on_ray(ray.exceptions.WorkerCrashedError()))
    assert stage.with_retries(tried, made) == {"steps": 6}
    assert tried.jobs == [replace(made, generation=number) for number in (1, 2, 3)]
    first, second = capfd.readouterr().out.splitlines()
    assert first.startswith("train: OSError: the network is gone; goes on from the newest checkpoint (failure 1 of 2 ")
    assert second.startswith("train: WorkerCrashedError: ")
    assert "(failure 2 of 2 that compute.max_failures allows)" in second
    for most in (0, 2):
        tried = Attempts(*(OSError(f"attempt {number}") for number in range(most + 2)))
        with pytest.raises(OSError, match=f"attempt {most}"):
            stage.with_retries(tried, work(max_failures=most))
        assert len(tried.jobs) == most + 1


GRAPHS = torch._dynamo.exc.FailOnRecompileLimitHit("of flex_attention")
FINAL = (DataError("a.png: changed"), ParamsError("no GPU"), GRAPHS)


@pytest.mark.parametrize("fault", FINAL, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("wrap", [lambda error: error, on_ray, lambda error: on_ray(OSError("reset by peer"), error)])
def test_what_another_attempt_would_meet_again_ends_the_run_as_itself(wrap, fault, work, capfd):
    tried = Attempts(wrap(fault))
    with pytest.raises(ParamsError if fault is GRAPHS else type(fault)) as met:
        stage.with_retries(tried, work())
    assert met.value is fault or "set compute.attention to sdpa" in str(met.value)
    assert (len(tried.jobs), capfd.readouterr().out) == (1, "")


@pytest.mark.parametrize("fault", OUT_OF_MEMORY, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("wrap", [lambda error: error, lambda error: on_ray(OSError("reset by peer"), error)])
def test_out_of_memory_is_tried_again_at_half_the_micro_batch_and_is_no_failure(wrap, fault, work, capfd):
    tried = Attempts(wrap(fault), wrap(fault))
    assert stage.with_retries(tried, work(max_failures=0, micro_batch=4)) == {"steps": 6}
    assert [each.compute for each in tried.jobs] == [work(max_failures=0, micro_batch=n).compute for n in (4, 2, 1)]
    first, _ = capfd.readouterr().out.splitlines()
    assert "out of memory with 4 sequences a micro-batch; goes on from the newest checkpoint with 2" in first
    assert "the same 4 a step (compute.micro_batch: 2 starts so)" in first


@pytest.mark.fault("12")
def test_one_sequence_that_does_not_fit_is_refused_with_what_to_change(work):
    made = work(micro_batch=1, zero_stage=1, activation_checkpointing="selective", max_captions_per_sequence=5)
    with pytest.raises(ParamsError) as refused:
        stage.with_retries(Attempts(OUT_OF_MEMORY[0]), made)
    for remedy in ("zero_stage (now 1)", "to full (now selective)", "max_captions_per_sequence (now 5)"):
        assert remedy in str(refused.value)
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), OSError("no space left on device")):
        assert not stage.is_out_of_memory(error)


@pytest.mark.parametrize(
    ("micro", "workers", "batch", "smaller"),
    [(3, 0, 12, 1), (6, 2, 12, 3), (5, 0, 10, 2), (7, 0, 14, 2), (10, 2, 20, 5)],
)
def test_the_smaller_micro_batch_divides_what_a_worker_has_of_a_step(micro, workers, batch, smaller, work):
    made = work(micro_batch=micro, workers=workers, global_batch=batch)
    got = stage.with_smaller_micro_batch(made, OUT_OF_MEMORY[0])
    assert got == work(micro_batch=smaller, workers=workers, global_batch=batch)


@pytest.mark.fault("P11")
@pytest.mark.parametrize("wrap", [ray.train.ControllerError, lambda error: error])
@pytest.mark.parametrize(
    "error", [exceptions.WorkerGroupStartupTimeoutError(2), exceptions.WorkerGroupStartupFailedError("gone")]
)
def test_workers_that_do_not_start_here_are_no_failure_to_go_on_from(error, wrap, work, monkeypatch):
    """On a cluster a node may have died, and another takes its place."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    tried = Attempts(wrap(error))
    with pytest.raises(NoRoomError, match="session_latest/logs/worker-"):
        stage.with_retries(tried, work(max_failures=2))
    assert len(tried.jobs) == 1
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert stage.with_retries(Attempts(wrap(error)), work(max_failures=2)) == {"steps": 6}


def test_a_base_that_does_not_fit_ends_the_run_at_once_as_a_fault_of_parameters(place, monkeypatch, capfd):
    def refuse(*_: Any) -> None:
        raise ValueError("LoRA targets match 0 linears")

    monkeypatch.setattr("m3diff.stages.train.loop.prepare", refuse)
    with pytest.raises(ParamsError, match=r"train: models.tiny on train.base .*: LoRA targets match 0 linears"):
        place.run()
    assert "failure" not in capfd.readouterr().out


@pytest.mark.fault("12")
def test_a_run_that_is_out_of_memory_ends_with_the_weights_of_one_that_is_not(place, monkeypatch, capfd):
    want = place.run(part="want", micro_batch=2)
    original, taken, failed = engine.take_step, [], []

    def take_step(model: Any, *given: Any) -> Any:
        assert all(each() is None for each in failed), "the first attempt's model is still held"
        size = model.train_micro_batch_size_per_gpu()
        if size > 2 and len(taken) == 3:
            failed.append(weakref.ref(model.module))
            raise torch.OutOfMemoryError("CUDA out of memory")
        taken.append((size, model.gradient_accumulation_steps()))
        return original(model, *given)

    monkeypatch.setattr(engine, "take_step", take_step)
    capfd.readouterr()
    got = place.run(part="got", micro_batch=4, max_failures=0)
    assert taken == [(4, 1)] * 3 + [(2, 2)] * 4, "from the checkpoint after the second step"
    assert failed
    told = capfd.readouterr().out
    assert "out of memory with 4 sequences a micro-batch" in told
    assert "resumed after step 2 of 6" in told
    assert got.report.rows_out == want.report.rows_out
    assert_same(got.weights, want.weights, atol=2e-5)


@pytest.fixture(scope="module")
def whole(mixture: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(recipe(base, export="best", caption_val_pairs=1), mixture, tmp_path_factory.mktemp("whole"))


@pytest.mark.slow(15)
@pytest.mark.fault("03", "S3", "T17")
@pytest.mark.parametrize(
    ("module", "name", "call"),
    [*((engine, "take_step", step) for step in (1, 3, 4, 6)),
     *((state, name, 1) for name in ("save_file", "write_manifest", "verify_manifest"))],
)  # fmt: skip
def test_a_run_that_sigterm_reaches_saves_its_step_and_goes_on_from_it(module, name, call, place, whole, capfd):
    """In a step, or while a checkpoint is written."""
    made = place.recipe(export="best", caption_val_pairs=1)
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)
    original, calls = getattr(module, name), []

    def asked(*given: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return original(*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, asked)
        with pytest.raises(SystemExit) as ended:
            place.run(made)
    assert ended.value.code == job.TERMINATED == 143
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)) == handlers
    assert not (place.folder / "out" / "report.json").exists()
    newest = state.checkpoints(run_dir_of(place.folder))[-1]
    assert state.latest_valid_checkpoint(run_dir_of(place.folder)) == newest
    step = state.step_of(newest)
    assert step == call or module is state
    assert f"asked to end (SIGTERM) at step {step}, whose checkpoint is written" in capfd.readouterr().out
    got = place.run(made)
    assert f"resumed after step {step} of 6" in capfd.readouterr().out
    assert_same_run(got, whole)


@pytest.mark.fault("03")
def test_a_step_that_takes_longer_than_the_grace_time_is_not_waited_for(place, monkeypatch):
    def take_step(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    assert job.GRACE_S < FLOW_GRACE_S, "it ends before a flow kills what is left"
    monkeypatch.setattr(engine, "take_step", take_step)
    monkeypatch.setattr(stage, "stop_on_sigterm", lambda run_dir: job.stop_on_sigterm(run_dir, grace_s=0.3))
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        place.run()
    assert ended.value.code == job.TERMINATED
    assert time.monotonic() - began < 50


def test_what_asked_an_earlier_run_to_end_does_not_ask_the_next(tmp_path):
    (tmp_path / job.STOP).touch()
    with job.stop_on_sigterm(tmp_path, grace_s=10):
        assert not (tmp_path / job.STOP).exists()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (tmp_path / job.STOP).exists()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 9.95, "a second signal gives no more time"
    assert not (tmp_path / job.STOP).exists()
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


WAITS = """
import sys, time
from pathlib import Path
from m3diff.stages.train import job
from m3diff.stages.train.job import begin, ended_when_superseded
job.LOOK_S = 0.2
run_dir, how = Path(sys.argv[1]), sys.argv[2]
begin(run_dir)
try:
    with ended_when_superseded(run_dir, 1):
        print("waits", flush=True)
        if how == "waits":
            time.sleep(600)
        if how == "superseded":
            begin(run_dir)
        raise RuntimeError("the other worker is gone")
except RuntimeError:
    print("lives on")
"""


@pytest.mark.fault("T15")
@pytest.mark.parametrize(
    ("how", "supersede", "code", "said"),
    [
        ("waits", job.begin, 1, "attempt 2 goes on\n"),
        ("waits", lambda folder: (folder / job.GENERATION).unlink(), 1, "the run has ended\n"),
        ("superseded", None, 1, "attempt 2 goes on\n"),
        ("", None, 0, "lives on\n"),
    ],
    ids=["a later attempt", "the run is over", "an operation fails after it", "an operation fails"],
)
def test_a_worker_of_a_superseded_attempt_ends_whatever_it_does(how, supersede, code, said, tmp_path):
    worker: Any = subprocess.Popen([sys.executable, "-c", WAITS, str(tmp_path), how], stdout=subprocess.PIPE, text=True)
    assert worker.stdout.readline() == "waits\n"
    if supersede:
        time.sleep(0.7)
        assert worker.poll() is None, "it is the newest"
        supersede(tmp_path)
    assert worker.wait(60) == code
    assert worker.stdout.read().endswith(said)


@pytest.mark.usefixtures("alone")
def test_the_loop_of_an_older_attempt_writes_neither_a_state_nor_the_output(base, mixture, tmp_path):
    older = started(recipe(base), mixture, tmp_path, generation=job.begin(tmp_path))
    take(older, 0)
    saved = older.save(1)
    job.begin(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for write in (lambda: older.save(2), lambda: older.validate(saved), older.export):
        with pytest.raises(job.SupersededError, match="attempt 2 goes on"):
            write()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

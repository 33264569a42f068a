"""What is tried again after a failure, how often and with what, and that the weights are those of a whole run."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions
import ray.train
import torch
from ray.exceptions import WorkerCrashedError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)

from m3diff.cluster import NoRoomError
from m3diff.models import FAMILIES
from m3diff.records.errors import DataError
from m3diff.settings.section import ParamsError
from m3diff.stages.train import loop
from m3diff.stages.train.attempts import DivergedError, causes, is_out_of_memory, with_retries, with_smaller_micro_batch
from m3diff.stages.train.job import Job
from m3diff.stages.train.loop import prepare_model
from tests.models.test_onediff import JOINED, settings
from tests.stages.train.toy import recipe, run
from tests.tiny_blip2 import blip2_settings, tiny_blip2

OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"),
    ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory."),
    MemoryError(),
)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def job(base: Path, **changes: Any) -> Job:
    made = recipe(base, **changes)
    return Job(made.cfg, made.model, made.compute, Path("mixture"), Path("out"), Path("run"), "hash")


def on_ray(*raised: BaseException) -> Exception:
    """What `trainer.fit()` raises where workers raised these."""
    wrapped = {rank: UserExceptionWithTraceback(error, "its traceback") for rank, error in enumerate(raised)}
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


def test_what_another_attempt_may_not_meet_is_tried_again_as_often_as_said(
    base: Path, capfd: pytest.CaptureFixture
) -> None:
    made = job(base, max_failures=2)
    attempts = Attempts(OSError("the network is gone\nfor now"), on_ray(WorkerCrashedError()))
    assert with_retries(attempts, made) == {"steps": 6}
    assert attempts.jobs == [replace(made, generation=number) for number in (1, 2, 3)]
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith(
        "train: OSError: the network is gone; goes on from the newest checkpoint (failure 1 of 2 "
    )
    assert lines[1].startswith("train: WorkerCrashedError: ")
    assert "(failure 2 of 2 that compute.max_failures allows)" in lines[1]
    assert len(lines) == 2


@pytest.mark.parametrize("most", [0, 2])
def test_the_failure_after_the_last_allowed_is_the_run_s(most: int, base: Path) -> None:
    faults = [OSError(f"attempt {number}") for number in range(most + 2)]
    attempts = Attempts(*faults)
    with pytest.raises(OSError, match=f"attempt {most}"):
        with_retries(attempts, job(base, max_failures=most))
    assert len(attempts.jobs) == most + 1


@pytest.mark.parametrize("fault", [DataError("a.png: changed"), ParamsError("no GPU"), DivergedError("loss is nan")])
@pytest.mark.parametrize("wrap", [lambda error: error, on_ray, lambda error: on_ray(OSError("reset by peer"), error)])
def test_what_another_attempt_would_meet_again_ends_the_run_as_itself(
    wrap: Callable[[Exception], Exception], fault: Exception, base: Path, capfd: pytest.CaptureFixture
) -> None:
    attempts = Attempts(wrap(fault))
    with pytest.raises(type(fault), match=str(fault)) as met:
        with_retries(attempts, job(base))
    assert met.value is fault
    assert len(attempts.jobs) == 1
    assert capfd.readouterr().out == ""


def test_a_graph_for_each_length_ends_the_run_and_names_the_other_kernel(base: Path) -> None:
    fault = torch._dynamo.exc.FailOnRecompileLimitHit("of flex_attention")
    for met in (fault, on_ray(fault)):
        attempts = Attempts(met)
        with pytest.raises(ParamsError, match="set compute.attention to sdpa"):
            with_retries(attempts, job(base))
        assert len(attempts.jobs) == 1


BERT = settings(JOINED | {"start": "bert"})


@pytest.mark.parametrize(
    ("model", "checkpointing", "words"),
    [
        (BERT, "none", "train: models.tiny on train.base .*base/bert: no BERT there"),
        (blip2_settings(), "selective", "compute.activation_checkpointing: selective .* this one is opt"),
        (settings(JOINED | {"vision_feature_layers": (1, 9)}), "none", "9 lies beyond the vision encoder's 2 layers"),
    ],
    ids=["BERT", "checkpointing", "layers"],
)
def test_a_base_that_does_not_fit_ends_the_run_at_once_as_a_fault_of_parameters(
    model: Any, checkpointing: str, words: str, mixture: Path, base: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    if model.family == "blip2idc":
        base = tiny_blip2(tmp_path / "blip2", "opt")
    made = recipe(base, model=model, max_failures=2, activation_checkpointing=checkpointing)
    with pytest.raises(ParamsError, match=words):
        run(made, mixture, tmp_path)
    assert "failure" not in capfd.readouterr().out


def test_weights_that_are_damaged_after_the_alignment_ended_are_a_fault_of_data_with_what_to_do(
    base: Path, tmp_path: Path
) -> None:
    made = job(base)
    with pytest.raises(DataError, match="run again, which writes the alignment's output anew") as refused:
        prepare_model(made.cfg, made.model, made.compute, FAMILIES["m3diff"], tmp_path)
    assert "train again" not in str(refused.value)


@pytest.mark.parametrize("fault", OUT_OF_MEMORY, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("wrap", [lambda error: error, lambda error: on_ray(OSError("reset by peer"), error)])
def test_out_of_memory_is_tried_again_at_half_the_micro_batch_and_is_no_failure(
    wrap: Callable[[Exception], Exception], fault: Exception, base: Path, capfd: pytest.CaptureFixture
) -> None:
    made = job(base, max_failures=0, micro_batch=4)
    attempts = Attempts(wrap(fault), wrap(fault))
    assert with_retries(attempts, made) == {"steps": 6}
    assert [each.compute for each in attempts.jobs] == [
        made.compute.model_copy(update={"micro_batch": size}) for size in (made.compute.micro_batch, 2, 1)
    ]
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == (
        "train: out of memory with 4 sequences a micro-batch; goes on from the newest checkpoint with 2 and the same "
        "4 a step (compute.micro_batch: 2 starts so)"
    )
    assert len(lines) == 2


@pytest.mark.fault("12")
def test_one_sequence_that_does_not_fit_is_refused_with_what_to_change(base: Path) -> None:
    made = job(base, micro_batch=1, zero_stage=1, activation_checkpointing="selective", max_captions_per_sequence=5)
    with pytest.raises(ParamsError) as refused:
        with_retries(Attempts(OUT_OF_MEMORY[0]), made)
    assert "raise compute.zero_stage (now 1)" in str(refused.value)
    assert "compute.activation_checkpointing to full (now selective)" in str(refused.value)
    assert "lower train.max_captions_per_sequence (now 5)" in str(refused.value)
    with pytest.raises(ParamsError, match=r"max_captions_per_sequence \(now null\)"):
        with_smaller_micro_batch(job(base, micro_batch=1), OUT_OF_MEMORY[0])


@pytest.mark.parametrize(
    ("micro", "workers", "batch", "smaller"),
    [(4, 0, 4, 2), (3, 0, 12, 1), (6, 2, 12, 3), (5, 0, 10, 2), (7, 0, 14, 2), (10, 1, 20, 5), (10, 2, 20, 5)],
)
def test_the_smaller_micro_batch_divides_what_a_worker_has_of_a_step(
    micro: int, workers: int, batch: int, smaller: int, base: Path
) -> None:
    made = job(base, micro_batch=micro, workers=workers, global_batch=batch)
    got = with_smaller_micro_batch(made, OUT_OF_MEMORY[0])
    assert got == job(base, micro_batch=smaller, workers=workers, global_batch=batch)
    assert batch % (smaller * max(workers, 1)) == 0


def test_only_what_says_so_is_out_of_memory() -> None:
    assert all(is_out_of_memory(error) for error in OUT_OF_MEMORY)
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), OSError("no space left on device")):
        assert not is_out_of_memory(error)


def test_causes_are_those_of_workers_and_those_before_and_a_circle_ends() -> None:
    first, second = ValueError("first"), OSError("second")
    second.__cause__, first.__context__ = first, second
    found = causes(on_ray(second))
    assert [error for error in found if error in (first, second)] == [second, first]
    assert len(found) == 4


@pytest.mark.fault("12")
def test_a_run_that_is_out_of_memory_ends_with_the_weights_of_one_that_is_not(
    mixture: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    want = run(recipe(base, micro_batch=2), mixture, tmp_path / "want")
    original, taken, failed = loop.take_step, [], []

    def take_step(engine: Any, *given: Any) -> Any:
        assert all(model() is None for model in failed), "the first attempt's model is still held"
        size = engine.train_micro_batch_size_per_gpu()
        if size > 2 and len(taken) == 3:
            failed.append(weakref.ref(engine.module))
            raise torch.OutOfMemoryError("CUDA out of memory")
        taken.append((size, engine.gradient_accumulation_steps()))
        return original(engine, *given)

    monkeypatch.setattr(loop, "take_step", take_step)
    capfd.readouterr()
    got = run(recipe(base, micro_batch=4, max_failures=0), mixture, tmp_path / "got")
    assert taken == [(4, 1)] * 3 + [(2, 2)] * 4, "from the checkpoint after the second step"
    assert failed
    told = capfd.readouterr().out
    assert "out of memory with 4 sequences a micro-batch" in told
    assert "resumed after step 2 of 6" in told
    assert got.report.rows_out == want.report.rows_out
    for name, weight in want.weights.items():
        if not name.endswith("k_proj.bias"):  # its gradient is rounding alone
            torch.testing.assert_close(got.weights[name], weight, rtol=0, atol=2e-5, msg=name)


@pytest.mark.fault("P11")
@pytest.mark.parametrize("error", [WorkerGroupStartupTimeoutError(2), WorkerGroupStartupFailedError("gone")])
@pytest.mark.parametrize("wrapped", [True, False])
def test_workers_that_do_not_start_here_are_no_failure_to_go_on_from(
    error: Exception, wrapped: bool, base: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """On a cluster a node may have died, and another takes its place."""
    met = ray.train.ControllerError(error) if wrapped else error
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    attempts = Attempts(met)
    with pytest.raises(NoRoomError, match="session_latest/logs/worker-"):
        with_retries(attempts, job(base, max_failures=2))
    assert len(attempts.jobs) == 1
    assert "goes on" not in capfd.readouterr().out
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert with_retries(Attempts(met), job(base, max_failures=2)) == {"steps": 6}

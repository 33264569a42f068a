"""Captions are made in this process, or in Ray workers with a GPU each (`compute.gpu`, `compute.workers`).

Each worker loads the checkpoint and takes its part of the batches. The batches that a dead worker has not answered
are dealt to the others. Threads read, check and resize the images of the next batches while the model computes.
"""

import json
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from m3diff.cluster import NoRoomError, per_worker, start_ray, wait_for_room
from m3diff.models.device import Device, DeviceError, environment
from m3diff.records.ahead import ahead
from m3diff.records.errors import DataError
from m3diff.settings.compute import Compute
from m3diff.settings.section import ParamsError
from m3diff.stages.predict.journal import Answer
from m3diff.stages.predict.pairs import PairSample

if TYPE_CHECKING:
    import numpy as np

    from m3diff.models.generation import Captioner
    from m3diff.models.processing import PairProcessor

AHEAD = 2  # batches whose images are prepared beforehand
ROOM_S = 60  # within which Ray must have nodes for every worker
START_S = 600  # and its processes must have started, which takes minutes where the cores are busy


class Batch(NamedTuple):
    """Pairs of one question, numbered among the batches of the run; `saliency` asks for the maps, too."""

    number: int
    pairs: list[PairSample]
    saliency: bool


Answered = tuple[int, list[Answer]]
"""The number of a batch, and its answers in the order of its pairs."""


@dataclass(frozen=True)
class Job:
    """The work that a worker is sent."""

    checkpoint: Path
    max_new_tokens: int
    compute: Compute


def caption(job: Job, batches: Sequence[Batch]) -> Iterator[Answered]:
    """Return the answers of all batches: in their order, or as they come from Ray's workers.

    Raises:
        DataError: the checkpoint is incomplete; an image is unreadable or not the one that ingest saw.
        DeviceError: a GPU is asked for and there is none.
        ParamsError: Ray cannot place as many workers.
        ConnectionError: Ray workers died more often than `compute.max_failures`.
    """
    if job.compute.gpu and job.compute.workers:
        return caption_on_ray(job, batches)
    return answers_of(load(job), batches, job.compute.cpus_per_worker)


def answers_of(captioner: "Captioner", batches: Sequence[Batch], threads: int) -> Iterator[Answered]:
    """Yield the answers of the batches, in their order."""
    for batch, images in zip(batches, images_ahead(batches, captioner.processor, threads), strict=True):
        captions, maps = captioner.answer(images, batch.pairs[0].question, batch.saliency)
        shown = [None] * len(captions) if maps is None else maps
        yield batch.number, [Answer(*answer) for answer in zip(captions, shown, strict=True)]


def load(job: Job) -> "Captioner":
    """Return the model with fused kernels, in the precision that it was trained in."""
    from m3diff.models.generation import load_captioner

    config = job.checkpoint / "config.json"
    dtype = json.loads(config.read_text(encoding="utf-8")).get("dtype") if config.is_file() else None
    device = Device(job.compute.gpu, "bf16" if dtype == "bfloat16" else "fp32")
    captioner = load_captioner(job.checkpoint, job.max_new_tokens, device)
    captioner.family.fuse(captioner.model, "none")
    return captioner


def images_ahead(batches: Sequence[Batch], processor: "PairProcessor", threads: int) -> Iterator[list["np.ndarray"]]:
    """Yield each batch's images as the processor prepares them, before, after, before, after, ...; those of the next
    AHEAD batches are on the way."""
    from m3diff.images.open import load_image

    def prepared(path: str, sha256: bytes | None) -> "np.ndarray":
        try:
            return processor.prepare_image(load_image(path, sha256))
        except ValueError as error:
            raise DataError(str(error)) from error

    def submit(batch: Batch) -> list[Future["np.ndarray"]]:
        files = [((pair.before, pair.before_sha256), (pair.after, pair.after_sha256)) for pair in batch.pairs]
        return [pool.submit(prepared, *file) for both in files for file in both]

    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="images")
    try:
        yield from ahead(submit, batches, AHEAD)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class Worker:
    """A Ray actor: a model, and the batches that it is dealt."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.captioner: Captioner | None = None

    def ready(self) -> None:
        """Answers once Ray has placed the worker."""

    def caption(self, batches: list[Batch]) -> Iterator[Answered]:
        """Yield the answers of the batches; the model is loaded with the first."""
        import torch

        threads = self.job.compute.cpus_per_worker
        torch.set_num_threads(threads)
        self.captioner = self.captioner or load(self.job)
        yield from answers_of(self.captioner, batches, threads)


@dataclass
class Part:
    """Batches that a worker was dealt: Ray's generator of its answers, and the batches that these do not have yet."""

    worker: Any
    answers: Any
    left: dict[int, Batch]


def caption_on_ray(job: Job, batches: Sequence[Batch]) -> Iterator[Answered]:
    """Yield the answers as they come from `compute.workers` workers, to which the batches are dealt by turns."""
    import ray

    own = not ray.is_initialized()
    if own:
        start_ray(job.compute)
    try:
        yield from _as_they_come(job, batches)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DataError | ParamsError | DeviceError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise ConnectionError(
            f"a worker died ({error}) and compute.max_failures: {job.compute.max_failures} allows no more; "
            "run `m3diff predict` again: what is captioned so far is kept"
        ) from error
    finally:
        if own:
            ray.shutdown()


def _start(job: Job, count: int) -> list[Any]:
    """Start `count` workers, each with CPUs and a GPU of its own.

    Raises:
        ParamsError: the nodes of Ray are too small for them.
        ConnectionError: they do not start in time.
    """
    import ray

    needs = per_worker(job.compute)
    try:
        wait_for_room(job.compute.model_copy(update={"workers": count}), ROOM_S)
    except NoRoomError as error:
        raise ParamsError(f"compute.workers: {error}") from error
    place = {"env_vars": environment(job.compute.gpu)}
    remote = ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0), runtime_env=place)(Worker)
    workers: list[Any] = [remote.remote(job) for _ in range(count)]
    started, waiting = ray.wait([worker.ready.remote() for worker in workers], num_returns=count, timeout=START_S)
    if waiting:
        for worker in workers:
            ray.kill(worker)
        raise ConnectionError(
            f"{len(waiting)} of {count} Ray workers did not start within {START_S} s; see how loaded the machine is, "
            "and run `m3diff predict` again: what is captioned so far is kept"
        )
    ray.get(started)
    return workers


def _as_they_come(job: Job, batches: Sequence[Batch]) -> Iterator[Answered]:
    """Yield the workers' answers, whichever is first. The batches that a dead worker has not answered go to the others,
    or to new ones where none is left."""
    import ray

    count = min(job.compute.workers, len(batches))
    workers = _start(job, count)
    parts, deaths = _deal(workers, batches), 0
    while parts:
        first: Any = ray.wait([part.answers for part in parts], num_returns=1)[0][0]
        part = next(part for part in parts if part.answers is first)
        try:
            number, answers = ray.get(next(first))
        except StopIteration:
            parts.remove(part)
        except ray.exceptions.RayActorError as error:
            if deaths == job.compute.max_failures:
                raise
            deaths += 1
            ray.kill(part.worker)  # one that is only out of reach answers nothing twice
            left = [batch for lost in parts if lost.worker is part.worker for batch in lost.left.values()]
            parts = [other for other in parts if other.worker is not part.worker]
            workers.remove(part.worker)
            others = f"{len(workers)} other worker(s)" if workers else "new workers"
            print(
                f"predict: a worker died ({textwrap.shorten(str(error), 160)}); its {len(left)} unanswered batches "
                f"go to {others} (failure {deaths} of {job.compute.max_failures} that compute.max_failures allows)",
                flush=True,
            )
            workers = workers or _start(job, min(count, len(left)))
            parts += _deal(workers, left)
        else:
            del part.left[number]
            yield number, answers


def _deal(workers: Sequence[Any], batches: Sequence[Batch]) -> list[Part]:
    """Deal the batches to the workers by turns; nothing to workers beyond the number of batches."""
    dealt = [(worker, batches[rank :: len(workers)]) for rank, worker in enumerate(workers[: len(batches)])]
    return [
        Part(worker, worker.caption.remote(part), {batch.number: batch for batch in part}) for worker, part in dealt
    ]

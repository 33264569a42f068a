"""Captions are made in this process, or in Ray workers with a GPU each (`compute.gpu`, `compute.workers`).

Each worker loads the checkpoint and takes its part of the batches. When one dies, the batches without an answer are
dealt to new workers. Threads read, check and resize the images of the next batches while the model computes.
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
from m3diff.records.errors import DataError
from m3diff.records.progress import ahead
from m3diff.settings.compute import Compute
from m3diff.settings.section import ParamsError
from m3diff.stages.predict.pairs import PairSample

if TYPE_CHECKING:
    import numpy as np

    from m3diff.models.generation import Captioner
    from m3diff.models.processing import PairProcessor

AHEAD = 2  # batches whose images are prepared beforehand
ROOM_S = 60  # within which Ray must have nodes for every worker


class Batch(NamedTuple):
    """Pairs of one question, numbered among the batches of the run; `saliency` asks for the maps, too."""

    number: int
    pairs: list[PairSample]
    saliency: bool


class Answer(NamedTuple):
    """The model's caption of a pair, and where it looks: [rows, columns] float16, where asked for."""

    caption: str
    saliency: "np.ndarray | None"


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
        return processor.prepare_image(load_image(path, sha256))

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

    def caption(self, batches: list[Batch]) -> Iterator[Answered]:
        """Yield the answers of the batches."""
        import torch

        threads = self.job.compute.cpus_per_worker
        torch.set_num_threads(threads)
        yield from answers_of(load(self.job), batches, threads)


def caption_on_ray(job: Job, batches: Sequence[Batch]) -> Iterator[Answered]:
    """Yield the answers as they come from `compute.workers` workers, to which the batches are dealt by turns."""
    import ray

    left, failures, most = {batch.number: batch for batch in batches}, 0, job.compute.max_failures
    own = not ray.is_initialized()
    if own:
        start_ray(job.compute)
    try:
        while left:
            try:
                for number, answers in _as_they_come(job, list(left.values())):
                    del left[number]
                    yield number, answers
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, DataError | ParamsError | DeviceError):
                    raise error.cause from None
                raise
            except ray.exceptions.RayActorError as error:
                if failures == most:
                    raise ConnectionError(
                        f"a worker died ({error}) and compute.max_failures: {most} allows no more; "
                        "run `m3diff predict` again: what is captioned so far is kept"
                    ) from error
                failures += 1
                print(
                    f"predict: a worker died ({textwrap.shorten(str(error), 160)}); {len(left)} unanswered batches go "
                    f"to new workers (failure {failures} of {most} that compute.max_failures allows)",
                    flush=True,
                )
    finally:
        if own:
            ray.shutdown()


def _as_they_come(job: Job, batches: Sequence[Batch]) -> Iterator[Answered]:
    """Yield the answers of new workers, each with CPUs and a GPU of its own, whichever is first.

    Raises:
        ParamsError: the nodes of Ray are too small for them.
    """
    import ray

    count, needs = min(job.compute.workers, len(batches)), per_worker(job.compute)
    try:
        wait_for_room(job.compute.model_copy(update={"workers": count}), ROOM_S)
    except NoRoomError as error:
        raise ParamsError(f"compute.workers: {error}") from error
    place = {"env_vars": environment(job.compute.gpu)}
    remote = ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0), runtime_env=place)(Worker)
    workers: list[Any] = [remote.remote(job) for _ in range(count)]
    streams = [worker.caption.remote(batches[rank::count]) for rank, worker in enumerate(workers)]
    try:
        while streams:
            first: Any = ray.wait(streams, num_returns=1)[0][0]
            try:
                answered = ray.get(next(first))
            except StopIteration:
                streams.remove(first)
            else:
                yield answered
    finally:
        for worker in workers:
            ray.kill(worker)  # one that is only out of reach answers nothing twice

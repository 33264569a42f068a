"""Where captions are made: in this process, or in Ray workers with a GPU each (`compute.gpu`, `compute.workers`).

Each worker loads the checkpoint and takes its part of the batches. Threads read, check and resize the images of the
next batches while the model computes.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from components.compute import Compute
from components.models.device import Device, DeviceError, environment
from components.predict.journal import Answer
from components.predict.pairs import PairSample
from components.ray_cluster import start_ray
from components.records import DataError
from components.section import ParamsError

if TYPE_CHECKING:
    from PIL import Image

    from components.models.family import ImagePair, PairProcessor
    from components.models.generation import Captioner

AHEAD = 2  # batches whose images are prepared beforehand
START_S = 60  # within which Ray must have placed every worker


class Batch(NamedTuple):
    """Pairs of one question, numbered among the batches of the run; `saliency` asks for the maps, too."""

    number: int
    pairs: list[PairSample]
    saliency: bool


Answered = tuple[int, list[Answer]]
"""The number of a batch, and its answers in the order of its pairs."""


@dataclass(frozen=True)
class Job:
    """What a worker is sent."""

    checkpoint: Path
    max_new_tokens: int
    compute: Compute


def caption(job: Job, batches: Sequence[Batch]) -> Iterator[Answered]:
    """The answers of all batches, in any order.

    Raises:
        DataError: the checkpoint is incomplete; an image is unreadable or not the one that ingest saw.
        DeviceError: a GPU is asked for and there is none.
        ParamsError: Ray cannot place as many workers.
        ConnectionError: a Ray worker died.
    """
    if job.compute.gpu and job.compute.workers:
        return caption_on_ray(job, batches)
    return caption_here(job, batches)


def caption_here(job: Job, batches: Sequence[Batch]) -> Iterator[Answered]:
    """The answers of the batches, in their order, from one model in this process."""
    captioner = load(job)
    for batch, images in images_ahead(batches, captioner.processor, job.compute.cpus_per_worker):
        captions = captioner.caption(images, batch.pairs[0].question)
        maps = captioner.saliency_map(images) if batch.saliency else [None] * len(images)
        yield batch.number, [Answer(*answer) for answer in zip(captions, maps, strict=True)]


def load(job: Job) -> "Captioner":
    """The model with fused kernels, in the precision that it was trained in."""
    from components.models.checkpoint import CheckpointError
    from components.models.generation import load_captioner

    try:
        device = Device(job.compute.gpu, "bf16" if _dtype(job.checkpoint) == "bfloat16" else "fp32")
        captioner = load_captioner(job.checkpoint, job.max_new_tokens, device)
    except CheckpointError as error:
        raise DataError(str(error)) from error
    captioner.family.fuse(captioner.model, "none")
    return captioner


def _dtype(checkpoint: Path) -> str | None:
    """What the checkpoint's weights are of, as its configuration has it; None where it has none."""
    config = checkpoint / "config.json"
    return json.loads(config.read_text(encoding="utf-8")).get("dtype") if config.is_file() else None


def images_ahead(
    batches: Iterable[Batch], processor: "PairProcessor", threads: int
) -> Iterator[tuple[Batch, list["ImagePair"]]]:
    """Each batch with its images, already of the model's size; those of the next AHEAD batches are on the way."""
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="images")
    waiting: deque[tuple[Batch, list[Any]]] = deque()
    try:
        for batch in batches:
            waiting.append((batch, [pool.submit(_open_pair, pair, processor) for pair in batch.pairs]))
            if len(waiting) > AHEAD:
                first, images = waiting.popleft()
                yield first, [image.result() for image in images]
        while waiting:
            first, images = waiting.popleft()
            yield first, [image.result() for image in images]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _open_pair(pair: PairSample, processor: "PairProcessor") -> "ImagePair":
    before = _open(pair.before, pair.before_sha256, processor)
    return before, _open(pair.after, pair.after_sha256, processor)


def _open(path: str, sha256: bytes | None, processor: "PairProcessor") -> "Image.Image":
    """The image as the model takes it; preparing it once more changes nothing."""
    from PIL import Image

    from components.models.images import load_image

    try:
        return Image.fromarray(processor.prepare_image(load_image(path, sha256)))
    except ValueError as error:
        raise DataError(str(error)) from error


class Worker:
    """One Ray actor: a model, and its part of the batches."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def ready(self) -> None:
        """Answers once Ray has placed the worker."""

    def caption(self, batches: list[Batch]) -> Iterator[Answered]:
        import torch

        torch.set_num_threads(self.job.compute.cpus_per_worker)
        yield from caption_here(self.job, batches)


def caption_on_ray(job: Job, batches: Sequence[Batch]) -> Iterator[Answered]:
    """The answers as they come from `compute.workers` workers, to which the batches are dealt by turns."""
    import ray

    own = not ray.is_initialized()
    if own:
        start_ray(job.compute)
    try:
        workers = _place(job, min(job.compute.workers, len(batches)))
        parts = [worker.caption.remote(batches[rank :: len(workers)]) for rank, worker in enumerate(workers)]
        yield from _as_they_come(parts)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DataError | ParamsError | DeviceError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise ConnectionError(
            f"a worker died ({error}); run `m3diff predict` again: what is captioned so far is kept"
        ) from error
    finally:
        if own:
            ray.shutdown()


def _place(job: Job, count: int) -> list[Any]:
    """Raises ParamsError where Ray has no room for as many."""
    import ray

    compute = job.compute
    remote = ray.remote(
        num_cpus=compute.cpus_per_worker,
        num_gpus=1 if compute.gpu else 0,
        runtime_env={"env_vars": environment(compute.gpu)},
    )(Worker)
    workers: list[Any] = [remote.remote(job) for _ in range(count)]
    placed, waiting = ray.wait([worker.ready.remote() for worker in workers], num_returns=count, timeout=START_S)
    if waiting:
        has = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
        raise ParamsError(
            f"compute.workers: {count} workers are asked for with {compute.cpus_per_worker} CPUs"
            f"{' and a GPU' if compute.gpu else ''} each, but Ray placed {len(placed)} within {START_S} s; it has "
            f"{has['CPU']:g} CPUs and {has['GPU']:g} GPUs; lower compute.workers or compute.cpus_per_worker"
        )
    ray.get(placed)
    return workers


def _as_they_come(parts: Iterable[Any]) -> Iterator[Answered]:
    """What Ray's generators give, whichever is first."""
    import ray

    running: list[Any] = list(parts)
    while running:
        first: Any = ray.wait(running, num_returns=1)[0][0]
        try:
            yield ray.get(next(first))
        except StopIteration:
            running.remove(first)

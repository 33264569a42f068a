"""A model that answers, and another that takes over: it decodes images, gathers pairs into batches and captions them.

The model is in the server's process; where RAY_ADDRESS names a cluster, it is in replicas of Ray Serve there, whose own
HTTP server is not started. Decoding has threads of its own, so that the next batch is ready when the model is.
"""

import asyncio
import io
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from m3diff.cluster import on_one_machine, start_ray
from m3diff.images.open import ImageError, load_image
from m3diff.images.saliency import outlined
from m3diff.records.errors import DataError
from m3diff.registry.model_source import Source, load
from m3diff.serving.params import Serve
from m3diff.settings.compute import Compute
from m3diff.settings.section import ParamsError

if TYPE_CHECKING:
    from m3diff.models.generation import Captioner

DECODERS = 2
OVERLAY_PX = 1024  # the longer side of an overlay at most: an image for a page, not an archive

BATCH_WAIT_S = 0.01  # seconds that a pair waits for others to share its batch


class Asked(NamedTuple):
    """A question about a pair.

    Attributes:
        before, after: bytes of image files.
        question: None: what changed.
        overlay: the outlines of the saliency map are wanted, too.
        model: as a chat names it; None if it does not.
    """

    before: bytes
    after: bytes
    question: str | None
    overlay: bool = False
    model: str | None = None


class Facts(NamedTuple):
    """Facts of the model that a question is checked against.

    Attributes:
        special_tokens: marks of the prompt, which no question may hold.
        reads_question: False: it says of every pair what changed.
    """

    name: str
    max_new_tokens: int
    special_tokens: tuple[str, ...]
    reads_question: bool


class Answer(NamedTuple):
    """The answer about one pair.

    Attributes:
        model: the version that gave it.
        overlay: before and after as PNG files with the outlines of the saliency map; None if it was not asked for or
            the model has none.
        prompt_tokens, completion_tokens: counts, with the end token.
        batch: number of pairs in its batch.
    """

    caption: str
    model: str
    overlay: tuple[bytes, bytes] | None
    prompt_tokens: int
    completion_tokens: int
    batch: int


class Fault(NamedTuple):
    """A damaged checkpoint, or an image whose header was right and whose rest is not. A value, since Ray logs an error
    for what is raised, and starts a replica again and again."""

    why: str


class Prepared(NamedTuple):
    """A pair as the model takes it.

    Attributes:
        inputs: before, after, each as the processor prepares it.
        shown: both images no larger than an overlay; None if none is asked for.
    """

    question: str
    inputs: tuple[np.ndarray, np.ndarray]
    shown: tuple[Image.Image, Image.Image] | None


class Replica:
    """A checkpoint in this process that captions pairs in batches.

    Args:
        batch_pairs: of the section `serve`.
        batch_wait_s: that a pair waits for others to share its batch.
        threads: that the model computes with on a CPU.
    """

    def __init__(self, source: Source, batch_pairs: int, batch_wait_s: float, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.name, self.batch_pairs, self.batch_wait_s = source.name, batch_pairs, batch_wait_s
        self.fault: Fault | None = None
        try:
            self.captioner = load(source)
        except DataError as error:
            self.fault = Fault(str(error))
        self.decoders, self.computer = ThreadPoolExecutor(DECODERS), ThreadPoolExecutor(1)
        self.waiting: asyncio.Queue[tuple[Prepared, asyncio.Future[Any]]] = asyncio.Queue()
        self.worker: asyncio.Task[None] | None = None

    async def facts(self) -> Facts | Fault:
        """Facts of the model that the server checks questions against; or the fault that kept it from being loaded."""
        if self.fault is not None:
            return self.fault
        tokenizer: Any = self.captioner.processor.tokenizer  # type: ignore[attr-defined]  # every family has one
        tokens = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        reads = self.captioner.family.reads_question
        return Facts(self.name, self.captioner.max_new_tokens, tuple(sorted(tokens)), reads)

    async def ask(self, asked: Asked) -> Answer | Fault:
        """The answer about one pair; or the fault of an image that cannot be decoded."""
        loop = asyncio.get_running_loop()
        try:
            prepared = await loop.run_in_executor(self.decoders, prepare, self.captioner, asked)
        except (ImageError, MemoryError) as error:
            return Fault(str(error).partition(";")[0])
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self.work())
        answer: asyncio.Future[Any] = loop.create_future()
        self.waiting.put_nowait((prepared, answer))
        caption, grid, batch = await answer
        overlay = None
        if prepared.shown is not None and grid is not None:
            overlay = await loop.run_in_executor(self.decoders, draw, prepared.shown, grid)
        processor = self.captioner.processor
        lengths = len(processor.encode_prompt(prepared.question)), len(processor.encode_reference(caption))
        return Answer(caption, self.name, overlay, *lengths, batch)

    async def work(self) -> None:
        """For ever gather a batch, leave out the pairs whose clients are gone, and answer the others."""
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self.waiting.get()]
            with suppress(TimeoutError):
                async with asyncio.timeout(self.batch_wait_s):
                    while len(batch) < self.batch_pairs:
                        batch.append(await self.waiting.get())
            batch = [(pair, answer) for pair, answer in batch if not answer.done()]
            pairs = [pair for pair, _ in batch]
            try:
                found: Sequence[Any] = await loop.run_in_executor(self.computer, captions, self.captioner, pairs)
            except Exception as error:  # each of them fails, and the next batch is captioned
                found = [error] * len(batch)
            for (_, answer), one in zip(batch, found, strict=True):
                if answer.done():
                    continue
                if isinstance(one, Exception):
                    answer.set_exception(one)
                else:
                    answer.set_result((*one, len(batch)))

    async def remove(self) -> None:
        if self.worker is not None:
            self.worker.cancel()
        self.decoders.shutdown(wait=False)
        self.computer.shutdown(wait=False)
        self.__dict__.pop("captioner", None)


def prepare(captioner: "Captioner", asked: Asked) -> Prepared:
    """The pair as the model takes it; one of its images is in memory at a time. Raises ImageError."""
    from m3diff.models.generation import QUESTION

    inputs: list[np.ndarray] = []
    shown: list[Image.Image] = []
    for data in (asked.before, asked.after):
        image = load_image(io.BytesIO(data))
        inputs.append(captioner.processor.prepare_image(image))
        if asked.overlay:
            image.thumbnail((OVERLAY_PX, OVERLAY_PX))
            shown.append(image)
        del image
    before, after = inputs
    return Prepared(asked.question or QUESTION, (before, after), (shown[0], shown[1]) if shown else None)


def captions(captioner: "Captioner", pairs: Sequence[Prepared]) -> list[tuple[str, np.ndarray | None]]:
    """Caption and map of each pair, in order. Pairs of one question go through the model together; those with a map
    apart, so that nobody's caption depends on what another asks for."""
    groups: dict[tuple[str, bool], list[int]] = {}
    for place, pair in enumerate(pairs):
        groups.setdefault((pair.question, pair.shown is not None), []).append(place)
    found: dict[int, tuple[str, np.ndarray | None]] = {}
    for (question, saliency), places in groups.items():
        texts, maps = captioner.answer([image for place in places for image in pairs[place].inputs], question, saliency)
        grids = [None] * len(texts) if maps is None else maps
        found |= dict(zip(places, zip(texts, grids, strict=True), strict=True))
    return [found[place] for place in range(len(pairs))]


def draw(images: tuple[Image.Image, Image.Image], grid: np.ndarray) -> tuple[bytes, bytes]:
    """Both images as PNG with the outlines of the pair's map."""
    drawn = io.BytesIO(), io.BytesIO()
    for image, file in zip(images, drawn, strict=True):
        outlined(image, grid.astype(np.float32)).save(file, "PNG")
    return drawn[0].getvalue(), drawn[1].getvalue()


GPU_SHARE = 0.5  # the share of a GPU that a replica reserves: while a version takes over, both are loaded

QUIET = {"log_level": "ERROR", "enable_access_log": False}


class RayDeployed:
    """A checkpoint in replicas of Ray Serve, an application of their own, that are ready.

    Args:
        options: of a Replica, after its source.
    """

    def __init__(self, source: Source, cfg: Serve, options: tuple[Any, ...]) -> None:
        import ray.serve

        self.name = f"m3diff-{uuid.uuid4().hex}"
        deployment = ray.serve.deployment(Replica).options(  # type: ignore[attr-defined]
            name="captioner",
            num_replicas=cfg.replicas,
            max_ongoing_requests=cfg.max_queue,
            ray_actor_options={"num_cpus": 0, "num_gpus": GPU_SHARE if ray.cluster_resources().get("GPU", 0) else 0},
            graceful_shutdown_timeout_s=cfg.answer_s,
            graceful_shutdown_wait_loop_s=0.1,
            logging_config=QUIET,
        )
        try:
            self.handle: Any = ray.serve.run(deployment.bind(source, *options), name=self.name, route_prefix=None)
        except Exception:
            ray.serve.delete(self.name)
            raise

    async def facts(self) -> Facts | Fault:
        return await self.handle.facts.remote()

    async def ask(self, asked: Asked) -> Answer | Fault:
        response = self.handle.ask.remote(asked)
        try:
            return await response
        finally:
            response.cancel()  # one that was answered is left alone

    async def remove(self) -> None:
        import ray.serve

        await asyncio.to_thread(ray.serve.delete, self.name)


Deployed = Replica | RayDeployed  # a model that is loaded

Deploy = Callable[[Source], Deployed]  # loads a checkpoint; blocks until it is ready


@contextmanager
def deployer(cfg: Serve, compute: Compute) -> Iterator[Deploy]:
    """Loads one checkpoint after the other: in this process, or on a cluster.

    Raises:
        ParamsError: several replicas are asked for, and there is no cluster.
    """
    options = (cfg.batch_pairs, BATCH_WAIT_S, compute.cpus_per_worker)
    if on_one_machine():
        if cfg.replicas > 1:
            raise ParamsError(
                f"serve.replicas: {cfg.replicas} need a Ray cluster, and RAY_ADDRESS names none; start one "
                "(docs/serving.md), or write 1"
            )
        yield lambda source: Replica(source, *options)
        return
    import ray.serve

    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    start_ray(compute)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        ray.serve.start(proxy_location="Disabled", logging_config=QUIET)
        yield lambda source: RayDeployed(source, cfg, options)  # Serve itself stays: it may be others', too
    finally:
        ray.shutdown()


class Metrics:
    """Counts that Prometheus reads at `GET /metrics`, in a registry of their own: two servers in one process, as in
    tests, count apart."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        labels, seconds = ["route", "status"], (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
        self.requests = Counter("m3diff_requests", "Requests by route and HTTP status", labels, registry=own)
        told = "Seconds from a request's head to the end of its answer"
        self.seconds = Histogram("m3diff_request_seconds", told, ["route"], buckets=seconds, registry=own)
        pairs = (1, 2, 4, 8, 16, 32, 64)
        self.batch = Histogram("m3diff_batch_pairs", "Pairs that shared an answer's batch", buckets=pairs, registry=own)
        self.queue = Gauge("m3diff_queue_length", "Requests being read, waiting or answered", registry=own)
        self.model = Gauge("m3diff_model", "1 for the version that answers", ["version"], registry=own)
        self.switches = Counter("m3diff_model_switches", "Versions that began to answer", registry=own)
        told = "Times that the next version could not be had"
        self.poll_failures = Counter("m3diff_model_failures", told, registry=own)


class Served:
    def __init__(self, deployed: Deployed, facts: Facts) -> None:
        self.deployed, self.facts, self.under_way = deployed, facts, 0

    async def ask(self, asked: Asked) -> Answer | Fault:
        self.under_way += 1
        try:
            return await self.deployed.ask(asked)
        finally:
            self.under_way -= 1

    async def retire(self) -> None:
        """Remove the model once it has given its last answer."""
        while self.under_way:
            await asyncio.sleep(0.05)
        await self.deployed.remove()


class Models:
    """The model that answers, `current`, None until the first is ready. Another takes over without a lost request: it
    is loaded, all new requests go to it, and the one before is removed when it has given its last answer."""

    def __init__(self, deploy: Deploy, metrics: Metrics) -> None:
        self.deploy, self.metrics = deploy, metrics
        self.current: Served | None = None
        self.removing: set[asyncio.Task[None]] = set()

    async def switch(self, source: Source) -> None:
        """Load a model, let it answer from now on, and retire the one before.

        Raises:
            DataError: its checkpoint is damaged; the one before stays.
        """
        deployed = await asyncio.to_thread(self.deploy, source)
        facts = await deployed.facts()
        if isinstance(facts, Fault):
            await deployed.remove()
            raise DataError(facts.why)
        before, self.current = self.current, Served(deployed, facts)
        self.metrics.model.clear()
        self.metrics.model.labels(facts.name).set(1)
        self.metrics.switches.inc()
        if before is not None:
            task = asyncio.create_task(before.retire())
            self.removing.add(task)
            task.add_done_callback(self.removing.discard)

    async def close(self) -> None:
        """Wait for models that are on their way out, and remove the current one."""
        if self.removing:
            await asyncio.wait(self.removing)
        if self.current is not None:
            current, self.current = self.current, None
            await current.deployed.remove()

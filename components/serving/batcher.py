"""Run the served model: decode images, group pairs into batches, caption them, and switch to a new model version.

The model runs in the server's process or, if RAY_ADDRESS is set, in Ray Serve replicas on that cluster (without Ray
Serve's HTTP proxy). Images are decoded in threads, so that the next batch is ready as soon as the model is free.
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

from m3diff import runtime
from m3diff.cluster import NoRoomError, on_one_machine, start_ray
from m3diff.images.enlarge import enlarge
from m3diff.images.open import ImageError, load_image
from m3diff.images.saliency import draw_outlines
from m3diff.models.device import process_environment
from m3diff.records.errors import DataError, Fault
from m3diff.records.sample import Turn
from m3diff.registry.model_source import Source, load
from m3diff.serving.memory import PauseTrimmer
from m3diff.serving.model_card import ModelCard
from m3diff.serving.params import Serve
from m3diff.settings.compute import Compute
from m3diff.settings.section import ParamsError

if TYPE_CHECKING:
    from m3diff.models.contract import Prepared
    from m3diff.models.generation import Captioner

DECODERS = 2  # number of threads that decode images
OVERLAY_PX = 1024  # maximum length of an overlay's longer side; overlays are meant for display on a page

BATCH_WAIT_S = 0.01  # seconds that a pair waits for other pairs to share its batch


class Asked(NamedTuple):
    """A request for a caption.

    Attributes:
        before, after: contents of the image files.
        question: the question, or None for the default question of the model.
        overlay: whether the answer should also contain both images with the outlines of the saliency map.
        model: the model requested in a chat, or None if the request does not name a model.
    """

    before: bytes
    after: bytes
    question: str | None
    overlay: bool = False
    model: str | None = None


class ModelFacts(NamedTuple):
    """Facts about a model that the server needs to check questions.

    Attributes:
        special_tokens: the tokenizer's special tokens, which must not occur in a question.
        reads_question: whether the model reads the question. If not, it always describes what changed.
        question: the question that is asked if a request has none.
        trained_question: the question that the model was trained on. None if it is unknown.
    """

    name: str
    max_new_tokens: int
    special_tokens: tuple[str, ...]
    reads_question: bool
    question: str
    trained_question: str | None


class ServedAnswer(NamedTuple):
    """The answer to a request.

    Attributes:
        model: the model version that wrote the caption.
        overlay: the images before and after as PNG files, with the outlines of the saliency map. None if no overlay was
            requested or the model does not compute saliency maps.
        prompt_tokens, completion_tokens: number of tokens. The completion includes the end token.
        batch_pairs: number of pairs in the same batch.
    """

    caption: str
    model: str
    overlay: tuple[bytes, bytes] | None
    prompt_tokens: int
    completion_tokens: int
    batch_pairs: int


class UndecodableImage(NamedTuple):
    """The result for an image that has a valid header but cannot be decoded.

    It is returned, not raised as an exception, because Ray logs every exception raised in a replica as an error.

    Attributes:
        reason: what is wrong, in the words shown to the client.
    """

    reason: str


class PreparedPair(NamedTuple):
    """A pair that is ready for the model.

    Attributes:
        inputs: the images, prepared by the model's processor.
        overlay_images: both images, scaled down to the size of an overlay, or None if no overlay was requested.
    """

    question: str
    inputs: "Prepared"
    overlay_images: tuple[Image.Image, Image.Image] | None


class BatchCaption(NamedTuple):
    """The caption of one pair in a batch.

    Attributes:
        saliency_map: array of shape [rows, columns]. None if no overlay was requested or the model does not compute
            saliency maps.
        batch_pairs: number of pairs in the batch.
    """

    text: str
    saliency_map: np.ndarray | None
    batch_pairs: int


class Replica:
    """Load a checkpoint into this process and caption pairs in batches.

    Args:
        batch_pairs: maximum number of pairs per batch.
        batch_wait_s: seconds that a pair waits for other pairs to share its batch.
        threads: number of threads for the model on a CPU.
    """

    def __init__(self, source: Source, batch_pairs: int, batch_wait_s: float, threads: int) -> None:
        runtime.prepare()  # needed on a cluster, where each replica is a separate process
        import torch

        torch.set_num_threads(threads)
        self.name = source.name
        self.batch_pairs = batch_pairs
        self.batch_wait_s = batch_wait_s
        self.fault: Fault | None = None
        try:
            self.captioner = load(source)
        except DataError as error:
            self.fault = error.fault  # if the error were raised, Ray would restart the replica forever
        self.decoders = ThreadPoolExecutor(DECODERS)
        self.computer = ThreadPoolExecutor(1)
        self.waiting: asyncio.Queue[tuple[PreparedPair, asyncio.Future[BatchCaption]]] = asyncio.Queue()
        self.worker: asyncio.Task[None] | None = None
        self.trimmer = PauseTrimmer()

    async def facts(self) -> ModelFacts | Fault:
        """Return the facts about the model, or a fault if the model could not be loaded."""
        if self.fault is not None:
            return self.fault
        tokenizer: Any = self.captioner.processor.tokenizer  # type: ignore[attr-defined]  # every family has one
        tokens = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        return ModelFacts(
            name=self.name,
            max_new_tokens=self.captioner.max_new_tokens,
            special_tokens=tuple(sorted(tokens)),
            reads_question=self.captioner.family.reads_question,
            question=self.captioner.question,
            trained_question=self.captioner.trained_question,
        )

    async def ask(self, asked: Asked) -> ServedAnswer | UndecodableImage:
        """Answer one request, or return why an image cannot be decoded."""
        self.trimmer.begin()
        try:
            return await self._answer(asked)
        finally:
            self.trimmer.end()

    async def _answer(self, asked: Asked) -> ServedAnswer | UndecodableImage:
        loop = asyncio.get_running_loop()
        try:
            pair = await loop.run_in_executor(self.decoders, prepare_pair, self.captioner, asked)
        except ImageError as error:
            # The error's own remedy is left out, since it applies to files on disk
            return UndecodableImage(error.fault.summary)
        except MemoryError as error:
            return UndecodableImage(str(error))
        self._start_worker()
        future: asyncio.Future[BatchCaption] = loop.create_future()
        self.waiting.put_nowait((pair, future))
        caption = await future
        overlay = None
        if pair.overlay_images is not None and caption.saliency_map is not None:
            overlay = await loop.run_in_executor(
                self.decoders, draw_overlays, pair.overlay_images, caption.saliency_map
            )
        processor = self.captioner.processor
        return ServedAnswer(
            caption=caption.text,
            model=self.name,
            overlay=overlay,
            prompt_tokens=len(processor.encode_prompt((Turn(pair.question),), pair.inputs.marks)),
            completion_tokens=len(processor.encode_answer(caption.text)),
            batch_pairs=caption.batch_pairs,
        )

    def _start_worker(self) -> None:
        """Start the task that gathers batches if it is not running. Must be called from a running event loop."""
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self.work())

    async def work(self) -> None:
        """Gather and caption batches forever. Pairs whose clients have disconnected are skipped."""
        while True:
            batch = [await self.waiting.get()]
            with suppress(TimeoutError):
                async with asyncio.timeout(self.batch_wait_s):
                    while len(batch) < self.batch_pairs:
                        batch.append(await self.waiting.get())
            await self._caption_batch([(pair, future) for pair, future in batch if not future.done()])

    async def _caption_batch(self, batch: list[tuple[PreparedPair, "asyncio.Future[BatchCaption]"]]) -> None:
        """Caption the pairs and set the results of their futures."""
        loop = asyncio.get_running_loop()
        pairs = [pair for pair, _ in batch]
        try:
            captions = await loop.run_in_executor(self.computer, caption_pairs, self.captioner, pairs)
        except Exception as error:  # only the requests in this batch fail; later batches are still captioned
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), caption in zip(batch, captions, strict=True):
            if not future.done():
                future.set_result(caption)

    async def remove(self) -> None:
        """Release the model and its threads."""
        if self.worker is not None:
            self.worker.cancel()
        self.decoders.shutdown(wait=False)
        self.computer.shutdown(wait=False)
        self.__dict__.pop("captioner", None)


def prepare_pair(captioner: "Captioner", asked: Asked) -> PreparedPair:
    """Decode and prepare both images for the model, one after the other to save memory.

    Raises:
        ImageError: an image cannot be decoded.
    """
    overlay_images: list[Image.Image] = []

    def decode_images() -> Iterator[Image.Image]:
        for data in (asked.before, asked.after):
            image = load_image(io.BytesIO(data))
            yield image
            if asked.overlay:
                image.thumbnail((OVERLAY_PX, OVERLAY_PX))
                overlay_images.append(image)
            del image  # frees its memory before the next image is decoded

    inputs = captioner.processor.prepare(decode_images())
    return PreparedPair(
        question=asked.question or captioner.question,
        inputs=inputs,
        overlay_images=(overlay_images[0], overlay_images[1]) if overlay_images else None,
    )


def caption_pairs(captioner: "Captioner", pairs: Sequence[PreparedPair]) -> list[BatchCaption]:
    """Return the caption of each pair, in order.

    Pairs with the same question are captioned together. Pairs with and without an overlay are captioned separately, so
    that a caption never depends on the requests of other clients.
    """
    positions_by_group: dict[tuple[str, bool], list[int]] = {}
    for position, pair in enumerate(pairs):
        has_overlay = pair.overlay_images is not None
        positions_by_group.setdefault((pair.question, has_overlay), []).append(position)
    captions: dict[int, BatchCaption] = {}
    for (question, has_overlay), positions in positions_by_group.items():
        prepared = [pairs[position].inputs for position in positions]
        texts, saliency_maps = captioner.answer(prepared, [(Turn(question),)] * len(prepared), has_overlay)
        maps: Sequence[np.ndarray | None] = [None] * len(texts) if saliency_maps is None else list(saliency_maps)
        for position, text, saliency_map in zip(positions, texts, maps, strict=True):
            captions[position] = BatchCaption(text, saliency_map, batch_pairs=len(pairs))
    return [captions[position] for position in range(len(pairs))]


def draw_overlays(images: tuple[Image.Image, Image.Image], saliency_map: np.ndarray) -> tuple[bytes, bytes]:
    """Draw the outlines of the saliency map on both images and return the PNG files. Small images are enlarged."""
    files = []
    for image in images:
        file = io.BytesIO()
        draw_outlines(enlarge(image, OVERLAY_PX), saliency_map.astype(np.float32)).save(file, "PNG")
        files.append(file.getvalue())
    return files[0], files[1]


# Share of a GPU that a replica reserves if `compute.gpu` is true. While a new version replaces the old one, both are
# loaded
GPU_SHARE = 0.5

QUIET_LOGGING = {"log_level": "ERROR", "enable_access_log": False}


def replica_options(compute: Compute) -> dict[str, Any]:
    """Return the resources that a replica reserves on the cluster, and the environment variables of its process.

    If `compute.gpu` is false, the replica reserves no GPU, and the variables hide the GPUs of its node. Otherwise, the
    model would use a GPU that Ray may have given to another program.
    """
    return {
        "num_cpus": 0,
        "num_gpus": GPU_SHARE if compute.gpu else 0,
        "runtime_env": {"env_vars": process_environment(compute.gpu)},
    }


def require_gpu_in_cluster() -> None:
    """Check that a node of the connected cluster has a GPU. Ray Serve would wait for one forever.

    Raises:
        NoRoomError: no node has a GPU.
    """
    import ray

    if not ray.cluster_resources().get("GPU", 0):
        raise NoRoomError("serving.no_gpu_in_cluster", key="compute.gpu")


class RayDeployment:
    """Deploy a checkpoint as a separate Ray Serve application and wait until its replicas are ready.

    Args:
        options: the arguments of `Replica` after `source`.
    """

    def __init__(self, source: Source, cfg: Serve, compute: Compute, options: tuple[Any, ...]) -> None:
        import ray.serve

        self.name = f"m3diff-{uuid.uuid4().hex}"
        deployment = ray.serve.deployment(Replica).options(  # type: ignore[attr-defined]
            name="captioner",
            num_replicas=cfg.replicas,
            max_ongoing_requests=cfg.max_queue,
            ray_actor_options=replica_options(compute),
            graceful_shutdown_timeout_s=cfg.answer_s,
            graceful_shutdown_wait_loop_s=0.1,
            logging_config=QUIET_LOGGING,
        )
        try:
            self.handle: Any = ray.serve.run(deployment.bind(source, *options), name=self.name, route_prefix=None)
        except Exception:
            ray.serve.delete(self.name)
            raise

    async def facts(self) -> ModelFacts | Fault:
        """Ask one of the replicas for the facts about the model, or for the fault if it could not load the model."""
        return await self.handle.facts.remote()

    async def ask(self, asked: Asked) -> ServedAnswer | UndecodableImage:
        """Answer one request with one of the replicas."""
        response = self.handle.ask.remote(asked)
        try:
            return await response
        finally:
            response.cancel()  # in case the client has disconnected; after an answer this does nothing

    async def remove(self) -> None:
        """Stop the replicas."""
        import ray.serve

        await asyncio.to_thread(ray.serve.delete, self.name)


Deployment = Replica | RayDeployment  # a loaded model

Deploy = Callable[[Source], Deployment]  # loads a checkpoint and blocks until it is ready


@contextmanager
def deployer(cfg: Serve, compute: Compute) -> Iterator[Deploy]:
    """Yield a function that loads a checkpoint, either in this process or on the cluster at RAY_ADDRESS.

    Raises:
        ParamsError: several replicas are configured, but RAY_ADDRESS is not set.
        NoRoomError: the cluster does not answer, or `compute.gpu` is true and the cluster has no GPU.
    """
    options = (cfg.batch_pairs, BATCH_WAIT_S, compute.cpus_per_worker)
    if on_one_machine():
        if cfg.replicas > 1:
            raise ParamsError("serving.replicas_without_cluster", key="serve.replicas", value=cfg.replicas)
        yield lambda source: Replica(source, *options)
        return
    import ray.serve

    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    start_ray(compute)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        if compute.gpu:
            require_gpu_in_cluster()
        ray.serve.start(proxy_location="Disabled", logging_config=QUIET_LOGGING)
        yield lambda source: RayDeployment(source, cfg, compute, options)
    finally:
        ray.shutdown()  # Ray Serve keeps running, since other users of the cluster may need it


class Metrics:
    """Metrics that Prometheus reads from `GET /metrics`.

    Each instance has its own registry, so that two servers in one process, as in tests, count separately.
    """

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self.requests = Counter(
            "m3diff_requests", "Requests by route and HTTP status", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "m3diff_request_seconds",
            "Seconds from a request's head to the end of its answer",
            ["route"],
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
            registry=registry,
        )
        self.batch = Histogram(
            "m3diff_batch_pairs",
            "Pairs that shared an answer's batch",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=registry,
        )
        self.queue = Gauge("m3diff_queue_length", "Requests being read, waiting or answered", registry=registry)
        self.model = Gauge("m3diff_model", "1 for the version that answers", ["version"], registry=registry)
        self.switches = Counter("m3diff_model_switches", "Versions that began to answer", registry=registry)
        self.poll_failures = Counter(
            "m3diff_model_failures", "Times that the next version could not be had", registry=registry
        )


class ServedModel:
    """A loaded model that answers requests.

    Args:
        card: task that looks up the model card. The lookup takes seconds, and captions do not wait for it.

    Attributes:
        requests: number of requests in progress.
    """

    def __init__(self, deployment: Deployment, facts: ModelFacts, card: asyncio.Task[ModelCard]) -> None:
        self.deployment = deployment
        self.facts = facts
        self.card = card
        self.requests = 0

    async def ask(self, asked: Asked) -> ServedAnswer | UndecodableImage:
        """Answer one request, or return why an image cannot be decoded."""
        self.requests += 1
        try:
            return await self.deployment.ask(asked)
        finally:
            self.requests -= 1

    async def retire(self) -> None:
        """Wait until all requests are answered, then remove the model."""
        while self.requests:
            await asyncio.sleep(0.05)
        await self.deployment.remove()


class Models:
    """Manage the current model and the models it has replaced.

    Switching models does not lose requests. The new model is loaded first and then receives all new requests. The
    previous model is removed after it has answered its last request.

    Args:
        describe: a function that returns the card of a model. It may block while it reads the training record, and it
            must not raise.

    Attributes:
        current: the model that answers requests, or None until the first model is ready.
        removing: tasks that remove earlier models.
    """

    def __init__(self, deploy: Deploy, metrics: Metrics, describe: Callable[[Source], ModelCard]) -> None:
        self.deploy = deploy
        self.metrics = metrics
        self.describe = describe
        self.current: ServedModel | None = None
        self.removing: set[asyncio.Task[None]] = set()

    async def switch(self, source: Source) -> None:
        """Load a model, send all new requests to it, and retire the previous model.

        Raises:
            DataError: the checkpoint is damaged. The previous model keeps answering requests.
        """
        deployment = await asyncio.to_thread(self.deploy, source)
        facts = await deployment.facts()
        if isinstance(facts, Fault):
            await deployment.remove()
            raise DataError(facts)
        card = asyncio.create_task(asyncio.to_thread(self.describe, source))
        replaced = self.current
        self.current = ServedModel(deployment, facts, card)
        self.metrics.model.clear()
        self.metrics.model.labels(facts.name).set(1)
        self.metrics.switches.inc()
        if replaced is not None:
            task = asyncio.create_task(replaced.retire())
            self.removing.add(task)
            task.add_done_callback(self.removing.discard)

    async def close(self) -> None:
        """Wait until earlier models are removed, then remove the current model."""
        if self.removing:
            await asyncio.wait(self.removing)
        if self.current is not None:
            model = self.current
            self.current = None
            await model.deployment.remove()

"""Run the served model: decode images, group requests into batches, answer them, and switch to a new model version.

The model runs in the server's process or, if RAY_ADDRESS is set, in Ray Serve replicas on that cluster (without Ray
Serve's HTTP proxy). Images are decoded in threads, so that the next batch is ready as soon as the model is free.
"""

import asyncio
import io
import logging
import os
import traceback
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
from m3diff.models.sample_batches import MAX_PREPARED_BYTES, split_by_shape
from m3diff.models.threads import preparing_threads, use_threads
from m3diff.records.errors import DataError, Fault, ValueFault
from m3diff.records.sample import Turn
from m3diff.registry.model_source import Source, load
from m3diff.serving.memory import PauseTrimmer
from m3diff.serving.model_card import ModelCard
from m3diff.serving.params import Serve
from m3diff.settings.compute import Compute
from m3diff.settings.section import ParamsError

if TYPE_CHECKING:
    from m3diff.models.contract import Prepared, Takes
    from m3diff.models.generation import Captioner
    from m3diff.models.sample_limits import TrainedOn

DECODERS = 2  # number of threads that decode images
OVERLAY_PX = 1024  # maximum length of an overlay's longer side; overlays are meant for display on a page

BATCH_WAIT_S = 0.01  # seconds that a request waits for other requests to share its batch


class AnswerRequest(NamedTuple):
    """A request for an answer.

    Attributes:
        images: contents of the image files. Of two images, the first is the image before.
        question: the question, or None for the default question of the model.
        history: the turns before the question. If the question of a turn is empty, the default question was asked.
        overlay: whether the answer should also contain both images of a pair with the outlines of the saliency map.
        model: the model requested in a chat, or None if the request does not name a model.
    """

    images: tuple[bytes, ...]
    question: str | None
    history: tuple[Turn, ...] = ()
    overlay: bool = False
    model: str | None = None

    def turns(self, default_question: str) -> tuple[Turn, ...]:
        """Return the turns of the dialogue. The last one is the question, whose answer is empty."""
        dialogue = (*self.history, Turn(self.question or ""))
        return tuple(turn if turn.question else turn._replace(question=default_question) for turn in dialogue)


class ModelFacts(NamedTuple):
    """Facts about a model that the server needs to check requests.

    Attributes:
        special_tokens: the tokenizer's special tokens, which must not occur in a question.
        question: the question that is asked if a request has none.
        takes: the samples that the model's family can process.
        trained_on: the samples that the model was trained on.
        has_maps: whether the model computes saliency maps.
    """

    name: str
    max_new_tokens: int
    special_tokens: tuple[str, ...]
    question: str
    takes: "Takes"
    trained_on: "TrainedOn"
    has_maps: bool


class ServedAnswer(NamedTuple):
    """The answer to a request.

    Attributes:
        text: the answer, for example the caption of a pair.
        model: the model version that wrote the answer.
        overlay: the images before and after as PNG files, with the outlines of the saliency map. None if no overlay was
            requested, the request does not contain a pair, or the model does not compute saliency maps.
        prompt_tokens, completion_tokens: number of tokens. The completion includes the end token.
        batch_requests: number of requests in the same batch.
    """

    text: str
    model: str
    overlay: tuple[bytes, bytes] | None
    prompt_tokens: int
    completion_tokens: int
    batch_requests: int


class UnusableImage(NamedTuple):
    """The result for an image that has a valid header but cannot be decoded, or that the model cannot process.

    It is returned, not raised as an exception, because Ray logs every exception raised in a replica as an error.

    Attributes:
        reason: what is wrong, in the words shown to the client.
        remedy: what to do, if the image can be decoded. Otherwise None.
    """

    reason: str
    remedy: str | None = None


class PreparedRequest(NamedTuple):
    """A request that is ready for the model.

    Attributes:
        turns: the turns of the dialogue, of which the last is to be answered.
        images: the images, prepared by the model's processor.
        overlay_images: both images of a pair, scaled down to the size of an overlay. None if no overlay is drawn.
    """

    turns: tuple[Turn, ...]
    images: "Prepared"
    overlay_images: tuple[Image.Image, Image.Image] | None

    @property
    def nbytes(self) -> int:
        """Size of the prepared images and the images for overlays in bytes."""
        overlay_pixels = sum(image.width * image.height for image in self.overlay_images or ())
        return self.images.nbytes + 3 * overlay_pixels


class BatchAnswer(NamedTuple):
    """The answer to one request of a batch.

    Attributes:
        saliency_map: array of shape [rows, columns]. None if no overlay was requested or the model does not compute
            saliency maps.
        prompt_tokens, completion_tokens: number of tokens. The completion includes the end token.
        batch_requests: number of requests in the batch.
    """

    text: str
    saliency_map: np.ndarray | None
    prompt_tokens: int
    completion_tokens: int
    batch_requests: int


class WaitingRequest(NamedTuple):
    """A prepared request in the queue of the model, and the future that will hold its answer."""

    request: PreparedRequest
    answer: "asyncio.Future[BatchAnswer]"


class PreparedBytes:
    """Limit the bytes of the prepared images that wait for the model or are being answered.

    The size of an image set is known only after its preparation, so the limit does not apply to the image sets that are
    being prepared. At most DECODERS image sets are being prepared at a time. In total, the prepared images therefore
    take at most `max_bytes` and the bytes of DECODERS image sets.

    Args:
        max_bytes: the number of bytes from which no further image set is prepared.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.has_room = asyncio.Event()
        self.change(0)

    def change(self, nbytes: int) -> None:
        """Add bytes, or with a negative number remove them."""
        self.used_bytes += nbytes
        if self.used_bytes < self.max_bytes:
            self.has_room.set()
        else:
            self.has_room.clear()


class Replica:
    """Load a checkpoint into this process and answer requests in batches.

    Args:
        batch_requests: maximum number of requests per batch.
        batch_wait_s: seconds that a request waits for other requests to share its batch.
        threads: number of threads for the model on a CPU.
    """

    def __init__(self, source: Source, batch_requests: int, batch_wait_s: float, threads: int) -> None:
        runtime.prepare()  # needed on a cluster, where each replica is a separate process
        use_threads(threads)
        self.name = source.name
        self.batch_requests = batch_requests
        self.batch_wait_s = batch_wait_s
        self.fault: Fault | None = None
        try:
            self.captioner = load(source)
        except DataError as error:
            self.fault = error.fault  # if the error were raised, Ray would restart the replica forever
        self.decoders = preparing_threads(DECODERS)
        self.computer = ThreadPoolExecutor(1, initializer=use_threads, initargs=(threads,))
        # Requests wait here with their files, which are smaller than prepared images
        self.preparations = asyncio.Semaphore(DECODERS)
        self.prepared_bytes = PreparedBytes(MAX_PREPARED_BYTES)
        self.queue: asyncio.Queue[WaitingRequest] = asyncio.Queue()
        self.worker: asyncio.Task[None] | None = None
        self.trimmer = PauseTrimmer()

    async def facts(self) -> ModelFacts | Fault:
        """Return the facts about the model, or a fault if the model could not be loaded."""
        if self.fault is not None:
            return self.fault
        tokenizer = self.captioner.processor.tokenizer
        tokens = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        return ModelFacts(
            name=self.name,
            max_new_tokens=self.captioner.max_new_tokens,
            special_tokens=tuple(sorted(tokens)),
            question=self.captioner.question,
            takes=self.captioner.family.takes,
            trained_on=self.captioner.trained_on,
            has_maps=self.captioner.family.maps is not None,
        )

    async def ask(self, request: AnswerRequest) -> ServedAnswer | UnusableImage:
        """Answer one request, or return why an image cannot be decoded."""
        self.trimmer.begin()
        try:
            return await self._answer(request)
        finally:
            self.trimmer.end()

    async def _answer(self, request: AnswerRequest) -> ServedAnswer | UnusableImage:
        try:
            overlay_images, future = await self._prepare(request)
        except ImageError as error:
            # The error's own remedy is left out, since it applies to files on disk
            return UnusableImage(error.fault.summary)
        except MemoryError as error:
            return UnusableImage(str(error))
        except ValueFault as error:
            return UnusableImage(error.fault.summary, error.fault.remedy)
        answer = await future
        overlay = None
        if overlay_images is not None and answer.saliency_map is not None:
            loop = asyncio.get_running_loop()
            overlay = await loop.run_in_executor(self.decoders, draw_overlays, overlay_images, answer.saliency_map)
        return ServedAnswer(
            text=answer.text,
            model=self.name,
            overlay=overlay,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            batch_requests=answer.batch_requests,
        )

    async def _prepare(
        self, request: AnswerRequest
    ) -> tuple[tuple[Image.Image, Image.Image] | None, "asyncio.Future[BatchAnswer]"]:
        """Prepare the images as soon as there is room for them, and put the request into the queue of the model.

        Returns:
            The images for the overlay, if one is drawn, and the future that will hold the answer.

        Raises:
            ImageError: an image cannot be decoded.
            ValueFault: the model cannot process an image.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[BatchAnswer] = loop.create_future()
        async with self.preparations:
            await self.prepared_bytes.has_room.wait()
            prepared = await loop.run_in_executor(self.decoders, prepare_request, self.captioner, request)
            self.prepared_bytes.change(prepared.nbytes)
            self.queue.put_nowait(WaitingRequest(prepared, future))
        self._start_worker()
        return prepared.overlay_images, future

    def _start_worker(self) -> None:
        """Start the task that gathers batches if it is not running. Must be called from a running event loop."""
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self.work())

    async def work(self) -> None:
        """Gather and answer batches forever. Requests whose clients have disconnected are skipped."""
        while True:
            batch = [await self.queue.get()]
            with suppress(TimeoutError):
                async with asyncio.timeout(self.batch_wait_s):
                    while len(batch) < self.batch_requests:
                        batch.append(await self.queue.get())
            await self._answer_batch([waiting for waiting in batch if not waiting.answer.done()])
            # The images of a request whose client has disconnected use memory until they leave the queue
            batch_bytes = sum(waiting.request.nbytes for waiting in batch)
            del batch  # otherwise, its images would stay in memory until the next request arrives
            self.prepared_bytes.change(-batch_bytes)

    async def _answer_batch(self, batch: list[WaitingRequest]) -> None:
        """Answer the requests and set the results of their futures."""
        loop = asyncio.get_running_loop()
        requests = [waiting.request for waiting in batch]
        try:
            answers = await loop.run_in_executor(self.computer, answer_requests, self.captioner, requests)
        except Exception as error:  # only the requests in this batch fail; later batches are still answered
            _release_variables(error)
            for waiting in batch:
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
            return
        for waiting, answer in zip(batch, answers, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(answer)

    async def remove(self) -> None:
        """Release the model and its threads."""
        if self.worker is not None:
            self.worker.cancel()
        self.decoders.shutdown(wait=False)
        self.computer.shutdown(wait=False)
        self.__dict__.pop("captioner", None)


def _release_variables(error: Exception) -> None:
    """Remove the variables of the functions that raised an error, which hold the prepared images of a batch.

    Otherwise, the images use memory until Python collects the cyclic references of the error. The first entry of the
    traceback is the calling function, whose variables cannot be removed while it runs, so it is left out.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
        traceback.clear_frames(error.__traceback__)


def prepare_request(captioner: "Captioner", request: AnswerRequest) -> PreparedRequest:
    """Decode and prepare the images for the model, one after the other to save memory.

    Raises:
        ImageError: an image cannot be decoded.
        ValueFault: the model cannot process an image.
    """
    overlay_images: list[Image.Image] = []
    draws_overlay = request.overlay and len(request.images) == 2

    def decode_images() -> Iterator[Image.Image]:
        for content in request.images:
            image = load_image(io.BytesIO(content))
            yield image
            if draws_overlay:
                image.thumbnail((OVERLAY_PX, OVERLAY_PX))
                overlay_images.append(image)
            del image  # frees its memory before the next image is decoded

    images = captioner.processor.prepare(decode_images())
    return PreparedRequest(
        turns=request.turns(captioner.question),
        images=images,
        overlay_images=(overlay_images[0], overlay_images[1]) if overlay_images else None,
    )


def answer_requests(captioner: "Captioner", requests: Sequence[PreparedRequest]) -> list[BatchAnswer]:
    """Return the answer to each request, in order.

    Requests with the same number of images and prompts of the same length are answered together, so that no prompt is
    padded. Requests with and without an overlay are answered separately. An answer then never depends on the requests
    of other clients.
    """
    shapes: list[tuple[int, int, bool]] = []
    for request in requests:
        marks = request.images.marks
        prompt = captioner.encode_prompt(request.turns, marks)
        shapes.append((len(marks), len(prompt), request.overlay_images is not None))
    answers: dict[int, BatchAnswer] = {}
    for positions in split_by_shape(shapes):
        _, prompt_tokens, has_overlay = shapes[positions[0]]
        prepared = [requests[position].images for position in positions]
        dialogues = [requests[position].turns for position in positions]
        texts, saliency_maps = captioner.answer(prepared, dialogues, has_overlay)
        maps: Sequence[np.ndarray | None] = [None] * len(texts) if saliency_maps is None else list(saliency_maps)
        for position, text, saliency_map in zip(positions, texts, maps, strict=True):
            answers[position] = BatchAnswer(
                text=text,
                saliency_map=saliency_map,
                prompt_tokens=prompt_tokens,
                completion_tokens=len(captioner.processor.encode_answer(text)),
                batch_requests=len(requests),
            )
    return [answers[position] for position in range(len(requests))]


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

    async def ask(self, request: AnswerRequest) -> ServedAnswer | UnusableImage:
        """Answer one request with one of the replicas."""
        response = self.handle.ask.remote(request)
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
            "Requests that shared an answer's batch",
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

    async def ask(self, request: AnswerRequest) -> ServedAnswer | UnusableImage:
        """Answer one request, or return why an image cannot be decoded."""
        self.requests += 1
        try:
            return await self.deployment.ask(request)
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

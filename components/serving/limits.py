"""Enforce limits on each request (size, upload time) and on all requests in progress (number, memory)."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from m3diff.records.errors import format_count
from m3diff.serving.batcher import Metrics
from m3diff.serving.memory import PauseTrimmer
from m3diff.serving.params import Serve
from m3diff.serving.refusals import RequestRefusedError

UPLOAD_S = 20  # seconds a client has to send its request before it gets HTTP 408

# Maximum number of bytes of a refused body that are read and discarded. Clients read the answer only after they have
# sent the whole body
DISCARDED_BYTES = 64_000_000

COPIES = 4  # maximum copies of a request in memory: received, parsed, on its way to a replica, and in the replica


class Upload:
    """Receive the messages of one request and enforce the limits on its size and upload time.

    The upload time is measured from the creation of this object.

    Attributes:
        max_bytes: maximum size of a request in bytes.
        expected_bytes: size of this request according to its headers, at most `max_bytes`. A chunked request does not
            announce its size and counts as `max_bytes`.
    """

    def __init__(self, receive: Receive, headers: Headers, settings: Serve) -> None:
        self.receive = receive
        self.settings = settings
        self.max_bytes = int(settings.max_request_mb * 1e6)
        self.deadline = time.monotonic() + UPLOAD_S
        content_length = headers.get("content-length", "0")
        announced_bytes = int(content_length) if content_length.isdecimal() else 0
        is_chunked = "transfer-encoding" in headers
        self.expected_bytes = self.max_bytes if is_chunked else min(announced_bytes, self.max_bytes)
        # If the announced size is too large, it counts as received, so that the request is refused before it is read
        self.received_bytes = announced_bytes if announced_bytes > self.max_bytes else 0
        self.has_ended = not announced_bytes and not is_chunked

    async def __call__(self) -> Message:
        """Return the next message.

        Raises:
            RequestRefusedError: the body is too large (HTTP 413) or arrives too slowly (HTTP 408).
        """
        message: Message = {} if self._is_too_large() else await self._next_message()
        if self._is_too_large():
            raise RequestRefusedError(
                status=413,
                code="too_large",
                finding=f"{self.received_bytes / 1e6:.1f} MB or more",
                limit=f"at most {self.settings.max_request_mb:g} MB a request (serve.max_request_mb)",
                remedy="send smaller images, or JPEG and WebP instead of PNG; base64 takes a third more than a form",
            )
        return message

    async def discard(self) -> None:
        """Read and discard the rest of the body, up to DISCARDED_BYTES and until the time limit."""
        max_received_bytes = self.received_bytes + DISCARDED_BYTES
        with suppress(RequestRefusedError):
            while not self.has_ended and self.received_bytes < max_received_bytes:
                await self._next_message()

    def _is_too_large(self) -> bool:
        return self.received_bytes > self.max_bytes

    async def _next_message(self) -> Message:
        if self.has_ended:
            return await self.receive()
        try:
            async with asyncio.timeout(self.deadline - time.monotonic()):
                message = await self.receive()
        except TimeoutError as error:
            raise RequestRefusedError(
                status=408,
                code="slow_client",
                finding="the rest is missing",
                limit=f"{UPLOAD_S:g} s to send a request",
                remedy="send it faster, or smaller images",
            ) from error
        self.has_ended = not message.get("more_body", False)
        self.received_bytes += len(message.get("body", b""))
        return message


class Capacity:
    """Limit the number of requests in progress and the memory reserved for them.

    Attributes:
        requests: number of requests in progress.
        reserved_bytes: memory reserved for these requests.
    """

    def __init__(self, settings: Serve, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.requests = 0
        self.reserved_bytes = 0
        self.trimmer = PauseTrimmer()

    @contextmanager
    def reserve(self, upload: Upload) -> Iterator[None]:
        """Reserve a place in the queue, and memory for COPIES of a request body that has not been read yet.

        Raises:
            RequestRefusedError: the queue is full (HTTP 429), or there is not enough memory (HTTP 503).
        """
        self._require_place()
        needed_bytes = COPIES * upload.expected_bytes
        self._require_memory(needed_bytes, upload.max_bytes)
        self.requests += 1
        self.reserved_bytes += needed_bytes
        self.trimmer.begin()
        self.metrics.queue.set(self.requests)
        try:
            yield
        finally:
            self.requests -= 1
            self.reserved_bytes -= needed_bytes
            self.trimmer.end()
            self.metrics.queue.set(self.requests)

    def _require_place(self) -> None:
        max_requests = self.settings.max_queue
        if self.requests >= max_requests:
            raise RequestRefusedError(
                status=429,
                code="queue_full",
                finding=f"{format_count(self.requests, 'request')} under way",
                limit=f"at most {max_requests} at a time (serve.max_queue)",
                remedy="try again later",
            )

    def _require_memory(self, needed_bytes: int, max_request_bytes: int) -> None:
        # One request of the maximum size must fit even if the queue is shorter than COPIES
        max_reserved_bytes = max(self.settings.max_queue, COPIES) * max_request_bytes
        if self.reserved_bytes + needed_bytes > max_reserved_bytes:
            reserved_mb = self.reserved_bytes / 1e6
            raise RequestRefusedError(
                status=503,
                code="memory_full",
                finding=f"{reserved_mb:.0f} MB are taken and {needed_bytes / 1e6:.0f} MB needed, {COPIES} times the "
                "request",
                limit=f"at most {max_reserved_bytes / 1e6:.0f} MB at a time (serve.max_queue x serve.max_request_mb)",
                remedy="try again later, or send smaller images",
            )

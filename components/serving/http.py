"""The edge of the server: its refusals, who may ask, bodies read within limits of bytes and time, and its metrics."""

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, Mapping

import h11
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from m3diff.serving.params import Serve
from m3diff.serving.same_origin import foreign

OPEN_ROUTES = ("/healthz", "/readyz")
"""For probes, which have no token; they tell only whether the server is there."""

DISCARDED_BYTES = 64_000_000
"""Bytes of a refused body that are read, so that a client that is still sending reads the answer."""

SAFE = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
}

UPLOAD_S = 20
"""Seconds for a client to send its request; the answer after them is 408."""

OTHER_SITE = {
    "host": ("wrong_host", "127.0.0.1 or localhost", "ask by that name; other names need M3DIFF_SERVE_TOKEN"),
    "origin": ("other_site", "this server's own page", "ask from a program, or set M3DIFF_SERVE_TOKEN"),
}
ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""OpenAI's, of statuses that have one of their own."""


class RequestRefusedError(ValueError):
    """A request that gets no caption.

    Args:
        status: of HTTP.
        code: a word for machines.
        found: what the request is or has.
        limit: what is allowed instead.
        remedy: what to do.
        field: of the request, if one is meant.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        code: str,
        found: str,
        limit: str,
        remedy: str,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{field + ': ' if field else ''}{found}; {limit}; {remedy}")
        self.status, self.field, self.headers = status, field, dict(headers or {})
        self.body = {"error": code, "field": field, "found": found, "limit": limit, "remedy": remedy}

    def response(self, path: str) -> Response:
        """The answer, on OpenAI's routes in the shape that its clients read."""
        said = self.body
        if path.startswith("/v1/"):
            kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
            error = {"message": str(self), "type": kind, "param": self.field, "code": self.body["error"]}
            said = {"error": error}  # type: ignore[dict-item]
        return JSONResponse(said, self.status, headers=self.headers)


def unprocessable(code: str, found: str, limit: str, remedy: str, field: str | None = None) -> RequestRefusedError:
    """A refusal with status 422."""
    return RequestRefusedError(422, code, found, limit, remedy, field)


def unavailable(code: str, found: str, limit: str, remedy: str) -> RequestRefusedError:
    """A refusal with status 503, which asks the client to come again."""
    return RequestRefusedError(503, code, found, limit, remedy, None, {"retry-after": "5"})


class ClientGoneError(ConnectionError):
    """The client closed the connection before it had an answer."""


class Metrics:
    """Counts that Prometheus reads at `GET /metrics`, in a registry of their own: two servers in one process, as in
    tests, count apart."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter(
            "m3diff_requests", "Requests by route and HTTP status", ["route", "status"], registry=own
        )
        self.seconds = Histogram(
            "m3diff_request_seconds",
            "Seconds from a request's head to the end of its answer",
            ["route"],
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
            registry=own,
        )
        pairs = (1, 2, 4, 8, 16, 32, 64)
        self.batch = Histogram("m3diff_batch_pairs", "Pairs that shared an answer's batch", buckets=pairs, registry=own)
        self.queue = Gauge("m3diff_queue_length", "Requests being read, waiting or answered", registry=own)
        self.model = Gauge("m3diff_model", "1 for the version that answers", ["version"], registry=own)
        self.switches = Counter("m3diff_model_switches", "Versions that began to answer", registry=own)
        self.poll_failures = Counter(
            "m3diff_model_failures", "Times that the next version could not be had", registry=own
        )


class Body:
    """The body of one request, which is read once. The clock starts with the object.

    Attributes:
        most: bytes that are read of any request.
        at_most: bytes that are read of this one: as many as it announces, or the limit.
    """

    def __init__(self, receive: Receive, headers: Headers, limits: Serve) -> None:
        self.receive, self.limits = receive, limits
        self.most = int(limits.max_request_mb * 1e6)
        self.deadline = time.monotonic() + UPLOAD_S
        length = headers.get("content-length", "0")
        self.announced = int(length) if length.isdecimal() else 0
        chunked = "transfer-encoding" in headers
        self.ended = not self.announced and not chunked
        self.at_most = self.most if chunked else min(self.announced, self.most)

    async def read(self) -> bytearray:
        """All of it. Raises as `parts` does."""
        body = bytearray()
        async for part in self.parts():
            body += part
        return body

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Its parts as they arrive.

        Raises:
            RequestRefusedError: 413, it is or says that it is too large; 408, it takes too long.
            ClientGoneError: the connection closed before its end.
        """
        size = self.announced if self.announced > self.most else 0
        while size <= self.most:
            if self.ended:
                return
            part = await self._part()
            size += len(part)
            if size <= self.most:
                yield part
        limit = f"at most {self.limits.max_request_mb:g} MB a request (serve.max_request_mb)"
        remedy = "send smaller images, or JPEG and WebP instead of PNG; base64 takes a third more than a form"
        raise RequestRefusedError(413, "too_large", f"{size / 1e6:.1f} MB or more", limit, remedy)

    async def discard(self) -> None:
        """Read what is left, within the time, and keep nothing."""
        size = 0
        try:
            while not self.ended and size < DISCARDED_BYTES:
                size += len(await self._part())
        except (RequestRefusedError, ClientGoneError):
            return

    async def gone(self) -> None:
        """Return when the client closes the connection; the body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _part(self) -> bytes:
        try:
            async with asyncio.timeout(self.deadline - time.monotonic()):
                message = await self.receive()
        except TimeoutError as error:
            limit, closes = f"{UPLOAD_S:g} s to send a request", {"connection": "close"}
            remedy = "send it faster, or smaller images"
            raise RequestRefusedError(408, "slow_client", "the rest is missing", limit, remedy, None, closes) from error
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client closed the connection while it sent its request")
        self.ended = not message.get("more_body", False)
        return message.get("body", b"")


class Gate:
    """Lets in who may ask, counts every answer, and adds the headers that all answers have.

    Args:
        token: that each request needs but for OPEN_ROUTES; None: no token, and then only what addresses this machine
            as itself and comes from no other site's page is let in (a page may call itself by a name that leads here).
        routes: known paths, for the metrics.
    """

    def __init__(
        self, app: ASGIApp, limits: Serve, token: str | None, metrics: Metrics, routes: frozenset[str]
    ) -> None:
        self.app, self.limits, self.token, self.metrics, self.routes = app, limits, token, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server takes neither WebSockets nor lifespans"
        start, status = time.monotonic(), 499  # nginx' word for a client that left
        headers = Headers(scope=scope)
        body = scope["body"] = Body(receive, headers, self.limits)

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(name.encode(), value.encode()) for name, value in SAFE.items()]
                message["headers"] = [*message.get("headers", ()), *added]
                await body.discard()
            await send(message)

        route = scope["path"] if scope["path"] in self.routes else "other"
        try:
            refusal = self.refusal(scope["path"], headers)
            app = self.app if refusal is None else refusal.response(scope["path"])
            await app(scope, receive, answer)
        finally:
            self.metrics.requests.labels(route, status).inc()
            self.metrics.seconds.labels(route).observe(time.monotonic() - start)

    def refusal(self, path: str, headers: Headers) -> RequestRefusedError | None:
        """The reason why this request is not let in; None if it is."""
        if self.token is None:
            if (site := foreign(headers.raw)) is None:
                return None
            code, limit, remedy = OTHER_SITE[site[0]]
            return RequestRefusedError(403, code, f"{site[0]} {site[1][:100]!r}", limit, remedy, site[0])
        scheme, _, given = headers.get("authorization", "").partition(" ")
        right = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token.encode())
        if right or path in OPEN_ROUTES:
            return None
        found, limit = "another token" if given else "no token", "the token of this server"
        remedy, asks = "send the header `Authorization: Bearer TOKEN`", {"www-authenticate": "Bearer"}
        return RequestRefusedError(401, "unauthorized", found, limit, remedy, "authorization", asks)


class Impatient(H11Protocol):
    """uvicorn's protocol, which closes a connection whose request has not its whole head after UPLOAD_S; uvicorn would
    wait without an end. The body has a limit of its own."""

    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._rest()
        elif self.timer is None:
            self.timer = self.loop.call_later(UPLOAD_S, self.transport.close)

    def _rest(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

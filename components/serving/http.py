"""The edge of the server: who may ask, and a body that is read within limits of bytes and time."""

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from m3diff.serving.metrics import Metrics
from m3diff.serving.params import Serve
from m3diff.serving.refused import RequestRefusedError
from m3diff.serving.same_origin import foreign

OPEN_ROUTES = ("/healthz", "/readyz")
"""For probes, which have no token; they say nothing but whether the server is there."""

DISCARDED_BYTES = 64_000_000
"""Of a body that is refused, so that a client that is still sending reads the answer."""

SAFE = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
}


UPLOAD_S = 20
"""Seconds for a client to send its request; the answer after them is 408."""


class ClientGoneError(ConnectionError):
    """The client closed the connection before it had an answer."""


class Body:
    """The body of one request; read once. The clock starts with the object.

    Attributes:
        at_most: how many bytes are read of it: as many as it announces, or the limit.
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
        """What is received, as it arrives.

        Raises:
            RequestRefusedError: 413, it is or says that it is too large; 408, it takes too long.
            ClientGoneError: the connection closed before its end.
        """
        if self.announced > self.most:
            raise self._too_large(self.announced)
        size = 0
        while not self.ended:
            part = await self._part()
            size += len(part)
            if size > self.most:
                raise self._too_large(size)
            yield part

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
            limit = f"{UPLOAD_S:g} s to send a request"
            remedy = "send it faster, or smaller images"
            closes = {"connection": "close"}
            raise RequestRefusedError(408, "slow_client", "the rest is missing", limit, remedy, None, closes) from error
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client closed the connection while it sent its request")
        self.ended = not message.get("more_body", False)
        return message.get("body", b"")

    def _too_large(self, size: int) -> RequestRefusedError:
        limit = f"at most {self.limits.max_request_mb:g} MB a request (serve.max_request_mb)"
        remedy = "send smaller images, or JPEG and WebP instead of PNG; base64 takes a third more than a form"
        return RequestRefusedError(413, "too_large", f"{size / 1e6:.1f} MB or more", limit, remedy)


class Gate:
    """Around the application: lets in who may ask, counts every answer, and adds the headers that all answers have.

    Args:
        token: that each request needs but for OPEN_ROUTES; None: no token, and then only what addresses this machine
            as itself and comes from no other site's page is let in (a page may call itself by a name that leads here).
        routes: known paths, for the metrics.
    """

    def __init__(
        self, app: ASGIApp, limits: Serve, token: str | None, metrics: Metrics, routes: frozenset[str]
    ) -> None:
        self.app, self.limits, self.metrics, self.routes = app, limits, metrics, routes
        self.token = None if token is None else token.encode()

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
            refusal = self._refusal(scope["path"], headers)
            app = self.app if refusal is None else refusal_response(scope["path"], refusal)
            await app(scope, receive, answer)
        finally:
            self.metrics.requests.labels(route, status).inc()
            self.metrics.seconds.labels(route).observe(time.monotonic() - start)

    def _refusal(self, path: str, headers: Headers) -> RequestRefusedError | None:
        """Why this request is not let in; None where it is."""
        if self.token is None:
            site = foreign(headers.raw)
            return _of_another_site(*site) if site else None
        if path in OPEN_ROUTES:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token):
            return None
        found = "another token" if given else "no token"
        limit, remedy = "the token of this server", "send the header `Authorization: Bearer TOKEN`"
        asks = {"www-authenticate": "Bearer"}
        return RequestRefusedError(401, "unauthorized", found, limit, remedy, "authorization", asks)


def refusal_response(path: str, refusal: RequestRefusedError) -> Response:
    """A refusal in words; on OpenAI's routes in its shape."""
    said = refusal.as_openai() if path.startswith("/v1/") else refusal.as_dict()
    return JSONResponse(said, refusal.status, headers=refusal.headers)


def _of_another_site(header: str, value: str) -> RequestRefusedError:
    code, limit, remedy = {
        "host": ("wrong_host", "127.0.0.1 or localhost", "ask by that name; other names need M3DIFF_SERVE_TOKEN"),
        "origin": ("other_site", "this server's own page", "ask from a program, or set M3DIFF_SERVE_TOKEN"),
    }[header]
    return RequestRefusedError(403, code, f"{header} {value[:100]!r}", limit, remedy, header)

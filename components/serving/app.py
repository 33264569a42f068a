"""The routes, as one ASGI application that knows nothing of where the model is; and the page at `/`, one file that asks
nothing of any other machine, with pairs of the test split to try.
"""

import asyncio
import base64
import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from m3diff.records.errors import readable
from m3diff.serving.batcher import Answer, Fault, Metrics, Models, Served
from m3diff.serving.params import Serve
from m3diff.serving.request import (
    AS_FILE,
    SIDES,
    Asked,
    RequestRefusedError,
    Upload,
    check_images,
    check_question,
    read_chat,
    read_form,
    read_json,
    unavailable,
    unprocessable,
)
from m3diff.serving.same_origin import foreign

CHAT = "/v1/chat/completions"
OPEN_ROUTES = ("/healthz", "/readyz")
"""For probes, which have no token; they tell only whether the server is there."""

FORM_FIELDS = 16
FORM_REMEDY = "curl -F before=@a.png -F after=@b.png"
COPIES = 4
"""Copies of a request in memory at most: received, read, on the way to a replica and there."""

EXAMPLES = 6
"""Pairs of the test split on the page."""

FILE = Path(__file__).with_name("page.html")
SAFE = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
}
OTHER_SITE = {
    "host": ("wrong_host", "127.0.0.1 or localhost", "ask by that name; other names need M3DIFF_SERVE_TOKEN"),
    "origin": ("other_site", "this server's own page", "ask from a program, or set M3DIFF_SERVE_TOKEN"),
}
MultiPartParser.spool_max_size = 2**31  # in memory: nothing of a client is written to a disk


def read_page() -> tuple[str, str]:
    """The page and its Content-Security-Policy: this server alone, and no script or style but its own, by hash."""
    html, hashes = FILE.read_text(encoding="utf-8"), []
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        hashes.append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
    policy = (
        f"default-src 'none'; script-src {hashes[0]}; style-src {hashes[1]}; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def find_examples(records: Path, shown: Collection[str]) -> list[dict[str, str]]:
    """Pairs of the test split of the datasets `shown`, of each in turn: id, before, after and a reference.

    Args:
        records: the table that validate writes; without it there are none.

    Raises:
        DataError: the table cannot be read.
    """
    if not records.is_file():
        return []
    rows = pl.scan_parquet(records).filter(pl.col("split") == "test", pl.col("dataset").is_in(shown)).sort("id")
    reference = pl.col("references").list.first().fill_null("").alias("reference")
    in_turn = rows.sort(pl.int_range(pl.len()).over("dataset"), "dataset").head(EXAMPLES)
    with readable(records):
        found = in_turn.select("id", "before", "after", reference).collect().to_dicts()
    return [each for each in found if Path(each["before"]).is_file() and Path(each["after"]).is_file()]


class Server:
    """State that the routes share.

    Args:
        name: of the registered model: what a client may call it in `model`.
        examples: pairs on the page, as of `find_examples`.
    """

    def __init__(
        self, limits: Serve, models: Models, metrics: Metrics, name: str, examples: list[dict[str, str]]
    ) -> None:
        self.limits, self.models, self.metrics, self.name = limits, models, metrics, name
        self.examples = examples
        self.under_way = self.held = 0  # requests, and bytes that are set aside for them
        self.reader = ThreadPoolExecutor(1)  # what a request becomes while it is read is in memory once

    async def readyz(self, request: Request) -> Response:
        return JSONResponse({"status": "ready", "model": self.ready().facts.name})

    async def list_models(self, request: Request) -> Response:
        """The version that answers, which goes by the registered model's name, too."""
        entry = {"id": self.ready().facts.name, "object": "model", "created": 0, "owned_by": self.name}
        return JSONResponse({"object": "list", "data": [entry]})

    async def list_examples(self, request: Request) -> Response:
        """The pairs to try, each image as its route."""
        images = [{side: f"/examples/{at}/{side}" for side in SIDES} for at in range(len(self.examples))]
        return JSONResponse([each | image for each, image in zip(self.examples, images, strict=True)])

    async def example_image(self, request: Request) -> Response:
        at, side = request.path_params["at"], request.path_params["side"]
        if at >= len(self.examples) or side not in SIDES:
            raise HTTPException(404)
        return FileResponse(self.examples[at][side])

    async def measured(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def caption(self, request: Request) -> Response:
        answer = await self.answered(request)
        said: dict[str, Any] = {"caption": answer.caption, "model": answer.model}
        if answer.overlay is not None:
            images = zip(("before", "after"), answer.overlay, strict=True)
            said["overlay"] = {side: base64.b64encode(image).decode() for side, image in images}
        return JSONResponse(said, headers={"X-Model-Version": answer.model})

    async def chat(self, request: Request) -> Response:
        """An answer in OpenAI's form."""
        answer = await self.answered(request)
        served = self.models.current
        cut = served is not None and answer.completion_tokens > served.facts.max_new_tokens
        message = {"role": "assistant", "content": answer.caption, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": "length" if cut else "stop", "logprobs": None}
        counts = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
        completion = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": answer.model,
            "choices": [choice],
            "usage": counts | {"total_tokens": sum(counts.values())},
        }
        return JSONResponse(completion, headers={"X-Model-Version": answer.model})

    async def answered(self, request: Request) -> Answer:
        """Read, check, ask, and wait for the answer; each within its limit.

        Raises:
            RequestRefusedError: 404, 408, 413, 422, 429 or 503.
            ClientDisconnect: nobody waits for the answer any more.
        """
        upload: Any = request.receive  # an Upload: see Gate
        self.ready()
        with self.room(upload):
            asked = await self.read(request, upload.most)
            served = self.ready()
            check_question(asked, self.name, served.facts)
            answer = await self.within(served.ask(asked), upload)
        if isinstance(answer, Fault):
            raise unprocessable("not_an_image", answer.why, "an image that can be decoded to its end", AS_FILE)
        self.metrics.batch.observe(answer.batch)
        return answer

    async def read(self, request: Request, most: int) -> Asked:
        """The request's pair and question, made of its body one request at a time."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        given: Any
        read: Callable[[Any], Asked]
        if kind == "multipart/form-data" and request.url.path != CHAT:
            read, given = read_form, await form_fields(request, most)
        elif kind == "application/json" or request.url.path == CHAT:
            read, given = read_chat if request.url.path == CHAT else read_json, bytearray()
            async for part in request.stream():
                given += part
        else:
            limit = "multipart/form-data or application/json"
            raise unprocessable("wrong_type", f"Content-Type {kind!r}", limit, FORM_REMEDY, "content-type")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.reader, lambda: check_images(read(given), self.limits.max_image_mpx))

    async def within(self, asking: Awaitable[Answer | Fault], upload: Upload) -> Answer | Fault:
        """The answer, unless it takes too long or the client goes; then what is asked is given up."""
        answer, gone = asyncio.ensure_future(asking), asyncio.ensure_future(upload.gone())
        try:
            await asyncio.wait((answer, gone), timeout=self.limits.answer_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if gone.done():
                raise ClientDisconnect
            limit = f"{self.limits.answer_s:g} s for an answer (serve.answer_s)"
            raise unavailable("timed_out", "no answer yet", limit, "try again when the queue is shorter")
        finally:
            answer.cancel()
            gone.cancel()

    def ready(self) -> Served:
        """The model. Raises RequestRefusedError (503) if none is loaded yet."""
        if self.models.current is None:
            raise unavailable("not_ready", "no model yet", "one that is loaded", "ask again when /readyz answers 200")
        return self.models.current

    @contextmanager
    def room(self, upload: Upload) -> Iterator[None]:
        """A place in the queue and memory for COPIES of the body, which is not read yet.

        Raises:
            RequestRefusedError: there is no place (429) or no memory (503).
        """
        most = self.limits.max_queue
        if self.under_way >= most:
            found, limit = f"{self.under_way} requests under way", f"at most {most} at a time (serve.max_queue)"
            raise RequestRefusedError(429, "queue_full", found, limit, "try again later", None, {"retry-after": "1"})
        needed, allowed = COPIES * upload.at_most, max(most, COPIES) * upload.most
        if self.held + needed > allowed:
            found = f"{self.held / 1e6:.0f} MB are taken and {needed / 1e6:.0f} MB needed, {COPIES} times the request"
            limit = f"at most {allowed / 1e6:.0f} MB at a time (serve.max_queue x serve.max_request_mb)"
            raise unavailable("memory_full", found, limit, "try again later, or send smaller images")
        self.under_way += 1
        self.held += needed
        self.metrics.queue.set(self.under_way)
        try:
            yield
        finally:
            self.under_way -= 1
            self.held -= needed
            self.metrics.queue.set(self.under_way)


def make_app(server: Server, token: str | None) -> ASGIApp:
    """The application with its gate; `token` as of Gate."""
    html, policy = read_page()
    gets: dict[str, Any] = {
        "/": Response(html, media_type="text/html", headers={"content-security-policy": policy}),
        "/healthz": JSONResponse({"status": "ok"}),
        "/readyz": server.readyz,
        "/metrics": server.measured,
        "/examples": server.list_examples,
        "/examples/{at:int}/{side}": server.example_image,
        "/v1/models": server.list_models,
    }
    posts = {CHAT: server.chat, "/caption": server.caption}
    routes = [Route(path, handler, methods=["GET"]) for path, handler in gets.items()]
    routes += [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
    errors: tuple[Any, ...] = (RequestRefusedError, HTTPException, ClientDisconnect, Exception)
    inner = Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, respond))
    return Gate(inner, server.limits, token, server.metrics, frozenset(route.path for route in routes))


async def respond(request: Request, error: Exception) -> Response:
    """The answer to a request that ended with this error. Its text may name what is on this machine and stays in the
    log."""
    path = request.url.path
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        found, remedy = f"{request.method} {path[:100]}", "correct method and path"
        limit, status = "the routes of docs/serving.md", error.status_code
        error = RequestRefusedError(status, "no_such_route", found, limit, remedy, None, error.headers)
    elif not isinstance(error, RequestRefusedError):
        remedy = "its log says more; try again"
        error = RequestRefusedError(500, "failed", "an error of the server", "none", remedy)
    return error.response(path)


async def form_fields(request: Request, most: int) -> list[tuple[str, str | bytes]]:
    """The parts of a multipart form, files as bytes. Raises RequestRefusedError (422) if it is none."""
    try:
        async with request.form(max_files=FORM_FIELDS, max_fields=FORM_FIELDS, max_part_size=most) as form:
            return [
                (name, await value.read() if isinstance(value, UploadFile) else value)
                for name, value in form.multi_items()
            ]
    except RequestRefusedError:
        raise
    except (HTTPException, KeyError, ValueError) as error:
        raise unprocessable("not_a_form", str(error)[:100], "a multipart form", FORM_REMEDY) from error


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
        upload = Upload(receive, headers, self.limits)

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(name.encode(), value.encode()) for name, value in SAFE.items()]
                message["headers"] = [*message.get("headers", ()), *added]
                await upload.discard()
            await send(message)

        route = scope["path"] if scope["path"] in self.routes else "other"
        try:
            refusal = self.refusal(scope["path"], headers)
            app = self.app if refusal is None else refusal.response(scope["path"])
            await app(scope, upload, answer)
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

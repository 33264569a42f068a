"""The routes, as one ASGI application that knows nothing of where the model is; and the page at `/`, one file that asks
nothing of any other machine, with pairs of the test split to try.
"""

import asyncio
import base64
import hashlib
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import check_licence
from m3diff.images.open import open_image
from m3diff.records.errors import DataError, readable
from m3diff.serving.batcher import Answer, Fault, Models, Served
from m3diff.serving.http import (
    Body,
    ClientGoneError,
    Gate,
    Metrics,
    RequestRefusedError,
    unavailable,
    unprocessable,
)
from m3diff.serving.params import Serve
from m3diff.serving.request import AS_FILE, Asked, check, check_model, read_chat, read_form, read_json
from m3diff.stages.ingest.params import DatasetEntry

CHAT = "/v1/chat/completions"
FORM_FIELDS = 16
FORM_REMEDY = "curl -F before=@a.png -F after=@b.png"
COPIES = 4
"""Copies of a request in memory at most: received, read, on the way to a replica and there."""
FILE = Path(__file__).with_name("page.html")
EXAMPLES = 6
"""Pairs of the test split on the page."""


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


class Example(NamedTuple):
    id: str
    before: Path
    after: Path
    reference: str

    def as_dict(self, number: int) -> dict[str, Any]:
        """Its entry for the page, without any path of this machine."""
        images = {side: f"/examples/{number}/{side}" for side in ("before", "after")}
        return {"id": self.id, "reference": self.reference, **images}

    def read(self, side: str) -> tuple[bytes, str]:
        """(bytes, media type) of one image."""
        from PIL import Image

        data = (self.before if side == "before" else self.after).read_bytes()
        with open_image(data) as image:
            return data, Image.MIME.get(image.format or "", "application/octet-stream")


def find_examples(clean: Path, entries: Mapping[str, DatasetEntry], count: int = EXAMPLES) -> list[Example]:
    """Pairs of the test split, evenly over each dataset that the licence lets us show; fewer if there are fewer.

    Args:
        clean: the folder that validate writes; it need not be there.
        entries: datasets by name, as `ingest.datasets`.
    """
    table = clean / "records.parquet"
    shown = [name for name, entry in entries.items() if may_show(entry)]
    if not shown or not table.is_file():
        return []
    import polars as pl

    columns = ["id", "dataset", "before", "after", "references"]
    rows = pl.scan_parquet(table).filter(pl.col("split") == "test", pl.col("dataset").is_in(shown)).select(columns)
    found: list[Example] = []
    with readable(table):
        parts = rows.sort("id").collect().partition_by("dataset", maintain_order=True)
    for number, part in enumerate(parts):
        wanted = (count + number) // len(parts)  # the shares of all add up to count
        for place in range(min(wanted, len(part))):
            row = part.row((2 * place + 1) * len(part) // (2 * wanted), named=True)
            example = Example(row["id"], Path(row["before"]), Path(row["after"]), (row["references"] or [""])[0])
            if example.before.is_file() and example.after.is_file():
                found.append(example)
    return found


def may_show(entry: DatasetEntry) -> bool:
    """True if the licence of its dataset lets its images be on a page."""
    if entry.reader not in DATASETS:
        return False
    try:
        check_licence(DATASETS[entry.reader], "show")
    except DataError:
        return False
    return True


class Server:
    """State that the routes share.

    Args:
        name: of the registered model: what a client may call it in `model`.
        examples: pairs on the page.
    """

    def __init__(self, limits: Serve, models: Models, metrics: Metrics, name: str, examples: list[Example]) -> None:
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

    async def measured(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def example_image(self, request: Request) -> Response:
        number, side = request.path_params["number"], request.path_params["side"]
        if number >= len(self.examples) or side not in ("before", "after"):
            raise HTTPException(404)
        data, kind = await asyncio.to_thread(self.examples[number].read, side)
        return Response(data, media_type=kind)

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
            ClientGoneError: nobody waits for the answer any more.
        """
        body: Body = request.scope["body"]
        self.ready()
        with self.room(body):
            asked = await self.read(request, body)
            served = self.ready()
            check_model(asked, self.name, served.facts)
            answer = await self.within(served.ask(asked), body)
        if isinstance(answer, Fault):
            raise unprocessable("not_an_image", answer.why, "an image that can be decoded to its end", AS_FILE)
        self.metrics.batch.observe(answer.batch)
        return answer

    async def read(self, request: Request, body: Body) -> Asked:
        """The request's pair and question, made of its body one request at a time."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        given: Any
        read: Callable[[Any], Asked]
        if request.url.path == CHAT:
            read, given = read_chat, await body.read()
        elif kind == "multipart/form-data":
            read, given = read_form, await form_fields(request, body)
        else:
            read, given = read_json, await body.read()
            if kind != "application/json":
                limit = "multipart/form-data or application/json"
                raise unprocessable("wrong_type", f"Content-Type {kind!r}", limit, FORM_REMEDY, "content-type")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.reader, lambda: check(read(given), self.limits))

    async def within(self, asking: Awaitable[Answer | Fault], body: Body) -> Answer | Fault:
        """The answer, unless it takes too long or the client goes; then what is asked is given up."""
        answer, gone = asyncio.ensure_future(asking), asyncio.ensure_future(body.gone())
        try:
            await asyncio.wait((answer, gone), timeout=self.limits.answer_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if gone.done():
                raise ClientGoneError("the client closed the connection before it had an answer")
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
    def room(self, body: Body) -> Iterator[None]:
        """A place in the queue and memory for COPIES of the body, which is not read yet.

        Raises:
            RequestRefusedError: there is no place (429) or no memory (503).
        """
        most = self.limits.max_queue
        if self.under_way >= most:
            found, limit = f"{self.under_way} requests under way", f"at most {most} at a time (serve.max_queue)"
            raise RequestRefusedError(429, "queue_full", found, limit, "try again later", None, {"retry-after": "1"})
        needed, allowed = COPIES * body.at_most, max(most, COPIES) * body.most
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
    """The application with its gate.

    Args:
        token: that each request needs; None if only this machine can ask.
    """
    html, policy = read_page()
    gets: dict[str, Any] = {
        "/": Response(html, media_type="text/html", headers={"content-security-policy": policy}),
        "/healthz": JSONResponse({"status": "ok"}),
        "/readyz": server.readyz,
        "/metrics": server.measured,
        "/v1/models": server.list_models,
        "/examples": JSONResponse([example.as_dict(number) for number, example in enumerate(server.examples)]),
        "/examples/{number:int}/{side}": server.example_image,
    }
    posts = {CHAT: server.chat, "/caption": server.caption}
    routes = [Route(path, handler, methods=["GET"]) for path, handler in gets.items()]
    routes += [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
    errors: tuple[Any, ...] = (RequestRefusedError, HTTPException, ClientGoneError, Exception)
    inner = Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, respond))
    return Gate(inner, server.limits, token, server.metrics, frozenset(route.path for route in routes))


async def respond(request: Request, error: Exception) -> Response:
    """The answer to a request that ended with this error. Its text may name what is on this machine and stays in the
    log."""
    path = request.url.path
    if isinstance(error, ClientGoneError):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        found, remedy = f"{request.method} {path[:100]}", "correct method and path"
        limit, status = "the routes of docs/serving.md", error.status_code
        error = RequestRefusedError(status, "no_such_route", found, limit, remedy, None, error.headers)
    elif not isinstance(error, RequestRefusedError):
        remedy = "its log says more; try again"
        error = RequestRefusedError(500, "failed", "an error of the server", "none", remedy)
    return error.response(path)


async def form_fields(request: Request, body: Body) -> list[tuple[str, str | bytes]]:
    """The parts of a multipart form, files as bytes. Raises RequestRefusedError (422) if it is none."""
    parser = MultiPartParser(
        request.headers, body.parts(), max_files=FORM_FIELDS, max_fields=FORM_FIELDS, max_part_size=body.most
    )
    parser.spool_max_size = body.most  # in memory: nothing of a client is written to a disk
    try:
        form = await parser.parse()
    except RequestRefusedError:
        raise
    except (MultiPartException, KeyError, ValueError, UnicodeError) as error:
        raise unprocessable("not_a_form", str(error)[:100], "a multipart form", FORM_REMEDY) from error
    pairs = form.multi_items()
    return [(name, await value.read() if isinstance(value, UploadFile) else value) for name, value in pairs]

"""The routes, as one ASGI application. It knows nothing of Ray: a test runs it as it is."""

import asyncio
import base64
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from m3diff.serving.asked import Asked, ChatBody, check_read, check_tokens, of_chat, of_form, of_json
from m3diff.serving.examples import Example
from m3diff.serving.http import Body, ClientGoneError, Gate, refusal_response
from m3diff.serving.metrics import Metrics
from m3diff.serving.models import Models, Served
from m3diff.serving.page import Page
from m3diff.serving.params import Serve
from m3diff.serving.refused import RequestRefusedError, unprocessable
from m3diff.serving.replica import Answer, Undecodable

CHAT = "/v1/chat/completions"
VERSION_HEADER = "X-Model-Version"
FORM_FIELDS = 16
COPIES = 4
"""Of a request that are in memory at most: received, read, on the way to a replica and there."""

Handler = Callable[[Request], Awaitable[Response]]
B = TypeVar("B")
T = TypeVar("T")


class Server:
    """What the routes share.

    Args:
        name: of the registered model: what a client may call it in `model`.
        examples: pairs on the page.
    """

    def __init__(self, limits: Serve, models: Models, metrics: Metrics, name: str, examples: list[Example]) -> None:
        self.limits, self.models, self.metrics, self.name = limits, models, metrics, name
        self.examples, self.page = examples, Page()
        self.under_way = self.held = 0  # requests, and bytes that are set aside for them
        self.reader = ThreadPoolExecutor(1)  # what a request becomes while it is read is in memory once

    async def index(self, request: Request) -> Response:
        return Response(self.page.html, media_type="text/html", headers={"content-security-policy": self.page.policy})

    async def healthz(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        return JSONResponse({"status": "ready", "model": self.ready().facts.name})

    async def list_models(self, request: Request) -> Response:
        """The version that answers; `m3diff` alone is taken for it, too."""
        entry = {"id": self.ready().facts.name, "object": "model", "created": 0, "owned_by": self.name}
        return JSONResponse({"object": "list", "data": [entry]})

    async def measured(self, request: Request) -> Response:
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def list_examples(self, request: Request) -> Response:
        return JSONResponse([example.as_dict(number) for number, example in enumerate(self.examples)])

    async def example_image(self, request: Request) -> Response:
        number, side = request.path_params["number"], request.path_params["side"]
        if number >= len(self.examples) or side not in ("before", "after"):
            raise HTTPException(404)
        data, kind = await asyncio.to_thread(self.examples[number].read, side)
        return Response(data, media_type=kind)

    async def caption(self, request: Request) -> Response:
        async def parse(body: Body) -> Asked:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind == "multipart/form-data":
                return await self.aside(of_form, await form_fields(request, body))
            text = await body.read()
            if kind == "application/json":
                return await self.aside(of_json, text)
            found, limit = f"Content-Type {kind!r}", "multipart/form-data or application/json"
            raise unprocessable("wrong_type", found, limit, "curl -F before=@a.png -F after=@b.png", "content-type")

        answer = await self.answered(request, parse)
        said: dict[str, Any] = {"caption": answer.caption, "model": answer.model}
        if answer.overlay is not None:
            images = zip(("before", "after"), answer.overlay, strict=True)
            said["overlay"] = {side: base64.b64encode(image).decode() for side, image in images}
        return JSONResponse(said, headers={VERSION_HEADER: answer.model})

    async def chat(self, request: Request) -> Response:
        async def parse(body: Body) -> Asked:
            asked, given = await self.aside(of_chat, await body.read())
            check_model(given, self.ready(), self.name)
            return asked

        answer = await self.answered(request, parse)
        served = self.models.current
        cut = served is not None and answer.completion_tokens > served.facts.max_new_tokens
        return JSONResponse(completion(answer, cut), headers={VERSION_HEADER: answer.model})

    async def aside(self, read: Callable[[B, Serve], T], body: B) -> T:
        """What is made of a request's body, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self.reader, read, body, self.limits)

    async def answered(self, request: Request, parse: Callable[[Body], Awaitable[Asked]]) -> Answer:
        """Read, check, ask, and wait for the answer; each within its limit.

        Raises:
            RequestRefusedError: 408, 413, 422, 429 or 503.
            ClientGoneError: nobody waits for the answer any more.
        """
        body: Body = request.scope["body"]
        self.ready()
        with self.room(body):
            asked = await parse(body)
            facts = self.ready().facts
            check_read(asked.question, facts.reads_question)
            check_tokens(asked.question, facts.special_tokens)
            answer = await self.within(self.ready().ask(asked), body)
        if isinstance(answer, Undecodable):
            remedy = "save it as PNG or JPEG and send that file's bytes"
            raise unprocessable("not_an_image", answer.why, "an image that can be decoded to its end", remedy)
        self.metrics.batch.observe(answer.batch)
        return answer

    async def within(self, asking: Awaitable[Answer | Undecodable], body: Body) -> Answer | Undecodable:
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
        """The model. Raises RequestRefusedError (503) where none is loaded yet."""
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

    def routes(self) -> list[Route]:
        get, post = ["GET"], ["POST"]
        return [
            Route("/", self.index, methods=get),
            Route("/healthz", self.healthz, methods=get),
            Route("/readyz", self.readyz, methods=get),
            Route("/metrics", self.measured, methods=get),
            Route("/v1/models", self.list_models, methods=get),
            Route(CHAT, self.chat, methods=post),
            Route("/caption", self.caption, methods=post),
            Route("/examples", self.list_examples, methods=get),
            Route("/examples/{number:int}/{side}", self.example_image, methods=get),
        ]


def make_app(server: Server, token: str | None) -> ASGIApp:
    """The application with its gate.

    Args:
        token: that each request needs; None where only this machine can ask.
    """
    handlers: dict[Any, Any] = {RequestRefusedError: refused, HTTPException: no_route}
    handlers |= {ClientGoneError: nobody, Exception: failed}
    routes = server.routes()
    inner = Starlette(routes=routes, exception_handlers=handlers)
    return Gate(inner, server.limits, token, server.metrics, frozenset(route.path for route in routes))


def check_model(given: ChatBody, served: Served, name: str) -> None:
    """Raises RequestRefusedError: 404, another model is asked for; 422, an answer shorter than this one gives."""
    facts = served.facts
    if given.model not in (name, facts.name):
        limit = f"{name}, or the version that answers: {facts.name}"
        raise RequestRefusedError(404, "model_not_found", repr(given.model[:100]), limit, f"ask for {name}", "model")
    if given.most_tokens is not None and given.most_tokens < facts.max_new_tokens:
        limit = f"{facts.max_new_tokens} or more, the most that {facts.name} says"
        raise unprocessable("invalid_field", str(given.most_tokens), limit, "raise it or leave it out", "max_tokens")


def completion(answer: Answer, cut: bool) -> dict[str, Any]:
    """An answer in OpenAI's form."""
    message = {"role": "assistant", "content": answer.caption, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": "length" if cut else "stop", "logprobs": None}
    counts = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": answer.model,
        "choices": [choice],
        "usage": counts | {"total_tokens": sum(counts.values())},
    }


async def form_fields(request: Request, body: Body) -> list[tuple[str, str | bytes]]:
    """The parts of a multipart form, files as bytes. Raises RequestRefusedError (422) where it is none."""
    parser = MultiPartParser(
        request.headers, body.parts(), max_files=FORM_FIELDS, max_fields=FORM_FIELDS, max_part_size=body.most
    )
    parser.spool_max_size = body.most  # in memory: nothing of a client is written to a disk
    try:
        form = await parser.parse()
    except RequestRefusedError:
        raise
    except (MultiPartException, KeyError, ValueError, UnicodeError) as error:
        limit, remedy = "a multipart form", "curl -F before=@a.png -F after=@b.png"
        raise unprocessable("not_a_form", str(error)[:100], limit, remedy) from error
    pairs = form.multi_items()
    return [(name, await value.read() if isinstance(value, UploadFile) else value) for name, value in pairs]


def unavailable(code: str, found: str, limit: str, remedy: str) -> RequestRefusedError:
    return RequestRefusedError(503, code, found, limit, remedy, None, {"retry-after": "5"})


async def refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefusedError)
    return refusal_response(request.url.path, error)


async def no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    found = f"{request.method} {request.url.path[:100]}"
    refusal = RequestRefusedError(
        error.status_code, "no_such_route", found, "the routes of docs/serving.md", "correct method and path"
    )
    refusal.headers = dict(error.headers or {})
    return await refused(request, refusal)


async def nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def failed(request: Request, error: Exception) -> Response:
    """Whatever the model fails of; the text of the error may name what is on this machine, and stays in the log."""
    refusal = RequestRefusedError(500, "failed", "an error of the server", "none", "its log says more; try again")
    return await refused(request, refusal)

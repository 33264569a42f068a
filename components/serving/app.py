"""Define the server's routes as an ASGI application. It works the same whether the model runs here or on a cluster."""

import asyncio
import base64
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from m3diff.datasets.tables import SIDES
from m3diff.models.sample_limits import answerable_images
from m3diff.serving.authentication import access_refusal
from m3diff.serving.batcher import AnswerRequest, Models, ServedAnswer, ServedModel, UnusableImage
from m3diff.serving.bodies import FORM_REMEDY, read_chat, read_form, read_form_fields, read_json
from m3diff.serving.checks import SAVE_AS_FILE, check_images, check_model, check_request
from m3diff.serving.limits import Capacity, Upload
from m3diff.serving.model_card import Example
from m3diff.serving.page import read_page
from m3diff.serving.params import Serve
from m3diff.serving.questions import note_about_sample
from m3diff.serving.refusals import CLIENT_CLOSED_REQUEST, RequestRefusedError, respond, unprocessable

CHAT = "/v1/chat/completions"

# Headers that are added to every response, so that browsers neither cache it nor let pages of other sites embed it
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Server:
    """ASGI application that checks access, answers requests, counts them, and adds SECURITY_HEADERS.

    Args:
        settings: the section `serve` of the parameters.
        name: name of the registered model, which clients may use in the field `model`.
        token: the token that clients must send, or None to answer only this machine. See `access_refusal`.
    """

    def __init__(self, settings: Serve, models: Models, name: str, token: str | None) -> None:
        self.settings = settings
        self.models = models
        self.name = name
        self.token = token
        self.metrics = models.metrics
        self.capacity = Capacity(settings, models.metrics)
        # A single thread, so that only one request at a time needs extra memory for parsing
        self.parser = ThreadPoolExecutor(1)
        self.routes = self.create_routes()
        error_types: tuple[Any, ...] = (RequestRefusedError, HTTPException, ClientDisconnect, Exception)
        self.app = Starlette(routes=self.routes, exception_handlers=dict.fromkeys(error_types, respond))

    def create_routes(self) -> list[Route]:
        """Return all routes of the server. A constant response is its own handler."""
        html, policy = read_page()
        page = Response(html, media_type="text/html", headers={"content-security-policy": policy})
        handlers: dict[tuple[str, str], Any] = {
            ("GET", "/"): page,
            ("GET", "/healthz"): JSONResponse({"status": "ok"}),
            ("GET", "/readyz"): self.report_ready,
            ("GET", "/metrics"): self.export_metrics,
            ("GET", "/examples"): self.list_examples,
            ("GET", "/examples/{key}/{side}"): self.send_example_image,
            ("GET", "/model"): self.describe_model_card,
            ("GET", "/v1/models"): self.list_models,
            ("GET", "/v1/models/{name:path}"): self.describe_model,
            ("POST", CHAT): self.complete_chat,
            ("POST", "/caption"): self.answer_caption,
        }
        return [Route(path, handler, methods=[method]) for (method, path), handler in handlers.items()]

    def route_label(self, scope: Scope) -> str:
        """Return the route of a request for the metrics, such as `/examples/{key}/{side}`, or `other` if none matches.

        A request with a wrong method counts for its route. The label is the route's path and not the request's, so that
        clients cannot create any number of time series.
        """
        for route in self.routes:
            match, _ = route.matches(scope)
            if match is not Match.NONE:
                return route.path_format
        return "other"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        assert scope["type"] == "http", "the server takes neither WebSockets nor lifespans"
        start = time.monotonic()
        status = CLIENT_CLOSED_REQUEST  # replaced when a response starts
        path = scope["path"]
        headers = Headers(scope=scope)
        upload = Upload(receive, headers, self.settings)

        async def send_message(message: Message) -> None:
            """Send a message of the response. Before the first one, add SECURITY_HEADERS and discard the upload."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
                await upload.discard()
            await send(message)

        route = self.route_label(scope)
        try:
            refusal = access_refusal(path, headers, self.token)
            app = self.app if refusal is None else refusal.response(path)
            await app(scope, upload, send_message)
        finally:
            self.metrics.requests.labels(route, status).inc()
            self.metrics.seconds.labels(route).observe(time.monotonic() - start)

    # Routes about the server and its model

    async def report_ready(self, request: Request) -> Response:
        """Handle `GET /readyz`: answer 200 once a model is loaded, otherwise 503."""
        return JSONResponse({"status": "ready", "model": self.require_model().facts.name})

    async def export_metrics(self, request: Request) -> Response:
        """Handle `GET /metrics`: return the metrics in Prometheus's format."""
        return Response(generate_latest(self.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def list_models(self, request: Request) -> Response:
        """Handle `GET /v1/models`: list the current version. Requests may also use the registered model's name."""
        entry = self.model_entry(self.require_model().facts.name)
        return JSONResponse({"object": "list", "data": [entry]})

    async def describe_model(self, request: Request) -> Response:
        """Handle `GET /v1/models/NAME`: describe the current model.

        NAME is the current version or the name of the registered model. It may contain slashes.

        Raises:
            RequestRefusedError: no model has this name (HTTP 404), or no model is loaded yet (HTTP 503).
        """
        name = request.path_params["name"]
        if not name:
            return await self.list_models(request)
        version = self.require_model().facts.name
        check_model(name, self.name, version)
        return JSONResponse(self.model_entry(name), headers={"X-Model-Version": version})

    def model_entry(self, name: str) -> dict[str, Any]:
        """Return the entry for a model in OpenAI's list of models."""
        return {"id": name, "object": "model", "created": 0, "owned_by": self.name}

    async def describe_model_card(self, request: Request) -> Response:
        """Handle `GET /model`: return the current model's card, its default question, and what it can be asked.

        `images` lists the numbers of images that it answers about. `turns` is the number of turns of the longest
        dialogue that it was trained on, or 1 if it does not read earlier turns. `outlines` says whether an answer about
        a pair can have an overlay.
        """
        model = self.require_model()
        card = await model.card
        facts = model.facts
        abilities = {
            "reads_question": facts.takes.questions,
            "question": facts.question,
            "images": answerable_images(facts.takes, facts.trained_on),
            "turns": facts.trained_on.turns if facts.takes.turns else 1,
            "outlines": facts.has_maps,
        }
        return JSONResponse(card.as_dict() | abilities)

    async def examples_by_key(self) -> dict[str, Example]:
        """Return the example pairs of the current model by their keys. Without a model, there are no examples."""
        if self.models.current is None:
            return {}
        card = await self.models.current.card
        return {example.key: example for example in card.examples}

    async def list_examples(self, request: Request) -> Response:
        """Handle `GET /examples`: list the example pairs with the routes of their images."""
        pairs = []
        for key, example in (await self.examples_by_key()).items():
            image_routes = {side: f"/examples/{key}/{side}" for side in SIDES}
            pairs.append({"id": example.id, "reference": example.reference} | image_routes)
        return JSONResponse(pairs)

    async def send_example_image(self, request: Request) -> Response:
        """Handle `GET /examples/KEY/SIDE`: return an image of an example pair."""
        examples = await self.examples_by_key()
        example = examples.get(request.path_params["key"])
        side = request.path_params["side"]
        if example is None or side not in SIDES:
            raise HTTPException(404)
        return FileResponse(getattr(example, side))

    # Routes for answers

    async def answer_caption(self, request: Request) -> Response:
        """Handle `POST /caption`: return the answer and, if requested for a pair, the overlays."""
        answer, note = await self.answer_request(request)
        body: dict[str, Any] = {"caption": answer.text, "model": answer.model}
        if note is not None:
            body["note"] = note
        if answer.overlay is not None:
            images = zip(SIDES, answer.overlay, strict=True)
            body["overlay"] = {side: base64.b64encode(image).decode() for side, image in images}
        return JSONResponse(body, headers={"X-Model-Version": answer.model})

    async def complete_chat(self, request: Request) -> Response:
        """Handle `POST /v1/chat/completions`: return the answer in OpenAI's format."""
        answer, note = await self.answer_request(request)
        model = self.models.current
        is_truncated = model is not None and answer.completion_tokens > model.facts.max_new_tokens
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "finish_reason": "length" if is_truncated else "stop",
            "logprobs": None,
        }
        usage = {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }
        completion = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": answer.model,
            "choices": [choice],
            "usage": usage,
        }
        if note is not None:
            completion["note"] = note
        return JSONResponse(completion, headers={"X-Model-Version": answer.model})

    async def answer_request(self, request: Request) -> tuple[ServedAnswer, str | None]:
        """Read and check a request and let the model answer it.

        Returns:
            The answer, and the note about the question and its history. The note is None if there is nothing to note.

        Raises:
            RequestRefusedError: the request is refused (HTTP 404, 408, 413, 422, 429 or 503).
            ClientDisconnect: the client disconnected before the request was complete.
        """
        upload: Any = request.receive  # an Upload: see `__call__`
        self.require_model()
        with self.capacity.reserve(upload):
            answer_request = await self.read_request(request, upload.max_bytes)
            model = self.require_model()  # the model may have been replaced in the meantime
            facts = model.facts
            check_request(answer_request, self.name, facts)
            answer = await self.wait_for_answer(model.ask(answer_request))
        if isinstance(answer, UnusableImage) and answer.remedy is not None:
            raise unprocessable(
                code="unusable_image",
                finding=answer.reason,
                limit="images that the model's processor can resize",
                remedy=answer.remedy,
            )
        if isinstance(answer, UnusableImage):
            raise unprocessable(
                code="not_an_image",
                finding=answer.reason,
                limit="an image that can be decoded to its end",
                remedy=SAVE_AS_FILE,
            )
        self.metrics.batch.observe(answer.batch_requests)
        turns = 1 + len(answer_request.history)
        return answer, note_about_sample(facts.takes, facts.trained_on, answer_request.question, turns)

    async def read_request(self, request: Request, max_bytes: int) -> AnswerRequest:
        """Parse the body of a request and check its images. Bodies are parsed one at a time.

        Raises:
            RequestRefusedError: the body is invalid (HTTP 422), too large (413) or too slow (408).
        """
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_chat = request.url.path == CHAT
        body: Any
        parse_body: Callable[[Any], AnswerRequest]
        if content_type == "multipart/form-data" and not is_chat:
            parse_body = read_form
            body = await read_form_fields(request, max_bytes)
        elif content_type == "application/json" or is_chat:
            parse_body = read_chat if is_chat else read_json
            body = bytearray()
            async for part in request.stream():
                body += part
        else:
            raise unprocessable(
                code="wrong_type",
                finding=f"Content-Type {content_type!r}",
                limit="multipart/form-data or application/json",
                remedy=FORM_REMEDY,
                field="content-type",
            )

        def parse_and_check() -> AnswerRequest:
            return check_images(parse_body(body), self.settings.max_image_mpx)

        return await asyncio.get_running_loop().run_in_executor(self.parser, parse_and_check)

    async def wait_for_answer(self, answer: Awaitable[ServedAnswer | UnusableImage]) -> ServedAnswer | UnusableImage:
        """Wait for the model's answer and return it. If it takes too long, cancel the request.

        Raises:
            RequestRefusedError: the model did not answer in time (HTTP 503).
        """
        try:
            async with asyncio.timeout(self.settings.answer_s):
                return await answer
        except TimeoutError as error:
            raise RequestRefusedError(
                status=503,
                code="timed_out",
                finding="no answer yet",
                limit=f"{self.settings.answer_s:g} s for an answer (serve.answer_s)",
                remedy="try again when the queue is shorter",
            ) from error

    def require_model(self) -> ServedModel:
        """Return the current model.

        Raises:
            RequestRefusedError: no model is loaded yet (HTTP 503).
        """
        if self.models.current is None:
            raise RequestRefusedError(
                status=503,
                code="not_ready",
                finding="the model is still loading",
                limit="requests are answered after it is loaded",
                remedy="wait until GET /readyz answers 200; ask again after the seconds in Retry-After",
            )
        return self.models.current

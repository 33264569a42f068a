"""The routes, as one ASGI application that knows nothing of where the model is: bodies read within limits of bytes and
time, a form, JSON or a chat as two images and a question, refusals; and the page at `/`, one file that asks nothing of
any other machine, with pairs of the test split to try.

Images come as bytes and never as paths or addresses: the server fetches and opens nothing that a client names.
"""

import asyncio
import base64
import hashlib
import hmac
import re
import time
import unicodedata
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import polars as pl
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from m3diff.images.open import FORMATS, NO_IMAGE, open_image, too_large
from m3diff.records.errors import readable
from m3diff.serving.batcher import Answer, Asked, Facts, Fault, Models, Served
from m3diff.serving.caption import SIDES
from m3diff.serving.params import Serve
from m3diff.serving.same_origin import foreign

CHAT = "/v1/chat/completions"
OPEN_ROUTES = ("/healthz", "/readyz")  # for probes, which have no token; they tell only whether the server is there

FORM_FIELDS = 16
FORM_REMEDY = "curl -F before=@a.png -F after=@b.png"
COPIES = 4  # copies of a request in memory at most: received, read, on the way to a replica and there

EXAMPLES = 6  # pairs of the test split on the page

FILE = Path(__file__).with_name("page.html")
SAFE = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
OTHER_SITE = {
    "host": ("wrong_host", "127.0.0.1 or localhost", "ask by that name; other names need M3DIFF_SERVE_TOKEN"),
    "origin": ("other_site", "this server's own page", "ask from a program, or set M3DIFF_SERVE_TOKEN"),
}
MultiPartParser.spool_max_size = 2**31  # in memory: nothing of a client is written to a disk

DATA_URL = re.compile(rb"data:image/[\w.+-]+;base64,")
WHITESPACE = b" \t\n\r\v\f"
SHOWN_CHARS, MAX_QUESTION_CHARS = 60, 500
# In the JSON of a request: millions of empty lists, or a fault in each, would take a hundred times its bytes
MOST_VALUES = 10_000

UPLOAD_S = 20  # seconds for a client to send its request; the answer after them is 408

# Bytes of a refused body that are read, so that a client that is still sending reads the answer
DISCARDED_BYTES = 64_000_000

ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}  # OpenAI's, of statuses that have one of their own

HEADERS = {  # of a refusal, by its status
    401: {"www-authenticate": "Bearer"},
    408: {"connection": "close"},
    429: {"retry-after": "1"},
    503: {"retry-after": "5"},
}

AS_FILE = "save it as PNG or JPEG and send that file's bytes"
ERROR_CODES = {"json_invalid": "not_json", "extra_forbidden": "unknown_field", "missing": "missing_field"}


class RequestRefusedError(Exception):
    """A request that gets no caption.

    Args:
        status: of HTTP.
        code: a word for machines.
        found: what the request is or has.
        limit: what is allowed instead.
        remedy: what to do.
        field: of the request, if one is meant.
    """

    def __init__(self, status: int, code: str, found: str, limit: str, remedy: str, field: str | None = None) -> None:
        super().__init__(f"{field + ': ' if field else ''}{found}; {limit}; {remedy}")
        self.status, self.field = status, field
        self.headers: Mapping[str, str] = HEADERS.get(status, {})
        self.body = {"error": code, "field": field, "found": found, "limit": limit, "remedy": remedy}

    def response(self, path: str) -> Response:
        """The answer, on OpenAI's routes in the shape that its clients read."""
        content: dict[str, Any] = self.body
        if path.startswith("/v1/"):
            kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
            content = {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.body["error"]}}
        return JSONResponse(content, self.status, headers=self.headers)


def unprocessable(code: str, found: str, limit: str, remedy: str, field: str | None = None) -> RequestRefusedError:
    return RequestRefusedError(422, code, found, limit, remedy, field)


class Upload:
    """The messages of one request, within limits of bytes and time; the clock starts with the object.

    Attributes:
        most: bytes that are read of any request.
        at_most: bytes that are read of this one: as many as it announces, or the limit.
    """

    def __init__(self, receive: Receive, headers: Headers, limits: Serve) -> None:
        self.receive, self.limits = receive, limits
        self.most = int(limits.max_request_mb * 1e6)
        self.deadline = time.monotonic() + UPLOAD_S
        length, chunked = headers.get("content-length", "0"), "transfer-encoding" in headers
        announced = int(length) if length.isdecimal() else 0
        self.at_most = self.most if chunked else min(announced, self.most)
        self.size = announced if announced > self.most else 0
        self.ended = not announced and not chunked

    async def __call__(self) -> Message:
        """The next message.

        Raises:
            RequestRefusedError: 413, the body is or says that it is too large; 408, it takes too long.
        """
        message: Message = {} if self.size > self.most else await self._next()
        if self.size > self.most:
            limit = f"at most {self.limits.max_request_mb:g} MB a request (serve.max_request_mb)"
            remedy = "send smaller images, or JPEG and WebP instead of PNG; base64 takes a third more than a form"
            raise RequestRefusedError(413, "too_large", f"{self.size / 1e6:.1f} MB or more", limit, remedy)
        return message

    async def discard(self) -> None:
        """Read what is left, within the time, and keep nothing."""
        end = self.size + DISCARDED_BYTES
        with suppress(RequestRefusedError):
            while not self.ended and self.size < end:
                await self._next()

    async def _next(self) -> Message:
        if self.ended:
            return await self.receive()
        try:
            async with asyncio.timeout(self.deadline - time.monotonic()):
                message = await self.receive()
        except TimeoutError as error:
            limit, remedy = f"{UPLOAD_S:g} s to send a request", "send it faster, or smaller images"
            raise RequestRefusedError(408, "slow_client", "the rest is missing", limit, remedy) from error
        self.ended = not message.get("more_body", False)
        self.size += len(message.get("body", b""))
        return message


class PairBody(BaseModel):
    """`POST /caption`: a form with two files, or JSON with both in base64."""

    model_config = ConfigDict(extra="forbid")

    before: bytes
    after: bytes
    question: str | None = None
    overlay: bool = False


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ImageUrl(BaseModel):
    url: bytes


class ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: ImageUrl


class UserMessage(BaseModel):
    role: Literal["user"]
    content: list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]


class HarmlessValues(NamedTuple):
    """The values of a request option that leave the caption as it is, and their description for a refusal."""

    described: str
    include: Callable[[Any], bool]


def _is_text_format(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


def _is_without_marks(value: Any) -> bool:
    return not value or (isinstance(value, list) and not any(value))


def _leaves_tools_to_model(value: Any) -> bool:
    return value is None or value in ("none", "auto")


def _is_text_alone(value: Any) -> bool:
    return not value or value == ["text"]


def _is_empty(value: Any) -> bool:
    return not value


def _is_null(value: Any) -> bool:
    return value is None


EMPTY = HarmlessValues("null, false, 0 or empty", _is_empty)
NULL = HarmlessValues("null or left out", _is_null)
# Options that ask for another form or meaning than a caption in plain text: a client that got a caption nevertheless
# would parse it as JSON, miss the probabilities, or read past its own stop mark
CHAT_OPTIONS: Mapping[str, HarmlessValues] = {
    "response_format": HarmlessValues('null or {"type": "text"}', _is_text_format),
    "tool_choice": HarmlessValues('null, "none" or "auto"', _leaves_tools_to_model),
    "function_call": HarmlessValues('null, "none" or "auto"', _leaves_tools_to_model),
    "modalities": HarmlessValues('null or ["text"]', _is_text_alone),
    "stop": HarmlessValues("null or empty", _is_without_marks),
    **dict.fromkeys(("audio", "web_search_options", "prompt_logprobs"), NULL),
    **dict.fromkeys(("logprobs", "top_logprobs", "logit_bias", "tools", "functions"), EMPTY),
    # Of vLLM, SGLang and llama.cpp
    **dict.fromkeys(
        (
            "allowed_token_ids",
            "bad_words",
            "continue_final_message",
            "custom_logit_processor",
            "documents",
            "ebnf",
            "echo",
            "grammar",
            "guided_choice",
            "guided_grammar",
            "guided_json",
            "guided_regex",
            "json_schema",
            "logits_processors",
            "lora_path",
            "n_probs",
            "regex",
            "return_token_ids",
            "stop_regex",
            "stop_token_ids",
            "structural_tag",
            "structured_outputs",
        ),
        EMPTY,
    ),
}


class ChatBody(BaseModel):
    """JSON of `POST /v1/chat/completions`: one message of the user, since the model was trained on a pair and a
    question. Fields that say how an answer is sampled or how long it may be, such as `temperature`, are passed over:
    the answer is the model's one greedy caption. CHAT_OPTIONS are refused unless their value is harmless."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: list[UserMessage]
    n: Literal[1] | None = None
    stream: Literal[False] | None = None


B = TypeVar("B", bound=BaseModel)


def read_json(body: bytearray) -> Asked:
    """The pair of `{"before": base64, "after": base64, "question": ..., "overlay": ...}`."""
    given = _parsed(PairBody, body)
    before, after = (_from_base64(side, getattr(given, side)) for side in SIDES)
    return Asked(before, after, given.question, given.overlay)


def read_form(fields: Iterable[tuple[str, str | bytes]]) -> Asked:
    """The pair of a multipart form: files `before` and `after`; texts `question` and `overlay`."""
    return Asked(**dict(_validated(PairBody.model_validate, dict(fields))))


def read_chat(body: bytearray) -> Asked:
    """The pair of a chat of OpenAI's form: one message of the user with at most one text and two images."""
    given = _parsed(ChatBody, body)
    check_chat_options(given.model_extra or {})
    parts, where = [part for message in given.messages for part in message.content], "messages.0.content"
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    urls = [part.image_url.url for part in parts if isinstance(part, ImagePart)]
    if len(given.messages) != 1 or len(urls) != 2 or len(texts) > 1:
        found = f"{len(given.messages)} message(s), {len(urls)} image(s), {len(texts)} text(s)"
        limit = "one message with exactly 2 images and at most one text"
        remedy = "send the image before, then the image after, as two parts `image_url`"
        raise unprocessable("wrong_parts", found, limit, remedy, "messages")
    before, after = (_from_base64(f"{where}: {side}", url) for side, url in zip(SIDES, urls, strict=True))
    return Asked(before, after, texts[0] if texts else None, model=given.model)


def check_chat_options(options: Mapping[str, Any]) -> None:
    """Raise RequestRefusedError (422) for the first option that asks for more than a caption in plain text."""
    for name, value in options.items():
        harmless = CHAT_OPTIONS.get(name)
        if harmless is not None and not harmless.include(value):
            limit = f"{harmless.described}: the answer is one caption in plain text"
            raise unprocessable("invalid_field", _short(value), limit, "see docs/serving.md, or leave it out", name)


def check_images(asked: Asked, max_mpx: float) -> Asked:
    """The request itself, if its images are by their headers images of at most so many million pixels as a square; none
    is decoded.

    Raises:
        RequestRefusedError: 422.
    """
    for side in SIDES:
        data: bytes = getattr(asked, side)
        try:
            with open_image(data) as image:
                large = too_large(image, max_mpx * 1e6)
        except Exception as error:  # a decoder stumbles over hostile bytes in any way
            # the answer names its own remedy: the file's, such as to fetch it again, is left out
            why = "is of no known image format" if str(error) == NO_IMAGE else _short(error).partition("; ")[0]
            limit = f"an image ({', '.join(FORMATS)})"
            raise unprocessable("not_an_image", f"{len(data)} bytes, {why}", limit, AS_FILE, side) from error
        if large:
            limit = f"at most {max_mpx:g} million pixels, padded to a square (serve.max_image_mpx)"
            raise unprocessable("too_many_pixels", large.partition(", more than")[0], limit, "make it smaller", side)
    return asked


def check_model(asked: str, name: str, version: str) -> None:
    """Raise RequestRefusedError (404) unless the registered model or the version that answers is asked for."""
    if asked not in (name, version):
        limit = f"{name}, or the version that answers: {version}"
        raise RequestRefusedError(404, "model_not_found", repr(asked[:100]), limit, f"ask for {name}", "model")


def check_question(asked: Asked, name: str, facts: Facts) -> None:
    """See that this model can answer what is asked. A question is data: what the tokenizer takes for a mark of the
    prompt, such as another image's place, is refused, since the model would not read it as text; nothing is changed in
    what a user asks.

    Args:
        name: of the registered model, which a client may use instead of a version's.

    Raises:
        RequestRefusedError: 404, another model is asked for; 422, a question of a model that reads none, or one that is
            empty, too long or holds a mark of the prompt.
    """
    if asked.model is not None:
        check_model(asked.model, name, facts.name)
    if asked.question is None:
        return
    spelled = unicodedata.normalize("NFC", asked.question)  # as tokenizers do
    marks = [token for token in facts.special_tokens if token in spelled]
    found, remedy = f"{len(asked.question)} characters", "ask in other words, or leave it out"
    if not facts.reads_question:
        code, limit = "question_not_read", "none: this model says of every pair what changed"
    elif not asked.question.strip():
        code, limit = "empty_question", "a question"
    elif len(asked.question) > MAX_QUESTION_CHARS:
        code, limit = "question_too_long", f"at most {MAX_QUESTION_CHARS} characters"
    elif marks:
        code, found, limit = "special_token", repr(marks[0]), "plain text: this is a mark of the model's prompt"
    else:
        return
    raise unprocessable(code, found, limit, remedy, "question")


def _parsed(kind: type[B], body: bytearray) -> B:
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > MOST_VALUES:
        limit, remedy = f"at most {MOST_VALUES:,} values", "send the two images and the question alone"
        raise unprocessable("not_json", "no JSON of a caption's request: too many values", limit, remedy)
    return _validated(kind.model_validate_json, body)


def _validated(read: Callable[[Any], B], given: Any) -> B:
    try:
        return read(given)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(_short(part) for part in fault["loc"]) or None
        code, found = ERROR_CODES.get(fault["type"], "invalid_field"), fault["input"]
        shown = found[:SHOWN_CHARS] if isinstance(found, str | bytes | bytearray) else found
        found = "nothing" if code == "missing_field" else _short(shown)
        raise unprocessable(code, found, fault["msg"], "see docs/serving.md, or leave it out", where) from error


def _from_base64(field: str, text: bytes) -> bytes:
    start = match.end() if (match := DATA_URL.match(text)) else 0
    try:
        return base64.b64decode(text[start:].translate(None, WHITESPACE), validate=True)  # `split` makes many objects
    except ValueError as error:
        found = f"{text[:SHOWN_CHARS].decode(errors='replace')} ({error})"
        limit = "an image's bytes in base64, in a chat as a data URL; no address is fetched"
        raise unprocessable("not_base64", found, limit, "encode the file's bytes: base64 FILE", field) from error


def _short(text: object) -> str:
    shown = str(text)
    return shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}..."


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
    """The application: lets in who may ask, answers, counts every answer, and adds the headers that all answers have.

    Args:
        name: of the registered model: what a client may call it in `model`.
        token: that each request needs but for OPEN_ROUTES; None: no token, and then only what addresses this machine
            as itself and comes from no other site's page is let in (a page may call itself by a name that leads here).
        examples: pairs on the page, as of `find_examples`.
    """

    def __init__(
        self, limits: Serve, models: Models, name: str, token: str | None, examples: list[dict[str, str]]
    ) -> None:
        self.limits, self.models, self.name, self.token = limits, models, name, token
        self.metrics, self.examples = models.metrics, examples
        self.under_way = self.held = 0  # requests, and bytes that are set aside for them
        self.reader = ThreadPoolExecutor(1)  # what a request becomes while it is read is in memory once
        html, policy = read_page()
        gets: dict[str, Any] = {
            "/": Response(html, media_type="text/html", headers={"content-security-policy": policy}),
            "/healthz": JSONResponse({"status": "ok"}),
            "/readyz": self.readyz,
            "/metrics": self.measured,
            "/examples": self.list_examples,
            "/examples/{at:int}/{side}": self.example_image,
            "/v1/models": self.list_models,
            "/v1/models/{name:path}": self.describe_model,
        }
        posts = {CHAT: self.chat, "/caption": self.caption}
        self.paths = frozenset((*gets, *posts))
        routes = [Route(path, handler, methods=["GET"]) for path, handler in gets.items()]
        routes += [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
        errors: tuple[Any, ...] = (RequestRefusedError, HTTPException, ClientDisconnect, Exception)
        self.app = Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, respond))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server takes neither WebSockets nor lifespans"
        start, status = time.monotonic(), 499  # nginx' word for a client that left
        headers = Headers(scope=scope)
        upload = Upload(receive, headers, self.limits)

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *SAFE]
                await upload.discard()
            await send(message)

        route = scope["path"] if scope["path"] in self.paths else "other"
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
        remedy = "send the header `Authorization: Bearer TOKEN`"
        return RequestRefusedError(401, "unauthorized", found, limit, remedy, "authorization")

    async def readyz(self, request: Request) -> Response:
        return JSONResponse({"status": "ready", "model": self.ready().facts.name})

    async def list_models(self, request: Request) -> Response:
        """The version that answers, which goes by the registered model's name, too."""
        return JSONResponse({"object": "list", "data": [self.model_entry(self.ready().facts.name)]})

    async def describe_model(self, request: Request) -> Response:
        """The entry of a model, by the version's name or the registered model's, which contain slashes.

        Raises:
            RequestRefusedError: 404, another model is asked for; 503, no model is loaded yet.
        """
        name = request.path_params["name"]
        if not name:
            return await self.list_models(request)
        version = self.ready().facts.name
        check_model(name, self.name, version)
        return JSONResponse(self.model_entry(name), headers={"X-Model-Version": version})

    def model_entry(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": self.name}

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
            images = zip(SIDES, answer.overlay, strict=True)
            said["overlay"] = {side: base64.b64encode(image).decode() for side, image in images}
        return JSONResponse(said, headers={"X-Model-Version": answer.model})

    async def chat(self, request: Request) -> Response:
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
            ClientDisconnect: the client left before its request was whole.
        """
        upload: Any = request.receive  # an Upload: see `__call__`
        self.ready()
        with self.room(upload):
            asked = await self.read(request, upload.most)
            served = self.ready()
            check_question(asked, self.name, served.facts)
            answer = await self.within(served.ask(asked))
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

    async def within(self, asking: Awaitable[Answer | Fault]) -> Answer | Fault:
        """The answer, unless it takes too long; then what is asked is given up."""
        try:
            async with asyncio.timeout(self.limits.answer_s):
                return await asking
        except TimeoutError as error:
            limit = f"{self.limits.answer_s:g} s for an answer (serve.answer_s)"
            remedy = "try again when the queue is shorter"
            raise RequestRefusedError(503, "timed_out", "no answer yet", limit, remedy) from error

    def ready(self) -> Served:
        """The model. Raises RequestRefusedError (503) if none is loaded yet."""
        if self.models.current is None:
            limit, remedy = "a loaded model", "ask again when /readyz answers 200"
            raise RequestRefusedError(503, "not_ready", "no model yet", limit, remedy)
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
            raise RequestRefusedError(429, "queue_full", found, limit, "try again later")
        needed, allowed = COPIES * upload.at_most, max(most, COPIES) * upload.most
        if self.held + needed > allowed:
            found = f"{self.held / 1e6:.0f} MB are taken and {needed / 1e6:.0f} MB needed, {COPIES} times the request"
            limit = f"at most {allowed / 1e6:.0f} MB at a time (serve.max_queue x serve.max_request_mb)"
            raise RequestRefusedError(503, "memory_full", found, limit, "try again later, or send smaller images")
        self.under_way += 1
        self.held += needed
        self.metrics.queue.set(self.under_way)
        try:
            yield
        finally:
            self.under_way -= 1
            self.held -= needed
            self.metrics.queue.set(self.under_way)


async def respond(request: Request, error: Exception) -> Response:
    """The answer to a request that ended with this error. Its text may name what is on this machine and stays in the
    log."""
    path = request.url.path
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        found, remedy = f"{request.method} {path[:100]}", "correct method and path"
        limit, refused = "the routes of docs/serving.md", error
        error = RequestRefusedError(refused.status_code, "no_such_route", found, limit, remedy)
        error.headers = refused.headers or {}
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
    except (HTTPException, KeyError, ValueError) as error:
        raise unprocessable("not_a_form", str(error)[:100], "a multipart form", FORM_REMEDY) from error

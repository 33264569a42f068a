"""Requests: bodies read within limits of bytes and time, refusals, and a form, JSON or a chat as two images and a
question.

Images come as bytes and never as paths or addresses: the server fetches and opens nothing that a client names.
"""

import asyncio
import base64
import re
import string
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive

from m3diff.images.open import FORMATS, NO_IMAGE, open_image, too_large
from m3diff.serving.params import Serve

SIDES = ("before", "after")
DATA_URL = re.compile(rb"data:image/[\w.+-]+;base64,")
WHITESPACE = string.whitespace.encode()
SHOWN_CHARS = 60
MAX_QUESTION_CHARS = 500
MOST_VALUES = 10_000
"""In the JSON of a request: millions of empty lists, or a fault in each, would take a hundred times its bytes."""

UPLOAD_S = 20
"""Seconds for a client to send its request; the answer after them is 408."""

DISCARDED_BYTES = 64_000_000
"""Bytes of a refused body that are read, so that a client that is still sending reads the answer."""

ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""OpenAI's, of statuses that have one of their own."""

AS_FILE = "save it as PNG or JPEG and send that file's bytes"
ERROR_CODES = {"json_invalid": "not_json", "extra_forbidden": "unknown_field", "missing": "missing_field"}


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
        content: dict[str, Any] = self.body
        if path.startswith("/v1/"):
            kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
            error = {"message": str(self), "type": kind, "param": self.field, "code": self.body["error"]}
            content = {"error": error}
        return JSONResponse(content, self.status, headers=self.headers)


def unprocessable(code: str, found: str, limit: str, remedy: str, field: str | None = None) -> RequestRefusedError:
    """A refusal with status 422."""
    return RequestRefusedError(422, code, found, limit, remedy, field)


def unavailable(code: str, found: str, limit: str, remedy: str) -> RequestRefusedError:
    """A refusal with status 503, which asks the client to come again."""
    return RequestRefusedError(503, code, found, limit, remedy, None, {"retry-after": "5"})


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

    async def gone(self) -> None:
        """Return when the client closes the connection; the body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _next(self) -> Message:
        if self.ended:
            return await self.receive()
        try:
            async with asyncio.timeout(self.deadline - time.monotonic()):
                message = await self.receive()
        except TimeoutError as error:
            limit, remedy = f"{UPLOAD_S:g} s to send a request", "send it faster, or smaller images"
            closes = {"connection": "close"}
            raise RequestRefusedError(408, "slow_client", "the rest is missing", limit, remedy, None, closes) from error
        self.ended = not message.get("more_body", False)
        self.size += len(message.get("body", b""))
        return message


class Asked(NamedTuple):
    """A question about a pair.

    Attributes:
        before, after: bytes of image files.
        question: None: what changed.
        overlay: the outlines of the saliency map are wanted, too.
        model: as a chat names it; None if it does not.
    """

    before: bytes
    after: bytes
    question: str | None
    overlay: bool = False
    model: str | None = None


class Facts(NamedTuple):
    """Facts of the model that a question is checked against.

    Attributes:
        special_tokens: marks of the prompt, which no question may hold.
        reads_question: False: it says of every pair what changed.
    """

    name: str
    max_new_tokens: int
    special_tokens: tuple[str, ...]
    reads_question: bool


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


class ChatBody(BaseModel):
    """JSON of `POST /v1/chat/completions`: one message of the user, since the model was trained on a pair and a
    question. Fields that greedy decoding has no use for, such as `temperature`, are passed over."""

    model: str
    messages: list[UserMessage] = Field(max_length=1, min_length=1)
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
    given: dict[str, Any] = {}
    for name, value in fields:
        if name in given:
            raise unprocessable("repeated_field", "given twice", "one of each", "send each field once", _short(name))
        given[name] = value
    return Asked(**dict(_validated(PairBody.model_validate, given)))


def read_chat(body: bytearray) -> Asked:
    """The pair of a chat of OpenAI's form: one message of the user with at most one text and two images."""
    given = _parsed(ChatBody, body)
    parts, where = given.messages[0].content, "messages.0.content"
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    urls = [part.image_url.url for part in parts if isinstance(part, ImagePart)]
    if len(urls) != 2 or len(texts) > 1:
        limit = "exactly 2 images and at most one text"
        remedy = "send the image before, then the image after, as two parts `image_url`"
        raise unprocessable("wrong_parts", f"{len(urls)} image(s), {len(texts)} text(s)", limit, remedy, where)
    before, after = (_from_base64(f"{where}: {side}", url) for side, url in zip(SIDES, urls, strict=True))
    return Asked(before, after, texts[0] if texts else None, model=given.model)


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
            why = "is of no known image format" if str(error) == NO_IMAGE else _short(error)
            limit = f"an image ({', '.join(FORMATS)})"
            raise unprocessable("not_an_image", f"{len(data)} bytes, {why}", limit, AS_FILE, side) from error
        if large:
            limit = f"at most {max_mpx:g} million pixels, padded to a square (serve.max_image_mpx)"
            raise unprocessable("too_many_pixels", large.partition(", more than")[0], limit, "make it smaller", side)
    return asked


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
    if asked.model is not None and asked.model not in (name, facts.name):
        limit = f"{name}, or the version that answers: {facts.name}"
        raise RequestRefusedError(404, "model_not_found", repr(asked.model[:100]), limit, f"ask for {name}", "model")
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

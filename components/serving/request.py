"""Requests: two images as bytes and a question, sent as a form, as JSON or as a chat.

Images come as bytes and never as paths or addresses: the server fetches and opens nothing that a client names.
"""

import base64
import json
import re
import string
import unicodedata
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from m3diff.images.open import FORMATS, NO_IMAGE, open_image, too_large
from m3diff.serving.http import RequestRefusedError, unprocessable
from m3diff.serving.params import Serve

SIDES = ("before", "after")
DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")
ADDRESS = re.compile(r"\s*(https?|file|ftp|s3|gs):", re.IGNORECASE)
SHOWN_CHARS = 60
MAX_QUESTION_CHARS = 500
MOST_VALUES = 10_000
"""In the JSON of a request: millions of empty lists, or a fault in each, would take a hundred times its bytes."""

AS_FILE = "save it as PNG or JPEG and send that file's bytes"
AS_BYTES = "send the image itself: `data:image/png;base64,...`"
FALSE = ("echo", "logprobs", "min_p", "min_tokens", "store", "top_logprobs", "use_beam_search")
TRUE = ("best_of", "repetition_penalty", "skip_special_tokens")
NEUTRAL: dict[str, tuple[Any, ...]] = dict.fromkeys(FALSE, (0,)) | dict.fromkeys(TRUE, (1,))  # 0 equals False
NEUTRAL |= {
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "tool_choice": ("auto", "none"),
    "top_k": (-1, 0, 1),
}
"""Values of fields that clients send, which ask for nothing but one caption as text; as do nulls and empty lists."""

MODEL_DECIDES = "leave it out: decoding is greedy and gives one caption"

Unset = Annotated[float, Field(ge=0, le=0)] | None


class Asked(NamedTuple):
    """A question about a pair.

    Attributes:
        before, after: bytes of image files.
        question: None: what changed.
        overlay: the outlines of the saliency map are wanted, too.
        model, most_tokens: as a chat names them; None if it does not.
    """

    before: bytes
    after: bytes
    question: str | None
    overlay: bool = False
    model: str | None = None
    most_tokens: int | None = None


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


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OfClients(Strict):
    """Ignores values that clients send and that change nothing."""

    @model_validator(mode="before")
    @classmethod
    def without_what_changes_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        asked = {name: value for name, value in given.items() if value is not None and value not in ([], {})}
        return {name: value for name, value in asked.items() if value not in NEUTRAL.get(name, ())}


class PairBody(Strict):
    """JSON of `POST /caption`."""

    before: str
    after: str
    question: str | None = None
    overlay: bool = False


class TextPart(OfClients):
    type: Literal["text"]
    text: str


class ImageAddress(OfClients):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"  # all the same: the model has one size


class ImagePart(OfClients):
    type: Literal["image_url"]
    image_url: ImageAddress


class Message(OfClients):
    role: Literal["user"]
    name: str | None = None
    content: list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]


class ChatBody(OfClients):
    """JSON of `POST /v1/chat/completions`. It may ask for anything that greedy decoding of one caption satisfies."""

    model: str
    messages: list[Message]
    temperature: Unset = None
    frequency_penalty: Unset = None
    presence_penalty: Unset = None
    top_p: float | None = None
    n: Literal[1] | None = None
    stream: Literal[False] | None = None
    seed: int | None = None
    user: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @field_validator("messages", mode="before")
    @classmethod
    def one_of_the_user(cls, messages: Any) -> Any:
        """The user's message. Raises RequestRefusedError if there is none, two, or another's with content."""
        if not isinstance(messages, list):
            return messages
        said = [message for message in messages if isinstance(message, dict) and message.get("content")]
        for message in said:
            role = message.get("role")
            if isinstance(role, str) and role != "user":
                remedy = "leave it out; what the model is to be asked stands in the user's message"
                limit = "the user's message alone: the model was trained on a pair and a question, and reads no other"
                found, where = f"a message of the role {_short(repr(role))}", f"messages.{messages.index(message)}.role"
                raise unprocessable("wrong_messages", found, limit, remedy, where)
        if len(said) != 1:
            limit, remedy = "one, with both images: no earlier one is read", "send each pair in a request of its own"
            raise unprocessable("wrong_messages", f"{len(said)} messages of the user", limit, remedy, "messages")
        return said


B = TypeVar("B", bound=Strict)


def read_json(body: bytes | bytearray) -> Asked:
    """The pair of `{"before": base64, "after": base64, "question": ..., "overlay": ...}`."""
    given = _parsed(PairBody, body)
    before, after = (_from_base64(side, getattr(given, side)) for side in SIDES)
    return Asked(before, after, given.question, given.overlay)


def read_form(fields: Iterable[tuple[str, str | bytes]]) -> Asked:
    """The pair of a multipart form: files `before` and `after`; texts `question` and `overlay`."""
    given: dict[str, Any] = {}
    for name, value in fields:
        if name not in PairBody.model_fields:
            known = ", ".join(PairBody.model_fields)
            raise unprocessable("unknown_field", "an unknown field", known, "leave it out", _short(name))
        if name in given:
            raise unprocessable("repeated_field", "given twice", "one of each", "send each field once", name)
        given[name] = value
    for side in SIDES:
        if not isinstance(given.get(side), bytes):
            found, wanted = "not there" if side not in given else "a text", "two files, before and after"
            raise unprocessable("wrong_images", found, wanted, f"curl -F {side}=@{side}.png", side)
    overlay, question = given.get("overlay", "false"), given.get("question")
    if overlay not in ("true", "false"):
        raise unprocessable("invalid_field", _short(overlay), "true or false", "write one of the two", "overlay")
    if isinstance(question, bytes):
        raise unprocessable("invalid_field", "a file", "a text", "curl -F question=TEXT", "question")
    return Asked(given["before"], given["after"], question, overlay == "true")


def read_chat(body: bytes | bytearray) -> Asked:
    """The pair of a chat of OpenAI's form: one message of the user with at most one text and two images."""
    given = _parsed(ChatBody, body)
    parts, where = given.messages[0].content, "messages.0.content"
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    urls = [part.image_url.url for part in parts if isinstance(part, ImagePart)]
    if len(urls) != 2:
        remedy = "send the image before, then the image after, as two parts `image_url`"
        raise unprocessable("wrong_images", f"{len(urls)} image(s)", "exactly 2 images", remedy, where)
    if len(texts) > 1:
        raise unprocessable("wrong_texts", f"{len(texts)} texts", "one text at most", "join them into one part", where)
    images = []
    for side, url in zip(SIDES, urls, strict=True):
        match = DATA_URL.match(url)
        if match is None:
            found = f"an address, {_short(url)}" if ADDRESS.match(url) else _short(url)
            limit = "a data URL of an image; no address is fetched"
            raise unprocessable("not_bytes", found, limit, AS_BYTES, f"{where}: {side}")
        images.append(_from_base64(f"{where}: {side}", url[match.end() :]))
    most_tokens = given.max_completion_tokens or given.max_tokens
    return Asked(images[0], images[1], texts[0] if texts else None, model=given.model, most_tokens=most_tokens)


def check(asked: Asked, limits: Serve) -> Asked:
    """The request itself, if its images are images within the limit and its question is a text.

    Raises:
        RequestRefusedError: 422.
    """
    for side in SIDES:
        check_image(side, getattr(asked, side), limits.max_image_mpx)
    question = asked.question
    if question is not None and not question.strip():
        raise unprocessable("empty_question", "an empty text", "a question", "ask, or leave it out", "question")
    if question is not None and len(question) > MAX_QUESTION_CHARS:
        limit = f"at most {MAX_QUESTION_CHARS} characters"
        raise unprocessable("question_too_long", f"{len(question)} characters", limit, "ask in fewer words", "question")
    return asked


def check_image(side: str, data: bytes, max_mpx: float) -> None:
    """See by its header that these bytes are an image of at most so many million pixels as a square; none is decoded.

    Raises:
        RequestRefusedError: 422.
    """
    from PIL import Image

    formats, code, remedy = f"an image ({', '.join(FORMATS)})", "too_many_pixels", "make it smaller"
    if not data:
        raise unprocessable("not_an_image", "0 bytes", formats, "send the file's bytes", side)
    limit = f"at most {max_mpx:g} million pixels, padded to a square (serve.max_image_mpx)"
    try:
        with open_image(data) as image:
            large = too_large(image, max_mpx * 1e6)
    except Image.DecompressionBombError as error:
        raise unprocessable(code, _short(error), limit, remedy, side) from error
    except Exception as error:  # a decoder stumbles over hostile bytes in any way
        why = "is of no known image format" if str(error) == NO_IMAGE else _short(error)
        raise unprocessable("not_an_image", f"{len(data)} bytes, {why}", formats, AS_FILE, side) from error
    if large:
        raise unprocessable(code, large.partition(", more than")[0], limit, remedy, side)


def check_model(asked: Asked, name: str, facts: Facts) -> None:
    """See that this model can answer what is asked. A question is data: what the tokenizer takes for a mark of the
    prompt, such as another image's place, is refused, since the model would not read it as text; nothing is changed in
    what a user asks.

    Args:
        name: of the registered model, which a client may use instead of a version's.

    Raises:
        RequestRefusedError: 404, another model is asked for; 422, an answer shorter than this one gives, a question of
            a model that reads none, or one with a mark of the prompt.
    """
    if asked.model is not None and asked.model not in (name, facts.name):
        limit = f"{name}, or the version that answers: {facts.name}"
        raise RequestRefusedError(404, "model_not_found", repr(asked.model[:100]), limit, f"ask for {name}", "model")
    if asked.most_tokens is not None and asked.most_tokens < facts.max_new_tokens:
        limit = f"{facts.max_new_tokens} or more, the most that {facts.name} says"
        found, remedy = str(asked.most_tokens), "raise it or leave it out"
        raise unprocessable("invalid_field", found, limit, remedy, "max_tokens")
    if asked.question is None:
        return
    if not facts.reads_question:
        limit = "none: this model says of every pair what changed"
        raise unprocessable("question_not_read", "a question", limit, "leave it out", "question")
    spelled = unicodedata.normalize("NFC", asked.question)  # as tokenizers do
    for token in facts.special_tokens:
        if token in spelled:
            limit = "plain text: this is a mark of the model's prompt"
            remedy = "write it another way, such as with blanks between its letters"
            raise unprocessable("special_token", f"{token!r}", limit, remedy, "question")


def _parsed(kind: type[B], body: bytes | bytearray) -> B:
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > MOST_VALUES:
        limit, remedy = f"at most {MOST_VALUES:,} values", "send the two images and the question alone"
        raise unprocessable("not_json", "no JSON of a caption's request: too many values", limit, remedy)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(_short(part) for part in fault["loc"]) or None
        raise _explained(kind, where, fault) from error


def _explained(kind: type[Strict], where: str | None, fault: Any) -> RequestRefusedError:
    if fault["type"] == "json_invalid":
        return unprocessable("not_json", "no JSON", fault["msg"], "send JSON with Content-Type: application/json")
    if isinstance(refusal := fault.get("ctx", {}).get("error"), RequestRefusedError):
        return refusal
    if fault["type"] == "extra_forbidden":  # messages.0.content.1.image_url.image_url.detail has seven parts
        part = TextPart if "text" in fault["loc"] else ImagePart
        depths: dict[int, type[Strict]] = {1: kind, 3: Message, 6: part, 7: ImageAddress}
        known = ", ".join(depths[len(fault["loc"])].model_fields)
        return unprocessable("unknown_field", "an unknown field", f"known here: {known}", "leave it out", where)
    if fault["type"] == "missing":
        return unprocessable("missing_field", "not there", "this field is needed", "add it", where)
    top = (where or "").split(".")[0]
    remedy = "see docs/serving.md" if top in ("messages", *PairBody.model_fields) else MODEL_DECIDES
    given = fault["input"]
    found = json.dumps(given[:SHOWN_CHARS] if isinstance(given, str) else given, default=str)
    return unprocessable("invalid_field", _short(found), fault["msg"], remedy, where)


def _from_base64(field: str, text: str) -> bytes:
    if ADDRESS.match(text):
        found, remedy = f"an address, {_short(text)}", "send the image itself in base64"
        raise unprocessable("not_bytes", found, "base64; no address is fetched", remedy, field)
    try:
        lines = text.encode("ascii")  # `split` would make an object of each
        return base64.b64decode(lines.translate(None, string.whitespace.encode()), validate=True)
    except ValueError as error:
        found, remedy = f"{_short(text)} ({error})", "encode the file's bytes: base64 FILE"
        raise unprocessable("not_base64", found, "bytes in base64", remedy, field) from error


def _short(text: object) -> str:
    shown = str(text)
    return shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}..."

"""What a request asks: two images as bytes and a question. Three forms come to the same: a form, JSON, a chat.

Images come as bytes and never as paths or addresses: the server fetches and opens nothing that a client names.
"""

import base64
import binascii
import json
import re
import string
import unicodedata
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from m3diff.images.open import FORMATS, NO_IMAGE, open_image, too_large
from m3diff.serving.params import Serve
from m3diff.serving.refused import RequestRefusedError, unprocessable

SIDES = ("before", "after")
DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")
ADDRESS = re.compile(r"\s*(https?|file|ftp|s3|gs):", re.IGNORECASE)
SHOWN_CHARS = 60
MAX_QUESTION_CHARS = 500
MOST_VALUES = 10_000
"""In the JSON of a request: millions of empty lists, or a fault in each, would take a hundred times its bytes."""

AS_BYTES = "send the image itself: `data:image/png;base64,...`"
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "tool_choice": ("auto", "none"),
    "top_k": (-1, 0, 1),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
"""Values of fields that clients send, which ask for nothing but one caption as text; as do nulls and empty lists."""

MODEL_DECIDES = "leave it out: decoding is greedy and gives one caption"

Unset = Annotated[float, Field(ge=0, le=0)] | None


class Asked(NamedTuple):
    """One question about one pair.

    Attributes:
        before, after: bytes of image files whose headers were checked.
        question: None: what changed.
        overlay: whether the outlines of the saliency map are wanted, too.
    """

    before: bytes
    after: bytes
    question: str | None
    overlay: bool = False


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OfClients(Strict):
    """Leaves out what clients send and what changes nothing."""

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
    """JSON of `POST /v1/chat/completions`. What greedy decoding of one caption satisfies anyway may be asked for."""

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
        """Raises RequestRefusedError for another's message that says something, and where the user's is not one."""
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

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


B = TypeVar("B", bound=Strict)


def of_json(body: bytes | bytearray, limits: Serve) -> Asked:
    """The pair of `{"before": base64, "after": base64, "question": ..., "overlay": ...}`."""
    given = _parsed(PairBody, body)
    images = [_from_base64(side, getattr(given, side)) for side in SIDES]
    return checked(Asked(images[0], images[1], given.question, given.overlay), limits)


def of_form(fields: Iterable[tuple[str, str | bytes]], limits: Serve) -> Asked:
    """The pair of a multipart form: files `before` and `after`; texts `question` and `overlay`."""
    given: dict[str, str | bytes] = {}
    for name, value in fields:
        if name not in (*SIDES, "question", "overlay"):
            raise unprocessable(
                "unknown_field", "an unknown field", "before, after, question, overlay", "leave it out", _short(name)
            )
        if name in given:
            raise unprocessable("repeated_field", "given twice", "one of each", "send each field once", name)
        given[name] = value
    for side in SIDES:
        if not isinstance(given.get(side), bytes):
            found = "not there" if side not in given else "a text"
            raise unprocessable(
                "wrong_images", found, "two files, before and after", f"curl -F {side}=@{side}.png", side
            )
    overlay = given.get("overlay", "false")
    if overlay not in ("true", "false"):
        raise unprocessable("invalid_field", _short(overlay), "true or false", "write one of the two", "overlay")
    return checked(
        Asked(given["before"], given["after"], _text(given.get("question")), overlay == "true"),  # type: ignore[arg-type]
        limits,
    )


def of_chat(body: bytes | bytearray, limits: Serve) -> tuple[Asked, ChatBody]:
    """The pair of a chat of OpenAI's form: one message of the user with at most one text and two images."""
    given = _parsed(ChatBody, body)
    parts = given.messages[0].content
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    urls = [part.image_url.url for part in parts if isinstance(part, ImagePart)]
    where = "messages.0.content"
    if len(urls) != 2:
        remedy = "send the image before, then the image after, as two parts `image_url`"
        raise unprocessable("wrong_images", f"{len(urls)} image(s)", "exactly 2 images", remedy, where)
    if len(texts) > 1:
        raise unprocessable("wrong_texts", f"{len(texts)} texts", "one text at most", "join them into one part", where)
    images = [_from_data_url(f"{where}: {side}", url) for side, url in zip(SIDES, urls, strict=True)]
    return checked(Asked(images[0], images[1], texts[0] if texts else None), limits), given


def checked(asked: Asked, limits: Serve) -> Asked:
    """What is asked, its images seen to be images within the limit and its question to be a text.

    Raises:
        RequestRefusedError: 422.
    """
    for side in SIDES:
        check_image(side, getattr(asked, side), limits.max_image_mpx)
    if asked.question is not None:
        check_question(asked.question)
    return asked


def check_image(side: str, data: bytes, max_mpx: float) -> None:
    """See by its header that these bytes are an image of at most so many million pixels as a square; none is decoded.

    Raises:
        RequestRefusedError: 422.
    """
    from PIL import Image

    formats = f"an image ({', '.join(FORMATS)})"
    if not data:
        raise unprocessable("not_an_image", "0 bytes", formats, "send the file's bytes", side)
    limit = f"at most {max_mpx:g} million pixels, padded to a square (serve.max_image_mpx)"
    try:
        with open_image(data) as image:
            large = too_large(image, max_mpx * 1e6)
    except Image.DecompressionBombError as error:
        raise unprocessable("too_many_pixels", _short(error), limit, "make it smaller", side) from error
    except Exception as error:  # a decoder stumbles over hostile bytes in any way
        remedy = "save it as PNG or JPEG and send that file's bytes"
        told = "is of no known image format" if str(error) == NO_IMAGE else _short(str(error))
        raise unprocessable("not_an_image", f"{len(data)} bytes, {told}", formats, remedy, side) from error
    if large:
        raise unprocessable("too_many_pixels", large.partition(", more than")[0], limit, "make it smaller", side)


def check_question(question: str) -> None:
    """Raises RequestRefusedError (422) where it is empty or too long."""
    if not question.strip():
        raise unprocessable("empty_question", "an empty text", "a question", "ask, or leave it out", "question")
    if len(question) > MAX_QUESTION_CHARS:
        limit = f"at most {MAX_QUESTION_CHARS} characters"
        raise unprocessable("question_too_long", f"{len(question)} characters", limit, "ask in fewer words", "question")


def check_read(question: str | None, reads_question: bool) -> None:
    """Raises RequestRefusedError (422) where a question is asked of a model that reads none: it would answer another
    one."""
    if question is not None and not reads_question:
        limit = "none: this model says of every pair what changed"
        raise unprocessable("question_not_read", "a question", limit, "leave it out", "question")


def check_tokens(question: str | None, special_tokens: Iterable[str]) -> None:
    """A question is data: what the tokenizer takes for a mark of the prompt, such as another image's place, is refused,
    since the model would not read it as text. Nothing is changed in what a user asks.

    Raises:
        RequestRefusedError: 422.
    """
    spelled = unicodedata.normalize("NFC", question or "")  # as tokenizers do
    for token in special_tokens:
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
    if fault["type"] == "extra_forbidden":
        known = ", ".join(_place(kind, fault["loc"]).model_fields)
        return unprocessable("unknown_field", "an unknown field", f"known here: {known}", "leave it out", where)
    if fault["type"] == "missing":
        return unprocessable("missing_field", "not there", "this field is needed", "add it", where)
    top = (where or "").split(".")[0]
    remedy = "see docs/serving.md" if top in ("messages", *PairBody.model_fields) else MODEL_DECIDES
    given = fault["input"]
    found = json.dumps(given[:SHOWN_CHARS] if isinstance(given, str) else given, default=str)
    return unprocessable("invalid_field", _short(found), fault["msg"], remedy, where)


def _place(kind: type[Strict], loc: tuple[int | str, ...]) -> type[Strict]:
    """What the field at the end of a path is a field of: messages.0.content.1.image_url.image_url.detail."""
    if len(loc) == 1:
        return kind
    if len(loc) == 3:
        return Message
    parts: dict[int | str, type[Strict]] = {"text": TextPart, "image_url": ImagePart}
    return parts.get(loc[4], kind) if len(loc) == 6 else ImageAddress


def _from_data_url(field: str, url: str) -> bytes:
    match = DATA_URL.match(url)
    if match is None:
        found = f"an address, {_short(url)}" if ADDRESS.match(url) else _short(url)
        raise unprocessable("not_bytes", found, "a data URL of an image; no address is fetched", AS_BYTES, field)
    return _from_base64(field, url[match.end() :])


def _from_base64(field: str, text: str) -> bytes:
    if ADDRESS.match(text):
        remedy = "send the image itself in base64"
        raise unprocessable("not_bytes", f"an address, {_short(text)}", "base64; no address is fetched", remedy, field)
    try:
        lines = text.encode("ascii")  # `split` would make an object of each
        return base64.b64decode(lines.translate(None, string.whitespace.encode()), validate=True)
    except (binascii.Error, ValueError) as error:
        found = f"{_short(text)} ({error})"
        raise unprocessable(
            "not_base64", found, "bytes in base64", "encode the file's bytes: base64 FILE", field
        ) from error


def _text(value: str | bytes | None) -> str | None:
    if isinstance(value, bytes):
        raise unprocessable("invalid_field", "a file", "a text", "curl -F question=TEXT", "question")
    return value


def _short(text: object) -> str:
    shown = str(text)
    return shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}..."

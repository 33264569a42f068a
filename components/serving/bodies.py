"""Parse request bodies (form, JSON or chat) into images, a question and the turns before it.

Images are sent as bytes, never as paths or URLs, so the server does not open or download anything that a client names.
"""

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from m3diff.datasets.tables import SIDES
from m3diff.records.errors import format_count
from m3diff.records.sample import MOST_IMAGES, Turn
from m3diff.serving.batcher import AnswerRequest
from m3diff.serving.refusals import MAX_EXCERPT_CHARS, RequestRefusedError, shorten, unprocessable

MAX_FORM_FIELDS = 16
MAX_HISTORY_FIELD = 100_000  # maximum number of characters of the field `history` in a form
FORM_REMEDY = "curl -F before=@a.png -F after=@b.png"
DATA_URL_PREFIX = re.compile(rb"data:image/[\w.+-]+;base64,")
WHITESPACE = b" \t\n\r\v\f"

# Maximum number of values in the JSON of a request. Parsing millions of empty lists, or reporting an error in each of
# them, would need a hundred times as much memory as the request itself
MAX_JSON_VALUES = 10_000

MAX_LISTED_FAULTS = 3  # maximum number of faults of a chat's messages that a refusal lists

# Error codes for pydantic's error types. All other types become "invalid_field"
VALIDATION_CODES = {"json_invalid": "not_json", "extra_forbidden": "unknown_field", "missing": "missing_field"}


class HistoryTurn(BaseModel):
    """A turn before the question."""

    model_config = ConfigDict(extra="forbid")

    question: str
    answer: str


class CaptionBody(BaseModel):
    """Body of `POST /caption`: a form with files, or JSON with images in base64.

    It contains a pair (`before` and `after`), one image (`image`) or no image.
    """

    model_config = ConfigDict(extra="forbid")

    before: bytes | None = None
    after: bytes | None = None
    image: bytes | None = None
    question: str | None = None
    history: list[HistoryTurn] = []
    overlay: bool = False


class HistoryField(BaseModel):
    """The field `history` of a form, which is a text in JSON."""

    history: list[HistoryTurn]


class TextPart(BaseModel):
    """A text part of a chat message."""

    type: Literal["text"]
    text: str


class ImageUrl(BaseModel):
    """An image as a data URL, which contains the bytes of the image."""

    url: bytes


class ImagePart(BaseModel):
    """An image part of a chat message."""

    type: Literal["image_url"]
    image_url: ImageUrl


def _parts_of_content(content: Any) -> Any:
    """Return a content that is a text as a list with one text part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(BaseModel):
    """A message of the user or the assistant in a chat."""

    role: Literal["user", "assistant"]
    content: Annotated[list[Part], BeforeValidator(_parts_of_content)]

    @property
    def texts(self) -> list[str]:
        """The texts of the message."""
        return [part.text for part in self.content if isinstance(part, TextPart)]

    @property
    def urls(self) -> list[bytes]:
        """The data URLs of the images in the message."""
        return [part.image_url.url for part in self.content if isinstance(part, ImagePart)]


class HarmlessValues(NamedTuple):
    """The accepted values of a request option: those that do not ask for anything but a caption in plain text.

    Attributes:
        description: the accepted values in words, for the error message.
        includes: a function that returns whether a value is accepted.
    """

    description: str
    includes: Callable[[Any], bool]


def _is_text_format(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


def _has_no_stop_sequence(value: Any) -> bool:
    return not value or (isinstance(value, list) and not any(value))


def _leaves_tools_to_model(value: Any) -> bool:
    return value is None or value in ("none", "auto")


def _is_text_modality(value: Any) -> bool:
    return not value or value == ["text"]


def _is_empty(value: Any) -> bool:
    return not value


def _is_null(value: Any) -> bool:
    return value is None


EMPTY = HarmlessValues("null, false, 0 or empty", _is_empty)
NULL = HarmlessValues("null or left out", _is_null)
# Options that ask for something other than a caption in plain text. A client that received a caption anyway would try
# to parse it as JSON, miss the probabilities, or read past its stop sequence
CHAT_OPTIONS: Mapping[str, HarmlessValues] = {
    "response_format": HarmlessValues('null or {"type": "text"}', _is_text_format),
    "tool_choice": HarmlessValues('null, "none" or "auto"', _leaves_tools_to_model),
    "function_call": HarmlessValues('null, "none" or "auto"', _leaves_tools_to_model),
    "modalities": HarmlessValues('null or ["text"]', _is_text_modality),
    "stop": HarmlessValues("null or empty", _has_no_stop_sequence),
    **dict.fromkeys(("audio", "web_search_options", "prompt_logprobs"), NULL),
    **dict.fromkeys(("logprobs", "top_logprobs", "logit_bias", "tools", "functions"), EMPTY),
    # Options of vLLM, SGLang and llama.cpp
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
    """Body of `POST /v1/chat/completions`: messages of the user and the assistant in turn.

    The first message has at most two images, and the other messages have none.

    Options for sampling and length, such as `temperature`, are accepted but have no effect, since the answer is always
    the model's greedy caption. The options in CHAT_OPTIONS are refused unless their value is harmless.
    """

    model_config = ConfigDict(extra="allow")

    model: str
    messages: list[ChatMessage]
    n: Literal[1] | None = None
    stream: Literal[False] | None = None


Body = TypeVar("Body", bound=BaseModel)


def read_json(body: bytearray) -> AnswerRequest:
    """Parse a JSON body: `{"before": base64, "after": base64, "question": ..., "history": ..., "overlay": ...}`.

    A request about one image has `image` in the place of `before` and `after`.

    Raises:
        RequestRefusedError: the body is invalid (HTTP 422).
    """
    caption_body = _parse(CaptionBody, body)
    names = _image_fields(caption_body)
    images = [_decode_base64(name, getattr(caption_body, name)) for name in names]
    return _request_of_body(caption_body, images)


def read_form(fields: Iterable[tuple[str, str | bytes]]) -> AnswerRequest:
    """Parse a multipart form with the files `before` and `after`, or `image`, and the fields of `CaptionBody`.

    The field `history` is a text in JSON.

    Raises:
        RequestRefusedError: the form is invalid (HTTP 422).
    """
    values: dict[str, Any] = dict(fields)
    history = values.pop("history", None)
    if history is not None:
        values["history"] = _parse_history(history)
    caption_body = _validate(CaptionBody.model_validate, values)
    images = [getattr(caption_body, name) for name in _image_fields(caption_body)]
    return _request_of_body(caption_body, images)


def _parse_history(history: str | bytes) -> list[HistoryTurn]:
    """Parse the field `history` of a form. An empty text is an empty history.

    Raises:
        RequestRefusedError: the text is too long, or it is not a list of turns in JSON (HTTP 422).
    """
    if len(history) > MAX_HISTORY_FIELD:
        raise unprocessable(
            code="history_too_long",
            finding=format_count(len(history), "character"),
            limit=f"at most {MAX_HISTORY_FIELD:,} characters of JSON",
            remedy="leave the earliest turns out",
            field="history",
        )
    text = history.encode() if isinstance(history, str) else history
    return _parse(HistoryField, b'{"history": ' + (text.strip() or b"[]") + b"}").history


def _image_fields(body: CaptionBody) -> tuple[str, ...]:
    """Return the fields of the images: both sides of a pair, `image`, or none.

    Raises:
        RequestRefusedError: one side of a pair is missing, or there are other images beside a pair (HTTP 422).
    """
    names = tuple(name for name in (*SIDES, "image") if getattr(body, name) is not None)
    if names in ((), ("image",), SIDES):
        return names
    if "image" in names:
        raise unprocessable(
            code="wrong_images",
            finding=" and ".join(names),
            limit="before and after for a pair, or image for one image",
            remedy="send the images as before and after, or only one as image",
            field="image",
        )
    (missing_side,) = set(SIDES).difference(names)
    raise unprocessable(
        code="missing_field",
        finding="nothing",
        limit="Field required",
        remedy="see docs/serving.md, or leave it out",
        field=missing_side,
    )


def _request_of_body(body: CaptionBody, images: Iterable[bytes]) -> AnswerRequest:
    """Return the request of a form or of JSON.

    Raises:
        RequestRefusedError: a turn of the history has no question or no answer, or no question follows the history
            (HTTP 422).
    """
    for number, turn in enumerate(body.history):
        for name, text in (("question", turn.question), ("answer", turn.answer)):
            if not text.strip():
                raise _empty_text(f"history.{number}.{name}", text, name)
    if body.history and body.question is None:
        raise unprocessable(
            code="missing_field",
            finding="nothing",
            limit="a question after the turns of the history",
            remedy="send the question that follows, or leave the history out",
            field="question",
        )
    history = tuple(Turn(turn.question, turn.answer) for turn in body.history)
    return AnswerRequest(tuple(images), body.question, history, body.overlay)


def _empty_text(field: str, text: str, name: str) -> RequestRefusedError:
    """Return the refusal of a question or an answer without any text in the turns before the question."""
    return unprocessable(
        code=f"empty_{name}",
        finding=format_count(len(text), "character"),
        limit=f"a turn with a question and an answer: this {name} is empty",
        remedy="leave this turn out",
        field=field,
    )


def read_chat(body: bytearray) -> AnswerRequest:
    """Parse a chat in OpenAI's format.

    Messages of the user and the assistant alternate, and the first and the last are the user's. The first message has
    up to two images and at most one text. All other messages have one text.

    Raises:
        RequestRefusedError: the body is invalid (HTTP 422).
    """
    chat = _parse(ChatBody, body)
    check_chat_options(chat.model_extra or {})
    _check_messages(chat.messages)
    urls = chat.messages[0].urls
    names = SIDES if len(urls) == 2 else ("image",)[: len(urls)]
    images = [_decode_base64(f"messages.0.content: {name}", url) for name, url in zip(names, urls, strict=True)]
    texts = [message.texts[0] if message.texts else None for message in chat.messages]
    history = []
    for question, answer in zip(texts[:-1:2], texts[1::2], strict=True):
        history.append(Turn(question or "", answer or ""))
    return AnswerRequest(tuple(images), texts[-1], tuple(history), model=chat.model)


def _check_messages(messages: list[ChatMessage]) -> None:
    """Check the order of the messages, the number of their texts, and that all images are in the first message.

    Raises:
        RequestRefusedError: the messages are not a dialogue that the server can answer (HTTP 422).
    """
    faults: list[str] = []
    for number, message in enumerate(messages):
        faults += _faults_of_message(number, message, is_last=number == len(messages) - 1)
    if len(messages) % 2 == 0:
        faults.append("the last message is not from the user")
    images = sum(len(message.urls) for message in messages)
    if faults or images > MOST_IMAGES:
        texts = sum(len(message.texts) for message in messages)
        counts = ", ".join(
            [format_count(len(messages), "message"), format_count(images, "image"), format_count(texts, "text")]
        )
        raise unprocessable(
            code="wrong_parts",
            finding=f"{counts}: {'; '.join(faults[:MAX_LISTED_FAULTS])}" if faults else counts,
            limit="messages of user and assistant in turn, the last from the user; at most 2 images, all in the first "
            "message; one text in each message",
            remedy="send the image before, then the image after, as two parts `image_url` of the first message",
            field="messages",
        )


def _faults_of_message(number: int, message: ChatMessage, is_last: bool) -> Iterator[str]:
    """Yield what is wrong with a message of a chat.

    Args:
        number: number of messages before this one.
    """
    name = f"messages.{number}"
    expected_role = ("user", "assistant")[number % 2]
    if message.role != expected_role:
        yield f"{name} is from the {message.role}"
    if number and message.urls:
        yield f"{name} has {format_count(len(message.urls), 'image')}"
    # The first message may ask the default question of the model
    if len(message.texts) > 1 or (number and not message.texts):
        yield f"{name} has {format_count(len(message.texts), 'text')}"
    elif message.texts and not message.texts[0].strip() and not is_last:
        yield f"{name} has an empty text"


def check_chat_options(options: Mapping[str, Any]) -> None:
    """Check that all chat options are compatible with a caption in plain text.

    Raises:
        RequestRefusedError: an option asks for something else (HTTP 422).
    """
    for name, value in options.items():
        harmless_values = CHAT_OPTIONS.get(name)
        if harmless_values is not None and not harmless_values.includes(value):
            raise unprocessable(
                code="invalid_field",
                finding=shorten(value),
                limit=f"{harmless_values.description}: the answer is one caption in plain text",
                remedy="see docs/serving.md, or leave it out",
                field=name,
            )


def _parse(model: type[Body], body: bytes | bytearray) -> Body:
    """Parse and validate a JSON body.

    Raises:
        RequestRefusedError: the body is invalid or has more than MAX_JSON_VALUES values (HTTP 422).
    """
    # Every value but the first follows one of these characters, so their number is an upper bound
    separators = body.count(b",") + body.count(b"[") + body.count(b"{")
    if separators > MAX_JSON_VALUES:
        raise unprocessable(
            code="not_json",
            finding="no JSON of a caption's request: too many values",
            limit=f"at most {MAX_JSON_VALUES:,} values",
            remedy="send only the images, the question and the turns before it",
        )
    return _validate(model.model_validate_json, body)


def _validate(validate: Callable[[Any], Body], value: Any) -> Body:
    """Validate a value with one of pydantic's methods.

    Raises:
        RequestRefusedError: the value is invalid (HTTP 422). Only the first error is reported.
    """
    try:
        return validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        code = VALIDATION_CODES.get(details["type"], "invalid_field")
        field = ".".join(shorten(part) for part in details["loc"])
        raise unprocessable(
            code=code,
            finding="nothing" if code == "missing_field" else _excerpt_of(details["input"]),
            limit=details["msg"],
            remedy="see docs/serving.md, or leave it out",
            field=field or None,
        ) from error


def _excerpt_of(value: Any) -> str:
    # Truncate before converting to a string, since the value may be as large as the request
    is_text = isinstance(value, str | bytes | bytearray)
    return shorten(value[:MAX_EXCERPT_CHARS] if is_text else value)


def _decode_base64(field: str, text: bytes) -> bytes:
    """Return the bytes of an image in base64 or in a data URL.

    Raises:
        RequestRefusedError: the text is neither (HTTP 422).
    """
    prefix = DATA_URL_PREFIX.match(text)
    encoded = text[prefix.end() :] if prefix else text
    try:
        # `translate` creates a single object, whereas `split` would create one per line
        return base64.b64decode(encoded.translate(None, WHITESPACE), validate=True)
    except ValueError as error:
        raise unprocessable(
            code="not_base64",
            finding=f"{text[:MAX_EXCERPT_CHARS].decode(errors='replace')} ({error})",
            limit="an image's bytes in base64, in a chat as a data URL; no address is fetched",
            remedy="encode the file's bytes: base64 FILE",
            field=field,
        ) from error


class InMemoryFormParser(MultiPartParser):
    """Starlette's form parser, but with all files kept in memory, so that no client data is written to disk."""

    spool_max_size = 2**31


async def read_form_fields(request: Request, max_bytes: int) -> list[tuple[str, str | bytes]]:
    """Return the names and values of the fields in a multipart form. Files are returned as bytes.

    Raises:
        RequestRefusedError: the body is not a multipart form (HTTP 422).
    """
    try:
        async with aclosing(request.stream()) as stream:
            parser = InMemoryFormParser(
                request.headers,
                stream,
                max_files=MAX_FORM_FIELDS,
                max_fields=MAX_FORM_FIELDS,
                max_part_size=max_bytes,
            )
            form = await parser.parse()
    except MultiPartException as error:
        raise _not_a_form(f"400: {error.message}") from error
    except (KeyError, ValueError) as error:
        raise _not_a_form(str(error)) from error
    try:
        fields: list[tuple[str, str | bytes]] = []
        for name, value in form.multi_items():
            content = await value.read() if isinstance(value, UploadFile) else value
            fields.append((name, content))
        return fields
    finally:
        await form.close()


def _not_a_form(reason: str) -> RequestRefusedError:
    return unprocessable(code="not_a_form", finding=reason[:100], limit="a multipart form", remedy=FORM_REMEDY)

"""Parse request bodies (form, JSON or chat) into two images and a question.

Images are sent as bytes, never as paths or URLs, so the server does not open or download anything that a client names.
"""

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from m3diff.records.errors import format_count
from m3diff.serving.batcher import Asked
from m3diff.serving.refusals import MAX_EXCERPT_CHARS, RequestRefusedError, shorten, unprocessable

MAX_FORM_FIELDS = 16
FORM_REMEDY = "curl -F before=@a.png -F after=@b.png"
DATA_URL_PREFIX = re.compile(rb"data:image/[\w.+-]+;base64,")
WHITESPACE = b" \t\n\r\v\f"

# Maximum number of values in the JSON of a request. Parsing millions of empty lists, or reporting an error in each of
# them, would need a hundred times as much memory as the request itself
MAX_JSON_VALUES = 10_000

# Error codes for pydantic's error types. All other types become "invalid_field"
VALIDATION_CODES = {"json_invalid": "not_json", "extra_forbidden": "unknown_field", "missing": "missing_field"}


class PairBody(BaseModel):
    """Body of `POST /caption`: a form with two files, or JSON with both images in base64."""

    model_config = ConfigDict(extra="forbid")

    before: bytes
    after: bytes
    question: str | None = None
    overlay: bool = False


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


class UserMessage(BaseModel):
    """A user message in a chat."""

    role: Literal["user"]
    content: list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]


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
    """Body of `POST /v1/chat/completions`: one user message with two images and at most one text.

    Options for sampling and length, such as `temperature`, are accepted but have no effect, since the answer is always
    the model's greedy caption. The options in CHAT_OPTIONS are refused unless their value is harmless.
    """

    model_config = ConfigDict(extra="allow")

    model: str
    messages: list[UserMessage]
    n: Literal[1] | None = None
    stream: Literal[False] | None = None


Body = TypeVar("Body", bound=BaseModel)


def read_json(body: bytearray) -> Asked:
    """Parse a JSON body `{"before": base64, "after": base64, "question": ..., "overlay": ...}` into a request.

    Raises:
        RequestRefusedError: the body is invalid (HTTP 422).
    """
    pair = _parse(PairBody, body)
    before = _decode_base64("before", pair.before)
    after = _decode_base64("after", pair.after)
    return Asked(before, after, pair.question, pair.overlay)


def read_form(fields: Iterable[tuple[str, str | bytes]]) -> Asked:
    """Parse a multipart form with the files `before` and `after` and the text fields `question` and `overlay`.

    Raises:
        RequestRefusedError: the form is invalid (HTTP 422).
    """
    pair = _validate(PairBody.model_validate, dict(fields))
    return Asked(**dict(pair))


def read_chat(body: bytearray) -> Asked:
    """Parse a chat in OpenAI's format: one user message with two images and at most one text.

    Raises:
        RequestRefusedError: the body is invalid (HTTP 422).
    """
    chat = _parse(ChatBody, body)
    check_chat_options(chat.model_extra or {})
    parts = [part for message in chat.messages for part in message.content]
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    urls = [part.image_url.url for part in parts if isinstance(part, ImagePart)]
    if len(chat.messages) != 1 or len(urls) != 2 or len(texts) > 1:
        message_count = format_count(len(chat.messages), "message")
        image_count = format_count(len(urls), "image")
        text_count = format_count(len(texts), "text")
        raise unprocessable(
            code="wrong_parts",
            finding=f"{message_count}, {image_count}, {text_count}",
            limit="one message with exactly 2 images and at most one text",
            remedy="send the image before, then the image after, as two parts `image_url`",
            field="messages",
        )
    before = _decode_base64("messages.0.content: before", urls[0])
    after = _decode_base64("messages.0.content: after", urls[1])
    question = texts[0] if texts else None
    return Asked(before, after, question, model=chat.model)


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


def _parse(model: type[Body], body: bytearray) -> Body:
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
            remedy="send the two images and the question alone",
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

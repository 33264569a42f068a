"""Check the images of a request by reading their headers, and check that the current model can answer the question."""

import unicodedata
from functools import partial

from m3diff.images.open import FORMATS, ImageError, open_image, size_fault
from m3diff.records.errors import Fault, format_count
from m3diff.serving.batcher import Asked, ModelFacts
from m3diff.serving.caption import SIDES
from m3diff.serving.refusals import RequestRefusedError, shorten, unprocessable

MAX_QUESTION_CHARS = 500
UNKNOWN_FORMAT = "is of no known image format"
SAVE_AS_FILE = "save it as PNG or JPEG and send that file's bytes"
REPHRASE_QUESTION = "ask in other words, or leave it out"


def check_images(caption_request: Asked, max_mpx: float) -> Asked:
    """Return the request if both files are images of an acceptable size. Only the headers are read.

    Args:
        max_mpx: maximum size of an image in millions of pixels, padded to a square.

    Raises:
        RequestRefusedError: a file is not an image, or it has too many pixels (HTTP 422).
    """
    for side in SIDES:
        _check_image(getattr(caption_request, side), side, max_mpx)
    return caption_request


def _check_image(data: bytes, side: str, max_mpx: float) -> None:
    try:
        with open_image(data) as image:
            excess = size_fault(image, max_mpx * 1e6)
    except Exception as error:  # malicious input can make a decoder raise anything
        raise unprocessable(
            code="not_an_image",
            finding=f"{format_count(len(data), 'byte')}, {_reason_of(error)}",
            limit=f"an image ({', '.join(FORMATS)})",
            remedy=SAVE_AS_FILE,
            field=side,
        ) from error
    if excess:
        raise unprocessable(
            code="too_many_pixels",
            finding=_describe_size(excess),
            limit=f"at most {max_mpx:g} million pixels, padded to a square (serve.max_image_mpx)",
            remedy="make it smaller",
            field=side,
        )


def _reason_of(error: Exception) -> str:
    """Return why a file is not an image, without the error's remedy, which applies to files on disk."""
    if not isinstance(error, ImageError):
        return shorten(error).partition("; ")[0]
    # The message of this error also lists the supported formats. The refusal lists them in `limit`
    return UNKNOWN_FORMAT if error.code == "images.unknown_format" else error.fault.problem


def _describe_size(fault: Fault) -> str:
    """Return the size of an image or its tiles in pixels, without the maximum, which the refusal gives in `limit`."""
    pixels = f"{fault.fields['value']:,}"
    if fault.code == "images.tiles_too_large":
        return f"has tiles of {pixels} pixels"
    return f"has {fault.fields['width']}x{fault.fields['height']} pixels, {pixels} padded to a square"


def check_model(requested_name: str, registered_name: str, version: str) -> None:
    """Check that a request names the registered model or its current version.

    Raises:
        RequestRefusedError: the request names another model (HTTP 404).
    """
    if requested_name not in (registered_name, version):
        raise RequestRefusedError(
            status=404,
            code="model_not_found",
            finding=repr(requested_name[:100]),
            limit=f"{registered_name}, or the version that answers: {version}",
            remedy=f"ask for {registered_name}",
            field="model",
        )


def check_question(caption_request: Asked, registered_name: str, facts: ModelFacts) -> None:
    """Check that the model can answer the question.

    The question is never changed. A question that contains a special token, such as an image placeholder, is refused,
    because the tokenizer would not treat it as text.

    Args:
        registered_name: name of the registered model, which a client may use instead of a version.

    Raises:
        RequestRefusedError: the request names another model (HTTP 404), the model does not support questions, or the
            question is empty, too long, or contains a special token (HTTP 422).
    """
    if caption_request.model is not None:
        check_model(caption_request.model, registered_name, facts.name)
    if caption_request.question is None:
        return
    refusal = _refusal_of_question(caption_request.question, facts)
    if refusal is not None:
        raise refusal


def _refusal_of_question(question: str, facts: ModelFacts) -> RequestRefusedError | None:
    """Return the refusal (HTTP 422) of a question, or None if the model can answer it."""
    refuse = partial(unprocessable, remedy=REPHRASE_QUESTION, field="question")
    length = format_count(len(question), "character")
    if not facts.reads_question:
        return refuse("question_not_read", length, "none: this model says of every pair what changed")
    if not question.strip():
        return refuse("empty_question", length, "a question")
    if len(question) > MAX_QUESTION_CHARS:
        return refuse("question_too_long", length, f"at most {MAX_QUESTION_CHARS} characters")
    normalised_question = unicodedata.normalize("NFC", question)  # tokenizers do the same
    for token in facts.special_tokens:
        if token in normalised_question:
            return refuse("special_token", repr(token), "plain text: this is a mark of the model's prompt")
    return None

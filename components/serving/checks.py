"""Check the images of a request by reading their headers, and check that the current model can answer the question."""

import unicodedata

from m3diff.images.open import FORMATS, ImageError, open_image, size_fault
from m3diff.records.errors import Fault
from m3diff.serving.batcher import Asked, ModelFacts
from m3diff.serving.caption import SIDES
from m3diff.serving.refusals import RequestRefusedError, shorten, unprocessable

MAX_QUESTION_CHARS = 500
UNKNOWN_FORMAT = "is of no known image format"
SAVE_AS_FILE = "save it as PNG or JPEG and send that file's bytes"
ASK_OTHERWISE = "ask in other words, or leave it out"


def check_images(asked: Asked, max_mpx: float) -> Asked:
    """Return the request if both files are images of an acceptable size. Only the headers are read.

    Args:
        max_mpx: maximum size of an image in millions of pixels, padded to a square.

    Raises:
        RequestRefusedError: a file is not an image, or it has too many pixels (HTTP 422).
    """
    for side in SIDES:
        _check_image(getattr(asked, side), side, max_mpx)
    return asked


def _check_image(data: bytes, side: str, max_mpx: float) -> None:
    try:
        with open_image(data) as image:
            excess = size_fault(image, max_mpx * 1e6)
    except Exception as error:  # malicious input can make a decoder raise anything
        # The error's own remedy is left out, since it applies to files on disk
        reason = _reason_of(error.fault) if isinstance(error, ImageError) else shorten(error).partition("; ")[0]
        raise unprocessable(
            code="not_an_image",
            found=f"{len(data)} bytes, {reason}",
            limit=f"an image ({', '.join(FORMATS)})",
            remedy=SAVE_AS_FILE,
            field=side,
        ) from error
    if excess:
        raise unprocessable(
            code="too_many_pixels",
            found=_size_of(excess),
            limit=f"at most {max_mpx:g} million pixels, padded to a square (serve.max_image_mpx)",
            remedy="make it smaller",
            field=side,
        )


def _reason_of(fault: Fault) -> str:
    """Return why a file is not an image, without the supported formats, which the refusal lists in `limit`."""
    return UNKNOWN_FORMAT if fault.code == "images.unknown_format" else fault.problem


def _size_of(fault: Fault) -> str:
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
            found=repr(requested_name[:100]),
            limit=f"{registered_name}, or the version that answers: {version}",
            remedy=f"ask for {registered_name}",
            field="model",
        )


def check_question(asked: Asked, registered_name: str, facts: ModelFacts) -> None:
    """Check that the model can answer the question.

    The question is never changed. A question that contains a special token, such as an image placeholder, is refused,
    because the tokenizer would not treat it as text.

    Args:
        registered_name: name of the registered model, which a client may use instead of a version.

    Raises:
        RequestRefusedError: the request names another model (HTTP 404), the model does not support questions, or the
            question is empty, too long, or contains a special token (HTTP 422).
    """
    if asked.model is not None:
        check_model(asked.model, registered_name, facts.name)
    if asked.question is None:
        return
    fault = _fault_of_question(asked.question, facts)
    if fault is not None:
        code, found, limit = fault
        raise unprocessable(code, found, limit, remedy=ASK_OTHERWISE, field="question")


def _fault_of_question(question: str, facts: ModelFacts) -> tuple[str, str, str] | None:
    """Return the refusal's `code`, `found` and `limit`, or None if the model can answer the question."""
    length = f"{len(question)} characters"
    if not facts.reads_question:
        return "question_not_read", length, "none: this model says of every pair what changed"
    if not question.strip():
        return "empty_question", length, "a question"
    if len(question) > MAX_QUESTION_CHARS:
        return "question_too_long", length, f"at most {MAX_QUESTION_CHARS} characters"
    normalised = unicodedata.normalize("NFC", question)  # tokenizers do the same
    for token in facts.special_tokens:
        if token in normalised:
            return "special_token", repr(token), "plain text: this is a mark of the model's prompt"
    return None

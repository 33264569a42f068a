"""Check the images of a request by reading their headers, and check that the current model can answer the request."""

import unicodedata
from collections.abc import Iterator

from m3diff.datasets.tables import SIDES
from m3diff.images.open import FORMATS, ImageError, open_image, size_fault
from m3diff.models.sample_limits import fault_of_sample
from m3diff.records.errors import Fault, format_count
from m3diff.serving.batcher import AnswerRequest, ModelFacts
from m3diff.serving.refusals import RequestRefusedError, shorten, unprocessable

MAX_QUESTION_CHARS = 500  # all questions of a dialogue together
MAX_ANSWER_CHARS = 4_000  # all answers before the question together
UNKNOWN_FORMAT = "is of no known image format"
SAVE_AS_FILE = "save it as PNG or JPEG and send that file's bytes"
REPHRASE_QUESTION = "ask in other words, or leave it out"
SHORTEN_HISTORY = "leave earlier turns out, or begin a new dialogue"


# What a model can answer, by the code of the fault of a sample
SAMPLE_LIMITS = {
    "models.images_not_taken": "{expected}: this model can process no other number of images",
    "models.images_not_trained": "{expected}: this model was trained on no other number of images",
    "models.history_not_read": "none: this model does not read earlier turns of a dialogue",
    "models.history_not_trained": "none: this model was trained on single questions, without earlier turns",
}


def check_images(request: AnswerRequest, max_mpx: float) -> AnswerRequest:
    """Return the request if all files are images of an acceptable size. Only the headers are read.

    Args:
        max_mpx: maximum size of an image in millions of pixels, padded to a square.

    Raises:
        RequestRefusedError: a file is not an image, or it has too many pixels (HTTP 422).
    """
    names = SIDES if len(request.images) == 2 else ("image",)
    for content, name in zip(request.images, names, strict=False):
        _check_image(content, name, max_mpx)
    return request


def _check_image(data: bytes, name: str, max_mpx: float) -> None:
    try:
        with open_image(data) as image:
            excess = size_fault(image, max_mpx * 1e6)
    except Exception as error:  # malicious input can make a decoder raise anything
        raise unprocessable(
            code="not_an_image",
            finding=f"{format_count(len(data), 'byte')}, {_reason_of(error)}",
            limit=f"an image ({', '.join(FORMATS)})",
            remedy=SAVE_AS_FILE,
            field=name,
        ) from error
    if excess:
        raise unprocessable(
            code="too_many_pixels",
            finding=_describe_size(excess),
            limit=f"at most {max_mpx:g} million pixels, padded to a square (serve.max_image_mpx)",
            remedy="make it smaller",
            field=name,
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


def check_request(request: AnswerRequest, registered_name: str, facts: ModelFacts) -> None:
    """Check that the model can answer the request.

    A text is never changed. A text that contains a special token, such as an image placeholder, is refused, because the
    tokenizer would not treat it as text.

    Args:
        registered_name: name of the registered model, which a client may use instead of a version.

    Raises:
        RequestRefusedError: the request names another model (HTTP 404), the model was not made for or trained on such
            a sample, or a text is empty, too long, or contains a special token (HTTP 422).
    """
    if request.model is not None:
        check_model(request.model, registered_name, facts.name)
    fault = fault_of_sample(facts.takes, facts.trained_on, len(request.images), request.question, len(request.history))
    if fault is not None:
        raise _refusal_of_sample(fault, request)
    refusal = next(_refusals_of_texts(request, facts), None)
    if refusal is not None:
        raise refusal


def _refusal_of_sample(fault: Fault, request: AnswerRequest) -> RequestRefusedError:
    """Return the refusal (HTTP 422) of a sample that the model cannot answer."""
    if fault.code == "models.question_not_read":
        return unprocessable(
            code="question_not_read",
            finding=format_count(len(request.question or ""), "character"),
            limit="none: this model says of every pair what changed",
            remedy=REPHRASE_QUESTION,
            field="question",
        )
    is_about_history = fault.code in ("models.history_not_read", "models.history_not_trained")
    kind = "earlier turn" if is_about_history else "image"
    count = fault.fields["value"]
    return unprocessable(
        code=fault.code.rpartition(".")[2],
        finding=format_count(count, kind),
        limit=SAMPLE_LIMITS[fault.code].format(expected=fault.fields.get("expected")),
        remedy=fault.remedy or "",
        field="history" if is_about_history else "images",
    )


def _refusals_of_texts(request: AnswerRequest, facts: ModelFacts) -> Iterator[RequestRefusedError]:
    """Yield the refusals (HTTP 422) of the question and of the turns before it."""
    question = request.question
    if question is not None and not question.strip():
        yield unprocessable(
            code="empty_question",
            finding=format_count(len(question), "character"),
            limit="a question",
            remedy=REPHRASE_QUESTION,
            field="question",
        )
    question_chars = len(question or "") + sum(len(turn.question) for turn in request.history)
    if question_chars > MAX_QUESTION_CHARS:
        is_dialogue = bool(request.history)
        yield unprocessable(
            code="question_too_long",
            finding=format_count(question_chars, "character") + (" in all questions" if is_dialogue else ""),
            limit=f"at most {MAX_QUESTION_CHARS} characters",
            remedy=SHORTEN_HISTORY if is_dialogue else REPHRASE_QUESTION,
            field="history" if is_dialogue else "question",
        )
    answer_chars = sum(len(turn.answer) for turn in request.history)
    if answer_chars > MAX_ANSWER_CHARS:
        yield unprocessable(
            code="history_too_long",
            finding=f"{format_count(answer_chars, 'character')} in all answers",
            limit=f"at most {MAX_ANSWER_CHARS} characters",
            remedy=SHORTEN_HISTORY,
            field="history",
        )
    texts = {"question": question or ""}
    for number, turn in enumerate(request.history):
        texts[f"history.{number}.question"] = turn.question
        texts[f"history.{number}.answer"] = turn.answer
    for field, text in texts.items():
        normalised_text = unicodedata.normalize("NFC", text)  # tokenizers do the same
        for token in facts.special_tokens:
            if token in normalised_text:
                yield unprocessable(
                    code="special_token",
                    finding=repr(token),
                    limit="plain text: this is a mark of the model's prompt",
                    remedy=REPHRASE_QUESTION if field == "question" else SHORTEN_HISTORY,
                    field=field,
                )

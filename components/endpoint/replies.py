"""Extract the answer from the reply of a server."""

from typing import Any

from m3diff.endpoint.answers import EndpointAnswer
from m3diff.endpoint.transport import EndpointError
from m3diff.settings.section import ParamsError

MAX_ERROR_CHARS = 200  # maximum number of characters of a server's error in a message
MAX_REPLY_CHARS = 60  # maximum number of characters of any other reply in a message


def read_answer(reply: Any) -> EndpointAnswer:
    """Return the answer in a chat completion.

    Args:
        reply: reply object of openai.

    Raises:
        EndpointError: the reply has a success status but contains an error.
        ParamsError: the reply is not a chat completion.
    """
    if error := getattr(reply, "error", None):
        raise EndpointError("endpoint.error_reply", cause=str(error)[:MAX_ERROR_CHARS])
    if getattr(reply, "choices", None) is None:
        raise ParamsError("endpoint.no_chat_completion", value=str(reply)[:MAX_REPLY_CHARS])
    if not reply.choices:
        return EndpointAnswer("empty", "")
    finish_reason = reply.choices[0].finish_reason
    message = reply.choices[0].message
    text = remove_thoughts(_text_of_content(message.content))
    refusal = getattr(message, "refusal", None)
    if refusal or finish_reason == "content_filter":
        return EndpointAnswer("refused", refusal or text)
    if finish_reason == "length":
        return EndpointAnswer("cut", text)
    if text.strip():
        return EndpointAnswer("text", text)
    reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    return EndpointAnswer("empty", reasoning if isinstance(reasoning, str) else text)


def _text_of_content(content: Any) -> str:
    """Return the text of a message. Some servers send it in parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""


def remove_thoughts(text: str) -> str:
    """Remove a model's reasoning (`<think>...</think>`) from the start of a text.

    Some servers leave out the opening tag. If the closing tag is missing, the reasoning was cut off and the result is
    empty.
    """
    _, closing_tag, answer = text.partition("</think>")
    if closing_tag:
        return answer.lstrip()
    is_only_reasoning = text.lstrip().startswith("<think>")
    return "" if is_only_reasoning else text

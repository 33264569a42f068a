"""A client of OpenAI-compatible chat endpoints that asks nothing twice.

Every answer is kept by the content of its question, in a file of JSON Lines that people can read: a second run asks
nothing, and one that was killed goes on. A server that puts a question off (429) or fails (5xx) is asked again, after
the time that it names. Refusals, empty answers and truncated answers are each recorded as a distinct outcome; a
rejected request (400, 413, 422) counts as refused where the server answered others that were asked with it. The key is
in an environment variable, and in no file.
"""

import base64
import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator

from m3diff.images.open import load_image, open_image
from m3diff.records.files import sha256
from m3diff.records.progress import progress
from m3diff.settings.section import ParamsError

if TYPE_CHECKING:
    import openai

RETRIES = 5  # of a request that the server puts off or fails; the client waits as the server asks
CONCURRENT = 8
WINDOW = 32 * CONCURRENT  # questions that wait for a thread or are asked: each takes 2 kB
# States of a reply: the question is at fault, or its form; and: later
NOT_TAKEN, PUT_OFF = (400, 413, 422), (408, 409, 425, 429)

URL = re.compile(r"https?://(\[[\da-f:]+\]|[^\s/:\[\]]+)(:[1-9]\d*)?(/\S*)?", re.IGNORECASE)


def endpoint_url(text: str) -> str:
    """The URL of an endpoint as parameters and the command line may have it; reports show it, so it holds no key.

    Raises:
        ValueError: it is none; the message does not repeat what may be a key.
    """
    if "@" in text or "?" in text or "#" in text:
        raise ValueError(
            "expected a URL without a key or a user, found one with '@', '?' or '#'; the key belongs into the "
            "environment variable that key_variable names"
        )
    if not URL.fullmatch(text):
        raise ValueError(f"expected http://... or https://..., up to and with /v1, found {text!r}")
    return text


EndpointUrl = Annotated[str, AfterValidator(endpoint_url)]  # a field of a section

THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


def on_this_machine(url: str) -> bool:
    """True where what is sent there stays on this machine; no proxy of the environment gets it then."""
    return urlsplit(url).hostname in THIS_MACHINE


class Question(NamedTuple):
    """A user's message, with the images before the text."""

    text: str
    images: tuple[Path, ...] = ()
    system: str = ""
    seed: int | None = None
    n: int = 0  # which of several answers to the same question


Kind = Literal["text", "refused", "empty", "cut"]
FORGOTTEN = "forgotten"


class Answer(NamedTuple):
    """`text` is what was asked for where `kind` is "text"; else the reason of a refusal, the beginning of a truncated
    answer, or the reasoning of an empty one."""

    kind: Kind
    text: str


class Answers:
    """The answers so far, in a file: a line of JSON for each, on the disk before the next question is asked.

    A line that is no answer, such as one that is torn by a kill, is read as none. A line of the kind "forgotten" takes
    the earlier answer to its question back.

    Attributes:
        known: answers by the key of their question.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        self.known: dict[str, Answer] = {}
        data = path.read_bytes() if path.is_file() else b""
        self.torn = bool(data) and not data.endswith(b"\n")
        for line in data.split(b"\n"):
            with suppress(ValueError, TypeError, KeyError):
                entry = json.loads(line)
                key, kind, text = entry["key"], entry["kind"], entry["answer"]
                if kind == FORGOTTEN:
                    self.known.pop(key, None)
                elif kind in get_args(Kind) and isinstance(key, str) and isinstance(text, str):
                    self.known[key] = Answer(kind, text)

    def keep(self, key: str, facts: Mapping[str, Any], answer: Answer) -> None:
        """Write one answer, down to the disk."""
        self._append({"key": key, **facts, "kind": answer.kind, "answer": answer.text})
        self.known[key] = answer

    def forget(self, key: str) -> None:
        """Take an answer back, so that its question is asked again."""
        self._append({"key": key, "kind": FORGOTTEN, "answer": ""})
        self.known.pop(key, None)

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        with self.lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(b"\n" + line if self.torn else line)
                file.flush()
                os.fsync(file.fileno())
            self.torn = False


class Endpoint:
    """A model behind an endpoint, with its answers so far.

    Args:
        url: up to and with `/v1`.
        key_variable: the environment variable that holds the key; servers of one's own need none.
        store: the file of the answers; several models may share it.
        max_tokens: of an answer; None: as the server has it.
    """

    def __init__(
        self, url: str, model: str, key_variable: str, timeout_s: float, store: Path, max_tokens: int | None = None
    ) -> None:
        self.url, self.model, self.key_variable, self.timeout_s = url, model, key_variable, timeout_s
        self.max_tokens = max_tokens
        self.answers = Answers(store)

    def ask(self, questions: Sequence[Question], told: str) -> list[Answer]:
        """The answer to each question, in order; `told` names the work on the progress bar.

        Raises:
            ParamsError: the endpoint refuses the key, the model or the form of the questions.
            ConnectionError: it cannot be reached, or goes on failing; what it answered is kept.
        """
        keys = [self.key(question) for question in questions]
        new = {key: one for key, one in zip(keys, questions, strict=True) if key not in self.answers.known}
        if new:
            self._ask(new, told, others_answered=len(new) < len(set(keys)))
        return [self.answers.known[key] for key in keys]

    def forget(self, questions: Iterable[Question]) -> None:
        """Take the answers back, so that the next run asks again."""
        for question in questions:
            self.answers.forget(self.key(question))

    def key(self, question: Question) -> str:
        return hashlib.sha256(json.dumps(self._facts(question), sort_keys=True).encode()).hexdigest()

    def _facts(self, question: Question) -> dict[str, Any]:
        return {
            "model": self.model,
            "system": question.system,
            "question": question.text,
            "images": [sha256(path) for path in question.images],
            "seed": question.seed,
            "n": question.n,
            "max_tokens": self.max_tokens,
        }

    def _ask(self, new: Mapping[str, Question], told: str, others_answered: bool) -> None:
        import openai

        client = openai.OpenAI(
            base_url=self.url,
            api_key=os.environ.get(self.key_variable) or "none",
            max_retries=RETRIES,
            timeout=self.timeout_s,
            http_client=openai.DefaultHttpxClient(trust_env=False) if on_this_machine(self.url) else None,
        )

        def ask_one(key: str) -> bool:
            """True unless the question was rejected."""
            answer = self._answer(client, new[key])
            if isinstance(answer, Answer):
                self.answers.keep(key, self._facts(new[key]), answer)
            else:
                rejected[key] = answer
            return isinstance(answer, Answer)

        rejected: dict[str, openai.APIStatusError] = {}
        keys = list(new)
        windows = (keys[start : start + WINDOW] for start in range(0, len(keys), WINDOW))
        with client, ThreadPoolExecutor(CONCURRENT) as pool:
            try:
                asked = (answered for window in windows for answered in pool.map(ask_one, window))
                for answered in progress(asked, told, len(new), "question"):
                    others_answered |= answered
                    if not others_answered and len(rejected) >= CONCURRENT:  # so many that it is their form
                        break
            finally:
                pool.shutdown(cancel_futures=True)
        for key, error in rejected.items():
            if not others_answered:
                raise ParamsError(self._told(error, new[key]))
            self.answers.keep(key, self._facts(new[key]), Answer("refused", error.message))

    def _answer(self, client: Any, question: Question) -> "Answer | openai.APIStatusError":
        import openai

        try:
            return read_answer(client.chat.completions.create(**self._request(question)))
        except openai.APIStatusError as error:
            if error.code == "content_filter":
                return Answer("refused", error.message)
            if error.status_code in NOT_TAKEN:
                return error
            later = error.status_code >= 500 or error.status_code in PUT_OFF
            raise (ConnectionError if later else ParamsError)(self._told(error, question)) from error
        except (openai.OpenAIError, json.JSONDecodeError) as error:  # not reached, or the reply was cut on its way
            raise ConnectionError(self._told(error, question)) from error

    def _request(self, question: Question) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": data_url(path)}} for path in question.images]
        text, system = in_unicode(question.text), in_unicode(question.system)
        content: Any = [*parts, {"type": "text", "text": text}] if parts else text
        messages = [{"role": "system", "content": system}] if system else []
        request = {"model": self.model, "messages": [*messages, {"role": "user", "content": content}], "temperature": 0}
        optional = {"seed": question.seed, "max_tokens": self.max_tokens}
        return request | {name: value for name, value in optional.items() if value is not None}

    def _told(self, error: Exception, question: Question) -> str:
        about = ", ".join(map(str, question.images)) or repr(question.text[:60])
        return f"{self.url}, model {self.model!r}: {type(error).__name__}: {error}; asked about {about}"


def in_unicode(text: str) -> str:
    """The text with a question mark for each half of a character (a lone surrogate), which no file or server takes."""
    return text.encode("utf-8", "replace").decode()


def without_thoughts(text: str) -> str:
    """The text after `<think>...</think>`; servers may leave the first mark out."""
    before, end, said = text.partition("</think>")
    if end:
        return said.lstrip()
    return "" if before.lstrip().startswith("<think>") else text


def data_url(path: Path) -> str:
    """The image inside a URL, as the project's own models see it: upright RGB, and nothing of where and how it was
    taken.

    A JPEG in colour is encoded anew by its own tables: it keeps its size and is off by less than a grey level in the
    mean, while a photograph as PNG has some nine times as many bytes, more than servers take. All else goes as PNG.

    Raises:
        ImageError: it cannot be read.
    """
    from PIL.JpegImagePlugin import JpegImageFile, get_sampling

    image, kind, made = load_image(path), "png", io.BytesIO()
    image.info.clear()  # Pillow would write a comment and a colour profile anew
    with open_image(path.read_bytes()) as file:
        if isinstance(file, JpegImageFile) and file.mode == "RGB":
            kind = "jpeg"
            image.save(made, "JPEG", qtables=file.quantization, subsampling=get_sampling(file))
        else:
            image.save(made, "PNG")
    return f"data:image/{kind};base64,{base64.b64encode(made.getvalue()).decode()}"


def read_answer(reply: Any) -> Answer:
    """The answer in a chat completion.

    Raises:
        ConnectionError: it is an error that came as if it were an answer.
        ParamsError: it is none.
    """
    if error := getattr(reply, "error", None):
        raise ConnectionError(f"the endpoint answers with an error in place of a chat completion: {str(error)[:200]}")
    if getattr(reply, "choices", None) is None:
        raise ParamsError(f"the endpoint answers with no chat completion ({str(reply)[:60]!r}); its url ends in /v1")
    if not reply.choices:
        return Answer("empty", "")
    end, message = reply.choices[0].finish_reason, reply.choices[0].message
    said = message.content or ""
    if isinstance(said, list):  # parts, as some servers send them
        said = "".join(str(part.get("text", "")) for part in said if isinstance(part, dict))
    text = without_thoughts(said)
    if getattr(message, "refusal", None) or end == "content_filter":
        return Answer("refused", getattr(message, "refusal", None) or text)
    if end == "length":
        return Answer("cut", text)
    if text.strip():
        return Answer("text", text)
    reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    return Answer("empty", reasoning if isinstance(reasoning, str) else text)

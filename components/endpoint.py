"""A client of OpenAI-compatible chat endpoints that asks nothing twice.

Every answer is kept by the content of its question, in a file of JSON Lines that people can read: a second run asks
nothing, and one that was killed goes on. A server that puts a question off (429) or fails (5xx) is asked again, after
the time that it names. Refusals, empty answers and truncated answers are each recorded as a distinct outcome; a
rejected request (400, 413, 422) counts as refused where the server took others of the same form. The key is in an
environment variable, and in no file.
"""

import base64
import hashlib
import io
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
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
WINDOW = 4 * CONCURRENT  # questions that wait for a thread or are asked
NOT_TAKEN, PUT_OFF = (400, 413, 422), (408, 409, 425, 429)
"""States of a reply: the question is at fault, or its form; and: later."""
PNG, PLAIN_CHUNKS = b"\x89PNG\r\n\x1a\n", {b"IHDR", b"IDAT", b"IEND", b"sRGB", b"pHYs"}
RGB_OF_8_BITS = b"\x08\x02"
"""Bytes 24 and 25 of a PNG."""


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
    known = False
    with suppress(ValueError):
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    if not known or any(letter.isspace() for letter in text):
        raise ValueError(f"expected http://... or https://..., up to and with /v1, found {text!r}")
    return text


EndpointUrl = Annotated[str, AfterValidator(endpoint_url)]
"""A field of a section."""

THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


def on_this_machine(url: str) -> bool:
    """True where what is sent there stays on this machine; no proxy of the environment gets it then."""
    return urlsplit(url).hostname in THIS_MACHINE


@dataclass(frozen=True)
class Question:
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


Form = tuple[Any, ...]


def form_of(facts: Mapping[str, Any]) -> Form:
    """The form of a question, which a server takes or not, whatever the words: the model, and which parts it has."""
    has = [bool(facts.get("system")), facts.get("seed") is not None, len(facts.get("images") or ())]
    return (facts.get("model"), facts.get("max_tokens"), *has)


class Answers:
    """The answers so far, in a file: a line of JSON for each, on the disk before the next question is asked.

    A line that is no answer, such as one that is torn by a kill, is read as none. A line of the kind "forgotten" takes
    the earlier answer to its question back.

    Attributes:
        known: answers by the key of their question.
        forms: of the questions that were answered.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        self.known: dict[str, Answer] = {}
        self.forms: set[Form] = set()
        data = path.read_bytes() if path.is_file() else b""
        self.torn = bool(data) and not data.endswith(b"\n")
        for line in data.split(b"\n"):
            with suppress(ValueError, TypeError, KeyError):
                entry = json.loads(line)
                key, kind, text, form = entry["key"], entry["kind"], entry["answer"], form_of(entry)
                if kind == FORGOTTEN:
                    self.known.pop(key, None)
                elif kind in get_args(Kind) and isinstance(key, str) and isinstance(text, str):
                    self.known[key] = Answer(kind, text)
                    self.forms.add(form)

    def keep(self, key: str, facts: Mapping[str, Any], answer: Answer) -> None:
        """Write one answer, down to the disk."""
        self._append({"key": key, **facts, "kind": answer.kind, "answer": answer.text})
        with self.lock:
            self.known[key] = answer
            self.forms.add(form_of(facts))

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
            self._ask(new, told)
        return [self.answers.known[key] for key in keys]

    def forget(self, questions: Iterable[Question]) -> None:
        """Take the answers back, so that the next run asks again."""
        for question in questions:
            self.answers.forget(self.key(question))

    def key(self, question: Question) -> str:
        """Names the question by its content."""
        return hashlib.sha256(json.dumps(self._facts(question), sort_keys=True).encode()).hexdigest()

    def _facts(self, question: Question) -> dict[str, Any]:
        """All that decides an answer, as the store has it."""
        return {
            "model": self.model,
            "system": question.system,
            "question": question.text,
            "images": [sha256(path) for path in question.images],
            "seed": question.seed,
            "n": question.n,
            "max_tokens": self.max_tokens,
        }

    def _ask(self, new: Mapping[str, Question], told: str) -> None:
        """Ask in parallel; each answer is kept as it comes."""
        import openai

        client = openai.OpenAI(
            base_url=self.url,
            api_key=os.environ.get(self.key_variable) or "none",
            max_retries=RETRIES,
            timeout=self.timeout_s,
            http_client=openai.DefaultHttpxClient(trust_env=False) if on_this_machine(self.url) else None,
        )

        def ask_one(asked: tuple[str, Question]) -> tuple[str, Question, openai.APIStatusError] | None:
            key, question = asked
            answer = self._answer(client, question)
            if not isinstance(answer, Answer):
                return key, question, answer
            self.answers.keep(key, self._facts(question), answer)
            return None

        rejected: list[tuple[str, Question, openai.APIStatusError]] = []
        with client, ThreadPoolExecutor(CONCURRENT) as pool:
            try:
                for done in progress(in_window(pool, ask_one, new.items()), told, len(new), "question"):
                    rejected += [one] if (one := done.result()) else []
                    for one in list(rejected):  # another question of the form was answered: this one is refused
                        key, question, error = one
                        facts = self._facts(question)
                        if form_of(facts) in self.answers.forms:
                            self.answers.keep(key, facts, Answer("refused", error.message))
                            rejected.remove(one)
                    if len(rejected) >= CONCURRENT:  # so many that it is their form
                        break
                if rejected:
                    raise ParamsError(self._told(rejected[0][2], rejected[0][1]))
            finally:
                pool.shutdown(cancel_futures=True)

    def _answer(self, client: Any, question: Question) -> "Answer | openai.APIStatusError":
        """The answer, or the error by which the server rejects the question."""
        import openai

        request = self._request(question)
        for _ in range(RETRIES):
            try:
                return read_answer(client.chat.completions.create(**request))
            except openai.APIStatusError as error:
                if error.code == "content_filter":
                    return Answer("refused", error.message)
                if error.status_code in NOT_TAKEN:
                    return error
                later = error.status_code >= 500 or error.status_code in PUT_OFF
                raise (ConnectionError if later else ParamsError)(self._told(error, question)) from error
            except openai.OpenAIError as error:
                raise ConnectionError(self._told(error, question)) from error
            except json.JSONDecodeError as error:  # the reply was cut on its way
                torn = error
        raise ConnectionError(self._told(torn, question)) from torn

    def _request(self, question: Question) -> dict[str, Any]:
        """The body of the request; a text alone where there is no image, which every server takes."""
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


def in_window(pool: Executor, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Future[Any]]:
    """The work on each item as it is done, in no order. At most WINDOW of it waits or runs: a future takes 2 kB."""
    left, waiting = iter(items), set[Future[Any]]()
    while waiting := waiting | {pool.submit(work, item) for item in islice(left, WINDOW - len(waiting))}:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        yield from done


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

    A PNG or JPEG that is that already goes as it is. Any other JPEG in colour is encoded anew by its own tables: it
    keeps its size and is off by less than a grey level in the mean, while a photograph as PNG has some nine times as
    many bytes, more than servers take. All else goes as PNG.

    Raises:
        ImageError: it cannot be read.
    """
    from PIL.JpegImagePlugin import JpegImageFile, get_sampling

    image, data, kind, made = load_image(path), path.read_bytes(), "png", io.BytesIO()
    image.info.clear()  # Pillow would write a comment and a colour profile anew
    with open_image(data) as file:
        if isinstance(file, JpegImageFile) and file.mode == "RGB":
            kind = "jpeg"
            known = all(name == "APP14" or (name == "APP0" and held.startswith(b"JFIF")) for name, held in file.applist)
            if not known or not data.endswith(b"\xff\xd9"):
                image.save(made, "JPEG", qtables=file.quantization, subsampling=get_sampling(file))
        elif not is_plain_png(data):
            image.save(made, "PNG")
    return f"data:image/{kind};base64,{base64.b64encode(made.getvalue() or data).decode()}"


def is_plain_png(data: bytes) -> bool:
    """True of a PNG in RGB of 8 bits that holds its picture and nothing else."""
    if not data.startswith(PNG) or data[24:26] != RGB_OF_8_BITS:
        return False
    at = len(PNG)
    while at < len(data) and data[at + 4 : at + 8] in PLAIN_CHUNKS:
        at += 12 + int.from_bytes(data[at : at + 4])
    return at == len(data)


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

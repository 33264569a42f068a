"""A client of OpenAI-compatible chat endpoints that asks nothing twice.

Every answer is kept by the content of its question, in a file of JSON Lines that people can read: a second run asks
nothing, and one that was killed goes on. An answer belongs to the server that gave it: its line names the server's URL
and what `GET /v1/models` says of the model (id, root, max_model_len). Answers of another server are used only if the
user says so. A server that puts a question off (429) or fails (5xx) is asked again, after the time that it names. A
question that gets no answer in time is asked once more; after CONCURRENT such questions in a row the run ends.
Refusals, empty answers and truncated answers are each recorded as a distinct outcome; a rejected request (400, 413,
422) counts as refused where the server answered others that were asked with it. The key is in an environment variable,
and in no file.
"""

import base64
import hashlib
import io
import ipaddress
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args
from urllib.parse import urljoin, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict

from m3diff.images.open import load_image, open_image
from m3diff.records.files import flush_to_disk, sha256
from m3diff.records.progress import progress
from m3diff.settings.section import ParamsError

if TYPE_CHECKING:
    import openai

RETRIES = 5  # of a request that the server puts off or fails; the client waits as the server asks
CONCURRENT = 8
WINDOW = 32 * CONCURRENT  # questions that wait for a thread or are asked: each takes 2 kB
# States of a reply: the question is at fault, or its form; and: later
NOT_TAKEN, PUT_OFF = (400, 413, 422), (408, 409, 425, 429)
NOT_IMPLEMENTED = 501
KEEP_METHOD = (307, 308)  # redirects that send a question on as it is
ATTEMPTS = 2  # of a question that gets no answer in time: a server that hangs would hang at each of six attempts, too
CONNECT_S = 10  # for a connection, which a server that is there takes at once however slowly it answers
IDENTIFY_S = 10  # for the list of models, which needs no computation

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


@dataclass(frozen=True)
class ServerIdentity:
    """What a server says of itself. `url` is normalised; the other fields are those of its entry for the model in
    `GET /v1/models`, None if the server or the entry has none."""

    url: str
    id: str | None = None
    root: str | None = None
    max_model_len: int | None = None

    def __str__(self) -> str:
        named = {"id": self.id, "root": self.root, "max_model_len": self.max_model_len}
        facts = ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)
        return f"{self.url} ({facts})" if facts else self.url


def normalised_url(url: str) -> str:
    """The URL as it is compared: without a user, a key, a default port and slashes at its end; the host in small
    letters, and one name for this machine."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    with suppress(ValueError):
        host = ipaddress.ip_address(host).compressed
    if host in THIS_MACHINE:
        host = THIS_MACHINE[0]
    default_port = 443 if parts.scheme == "https" else 80
    port = "" if parts.port in (None, default_port) else f":{parts.port}"
    shown_host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown_host}{port}{parts.path.rstrip('/')}"


def identity_in_list(url: str, model: str, listing: str) -> ServerIdentity:
    """The identity of the server behind `url` by the text that it answers to `GET /v1/models`.

    A list without the model's name describes it if it has a single entry: some servers take an alias, or any name.
    """
    try:
        entries = json.loads(listing)["data"]
        named = [entry for entry in entries if entry["id"] == model]
        entry = (named or entries)[0] if named or len(entries) == 1 else {}
    except (ValueError, TypeError, KeyError, RecursionError):
        entry = {}
    return _identity_of_entry(normalised_url(url), entry)


def _identity_of_entry(url: str, entry: Mapping[str, Any]) -> ServerIdentity:
    texts = {name: entry[name] for name in ("id", "root") if isinstance(entry.get(name), str)}
    length = entry.get("max_model_len")
    return ServerIdentity(url=url, **texts, max_model_len=length if type(length) is int else None)


Kind = Literal["text", "refused", "empty", "cut"]
FORGOTTEN = "forgotten"


class Answer(NamedTuple):
    """`text` is what was asked for where `kind` is "text"; else the reason of a refusal, the beginning of a truncated
    answer, or the reasoning of an empty one."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class StoredAnswer:
    """An answer with the server that gave it and the time, in UTC; None if an earlier version of this module wrote the
    line, which recorded neither."""

    answer: Answer
    server: ServerIdentity | None = None
    date: str | None = None


class AnswerSource(BaseModel):
    """How many answers of a run one server gave, and how many of them are from the cache and from when: the first and
    the last time in UTC. A server of None was not recorded."""

    model_config = ConfigDict(frozen=True)

    url: str | None
    id: str | None
    root: str | None
    max_model_len: int | None
    answers: int
    cached: int
    cached_from: str | None
    cached_until: str | None


class RedirectError(ParamsError):
    """The URL leads to another server, or in a way that loses the question."""


class OtherServerError(ParamsError):
    """Stored answers came from another server, or from one that was not recorded.

    Attributes:
        path: the file of the answers.
        answers: how many there are.
        servers: whose they are, with how many of each; None: not recorded.
    """

    def __init__(self, path: Path, servers: Counter[ServerIdentity | None], asked: str, count: int, option: str):
        self.path = path
        self.answers = servers.total()
        self.servers = servers
        listed = ", ".join(f"{number:,} of {server or NOT_RECORDED}" for server, number in servers.most_common(3))
        more = f" and {len(servers) - 3} other servers" if len(servers) > 3 else ""
        super().__init__(
            f"{path}: {self.answers:,} of {count:,} answers are not known to be of {asked}: they are {listed}{more}; "
            f"{option}"
        )


NOT_RECORDED = "a server that was not recorded"
REUSE_OPTION = "write `reuse_answers: true` into the section to use them, `reuse_answers: false` to ask anew"
NUMBERS = {1: "one", 2: "two"}


class Answers:
    """The answers so far, in a file: a line of JSON for each, on the disk before the next question is asked.

    A line that is no answer, such as one that is torn by a kill, is read as none. A line of the kind "forgotten" takes
    the earlier answer of its server to its question back, or those of all servers if it has no field `server`.

    Attributes:
        by_key: the answers to each question, of each server the last one, in the order of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        self.by_key: dict[str, dict[ServerIdentity | None, StoredAnswer]] = {}
        data = path.read_bytes() if path.is_file() else b""
        self.torn = bool(data) and not data.endswith(b"\n")
        for line in data.split(b"\n"):
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                self._read(json.loads(line))

    def _read(self, entry: Any) -> None:
        key, kind, text, server = entry["key"], entry["kind"], entry["answer"], read_server(entry.get("server"))
        if kind == FORGOTTEN and "server" in entry:
            self._drop(key, server)
        elif kind == FORGOTTEN:
            self.by_key.pop(key, None)
        elif kind in get_args(Kind) and isinstance(key, str) and isinstance(text, str):
            date = entry.get("date")
            self._add(key, StoredAnswer(Answer(kind, text), server, date if isinstance(date, str) else None))

    def _add(self, key: str, stored: StoredAnswer) -> None:
        self._drop(key, stored.server)  # so that the new one is the last
        self.by_key.setdefault(key, {})[stored.server] = stored

    def _drop(self, key: str, server: ServerIdentity | None) -> None:
        of_servers = self.by_key.get(key, {})
        of_servers.pop(server, None)
        if not of_servers:
            self.by_key.pop(key, None)

    @property
    def known(self) -> dict[str, Answer]:
        """The last answer to each question, whoever gave it."""
        return {key: list(of_servers.values())[-1].answer for key, of_servers in self.by_key.items()}

    def of(self, key: str) -> list[StoredAnswer]:
        """The answers to a question, the last one of each server, in the order of the file."""
        return list(self.by_key.get(key, {}).values())

    def keep(
        self, key: str, facts: Mapping[str, Any], answer: Answer, server: ServerIdentity | None = None
    ) -> StoredAnswer:
        """Write one answer with its server and the time, down to the disk."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        stored = StoredAnswer(answer, server, now)
        origin = {"server": asdict(server) if server else None, "date": now}
        self._append({"key": key, **facts, **origin, "kind": answer.kind, "answer": answer.text})
        with self.lock:
            self._add(key, stored)
        return stored

    def forget(self, key: str, server: ServerIdentity | None) -> None:
        """Take a server's answer back, so that its question is asked again."""
        origin = asdict(server) if server else None
        self._append({"key": key, "server": origin, "kind": FORGOTTEN, "answer": ""})
        self._drop(key, server)

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        with self.lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(b"\n" + line if self.torn else line)
                file.flush()
                flush_to_disk(file.fileno())
            self.torn = False


def read_server(value: Any) -> ServerIdentity | None:
    """The server of a line of the store; None if the line names none."""
    if not isinstance(value, dict) or not isinstance(value.get("url"), str):
        return None
    return _identity_of_entry(value["url"], value)


class SilenceWatch:
    """Tells a slow server from one that hangs: it counts the questions in a row that got no answer in time.

    While there is such a question, a new one is asked only after another answer has come or no question is under way;
    else each free thread would wait for the time limit again although the server hangs.

    Args:
        report_first: called at the first attempt that had no answer in time.

    Attributes:
        unanswered: questions without an answer in time since the last answer.
        stopped: the run ends; nothing more is asked.
    """

    def __init__(self, report_first: Callable[[], None]) -> None:
        self.condition = threading.Condition()
        self.report_first = report_first
        self.has_reported = False
        self.unanswered = 0
        self.under_way = 0
        self.stopped = False

    def begin(self) -> bool:
        """Wait until a question may be asked; False if the run ends."""
        with self.condition:
            self.condition.wait_for(lambda: self.stopped or not (self.unanswered and self.under_way))
            self.under_way += not self.stopped
            return not self.stopped

    def end(self, answered: bool) -> None:
        """Count the outcome of a question that began; the run ends after CONCURRENT in a row without an answer."""
        with self.condition:
            self.under_way -= 1
            self.unanswered = 0 if answered else self.unanswered + 1
            self.stopped |= self.unanswered >= CONCURRENT
            self.condition.notify_all()

    def note(self) -> None:
        """Report the first attempt of the run that had no answer in time."""
        with self.condition:
            is_first = not self.has_reported
            self.has_reported = True
        if is_first:
            self.report_first()

    def stop(self) -> None:
        with self.condition:
            self.stopped = True
            self.condition.notify_all()


class Endpoint:
    """A model behind an endpoint, with its answers so far.

    Args:
        url: up to and with `/v1`.
        key_variable: the environment variable that holds the key; servers of one's own need none.
        timeout_s: the time limit of one question.
        store: the file of the answers; several models may share it.
        max_tokens: of an answer; None: as the server has it.
        reuse: what to do with stored answers that are not known to be of this server. None: raise OtherServerError;
            True: use them; False: ask this server, and keep both.
        option: how the user decides that, for the message of OtherServerError.

    Attributes:
        chosen: the answers that `ask` gave so far, by the key of their question.
        sources: whose answers the last call of `ask` gave.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key_variable: str,
        timeout_s: float,
        store: Path,
        max_tokens: int | None = None,
        reuse: bool | None = None,
        option: str = REUSE_OPTION,
    ) -> None:
        self.url, self.model, self.key_variable, self.timeout_s = url, model, key_variable, timeout_s
        self.max_tokens = max_tokens
        self.reuse = reuse
        self.option = option
        self.answers = Answers(store)
        self.chosen: dict[str, StoredAnswer] = {}
        self.sources: list[AnswerSource] = []

    def ask(self, questions: Sequence[Question], told: str) -> list[Answer]:
        """The answer to each question, in order; `told` names the work on the progress bar.

        The server is needed, and asked for its identity, only if a question must be sent. A line says how many answers
        are from the cache, whose they are and from when.

        Raises:
            OtherServerError: stored answers are not known to be of this server, and `reuse` is None.
            ParamsError: the endpoint refuses the key, the model or the form of the questions.
            ConnectionError: it cannot be reached, goes on failing, or gives no answer in time; what it answered is
                kept.
        """
        keys = [self.key(question) for question in questions]
        distinct = dict(zip(keys, questions, strict=True))
        server = self._server_without_contact(distinct)
        if server is not None:
            stored = self._choose(distinct, server)
        else:
            self._refuse_other_urls(distinct)
            with self._client() as client:
                server = self._identify_or_reuse(client, distinct)
                stored = self._choose(distinct, server)
                new = {key: question for key, question in distinct.items() if key not in stored}
                if new:
                    has_answered = any(answer.server == server for answer in stored.values())
                    try:
                        self.chosen |= self._ask(client, server, new, told, has_answered)
                    except (ConnectionError, ParamsError):
                        self._answers_after_change(client, server, new, distinct)
                        raise
                    self.chosen |= self._answers_after_change(client, server, new, distinct)
        self.chosen |= stored
        self.sources = sources_of([self.chosen[key] for key in keys], [key in stored for key in keys])
        if stored:
            print(f"{told}: {describe_cache(self.sources, self.answers.path)}", flush=True)
        return [self.chosen[key].answer for key in keys]

    def _server_without_contact(self, keys: Iterable[str]) -> ServerIdentity | None:
        """The server whose answers are given if no question is sent; None if one must be, or if the user wants the
        answers of the present server alone."""
        if self.reuse is False:
            return None
        if server := self._server_of_all(keys):
            return server
        if all(self.answers.of(key) for key in keys):
            at_url = [stored.server for key in keys for stored in self._at_url(key)]
            return at_url[-1] if at_url else ServerIdentity(normalised_url(self.url))
        return None

    def _server_of_all(self, keys: Iterable[str]) -> ServerIdentity | None:
        """The server at this URL that has answered each of the questions; of several the last."""
        counts = Counter(stored.server for key in keys for stored in self._at_url(key))
        complete = [server for server, count in counts.items() if count == len(list(keys))]
        return complete[-1] if complete else None

    def _at_url(self, key: str) -> list[StoredAnswer]:
        url = normalised_url(self.url)
        return [stored for stored in self.answers.of(key) if stored.server is not None and stored.server.url == url]

    def _refuse_other_urls(self, keys: Iterable[str]) -> None:
        """Raise OtherServerError before the server is asked for anything, if answers are there of other URLs alone."""
        others = {
            key: self.answers.of(key)[-1].server
            for key in keys
            if self.reuse is None and self.answers.of(key) and not self._at_url(key)
        }
        self._refuse(others, keys, f"{normalised_url(self.url)}, model {self.model!r}")

    def _choose(self, keys: Iterable[str], server: ServerIdentity) -> dict[str, StoredAnswer]:
        """Choose the stored answers that may be given as the server's, by `reuse`.

        Raises:
            OtherServerError: there are others, here or among the answers that this object gave before: a server that
                was restarted with other weights meanwhile would make one result of two models.
        """
        choice: dict[str, StoredAnswer] = {}
        others: dict[str, ServerIdentity | None] = {}
        if self.reuse is not True:
            others = {key: stored.server for key, stored in self.chosen.items() if stored.server != server}
        for key in keys:
            own = [stored for stored in self.answers.of(key) if stored.server == server]
            candidates = own or self._at_url(key) or self.answers.of(key)
            if own or (candidates and self.reuse):
                choice[key] = candidates[-1]
            elif candidates and self.reuse is None:
                others[key] = candidates[-1].server
        self._refuse(others, keys, f"{server}, model {self.model!r}")
        return choice

    def _refuse(self, others: Mapping[str, ServerIdentity | None], keys: Iterable[str], asked: str) -> None:
        if others:
            count = len({*keys, *self.chosen})
            raise OtherServerError(self.answers.path, Counter(others.values()), asked, count, self.option)

    def _answers_after_change(
        self, client: Any, server: ServerIdentity, asked: Mapping[str, Question], keys: Iterable[str]
    ) -> dict[str, StoredAnswer]:
        """The answers to the questions just asked, without their server if another model answers there by now; nothing
        if the same one does, or if the server does not say.

        Raises:
            OtherServerError: another model answers, and `reuse` is not true.
        """
        if server.id is None:
            return {}
        try:
            present = self._identify(client.with_options(max_retries=0))
        except ConnectionError:
            return {}
        if present.id is None or present == server:
            return {}
        unsure: dict[str, StoredAnswer] = {}
        for key, question in asked.items():
            for stored in self.answers.of(key):
                if stored.server == server:
                    unsure[key] = self.answers.keep(key, self._facts(question), stored.answer)
                    self.answers.forget(key, server)
        if self.reuse is not True:
            now = f"{present}, which was {server} when the questions began, model {self.model!r}"
            self._refuse(dict.fromkeys(unsure), keys, now)
        return unsure

    def _client(self) -> Any:
        import openai

        return openai.OpenAI(
            base_url=self.url,
            api_key=os.environ.get(self.key_variable) or "none",
            max_retries=RETRIES,
            timeout=openai.Timeout(self.timeout_s, connect=min(CONNECT_S, self.timeout_s)),
            http_client=http_client(trust_env=not on_this_machine(self.url)),
        )

    def _identify_or_reuse(self, client: Any, keys: Iterable[str]) -> ServerIdentity:
        """The server's identity; if it cannot be reached, that of the one at this URL that has answered everything."""
        try:
            return self._identify(client)
        except ConnectionError:
            server = self._server_of_all(keys)
            if server is None:
                raise
            return server

    def _identify(self, client: Any) -> ServerIdentity:
        """What `GET /v1/models` says of the model; the URL alone if the server has no such list.

        Raises:
            ConnectionError: the server cannot be reached.
        """
        import openai

        limit_s = min(IDENTIFY_S, self.timeout_s)
        try:
            reply = client.with_options(timeout=limit_s).models.with_raw_response.list()
        except (openai.APIStatusError, openai.APITimeoutError):
            return ServerIdentity(normalised_url(self.url))
        except openai.OpenAIError as error:
            self._refuse_redirect(error)
            raise ConnectionError(
                f"{self.url}, model {self.model!r}: {describe_error(error)}; asked for its list of models"
            ) from error
        return identity_in_list(self.url, self.model, reply.text)

    def forget(self, questions: Iterable[Question]) -> None:
        """Take the answers that `ask` gave back, so that the next run asks again."""
        for question in questions:
            key = self.key(question)
            stored = self.chosen.pop(key, None)
            if stored is not None:
                self.answers.forget(key, stored.server)

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

    def _ask(
        self, client: Any, server: ServerIdentity, new: Mapping[str, Question], told: str, has_answered: bool
    ) -> dict[str, StoredAnswer]:
        """Ask each question and keep its answer; `has_answered`: the server took other questions in an earlier run."""
        import openai

        watch = SilenceWatch(lambda: self._note_silence(told))
        answers: dict[str, StoredAnswer] = {}
        rejected: dict[str, openai.APIStatusError] = {}
        unanswered: list[str] = []

        def ask_one(key: str) -> bool:
            """True if the question was answered; False if it was rejected, had no answer in time, or was not sent."""
            if not watch.begin():
                return False
            outcome = None
            try:
                outcome = self._answer_in_time(client, new[key], watch)
            finally:
                watch.end(answered=outcome is not None)
            if outcome is None:
                unanswered.append(key)
            elif isinstance(outcome, Answer):
                answers[key] = self.answers.keep(key, self._facts(new[key]), outcome, server)
            else:
                rejected[key] = outcome
            return isinstance(outcome, Answer)

        keys = list(new)
        windows = (keys[start : start + WINDOW] for start in range(0, len(keys), WINDOW))
        with ThreadPoolExecutor(CONCURRENT) as pool:
            try:
                asked = (answered for window in windows for answered in pool.map(ask_one, window))
                for answered in progress(asked, told, len(new), "question"):
                    has_answered |= answered
                    if not has_answered and len(rejected) >= CONCURRENT:  # so many that it is their form
                        break
                    if watch.stopped:
                        break
            finally:
                watch.stop()
                pool.shutdown(cancel_futures=True)
        for key, error in rejected.items():
            if not has_answered:
                raise ParamsError(self._told(error, new[key]))
            answers[key] = self.answers.keep(key, self._facts(new[key]), Answer("refused", error.message), server)
        if unanswered:
            raise ConnectionError(self._describe_silence(new, unanswered, len(answers), watch.unanswered))
        return answers

    def _answer_in_time(
        self, client: Any, question: Question, watch: "SilenceWatch"
    ) -> "Answer | openai.APIStatusError | None":
        """The answer, or the rejection; None if neither attempt ends in time."""
        import openai

        for _ in range(ATTEMPTS):
            try:
                return self._answer(client, question)
            except openai.APITimeoutError:
                watch.note()
            if watch.stopped:
                break
        return None

    def _note_silence(self, told: str) -> None:
        """Show that the work goes on: until the first answer the progress bar stands still."""
        print(
            f"{told}: {self.url} gave no answer to a question within {self.timeout_s:g} s; such a question is asked "
            f"{ATTEMPTS} times",
            file=sys.stderr,
            flush=True,
        )

    def _describe_silence(
        self, new: Mapping[str, Question], unanswered: Sequence[str], answers: int, in_a_row: int
    ) -> str:
        """The sentence of a server that gives no answer in time: one that hangs, or one that is slow."""
        counts = {len(new[key].images) for key in unanswered}
        images = f" with {NUMBERS.get(max(counts), max(counts))} image{'s' * (max(counts) > 1)}" if max(counts) else ""
        take_images = ""
        if images:
            take_images = (
                "see with a single question whether the server takes as many images in a message (vLLM: "
                f"`--limit-mm-per-prompt '{{\"image\": {max(counts)}}}'`), or "
            )
        silent = f"{len(unanswered):,} question{'s' * (len(unanswered) > 1)}{images}"
        hangs = not answers or in_a_row >= CONCURRENT
        outcome = f"it answered nothing to {silent}" if hangs else f"it answered {answers:,} and nothing to {silent}"
        return (
            f"{self.url}, model {self.model!r}: {outcome} within {self.timeout_s:g} s, each asked {ATTEMPTS} times; "
            f"{take_images}raise timeout_s if it is slow"
        )

    def _answer(self, client: Any, question: Question) -> "Answer | openai.APIStatusError":
        import openai

        try:
            return read_answer(client.chat.completions.create(**self._request(question)))
        except openai.APITimeoutError:
            raise
        except openai.APIStatusError as error:
            if error.code == "content_filter":
                return Answer("refused", error.message)
            if error.status_code in NOT_TAKEN:
                return error
            later = error.status_code >= 500 or error.status_code in PUT_OFF
            raise (ConnectionError if later else ParamsError)(self._told(error, question)) from error
        except (openai.OpenAIError, json.JSONDecodeError) as error:
            self._refuse_redirect(error)
            # not reached, or the reply was cut on its way
            raise ConnectionError(self._told(error, question)) from error

    def _refuse_redirect(self, error: Exception) -> None:
        if isinstance(error.__cause__, RedirectError):
            raise RedirectError(f"{self.url}: {error.__cause__}") from error

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
        return f"{self.url}, model {self.model!r}: {describe_error(error)}; asked about {about}"


def describe_error(error: Exception) -> str:
    """An error in words, with its cause where openai says "Connection error." alone."""
    cause = error.__cause__
    because = f" ({type(cause).__name__}: {cause})" if cause is not None and str(cause) not in str(error) else ""
    return f"{type(error).__name__}: {error}{because}"


def sources_of(answers: Iterable[StoredAnswer], cached: Iterable[bool]) -> list[AnswerSource]:
    """How many of the answers each server gave, and how many of these were in the cache before the run."""
    of_servers: dict[ServerIdentity | None, list[tuple[StoredAnswer, bool]]] = {}
    for stored, is_cached in zip(answers, cached, strict=True):
        of_servers.setdefault(stored.server, []).append((stored, is_cached))
    sources = []
    for server, given in of_servers.items():
        dates = sorted(stored.date for stored, is_cached in given if is_cached and stored.date)
        source = AnswerSource(
            url=server.url if server else None,
            id=server.id if server else None,
            root=server.root if server else None,
            max_model_len=server.max_model_len if server else None,
            answers=len(given),
            cached=sum(is_cached for _, is_cached in given),
            cached_from=dates[0] if dates else None,
            cached_until=dates[-1] if dates else None,
        )
        sources.append(source)
    return sources


def describe_cache(sources: Sequence[AnswerSource], path: Path) -> str:
    """A line for people: how many answers are from the cache, whose they are and from when, by the day in UTC."""
    parts = []
    for source in sources:
        if not source.cached:
            continue
        identity = ServerIdentity(source.url, source.id, source.root, source.max_model_len) if source.url else None
        days = dict.fromkeys(date[:10] for date in (source.cached_from, source.cached_until) if date)
        when = f"from {' to '.join(days)}" if days else "of an unknown date"
        parts.append(f"{source.cached:,} of {identity or NOT_RECORDED}, {when}")
    cached = sum(source.cached for source in sources)
    total = sum(source.answers for source in sources)
    return f"{cached:,} of {total:,} answers are from the cache {path}: {'; '.join(parts)}"


def http_client(trust_env: bool) -> Any:
    """openai's HTTP client with a limit for a whole reply: the library's own limit is for each read, so a server that
    sends a byte now and then would keep a question for ever. openai repeats what timed out as often as what failed; an
    error of its own class it passes on, and this client raises that.
    """
    import httpx2
    import openai

    class BodyInTime(httpx2.SyncByteStream):
        def __init__(self, stream: Any, deadline: float) -> None:
            self.stream = stream
            self.deadline = deadline

        def __iter__(self) -> Iterator[bytes]:
            for chunk in self.stream:
                if time.monotonic() > self.deadline:
                    raise httpx2.ReadTimeout("the reply is not whole in time")
                yield chunk

        def close(self) -> None:
            self.stream.close()

    class ClientInTime(openai.DefaultHttpxClient):
        def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            deadline = time.monotonic() + request.extensions["timeout"]["read"]
            try:
                response = super().send(request, stream=True, **options)
                response.stream = BodyInTime(response.stream, deadline)
                if response.status_code == NOT_IMPLEMENTED:  # openai would ask five times more
                    response.headers["x-should-retry"] = "false"
                if not stream:
                    try:
                        response.read()
                    finally:
                        response.close()
            except httpx2.ConnectTimeout as error:  # not reached, so the question is not what it hangs on
                raise httpx2.ConnectError(str(error)) from error
            except httpx2.TimeoutException as error:
                raise openai.APITimeoutError(request=request) from error
            return response

    return ClientInTime(trust_env=trust_env, event_hooks={"response": [refuse_redirect]})


def refuse_redirect(response: Any) -> None:
    """Raise openai.OpenAIError, which openai passes on and does not repeat, for a redirect that may not be followed."""
    import openai

    target = refused_redirect(response.request.method, str(response.request.url), response)
    if target is not None:
        why = f"redirects to {target}; write the URL that answers itself, up to and with /v1"
        raise openai.OpenAIError(why) from RedirectError(why)


def refused_redirect(method: str, url: str, response: Any) -> str | None:
    """Where a reply leads that no question may follow; None for any other reply.

    Answers belong to the server of the URL that the user wrote, so the origin stays the same. A question that is
    redirected with 301 to 303 would go on as GET, without its text.
    """
    if not response.has_redirect_location:
        return None
    target = urljoin(url, response.headers["location"])
    try:
        is_same_origin = normalised_url(urljoin(url, "/")) == normalised_url(urljoin(target, "/"))
        shown = normalised_url(target)
    except ValueError:  # a port or a host that is none
        is_same_origin = False
        shown = repr(target[:100])
    keeps_method = method == "GET" or response.status_code in KEEP_METHOD
    return None if is_same_origin and keeps_method else shown


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

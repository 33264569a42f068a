"""Define the answers of servers and the file that caches them."""

import json
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict

from m3diff.endpoint.servers import ServerIdentity, read_server
from m3diff.records.errors import Fault, format_count
from m3diff.records.files import flush_to_disk
from m3diff.settings.section import ParamsError

AnswerKind = Literal["text", "refused", "empty", "cut"]

# Kind of a line that revokes an earlier answer
REVOCATION = "forgotten"

UNKNOWN_SERVER = "a server that was not recorded"
MAX_LISTED_SERVERS = 3


class EndpointAnswer(NamedTuple):
    """The answer of a model.

    Attributes:
        text: the answer if `kind` is "text". Otherwise the reason for a refusal, the beginning of a truncated answer
            ("cut"), or the reasoning before an empty answer.
    """

    kind: AnswerKind
    text: str


@dataclass(frozen=True)
class StoredAnswer:
    """An answer in the cache.

    Attributes:
        server: server that gave the answer, or None if unknown.
        date: UTC time of the answer.
    """

    answer: EndpointAnswer
    server: ServerIdentity | None = None
    date: str | None = None


class AnswerSource(BaseModel):
    """The answers of a run that came from one server, as shown in reports.

    Attributes:
        url: URL of the server, or None if the server is unknown.
        answers: number of answers from the server.
        cached: number of these answers that were cached before the run.
        cached_from, cached_until: UTC times of the first and the last cached answer.
    """

    model_config = ConfigDict(frozen=True)

    url: str | None
    id: str | None
    root: str | None
    max_model_len: int | None
    answers: int
    cached: int
    cached_from: str | None
    cached_until: str | None


class OtherServerError(ParamsError):
    """Cached answers came from another server or an unknown one. See `other_server_error` for the fields."""


def other_server_error(
    path: Path,
    servers: Counter[ServerIdentity | None],
    requested_server: Fault,
    questions: int,
    option: Fault | str,
) -> OtherServerError:
    """Return the error for cached answers that may not come from the requested server.

    The error's fields are the arguments below, `answers` (the number of these answers) and `origins` (a fault for each
    of the most common servers).

    Args:
        path: file of the answers.
        servers: number of answers per server; None stands for an unknown server.
        requested_server: server that is asked in this run.
        questions: number of questions in the run.
        option: how the user can choose what happens to the answers.
    """
    origins = []
    for server, answers in servers.most_common(MAX_LISTED_SERVERS):
        origins.append(Fault("endpoint.origin", answers=answers, server=server or UNKNOWN_SERVER))
    if len(servers) > MAX_LISTED_SERVERS:
        origins.append(Fault("endpoint.further_origins", servers=len(servers) - MAX_LISTED_SERVERS))
    return OtherServerError(
        "endpoint.other_server",
        path=path,
        answers=servers.total(),
        questions=questions,
        requested_server=requested_server,
        servers=servers,
        origins=origins,
        option=option,
    )


class AnswerStore:
    """The cache of answers: a file with one line of JSON per answer, which is flushed to the disk immediately.

    Lines that are not answers, such as a line truncated when the process was killed, are skipped. A line of the kind
    "forgotten" revokes its server's earlier answer to its question. If the line has no field `server`, it revokes the
    answers of all servers to the question.

    Attributes:
        answers_by_key: for each key of a question, the last answer of each server, in the order of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.answers_by_key: dict[str, dict[ServerIdentity | None, StoredAnswer]] = {}
        content = path.read_bytes() if path.is_file() else b""
        self.ends_in_torn_line = bool(content) and not content.endswith(b"\n")
        for line in content.split(b"\n"):
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                self._read_entry(json.loads(line))

    def _read_entry(self, entry: Any) -> None:
        """Apply a line of the file: add its answer, or revoke an earlier one."""
        key = entry["key"]
        kind = entry["kind"]
        text = entry["answer"]
        server = read_server(entry.get("server"))
        if kind == REVOCATION and "server" in entry:
            self._drop(key, server)
        elif kind == REVOCATION:
            self.answers_by_key.pop(key, None)
        elif kind in get_args(AnswerKind) and isinstance(key, str) and isinstance(text, str):
            date = entry.get("date") if isinstance(entry.get("date"), str) else None
            self._add(key, StoredAnswer(EndpointAnswer(kind, text), server, date))

    def _add(self, key: str, stored: StoredAnswer) -> None:
        self._drop(key, stored.server)  # so that the new answer comes last
        self.answers_by_key.setdefault(key, {})[stored.server] = stored

    def _drop(self, key: str, server: ServerIdentity | None) -> None:
        answers_by_server = self.answers_by_key.get(key, {})
        answers_by_server.pop(server, None)
        if not answers_by_server:
            self.answers_by_key.pop(key, None)

    @property
    def last_answers(self) -> dict[str, EndpointAnswer]:
        """The last answer to each question, from any server."""
        last_answers = {}
        for key, answers_by_server in self.answers_by_key.items():
            last_stored = list(answers_by_server.values())[-1]
            last_answers[key] = last_stored.answer
        return last_answers

    def answers_to(self, key: str) -> list[StoredAnswer]:
        """Return the last answer of each server to a question, in the order of the file."""
        return list(self.answers_by_key.get(key, {}).values())

    def store_answer(
        self, key: str, facts: Mapping[str, Any], answer: EndpointAnswer, server: ServerIdentity | None = None
    ) -> StoredAnswer:
        """Write an answer with its server and the time, and flush it to the disk.

        Args:
            facts: content of the question, for people who read the file.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        stored = StoredAnswer(answer, server, now)
        origin = {"server": asdict(server) if server else None, "date": now}
        self._append({"key": key, **facts, **origin, "kind": answer.kind, "answer": answer.text})
        with self.lock:
            self._add(key, stored)
        return stored

    def revoke_answer(self, key: str, server: ServerIdentity | None) -> None:
        """Revoke a server's answer, so that the question is asked again."""
        self._append({"key": key, "server": asdict(server) if server else None, "kind": REVOCATION, "answer": ""})
        self._drop(key, server)

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        with self.lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(b"\n" + line if self.ends_in_torn_line else line)
                file.flush()
                flush_to_disk(file.fileno())
            self.ends_in_torn_line = False


def count_answers_by_server(answers: Iterable[StoredAnswer], are_cached: Iterable[bool]) -> list[AnswerSource]:
    """Return, for each server, how many answers it gave and how many of them were cached before the run."""
    answers_by_server: dict[ServerIdentity | None, list[tuple[StoredAnswer, bool]]] = {}
    for stored, is_cached in zip(answers, are_cached, strict=True):
        answers_by_server.setdefault(stored.server, []).append((stored, is_cached))
    sources = []
    for server, server_answers in answers_by_server.items():
        cached_answers = [stored for stored, is_cached in server_answers if is_cached]
        dates = sorted(stored.date for stored in cached_answers if stored.date)
        source = AnswerSource(
            url=server.url if server else None,
            id=server.id if server else None,
            root=server.root if server else None,
            max_model_len=server.max_model_len if server else None,
            answers=len(server_answers),
            cached=len(cached_answers),
            cached_from=dates[0] if dates else None,
            cached_until=dates[-1] if dates else None,
        )
        sources.append(source)
    return sources


def describe_cache(sources: Sequence[AnswerSource], path: Path) -> str:
    """Return a line that says how many answers were cached, which servers they came from, and on which days (UTC)."""
    descriptions = []
    for source in sources:
        if not source.cached:
            continue
        server = UNKNOWN_SERVER
        if source.url is not None:
            server = str(ServerIdentity(source.url, source.id, source.root, source.max_model_len))
        days = dict.fromkeys(date[:10] for date in (source.cached_from, source.cached_until) if date)
        period = f"from {' to '.join(days)}" if days else "of an unknown date"
        descriptions.append(f"{source.cached:,} of {server}, {period}")
    cached = sum(source.cached for source in sources)
    total = sum(source.answers for source in sources)
    answers = format_count(total, "answer is", "answers are")
    return f"{cached:,} of {answers} from the cache {path}: {'; '.join(descriptions)}"

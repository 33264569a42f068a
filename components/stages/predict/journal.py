"""What a run has captioned so far, on disk: a run that was killed goes on with what is missing."""

import base64
import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

Key = tuple[str, str]
"""Name of the set of pairs (predictions, control), id of the pair."""


class Answer(NamedTuple):
    """What the model says of a pair, and where it looks: [rows, columns] float16, where asked for."""

    caption: str
    saliency: np.ndarray | None


class Journal:
    """A file with a line of JSON for each answer. Within `with`, no other process has it.

    Attributes:
        answers: all that the file holds.

    Raises:
        BlockingIOError: another process writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[Key, Answer] = {}

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file: BinaryIO = self.path.open("a+b")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.file.close()
            raise BlockingIOError(f"{self.path}: another process captions the same pairs; wait for its end") from error
        self.file.seek(0)
        self.file.truncate(self._read(self.file.read()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()

    def _read(self, data: bytes) -> int:
        """Take the answers of whole lines; the length of these. What follows a line that is torn was never finished."""
        whole = 0
        for line in data.splitlines(keepends=True):
            try:
                key, answer = _parsed(line)
            except ValueError:
                break
            self.answers[key] = answer
            whole += len(line)
        return whole

    def add(self, answers: Iterable[tuple[Key, Answer]]) -> None:
        """Write the answers that are not there yet, down to the disk."""
        for key, answer in answers:
            if key not in self.answers:
                self.answers[key] = answer
                self.file.write(_line(key, answer))
        self.file.flush()
        os.fsync(self.file.fileno())

    def delete(self) -> None:
        self.path.unlink()


def _line(key: Key, answer: Answer) -> bytes:
    row: dict[str, Any] = {"set": key[0], "pair": key[1], "caption": answer.caption}
    if answer.saliency is not None:
        row["shape"] = answer.saliency.shape
        row["saliency"] = base64.b64encode(answer.saliency.tobytes()).decode()
    return json.dumps(row).encode() + b"\n"


def _parsed(line: bytes) -> tuple[Key, Answer]:
    """Raises ValueError where the line is torn."""
    if not line.endswith(b"\n"):
        raise ValueError("no end of line")
    row = json.loads(line)
    found = None
    if "saliency" in row:
        found = np.frombuffer(base64.b64decode(row["saliency"]), np.float16).reshape(row["shape"])
    return (row["set"], row["pair"]), Answer(row["caption"], found)

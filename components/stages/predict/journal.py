"""The captions of a run so far, on disk: a run that was killed goes on with what is missing."""

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
    """The model's caption of a pair, and where it looks: [rows, columns] float16, where asked for."""

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
        """Take the answers of whole lines; return the length of these. What follows a torn line was never finished."""
        whole = 0
        for line in data.splitlines(keepends=True):
            try:
                if not line.endswith(b"\n"):
                    break
                row = json.loads(line)
                saliency = None
                if "saliency" in row:
                    saliency = np.frombuffer(base64.b64decode(row["saliency"]), np.float16).reshape(row["shape"])
                self.answers[row["set"], row["pair"]] = Answer(row["caption"], saliency)
            except ValueError:
                break
            whole += len(line)
        return whole

    def add(self, answers: Iterable[tuple[Key, Answer]]) -> None:
        """Write the answers that are not there yet, down to the disk."""
        for key, answer in answers:
            if key not in self.answers:
                self.answers[key] = answer
                row: dict[str, Any] = {"set": key[0], "pair": key[1], "caption": answer.caption}
                if answer.saliency is not None:
                    row["shape"] = answer.saliency.shape
                    row["saliency"] = base64.b64encode(answer.saliency.tobytes()).decode()
                self.file.write(json.dumps(row).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())

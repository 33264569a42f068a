"""Files that others trust: written whole or not at all, and known by their content."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Self

from pydantic import BaseModel, ConfigDict


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary neighbour to write to; flush it to disk and rename it at the end: a reader sees the old file or
    the new, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a whole file as `atomic` does."""
    with atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """A folder to fill, which takes `place`, and that of an older one there, when the block ends without a fault."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as scratch:
        made = Path(scratch) / place.name
        yield made
        shutil.rmtree(place, ignore_errors=True)
        made.rename(place)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_folder(folder: Path) -> str:
    """Hex digest over the names and contents of all files below a folder, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{sha256(path)}\n".encode())
    return digest.hexdigest()


class StageReport(BaseModel):
    """Counts of a stage. No clock time in it: equal inputs must give equal bytes (DVC's run cache)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    rows_in: int
    rows_out: int

    def write(self, path: Path) -> Self:
        """Write as indented JSON, whole or not at all."""
        write_atomic(path, json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n")
        return self

"""Files that others trust: written whole or not at all, and known by their content."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Self

from pydantic import BaseModel, ConfigDict

# What a file system answers to a call that it does not know
NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary neighbour to write to; flush it to disk and rename it at the end: a reader sees the old file or
    the new, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # "x" opens with mode 0666, from which the kernel takes the umask. `mkstemp` would make 0600, and some file
        # systems (exFAT, SMB, FAT) refuse the chmod that mends it.
        with temporary.open("xb") as file:
            yield file
            file.flush()
            flush_to_disk(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def flush_to_disk(handle: int) -> None:
    """Have what an open file or folder holds on disk; go on where its file system knows no such call (some FUSE, SMB).

    Raises:
        OSError: the disk is full or broken.
    """
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a whole file as `atomic` does."""
    with atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def lock_exclusively(file: IO[Any], wait: bool = True) -> None:
    """Take the lock of an open file, which the kernel gives back when the file is closed.

    A file system without locks (some of NFS, SMB and FUSE) lets everybody go on, with a line on standard error.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is false.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (*NOT_SUPPORTED, errno.ENOLCK):
            raise
        print(f"{file.name}: this file system has no locks; run nothing else on these files meanwhile", file=sys.stderr)


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

"""Write files completely or not at all, and compute digests of their contents."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Self

from pydantic import BaseModel, ConfigDict

# Error numbers that file systems return for unsupported calls
NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing. Readers see the new file only after the block has ended without an error.

    The content is written to a temporary file in the same folder. At the end, the temporary file is flushed to disk and
    renamed. After an error, the old file stays unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # "x" creates a file with mode 0666 minus the umask. `mkstemp` uses 0600, and some file systems (exFAT, SMB,
        # FAT) do not allow the chmod that would correct it
        with temporary.open("xb") as file:
            yield file
            file.flush()
            flush_to_disk(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def flush_to_disk(handle: int) -> None:
    """Flush an open file or folder to disk, if the file system supports this (some FUSE and SMB file systems do not).

    Raises:
        OSError: the disk is full or broken.
    """
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all."""
    with open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def lock_exclusively(file: IO[Any], wait: bool = True) -> None:
    """Lock an open file exclusively. The kernel releases the lock when the file is closed.

    If the file system does not support locks (some NFS, SMB and FUSE), print a warning and continue without a lock.

    Args:
        file: the open file.
        wait: whether to wait until another process releases the lock.

    Raises:
        BlockingIOError: another process has the lock, and `wait` is false.
    """
    operation = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in (*NOT_SUPPORTED, errno.ENOLCK):
            raise
        print(f"{file.name}: this file system has no locks; run nothing else on these files meanwhile", file=sys.stderr)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a path where the block must create a folder. After the block, the new folder replaces `folder`.

    If the block raises an error, `folder` stays unchanged.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        temporary = Path(scratch) / folder.name
        yield temporary
        remove_folder(folder)
        temporary.rename(folder)


def remove_folder(folder: Path) -> None:
    """Delete a folder with its content, if it exists.

    The folder is first renamed, so that a process that is killed meanwhile leaves no folder with this name that lacks
    some of its files.
    """
    if not os.path.lexists(folder):
        return
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}.", ignore_cleanup_errors=True
    ) as scratch:
        folder.rename(Path(scratch) / folder.name)


def user_cache() -> Path:
    """Return the user's cache folder for m3diff. Its content only saves time, so the folder can be deleted."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "m3diff"


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content as a hex string."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_folder(folder: Path) -> str:
    """Return the SHA-256 of the relative paths and contents of all files in a folder, as a hex string."""
    digest = hashlib.sha256()
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in sorted(files):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{sha256(path)}\n".encode())
    return digest.hexdigest()


class StageReport(BaseModel):
    """Counts of a stage. Times are not recorded, because DVC's run cache requires equal inputs to give equal bytes.

    Attributes:
        stage: name of the stage.
        rows_in: number of rows that the stage read.
        rows_out: number of rows that the stage wrote.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    rows_in: int
    rows_out: int

    def write(self, path: Path) -> Self:
        """Write the report as indented JSON, completely or not at all, and return the report."""
        write_atomic(path, json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n")
        return self

"""Room on the disk for a run's checkpoints: estimated before the first step, and named where it ran out."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
STATE_BYTES = 12
"""Of a parameter that trains: its weight and two moments in fp32."""


class NotWrittenError(BlockingIOError):
    """A disk has no room for what was to be written; what was written before stands. Try again when there is room."""


def require_room(folder: Path, trainable: int, kept: int, there: int) -> None:
    """See that `folder` has room for the checkpoints that a run keeps and the one it writes.

    Args:
        trainable: parameters that train.
        kept: checkpoints at most; `there` of them are written already.

    Raises:
        NotWrittenError: it has not.
    """
    needed = max(kept + 1 - there, 1) * trainable * STATE_BYTES
    if (free := shutil.disk_usage(folder).free) < needed:
        raise NotWrittenError(
            f"{folder}: a run keeps {kept} checkpoints and writes another, of {trainable * STATE_BYTES:,} bytes each "
            f"({trainable:,} parameters train): {needed:,} bytes more are needed, {free:,} are free; make room there, "
            "or set compute.scratch to a folder of a larger disk"
        )


@contextmanager
def full_disk_explained(folder: Path, needed: int) -> Iterator[None]:
    """Around what writes `needed` bytes into a new `folder`. Raises NotWrittenError where the disk is full; the folder
    is removed then."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        shutil.rmtree(folder, ignore_errors=True)
        free = shutil.disk_usage(folder.parent).free
        raise NotWrittenError(
            f"{folder}: the disk is full: {needed:,} bytes are needed, {free:,} are free; it is removed again, and "
            "earlier checkpoints stand: make room and run again, which goes on from the newest"
        ) from error


def is_disk_full(error: BaseException) -> bool:
    """Or the user's part of it. Safetensors' own error has the number in its text alone."""
    number = getattr(error, "errno", None)
    return number in FULL or any(f"(os error {full})" in str(error) for full in FULL)

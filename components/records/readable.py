"""Files that a stage or a person wrote, where what reads them does not say which one it could not read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from m3diff.records.errors import DataError


@contextmanager
def readable(path: Path, remedy: str = "run `dvc repro`, which writes it again") -> Iterator[None]:
    """Around the reading of one file, and of nothing else.

    Raises:
        DataError: it is cut off, empty or of another kind, which each library says in its own way.
    """
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(f"{path}: cannot be read ({said}); {remedy}") from error

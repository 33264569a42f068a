"""Errors of the user's data, and texts that are fit to be shown."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DataError(ValueError):
    """Something in the user's data is wrong. The text names file, row, field, rule, value and remedy."""


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


IN_ADDRESS = re.compile(r"(\w+://)(?=[^\s/'\"]*:[^\s/'\"]*@|(?<=http://)|(?<=https://))[^\s/'\"]*@")
IN_QUERY = re.compile(r"(?i)([?&][\w-]*(?:token|secret|password|signature|credential|sig|key)=)[^&\s'\"]+")
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|AUTH_STRING|API_KEY|ACCESS_KEY|CONNECTION_URL|M3DIFF_NOTIFY")
LEAST = 8  # characters: a shorter word may be any other's
HIDDEN = "***"


def redacted(text: str) -> str:
    """The text without the user and password of an address, keys in a query, and values of this process's secrets."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= LEAST:
            text = text.replace(value, HIDDEN)
    return IN_QUERY.sub(rf"\1{HIDDEN}", IN_ADDRESS.sub(rf"\1{HIDDEN}@", text))

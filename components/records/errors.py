"""Errors of the user's data, and texts that are fit to be shown."""

import os
import re
import shlex
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


def is_utf8(name: str) -> bool:
    """Return whether a name of a file is UTF-8; Python holds the bytes of another one as lone surrogates."""
    return name.isascii() or name.encode(errors="ignore").decode() == name


def shell_word(path: Path | str) -> str:
    """A path as a word of a shell's command; the bytes of a name that is not UTF-8 as bash and zsh read them."""
    word = f"./{path}" if str(path).startswith("-") else str(path)
    if is_utf8(word):
        return shlex.quote(word)
    codes = word.encode("utf-8", "surrogateescape")
    return (
        "$'"
        + "".join(
            chr(code) if chr(code).isalnum() and code < 128 or code in b"/._-" else f"\\x{code:02x}" for code in codes
        )
        + "'"
    )


def command_to_read_again(path: Path | str) -> str:
    """The command after which DVC reads a file, or every file of a folder, and runs the stages that it changes.

    DVC knows a file by size, modification time and inode. It takes a file that was edited with all three kept for the
    one it has read before, so that `dvc repro` alone does nothing.
    """
    word = shell_word(path)
    touch = f"find -L {word} -type f -exec touch -c {{}} +" if os.path.isdir(path) else f"touch -c {word}"
    return f"`{touch} && dvc repro`"


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

"""Annotation files, read strictly: a file that cannot be trusted is a DataError naming file, place, rule and remedy."""

import codecs
import json
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from m3diff.records.errors import DataError
from m3diff.records.schemas import SPLITS

T = TypeVar("T")

KINDS = {
    dict: "an object",
    list: "a list",
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "a truth value",
}


CONTENTS = {
    b"version https://git-lfs": "is a pointer of Git LFS, not the file; fetch it: `git -C {folder} lfs pull`",
    b"PK\3\4": "is an archive or a spreadsheet by its content; unpack it, or save it as CSV (UTF-8)",
    b"\xd0\xcf\x11\xe0": "is a spreadsheet by its content; save it as CSV (UTF-8)",
    b"PAR1": "is Parquet by its content; save it as text, or call it so where it is read: `mv {name} {name}.parquet`",
    b"\x1f\x8b": "is compressed by gzip; unpack it: `mv {name} {name}.gz && gunzip {name}.gz`",
}
"""What a file is that begins so, and what mends it."""

ADDRESS = re.compile(r"(?!file:)([a-z][a-z0-9+.-]+://|data:)", re.IGNORECASE)
ELSEWHERE = re.compile(r"\\\\|[a-z]:[/\\]|file:|.*\0", re.IGNORECASE | re.DOTALL)
"""What paths of Windows and of other forms begin with, or what no path holds."""


def fault_of_path(name: str, root: Path, opened: Iterable[Path] = (), option: str = "image_root") -> str | None:
    """The fault of an image's path in a data row, with the remedy; None where it stays inside its root.

    Args:
        opened: other folders that it may lead into. Links are not followed: see `is_inside`.
        option: by which the user names such a folder.
    """
    if ADDRESS.match(name):
        return f"is an address, and nothing is fetched; download the image into {root} and write its path"
    path = name.replace("\\", "/")
    climbs = path.startswith("/") or ".." in path.split("/")
    inside = (Path(os.path.abspath(root / path)).is_relative_to(os.path.abspath(each)) for each in opened)
    if ELSEWHERE.match(name) or (climbs and not any(inside)):
        return f"leads out of the dataset's root; copy the image into it, or name the image's folder by {option}"
    return None


def is_inside(path: Path | str, *roots: Path) -> bool:
    """True if a path leads into one of the folders once every link is followed."""
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(os.path.realpath(root)) for root in roots)


def read_text(path: Path) -> str:
    """The file's text, UTF-8 with or without a byte order mark.

    Raises:
        DataError: missing, unreadable, empty or not UTF-8; it says what the file is instead.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; the dataset is incomplete, fetch it or correct the root") from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; check its permissions: `chmod u+r {quoted(path)}`"
        ) from error
    if not data.removeprefix(codecs.BOM_UTF8).strip():
        raise DataError(f"{path}: the file is empty; fetch it again")
    if what := next((what for start, what in CONTENTS.items() if data.startswith(start)), None):
        raise DataError(f"{path}: {what.format(name=quoted(path), folder=quoted(path.parent))}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        encoding, name, new = "UTF-16" if is_utf16 else "WINDOWS-1252", quoted(path), quoted(f"{path}.new")
        raise DataError(
            f"{path}: byte {error.start} is not UTF-8, probably {encoding}; "
            f"convert it: `iconv -f {encoding} -t UTF-8 {name} > {new} && mv {new} {name}`"
        ) from error


def quoted(path: Path | str) -> str:
    """A path as a word of a shell's command."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def read_json(path: Path, kind: type[T]) -> T:
    """The file's JSON value, which must be a `kind`. Repeated keys and NaN, which json lets pass, are refused."""
    value = parse_json(read_text(path), str(path))
    if not isinstance(value, kind):
        raise DataError(f"{path}: expected {describe_kind(kind)} at the top, found {describe(value)}")
    return value


def read_splits(path: Path, names: Sequence[str] = SPLITS) -> dict[str, list[Any]]:
    """`{"train": [scene number, ...], "val": ..., "test": ...}`; every name must be there, an empty list is allowed."""
    splits = read_json(path, dict)
    if missing := [split for split in names if not isinstance(splits.get(split), list)]:
        raise DataError(f"{path}: no list {' or '.join(missing)}; expected {', '.join(names)} (one may be [])")
    return {split: splits[split] for split in names}


def parse_json(text: str, where: str) -> Any:
    """The JSON value of a text; `where` (a file, or a file and line) begins the message of a fault."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise DataError(f"{where}: {place}: not valid JSON: {error.msg}; correct it there or fetch it again") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not usable JSON: {error}") from error


def describe(value: Any) -> str:
    """A value for a message: its kind, and the value itself cut to 60 characters."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    shown = repr(value)
    return f"{describe_kind(type(value))} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def describe_kind(kind: type) -> str:
    """A type in JSON's words."""
    return KINDS.get(kind, kind.__name__)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice; keep one")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value; use null or remove it")

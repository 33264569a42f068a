"""Annotation files, read strictly: a file that cannot be trusted is a DataError naming file, place, rule and remedy."""

import json
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from components.records import SPLITS, DataError

T = TypeVar("T")

KINDS = {
    dict: "an object",
    list: "a list",
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "a truth value",
}


def read_text(path: Path) -> str:
    """The file's text, UTF-8 with or without a byte order mark.

    Raises:
        DataError: missing, unreadable, empty or not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no such file; the dataset is incomplete, fetch it again or correct the root"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; convert the file with `iconv -t UTF-8`") from error
    if not text.strip():
        raise DataError(f"{path}: the file is empty; fetch it again")
    return text


def read_json(path: Path, kind: type[T]) -> T:
    """The file's JSON value, which must be a `kind`. Repeated keys and NaN, which json lets pass, are refused."""
    value = parse_json(read_text(path), str(path))
    if not isinstance(value, kind):
        raise DataError(f"{path}: expected {describe_kind(kind)} at the top, found {describe(value)}")
    return value


def read_splits(path: Path) -> dict[str, list[Any]]:
    """`{"train": [scene number, ...], "val": ..., "test": ...}`; all three must be there, an empty list is allowed."""
    splits = read_json(path, dict)
    if missing := [split for split in SPLITS if not isinstance(splits.get(split), list)]:
        raise DataError(f"{path}: no list {' or '.join(missing)}; expected train, val and test (one may be [])")
    return {split: splits[split] for split in SPLITS}


def parse_json(text: str, where: str) -> Any:
    """One JSON value; `where` (a file, or a file and line) begins the message of a fault."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        truncated = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        remedy = "it ends too early, fetch it again" if truncated else "correct it there"
        raise DataError(
            f"{where}: line {error.lineno} column {error.colno}: not valid JSON: {error.msg}; {remedy}"
        ) from error
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

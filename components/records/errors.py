"""Errors with codes, the wording of their messages, and helpers to count, to quote text and to remove secrets from it.

An error has a code such as `images.blank` and fields such as `path`. `messages.toml` contains the wording for each
code: `problem` says what is wrong, and `remedy` says what to do. Programs and tests should use the code and the fields,
because these do not change when a sentence is improved.
"""

import functools
import os
import re
import shlex
import string
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MESSAGES = Path(__file__).with_name("messages.toml")

# The wording for a copy of this file that does not have messages.toml next to it. `m3diff export --hub` inserts the
# wording here
WORDING_OF_COPY: Mapping[str, Mapping[str, str]] | None = None

# Fields that say where a fault is. A message begins with the fields in LOCATION that its template does not contain
LOCATION = {"path": "{path}", "row": "row {row:,}", "line": "line {line:,}", "key": "{key}"}

# A longer text in a field is cut in the message, so that a message stays readable if a file has one endless line
MAX_VALUE_CHARS = 1000
# Fields that are never cut: texts that the user copies, and the output of a program
WHOLE_FIELDS = frozenset({"path", "command", "options", "output"})
# Control characters and Unicode's line separators. A caption or a file name may contain them
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@functools.cache
def wording() -> Mapping[str, Mapping[str, str]]:
    """Return the `problem` and the optional `remedy` of each code, which are templates for `str.format`."""
    if WORDING_OF_COPY is not None:
        return WORDING_OF_COPY
    areas = tomllib.loads(MESSAGES.read_text(encoding="utf-8"))
    return {f"{area}.{name}": message for area, messages in areas.items() for name, message in messages.items()}


def escape_control_characters(text: str) -> str:
    """Return the text on one line. A newline becomes `\\n`; other control characters are escaped in the same way."""
    return CONTROL_CHARACTERS.sub(lambda match: repr(match[0])[1:-1], text)


def shorten_value(value: Any) -> Any:
    """Return the first MAX_VALUE_CHARS characters of a longer text and its length. Return any other value unchanged."""
    if not isinstance(value, str) or len(value) <= MAX_VALUE_CHARS:
        return value
    return f"{value[:MAX_VALUE_CHARS]}... ({format_count(len(value), 'character')})"


def format_count(count: float, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, such as "1 step", "2,000 steps" or "0.5 epochs".

    Args:
        noun: the noun after 1. It may include a verb: "caption is empty".
        plural: the noun after any other number. The default is `noun` with an s.
    """
    number = f"{count:,.0f}" if count == round(count) else f"{count:g}"
    return f"{number} {noun if count == 1 else plural or f'{noun}s'}"


def text_of_item(item: Any) -> str:
    """Return an item of a list as text. Only the message of a fault may have several lines."""
    return str(item) if isinstance(item, Fault) else escape_control_characters(str(shorten_value(item)))


class MessageFormatter(string.Formatter):
    """A formatter for messages.

    Control characters of a text are escaped, so that a caption or a file name with a newline stays on one line. A fault
    in a field is rendered as its own message, which may have several lines.

    In addition to the formats of `str.format`, a template may use:
        {names:list}        the items, separated by commas
        {faults:lines}      each item on a new, indented line; a text with several lines keeps them
        {rows:first 5}      the first items, each on a new, indented line, and the number of further items
        {path:shell}        the value, quoted as one word of a shell command
        {rows:row|rows}     a number with its noun, such as "1 row" or "2,000 rows"
    """

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        """Return the field's value. For a missing field, return its name in brackets instead of raising an error."""
        return kwargs.get(key, f"<{key}>")

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return the value in the template's format, or as plain text if its type does not support this format."""
        if format_spec == "list":
            return escape_control_characters(value) if isinstance(value, str) else ", ".join(map(text_of_item, value))
        if format_spec == "lines":
            return value if isinstance(value, str) else indented_lines(value)
        if format_spec.startswith("first "):
            count = int(format_spec.removeprefix("first "))
            return value if isinstance(value, str) else indented_lines([text_of_item(item) for item in value], count)
        if format_spec == "shell":
            return shell_word(value)
        if "|" in format_spec and not isinstance(value, str):
            return format_count(value, *format_spec.split("|"))
        try:
            text = format(value, format_spec)
        except (TypeError, ValueError):
            text = str(value)
        return text if isinstance(value, Fault) else escape_control_characters(text)


def indented_lines(items: Sequence[Any], count: int | None = None) -> str:
    """Return up to `count` items (None: all) as indented lines, and a line with the number of further items, if any."""
    texts = [str(item) for item in items[:count]]
    if len(texts) < len(items):
        texts.append(f"and {len(items) - len(texts):,} more")
    return "".join("\n  " + text.replace("\n", "\n  ") for text in texts)


def fields_of(template: str) -> set[str]:
    """Return the names of the fields in the template of a message."""
    names = set()
    for _, expression, _, _ in string.Formatter().parse(template):
        if expression:
            names.add(re.split(r"[.\[]", expression)[0])
    return names


class Fault:
    """A problem, described by a code in `messages.toml` and values for the fields of its message.

    Args:
        code: the code.
        fields: values for the message, such as `path`, `row`, `field` and `value`. A value may be another fault.
    """

    formatter = MessageFormatter()

    def __init__(self, code: str, /, **fields: Any) -> None:
        self.code = code
        self.fields = fields

    def at(self, **location: Any) -> "Fault":
        """Return a copy of the fault with additional fields, such as the path of the file that contains it."""
        return Fault(self.code, **{**location, **self.fields})

    @property
    def problem(self) -> str:
        """The part of the message that says what is wrong, without the location."""
        message = wording().get(self.code)
        if message is None:  # do not raise an error here, because it would hide the fault
            fields = [(name, text_of_item(value)) for name, value in self.fields.items() if name not in LOCATION]
            return " ".join([self.code, *(f"{name}={text}" for name, text in fields)])
        return self._render(message["problem"])

    @property
    def remedy(self) -> str | None:
        """The part of the message that says what to do, or None if the message has no remedy."""
        remedy = wording().get(self.code, {}).get("remedy")
        return remedy and self._render(remedy)

    @property
    def location(self) -> str:
        """The location of the fault, such as "pairs.csv, row 7", without fields that the problem already mentions."""
        problem_fields = fields_of(wording().get(self.code, {}).get("problem", ""))
        templates = [text for name, text in LOCATION.items() if name in self.fields and name not in problem_fields]
        return ", ".join(self._render(template) for template in templates)

    def _render(self, template: str) -> str:
        """Return a template with the values of the fields. Long texts are cut, except those in WHOLE_FIELDS."""
        values = {name: value if name in WHOLE_FIELDS else shorten_value(value) for name, value in self.fields.items()}
        return self.formatter.vformat(template, (), values)

    @property
    def summary(self) -> str:
        """The location and the problem, without the remedy."""
        return f"{self.location}: {self.problem}" if self.location else self.problem

    def __str__(self) -> str:
        summary = self.summary
        remedy = self.remedy
        if remedy is None:
            return summary
        if "\n" in summary:
            return f"{summary}\n{remedy}"
        separator = " " if summary.endswith((".", "?", "!")) else "; "
        return f"{summary}{separator}{remedy}"

    def __repr__(self) -> str:
        return f"Fault({self.code!r}, {self.fields})"

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Fault) and (self.code, self.fields) == (value.code, value.fields)

    def __hash__(self) -> int:
        return hash(self.code)


class CodedError(Exception):
    """An error with a code and fields. Its text is the message of its fault.

    Args:
        code: a code in `messages.toml`, or a fault.
        fields: fields of the message.
    """

    def __init__(self, code: str | Fault, /, **fields: Any) -> None:
        self.fault = code if isinstance(code, Fault) else Fault(code, **fields)
        super().__init__(self.fault)  # a single argument, so that the error can be pickled

    @property
    def code(self) -> str:
        """The code of the message in `messages.toml`."""
        return self.fault.code

    @property
    def fields(self) -> Mapping[str, Any]:
        """The values in the message, such as `path`, `row`, `field` and `value`."""
        return self.fault.fields

    def __str__(self) -> str:
        return str(self.fault)


class ParamsError(CodedError, ValueError):
    """The parameters cannot be used. The message lists every fault with its remedy."""


class DataError(CodedError, ValueError):
    """The user's data is invalid. The message names the file, row, field, rule, value and remedy, where they apply."""


class ValueFault(CodedError, ValueError):
    """A value breaks a rule. The code that reads the value adds the location to the fault."""


def cause_of(error: Exception) -> Fault | str:
    """Return the fault of an error, or its text on one line if it has no code. Use it as a field of another fault."""
    return error.fault if isinstance(error, CodedError) else re.sub(r"\s*\n\s*", " ", str(error).strip())


@contextmanager
def data_error_if_unreadable(path: Path, code: str = "files.unreadable_output", **fields: Any) -> Iterator[None]:
    """Convert any error inside the block to a DataError. The block should only read the file.

    Each library raises other errors for a file that is truncated, empty or of the wrong type.

    Args:
        path: the file that is read.
        code: code of the error. Its remedy should say how to get the file again.
        fields: fields of the error message besides `path` and `cause`.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        cause = first_line or type(error).__name__
        raise DataError(code, path=path, cause=cause, **fields) from error


def is_utf8(name: str) -> bool:
    """Return whether a file name is valid UTF-8. Python represents invalid bytes in file names as lone surrogates."""
    return name.isascii() or name.encode(errors="ignore").decode() == name


def shell_word(path: Path | str) -> str:
    """Quote a path as one word of a shell command.

    A name that is not UTF-8 or contains a control character, such as a newline, is quoted as $'...' with hexadecimal
    bytes, which bash and zsh support.
    """
    word = f"./{path}" if str(path).startswith("-") else str(path)
    if is_utf8(word) and not CONTROL_CHARACTERS.search(word):
        return shlex.quote(word)
    characters = []
    for code in word.encode("utf-8", "surrogateescape"):
        is_plain = (code < 128 and chr(code).isalnum()) or code in b"/._-"
        characters.append(chr(code) if is_plain else f"\\x{code:02x}")
    return "$'" + "".join(characters) + "'"


def command_to_read_again(path: Path | str) -> str:
    """Return the command that makes DVC read a file or folder again and rerun the stages that depend on it.

    DVC detects changes by size, modification time and inode. If an edit did not change any of these, `dvc repro` does
    nothing, so the command first updates the modification time with `touch`.
    """
    word = shell_word(path)
    touch = f"find -L {word} -type f -exec touch -c {{}} +" if os.path.isdir(path) else f"touch -c {word}"
    return f"`{touch} && dvc repro`"


# Matches "user:password@" in a URL. In http(s) URLs, it also matches "token@"
CREDENTIALS_IN_ADDRESS = re.compile(r"(\w+://)(?=[^\s/'\"]*:[^\s/'\"]*@|(?<=http://)|(?<=https://))[^\s/'\"]*@")
# Matches the value of a query parameter such as `token=`
SECRET_IN_QUERY = re.compile(r"(?i)([?&][\w-]*(?:token|secret|password|signature|credential|sig|key)=)[^&\s'\"]+")
# Matches the names of environment variables whose values are secret
SECRET_VARIABLE = re.compile(r"PASSWORD|SECRET|TOKEN|AUTH_STRING|API_KEY|ACCESS_KEY|CONNECTION_URL|M3DIFF_NOTIFY")
MIN_SECRET_CHARS = 8  # shorter values are not hidden, because ordinary words would be hidden, too
HIDDEN = "***"


def redact(text: str) -> str:
    """Return the text without secrets, such as passwords in URLs and the values of secret environment variables."""
    for name, value in os.environ.items():
        if SECRET_VARIABLE.search(name) and len(value) >= MIN_SECRET_CHARS:
            text = text.replace(value, HIDDEN)
    text = CREDENTIALS_IN_ADDRESS.sub(rf"\1{HIDDEN}@", text)
    return SECRET_IN_QUERY.sub(rf"\1{HIDDEN}", text)

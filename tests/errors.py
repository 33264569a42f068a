"""Assert the class, code and fields of errors. The wording is only in a snapshot, tests/messages.txt."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from m3diff.records.errors import CodedError, Fault, MessageFormatter, wording

# Stands for a field that a test leaves open
OPEN_VALUE = "\0"


@contextmanager
def raises(error: type[CodedError], code: str, **fields: Any) -> Iterator[pytest.ExceptionInfo[CodedError]]:
    """Expect an error of this class with this code, whose fields have these values. Other fields are not compared."""
    __tracebackhide__ = True
    with pytest.raises(error) as caught:
        yield caught
    actual_fields = caught.value.fields
    assert caught.value.code == code, str(caught.value)
    assert {name: actual_fields.get(name) for name in fields} == fields


class _OpenFormatter(MessageFormatter):
    """Replace a field without a value by OPEN_VALUE."""

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        return kwargs.get(key, OPEN_VALUE)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return value if value == OPEN_VALUE else super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, str) and value == OPEN_VALUE:
            return f"\n{OPEN_VALUE}" if format_spec == "lines" or format_spec.startswith("first ") else OPEN_VALUE
        return super().format_field(value, format_spec)

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        first_name = re.split(r"[.\[]", field_name)[0]
        return super().get_field(field_name, args, kwargs) if first_name in kwargs else (OPEN_VALUE, first_name)


class Message:
    """The text of an error wherever a command, a page or an answer shows it. Fields without a value may be anything.

    It equals a text that is this message as a whole, and `in_text` finds it inside of a longer one. Where the problem
    does not name the path, the row, the line or the key, these are expected in front of it only if they are given.

        assert Message("images.video") == verdict
        assert Message("pairs.no_column", path=table).in_text(capsys.readouterr().err)
    """

    def __init__(self, code: str, /, **fields: Any) -> None:
        assert code in wording(), code
        self.fault = _OpenFault(code, **fields)

    @property
    def pattern(self) -> str:
        """A regular expression for the text. A message inside of another one has its lines indented."""
        parts = [re.escape(part).replace("\\\n", "\n *") for part in str(self.fault).split(OPEN_VALUE)]
        return "[\\s\\S]*?".join(parts)

    def in_text(self, text: str) -> bool:
        """Return whether the text has this message."""
        return re.search(self.pattern, text) is not None

    def __eq__(self, text: object) -> bool:
        return re.fullmatch(self.pattern, str(text)) is not None

    def __hash__(self) -> int:
        return hash(self.fault.code)

    def __repr__(self) -> str:
        return f"<{self.fault.code}: {str(self.fault).replace(OPEN_VALUE, '*')}>"


class _OpenFault(Fault):
    formatter = _OpenFormatter()

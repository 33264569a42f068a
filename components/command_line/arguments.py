"""Define argument types, arguments that several commands share, and the lookup of an entry that an argument names."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from m3diff.command_line.command import argument, flag
from m3diff.records.errors import Fault, ParamsError

Entry = TypeVar("Entry")


def parse_url(text: str) -> str:
    """Check the URL of an OpenAI-compatible endpoint, and return it."""
    from m3diff.endpoint.url import endpoint_url

    try:
        return endpoint_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_port(text: str) -> int:
    """Parse the number of a TCP port."""
    if not (text.isdecimal() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(str(Fault("command.not_a_port", value=text)))
    return int(text)


def parse_count(text: str) -> int:
    """Parse a whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(str(Fault("command.not_a_count", value=text)))
    return int(text)


FOLDER: Any = {"type": Path, "metavar": "FOLDER"}  # keyword arguments of `argument` for a folder

MODEL = (
    argument(
        "--model", default="champion", help="a version number or alias, or a checkpoint folder (default: champion)"
    ),
    argument("--base", **FOLDER, help="base model of adapters; default: train.base"),
)
JSON = flag("--json", "print JSON")
ALLOW_UNLICENSED = flag("--allow-unlicensed", "even if a licence does not allow passing the data on")


def find_entry(section: str, entries: Mapping[str, Entry], name: str) -> Entry:
    """Return the entry with this name in a section of the parameters.

    Raises:
        ParamsError: the section has no entry with this name. The error contains the most similar name and all names.
    """
    from m3diff.settings.section import fields_of_name

    if name not in entries:
        raise ParamsError("command.no_entry", key=section, **fields_of_name(name, entries))
    return entries[name]

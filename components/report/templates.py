"""Load the templates of pages, and define their filters for numbers, tables and data."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from m3diff.report.tables import ABSENT, format_csv, format_latex, make_cell


def load_templates(*folders: Path) -> Environment:
    """Return a Jinja environment that looks for templates first in the given folders, then in this folder."""
    environment = Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "times100": lambda value: make_cell(value).text,
        "percent": lambda value: ABSENT if value is None else f"{100 * value:.1f}%",
        "cell": make_cell,
        "as_latex": format_latex,
        "as_csv": format_csv,
        "as_link": make_data_url,
        "as_script": dump_for_script,
        "breakable": allow_line_breaks,
    }
    return environment


def make_data_url(text: str) -> str:
    """Return a data URL that downloads the text as a file."""
    return "data:text/plain;charset=utf-8," + quote(text)


def allow_line_breaks(name: str) -> Markup:
    """Allow line breaks after the slashes and underscores of a name, for narrow columns."""
    return Markup(escape(name).replace("/", Markup("/<wbr>")).replace("_", Markup("_<wbr>")))


def dump_for_script(data: Any) -> Markup:
    """Return data as JSON for a script element, escaped so that no text can close the element."""
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))

"""Model families: the only list. A new family is a file beside `m3diff.py`, with its FAMILY, and a line here."""

from typing import TYPE_CHECKING

from m3diff.records import Lazy

if TYPE_CHECKING:
    from m3diff.models.family import Family

FAMILIES: Lazy["Family"] = Lazy(
    "FAMILY",
    {
        "m3diff": "m3diff.models.m3diff",
        "onediff": "m3diff.models.onediff",
        "blip2idc": "m3diff.models.blip2idc",
    },
)

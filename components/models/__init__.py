"""Model families: the only list. A new family is a folder beside `m3diff/`, with its FAMILY, and a line here."""

from typing import TYPE_CHECKING

from components.lazy import Lazy

if TYPE_CHECKING:
    from components.models.family import Family

FAMILIES: Lazy["Family"] = Lazy(
    "FAMILY",
    {
        "m3diff": "components.models.m3diff.family",
        "onediff": "components.models.onediff.family",
        "blip2idc": "components.models.blip2idc.family",
    },
)

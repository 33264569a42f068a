"""List the model families by name. To add a family, define FAMILY in a new file next to `m3diff.py` and add a line
here."""

from typing import TYPE_CHECKING

from m3diff.records import LazyMapping

if TYPE_CHECKING:
    from m3diff.models.family import Family

FAMILIES: LazyMapping["Family"] = LazyMapping(
    "FAMILY",
    {
        "m3diff": "m3diff.models.m3diff",
        "onediff": "m3diff.models.onediff",
        "blip2idc": "m3diff.models.blip2idc",
        "auto": "m3diff.models.auto",
    },
)

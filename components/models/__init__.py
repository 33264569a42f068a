"""Model families: the only list. A new family is a folder beside `m3diff/` and a line here."""

from typing import TYPE_CHECKING

from components.lazy import Lazy

if TYPE_CHECKING:
    from components.models.family import Family

FAMILIES: Lazy["Family"] = Lazy(
    "FAMILY",
    {name: f"components.models.{name}.family" for name in ("m3diff", "onediff", "blip2idc")},
)

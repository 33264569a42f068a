"""Model families: the only list. A new family is a folder beside `m3diff/` and a line here."""

from components.models.blip2idc.family import BLIP2IDC
from components.models.family import Family
from components.models.m3diff.family import M3DIFF
from components.models.onediff.family import ONEDIFF

FAMILIES: dict[str, Family] = {"m3diff": M3DIFF, "onediff": ONEDIFF, "blip2idc": BLIP2IDC}

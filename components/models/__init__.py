"""Model families: the only list. A new family is a folder beside `m3diff/` and a line here."""

from components.models.blip2idc.family import BLIP2IDC
from components.models.family import Family
from components.models.m3diff.family import M3DIFF

FAMILIES: dict[str, Family] = {"m3diff": M3DIFF, "blip2idc": BLIP2IDC}

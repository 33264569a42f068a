"""Datasets: the only list. A new dataset is a file beside the others and a line here."""

from components.datasets import (
    birds_to_words,
    clevr_change,
    clevr_dc,
    emu_edit,
    iedit,
    levir_cc,
    magicbrush,
    minichange,
    nlvr2,
    omnidiff,
    pairs,
    spot_the_diff,
    syned,
)
from components.datasets.spec import DatasetSpec

DATASETS: dict[str, DatasetSpec] = {
    "birds_to_words": birds_to_words.SPEC,
    "clevr_change": clevr_change.SPEC,
    "clevr_dc": clevr_dc.SPEC,
    "emu_edit": emu_edit.SPEC,
    "iedit": iedit.SPEC,
    "levir_cc": levir_cc.SPEC,
    "magicbrush": magicbrush.SPEC,
    "minichange": minichange.SPEC,
    "nlvr2": nlvr2.SPEC,
    "omnidiff": omnidiff.SPEC,
    "pairs": pairs.SPEC,
    "spot_the_diff": spot_the_diff.SPEC,
    "syned": syned.SPEC,
}
"""By the name that `ingest.datasets.<name>.reader` gives."""

"""Datasets: the only list. A new dataset is a file beside the others, with its SPEC, and a line here."""

from m3diff.datasets.spec import DatasetSpec
from m3diff.records import Lazy

DATASETS: Lazy[DatasetSpec] = Lazy(  # by the name that `ingest.datasets.<name>.reader` gives
    "SPEC",
    {
        "birds_to_words": "m3diff.datasets.birds_to_words",
        "clevr_change": "m3diff.datasets.clevr_change",
        "clevr_dc": "m3diff.datasets.clevr_dc",
        "emu_edit": "m3diff.datasets.emu_edit",
        "iedit": "m3diff.datasets.iedit",
        "levir_cc": "m3diff.datasets.levir_cc",
        "magicbrush": "m3diff.datasets.magicbrush",
        "minichange": "m3diff.datasets.minichange",
        "nlvr2": "m3diff.datasets.nlvr2",
        "omnidiff": "m3diff.datasets.omnidiff",
        "pairs": "m3diff.datasets.pairs",
        "spot_the_diff": "m3diff.datasets.spot_the_diff",
        "syned": "m3diff.datasets.syned",
    },
)

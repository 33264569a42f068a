"""Datasets: the only list. A new dataset is a file beside the others, with its SPEC, and a line here."""

from components.datasets.spec import DatasetSpec
from components.lazy import Lazy

DATASETS: Lazy[DatasetSpec] = Lazy(
    "SPEC",
    {
        "birds_to_words": "components.datasets.birds_to_words",
        "clevr_change": "components.datasets.clevr_change",
        "clevr_dc": "components.datasets.clevr_dc",
        "emu_edit": "components.datasets.emu_edit",
        "iedit": "components.datasets.iedit",
        "levir_cc": "components.datasets.levir_cc",
        "magicbrush": "components.datasets.magicbrush",
        "minichange": "components.datasets.minichange",
        "nlvr2": "components.datasets.nlvr2",
        "omnidiff": "components.datasets.omnidiff",
        "pairs": "components.datasets.pairs",
        "spot_the_diff": "components.datasets.spot_the_diff",
        "syned": "components.datasets.syned",
    },
)
"""By the name that `ingest.datasets.<name>.reader` gives."""

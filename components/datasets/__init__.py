"""Datasets: the only list. A new dataset is a file beside the others and a line here."""

from components.datasets.spec import DatasetSpec
from components.lazy import Lazy

READERS = (
    "birds_to_words",
    "clevr_change",
    "clevr_dc",
    "emu_edit",
    "iedit",
    "levir_cc",
    "magicbrush",
    "minichange",
    "nlvr2",
    "omnidiff",
    "pairs",
    "spot_the_diff",
    "syned",
)

DATASETS: Lazy[DatasetSpec] = Lazy("SPEC", {name: f"components.datasets.{name}" for name in READERS})
"""By the name that `ingest.datasets.<name>.reader` gives."""

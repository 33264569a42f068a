"""Datasets: the only list. A new dataset is a file beside the others and a line here."""

from components.datasets import (
    birds_to_words,
    clevr_change,
    clevr_dc,
    iedit,
    minichange,
    omnidiff,
    pairs,
    spot_the_diff,
)
from components.datasets.spec import DatasetSpec

DATASETS: dict[str, DatasetSpec] = {
    "birds_to_words": birds_to_words.SPEC,
    "clevr_change": clevr_change.SPEC,
    "clevr_dc": clevr_dc.SPEC,
    "iedit": iedit.SPEC,
    "minichange": minichange.SPEC,
    "omnidiff": omnidiff.SPEC,
    "pairs": pairs.SPEC,
    "spot_the_diff": spot_the_diff.SPEC,
}
"""By the name that `ingest.datasets.<name>.reader` gives."""

"""M3Diff's training mixture (section 5.2): seven sources, "145k pairs and 896k question-answer samples" in all.

The paper's table of the counts by source is not known to us. What is known: the official splits of each source, which
`DATASETS` has; train and val together come to 145k pairs. CLEVR-Change's paper gives 493,735 captions in all and none
by split, so its splits' are by share, to the nearest ten. Of CLEVR-DC's captions no count is published.
"""

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, Published, SplitCount

PAIRS, SAMPLES = 145_000, 896_000
"""As the paper prints them."""

SOURCES = (
    "omnidiff_real",
    "omnidiff_render",
    "spot_the_diff",
    "iedit",
    "birds_to_words",
    "clevr_change",
    "clevr_dc",
)
"""The mixture's datasets, by the names that `profiles/paper.yaml` gives them."""

Count = tuple[int, int | None]
"""Pairs, and their references without the empty ones; None where no count is published."""


def training_counts() -> dict[str, dict[str, Count]]:
    """Return of each source the published `train` and `train_val` (both together) counts."""
    specs = {part.part: (spec, part) for spec in DATASETS.values() for part in spec.published}
    return {name: _counts(*specs[name]) for name in SOURCES}


def _counts(spec: DatasetSpec, part: Published) -> dict[str, Count]:
    splits = {"train": (part.train,), "train_val": (part.train, part.val)}
    return {name: (sum(count.pairs for count in counts), _references(spec, counts)) for name, counts in splits.items()}


def _references(spec: DatasetSpec, counts: tuple[SplitCount, ...]) -> int | None:
    """Counted; else by the pairs' share of the dataset's published sum; else None."""
    counted = [count.references - count.empty for count in counts if count.references is not None]
    if len(counted) == len(counts):
        return sum(counted)
    if spec.table is None or spec.table.references is None:
        return None
    share = sum(count.pairs for count in counts) / spec.table.pairs
    return 10 * round(spec.table.references * share / 10)

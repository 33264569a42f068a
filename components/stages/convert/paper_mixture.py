"""M3Diff's training mixture (section 5.2): seven sources, "145k pairs and 896k question-answer samples" in all.

The paper's table of the counts by source is not known to us. What is known: the official splits of each source, which
`DATASETS` has; train and val together come to 145k pairs. CLEVR-Change's paper gives 493,735 captions in all and none
by split, so its splits' are by share, to the nearest ten. Of CLEVR-DC's captions no count is published.
"""

from m3diff.datasets import DATASETS

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
    """Return of each source the published `train` and `train_val` (both together) counts. References are counted, else
    by the pairs' share of the dataset's published sum, else None."""
    specs = {part.part: (spec.table, part) for spec in DATASETS.values() for part in spec.published}
    found: dict[str, dict[str, Count]] = {}
    for name in SOURCES:
        table, part = specs[name]
        for splits, counts in (("train", (part.train,)), ("train_val", (part.train, part.val))):
            pairs = sum(count.pairs for count in counts)
            counted = [count.references - count.empty for count in counts if count.references is not None]
            references = None
            if len(counted) == len(counts):
                references = sum(counted)
            elif table is not None and table.references is not None:
                references = 10 * round(table.references * pairs / table.pairs / 10)
            found.setdefault(name, {})[splits] = (pairs, references)
    return found

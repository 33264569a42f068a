"""Coupled samples (OneDiff, arXiv 2407.05645, section 4.2): two unrelated images with their captions become one pair,
whose caption is both captions, so that a new module learns to read both images before it learns to compare them.

Within a split, in a random order by the seed; each image is used once.
"""

import random
from collections import Counter

from m3diff.records.schemas import SPLITS
from m3diff.stages.augment.pair import Made, Pair, seed_of
from m3diff.stages.augment.params import CoupledSamples
from m3diff.stages.augment.source import Captioned, Rejected


def make_coupled_samples(cfg: CoupledSamples, captioned: list[Captioned], rejected: Rejected) -> Made:
    """The pairs of all splits. What is not usable counts as a pair that is not made, as does a last odd image."""
    rejected = Rejected(rejected)
    pairs: list[Pair] = []
    for split in SPLITS:
        images = [each for each in captioned if each.split == split]
        random.Random(seed_of(cfg.seed, split)).shuffle(images)
        rejected.update({"no partner is left": 1} if len(images) % 2 else {})
        for first, second in zip(images[::2], images[1::2], strict=False):
            if first.scene == second.scene:
                rejected["both are of one scene"] += 1
            else:
                pairs.append(_pair(cfg, first, second))
    return Made(pairs, rejected, Counter(), {})


def _pair(cfg: CoupledSamples, first: Captioned, second: Captioned) -> Pair:
    caption = f"{first.caption}{cfg.separator}{second.caption}"
    scene = f"{first.scene}+{second.scene}"
    return Pair(f"{first.name}+{second.name}", first.split, scene, first.image, second.image, [caption], [], {})

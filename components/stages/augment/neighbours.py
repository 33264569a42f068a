"""DiffCap's retrieved pairs (OneDiff, arXiv 2407.05645, section 3.2): images that are alike but not the same, whose
captions differ, with a caption of the difference that is written from the two.

Each image is a query and the others of its split are searched, so that no pair crosses splits. The caption is written
from texts alone: what no caption tells (on MiniChange camera and lamp) is not in it.
"""

import re
from collections import Counter

from m3diff.records.schemas import SPLITS
from m3diff.stages.augment.pair import Made, Pair
from m3diff.stages.augment.params import Neighbours
from m3diff.stages.augment.parts import Features, Writer
from m3diff.stages.augment.search import nearest
from m3diff.stages.augment.source import Captioned, Rejected

Candidate = tuple[Captioned, Captioned, float]
"""Query, neighbour and the cosine of their features."""


def make_neighbours(
    cfg: Neighbours,
    captioned: list[Captioned],
    known: set[frozenset],
    rejected: Rejected,
    features: Features,
    writer: Writer,
) -> Made:
    """The pairs of all splits, with `cfg.references` captions each.

    Args:
        known: pairs of image paths that the source has already.
    """
    rejected, dropped = Rejected(rejected), Counter[str]()
    chosen: list[Candidate] = []
    for split in SPLITS:
        chosen += _of_split(cfg, captioned, split, known, rejected, features)
    facts = [{"first": query.caption, "second": found.caption} for query, found, _ in chosen]
    pairs: list[Pair] = []
    for (query, found, cosine), written in zip(chosen, writer.write("difference", facts, cfg.references), strict=True):
        dropped += written.dropped
        if len(written.texts) < cfg.references:
            rejected["too few captions"] += 1
        else:
            pairs.append(_pair(query, found, list(written.texts), cosine))
    return Made(pairs, rejected, dropped, {"features": features.identity, "writer": writer.identity})


def _of_split(
    cfg: Neighbours,
    captioned: list[Captioned],
    split: str,
    known: set[frozenset],
    rejected: Rejected,
    features: Features,
) -> list[Candidate]:
    """Each image's nearest others, those that pass; the reasons of the rest are counted."""
    images = [each for each in captioned if each.split == split]
    if len(images) < 2:
        rejected.update({"alone in its split": 1} if images else {})
        return []
    cosines, numbers = nearest(features.features([each.image for each in images]), cfg.candidates, cfg.search)
    taken: dict[frozenset, Candidate] = {}
    for at, query in enumerate(images):
        for cosine, number in zip(cosines[at].tolist(), numbers[at].tolist(), strict=True):
            pair = frozenset((query.image, images[number].image))
            reason = _reason(cfg, query, images[number], cosine)
            reason = reason or ("is a pair of the source" if pair in known else None)
            reason = reason or ("was found the other way round" if pair in taken else None)
            if reason:
                rejected[reason] += 1
            else:
                taken[pair] = (query, images[number], cosine)
    return list(taken.values())


def _reason(cfg: Neighbours, query: Captioned, found: Captioned, cosine: float) -> str | None:
    """Why two images make no pair."""
    low, high = cfg.band
    if not low <= cosine <= high:
        return "too alike" if cosine > high else "too unlike"
    if query.digest == found.digest:
        return "same image"
    if text_similarity(query.caption, found.caption) > cfg.max_text_similarity or query.caption == found.caption:
        return "captions are alike"
    return None


def text_similarity(first: str, second: str) -> float:
    """Share of the words of two texts that both have, each as often as it stands there (Jaccard of multisets)."""
    one, other = (Counter(re.findall(r"\w+", text.lower())) for text in (first, second))
    return (one & other).total() / max(1, (one | other).total())


def _pair(query: Captioned, found: Captioned, texts: list[str], cosine: float) -> Pair:
    """Its scene is that of both images; of two scenes, which are in one split, it has one of its own."""
    scene = query.scene if query.scene == found.scene else f"{query.scene}+{found.scene}"
    made = {"cosine": round(cosine, 4)}
    return Pair(f"{query.name}+{found.name}", query.split, scene, query.image, found.image, texts, [], made)

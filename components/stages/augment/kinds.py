"""Kinds of synthetic data: edits, neighbours, coupled samples. Each takes the usable rows of a source and gives pairs.

*Edits* (Syned, Evennou et al., WACV 2025, section 4.3): each original edited several times by its own instruction,
which is the caption; a writer's paraphrases are further references. Edits of one original differ by their seed alone.
They share its scene, its split and its types of change. An edit that shows the original, or what an earlier one shows,
pixel by pixel, is none; a pair whose paraphrases are fewer than asked for is left out, since scores move with the
number of references.

*Neighbours* (DiffCap's retrieved pairs, OneDiff, arXiv 2407.05645, section 3.2): images that are alike but not the
same, whose captions differ, with a caption of the difference that is written from the two. Each image is a query and
the others of its split are searched, so that no pair crosses splits. The caption is written from texts alone: what no
caption tells (on MiniChange camera and lamp) is not in it.

*Coupled samples* (OneDiff, section 4.2): two unrelated images with their captions become one pair, whose caption is
both captions, so that a new module learns to read both images before it learns to compare them. Within a split, in a
random order by the seed; each image is used once.
"""

import hashlib
import io
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.images.open import load_image
from m3diff.records.files import write_atomic
from m3diff.records.progress import progress
from m3diff.records.schemas import SPLITS
from m3diff.stages.augment.editors import Editor
from m3diff.stages.augment.features import Features, nearest
from m3diff.stages.augment.params import CoupledSamples, Edits, Neighbours
from m3diff.stages.augment.source import Original, Rejected
from m3diff.stages.augment.writers import Writer


class Pair(NamedTuple):
    """A pair of images with its captions. `made` says how it came about, for people: the reader passes over it."""

    id: str
    split: str
    scene: str
    before: Path
    after: Path
    captions: list[str]
    change_types: Sequence[str]
    made: Mapping[str, Any]


class Made(NamedTuple):
    """Pairs in order; how many others were rejected, by reason; and texts that a writer gave in vain."""

    pairs: list[Pair]
    rejected: Rejected
    dropped_texts: Mapping[str, int] = {}
    models: Mapping[str, str] = {}  # digests of what made it, by its part


def seed_of(*facts: object) -> int:
    """A seed of 32 bits that follows from the facts."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, facts)).encode()).digest()[:4])


def make_edits(
    cfg: Edits, originals: list[Original], rejected: Rejected, editor: Editor, writer: Writer, into: Path
) -> Made:
    """The pairs of all originals.

    Args:
        rejected: rows of the source that are not usable; pairs that are not made are counted in it, too.
        into: the folder of this editor's edits. What another run has left there is not edited again.
    """
    dropped, pairs = Counter[str](), list[Pair]()
    texts = {at: [original.text] for at, original in enumerate(originals)}
    for split, count in cfg.paraphrases.items():
        places = [at for at, original in enumerate(originals) if original.split == split] if count else []
        asked = [originals[at] for at in places]
        facts = [{"text": one.text} | ({"first": one.caption} if one.caption else {}) for one in asked]
        for at, written in zip(places, writer.write("paraphrase", facts, count), strict=True):
            texts[at] += written.texts
            dropped += written.dropped
    for at, original in progress(enumerate(originals), "augment: edits", len(originals), "original"):
        if len(texts[at]) <= cfg.paraphrases.get(original.split, 0):
            rejected["too few paraphrases"] += cfg.edits
        else:
            pairs += _edit(cfg, original, texts[at], rejected, editor, into)
    return Made(pairs, rejected, dropped, {"editor": editor.identity, "writer": writer.identity})


def _edit(
    cfg: Edits, original: Original, texts: list[str], rejected: Rejected, editor: Editor, into: Path
) -> list[Pair]:
    """The pairs of one original. A file of an edit is named by the content that is edited, how and by which seed."""
    pairs: list[Pair] = []
    name, split, scene, image, digest, instruction, kinds, _ = original
    shown = {_pixels(image)}
    for number in range(cfg.edits):
        seed = seed_of(cfg.seed, name, number)
        facts = f"{digest}\0{instruction}\0{seed}"
        file = into / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.png"
        if not file.exists():
            edited = editor.edit(image, instruction, seed)
            if edited is None:
                rejected["cannot be carried out"] += 1
                continue
            png = io.BytesIO()
            edited.save(png, "PNG", compress_level=4)
            write_atomic(file, png.getvalue())
        if (pixels := _pixels(file)) in shown:
            rejected["shows what another shows"] += 1
            continue
        shown.add(pixels)
        made = {"of": name, "seed": seed}
        pairs.append(Pair(f"{name}-{number}", split, scene, image, file, texts, kinds, made))
    return pairs


def _pixels(image: Path) -> bytes:
    return hashlib.sha256(load_image(image).tobytes()).digest()


def make_neighbours(
    cfg: Neighbours,
    captioned: list[Original],
    known: set[frozenset],
    rejected: Rejected,
    features: Features,
    writer: Writer,
) -> Made:
    """The pairs of all splits, with `cfg.references` captions each.

    Args:
        known: pairs of image paths that the source has already.
    """
    dropped, pairs = Counter[str](), list[Pair]()
    chosen: dict[tuple[str, frozenset], tuple[Original, Original, float]] = {}
    for split in SPLITS:
        images = [each for each in captioned if each.split == split]
        if len(images) < 2:
            rejected.update({"alone in its split": 1} if images else {})
            continue
        cosines, numbers = nearest(features.features([each.image for each in images]), cfg.candidates, cfg.search)
        for query, alike, others in zip(images, cosines.tolist(), numbers.tolist(), strict=True):
            for cosine, number in zip(alike, others, strict=True):
                found = images[number]
                both = frozenset((query.image, found.image))
                if reason := _no_pair(cfg, query, found, cosine):
                    rejected[reason] += 1
                elif both in known or (split, both) in chosen:
                    rejected["is a pair of the source" if both in known else "was found the other way round"] += 1
                else:
                    chosen[split, both] = (query, found, cosine)
    facts = [{"first": query.text, "second": found.text} for query, found, _ in chosen.values()]
    texts = writer.write("difference", facts, cfg.references)
    for (query, found, cosine), written in zip(chosen.values(), texts, strict=True):
        dropped += written.dropped
        if len(written.texts) < cfg.references:
            rejected["too few captions"] += 1
            continue
        # of two scenes, which are in one split, the pair has a scene of its own
        scene = query.scene if query.scene == found.scene else f"{query.scene}+{found.scene}"
        name, made = f"{query.name}+{found.name}", {"cosine": round(cosine, 4)}
        pairs.append(Pair(name, query.split, scene, query.image, found.image, list(written.texts), [], made))
    return Made(pairs, rejected, dropped, {"features": features.identity, "writer": writer.identity})


def _no_pair(cfg: Neighbours, query: Original, found: Original, cosine: float) -> str | None:
    """The reason why two images make no pair."""
    low, high = cfg.band
    if not low <= cosine <= high:
        return "too alike" if cosine > high else "too unlike"
    if query.digest == found.digest:
        return "same image"
    # the share of the words of both that both have, each as often as it occurs (Jaccard of multisets)
    one, other = (Counter(re.findall(r"\w+", each.text.lower())) for each in (query, found))
    similarity = (one & other).total() / max(1, (one | other).total())
    if similarity > cfg.max_text_similarity or query.text == found.text:
        return "captions are alike"
    return None


def make_coupled_samples(cfg: CoupledSamples, captioned: list[Original], rejected: Rejected) -> Made:
    """The pairs of all splits. What is not usable counts as a pair that is not made, as does a last odd image."""
    pairs = list[Pair]()
    for split in SPLITS:
        images = [each for each in captioned if each.split == split]
        random.Random(seed_of(cfg.seed, split)).shuffle(images)
        rejected.update({"no partner is left": 1} if len(images) % 2 else {})
        for one, two in zip(images[::2], images[1::2], strict=False):
            if one.scene == two.scene:
                rejected["both are of one scene"] += 1
                continue
            caption, scene = f"{one.text}{cfg.separator}{two.text}", f"{one.scene}+{two.scene}"
            pairs.append(Pair(f"{one.name}+{two.name}", split, scene, one.image, two.image, [caption], [], {}))
    return Made(pairs, rejected)

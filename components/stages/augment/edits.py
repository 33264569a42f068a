"""Syned (Evennou et al., WACV 2025, section 4.3): each original edited several times by its own instruction, which is
the caption; a writer's paraphrases are further references.

Edits of one original differ by their seed alone. They share its scene, its split and its types of change. An edit that
shows the original, or what an earlier one shows, pixel by pixel, is none; a pair whose paraphrases are fewer than asked
for is left out, since scores move with the number of references.
"""

import hashlib
import io
from collections import Counter
from pathlib import Path

from m3diff.images.open import load_image
from m3diff.records.files import write_atomic
from m3diff.records.progress import progress
from m3diff.stages.augment.pair import Made, Pair, seed_of
from m3diff.stages.augment.params import Edits
from m3diff.stages.augment.parts import Editor, Writer, Written
from m3diff.stages.augment.source import Original, Rejected


def make_edits(
    cfg: Edits, originals: list[Original], rejected: Rejected, editor: Editor, writer: Writer, into: Path
) -> Made:
    """The pairs of all originals.

    Args:
        rejected: rows of the source that are not usable; each stands for all the edits that it would have given.
        into: the folder of this editor's edits. What another run has left there is not edited again.
    """
    rejected = rejected.times(cfg.edits)
    dropped: Counter[str] = Counter()
    pairs: list[Pair] = []
    texts = _paraphrases(cfg, originals, writer)
    for original, written in progress(zip(originals, texts, strict=True), "augment: edits", len(originals), "original"):
        dropped += written.dropped
        if len(written.texts) < cfg.paraphrases.get(original.split, 0):
            rejected["too few paraphrases"] += cfg.edits
        else:
            pairs += _edit(cfg, original, list(written.texts), rejected, editor, into)
    return Made(pairs, rejected, dropped, {"editor": editor.identity, "writer": writer.identity})


def _paraphrases(cfg: Edits, originals: list[Original], writer: Writer) -> list[Written]:
    """Of each original the paraphrases that its split asks for; the same instruction of like images is asked once."""
    found: list[Written] = [Written((), Counter())] * len(originals)
    for split, count in cfg.paraphrases.items():
        places = [at for at, original in enumerate(originals) if original.split == split] if count else []
        facts = [_facts(originals[at]) for at in places]
        for at, written in zip(places, writer.write("paraphrase", facts, count), strict=True):
            found[at] = written
    return found


def _facts(original: Original) -> dict[str, str]:
    known = {"text": original.instruction}
    return known | {"first": original.caption} if original.caption else known


def _edit(
    cfg: Edits, original: Original, paraphrases: list[str], rejected: Rejected, editor: Editor, into: Path
) -> list[Pair]:
    pairs: list[Pair] = []
    shown = {_pixels(original.image)}
    for number in range(cfg.edits):
        seed = seed_of(cfg.seed, original.name, number)
        file = into / f"{_name(original, seed)}.png"
        if not file.exists():
            edited = editor.edit(original.image, original.instruction, seed)
            if edited is None:
                rejected["cannot be carried out"] += 1
                continue
            made = io.BytesIO()
            edited.save(made, "PNG", compress_level=4)
            write_atomic(file, made.getvalue())
        pixels = _pixels(file)
        if pixels in shown:
            rejected["shows what another shows"] += 1
            continue
        shown.add(pixels)
        pairs.append(
            Pair(
                f"{original.name}-{number}",
                original.split,
                original.scene,
                original.image,
                file,
                [original.instruction, *paraphrases],
                original.change_types,
                {"of": original.name, "seed": seed},
            )
        )
    return pairs


def _name(original: Original, seed: int) -> str:
    """By the content of what is edited, how and by which seed."""
    return hashlib.sha256(f"{original.digest}\0{original.instruction}\0{seed}".encode()).hexdigest()[:32]


def _pixels(image: Path) -> bytes:
    return hashlib.sha256(load_image(image).tobytes()).digest()

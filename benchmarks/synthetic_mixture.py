"""A synthetic mixture of the paper's size: the published counts, captions of the right number and length, and one small
image under every name (hard links). OmniDiff has its own layout, since the gate of the paper's profile is of its
protocol; the others are pairs of one's own. Everything that trains is there, no test set.

145,377 pairs (train and validation splits, the one plain sum that gives the paper's 145k) and 896,000 captions. Of
CLEVR-DC's captions no count is published; they are the remainder, 9.2 a pair.
"""

import json
import os
from collections.abc import Iterable
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml
from PIL import Image

PARAMS, PROFILE = Path("params.yaml"), Path("profiles/paper.yaml")
SAMPLES = 896_000
LINKS = 60_000
"""Names of one file; ext4 allows 65,000."""

Captions = list[list[str]]
Splits = dict[str, Captions]
"""The captions of every pair, by split."""


class Part(NamedTuple):
    """A dataset at full size: pairs and captions of train and val, words of a caption, words in use."""

    pairs: tuple[int, int]
    captions: tuple[int, int]
    words: tuple[int, int]  # fewest and most; the mean lies half-way
    vocabulary: int


PARTS = {
    "omnidiff_real": Part((7_007, 799), (7_007, 799), (20, 100), 3_793),
    "omnidiff_render": Part((5_445, 777), (5_445, 777), (20, 100), 3_793),
    "spot_the_diff": Part((8_566, 1_493), (17_623, 3_304), (3, 18), 2_400),
    "iedit": Part((3_061, 383), (3_061, 1_149), (2, 13), 2_000),
    "birds_to_words": Part((2_685, 325), (12_890, 1_556), (12, 53), 2_500),
    "clevr_change": Part((67_660, 3_976), (419_640, 24_660), (6, 14), 72),
    "clevr_dc": Part((40_800, 2_400), (375_978, 22_111), (5, 11), 83),
}


OMNIDIFF = ("omnidiff_real", "omnidiff_render")
OWN = {"reader": "pairs", "options": {"manifest": "pairs.jsonl"}}


class Picture:
    """The one image, under as many names as are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = count()

    def __call__(self, *paths: Path) -> None:
        for path in paths:
            source = self.folder / f"{next(self.names) // LINKS}{path.suffix}"
            if not source.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                Image.linear_gradient("L").resize((16, 16)).save(source)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(source, path)


def write_synthetic_mixture(root: Path, samples: int = SAMPLES) -> Path:
    """Write the datasets under `root` and the parameter file `root/params.yaml`, whose path is returned."""
    picture, rng = Picture(root / "picture"), np.random.default_rng(896)
    parts = _scaled(samples)
    for name, part in parts.items():
        splits = {split: _captions(rng, part, which) for which, split in enumerate(("train", "val"))}
        (root / "raw" / name).mkdir(parents=True)
        (_omnidiff if name in OMNIDIFF else _own)(root / "raw" / name, splits, picture)
    return _write_params(root, parts)


def _scaled(samples: int) -> dict[str, Part]:
    """Every part cut down alike; CLEVR-DC takes what rounding leaves, so that the sum is exact."""
    share, parts = samples / SAMPLES, {}
    for name, part in PARTS.items():
        train, val = (round(number * share) for number in part.pairs)
        captions = round(part.captions[0] * share), round(part.captions[1] * share)
        parts[name] = part._replace(pairs=(train, val), captions=captions)
    rest = samples - sum(sum(part.captions) for part in parts.values())
    last = parts["clevr_dc"]
    parts["clevr_dc"] = last._replace(captions=(last.captions[0] + rest, last.captions[1]))
    return parts


def _captions(rng: np.random.Generator, part: Part, which: int) -> Captions:
    """Captions of every pair of one split, dealt out evenly; common words are common (Zipf)."""
    pairs, captions = part.pairs[which], part.captions[which]
    words = _words(part.vocabulary)
    frequency = 1 / np.arange(2, len(words) + 2)
    lengths = rng.integers(part.words[0], part.words[1] + 1, captions)
    sampled = rng.choice(len(words), lengths.sum(), p=frequency / frequency.sum())
    ends = np.concatenate([[0], lengths.cumsum()])
    texts = [" ".join(words[index] for index in sampled[start:end].tolist()) for start, end in pairwise(ends)]
    cuts = (np.arange(pairs + 1) * captions) // pairs
    return [_distinct(texts[start:end]) for start, end in pairwise(cuts)]


def _distinct(texts: list[str]) -> list[str]:
    """Training drops repeats within a pair; a repeat gets one more word until it is none."""
    kept: list[str] = []
    for text in texts:
        while text in kept:
            text += " again"
        kept.append(text)
    return kept


def _words(number: int) -> list[str]:
    """Made-up words of two or three syllables, five letters in the mean."""
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    stems = syllables + [first + second for first in syllables for second in syllables]
    return [stem + "rn"[index % 2] for index, stem in enumerate(stems)][:number]


def _omnidiff(root: Path, splits: Splits, picture: Picture) -> None:
    rows = []
    for number, (split, captions) in enumerate(_each(splits)):
        before, after = f"{number // 50:03d}/{number}_a.jpg", f"{number // 50:03d}/{number}_b.jpg"
        picture(root / before, root / after)
        words = captions[0].split()
        text = ". ".join(" ".join(words[start : start + 24]) for start in range(0, len(words), 24)) + "."
        row = {"before": before, "after": after, "captions": text, "change_types": ["addition"], "split": split}
        rows.append(row)
    (root / "annotations.json").write_text(json.dumps(rows), "utf-8")


def _own(root: Path, splits: Splits, picture: Picture) -> None:
    """Pairs of one's own, a line of JSON each."""
    lines = []
    for number, (split, captions) in enumerate(_each(splits)):
        before, after = f"{number // 1000:03d}/{number}_a.png", f"{number // 1000:03d}/{number}_b.png"
        picture(root / before, root / after)
        lines.append(json.dumps({"before": before, "after": after, "captions": captions, "split": split}) + "\n")
    (root / "pairs.jsonl").write_text("".join(lines), "utf-8")


def _each(splits: Splits) -> Iterable[tuple[str, list[str]]]:
    return ((split, captions) for split, some in splits.items() for captions in some)


def _write_params(root: Path, parts: dict[str, Part]) -> Path:
    """The embedded run's parameters with this mixture in place of its dataset, converted as the paper's profile says.

    Validation splits train, as the paper's 145k pairs ask.
    """
    params, profile = (yaml.safe_load(path.read_text("utf-8")) for path in (PARAMS, PROFILE))
    params["paths"] |= {name: str(root / Path(path).name) for name, path in params["paths"].items() if name != "base"}
    params["synthesize"], params["convert"] = {}, params["convert"] | profile["convert"]
    params["promote"] |= profile["promote"]  # a gate on these datasets
    params["compute"]["scratch"] = str(root / "runs")
    params["ingest"]["datasets"] = {
        name: {
            **({"reader": "omnidiff"} if name in OMNIDIFF else OWN),
            "root": str(root / "raw" / name),
            "train_on": ["train", "val"],
            "expected_pairs": dict(zip(("train", "val"), part.pairs, strict=True)),
        }
        for name, part in parts.items()
    }
    path = root / "params.yaml"
    path.write_text(yaml.safe_dump(params, sort_keys=False), "utf-8")
    return path

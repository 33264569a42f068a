"""A Spot-the-Diff of five pairs in seven records, one pair without a word, and its captions: as small as the traps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, Published, SplitCount

LONG = " ".join(["the grey van that stood beside the gate has been driven away from the long wall"] * 2)
RECORDS: list[tuple[str, list[str]]] = [
    ("11", ["the red car is gone from the street", "a man in a dark coat has appeared"]),
    ("12", ["the white van moved to the left side"]),
    ("13", [""]),
    ("14", [LONG, f"{LONG} and {LONG}", "two people walk past the shop"]),
    ("11", ["the small red car left the street"]),
    ("15", ["the door of the shop is open now"]),
    ("12", ["a van was parked near the shop"]),
]
CAPTIONS = {
    "11": "the red car is gone from the street",
    "12": "the white van moved to the right side",
    "13": "there is no difference",
    "14": "the grey van has been driven away and two people walk past the shop",
    "15": "the door of the house is open",
}
PAIRS = ("11", "12", "13", "14", "15")


def write_data(root: Path) -> Path:
    """The dataset's own folder, without an image."""
    (root / "annotations").mkdir(parents=True)
    records = [{"img_id": name, "sentences": sentences} for name, sentences in RECORDS]
    for split in ("train", "val"):
        write(root / "annotations" / f"{split}.json", [])
    write(root / "annotations/test.json", records)
    return root


def small_spec() -> DatasetSpec:
    """Spot-the-Diff as if papers scored these five pairs, by the metrics that are quick."""
    counts = SplitCount(5, 10, empty=1, wordless=1, records=7)
    spec = DATASETS["spot_the_diff"]
    protocols = tuple(replace(one, n=5, metrics=("BLEU", "CIDEr")) for one in spec.protocols)
    published = Published("spot_the_diff", "Spot-the-Diff", SplitCount(0), SplitCount(0), counts)
    return replace(spec, published=(published,), protocols=protocols)


def merged() -> dict[str, list[str]]:
    """All references of each pair."""
    return {name: [text for other, found in RECORDS if other == name for text in found] for name in PAIRS}


def coco(references: dict[str, list[str]]) -> dict[str, Any]:
    annotations = [{"image_id": name, "caption": text} for name, texts in references.items() for text in texts]
    return {"images": [{"id": name} for name in references], "annotations": annotations}


def results(captions: dict[str, str]) -> list[dict[str, str]]:
    return [{"image_id": name, "caption": caption} for name, caption in captions.items()]


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def record_level() -> tuple[dict[str, list[str]], dict[str, str]]:
    """Every record scored by itself, under its number."""
    references = {str(number): sentences for number, (_, sentences) in enumerate(RECORDS)}
    return references, {str(number): CAPTIONS[name] for number, (name, _) in enumerate(RECORDS)}


def last_record_wins() -> tuple[dict[str, list[str]], dict[str, str]]:
    """As a dictionary by id keeps them."""
    return dict(RECORDS), CAPTIONS


def empties_dropped() -> tuple[dict[str, list[str]], dict[str, str]]:
    references = {name: texts for name, texts in merged().items() if texts != [""]}
    return references, {name: CAPTIONS[name] for name in references}


def joined_text() -> tuple[dict[str, list[str]], dict[str, str]]:
    return {name: [". ".join(texts)] for name, texts in merged().items()}, CAPTIONS

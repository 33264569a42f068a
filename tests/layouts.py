"""Datasets in their exact layouts on disk, as small as a test wants them."""

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from components.ingest.params import DatasetEntry
from components.ingest.stage import IngestReport, ingest
from components.validate.params import Validate
from components.validate.stage import ValidateReport, validate

CLEVR_SPLITS = {"train": [3, 5, 8], "val": [9], "test": [1, 12]}


def write_clevr(root: Path, splits: dict[str, list[Any]] | None = None) -> Path:
    """CLEVR-Change: scenes with gaps in their numbers, every image distinct, two references a pair."""
    splits = splits or CLEVR_SPLITS
    scenes = sorted({scene for numbers in splits.values() for scene in numbers})
    for folder, kind, shade in (
        ("images", "default", 0),
        ("sc_images", "semantic", 80),
        ("nsc_images", "nonsemantic", 160),
    ):
        for scene in scenes:
            save_picture(root / folder / f"CLEVR_{kind}_{scene:06d}.png", scene, shade)
    keys = [f"CLEVR_default_{scene:06d}.png" for scene in scenes]
    write_json(
        root / "change_captions.json", {k: [f"the cube of {k[14:20]} turned red", "it became red"] for k in keys}
    )
    write_json(root / "no_change_captions.json", {k: ["nothing has changed", "no change was made"] for k in keys})
    write_json(root / "splits.json", splits)
    write_json(root / "type_mapping.json", {"color": [f"{scene:06d}.png" for scene in scenes], "size": ["000003.png"]})
    return root


def save_picture(path: Path, number: int, shade: int = 0, mode: str = "RGB") -> Path:
    """16x16 pixels, told apart by a block (place and colour follow the number) on a ground (follows the shade)."""
    image = Image.new("RGB", (16, 16), (shade, 40, 90))
    left, top = 2 * (number % 7), 2 * (number // 7 % 7)
    image.paste((255, 255 - 10 * number % 256, 0), (left, top, left + 3, top + 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.convert(mode).save(path)
    return path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Rewrite a JSON file by a function that changes its value in place."""
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    write_json(path, value)


def make_entry(reader: str, root: Path, **fields: Any) -> DatasetEntry:
    """An entry of `ingest.datasets`; what is no field of DatasetEntry is an option of the reader."""
    own = {key: fields.pop(key) for key in ("train_on", "follow_links", "expected_pairs") if key in fields}
    return DatasetEntry.model_validate({"reader": reader, "root": root, "options": fields} | own)


def run_ingest(root: Path, reader: str = "clevr_change", name: str = "mini", **fields: Any) -> IngestReport:
    """Read one dataset into `records/<name>` beside its root; `fields` as in `make_entry`."""
    return ingest(name, make_entry(reader, root, **fields), image_cache(root.parent), root.parent / "records")


def run_validate(
    folder: Path, entries: Mapping[str, DatasetEntry] | None = None, cache: Path | None = None, **changes: Any
) -> ValidateReport:
    """Check `folder/records` into `folder/clean`, every share of bad rows allowed unless said.

    Without `entries`, the datasets that were ingested, by name.
    """
    fields = {
        "max_quarantined_share": 1.0,
        "allow_lost_test_pairs": True,
        "max_caption_chars": 2000,
        "max_image_pixels": 1_000_000,
        "allow_test_leakage": False,
        "near_duplicate_max_diff": 2,
    }
    cfg = Validate.model_validate(fields | changes)
    entries = ingested(folder) if entries is None else entries
    return validate(cfg, entries, cache or image_cache(folder), folder / "records", folder / "clean")


def ingested(folder: Path) -> dict[str, DatasetEntry]:
    """Entries of the datasets that have records in `folder`, by name."""
    reports = sorted((folder / "records").glob("*.json"))
    return {path.stem: make_entry(json.loads(path.read_text())["reader"], folder) for path in reports}


def image_cache(folder: Path) -> Path:
    return folder / "image_cache.parquet"


def write_clevr_dc(root: Path) -> Path:
    """CLEVR-DC: un-padded names, so that 10 would come before 9 if they were sorted as text."""
    for scene in (9, 10, 47999):
        save_picture(root / f"bef/{scene}.png", scene, 0)
        save_picture(root / f"aft/{scene}.png", scene, 90)
    write_json(root / "captions.json", {"10": ["b", "b2"], "9": ["a"], "47999": ["c"]})
    write_json(root / "split.json", {"train": [9, 10], "val": [], "test": [47999]})
    return root


def write_spot(root: Path) -> Path:
    """Spot-the-Diff: an id in three records, an empty sentence, a test pair whose only reference is empty."""
    records = {
        "train": [("235", ["the suv is gone"]), ("76", [""]), ("235", ["a man left", ""]), ("235", ["it is dark"])],
        "val": [("8", ["there are no differences"])],
        "test": [("9", [""])],
    }
    for split, found in records.items():
        (root / "annotations").mkdir(parents=True, exist_ok=True)
        write_json(root / f"annotations/{split}.json", [{"img_id": i, "sentences": s} for i, s in found])
        for img_id, _ in found:
            save_picture(root / f"resized_images/{img_id}.png", int(img_id), 10)
            save_picture(root / f"resized_images/{img_id}_2.png", int(img_id), 120)
    return root


def write_iedit(root: Path) -> Path:
    """IEdit: one pair under two uids, a valid and a train pair that are in test, a GIF, images of different size."""
    rows = {
        "train": [("a.jpg", "b.gif", "Zhopped_1"), ("a.jpg", "b.gif", "Zhopped_2"), ("e.JPG", "f.png", "Reddit_3")],
        "valid": [("e.JPG", "f.png", "Reddit_4"), ("g.jpeg", "h.png", "Reddit_5")],
        "test": [("e.JPG", "f.png", "Reddit_6"), ("a.jpg", "h.png", "Reddit_7")],
    }
    for split, found in rows.items():
        records = [{"img0": a, "img1": b, "sents": [f"edit  of {uid} "], "uid": uid} for a, b, uid in found]
        root.mkdir(parents=True, exist_ok=True)
        write_json(root / f"{split}.json", records)
    for number, name in enumerate(("a.jpg", "b.gif", "e.JPG", "f.png", "g.jpeg", "h.png")):
        save_picture(root / "images" / name, 9 * number, 40 * number)
    return root


BIRD_COLUMNS = [f"img{n}{what}" for n in (1, 2) for what in ("ObservationURL", "ImgURL", "Species", "Selection")]
BIRD_COLUMNS += ["split", "annN", "description"]


def write_birds(path: Path, rows: list[tuple[str, str, str, str]]) -> None:
    """The Birds-to-Words TSV of rows (first photo, second photo, split, description)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter="\t", quotechar='"', lineterminator="\n")
        table.writerow(BIRD_COLUMNS)
        for number, (first, second, split, description) in enumerate(rows):
            photos = [[f"{SITE}/{p}", f"{SITE}/{p}/medium.jpg?1545", "Larus", "visual"] for p in (first, second)]
            table.writerow([*photos[0], *photos[1], split, number % 5 + 1, description])


SITE = "https://www.inaturalist.org/photos"

"""Datasets in their exact layouts on disk, as small as a test wants them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from components.ingest.stage import IngestReport, ingest
from components.params import Dataset, Ingest, Validate
from components.validate.stage import ValidateReport, validate

CLEVR_SPLITS = {"train": [3, 5, 8], "val": [9], "test": [1, 12]}


def write_clevr(root: Path, splits: dict[str, list[Any]] | None = None) -> Path:
    """CLEVR-Change: scenes with gaps in their numbers, every image distinct, two captions a pair."""
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


def run_ingest(root: Path, reader: str = "clevr_change", name: str = "mini", **options: Any) -> IngestReport:
    """Read one dataset into the folder `records` beside its root."""
    dataset = Dataset.model_validate({"name": name, "reader": reader, "root": root, "options": options})
    return ingest(Ingest(datasets=[dataset]), root.parent / "records")


def run_validate(folder: Path, **changes: Any) -> ValidateReport:
    """Check `folder/records` into `folder/clean`, every share of bad rows allowed unless said."""
    fields = {
        "max_quarantined_share": 1.0,
        "max_caption_chars": 2000,
        "max_image_pixels": 1_000_000,
        "near_duplicate_levels": 2,
        "expected_pairs": {},
        "image_memory": folder / "image_memory.parquet",
    }
    return validate(Validate.model_validate(fields | changes), folder / "records", folder / "clean")

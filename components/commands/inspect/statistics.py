"""The statistics that the papers report, of every dataset, and one page with plots and pairs: `m3diff data statistics`.

A command and no part of convert: to count every word of 896k references takes 1.5 s of the 6 s that validate and
convert have together, and the page shows images, which convert does not read. Words are runs of characters between
white space; the vocabulary is of lower-case words without punctuation. Empty references are not counted.
"""

import base64
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import polars as pl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import check_licence
from m3diff.images.open import load_image
from m3diff.records.errors import DataError
from m3diff.records.files import write_atomic
from m3diff.records.progress import progress
from m3diff.records.schemas import SPLITS

LONG = 20  # words beyond which Table 1 of OmniDiff calls a caption long
PAIRS, THUMB_PX, TOP_TYPES, BINS = 4, 160, 12, 24


def write_statistics(clean: Path) -> dict[str, dict[str, Any]]:
    """Write `clean/statistics.html` and `clean/statistics.json` of `clean/records.parquet`.

    Returns:
        Counts over all splits by dataset, as in the JSON file.

    Raises:
        DataError: there are no clean records.
    """
    path = clean / "records.parquet"
    if not path.is_file():
        raise DataError(f"{path}: no such file; run `m3diff validate` first")
    records = pl.read_parquet(path)
    names = records["dataset"].unique().sort().to_list()
    found = {name: _count(records.filter(dataset=name)) for name in progress(names, "statistics", len(names))}
    notices, shown = dict[str, str](), dict[str, list[dict[str, Any]]]()
    for name in found:
        named = [spec for each, spec in DATASETS.items() if each == name or name in {p.part for p in spec.published}]
        try:
            if notice := check_licence(named[0], "show") if named else None:
                notices[name] = notice
            shown[name] = _shown_pairs(records.filter(dataset=name))
        except DataError as error:
            notices[name] = str(error)
    write_atomic(clean / "statistics.html", _render(found, shown, notices))
    write_atomic(clean / "statistics.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return found


def _count(records: pl.DataFrame) -> dict[str, Any]:
    reference = pl.col("reference")
    references = records.select(reference=pl.col("references")).explode("reference").filter(reference != "")
    ends, open_end = reference.str.count_matches(r"[.!?]+(?:\s|$)"), ~reference.str.contains(r"[.!?]\s*$")
    counted = references.select(words=reference.str.count_matches(r"\S+"), sentences=ends + open_end)
    words, sentences = counted["words"], int(counted["sentences"].sum())
    by_split = dict(records["split"].value_counts().iter_rows())
    number = max(references.height, 1)
    types = records["change_types"].explode().drop_nulls().alias("type").to_frame().group_by("type").len("count")
    return {
        "pairs": records.height,
        "pairs_by_split": {split: by_split.get(split, 0) for split in SPLITS},
        "references": references.height,
        "references_per_pair": references.height / records.height,
        "words": int(words.sum()) / number,
        "words_per_pair": int(words.sum()) / records.height,
        "sentences": sentences,
        "sentences_per_reference": sentences / number,
        "vocabulary": _vocabulary(references["reference"]),
        "over_20": int((words > LONG).sum()) / number,
        "lengths": _lengths(words),
        "change_types": types.sort(["count", "type"], descending=[True, False]).head(TOP_TYPES).rows(),
    }


def _lengths(words: pl.Series) -> list[tuple[str, int]]:
    """References by number of words in at most BINS equal steps, for a plot."""
    longest = int(words.quantile(0.995) or 1)
    step = max(1, -(-longest // BINS))
    counts = dict((words.clip(0, longest) // step).value_counts().iter_rows())
    starts = range(0, longest + 1, step)
    return [(str(n) if step == 1 else f"{n}–{n + step - 1}", counts.get(n // step, 0)) for n in starts]


def _shown_pairs(records: pl.DataFrame) -> list[dict[str, Any]]:
    """Pairs chosen by the hash of their ids, so that the page stays equal while the data does."""
    worded = records.filter(pl.col("references").list.eval(pl.element() != "").list.any())
    rows = sorted(worded.iter_rows(named=True), key=lambda row: hashlib.sha256(row["id"].encode()).digest())[:PAIRS]
    return [row | {side: _thumb(row[side]) for side in ("before", "after")} for row in rows]


def _thumb(path: str) -> str:
    image = load_image(path)
    image.thumbnail((2 * THUMB_PX, 2 * THUMB_PX), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=80)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def _vocabulary(texts: pl.Series) -> int:
    plain = texts.str.to_lowercase().str.replace_all(r"[^\p{L}\p{N}'\s]+", " ").str.replace_all(r"\s+", " ")
    return len({*plain.str.split(" ").explode().unique().drop_nulls()} - {""})


def _render(found: dict[str, Any], shown: dict[str, list[dict[str, Any]]], notices: dict[str, str]) -> str:
    loader = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    pages.filters["thousands"] = "{:,}".format
    return pages.get_template("statistics.html.j2").render(found=found, shown=shown, notices=notices, long=LONG)

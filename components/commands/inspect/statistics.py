"""Write the statistics that papers report about datasets, and a page with plots and pairs: `m3diff data statistics`.

This is a separate command and not part of convert, for two reasons: counting the words of 896k references takes 1.5 s,
a quarter of the time of validate and convert, and the page shows images, which convert does not read. Words are
separated by white space. The vocabulary consists of lowercase words without punctuation. Empty references are not
counted.
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
from m3diff.datasets.spec import DatasetSpec, check_licence
from m3diff.images.open import load_image
from m3diff.records.errors import DataError
from m3diff.records.files import write_atomic
from m3diff.records.progress import progress
from m3diff.records.schemas import SPLITS
from m3diff.records.tables import part_paths, read_table

LONG = 20  # a caption with more words counts as long, as in Table 1 of OmniDiff
SHOWN_PAIRS = 4
THUMBNAIL_PX = 160
MAX_CHANGE_TYPES = 12
MAX_BINS = 24


def write_statistics(clean: Path) -> dict[str, dict[str, Any]]:
    """Write `clean/statistics.html` and `clean/statistics.json` for the table `clean/records`.

    Returns:
        The counts over all splits by dataset, as in the JSON file.

    Raises:
        DataError: the clean records do not exist.
    """
    table = clean / "records"
    if not part_paths(table):
        raise DataError("check.no_clean_records", path=table)
    records = pl.DataFrame(read_table(table))
    names = records["dataset"].unique().sort().to_list()
    figures = {name: _count(records.filter(dataset=name)) for name in progress(names, "statistics", len(names))}
    notices = dict[str, str]()
    shown_pairs = dict[str, list[dict[str, Any]]]()
    for name in names:
        spec = _spec_of(name)
        try:
            notice = check_licence(spec, "show") if spec else None
            if notice:
                notices[name] = notice
            shown_pairs[name] = _choose_pairs(records.filter(dataset=name))
        except DataError as error:
            notices[name] = str(error)
    write_atomic(clean / "statistics.html", _render(figures, shown_pairs, notices))
    write_atomic(clean / "statistics.json", json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    return figures


def _spec_of(name: str) -> DatasetSpec | None:
    """Return the supported dataset that has this name or a part with this name, or None for the user's own datasets."""
    for reader, spec in DATASETS.items():
        if reader == name or any(part.part == name for part in spec.published):
            return spec
    return None


def _count(records: pl.DataFrame) -> dict[str, Any]:
    reference = pl.col("reference")
    references = records.select(reference=pl.col("references")).explode("reference").filter(reference != "")
    ends = reference.str.count_matches(r"[.!?]+(?:\s|$)")
    open_end = ~reference.str.contains(r"[.!?]\s*$")
    lengths = references.select(words=reference.str.count_matches(r"\S+"), sentences=ends + open_end)
    words = lengths["words"]
    sentences = int(lengths["sentences"].sum())
    pairs_by_split = dict(records.group_by("split").agg(pl.col("image_set").n_unique()).iter_rows())
    pairs = records["image_set"].n_unique()
    divisor = max(references.height, 1)
    types = records["change_types"].explode().drop_nulls().alias("type").to_frame().group_by("type").len("count")
    return {
        "pairs": pairs,
        "pairs_by_split": {split: pairs_by_split.get(split, 0) for split in SPLITS},
        "references": references.height,
        "references_per_pair": references.height / pairs,
        "words": int(words.sum()) / divisor,
        "words_per_pair": int(words.sum()) / pairs,
        "sentences": sentences,
        "sentences_per_reference": sentences / divisor,
        "vocabulary": _vocabulary(references["reference"]),
        "over_20": int((words > LONG).sum()) / divisor,
        "lengths": _lengths(words),
        "change_types": types.sort(["count", "type"], descending=[True, False]).head(MAX_CHANGE_TYPES).rows(),
        **_count_questions(records),
    }


def _count_questions(records: pl.DataFrame) -> dict[str, Any]:
    """Return the numbers of records by kind of question, of images and of turns. Captions have no question."""
    questions = records.filter(pl.col("question").is_not_null())
    kinds = questions.select(kind=pl.col("kind").fill_null("no kind")).group_by("kind").len("count")
    images = records.select(images=pl.col("images").list.len()).group_by("images").len("count")
    turns = questions.select(turns=pl.col("history").list.len() + 1).group_by("turns").len("count")
    return {
        "questions": questions.height,
        "kinds": kinds.sort(["count", "kind"], descending=[True, False]).rows(),
        "images": images.sort("images").rows(),
        "turns": turns.sort("turns").rows(),
    }


def _lengths(words: pl.Series) -> list[tuple[str, int]]:
    """Return the bars of a plot: the number of references by length in words, in about MAX_BINS equal bins."""
    # Longer references are counted in the last bin. Otherwise, a few of them would push all others into the first bins
    longest = int(words.quantile(0.995) or 1)
    step = max(1, -(-longest // MAX_BINS))
    counts = dict((words.clip(0, longest) // step).value_counts().iter_rows())
    starts = range(0, longest + 1, step)
    return [(str(n) if step == 1 else f"{n}–{n + step - 1}", counts.get(n // step, 0)) for n in starts]


def _choose_pairs(records: pl.DataFrame) -> list[dict[str, Any]]:
    """Choose a few records with answers for the page.

    The ids of the chosen pairs have the smallest hashes, so equal data always give the same page.
    """
    with_caption = records.filter(pl.col("references").list.eval(pl.element() != "").list.any())
    rows = sorted(with_caption.iter_rows(named=True), key=lambda row: hashlib.sha256(row["id"].encode()).digest())
    return [row | {"images": [_thumbnail(image["uri"]) for image in row["images"]]} for row in rows[:SHOWN_PAIRS]]


def _thumbnail(path: str) -> str:
    """Return a small image as a data URL, at twice the resolution at which the page shows it."""
    image = load_image(path)
    image.thumbnail((2 * THUMBNAIL_PX, 2 * THUMBNAIL_PX), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=80)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def _vocabulary(texts: pl.Series) -> int:
    """Return the number of distinct words."""
    plain = texts.str.to_lowercase().str.replace_all(r"[^\p{L}\p{N}'\s]+", " ").str.replace_all(r"\s+", " ")
    return len({*plain.str.split(" ").explode().unique().drop_nulls()} - {""})


def _render(figures: dict[str, Any], shown_pairs: dict[str, list[dict[str, Any]]], notices: dict[str, str]) -> str:
    loader = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    pages.filters["thousands"] = "{:,}".format
    return pages.get_template("statistics.html.j2").render(
        figures=figures, shown=shown_pairs, notices=notices, long=LONG
    )

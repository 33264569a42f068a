"""The statistics that the papers report, of every dataset, and one page with plots and pairs: `m3diff data statistics`.

A command and no part of convert: to count every word of 896k references takes 1.5 s of the 6 s that validate and
convert have together, and the page shows images, which convert does not read. Words are runs of characters between
white space; the vocabulary is of lower-case words without punctuation. Empty references are not counted.
"""

import base64
import hashlib
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image
from pydantic import BaseModel

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import check_licence
from m3diff.images.open import load_image
from m3diff.records.errors import DataError
from m3diff.records.files import write_atomic
from m3diff.records.progress import progress
from m3diff.records.schemas import SPLITS

LONG = 20
"""Words beyond which Table 1 of OmniDiff calls a caption long."""

PAIRS, THUMB_PX, TOP_WORDS, TOP_TYPES, BINS = 4, 160, 16, 12, 24


class Bar(NamedTuple):
    """A bar of a plot."""

    label: str
    number: int


class Statistics(BaseModel):
    """Counts of a dataset over all its splits."""

    pairs: int
    pairs_by_split: dict[str, int]
    references: int
    references_per_pair: float
    words: float  # per reference
    words_per_pair: float
    sentences: int
    sentences_per_reference: float
    vocabulary: int
    over_20: float  # share of references
    lengths: list[Bar]  # references by number of words
    per_pair: list[Bar]  # pairs by number of references
    frequent: list[Bar]  # words of four letters or more
    change_types: list[Bar]  # pairs


class ShownPair(NamedTuple):
    """A pair of the page."""

    id: str
    before: str  # data URI
    after: str
    references: list[str]


def write_statistics(clean: Path) -> dict[str, Statistics]:
    """Write `clean/statistics.html` and `clean/statistics.json` of `clean/records.parquet`.

    Raises:
        DataError: there are no clean records.
    """
    path = clean / "records.parquet"
    if not path.is_file():
        raise DataError(f"{path}: no such file; run `m3diff validate` first")
    records = pl.read_parquet(path)
    groups = _groups(records)
    found = {name: _count(records.filter(members)) for name, members in progress(groups, "statistics", len(groups))}
    notices = {name: _notice(name) for name in found}
    shown = {
        name: _shown_pairs(records.filter(dataset=name))
        for name in records["dataset"].unique().sort()
        if notices[name].may_show
    }
    write_atomic(clean / "statistics.html", _render(found, shown, notices))
    values = {name: one.model_dump(mode="json") for name, one in found.items()}
    write_atomic(clean / "statistics.json", json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    return found


def _groups(records: pl.DataFrame) -> list[tuple[str, pl.Expr]]:
    """Every dataset; parts of one (OmniDiff's two) also together, as its paper counts them."""
    names = records["dataset"].unique().sort().to_list()
    groups = {name: pl.col("dataset") == name for name in names}
    for name, spec in DATASETS.items():
        parts = [part.part for part in spec.published]
        if len(parts) > 1 and set(parts) <= set(names):
            groups[name] = pl.col("dataset").is_in(parts)
    return sorted(groups.items(), key=lambda group: group[0])


def _count(records: pl.DataFrame) -> Statistics:
    reference = pl.col("reference")
    references = records.select(reference=pl.col("references")).explode("reference").filter(reference != "")
    ends, open_end = reference.str.count_matches(r"[.!?]+(?:\s|$)"), ~reference.str.contains(r"[.!?]\s*$")
    counted = references.select(words=reference.str.count_matches(r"\S+"), sentences=ends + open_end)
    words, sentences = counted["words"], int(counted["sentences"].sum())
    vocabulary = _vocabulary(references["reference"])
    by_split = dict(records["split"].value_counts().iter_rows())
    worded = records["references"].list.eval(pl.element().filter(pl.element() != ""))
    per_pair = dict(worded.list.len().value_counts().iter_rows())
    number = max(references.height, 1)
    return Statistics(
        pairs=records.height,
        pairs_by_split={split: by_split.get(split, 0) for split in SPLITS},
        references=references.height,
        references_per_pair=references.height / records.height,
        words=int(words.sum()) / number,
        words_per_pair=int(words.sum()) / records.height,
        sentences=sentences,
        sentences_per_reference=sentences / number,
        vocabulary=vocabulary.height,
        over_20=int((words > LONG).sum()) / number,
        lengths=_lengths(words),
        per_pair=[Bar(str(n), per_pair.get(n, 0)) for n in range(min(per_pair), max(per_pair) + 1)],
        frequent=[Bar(*row) for row in vocabulary.filter(pl.col("word").str.len_chars() > 3).head(TOP_WORDS).rows()],
        change_types=_types(records["change_types"]),
    )


def _vocabulary(texts: pl.Series) -> pl.DataFrame:
    """`word`, `count` of lower-case words without punctuation, the most frequent first."""
    plain = texts.str.to_lowercase().str.replace_all(r"[^\p{L}\p{N}'\s]+", " ").str.replace_all(r"\s+", " ")
    words = plain.str.split(" ").explode().alias("word").to_frame().filter(pl.col("word") != "")
    return words.group_by("word").agg(count=pl.len()).sort(["count", "word"], descending=[True, False])


def _lengths(words: pl.Series) -> list[Bar]:
    """References by number of words in at most BINS equal steps."""
    longest = int(words.quantile(0.995) or 1)
    step = max(1, -(-longest // BINS))
    counts = dict((words.clip(0, longest) // step).value_counts().iter_rows())
    return [
        Bar(f"{n * step}" if step == 1 else f"{n * step}–{n * step + step - 1}", counts.get(n, 0))
        for n in range(longest // step + 1)
    ]


def _types(types: pl.Series) -> list[Bar]:
    counts = types.explode().drop_nulls().alias("type").to_frame().group_by("type").agg(count=pl.len())
    return [Bar(*row) for row in counts.sort(["count", "type"], descending=[True, False]).head(TOP_TYPES).rows()]


def _shown_pairs(records: pl.DataFrame) -> list[ShownPair]:
    """Pairs chosen by the hash of their ids, so that the page stays equal while the data does."""
    worded = records.filter(pl.col("references").list.eval(pl.element() != "").list.any())
    keys = [hashlib.sha256(name.encode()).digest() for name in worded["id"]]
    chosen = sorted(range(len(keys)), key=keys.__getitem__)[:PAIRS]
    rows = worded[chosen].iter_rows(named=True)
    return [ShownPair(row["id"], _thumb(row["before"]), _thumb(row["after"]), row["references"][:3]) for row in rows]


def _thumb(path: str) -> str:
    """The image upright and small, as a data URI."""
    image = load_image(path)
    image.thumbnail((2 * THUMB_PX, 2 * THUMB_PX), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=80)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def published_row(name: str) -> dict[str, Any]:
    """Figures that the papers print of a dataset or a part of it, by field of `Statistics`; empty where nothing."""
    if name in DATASETS:
        table = DATASETS[name].table
        return {field: value for field, value in asdict(table).items() if value is not None} if table else {}
    parts = [part for spec in DATASETS.values() for part in spec.published if part.part == name]
    return {"pairs": sum(parts[0].pairs().values())} if parts else {}


class Notice(NamedTuple):
    """The licence's answer to showing a dataset's pairs."""

    text: str | None
    may_show: bool


def _notice(name: str) -> Notice:
    """By the dataset's name; nothing is known of a dataset that is called otherwise than its reader or part."""
    named = [spec for each, spec in DATASETS.items() if each == name or any(p.part == name for p in spec.published)]
    if not named:
        return Notice(None, may_show=True)
    try:
        return Notice(check_licence(named[0], "show"), may_show=True)
    except DataError as error:
        return Notice(str(error), may_show=False)


def _render(found: dict[str, Statistics], shown: dict[str, list[ShownPair]], notices: dict[str, Notice]) -> str:
    page = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    page.filters["thousands"] = lambda value: f"{value:,}"
    template = page.get_template("statistics.html.j2")
    published = {name: row for name in found if (row := published_row(name))}
    return template.render(found=found, shown=shown, published=published, notices=notices, long=LONG)

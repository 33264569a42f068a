"""The statistics that the papers report, of every dataset, and one page with plots and pairs: `m3diff data statistics`.

A command and no part of convert: to count every word of 896k captions takes 1.5 s of the 6 s that validate and convert
have together, and the page shows images, which convert does not read. Words are runs of characters between white
space; the vocabulary is of lower-case words without punctuation. Empty captions are not counted.
"""

import base64
import hashlib
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image, ImageOps
from pydantic import BaseModel

from components.progress import progress
from components.files import write_atomic
from components.records import SPLITS, DataError

PUBLISHED = Path(__file__).parent / "published.yaml"
LONG = 20
"""Words beyond which Table 1 calls a caption long."""

SAMPLES, THUMB_PX, TOP_WORDS, TOP_TYPES, BINS = 4, 160, 16, 12, 24


class Bar(NamedTuple):
    label: str
    number: int


class Statistics(BaseModel):
    """One dataset over all its splits."""

    pairs: int
    pairs_by_split: dict[str, int]
    captions: int
    captions_per_pair: float
    words: float  # per caption
    words_per_pair: float
    sentences: int
    sentences_per_caption: float
    vocabulary: int
    over_20: float  # share of captions
    lengths: list[Bar]  # captions by number of words
    per_pair: list[Bar]  # pairs by number of captions
    frequent: list[Bar]  # words of four letters or more
    change_types: list[Bar]  # pairs


class Pair(NamedTuple):
    id: str
    before: str  # data URI
    after: str
    captions: list[str]


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
    found = {name: _describe(records.filter(members)) for name, members in progress(groups, "statistics", len(groups))}
    datasets = records["dataset"].unique().sort()
    samples = {name: _samples(records.filter(dataset=name)) for name in datasets}
    published = yaml.safe_load(PUBLISHED.read_text("utf-8"))
    write_atomic(clean / "statistics.html", _render(found, samples, published["tables"]))
    told = {name: one.model_dump(mode="json") for name, one in found.items()}
    write_atomic(clean / "statistics.json", json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    return found


def _groups(records: pl.DataFrame) -> list[tuple[str, pl.Expr]]:
    """Every dataset; OmniDiff's two parts also together, as its paper counts them."""
    names = records["dataset"].unique().sort().to_list()
    groups = [(name, pl.col("dataset") == name) for name in names]
    if {"omnidiff_real", "omnidiff_render"} <= set(names):
        groups.append(("omnidiff", pl.col("dataset").is_in(["omnidiff_real", "omnidiff_render"])))
    return sorted(groups, key=lambda group: group[0])


def _describe(records: pl.DataFrame) -> Statistics:
    text = pl.col("text")
    captions = records.select(pl.col("captions").alias("text")).explode("text").filter(text != "")
    ends, open_end = text.str.count_matches(r"[.!?]+(?:\s|$)"), ~text.str.contains(r"[.!?]\s*$")
    counted = captions.select(words=text.str.count_matches(r"\S+"), sentences=ends + open_end)
    words, sentences = counted["words"], int(counted["sentences"].sum())
    vocabulary = _vocabulary(captions["text"])
    by_split = dict(records["split"].value_counts().iter_rows())
    number = max(captions.height, 1)
    return Statistics(
        pairs=records.height,
        pairs_by_split={split: by_split.get(split, 0) for split in SPLITS},
        captions=captions.height,
        captions_per_pair=captions.height / records.height,
        words=int(words.sum()) / number,
        words_per_pair=int(words.sum()) / records.height,
        sentences=sentences,
        sentences_per_caption=sentences / number,
        vocabulary=vocabulary.height,
        over_20=int((words > LONG).sum()) / number,
        lengths=_lengths(words),
        per_pair=_bars(records["captions"].list.eval(pl.element().filter(pl.element() != "")).list.len()),
        frequent=[Bar(*row) for row in vocabulary.filter(pl.col("word").str.len_chars() > 3).head(TOP_WORDS).rows()],
        change_types=_types(records["change_types"]),
    )


def _vocabulary(texts: pl.Series) -> pl.DataFrame:
    """`word`, `count` of lower-case words without punctuation, the most frequent first."""
    plain = texts.str.to_lowercase().str.replace_all(r"[^\p{L}\p{N}'\s]+", " ").str.replace_all(r"\s+", " ")
    words = plain.str.split(" ").explode().alias("word").to_frame().filter(pl.col("word") != "")
    return words.group_by("word").agg(count=pl.len()).sort(["count", "word"], descending=[True, False])


def _lengths(words: pl.Series) -> list[Bar]:
    """Captions by number of words in at most BINS equal steps."""
    longest = int(words.quantile(0.995) or 1)
    step = max(1, -(-longest // BINS))
    counts = dict((words.clip(0, longest) // step).value_counts().iter_rows())
    return [
        Bar(f"{n * step}" if step == 1 else f"{n * step}–{n * step + step - 1}", counts.get(n, 0))
        for n in range(longest // step + 1)
    ]


def _bars(values: pl.Series) -> list[Bar]:
    counts = dict(values.value_counts().iter_rows())
    return [Bar(str(n), counts.get(n, 0)) for n in range(min(counts), max(counts) + 1)]


def _types(types: pl.Series) -> list[Bar]:
    counts = types.explode().drop_nulls().alias("type").to_frame().group_by("type").agg(count=pl.len())
    return [Bar(*row) for row in counts.sort(["count", "type"], descending=[True, False]).head(TOP_TYPES).rows()]


def _samples(records: pl.DataFrame) -> list[Pair]:
    """Pairs drawn by the hash of their ids, so that the page stays equal while the data does."""
    worded = records.filter(pl.col("captions").list.eval(pl.element() != "").list.any())
    keys = [hashlib.sha256(name.encode()).digest() for name in worded["id"]]
    chosen = sorted(range(len(keys)), key=keys.__getitem__)[:SAMPLES]
    rows = worded[chosen].iter_rows(named=True)
    return [Pair(row["id"], _thumb(row["before"]), _thumb(row["after"]), row["captions"][:3]) for row in rows]


def _thumb(path: str) -> str:
    """The image upright and small, as a data URI."""
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file).convert("RGB")
    image.thumbnail((2 * THUMB_PX, 2 * THUMB_PX), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=80)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def _render(found: dict[str, Statistics], samples: dict[str, list[Pair]], published: dict[str, Any]) -> str:
    page = Environment(
        loader=FileSystemLoader(PUBLISHED.parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    page.filters["thousands"] = lambda value: f"{value:,}"
    template = page.get_template("statistics.html.j2")
    return template.render(found=found, samples=samples, published=published, splits=SPLITS, long=LONG)

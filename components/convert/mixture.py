"""One dataset's records as samples: which pairs train, which captions of them, and what they are asked."""

from typing import NamedTuple

import numpy as np
import polars as pl

from components.convert.sampling import CAPTION, NO_CHANGE_DRAW, ORDER, PICK, QUESTION, WEIGHT, draw, uniform
from components.convert.params import Convert, Source
from components.records import NO_CHANGE, SAMPLE_SCHEMA

COLUMNS = [*SAMPLE_SCHEMA.names, "order"]


class LeftOut(NamedTuple):
    """What training left out: pairs, and captions of the pairs that were drawn."""

    pairs_not_drawn: int
    pairs_without_caption: int
    empty_captions: int
    repeated_captions: int
    captions_over_cap: int


def evaluation_samples(pairs: pl.DataFrame, questions: list[str]) -> pl.DataFrame:
    """Every caption of every pair, empty ones too, in the records' order; COLUMNS."""
    asked = pairs.with_columns(question=pl.lit(questions[0]), order=pl.col("row").cast(pl.UInt64))
    return _samples(_explode(asked.with_columns(copy=pl.lit(0))))


def training_samples(
    pairs: pl.DataFrame, questions: list[str], source: Source, cfg: Convert
) -> tuple[pl.DataFrame, LeftOut]:
    """Samples of the pairs that are drawn, pairs in shuffled order; COLUMNS."""
    drawn = _draw_pairs(pairs, source, cfg.no_change_share)
    asked = drawn.with_columns(question=_questions(drawn, questions))
    captions = _explode(asked)
    full = captions.filter(pl.col("answer") != "")
    distinct = full.filter(pl.struct("row", "copy", "answer").is_first_distinct())
    if source.samples == "joined":
        kept = _join(distinct)
    else:
        kept = _cap(distinct, 1 if source.samples == "one" else cfg.captions_per_pair)
    left_out = LeftOut(
        pairs_not_drawn=pairs.height - drawn["row"].n_unique(),
        pairs_without_caption=drawn["row"].n_unique() - kept["row"].n_unique(),
        empty_captions=captions.height - full.height,
        repeated_captions=full.height - distinct.height,
        captions_over_cap=0 if source.samples == "joined" else distinct.height - kept.height,
    )
    return _samples(kept), left_out


def _draw_pairs(pairs: pl.DataFrame, source: Source, no_change_share: float) -> pl.DataFrame:
    """The pairs that train, each as often as its weight says (`copy` counts from 0), with their shuffled `order`."""
    no_change = pairs["change_types"].list.contains(NO_CHANGE).to_numpy()
    thinned = no_change & (uniform(draw(pairs["key"], NO_CHANGE_DRAW)) >= no_change_share)
    whole, part = divmod(source.weight, 1)
    copies = whole + (uniform(draw(pairs["key"], WEIGHT)) < part)
    kept = pairs.with_columns(copies=pl.Series(np.where(thinned, 0, copies)), pick=draw(pairs["key"], PICK))
    kept = kept.filter(pl.col("copies") > 0)
    if source.max_pairs is not None:
        kept = kept.sort("pick", "id").head(source.max_pairs)
    repeated = kept.with_columns(copy=pl.int_ranges(pl.col("copies").cast(pl.Int64))).explode("copy")
    return repeated.with_columns(order=draw(draw(repeated["key"], ORDER), repeated["copy"]))


def _questions(pairs: pl.DataFrame, questions: list[str]) -> pl.Series:
    """One question a pair: its captions can then share a prefix."""
    return pl.Series(questions, dtype=pl.String).gather(draw(pairs["key"], QUESTION) % len(questions))


def _explode(pairs: pl.DataFrame) -> pl.DataFrame:
    """One row per caption: `answer`, and `number`, its place in the record."""
    numbered = pairs.with_columns(number=pl.int_ranges(pl.col("captions").list.len().cast(pl.Int64)))
    return numbered.explode("captions", "number").rename({"captions": "answer"})


def _cap(captions: pl.DataFrame, most: int) -> pl.DataFrame:
    """At most so many captions of a pair, drawn; in the record's order."""
    drawn = draw(draw(captions["key"], CAPTION), captions["number"] + 2**32 * captions["copy"])
    place = pl.col("draw").rank("ordinal").over("row", "copy")
    return captions.with_columns(draw=drawn).filter(place <= most).drop("draw")


def _join(captions: pl.DataFrame) -> pl.DataFrame:
    """All captions of a pair as sentences of one answer."""
    sentence = pl.col("answer").str.strip_suffix(".").str.join(". ") + "."
    others = pl.all().exclude("answer", "row", "copy", "number").first()
    return captions.group_by("row", "copy", maintain_order=True).agg(sentence, others, number=pl.lit(0).first())


def _samples(captions: pl.DataFrame) -> pl.DataFrame:
    """COLUMNS, the samples of a pair side by side; a pair's second use has an id of its own."""
    use = pl.when(pl.col("copy") > 0).then(pl.format("x{}", "copy")).otherwise(pl.lit(""))
    return (
        captions.sort("order", "row", "copy", "number")
        .with_columns(id=pl.format("{}#{}{}", "id", "number", use), pair="id")
        .select(COLUMNS)
    )

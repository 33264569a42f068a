"""Rules of a good record: each once, as the sign of a bad row (for polars) and as an expectation (for GX).

The rules read *facts*: one row per record with the columns that `facts` computes, so that 896k references cost a few
vectorised passes.
"""

from typing import Any, NamedTuple

import polars as pl

from m3diff.images.check import OK
from m3diff.records.schemas import SPLITS

RANK = {"train": 0, "val": 1, "test": 2}
"""Where one pair lies in two splits, the lower one gives it up: a test set stays whole."""

MARKUP = r"<[/!|]?[A-Za-z][^<>]*>|&(?:[a-z]{2,8}|#\d+|#x[0-9a-fA-F]+);"
"""HTML, and the special tokens of chat templates (`<image>`, `<|im_end|>`), which would change what a prompt means."""


LEAK = "not_in_test"
"""The one rule that a sound row can break; its rows do not count towards the share of bad rows."""


class Rule(NamedTuple):
    name: str  # as the quarantine's `rules` and the report call it
    column: str  # the fact it reads
    bad: pl.Expr  # true for a row that goes to quarantine
    reason: pl.Expr  # what is wrong and how to fix it, in words
    expectation: str  # the class in great_expectations.expectations
    arguments: dict[str, Any]


NULL, NOT_NULL, UNIQUE, IN_SET, BETWEEN = (
    f"ExpectColumnValuesTo{rule}" for rule in ("BeNull", "NotBeNull", "BeUnique", "BeInSet", "BeBetween")
)
"""Classes in great_expectations.expectations."""


def rules(max_chars: int) -> list[Rule]:
    """Every rule over the rows, in the order in which reasons are named."""
    col, form, rank = pl.col, pl.format, pl.col("rank")
    repeats = col("id").is_not_null() & (col("turn") != col("turn").min().over("id"))
    repeated = form("id: {} occurs more than once; the first of the highest split (test, val, train) stays", "id")
    is_lower = (col("scene_splits") > 1) & (rank < rank.max().over("scene"))
    scene = form("split: scene {} is also in a higher split (test, val, train), which keeps it", "scene")
    leak = form("leak: test pair {} {}, so this one may not train", "twin", "how")
    none = _alone("references: there is none; a pair needs at least one, which may be empty")
    length, markup = col("longest_reference"), col("markup_references")
    long = form("references: one has {} characters, more than validate.max_caption_chars = {}", length, max_chars)
    marked = form("references: {} hold HTML or a special token; write plain text", markup)
    unknown = form("split: {} is none of train, val, test", "split")
    return [
        Rule("readable", "fault", col("fault").is_not_null(), col("fault"), NULL, {}),
        Rule("id_given", "id", col("id").is_null(), _alone("id: is missing"), NOT_NULL, {}),
        Rule("id_unique", "id", repeats, repeated, UNIQUE, {}),
        Rule("split_given", "split", col("split").is_null(), _alone("split: is missing"), NOT_NULL, {}),
        Rule("split_known", "split", ~col("split").is_in(SPLITS), unknown, IN_SET, {"value_set": list(SPLITS)}),
        Rule("scene_in_one_split", "scene_splits", is_lower, scene, IN_SET, {"value_set": [1]}),
        Rule(LEAK, "twin", col("twin").is_not_null(), leak, NULL, {}),
        Rule("references_given", "references", col("references") == 0, none, BETWEEN, {"min_value": 1}),
        Rule("reference_length", "longest_reference", length > max_chars, long, BETWEEN, {"max_value": max_chars}),
        Rule("no_markup", "markup_references", markup > 0, marked, IN_SET, {"value_set": [0]}),
        *(
            Rule(
                f"{side}_decodes", f"{side}_image", col(f"{side}_image") != OK, _told(side), IN_SET, {"value_set": [OK]}
            )
            for side in ("before", "after")
        ),
    ]


def _told(side: str) -> pl.Expr:
    """The verdict on an image, with the remedy that it does not name itself."""
    verdict = pl.col(f"{side}_image")
    is_large, has_remedy = verdict.str.contains(" padded to a square, "), verdict.str.contains("; save it ")
    limit, restore = pl.lit(", or raise validate.max_image_pixels"), pl.lit("; restore the file")
    remedy = pl.when(is_large).then(limit).when(has_remedy).then(pl.lit("")).otherwise(restore)
    told = pl.format(f"{side}: {{}} {{}}{{}}", side, verdict, remedy)
    return pl.when(pl.col(side).is_not_null()).then(told).otherwise(_alone(f"{side}: is not given"))


def _alone(reason: str) -> pl.Expr:
    """Report this reason only if the row itself was readable."""
    return pl.when(pl.col("fault").is_null()).then(pl.lit(reason))


def facts(records: pl.DataFrame, images: pl.DataFrame, twins: pl.DataFrame) -> pl.DataFrame:
    """`row`, the record's plain columns, and the facts that the rules read."""
    texts = records["references"].to_frame("text").with_row_index("row").explode("text", empty_as_null=True)
    text = pl.col("text")
    of_references = texts.group_by("row", maintain_order=True).agg(
        references=text.count().cast(pl.Int64),
        longest_reference=text.str.len_chars().max().fill_null(0).cast(pl.Int64),
        markup_references=text.str.contains(MARKUP).sum().cast(pl.Int64),
    )
    found = records.drop("references", "change_types").with_row_index("row").hstack(of_references.drop("row"))
    for side in ("before", "after"):
        verdicts = images.select(pl.col("path").alias(side), pl.col("verdict").alias(f"{side}_image"))
        found = found.join(verdicts, on=side, how="left")
    rank = pl.col("split").replace_strict(RANK, default=-1, return_dtype=pl.Int64)
    scene_splits = pl.col("split").n_unique().over("scene")
    sorted_rows = found.join(twins, on="row", how="left").sort("row")
    return sorted_rows.with_columns(
        pl.col("before_image", "after_image").fill_null("is not given"),
        rank=rank,
        turn=(2 - rank + 3 * pl.col("fault").is_not_null()) * records.height + pl.col("row"),
        scene_splits=pl.when(pl.col("scene").is_null()).then(1).otherwise(scene_splits),
    )


def bad_rows(found: pl.DataFrame, all_rules: list[Rule]) -> pl.DataFrame:
    """`row`, `rules` (names) and `reason` of every row that breaks a rule."""
    flags = found.select("row", *(rule.bad.alias(f"bad_{rule.name}") for rule in all_rules))
    broken = found.hstack(flags.drop("row")).filter(pl.any_horizontal(pl.col("^bad_.*$")))
    hit = [pl.when(f"bad_{rule.name}") for rule in all_rules]
    return broken.select(
        "row",
        rules=pl.concat_list(w.then(pl.lit(r.name)) for w, r in zip(hit, all_rules, strict=True)).list.drop_nulls(),
        reason=pl.concat_str(
            [w.then(r.reason) for w, r in zip(hit, all_rules, strict=True)], separator="; ", ignore_nulls=True
        ),
    )

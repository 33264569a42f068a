"""What a good record is: each rule once, as the sign of a bad row (for polars) and as an expectation (for GX).

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


def rules(max_caption_chars: int) -> list[Rule]:
    """Every rule over the rows, in the order in which reasons are named."""
    fault, name, split, rank = (pl.col(column) for column in ("fault", "id", "split", "rank"))
    return [
        Rule("readable", "fault", fault.is_not_null(), fault, "ExpectColumnValuesToBeNull", {}),
        Rule("id_given", "id", name.is_null(), _alone("id: is missing"), "ExpectColumnValuesToNotBeNull", {}),
        Rule(
            "id_unique",
            "id",
            name.is_not_null() & (pl.col("turn") != pl.col("turn").min().over("id")),
            pl.format("id: {} occurs more than once; the first of the highest split (test, val, train) stays", "id"),
            "ExpectColumnValuesToBeUnique",
            {},
        ),
        Rule("split_given", "split", split.is_null(), _alone("split: is missing"), "ExpectColumnValuesToNotBeNull", {}),
        Rule(
            "split_known",
            "split",
            ~split.is_in(SPLITS),
            pl.format("split: {} is none of train, val, test", "split"),
            *_in_set(*SPLITS),
        ),
        Rule(
            "scene_in_one_split",
            "scene_splits",
            (pl.col("scene_splits") > 1) & (rank < rank.max().over("scene")),
            pl.format("split: scene {} is also in a higher split (test, val, train), which keeps it", "scene"),
            *_in_set(1),
        ),
        Rule(
            LEAK,
            "twin",
            pl.col("twin").is_not_null(),
            pl.format("leak: test pair {} {}, so this one may not train", "twin", "how"),
            "ExpectColumnValuesToBeNull",
            {},
        ),
        *_reference_rules(max_caption_chars),
        _image_rule("before"),
        _image_rule("after"),
    ]


def _reference_rules(max_chars: int) -> list[Rule]:
    count, longest, markup = (pl.col(column) for column in ("references", "longest_reference", "markup_references"))
    none = _alone("references: there is none; a pair needs at least one, which may be empty")
    long = pl.format("references: one has {} characters, more than validate.max_caption_chars = {}", longest, max_chars)
    marked = pl.format("references: {} hold HTML or a special token; write plain text", markup)
    between = "ExpectColumnValuesToBeBetween"
    return [
        Rule("references_given", "references", count == 0, none, between, {"min_value": 1}),
        Rule("reference_length", "longest_reference", longest > max_chars, long, between, {"max_value": max_chars}),
        Rule("no_markup", "markup_references", markup > 0, marked, *_in_set(0)),
    ]


def _image_rule(side: str) -> Rule:
    verdict = pl.col(f"{side}_image")
    given = pl.col(side).is_not_null()
    remedy = (
        pl.when(verdict.str.contains(" padded to a square, "))
        .then(pl.lit(", or raise validate.max_image_pixels"))
        .when(verdict.str.contains("; save it "))
        .then(pl.lit(""))
        .otherwise(pl.lit("; restore the file"))
    )
    told = pl.format(f"{side}: {{}} {{}}{{}}", side, verdict, remedy)
    words = pl.when(given).then(told).otherwise(_alone(f"{side}: is not given"))
    return Rule(f"{side}_decodes", f"{side}_image", verdict != OK, words, *_in_set(OK))


def _alone(reason: str) -> pl.Expr:
    """A reason that is said only where no fault of reading tells the cause."""
    return pl.when(pl.col("fault").is_null()).then(pl.lit(reason))


def _in_set(*values: Any) -> tuple[str, dict[str, Any]]:
    return "ExpectColumnValuesToBeInSet", {"value_set": list(values)}


def facts(records: pl.DataFrame, images: pl.DataFrame, twins: pl.DataFrame) -> pl.DataFrame:
    """`row`, the record's plain columns, and the facts that the rules read."""
    verdicts = images.select("path", "verdict")
    rank = pl.col("split").replace_strict(RANK, default=-1, return_dtype=pl.Int64)
    scene_splits = pl.col("split").n_unique().over("scene")
    return (
        records.drop("references", "change_types")
        .with_row_index("row")
        .hstack(_reference_facts(records["references"]))
        .join(verdicts.rename({"path": "before", "verdict": "before_image"}), on="before", how="left")
        .join(verdicts.rename({"path": "after", "verdict": "after_image"}), on="after", how="left")
        .join(twins, on="row", how="left")
        .sort("row")
        .with_columns(
            pl.col("before_image", "after_image").fill_null("is not given"),
            rank=rank,
            turn=(2 - rank + 3 * pl.col("fault").is_not_null()) * records.height + pl.col("row"),
            scene_splits=pl.when(pl.col("scene").is_null()).then(1).otherwise(scene_splits),
        )
    )


def _reference_facts(references: pl.Series) -> pl.DataFrame:
    """Number of references, characters of the longest and number with markup; 0 for a record without references."""
    exploded = references.to_frame("text").with_row_index("row").explode("text", empty_as_null=True)
    return (
        exploded.group_by("row", maintain_order=True)
        .agg(
            references=pl.col("text").count().cast(pl.Int64),
            longest_reference=pl.col("text").str.len_chars().max().fill_null(0).cast(pl.Int64),
            markup_references=pl.col("text").str.contains(MARKUP).sum().cast(pl.Int64),
        )
        .drop("row")
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

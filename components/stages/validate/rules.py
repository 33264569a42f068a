"""Rules of a good record: each once, as the sign of a bad row (for polars) and as an expectation (for GX).

The rules read *facts*: one row per record with the columns that `facts` computes, so that 896k references cost a few
vectorised passes. polars finds the bad rows; great-expectations, an independent engine, judges by the same rules, one
suite and one validation with SUMMARY results. A COMPLETE result would cost seconds on a tenth of bad rows, and an empty
table would pass every column rule, hence the row count.

One fact is a leak: a pair of one split that is also in another, of its own dataset or any, under whatever name. Two
pairs are the same when both their images are: by content (sha256, and so by path), or by look (their 8x8 grey
thumbnails differ nowhere by more than some levels: re-encoding and resizing change 1 or 2 levels, an object that moved
changes more). The direction does not matter. A single shared image is no leak: datasets share them between splits.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from m3diff.images.check import OK
from m3diff.records.schemas import SPLITS

# Where one pair lies in two splits, the lower one gives it up: a test set stays whole
RANK = {"train": 0, "val": 1, "test": 2}

# HTML, and the special tokens of chat templates (`<image>`, `<|im_end|>`), which would change what a prompt means
MARKUP = r"<[/!|]?[A-Za-z][^<>]*>|&(?:[a-z]{2,8}|#\d+|#x[0-9a-fA-F]+);"

COMPARED_AT_ONCE = 200_000  # candidate pairs that are held next to each other; 150 MB with their thumbnails

Thumbs = NDArray[np.int16]  # [pairs, 128]: the grey levels of the image before, then of the image after

ExpectedPairs = Mapping[str, Mapping[Any, int]]  # pairs by dataset and split, as the dataset's own files call it

REMEDY = "; (?:fetch|restore|save|unpack) it "  # in a verdict on an image that names what mends it

LOOKS_THE_SAME = "looks the same"  # how a leaked pair is like its twin, if their images are not the same files

LEAK = "not_in_test"  # the one rule that a sound row can break; its rows do not count towards the share of bad rows


class Rule(NamedTuple):
    name: str  # as the quarantine's `rules` and the report call it
    column: str  # the fact it reads
    bad: pl.Expr  # true for a row that goes to quarantine
    reason: pl.Expr  # what is wrong and how to fix it, in words
    expectation: str  # the class in great_expectations.expectations
    arguments: dict[str, Any]


NULL, NOT_NULL, UNIQUE, IN_SET, BETWEEN = (  # classes in great_expectations.expectations
    f"ExpectColumnValuesTo{rule}" for rule in ("BeNull", "NotBeNull", "BeUnique", "BeInSet", "BeBetween")
)


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
        Rule("shows_a_change", "unshown", col("unshown").is_not_null(), col("unshown"), NULL, {}),
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
    is_large, has_remedy = verdict.str.contains(" padded to a square, "), verdict.str.contains(REMEDY)
    limit, restore = pl.lit(", or raise validate.max_image_pixels"), pl.lit("; restore the file")
    remedy = pl.when(is_large).then(limit).when(has_remedy).then(pl.lit("")).otherwise(restore)
    told = pl.format(f"{side}: {{}} {{}}{{}}", side, verdict, remedy)
    return pl.when(pl.col(side).is_not_null()).then(told).otherwise(_alone(f"{side}: is not given"))


def _alone(reason: str) -> pl.Expr:
    return pl.when(pl.col("fault").is_null()).then(pl.lit(reason))


def facts(records: pl.DataFrame, images: pl.DataFrame, twins: pl.DataFrame, likeness: pl.DataFrame) -> pl.DataFrame:
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
    unshown = likeness.select("row", "unshown")
    sorted_rows = found.join(twins, on="row", how="left").join(unshown, on="row", how="left").sort("row")
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


def find_twins(pairs: pl.DataFrame, split: str, other: str, max_diff: int | None) -> pl.DataFrame:
    """`row`, `twin`, `how` of the rows of `split` with a twin in `other`; by content only where max_diff is None."""
    ours, theirs = pairs.filter(split=split), pairs.filter(split=other)
    twins = theirs.unique(["low", "high"], keep="first", maintain_order=True).select("low", "high", twin="id")
    same = ours.join(twins, on=["low", "high"]).select("row", "twin", how=pl.lit("has the same images")).sort("row")
    ours = ours.join(same, on="row", how="anti")
    if max_diff is None or not (ours.height and theirs.height):
        return same
    return pl.concat([same, _same_look(ours, theirs, max_diff)]).sort("row")


def sound_pairs(records: pl.DataFrame, images: pl.DataFrame) -> pl.DataFrame:
    """Rows whose images are both sound, with a number for each content (`low`, `high`) and both thumbnails."""
    sound = images.filter(verdict=OK).select("path", "thumb", content=pl.col("digest").rank("dense"))
    both = ("content", "content_after")
    return (
        records.with_row_index("row")
        .select("row", "id", "split", "before", "after")
        .join(sound, left_on="before", right_on="path")
        .join(sound, left_on="after", right_on="path", suffix="_after")
        .with_columns(low=pl.min_horizontal(both), high=pl.max_horizontal(both))
        .sort("row")
    )


def _same_look(ours: pl.DataFrame, theirs: pl.DataFrame, max_diff: int) -> pl.DataFrame:
    """Candidates by the mean levels of the quarters, which differ no more than single levels do; then all levels.

    Thumbnails that repeat are compared once, and rows in slices whose candidates number COMPARED_AT_ONCE at most
    (unless one row has more), so that a fixed camera's memory is bounded.
    """
    look = ["thumb", "thumb_after"]
    some, others = (pairs.unique(look, keep="first", maintain_order=True) for pairs in (ours, theirs))
    our_thumbs, thumbs = _thumbs(some), _thumbs(others)
    both_ways = np.concatenate([thumbs, np.roll(thumbs, 64, axis=1)])
    tree, quarters = cKDTree(_quarters(both_ways)), _quarters(our_thumbs)
    counts = tree.query_ball_point(quarters, max_diff, p=np.inf, return_length=True)
    rows = np.flatnonzero(counts)
    cuts = np.flatnonzero(np.diff(np.cumsum(counts[rows]) // COMPARED_AT_ONCE)) + 1
    at: list[int] = []
    twin: list[int] = []
    for part in np.split(rows, cuts) if len(rows) else []:
        near = tree.query_ball_point(quarters[part], max_diff, p=np.inf, return_sorted=True)
        a, b = np.repeat(part, counts[part]), np.concatenate([np.asarray(one, dtype=np.int64) for one in near])
        close = np.abs(our_thumbs[a] - both_ways[b]).max(axis=1) <= max_diff
        found, first = np.unique(a[close], return_index=True)
        at += found.tolist()
        twin += (b[close][first] % others.height).tolist()
    twins = some[at].select(*look, twin=others["id"].gather(twin))
    return ours.join(twins, on=look).select("row", "twin", how=pl.lit(LOOKS_THE_SAME)).sort("row")


def _thumbs(pairs: pl.DataFrame) -> Thumbs:
    joined = b"".join(half for pair in pairs.select("thumb", "thumb_after").iter_rows() for half in pair)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, 128).astype(np.int16)


def _quarters(thumbs: Thumbs) -> NDArray[np.float64]:
    """Mean level of each quarter of both images, [pairs, 8]."""
    return thumbs.reshape(-1, 2, 2, 4, 2, 4).mean(axis=(3, 5)).reshape(-1, 8)


class Check(NamedTuple):
    """An expectation and what great-expectations found of it: the number of rows that break it, or of those there."""

    dataset: str
    rule: str  # or "pairs of <split>"
    expectation: str
    met: bool
    found: int


def run_suite(found: pl.DataFrame, all_rules: list[Rule], expected: ExpectedPairs) -> tuple[list[Check], list[str]]:
    """Validate the facts, with their column `counts` (1 where a row counts as there).

    Returns:
        Each expectation with its result, and a sentence for each expected count that does not hold.
    """
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    import great_expectations as gx  # seconds of import

    columns = dict.fromkeys(["dataset", "own_split", "counts", *(rule.column for rule in all_rules)])
    # categorical, since conditions copy rows
    frame = found.select(*columns).with_columns(pl.selectors.string().cast(pl.Categorical)).to_pandas()
    context: Any = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    asset = context.data_sources.add_pandas("records").add_dataframe_asset("records")
    batch = asset.add_batch_definition_whole_dataframe("all").get_batch({"dataframe": frame})
    suite = gx.ExpectationSuite(name="records", expectations=_expectations(found, all_rules, expected))
    checks, miscounts = [], []
    for result in batch.validate(suite, result_format="SUMMARY").results:
        config = result.expectation_config
        assert not result.exception_info.get("raised_exception"), (config.meta, result.exception_info)
        rows = result.result.get("unexpected_count", result.result.get("observed_value"))
        check = Check(**config.meta, expectation=config.type, met=result.success, found=rows)
        checks.append(check)
        if not check.met and check.expectation == "expect_table_row_count_to_equal":
            split, wanted = check.rule.removeprefix("pairs of "), config.kwargs["value"]
            miscounts.append(f"{check.dataset} {split}: {rows} pairs, but {wanted} are expected")
    return checks, miscounts


def _expectations(found: pl.DataFrame, all_rules: list[Rule], expected: ExpectedPairs) -> list[Any]:
    """The rules of each dataset (a condition on its rows) in one suite, so that GX computes shared metrics once."""
    import great_expectations.expectations as gxe
    from great_expectations.expectations.row_conditions import Column

    expectations: list[Any] = [gxe.ExpectTableRowCountToBeBetween(min_value=1, meta={"dataset": "all", "rule": "rows"})]
    for dataset in found["dataset"].unique().sort():
        condition: Any = Column("dataset") == dataset
        for rule in all_rules:
            meta = {"rule": rule.name, "dataset": dataset}
            build = getattr(gxe, rule.expectation)
            expectations.append(build(column=rule.column, row_condition=condition, meta=meta, **rule.arguments))
    for dataset, splits in expected.items():
        for split, pairs in splits.items():
            rows = (Column("dataset") == dataset) & (Column("own_split") == split) & (Column("counts") == 1)
            meta = {"dataset": dataset, "rule": f"pairs of {split}"}
            expectations.append(gxe.ExpectTableRowCountToEqual(value=pairs, row_condition=rows, meta=meta))
    return expectations

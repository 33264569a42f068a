"""The rules for clean records. Each rule is written once, for two engines: polars and great-expectations.

Rules read *facts*: the columns of the table that `compute_facts` returns, which has one row per record. This way, only
a few vectorised passes over the 896k references are required. polars finds the rows that break a rule
(`find_quarantined_rows`), and great-expectations checks the same rules (`suite.py`). One of the facts is whether a
training pair is also in a test set (`twins.py`).

A new rule needs:

1. a `Rule` in the function of its group (`_row_rules`, `_split_rules`, `_question_rules`, `_reference_rules` or
   `_image_rules`);
2. a column for `compute_facts` to add, unless the column already exists;
3. its description in `RULE_TEXTS` of `rule_texts.py`, for the stage's web page;
4. its name in `RULES_BETWEEN_SPLITS` of `commands/inspect/judgement.py`, if a row can break the rule because of a row
   in another split;
5. if users should be able to change its limit, a field in `params.py` with a default. `check_records` in `stage.py`
   passes it to `build_rules`.
"""

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from m3diff.datasets.tables import SIDES
from m3diff.images.check import OK
from m3diff.records.sample import IMAGE_MARK, MOST_IMAGES
from m3diff.records.schemas import SPLITS

# If a pair is in two splits, it is removed from the split with the lower rank, so that test sets stay complete
SPLIT_RANKS = {"train": 0, "val": 1, "test": 2}

# HTML, and special tokens of chat templates (`<image>`, `<|im_end|>`), which would change the meaning of a prompt
MARKUP = r"<[/!|]?[A-Za-z][^<>]*>|&(?:[a-z]{2,8}|#\d+|#x[0-9a-fA-F]+);"

IMAGE_COLUMNS = tuple(f"image_{number}" for number in range(1, MOST_IMAGES + 1))
NO_PATH_VERDICT = "is not given"  # verdict used if the row does not name an image
TOO_LARGE_CODES = [
    "images.too_large",
    "images.tiles_too_large",
]  # codes of the faults of images that exceed the pixel limit

# The only rule that a valid row can break. Rows that break only this rule do not count towards the share of bad rows
LEAK_RULE = "not_in_test"


@dataclass(frozen=True)
class Rule:
    """A rule that every clean row satisfies.

    Attributes:
        name: name of the rule in the report and in the column `rules` of the quarantine.
        column: the fact that the rule reads.
        is_broken: polars expression that is true for a row that breaks the rule.
        reason: polars expression that describes what is wrong and how to fix it. It is null if the row's `fault`
            already describes that.
        expectation: name of a class in `great_expectations.expectations`.
        arguments: keyword arguments of the expectation, in addition to the column.
    """

    name: str
    column: str
    is_broken: pl.Expr
    reason: pl.Expr
    expectation: str
    arguments: dict[str, Any] = field(default_factory=dict)


def build_rules(max_chars: int) -> list[Rule]:
    """Return all rules. If a row breaks several rules, its reasons are listed in this order.

    Args:
        max_chars: maximum length of a reference, in characters.
    """
    return _row_rules() + _split_rules() + _question_rules() + _reference_rules(max_chars) + _image_rules()


def _row_rules() -> list[Rule]:
    has_repeated_id = pl.col("id").is_not_null() & (pl.col("keep_order") != pl.col("keep_order").min().over("id"))
    repeated_id = "id: {} occurs more than once; only the first row in the highest split (test, val, train) is kept"
    return [
        Rule(
            name="readable",
            column="fault",
            is_broken=pl.col("fault").is_not_null(),
            reason=pl.col("fault"),
            expectation="ExpectColumnValuesToBeNull",
        ),
        Rule(
            name="id_given",
            column="id",
            is_broken=pl.col("id").is_null(),
            reason=_reason_if_readable("id: is missing"),
            expectation="ExpectColumnValuesToNotBeNull",
        ),
        Rule(
            name="id_unique",
            column="id",
            is_broken=has_repeated_id,
            reason=pl.format(repeated_id, "id"),
            expectation="ExpectColumnValuesToBeUnique",
        ),
    ]


def _split_rules() -> list[Rule]:
    split_rank = pl.col("split_rank")
    is_in_lower_split = (pl.col("scene_splits") > 1) & (split_rank < split_rank.max().over("scene"))
    return [
        Rule(
            name="split_given",
            column="split",
            is_broken=pl.col("split").is_null(),
            reason=_reason_if_readable("split: is missing"),
            expectation="ExpectColumnValuesToNotBeNull",
        ),
        Rule(
            name="split_known",
            column="split",
            is_broken=~pl.col("split").is_in(SPLITS),
            reason=pl.format("split: {} is not train, val or test", "split"),
            expectation="ExpectColumnValuesToBeInSet",
            arguments={"value_set": list(SPLITS)},
        ),
        Rule(
            name="scene_in_one_split",
            column="scene_splits",
            is_broken=is_in_lower_split,
            reason=pl.format("split: scene {} is also in a higher split (test, val, train), which keeps it", "scene"),
            expectation="ExpectColumnValuesToBeInSet",
            arguments={"value_set": [1]},
        ),
        Rule(
            name=LEAK_RULE,
            column="twin",
            is_broken=pl.col("twin").is_not_null(),
            reason=pl.format("leak: test pair {} {}, so this pair is not used for training", "twin", "twin_similarity"),
            expectation="ExpectColumnValuesToBeNull",
        ),
    ]


def _question_rules() -> list[Rule]:
    return [
        Rule(
            name="question_given",
            column="empty_questions",
            is_broken=pl.col("empty_questions") > 0,
            reason=pl.lit("question: is empty; write a question, or leave out the column to ask what changed"),
            expectation="ExpectColumnValuesToBeInSet",
            arguments={"value_set": [0]},
        ),
        Rule(
            name="history_given",
            column="empty_turns",
            is_broken=pl.col("empty_turns") > 0,
            reason=pl.format("history: {} turns have no question or no answer; complete the dialogue", "empty_turns"),
            expectation="ExpectColumnValuesToBeInSet",
            arguments={"value_set": [0]},
        ),
    ]


def _reference_rules(max_chars: int) -> list[Rule]:
    length = pl.col("longest_reference")
    marked_references = pl.col("markup_references")
    references_with_markup = pl.format(
        "references: {} contain HTML or a special token; write plain text", marked_references
    )
    questions_with_markup = pl.lit("question: contains HTML or a special token; write plain text")
    return [
        Rule(
            name="references_given",
            column="references",
            is_broken=pl.col("references") == 0,
            reason=_reason_if_readable("references: are missing; a pair needs at least one, which may be empty"),
            expectation="ExpectColumnValuesToBeBetween",
            arguments={"min_value": 1},
        ),
        Rule(
            name="reference_length",
            column="longest_reference",
            is_broken=length > max_chars,
            reason=pl.format(
                "references: the longest has {} characters, more than validate.max_caption_chars = {}",
                length,
                max_chars,
            ),
            expectation="ExpectColumnValuesToBeBetween",
            arguments={"max_value": max_chars},
        ),
        Rule(
            name="no_markup",
            column="markup_texts",
            is_broken=pl.col("markup_texts") > 0,
            reason=pl.when(marked_references > 0).then(references_with_markup).otherwise(questions_with_markup),
            expectation="ExpectColumnValuesToBeInSet",
            arguments={"value_set": [0]},
        ),
    ]


def _image_rules() -> list[Rule]:
    image_rules = [
        Rule(
            name="shows_a_change",
            column="no_change_reason",
            is_broken=pl.col("no_change_reason").is_not_null(),
            reason=pl.col("no_change_reason"),
            expectation="ExpectColumnValuesToBeNull",
        ),
        Rule(
            name="images_present",
            column="absent_images",
            is_broken=pl.col("absent_images").is_not_null(),
            reason=_reason_for_absent_images(),
            expectation="ExpectColumnValuesToBeNull",
        ),
    ]
    for column in IMAGE_COLUMNS:
        image_rules.append(
            Rule(
                name=f"{column}_decodes",
                column=f"{column}_unreadable",
                is_broken=pl.col(f"{column}_unreadable").is_not_null(),
                reason=_reason_for_bad_image(column),
                expectation="ExpectColumnValuesToBeNull",
            )
        )
    return image_rules


def _reason_if_readable(reason: str) -> pl.Expr:
    """Return the reason, or null for a row that could not be read, because all values of such a row are missing."""
    return pl.when(pl.col("fault").is_null()).then(pl.lit(reason))


def name_of_image(column: str) -> pl.Expr:
    """Return what messages call an image: before and after if a record has two images, and otherwise image."""
    side = SIDES[IMAGE_COLUMNS.index(column)]
    return pl.when(pl.col("image_count") == len(SIDES)).then(pl.lit(side)).otherwise(pl.lit("image"))


def _is_absent(column: str) -> pl.Expr:
    """Return an expression that is true if the row should have an image, but does not name it or has no such file.

    An image file that is damaged is not absent. Other rules report it.
    """
    is_missing = pl.col(f"{column}_code").eq_missing(pl.lit("images.missing"))
    return is_missing | pl.col(f"{column}_verdict").eq_missing(pl.lit(NO_PATH_VERDICT))


def _reason_for_absent_images() -> pl.Expr:
    """Return the reasons of all absent images of a row, or null if the row's fault already describes them."""
    reasons = [pl.when(_is_absent(column)).then(_reason_for_bad_image(column)) for column in IMAGE_COLUMNS]
    joined_reasons = pl.concat_str(reasons, separator="; ", ignore_nulls=True)
    # polars joins nulls to an empty string, and an empty reason would leave a stray "; "
    return pl.when(joined_reasons != "").then(joined_reasons)


def _reason_for_bad_image(column: str) -> pl.Expr:
    """Return why an image is absent or cannot be opened: its name, the path and the verdict of `check_images`.

    If the image is too large, the reason also says that the limit can be raised. If the row could not be read, the
    reason is null.
    """
    name = name_of_image(column)
    is_too_large = pl.col(f"{column}_code").is_in(TOO_LARGE_CODES)
    raise_limit = pl.when(is_too_large).then(pl.lit(", or raise validate.max_image_pixels")).otherwise(pl.lit(""))
    reason = pl.format("{}: {} {}{}", name, column, f"{column}_verdict", raise_limit)
    not_given = pl.when(pl.col("fault").is_null()).then(pl.format("{}: is not given", name))
    return pl.when(pl.col(column).is_not_null()).then(reason).otherwise(not_given)


def compute_facts(
    records: pl.DataFrame, images: pl.DataFrame, leaks: pl.DataFrame, likeness: pl.DataFrame
) -> pl.DataFrame:
    """Return one row per record, with the columns that the rules read.

    The columns are `row`, the columns of the records except lists, and the computed facts.

    Args:
        records: records with RAW_SCHEMA and the columns of `add_image_columns`.
        images: verdicts by path, as `check_images` returns them.
        leaks: `row`, `twin` and `twin_similarity` of the training pairs that are also in a test set, as `find_twins`
            returns them.
        likeness: `row` and `no_change_reason` of pairs with similar images, as `compare_images_of_pairs` returns them.
    """
    rows = records.drop("images", "history", "references", "change_types").with_row_index("row")
    rows = rows.hstack(_reference_facts(records["references"]))
    rows = rows.hstack(_question_facts(records.select("question", "history")))
    for column in IMAGE_COLUMNS:
        verdict = pl.col("verdict").alias(f"{column}_verdict")
        verdicts = images.select(pl.col("path").alias(column), verdict, pl.col("code").alias(f"{column}_code"))
        rows = rows.join(verdicts, on=column, how="left")
    rows = rows.join(leaks, on="row", how="left")
    rows = rows.join(likeness.select("row", "no_change_reason"), on="row", how="left")
    split_rank = pl.col("split").replace_strict(SPLIT_RANKS, default=-1, return_dtype=pl.Int64)
    has_fault = pl.col("fault").is_not_null()
    scene_splits = pl.col("split").n_unique().over("scene")
    rows = rows.sort("row").with_columns(
        *(_verdict_or_no_path(number) for number in range(1, MOST_IMAGES + 1)),
        markup_texts=pl.col("markup_references") + pl.col("markup_questions"),
        split_rank=split_rank,
        # Among rows with the same id, only the first row in this order is kept. Readable rows come first, then higher
        # splits, then earlier rows
        keep_order=(2 - split_rank + 3 * has_fault) * records.height + pl.col("row"),
        scene_splits=pl.when(pl.col("scene").is_null()).then(1).otherwise(scene_splits),
    )
    return rows.with_columns(
        _names_of_absent_images().alias("absent_images"),
        *(_verdict_if_unreadable(column).alias(f"{column}_unreadable") for column in IMAGE_COLUMNS),
    )


def _verdict_or_no_path(number: int) -> pl.Expr:
    """Return the verdict on an image, or NO_PATH_VERDICT if the record should have this image but does not name it."""
    name = f"image_{number}_verdict"
    is_absent = pl.col(name).is_null() & (pl.col("image_count") >= number)
    return pl.when(is_absent).then(pl.lit(NO_PATH_VERDICT)).otherwise(pl.col(name)).alias(name)


def _reference_facts(references: pl.Series) -> pl.DataFrame:
    """Return the number of references, the length of the longest reference, and the number with markup, per record."""
    texts = references.to_frame("text").with_row_index("row").explode("text", empty_as_null=True)
    text = pl.col("text")
    by_row = texts.group_by("row", maintain_order=True).agg(
        references=text.count().cast(pl.Int64),
        longest_reference=text.str.len_chars().max().fill_null(0).cast(pl.Int64),
        markup_references=text.str.contains(MARKUP).sum().cast(pl.Int64),
    )
    return by_row.drop("row")


def _question_facts(records: pl.DataFrame) -> pl.DataFrame:
    """Return whether the own question is empty, and the numbers of empty turns and of texts with markup, per record.

    Image marks in questions are no markup. `<image>` in an answer is.
    """
    question = pl.col("question")
    is_empty = (question.str.strip_chars() == "").fill_null(False)
    has_markup = question.str.replace_all(IMAGE_MARK, "", literal=True).str.contains(MARKUP).fill_null(False)
    facts = records.with_row_index("row").select(
        "row", empty_questions=is_empty.cast(pl.Int64), markup_questions=has_markup.cast(pl.Int64)
    )
    turns = records.with_row_index("row").filter(pl.col("history").list.len() > 0).select("row", "history")
    turns = turns.explode("history").unnest("history")
    texts = pl.col("question", "answer")
    is_empty_turn = pl.any_horizontal(texts.is_null() | (texts.str.strip_chars() == ""))
    answer_has_markup = pl.col("answer").str.contains(MARKUP).fill_null(False)
    by_row = turns.group_by("row").agg(
        empty_turns=is_empty_turn.sum().cast(pl.Int64),
        markup_turns=(has_markup | answer_has_markup).sum().cast(pl.Int64),
    )
    facts = facts.join(by_row, on="row", how="left", maintain_order="left").with_columns(
        pl.col("empty_turns", "markup_turns").fill_null(0)
    )
    return facts.select(
        "empty_questions", "empty_turns", markup_questions=pl.col("markup_questions") + pl.col("markup_turns")
    )


def _names_of_absent_images() -> pl.Expr:
    """Return which images are absent, such as "before, after", or null if all images are present."""
    names = [pl.when(_is_absent(column)).then(name_of_image(column)) for column in IMAGE_COLUMNS]
    joined_names = pl.concat_str(names, separator=", ", ignore_nulls=True)
    return pl.when(pl.any_horizontal(_is_absent(column) for column in IMAGE_COLUMNS)).then(joined_names)


def _verdict_if_unreadable(column: str) -> pl.Expr:
    """Return the verdict on an existing file that is not a valid image, or null for a valid or absent image."""
    verdict = pl.col(f"{column}_verdict")
    return pl.when((verdict != OK) & ~_is_absent(column)).then(verdict)


def find_quarantined_rows(row_facts: pl.DataFrame, all_rules: list[Rule]) -> pl.DataFrame:
    """Return `row`, `rules` (the names of the broken rules) and `reason` for every row that breaks a rule."""
    flagged_rows = row_facts.with_columns(rule.is_broken.alias(f"bad_{rule.name}") for rule in all_rules)
    broken_rows = flagged_rows.filter(pl.any_horizontal(pl.col("^bad_.*$")))
    rule_names = [pl.when(f"bad_{rule.name}").then(pl.lit(rule.name)) for rule in all_rules]
    reasons = [pl.when(f"bad_{rule.name}").then(rule.reason) for rule in all_rules]
    return broken_rows.select(
        "row",
        rules=pl.concat_list(rule_names).list.drop_nulls(),
        reason=pl.concat_str(reasons, separator="; ", ignore_nulls=True),
    )

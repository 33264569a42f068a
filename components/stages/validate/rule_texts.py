"""Describe the rules in words, for the stage's web page. Every rule of `rules.py` has a text in `RULE_TEXTS`."""

from typing import NamedTuple

from m3diff.records.errors import format_count
from m3diff.stages.validate.suite import ExpectationResult


class RuleText(NamedTuple):
    """Descriptions of what a rule requires and of what is wrong with a row that breaks it."""

    requirement: str
    broken: str


RULE_TEXTS = {
    "readable": RuleText("The line of the annotation file can be read", "The line cannot be read"),
    "id_given": RuleText("Every pair has an id", "No id"),
    "id_unique": RuleText("No id occurs twice", "The id occurs more than once"),
    "split_given": RuleText("Every pair has a split", "No split"),
    "split_known": RuleText("The split is train, val or test", "An unknown split"),
    "scene_in_one_split": RuleText("The pairs of a scene are in one split", "The scene is in several splits"),
    "not_in_test": RuleText("No training pair is in a test set", "A training pair that is in a test set"),
    "question_given": RuleText("No question is empty", "An empty question"),
    "history_given": RuleText("Every earlier turn has a question and an answer", "An earlier turn without a text"),
    "references_given": RuleText("Every pair has a caption", "No caption"),
    "reference_length": RuleText("No caption is too long", "A caption is too long"),
    "no_markup": RuleText("No text holds HTML or a special token", "HTML or a special token in a text"),
    "shows_a_change": RuleText("A pair with a change has two different images", "Both images are the same"),
    "images_present": RuleText("All image files are there", "An image file is missing"),
    "image_1_decodes": RuleText("The first image can be opened", "The first image cannot be opened"),
    "image_2_decodes": RuleText("The second image can be opened", "The second image cannot be opened"),
}
PAIR_COUNT = "pairs of "  # rules about the number of pairs in a split are named by this prefix and the split


class ResultText(NamedTuple):
    """The result of an expectation, described in words.

    Attributes:
        dataset: name of the dataset, or "all".
        sentence: what was expected.
        is_met: true if the expectation is met.
        outcome: the actual result, which is shown if the expectation is not met.
    """

    dataset: str
    sentence: str
    is_met: bool
    outcome: str


def describe_rule(rule: str) -> RuleText:
    """Return the descriptions of a rule.

    Raises:
        KeyError: RULE_TEXTS does not contain the rule.
    """
    return RULE_TEXTS[rule]


def describe_result(result: ExpectationResult) -> ResultText:
    """Describe the result of an expectation in words."""
    rows = format_count(result.row_count or 0, "row")
    if result.rule == "rows":
        sentence = "There is at least one row"
        outcome = f"found {rows}"
    elif result.rule.startswith(PAIR_COUNT):
        sentence = f"The split {result.rule.removeprefix(PAIR_COUNT)} has as many pairs as expected"
        outcome = f"found {rows}"
    else:
        sentence = describe_rule(result.rule).requirement
        outcome = f"broken by {rows}"
    return ResultText(dataset=result.dataset, sentence=sentence, is_met=result.is_met, outcome=outcome)

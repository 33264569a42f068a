"""The numbers of metrics.json: caption scores by group, and what the grammar says of right and wrong."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from components.evaluate.coco import ALL, CocoScores, Groups
from components.evaluate.grammar import ParsedCaption
from components.evaluate.pairs import Pair
from components.reports import StageReport

BY_ALIAS = ConfigDict(frozen=True, extra="forbid", serialize_by_alias=True)


class Scores(BaseModel):
    """Caption scores of a group of pairs as pycocoevalcap gives them; papers print them times 100. None is absent."""

    model_config = BY_ALIAS

    pairs: int
    bleu_1: float | None = Field(alias="BLEU-1")
    bleu_2: float | None = Field(alias="BLEU-2")
    bleu_3: float | None = Field(alias="BLEU-3")
    bleu_4: float | None = Field(alias="BLEU-4")
    meteor: float | None = Field(alias="METEOR")
    rouge_l: float | None = Field(alias="ROUGE-L")
    cider: float | None = Field(alias="CIDEr")
    spice: float | None = Field(alias="SPICE")


class TypeScores(Scores):
    """Of the single-change pairs of one type."""

    type_accuracy: float | None
    exact_accuracy: float | None


class ManyScores(Scores):
    """Of the pairs with more than one change: shares of the clauses said that are right, and of the changes found."""

    changes: int
    type_precision: float | None
    type_recall: float | None
    exact_precision: float | None
    exact_recall: float | None
    all_types_right: float | None
    all_exact_right: float | None


class ChangeScores(BaseModel):
    """What the grammar makes of the captions, as shares of pairs; None without a grammar or without such pairs."""

    model_config = BY_ALIAS

    change_type_accuracy: float | None
    change_exact_accuracy: float | None
    no_change_recall: float | None
    false_no_change: float | None


class EvaluateReport(ChangeScores, Scores, StageReport):
    """metrics.json. rows_in: test pairs; rows_out: pairs captioned and scored."""

    model_config = BY_ALIAS

    cider_shuffled: float | None = Field(alias="CIDEr_shuffled")
    change: Scores
    multi_change: ManyScores
    distractors: Scores
    by_type: dict[str, TypeScores]
    by_dataset: dict[str, Scores]
    absent: dict[str, str]  # metric -> why it is null


def group_pairs(pairs: list[Pair]) -> Groups:
    """Ids of the pairs of each group that gets scores of its own."""
    groups: Groups = {"change": [], "multi_change": [], "distractors": []}
    found: dict[str, list[str]] = defaultdict(list)
    for pair in pairs:
        if pair.changes:
            groups["change"].append(pair.id)
            found[f"by_type/{pair.changes[0]}" if len(pair.changes) == 1 else "multi_change"].append(pair.id)
        if pair.is_distractor:
            groups["distractors"].append(pair.id)
        found[f"by_dataset/{pair.dataset}"].append(pair.id)
    return groups | dict(sorted(found.items()))


def share(flags: Iterable[bool]) -> float | None:
    known = list(flags)
    return sum(known) / len(known) if known else None


def change_scores(parsed: Iterable[ParsedCaption]) -> dict[str, Any]:
    """The four scores of `ChangeScores` over the pairs that the grammar understands."""
    parsed = list(parsed)
    single = [reading for reading in parsed if len(reading.pair.changes) == 1]
    return {
        "change_type_accuracy": share(reading.type_right for reading in single),
        "change_exact_accuracy": share(reading.exact_right for reading in single),
        "no_change_recall": share(reading.says_no_change for reading in parsed if reading.pair.is_distractor),
        "false_no_change": share(reading.says_no_change for reading in parsed if reading.pair.changes),
    }


def clause_scores(parsed: list[ParsedCaption]) -> dict[str, Any]:
    """Precision and recall over the clauses of many-change pairs, and the shares of pairs wholly right."""
    said, changes = (sum(len(r.said) for r in parsed), sum(r.truth.total() for r in parsed))
    types, exact = (sum(r.found[k] for r in parsed) for k in (0, 1))
    return {
        "changes": changes,
        "type_precision": types / said if said else None,
        "type_recall": types / changes if changes else None,
        "exact_precision": exact / said if said else None,
        "exact_recall": exact / changes if changes else None,
        "all_types_right": share(r.type_right for r in parsed),
        "all_exact_right": share(r.exact_right for r in parsed),
    }


def confuse(parsed: Iterable[ParsedCaption]) -> dict[str, dict[str, int]]:
    """True change type -> what the caption says -> pairs, over pairs of one change and distractors."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for reading in parsed:
        if len(reading.pair.change_types) == 1:
            counts[reading.pair.change_types[0]][reading.word] += 1
    return {true: dict(said) for true, said in counts.items()}


def summarise(
    pairs: list[Pair], test_pairs: int, groups: Groups, scores: CocoScores, parsed: dict[str, ParsedCaption]
) -> EvaluateReport:
    """Everything that is measured, in the shape of metrics.json."""

    def scores_of(group: str) -> dict[str, Any]:
        return {"pairs": len(groups.get(group, pairs)), **scores.groups[group]}

    def read(group: str) -> list[ParsedCaption]:
        return [parsed[i] for i in groups[group] if i in parsed]

    by_type = {}
    for group in (name for name in groups if name.startswith("by_type/")):
        right = change_scores(read(group))
        accuracies = {f"{kind}_accuracy": right[f"change_{kind}_accuracy"] for kind in ("type", "exact")}
        by_type[group.removeprefix("by_type/")] = TypeScores(**scores_of(group), **accuracies)
    return EvaluateReport(
        stage="evaluate",
        rows_in=test_pairs,
        rows_out=len(pairs),
        **scores_of(ALL),
        **change_scores(parsed.values()),
        CIDEr_shuffled=scores.shuffled_cider,
        change=Scores(**scores_of("change")),
        multi_change=ManyScores(**scores_of("multi_change"), **clause_scores(read("multi_change"))),
        distractors=Scores(**scores_of("distractors")),
        by_type=by_type,
        by_dataset={
            name.removeprefix("by_dataset/"): Scores(**scores_of(name))
            for name in groups
            if name.startswith("by_dataset/")
        },
        absent=scores.absent,
    )

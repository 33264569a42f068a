"""Collect the data of a page's gallery: captions, references, scores and images of each pair.

Each part of a caption is marked as right or wrong. A page shows a single run, or two runs to compare.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from m3diff.records.progress import progress
from m3diff.report.images import ImageRights, draw_images, link_images
from m3diff.scoring.grammar import UNREADABLE, Clause, ParsedCaption, change_type_order
from m3diff.scoring.metrics import Metric, PairValue
from m3diff.scoring.metrics.answers import is_exact_match, judge_form
from m3diff.scoring.pairs import EvalPair

# Arrow types of the columns of scores.parquet that contain one number per pair
NUMBER_TYPES = ("double", "float", "int64", "int32", "bool")

PartMark = tuple[str, bool]  # part of a clause, and whether it is right

FORM_TITLES = {"yes_no": "yes or no", "number": "number", "choice": "choice"}  # titles of the marks of answers


class RunPairs(NamedTuple):
    """The predictions and scores of a run.

    pairs: protocol -> pair id -> pair in the form in which the protocol scores it.
    scores: protocol -> pair id -> column of scores.parquet -> score.
    parsed: pair id -> parsed prediction.
    """

    name: str
    pairs: Mapping[str, Mapping[str, EvalPair]]
    scores: Mapping[str, Mapping[str, Mapping[str, PairValue]]]
    parsed: Mapping[str, ParsedCaption]

    def pair_of_first_protocol(self, pair_id: str) -> EvalPair:
        """Return the pair in the form in which its first protocol scores it."""
        return next(pairs[pair_id] for pairs in self.pairs.values() if pair_id in pairs)


def build_gallery(
    runs: Sequence[RunPairs],
    metrics: Mapping[str, Metric],
    rights: Mapping[str, ImageRights],
    saliency: Mapping[str, np.ndarray],
    folder: Path,
    embedded_bytes: int,
) -> dict[str, Any]:
    """Return all pairs in the format that the page's script reads. All runs must have the same pairs.

    Args:
        rights: image rights by dataset.
        saliency: saliency maps by pair id.
        folder, embedded_bytes: see `link_images`.

    Raises:
        DataError: an image is missing or changed since ingest.
    """
    columns = list_number_columns(metrics)
    first_run = runs[0]
    protocols = list(first_run.pairs)
    pairs: dict[str, EvalPair] = {}
    for pairs_of_protocol in first_run.pairs.values():
        for pair in pairs_of_protocol.values():
            pairs.setdefault(pair.id, pair)
    images = list(progress(draw_images(pairs.values(), rights, saliency), "evaluate: images", len(pairs), "pair"))
    drawn_images: list[bytes] = []
    for drawn in images:
        if drawn is not None:
            drawn_images += drawn.images
            drawn_images += [drawn.outlined] if drawn.outlined else []
    links = link_images(drawn_images, folder, embedded_bytes)
    entries = []
    for pair, drawn in zip(pairs.values(), images, strict=True):
        entry = make_pair_entry(pair, runs, columns)
        entry["images"] = None if drawn is None else [links[image] for image in drawn.images]
        entry["outlined"] = links[drawn.outlined] if drawn is not None and drawn.outlined else None
        entries.append(entry)
    change_types: set[str] = set()
    for pair in pairs.values():
        change_types |= set(pair.change_types)
    readable_captions = sum(not caption.is_unreadable for caption in runs[-1].parsed.values())
    answers = sum(pair.question is not None for pair in pairs.values())
    return {
        "runs": [run.name for run in runs],
        "columns": columns,
        "protocols": protocols,
        "datasets": list(dict.fromkeys(pair.dataset for pair in pairs.values())),
        "types": sorted(change_types, key=change_type_order),
        "kinds": sorted({pair.kind for pair in pairs.values() if pair.kind}),
        # whether most texts are right or wrong: captions that a grammar can read, and answers
        "graded": 2 * (readable_captions + answers) > len(pairs),
        "saliency": bool(saliency),
        "pairs": entries,
    }


def list_number_columns(metrics: Mapping[str, Metric]) -> list[str]:
    """Return the columns of scores.parquet that contain one number per pair, the main scores of the metrics first."""
    main_scores = {metric.main_score for metric in metrics.values()}
    columns: list[str] = []
    for metric in metrics.values():
        columns += [name for name, arrow_type in metric.columns.items() if arrow_type in NUMBER_TYPES]
    return sorted(columns, key=lambda name: name not in main_scores)


def make_pair_entry(pair: EvalPair, runs: Sequence[RunPairs], columns: Sequence[str]) -> dict[str, Any]:
    """Return the gallery's entry for a pair: texts, marks, and scores by protocol number. Images are added later."""
    captions = []
    for run in runs:
        pair_of_run = run.pair_of_first_protocol(pair.id)
        captions.append(make_caption_entry(pair_of_run, run.parsed.get(pair.id)))
    scores = {}
    for number, (protocol, pairs_of_protocol) in enumerate(runs[0].pairs.items()):
        if pair.id in pairs_of_protocol:
            scores[str(number)] = [
                [round_score(run.scores[protocol][pair.id].get(column)) for column in columns] for run in runs
            ]
    last_prediction = runs[-1].pair_of_first_protocol(pair.id).prediction
    return {
        "id": pair.id,
        "dataset": pair.dataset,
        "question": pair.question,
        "history": pair.history,
        "kind": pair.kind,
        "types": pair.change_types,
        "captions": captions,
        "references": sort_by_similarity(last_prediction, pair.references),
        "scores": scores,
    }


def round_score(value: PairValue) -> float | None:
    """Return a score rounded to five decimals, or None if it is not a number."""
    return round(float(value), 5) if isinstance(value, int | float) else None


def make_caption_entry(pair: EvalPair, parsed: ParsedCaption | None) -> dict[str, Any]:
    """Return the gallery's entry for a prediction, clause by clause.

    Args:
        parsed: parsed prediction. None if it was not parsed by a grammar.

    Returns:
        clauses: text and marks of each clause. Without a grammar, there are no marks. The answer to a question of its
            own is one clause, with marks for exact match and for the form of the answer.
        missed: number of changes of the pair that the prediction does not name.
        grade: 2 if everything is right, 1 if only the types or only the form of an answer are right, otherwise 0. None
            without a grammar.
    """
    if pair.question is not None:
        return make_answer_entry(pair, pair.question)
    if parsed is None:
        return {"clauses": [(pair.prediction, [])], "missed": 0, "grade": None}
    if parsed.says_no_change:
        clauses = [(pair.prediction, [("nothing changed", pair.is_distractor)])]
    else:
        texts_and_clauses = zip(parsed.clause_texts, parsed.predicted_clauses, strict=True)
        clauses = [(text, mark_clause_parts(parsed, clause)) for text, clause in texts_and_clauses]
    missed = 0 if pair.is_distractor else parsed.true_types.total() - parsed.named_changes.type
    if parsed.correctness.exact:
        grade = 2
    elif parsed.correctness.type:
        grade = 1
    else:
        grade = 0
    return {"clauses": clauses, "missed": missed, "grade": grade}


def make_answer_entry(pair: EvalPair, question: str) -> dict[str, Any]:
    """Return the gallery's entry for the answer to a question; see `make_caption_entry`."""
    is_match = is_exact_match(pair.prediction, pair.references)
    marks: list[PartMark] = [("exact match", is_match)]
    verdict = judge_form(question, pair.prediction, pair.references)
    if verdict is not None:
        marks.append((FORM_TITLES[verdict.form], verdict.is_right))
    is_right = is_match or (verdict is not None and verdict.is_right)
    return {"clauses": [(pair.prediction, marks)], "missed": 0, "grade": 2 if is_match else int(is_right)}


def mark_clause_parts(parsed: ParsedCaption, clause: Clause) -> list[PartMark]:
    """Return each part that a clause names and whether it is right. If the type is wrong, return only the type."""
    if clause.type == UNREADABLE:
        return [("not understood", False)]
    agreement = parsed.compare_with_references(clause)
    marks = [(clause.type, agreement.type)]
    if not agreement.type:
        return marks
    if clause.object:
        marks.append(("object", agreement.object))
    if clause.place:
        marks.append(("place", agreement.place))
    if clause.before or clause.after:
        marks.append(("change", parsed.agrees_on_before_and_after(clause)))
    return marks


def sort_by_similarity(prediction: str, references: Iterable[str]) -> list[str]:
    """Sort references by the words that they share with the prediction (Jaccard index), most similar first."""
    predicted_words = set(prediction.casefold().split())

    def similarity(reference: str) -> float:
        reference_words = set(reference.casefold().split())
        return len(predicted_words & reference_words) / (len(predicted_words | reference_words) or 1)

    return sorted(references, key=similarity, reverse=True)

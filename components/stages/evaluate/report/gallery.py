"""What the page's gallery knows of each pair: captions with marks for right and wrong, references, scores, images.

A page shows one run, or two of which the second is compared with the first.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from m3diff.records.progress import progress
from m3diff.scoring.grammar import UNREADABLE, Clause, ParsedCaption, type_order
from m3diff.scoring.metrics.metric import Metric, PairValue
from m3diff.scoring.pairs import EvalPair
from m3diff.stages.evaluate.report.figures import SaliencyMaps
from m3diff.stages.evaluate.report.images import ImageRights, ImageStore, PairImages, draw_images

PLAIN = ("double", "float", "int64", "int32", "bool")
"""Arrow types of a column that is one number to a pair."""


@dataclass(frozen=True)
class Mark:
    what: str
    right: bool


@dataclass(frozen=True)
class RunPairs:
    """The captions and scores of one run."""

    name: str
    pairs: Mapping[str, Mapping[str, EvalPair]]  # protocol -> pair id -> pair as the protocol scored it
    scores: Mapping[str, Mapping[str, Mapping[str, PairValue]]]  # protocol -> pair id -> column -> score
    parsed: Mapping[str, ParsedCaption]  # by pair id


def gallery(
    runs: Sequence[RunPairs],
    metrics: Mapping[str, Metric],
    rights: Mapping[str, ImageRights],
    saliency: SaliencyMaps | None,
    store: ImageStore,
) -> dict[str, Any]:
    """All pairs of the first run, as the page's script reads them; every run has the same pairs.

    Raises:
        DataError: an image is missing or changed since ingest.
    """
    columns = pair_columns(metrics)
    protocols = list(runs[0].pairs)
    pairs = {pair.id: pair for of in reversed(protocols) for pair in runs[0].pairs[of].values()}
    ordered = [pairs[i] for i in dict.fromkeys(i for of in protocols for i in runs[0].pairs[of])]
    drawn = progress(zip(ordered, draw_images(ordered, rights, saliency), strict=True), "evaluate: images", unit="pair")
    names = {pair.id: _keep(images, store) for pair, images in drawn}
    return {
        "runs": [run.name for run in runs],
        "columns": columns,
        "protocols": protocols,
        "datasets": list(dict.fromkeys(pair.dataset for pair in ordered)),
        "types": sorted({kind for pair in ordered for kind in pair.change_types}, key=type_order),
        "graded": reads_most(runs[-1].parsed, len(ordered)),
        "saliency": bool(saliency),
        "pairs": [_entry(pair, runs, columns, protocols) | _images(names[pair.id], store) for pair in ordered],
    }


def pair_columns(metrics: Mapping[str, Metric]) -> list[str]:
    """The columns of scores.parquet that are one number to a pair, headlines first."""
    plain = [name for metric in metrics.values() for name, arrow in metric.columns.items() if arrow in PLAIN]
    headlines = {metric.headline for metric in metrics.values()}
    return sorted(plain, key=lambda name: name not in headlines)


def reads_most(parsed: Mapping[str, ParsedCaption], pairs: int) -> bool:
    """Whether a grammar reads most captions, so that right and wrong can be told."""
    read = (all(clause.type != UNREADABLE for clause in caption.predicted_clauses) for caption in parsed.values())
    return 2 * sum(read) > pairs


def _entry(pair: EvalPair, runs: Sequence[RunPairs], columns: list[str], protocols: list[str]) -> dict[str, Any]:
    of_runs = [next(run.pairs[of][pair.id] for of in protocols if pair.id in run.pairs[of]) for run in runs]
    return {
        "id": pair.id,
        "dataset": pair.dataset,
        "types": pair.change_types,
        "captions": [_caption(mine, run.parsed.get(pair.id)) for mine, run in zip(of_runs, runs, strict=True)],
        "references": most_similar_first(of_runs[-1].prediction, pair.references),
        "scores": {
            str(place): [[_number(run.scores[of][pair.id].get(column)) for column in columns] for run in runs]
            for place, of in enumerate(protocols)
            if pair.id in runs[0].pairs[of]
        },
    }


def _number(value: PairValue) -> float | None:
    return round(float(value), 5) if isinstance(value, int | float) else None


def _caption(pair: EvalPair, parsed: ParsedCaption | None) -> dict[str, Any]:
    return {
        "clauses": [[text, [[found.what, found.right] for found in marks]] for text, marks in mark(pair, parsed)],
        "missed": missed(pair, parsed),
        "grade": None if parsed is None else 2 if parsed.exact_right else 1 if parsed.type_right else 0,
    }


def missed(pair: EvalPair, parsed: ParsedCaption | None) -> int:
    """Changes that the prediction does not name."""
    return 0 if parsed is None or pair.is_distractor else parsed.true_types.total() - parsed.changes_found[0]


def _keep(images: PairImages | None, store: ImageStore) -> list[str | None] | None:
    """The names of a pair's images in the store."""
    return None if images is None else [None if content is None else store.add(content) for content in images]


def _images(names: list[str | None] | None, store: ImageStore) -> dict[str, Any]:
    return {"images": None if names is None else [None if name is None else store.url(name) for name in names]}


def mark(pair: EvalPair, parsed: ParsedCaption | None) -> list[tuple[str, list[Mark]]]:
    """The prediction clause by clause, each with its marks; no marks where no grammar reads it."""
    if parsed is None:
        return [(pair.prediction, [])]
    if parsed.says_no_change:
        return [(pair.prediction, [Mark("nothing changed", pair.is_distractor)])]
    clauses = zip(parsed.parts, parsed.predicted_clauses, strict=True)
    return [(text, marks(parsed, clause)) for text, clause in clauses]


def marks(parsed: ParsedCaption, clause: Clause) -> list[Mark]:
    if clause.type == UNREADABLE:
        return [Mark("not understood", False)]
    known, named, placed = parsed.agrees(clause)
    found = [Mark(clause.type, known)]
    if known and clause.object:
        found.append(Mark("object", named))
    if known and clause.place:
        found.append(Mark("place", placed))
    if known and (clause.before or clause.after):
        found.append(Mark("change", parsed.says_change(clause)))
    return found


def most_similar_first(prediction: str, references: Iterable[str]) -> list[str]:
    """References, the one that shares most words with the prediction first."""
    words = set(prediction.casefold().split())

    def similarity(reference: str) -> float:
        theirs = set(reference.casefold().split())
        return len(words & theirs) / (len(words | theirs) or 1)

    return sorted(references, key=similarity, reverse=True)


def as_script(data: Any) -> str:
    """JSON that may stand inside a script element: no text of the data can end it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")

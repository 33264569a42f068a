"""Describe what a model keeps of what its base could do: a table per dataset, and examples of lost answers."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from m3diff.datasets.spec import DatasetSpec
from m3diff.report.images import ImageRights, draw_images
from m3diff.report.tables import Table, TableRow, file_name_of_protocol, make_cell
from m3diff.scoring.metrics import HEADLINE_SCORES
from m3diff.scoring.metrics.answers import is_exact_match
from m3diff.scoring.pairs import EvalPair
from m3diff.scoring.protocols import select_protocols
from m3diff.scoring.results import ModelAndBaseScore, RetentionScores

MAX_EXAMPLES = 4  # maximum number of lost answers per dataset


def describe_retention(
    scores: Mapping[str, RetentionScores],
    pairs: Sequence[EvalPair],
    pairs_of_base: Sequence[EvalPair],
    specs: Mapping[str, DatasetSpec],
    rights: Mapping[str, ImageRights],
) -> list[dict[str, Any]]:
    """Return the page's part for each retention dataset: its protocol, table and examples.

    Only the records of the protocol count, as in its scores.

    Args:
        scores: scores of the model and its base by protocol.
        pairs: records of retention datasets with the model's predictions.
        pairs_of_base: the same records with the base's predictions.
        specs: specs of the datasets, by dataset.
        rights: image rights by dataset.

    Raises:
        DataError: an image of an example is missing or changed since ingest.
    """
    pairs_by_protocol = {protocol.name: protocol.pairs for protocol in select_protocols(pairs, specs)}
    base_by_protocol = {protocol.name: protocol.pairs for protocol in select_protocols(pairs_of_base, specs)}
    parts = []
    for protocol, protocol_scores in scores.items():
        lost_answers = []
        kept_answers = 0
        for pair, pair_of_base in zip(pairs_by_protocol[protocol], base_by_protocol[protocol], strict=True):
            if not is_exact_match(pair_of_base.prediction, pair.references):
                continue
            if is_exact_match(pair.prediction, pair.references):
                kept_answers += 1
            else:
                lost_answers.append((pair, pair_of_base))
        parts.append(
            {
                "name": protocol,
                "table": retention_table(protocol, protocol_scores),
                "kept": kept_answers,
                "lost": len(lost_answers),
                "examples": list(describe_examples(choose_examples(lost_answers), rights)),
            }
        )
    return parts


def retention_table(protocol: str, scores: RetentionScores) -> Table:
    """Return a table with the base's score, the model's score and the change with its interval.

    All records have a row per score, and each kind of question has a row for the first score.
    """
    rows = list(make_rows("all records", scores.records, scores.scores))
    for kind, scores_of_kind in scores.by_kind.items():
        rows += list(make_rows(kind, scores.records_by_kind[kind], scores_of_kind))[:1]
    columns = ("Records", "n", "score", "base", "this model", "change")
    return Table(f"{file_name_of_protocol(protocol)}-retention", columns, rows)


def make_rows(name: str, records: int, scores: Mapping[str, ModelAndBaseScore]) -> Iterator[TableRow]:
    """Yield a row for each score that is shown wherever runs are compared."""
    for score, values in scores.items():
        if score in HEADLINE_SCORES:
            cells = (
                make_cell(values.base),
                make_cell(values.model),
                make_cell(values.change, values.interval, is_difference=True),
            )
            yield TableRow(name, (f"{records:,}", score.replace("_", " ")), cells)


def choose_examples(lost_answers: Sequence[tuple[EvalPair, EvalPair]]) -> list[tuple[EvalPair, EvalPair]]:
    """Return at most MAX_EXAMPLES lost answers, spread over the dataset."""
    step = max(1, -(-len(lost_answers) // MAX_EXAMPLES))
    return list(lost_answers[::step])


def describe_examples(
    lost_answers: Sequence[tuple[EvalPair, EvalPair]], rights: Mapping[str, ImageRights]
) -> Iterator[dict[str, Any]]:
    """Yield the question, the texts and the images of each lost answer. The images are data URLs."""
    drawn_images = draw_images((pair for pair, _ in lost_answers), rights, {})
    for (pair, pair_of_base), drawn in zip(lost_answers, drawn_images, strict=True):
        yield {
            "question": pair.question,
            "reference": pair.references[0],
            "base": pair_of_base.prediction,
            "model": pair.prediction,
            "images": [] if drawn is None else list(map(embed_webp, drawn.images)),
        }


def embed_webp(image: bytes) -> str:
    """Return a WebP image as a data URL."""
    return f"data:image/webp;base64,{base64.b64encode(image).decode()}"

"""Scores printed in papers, times 100.

published.csv has one row per method and benchmark ("<benchmark>", the main protocol) or protocol
("<benchmark>/<protocol>"). A row names the paper and, if the epoch was chosen on the test split, the evidence for that.
A result that is printed in several papers has only one row.
"""

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

from m3diff.datasets.spec import Protocol

# Column of published.csv -> name of the score
COLUMNS = {"bleu_4": "BLEU-4", "meteor": "METEOR", "rouge_l": "ROUGE-L", "cider": "CIDEr", "spice": "SPICE"}
PUBLISHED_SCORES = tuple(COLUMNS.values())


class PublishedRow(NamedTuple):
    """Published scores of a method on a benchmark, times 100.

    scores: name -> score, or None if the paper does not print the score.
    chosen_on_test: evidence that the epoch was chosen on the test split. None if there is no such evidence.
    """

    method: str
    venue: str
    scores: dict[str, float | None]
    source: str
    chosen_on_test: str | None


@cache
def published_rows(benchmark: str) -> list[PublishedRow]:
    """Return the rows for a "<benchmark>" (its main protocol) or a "<benchmark>/<protocol>", in file order."""
    rows = []
    with Path(__file__).with_name("published.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["benchmark"] == benchmark:
                scores = {name: float(row[column]) if row[column] else None for column, name in COLUMNS.items()}
                published_row = PublishedRow(
                    method=row["method"],
                    venue=row["venue"],
                    scores=scores,
                    source=row["source"],
                    chosen_on_test=row["chosen_on_test"] or None,
                )
                rows.append(published_row)
    return rows


def find_published_rows(dataset: str, protocol: Protocol, is_main_protocol: bool) -> list[PublishedRow]:
    """Return the published rows of a protocol. Rows of the main protocol are stored under the dataset's name."""
    return published_rows(dataset if is_main_protocol else f"{dataset}/{protocol.name}")

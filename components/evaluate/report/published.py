"""The published figures of each benchmark and, where it is known, on what their authors chose the epoch."""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
SCORES = {"bleu_4": "BLEU-4", "meteor": "METEOR", "rouge_l": "ROUGE-L", "cider": "CIDEr", "spice": "SPICE"}


@dataclass(frozen=True)
class PublishedRow:
    """One method's figures on one benchmark, times 100."""

    method: str
    venue: str
    scores: dict[str, float | None]  # by the score's name; None: not printed
    source: str
    chosen_on_test: str | None  # how it is known that the epoch was chosen on the test split; None: it is not known


def published_rows(benchmark: str) -> list[PublishedRow]:
    """The figures of a benchmark in the file's order. A result that several papers print is there once."""
    first_to_print = {(row["method"], row["cider"]): row for row in reversed(read("published.csv"))
                      if row["benchmark"] == benchmark}  # fmt: skip
    return [_row(row) for row in list(first_to_print.values())[::-1]]


@cache
def read(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _row(row: dict[str, str]) -> PublishedRow:
    return PublishedRow(
        method=row["method"],
        venue=row["venue"],
        scores={name: float(row[column]) if row[column] else None for column, name in SCORES.items()},
        source=row["source"],
        chosen_on_test=chosen_on_test(row["method"], row["benchmark"]),
    )


def chosen_on_test(method: str, benchmark: str) -> str | None:
    """The evidence that a method's epoch was chosen on the benchmark's test split; None where there is none."""
    for row in read("selection.csv"):
        if (row["method"], row["selected_on"]) == (method, "test") and row["benchmark"] in (benchmark, "all"):
            return row["evidence"]
    return None

"""The published figures of each benchmark and, where it is known, on what their authors chose the epoch.

results.csv                        every method's row of a benchmark's headline protocol, times 100, with its paper
clevr_change_cider_by_type.csv     CIDEr of CLEVR-Change by change type, times 100 (BLIP2IDC, WACV 2025)
selection.csv                      the split on which a method's epoch was chosen, and how that is known
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
SCORES = {"bleu_4": "BLEU-4", "meteor": "METEOR", "rouge_l": "ROUGE-L", "cider": "CIDEr", "spice": "SPICE"}
BY_TYPE = {
    "color": "color",
    "material": "texture",  # as the papers call it
    "add": "add",
    "drop": "drop",
    "move": "move",
}
BY_TYPE_SOURCE = "BLIP2IDC (WACV 2025), CIDEr by change type"


@dataclass(frozen=True)
class PublishedRow:
    """One method's figures on one benchmark, times 100."""

    method: str
    venue: str
    scores: dict[str, float | None]  # by the score's name; None: not printed
    source: str
    chosen_on_test: str | None  # how it is known that the epoch was chosen on the test split; None: it is not known


def published_rows(benchmark: str) -> list[PublishedRow]:
    """The figures of a benchmark's headline protocol in the file's order. A result that several papers print is there
    once."""
    of_benchmark = [row for row in read("results.csv") if row["benchmark"] == benchmark]
    first_to_print = {(row["method"], row["cider"]): row for row in reversed(of_benchmark)}
    return [
        PublishedRow(
            method=row["method"],
            venue=row["venue"],
            scores={name: float(row[column]) if row[column] else None for column, name in SCORES.items()},
            source=row["source"],
            chosen_on_test=chosen_on_test(row["method"], benchmark),
        )
        for row in list(first_to_print.values())[::-1]
    ]


def published_rows_by_type(benchmark: str, change_type: str) -> list[PublishedRow]:
    """CIDEr of the pairs of one change type of CLEVR-Change, in the file's order; none of other benchmarks."""
    if benchmark != "clevr_change" or change_type not in BY_TYPE:
        return []
    return [
        PublishedRow(
            method=row["method"],
            venue=row["venue"],
            scores=dict.fromkeys(SCORES.values()) | {"CIDEr": float(row[BY_TYPE[change_type]])},
            source=BY_TYPE_SOURCE,
            chosen_on_test=chosen_on_test(row["method"], benchmark),
        )
        for row in read("clevr_change_cider_by_type.csv")
    ]


@cache
def read(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def chosen_on_test(method: str, benchmark: str) -> str | None:
    """The evidence that a method's epoch was chosen on the benchmark's test split; None where there is none."""
    for row in read("selection.csv"):
        if (row["method"], row["selected_on"]) == (method, "test") and row["benchmark"] in (benchmark, "all"):
            return row["evidence"]
    return None

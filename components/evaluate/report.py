"""report.html: one file, nothing fetched, equal bytes for equal inputs. The words and the looks are in the template."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from components.evaluate.figures import Attention, Line, chart, smooth
from components.evaluate.gallery import SECTIONS, Card, choose, draw
from components.evaluate.grammar import ParsedCaption, type_order
from components.evaluate.metrics import EvaluateReport, Scores, confuse
from components.evaluate.pairs import Pair
from components.progress import progress

HERE = Path(__file__).parent
PUBLISHED_METRICS = {"bleu_4": "BLEU-4", "meteor": "METEOR", "rouge_l": "ROUGE-L", "cider": "CIDEr", "spice": "SPICE"}


@dataclass(frozen=True)
class Evidence:
    """All that the report is drawn from."""

    metrics: EvaluateReport
    pairs: list[Pair]
    cider: dict[str, float]  # by pair id
    parsed: dict[str, ParsedCaption]
    attention: Path | None
    curves: Path | None


def render(evidence: Evidence, gallery: int) -> str:
    """The page as text."""
    metrics = evidence.metrics
    page = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    page.filters |= {"times100": times100, "percent": percent}
    return page.get_template("report.html.j2").render(
        metrics=metrics,
        scores=metrics.model_dump(),
        datasets=list(metrics.by_dataset),
        types=sorted(metrics.by_type, key=type_order),
        alarms=alarms(evidence.parsed),
        confusion=confusion_table(evidence.parsed),
        charts=charts(evidence.curves) if evidence.curves else [],
        sections=draw_gallery(evidence, gallery),
        has_attention=evidence.attention is not None,
        published=published_tables(metrics.by_dataset),
    )


def times100(value: float | None) -> str:
    """A score in the units of papers."""
    return "–" if value is None else f"{100 * value:.1f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def alarms(parsed: dict[str, ParsedCaption]) -> list[tuple[str, int, int]]:
    """Kind of pair, how many were called unchanged, and of how many something else was said; no empty kinds."""
    kinds = {"distractors": 0, "pairs with one change": 1, "pairs with several changes": 2}
    rows = []
    for kind, changes in kinds.items():
        calm = [r.says_no_change for r in parsed.values() if min(len(r.pair.changes), 2) == changes]
        rows.append((kind, sum(calm), len(calm) - sum(calm)))
    return [row for row in rows if row[1] + row[2]]


def confusion_table(parsed: dict[str, ParsedCaption]) -> dict[str, Any]:
    """Columns, and per true type a row of (count, share of the row, on the diagonal)."""
    counts = confuse(parsed.values())
    columns = sorted({said for row in counts.values() for said in row} | counts.keys(), key=type_order)
    rows = []
    for true in sorted(counts, key=type_order):
        total = sum(counts[true].values())
        rows.append((true, [(n, n / total, said == true) for said in columns for n in [counts[true].get(said, 0)]]))
    return {"columns": columns, "rows": rows}


def charts(curves: Path) -> list[dict[str, Any]]:
    """Loss and learning rates over training steps, from train's curves.csv."""
    with curves.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))

    def column(name: str) -> list[tuple[float, float]]:
        return [(float(row["step"]), float(row[name])) for row in rows if row.get(name)]

    loss = column("loss")
    figures = [
        (
            "Loss",
            "per supervised token and training step, log scale",
            [
                Line("each step", loss, "faint"),
                Line("training, running mean", smooth(loss), "main"),
                Line("validation", column("val_loss"), "second", dots=True),
            ],
            True,
        ),
        (
            "Learning rate",
            "per training step",
            [
                Line("lr", column("lr"), "main"),
                Line("lr_vision", column("lr_vision"), "second"),
                Line("lr_mdp", column("lr_mdp"), "third"),
            ],
            False,
        ),
    ]
    drawn = [
        {
            "title": title,
            "note": note,
            "lines": [line for line in lines if line.points],
            "svg": chart(lines, title, log),
        }
        for title, note, lines, log in figures
    ]
    return [figure for figure in drawn if figure["svg"]]


def draw_gallery(evidence: Evidence, size: int) -> list[dict[str, Any]]:
    """The sections of the gallery with their cards."""
    attention = Attention(evidence.attention) if evidence.attention else None
    chosen = choose(evidence.pairs, evidence.cider, evidence.parsed, size)
    shown = [(name, pair) for name, pairs in chosen.items() for pair in pairs]
    cards: dict[str, list[Card]] = {name: [] for name in chosen}
    for name, pair in progress(shown, "evaluate: report", unit="pair"):
        cards[name].append(draw(pair, evidence.parsed.get(pair.id), evidence.cider[pair.id], attention))
    return [
        {"name": name, "title": SECTIONS[name][0], "note": SECTIONS[name][1], "cards": cards[name]} for name in chosen
    ]


def published_tables(by_dataset: dict[str, Scores]) -> list[dict[str, Any]]:
    """For each dataset that is a published benchmark: its rows, best CIDEr first, with this run's among them.

    A result that several papers print is shown once.
    """
    with (HERE / "published.csv").open(encoding="utf-8", newline="") as file:
        first_to_print = {
            (row["benchmark"], row["method"], row["cider"]): row for row in reversed(list(csv.DictReader(file)))
        }
    known = list(first_to_print.values())[::-1]
    tables = []
    for dataset, scores in by_dataset.items():
        rows = [row for row in known if row["benchmark"] == dataset]
        if rows:
            ours = {"method": "this run", "venue": "", "ours": True, "scores": in_papers_units(scores)}
            table = sorted([ours, *map(published_row, rows)], key=lambda row: -(row["scores"]["CIDEr"] or 0.0))
            tables.append({"dataset": dataset, "rows": table, "sources": sorted({row["source"] for row in rows})})
    return tables


def in_papers_units(scores: Scores) -> dict[str, float | None]:
    values = scores.model_dump()
    return {name: None if values[name] is None else 100 * values[name] for name in PUBLISHED_METRICS.values()}


def published_row(row: dict[str, str]) -> dict[str, Any]:
    scores = {name: float(row[column]) if row[column] else None for column, name in PUBLISHED_METRICS.items()}
    return {"method": row["method"], "venue": row["venue"], "ours": False, "scores": scores}

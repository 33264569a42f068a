"""report.html: one file, nothing fetched, equal bytes for equal inputs. The words and the looks are in the template."""

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from components.datasets.spec import DatasetSpec, check_licence
from components.evaluate.grammar import ParsedCaption, type_order
from components.evaluate.metrics.metric import Metric, PairValue, Value
from components.evaluate.pairs import EvalPair
from components.evaluate.published.published import SCORES, PublishedRow, published_rows
from components.evaluate.report.figures import STYLES, Line, SaliencyMaps, chart, smooth
from components.evaluate.report.gallery import SECTIONS, Card, choose, make_card
from components.evaluate.summary import EvaluateReport
from components.progress import progress
from components.records import DataError

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Evidence:
    """All that the report is drawn from."""

    metrics: Mapping[str, Metric]
    report: EvaluateReport
    pairs: list[EvalPair]
    pair_scores: Mapping[str, Mapping[str, PairValue]]  # by pair id
    parsed: Mapping[str, ParsedCaption]  # by pair id
    specs: Mapping[str, DatasetSpec]  # by dataset
    saliency: Path | None
    curves: Path | None


def render(evidence: Evidence, gallery: int) -> str:
    """The page as text.

    Raises:
        DataError: an image of the gallery is missing or changed since ingest.
    """
    page = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    page.filters |= {"times100": times100, "percent": percent}
    scores = evidence.report.model_dump()
    saliency = SaliencyMaps(evidence.saliency) if evidence.saliency else None
    image_rights = {dataset: rights_of(spec) for dataset, spec in evidence.specs.items()}
    return page.get_template("report.html.j2").render(
        scores=scores,
        datasets=list(scores["by_dataset"]),
        types=sorted(scores["by_type"], key=type_order),
        **table_columns(evidence.metrics, scores),
        alarms=alarms(evidence.parsed.values()),
        confusion=confusion_table(evidence.parsed.values()),
        charts=charts(evidence.curves) if evidence.curves else [],
        ranking=ranking_score(evidence.metrics),
        sections=make_gallery(evidence, gallery, saliency, image_rights),
        image_rights=image_rights,
        has_saliency=bool(saliency),
        published=published_tables(scores["by_dataset"]),
        control_pairs=sum(pair.shuffled_prediction is not None for pair in evidence.pairs),
    )


class ImageRights(NamedTuple):
    """Whether the licence of a dataset lets its images stand on the page, and what it says; None: no condition."""

    show: bool
    note: str | None


def rights_of(spec: DatasetSpec) -> ImageRights:
    try:
        condition = check_licence(spec, "show")
    except DataError:
        return ImageRights(False, f"{spec.licence.name}: {spec.licence.show.reason}")
    return ImageRights(True, condition)


def table_columns(metrics: Mapping[str, Metric], scores: Mapping[str, Any]) -> dict[str, list[str]]:
    """The scores of the wide table, and those that stand for a metric each in tiles and narrow tables."""
    shown = [m for m in metrics.values() if m.scores and not (m.optional and scores[m.headline] is None)]
    return {"all_columns": [score for m in shown for score in m.scores], "columns": [m.headline for m in shown]}


def ranking_score(metrics: Mapping[str, Metric]) -> str | None:
    """The score of a pair by which the gallery chooses: that of the first metric that gives one."""
    return next((metric.headline for metric in metrics.values() if metric.headline in metric.columns), None)


def times100(value: float | None) -> str:
    """A score in the units of papers."""
    return "–" if value is None else f"{100 * value:.1f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def alarms(parsed: Iterable[ParsedCaption]) -> list[tuple[str, int, int]]:
    """Kind of pair, how many were called unchanged, and of how many anything else was predicted; no empty kinds."""
    kinds = ("distractors", "pairs with one change", "pairs with several changes")
    counts = Counter((min(len(caption.pair.changes), 2), caption.says_no_change) for caption in parsed)
    rows = [(kind, counts[changes, True], counts[changes, False]) for changes, kind in enumerate(kinds)]
    return [row for row in rows if row[1] + row[2]]


def confusion(parsed: Iterable[ParsedCaption]) -> dict[str, Counter[str]]:
    """True change type -> predicted type -> pairs, over pairs of one change and distractors."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for caption in parsed:
        if len(caption.pair.change_types) == 1:
            counts[caption.pair.change_types[0]][caption.predicted_type] += 1
    return counts


def confusion_table(parsed: Iterable[ParsedCaption]) -> dict[str, Any]:
    """Columns, and per true type a row of (count, fraction of the row, on the diagonal)."""
    counts = confusion(parsed)
    columns = sorted({predicted for row in counts.values() for predicted in row} | counts.keys(), key=type_order)
    rows = []
    for true in sorted(counts, key=type_order):
        row = counts[true]
        rows.append((true, [(row[name], row[name] / row.total(), name == true) for name in columns]))
    return {"columns": columns, "rows": rows}


def charts(curves: Path) -> list[dict[str, Any]]:
    """Loss, learning rates and CIDEr of validation over training steps, from train's curves.csv."""
    with curves.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))

    def column(name: str, factor: float = 1.0) -> list[tuple[float, float]]:
        return [(float(row["step"]), factor * float(row[name])) for row in rows if row.get(name)]

    def columns(prefix: str) -> list[str]:
        return [name for name in (rows[0] if rows else ()) if name.startswith(prefix)]

    loss = column("loss")
    parts = columns("val_loss_")
    rates = zip(columns("lr_"), cycle(STYLES))
    lines_of_loss = [
        Line("each step", loss, "faint"),
        Line("training, running mean", smooth(loss), "main"),
        Line("validation", column("val_loss"), "second", dots=True),
    ]
    if len(parts) > 1:  # of one dataset the line is that of val_loss
        lines_of_loss += [
            Line(f"validation, {name.removeprefix('val_loss_')}", column(name), style, dots=True)
            for name, style in zip(parts, cycle(STYLES[2:]))
        ]
    lines_of_rates = [Line(name, column(name), style) for name, style in rates]
    cider = [Line("CIDEr", column("val_cider", 100), "second", dots=True)]
    drawn = [
        figure("Loss", "per supervised token and training step, log scale", lines_of_loss, log=True),
        figure("Learning rate", "per training step", lines_of_rates),
        figure("CIDEr of validation pairs", "times 100, at the checkpoints that were captioned", cider),
    ]
    return [drawing for drawing in drawn if drawing["svg"]]


def figure(title: str, note: str, lines: list[Line], log: bool = False) -> dict[str, Any]:
    """A chart with what the template writes beside it; its `svg` is empty where there is nothing to draw."""
    drawn = [line for line in lines if line.points]
    return {"title": title, "note": note, "lines": drawn, "svg": chart(drawn, title, log)}


def make_gallery(
    evidence: Evidence, size: int, saliency: SaliencyMaps | None, image_rights: Mapping[str, ImageRights]
) -> list[dict[str, Any]]:
    """The sections of the gallery with their cards."""
    name_of_score = ranking_score(evidence.metrics) or ""
    ranking = {pair.id: float(evidence.pair_scores[pair.id].get(name_of_score) or 0.0) for pair in evidence.pairs}
    chosen = choose(evidence.pairs, ranking, evidence.parsed, size)
    shown = [(section, pair) for section, pairs in chosen.items() for pair in pairs]
    cards: dict[str, list[Card]] = {section: [] for section in chosen}
    for section, pair in progress(shown, "evaluate: report", unit="pair"):
        show = image_rights[pair.dataset].show
        cards[section].append(make_card(pair, evidence.parsed.get(pair.id), ranking[pair.id], saliency, show))
    return [
        {"name": section, "title": title, "note": note.format(score=name_of_score), "cards": cards[section]}
        for section, (title, note) in SECTIONS.items()
        if section in chosen
    ]


def published_tables(by_dataset: Mapping[str, Mapping[str, Value]]) -> list[dict[str, Any]]:
    """For each dataset that is a published benchmark: its rows, best CIDEr first, with this run's among them.

    A result that several papers print is shown once.
    """
    tables = []
    for dataset, scores in by_dataset.items():
        rows = published_rows(dataset)
        if rows:
            ours = {"method": "this run", "venue": "", "ours": True, "scores": in_papers_units(scores)}
            table = sorted([ours, *map(published_row, rows)], key=lambda row: -(row["scores"]["CIDEr"] or 0.0))
            tables.append({"dataset": dataset, "rows": table, "sources": sorted({row.source for row in rows})})
    return tables


def in_papers_units(scores: Mapping[str, Value]) -> dict[str, float | None]:
    values = {name: scores.get(name) for name in SCORES.values()}
    return {name: None if value is None else 100 * value for name, value in values.items()}


def published_row(row: PublishedRow) -> dict[str, Any]:
    return {"method": row.method, "venue": row.venue, "ours": False, "scores": row.scores}

"""report.html and its images: nothing fetched, equal bytes for equal inputs. The words and the looks are in the
templates."""

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from m3diff.datasets.spec import DatasetSpec, Protocol
from m3diff.records.files import write_atomic
from m3diff.scoring.grammar import ParsedCaption, type_order
from m3diff.scoring.metrics.metric import Metric, PairValue
from m3diff.scoring.protocols import ProtocolPairs
from m3diff.scoring.summary import EvaluateReport, ProtocolScores
from m3diff.stages.evaluate.report import tables
from m3diff.stages.evaluate.report.figures import STYLES, Line, SaliencyMaps, chart, smooth
from m3diff.stages.evaluate.report.gallery import RunPairs, as_script, gallery
from m3diff.stages.evaluate.report.images import ImageStore, rights_of

HERE = Path(__file__).parent
MB = 1_000_000


@dataclass(frozen=True)
class Evidence:
    """All that the report is drawn from."""

    metrics: Mapping[str, Metric]
    report: EvaluateReport
    protocols: list[ProtocolPairs]
    pair_scores: Mapping[str, Mapping[str, Mapping[str, PairValue]]]  # by protocol and pair id
    parsed: Mapping[str, ParsedCaption]  # by pair id
    specs: Mapping[str, DatasetSpec]  # by dataset
    saliency: Path | None
    curves: Path | None
    notes: Sequence[str] = ()  # on the predictions' text


def write_report(evidence: Evidence, out: Path, inside_mb: int) -> None:
    """Write `out`/report.html and the folder `out`/images, empty where the page holds its images itself.

    Args:
        inside_mb: MB of images that the page may hold; of more, all are files of the folder.

    Raises:
        DataError: an image is missing or changed since ingest.
    """
    images = out / "images"
    images.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "report.html", render(evidence, ImageStore(images, inside_mb * MB)))


def render(evidence: Evidence, store: ImageStore) -> str:
    """The page as text; its images are in `store`."""
    scores = evidence.report.protocols
    rights = {dataset: rights_of(spec) for dataset, spec in evidence.specs.items()}
    saliency = SaliencyMaps(evidence.saliency) if evidence.saliency else None
    all_columns, columns = table_columns(evidence.metrics, scores)
    run = RunPairs(
        "this run",
        {one.name: {pair.id: pair for pair in one.pairs} for one in evidence.protocols},
        evidence.pair_scores,
        evidence.parsed,
    )
    first = evidence.protocols[0]
    readable = scores[first.name].scores.get("change_type_accuracy") is not None
    parsed = [evidence.parsed[pair.id] for pair in first.pairs if readable and pair.id in evidence.parsed]
    return (
        templates()
        .get_template("report.html.j2")
        .render(
            report=evidence.report,
            datasets=list(dict.fromkeys(one.dataset for one in evidence.protocols)),
            first=scores[first.name],
            columns=columns,
            without_rare_words=any(of.groups.get("distractors", {}).get("CIDEr") == 0 for of in scores.values()),
            overview=tables.overview(scores, columns, evidence.notes),
            parts=protocol_parts(evidence, all_columns, columns),
            alarms=alarms(parsed),
            confusion=confusion_table(parsed),
            charts=charts(evidence.curves) if evidence.curves else [],
            gallery=gallery([run], evidence.metrics, rights, saliency, store),
            gallery_title="All pairs",
            gallery_note="Every test pair with what the model said of it. Open one to slide between its images.",
            image_rights=rights,
            images_inside=store.is_inside,
            has_saliency=bool(saliency),
            absent=absent_scores(scores),
            control_pairs=sum(pair.shuffled_prediction is not None for pair in first.pairs),
        )
    )


def templates(*folders: Path) -> Environment:
    """The templates of the report and of further folders, with what they write numbers and tables with."""
    loader = FileSystemLoader([*folders, HERE])
    known = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    known.filters |= {
        "times100": times100,
        "percent": percent,
        "cell": tables.in_papers_units,
        "as_latex": tables.as_latex,
        "as_csv": tables.as_csv,
        "as_link": as_link,
        "as_script": lambda data: Markup(as_script(data)),
    }
    return known


def as_link(text: str) -> str:
    """A link that saves the text."""
    return "data:text/plain;charset=utf-8," + quote(text)


def protocol_parts(evidence: Evidence, all_columns: list[str], columns: list[str]) -> list[dict[str, Any]]:
    """What the page says of each protocol; of a dataset's first, which papers print, all that there is."""
    first_of = {one.dataset: one.name for one in reversed(evidence.protocols)}
    parts = []
    for one in evidence.protocols:
        scores = evidence.report.protocols[one.name]
        part = {"name": one.name, "id": tables.plain(one.name), "rules": rules_of(one.protocol)}
        is_headline = one.name == first_of[one.dataset]
        published = tables.published_table(one.name, scores, tables.published_of(one, is_headline))
        known = {"is_headline": is_headline, "published": published, "several": None, "types": None}
        if is_headline:
            known |= headline_parts(one, scores, columns)
        parts.append(part | known | {"groups": tables.group_table(one.name, scores, all_columns)})
    return parts


def headline_parts(one: ProtocolPairs, scores: ProtocolScores, columns: list[str]) -> dict[str, Any]:
    types = sorted(scores.folder("by_type"), key=type_order)
    return {
        "several": scores.groups.get("multi_change"),
        "types": tables.type_table(one.name, scores, types, columns) if types else None,
    }


def rules_of(protocol: Protocol) -> str:
    """What a protocol scores, in words."""
    which = f"Pairs of {', '.join(protocol.change_types)} alone" if protocol.change_types else "Pairs"
    ids = "" if protocol.ids == ".*" else f" whose id matches {protocol.ids}"
    against = "all their references" if protocol.references == "all" else "their references joined to one text"
    cut = f", both cut after {protocol.max_words} words" if protocol.max_words else ""
    split_at = "the PTB tokenizer" if protocol.tokenizer == "ptb" else "white space alone"
    return f"{which}{ids}, against {against}{cut}; tokens by {split_at}."


def absent_scores(protocols: Mapping[str, ProtocolScores]) -> list[tuple[str, str]]:
    """Score and why it is absent; with the protocols where it is not so in all."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, scores in protocols.items():
        for score, reason in scores.absent.items():
            found[score, reason].append(name)
    return [
        (score if len(names) == len(protocols) else f"{score} of {', '.join(names)}", reason)
        for (score, reason), names in found.items()
    ]


def table_columns(
    metrics: Mapping[str, Metric], protocols: Mapping[str, ProtocolScores]
) -> tuple[list[str], list[str]]:
    """The scores of the wide tables, and those that stand for a metric each in tiles and narrow tables."""
    there = {name for of in protocols.values() for name, value in of.scores.items() if value is not None}
    shown = [m for m in metrics.values() if m.scores and (not m.optional or m.headline in there)]
    return [score for m in shown for score in m.scores], [m.headline for m in shown]


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
    """Loss, learning rates, what the module contributes and CIDEr of validation over training steps, from train's
    curves.csv."""
    with curves.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))

    def column(name: str, factor: float = 1.0) -> list[tuple[float, float]]:
        return [(float(row["step"]), factor * float(row[name])) for row in rows if row.get(name)]

    def columns(prefix: str) -> list[str]:
        return [name for name in (rows[0] if rows else ()) if name.startswith(prefix)]

    loss = column("loss")
    parts = columns("val_loss_")
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

    def each(prefix: str) -> list[Line]:
        return [Line(name, column(name), style) for name, style in zip(columns(prefix), cycle(STYLES))]

    cider = [Line("CIDEr", column("val_cider", 100), "second", dots=True)]
    drawn = [
        figure("Loss", "per supervised token and training step, log scale", lines_of_loss, log=True),
        figure("Learning rate", "per training step", each("lr_")),
        figure(
            "Update of the module", "RMS over that of the features, log scale", each("module_update_ratio"), log=True
        ),
        figure("Score of the module", "gate on each level's update, mean of a step", each("module_score")),
        figure("CIDEr of validation pairs", "times 100, at the checkpoints that were captioned", cider),
    ]
    return [drawing for drawing in drawn if drawing["svg"]]


def figure(title: str, note: str, lines: list[Line], log: bool = False) -> dict[str, Any]:
    """A chart with what the template writes beside it; its `svg` is empty where there is nothing to draw."""
    drawn = [line for line in lines if line.points]
    return {"title": title, "note": note, "lines": drawn, "svg": chart(drawn, title, log)}

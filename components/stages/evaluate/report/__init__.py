"""Tables and pages: evaluate's report.html with LaTeX and CSV of its tables, and what `compare` shares with it.

The gallery of a page has the captions of each pair with marks for right and wrong, references, scores and images. A
page shows one run, or two of which the second is compared with the first. Its images are inside it while they are few,
else files of the folder `images` beside it. Nothing is fetched, and equal inputs give equal bytes. The words and the
looks are in the templates.
"""

import base64
import csv
import hashlib
import io
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from m3diff.datasets.spec import DatasetSpec, check_licence
from m3diff.images.open import load_image
from m3diff.images.saliency import outlined
from m3diff.records.errors import DataError
from m3diff.records.files import write_atomic
from m3diff.records.machine import usable_cpus
from m3diff.records.progress import aligned, progress
from m3diff.scoring.bootstrap import Interval
from m3diff.scoring.grammar import UNREADABLE, Clause, ParsedCaption, type_order
from m3diff.scoring.metrics import BY_CHARACTERS, Metric, PairValue, Value
from m3diff.scoring.pairs import PUBLISHED_SCORES, EvalPair, ProtocolPairs, PublishedRow, published_of
from m3diff.scoring.run import EvaluateReport, ProtocolScores

MB = 1_000_000
MAX_PX = 384
BASE64 = 4 / 3  # bytes in the page to a byte of an image
PLAIN = ("double", "float", "int64", "int32", "bool")  # Arrow types of a column that is one number to a pair
GROUP_NAMES = {"change": "with a change", "multi_change": "with several changes", "distractors": "distractors"}
RIGHT = {"type right": "type_accuracy", "place right": "place_accuracy", "all right": "exact_accuracy"}
ABSENT = "–"
LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_"},
})  # fmt: skip


class Cell(NamedTuple):
    """A score of a table, in the units of papers; None is absent."""

    value: float | None
    interval: Interval | None = None
    best: bool = False  # among the rows that compare
    signed: bool = False  # a difference

    @property
    def text(self) -> str:
        return ABSENT if self.value is None else one_digit(self.value, self.signed)

    @property
    def bounds(self) -> str:
        """The interval as text: a dash between two positive bounds, else "to"."""
        if self.interval is None:
            return ""
        low, high = (one_digit(bound, self.signed) for bound in (self.interval.low, self.interval.high))
        return f"{low} to {high}" if self.signed else f"{low}–{high}"


def one_digit(value: float, signed: bool = False) -> str:
    """The value as papers print it; with its sign where that is asked for and it is not 0.0."""
    text = f"{value:+.1f}" if signed else f"{value:.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


class Row(NamedTuple):
    name: str
    labels: tuple[str, ...]  # what stands between the name and the scores
    cells: tuple[Cell, ...]
    marks: tuple[str, ...] = ()  # beside the name: "†", "*"; the table's notes say what they mean
    ours: bool = False


class Table(NamedTuple):
    """`columns` names the row's name, then its labels, then its cells."""

    name: str  # of the files that are saved
    columns: tuple[str, ...]
    rows: list[Row]
    notes: Sequence[str] = ()

    @property
    def labels(self) -> int:
        return len(self.rows[0].labels) if self.rows else 0

    @property
    def has_intervals(self) -> bool:
        return any(cell.interval for row in self.rows for cell in row.cells)


def in_papers_units(value: Value, interval: Interval | None = None, signed: bool = False) -> Cell:
    """A score, or the difference of two, times 100, with its interval."""
    if value is None:
        return Cell(None)
    scaled = None if interval is None else Interval(low=100 * interval.low, high=100 * interval.high)
    return Cell(100 * value, scaled, signed=signed)


def row_of(name: str, scores: ProtocolScores, columns: Iterable[str]) -> Row:
    """All pairs of a protocol: how many are scored, beside how many papers score, and scores with their intervals."""
    papers = "" if scores.published_pairs is None else f" of {scores.published_pairs:,}"
    found = tuple(in_papers_units(scores.scores.get(score), scores.intervals.get(score)) for score in columns)
    return Row(name, (f"{scores.pairs:,}{papers}",), found, ("*",) if scores.is_partial else ())


def partial_note(scores: Iterable[ProtocolScores]) -> list[str]:
    note = "* Fewer pairs than papers score: not comparable with published figures."
    return [note] if any(one.is_partial for one in scores) else []


def overview(protocols: Mapping[str, ProtocolScores], columns: Sequence[str], notes: Sequence[str] = ()) -> Table:
    rows = [row_of(name, of, columns) for name, of in protocols.items()]
    return Table("scores", ("Protocol", "n", *columns), rows, [*partial_note(protocols.values()), *notes])


def group_rows(scores: ProtocolScores, titles: Mapping[str, str], columns: Sequence[str]) -> Iterator[Row]:
    """A row to each of the groups, by its title, that has pairs."""
    for name, title in titles.items():
        if (values := scores.groups.get(name)) and values["pairs"]:
            cells = tuple(in_papers_units(values.get(score)) for score in columns)
            yield Row(title, (f"{values['pairs']:,}",), cells)


def group_table(protocol: str, scores: ProtocolScores, columns: Sequence[str]) -> Table:
    """All pairs of a protocol, and its groups that have pairs, but for those of one change type."""
    rows = [row_of("all", scores, columns), *group_rows(scores, GROUP_NAMES, columns)]
    return Table(f"{plain(protocol)}-groups", ("Pairs", "n", *columns), rows, partial_note([scores]))


def type_table(protocol: str, scores: ProtocolScores, types: Sequence[str], columns: Sequence[str]) -> Table:
    """Pairs of exactly one change, by its type; how many were named right where a grammar reads captions."""
    groups = scores.folder("by_type").values()
    read = {title: name for title, name in RIGHT.items() if any(of.get(name) is not None for of in groups)}
    rows = group_rows(scores, {f"by_type/{name}": name for name in types}, [*read.values(), *columns])
    return Table(f"{plain(protocol)}-types", ("Type", "n", *read, *columns), list(rows))


def published_table(
    protocol: str, scores: ProtocolScores, known: Sequence[PublishedRow], headline: str
) -> Table | None:
    """This run among the published rows of a protocol, the best headline score first; None where nothing is published.

    The best of each column is marked. A run over fewer pairs than papers score does not compare.
    """
    if not known:
        return None
    papers = "" if scores.published_pairs is None else f"{scores.published_pairs:,}"
    rows = [
        Row(row.method, (row.venue, papers), tuple(map(Cell, row.scores.values())), ("†",) * bool(row.chosen_on_test))
        for row in known
    ]
    ours = row_of("this run", scores, PUBLISHED_SCORES)._replace(labels=("", f"{scores.pairs:,}"), ours=True)
    by = PUBLISHED_SCORES.index(headline)
    ranked = mark_best(sorted([ours, *rows], key=lambda row: -(row.cells[by].value or 0.0)))
    evidence = sorted({f"{row.method}: {row.chosen_on_test}" for row in known if row.chosen_on_test})
    notes = [f"† Epoch chosen on the test split. {'; '.join(evidence)}."] if evidence else []
    sources = "; ".join(sorted({row.source for row in known}))
    notes += [*partial_note([scores]), f"Published figures as given by {sources}."]
    return Table(f"{plain(protocol)}-published", ("Method", "venue", "n", *PUBLISHED_SCORES), ranked, notes)


def mark_best(rows: list[Row]) -> list[Row]:
    """The rows with the best value of each column marked, as printed; rows marked * do not count.

    Equal values have equal marks; where all that compare are equal, or one alone has a value, none is marked.
    """
    best = []
    for column in zip(*([cell.text for cell in row.cells] for row in rows if "*" not in row.marks), strict=True):
        values = {float(text) for text in column if text != ABSENT}
        best.append(f"{max(values):.1f}" if len(values) > 1 else "")
    marked = []
    for row in rows:
        if "*" not in row.marks:
            found = zip(row.cells, best, strict=True)
            row = row._replace(cells=tuple(cell._replace(best=cell.text == text) for cell, text in found))
        marked.append(row)
    return marked


def plain(name: str) -> str:
    """A protocol's name as part of a file's."""
    return name.replace("/", "-")


def text_lines(table: Table) -> list[str]:
    """A table as lines of a terminal."""
    rows = []
    for row in table.rows:
        cells = (f"{cell.text}  {cell.bounds}".strip() for cell in row.cells)
        rows.append((row.name + "".join(row.marks), *row.labels, *cells))
    return aligned([table.columns, *rows])


def as_csv(table: Table) -> str:
    """Scores times 100 with two digits; the bounds of those with an interval, and a row's marks, in columns of their
    own."""
    rows = []
    for row in table.rows:
        values = dict(zip(table.columns, (row.name, *row.labels), strict=False)) | {"marks": "".join(row.marks)}
        for name, cell in zip(table.columns[1 + table.labels :], row.cells, strict=True):
            bounds = (cell.interval.low, cell.interval.high) if cell.interval else ()
            numbers = zip((name, f"{name} low", f"{name} high"), (cell.value, *bounds), strict=False)
            values |= {column: "" if number is None else f"{number:.2f}" for column, number in numbers}
        rows.append(values)
    text = io.StringIO()
    writer = csv.DictWriter(text, dict.fromkeys(chain.from_iterable(rows)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_latex(table: Table) -> str:
    """A tabular of booktabs: the best bold, the intervals small behind their scores."""
    columns = "l" * (1 + table.labels) + "r" * (len(table.columns) - 1 - table.labels)
    marks = {"†": r"$^\dagger$", "*": "$^*$"}
    body = [[name.translate(LATEX) for name in table.columns]]
    for row in table.rows:
        name, *labels = (text.translate(LATEX) for text in (row.name, *row.labels))
        line = [name + "".join(marks[mark] for mark in row.marks), *labels]
        for cell in row.cells:
            text = rf"\textbf{{{cell.text}}}" if cell.best else cell.text
            low_high = cell.interval and rf" {{\scriptsize [{cell.interval.low:.1f}, {cell.interval.high:.1f}]}}"
            line.append("--" if cell.value is None else text + (low_high or ""))
        body.append(line)
    head, *lines = [" & ".join(line) + r" \\" for line in body]
    begin = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule"]
    return "\n".join([*begin, *lines, r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in table.notes)]) + "\n"


def templates(*folders: Path) -> Environment:
    """The templates of the report and of further folders, with what they write numbers and tables with."""
    loader = FileSystemLoader([*folders, Path(__file__).parent])
    known = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    known.filters |= {
        "times100": lambda value: in_papers_units(value).text,
        "percent": lambda value: ABSENT if value is None else f"{100 * value:.1f}%",
        "cell": in_papers_units,
        "as_latex": as_latex,
        "as_csv": as_csv,
        "as_link": lambda text: "data:text/plain;charset=utf-8," + quote(text),  # saves the text
        "as_script": as_script,
    }
    return known


@dataclass(frozen=True)
class Evidence:
    metrics: Mapping[str, Metric]
    report: EvaluateReport
    protocols: list[ProtocolPairs]
    pair_scores: Mapping[str, Mapping[str, Mapping[str, PairValue]]]  # by protocol and pair id
    parsed: Mapping[str, ParsedCaption]  # by pair id
    specs: Mapping[str, DatasetSpec]  # by dataset
    saliency: Path  # where there is one
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
    scores = evidence.report.protocols
    rights = {dataset: rights_of(spec) for dataset, spec in evidence.specs.items()}
    saliency = read_saliency(evidence.saliency) if evidence.saliency.is_file() else {}
    all_columns, columns = table_columns(evidence.metrics, scores)
    pairs = {one.name: {pair.id: pair for pair in one.pairs} for one in evidence.protocols}
    run = RunPairs("this run", pairs, evidence.pair_scores, evidence.parsed)
    first = evidence.protocols[0]
    readable = scores[first.name].scores.get("change_type_accuracy") is not None
    parsed = [evidence.parsed[pair.id] for pair in first.pairs if readable and pair.id in evidence.parsed]
    page = templates().get_template("report.html.j2")
    text = page.render(
        report=evidence.report,
        datasets=list(dict.fromkeys(one.dataset for one in evidence.protocols)),
        first=scores[first.name],
        columns=columns,
        without_rare_words=any(of.groups.get("distractors", {}).get("CIDEr") == 0 for of in scores.values()),
        overview=overview(scores, columns, evidence.notes),
        parts=protocol_parts(evidence, all_columns, columns),
        confusion=confusion_table(parsed),
        gallery=gallery([run], evidence.metrics, rights, saliency, images, inside_mb * MB),
        gallery_title="All pairs",
        gallery_note="Every test pair with what the model said of it. Open one to slide between its images.",
        image_rights=rights,
        has_saliency=bool(saliency),
        absent=dict.fromkeys(absent for of in scores.values() for absent in of.absent.items()),
        control_pairs=sum(pair.shuffled_prediction is not None for pair in first.pairs),
    )
    write_atomic(out / "report.html", text)


def protocol_parts(evidence: Evidence, all_columns: list[str], columns: list[str]) -> list[dict[str, Any]]:
    """Report sections per protocol. The first protocol of a dataset, the one papers report, gets the full section."""
    first_of = {one.dataset: one.name for one in reversed(evidence.protocols)}
    parts = []
    for one in evidence.protocols:
        scores = evidence.report.protocols[one.name]
        is_headline = one.name == first_of[one.dataset]
        types = sorted(scores.folder("by_type"), key=type_order) if is_headline else []
        known = published_of(one.dataset, one.protocol, is_headline)
        parts.append(
            {
                "name": one.name,
                "id": plain(one.name),
                "protocol": one.protocol,
                "counts_characters": one.counts_characters,
                "is_headline": is_headline,
                "published": None
                if one.counts_characters
                else published_table(one.name, scores, known, one.protocol.headline),
                "several": scores.groups.get("multi_change") if is_headline else None,
                "types": type_table(one.name, scores, types, columns) if types else None,
                "groups": group_table(one.name, scores, all_columns),
            }
        )
    return parts


def table_columns(
    metrics: Mapping[str, Metric], protocols: Mapping[str, ProtocolScores]
) -> tuple[list[str], list[str]]:
    """The scores of the wide tables, and those that stand for a metric each in tiles and narrow tables."""
    there = {name for of in protocols.values() for name, value in of.scores.items() if value is not None}
    # of a metric's scores of words and of characters, those that any protocol has
    hidden = {
        name
        for name, metric in metrics.items()
        if f"{metric.headline}{BY_CHARACTERS}" in there and metric.headline not in there
    }
    shown = [
        metric
        for name, metric in metrics.items()
        if metric.scores and name not in hidden and (not metric.optional or metric.headline in there)
    ]
    return [score for m in shown for score in m.scores], [m.headline for m in shown]


def confusion_table(parsed: Iterable[ParsedCaption]) -> dict[str, Any]:
    """The counts of predicted types by true type, of pairs of one change and distractors; and the types in order."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for caption in parsed:
        if len(caption.pair.change_types) == 1:
            counts[caption.pair.change_types[0]][caption.predicted_type] += 1
    columns = {predicted for row in counts.values() for predicted in row} | counts.keys()
    rows = {true: counts[true] for true in sorted(counts, key=type_order)}
    return {"columns": sorted(columns, key=type_order), "rows": rows}


class ImageRights(NamedTuple):
    """Permission of a dataset's licence to show its images, and its words; None: no condition."""

    show: bool
    note: str | None


def rights_of(spec: DatasetSpec) -> ImageRights:
    try:
        return ImageRights(True, check_licence(spec, "show"))
    except DataError:
        return ImageRights(False, f"{spec.licence.name}: {spec.licence.show.reason}")


def link_images(images: Iterable[bytes], folder: Path, limit: int) -> dict[bytes, str]:
    """The page's link to each WebP image: the image itself while all have at most `limit` bytes in the page, else a
    file of `folder`, from which those of an earlier page are removed."""
    for old in folder.glob("*.webp"):
        old.unlink()
    distinct = set(images)
    if BASE64 * sum(map(len, distinct)) <= limit:
        return {image: "data:image/webp;base64," + base64.b64encode(image).decode() for image in distinct}
    folder.mkdir(parents=True, exist_ok=True)
    links = {}
    for image in distinct:
        name = f"{hashlib.sha256(image).hexdigest()[:24]}.webp"
        (folder / name).write_bytes(image)
        links[image] = f"{folder.name}/{name}"
    return links


def load_small(path: Path, sha256: bytes) -> Image.Image:
    """The image upright, in RGB, its longer side at most `MAX_PX`.

    Raises:
        ImageError: the file is missing, is no image, or is not the one of this digest.
    """
    image = load_image(path, sha256)
    image.thumbnail((MAX_PX, MAX_PX), Image.Resampling.LANCZOS)
    return image


def as_webp(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=88, method=4)
    return buffer.getvalue()


def read_saliency(path: Path) -> dict[str, np.ndarray]:
    """Maps of where the model looks for the difference, by pair id, [rows, columns], each of sum 1."""
    with np.load(path) as arrays:
        return {str(i): grid for i, grid in zip(arrays["ids"], arrays["maps"].astype(np.float32), strict=True)}


def draw_images(
    pairs: Iterable[EvalPair], rights: Mapping[str, ImageRights], saliency: Mapping[str, np.ndarray]
) -> Iterator[list[bytes | None] | None]:
    """WebP files of each pair in order, several drawn at once: before, after, and the after-image with the outlines of
    its saliency map, None where it has none; None where the licence does not let them be shown.

    Raises:
        DataError: an image is missing or changed since ingest.
    """

    def draw(pair: EvalPair) -> list[bytes | None] | None:
        if not rights[pair.dataset].show:
            return None
        after = load_small(pair.after, pair.after_sha256)
        before = load_small(pair.before, pair.before_sha256)
        grid = saliency.get(pair.id)
        return [as_webp(before), as_webp(after), None if grid is None else as_webp(outlined(after, grid))]

    with ThreadPoolExecutor(usable_cpus()) as pool:
        yield from pool.map(draw, pairs)


class RunPairs(NamedTuple):
    name: str
    pairs: Mapping[str, Mapping[str, EvalPair]]  # protocol -> pair id -> pair as the protocol scored it
    scores: Mapping[str, Mapping[str, Mapping[str, PairValue]]]  # protocol -> pair id -> column -> score
    parsed: Mapping[str, ParsedCaption]  # by pair id


def gallery(
    runs: Sequence[RunPairs],
    metrics: Mapping[str, Metric],
    rights: Mapping[str, ImageRights],
    saliency: Mapping[str, np.ndarray],
    folder: Path,
    limit: int,
) -> dict[str, Any]:
    """All pairs of the first run, as the page's script reads them; every run has the same pairs.

    Args:
        folder, limit: as of `link_images`.

    Raises:
        DataError: an image is missing or changed since ingest.
    """
    plain = [name for metric in metrics.values() for name, arrow in metric.columns.items() if arrow in PLAIN]
    headlines = {metric.headline for metric in metrics.values()}
    columns = sorted(plain, key=lambda name: name not in headlines)
    protocols = list(runs[0].pairs)
    pairs = {pair.id: pair for of in reversed(protocols) for pair in runs[0].pairs[of].values()}
    ordered = [pairs[i] for i in dict.fromkeys(i for of in protocols for i in runs[0].pairs[of])]
    drawn = list(progress(draw_images(ordered, rights, saliency), "evaluate: images", len(ordered), "pair"))
    links = link_images((image for images in drawn for image in images or () if image), folder, limit)
    read = sum(not caption.unreadable for caption in runs[-1].parsed.values())
    return {
        "runs": [run.name for run in runs],
        "columns": columns,
        "protocols": protocols,
        "datasets": list(dict.fromkeys(pair.dataset for pair in ordered)),
        "types": sorted({kind for pair in ordered for kind in pair.change_types}, key=type_order),
        "graded": 2 * read > len(ordered),  # right and wrong can be told of most
        "saliency": bool(saliency),
        "pairs": [
            entry(pair, runs, columns, protocols)
            | {"images": None if images is None else [links[image] if image else None for image in images]}
            for pair, images in zip(ordered, drawn, strict=True)
        ],
    }


def entry(pair: EvalPair, runs: Sequence[RunPairs], columns: list[str], protocols: list[str]) -> dict[str, Any]:
    of_runs = [next(run.pairs[of][pair.id] for of in protocols if pair.id in run.pairs[of]) for run in runs]

    def number(value: PairValue) -> float | None:
        return round(float(value), 5) if isinstance(value, int | float) else None

    return {
        "id": pair.id,
        "dataset": pair.dataset,
        "types": pair.change_types,
        "captions": [caption_of(mine, run.parsed.get(pair.id)) for mine, run in zip(of_runs, runs, strict=True)],
        "references": most_similar_first(of_runs[-1].prediction, pair.references),
        "scores": {
            str(place): [[number(run.scores[of][pair.id].get(column)) for column in columns] for run in runs]
            for place, of in enumerate(protocols)
            if pair.id in runs[0].pairs[of]
        },
    }


def caption_of(pair: EvalPair, parsed: ParsedCaption | None) -> dict[str, Any]:
    """The prediction clause by clause, each with its marks, no marks where no grammar reads it; how many changes it
    does not name; and its grade: 2 all right, 1 the types, 0."""
    if parsed is None:
        return {"clauses": [(pair.prediction, [])], "missed": 0, "grade": None}
    if parsed.says_no_change:
        clauses = [(pair.prediction, [("nothing changed", pair.is_distractor)])]
    else:
        read = zip(parsed.parts, parsed.predicted_clauses, strict=True)
        clauses = [(text, marks(parsed, clause)) for text, clause in read]
    missed = 0 if pair.is_distractor else parsed.true_types.total() - parsed.changes_found.type
    grade = 2 if parsed.right.exact else 1 if parsed.right.type else 0
    return {"clauses": clauses, "missed": missed, "grade": grade}


def marks(parsed: ParsedCaption, clause: Clause) -> list[tuple[str, bool]]:
    """The parts of a clause, each with its verdict."""
    if clause.type == UNREADABLE:
        return [("not understood", False)]
    known, named, placed = parsed.agrees(clause)
    parts = (
        ("object", clause.object, named),
        ("place", clause.place, placed),
        ("change", clause.before or clause.after, parsed.says_change(clause)),
    )
    return [(clause.type, known), *((part, right) for part, said, right in parts if known and said)]


def most_similar_first(prediction: str, references: Iterable[str]) -> list[str]:
    """References, the one that shares most words with the prediction first."""
    words = set(prediction.casefold().split())

    def similarity(reference: str) -> float:
        theirs = set(reference.casefold().split())
        return len(words & theirs) / (len(words | theirs) or 1)

    return sorted(references, key=similarity, reverse=True)


def as_script(data: Any) -> Markup:
    """JSON that may stand inside a script element: no text of the data can end it."""
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))

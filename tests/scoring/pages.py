"""What a report is drawn from, with scores that tests choose, and what stands on a page."""

import json
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec
from m3diff.scoring.bootstrap import Interval
from m3diff.scoring.metrics import ALL, METRICS, MetricScores
from m3diff.scoring.pairs import EvalPair
from m3diff.scoring.protocols import ProtocolPairs, select
from m3diff.scoring.run import merge, summarise
from m3diff.stages.evaluate.report import Evidence, render
from m3diff.stages.evaluate.report.gallery import ImageStore
from m3diff.stages.evaluate.stage import score_table
from tests.scoring import bench

SHOWN = ("CIDEr", "METEOR", "ROUGE-L", "BLEU", "SPICE", "change_accuracy")


def evidence(
    root: Path,
    pairs: list[EvalPair],
    specs: Mapping[str, DatasetSpec] | None = None,
    with_grammar: bool = True,
    intervals: Mapping[str, Interval] | None = None,
    **scores: float | None,
) -> Evidence:
    """Every caption score 0.5 or as given, CIDEr of a pair its number, the accuracies as they are."""
    datasets = dict.fromkeys(pair.dataset for pair in pairs)
    specs = specs or dict.fromkeys(datasets, DATASETS["pairs"])
    metrics = {name: METRICS[name] for name in SHOWN}
    protocols = select(pairs, specs)
    parsed = bench.parse(pairs) if with_grammar else {}
    numbers = {pair.id: float(number) for number, pair in enumerate(pairs)}
    found = {one.name: merge(metrics, one.groups, fixed(one, numbers, parsed, scores)) for one in protocols}
    return Evidence(
        metrics=metrics,
        report=summarise(len(pairs), len(pairs), protocols, found, dict.fromkeys(found, intervals or {})),
        protocols=protocols,
        pair_scores={name: of.pairs for name, of in found.items()},
        parsed=parsed,
        specs=specs,
        saliency=root / "predictions" / "saliency.npz",
        curves=root / "model" / "curves.csv",
    )


def fixed(
    one: ProtocolPairs, numbers: Mapping[str, float], parsed: Mapping[str, Any], scores: Mapping[str, float | None]
) -> dict[str, MetricScores]:
    found = {}
    for name in SHOWN[:4]:
        values = dict.fromkeys(METRICS[name].scores, 0.5) | {
            score: value for score, value in scores.items() if score in METRICS[name].scores
        }
        found[name] = MetricScores(dict.fromkeys(one.groups, values), {})
    found["CIDEr"] = MetricScores(
        {**found["CIDEr"].groups, ALL: {**found["CIDEr"].groups[ALL], "CIDEr_shuffled": 0.05}},
        {pair.id: {"CIDEr": numbers[pair.id]} for pair in one.pairs},
    )
    found["SPICE"] = MetricScores({}, {}, {"SPICE": "its jars are not there"})
    tools = bench.tools(parsed=parsed)
    found["change_accuracy"] = METRICS["change_accuracy"].compute(one.pairs, one.groups, tools)
    return found


def draw(drawn_from: Evidence, folder: Path, limit: int = 10_000_000) -> str:
    """The page, whose images stand inside it unless they have more than `limit` bytes."""
    return render(drawn_from, ImageStore(folder / "images", limit))


def write_scores(known: Evidence, folder: Path) -> Path:
    """The folder with the scores.parquet of this evidence."""
    folder.mkdir(parents=True)
    scores = {name: MetricScores({}, pairs) for name, pairs in known.pair_scores.items()}
    pq.write_table(score_table(known.metrics, known.protocols, scores), folder / "scores.parquet")
    return folder


class Tags(HTMLParser):
    """Checks that tags nest, and collects what a page would fetch."""

    VOID = {"meta", "link", "img", "line", "circle", "path", "br", "input"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.names: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another tag"


def text_of(page: str) -> str:
    body = re.sub(r"<(style|script|pre)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def gallery_of(page: str) -> dict[str, Any]:
    """What the page's script reads."""
    (data,) = re.findall(r'<script type="application/json" id="pairs">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(data)


def table(page: str, after: str) -> list[list[str]]:
    """The cells of the first table behind the element of that id, as text."""
    body = page[page.index(f'id="{after}"') :]
    rows = body[: body.index("</table>")].split("<tr")[1:]
    return [[re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]

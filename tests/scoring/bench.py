"""A benchmark of six pairs with a grammar of three patterns: as objects, as files, and as a page with chosen scores."""

import gzip
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from m3diff.datasets import DATASETS
from m3diff.records.sample import ImageRef
from m3diff.report.page import PageContent, write_report
from m3diff.scoring.grammar import Grammar, ParsedCaption, parse_predictions
from m3diff.scoring.metrics import METRICS, MetricInputs, MetricScores, Tokens
from m3diff.scoring.pairs import ALL_PAIRS, EvalPair
from m3diff.scoring.protocols import select_protocols
from m3diff.scoring.results import EvaluateReport, score_table, summarise
from m3diff.scoring.run import merge_scores
from m3diff.settings.compute import Compute
from m3diff.settings.load import load_params
from m3diff.stages.evaluate.params import Evaluate
from m3diff.stages.evaluate.stage import evaluate
from tests.layouts import list_images, write_record_table
from tests.toy import REPOSITORY

GRAMMAR = {
    "clause_separator": ", and ",
    "no_change": ["nothing changed", "no change was made"],
    "clauses": [
        {"type": "color", "pattern": r"the (?P<object>\w+ \w+) (?P<place>at the \w+) (?:turned|became) (?P<after>\w+)"},
        {"type": "removal", "pattern": r"the (?P<object>\w+ \w+) (?P<place>at the \w+) (?:was removed|is gone)"},
        {"type": "illumination", "pattern": r"the lamp went out"},
    ],
}

RECORDS: list[tuple[str, list[str], list[str]]] = [
    ("0", ["color"], ["the red cube at the left turned blue", "the red cube at the left became blue"]),
    ("1", ["removal"], ["the green ball at the top was removed", "the green ball at the top is gone"]),
    ("2", ["illumination"], ["the lamp went out"]),
    ("3", ["color", "removal"], ["the red ball at the top turned green, and the blue cube at the left was removed"]),
    ("4", ["none"], ["nothing changed", "no change was made"]),
    ("5", ["none"], ["nothing changed", "no change was made"]),
]

PREDICTIONS = {
    "toy/0": "the red cube at the left became blue",  # all right
    "toy/1": "the green ball at the left was removed",  # wrong place
    "toy/2": "nothing changed",  # missed
    "toy/3": "the red ball at the top turned green, and the lamp went out",  # one of two
    "toy/4": "nothing changed",  # rightly
    "toy/5": "the red cube at the left turned blue",  # false alarm
}

PUBLISHED = {"BLEU-1": 0.5794, "BLEU-2": 0.4044, "BLEU-3": 0.2785, "BLEU-4": 0.1908}
PUBLISHED |= {"METEOR": 0.1953, "ROUGE-L": 0.3963, "CIDEr": 0.5998}
"""Scores of the 1,000 captions that coco-caption brings with it."""

SHOWN = ("CIDEr", "METEOR", "ROUGE-L", "BLEU", "SPICE", "change_accuracy")
ALL_METRICS = tuple(name for name in METRICS if name != "judge")


REAL = REPOSITORY.parent / "shared" / "real"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the published annotations are not beside the project")


class Folders(NamedTuple):
    """What the stage reads, in the order of its arguments."""

    records: Path
    clean: Path
    predictions: Path


def grammar() -> Grammar:
    return Grammar(GRAMMAR)


def parse(pairs: list[EvalPair]) -> dict[str, ParsedCaption]:
    return parse_predictions({"toy": grammar()}, pairs)


def digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest() if path.is_file() else bytes(32)


def pair(prediction, references, change_types, name="0", folder=Path()) -> EvalPair:
    paths = [folder / f"{name}_{side}.png" for side in ("before", "after")]
    images = tuple(ImageRef(str(path), digest(path)) for path in paths)
    return EvalPair(
        id=f"toy/{name}",
        dataset="toy",
        images=images,
        references=references,
        change_types=change_types,
        prediction=prediction,
    )


def pairs(folder: Path = Path()) -> list[EvalPair]:
    return [pair(PREDICTIONS[f"toy/{name}"], texts, types, name, folder) for name, types, texts in RECORDS]


def metric_inputs(references=None, predictions=None, shuffled=None, parsed=None, answers=None) -> MetricInputs:
    tokens = Tokens(dict(references or {}), dict(predictions or {}), None if shuffled is None else dict(shuffled))
    return MetricInputs(tokens, answers or {}, parsed or {})


def folders_in(root: Path) -> Folders:
    return Folders(*(root / name for name in Folders._fields))


def write(root: Path, reader: str = "pairs") -> Folders:
    folders = folders_in(root)
    for folder in (*folders, folders.records / "toy"):
        folder.mkdir(parents=True)
    rows = [record(root, name, types, texts) for name, types, texts in RECORDS]
    train = record(root, "6", ["color"], ["the red cube at the left turned blue"]) | {"split": "train"}
    write_record_table(folders.clean / "records", [*rows, train])
    write_json(folders.records / "toy.json", {"stage": "ingest", "dataset": "toy", "reader": reader})
    write_json(folders.records / "toy" / "grammar.json", GRAMMAR)
    write_json(folders.predictions / "predictions.json", as_file(PREDICTIONS))
    shifted = dict(zip(PREDICTIONS, [*list(PREDICTIONS.values())[1:], "nothing changed"], strict=True))
    write_json(folders.predictions / "predictions_shuffled.json", as_file(shifted))
    maps = np.random.default_rng(0).random((len(PREDICTIONS), 4, 4)).astype(np.float16)
    np.savez(folders.predictions / "saliency.npz", ids=np.array(list(PREDICTIONS)), maps=maps)
    return folders


def record(root: Path, name: str, change_types: list[str], references: list[str]) -> dict[str, Any]:
    blues = {"before": 120, "after": 220}
    images = [paint(root / f"{name}_{side}.png", (40 * int(name), 90, blue)) for side, blue in blues.items()]
    fields = {"id": f"toy/{name}", "dataset": "toy", "split": "test", "scene": f"toy/{name}", "source": "bench.py"}
    texts = {"references": references, "change_types": change_types}
    return fields | texts | {"images": list_images(*images)}


def paint(path: Path, colour: tuple[int, int, int]) -> Path:
    Image.new("RGB", (24, 16), colour).save(path)
    return path


def as_file(captions: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"image_id": i, "caption": caption} for i, caption in captions.items()]


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def config(**changes: Any) -> Evaluate:
    # `allow_fewer_pairs` is left out, so that the tests of incomplete protocols also test its default
    return Evaluate(**({"metrics": ALL_METRICS, "gallery": 6, "judge": None} | changes))


def compute(**changes: Any) -> Compute:
    settings = load_params(REPOSITORY / "profiles/embedded.yaml").compute.model_dump()
    settings |= dict.fromkeys(("workers", "max_failures", "val_pairs", "caption_val_pairs"), 0)
    return Compute(**(settings | {"micro_batch": 1, "scorer_timeout_s": 120} | changes))


def run(folders: Folders, out: Path, **changes: Any) -> EvaluateReport:
    return evaluate(config(**changes), compute(), *folders, out)


def small_table(folder: Path, monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> Path:
    """A copy of METEOR's package whose table of paraphrases has these entries alone: (in a reference, predicted)."""
    from pycocoevalcap.meteor import meteor

    package = folder / "pycocoevalcap" / "meteor"
    (package / "data").mkdir(parents=True)
    for name in ("meteor.py", meteor.METEOR_JAR):
        (package / name).symlink_to(Path(meteor.__file__).parent / name)
    with gzip.open(package / "data" / "paraphrase-en.gz", "wt", encoding="utf-8") as file:
        file.writelines(f"0.5\n{reference}\n{predicted}\n" for reference, predicted in entries)
    monkeypatch.setattr(meteor, "__file__", str(package / "meteor.py"))
    return package


def fake_java(folder: Path, monkeypatch: pytest.MonkeyPatch, when: str, shell_line: str) -> Path:
    """A `java` first on PATH that runs `shell_line` if its arguments hold `when`, else the real Java."""
    folder.mkdir()
    script = folder / "java"
    script.write_text(f'#!/bin/sh\ncase "$*" in *{when}*) {shell_line};; esac\nexec {shutil.which("java")} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return script


def page_content(root, pairs, specs=None, with_grammar=True, intervals=None, **scores) -> PageContent:
    """Every caption score 0.5 or as given, CIDEr of a pair its number, the accuracies as they are."""
    datasets = dict.fromkeys(pair.dataset for pair in pairs)
    specs = specs or dict.fromkeys(datasets, DATASETS["pairs"])
    metrics = {name: METRICS[name] for name in SHOWN}
    protocols = select_protocols(pairs, specs)
    parsed = parse(pairs) if with_grammar else {}
    numbers = {pair.id: float(number) for number, pair in enumerate(pairs)}
    scores_by_protocol = {
        protocol.name: merge_scores(metrics, protocol.groups, fixed_scores(protocol, numbers, parsed, scores))
        for protocol in protocols
    }
    return PageContent(
        metrics=metrics,
        report=summarise(
            len(pairs), len(pairs), protocols, scores_by_protocol, dict.fromkeys(scores_by_protocol, intervals or {})
        ),
        protocols=protocols,
        pair_scores={name: protocol_scores.pairs for name, protocol_scores in scores_by_protocol.items()},
        parsed=parsed,
        specs=specs,
        saliency=root / "predictions" / "saliency.npz",
    )


def fixed_scores(protocol, numbers, parsed, scores) -> dict[str, MetricScores]:
    scores_by_metric = {}
    for name in SHOWN[:4]:
        values = dict.fromkeys(METRICS[name].scores, 0.5) | {
            score: value for score, value in scores.items() if score in METRICS[name].scores
        }
        scores_by_metric[name] = MetricScores(dict.fromkeys(protocol.groups, values), {})
    scores_by_metric["CIDEr"] = MetricScores(
        {
            **scores_by_metric["CIDEr"].groups,
            ALL_PAIRS: {**scores_by_metric["CIDEr"].groups[ALL_PAIRS], "CIDEr_shuffled": 0.05},
        },
        {pair.id: {"CIDEr": numbers[pair.id]} for pair in protocol.pairs},
    )
    scores_by_metric["SPICE"] = MetricScores({}, {}, {"SPICE": "its jars are not there"})
    scores_by_metric["change_accuracy"] = METRICS["change_accuracy"].compute(
        protocol.pairs, protocol.groups, metric_inputs(parsed=parsed)
    )
    return scores_by_metric


def draw(drawn_from: PageContent, folder: Path, embedded_mb: int = 10) -> str:
    """The page, whose images stand inside it unless they have more than `embedded_mb` MB."""
    write_report(drawn_from, folder, embedded_mb)
    return (folder / "report.html").read_text(encoding="utf-8")


def write_scores(shown: PageContent, folder: Path) -> Path:
    folder.mkdir(parents=True)
    scores = {name: MetricScores({}, pairs) for name, pairs in shown.pair_scores.items()}
    pq.write_table(score_table(shown.metrics, shown.protocols, scores), folder / "scores.parquet")
    return folder


def text_of(page: str) -> str:
    body = re.sub(r"<(style|script|pre)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def gallery_of(page: str) -> dict[str, Any]:
    (data,) = re.findall(r'<script type="application/json" id="pairs">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(data)


def table(page: str, after: str) -> list[list[str]]:
    """Return the cells of the first table behind the element with an id, or of the table with a label, as text."""
    element = re.search(rf'(?:id|aria-label)="{re.escape(after)}"', page)
    assert element is not None
    body = page[element.start() :]
    rows = body[: body.index("</table>")].split("<tr")[1:]
    return [[re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]

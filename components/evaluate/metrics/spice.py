"""SPICE (Anderson et al., ECCV 2016), pycocoevalcap's Java program and two CoreNLP jars."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from components.evaluate.metrics.metric import (
    Groups,
    Item,
    Metric,
    MetricScores,
    Program,
    Tools,
    mean_of,
    of_each_group,
)
from components.evaluate.metrics.scorer import ScorerFailed
from components.evaluate.pairs import EvalPair

JARS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")
REMEDY = (
    f"needs {JARS[0]} and {JARS[1]}, which nothing here downloads: take them from "
    "http://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip (384 MB) and name their folder in "
    "compute.spice_dir"
)


def program(of: Program) -> dict[Item, float | None]:
    """F of each item; None where neither side has a tuple.

    Raises:
        ScorerFailed: the jars are missing, or the program gave no result.
    """
    jars = [str(jar) for jar in find_jars(of.spice_dir)]
    worker = of.start("SPICE")
    items = of.items()
    worker.send({"items": items, "jars": jars})
    return dict(zip(items, worker.result(), strict=True))


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """A group's score is the mean F of those of its pairs that have one."""
    answers: Mapping[Item, float | None] = tools.answers()
    tokens = tools.tokens()
    values = {pair: answers[tokens.item(pair)] for pair in tokens.predictions}
    return MetricScores(
        of_each_group(groups, lambda ids: {"SPICE": mean([values[pair] for pair in ids])}),
        {pair: {"SPICE": value} for pair, value in values.items()},
    )


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that there are; None of none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def find_jars(spice_dir: Path | None) -> list[Path]:
    """The CoreNLP jars, absolute.

    Raises:
        ScorerFailed: no folder is named, or a jar is missing in it; the text says how to get them.
    """
    if spice_dir is None:
        raise ScorerFailed(REMEDY)
    jars = [(spice_dir / name).absolute() for name in JARS]
    if missing := [jar.name for jar in jars if not jar.is_file()]:
        raise ScorerFailed(f"{spice_dir}: has no {' and no '.join(missing)}; SPICE {REMEDY}")
    return jars


METRIC = Metric(
    compute,
    headline="SPICE",
    scores=("SPICE",),
    columns={"SPICE": "double"},
    resampled={"SPICE": mean_of("SPICE")},
    program=program,
    optional=True,
)

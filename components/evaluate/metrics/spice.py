"""SPICE (Anderson et al., ECCV 2016), pycocoevalcap's Java program and two CoreNLP jars."""

from pathlib import Path

from components.evaluate.metrics.metric import Groups, Metric, MetricScores, Tools
from components.evaluate.metrics.scorer import ScorerFailed, from_worker
from components.evaluate.pairs import EvalPair

JARS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")
REMEDY = (
    f"needs {JARS[0]} and {JARS[1]}, which nothing here downloads: take them from "
    "http://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip (384 MB) and name their folder in "
    "compute.spice_dir"
)


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """A group's score is the mean F of those of its pairs that have one.

    Raises:
        ScorerFailed: the jars are missing, or the program gave no result.
    """
    jars = [str(jar) for jar in find_jars(tools.spice_dir)]
    references, predictions, _ = tools.tokens()
    worker = tools.start("SPICE")
    worker.send({"references": references, "predictions": predictions, "groups": groups, "jars": jars})
    return MetricScores(*from_worker(worker.result(), "SPICE"))


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


METRIC = Metric(compute, headline="SPICE", scores=("SPICE",), columns={"SPICE": "double"}, beside=True, optional=True)

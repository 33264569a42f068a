"""Is SPICE there? Its program comes with pycocoevalcap; Java and two jars of CoreNLP do not."""

from pathlib import Path
from typing import NamedTuple

from components.datasets.spec import Protocol
from components.evaluate.metrics import choose_metrics
from components.evaluate.metrics.java import JavaMissing, require_java
from components.evaluate.metrics.metric import ALL
from components.evaluate.metrics.run import compute_metrics
from components.evaluate.metrics.scorer import ScorerFailed
from components.evaluate.metrics.spice import JARS
from components.evaluate.pairs import EvalPair
from components.evaluate.protocols import ProtocolPairs

ARCHIVE = "http://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip"
LIMIT_S = 600
TRIAL = ("the red cube turned blue", ["the red cube became blue"])


class Found(NamedTuple):
    """`lines` to show, and whether SPICE can be computed."""

    lines: list[str]
    works: bool


def check_spice(spice_dir: Path | None) -> Found:
    """Look for what SPICE needs and, where all of it is there, score one pair."""
    lines = []
    try:
        lines.append(f"found   Java {require_java()}")
    except JavaMissing as missing:
        lines.append(f"MISSING {missing}")
    for name in JARS:
        there = spice_dir is not None and (spice_dir / name).is_file()
        lines.append(f"{'found  ' if there else 'MISSING'} {name if spice_dir is None else spice_dir / name}")
    if all(line.startswith("found") for line in lines):
        works, line = trial(spice_dir)
        return Found([*lines, line], works)
    where = "a folder" if spice_dir is None else str(spice_dir)
    lines.append(
        f"the jars stand in {ARCHIVE} (384 MB; nothing here downloads it): put both into {where} and name it by "
        "--spice-dir, and for `m3diff evaluate` as compute.spice_dir in params.yaml"
    )
    return Found(lines, works=False)


def trial(spice_dir: Path | None) -> tuple[bool, str]:
    """Whether a pair gets a score, and a line that says so."""
    prediction, references = TRIAL
    pair = EvalPair("trial/0", "trial", Path(), Path(), b"", b"", references, [], prediction, None)
    one = ProtocolPairs("trial", Protocol("trial", n=None), [pair])
    try:
        scores = compute_metrics(choose_metrics(["SPICE"]), [one], {}, spice_dir, LIMIT_S)[one.name]
    except ScorerFailed as failure:
        return False, f"FAILED  {failure}"
    value = scores.groups[ALL]["SPICE"]
    if value is None:
        return False, f"FAILED  {scores.absent.get('SPICE', 'no score')}"
    return True, f"works   one pair scored {value:.3f}"

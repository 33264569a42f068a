"""The COCO caption scores, by pycocoevalcap's own scorers: BLEU-1..4, METEOR, ROUGE-L, CIDEr(-D) and SPICE.

Captions are tokenised once, by the package's PTBTokenizer. The Java programs each run in a process group of their own
with a time limit: one that dies or hangs costs its own score only. METEOR takes 10 to 30 s to start its JVM, so it is
started first and works beside the scorers in Python.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Self

from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.rouge.rouge import Rouge

from components.progress import progress

METRICS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE")
ALL = "all"
SPICE_JARS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")
SPICE_REMEDY = (
    f"needs {SPICE_JARS[0]} and {SPICE_JARS[1]}, which nothing here downloads: take them from "
    "http://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip (384 MB) and name their folder in "
    "evaluate.spice_dir"
)
ADD_OPENS = " ".join(
    f"--add-opens=java.base/java.{package}=ALL-UNNAMED"
    for package in ("lang", "math", "util", "util.concurrent", "net", "text")
)  # SPICE's serialiser looks into these, which Java 16 and later forbid

Groups = dict[str, list[str]]


class ScorerFailed(RuntimeError):
    """A Java program gave no result; the text says why."""


class Scorer:
    """A worker process for one Java scorer. Leaving the context kills its whole process group."""

    def __init__(self, name: str, limit_s: int) -> None:
        self.name, self.limit_s = name, limit_s
        self.folder = tempfile.TemporaryDirectory(prefix=f"m3diff-{name.lower()}-")
        home = Path(self.folder.name)
        self.result_path, self.log = home / "result.json", home / "stderr"
        worker = Path(__file__).with_name("worker.py")
        command = [sys.executable, "-P", str(worker), name, str(limit_s + 5), str(home)]
        environment = {
            **os.environ,
            "LC_ALL": "C.UTF-8",
            "JAVA_TOOL_OPTIONS": "-Duser.language=en -Dfile.encoding=UTF-8",
            "JDK_JAVA_OPTIONS": ADD_OPENS,
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, process_group=0
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.folder.cleanup()

    def send(self, job: dict[str, Any]) -> None:
        """Hand over the work and return at once; the time limit counts from here."""
        assert self.process.stdin is not None
        self.deadline = time.monotonic() + self.limit_s
        with suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(json.dumps(job).encode())

    def result(self) -> Any:
        """Wait for the answer.

        Raises:
            ScorerFailed: the worker died, ran over its time, or reported an error.
        """
        try:
            status = self.process.wait(timeout=max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ScorerFailed(f"no answer within {self.limit_s} s (evaluate.scorer_timeout_s)") from None
        if not self.result_path.is_file():
            words = self.log.read_text(errors="replace").strip().splitlines()
            raise ScorerFailed(f"its process ended with status {status}: {words[-1] if words else 'no message'}")
        answer = json.loads(self.result_path.read_text(encoding="utf-8"))
        if "error" in answer:
            raise ScorerFailed(answer["error"])
        return answer["value"]


def sanitise(caption: str) -> str:
    """One line of plain text: NFC, runs of any white space (U+2028, \\v, \\r ...) to one space, no METEOR separator.

    The tokenizer ends a line at seven different characters; one that it met inside a caption would move every later
    caption to the wrong pair.
    """
    text = unicodedata.normalize("NFC", caption).replace("\0", " ")
    return " ".join(re.sub(r"\|{3,}", " ", text).split())


def tokenise(captions: Iterable[str], limit_s: int) -> dict[str, str]:
    """PTB tokens of every distinct caption, keyed by the caption as it came.

    Raises:
        ScorerFailed: without tokens there is no score at all.
    """
    texts = {caption: sanitise(caption) for caption in captions}
    distinct = sorted(set(texts.values()))
    with Scorer("PTB", limit_s) as worker:
        worker.send({"captions": distinct})
        tokens = dict(zip(distinct, worker.result(), strict=True))
    return {caption: tokens[text] for caption, text in texts.items()}


@dataclass
class CocoScores:
    """Scores as the package gives them (0 to 1, CIDEr 0 to 10) by group and by pair, and why a metric is absent."""

    groups: dict[str, dict[str, float | None]]
    pairs: dict[str, dict[str, float]]
    shuffled_cider: float | None = None
    absent: dict[str, str] = field(default_factory=dict)


def score(
    references: dict[str, list[str]],
    captions: dict[str, str],
    shuffled: dict[str, str] | None,
    groups: Groups,
    spice_dir: Path | None,
    limit_s: int,
) -> CocoScores:
    """Every metric of every group of pair ids. `shuffled` are captions of other images for the same references.

    Raises:
        ScorerFailed: the tokenizer gave up.
    """
    assert references.keys() == captions.keys(), "references and captions are of different pairs"
    groups = {ALL: list(references), **groups}
    jars, absent = find_spice(spice_dir)
    with ExitStack() as stack:
        java = {"METEOR": stack.enter_context(Scorer("METEOR", limit_s))}
        tokens = tokenise(
            [*captions.values(), *(shuffled or {}).values(), *chain.from_iterable(references.values())], limit_s
        )
        references = {i: [tokens[caption] for caption in found] for i, found in references.items()}
        captions = {i: tokens[caption] for i, caption in captions.items()}
        job = {"references": references, "captions": captions, "groups": groups}
        java["METEOR"].send(job)
        scores = score_in_python(references, captions, groups)
        scores.absent |= absent
        if shuffled is not None:
            scores.shuffled_cider = cider(references, {i: tokens[caption] for i, caption in shuffled.items()})[0]
        if jars:
            java["SPICE"] = stack.enter_context(Scorer("SPICE", limit_s))
            java["SPICE"].send({**job, "jars": [str(jar) for jar in jars]})
        for metric, worker in progress(java.items(), "evaluate: METEOR", unit="scorer"):
            collect(scores, metric, worker)
    return scores


def find_spice(spice_dir: Path | None) -> tuple[list[Path], dict[str, str]]:
    """The CoreNLP jars, or why SPICE is absent."""
    if spice_dir is None:
        return [], {"SPICE": SPICE_REMEDY}
    jars = [(spice_dir / name).absolute() for name in SPICE_JARS]
    lacking = [jar.name for jar in jars if not jar.is_file()]
    return ([], {"SPICE": f"{spice_dir}: lacks {', '.join(lacking)}; SPICE {SPICE_REMEDY}"}) if lacking else (jars, {})


def collect(scores: CocoScores, metric: str, worker: Scorer) -> None:
    """Put a Java scorer's values beside the others, or the reason why there are none."""
    try:
        answer = worker.result()
    except ScorerFailed as failure:
        scores.absent[metric] = str(failure)
        return
    for group, value in answer["groups"].items():
        scores.groups[group][metric] = value
    for pair, value in answer["pairs"].items():
        scores.pairs[pair][metric] = value


def score_in_python(references: dict[str, list[str]], captions: dict[str, str], groups: Groups) -> CocoScores:
    """BLEU, ROUGE-L and CIDEr. ROUGE-L is a mean over pairs, so a group's is taken from the whole's."""
    hypotheses = {i: [caption] for i, caption in captions.items()}
    rouge = dict(zip(captions, map(float, Rouge().compute_score(references, hypotheses)[1]), strict=True))
    scores = CocoScores(groups={}, pairs={i: {"ROUGE-L": value} for i, value in rouge.items()})
    for group, ids in progress(groups.items(), "evaluate: scores", unit="group"):
        scores.groups[group] = dict.fromkeys(METRICS)
        if not ids:
            continue
        members = {i: references[i] for i in ids}
        bleu, bleu_of_pairs = Bleu(4).compute_score(members, {i: hypotheses[i] for i in ids}, verbose=0)
        corpus_cider, cider_of_pairs = cider(members, {i: captions[i] for i in ids})
        values = {**{f"BLEU-{n}": value for n, value in enumerate(bleu, 1)}, "CIDEr": corpus_cider}
        scores.groups[group] |= {**values, "ROUGE-L": math.fsum(rouge[i] for i in ids) / len(ids)}
        if group == ALL:
            for i, bleu_4, one_cider in zip(ids, bleu_of_pairs[3], cider_of_pairs, strict=True):
                scores.pairs[i] |= {"BLEU-4": bleu_4, "CIDEr": one_cider}
    return scores


def cider(references: dict[str, list[str]], captions: dict[str, str]) -> tuple[float | None, list[float]]:
    """CIDEr-D of a set of pairs and of each. Word weights come from the set itself, so of one pair there is none."""
    if len(references) < 2:
        return None, [0.0] * len(references)
    corpus, pairs = Cider().compute_score(references, {i: [captions[i]] for i in references})
    return float(corpus), [float(value) for value in pairs]

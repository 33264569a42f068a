"""METEOR 1.5 (Denkowski and Lavie, 2014): the alignments by pycocoevalcap's Java program, the score from their counts.

The program gives 23 statistics of a pair: words and function words of prediction and reference; four counts for each of
the matchers exact, stem, synonym and paraphrase; chunks and matched words. A group's score follows from their sums, so
it costs nothing and can be resampled.
"""

import gzip
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from m3diff.records.copies import link_or_copy
from m3diff.scoring.metrics import Item, Metric, MetricScores, Resampled, Tools, of_each_group
from m3diff.scoring.metrics.java import ScorerFailed, run
from m3diff.scoring.pairs import EvalPair, Groups

ALPHA, BETA, GAMMA, DELTA = 0.85, 0.2, 0.6, 0.75  # the program's for English
WEIGHTS = (1.0, 0.6, 0.8, 0.6)  # of matches that are exact, by stem, by synonym, by paraphrase
STATISTICS = 23
COMMAND = ("-jar", "meteor-1.5.jar", "-", "-", "-stdio", "-l", "en", "-norm", "-a", "paraphrases.gz")
LONGEST_PHRASE = 7  # words; of the table
CHUNK = 1 << 13  # bytes of the table, read at once
USUAL = b"abcdefghijklmnopqrstuvwxyz0123456789 .-E\n"  # in the table
MARKED = bytes(byte if byte in USUAL else 0 for byte in range(256))
WORD, ENTITY = re.compile(rb"[a-z0-9]+"), re.compile("&(quot|apos|lt|gt|amp);")


def program(items: list[Item], spice_dir: Path | None, limit_s: int) -> dict[Item, list[float]]:
    """The 23 statistics of each item, of its best reference, ready to be summed.

    The program keeps its whole paraphrase table in memory, 5 million entries that take it 15 s to read, so it gets a
    table of the entries that can match here. METEOR counts no chunk where all words of both sides match in one.

    Raises:
        ScorerFailed: the program gave no statistics.
    """
    from pycocoevalcap.meteor import meteor as module

    home = Path(module.__file__).parent
    with gzip.open(home / "data" / "paraphrase-en.gz") as file:
        table = file.read()
    # of the best references it takes the first, so one that comes again changes nothing
    lines = [" ||| ".join(("SCORE", *dict.fromkeys(references), said)) + "\n" for said, references in items]
    with TemporaryDirectory(prefix="m3diff-meteor-") as name:
        folder = Path(name)
        link_or_copy(home / module.METEOR_JAR, folder / module.METEOR_JAR)
        with gzip.open(folder / "paraphrases.gz", "wb", compresslevel=1) as file:
            file.writelines(matching_paraphrases(table, items))
        answer = run(COMMAND, folder, limit_s, "".join(lines))
    try:
        statistics = [[float(number) for number in line.split()] for line in answer.splitlines()]
    except ValueError as error:
        raise ScorerFailed(f"METEOR gave no statistics: {error}") from error
    if len(statistics) != len(lines) or any(len(numbers) != STATISTICS for numbers in statistics):
        raise ScorerFailed(f"METEOR gave {len(statistics)} answers to {len(lines)} captions")
    for numbers in statistics:
        if numbers[20:] == [1.0, *numbers[:2]]:
            numbers[20] = 0.0
    return dict(zip(items, statistics, strict=True))


def matching_paraphrases(table: bytes, items: Sequence[Item]) -> Iterator[bytes]:
    """The lines of METEOR's table whose phrases may stand in a reference and in a prediction, in the table's order.

    The table has three lines an entry: probability and two phrases, which METEOR matches either way round. Phrases are
    compared by their runs of ASCII letters and digits alone, which METEOR's own tokenizer never splits. A phrase with
    other characters (one in 140) may stand anywhere: too many entries change nothing.
    """
    of_references = phrases(reference for _, references in items for reference in references)
    of_predictions = phrases(prediction for prediction, _ in items)

    def matches(one: bytes, other: bytes) -> bool:
        return (one in of_references and other in of_predictions) or (one in of_predictions and other in of_references)

    is_known = (of_references | of_predictions).__contains__
    file = io.BytesIO(table)
    while lines := file.readlines(CHUNK):
        lines += [file.readline() for _ in range(-len(lines) % 3)]
        ones, others = lines[1::3], lines[2::3]
        kept = {at for at in compress(range(len(ones)), map(is_known, ones)) if matches(ones[at], others[at])}
        marked = b"".join(lines).translate(MARKED).split(b"\n")
        kept.update(place // 3 for place, line in enumerate(marked) if b"\0" in line)
        for at in sorted(kept):
            yield from lines[3 * at : 3 * at + 3]


def phrases(texts: Iterable[str]) -> set[bytes]:
    """All runs of none to LONGEST_PHRASE words of ASCII letters and digits, a line each."""
    lowered = {text.lower() for text in texts}
    captions = {tuple(WORD.findall(text.encode())) for text in lowered | {ENTITY.sub(" ", text) for text in lowered}}
    longest = {words[start : start + LONGEST_PHRASE] for words in captions for start in range(len(words))}
    return {b"\n"} | {b" ".join(run[:size]) + b"\n" for run in longest for size in range(1, len(run) + 1)}


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """A group's score is aggregated from its pairs' statistics, as METEOR does; it is no mean."""
    answers, tokens = tools.answers, tools.tokens
    statistics = {pair: answers[tokens.item(pair)] for pair in tokens.predictions}
    scores = zip(statistics, meteor(np.array(list(statistics.values()))).tolist(), strict=True)
    of_groups = of_each_group(
        groups, lambda ids: {"METEOR": float(meteor(np.sum([statistics[pair] for pair in ids], axis=0)))}
    )
    of_pairs = {pair: {"METEOR": score, "METEOR_statistics": statistics[pair]} for pair, score in scores}
    return MetricScores(of_groups, of_pairs)


def meteor(sums: np.ndarray) -> np.ndarray:
    """The score of summed statistics [..., 23] -> [...]: weighted F of precision and recall, less for many chunks."""
    words, reference_words, functions, reference_functions = (sums[..., i] for i in range(4))
    matches = sums[..., 4:20].reshape(*sums.shape[:-1], 4, 4)  # matcher; content and function words of both sides
    chunks, matched, reference_matched = (sums[..., i] for i in range(20, 23))
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = weighted(matches[..., 0], matches[..., 2]) / weighted_length(words, functions)
        recall = weighted(matches[..., 1], matches[..., 3]) / weighted_length(reference_words, reference_functions)
        mean = 1.0 / ((1.0 - ALPHA) / precision + ALPHA / recall)
        fragmentation = chunks / ((matched + reference_matched) / 2)
        score = mean * (1.0 - GAMMA * fragmentation**BETA)
    return np.where(np.isnan(score), 0.0, np.maximum(score, 0.0))


def weighted(content: np.ndarray, function: np.ndarray) -> np.ndarray:
    """Matches [..., matcher] of both kinds of words, weighed by matcher and kind, added in METEOR's order."""
    total = np.zeros(content.shape[:-1])
    for kind, weight in ((content, DELTA), (function, 1.0 - DELTA)):
        for matcher, of_matcher in enumerate(WEIGHTS):
            total = total + kind[..., matcher] * of_matcher * weight
    return total


def weighted_length(words: np.ndarray, functions: np.ndarray) -> np.ndarray:
    return DELTA * (words - functions) + (1.0 - DELTA) * functions


METRIC = Metric(
    compute,
    headline="METEOR",
    scores=("METEOR",),
    columns={"METEOR": "double", "METEOR_statistics": "list<double>"},
    resampled={"METEOR": Resampled("METEOR_statistics", meteor)},
    program=program,
    reads="English",
)

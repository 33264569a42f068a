"""Compute METEOR 1.5 (Denkowski and Lavie, 2014). pycocoevalcap's Java program aligns captions; this file scores them.

The program returns 23 statistics per pair: words and function words of prediction and reference; four counts for each
of the matchers exact, stem, synonym and paraphrase; chunks (runs of matched words in the same order) and matched words.
A group's score is computed from the sums of its pairs' statistics, so it can be resampled without another run of the
program. The statistics of a pair do not depend on other pairs, so splitting the pairs between processes does not change
any score.
"""

import gzip
import math
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np

from m3diff.records.copies import link_or_copy
from m3diff.scoring.metrics import Item, Metric, MetricInputs, MetricScores, Program, Resampled, score_each_group
from m3diff.scoring.metrics.java import JavaProgram, ScorerFailed, programs_at_once
from m3diff.scoring.metrics.paraphrases import matching_paraphrases, read_paraphrases
from m3diff.scoring.pairs import EvalPair, Groups

Result = TypeVar("Result")

# The program's parameters for English
ALPHA = 0.85
BETA = 0.2
GAMMA = 0.6
DELTA = 0.75
WEIGHTS = (1.0, 0.6, 0.8, 0.6)  # weights of exact, stem, synonym and paraphrase matches
STATISTICS = 23
COMMAND = ("-jar", "meteor-1.5.jar", "-", "-", "-stdio", "-l", "en", "-a", "paraphrases.gz")
MAX_PROCESSES = 4
ITEMS_A_PROCESS = 500  # minimum; for fewer items, starting another process takes longer than it saves
# The program's normaliser takes a third of the time. It changes only punctuation and capitals, so texts that match this
# pattern do not need it
NORMAL = re.compile("[a-z0-9 ]*")
# Relative time for an item that needs the normaliser. The item itself takes 2.7 times as long as another item, and the
# option also slows down the other items of the process
NORMALISED_COST = 3.0
CLOSING_S = 10  # seconds that `close` waits for the threads, which cannot be stopped


@dataclass(frozen=True)
class MeteorProcess:
    """A running process and the items that it scores."""

    items: Sequence[Item]
    java: JavaProgram


class MeteorProgram(Program):
    """METEOR in one or more processes.

    A thread reads the paraphrase table while captions are tokenised. Another one then starts the processes. In the
    meantime, the caller computes the metrics that do not need Java.

    Nothing waits longer than the time limit, whatever the processes answer and however long the threads take.

    Args:
        limit_s: time limit in seconds for each process, and for starting the processes.
    """

    def __init__(self, spice_dir: Path | None, limit_s: int) -> None:
        from pycocoevalcap.meteor import meteor as module

        self.limit_s = limit_s
        self.jar = Path(module.__file__).with_name(module.METEOR_JAR)
        self.running = ExitStack()
        # a thread that has not ended when the folder is removed may write into it
        folder = TemporaryDirectory(prefix="m3diff-meteor-", ignore_cleanup_errors=True)
        self.folder = Path(self.running.enter_context(folder))
        self.table_file = self.jar.with_name("data") / "paraphrase-en.gz"
        self.table = run_in_thread(lambda: read_paraphrases(self.table_file))
        # item -> item that is sent to a process instead
        self.asked_items: dict[Item, Item] = {}
        self.processes: list[MeteorProcess] = []
        self.started: Future[None] | None = None
        self.lock = threading.Lock()  # held while a process is started, and while `is_closed` is set
        self.is_closed = False

    def close(self) -> None:
        """Stop the processes, wait for the threads, and remove the folder."""
        with self.lock:
            self.is_closed = True
        threads: list[Future[Any]] = [self.table]
        if self.started is not None:
            threads.append(self.started)
        wait(threads, CLOSING_S)
        self.running.close()

    def start(self, items: Sequence[Item]) -> None:
        """Start the processes in a thread, and return immediately. `answers` raises errors from starting them."""
        self.started = run_in_thread(lambda: self.start_processes(items))

    def start_processes(self, items: Sequence[Item]) -> None:
        """Start the processes. Their number depends on the CPUs, the memory and the number of items."""
        self.asked_items = {item: remove_needless_references(item) for item in items}
        link_or_copy(self.jar, self.folder / self.jar.name)
        with gzip.open(self.folder / "paraphrases.gz", "wb", compresslevel=1) as file:
            file.write(matching_paraphrases(self.table.result(), items))
        distinct_items = list(dict.fromkeys(self.asked_items.values()))
        useful_processes = min(MAX_PROCESSES, max(1, len(distinct_items) // ITEMS_A_PROCESS))
        shares = divide_by_time(distinct_items, programs_at_once(useful_processes))
        self.processes = [self.start_process(share) for share in shares]

    def answers(self) -> dict[Item, list[float]]:
        """Wait for the processes and return the 23 statistics of each item with its best reference, ready to be summed.

        Raises:
            ScorerFailed: the paraphrase table cannot be read, the processes did not start in time, or a process gave no
                statistics in time.
        """
        if self.started:
            finished, _ = wait([self.started], self.limit_s)
            if not finished:
                raise ScorerFailed("scoring.program_timeout", limit=self.limit_s)
            self.started.result()
        statistics: dict[Item, list[float]] = {}
        for process in self.processes:
            statistics |= wait_for_statistics(process)
        # so far, a reference that equals the prediction has always matched completely. If it does not, another
        # reference could be better, so the item is scored with all its references
        doubtful_items = [
            item
            for item, asked_item in self.asked_items.items()
            if item != asked_item and not is_exact(statistics[asked_item])
        ]
        if doubtful_items:
            statistics |= wait_for_statistics(self.start_process(doubtful_items))
        answers = {}
        for item, asked_item in self.asked_items.items():
            numbers = statistics.get(item) or statistics[asked_item]
            # METEOR does not penalise the single chunk of a complete match
            answers[item] = [*numbers[:20], 0.0, *numbers[21:]] if is_complete(numbers) else numbers
        return answers

    def start_process(self, items: Sequence[Item]) -> MeteorProcess:
        """Start a process that scores the items.

        Raises:
            CancelledError: the program is closed, so nothing would stop the process.
        """
        lines = []
        for prediction, references in items:
            # the program uses the first of the best references, so duplicates can be left out
            distinct_references = dict.fromkeys(references)
            lines.append(" ||| ".join(("SCORE", *distinct_references, prediction)) + "\n")
        command = [*COMMAND, "-norm"] if any(map(needs_normalising, items)) else COMMAND
        with self.lock:
            if self.is_closed:
                raise CancelledError
            java = JavaProgram(command, self.folder, self.limit_s, "".join(lines))
            return MeteorProcess(items, self.running.enter_context(java))


def run_in_thread(function: Callable[[], Result]) -> Future[Result]:
    """Run a function in a thread, and return its result as a future.

    A thread of a `ThreadPoolExecutor` keeps the process from ending until it has ended. This one does not.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def remove_needless_references(item: Item) -> Item:
    """Remove the references that cannot be the best match of the prediction.

    The statistics come from the best reference only. A reference that equals the prediction scores 1, so the others are
    not needed.
    """
    prediction, references = item
    is_same = prediction in references and any(character.isalnum() for character in prediction)
    return (prediction, (prediction,)) if is_same else item


def is_complete(statistics: Sequence[float]) -> bool:
    """Return True if all words of prediction and reference match, in one chunk."""
    return list(statistics[20:]) == [1.0, *statistics[:2]]


def is_exact(statistics: Sequence[float]) -> bool:
    """Return True if all words of prediction and reference match exactly, in one chunk. The score is then 1."""
    content_and_function_words = [statistics[4] + statistics[6], statistics[5] + statistics[7]]
    return is_complete(statistics) and content_and_function_words == list(statistics[:2])


def needs_normalising(item: Item) -> bool:
    """Return True if the program's normaliser could change a text of the item."""
    prediction, references = item
    return not all(NORMAL.fullmatch(text) for text in (prediction, *references))


def divide_by_time(items: Sequence[Item], processes: int) -> list[list[Item]]:
    """Divide the items into lists that take about the same time to score, one list per process.

    Items that need the normaliser are kept together, because it is enabled for a whole process.
    """
    is_normalised = {item: needs_normalising(item) for item in items}
    ordered = sorted(items, key=is_normalised.__getitem__)
    characters = [len(prediction) + sum(map(len, references)) for prediction, references in ordered]
    weights = [NORMALISED_COST if is_normalised[item] else 1.0 for item in ordered]
    ends = np.cumsum([0.0, *np.multiply(characters, weights)])
    cuts = np.searchsorted(ends, ends[-1] * np.arange(processes + 1) / processes).tolist()
    cuts[-1] = len(ordered)
    return [ordered[start:end] for start, end in pairwise(cuts) if start < end]


def wait_for_statistics(process: MeteorProcess) -> dict[Item, list[float]]:
    """Wait for a process and return the statistics of its items.

    Raises:
        ScorerFailed: the process failed or did not end in time, or its output is not one line of 23 counts per item.
    """
    answer = process.java.result()
    try:
        statistics = [[float(number) for number in line.split()] for line in answer.splitlines()]
    except ValueError as error:
        raise ScorerFailed("scoring.meteor_no_numbers", cause=str(error)) from error
    if len(statistics) != len(process.items):
        raise ScorerFailed("scoring.meteor_answer_count", value=len(statistics), expected=len(process.items))
    for numbers in statistics:
        if len(numbers) != STATISTICS:
            raise ScorerFailed("scoring.meteor_number_count", value=len(numbers), expected=STATISTICS)
        # `float` also reads nan, inf and -1, and the score of a group would be wrong
        wrong_counts = [number for number in numbers if not 0 <= number < math.inf]
        if wrong_counts:
            raise ScorerFailed("scoring.meteor_no_count", value=wrong_counts[0])
    return dict(zip(process.items, statistics, strict=True))


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Score pairs and groups. As in METEOR, a group's score is computed from summed statistics and is not a mean."""
    tokens = inputs.tokens
    statistics = {pair_id: inputs.answers[tokens.item(pair_id)] for pair_id in tokens.predictions}

    def score_group(pair_ids: list[str]) -> dict[str, float]:
        sums = np.sum([statistics[pair_id] for pair_id in pair_ids], axis=0)
        return {"METEOR": float(meteor(sums))}

    scores = meteor(np.array(list(statistics.values()))).tolist()
    pair_scores = {}
    for (pair_id, numbers), score in zip(statistics.items(), scores, strict=True):
        pair_scores[pair_id] = {"METEOR": score, "METEOR_statistics": numbers}
    return MetricScores(score_each_group(groups, score_group), pair_scores)


def meteor(sums: np.ndarray) -> np.ndarray:
    """Return the scores for summed statistics, [..., 23] -> [...]: weighted F-score with a fragmentation penalty."""
    words, reference_words, function_words, reference_function_words = (sums[..., i] for i in range(4))
    matches = sums[..., 4:20].reshape(*sums.shape[:-1], 4, 4)  # [matcher, content and function words of each side]
    chunks, matched, reference_matched = (sums[..., i] for i in range(20, 23))
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = weigh_matches(matches[..., 0], matches[..., 2]) / weigh_words(words, function_words)
        reference_length = weigh_words(reference_words, reference_function_words)
        recall = weigh_matches(matches[..., 1], matches[..., 3]) / reference_length
        mean = 1.0 / ((1.0 - ALPHA) / precision + ALPHA / recall)
        fragmentation = chunks / ((matched + reference_matched) / 2)
        score = mean * (1.0 - GAMMA * fragmentation**BETA)
    return np.where(np.isnan(score), 0.0, np.maximum(score, 0.0))


def weigh_matches(content_matches: np.ndarray, function_matches: np.ndarray) -> np.ndarray:
    """Return the weighted sum of matched words, [..., matcher] -> [...].

    The products are added in the same order as in METEOR's Java code: first all matchers of content words, then all
    matchers of function words. Another order could round differently.

    Args:
        content_matches, function_matches: [..., matcher] number of matched content words and of matched function words.
            The matchers are in the order of WEIGHTS.
    """
    total = np.zeros(content_matches.shape[:-1])
    for matches, kind_weight in ((content_matches, DELTA), (function_matches, 1.0 - DELTA)):
        for matcher, matcher_weight in enumerate(WEIGHTS):
            total = total + matches[..., matcher] * matcher_weight * kind_weight
    return total


def weigh_words(words: np.ndarray, function_words: np.ndarray) -> np.ndarray:
    """Return the weighted number of words, [...]. Function words have a lower weight than content words.

    Args:
        words: [...] number of all words.
        function_words: [...] number of function words among them.
    """
    return DELTA * (words - function_words) + (1.0 - DELTA) * function_words


METRIC = Metric(
    compute,
    main_score="METEOR",
    scores=("METEOR",),
    columns={"METEOR": "double", "METEOR_statistics": "list<double>"},
    resampled={"METEOR": Resampled("METEOR_statistics", meteor)},
    program=MeteorProgram,
    reads="English",
)

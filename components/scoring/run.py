"""Compute the chosen metrics of all protocols at once: tokenised once, Java programs beside the scorers in Python."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from m3diff.records.progress import progress
from m3diff.scoring.grammar import ParsedCaption
from m3diff.scoring.metrics.metric import (
    ALL,
    Groups,
    Item,
    Metric,
    MetricScores,
    PairValue,
    Program,
    Tokens,
    Tools,
    Value,
)
from m3diff.scoring.metrics.scorer import Scorer, ScorerFailed, sanitise, tokenise
from m3diff.scoring.metrics.verdicts import Judge
from m3diff.scoring.pairs import EvalPair
from m3diff.scoring.protocols import ProtocolPairs

T = TypeVar("T")


def compute_metrics(
    metrics: Mapping[str, Metric],
    protocols: Iterable[ProtocolPairs],
    parsed: Mapping[str, ParsedCaption],
    spice_dir: Path | None,
    limit_s: int,
    judge: Judge | None = None,
) -> dict[str, MetricScores]:
    """Every score of every group of each protocol, null where there is none. A metric that fails costs its own scores
    only.

    Raises:
        ScorerFailed: the tokenizer gave up, and a metric needs it.
    """
    scored = {one.name: one for one in protocols}
    tokens: Future[dict[str, Tokens]] = Future()
    programs = {name: metric.program for name, metric in metrics.items() if metric.program}
    stopped = Event()
    with ThreadPoolExecutor(max_workers=max(1, len(programs))) as pool, ExitStack() as workers, ExitStack() as first:
        first.callback(stopped.set)

        def start(name: str, more_s: float) -> Scorer:
            started = workers.enter_context(Scorer(name, limit_s + more_s))
            if stopped.is_set():
                started.__exit__()
                raise ScorerFailed("stopped")
            return started

        program = Program(start, lambda: distinct_items(tokens.result().values()), spice_dir)
        answers = {name: pool.submit(run, program) for name, run in programs.items()}  # they take long to start
        fulfil(tokens, lambda: tokenise_protocols(scored.values(), limit_s) if needs_java(metrics) else {})
        found: dict[str, dict[str, MetricScores]] = {protocol: {} for protocol in scored}
        jobs = [(name, protocol) for name in ordered(metrics) for protocol in scored]
        for name, protocol in progress(jobs, "evaluate: metrics", unit="score"):
            tools = Tools(lambda of=protocol: tokens.result()[of], answers_of(answers.get(name)), parsed, judge)  # type: ignore[misc]
            found[protocol][name] = attempt(metrics[name], scored[protocol], tools)
    return {protocol: merge(metrics, scored[protocol].groups, found[protocol]) for protocol in scored}


def ordered(metrics: Mapping[str, Metric]) -> list[str]:
    """Those in Python first; then wait for the others."""
    return sorted(metrics, key=lambda name: metrics[name].program is not None)


def needs_java(metrics: Mapping[str, Metric]) -> bool:
    return any(metric.java for metric in metrics.values())


def answers_of(program: Future[Mapping[Item, Any]] | None) -> Callable[[], Mapping[Item, Any]]:
    return dict if program is None else program.result


def distinct_items(tokens: Iterable[Tokens]) -> list[Item]:
    """In the order in which they come."""
    return list(dict.fromkeys(of.item(pair) for of in tokens for pair in of.predictions))


def attempt(metric: Metric, scored: ProtocolPairs, tools: Tools) -> MetricScores:
    """The metric's scores, or the reason why there are none."""
    try:
        return metric.compute(scored.pairs, scored.groups, tools)
    except ScorerFailed as failure:
        return MetricScores({}, {}, {metric.headline: str(failure)})


def fulfil(tokens: Future[T], make: Callable[[], T]) -> None:
    """Make the tokens for all who wait; where that fails they fail too."""
    try:
        tokens.set_result(make())
    except BaseException as failure:
        tokens.set_exception(failure)
        raise


def tokenise_protocols(protocols: Iterable[ProtocolPairs], limit_s: int) -> dict[str, Tokens]:
    """The tokens of each protocol's pairs, by its name; each distinct text is tokenised once."""
    scored = list(protocols)
    by_tokenizer = {
        name: TOKENIZERS[name](
            chain.from_iterable(texts(pair) for one in scored if one.protocol.tokenizer == name for pair in one.pairs),
            limit_s,
        )
        for name in dict.fromkeys(one.protocol.tokenizer for one in scored)
    }
    return {one.name: tokens_of(one.pairs, by_tokenizer[one.protocol.tokenizer]) for one in scored}


def split_at_white_space(captions: Iterable[str], limit_s: int) -> dict[str, str]:
    """Tokens by white space alone: case and punctuation stay."""
    return {caption: sanitise(caption) for caption in captions}


TOKENIZERS: dict[str, Callable[[Iterable[str], int], dict[str, str]]] = {
    "ptb": tokenise,
    "whitespace": split_at_white_space,
}


def texts(pair: EvalPair) -> list[str]:
    """Prediction, references and, where there is one, the shuffled prediction."""
    shuffled = [] if pair.shuffled_prediction is None else [pair.shuffled_prediction]
    return [pair.prediction, *pair.references, *shuffled]


def tokens_of(pairs: Iterable[EvalPair], tokens: Mapping[str, str]) -> Tokens:
    listed = list(pairs)
    shuffled = {pair.id: pair.shuffled_prediction for pair in listed if pair.shuffled_prediction is not None}
    return Tokens(
        {pair.id: [tokens[reference] for reference in pair.references] for pair in listed},
        {pair.id: tokens[pair.prediction] for pair in listed},
        {i: tokens[text] for i, text in shuffled.items()} or None,
    )


def merge(metrics: Mapping[str, Metric], groups: Groups, found: Mapping[str, MetricScores]) -> MetricScores:
    """The scores of all metrics side by side, in the metrics' order; null where one gave none."""
    names = [name for metric in metrics.values() for name in metric.scores]
    overall = [name for metric in metrics.values() for name in metric.overall]
    of_groups: dict[str, dict[str, Value]] = {
        group: dict.fromkeys(names + overall if group == ALL else names) for group in groups
    }
    of_pairs: dict[str, dict[str, PairValue]] = {i: {} for i in groups[ALL]}
    absent: dict[str, str] = {}
    for name in metrics:
        for group, values in found[name].groups.items():
            of_groups[group].update(values)
        for i, of_pair in found[name].pairs.items():
            of_pairs[i].update(of_pair)
        absent.update(found[name].absent)
    return MetricScores(of_groups, of_pairs, absent)

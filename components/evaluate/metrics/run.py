"""Compute the chosen metrics of all groups at once: tokenised once, Java programs beside the scorers in Python."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from components.evaluate.grammar import ParsedCaption
from components.evaluate.metrics.metric import ALL, Groups, Metric, MetricScores, PairValue, Tokens, Tools, Value
from components.evaluate.metrics.scorer import Scorer, ScorerFailed, tokenise
from components.evaluate.pairs import EvalPair
from components.progress import progress


def compute_metrics(
    metrics: Mapping[str, Metric],
    pairs: list[EvalPair],
    groups: Groups,
    parsed: Mapping[str, ParsedCaption],
    spice_dir: Path | None,
    limit_s: int,
) -> MetricScores:
    """Every score of every group, null where there is none. A metric that fails costs its own scores only.

    Raises:
        ScorerFailed: the tokenizer gave up, and a metric needs it.
    """
    groups = {ALL: [pair.id for pair in pairs], **groups}
    tokens: Future[Tokens] = Future()
    with ThreadPoolExecutor(max_workers=len(metrics)) as pool, ExitStack() as workers:

        def start(name: str) -> Scorer:
            return workers.enter_context(Scorer(name, limit_s))

        tools = Tools(tokens.result, start, parsed, spice_dir)
        beside = {
            name: pool.submit(attempt, metric, pairs, groups, tools)
            for name, metric in metrics.items()
            if metric.beside  # first: their programs take long to start
        }
        fulfil(tokens, lambda: tokenise_pairs(pairs, limit_s) if needs_java(metrics) else NO_TOKENS)
        found = {
            name: beside[name].result() if name in beside else attempt(metric, pairs, groups, tools)
            for name, metric in progress(ordered(metrics), "evaluate: metrics", unit="metric")
        }
    return merge(metrics, groups, found)


NO_TOKENS = Tokens({}, {}, None)


def ordered(metrics: Mapping[str, Metric]) -> list[tuple[str, Metric]]:
    """Those in Python first; then wait for the others."""
    return sorted(metrics.items(), key=lambda item: item[1].beside)


def needs_java(metrics: Mapping[str, Metric]) -> bool:
    return any(metric.java for metric in metrics.values())


def attempt(metric: Metric, pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """The metric's scores, or the reason why there are none."""
    try:
        return metric.compute(pairs, groups, tools)
    except ScorerFailed as failure:
        return MetricScores({}, {}, {metric.headline: str(failure)})


def fulfil(tokens: Future[Tokens], make: Callable[[], Tokens]) -> None:
    """Make the tokens for all who wait; where that fails they fail too."""
    try:
        tokens.set_result(make())
    except BaseException as failure:
        tokens.set_exception(failure)
        raise


def tokenise_pairs(pairs: list[EvalPair], limit_s: int) -> Tokens:
    """Predictions, references and the shuffled predictions of the pairs that have one."""
    shuffled = {pair.id: pair.shuffled_prediction for pair in pairs if pair.shuffled_prediction is not None}
    texts = chain((pair.prediction for pair in pairs), shuffled.values(), *(pair.references for pair in pairs))
    tokens = tokenise(texts, limit_s)
    return Tokens(
        {pair.id: [tokens[reference] for reference in pair.references] for pair in pairs},
        {pair.id: tokens[pair.prediction] for pair in pairs},
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

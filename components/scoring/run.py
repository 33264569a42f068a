"""Compute the chosen metrics for all protocols together, so that each Java program is started only once.

A protocol is a set of rules for scoring a dataset: which test pairs, which form of their texts, and which tokenizer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from m3diff.records.progress import progress
from m3diff.scoring.characters import Tokenizer, tokenise_characters
from m3diff.scoring.grammar import ParsedCaption
from m3diff.scoring.metrics import (
    BY_CHARACTERS,
    ENGLISH_ONLY,
    Item,
    Metric,
    MetricInputs,
    MetricScores,
    Program,
    Tokens,
    add_character_variants,
    make_character_variant,
    needs_java,
)
from m3diff.scoring.metrics.java import ScorerFailed, sanitise, tokenise
from m3diff.scoring.metrics.judge import Judge
from m3diff.scoring.pairs import ALL_PAIRS, EvalPair, Groups, SelectedRecords
from m3diff.scoring.protocols import MIN_TEXT_WORDS, ProtocolPairs

# Why a score is absent if a protocol has no record that its metric scores
ABSENT_RECORDS: dict[SelectedRecords, str] = {
    "texts": f"all references are short answers to questions, of less than {MIN_TEXT_WORDS} words on average",
    "captions": "all records have questions of their own",
    "questions": "no record has a question of its own",
}


@dataclass(frozen=True)
class TokenRules:
    """How the captions of a protocol are tokenised.

    tokenizer: word tokenizer, as in `Protocol.tokenizer`.
    by_characters: whether each character of scripts without spaces is a token.
    """

    tokenizer: str
    by_characters: bool


def compute_metrics(
    metrics: Mapping[str, Metric],
    protocols: Sequence[ProtocolPairs],
    parsed: Mapping[str, ParsedCaption],
    spice_dir: Path | None,
    limit_s: int,
    judge: Judge | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> dict[str, MetricScores]:
    """Compute the metrics for each protocol and each of its groups of pairs.

    A score is None if its metric fails or does not apply. Java programs run while the metrics in Python are computed.

    Args:
        parsed: parsed predictions by pair id.
        limit_s: time limit for each Java program, in seconds.
        meanwhile: function to call while the Java programs run, for work that does not need the scores.

    Returns:
        The scores by protocol name.

    Raises:
        ScorerFailed: a metric needs the tokenizer, and the tokenizer failed.
    """
    scores: dict[str, dict[str, MetricScores]] = {protocol.name: {} for protocol in protocols}
    programs: dict[str, Program] = {}
    with ExitStack() as running:
        for name, metric in metrics.items():
            if metric.program and select_scored_pairs(name, metric, protocols):
                programs[name] = metric.program(spice_dir, limit_s)
                running.callback(programs[name].close)
        tokens = tokenise_protocols(protocols, limit_s) if needs_java(metrics) else {}
        failures = start_programs(programs, metrics, protocols, tokens)
        if meanwhile is not None:
            meanwhile()
        python_first = sorted(metrics.items(), key=lambda entry: entry[0] in programs)
        for name, metric in progress(python_first, "evaluate: metrics", unit="metric"):
            try:
                if name in failures:
                    raise failures[name]
                answers = programs[name].answers() if name in programs else {}
                for protocol in select_scored_pairs(name, metric, protocols):
                    protocol_tokens = tokens.get(protocol.name, Tokens({}, {}, None))
                    inputs = MetricInputs(protocol_tokens, answers, parsed, judge)
                    computed_name, computed_metric = variant_for_protocol(name, metric, protocol)
                    metric_scores = computed_metric.compute(protocol.pairs, protocol.groups, inputs)
                    scores[protocol.name][computed_name] = metric_scores
            except ScorerFailed as failure:
                for protocol_scores in scores.values():
                    # a protocol that was scored before the metric failed keeps its scores
                    protocol_scores.setdefault(name, MetricScores({}, {}, {metric.main_score: str(failure)}))
    for protocol in protocols:
        if protocol.counts_characters:
            scores[protocol.name] |= explain_absent_word_scores(metrics)
        scores[protocol.name] |= explain_absent_records(metrics, protocol)
    return {
        protocol.name: merge_scores(list_metrics_of_protocol(metrics, protocol), protocol.groups, scores[protocol.name])
        for protocol in protocols
    }


def variant_for_protocol(name: str, metric: Metric, protocol: ProtocolPairs) -> tuple[str, Metric]:
    """Return the metric to compute for a protocol with its name: the character variant if the protocol needs it."""
    if protocol.counts_characters and metric.reads == "tokens":
        return f"{name}{BY_CHARACTERS}", make_character_variant(metric)
    return name, metric


def start_programs(
    programs: Mapping[str, Program],
    metrics: Mapping[str, Metric],
    protocols: Sequence[ProtocolPairs],
    tokens: Mapping[str, Tokens],
) -> dict[str, ScorerFailed]:
    """Start the Java program of each metric on the captions that the metric scores.

    Returns:
        Metric -> error, for each program that could not be started.
    """
    failures = {}
    for name, program in programs.items():
        scored = select_scored_pairs(name, metrics[name], protocols)
        items = distinct_items(tokens[protocol.name] for protocol in scored if protocol.name in tokens)
        try:
            program.start(items)
        except ScorerFailed as failure:
            failures[name] = failure
    return failures


def has_metric(protocol: ProtocolPairs, name: str, metric: Metric) -> bool:
    """Return whether a protocol has a metric. Protocols name the metrics that only they have."""
    return not metric.protocol_only or name in protocol.rules.metrics


def select_scored_pairs(name: str, metric: Metric, protocols: Iterable[ProtocolPairs]) -> list[ProtocolPairs]:
    """Return the protocols that a metric can score, each with the pairs that the metric scores.

    Metrics for English cannot score captions split into characters.

    Args:
        name: name of the metric in METRICS.
    """
    scored = []
    for protocol in protocols:
        if not has_metric(protocol, name, metric):
            continue
        selection = protocol.select(metric.records)
        is_unreadable = protocol.counts_characters and metric.reads == "English"
        if selection.pairs and not is_unreadable:
            scored.append(selection)
    return scored


def distinct_items(tokens: Iterable[Tokens]) -> list[Item]:
    """Return the predictions with their references. An item that occurs in several protocols is returned once."""
    items: dict[Item, None] = {}  # a dict keeps the order
    for protocol_tokens in tokens:
        items |= dict.fromkeys(map(protocol_tokens.item, protocol_tokens.predictions))
    return list(items)


def list_metrics_of_protocol(metrics: Mapping[str, Metric], protocol: ProtocolPairs) -> dict[str, Metric]:
    """Return the metrics that metrics.json lists for a protocol: see `list_metrics_of_protocols`."""
    return list_metrics_of_protocols(metrics, [protocol])


def list_metrics_of_protocols(metrics: Mapping[str, Metric], protocols: Iterable[ProtocolPairs]) -> dict[str, Metric]:
    """Return the metrics that metrics.json lists for at least one of the protocols.

    Metrics of answers are listed if a record has a question of its own. Metrics on characters are listed if a protocol
    counts characters. Metrics that only some protocols have are listed if one of these names them.
    """
    needs_characters = False
    listed_names: set[str] = set()
    for protocol in protocols:
        needs_characters |= protocol.counts_characters
        for name, metric in metrics.items():
            if has_metric(protocol, name, metric) and (protocol.has_questions or metric.records != "questions"):
                listed_names.add(name)
    listed = {name: metric for name, metric in metrics.items() if name in listed_names}
    return add_character_variants(listed) if needs_characters else listed


def explain_absent_word_scores(metrics: Mapping[str, Metric]) -> dict[str, MetricScores]:
    """Explain why a protocol that counts characters has no scores on words.

    Returns:
        Metric -> an empty result whose `absent` holds the reason for each score. A metric that reads no tokens is not
        included, because its scores exist.
    """
    empty_results = {}
    for name, metric in metrics.items():
        if metric.reads == "English":
            empty_results[name] = MetricScores({}, {}, dict.fromkeys(metric.scores, ENGLISH_ONLY))
        elif metric.reads == "tokens":
            reasons = {
                score: f"the references have no spaces between words; {score}{BY_CHARACTERS} counts characters"
                for score in metric.scores
            }
            empty_results[name] = MetricScores({}, {}, reasons)
    return empty_results


def explain_absent_records(metrics: Mapping[str, Metric], protocol: ProtocolPairs) -> dict[str, MetricScores]:
    """Explain why metrics have no scores because the protocol has no record that they score.

    Returns:
        Metric -> an empty result whose `absent` holds the reason. A metric that scores records is not included.
    """
    empty_results = {}
    for name, metric in metrics.items():
        if not protocol.select(metric.records).pairs:
            empty_results[name] = MetricScores({}, {}, {metric.main_score: ABSENT_RECORDS[metric.records]})
    return empty_results


def tokenise_protocols(protocols: Sequence[ProtocolPairs], limit_s: int) -> dict[str, Tokens]:
    """Tokenise the texts of all protocols. Protocols with the same rules share one run of the tokenizer.

    Returns:
        The tokens by protocol name. A protocol without texts has none.
    """
    protocols_by_rules: dict[TokenRules, list[ProtocolPairs]] = {}
    for protocol in protocols:
        texts = protocol.select("texts")
        if not texts.pairs:
            continue
        rules = TokenRules(protocol.rules.tokenizer, by_characters=protocol.counts_characters)
        protocols_by_rules.setdefault(rules, []).append(texts)
    tokens_by_protocol = {}
    for rules, protocols_of_rules in protocols_by_rules.items():
        tokens = tokenise_texts(collect_texts(protocols_of_rules), rules, limit_s)
        for protocol in protocols_of_rules:
            tokens_by_protocol[protocol.name] = look_up_tokens(protocol.pairs, tokens)
    return tokens_by_protocol


def collect_texts(protocols: Iterable[ProtocolPairs]) -> list[str]:
    """Return all texts to tokenise: predictions, references, and captions of the shuffled control."""
    texts = []
    for protocol in protocols:
        for pair in protocol.pairs:
            texts += [pair.prediction, *pair.references]
            if pair.shuffled_prediction is not None:
                texts.append(pair.shuffled_prediction)
    return texts


def tokenise_texts(texts: Iterable[str], rules: TokenRules, limit_s: int) -> Mapping[str, str]:
    """Return the tokens of each text, joined by spaces.

    Raises:
        ScorerFailed: the PTB tokenizer failed.
    """
    tokenizers: dict[str, Tokenizer] = {
        "ptb": partial(tokenise, limit_s=limit_s),
        "whitespace": split_at_spaces,
        "lowercase": split_lowercase_words,
    }
    tokenise_words = tokenizers[rules.tokenizer]
    return tokenise_characters(texts, tokenise_words) if rules.by_characters else tokenise_words(texts)


def split_at_spaces(texts: Iterable[str]) -> dict[str, str]:
    """Return the words of each text, joined by single spaces."""
    return {text: sanitise(text) for text in texts}


def split_lowercase_words(texts: Iterable[str]) -> dict[str, str]:
    """Return the words of each text in lower case and without full stops, joined by single spaces."""
    return {text: sanitise(text.lower().replace(".", " ")) for text in texts}


def look_up_tokens(pairs: Iterable[EvalPair], tokens: Mapping[str, str]) -> Tokens:
    """Return the tokens of the captions of some pairs.

    Args:
        tokens: text -> its tokens, joined by spaces.
    """
    references = {}
    predictions = {}
    shuffled = {}
    for pair in pairs:
        references[pair.id] = [tokens[reference] for reference in pair.references]
        predictions[pair.id] = tokens[pair.prediction]
        if pair.shuffled_prediction is not None:
            shuffled[pair.id] = tokens[pair.shuffled_prediction]
    return Tokens(references, predictions, shuffled or None)


def merge_scores(metrics: Mapping[str, Metric], groups: Groups, scores: Mapping[str, MetricScores]) -> MetricScores:
    """Merge the scores of all metrics, in the order of the metrics. A score that was not computed is None.

    Args:
        scores: scores by metric.
    """
    names: list[str] = []
    overall_names: list[str] = []
    for metric in metrics.values():
        names += metric.scores
        overall_names += metric.overall
    group_scores: dict[str, dict[str, Any]] = {
        group: dict.fromkeys(names + overall_names if group == ALL_PAIRS else names) for group in groups
    }
    pair_scores: dict[str, dict[str, Any]] = {pair_id: {} for pair_id in groups[ALL_PAIRS]}
    absent: dict[str, str] = {}
    for name in metrics:
        metric_scores = scores.get(name, MetricScores({}, {}))
        for group, values in metric_scores.groups.items():
            group_scores[group].update(values)
        for pair_id, values_of_pair in metric_scores.pairs.items():
            pair_scores[pair_id].update(values_of_pair)
        absent.update(metric_scores.absent)
    return MetricScores(group_scores, pair_scores, absent)

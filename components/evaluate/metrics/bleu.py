"""BLEU-1 to BLEU-4 (Papineni et al., ACL 2002), by pycocoevalcap."""

from components.evaluate.metrics.metric import ALL, Groups, Metric, MetricScores, Tools, of_each_group
from components.evaluate.pairs import EvalPair

NAMES = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4")


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """BLEU of a group is of its corpus, not a mean over pairs; a pair has BLEU-4 alone."""
    references, predictions, _ = tools.tokens()
    found = of_each_group(groups, lambda ids: bleu(references, predictions, ids))
    _, (*_, bleu_4) = found[ALL]
    return MetricScores(
        {name: dict(zip(NAMES, corpus, strict=True)) for name, (corpus, _) in found.items()},
        {i: {"BLEU-4": value} for i, value in zip(groups[ALL], bleu_4, strict=True)},
    )


def bleu(
    references: dict[str, list[str]], predictions: dict[str, str], ids: list[str]
) -> tuple[list[float], list[list[float]]]:
    """BLEU-1..4 of the corpus of these pairs, and four lists of the pairs' own."""
    from pycocoevalcap.bleu.bleu import Bleu

    return Bleu(4).compute_score({i: references[i] for i in ids}, {i: [predictions[i]] for i in ids}, verbose=0)


METRIC = Metric(compute, headline="BLEU-4", scores=NAMES, columns={"BLEU-4": "double"})

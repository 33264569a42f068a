"""CIDEr-D (Vedantam et al., CVPR 2015), by pycocoevalcap, and its control: that of shuffled pairs' predictions."""

import numpy as np

from components.evaluate.metrics.metric import ALL, Groups, Metric, MetricScores, Tools, Value, of_each_group
from components.evaluate.pairs import EvalPair

NO_SHUFFLED = "there are no predictions of shuffled pairs (predictions_shuffled.json), or only one pair"


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """0 to 10. Word weights come from the references of the group itself, so groups do not average to the whole."""
    references, predictions, shuffled = tools.tokens()
    found = of_each_group(groups, lambda ids: cider(references, predictions, ids))
    control = None if shuffled is None else control_cider(references, shuffled, groups[ALL])
    scores: dict[str, dict[str, Value]] = {name: {"CIDEr": corpus} for name, (corpus, _) in found.items()}
    scores[ALL]["CIDEr_shuffled"] = control
    return MetricScores(
        scores,
        {i: {"CIDEr": value} for i, value in zip(groups[ALL], found[ALL][1], strict=True)},
        {} if control is not None else {"CIDEr_shuffled": NO_SHUFFLED},
    )


def control_cider(references: dict[str, list[str]], shuffled: dict[str, str], ids: list[str]) -> float | None:
    """Mean CIDEr-D of the pairs that have a shuffled prediction, with the word weights of all `ids`.

    With the weights of its own pairs alone a sample's score would not compare with the CIDEr of all.
    """
    corpus, each = cider(references, {i: shuffled.get(i, "") for i in ids}, ids)
    if corpus is None or len(shuffled) == len(ids):
        return corpus
    return float(np.mean([value for i, value in zip(ids, each, strict=True) if i in shuffled]))


def cider(
    references: dict[str, list[str]], predictions: dict[str, str], ids: list[str]
) -> tuple[float | None, list[float]]:
    """CIDEr-D of a set of pairs and of each. Word weights come from the set itself, so of one pair there is none."""
    from pycocoevalcap.cider.cider import Cider

    if len(ids) < 2:
        return None, [0.0] * len(ids)
    corpus, pairs = Cider().compute_score({i: references[i] for i in ids}, {i: [predictions[i]] for i in ids})
    return float(corpus), [float(value) for value in pairs]


METRIC = Metric(
    compute,
    headline="CIDEr",
    scores=("CIDEr",),
    overall=("CIDEr_shuffled",),
    columns={"CIDEr": "double"},
    lower_is_better=("CIDEr_shuffled",),
)

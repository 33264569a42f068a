"""Warn in plain language if a model has not learned anything yet.

Without this warning, only experts would know what a row of zeros means.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from m3diff.records.errors import format_count
from m3diff.report.curves import Phase, first_and_last_loss
from m3diff.scoring.grammar import normalise_caption
from m3diff.scoring.metrics import BY_CHARACTERS
from m3diff.scoring.protocols import ProtocolPairs
from m3diff.scoring.results import ProtocolScores
from m3diff.stages.train.params import ENOUGH_STEPS, NO_CIDER

MAX_EXACT_SHARE = 0.02  # a model with a larger share of captions that equal a reference has learned something
MIN_LOSS_FALL = 0.5  # if the final loss is more than this share of the first loss, it has hardly fallen
EMBEDDED_BASE = "00_base"  # folder of the small base model that is part of the project


class LearningVerdict(NamedTuple):
    """A sentence saying that a model has not learned to describe changes, and advice on what to try."""

    sentence: str
    advice: list[str]


def judge_learning_by_scores(
    protocols: Sequence[ProtocolPairs],
    scores: Mapping[str, ProtocolScores],
    training: Phase | None = None,
    base: str = "",
) -> LearningVerdict | None:
    """Return a warning if the model has not learned to describe changes, otherwise None.

    Args:
        protocols: first protocol of each dataset.
        scores: scores by protocol.
        training: last training phase of the run. None if it is not known.
        base: folder of the base model that was trained.
    """
    ciders = [find_cider(scores[protocol.name]) for protocol in protocols]
    computed_ciders = [cider for cider in ciders if cider is not None]
    if not computed_ciders or max(computed_ciders) >= NO_CIDER or share_of_exact_captions(protocols) > MAX_EXACT_SHARE:
        return None
    highest_cider = f"{100 * max(computed_ciders):.1f}"
    test_sets_in_words = "the test set" if len(computed_ciders) == 1 else f"all {len(computed_ciders)} test sets"
    sentence = f"The model has not learned to describe changes yet: CIDEr is {highest_cider} on {test_sets_in_words}."
    captions: set[str] = set()
    for protocol in protocols:
        captions |= {pair.prediction for pair in protocol.pairs}
    if len(captions) == 1:
        sentence += f" It writes the same caption for every pair: “{captions.pop() or '(nothing)'}”."
    return LearningVerdict(sentence, give_advice(training, base))


def find_cider(scores: ProtocolScores) -> float | None:
    """Return the CIDEr over all pairs, computed on words or, if that is absent, on characters."""
    cider = scores.scores.get("CIDEr")
    if cider is None:
        return scores.scores.get(f"CIDEr{BY_CHARACTERS}")
    return cider


def share_of_exact_captions(protocols: Sequence[ProtocolPairs]) -> float:
    """Return the share of captions that equal one of their references.

    CIDEr alone is not enough for a verdict: if all references use the same words, CIDEr is 0 for any caption.
    """
    pairs = 0
    exact_captions = 0
    for protocol in protocols:
        for pair in protocol.pairs:
            pairs += 1
            references = [normalise_caption(reference) for reference in pair.references]
            exact_captions += normalise_caption(pair.prediction) in references
    return exact_captions / pairs if pairs else 0.0


def give_advice(training: Phase | None, base: str) -> list[str]:
    """Return sentences of advice, based on the training and its base model."""
    advice = []
    if training is not None and training.steps:
        advice += give_training_advice(training)
    if base.rstrip("/").endswith(EMBEDDED_BASE):
        advice.append(
            "The base that comes with the project only knows its own drawn scenes. For photographs, start with a real "
            "base, as docs/your-data.md explains."
        )
    return advice or ["Look at some pairs below. Captions of one word or none indicate an unsuitable prompt or base."]


def give_training_advice(training: Phase) -> list[str]:
    """Return the length of a training phase and how its loss changed, followed by advice on what to try."""
    loss = first_and_last_loss(training)
    loss_change = "" if loss is None else f", and the loss changed from {loss[0]:.2f} to {loss[1]:.2f}"
    advice = [f"It trained for {format_count(training.steps, 'step')}{loss_change}."]
    if training.steps < ENOUGH_STEPS:
        advice.append(f"A model learns little in fewer than {ENOUGH_STEPS} steps. Raise train.epochs, or add pairs.")
    if loss is not None and loss[1] > MIN_LOSS_FALL * loss[0]:
        advice.append(
            "The loss has hardly fallen. Train longer, or raise the learning rates (models.NAME.rates in params.yaml)."
        )
    return advice

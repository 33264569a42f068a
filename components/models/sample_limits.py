"""Which samples a model can answer: what its family can process, and what the model was trained on.

A model that never saw a single image, or a question with turns before it, would answer such a sample with a text that
only looks like an answer. Such a sample is refused. A question that the model never saw is answered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from m3diff.models.contract import Takes
from m3diff.records.errors import Fault


@dataclass(frozen=True)
class TrainedOn:
    """The samples that a model was trained on, as its manifest describes them.

    The defaults apply to a manifest from before these fields existed, when every sample was a pair and one question.

    Attributes:
        question: the question that is asked by default. None if the manifest does not name it.
        images: numbers of images of the samples.
        turns: number of turns of the longest dialogue. 1 if no question had turns before it.
        own_questions: whether datasets brought questions of their own, so that other questions than `question` were
            trained.
    """

    question: str | None = None
    images: tuple[int, ...] = (2,)
    turns: int = 1
    own_questions: bool = False


def answerable_images(takes: Takes, trained_on: TrainedOn) -> tuple[int, ...]:
    """Return the numbers of images that a model can be asked about."""
    return tuple(count for count in takes.images if count in trained_on.images)


def fault_of_family(takes: Takes, images: int, question: str | None, earlier_turns: int) -> Fault | None:
    """Return why no model of a family can answer a sample, or None if its models can be trained to.

    Args:
        takes: the samples that the family can process.
        images: number of images.
        question: the question to be answered. None for a question that does not matter, such as the default one.
        earlier_turns: number of turns before the question.
    """
    if images not in takes.images:
        return Fault("models.images_not_taken", value=images, expected=describe_image_counts(takes.images))
    if question is not None and not takes.questions:
        return Fault("models.question_not_read", value=question)
    if earlier_turns and not takes.turns:
        return Fault("models.history_not_read", value=earlier_turns)
    return None


def fault_of_sample(
    takes: Takes, trained_on: TrainedOn, images: int, question: str | None, earlier_turns: int
) -> Fault | None:
    """Return why a model cannot answer a sample, or None if it can.

    Args:
        takes: the samples that the model's family can process.
        trained_on: the samples that the model was trained on.
        images: number of images.
        question: the question to be answered. None for the default question of the model.
        earlier_turns: number of turns before the question.
    """
    fault = fault_of_family(takes, images, question, earlier_turns)
    if fault is not None:
        return fault
    answerable = answerable_images(takes, trained_on)
    if images not in answerable:
        return Fault("models.images_not_trained", value=images, expected=describe_image_counts(answerable))
    if earlier_turns and trained_on.turns == 1:
        return Fault("models.history_not_trained", value=earlier_turns)
    return None


def describe_image_counts(counts: Sequence[int]) -> str:
    """Return numbers of images in words, such as "0, 1 or 2 images"."""
    if not counts:
        return "no number of images"
    first_counts = ", ".join(map(str, counts[:-1]))
    numbers = f"{first_counts} or {counts[-1]}" if first_counts else str(counts[-1])
    return f"{numbers} image" if counts[-1] == 1 else f"{numbers} images"

"""Limits on samples: a model answers samples that its family takes and that it was trained on."""

import pytest

from m3diff.models.contract import Takes
from m3diff.models.sample_limits import TrainedOn, describe_image_counts, fault_of_family, fault_of_sample
from m3diff.records.errors import Fault

PAIRS_ALONE = Takes(images=(2,), questions=False, turns=False)
ANYTHING = Takes(images=(0, 1, 2), questions=True, turns=True)

FAULTS_OF_FAMILIES = {
    "a pair": (PAIRS_ALONE, (2, None, 0), None),
    "one image": (PAIRS_ALONE, (1, None, 0), Fault("models.images_not_taken", value=1, expected="2 images")),
    "a question": (PAIRS_ALONE, (2, "Why?", 0), Fault("models.question_not_read", value="Why?")),
    "earlier turns": (PAIRS_ALONE, (2, None, 3), Fault("models.history_not_read", value=3)),
    "all of these": (ANYTHING, (0, "Why?", 3), None),
    "three images": (ANYTHING, (3, None, 0), Fault("models.images_not_taken", value=3, expected="0, 1 or 2 images")),
}


@pytest.mark.parametrize(("takes", "sample", "fault"), FAULTS_OF_FAMILIES.values(), ids=FAULTS_OF_FAMILIES)
def test_a_family_says_which_samples_no_model_of_it_can_answer(takes, sample, fault):
    assert fault_of_family(takes, *sample) == fault


FAULTS_OF_SAMPLES = {
    "as in training": (TrainedOn(images=(1, 2), turns=2), (1, "Why?", 5), None),
    "an untrained number": (
        TrainedOn(images=(1, 2)),
        (0, None, 0),
        Fault("models.images_not_trained", value=0, expected="1 or 2 images"),
    ),
    "a trained number that is not taken": (
        TrainedOn(images=(2, 7)),
        (7, None, 0),
        Fault("models.images_not_taken", value=7, expected="0, 1 or 2 images"),
    ),
    "turns after single questions": (TrainedOn(), (2, "Why?", 1), Fault("models.history_not_trained", value=1)),
    "a single question": (TrainedOn(), (2, "Why?", 0), None),
}


@pytest.mark.parametrize(("trained_on", "sample", "fault"), FAULTS_OF_SAMPLES.values(), ids=FAULTS_OF_SAMPLES)
def test_a_model_answers_what_its_family_takes_and_it_was_trained_on(trained_on, sample, fault):
    assert fault_of_sample(ANYTHING, trained_on, *sample) == fault


@pytest.mark.parametrize(
    ("counts", "words"),
    [((), "no number of images"), ((1,), "1 image"), ((2,), "2 images"), ((0, 1), "0 or 1 image")],
    ids=str,
)
def test_the_numbers_of_images_that_a_model_takes_are_named_in_words(counts, words):
    assert describe_image_counts(counts) == words

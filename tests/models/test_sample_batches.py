"""Batches of samples that are answered together, and the size of their parts."""

from collections.abc import Iterator
from typing import Any

import pytest

from m3diff.models import generation
from m3diff.models.generation import Captioner
from m3diff.models.prepared import Prepared
from m3diff.models.sample_batches import split_by_bytes, split_by_shape
from m3diff.records.sample import Turn
from tests.prepared_sets import SET_BYTES, PreparedSets


def prepare(sets: PreparedSets, count: int) -> Iterator[Prepared]:
    return (sets.prepare(["image"]) for _ in range(count))


@pytest.mark.parametrize(
    ("shapes", "size", "batches"),
    [
        ([(2, 5), (1, 5), (2, 5), (2, 6), (1, 5)], None, [[0, 2], [1, 4], [3]]),
        ([(2, 5), (1, 5), (2, 5), (2, 6), (1, 5)], 1, [[0], [2], [1], [4], [3]]),
        ([(2, 5)] * 5, 2, [[0, 1], [2, 3], [4]]),
        ([(2, 5)] * 4, 2, [[0, 1], [2, 3]]),
        ([(2, 5, True), (2, 5, False), (2, 5, True)], 9, [[0, 2], [1]]),
        ([], 2, []),
    ],
)
def test_samples_of_one_shape_share_batches_in_the_order_of_their_first_samples(shapes, size, batches):
    assert split_by_shape(shapes, size) == batches


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([1, 1, 1], [[1, 1, 1]]),
        ([4, 5, 1, 9, 2], [[4, 5, 1], [9, 2]]),
        ([10, 10], [[10], [10]]),
        ([30, 1, 9], [[30], [1, 9]]),
        ([0, 0], [[0, 0]]),
        ([], []),
    ],
)
def test_a_part_ends_with_the_image_set_that_reaches_the_limit(sizes, parts):
    sets = PreparedSets(sizes)
    assert [[images.nbytes for images in part] for part in split_by_bytes(prepare(sets, len(sizes)), 10)] == parts


def test_a_part_is_emptied_before_the_next_image_set_is_prepared():
    sets = PreparedSets()
    for part in split_by_bytes(prepare(sets, 7), 3 * SET_BYTES):
        assert sets.held_bytes == len(part) * SET_BYTES
    assert sets.peak_bytes == 3 * SET_BYTES


def test_dialogues_are_answered_in_parts_that_fit_into_memory(monkeypatch):
    monkeypatch.setattr(generation, "MAX_PREPARED_BYTES", 2 * SET_BYTES)
    dialogues = [(Turn(f"{number}?"),) for number in range(5)]
    sizes = []

    def answer(self: Any, prepared: Any, turns: Any, saliency: bool = False) -> Any:
        sizes.append(len(prepared))
        return [turn.question for (turn,) in turns], None

    monkeypatch.setattr(Captioner, "answer", answer)
    sets = PreparedSets()
    captioner = Captioner.__new__(Captioner)
    assert captioner.answer_in_parts(prepare(sets, 5), dialogues) == [f"{number}?" for number in range(5)]
    assert sizes == [2, 2, 1]
    assert sets.peak_bytes == 2 * SET_BYTES

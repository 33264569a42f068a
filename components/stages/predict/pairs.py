"""The pairs of the test split, those of the two controls, and the batches of all."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

from m3diff.records.errors import DataError, readable

CONTROL_SEED = 0
CONTROL_PAIRS = 600
"""Pairs of each control at most, sampled from all."""


class PairSample(NamedTuple):
    """A pair of the test split; digests as in the samples, 32 bytes."""

    id: str
    before: str
    after: str
    before_sha256: bytes | None
    after_sha256: bytes | None
    question: str


COLUMNS = ["pair", *PairSample._fields[1:]]


def read_test_pairs(mixture: Path) -> list[PairSample]:
    """The test split's pairs, each once, in the mixture's order.

    Raises:
        DataError: there is none.
    """
    pairs: dict[str, PairSample] = {}
    for file in sorted((mixture / "test").glob("*.parquet")):
        with readable(file):
            table = pq.read_table(file, columns=COLUMNS).to_pydict()
        for row in zip(*(table[column] for column in COLUMNS), strict=True):
            pairs.setdefault(row[0], PairSample(*row))
    if not pairs:
        raise DataError(f"{mixture / 'test'}: no sample of the test split; run `m3diff convert` and read its report")
    return list(pairs.values())


def shuffle_after(pairs: list[PairSample]) -> list[PairSample]:
    """Hand the after-images on by half the list: every pair gets another's, for any two or more."""
    shift = max(1, len(pairs) // 2)
    others = pairs[shift:] + pairs[:shift]
    return [a._replace(after=b.after, after_sha256=b.after_sha256) for a, b in zip(pairs, others, strict=True)]


def sampled(pairs: list[PairSample], count: int = CONTROL_PAIRS) -> list[int]:
    """Return the numbers of `count` pairs (all where there are fewer), by a seed, in order. A smaller count is part of
    a larger one."""
    return sorted(np.random.default_rng(CONTROL_SEED).permutation(len(pairs))[:count])


def control_pairs(pairs: list[PairSample], count: int = CONTROL_PAIRS) -> list[PairSample]:
    """Return sampled pairs with another's image after; the partners come from the whole list."""
    shuffled = shuffle_after(pairs)
    return [shuffled[number] for number in sampled(pairs, count)]


def reversed_pairs(pairs: list[PairSample], count: int = CONTROL_PAIRS) -> list[PairSample]:
    """Return the pairs of `control_pairs`, each with its own two images swapped: after first, before second."""
    return [
        pair._replace(
            before=pair.after, after=pair.before, before_sha256=pair.after_sha256, after_sha256=pair.before_sha256
        )
        for pair in (pairs[number] for number in sampled(pairs, count))
    ]


def batches(pairs: Sequence[PairSample], size: int) -> list[list[PairSample]]:
    """Up to `size` pairs of one question each: without padding, no pair changes another's caption."""
    by_question: dict[str, list[PairSample]] = {}
    for pair in pairs:
        by_question.setdefault(pair.question, []).append(pair)
    return [same[at : at + size] for same in by_question.values() for at in range(0, len(same), size)]

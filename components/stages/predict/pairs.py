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


def control_pairs(pairs: list[PairSample], count: int = CONTROL_PAIRS) -> tuple[list[PairSample], list[PairSample]]:
    """Return two controls of `count` pairs (all where there are fewer), sampled by a seed, in order.

    In the first, each has the image after of another pair, half the list on: of any two or more pairs none keeps its
    own, and the partners come from the whole list. In the second, each has its own two images swapped. A smaller count
    gives a part of a larger one.
    """
    shift = max(1, len(pairs) // 2)
    shuffled, swapped = [], []
    for number in sorted(np.random.default_rng(CONTROL_SEED).permutation(len(pairs))[:count]):
        one, other = pairs[number], pairs[(number + shift) % len(pairs)]
        shuffled.append(one._replace(after=other.after, after_sha256=other.after_sha256))
        swapped.append(PairSample(one.id, one.after, one.before, one.after_sha256, one.before_sha256, one.question))
    return shuffled, swapped


def batches(pairs: Sequence[PairSample], size: int) -> list[list[PairSample]]:
    """Up to `size` pairs of one question each: without padding, no pair changes another's caption."""
    by_question: dict[str, list[PairSample]] = {}
    for pair in pairs:
        by_question.setdefault(pair.question, []).append(pair)
    return [same[at : at + size] for same in by_question.values() for at in range(0, len(same), size)]

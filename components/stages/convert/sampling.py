"""Random numbers that depend on the seed and an id alone. Neither other records nor a library's version change them,
which the hashes of polars and Python do not promise."""

import hashlib
from collections.abc import Iterable

import numpy as np
import polars as pl
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
QUESTION, NO_CHANGE_KEPT, EXTRA_COPY, MAX_PAIRS, ORDER, REFERENCE = range(6)
"""Which random number of an id's key decides what."""


def id_keys(seed: int, ids: Iterable[str]) -> pl.Series:
    """64 bits per id, from blake2b keyed by the seed; UInt64 [ids]."""
    hasher = hashlib.blake2b(digest_size=8, key=str(seed).encode())
    digests = []
    for name in ids:
        one = hasher.copy()
        one.update(name.encode())
        digests.append(one.digest())
    return pl.Series("key", np.frombuffer(b"".join(digests), dtype="<u8"), dtype=pl.UInt64)


def random_bits(keys: pl.Series, number: pl.Series | int) -> pl.Series:
    """Independent 64 bits per key and number: the finalizer of splitmix64 (Steele et al., OOPSLA 2014)."""
    step = np.asarray(number, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = keys.to_numpy() + (step + np.uint64(1)) * GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return pl.Series(z ^ (z >> np.uint64(31)), dtype=pl.UInt64)


def uniform(bits: pl.Series) -> NDArray[np.float64]:
    """64 bits as a number in [0, 1)."""
    return (bits.to_numpy() >> np.uint64(11)).astype(np.float64) / 2.0**53

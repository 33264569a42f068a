"""A made pair, and what a kind of made dataset gives."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.stages.augment.source import Rejected


class Pair(NamedTuple):
    """One pair. `made` says how it came about, for people: the reader passes over it."""

    id: str
    split: str
    scene: str
    before: Path
    after: Path
    captions: list[str]
    change_types: list[str]
    made: Mapping[str, Any]


class Made(NamedTuple):
    """Pairs in order; of the others how many were rejected, by reason; and texts that a writer gave in vain."""

    pairs: list[Pair]
    rejected: Rejected
    dropped_texts: Counter[str]
    models: dict[str, str]  # digests of what made it, by its part


def seed_of(*facts: object) -> int:
    """A seed of 32 bits that follows from the facts."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, facts)).encode()).digest()[:4])

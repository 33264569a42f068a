"""Which pairs are scored together: each dataset by its own evaluation protocols, and within one by what changed."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, Protocol
from m3diff.records.errors import DataError
from m3diff.scoring.metrics.metric import ALL, Groups
from m3diff.scoring.pairs import EvalPair


@dataclass(frozen=True)
class ProtocolPairs:
    """A dataset's pairs as one of its protocols scores them."""

    dataset: str
    protocol: Protocol
    pairs: list[EvalPair]

    @property
    def name(self) -> str:
        """As metrics.json, scores.parquet and the gate name it."""
        return f"{self.dataset}/{self.protocol.name}"

    @cached_property
    def groups(self) -> Groups:
        return {ALL: [pair.id for pair in self.pairs], **group_pairs(self.pairs)}


def load_specs(records: Path, datasets: Iterable[str]) -> dict[str, DatasetSpec]:
    """What is known of each dataset, by the reader that ingest's report `records/<dataset>.json` names.

    Raises:
        DataError: there is no such report, or no such reader; without it neither licence nor protocol is known.
    """
    specs = {}
    for dataset in datasets:
        path = records / f"{dataset}.json"
        if not path.is_file():
            raise DataError(
                f"{path}: no such file, so the licence of {dataset!r} is unknown; run `m3diff ingest` again"
            )
        reader = json.loads(path.read_text(encoding="utf-8")).get("reader")
        if reader not in DATASETS:
            raise DataError(
                f"{path}: reader {reader!r} is unknown; known: {', '.join(DATASETS)}; run `m3diff ingest` again"
            )
        specs[dataset] = DATASETS[reader]
    return specs


def protocols_of(dataset: str, spec: DatasetSpec) -> tuple[Protocol, ...]:
    """How the dataset is scored: the protocols of its part, the headline's first; every pair where it has none."""
    fitting = [protocol for protocol in spec.protocols if protocol.part in (None, dataset) and protocol.split == "test"]
    return tuple(fitting) or (Protocol("test", n=None),)


def select(pairs: list[EvalPair], specs: Mapping[str, DatasetSpec]) -> list[ProtocolPairs]:
    """The pairs of every protocol of every dataset that has any, in the order of `specs`."""
    found = [
        ProtocolPairs(dataset, protocol, apply(protocol, [pair for pair in pairs if pair.dataset == dataset]))
        for dataset, spec in specs.items()
        for protocol in protocols_of(dataset, spec)
    ]
    return [one for one in found if one.pairs]


def apply(protocol: Protocol, pairs: Iterable[EvalPair]) -> list[EvalPair]:
    """A dataset's pairs that a protocol takes, with references and predictions as it scores them."""
    return [as_scored(protocol, pair) for pair in pairs if takes(protocol, pair)]


def takes(protocol: Protocol, pair: EvalPair) -> bool:
    name = pair.id.removeprefix(f"{pair.dataset}/")
    known = not protocol.change_types or (
        bool(pair.change_types) and set(pair.change_types) <= set(protocol.change_types)
    )
    return known and re.fullmatch(protocol.ids, name) is not None


def as_scored(protocol: Protocol, pair: EvalPair) -> EvalPair:
    if protocol.references == "all" and protocol.max_words is None:
        return pair
    references = [". ".join(pair.references)] if protocol.references == "joined" else pair.references

    def cut(text: str) -> str:
        return " ".join(text.split()[: protocol.max_words])

    shuffled, swapped = pair.shuffled_prediction, pair.reversed_prediction
    return replace(
        pair,
        references=[cut(reference) for reference in references],
        prediction=cut(pair.prediction),
        shuffled_prediction=None if shuffled is None else cut(shuffled),
        reversed_prediction=None if swapped is None else cut(swapped),
    )


LENGTHS = {"1-9": 1, "10-19": 10, "20-39": 20, "40 or more": 40}
"""Groups by the mean number of words of a pair's references, with the fewest words of each."""


def group_pairs(pairs: list[EvalPair]) -> Groups:
    """Ids of the pairs of each group that has scores of its own: by what changed, by how many changes there are and by
    how long the references are; the last two only where they tell pairs apart."""
    groups: Groups = {"change": [], "multi_change": [], "distractors": []}
    types: dict[str, list[str]] = defaultdict(list)
    for pair in pairs:
        if pair.changes:
            groups["change"].append(pair.id)
            types[f"by_type/{pair.changes[0]}" if len(pair.changes) == 1 else "multi_change"].append(pair.id)
        if pair.is_distractor:
            groups["distractors"].append(pair.id)
    groups["multi_change"] = types.pop("multi_change", [])
    changed = [pair for pair in pairs if not pair.is_distractor]
    by_changes = split_by([(len(pair.changes), pair.id) for pair in changed if pair.changes])
    by_length = split_by([(fewest_words(pair), pair.id) for pair in changed])
    names = {fewest: name for name, fewest in LENGTHS.items()}
    return (
        groups
        | dict(sorted(types.items()))
        | {f"by_changes/{count}": ids for count, ids in by_changes.items()}
        | {f"by_length/{names[fewest]}": ids for fewest, ids in by_length.items()}
    )


def split_by(numbered: list[tuple[int, str]]) -> dict[int, list[str]]:
    """The ids of each number, in order; nothing where all have the same."""
    numbers = sorted({number for number, _ in numbered})
    if len(numbers) < 2:
        return {}
    return {each: [i for number, i in numbered if number == each] for each in numbers}


def fewest_words(pair: EvalPair) -> int:
    """The lower bound of the length of the pair's references, empty ones left out."""
    counts = [len(reference.split()) for reference in pair.references if reference.strip()]
    mean = sum(counts) / max(1, len(counts))
    return max((fewest for fewest in LENGTHS.values() if fewest <= mean), default=1)

"""Pairs that are scored together, each dataset by its own evaluation protocols and within one by what changed, and
published figures of a protocol.

published/results.csv has every method's row of a benchmark's headline protocol, or of a "<benchmark>/<protocol>", times
100, its paper, and how it is known that its epoch was chosen on the test split. A result that several papers print is
there once.
"""

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, Protocol
from m3diff.records.errors import DataError
from m3diff.scoring.metrics import ALL, Groups
from m3diff.scoring.pairs import EvalPair

LENGTHS = {1: "1-9", 10: "10-19", 20: "20-39", 40: "40 or more"}
"""Groups by the mean number of words of a pair's references, by the fewest words of each."""
COLUMNS = {"bleu_4": "BLEU-4", "meteor": "METEOR", "rouge_l": "ROUGE-L", "cider": "CIDEr", "spice": "SPICE"}
PUBLISHED_SCORES = tuple(COLUMNS.values())


@dataclass(frozen=True)
class ProtocolPairs:
    """A dataset's pairs as one of its protocols scores them."""

    dataset: str
    protocol: Protocol
    pairs: list[EvalPair]

    @property
    def name(self) -> str:
        """Name in metrics.json, in scores.parquet and for the gate."""
        return f"{self.dataset}/{self.protocol.name}"

    @cached_property
    def groups(self) -> Groups:
        return {ALL: [pair.id for pair in self.pairs], **group_pairs(self.pairs)}


def load_specs(records: Path, pairs: Iterable[EvalPair]) -> dict[str, DatasetSpec]:
    """The spec of each dataset of the pairs, by the reader that ingest's report `records/<dataset>.json` names.

    Raises:
        DataError: there is no such report, or no such reader; without it neither licence nor protocol is known.
    """
    specs = {}
    for dataset in dict.fromkeys(pair.dataset for pair in pairs):
        path = records / f"{dataset}.json"
        reader = json.loads(path.read_text(encoding="utf-8")).get("reader") if path.is_file() else ""
        if reader not in DATASETS:
            raise DataError(
                f"{path}: names no known reader ({reader!r}), so the licence of {dataset!r} is unknown; known: "
                f"{', '.join(DATASETS)}; run `m3diff ingest` again"
            )
        specs[dataset] = DATASETS[reader]
    return specs


def protocols_of(dataset: str, spec: DatasetSpec) -> tuple[Protocol, ...]:
    """The protocols of the dataset's part, the headline's first; one of every pair where it has none."""
    fitting = [protocol for protocol in spec.protocols if protocol.part in (None, dataset) and protocol.split == "test"]
    return tuple(fitting) or (Protocol("test", n=None),)


def select(pairs: Iterable[EvalPair], specs: Mapping[str, DatasetSpec]) -> list[ProtocolPairs]:
    """The pairs of every protocol of every dataset that has any, in the order of `specs`."""
    of: dict[str, list[EvalPair]] = defaultdict(list)
    for pair in pairs:
        of[pair.dataset].append(pair)
    found = [
        ProtocolPairs(dataset, protocol, apply(protocol, of[dataset]))
        for dataset, spec in specs.items()
        for protocol in protocols_of(dataset, spec)
    ]
    return [one for one in found if one.pairs]


def apply(protocol: Protocol, pairs: Iterable[EvalPair]) -> list[EvalPair]:
    """A dataset's pairs that a protocol takes, with references and predictions as it scores them."""
    taken = [pair for pair in pairs if takes(protocol, pair)]
    if protocol.references == "all" and protocol.max_words is None:
        return taken

    def cut(text: str) -> str:
        return " ".join(text.split()[: protocol.max_words])

    scored = []
    for pair in taken:
        references = [". ".join(pair.references)] if protocol.references == "joined" else pair.references
        said = {name: getattr(pair, name) for name in ("prediction", "shuffled_prediction", "reversed_prediction")}
        cuts: dict[str, Any] = {name: text if text is None else cut(text) for name, text in said.items()}
        scored.append(replace(pair, references=[cut(reference) for reference in references], **cuts))
    return scored


def takes(protocol: Protocol, pair: EvalPair) -> bool:
    name, types = pair.id.removeprefix(f"{pair.dataset}/"), set(pair.change_types)
    known = not protocol.change_types or (bool(types) and types <= set(protocol.change_types))
    return known and re.fullmatch(protocol.ids, name) is not None


def group_pairs(pairs: list[EvalPair]) -> Groups:
    """Ids of the pairs of each group that has scores of its own: by what changed, by how many changes there are and by
    how long the references are; the last two only where they tell pairs apart."""
    changed = [pair for pair in pairs if pair.changes]
    types = sorted({pair.changes[0] for pair in changed if len(pair.changes) == 1})
    not_calm = [pair for pair in pairs if not pair.is_distractor]
    by_changes = split_by([(len(pair.changes), pair.id) for pair in changed])
    by_length = split_by([(fewest_words(pair), pair.id) for pair in not_calm])
    return {
        "change": [pair.id for pair in changed],
        "multi_change": [pair.id for pair in changed if len(pair.changes) > 1],
        "distractors": [pair.id for pair in pairs if pair.is_distractor],
        **{f"by_type/{kind}": [pair.id for pair in changed if pair.changes == [kind]] for kind in types},
        **{f"by_changes/{count}": ids for count, ids in by_changes.items()},
        **{f"by_length/{LENGTHS[fewest]}": ids for fewest, ids in by_length.items()},
    }


def split_by(numbered: list[tuple[int, str]]) -> dict[int, list[str]]:
    """The ids of each number, in order; nothing where all have the same."""
    numbers = sorted({number for number, _ in numbered})
    return {each: [i for number, i in numbered if number == each] for each in numbers if len(numbers) > 1}


def fewest_words(pair: EvalPair) -> int:
    """The lower bound of the length of the pair's references, empty ones left out."""
    counts = [len(reference.split()) for reference in pair.references if reference.strip()] or [1]
    return max(fewest for fewest in LENGTHS if fewest <= sum(counts) / len(counts))


class PublishedRow(NamedTuple):
    """A method's figures on a benchmark, times 100."""

    method: str
    venue: str
    scores: dict[str, float | None]  # by the score's name; None: not printed
    source: str
    chosen_on_test: str | None  # how it is known that the epoch was chosen on the test split; None: it is not known


@cache
def published_rows(benchmark: str) -> list[PublishedRow]:
    """The figures of a benchmark's headline protocol, or of its "<benchmark>/<protocol>", in the file's order."""
    with (Path(__file__).parent / "published" / "results.csv").open(encoding="utf-8") as file:
        return [
            PublishedRow(
                method=row["method"],
                venue=row["venue"],
                scores={name: float(row[column]) if row[column] else None for column, name in COLUMNS.items()},
                source=row["source"],
                chosen_on_test=row["chosen_on_test"] or None,
            )
            for row in csv.DictReader(file)
            if row["benchmark"] == benchmark
        ]


def published_of(dataset: str, protocol: Protocol, is_headline: bool) -> list[PublishedRow]:
    """The published rows of a protocol: those of its benchmark are of the headline's."""
    return published_rows(dataset if is_headline else f"{dataset}/{protocol.name}")

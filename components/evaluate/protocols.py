"""Which pairs are scored together: by what changed, and by dataset as its evaluation protocol says."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from components.datasets import DATASETS
from components.datasets.spec import DatasetSpec, Protocol
from components.evaluate.metrics.metric import Groups
from components.evaluate.pairs import EvalPair
from components.records import DataError


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


def protocol_of(dataset: str, spec: DatasetSpec) -> Protocol:
    """How the dataset is scored: the first protocol for its part; every pair and reference where it has none."""
    fitting = (protocol for protocol in spec.protocols if protocol.part in (None, dataset) and protocol.split == "test")
    return next(fitting, Protocol("test", n=None))


def group_pairs(pairs: list[EvalPair], protocols: Mapping[str, Protocol]) -> Groups:
    """Ids of the pairs of each group that has scores of its own; `protocols` by dataset."""
    groups: Groups = {"change": [], "multi_change": [], "distractors": []}
    found: dict[str, list[str]] = defaultdict(list)
    for pair in pairs:
        if pair.changes:
            groups["change"].append(pair.id)
            found[f"by_type/{pair.changes[0]}" if len(pair.changes) == 1 else "multi_change"].append(pair.id)
        if pair.is_distractor:
            groups["distractors"].append(pair.id)
        if re.fullmatch(protocols[pair.dataset].ids, pair.id.removeprefix(f"{pair.dataset}/")):
            found[f"by_dataset/{pair.dataset}"].append(pair.id)
    return groups | dict(sorted(found.items()))

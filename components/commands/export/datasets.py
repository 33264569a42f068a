"""Read which datasets are in the mixture (the samples that convert wrote) and check their licences."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, Use, check_licence
from m3diff.records.errors import DataError, data_error_if_unreadable
from m3diff.settings.rules import entries_by_original_reader
from m3diff.settings.tree import Params
from m3diff.stages.ingest.params import DatasetEntry


@dataclass(frozen=True)
class MixtureDataset:
    """A dataset of the mixture.

    Attributes:
        name: name of the dataset in the parameters.
        spec: facts about the dataset.
        pairs: split -> number of pairs.
        samples: split -> number of samples.
    """

    name: str
    spec: DatasetSpec
    pairs: Mapping[str, int]
    samples: Mapping[str, int]

    @property
    def has_trained(self) -> bool:
        """Whether the training split of the mixture contains samples of this dataset."""
        return self.samples["train"] > 0


def read_datasets(params: Params) -> list[MixtureDataset]:
    """Return the datasets that are listed in the report of convert.

    Raises:
        DataError: the report is missing or does not list the datasets, or a dataset is not in the parameters.
    """
    report_file = params.paths.mixture / "report.json"
    counts_by_dataset = read_stage_report(report_file).get("datasets")
    if counts_by_dataset is None:
        raise DataError("export.unnamed_datasets", path=report_file)
    entries = entries_by_original_reader(params)
    return [
        MixtureDataset(name=name, spec=find_spec(name, entries), pairs=counts["pairs"], samples=counts["samples"])
        for name, counts in counts_by_dataset.items()
    ]


def read_stage_report(file: Path) -> dict[str, Any]:
    """Read the report of a stage. Return an empty report if the file does not exist."""
    with data_error_if_unreadable(file):
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def find_spec(name: str, entries: Mapping[str, DatasetEntry]) -> DatasetSpec:
    """Return the facts about a dataset of the mixture. Raises DataError if it is not in the parameters."""
    if name not in entries:
        raise DataError("export.dataset_not_in_params", key=name)
    return DATASETS[entries[name].reader]


def licence_notices(specs: Mapping[str, DatasetSpec], uses: Iterable[Use], allow_unlicensed: bool) -> list[str]:
    """Return the conditions of the datasets' licences for these uses.

    Raises:
        DataError: a licence does not permit a use, and `allow_unlicensed` is false.
    """
    notices = []
    for name, spec in specs.items():
        for use in uses:
            notice = check_licence(spec, use, allow_unlicensed)
            if notice:
                notices.append(f"{name}: {notice}")
    return notices

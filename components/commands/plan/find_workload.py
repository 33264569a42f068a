"""Find the workload of a run, the number of pairs and references per epoch, from the best available source.

The sources are the run's mixture, the annotation files of its datasets, and published counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from m3diff.commands.plan.annotations import plan_samples
from m3diff.commands.plan.mixture import counted_workload, has_mixture, workload_of_samples
from m3diff.commands.plan.published import published_workload
from m3diff.commands.plan.workload import ESTIMATED_LENGTHS, TokenCounter, Workload
from m3diff.datasets import DATASETS
from m3diff.stages.convert.params import Convert
from m3diff.stages.ingest.params import DatasetEntry


def find_workload(
    mixture: Path,
    entries: Mapping[str, DatasetEntry],
    convert: Convert,
    tokens: TokenCounter,
    excluded_datasets: Sequence[str] = (),
) -> Workload:
    """Return the workload of the run's mixture or, if there is no such mixture, of the run's datasets.

    A mixture that contains datasets that are not in this run belongs to another run and is not used. For the workload
    of the datasets, see `workload_of_datasets`.

    Args:
        tokens: counts or estimates the lengths of the texts.
        excluded_datasets: datasets whose samples are used by another phase.
    """
    entries = {name: entry for name, entry in entries.items() if name not in excluded_datasets}
    if not has_mixture(mixture):
        return workload_of_datasets(entries, convert, tokens)
    workload = counted_workload(mixture / "train", tokens, excluded_datasets)
    training_datasets = {name for name, entry in entries.items() if entry.train_on}
    foreign_datasets = workload.counts_by_dataset.keys() - training_datasets
    if not foreign_datasets:
        return workload
    workload = workload_of_datasets(entries, convert, tokens)
    note = f"{mixture} belongs to another run, with {', '.join(sorted(foreign_datasets))}"
    return replace(workload, origin=f"{workload.origin}; {note}")


def workload_of_datasets(
    entries: Mapping[str, DatasetEntry], convert: Convert, tokens: TokenCounter = ESTIMATED_LENGTHS
) -> Workload:
    """Return the workload of a run that has no mixture yet.

    Published counts are used for the datasets that have them. The annotation files of the other datasets are read in
    the same way as by ingest and convert.

    Raises:
        ParamsError: no dataset is used for training, or no training dataset can be counted.
    """
    published: dict[str, DatasetEntry] = {}
    unpublished: dict[str, DatasetEntry] = {}
    for name, entry in entries.items():
        if not entry.train_on:
            continue
        if DATASETS[entry.reader].part(name) is None:
            unpublished[name] = entry
        else:
            published[name] = entry
    planned = plan_samples(unpublished, convert)
    if planned.samples is None:
        return published_workload(entries, convert, planned.unread)
    read_names = ", ".join(name for name in unpublished if name not in planned.unread)
    origin = f"the annotation files of {read_names}, used in the same way as by convert"
    workload = workload_of_samples(planned.samples, tokens, origin)
    if published:
        published_part = published_workload(published, convert, planned.unread)
        return Workload(
            origin=f"{workload.origin}; {published_part.origin}", groups=[*workload.groups, *published_part.groups]
        )
    if planned.unread:
        return replace(workload, origin=f"{workload.origin}; without {', '.join(planned.unread)}")
    return workload

"""Facts of the run behind a model, for its card: data and licences, scores, recipe, lineage, an example."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, Use, check_licence
from m3diff.records.errors import DataError, readable
from m3diff.records.files import sha256
from m3diff.records.schemas import NO_CHANGE
from m3diff.stages.ingest.params import DatasetEntry


class Trace(NamedTuple):
    """Facts of the checkpoint in `dvc.lock`: its lineage, and the parameters that the stages ran with."""

    lineage: Mapping[str, str]  # the tags of a version
    parameters: Mapping[str, Any]  # by section, such as `train`


@dataclass(frozen=True)
class Run:
    """The outputs of the stages, and what the parameters say of them."""

    entries: Mapping[str, DatasetEntry]  # the datasets of the run, whose readers tell the licences
    base: Path
    max_new_tokens: int
    mixture: Path
    clean: Path
    model: Path
    predictions: Path
    report: Path
    trace: Callable[[], Trace]  # raises DataError where the files are not those that `dvc.lock` names


@dataclass(frozen=True)
class Dataset:
    """A dataset of the mixture: its pairs and samples by split."""

    name: str
    spec: DatasetSpec
    pairs: Mapping[str, int]
    samples: Mapping[str, int]

    @property
    def trains(self) -> bool:
        return self.samples["train"] > 0


@dataclass(frozen=True)
class Example:
    """A test pair: its image files, what the model said of it, and its references."""

    id: str
    before: Path
    after: Path
    caption: str
    references: list[str]


def read_datasets(run: Run) -> list[Dataset]:
    """The datasets of the mixture, by convert's report. Raises DataError without it, or for one that is unknown."""
    file = run.mixture / "report.json"
    if not file.is_file():
        raise DataError(f"{file}: no such file, so what trained the model is unknown; run `m3diff convert` first")
    with readable(file):
        found = json.loads(file.read_text(encoding="utf-8"))["datasets"]
    return [
        Dataset(name, spec_of(name, run.entries), counts["pairs"], counts["samples"]) for name, counts in found.items()
    ]


def spec_of(name: str, entries: Mapping[str, DatasetEntry]) -> DatasetSpec:
    """The facts of a dataset of the mixture. Raises DataError for one that the parameters do not name."""
    if name not in entries:
        raise DataError(f"{name}: in the mixture, but not in ingest.datasets; run `m3diff convert` again")
    return DATASETS[entries[name].reader]


def licence_notices(
    names: Iterable[str], entries: Mapping[str, DatasetEntry], uses: tuple[Use, ...], allow_unlicensed: bool
) -> list[str]:
    """Conditions that the licences of datasets of the mixture set for these uses.

    Raises:
        DataError: a licence refuses, and `allow_unlicensed` is not set; or a dataset is unknown.
    """
    told = ((name, check_licence(spec_of(name, entries), use, allow_unlicensed)) for name in names for use in uses)
    return [f"{name}: {notice}" for name, notice in told if notice]


def read_json(file: Path) -> dict[str, Any]:
    """A report of a stage, as evaluate's and train's; nothing where there is none."""
    with readable(file):
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def find_example(run: Run, datasets: list[Dataset]) -> Example | None:
    """The first captioned test pair with a change, of the first dataset whose images may be passed on without a
    condition; not chosen by how well the model does on it. None where there is no such pair.

    Raises:
        DataError: its images are not those that were captioned.
    """
    predictions, records = run.predictions / "predictions.json", run.clean / "records.parquet"
    if not (predictions.is_file() and records.is_file()):
        return None
    with readable(predictions):
        captions = {row["image_id"]: row["caption"] for row in json.loads(predictions.read_text(encoding="utf-8"))}
    with readable(records):
        rows = pq.read_table(records, filters=[("split", "=", "test")]).to_pylist()
    for dataset in datasets:
        if dataset.spec.licence.redistribute.answer != "yes":
            continue
        for row in rows:
            if row["dataset"] != dataset.name or row["id"] not in captions or row["change_types"] == [NO_CHANGE]:
                continue
            for side in ("before", "after"):
                path = Path(row[side])
                if not path.is_file() or sha256(path) != row[f"{side}_sha256"].hex():
                    raise DataError(f"{path}: missing or changed since ingest, so no example; run `dvc repro` first")
            caption = captions[row["id"]]
            return Example(row["id"], Path(row["before"]), Path(row["after"]), caption, row["references"])
    return None

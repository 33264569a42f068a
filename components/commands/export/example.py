"""Select the example pair for an exported folder."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from m3diff.commands.export.datasets import MixtureDataset
from m3diff.records.errors import DataError, command_to_read_again, data_error_if_unreadable
from m3diff.records.files import sha256
from m3diff.records.schemas import NO_CHANGE
from m3diff.records.tables import part_paths, read_table
from m3diff.settings.tree import Paths


@dataclass(frozen=True)
class ExamplePair:
    """A test pair with the caption that the model predicted for it."""

    id: str
    before: Path
    after: Path
    references: Sequence[str]
    caption: str


def find_example(paths: Paths, datasets: Sequence[MixtureDataset]) -> ExamplePair | None:
    """Return a captioned test pair with a change whose images may be redistributed, or None if there is no such pair.

    The datasets are tried in order, and the first suitable pair is used. The quality of the caption does not matter.

    Raises:
        DataError: an image of the pair is missing or has changed since it was captioned.
    """
    predictions_file = paths.predictions / "predictions.json"
    records_table = paths.clean / "records"
    if not predictions_file.is_file() or not part_paths(records_table):
        return None
    with data_error_if_unreadable(predictions_file):
        predictions = json.loads(predictions_file.read_text(encoding="utf-8"))
        captions = {prediction["image_id"]: prediction["caption"] for prediction in predictions}
    test_records = pl.DataFrame(read_table(records_table, filters=[("split", "=", "test")]))
    records = test_records.filter(pl.col("id").is_in([*captions]))
    free_datasets = [dataset.name for dataset in datasets if dataset.spec.licence.redistribute.answer == "yes"]
    candidates = [
        record
        for record in records.to_dicts()
        if record["dataset"] in free_datasets
        and record["change_types"] != [NO_CHANGE]
        and record["question"] is None
        and len(record["images"]) == 2
    ]
    if not candidates:
        return None
    record = min(candidates, key=lambda candidate: free_datasets.index(candidate["dataset"]))
    before, after = record["images"]
    for image in (before, after):
        path = Path(image["uri"])
        if not path.is_file() or sha256(path) != image["sha256"].hex():
            raise DataError("export.example_changed", path=path, command=command_to_read_again(path))
    return ExamplePair(
        id=record["id"],
        before=Path(before["uri"]),
        after=Path(after["uri"]),
        references=record["references"],
        caption=captions[record["id"]],
    )

"""Recognise the layout of a folder by its annotation files or as a table of pairs."""

import inspect
import os
import re
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path

from m3diff.commands.inspect.unknown_folder import fault_of_unknown_folder
from m3diff.datasets import DATASETS, omnidiff
from m3diff.datasets.doubts import Doubt
from m3diff.datasets.guess import IMAGE_FIELDS, guess_table
from m3diff.datasets.pairs import files_called
from m3diff.datasets.spec import Row
from m3diff.records.errors import DataError
from m3diff.stages.ingest.params import DatasetEntry

# Readers for tables whose columns are named in options. These layouts are recognised by their columns
TABLE_READERS = ("omnidiff", "pairs")
# Readers of the user's own data, which is called after its folder
OWN_READERS = ("pairs", "sidecar")
ROWS_TO_TRY = 5  # number of rows that are read to tell a layout from a table with the same file name


@dataclass(frozen=True)
class RecognisedDataset:
    """A dataset that was recognised in a folder.

    name: an unused name for the dataset.
    entry: the dataset's entry for `ingest.datasets`.
    notes: lines about the table, with facts that the entry does not show.
    doubts: questions about the table for the user. The entry contains the first answer to each question.
    """

    name: str
    entry: DatasetEntry
    notes: list[str] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)


def recognise(root: Path, used_names: Container[str] = (), reader: str | None = None) -> RecognisedDataset:
    """Recognise which dataset's layout a folder has.

    This is the dataset with the largest share of its annotation files in the folder. In case of a tie, it is the
    dataset with more files. A folder without any known annotation files is read as a table of pairs.

    Args:
        used_names: names of other datasets.
        reader: the reader of the layout, if the user has named it.

    Raises:
        DataError: the folder does not match any layout. The fields describe its content and what to do.
    """
    if reader is None:
        _refuse_folder_of_card(root)
        reader = _reader_by_files(root)
    if reader is not None and reader not in TABLE_READERS:
        options_of = DATASETS[reader].options_of
        entry = DatasetEntry(reader=reader, root=root, options=options_of(root) if options_of else {})
        return RecognisedDataset(_unused_name(root, reader, used_names), entry)

    try:
        table = guess_table(root)
    except DataError as error:
        raise DataError(fault_of_unknown_folder(root, error.fields["faults"])) from error
    options = table.options
    omnidiff_options = inspect.signature(omnidiff.read).parameters
    if reader is None:
        # A table of OmniDiff has the documented file name and can be read with the few options of its reader
        is_omnidiff = options["manifest"] == "annotations.json" and options.keys() <= omnidiff_options.keys()
        reader = "omnidiff" if is_omnidiff else "pairs"
    if reader == "omnidiff":
        options = {option: value for option, value in options.items() if option in omnidiff_options}
    entry = DatasetEntry(reader=reader, root=root, options=options)
    return RecognisedDataset(_unused_name(root, reader, used_names), entry, table.notes, table.doubts)


def has_file(root: Path, pattern: str) -> bool:
    """Return True if the folder contains a file with this name or pattern."""
    return (root / pattern).is_file() or any(path.is_file() for path in root.glob(pattern))


def annotation_files(entry: DatasetEntry) -> list[str]:
    """Return the annotation files that an entry reads, as names or patterns relative to its root."""
    manifest = entry.options.get("manifest")
    if manifest is None:
        return list(DATASETS[entry.reader].files)
    names = [manifest] if isinstance(manifest, str) else [*manifest.values()]
    try:
        paths = chain.from_iterable(files_called(entry.root, name) for name in names)
        return [os.path.relpath(path, entry.root) for path in paths]
    except DataError:
        return names


def _refuse_folder_of_card(root: Path) -> None:
    if (root / "change_multi_captions.json").exists():
        raise DataError("check.folder_of_card", path=root)


def _reader_by_files(root: Path) -> str | None:
    """Return the reader with the largest share of its files in the folder, or None if it has a table of pairs."""

    def completeness(reader: str) -> tuple[float, int]:
        files = DATASETS[reader].files
        files_in_root = sum(has_file(root, file) for file in files)
        return files_in_root / len(files), len(files)

    # A file such as captions.json or data/train-*.parquet does not make a folder a published dataset
    candidates = [reader for reader, spec in DATASETS.items() if spec.recognise is None or spec.recognise(root)]
    reader = max(candidates, key=completeness)
    share, _ = completeness(reader)
    if not share or reader in TABLE_READERS or _is_table_of_pairs(root, reader):
        return None
    return reader


def _is_table_of_pairs(root: Path, reader: str) -> bool:
    """Return True if a table of pairs only has the file name of the annotation file that `reader` expects.

    This is the case if the table has the documented columns, or if `reader` cannot read any of its first rows.
    """
    try:
        table = guess_table(root)
    except DataError:
        return False
    if IMAGE_FIELDS.isdisjoint(table.options.get("columns", {})):
        return True
    rows: list[Row] = []
    with suppress(DataError):
        rows.extend(islice(DATASETS[reader].read(root), ROWS_TO_TRY))
    return bool(rows) and all(row.fault for row in rows)


def _unused_name(root: Path, reader: str, used_names: Container[str]) -> str:
    """Return an unused name for a dataset: the name of its reader, of its folder, or of its folder with a number."""
    folder_name = re.sub(r"[^A-Za-z0-9_-]+", "_", root.resolve().name).strip("_") or "pairs"
    names = [folder_name] if reader in OWN_READERS else [reader, folder_name]
    numbered_names = (f"{folder_name}_{number}" for number in count(2))
    return next(name for name in chain(names, numbered_names) if name not in used_names)

"""Find out under which names some rows of a table have a field that other rows have in the columns of an entry."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from m3diff.commands.inspect.layout import TABLE_READERS, annotation_files
from m3diff.datasets.doubts import as_yaml
from m3diff.datasets.files import look_up, read_values
from m3diff.datasets.filters import split_of_cell
from m3diff.datasets.guess import PLAIN_FIELDS
from m3diff.datasets.tables import SAMPLE_ROWS, TableSample, find_image_columns, holds_images
from m3diff.datasets.text_columns import find_text_columns
from m3diff.records.errors import DataError, Fault
from m3diff.stages.ingest.params import DatasetEntry


def remedy_for_missing_columns(entry: DatasetEntry, sources: Collection[str] | None = None) -> Fault | None:
    """Return the option `columns` that also lists the columns which rows have in place of a missing one.

    Args:
        sources: locations of the rows that lack a value; None if whole files lack a column.

    Returns:
        A remedy, or None if no other column looks like the missing one.
    """
    if entry.reader not in TABLE_READERS:
        return None
    columns = _columns_of_fields(entry)
    columns_to_list = dict(entry.options.get("columns") or {})
    missing_columns: list[str] = []
    new_columns: list[str] = []
    try:
        rows_by_field = _rows_without_value(entry, columns, sources)
    except DataError:
        return None
    for field, rows in rows_by_field.items():
        columns_of_rows = [
            name for name in _find_columns(entry.root, field, rows, columns) if name not in columns[field]
        ]
        if columns_of_rows:
            columns_to_list[field] = [*columns[field], *columns_of_rows]
            missing_columns += columns[field]
            new_columns += columns_of_rows
    if not new_columns:
        return None
    return Fault(
        "check.columns_differ_by_file",
        missing=missing_columns,
        names=new_columns,
        options=as_yaml({"columns": columns_to_list}),
    )


def _columns_of_fields(entry: DatasetEntry) -> dict[str, list[str]]:
    """Return the columns of each required field according to the entry."""
    columns = entry.options.get("columns") or {}
    fields = ["before", "after"]
    if "images" in columns:
        fields = ["images"] if columns["images"] else []
    fields.append("captions")
    if isinstance(entry.options.get("manifest", ""), str) and "split" not in entry.options:
        fields.append("split")
    columns_of_field = {}
    for field in fields:
        names = columns.get(field) or field
        columns_of_field[field] = [names] if isinstance(names, str) else list(names)
    return columns_of_field


def _rows_without_value(
    entry: DatasetEntry, columns: Mapping[str, Sequence[str]], sources: Collection[str] | None
) -> dict[str, list[dict[str, Any]]]:
    """Return for each field the first rows that have no value in any of its columns.

    Raises:
        DataError: a file cannot be read.
    """
    rows_by_field: dict[str, list[dict[str, Any]]] = {}
    for row in _rows_of(entry, sources):
        for field, names in columns.items():
            rows = rows_by_field.setdefault(field, [])
            if len(rows) < SAMPLE_ROWS and all(look_up(row, name) is None for name in names):
                rows.append(row)
    return {field: rows for field, rows in rows_by_field.items() if rows}


def _rows_of(entry: DatasetEntry, sources: Collection[str] | None) -> Iterator[dict[str, Any]]:
    for file in annotation_files(entry):
        path = entry.root / file
        options = entry.options
        for location, row in read_values(path, (), options.get("delimiter"), options.get("rows", "")):
            # A location contains the file's folder if the manifest is a pattern
            locations = {location, str(Path(file).parent / location)}
            if isinstance(row, dict) and (sources is None or not locations.isdisjoint(sources)):
                yield row


def _find_columns(
    root: Path, field: str, rows: Sequence[dict[str, Any]], columns: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the columns of the rows that look like a field, or []."""
    values = TableSample({}, list(rows)).values()
    used_columns = {name for names in columns.values() for name in names}
    other_values = {name: column for name, column in values.items() if column and name not in used_columns}
    names: Any = None
    if field == "captions":
        texts = {name: column for name, column in other_values.items() if not holds_images(column)}
        answers = find_text_columns(texts, PLAIN_FIELDS).answers
        names = answers[0]["captions"] if answers else None
    elif field == "split":
        names = [name for name, column in other_values.items() if all(map(split_of_cell, column))][:1]
    else:
        answers = find_image_columns(root, values).answers
        names = answers[0].get(field) if answers else None
    return [names] if isinstance(names, str) else list(names or ())

"""Read tables of pairs as people write them: find out how a file is divided into rows, and find the image columns.

`m3diff data check`, `m3diff caption` and `m3diff score` use this module, so they accept the same files: with commas,
semicolons, tabs or bars, with Excel's line `sep=;`, with a byte order mark, and with headers in any language.

`order.py` decides which of two columns is before. If it cannot, the user has to decide.
"""

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from m3diff.datasets.conversations import is_message, is_turn
from m3diff.datasets.files import (
    DELIMITERS,
    SEP_LINE,
    Embedded,
    column_names,
    columns_in,
    fault_of_images,
    look_up,
    parse_images,
    parse_json,
    read_text,
    read_values,
)
from m3diff.datasets.order import choose_sides, words_in
from m3diff.datasets.spec import unexpected
from m3diff.records.errors import DataError, Fault

SIDES = ("before", "after")
TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
IMAGE_SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".avif", ".heic", ".heif", ".jp2",
)  # fmt: skip
SEPARATORS = (",", ";", "\t", "|")
LIST_COLUMNS = ("images", "image", "imgs", "imagepaths")  # names of columns that may contain a list of both images
SAMPLE_ROWS = 200  # number of rows that are read to find out what the columns contain
# Matches a word in the name of a column that probably contains names of images
WORD_FOR_IMAGE = re.compile(r"image|img|file|photo|picture", re.I)
TRIED_VALUES = 20  # number of values of a column that are tried as names of images
MAX_FOLDERS = 8  # if there are more folders next to a table, no path templates are tried


def is_image(value: Any) -> bool:
    """Return True if a value is the name of an image, judging by its suffix."""
    return isinstance(value, str) and value.strip().lower().endswith(IMAGE_SUFFIXES)


@dataclass(frozen=True)
class TableSample:
    """The first rows of a table.

    options: the options `delimiter` and `rows` of `read_values`, if they differ from the defaults.
    rows: at least one row. For a table without rows, this is a row with only null values.
    """

    options: dict[str, str]
    rows: list[dict[str, Any]]

    def values(self) -> dict[str, list[Any]]:
        """Return the values of each column and of each path into objects, without nulls.

        Conversations, histories and lists of images that a CSV file contains as JSON text are lists. Names with braces
        are left out, because they would be read as templates.
        """
        values: dict[str, list[Any]] = {}
        for row in self.rows:
            for name, value in row.items():
                values.setdefault(name, []).append(value)
        for name, column in list(values.items()):
            for value in column:
                if isinstance(value, dict):
                    for key, inner_value in value.items():
                        values.setdefault(f"{name}.{key}", []).append(inner_value)
        values_without_nulls = {}
        for name, column in values.items():
            if "{" not in name and "}" not in name:
                values_without_nulls[name] = [_parse_list(value) for value in column if value is not None]
        return values_without_nulls


def _parse_list(cell: Any) -> Any:
    """Return the messages, turns or images that a cell contains as JSON text. Return any other cell unchanged."""
    if not isinstance(cell, str) or not cell.lstrip().startswith("["):
        return cell
    try:
        values = parse_json(cell)
    except DataError:
        return cell
    if not values or not isinstance(values, list):
        return cell
    is_known_list = any(all(map(is_kind, values)) for is_kind in (is_message, is_turn, is_image))
    return values if is_known_list else cell


def read_sample(path: Path) -> TableSample:
    """Return the first rows of a table and the options that divide it into rows.

    Raises:
        DataError: the file cannot be read, or has neither a header nor a row that is an object.
    """
    options: dict[str, str] = {}
    header: list[str] = []
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        header = column_names(path)
    elif suffix in DELIMITERS:
        options = delimiter_of(path)
        header = _read_header(read_text(path), options.get("delimiter") or DELIMITERS[suffix])
    elif suffix == ".json":
        key_of_rows = _key_of_rows(path)
        if key_of_rows:
            options["rows"] = key_of_rows
    fault = Fault("datasets.no_row", path=path)
    rows: list[dict[str, Any]] = []
    for location, row in read_values(path, (), options.get("delimiter"), options.get("rows", "")):
        if isinstance(row, dict):
            rows.append(row)
        elif isinstance(row, DataError):
            fault = row.fault.at(path=path.parent / location)
        if len(rows) == SAMPLE_ROWS:
            break
    if not rows and not header:
        raise DataError(fault)
    return TableSample(options, rows or [dict.fromkeys(header)])


def delimiter_of(path: Path) -> dict[str, str]:
    """Return the option `delimiter` of a CSV or TSV file, or {} if the suffix or a line `sep=` already determines it.

    The delimiter is the separator that divides the header into the most columns. Quoted separators are not counted.

    Raises:
        DataError: the file cannot be read.
    """
    default_delimiter = DELIMITERS.get(path.suffix.lower())
    if default_delimiter is None:
        return {}
    text = read_text(path)
    if SEP_LINE.match(text):
        return {}
    # In case of a tie, the suffix decides: `id,name;alias` in a CSV file
    other_separators = [separator for separator in SEPARATORS if separator != default_delimiter]
    candidates = [default_delimiter, *other_separators]
    delimiter = max(candidates, key=lambda separator: len(_read_header(text, separator)))
    return {} if delimiter == default_delimiter else {"delimiter": delimiter}


def _read_header(text: str, delimiter: str) -> list[str]:
    """Return the column names in the first non-empty line of a table."""
    sep_line = SEP_LINE.match(text)
    table_text = io.StringIO(text[sep_line.end() if sep_line else 0 :], newline="")
    # Strict mode, because text after a closing quote means that the delimiter is wrong
    reader = csv.reader(table_text, delimiter=delimiter, strict=True)
    try:
        return [name.strip() for name in next(filter(None, reader), [])]
    except csv.Error:
        # For example an unclosed quote. `read_values` reports its position
        return []


def _key_of_rows(path: Path) -> str | None:
    """Return the key of the list of rows in a JSON file that contains an object, or None if there is no such key.

    Raises:
        DataError: several values are lists of rows. The field `names` contains their keys.
    """
    value = parse_json(read_text(path), path)
    items = value.items() if isinstance(value, dict) else ()
    keys = [key for key, rows in items if isinstance(rows, list) and rows and isinstance(rows[0], dict)]
    if len(keys) > 1:
        raise DataError("datasets.several_lists_of_rows", path=path, names=keys, file=path.name, example=keys[0])
    return keys[0] if keys else None


@dataclass(frozen=True)
class ImageColumns:
    """The columns that contain the two images of a pair, or the possible choices.

    answers: columns by field, `{before: ..., after: ...}` or `{images: ...}`, the most likely first. There are several
        if the user has to choose, and none if no columns name two images.
    question: the question for the user if there are several answers.
    """

    answers: list[dict[str, Any]] = field(default_factory=list)
    question: Fault | None = None


def find_image_columns(root: Path, values: Mapping[str, list[Any]]) -> ImageColumns:
    """Find the columns that contain the two images. If there are none, find path templates that lead into two folders.

    Args:
        root: the folder to which the table's paths are relative.
        values: the first values of each column, as returned by `TableSample.values`.
    """
    columns = _find_columns(values)
    return columns if columns.answers else _find_templates(root, values)


def _find_columns(values: Mapping[str, list[Any]]) -> ImageColumns:
    """Find two columns that contain images or have the documented names, or one column with lists of both images."""
    pairs = choose_sides([name for name, column in values.items() if holds_images(column)])
    list_column = _list_column(values)
    if list_column is not None and len(pairs) != 1:
        return ImageColumns([{"images": list_column}])
    if not pairs and {*SIDES} <= values.keys():
        pairs = [SIDES]
    return ImageColumns(
        [dict(zip(SIDES, pair, strict=True)) for pair in pairs],
        Fault("datasets.order_of_columns", names=list(dict.fromkeys(chain(*pairs)))),
    )


def _list_column(values: Mapping[str, list[Any]]) -> str | None:
    """Return the column that contains lists of both images, based on its name and values, or None."""
    plain_names = {name: "".join(words_in(name.split(".")[-1])) for name in values}
    for list_name in LIST_COLUMNS:
        for name, column in values.items():
            if plain_names[name] == list_name and any(isinstance(value, list) for value in column):
                return name
    return None


def holds_images(column: Sequence[Any]) -> bool:
    """Return True if at least half of a column's values are images."""
    image_count = sum(is_image(value) or isinstance(value, Embedded) for value in column)
    return image_count > 0 and 2 * image_count >= len(column)


def _find_templates(root: Path, values: Mapping[str, list[Any]]) -> ImageColumns:
    """Return path templates such as `before/{name}.png` if columns contain the names of images in two folders.

    Several such columns are a question to the user. In COCO's annotations, for example, `id` and `image_id` are both
    numbers, but only `image_id` names an image.
    """
    folders = sorted(path.name for path in root.iterdir() if path.is_dir() and path.name[0] != ".")
    folder_pairs = choose_sides(folders) if len(folders) <= MAX_FOLDERS else []
    templates_by_column: dict[str, list[dict[str, str]]] = {}
    for name, column in values.items():
        templates = _templates_of_column(root, name, column, folder_pairs)
        if templates:
            templates_by_column[name] = templates
    if not templates_by_column:
        return ImageColumns()
    names = sorted(templates_by_column, key=lambda name: WORD_FOR_IMAGE.search(name) is None)
    answers = [template for name in names for template in templates_by_column[name]]
    if len(names) > 1:
        return ImageColumns(answers, Fault("datasets.columns_of_image_names", columns=names))
    folder_names = sorted({answer[side].partition("/")[0] for answer in answers for side in SIDES})
    return ImageColumns(answers, Fault("datasets.order_of_folders", names=folder_names))


def _templates_of_column(
    root: Path, name: str, column: Sequence[Any], folder_pairs: Sequence[tuple[str, str]]
) -> list[dict[str, str]]:
    """Return the path templates by which at least one value of a column names an image in both folders of a pair."""
    stems = list(dict.fromkeys(value for value in column if isinstance(value, str | int)))[:TRIED_VALUES]
    for suffix in ("", *IMAGE_SUFFIXES):
        templates = []
        for before, after in folder_pairs:
            images = [f"{stem}{suffix}" for stem in stems]
            if any(os.path.isfile(root / before / image) and os.path.isfile(root / after / image) for image in images):
                templates.append({"before": f"{before}/{{{name}}}{suffix}", "after": f"{after}/{{{name}}}{suffix}"})
        if templates:
            return templates
    return []


@dataclass(frozen=True)
class TableRow:
    """The two images in a row of a table.

    location: file and line for messages, such as `photos/pairs.csv, line 3`.
    before, after: a path or an `Embedded` from the row, not yet checked.
    """

    location: str
    before: Any
    after: Any


def read_image_pairs(table: Path, columns: Mapping[str, str]) -> Iterator[TableRow]:
    """Yield the images of every row of a table, in order.

    Args:
        columns: `{before: ..., after: ...}` or `{images: ...}`. Each is a column, a path into objects, or a template.

    Raises:
        DataError: the file or a row cannot be read, a column is missing, or a row does not have two images.
    """
    header = list(chain.from_iterable(columns_in(name) for name in columns.values()))
    for location, row in read_rows(table, header):
        before, after = images_of(location, row, columns)
        yield TableRow(location, before, after)


def read_rows(table: Path, required: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and the values of every row of a table.

    Raises:
        DataError: the file or a row cannot be read, or a required column is missing.
    """
    options = read_sample(table).options
    for row_location, row in read_values(table, required, options.get("delimiter"), options.get("rows", "")):
        location = f"{table.parent / row_location}"
        if isinstance(row, DataError):
            raise DataError(row.fault.at(path=location))
        if not isinstance(row, dict):
            raise DataError(unexpected("row", "an object", row).at(path=location))
        yield location, row


def images_of(location: str, row: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[Any, Any]:
    """Return the images before and after in a row. A list of both may be a JSON text.

    Args:
        location: file and line of the row for messages.
        columns: as in `read_image_pairs`.

    Raises:
        DataError: the row does not have two images.
    """
    try:
        images_by_field = {field_name: look_up(row, column) for field_name, column in columns.items()}
        if "images" in images_by_field:
            images_by_field["images"] = parse_images(images_by_field["images"], columns["images"])
    except DataError as error:
        raise DataError(error.fault.at(path=location)) from error
    if "images" in images_by_field:
        images = images_by_field["images"]
        fault = fault_of_images(images, columns["images"])
        if fault:
            raise DataError(fault.at(path=location))
        images_by_field = dict(zip(SIDES, images, strict=True))
    for side in SIDES:
        if images_by_field[side] in (None, ""):
            column = columns.get(side) or columns["images"]
            raise DataError("datasets.no_image_in_row", path=location, key=column, side=side)
    return images_by_field["before"], images_by_field["after"]


def names_of(pairs: Sequence[tuple[Path | Embedded, Path | Embedded]]) -> list[str]:
    """Return a distinct name for each pair, as short as possible.

    The name is the file name of the image before, without its suffix. If several pairs would have the same name, their
    names also contain the folders of the image before, or the name of the image after, or, if a pair occurs twice, the
    row number. Pairs of embedded images are named by row number.
    """
    proposals = [_proposed_names(number, before, after) for number, (before, after) in enumerate(pairs, 1)]
    name_of_pair: dict[int, str] = {}
    used_names: set[str] = set()
    for level in range(max(map(len, proposals), default=0)):
        candidates = {
            index: names[min(level, len(names) - 1)]
            for index, names in enumerate(proposals)
            if index not in name_of_pair
        }
        # Overlays are written to files with these names, and Windows and macOS ignore case in file names
        counts = Counter(name.casefold() for name in candidates.values())
        for index, name in candidates.items():
            if counts[name.casefold()] == 1 and name.casefold() not in used_names:
                name_of_pair[index] = name
        used_names |= {name.casefold() for name in name_of_pair.values()}
    return [name_of_pair.get(index, f"pair-{index + 1:05}") for index in range(len(proposals))]


def _proposed_names(number: int, before: Path | Embedded, after: Path | Embedded) -> list[str]:
    """Return possible names of a pair, the shortest first. The last name contains the row number, so it is unique."""
    if not isinstance(before, Path) or not isinstance(after, Path):
        return [f"{number:05}", f"row-{number:05}"]
    parts = [part for part in before.with_suffix("").parts if part not in (before.anchor, "..")]
    names_with_folders = ["/".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
    name_of_both_images = f"{before.stem}-{after.stem}"
    return [*names_with_folders, name_of_both_images, f"{name_of_both_images}-row-{number:05}"]

"""Guess how a table of pairs is read: its options for the reader `pairs`, guessed from names and from the first rows.

A guess is a suggestion, never taken without being shown. What cannot be guessed is a DataError that says what the table
holds, what is wrong with it, and what mends it.

`order.py` says which of two images is before, `text_columns.py` which columns hold captions.
"""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.commands.inspect.order import choose, words_in
from m3diff.commands.inspect.text_columns import find_text_columns
from m3diff.datasets import pairs
from m3diff.datasets.files import DELIMITERS, SEP_LINE, Embedded, column_names, parse_json, read_text, read_values
from m3diff.datasets.filters import SPLIT_ALIASES
from m3diff.records.errors import DataError
from m3diff.records.schemas import SPLITS
from m3diff.stages.ingest.stage import Doubt

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
SEPARATORS = (",", ";", "\t", "|")
LISTS = ("images", "image", "imgs", "imagepaths")  # columns that may hold a list of both images
READING = {"delimiter": "its columns are separated by {!r}", "rows": "its rows stand under {!r}"}
SAMPLE = 200  # rows that a guess looks at
ENTRIES = 24  # entries up to which every combination of answers is shown
TASKS = 8  # fewer texts in a column of tasks are asked about
READ_AS_THEY_ARE = ("id", "scene", "change_types")  # columns that the reader takes by these names
# Tables that are taken before others where their columns have the documented names
DOCUMENTED = ("pairs.csv", "annotations.json")
SIDES = ("before", "after")


class Guess(NamedTuple):
    """`options` for the reader `pairs`, `notes` on what was found that is not as it is by default, and `doubts`: what
    a person must say first. Of a doubt, `options` hold the first answer."""

    options: dict[str, Any]
    notes: list[str]
    doubts: list[Doubt]

    def entries(self) -> list[dict[str, Any]]:
        """The options under each combination of answers; of very many, each answer with the first of the others."""
        answers = [doubt.answers for doubt in self.doubts]
        combinations = list(islice(product(*answers), ENTRIES + 1))
        if len(combinations) > ENTRIES:
            first_answers = [doubt.answers[0] for doubt in self.doubts]
            combinations = [tuple(first_answers)]
            for position, doubt in enumerate(self.doubts):
                before = first_answers[:position]
                after = first_answers[position + 1 :]
                combinations += [(*before, answer, *after) for answer in doubt.answers[1:]]
        found = []
        for chosen in combinations:
            options = self.options
            for answer in chosen:
                columns = {**options.get("columns", {}), **answer.get("columns", {})}
                options = options | answer | ({"columns": columns} if columns else {})
            found.append(options)
        return found


def guess(root: Path) -> Guess:
    """Guess how the table of pairs in a folder is read. Several tables are a doubt, unless one has the documented name
    and columns.

    Raises:
        DataError: no manifest is; a line for each says why.
    """
    faults, found, read = [], dict[str, Guess](), set[str]()
    for path in sorted(manifests(root), key=lambda path: path.name not in DOCUMENTED):
        if path.name in read:
            continue
        try:
            manifest = _manifest(root, path)
            found[path.name] = guessed = _guess(root, path, manifest)
        except DataError as error:
            faults.append(str(error))
            continue
        read |= {manifest} if isinstance(manifest, str) else {*manifest.values()}
        if path.name in DOCUMENTED and not {"before", "after", "images"} & guessed.options.get("columns", {}).keys():
            break
    if not found:
        raise DataError("\n".join(faults))
    if len(found) > 1:
        which = f"{', '.join(found)}: each could be the table of pairs; which one is?"
        notes = [note for each in found.values() for note in each.notes]
        inner = [doubt.question for each in found.values() for doubt in each.doubts]
        answers = [options for each in found.values() for options in each.entries()]
        return Guess(answers[0], notes, [Doubt("\n".join([which, *inner]), answers)])
    (chosen,) = found.values()
    if rest := [each.name for each in manifests(root) if each.name not in read]:
        chosen.notes.append(f"not read: {', '.join(rest)}")
    return chosen


def manifests(root: Path) -> list[Path]:
    """Files of a folder that could be a table, those that the system hides left out; none where it cannot be read."""
    try:
        return sorted(path for path in root.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] not in "._")
    except OSError:
        return []


def split_called(name: str) -> str | None:
    """train, val or test, as a name has it: `Train`, `validation`, `my_dev`; None where it says none, or several."""
    words = re.findall(r"[a-z]+", name.lower())
    found = {split for split, aliases in SPLIT_ALIASES.items() for alias in aliases if alias in words}
    return found.pop() if len(found) == 1 else None


def is_image(value: Any) -> bool:
    """True if a value names an image, by its suffix."""
    return isinstance(value, str) and value.strip().lower().endswith(IMAGES)


def _guess(root: Path, path: Path, manifest: str | dict[str, str]) -> Guess:
    options: dict[str, Any] = {"manifest": manifest}
    notes, by_split = [], not isinstance(manifest, str)
    if not isinstance(manifest, str):
        notes.append(f"{', '.join(manifest.values())}: a file for each split")
    reading, rows = _sample(path)
    notes += [f"{path.name}: {READING[name].format(value)}: option `{name}`" for name, value in reading.items()]
    values = _by_column(rows)
    columns, doubts, unread = _columns(root, path, values)
    # What a question leaves open is not shown as if it were settled
    open_fields = {name for doubt in doubts for answer in doubt.answers for name in answer.get("columns", {})}
    settled = {field: name for field, name in columns.items() if field not in open_fields}
    shown = {field: name if isinstance(name, str) else " and ".join(name) for field, name in settled.items()}
    named = ", ".join(f"{field} is {name}" for field, name in shown.items() if field != name)
    if named or open_fields:
        read_as = f", read as: {named}" if named else ""
        notes.append(f"{path.name}: has the columns {', '.join(rows[0])}{read_as}")
    if unread:
        notes.append(f"{path.name}: text columns that are not read: {', '.join(unread)}")
    split = _split_column(values)
    if split not in (None, "split") and not by_split:
        columns["split"] = split
    captions = values.get(str(columns["captions"]), [])
    if "images" in columns and "id" in values and any(isinstance(each, list) for each in captions):
        columns["id"] = None
    if renamed := {field: name for field, name in columns.items() if field != name or field in ("images", "question")}:
        options["columns"] = renamed
    options |= reading
    if not split and not by_split:
        options["split"] = split_called(path.stem) or "train"
        notes.append(f"{path.name}: no column tells the split, so all pairs are {options['split']}: option `split`")
    if not by_split and "split" not in options:
        names = {row.split for row in pairs.read(root, **options) if isinstance(row.split, str)} - set(SPLITS)
        if aliases := {name: split for name in sorted(names) if (split := split_called(name))}:
            options["splits"] = aliases
            notes.append(f"{path.name}: its splits have other names: option `splits`")
    return Guess(options, notes, doubts)


def _manifest(root: Path, path: Path) -> str | dict[str, str]:
    """The file's name; with siblings that are called alike but for the split, those of each split."""
    splits = {split_called(each.stem): each.name for each in manifests(root) if _rest(each) == _rest(path)}
    files = {split: splits[split] for split in SPLITS if split in splits}
    return files if split_called(path.stem) and len(files) > 1 else path.name


def _rest(path: Path) -> list[str]:
    splits = {*chain(*SPLIT_ALIASES.values())}
    return [word for word in re.findall(r"[^\W\d_]+|\d+|[^\w\s.-]", path.name.lower()) if word not in splits]


def _sample(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Options that say how the file is cut into rows, and its first rows that can be read; where none can, one of a
    header's names."""
    suffix, reading, header = path.suffix.lower(), dict[str, Any](), list[str]()
    if suffix == ".parquet":
        header = column_names(path)
    elif suffix in DELIMITERS:
        text = read_text(path)
        named = SEP_LINE.match(text)
        first = text[named.end() if named else 0 :].lstrip().partition("\n")[0]
        best = named[1] if named else max(SEPARATORS, key=first.count)
        header = [name.strip().strip('"') for name in first.split(best)]
        if not named and first.count(best) and best != DELIMITERS[suffix]:
            reading["delimiter"] = best
    elif suffix == ".json" and (rows_at := _rows_in(path)):
        reading["rows"] = rows_at
    wrong, rows = f"{path}: has no row that is an object with before, after, captions and split", list[dict[str, Any]]()
    for where, row in read_values(path, (), reading.get("delimiter"), reading.get("rows", "")):
        if isinstance(row, dict):
            rows.append(row)
        elif isinstance(row, DataError):
            wrong = f"{path.parent / where}: {row}"
        if len(rows) == SAMPLE:
            break
    if not rows and not header:
        raise DataError(wrong)
    return reading, rows or [dict.fromkeys(header)]


def _rows_in(path: Path) -> str | None:
    """The key of a JSON object whose value is the list of rows; None where the file is no such object.

    Raises:
        DataError: several are; names them.
    """
    value = parse_json(read_text(path), str(path))
    items = value.items() if isinstance(value, dict) else ()
    lists = [key for key, rows in items if isinstance(rows, list) and rows and isinstance(rows[0], dict)]
    if len(lists) > 1:
        raise DataError(
            f"{path}: holds several lists of rows, {', '.join(lists)}; write those that are pairs into a file each "
            f"(train.json, val.json), or say which one is read: options: {{manifest: {path.name}, rows: {lists[0]}}}"
        )
    return lists[0] if lists else None


def _by_column(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The values of the rows by column, then by path into objects; nulls and names with braces (templates) are left
    out."""
    found: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    for name, column in list(found.items()):
        for value in column:
            for key, inner in value.items() if isinstance(value, dict) else ():
                found.setdefault(f"{name}.{key}", []).append(inner)
    return {
        name: [value for value in column if value is not None]
        for name, column in found.items()
        if not set("{}") & set(name)
    }


Choice = tuple[dict[str, Any], list[Doubt]]  # columns by field, and a doubt where there are others


def _choice(answers: Sequence[dict[str, Any]], question: str) -> Choice:
    doubt = Doubt(question, [{"columns": answer} for answer in answers])
    return (answers[0], [doubt] if len(answers) > 1 else []) if answers else ({}, [])


def _columns(root: Path, path: Path, values: Mapping[str, list[Any]]) -> tuple[dict[str, Any], list[Doubt], list[str]]:
    """Columns by field, the doubts, and the text columns that are not read."""
    images, doubts = _images(values)
    if not images:
        images, doubts = _templates(root, values)
    found = ", ".join(values) or "nothing"
    if not images:
        raise DataError(
            f"{path}: has the columns {found}; none names two images: add `before` and `after` with their paths, or "
            "say which columns do: options: {columns: {before: ..., after: ..., captions: ...}}"
        )
    used = {*images.values()} | {name.split(".")[0] for name in images.values()}
    rest = {name: column for name, column in values.items() if name not in used and not _holds_images(column)}
    tasks = _tasks(path, rest)
    read = {*READ_AS_THEY_ARE, _split_column(values), *(name for name, _ in tasks)}
    text_columns = find_text_columns(rest, read)
    if not text_columns.answers:
        raise DataError(
            f"{path}: has the columns {found}; none holds captions: add a column `captions` with a text or a list of "
            "texts for each pair (captions that stand in another file belong in this one)"
        )
    captions, doubt = _choice(
        text_columns.answers,
        f"{path.name}: the columns {', '.join(text_columns.names())} could each hold the captions; which do?",
    )
    if doubt:  # the question belongs to its own answer
        captions = {"captions": captions["captions"]}
    return images | captions, doubts + [task for _, task in tasks] + doubt, text_columns.unread


def _tasks(path: Path, values: Mapping[str, list[Any]]) -> list[tuple[str, Doubt]]:
    """Columns that name a few tasks, with the question which of them say what changed."""
    doubts = []
    for name, column in values.items():
        tasks = list(dict.fromkeys(value for value in column if isinstance(value, str)))
        if "task" in {*words_in(name)} and 1 < len(tasks) < TASKS:
            which = f"{path.name}: the column {name} names several tasks; the rows of which say what changed?"
            doubts.append((name, Doubt(which, [*({"where": {name: task}} for task in tasks), {}])))
    return doubts


def _split_column(values: Mapping[str, Any]) -> str | None:
    return next((name for name in values if words_in(name.split(".")[-1]) in (["split"], ["subset"])), None)


def _images(values: Mapping[str, list[Any]]) -> Choice:
    """The columns of both images: two that hold images or have the documented names, or one with a list of them."""
    named = [name for name, column in values.items() if _holds_images(column)]
    plain = {name: "".join(words_in(name.split(".")[-1])) for name in values}
    listed = [name for known in LISTS for name in values if plain[name] == known]
    lists = [name for name in listed if any(isinstance(value, list) for value in values[name])]
    pairs = choose(named)
    if lists and len(pairs) != 1:
        return {"images": lists[0]}, []
    if not pairs and {*SIDES} <= values.keys():
        pairs = [SIDES]
    columns = ", ".join(dict.fromkeys(chain(*pairs)))
    return _choice(
        [dict(zip(SIDES, pair, strict=True)) for pair in pairs],
        f"the columns {columns} hold images, and their names do not tell which is before and which is after",
    )


def _holds_images(column: list[Any]) -> bool:
    images = sum(is_image(value) or isinstance(value, Embedded) for value in column)
    return images > 0 and 2 * images >= len(column)


def _templates(root: Path, values: Mapping[str, list[Any]]) -> Choice:
    """`before/{name}.png` and `after/{name}.png`, where a column names an image in each of two folders."""
    folders = sorted(path.name for path in root.iterdir() if path.is_dir() and path.name[0] != ".")
    pairs = choose(folders) if len(folders) < 9 else []
    for name, column in values.items():
        value = next((value for value in column if isinstance(value, str | int)), "")
        for end in ("", *IMAGES):
            holding = [p for p in pairs if all(os.path.isfile(root / folder / f"{value}{end}") for folder in p)]
            answers = [{side: f"{at}/{{{name}}}{end}" for side, at in zip(SIDES, p, strict=True)} for p in holding]
            if answers:
                called = ", ".join(sorted({*chain(*holding)}))
                return _choice(answers, f"the folders {called} do not tell by their names which is before")
    return {}, []

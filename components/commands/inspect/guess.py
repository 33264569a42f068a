"""Guess how a table of pairs is read: its options for the reader `pairs`, guessed from names and from the first rows.

A guess is a suggestion, never taken without being shown. What names do not tell is a doubt, with an answer for each
possibility. What cannot be guessed is a DataError that says what the table holds and what mends it.

The order of two images is that of the names of their columns or folders. Names are compared by whole words ("t1",
"img_after" and "imageAfter" are two words each), never by parts of words, so that `prediction`, `folder` and
`newspaper` tell nothing. A word that both names hold decides nothing.
"""

import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import chain, combinations, islice, product
from pathlib import Path
from typing import Any

from m3diff.datasets.files import DELIMITERS, Embedded, parse_json, read_text, read_values
from m3diff.records.errors import DataError
from m3diff.records.schemas import SPLITS
from m3diff.stages.ingest.stage import Doubt

BEFORE = (
    "before bef pre prior original orig source src start starting begin beginning first initial init old older oldest "
    "previous prev earlier early past then input in unedited unchanged undamaged from vorher alt avant ancien antes do "
    "前 之前 变化前 変更前"
)
AFTER = (
    "after aft post edited edit target tgt dest dst destination end ending final finish second new newer newest later "
    "subsequent next future following recent latest output out result modified changed updated altered manipulated "
    "retouched damaged to nachher neu apres nouveau despues depois после 后 後 之后 变化后 変更後"
)
RANK = {word: rank for rank, words in enumerate((BEFORE, AFTER)) for word in words.split()}
"""Place in time by word."""

NUMBERS = {"zero": "0", "one": "1", "two": "2", "three": "3", "a": "1", "b": "2"}
AUXILIARY = {"mask", "depth", "thumb", "thumbnail", "overlay", "heatmap", "diff", "seg", "segmentation", "crop", "flow"}
"""Pictures that belong to an image and are none of the two."""

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
SEPARATORS = (",", ";", "\t", "|")
LISTS = ("images", "image", "imgs", "image_paths")
"""Columns that may hold a list of both images."""
CAPTIONS = {
    *("captions", "caption", "description", "descriptions", "desc", "sentences", "sentence", "sents", "text", "texts"),
    *("differences", "difference", "conversations", "messages", "answer", "answers", "output", "response"),
    *("completion", "reference", "references", "target"),
}
"""Words in the names of columns that hold captions."""
QUESTIONS = {"question", "query", "instruction", "prompt", "input", "user", "human"}
"""Words in the names of columns that hold what a caption answers."""
DATA = {"id", "key", "type", "types", "count", "number", "length", "score", "language", "model", "source", "date"}
"""Last words in the names of columns that tell something of a caption and are none."""
SAMPLE = 200  # rows that a guess looks at
ENTRIES = 8  # that are shown of those that doubts leave open
SIDES = ("before", "after")
ALIASES = {
    "train": ("train", "training", "restval"),
    "val": ("val", "valid", "validation", "dev", "development", "eval"),
    "test": ("test", "testing"),
}

Guess = tuple[dict[str, Any], list[str], list[Doubt]]
"""Options for the reader `pairs`, which hold the first answer of each doubt; notes on what was found; doubts."""


def combined(options: Mapping[str, Any], doubts: Sequence[Doubt]) -> list[dict[str, Any]]:
    """The options under each combination of answers: the first of these. A doubt that is sure has its first answer."""
    answers = [doubt.answers[:1] if doubt.sure else doubt.answers for doubt in doubts if doubt.answers]
    found = []
    for chosen in islice(product(*answers), ENTRIES):
        entry = dict(options)
        for answer in chosen:
            columns = {**entry.get("columns", {}), **answer.get("columns", {})}
            entry |= answer | ({"columns": columns} if columns else {})
        found.append(entry)
    return found


def words_in(name: str) -> list[str]:
    """The words and numbers of a name in small letters without accents, split at signs, digits and capitals."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", name) if not unicodedata.combining(c))
    found = re.findall(r"\d+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_a-zA-Z]+", plain)
    return [NUMBERS.get(word.lower(), word.lower()) for word in found]


def order(first: str, second: str) -> tuple[bool, bool] | None:
    """True if the first of two names is the image before, and True if both say so by a word; None where their words
    tell nothing, or contradict themselves."""
    words = [words_in(name) for name in (first, second)]
    left, right = ({RANK[word] for word in own if word in RANK and not all(word in w for w in words)} for own in words)
    if places := left | {1 - rank for rank in right}:
        return (places == {0}, bool(left and right)) if len(places) == 1 else None
    if [re.sub(r"\d+", "0", word) for word in words[0]] != [re.sub(r"\d+", "0", word) for word in words[1]]:
        return None
    differ = [(int(one), int(two)) for one, two in zip(*words, strict=True) if one != two]
    return (differ[0][0] < differ[0][1], False) if len(differ) == 1 else None


def choose(names: Sequence[str]) -> list[tuple[str, str]]:
    """The two of these names that are before and after; several such pairs where that is a question."""
    plain = [name for name in names if not AUXILIARY & {*words_in(name)}]
    names = plain if len(plain) > 1 else names
    found: dict[tuple[str, str], bool] = {}
    for pair in combinations(names, 2):
        if told := order(*pair):
            is_first, is_sure = told
            found[pair if is_first else pair[::-1]] = is_sure
    if best := [pair for pair, is_sure in found.items() if is_sure] or list(found):
        return best
    return [ordered for pair in combinations(names, 2) for ordered in (pair, pair[::-1])]


def guess(root: Path) -> Guess:
    """Guess how the table of pairs in a folder is read. Several tables are a doubt.

    Raises:
        DataError: no manifest is; a line for each says why.
    """
    faults, found, read = list[str](), dict[str, Guess](), set[str]()
    for path in manifests(root):
        if path.name in read:
            continue
        manifest = _manifest(root, path)
        try:
            found[path.name] = _guess(root, path, manifest)
        except DataError as error:
            faults.append(str(error))
            continue
        read |= {manifest} if isinstance(manifest, str) else {*manifest.values()}
    if not found:
        raise DataError("\n".join(faults))
    if len(found) > 1:
        which = f"{', '.join(found)}: each could be the table of pairs; which one is?"
        inner = [doubt.question for _, _, doubts in found.values() for doubt in doubts]
        answers = [entry for options, _, doubts in found.values() for entry in combined(options, doubts)]
        return answers[0], [], [Doubt("\n".join([which, *inner]), answers)]
    (chosen,) = found.values()
    if rest := [each.name for each in manifests(root) if each.name not in read]:
        chosen[1].append(f"not read: {', '.join(rest)}")
    return chosen


def manifests(root: Path) -> list[Path]:
    """Files of a folder that could be a table, those that the system hides left out; none where there is no folder."""
    return sorted(path for path in root.glob("[!._]*") if path.suffix.lower() in SUFFIXES)


def split_called(name: str) -> str | None:
    """train, val or test, as a name has it: `Train`, `validation`, `my_dev`; None where it says none, or several."""
    found = {split for split, aliases in ALIASES.items() if {*words_in(name)} & {*aliases}}
    return found.pop() if len(found) == 1 else None


def _manifest(root: Path, path: Path) -> str | dict[str, str]:
    """The file's name; with siblings that are called alike but for the split, those of each split."""
    splits = {split_called(each.stem): each.name for each in manifests(root) if _rest(each) == _rest(path)}
    files = {split: splits[split] for split in SPLITS if split in splits}
    return files if split_called(path.stem) and len(files) > 1 else path.name


def _rest(path: Path) -> list[str]:
    """Words, numbers and suffix of a file's name without the word of its split."""
    return [word for word in words_in(path.name) if word not in chain(*ALIASES.values())]


def _guess(root: Path, path: Path, manifest: str | dict[str, str]) -> Guess:
    """Guess how one table is read, or those of several splits, of which it is one."""
    reading, rows = _sample(path)
    options: dict[str, Any] = {"manifest": manifest, **reading}
    notes = list[str]()
    values = _by_column(rows)
    columns, doubts = _columns(root, path, values)
    if any(field != name for field, name in columns.items()):
        shown = {field: name if isinstance(name, str) else " and ".join(name) for field, name in columns.items()}
        named = ", ".join(f"{field} is {name}" for field, name in shown.items() if field != name)
        notes.append(f"{path.name}: has the columns {', '.join(rows[0])}, read as: {named}")
    if isinstance(manifest, str):
        split = next((name for name in values if words_in(name.split(".")[-1]) in (["split"], ["subset"])), None)
        if split:
            columns["split"] = split
        else:
            options["split"] = split_called(path.stem) or "train"
            notes.append(f"{path.name}: no column tells the split, so all pairs are {options['split']}: option `split`")
    captions = values.get(str(columns["captions"]), [])
    if "images" in columns and "id" in values and any(isinstance(each, list) for each in captions):
        columns["id"] = None
    if renamed := {field: name for field, name in columns.items() if field != name or field in ("images", "question")}:
        options["columns"] = renamed
    return options, notes, doubts


def _sample(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Options that say how the file is cut into rows, and its first rows that can be read."""
    suffix, reading = path.suffix.lower(), dict[str, Any]()
    if suffix in DELIMITERS:
        first = read_text(path).lstrip().partition("\n")[0]
        best = max(SEPARATORS, key=first.count)
        if first.count(best) and best != DELIMITERS[suffix]:
            reading["delimiter"] = best
    elif suffix == ".json" and (rows_at := _rows_in(path)):
        reading["rows"] = rows_at
    found = list(islice(read_values(path, (), reading.get("delimiter"), reading.get("rows", "")), SAMPLE))
    if rows := [row for _, row in found if isinstance(row, dict)]:
        return reading, rows
    faults = [f"{path.parent / where}: {row}" for where, row in found if isinstance(row, DataError)]
    raise DataError((*faults, f"{path}: has no row that is an object with before, after, captions and split")[0])


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
    """The values of the rows by column and by path into objects; names with braces (templates) are left out."""
    found: dict[str, list[Any]] = {}
    for row in rows:
        objects = {name: value for name, value in row.items() if isinstance(value, dict)}
        inner = {f"{name}.{key}": value for name, inside in objects.items() for key, value in inside.items()}
        for name, value in (row | inner).items():
            if not set("{}") & set(name):
                found.setdefault(name, []).append(value)
    return found


Choice = tuple[dict[str, Any], list[Doubt]]
"""Columns by field, and a doubt where there are others."""


def _choice(answers: Sequence[dict[str, Any]], question: str) -> Choice:
    """The first answer, and the question where there are several; no column where there is none."""
    doubt = Doubt(question, [{"columns": answer} for answer in answers])
    return (answers[0], [doubt] if len(answers) > 1 else []) if answers else ({}, [])


def _columns(root: Path, path: Path, values: Mapping[str, list[Any]]) -> Choice:
    """The columns of images, captions and their question."""
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
    pool = _captions(rest)
    if not pool:
        raise DataError(
            f"{path}: has the columns {found}; none holds captions: add a column `captions` with a text or a list of "
            "texts for each pair (captions that stand in another file belong in this one)"
        )
    kinds = {tuple(word for word in words_in(name) if not word.isdecimal()) for name in pool}
    answers: list[dict[str, Any]] = [{"captions": name} for name in pool] if len(kinds) > 1 else []
    captions, doubt = _choice(
        [*answers, {"captions": pool if len(pool) > 1 else pool[0]}],  # caption_1 and caption_2 are one answer
        f"{path.name}: the columns {', '.join(pool)} could each hold the captions; which do?",
    )
    asked = (name for name in rest if name not in pool and {*words_in(name)} & QUESTIONS)
    question = next((name for name in asked if words_in(name)[-1] not in DATA), None)
    if question and any({*words_in(name)} & CAPTIONS for name in pool):
        captions = captions | {"question": question}
    return images | captions, doubts + doubt


def _images(values: Mapping[str, list[Any]]) -> Choice:
    """The columns of both images: two that hold images or have the documented names, or one with a list of them."""
    lists = [name for name in LISTS if any(isinstance(value, list) for value in values.get(name, ()))]
    pairs = choose([name for name, column in values.items() if _holds_images(column)])
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
    """True if half of the values or more name images, by their suffix, or are images."""
    named = (isinstance(value, str) and value.strip().lower().endswith(IMAGES) for value in column)
    images = sum(named) + sum(isinstance(value, Embedded) for value in column)
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


def _captions(values: Mapping[str, list[Any]]) -> list[str]:
    """The columns that could hold the captions: the documented one, those whose names say so, else all with texts of
    several words; caption_1 before caption_2."""
    if "captions" in values:
        return ["captions"]
    named = [name for name in values if {*words_in(name)} & CAPTIONS and words_in(name)[-1] not in DATA]
    texts = [name for name, column in values.items() if any(" " in value for value in column if isinstance(value, str))]
    return sorted(named or texts, key=lambda name: [int(word) for word in words_in(name) if word.isdecimal()])

"""Guess how a table of pairs is read: its options for the reader `pairs`, guessed from names and from the first rows.

A guess is a suggestion, never taken without being shown. What cannot be guessed is a DataError that says what the table
holds, what is wrong with it, and what mends it.

The order of two images is that of the names of their columns or folders. Names are compared by whole words ("t1",
"img_after" and "imageAfter" are two words each), never by parts of words, so that `prediction`, `folder` and
`newspaper` tell nothing. A word that both names hold decides nothing.
"""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, combinations, islice, product
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.datasets import pairs
from m3diff.datasets.files import DELIMITERS, SEP_LINE, Embedded, column_names, parse_json, read_text, read_values
from m3diff.records.errors import DataError
from m3diff.records.schemas import SPLITS
from m3diff.stages.ingest.stage import Doubt

WORDS = {
    0: "before bef pre prior original orig source src start starting begin beginning first initial init old older "
    "oldest previous prev earlier early past then input in unedited unchanged undamaged from vorher alt avant ancien "
    "antes до 前 之前 变化前 変更前",
    1: "current now present today",
    2: "after aft post edited edit target tgt dest dst destination end ending final finish second new newer newest "
    "later subsequent recent latest output out result modified changed updated altered manipulated retouched damaged "
    "to nachher neu apres nouveau despues depois после 后 後 之后 变化后 変更後",
    3: "next future following",
}
RANK = {word: rank for rank, words in WORDS.items() for word in words.split()}  # place in time by word

NUMBERS = {"zero": "0", "one": "1", "two": "2", "three": "3"}
# What else a name says of an image; `beforeimg` is `before`
NOUNS = ("images", "image", "imgs", "img", "photo", "picture", "pic", "frame", "path", "filename", "file", "name")

# Pictures that belong to an image and are none of the two
AUXILIARY = {"mask", "depth", "thumb", "thumbnail", "overlay", "heatmap", "diff", "seg", "segmentation", "crop", "flow"}

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
SEPARATORS = (",", ";", "\t", "|")
LISTS = ("images", "image", "imgs", "imagepaths")  # columns that may hold a list of both images
CAPTIONS = {  # words in the names of columns that hold captions
    *("captions", "caption", "description", "descriptions", "desc", "sentences", "sentence", "sents", "text", "texts"),
    *("differences", "difference", "conversations", "messages", "answer", "answers", "output", "response"),
    *("completion", "reference", "references", "target"),
}
# Those that do so where no other column does
WEAK = {"label", "value", "instruction", "prompt", "edit", "annotation", "transcription", "change", "diff"}
# Words in the names of columns that hold what a caption answers
QUESTIONS = {"question", "query", "instruction", "prompt", "input", "user", "human"}
DATA = {  # last words in the names of columns that tell something of a caption and are none
    "id",
    "ids",
    "key",
    "type",
    "types",
    "count",
    "number",
    "length",
    "score",
    "language",
    "model",
    "source",
    "date",
}
READING = {"delimiter": "its columns are separated by {!r}", "rows": "its rows stand under {!r}"}
SAMPLE = 200  # rows that a guess looks at
ENTRIES = 8  # entries that are shown of those that doubts leave open
# Tables that are taken before others where their columns have the documented names
DOCUMENTED = ("pairs.csv", "annotations.json")
NUMBER = re.compile(r"[-+\d.,:\s]+")
UNSPACED = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]{4}")
SIDES = ("before", "after")
ALIASES = {
    "train": ("train", "training", "restval"),
    "val": ("val", "valid", "validation", "dev", "development", "eval"),
    "test": ("test", "testing"),
}


class Guess(NamedTuple):
    """`options` for the reader `pairs`, `notes` on what was found that is not as it is by default, and `doubts`: what
    a person must say first. Of a doubt, `options` hold the first answer."""

    options: dict[str, Any]
    notes: list[str]
    doubts: list[Doubt]

    def entries(self) -> list[dict[str, Any]]:
        """The options under each combination of answers: the first of these."""
        found = []
        for chosen in islice(product(*(doubt.answers for doubt in self.doubts)), ENTRIES):
            options = self.options
            for answer in chosen:
                columns = {**options.get("columns", {}), **answer.get("columns", {})}
                options = options | answer | ({"columns": columns} if columns else {})
            found.append(options)
        return found


def words_in(name: str) -> list[str]:
    """The words and numbers of a name in small letters without accents, split at signs, digits and capitals."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", name) if not unicodedata.combining(c))
    found = []
    for word in map(str.lower, re.findall(r"\d+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_a-zA-Z]+", plain)):
        rests = (rest for noun in NOUNS for rest in (word.removeprefix(noun), word.removesuffix(noun)) if rest != word)
        rest = next((rest for rest in rests if rest in RANK or rest in ("a", "b")), word)
        found.append(NUMBERS.get(rest, rest))
    return found


def order(first: str, second: str) -> tuple[bool, bool] | None:
    """True if the first of two names is the image before, and True if both say so by a word; None where their words
    tell nothing, or contradict themselves."""
    words = [words_in(name) for name in (first, second)]
    common = Counter(words[0]) & Counter(words[1])
    left, right = (list((Counter(each) - common).elements()) for each in words)
    ranks = [{RANK[word] for word in own if word in RANK} for own in (left, right)]
    if max(map(len, ranks)) > 1:
        return None
    if ranks[0] and ranks[1]:
        (one,), (two,) = ranks
        return None if one == two else (one < two, True)
    if ranks[0] or ranks[1]:  # photo, photo_edited
        (rank,) = ranks[0] or ranks[1]
        return None if rank == 1 else ((rank == 0) == bool(ranks[0]), False)
    different = left + right
    if sorted(different) == ["a", "b"]:
        return left == ["a"], False
    if not different or not all(word.isdecimal() for word in different):
        return None
    before, after = ([int(word) for word in each if word.isdecimal()] for each in words)
    differ = sum(a != b for a, b in zip(before, after, strict=False))
    if len(before) != len(after) or before == after:
        return None
    are_dates = all(1900 <= date[0] < 2200 for date in (before, after))
    return (before < after, False) if differ == 1 or are_dates else None


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
    found = {split for split, aliases in ALIASES.items() for alias in aliases if alias in words}
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
    columns, doubts = _columns(root, path, values)
    if any(field != name for field, name in columns.items()):
        shown = {field: name if isinstance(name, str) else " and ".join(name) for field, name in columns.items()}
        named = ", ".join(f"{field} is {name}" for field, name in shown.items() if field != name)
        notes.append(f"{path.name}: has the columns {', '.join(rows[0])}, read as: {named}")
    split = next((name for name in values if words_in(name.split(".")[-1]) in (["split"], ["subset"])), None)
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
    splits = {*chain(*ALIASES.values())}
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


def _columns(root: Path, path: Path, values: Mapping[str, list[Any]]) -> Choice:
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
    candidates = _captions(rest)
    if not candidates:
        raise DataError(
            f"{path}: has the columns {found}; none holds captions: add a column `captions` with a text or a list of "
            "texts for each pair (captions that stand in another file belong in this one)"
        )
    taken = dict.fromkeys(name.split(".*.")[0] for names in candidates for name in names)
    captions, doubt = _choice(
        [{"captions": names[0] if len(names) == 1 else names} for names in candidates],
        f"{path.name}: the columns {', '.join(taken)} could each hold the captions; which do?",
    )
    for name, column in rest.items():
        tasks = list(dict.fromkeys(value for value in column if isinstance(value, str)))
        if "task" in {*words_in(name)} and 1 < len(tasks) < ENTRIES:
            which = f"{path.name}: the column {name} names several tasks; the rows of which say what changed?"
            doubts = [*doubts, Doubt(which, [*({"where": {name: task}} for task in tasks), {}])]
    asked = [
        name
        for name, column in rest.items()
        if name not in taken
        and {*words_in(name)} & QUESTIONS
        and words_in(name)[-1] not in DATA
        and any(str(value).strip() for value in column)
    ]
    question = {}
    if asked and any({*words_in(name)} & CAPTIONS for name in taken):
        question["question"] = asked[0] if len(asked) == 1 else " ".join(f"{{{name}}}" for name in asked)
    return images | captions | question, doubts + doubt


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


def _captions(values: Mapping[str, list[Any]]) -> list[list[str]]:
    """The columns that could hold the captions, alone or several together; one such list where that is clear."""
    named = [
        n for n, column in values.items() if words_in(n)[-1:] and words_in(n)[-1] not in DATA and _may_be_text(column)
    ]
    strong = [name for name in named if {*words_in(name)} & CAPTIONS]
    if "captions" in values and not any(isinstance(value, dict) for value in values["captions"]):
        strong = ["captions"]
    texts = [name for name in named if _is_text(values[name])]
    pool = strong or texts or [name for name in named if {*words_in(name)} & WEAK]
    if len(pool) < 2:
        return [[_inner(name, values[name])] for name in pool]
    words = {tuple(word for word in words_in(name) if not word.isdecimal()) for name in pool}
    if strong and len(words) == 1:  # caption_1, caption_2
        return [sorted(pool, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])]
    together = [pool] if all(isinstance(value, str) for name in pool for value in values[name]) else []
    return [*([_inner(name, values[name])] for name in pool), *together]


def _inner(name: str, column: list[Any]) -> str:
    """The texts of sentences in objects of their own; a conversation stays as it is."""
    value = next(iter(column), None)
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return name
    inside = next((key for key in ("raw", "text", "caption", "sentence") if key in value[0]), None)
    return f"{name}.*.{inside}" if inside else name


def _may_be_text(column: list[Any]) -> bool:
    """True if a column may hold captions: texts or lists, of which not all are numbers; an empty one may."""
    values = [value for value in column if value != ""]
    usable = (isinstance(v, list) and not all(isinstance(e, int | float) for e in v) for v in values)
    return not values or any(usable) or any(isinstance(v, str) and not NUMBER.fullmatch(v) for v in values)


def _is_text(column: list[Any]) -> bool:
    """True if a column holds a text of several words, or lists of these; some scripts put no spaces between words."""
    return any(
        isinstance(text, str) and not NUMBER.fullmatch(text) and (" " in text.strip() or bool(UNSPACED.search(text)))
        for value in column
        for text in (value if isinstance(value, list) else [value])
    )

"""A collection of one's own: a manifest with a row per pair, or several rows per pair with a caption each.

    pairs.csv          before,after,captions,split      (or .tsv, .json, .jsonl, .parquet: option `manifest`)
    a/1.png, b/1.png   images, relative to the root

    a/1.png,b/1.png,the lamp is out,train
    {"before": "a/1.png", "after": "b/1.png", "captions": ["the lamp is out", "it is dark"], "split": "train"}

`captions` is a list, a JSON list in a text field, or one caption. Further columns are used where they exist: `id` (else
the two paths name the pair), `scene` (pairs of one scene must share a split) and `change_types`, of which `none` alone
marks a pair without a change. Other layouts are read by options, which `m3diff data check ROOT` suggests:

    manifest   a file, a pattern (`part-*.jsonl`), or one of these by split: {train: train.csv, val: dev.csv}
    columns    what columns are called: {before: img_a}; {id: null}: there is none. Also a path into nested values
               (`meta.split`, `images.0`, `sentences.*.raw`) or a template of these (`B/{name}.png`, `{number:06}.png`).
               `images` names a list of both images. Of several names a row's first is taken, where files differ:
               {captions: [instruction, prompt]}. Of a conversation (LLaVA, M4-Instruct, LLaMA-Factory, ms-swift)
               the answer is the caption: {images: image, captions: conversations}, {images: images, captions: messages}
    all_ask_what_changed  true: the questions of a conversation, or of the column `question`, all ask what changed. They
               are not kept: without this option, questions that are not known to ask so are refused
    no_caption texts that stand for no caption: [nan, n/a, "-"]; a pair without any other is passed over. []: such texts
               are captions. Without this option they are refused
    separator  between the captions of one text: "|". "": it separates nothing
    split      of every pair, where the manifest has none
    splits     the manifest's names of splits: {validation: val, dev: val}, {0: train, 1: test}
    rows       where in a JSON file the rows stand: `data`. They may be an object: {"7": ["it fell"]} has the columns
               `key` and `value`
    where      rows to take: {label: "True", lang: [en, de]}; others are passed over
    pairs_only true: rows that have not two images and one answer are passed over
    no_change  rows without a change: {changeflag: 0}
    delimiter  of a CSV file, where it is no comma
    confirmed  what looks like a mistake and is meant so: [where, encoding]

`where`, `no_change` and `splits` compare values by what they mean in the table (`filters.py`): `no` matches "no",
"FALSE", 0 and "0.0", `0` matches "0.0", and "no" between quotes is a text. An option that cannot be meant so is refused
unless `confirmed` has its name: a `where` or `no_change` that matches no row, or every row; a name of `splits`, an
optional column or a further name of `columns`, or a `separator`, that is nowhere in the table. Captions that no person
seems to have written are counted by kind (refusals, roles, chat, tokens, literals, markup, encoding, escapes, repeats);
in a test split each kind has to be confirmed. Change types such as "unchanged" or "No change" are read as `none`.

A path is relative to the root; an absolute one, or a file:// address, that leads into it is read as such. Images may
stand in the Parquet file itself, as `datasets` writes them (`Image`, or a list of them); ingest writes them
as files beside its records.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from pydantic import AfterValidator, Discriminator, Field, Tag

from m3diff.datasets.files import Embedded, columns_in, describe, look_up, pick, read_values, texts
from m3diff.datasets.filters import (
    ColumnNames,
    NoChangeNames,
    RowFilter,
    SplitNames,
    columns_to_find,
    refuse_faults,
)
from m3diff.datasets.spec import DatasetSpec, Licence, NotedRows, Permission, Protocol, Question, Row, merged
from m3diff.records.errors import DataError
from m3diff.records.schemas import NO_CHANGE, Split

REQUIRED, OPTIONAL = ("before", "after", "captions", "split"), ("id", "scene", "change_types")
# In the fault of a row that has another number of images or of answers than a pair
NO_PAIR = re.compile(r"two images, found (\d+)|one answer, found (\d+)")

Manifest = Annotated[
    Annotated[str, Tag("[file]")] | Annotated[Mapping[Split, str], Tag("[files]")],
    Discriminator(lambda value: "[files]" if isinstance(value, Mapping) else "[file]"),
]


def _template(column: str) -> str:
    columns_in(column)
    return column


Column = Annotated[str, AfterValidator(_template)]
Columns = Mapping[
    Literal["before", "after", "images", "captions", "split", "id", "scene", "change_types", "question"],
    Annotated[
        Annotated[Column, Tag("[column]")] | Annotated[tuple[Column, ...], Tag("[columns]")],
        Discriminator(lambda value: "[columns]" if isinstance(value, list | tuple) else "[column]"),
    ]
    | None,
]
# By column, the value or the list of values that a row may have; compared by meaning
Values = Mapping[str, Any]
# What an entry confirms: options that match nothing, or every row, and kinds of odd captions in a test split
Confirmable = Literal[
    "where",
    "no_change",
    "splits",
    "columns",
    "separator",
    "refusals",
    "roles",
    "chat",
    "tokens",
    "literals",
    "markup",
    "encoding",
    "escapes",
    "repeats",
]


def read(
    root: Path,
    manifest: Manifest = "pairs.csv",
    columns: Columns | None = None,
    split: Split | None = None,
    splits: Mapping[Any, Split] | None = None,
    rows: str = "",
    where: Values | None = None,
    no_change: Values | None = None,
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None,
    pairs_only: bool = False,
    all_ask_what_changed: bool = False,
    no_caption: Sequence[str] | None = None,
    separator: str | None = None,
    confirmed: Sequence[Confirmable] = (),
) -> NotedRows:
    """Yield a row per pair, at the place of its first row; rows that contradict an earlier one of their id stand alone.

    `all_ask_what_changed` changes nothing here: ingest and `data check` ask for it where a row has `questions`.

    Raises:
        DataError: a file cannot be read, or options match nothing, or every row, and `confirmed` does not name them.
    """
    called = {field: field for field in REQUIRED + OPTIONAL} | dict(columns or {})
    named = {field: (name,) if isinstance(name, str) else tuple(name or ()) for field, name in called.items()}
    tops = (f"{root.absolute()}/", f"{root.resolve()}/")
    checks = _OptionChecks(root, dict(columns or {}), splits or {}, where or {}, no_change or {}, separator, confirmed)

    def found_rows() -> Iterator[Row]:
        for path, place, own_split in _files(root, manifest, split):
            needed = [*(["images"] if named.get("images") else ["before", "after"]), "captions"]
            needed += [] if own_split else ["split"]
            single = [(*named[field], field)[0] for field in needed if len(named[field]) < 2]
            header = [each for column in single for each in columns_in(column)]
            for at, value in read_values(path, header, delimiter, rows):
                if not checks.takes(value, () if own_split else named["split"]):
                    continue
                found, fault = _fields(value, named, needed)
                if pairs_only and fault and NO_PAIR.search(fault):
                    continue
                if checks.is_unchanged(value):
                    found["change_types"] = [NO_CHANGE]
                found |= {side: _relative(found[side], tops) for side in ("before", "after")}
                row = _row(place + at, found, own_split, checks)
                yield row._replace(fault=fault or row.fault)
        checks.finish()

    pairs = merged(found_rows(), across_splits=True)
    return NotedRows(_without_no_caption(pairs, no_caption or (), checks.notes), checks.notes)


def _without_no_caption(rows: Iterable[Row], no_caption: Sequence[str], notes: list[str]) -> Iterator[Row]:
    """Drop the texts that stand for no caption; add a note if no caption is such a text."""
    wanted = {text.strip().casefold() for text in no_caption}
    captions = 0
    dropped = 0
    for row in rows:
        kept = row.references
        if wanted and not row.fault and isinstance(row.references, list):
            kept = [
                text for text in row.references if not (isinstance(text, str) and text.strip().casefold() in wanted)
            ]
            captions += len(row.references)
            dropped += len(row.references) - len(kept)
        yield row._replace(references=kept, without_caption=bool(row.references) and not kept)
    if captions and not dropped:
        # a note and no refusal: an entry may list such texts for files that come later
        notes.append(f"no_caption: none of {captions:,} captions is {' or '.join(map(repr, no_caption))}")


class _OptionChecks:
    """The options that compare values with the table's, and what of them matches nothing, or every row."""

    def __init__(
        self,
        root: Path,
        columns: Mapping[Any, Any],
        splits: Mapping[Any, Split],
        where: Values,
        no_change: Values,
        separator: str | None,
        confirmed: Sequence[str],
    ) -> None:
        self.root = root
        self.separator = separator
        self.confirmed = confirmed
        self.notes: list[str] = []
        self.splits = SplitNames(splits)
        self.change_types = NoChangeNames()
        self._where = RowFilter("where", where)
        self._no_change = RowFilter("no_change", no_change)
        self._columns = ColumnNames(columns_to_find(columns, REQUIRED + ("images",)))
        self._texts = 0
        self._separated = 0

    def takes(self, value: Any, split_columns: Sequence[str]) -> bool:
        """True if `where` takes the row; what cannot be read as a row is not passed over.

        Args:
            split_columns: that may name the row's split.
        """
        if not isinstance(value, dict):
            return True
        self._columns.add(value)
        for column in split_columns if self.splits.splits else ():
            with suppress(DataError):  # a template that the row does not fit, which is a fault of the row
                self.splits.add(look_up(value, column))
        return not self._where.wanted or self._where.matches(value)

    def is_unchanged(self, value: Any) -> bool:
        """True if `no_change` marks the row."""
        return isinstance(value, dict) and bool(self._no_change.wanted) and self._no_change.matches(value)

    def separate(self, captions: Any) -> Any:
        """The captions of a list of texts, cut at the separator; anything else is returned unchanged."""
        if not self.separator or not isinstance(captions, list):
            return captions
        if not all(isinstance(text, str) for text in captions):
            return captions
        self._texts += len(captions)
        self._separated += sum(self.separator in text for text in captions)
        cut = ([part.strip() for part in text.split(self.separator) if part.strip()] for text in captions)
        return [part for parts in cut for part in parts or [""]]

    def finish(self) -> None:
        """Complete the notes once every row is read.

        Raises:
            DataError: an option matches nothing, or every row, and the entry does not confirm it.
        """
        unseen = f"separator: {self.separator!r} is in none of {self._texts:,} captions"
        faults = {
            "columns": [f"columns: {fault}" for fault in self._columns.faults()],
            "where": self._where.faults(),
            "no_change": self._no_change.faults(),
            "splits": self.splits.faults(),
            "separator": [unseen] if self._texts and not self._separated else [],
        }
        refuse_faults(self.root, faults, self.confirmed)
        self.notes.extend([*self._where.notes(), *self._no_change.notes(), *self.change_types.notes()])


def _files(root: Path, manifest: Manifest, split: Split | None) -> Iterator[tuple[Path, str, Split | None]]:
    """The files of the manifest, what goes before their names in a message, and the split of their pairs if known."""
    named: Iterable[tuple[Split | None, str]]
    named = [(split, manifest)] if isinstance(manifest, str) else manifest.items()
    for own_split, name in named:
        for path in files_called(root, name):
            folder = path.relative_to(root).parent if path != root / name else Path()
            yield path, "" if folder == Path() else f"{folder}/", own_split


def files_called(root: Path, name: str) -> list[Path]:
    """The file, or those that a pattern stands for.

    Raises:
        DataError: no file has the pattern.
    """
    if (root / name).exists() or not any(letter in name for letter in "*?["):
        return [root / name]
    if found := sorted(root.glob(name)):
        return found
    raise DataError(f"{root / name}: no file is called so; correct `manifest` or the root")


def _relative(image: Any, tops: tuple[str, str]) -> Any:
    """The image's path below one of the two names of the root, where it is absolute or a file:// address."""
    path = image
    if isinstance(image, str) and (uri := re.match("file:(//(localhost)?)?(?=/)", image, re.IGNORECASE)):
        path = unquote(image[uri.end() :])
    top = next((top for top in tops if isinstance(path, str) and path.startswith(top)), None)
    return path.removeprefix(top) if top else image


def _fields(value: Any, named: Mapping[str, tuple[str, ...]], needed: list[str]) -> tuple[dict[str, Any], str | None]:
    found: dict[str, Any] = {**dict.fromkeys((*REQUIRED, *OPTIONAL, "question")), "questions": ()}
    if isinstance(value, DataError):
        return found, str(value)
    if not isinstance(value, dict):
        return found, f"row: expected an object, found {describe(value)}"
    try:
        for field, columns in named.items():
            values = [each for each in (look_up(value, column) for column in columns) if each is not None]
            found[field] = next(iter(values), None)
            if field == "captions" and values[1:]:  # of several columns, whose empty fields are none
                several = [texts(each) for each in values if each != ""] or [""]
                found[field] = [text for each in several for text in (each if isinstance(each, list) else [each])]
        found["captions"], found["questions"] = _answer(found["captions"], "".join(named["captions"][:1]))
    except DataError as error:
        return found, str(error)
    if isinstance(found["question"], str) and found["question"].strip():
        found["questions"] = (*found["questions"], Question(named["question"][0], found["question"]))
    if "images" in needed:
        images = found["images"]
        if not isinstance(images, list) or len(images) != 2:
            count = len(images) if isinstance(images, list) else int(images is not None)
            names = " or ".join(named["images"])
            return found, f"{names}: expected a list of two images, found {count}: {describe(images)}"
        found["before"], found["after"] = images
    if missing := [" or ".join(named[field]) or field for field in needed if found[field] is None]:
        return found, f"{', '.join(missing)}: is missing"
    return found, None


def _answer(captions: Any, column: str) -> tuple[Any, tuple[Question, ...]]:
    """The answer and the questions of a conversation; anything else is returned unchanged."""
    if not isinstance(captions, list) or not captions or not all(isinstance(turn, dict) for turn in captions):
        return captions, ()
    key = "value" if "value" in captions[0] else "content"
    turns = [(turn.get("from", turn.get("role")), _text_of(turn.get(key))) for turn in captions]
    answers = [text for who, text in turns if who in ("gpt", "assistant")]
    if len(answers) != 1:
        raise DataError(f"captions: expected a conversation with one answer, found {len(answers)}")
    asked = [(place, text) for place, (who, text) in enumerate(turns) if who in ("human", "user")]
    return answers[0], tuple(
        Question(f"{column}.{place}.{key}", text) for place, text in asked if text and isinstance(text, str)
    )


def _text_of(content: Any) -> Any:
    if isinstance(content, list):
        return " ".join(str(pick(part, "text")) for part in content if pick(part, "text"))
    return content


def _row(where: str, value: dict[str, Any], own_split: str | None, checks: _OptionChecks) -> Row:
    before, after = value["before"], value["after"]
    images = [image.name if isinstance(image, Embedded) else image for image in (before, after)]
    name = _named(value["id"]) or ("|".join(images) if all(isinstance(image, str) for image in images) else None)
    scene = _named(value["scene"]) or name
    split = own_split or value["split"]
    split = checks.splits.translate(split, _named(split))
    captions = checks.separate(texts(value["captions"]))
    types = texts(value["change_types"] or [])
    fault = None
    if isinstance(types, list) and all(isinstance(name_of_type, str) for name_of_type in types):
        types = checks.change_types.unify(types)
    else:
        types = []
        fault = "change_types: expected a list of names"
    return Row(name, split, scene, before, after, captions, types, where, fault, questions=value["questions"])


def _named(value: Any) -> Any:
    """A number as the text that it is as a name, 1.0 as 1; pandas makes whole numbers floats where one is missing."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, int) else value


OWN = Permission("yes", "a collection of one's own: whoever writes the manifest decides")
SPEC = DatasetSpec(
    title="own pairs",
    page=None,
    paper=None,
    licence=Licence.of("the owner's", None, OWN),
    read=read,
    files=("pairs.csv",),
    protocols=(Protocol("test", n=None),),
)

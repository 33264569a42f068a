"""A collection of one's own: a manifest with a row per pair, or several rows per pair with a caption each.

    pairs.csv          before,after,captions,split      (or .tsv, .json, .jsonl, .parquet: option `manifest`)
    a/1.png, b/1.png   images, relative to the root

    a/1.png,b/1.png,the lamp is out,train
    {"before": "a/1.png", "after": "b/1.png", "captions": ["the lamp is out", "it is dark"], "split": "train"}

`captions` is a list, a JSON list in a text field, or one caption. Further columns are used where they exist: `id` (else
the two paths name the pair), `scene` (pairs of one scene must share a split) and `change_types`. The option `columns`
names columns that are called otherwise, e.g. {before: img_a}; a manifest without splits takes the option `split`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from components.datasets.rows import Row
from components.datasets.spec import DatasetSpec, Licence, Permission, Protocol
from components.datasets.tables import read_table, texts

REQUIRED = ("before", "after", "captions", "split")
OPTIONAL = ("id", "scene", "change_types")


class Entry(NamedTuple):
    """One row of the manifest, columns by their field."""

    where: str
    name: Any
    split: Any
    scene: Any
    before: Any
    after: Any
    captions: Any
    change_types: Any


def read(
    root: Path, manifest: str = "pairs.csv", columns: dict[str, str] | None = None, split: str | None = None
) -> Iterator[Row]:
    """One row per pair, at the place of its first row; rows that contradict an earlier one of their id stand alone."""
    named = {field: (columns or {}).get(field, field) for field in REQUIRED + OPTIONAL}
    required = [named[field] for field in REQUIRED if field != "split" or split is None]
    merged: dict[Any, list[Entry]] = {}
    for where, value, fault in read_table(root / manifest, required):
        entry = _entry(where, {field: value.get(column) for field, column in named.items()}, split)
        if fault or not isinstance(entry.captions, list) or not isinstance(entry.name, str):
            yield _row([entry], fault)
            continue
        same = merged.setdefault(entry.name, [])
        if same and entry[1:6] != same[0][1:6]:
            yield _row([entry], f"id: {same[0].where} has the same id, but other images, split or scene")
        else:
            same.append(entry)
    for entries in merged.values():
        yield _row(entries, None)


def _entry(where: str, value: dict[str, Any], split: str | None) -> Entry:
    before, after = value["before"], value["after"]
    name = value["id"]
    if name in (None, ""):
        name = f"{before}|{after}" if isinstance(before, str) and isinstance(after, str) else None
    name = str(name) if isinstance(name, int) else name
    scene = value["scene"] if value["scene"] not in (None, "") else name
    types = texts(value["change_types"] or [])
    return Entry(where, name, split or value["split"], scene, before, after, texts(value["captions"]), types)


def _row(entries: list[Entry], fault: str | None) -> Row:
    first = entries[0]
    if len(entries) > 1:
        captions: Any = [caption for entry in entries for caption in entry.captions]
    else:
        captions = first.captions
    types = first.change_types
    if not isinstance(types, list) or not all(isinstance(each, str) for each in types):
        types, fault = [], fault or "change_types: expected a list of names"
    where = " and ".join(entry.where for entry in entries)
    return Row(
        first.name, first.split, first.scene, first.before, first.after, captions, types, where, fault, len(entries)
    )


OWN = Permission("yes", "a collection of one's own: whoever writes the manifest decides")
SPEC = DatasetSpec(
    title="own pairs",
    page=None,
    paper=None,
    licence=Licence("the owner's", None, train=OWN, redistribute=OWN, show=OWN),
    read=read,
    files=("pairs.csv",),
    protocols=(Protocol("test", n=None),),
)

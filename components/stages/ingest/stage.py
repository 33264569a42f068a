"""ingest: one dataset's own layout on disk -> records with the digest of every image.

Image bytes enter here and nowhere else: later stages depend on the records, which name the content of each image, and
not on the dataset's folder. Each dataset is a stage of its own in DVC, so that a new one leaves the others alone.

Captions that are probably none, and questions that are probably others, are doubts: what a person must say before they
train. A doubt is answered once, in the options of the dataset's entry; `m3diff data check` prints the entries.
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from m3diff.datasets import DATASETS
from m3diff.datasets.files import describe, fault_of_path, is_inside, require_utf8
from m3diff.datasets.spec import Row, read_with_notes, unpacked
from m3diff.images.check import check_images
from m3diff.provenance.cache import is_cached_object
from m3diff.records.errors import DataError
from m3diff.records.files import StageReport, write_atomic
from m3diff.records.schemas import RAW_SCHEMA
from m3diff.stages.ingest.captions import OddCaptions, find_odd_captions, unconfirmed
from m3diff.stages.ingest.params import DatasetEntry

MAX_DECODED_PIXELS = 100_000_000  # a larger image is hashed and not decoded here; validate decides with its own limit

SAY_NOTHING = {
    *("nan", "none", "null", "nil", "n/a", "n.a", "na", "nat", "undefined", "missing", "empty", "blank", "unknown"),
    *("unlabeled", "tbd", "todo", "fixme", "test", "caption", "true", "false", "no caption", "no captions"),
    *("no description", "not available", "not applicable", "no answer", "not annotated", "string", "placeholder"),
    *("dummy", "asdf", "qwerty", "%s"),
}
FIRST_OF_PLACEHOLDERS = ("lorem ipsum", "todo", "fixme", "tbd", "xxx")
LAST_OF_PLACEHOLDERS = (
    *("placeholder", "caption", "captions", "text", "texts", "description", "descriptions", "string", "only", "here"),
    *("available", "unavailable", "provided", "given", "found"),
    *("added", "annotated", "written", "done", "determined", "filled", "filled in", "pending", "missing", "soon"),
)
NOT_WRITTEN_YET = re.compile(  # texts that keep a caption's place, in small letters
    r"""(?:this\ is\ )?(?:just\ )?(?:an?\ |the\ )?(?:
        placeholder(?:\ (?:captions?|texts?|descriptions?|only)|\ for\ (?:an?\ |the\ |your\ )?(?:[\w-]+\ ){0,3}
            (?:captions?|texts?|descriptions?))?
        | (?:example|sample|dummy|default|test)\ (?:caption|description|text|string)
        | caption\ placeholder )
    | lorem\ ipsum\b.*
    | (?:insert|enter|put|type|add|write)\ (?:an?\ |your\ |the\ )?(?:\w+\ ){0,2}(?:captions?|descriptions?)(?:\ here)?
    | your\ (?:\w+\ )?(?:caption|text|description)(?:\ (?:goes\ )?here)?
    | (?:the\ )?(?:caption|text|description)s?\ (?:
        goes\ here | here | to\ be\ (?:added|written|filled(?:\ in)?) | pending | missing | coming\ soon )
    | (?:todo|fixme|tbd|xxx)\b\s?[:-].{0,80} | to\ be\ (?:added|annotated|done|determined|filled(?:\ in)?)
    | coming\ soon | (?:insert|enter|your)\ text(?:\ here)? | x{2,12}
    | (?:no|missing)\ (?:captions?|descriptions?|texts?|annotations?)
        (?:\ (?:is\ |are\ )?(?:available|provided|given|found))?
    | (?:captions?|descriptions?|texts?)\ (?:is\ |are\ )?
        (?:unavailable|not\ (?:yet\ )?(?:available|provided|given|found))""",
    re.VERBOSE | re.DOTALL,
)
LIST = re.compile(  # a list, tuple, set or object as a programming language prints it
    r"""\s*(
        [A-Za-z_][\w.]*\(.*[,"'].*\) | \(\s*[bur]*["'].*\)     # array(["..."]), WrappedArray(..., ...), ("...",)
        | \[\s*(?:[bur]*["']|\[|\{).* | \[.*,.*\] | \{.*\}
    )\s*""",
    re.VERBOSE | re.DOTALL,
)
# A text of Python with its prefix, as str() prints bytes: b'it fell'. Without a prefix, a caption may be quoted
LITERAL = re.compile(
    r"""\s*(?P<outer>["']?) (?:[bruf]|br|rb|fr|rf) (?P<quote>\'{3}|"{3}|'|") (?:\\.|(?!(?P=quote))[^\\])* (?P=quote)
    (?P=outer)\s*""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
# How a sentence may begin that looks like a literal: b's car is near the boys', b' is where a' was
SENTENCE = re.compile(r"\s*[a-z]'s?\s", re.IGNORECASE)
WORD = re.compile(r"[^\W\d_]+[.,;:!?]*|[.,;:!?]")
SEPARATORS = ("<sep>", "[SEP]", "<br>", "|", "##", "\n", ";", "\t")
MANY = 0.2  # share of captions from which on a sign may separate; below it, it belongs to a sentence
PLACEHOLDER = re.compile(
    r"<[^<>]*(?:image|img|vision|video)[^<>]*>|\[/?(?:IMG|INST)\]|\b(?:image|picture|img)[- ]?\d+:", re.I
)
ASKS = re.compile(
    r"(please )?(what (has )?(been )?changed|what is different|what differs|what (is|are) the (change|difference)s?"
    r"|(describe|list|find|spot|identify) (what changed|the (change|difference)s?))( between (the|these) two images)?"
)
# Questions that are the task's own, in small letters without signs: those of profiles/questions.yaml that ask what
# changed, beside the short ones of `ASKS`. A question that is not here is never taken for one that is
ASK_WHAT_CHANGED = {
    "what has changed from the first image to the second",
    "what is different in the second image",
    "what difference happened from image1 to image2",
    "describe in detail every change from the first image to the second",
    "compare the two images and describe the changes",
    "compare the two images and describe the differences",
    "compare the two images and say what changed",
    "look at the image before and the image after what changed",
    "say in words how the second image differs from the first",
    "which objects changed between the two images where are they and how did they change",
    "list all changes from the image before to the image after with their places",
    "give a full account of what differs between the two images",
}


class IngestReport(StageReport):
    """Counts of one dataset; pairs and references by split. `rows_in` are rows of its annotation files."""

    dataset: str
    reader: str
    pairs: dict[str, int]
    references: dict[str, int]  # empty ones are counted
    empty_references: int
    faults: int  # rows that could not be read; validate quarantines them
    images: int  # distinct paths
    unread_images: int  # missing or unreadable; validate quarantines their pairs


def ingest(name: str, entry: DatasetEntry, image_cache: Path, out: Path) -> IngestReport:
    """Write `out/<name>/records.parquet` (RAW_SCHEMA, every annotation row kept) and `out/<name>.json`, the report.

    A dataset with a grammar gets it as `out/<name>/grammar.json`, one whose images stand in its manifest gets them in
    `out/<name>/images`. The folder is made anew.

    Args:
        name: of the dataset in `params.yaml`; the namespace of its ids.
        image_cache: what is known of images by content; it changes no output.

    Raises:
        DataError: an annotation file cannot be used, there is no pair, or the meaning of captions is in doubt.
    """
    require_utf8(entry.root)
    read, option_notes = read_with_notes(DATASETS[entry.reader], entry.root, entry.options)
    odd = odd_captions_of(entry, read)
    _refuse_doubts(name, entry, read, odd)
    for note in [*option_notes, *(f"{captions}; {captions.remedy}" for captions in odd)]:
        print(f"ingest {name}: {note}")
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    records, annotation_rows = to_records(name, entry, unpacked(read, folder / "images"))
    if not records:
        why = "no pair with a caption; see `no_caption` in its options" if read else "no pair; fetch the dataset again"
        raise DataError(f"ingest.datasets {name!r}: {entry.root} holds {why}")
    paths = pl.Series([record[side] for side in ("before", "after") for record in records], dtype=pl.String)
    images = check_images(paths, MAX_DECODED_PIXELS, image_cache, f"ingest {name}")
    digests = dict(images.select("path", "digest").iter_rows())
    for record in records:
        record |= {f"{side}_sha256": digests.get(record[side]) for side in ("before", "after")}
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records, RAW_SCHEMA), folder / "records.parquet", compression="zstd")
    if grammar := DATASETS[entry.reader].grammar:
        write_atomic(folder / "grammar.json", json.dumps(grammar(entry.root), indent=1) + "\n")
    pairs, references = Counter[str](), Counter[str]()
    for record in sorted(records, key=lambda record: record["split"] or "?"):
        pairs[record["split"] or "?"] += 1
        references[record["split"] or "?"] += len(record["references"])
    report = IngestReport(
        stage="ingest",
        rows_in=annotation_rows,
        rows_out=len(records),
        dataset=name,
        reader=entry.reader,
        pairs=pairs,
        references=references,
        empty_references=sum(record["references"].count("") for record in records),
        faults=sum(record["fault"] is not None for record in records),
        images=images.height,
        unread_images=images["digest"].null_count(),
    )
    return report.write(out / f"{name}.json")


class Doubt(NamedTuple):
    """A question to the user, and the options of each answer, the likeliest first; a fault of the files has none.

    `sure`: the first answer needs no confirmation before it is written into an entry.
    """

    question: str
    answers: list[dict[str, Any]]
    sure: bool = False


def odd_captions_of(entry: DatasetEntry, rows: Sequence[Row]) -> list[OddCaptions]:
    """Captions that no person wrote; a dataset with a grammar has drawn its own and repeats them."""
    return [] if DATASETS[entry.reader].grammar else find_odd_captions(rows)


def doubts(
    rows: Sequence[Row], options: Mapping[str, Any], own: bool, odd: Sequence[OddCaptions] = ()
) -> Iterator[Doubt]:
    """Yield the questions that the entry's options leave open.

    Args:
        own: the dataset is a collection of the user's own (reader `pairs`), whose texts nobody has looked at.
        odd: its captions that no person seems to have written.
    """
    told = [(row, row.references) for row in rows if isinstance(row.references, list)]
    texts = [(row, text) for row, references in told for text in references if isinstance(text, str)]
    if lists := [(row, text.strip()) for row, text in texts if LIST.fullmatch(text) and not says_nothing(text)]:
        many = len({row.source for row, _ in lists})
        yield Doubt(
            f"{_place(lists)}: captions are a list or an object written as text ({lists[0][1][:60]}), so in {many:,} "
            "rows; write the captions as JSON: `json.dumps(captions)`",
            [],
        )
    literals = list(_literals(texts))
    yield from literals
    words = [(row, texts) for row, texts in told if len(texts) > 3 and all(WORD.fullmatch(str(text)) for text in texts)]
    if 2 * len(words) > len(told):
        yield Doubt(
            f"{_place(words)}: captions are a list of single words ({', '.join(map(str, words[0][1][:4]))}, ...), so "
            f"in {len(words):,} rows; write each caption as one text: `' '.join(words)`",
            [],
        )
    asked = list(_questions(rows)) if own and not options.get("all_ask_what_changed") else []
    yield from asked
    if own and not asked:
        if options.get("separator") is None:
            yield from _separators(texts)
        yield from _nothing(texts, options.get("no_caption"))
    if own:
        # what is written as text, with its quotes and escapes, has its own question above
        answered = {"literals", "escapes"} if lists or literals else set[str]()
        others = [captions for captions in odd if captions.kind not in answered]
        yield from _unconfirmed(others, options.get("confirmed") or ())


def _unconfirmed(odd: Sequence[OddCaptions], confirmed: Sequence[str]) -> Iterator[Doubt]:
    """Captions that no person wrote in a test split, all kinds in one question."""
    if tested := unconfirmed(odd, confirmed):
        listed = "\n".join(f"{captions}; {captions.remedy}" for captions in tested)
        kinds = [*confirmed, *(captions.kind for captions in tested)]
        yield Doubt(
            f"{listed}\nReferences of a test split score every model; mend them. Or are they meant so?",
            [{"confirmed": kinds}],
        )


def _literals(texts: Sequence[tuple[Row, str]]) -> Iterator[Doubt]:
    """Captions that are literals of Python in themselves, whose quotes and escapes would be trained."""
    # The end is compared first, which costs less than the pattern where there are millions of captions
    quoted = [(row, text.strip()) for row, text in texts if text.rstrip().endswith(("'", '"'))]
    literals = [(row, text) for row, text in quoted if LITERAL.fullmatch(text)]
    if not literals or (all(SENTENCE.match(text) for _, text in literals) and 2 * len(literals) < len(texts)):
        return
    rows = len({row.source for row, _ in literals})
    yield Doubt(
        f"{_place(literals)}: captions are literals of Python written as text ({literals[0][1][:60]}), so in {rows:,} "
        "rows; write the text inside: `ast.literal_eval(caption)`, and `.decode()` where that is bytes",
        [],
    )


def says_nothing(text: str) -> bool:
    """True if a text has no letter or digit, is a single number, or a word that programs and people write for none."""
    bare = text.strip("\"'`()[]{}<>.!*#$ \t\r\n").casefold()
    return bare in SAY_NOTHING or not re.search(r"[^\W\d_]", bare) or _keeps_a_place(bare)


def _keeps_a_place(bare: str) -> bool:
    """True if a text stands where a caption is to be written. Its last or first word decides for most, in less time."""
    is_candidate = bare.endswith(LAST_OF_PLACEHOLDERS) or bare.startswith(FIRST_OF_PLACEHOLDERS)
    return is_candidate and NOT_WRITTEN_YET.fullmatch(bare) is not None


def _place(found: Sequence[tuple[Row, Any]]) -> str:
    return found[0][0].source.split(" and ")[0]


def _counted(texts: Iterable[str]) -> str:
    counts = Counter(texts)
    listed = "; ".join(f"{text[:80]!r} ({count:,})" for text, count in counts.most_common(5))
    return listed + (f"; and {len(counts) - 5:,} more" if len(counts) > 5 else "")


def _separators(texts: Sequence[tuple[Row, str]]) -> Iterator[Doubt]:
    """The first sign that is between texts in many captions; a semicolon or a line break between several words."""
    for sign in SEPARATORS:
        least = 2 if sign in ";\n\t" else 1
        lengths = [[len(part.split()) for part in text.split(sign) if part.strip()] for _, text in texts]
        found = [one for one, cut in zip(texts, lengths, strict=True) if len(cut) > 1 and min(cut) >= least]
        if found and len(found) >= MANY * len(texts):
            yield Doubt(
                f"{_place(found)}: {sign!r} is between words of {len(found):,} captions ({found[0][1][:60]!r}); does "
                "it separate several captions?",
                [{"separator": sign}, {"separator": ""}],
            )
            return


def _nothing(texts: Sequence[tuple[Row, str]], known: Sequence[str] | None) -> Iterator[Doubt]:
    """Texts that say nothing: to be confirmed in a test split, where an empty one is a reference, too."""
    told = {text.strip().casefold() for text in known or ()}
    found = [
        (row, text)
        for row, text in texts
        if says_nothing(text) and text.strip().casefold() not in told and (text.strip() or row.split == "test")
    ]
    if found and (known is None or known):
        tested, bare = sum(row.split == "test" for row, _ in found), [text.strip() for _, text in found]
        yield Doubt(
            f"{_place(found)}: the caption {found[0][1]!r} says nothing; such texts: {_counted(bare)}, {tested:,} of "
            "them in test. Do they stand for no caption (`no_caption`; a pair without any other is passed over), or "
            "are they captions ([])? If they mean that nothing changed, `no_change` says so",
            [{"no_caption": sorted({*(known or ()), *bare})}, {"no_caption": []}],
            sure=not tested,
        )


def _questions(rows: Sequence[Row]) -> Iterator[Doubt]:
    """The questions that references answer, unless each one is known to ask what changed."""
    found = [(row, question) for row in rows for question in row.questions]
    known = {question.text for _, question in found if asks_what_changed(question.text)}
    if any(question.text not in known for _, question in found):
        asked = _counted(" ".join(PLACEHOLDER.sub(" ", question.text).split()) for _, question in found)
        alone = {each.column: each.text for _, each in found if each.text in known and "{" not in each.column}
        texts_of = {column: {each.text for _, each in found if each.column == column} for column in alone}
        # a filter that takes every row leaves the questions of other columns, and is refused
        alone = {column: text for column, text in alone.items() if len(texts_of[column]) > 1}
        yield Doubt(
            f"{_place(found)}: captions answer questions, which are not kept: {asked}. Do all of them ask what "
            "changed?",
            [*({"where": {column: text}} for column, text in alone.items()), {"all_ask_what_changed": True}],
        )


def asks_what_changed(question: str) -> bool:
    """True if a question is known to be the task's own."""
    plain = _plain(question)
    return ASKS.fullmatch(plain) is not None or plain in ASK_WHAT_CHANGED


def _plain(question: str) -> str:
    return " ".join(re.sub(r"[^\w\s]", " ", PLACEHOLDER.sub(" ", question).casefold()).split())


class _OneLine(yaml.SafeDumper):
    """Writes a text with a line break between double quotes, on one line."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "\n" in data else None)


_OneLine.add_representer(str, _OneLine.represent_str)


def as_yaml(value: Any) -> str:
    """A value on one line, as it goes into `params.yaml`."""
    form: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "width": 10_000, "allow_unicode": True}
    return yaml.dump(json.loads(json.dumps(value)), Dumper=_OneLine, **form).strip()


def _refuse_doubts(name: str, entry: DatasetEntry, rows: list[Row], odd: Sequence[OddCaptions]) -> None:
    found = [
        doubt.question + "".join(f"\n    options: {as_yaml(answer)}" for answer in doubt.answers)
        for doubt in doubts(rows, entry.options, entry.reader == "pairs", odd)
    ]
    if found:
        told = "\n  ".join(found)
        raise DataError(
            f"ingest.datasets {name!r}: {entry.root}: captions are in doubt:\n  {told}\n"
            f"put the right options into the entry, or mend the file; `m3diff data check {entry.root}` says more"
        )
    if left_out := [row for row in rows if row.without_caption]:
        print(f"ingest {name}: {len(left_out):,} pairs without a caption are passed over, first {left_out[0].source}")


def to_records(name: str, entry: DatasetEntry, rows: Iterable[Row]) -> tuple[list[dict[str, Any]], int]:
    """All rows as records of RAW_SCHEMA without digests, in the reader's order, and the number of annotation rows.

    Rows that have no caption by the dataset's entry are left out.
    """
    rows = list(rows)

    @cache
    def stays(path: str) -> bool:
        roots = filter(None, [entry.root, entry.image_root])
        return entry.follow_links or is_inside(path, *roots) or is_cached_object(path)

    records = [_record(name, entry, row, stays) for row in rows if not row.without_caption]
    return records, sum(row.raw_rows for row in rows)


def _record(dataset: str, entry: DatasetEntry, row: Row, stays: Callable[[str], bool]) -> dict[str, Any]:
    """Typed fields; what cannot be typed becomes null (or no references) and is named in `fault`."""
    faults = [row.fault] if row.fault else []
    name = _text("id", row.name, faults)
    scene = _text("scene", row.scene, faults)
    split = _text("split", row.split, faults)
    return {
        "id": name and f"{dataset}/{name}",
        "dataset": dataset,
        "split": "train" if split in entry.train_on else split,
        "own_split": split,
        "scene": scene and f"{dataset}/{scene}",
        "before": _image("before", entry, row.before, faults, stays),
        "after": _image("after", entry, row.after, faults, stays),
        "references": _references(row.references, faults),
        "change_types": row.change_types,
        "source": _printable(row.source),
        "fault": "; ".join(map(_printable, faults)) or None,
    }


def _text(field: str, value: Any, faults: list[str]) -> str | None:
    """The value where it is usable text. A null is no second fault where one is known: it follows from it."""
    if not isinstance(value, str):
        if value is not None or not faults:
            faults.append(f"{field}: expected text, found {describe(value)}")
    elif not value:
        faults.append(f"{field}: is empty")
    elif not value.isascii() and value.encode(errors="ignore").decode() != value:
        faults.append(f"{field}: holds half a surrogate pair, which is no character: {describe(value)}")
    else:
        return value
    return None


def _references(value: Any, faults: list[str]) -> list[str]:
    if not isinstance(value, list):
        if value is not None or not faults:
            faults.append(f"references: expected a list of text, found {describe(value)}")
        return []
    return [text for number, text in enumerate(value) if text == "" or _text(f"reference {number}", text, faults)]


def _image(field: str, entry: DatasetEntry, value: Any, faults: list[str], stays: Callable[[str], bool]) -> str | None:
    """`root/value`, refused where it or a link on its way leads out of the entry's roots; a path as it is, which ingest
    itself has written.

    Args:
        stays: True for a path that no link leads out. It is asked for a folder once, and for files that are links.
    """
    if isinstance(value, Path):
        return str(value)
    name = _text(field, value, faults)
    if name is None:
        return None
    if fault := fault_of_path(name, entry.root, [*filter(None, [entry.image_root])]):
        faults.append(f"{field}: {describe(value)} {fault}")
        return None
    path = os.path.join(entry.root, name)
    path = os.path.normpath(path) if entry.image_root else path
    if stays(os.path.dirname(path)) and not (os.path.islink(path) and not stays(path)):
        return path
    faults.append(f"{field}: {path} is a symbolic link out of the dataset's root; copy the file or set follow_links")
    return None


def _printable(value: str) -> str:
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()

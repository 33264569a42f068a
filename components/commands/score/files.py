"""Anyone's predictions (COCO results, {id: caption}, JSON Lines, CSV or TSV); what they are scored against, a
benchmark's annotation files, ingest's records or a COCO file; and the faults that such files typically have.

Nothing of a dataset is handed on here: its files are the user's, read where they lie. Images are not looked at.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.datasets import DATASETS
from m3diff.datasets.files import describe, parse_json, read_json, read_text
from m3diff.datasets.spec import DatasetSpec, Protocol, Published, SplitCount
from m3diff.datasets.tables import read_values
from m3diff.records.errors import DataError, readable
from m3diff.scoring.grammar import Grammar
from m3diff.scoring.pairs import EvalPair, without_surrogates
from m3diff.scoring.protocols import protocols_of, takes

IDS = ("image_id", "id", "img_id", "uid", "pair_id", "image", "file_name", "filename", "name", "question_id")
"""Names of the id's field, the likeliest first."""
PREDICTIONS = (
    "prediction", "predicted_caption", "predicted", "pred", "pred_caption", "generated", "generated_caption",
    "generated_text", "hypothesis", "hyp", "output", "model_output", "response",
)  # fmt: skip
"""Names of the caption's field that say that a model wrote it."""
CAPTIONS = ("caption", "text", "sentence", "description", "answer")
"""Names of the caption's field that may also name the references."""
TABLES = (".csv", ".tsv", ".jsonl")
KINDS = "[{image_id, caption}] or {id: caption} as .json, an object a line as .jsonl, or columns as .csv or .tsv"
EXTENSION = re.compile(r"\.(?:png|jpe?g|gif|webp)", re.IGNORECASE)
SCENE = re.compile(r"(?:CLEVR_(?P<kind>semantic|nonsemantic)_)?0*(?P<number>\d+)(?P<distractor>_n)?")
TOKENISED = re.compile(r"\w (?:[.,;:!?]|'s|n't)(?: |$)")
SENTENCES = re.compile(r"\w\. +\w")
MANY = 0.2
"""Share of captions from which on a way of writing is the file's."""


class Prediction(NamedTuple):
    id: str
    caption: str


def read_predictions(path: Path) -> list[Prediction]:
    """Every caption of the file with its id, in the file's order; an id perhaps several times.

    Raises:
        DataError: the file cannot be read, has no row, or one without an id or a caption, or with two captions.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; name the file of captions: {KINDS}")
    found = [read_prediction(where, row) for where, row in read_rows(path)]
    if not found:
        raise DataError(f"{path}: holds no caption; expected {KINDS}")
    return found


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The place and the value of each row of a table, of JSON (a list, or one row), or of an object {id: caption}."""
    if path.suffix.lower() in TABLES:
        for where, row in read_values(path, ()):
            if isinstance(row, DataError):
                raise DataError(f"{path.parent / where}: {row}")
            yield str(path.parent / where), row
        return
    try:
        value = parse_json(read_text(path), str(path))
    except DataError as error:
        raise DataError(f"{error}; expected {KINDS}") from error
    if isinstance(value, dict) and named(value, IDS) and named(value, (*PREDICTIONS, *CAPTIONS)):
        value = [value]
    if isinstance(value, dict):
        yield from ((f"{path}, {name!r}", {IDS[0]: name, CAPTIONS[0]: caption}) for name, caption in value.items())
    elif isinstance(value, list):
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(value))
    else:
        raise DataError(f"{path}: expected {KINDS}; found {describe(value)}")


def read_prediction(where: str, row: Any) -> Prediction:
    """The likeliest id of a row, and its caption: a field that says that a model wrote it, else another of its names.

    Raises:
        DataError: there is none of either, it is no text, or captions differ.
    """
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with an id and a caption, found {describe(row)}")
    ids, captions = named(row, IDS), named(row, PREDICTIONS) or named(row, CAPTIONS)
    for found, name in ((ids, IDS[0]), (captions, CAPTIONS[0])):
        if not found:
            fields = ", ".join(map(str, row))[:120]
            raise DataError(f"{where}: no field {name}; found {fields}; rename the one that holds it to {name}")
    caption, *others = captions.values()
    if any(other != caption for other in others):
        raise DataError(
            f"{where}: {' and '.join(map(repr, captions))} could each be the caption; remove all but one of them, or "
            "rename the model's to prediction"
        )
    if isinstance(caption, list) and len(caption) == 1:
        (caption,) = caption
    return Prediction(read_id(where, next(iter(ids.values()))), read_caption(where, caption))


def named(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The fields of these names, in the names' order, whatever their case, spaces and hyphens."""
    known = {str(key).strip().lower().replace(" ", "_").replace("-", "_"): key for key in row}
    return {str(known[name]): row[known[name]] for name in names if name in known}


def read_id(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise DataError(
            f"{where}: id: expected text or a whole number, found {describe(value)}; write the pair's id, as the "
            "references have it"
        )
    return str(value).strip()


def read_caption(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{where}: caption: expected plain text, found {describe(value)}; write one text to a pair, words joined "
            'by spaces, and "" where there is no caption'
        )
    return without_surrogates(value)


class Benchmark(NamedTuple):
    """A dataset, or one part of it, whose test pairs papers score."""

    name: str
    spec: DatasetSpec
    published: Published | None

    @property
    def protocols(self) -> tuple[Protocol, ...]:
        """The headline's first."""
        return protocols_of(self.name, self.spec)

    def protocol(self, name: str | None) -> Protocol:
        """The protocol of this name; without one the headline's.

        Raises:
            DataError: there is none of this name.
        """
        known = {one.name: one for one in self.protocols}
        if (name or self.protocols[0].name) not in known:
            raise DataError(f"{self.name}: no protocol {name!r}; it has {', '.join(known)}")
        return known[name or self.protocols[0].name]


def benchmarks() -> dict[str, Benchmark]:
    """By name: each published part, and each dataset that draws itself."""
    found = {part.part: Benchmark(part.part, spec, part) for spec in DATASETS.values() for part in spec.published}
    own = {name: Benchmark(name, spec, None) for name, spec in DATASETS.items() if spec.generate}
    return dict(sorted((found | own).items()))


class References(NamedTuple):
    """Pairs by name, in the file's order: without captions, and without their images, of which scores know nothing."""

    pairs: dict[str, EvalPair]
    records: int | None = None  # of the annotation file, over all of `pairs`
    image_pairs: int | None = None
    grammar: Grammar | None = None  # reads captions back into changes
    as_scored: bool = False  # a COCO file: what it holds is scored as it stands


def bare_pair(dataset: str, name: str, references: list[str], change_types: list[str]) -> EvalPair:
    return EvalPair(f"{dataset}/{name}", dataset, Path(), Path(), b"", b"", references, change_types)


def from_coco(path: Path, dataset: str) -> References:
    """{"images": [{"id"}], "annotations": [{"image_id", "caption"}]}; an image may stand there several times.

    Raises:
        DataError: the file is not of that shape, holds no image, or one without a caption.
    """
    value = read_json(path, dict)
    texts: dict[str, list[str]] = {}
    for kind, field in (("images", "id"), ("annotations", "image_id")):
        if not isinstance(value.get(kind), list):
            raise DataError(f"{path}: expected COCO captions, an object with the lists images and annotations")
        for number, row in enumerate(value[kind]):
            where = f"{path}, {kind[:-1]} {number}"
            given = row if isinstance(row, dict) else {}
            found = texts.setdefault(read_id(where, given.get(field)), [])
            if kind == "annotations":
                found.append(read_caption(where, given.get("caption")))
    bare = [name for name, found in texts.items() if not found]
    if bare or not texts:
        raise DataError(
            f"{path}: {len(bare)} of {len(texts)} images without a caption, such as {bare[:1]}: were empty ones "
            "dropped? An empty caption is a reference and stays"
        )
    return References({name: bare_pair(dataset, name, found, []) for name, found in texts.items()}, as_scored=True)


def from_data(benchmark: Benchmark, path: Path) -> References:
    """The test pairs of the dataset's own folder, or of ingest's records.parquet or the folder it stands in.

    Raises:
        DataError: there is nothing of the kind, a test pair cannot be read, or there is none.
    """
    records = path if path.suffix == ".parquet" else path / "records.parquet"
    if records.is_file():
        return from_records(records, benchmark.name)
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; name the one that holds {', '.join(benchmark.spec.files)}")
    rows = [row for row in benchmark.spec.read(path) if row.split == "test"]
    if not rows:
        raise DataError(f"{path}: has no test pair; is it the whole dataset?")
    pairs = {}
    for row in rows:
        if row.fault or not isinstance(row.references, list):
            fault = row.fault or f"references: expected a list, found {describe(row.references)}"
            raise DataError(f"{path}: {row.source}: {fault}; fetch the file again")
        texts = [read_caption(f"{path}: {row.source}", text) for text in row.references]
        pairs[row.name] = bare_pair(benchmark.name, row.name, texts or [""], row.change_types)
    grammar = Grammar.load(path / "grammar.json") if benchmark.spec.grammar else None
    images = {(row.before, row.after) for row in rows}
    return References(pairs, sum(row.raw_rows for row in rows), len(images), grammar)


def from_records(path: Path, dataset: str) -> References:
    import pyarrow.parquet as pq

    columns = ["id", "dataset", "split", "references", "change_types", "before", "after"]
    with readable(path, "run `m3diff ingest` again"):
        rows = pq.read_table(path, columns=columns, filters=[("split", "=", "test")]).to_pylist()
    pairs = {}
    for row in rows:
        if row["id"] is not None:
            name = row["id"].removeprefix(f"{row['dataset']}/")
            pairs[name] = bare_pair(dataset, name, row["references"] or [""], row["change_types"] or [])
    if not pairs:
        raise DataError(f"{path}: has no record of the split 'test'")
    rules = path.with_name("grammar.json")
    images = {(row["before"], row["after"]) for row in rows}
    return References(pairs, None, len(images), Grammar.load(rules) if rules.is_file() else None)


def counts_of(references: References, protocol: Protocol) -> SplitCount:
    """Numbers of the pairs that a protocol takes."""
    pairs = [pair.references for pair in references.pairs.values() if takes(protocol, pair)]
    whole = len(pairs) == len(references.pairs)
    return SplitCount(
        pairs=len(pairs),
        references=len(pairs) if protocol.references == "joined" else sum(map(len, pairs)),
        wordless=sum(not any(text.strip() for text in texts) for texts in pairs),
        records=references.records if whole else None,
        image_pairs=references.image_pairs if whole else None,
    )


def published_counts(benchmark: Benchmark, protocol: Protocol) -> SplitCount | None:
    """Published numbers of the pairs that a protocol takes; all of a split but for their number."""
    test = benchmark.published and benchmark.published.test
    if test is None or protocol.n != test.pairs:
        return None if protocol.n is None else SplitCount(protocol.n)
    return replace(test, references=test.pairs) if protocol.references == "joined" else test


class Matched(NamedTuple):
    """Captions by the references' ids."""

    captions: dict[str, str]
    unknown: list[str]
    renamed: tuple[str, str] | None  # an id as it was given, and whose it was taken for


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def plain(name: str) -> str:
    """An id without folder, extension, padding and the words of CLEVR-Change's file names: "235" of "a/000235.png"."""
    bare = EXTENSION.sub("", re.split(r"[/\\]", name)[-1])
    found = SCENE.fullmatch(bare)
    if not found:
        return bare
    return found["number"] + (found["distractor"] or ("_n" if found["kind"] == "nonsemantic" else ""))


def finder(known: Iterable[str], dataset: str) -> Callable[[str], str | None]:
    """The references' id that an id means, None where it means none. Unicode forms of the same letters are equal."""
    ids = {nfc(name): name for name in known}
    names = Counter(map(plain, ids))
    by_plain = {plain(form): name for form, name in ids.items() if names[plain(form)] == 1}

    def find(given: str) -> str | None:
        form = nfc(given)
        return ids.get(form) or ids.get(form.removeprefix(f"{nfc(dataset)}/")) or by_plain.get(plain(form))

    return find


def match(rows: Sequence[Prediction], known: Iterable[str], dataset: str, counts: SplitCount | None) -> Matched:
    """Every caption under the id of the references that its own id means.

    Raises:
        DataError: two captions of one id, or none of the ids is known.
    """
    ids = list(known)
    find = finder(ids, dataset)
    captions: dict[str, str] = {}
    unknown: list[str] = []
    renamed, times = None, Counter[str]()
    for given, caption in rows:
        name = find(given)
        times[name or given] += 1
        if name is None:
            unknown.append(given)
            continue
        if nfc(name) != nfc(given) and renamed is None:
            renamed = given, name
        captions[name] = caption
    if len(times) < len(rows):
        name, most = times.most_common(1)[0]
        found = f"{len(rows):,} captions for {len(times):,} ids: {name!r} has {most}"
        raise DataError(f"{found}{level(len(rows), counts)}; keep one caption to an id")
    if not captions:
        raise DataError(not_known(unknown, len(rows), ids, counts))
    return Matched(captions, unknown, renamed)


def not_known(unknown: Sequence[str], rows: int, ids: Sequence[str], counts: SplitCount | None) -> str:
    """The unknown ids beside valid ones."""
    found = f"{len(unknown):,} of {rows:,} ids are unknown: {some(unknown)}; valid ones are {some(ids)}"
    return f"{found}: write the ids as the references do{level(rows, counts)}"


def some(names: Sequence[str]) -> str:
    """The first three."""
    return ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")


def level(ids: int, counts: SplitCount | None) -> str:
    """The level, if any, that the number of ids gives away."""
    if counts is None or ids == counts.pairs:
        return ""
    if ids == counts.records:
        return (
            f". The annotation file has {ids:,} records: this is the record level. A pair is scored once, against the "
            "references of all its records"
        )
    if ids == counts.image_pairs:
        return (
            f". There are {ids:,} distinct pairs of images: keyed by its images, a pair overwrote others that have the "
            "same; key by the id"
        )
    return ""


def faults_of_predictions(
    rows: int, matched: Matched, taken: Mapping[str, EvalPair], known: Iterable[str], counts: SplitCount | None
) -> list[str]:
    """Unknown and missing ids, with the likely reason."""
    faults = [not_known(matched.unknown, rows, list(known), counts)] if matched.unknown else []
    missing = [name for name in taken if name not in matched.captions]
    wordless = [name for name, pair in taken.items() if not any(text.strip() for text in pair.references)]
    if missing and missing == wordless:
        faults.append(
            f"no caption for {some(missing)}, the {len(missing)} pairs of which every reference is empty: they were "
            f"dropped. They count in every published score; caption all {len(taken):,} pairs"
        )
    elif missing:
        faults.append(f"no caption for {len(missing):,} of {len(taken):,} pairs: {some(missing)}" + level(rows, counts))
    return faults


def fault_of_references(pairs: Mapping[str, EvalPair], counts: SplitCount | None, protocol: Protocol) -> str:
    """The difference of a file of references from those of the benchmark; "" where there is none."""
    texts = [text for pair in pairs.values() for text in pair.references]
    if counts is not None and len(pairs) != counts.pairs:
        fault = f"{len(pairs):,} pairs, the benchmark has {counts.pairs:,}"
        if counts.wordless and len(pairs) == counts.pairs - counts.wordless:
            return f"{fault}: the {counts.wordless} pairs of which every reference is empty were dropped; they count"
        return fault + level(len(pairs), counts)
    if protocol.references == "joined":
        several = sum(len(pair.references) > 1 for pair in pairs.values())
        longest = max(len(text.split()) for text in texts)
        if several:
            return f"{several:,} pairs have several; under {protocol.name!r} all sentences of a pair are one text"
        if protocol.max_words is not None and longest > protocol.max_words:
            return f"untruncated, of up to {longest} words; {protocol.name!r} cuts them after {protocol.max_words}"
    elif counts is not None and counts.references is not None and len(texts) < counts.references:
        if len(texts) == len(pairs) and share(SENTENCES, texts) > 0:
            rule = f"under {protocol.name!r} every sentence is a reference of its own"
            return f"{len(texts):,} of {counts.references:,}: joined text, one reference a pair; {rule}"
        return (
            f"{len(texts):,} of {counts.references:,}: of pairs that stand in several records the last one overwrote "
            "the others; all of them count"
        )
    return ""


def share(pattern: re.Pattern[str], texts: Sequence[str]) -> float:
    return sum(bool(pattern.search(text)) for text in texts) / len(texts) if texts else 0.0


def notes_of_captions(captions: Sequence[str], references: Sequence[str], protocol: Protocol) -> list[str]:
    """Notes on ways of writing that move scores."""
    notes = []
    if empty := sum(not caption.strip() for caption in captions):
        notes.append(f"{empty:,} captions are empty")
    if protocol.max_words is not None:
        if longer := sum(len(caption.split()) > protocol.max_words for caption in captions):
            notes.append(f"{longer:,} captions were cut after {protocol.max_words} words, as the references are")
    elif protocol.references == "all" and share(SENTENCES, captions) > MANY > share(SENTENCES, references):
        notes.append(f"captions hold several sentences: joined text? References of {protocol.name!r} are one each")
    if protocol.tokenizer == "whitespace" and share(TOKENISED, captions) <= MANY < share(TOKENISED, references):
        notes.append("captions are not tokenised, the references are: 'head.' is no 'head'; write 'head .'")
    return notes

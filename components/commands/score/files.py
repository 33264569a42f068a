"""Anyone's predictions (COCO results, {id: caption}, JSON Lines, CSV or TSV), and what they are scored against: a
benchmark's own annotation files, ingest's records of them, or a COCO file.

Nothing of a dataset is handed on here: its files are the user's, read where they lie. Images are not looked at.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.datasets import DATASETS
from m3diff.datasets.files import describe, read_json, read_text
from m3diff.datasets.spec import DatasetSpec, Protocol, Published
from m3diff.records.errors import DataError, readable
from m3diff.scoring.grammar import Grammar
from m3diff.scoring.pairs import without_surrogates
from m3diff.scoring.protocols import protocols_of

IDS = (
    "image_id", "id", "img_id", "uid", "pair_id", "pair", "image", "img", "file_name", "filename", "name",
    "question_id",
)  # fmt: skip
"""Names of the id's field, the likeliest first."""
PREDICTIONS = (
    "prediction", "predictions", "predicted", "predicted_caption", "predicted_text", "pred", "preds", "pred_caption",
    "generated", "generated_caption", "generated_text", "generation", "hypothesis", "hyp", "output", "model_output",
    "response", "candidate",
)  # fmt: skip
"""Names of the caption's field that say that a model wrote it."""
CAPTIONS = (*PREDICTIONS, "caption", "captions", "text", "sentence", "description", "answer")
"""Names of the caption's field; the last ones may also name the references."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
KINDS = "[{image_id, caption}] or {id: caption} as .json, an object a line as .jsonl, or columns as .csv or .tsv"


class Prediction(NamedTuple):
    id: str
    caption: str


class Predictions(NamedTuple):
    """A file's rows in their order, an id perhaps several times, and what is to be said of how they were written."""

    rows: list[Prediction]
    notes: list[str]


class Repeated(list[tuple[str, Any]]):
    """A JSON object with a key that is written twice, as its items."""


class Row(NamedTuple):
    """A row's fields that may be the id and the caption, by their names."""

    where: str
    ids: Mapping[str, Any]
    captions: Mapping[str, Any]


def read_predictions(path: Path, known: Callable[[str], str | None] = lambda name: None) -> Predictions:
    """Every caption of the file with its id.

    Args:
        known: the references' id that an id means; of several fields it decides which one holds the ids.

    Raises:
        DataError: the file cannot be read, has no row, or one without an id or a caption, or with two of either.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; name the file of captions: {KINDS}")
    if not path.stat().st_size:
        raise DataError(f"{path}: the file is empty; expected {KINDS}")
    found = list(read_rows(path))
    if not found:
        raise DataError(f"{path}: holds no caption; expected {KINDS}")
    notes: Counter[str] = Counter()
    field = id_field(found, known)
    rows = []
    for row in found:
        name = row.ids[field] if field in row.ids else next(iter(row.ids.values()))
        rows.append(Prediction(read_id(name, row.where), read_caption(row, notes)))
    return Predictions(rows, [note.format(n=count) for note, count in notes.items()])


def read_rows(path: Path) -> Iterator[Row]:
    suffix = path.suffix.lower()
    if suffix in DELIMITERS:
        yield from read_columns(path, DELIMITERS[suffix])
    elif suffix == ".jsonl":
        for number, line in enumerate(read_text(path).split("\n"), 1):
            if line.strip():
                yield fields_of(parse_json(line, f"{path}, line {number}"), f"{path}, line {number}")
    else:
        value = parse_json(read_text(path), str(path))
        if isinstance(value, list) and not isinstance(value, Repeated):
            for number, row in enumerate(value):
                yield fields_of(row, f"{path}, row {number}")
        elif isinstance(value, dict) and all(named(value, names) for names in (IDS, CAPTIONS)):
            yield fields_of(value, str(path))
        elif isinstance(value, dict | Repeated):
            for name, caption in value.items() if isinstance(value, dict) else value:
                if isinstance(caption, list) and caption and isinstance(caption[0], dict):
                    raise DataError(f"{path}: {name!r} is a list of rows; write that list alone, as {KINDS}")
                yield Row(f"{path}, {name!r}", {"": name}, {"": caption})
        else:
            raise DataError(f"{path}: expected {KINDS}; found {describe(value)}")


def parse_json(text: str, where: str) -> Any:
    def keep_repeated(items: list[tuple[str, Any]]) -> dict[str, Any] | Repeated:
        found = dict(items)
        return found if len(found) == len(items) else Repeated(items)

    try:
        return json.loads(text, object_pairs_hook=keep_repeated)
    except (ValueError, RecursionError) as error:
        lines = "; is it an object a line? Name it .jsonl" if str(error).startswith("Extra data") else ""
        raise DataError(f"{where}: not valid JSON: {error}{lines}; expected {KINDS}") from error


def fields_of(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with an id and a caption, found {describe(row)}")
    ids, captions = named(row, IDS), named(row, CAPTIONS)
    for found, names in ((ids, ("image_id", "id", "uid")), (captions, ("caption", "prediction", "output"))):
        if not found:
            raise DataError(
                f"{where}: no field {' or '.join(names)}; found {', '.join(map(str, row))[:120]}; rename the one that "
                f"holds it to {names[0]}"
            )
    return Row(where, ids, captions)


def named(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The fields of these names, in the names' order, whatever their case, spaces and hyphens."""
    known = {str(key).strip().lower().replace(" ", "_").replace("-", "_"): key for key in row}
    return {str(known[name]): row[known[name]] for name in names if name in known}


def id_field(rows: Sequence[Row], known: Callable[[str], str | None]) -> str:
    """The field whose ids the references know best; the likeliest by its name where they know none.

    Raises:
        DataError: they know those of two fields, which mean different pairs.
    """
    fields = dict.fromkeys(field for row in rows for field in row.ids)
    if len(fields) == 1:
        return next(iter(fields))
    means = {
        field: [known(str(row.ids[field]).strip()) if field in row.ids else None for row in rows] for field in fields
    }
    right = {field: sum(name is not None for name in means[field]) for field in fields}
    first, *others = sorted(fields, key=lambda field: -right[field])
    for other in others:
        if right[other] == right[first] > 0 and means[other] != means[first] and first.lower() != "image_id":
            raise DataError(
                f"{rows[0].where}: {first!r} and {other!r} could both be the id; remove one, or rename the right one "
                "to image_id"
            )
    return first


def read_columns(path: Path, delimiter: str) -> Iterator[Row]:
    """Rows of a table; without a header that names the columns, of two columns the first is the id."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=delimiter, strict=True)
    try:
        lines = [(reader.line_num, fields) for fields in reader if fields]
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: not valid CSV: {error}; correct the quotes there") from error
    header = lines[0][1]
    columns = [named(dict.fromkeys(header), names) for names in (IDS, CAPTIONS)]
    if all(columns):
        lines = lines[1:]
        if twice := [name for name in chain(*columns) if header.count(name) > 1]:
            raise DataError(f"{path}: line 1 has {twice[0]!r} twice; rename one of the columns")
    elif any(columns) or len(header) != 2:
        raise DataError(f"{path}: line 1 {no_header(header, delimiter)}")
    for number, fields in lines:
        where = f"{path}, line {number}"
        if len(fields) != len(header):
            wrong = f"has {len(fields)} fields, the first line {len(header)}; quote captions that hold {delimiter!r}"
            raise DataError(f"{where}: {wrong}")
        if all(columns):
            yield fields_of(dict(zip(header, fields, strict=True)), where)
        else:
            yield Row(where, {"": fields[0]}, {"": fields[1]})


def no_header(header: Sequence[str], delimiter: str) -> str:
    if len(header) == 1:
        for other in {";", "\t", ","} - {delimiter}:
            if other in header[0]:
                return f"is separated by {other!r}; save the file with {delimiter!r} between its columns"
        return f"has one column, and captions need an id; write image_id{delimiter}caption on it and both on each line"
    names = delimiter.join(["image_id", "caption", *(f"other{n}" for n in range(len(header) - 2))])
    return f"names no columns; write e.g. {names} there, in the columns' order, for ids and captions"


def read_id(value: Any, where: str) -> str:
    if isinstance(value, float) and value.is_integer():
        raise DataError(f"{where}: id: {value} is a number with a point; write {int(value)}, as the references have it")
    if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
        return str(value).strip()
    raise DataError(f"{where}: id: expected text or a whole number, found {describe(value)}; write the pair's id")


def read_caption(row: Row, notes: Counter[str]) -> str:
    """The caption as text, of the field that holds the model's by its name. A list of one is that one; it is counted in
    `notes`, as are fields that were not taken.

    Raises:
        DataError: several fields may be it, and differ; or it is no text.
    """
    chosen = named(row.captions, PREDICTIONS) or row.captions
    (name, value), *others = chosen.items()
    if any(text != value for _, text in others):
        raise DataError(
            f"{row.where}: {' and '.join(map(repr, chosen))} could each be the caption; remove all but one of them, or "
            "rename the model's to prediction"
        )
    if rest := [other for other in row.captions if other not in chosen]:
        notes[f"{name!r} was scored in {{n}} rows, and not {' and '.join(map(repr, rest))} beside it"] += 1
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        notes["{n} captions are lists of one text; the text was taken"] += 1
        value = value[0]
    if not isinstance(value, str):
        raise DataError(f"{row.where}: {no_text(value)}")
    if value.startswith(("['", '["')) and value.endswith(("']", '"]')):
        raise DataError(f"{row.where}: caption: is a list printed as text, {describe(value)}; write what it holds")
    return without_surrogates(value)


def no_text(value: Any) -> str:
    """The fault of a caption that is no text, and how to write it."""
    if not value or value != value:
        remedy = 'write "" where there is no caption'
    elif isinstance(value, list) and all(isinstance(word, str) and len(word.split()) == 1 for word in value):
        remedy = f"one caption to a pair, as text: join its {len(value)} words by spaces"
    else:
        remedy = "one caption to a pair, as text"
    return f"caption: expected text, found {describe(value)}; {remedy}"


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
        if name is not None and name not in known:
            raise DataError(f"{self.name}: no protocol {name!r}; it has {', '.join(known)}")
        return known[name] if name is not None else self.protocols[0]


def benchmarks() -> dict[str, Benchmark]:
    """By name: each published part, and each dataset that draws itself."""
    found = {part.part: Benchmark(part.part, spec, part) for spec in DATASETS.values() for part in spec.published}
    own = {name: Benchmark(name, spec, None) for name, spec in DATASETS.items() if spec.generate}
    return dict(sorted((found | own).items()))


class Reference(NamedTuple):
    """A pair's references and change types; no types where they are unknown."""

    texts: list[str]
    change_types: list[str]


class Counts(NamedTuple):
    """Numbers of the pairs of a protocol. None: not known."""

    pairs: int | None
    references: int | None = None
    wordless: int | None = None  # pairs of which every reference is empty
    records: int | None = None  # of the annotation file
    image_pairs: int | None = None  # distinct ones


class References(NamedTuple):
    """By the pair's id, in the file's order."""

    pairs: dict[str, Reference]
    records: int | None = None  # of the annotation file, over all of `pairs`
    image_pairs: int | None = None
    grammar: Grammar | None = None  # reads captions back into changes
    as_scored: bool = False  # a COCO file: what it holds is scored as it stands


def from_coco(path: Path) -> References:
    """{"images": [{"id"}], "annotations": [{"image_id", "caption"}]}; an image may stand there several times.

    Raises:
        DataError: the file is not of that shape; an image has no caption.
    """
    value = read_json(path, dict)
    images, annotations = value.get("images"), value.get("annotations")
    if not isinstance(images, list) or not isinstance(annotations, list):
        raise DataError(f"{path}: expected COCO captions, an object with the lists images and annotations")

    def field(row: Any, name: str, where: str) -> str:
        value = row.get(name) if isinstance(row, dict) else None
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise DataError(f"{path}, {where}: {name}: expected text or a whole number, found {describe(value)}")
        return str(value)

    texts: dict[str, list[str]] = {field(row, "id", f"image {n}"): [] for n, row in enumerate(images)}
    for number, row in enumerate(annotations):
        name = field(row, "image_id", f"annotation {number}")
        if not isinstance(row.get("caption"), str):
            raise DataError(f"{path}, annotation {number}: {no_text(row.get('caption'))}")
        texts.setdefault(name, []).append(without_surrogates(row["caption"]))
    if bare := [name for name, found in texts.items() if not found]:
        raise DataError(
            f"{path}: {len(bare)} images without a caption, such as {bare[0]!r}: were empty ones dropped? An empty "
            "caption is a reference and stays"
        )
    if not texts:
        raise DataError(f"{path}: holds no image; is it the right file?")
    return References({name: Reference(found, []) for name, found in texts.items()}, as_scored=True)


def from_data(benchmark: Benchmark, path: Path) -> References:
    """The test pairs of the dataset's own folder, or of ingest's records.parquet or the folder it stands in.

    Raises:
        DataError: there is nothing of the kind, a test pair cannot be read, or there is none.
    """
    records = path if path.suffix == ".parquet" else path / "records.parquet"
    if records.is_file():
        return from_records(records)
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; name the one that holds {', '.join(benchmark.spec.files)}")
    rows = [row for row in benchmark.spec.read(path) if row.split == "test"]
    for row in rows:
        fault = row.fault
        if not fault and not isinstance(row.name, str):
            fault = f"id: expected text, found {describe(row.name)}"
        elif not fault and not (isinstance(row.references, list) and all(isinstance(t, str) for t in row.references)):
            fault = f"references: expected a list of text, found {describe(row.references)}"
        if fault:
            raise DataError(f"{path}: {row.source}: {fault}; fetch the file again")
    if not rows:
        raise DataError(f"{path}: has no test pair; is it the whole dataset?")
    pairs = {
        row.name: Reference(list(map(without_surrogates, row.references)) or [""], row.change_types) for row in rows
    }
    grammar = Grammar.load(path / "grammar.json") if benchmark.spec.grammar else None
    images = {(row.before, row.after) for row in rows}
    return References(pairs, sum(row.raw_rows for row in rows), len(images), grammar)


def from_records(path: Path) -> References:
    import pyarrow.parquet as pq

    columns = ["id", "dataset", "split", "references", "change_types", "before", "after"]
    with readable(path, "run `m3diff ingest` again"):
        rows = pq.read_table(path, columns=columns, filters=[("split", "=", "test")]).to_pylist()
    rows = [row for row in rows if row["id"] is not None]
    for row in rows:
        if not isinstance(row["references"], list | None):
            raise DataError(f"{path}: {row['id']}: references: expected a list, found {describe(row['references'])}")
    if not rows:
        raise DataError(f"{path}: has no record of the split 'test'")
    pairs = {
        row["id"].removeprefix(f"{row['dataset']}/"): Reference(row["references"] or [""], row["change_types"] or [])
        for row in rows
    }
    rules = path.with_name("grammar.json")
    images = {(row["before"], row["after"]) for row in rows}
    return References(pairs, None, len(images), Grammar.load(rules) if rules.is_file() else None)


def counts_of(references: References, taken: Iterable[str], protocol: Protocol) -> Counts:
    """Numbers of the pairs that a protocol takes."""
    pairs = [references.pairs[name].texts for name in taken]
    whole = len(pairs) == len(references.pairs)
    return Counts(
        pairs=len(pairs),
        references=len(pairs) if protocol.references == "joined" else sum(map(len, pairs)),
        wordless=sum(not any(text.strip() for text in texts) for texts in pairs),
        records=references.records if whole else None,
        image_pairs=references.image_pairs if whole else None,
    )


def published_counts(benchmark: Benchmark, protocol: Protocol) -> Counts:
    """Published numbers of the pairs that a protocol takes; all of a split but for their number."""
    test = benchmark.published.test if benchmark.published else None
    if test is None or protocol.n != test.pairs:
        return Counts(protocol.n)
    references = test.pairs if protocol.references == "joined" else test.references
    return Counts(test.pairs, references, test.wordless, test.records, test.image_pairs)

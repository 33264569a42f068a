"""Anyone's predictions (COCO results, {id: caption}, JSON Lines, CSV or TSV), and what they are scored against: a
benchmark's own annotation files, ingest's records of them, or a COCO file.

Nothing of a dataset is handed on here: its files are the user's, read where they lie. Images are not looked at.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.datasets import DATASETS
from m3diff.datasets.files import describe, parse_json, read_json, read_text
from m3diff.datasets.spec import DatasetSpec, Protocol, Published
from m3diff.datasets.tables import DELIMITERS, read_values
from m3diff.records.errors import DataError, readable
from m3diff.scoring.grammar import Grammar
from m3diff.scoring.pairs import EvalPair, without_surrogates
from m3diff.scoring.protocols import protocols_of, takes

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
TABLES = (".csv", ".tsv", ".jsonl")
KINDS = "[{image_id, caption}] or {id: caption} as .json, an object a line as .jsonl, or columns as .csv or .tsv"


class Prediction(NamedTuple):
    id: str
    caption: str


class Predictions(NamedTuple):
    """A file's rows in their order, an id perhaps several times, and what is to be said of how they were written."""

    rows: list[Prediction]
    notes: list[str]


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
    found = list(read_columns(path) if path.suffix.lower() in TABLES else read_list(path))
    if not found:
        raise DataError(f"{path}: holds no caption; expected {KINDS}")
    notes: Counter[str] = Counter()
    field = id_field(found, known)
    rows = []
    for row in found:
        name = row.ids[field] if field in row.ids else next(iter(row.ids.values()))
        if isinstance(name, bool) or not isinstance(name, str | int) or not str(name).strip():
            raise DataError(
                f"{row.where}: id: expected text or a whole number, found {describe(name)}; write the pair's id, as "
                "the references have it"
            )
        rows.append(Prediction(str(name).strip(), read_caption(row, notes)))
    return Predictions(rows, [note.format(n=count) for note, count in notes.items()])


def read_list(path: Path) -> Iterator[Row]:
    """Rows of a JSON list, or of an object: one row, or a caption to each id."""
    try:
        value = parse_json(read_text(path), str(path))
    except DataError as error:
        raise DataError(f"{error}; expected {KINDS}") from error
    if isinstance(value, dict) and all(named(value, names) for names in (IDS, CAPTIONS)):
        value = [value]
    if isinstance(value, list):
        yield from (fields_of(row, f"{path}, row {number}") for number, row in enumerate(value))
    elif isinstance(value, dict):
        yield from (Row(f"{path}, {name!r}", {"": name}, {"": caption}) for name, caption in value.items())
    else:
        raise DataError(f"{path}: expected {KINDS}; found {describe(value)}")


def read_columns(path: Path) -> Iterator[Row]:
    """Rows of a table or of JSON Lines; in a table of two columns without a header the first is the id."""
    rows = [(str(path.parent / where), row) for where, row in read_values(path, ())]
    header = dict(rows[0][1]) if rows and isinstance(rows[0][1], dict) and path.suffix.lower() != ".jsonl" else {}
    if header and not all(named(header, names) for names in (IDS, CAPTIONS)):
        comma = DELIMITERS[path.suffix.lower()]
        if len(header) != 2 or any(named(header, names) for names in (IDS, CAPTIONS)):
            raise DataError(
                f"{path}: line 1 names no columns of ids and captions, found {comma.join(header)[:120]!r}; write e.g. "
                f"image_id{comma}caption there, in the columns' order and with {comma!r} between them on each line"
            )
        rows = [(f"{path}, line 1", dict(zip(header, header, strict=True))), *rows]
    for where, row in rows:
        if isinstance(row, DataError):
            raise DataError(f"{where}: {row}")
        if header and not named(row, IDS):
            name, caption = row.values()
            yield Row(where, {"": name}, {"": caption})
        else:
            yield fields_of(row, where)


def fields_of(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with an id and a caption, found {describe(row)}")
    ids, captions = named(row, IDS), named(row, CAPTIONS)
    for found, names in ((ids, "image_id or id"), (captions, "caption or prediction")):
        if not found:
            raise DataError(
                f"{where}: no field {names}; found {', '.join(map(str, row))[:120]}; rename the one that holds it to "
                f"{names.partition(' ')[0]}"
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
    means = {field: [known(str(row.ids.get(field, "")).strip()) for row in rows] for field in fields}
    right = {field: sum(name is not None for name in names) for field, names in means.items()}
    first = max(fields, key=right.__getitem__)
    for other in fields:
        if right[other] == right[first] > 0 and means[other] != means[first] and first.lower() != "image_id":
            raise DataError(
                f"{rows[0].where}: {first!r} and {other!r} could both be the id; remove one, or rename the right one "
                "to image_id"
            )
    return first


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
    if not isinstance(value, str) or (value[:2] in ("['", '["') and value[-2:] in ("']", '"]')):
        raise DataError(f"{row.where}: {no_text(value)}")
    return without_surrogates(value)


def no_text(value: Any) -> str:
    """The fault of a caption that is no text, and how to write it."""
    remedy = 'write one text to a pair, words joined by spaces, and "" where there is no caption'
    return f"caption: expected plain text, found {describe(value)}; {remedy}"


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


class Counts(NamedTuple):
    """Numbers of the pairs of a protocol. None: not known."""

    pairs: int | None
    references: int | None = None
    wordless: int | None = None  # pairs of which every reference is empty
    records: int | None = None  # of the annotation file
    image_pairs: int | None = None  # distinct ones


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
        DataError: the file is not of that shape; an image has no caption.
    """
    value = read_json(path, dict)
    texts: dict[str, list[str]] = {}
    for kind, field in (("images", "id"), ("annotations", "image_id")):
        if not isinstance(value.get(kind), list):
            raise DataError(f"{path}: expected COCO captions, an object with the lists images and annotations")
        for number, row in enumerate(value[kind]):
            where, name = f"{path}, {kind[:-1]} {number}", row.get(field) if isinstance(row, dict) else None
            if not isinstance(name, str | int) or isinstance(name, bool):
                raise DataError(f"{where}: {field}: expected text or a whole number, found {describe(name)}")
            found = texts.setdefault(str(name), [])
            if kind == "annotations":
                if not isinstance(row.get("caption"), str):
                    raise DataError(f"{where}: {no_text(row.get('caption'))}")
                found.append(without_surrogates(row["caption"]))
    if bare := [name for name, found in texts.items() if not found]:
        raise DataError(
            f"{path}: {len(bare)} images without a caption, such as {bare[0]!r}: were empty ones dropped? An empty "
            "caption is a reference and stays"
        )
    if not texts:
        raise DataError(f"{path}: holds no image; is it the right file?")
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
    for row in rows:
        fault, texts = row.fault, row.references
        if not fault and not (isinstance(texts, list) and all(isinstance(text, str) for text in [row.name, *texts])):
            fault = f"id, references: expected text and a list of text, found {row.name!r} and {describe(texts)}"
        if fault:
            raise DataError(f"{path}: {row.source}: {fault}; fetch the file again")
    if not rows:
        raise DataError(f"{path}: has no test pair; is it the whole dataset?")
    pairs = {
        row.name: bare_pair(
            benchmark.name, row.name, list(map(without_surrogates, row.references)) or [""], row.change_types
        )
        for row in rows
    }
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


def counts_of(references: References, protocol: Protocol) -> Counts:
    """Numbers of the pairs that a protocol takes."""
    pairs = [pair.references for pair in references.pairs.values() if takes(protocol, pair)]
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

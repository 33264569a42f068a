"""Anyone's predictions (COCO results, {id: caption}, JSON Lines, CSV or TSV), and what they are scored against: a
benchmark's own annotation files, ingest's records of them, or a COCO file.

Nothing of a dataset is handed on here: its files are the user's, read where they lie. Images are not looked at.
"""

from collections.abc import Iterable, Iterator, Mapping
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

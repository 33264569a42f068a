"""What captions are scored against: a benchmark's own annotation files, ingest's records of them, or a COCO file.

Nothing of a dataset is handed on here: its files are the user's, read where they lie. Images are not looked at.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.commands.score.predictions import as_text
from m3diff.datasets import DATASETS
from m3diff.datasets.files import describe, read_json
from m3diff.datasets.spec import DatasetSpec, Protocol, Published, Row
from m3diff.records.errors import DataError
from m3diff.scoring.grammar import Grammar


class Benchmark(NamedTuple):
    """A dataset, or one part of it, whose test pairs papers score."""

    name: str
    spec: DatasetSpec
    published: Published | None

    @property
    def protocols(self) -> tuple[Protocol, ...]:
        """The headline's first."""
        return tuple(one for one in self.spec.protocols if one.part in (None, self.name) and one.split == "test")

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


@dataclass(frozen=True)
class Counts:
    """Of the pairs of a protocol. None: not known."""

    pairs: int | None
    references: int | None = None
    wordless: int | None = None  # pairs of which every reference is empty
    records: int | None = None  # of the annotation file
    image_pairs: int | None = None  # distinct ones


@dataclass(frozen=True)
class References:
    """By the pair's id, in the file's order."""

    pairs: dict[str, Reference]
    records: int | None  # of the annotation file, over all of `pairs`
    image_pairs: int | None
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
    texts: dict[str, list[str]] = {_field(row, "id", f"{path}, image {n}"): [] for n, row in enumerate(images)}
    for number, row in enumerate(annotations):
        where = f"{path}, annotation {number}"
        name = _field(row, "image_id", where)
        if not isinstance(row.get("caption"), str):
            found = row.get("caption")
            raise DataError(f"{where}: caption: expected text, found {describe(found)}; {as_text(found)}")
        texts.setdefault(name, []).append(row["caption"])
    if bare := [name for name, found in texts.items() if not found]:
        raise DataError(
            f"{path}: {len(bare)} images without a caption, such as {bare[0]!r}: were empty ones dropped? An empty "
            "caption is a reference and stays"
        )
    if not texts:
        raise DataError(f"{path}: holds no image; is it the right file?")
    pairs = {name: Reference([_clean(text) for text in found], []) for name, found in texts.items()}
    return References(pairs, None, None, as_scored=True)


def _field(row: Any, name: str, where: str) -> str:
    value = row.get(name) if isinstance(row, dict) else None
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise DataError(f"{where}: {name}: expected text or a whole number, found {describe(value)}")
    return str(value)


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # no lone surrogates


def from_data(benchmark: Benchmark, path: Path) -> References:
    """The test pairs of the dataset's own folder, or of ingest's records.parquet or the folder it stands in.

    Raises:
        DataError: there is nothing of the kind, a test pair cannot be read, or there is none.
    """
    records = path if path.suffix == ".parquet" else path / "records.parquet"
    if records.is_file():
        return _from_records(benchmark, records)
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; name the one that holds {', '.join(benchmark.spec.files)}")
    rows = [row for row in benchmark.spec.read(path) if row.split == "test"]
    for row in rows:
        if fault := row.fault or _unusable(row):
            raise DataError(f"{path}: {row.source}: {fault}; fetch the file again")
    if not rows:
        raise DataError(f"{path}: has no test pair; is it the whole dataset?")
    pairs = {row.name: Reference([_clean(text) for text in row.references] or [""], row.change_types) for row in rows}
    grammar = Grammar.load(path / "grammar.json") if benchmark.spec.grammar else None
    images = {(row.before, row.after) for row in rows}
    return References(pairs, sum(row.raw_rows for row in rows), len(images), grammar)


def _unusable(row: Row) -> str | None:
    if not isinstance(row.name, str):
        return f"id: expected text, found {describe(row.name)}"
    if not isinstance(row.references, list) or not all(isinstance(text, str) for text in row.references):
        return f"references: expected a list of text, found {describe(row.references)}"
    return None


def _from_records(benchmark: Benchmark, path: Path) -> References:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = ["id", "dataset", "split", "references", "change_types", "before", "after"]
    try:
        rows = pq.read_table(path, columns=columns, filters=[("split", "=", "test")]).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not records of ingest: {error}; run `m3diff ingest` again") from error
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
    grammar = path.with_name("grammar.json")
    return References(
        pairs,
        None,
        len({(row["before"], row["after"]) for row in rows}),
        Grammar.load(grammar) if grammar.is_file() else None,
    )


def counts_of(references: References, taken: Iterable[str], protocol: Protocol) -> Counts:
    """Of the pairs that a protocol takes."""
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
    """What is published of the pairs that a protocol takes; all of a split but for their number."""
    test = benchmark.published.test if benchmark.published else None
    if test is None or protocol.n != test.pairs:
        return Counts(protocol.n)
    references = test.pairs if protocol.references == "joined" else test.references
    return Counts(test.pairs, references, test.wordless, test.records, test.image_pairs)

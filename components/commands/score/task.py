"""Choose the scoring task: a benchmark with one of its protocols, or a file of references without a benchmark.

A protocol states which test pairs are scored and in which form, as in the papers on a dataset.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, Protocol, SplitCount
from m3diff.records.errors import DataError, Fault
from m3diff.records.tables import part_paths
from m3diff.scoring.protocols import list_protocols
from m3diff.scoring.published import PublishedRow, find_published_rows
from m3diff.settings.section import ParamsError

PART_NAME = re.compile(r"\d{5}\.parquet")


@dataclass(frozen=True)
class ScoringTask:
    """A benchmark with a protocol, or a file of references without a benchmark.

    spec: dataset of the benchmark. None for a file of references.
    counts: published counts of the protocol's pairs, as far as they are known.
    published: scores of other methods on this protocol, from papers.
    """

    dataset: str
    protocol: Protocol
    spec: DatasetSpec | None = None
    counts: SplitCount | None = None
    published: Sequence[PublishedRow] = ()


@dataclass(frozen=True)
class Benchmark:
    """A dataset, or a published part of a dataset, that captions can be scored on.

    test_counts: published counts of the test split. None if the dataset is synthesized.
    """

    spec: DatasetSpec
    test_counts: SplitCount | None


def benchmarks() -> dict[str, Benchmark]:
    """Return all benchmarks by name: the published parts of datasets, and the synthesized datasets."""
    benchmarks_by_name = {}
    for name, spec in DATASETS.items():
        if spec.generate:
            benchmarks_by_name[name] = Benchmark(spec, test_counts=None)
    for spec in DATASETS.values():
        for part in spec.published:
            benchmarks_by_name[part.part] = Benchmark(spec, test_counts=part.test)
    return dict(sorted(benchmarks_by_name.items()))


def require_references(
    predictions: Path, benchmark: str | None, protocol: str | None, references: Path | None, data: Path | None
) -> None:
    """Check that the options say what to compare the captions with.

    Records of ingest need no benchmark, because they contain the references of any dataset.

    Raises:
        ParamsError: neither a benchmark nor references are given, or an option needs a benchmark that is not given.
    """
    if benchmark is not None:
        return
    if protocol is None and references is not None and data is None:
        return
    if protocol is None and references is None and data is not None and find_record_table(data) is not None:
        return
    needs_benchmark = [f"--{name}" for name, value in (("protocol", protocol), ("data", data)) if value is not None]
    faults = []
    if not predictions.exists():
        faults.append(Fault("score.captions_missing", path=predictions))
    if needs_benchmark:
        faults.append(Fault("score.options_without_benchmark", names=needs_benchmark))
    else:
        faults.append(Fault("score.no_references_named"))
    raise ParamsError("score.call_incomplete", faults=faults, predictions=predictions, names=list(benchmarks()))


def find_record_table(data: Path) -> Path | None:
    """Return the table of records that a path names or contains, or None if there is none."""
    candidates = (data, data / "records", data / "records.parquet")
    return next((table for table in candidates if is_table_of_records(table)), None)


def is_table_of_records(path: Path) -> bool:
    """Return whether a path is a table of records: a folder of numbered parts, or the single file of an older release.

    A dataset's folder may contain Parquet files, too, but with other names.
    """
    if path.is_dir():
        return any(PART_NAME.fullmatch(part.name) for part in part_paths(path))
    return path.suffix == ".parquet" and path.is_file()


def find_task(
    benchmark: str | None, protocol: str | None, references: Path | None, data: Path | None = None
) -> ScoringTask:
    """Return the task for a benchmark's protocol, with its published scores, or for references without a benchmark.

    Args:
        benchmark: name of the benchmark. None to use `references` or the records in `data` without a benchmark.
        protocol: name of the protocol. None for the benchmark's main protocol.

    Raises:
        DataError: the benchmark or the protocol does not exist.
    """
    if benchmark is None and references is not None:
        return ScoringTask(references.stem, Protocol("as given", published_pairs=None))
    table = find_record_table(data) if benchmark is None and data is not None else None
    if table is not None:
        # ingest writes the records of a dataset to <dataset>/records
        folder = table.parent if table.stem == "records" else table
        return ScoringTask(folder.resolve().name, Protocol("test", published_pairs=None))
    known_benchmarks = benchmarks()  # imports every dataset
    if benchmark not in known_benchmarks:
        raise DataError("score.benchmark_unknown", value=benchmark, names=list(known_benchmarks))
    spec = known_benchmarks[benchmark].spec
    protocols = {candidate.name: candidate for candidate in list_protocols(benchmark, spec)}
    main_protocol = next(iter(protocols))
    if protocol is not None and protocol not in protocols:
        raise DataError("score.protocol_unknown", key=benchmark, value=protocol, names=list(protocols))
    chosen = protocols[protocol or main_protocol]
    return ScoringTask(
        dataset=benchmark,
        protocol=chosen,
        spec=spec,
        counts=find_counts(chosen, known_benchmarks[benchmark].test_counts),
        published=find_published_rows(benchmark, chosen, is_main_protocol=chosen.name == main_protocol),
    )


def find_counts(protocol: Protocol, test_counts: SplitCount | None) -> SplitCount | None:
    """Return the published counts of a protocol, or None if they are not known.

    If the protocol does not include the whole test split, only the number of pairs is known.
    """
    if protocol.published_pairs is None:
        return None
    if test_counts is None or protocol.published_pairs != (test_counts.questions or test_counts.pairs):
        return SplitCount(protocol.published_pairs)
    if protocol.references == "joined":
        return replace(test_counts, references=test_counts.pairs)
    if test_counts.questions is not None:
        return replace(test_counts, pairs=test_counts.questions, image_pairs=test_counts.pairs)
    return test_counts

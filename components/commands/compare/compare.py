"""Two runs on the same test pairs: the difference of each score with its interval, and a page of the pairs.

Each run is a report folder of evaluate; of it scores.parquet alone is read. References, images, grammar and licence are
those of this checkout's records.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from m3diff.records.errors import DataError, readable
from m3diff.records.files import write_atomic
from m3diff.scoring import bootstrap
from m3diff.scoring.grammar import load_grammars, parse_predictions
from m3diff.scoring.metrics import METRICS
from m3diff.scoring.metrics.metric import Metric
from m3diff.scoring.pairs import EvalPair, pair_of, read_test_records
from m3diff.scoring.protocols import load_specs
from m3diff.stages.evaluate.report.gallery import RunPairs, gallery
from m3diff.stages.evaluate.report.images import ImageStore, rights_of
from m3diff.stages.evaluate.report.report import templates
from m3diff.stages.evaluate.report.tables import Row, Table, difference, in_papers_units, plain

INSIDE_MB = 24
"""Of images; of more, all stand in a folder beside the page."""


def compare(first: Path, second: Path, records: Path, clean: Path, out: Path) -> dict[str, Table]:
    """Write the page `out`; its images stand inside it or, where there are many, in `<name>_images` beside it.

    Args:
        first, second: folders that hold scores.parquet, or the files themselves.

    Returns:
        By protocol a table with a row to each score: both runs, and the second minus the first.

    Raises:
        DataError: no scores.parquet, or none that this version writes; the pairs of a protocol are not the same ones;
            they are not among the test pairs of `clean`; no protocol is in both; an image is missing.
    """
    paths = [path / "scores.parquet" if path.is_dir() else path for path in (first, second)]
    scores = [read_scores(path) for path in paths]
    protocols = shared_protocols(paths, scores)
    names = run_names(first, second)
    columns = set(scores[0].column_names) & set(scores[1].column_names)
    metrics = {name: metric for name, metric in METRICS.items() if metric.columns and set(metric.columns) <= columns}
    tables = {protocol: difference_table(protocol, names, metrics, *scores) for protocol in protocols}
    rows = {row["id"]: row for row in read_test_records(clean / "records.parquet")}
    pairs = [pairs_of(table, protocols, rows, clean) for table in scores]
    specs = load_specs(records, dict.fromkeys(pair.dataset for of in pairs[0].values() for pair in of.values()))
    grammars = load_grammars(records, specs)
    runs = [
        RunPairs(name, of, values_of(table, protocols), parse_predictions(grammars, list(distinct(of).values())))
        for name, of, table in zip(names, pairs, scores, strict=True)
    ]
    rights = {dataset: rights_of(spec) for dataset, spec in specs.items()}
    store = ImageStore(out.with_name(f"{out.stem}_images"), INSIDE_MB * 1_000_000)
    page = templates(Path(__file__).parent).get_template("compare.html.j2")
    text = page.render(
        runs=names,
        parts=[{"name": name, "id": plain(name), "table": table} for name, table in tables.items()],
        gallery=gallery(runs, metrics, rights, None, store),
        gallery_title="Pair by pair",
        gallery_note=f"Differences are {names[1]} minus {names[0]}.",
        image_rights=rights,
    )
    write_atomic(out, text)
    return tables


def read_scores(path: Path) -> pa.Table:
    if not path.is_file():
        raise DataError(f"{path}: no such file; name the folder that evaluate wrote for a run, such as data/07_report")
    with readable(path, "fetch it again, or run `m3diff evaluate` there"):
        table = pq.read_table(path)
    missing = [name for name in ("protocol", "id", "prediction") if name not in table.column_names]
    if missing:
        raise DataError(
            f"{path}: no column {', '.join(missing)}: an earlier version wrote it; run `m3diff evaluate` again"
        )
    return table


def shared_protocols(paths: Sequence[Path], scores: Sequence[pa.Table]) -> list[str]:
    """The protocols of both runs, in the first one's order.

    Raises:
        DataError: there is none, or one has not the same pairs in both.
    """
    ids = [ids_of(table) for table in scores]
    shared = [name for name in ids[0] if name in ids[1]]
    if not shared:
        raise DataError(
            f"{paths[1]}: protocols {', '.join(ids[1])}; {paths[0]} has {', '.join(ids[0])}: none is in both"
        )
    for name in shared:
        if odd := ids[0][name] ^ ids[1][name]:
            raise DataError(
                f"{paths[0]} and {paths[1]}: {name} has {len(ids[0][name])} and {len(ids[1][name])} pairs, "
                f"{len(odd)} of them in one run alone, such as {min(odd)}; score both runs on the same test pairs"
            )
    return shared


def ids_of(table: pa.Table) -> dict[str, set[str]]:
    """Pair ids by protocol."""
    found: dict[str, set[str]] = {}
    for protocol, i in zip(table["protocol"].to_pylist(), table["id"].to_pylist(), strict=True):
        found.setdefault(protocol, set()).add(i)
    return found


def run_names(first: Path, second: Path) -> list[str]:
    """The folders' own names; their paths where those are the same."""
    folders = [path if path.is_dir() else path.parent for path in (first, second)]
    names = [folder.resolve().name for folder in folders]
    return names if names[0] != names[1] else [str(folder) for folder in folders]


def difference_table(
    protocol: str, names: Sequence[str], metrics: Mapping[str, Metric], first: pa.Table, second: pa.Table
) -> Table:
    """A row to each score: of either run, and the gain of the second with its interval."""
    rows = []
    for name, score in bootstrap.resampled_scores(metrics).items():
        found = bootstrap.compare(second, first, protocol, score)
        if found is not None:
            cells = in_papers_units(found.second), in_papers_units(found.first), difference(found.gain, found.interval)
            rows.append(Row(name, (), cells))
    return Table(f"{plain(protocol)}-difference", ("Score", *names, "difference"), rows)


def pairs_of(
    table: pa.Table, protocols: Sequence[str], rows: Mapping[str, dict[str, Any]], clean: Path
) -> dict[str, dict[str, EvalPair]]:
    """Protocol -> pair id -> the pair with what the run said of it."""
    found: dict[str, dict[str, EvalPair]] = {protocol: {} for protocol in protocols}
    columns = (table[name].to_pylist() for name in ("protocol", "id", "prediction"))
    for protocol, i, prediction in zip(*columns, strict=True):
        if protocol in found:
            if i not in rows:
                raise DataError(f"{clean / 'records.parquet'}: no test pair {i}, which both runs captioned")
            found[protocol][i] = pair_of(rows[i], prediction, None)
    return found


def distinct(pairs: Mapping[str, Mapping[str, EvalPair]]) -> dict[str, EvalPair]:
    """Each pair as its first protocol has it."""
    return {i: pair for of in reversed(list(pairs.values())) for i, pair in of.items()}


def values_of(table: pa.Table, protocols: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Protocol -> pair id -> column -> value."""
    found: dict[str, dict[str, dict[str, Any]]] = {protocol: {} for protocol in protocols}
    for row in table.to_pylist():
        if row["protocol"] in found:
            found[row["protocol"]][row["id"]] = row
    return found


def as_text(protocol: str, table: Table) -> str:
    """A table as lines of a terminal."""
    lines = [
        table.columns,
        *((row.name, *(f"{cell.text}  {cell.bounds}".strip() for cell in row.cells)) for row in table.rows),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([protocol, *body])

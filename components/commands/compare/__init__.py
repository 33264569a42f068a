"""Compare two runs on the same test pairs: the difference of each score with its interval, and a page with all pairs.

A run is given by the report folder that evaluate wrote. Only its scores.parquet is read. References, images, grammars
and licences come from the records of this checkout.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from m3diff.records.errors import DataError, data_error_if_unreadable
from m3diff.records.files import write_atomic
from m3diff.report.gallery import RunPairs, build_gallery
from m3diff.report.images import MB, find_image_rights
from m3diff.report.tables import Table, TableRow, file_name_of_protocol, format_lines, make_cell
from m3diff.report.templates import load_templates
from m3diff.scoring import bootstrap
from m3diff.scoring.grammar import Grammar, load_grammars, parse_predictions
from m3diff.scoring.metrics import BY_CHARACTERS, METRICS, Metric, PairValue, add_character_variants
from m3diff.scoring.pairs import EvalPair, read_test_records
from m3diff.scoring.protocols import load_specs
from m3diff.scoring.retention import BASE_PREFIX

EMBEDDED_MB = 24  # limit for images embedded in the page; above it, images are written to a folder next to the page


@dataclass(frozen=True)
class ComparedRun:
    """The content of a run's scores.parquet.

    rows: protocol -> pair id -> column -> value.
    """

    path: Path
    table: pa.Table
    rows: dict[str, dict[str, dict[str, PairValue]]]


def compare(first_path: Path, second_path: Path, records: Path, clean: Path, out: Path) -> dict[str, Table]:
    """Compare two runs and write the page `out`.

    Images are embedded in the page or, if they are too large, written to the folder `<name>_images` next to it.

    Args:
        first_path, second_path: folders that contain scores.parquet, or the files themselves.

    Returns:
        One table per protocol with the scores of both runs and the second score minus the first.

    Raises:
        DataError: a scores.parquet is missing or was written by another version; the runs have no protocol in common,
            different pairs or different tokens; the pairs are not test pairs of `clean`; or an image is missing.
    """
    runs = [read_run(first_path), read_run(second_path)]
    protocols = find_shared_protocols(*runs)
    names = choose_run_names(*runs)
    refuse_mixed_tokens(runs, protocols)
    metrics = find_shared_metrics(*runs)
    differences = {protocol: make_difference_table(protocol, names, metrics, *runs) for protocol in protocols}
    test_pairs = read_test_records(clean)
    compared_ids: dict[str, None] = {}  # a dict keeps the order
    for protocol in protocols:
        compared_ids |= dict.fromkeys(runs[0].rows[protocol])
    unknown_ids = [pair_id for pair_id in compared_ids if pair_id not in test_pairs]
    if unknown_ids:
        raise DataError("compare.unknown_pairs", path=clean / "records", names=unknown_ids, name=unknown_ids[0])
    specs = load_specs(records, (test_pairs[pair_id] for pair_id in compared_ids))
    grammars = load_grammars(records, specs)
    rights = {dataset: find_image_rights(spec) for dataset, spec in specs.items()}
    run_pairs = [
        make_run_pairs(name, run, protocols, test_pairs, grammars) for name, run in zip(names, runs, strict=True)
    ]
    images = out.with_name(f"{out.stem}_images")
    parts = []
    for protocol, table in differences.items():
        parts.append({"name": protocol, "id": file_name_of_protocol(protocol), "table": table})
    page = load_templates(Path(__file__).parent).get_template("compare.html.j2")
    text = page.render(
        runs=names,
        parts=parts,
        gallery=build_gallery(run_pairs, metrics, rights, {}, images, EMBEDDED_MB * MB),
        gallery_title="Pair by pair",
        gallery_note=f"Differences are {names[1]} minus {names[0]}.",
        image_rights=rights,
    )
    write_atomic(out, text)
    return differences


def read_run(path: Path) -> ComparedRun:
    """Read a run's scores.parquet, without the rows with predictions of the run's base.

    Raises:
        DataError: the file cannot be read, or a column is missing.
    """
    file = path / "scores.parquet" if path.is_dir() else path
    with data_error_if_unreadable(file, "compare.unreadable_scores"):
        table = pq.read_table(file)
        table.select(["protocol", "id", "prediction"])
    rows: dict[str, dict[str, dict[str, PairValue]]] = {}
    for row in table.to_pylist():
        if not row["protocol"].startswith(BASE_PREFIX):
            rows.setdefault(row["protocol"], {})[row["id"]] = row
    return ComparedRun(path=file, table=table, rows=rows)


def choose_run_names(first_run: ComparedRun, second_run: ComparedRun) -> list[str]:
    """Return the names of the runs' folders, or their paths if both names are the same."""
    folders = [first_run.path.parent, second_run.path.parent]
    names = [folder.resolve().name for folder in folders]
    return [str(folder) for folder in folders] if names[0] == names[1] else names


def find_shared_protocols(first_run: ComparedRun, second_run: ComparedRun) -> list[str]:
    """Return the protocols that both runs have, in the order of the first run.

    Raises:
        DataError: the runs have no protocol in common, or different pairs for a protocol.
    """
    shared = [protocol for protocol in first_run.rows if protocol in second_run.rows]
    if not shared:
        raise DataError(
            "compare.no_shared_protocol",
            path=second_run.path,
            other=first_run.path,
            names=list(second_run.rows),
            other_names=list(first_run.rows),
        )
    for protocol in shared:
        first_pairs = first_run.rows[protocol]
        second_pairs = second_run.rows[protocol]
        unshared_ids = first_pairs.keys() ^ second_pairs.keys()
        if unshared_ids:
            raise DataError(
                "compare.pairs_differ",
                path=first_run.path,
                other=second_run.path,
                protocol=protocol,
                pairs=len(first_pairs),
                other_pairs=len(second_pairs),
                unshared=len(unshared_ids),
                name=min(unshared_ids),
            )
    return shared


def refuse_mixed_tokens(runs: Sequence[ComparedRun], protocols: Sequence[str]) -> None:
    """Check that both runs score each protocol on the same kind of tokens, either words or characters.

    Raises:
        DataError: one run uses words, and the other run uses characters.
    """
    word_columns: list[str] = []
    for metric in METRICS.values():
        if metric.reads == "tokens":
            word_columns += metric.columns
    character_columns = [f"{column}{BY_CHARACTERS}" for column in word_columns]
    for protocol in protocols:
        for character_run, word_run in (runs, runs[::-1]):
            has_characters = has_values(character_run.table, protocol, character_columns)
            if has_characters and has_values(word_run.table, protocol, word_columns):
                raise DataError(
                    "compare.tokens_differ", path=word_run.path, other=character_run.path, protocol=protocol
                )


def has_values(table: pa.Table, protocol: str, columns: Iterable[str]) -> bool:
    """Return True if any of the columns has a value for at least one pair of the protocol."""
    rows = bootstrap.rows_of(table, protocol)
    return any(column in rows.column_names and rows[column].null_count < rows.num_rows for column in columns)


def find_shared_metrics(first_run: ComparedRun, second_run: ComparedRun) -> dict[str, Metric]:
    """Return the metrics whose columns are all present in both runs."""
    columns = set(first_run.table.column_names) & set(second_run.table.column_names)
    return {
        name: metric
        for name, metric in add_character_variants(METRICS).items()
        if metric.columns and set(metric.columns) <= columns
    }


def make_difference_table(
    protocol: str, names: Sequence[str], metrics: Mapping[str, Metric], first_run: ComparedRun, second_run: ComparedRun
) -> Table:
    """Return a table with one row per score: its value in each run, and the difference with its interval.

    The difference is the second run minus the first. The scores of answers are compared for each kind of question, too.
    """
    rows = compare_scores(protocol, metrics, first_run, second_run)
    answer_metrics = {name: metric for name, metric in metrics.items() if metric.records == "questions"}
    for kind in list_kinds((first_run, second_run), protocol):
        rows_of_kind = compare_scores(
            protocol, answer_metrics, select_kind(first_run, kind), select_kind(second_run, kind)
        )
        rows += [row._replace(name=f"{row.name}, {kind}") for row in rows_of_kind]
    return Table(f"{file_name_of_protocol(protocol)}-difference", ("Score", *names, "difference"), rows)


def compare_scores(
    protocol: str, metrics: Mapping[str, Metric], first_run: ComparedRun, second_run: ComparedRun
) -> list[TableRow]:
    """Return a row for each score that both runs have; see `make_difference_table`."""
    rows = []
    for name, score in bootstrap.resampled_scores(metrics).items():
        # `bootstrap.compare` returns its first table minus its second, so the runs are swapped
        comparison = bootstrap.compare(second_run.table, first_run.table, protocol, score)
        if comparison is not None:
            gain = comparison.first_score - comparison.second_score
            cells = (
                make_cell(comparison.second_score),
                make_cell(comparison.first_score),
                make_cell(gain, comparison.interval, is_difference=True),
            )
            rows.append(TableRow(name, (), cells))
    return rows


def select_kind(run: ComparedRun, kind: str) -> ComparedRun:
    """Return a run with the questions of one kind."""
    return replace(run, table=run.table.filter(pc.equal(run.table["kind"], kind)))


def list_kinds(runs: Iterable[ComparedRun], protocol: str) -> list[str]:
    """Return the kinds of a protocol's questions. An older scores.parquet does not name them."""
    kinds: set[str] = set()
    for run in runs:
        if "kind" not in run.table.column_names:
            return []
        kinds |= set(bootstrap.rows_of(run.table, protocol)["kind"].drop_null().to_pylist())
    return sorted(kinds)


def make_run_pairs(
    name: str,
    run: ComparedRun,
    protocols: Sequence[str],
    test_pairs: Mapping[str, EvalPair],
    grammars: Mapping[str, Grammar],
) -> RunPairs:
    """Return a run's pairs for the gallery. Each prediction is parsed as its first protocol scores it."""
    pairs: dict[str, dict[str, EvalPair]] = {}
    pairs_to_parse: dict[str, EvalPair] = {}
    for protocol in protocols:
        pairs[protocol] = {
            pair_id: replace(test_pairs[pair_id], prediction=str(row["prediction"]))
            for pair_id, row in run.rows[protocol].items()
        }
        for pair_id, pair in pairs[protocol].items():
            pairs_to_parse.setdefault(pair_id, pair)
    return RunPairs(
        name=name,
        pairs=pairs,
        scores=run.rows,
        parsed=parse_predictions(grammars, pairs_to_parse.values()),
    )


def format_table(protocol: str, table: Table) -> str:
    """Return the table of a protocol as text for the terminal."""
    return "\n".join([protocol, *format_lines(table)])

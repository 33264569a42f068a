"""Two runs on the same test pairs: the difference of each score with its interval, and a page of the pairs.

Each run is a report folder of evaluate; of it scores.parquet alone is read. References, images, grammar and licence are
those of this checkout's records.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from m3diff.records.errors import DataError, readable
from m3diff.records.files import write_atomic
from m3diff.scoring import bootstrap
from m3diff.scoring.grammar import load_grammars, parse_predictions
from m3diff.scoring.metrics import BY_CHARACTERS, METRICS, Metric, PairValue, with_characters
from m3diff.scoring.pairs import EvalPair, load_specs, read_test_records
from m3diff.stages.evaluate import report
from m3diff.stages.evaluate.report import Row, Table, in_papers_units

INSIDE_MB = 24  # MB of images that the page holds; of more, all are files of a folder beside it
Scores = dict[str, dict[str, dict[str, PairValue]]]  # protocol -> pair id -> column -> value


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
    tables = [read_scores(path) for path in paths]
    scores: list[Scores] = [{}, {}]
    for table, found in zip(tables, scores, strict=True):
        for row in table.to_pylist():
            found.setdefault(row["protocol"], {})[row["id"]] = row
    protocols = shared_protocols(paths, scores)
    folders = [path.parent for path in paths]
    names = [folder.resolve().name for folder in folders]
    if names[0] == names[1]:
        names = [str(folder) for folder in folders]
    columns = set(tables[0].column_names) & set(tables[1].column_names)
    refuse_other_tokens(paths, tables, protocols)
    metrics = {
        name: metric
        for name, metric in with_characters(METRICS).items()
        if metric.columns and set(metric.columns) <= columns
    }
    differences = {protocol: difference_table(protocol, names, metrics, *tables) for protocol in protocols}
    known = read_test_records(clean)
    for protocol in protocols:
        if missing := [i for i in scores[0][protocol] if i not in known]:
            raise DataError(f"{clean / 'records.parquet'}: no test pair {missing[0]}, which both runs captioned")
    specs = load_specs(records, (known[i] for protocol in protocols for i in scores[0][protocol]))
    grammars = load_grammars(records, specs)
    runs = []
    for name, of_run in zip(names, scores, strict=True):
        pairs: dict[str, dict[str, EvalPair]] = {
            of: {i: replace(known[i], prediction=str(row["prediction"])) for i, row in of_run[of].items()}
            for of in protocols
        }
        first_protocols = {i: pair for of in reversed(protocols) for i, pair in pairs[of].items()}
        runs.append(report.RunPairs(name, pairs, of_run, parse_predictions(grammars, first_protocols.values())))
    rights = {dataset: report.rights_of(spec) for dataset, spec in specs.items()}
    images = out.with_name(f"{out.stem}_images")
    page = report.templates(Path(__file__).parent).get_template("compare.html.j2")
    text = page.render(
        runs=names,
        parts=[{"name": name, "id": report.plain(name), "table": table} for name, table in differences.items()],
        gallery=report.gallery(runs, metrics, rights, {}, images, INSIDE_MB * report.MB),
        gallery_title="Pair by pair",
        gallery_note=f"Differences are {names[1]} minus {names[0]}.",
        image_rights=rights,
    )
    write_atomic(out, text)
    return differences


def read_scores(path: Path) -> pa.Table:
    with readable(path, "name the folder that evaluate wrote for a run, or run `m3diff evaluate` there again"):
        table = pq.read_table(path)
        table.select(["protocol", "id", "prediction"])
    return table


def shared_protocols(paths: Sequence[Path], scores: Sequence[Scores]) -> list[str]:
    """The protocols of both runs, in the first one's order.

    Raises:
        DataError: there is none, or one has not the same pairs in both.
    """
    first, second = scores
    shared = [name for name in first if name in second]
    if not shared:
        raise DataError(
            f"{paths[1]}: protocols {', '.join(second)}; {paths[0]} has {', '.join(first)}: none is in both"
        )
    for name in shared:
        if odd := first[name].keys() ^ second[name].keys():
            raise DataError(
                f"{paths[0]} and {paths[1]}: {name} has {len(first[name])} and {len(second[name])} pairs, "
                f"{len(odd)} of them in one run alone, such as {min(odd)}; score both runs on the same test pairs"
            )
    return shared


def refuse_other_tokens(paths: Sequence[Path], tables: Sequence[pa.Table], protocols: Sequence[str]) -> None:
    """Refuse two files if one counts the words of a protocol and the other its characters.

    Raises:
        DataError: names both files, the protocol and the remedy.
    """
    of_characters = [score for metric in METRICS.values() if metric.reads == "tokens" for score in metric.columns]
    for protocol in protocols:
        counts_characters = [
            any(has_values(table, protocol, f"{column}{BY_CHARACTERS}") for column in of_characters) for table in tables
        ]
        counts_words = [any(has_values(table, protocol, column) for column in of_characters) for table in tables]
        for characters, words in ((0, 1), (1, 0)):
            if counts_characters[characters] and counts_words[words]:
                raise DataError(
                    f"{paths[words]}: {protocol}: its scores count words, those of {paths[characters]} count "
                    "characters, since the references have no spaces between words; run `m3diff evaluate` again for "
                    "the first"
                )


def has_values(table: pa.Table, protocol: str, column: str) -> bool:
    """True if a column is there with a value for any pair of the protocol."""
    rows = bootstrap.rows_of(table, protocol)
    return column in rows.column_names and rows[column].null_count < rows.num_rows


def difference_table(
    protocol: str, names: Sequence[str], metrics: Mapping[str, Metric], first: pa.Table, second: pa.Table
) -> Table:
    """A row to each score: of either run, and the gain of the second with its interval."""
    rows = []
    for name, score in bootstrap.resampled_scores(metrics).items():
        found = bootstrap.compare(second, first, protocol, score)
        if found is not None:
            later, earlier, interval = found
            gain = in_papers_units(later - earlier, interval, signed=True)
            rows.append(Row(name, (), (in_papers_units(earlier), in_papers_units(later), gain)))
    return Table(f"{report.plain(protocol)}-difference", ("Score", *names, "difference"), rows)


def as_text(protocol: str, table: Table) -> str:
    return "\n".join([protocol, *report.text_lines(table)])

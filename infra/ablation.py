"""What each part brings: `make ablation` trains every row of infra/ablation.yaml, from several seeds, and compares.

Each row is an experiment of DVC in a folder of its own (`dvc exp show` lists them, `dvc exp apply` brings one back), so
a row that was run before is restored and not trained again. The table has each row's scores, their mean and standard
deviation over the seeds, and the difference to each row of `compare_with`, and to the one it stands beside, with its
interval over pairs; another what each row trained on: pairs, epochs and optimizer steps. They are printed and written
to benchmarks/results/ablation.json, with a plot and the same tables in Markdown beside it.

Beside its changes of params.yaml a row may have two keys:

    made: [minichange_edits]   # datasets of profiles/made-data.yaml whose training pairs train, too
    beside: M3Diff             # a row above it, to which it is compared, on as many optimizer steps: its train.epochs
                               # follow from how many pairs it has
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from pydantic import ValidationError

from components.evaluate.bootstrap import compare, resampled_scores, rows_of
from components.evaluate.bootstrap import statistics as sums_of
from components.evaluate.metrics import METRICS
from components.files import sha256_of_folder, write_atomic
from components.params import Params, ParamsError, Paths, explain, load_params
from components.profiles import resolve
from components.section import Section
from infra.budget import Budget, budget_of, epochs_for
from infra.experiments import read, run_experiment
from infra.seeds import known, over_seeds

ROWS = Path(__file__).with_suffix(".yaml")
RESULTS = Path("benchmarks/results/ablation.json")
PARAMS, MADE_DATA = Path("params.yaml"), Path("profiles/made-data.yaml")
MADE, BESIDE, EPOCHS = "made", "beside", "train.epochs"


class Column(NamedTuple):
    """How a score is written, times 100: its title, and whether it is a share."""

    title: str
    percent: bool = False

    def text(self, value: float, sign: str = "") -> str:
        return f"{100 * value:{sign}.1f}"

    @property
    def heading(self) -> str:
        return f"{self.title}, %" if self.percent else self.title


SCORES = {
    "CIDEr": Column("CIDEr"),
    "change_type_accuracy": Column("type correct", percent=True),
    "change_exact_accuracy": Column("all correct", percent=True),
    "no_change_recall": Column("no change seen as such", percent=True),
    "multi_change_exact_f1": Column("several changes, F1"),
    "reversal": Column("swapped, inverse named", percent=True),
    "CIDEr_shuffled": Column("CIDEr, shuffled"),
}


class Ablation(Section):
    """A file of rows."""

    protocols: tuple[str, ...]  # the parts of metrics.json to show
    compare_with: tuple[str, ...] = ()  # names of rows that every other is compared with
    rows: dict[str, dict[str, Any]]  # what each changes of params.yaml, by its name; and `made` and `beside`
    needs: dict[Path, str] = {}  # folders that git does not hold, and the command that makes each


class Scored(NamedTuple):
    """Scores of a row on a protocol, by seed, and its pairs' statistics summed over the seeds."""

    scores: dict[str, list[float]]
    pairs: pa.Table  # as scores.parquet


class Row(NamedTuple):
    """A row that was run; its scores by protocol."""

    name: str
    changes: Mapping[str, Any]
    protocols: dict[str, Scored]
    budget: Budget | None = None
    beside: str | None = None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("seeds", type=int, nargs="?", default=1, help="that of the parameters and those that follow it")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the rows")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="the table as JSON; Markdown and plot stand beside it"
    )
    args = parser.parse_args(argv)
    try:
        params = load_params(PARAMS)
        ablation = read_ablation(args.rows)
        check_made(ablation, params, args.rows)
        absent = left_out(ablation)
        print("\n".join(absent.values()), end="\n" * bool(absent), flush=True)
        seeds = range(params.train.seed, params.train.seed + args.seeds)
        rows = run_rows(ablation, absent, seeds, params.paths)
    except (ParamsError, OSError) as error:
        print(f"make ablation: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"make ablation: `{' '.join(error.cmd)}` ended with {error.returncode}", file=sys.stderr)
        return error.returncode
    found = {protocol: table(rows, ablation.compare_with, protocol) for protocol in ablation.protocols}
    budgets = {row.name: row.budget._asdict() for row in rows if row.budget}
    print("\n".join(budget_table(budgets)))
    for protocol, cells in found.items():
        print("\n".join(lines(cells, protocol, len(seeds))))
    print("\n".join(absent.values()), end="\n" * bool(absent))
    facts = {
        "command": f"make ablation N={args.seeds}" + (f" ROWS={args.rows}" if args.rows != ROWS else ""),
        "seeds": list(seeds),
        "compare_with": list(ablation.compare_with),
        "left_out": absent,
        "made": {str(folder): sha256_of_folder(folder) for folder in ablation.needs if folder.is_dir()},
        "budgets": budgets,
        "protocols": found,
    }
    write_atomic(args.out, json.dumps(facts, indent=1) + "\n")
    page = [*budget_table(budgets), "", *markdown(found, ablation.compare_with, len(seeds), absent)]
    write_atomic(args.out.with_suffix(".md"), "\n".join(page) + "\n")
    plot(found, args.out.with_suffix(".svg"))
    print(f"written to {args.out}, {args.out.with_suffix('.md')} and {args.out.with_suffix('.svg')}")
    return 0


def read_yaml(path: Path) -> Any:
    """Raises ParamsError where the file is no YAML."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParamsError(f"{path}: not valid YAML: {error}") from error


def read_ablation(path: Path) -> Ablation:
    """The rows, and what they are compared with.

    Raises:
        ParamsError: the file is no YAML, no mapping of these fields, has no two rows, or compares with a row that it
            has not, or a row asks for what cannot be.
    """
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ParamsError(f"{path}: expected a mapping of protocols, compare_with, rows and needs")
    try:
        found = Ablation.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(explain(fault, top=Ablation) for fault in error.errors())
        raise ParamsError(f"{path}: {faults}") from error
    if len(found.rows) < 2:
        raise ParamsError(f"{path}: rows: expected two or more, found {len(found.rows)}")
    for name in found.compare_with:
        if name not in found.rows:
            raise ParamsError(f"{path}: compare_with: no row is called {name!r}; the rows are {', '.join(found.rows)}")
    if faults_of_rows := [fault for name in found.rows for fault in row_faults(name, found.rows)]:
        raise ParamsError(f"{path}: {'; '.join(faults_of_rows)}")
    return found


def row_faults(name: str, rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What is wrong with a row's `made` and `beside`."""
    row, above = rows[name], list(rows)[: list(rows).index(name)]
    if MADE in row:
        known = resolve(MADE_DATA)[0]["augment"]
        if not isinstance(row[MADE], list) or not set(row[MADE]) <= set(known):
            wanted = f"expected a list of what {MADE_DATA} makes, of {', '.join(known)}"
            yield f"rows.{name}.made: {wanted}; found {row[MADE]!r}"
    if BESIDE in row:
        if row[BESIDE] not in above:
            known = ", ".join(above) or "of which there is none"
            yield f"rows.{name}.beside: expected a row above it, {known}; found {row[BESIDE]!r}"
        if EPOCHS in row:
            yield f"rows.{name}.{EPOCHS}: follows from the steps of the row beside; leave one of the two out"


def check_made(ablation: Ablation, params: Params, rows: Path) -> None:
    """Raises ParamsError where params.yaml makes a dataset of a row already: the rows without it would train on it."""
    for name, row in ablation.rows.items():
        for made in row.get(MADE, ()):
            if made in params.ingest.datasets or made in params.augment:
                raise ParamsError(
                    f"{rows}: rows.{name}.made: {PARAMS} has {made!r} already, so that the rows without it would train "
                    "on it, too; start from parameters without it: `m3diff profile embedded`"
                )


def changes_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row changes of params.yaml, its made datasets written out."""
    changes = {key: value for key, value in row.items() if key not in (MADE, BESIDE)}
    for name in row.get(MADE, ()):
        changes |= made_dataset(name)
    return changes


def made_dataset(name: str) -> dict[str, Any]:
    """What of params.yaml has this dataset made and read, as profiles/made-data.yaml does, of training pairs alone: so
    every row is validated and tested on the same pairs."""
    profile = resolve(MADE_DATA)[0]
    entry = profile["augment"][name]
    entry["source"]["splits"] = ["train"]
    changes = {f"+augment.{name}": entry, f"+ingest.datasets.{name}": profile["ingest"]["datasets"][name]}
    if name in profile["convert"]["sources"]:
        changes[f"+convert.sources.{name}"] = profile["convert"]["sources"][name]
    return changes


def left_out(ablation: Ablation) -> dict[str, str]:
    """The rows that cannot run here, and why: by name, a line that says what is not there and what makes it."""
    absent = {
        name: f"left out: {name}: {folder} is not there; make it with `{command}`"
        for name, changes in ablation.rows.items()
        for folder, command in ablation.needs.items()
        if str(folder) in changes.values() and not folder.is_dir()
    }
    for name, row in ablation.rows.items():
        if row.get(BESIDE) in absent:
            absent.setdefault(name, f"left out: {name}: {row[BESIDE]}, which it stands beside, is left out")
    return absent


def run_rows(ablation: Ablation, absent: Mapping[str, str], seeds: Sequence[int], paths: Paths) -> list[Row]:
    """Run the rows that can run, in their order.

    Raises:
        CalledProcessError: an experiment failed.
        ParamsError: it has not the protocols.
    """
    found: dict[str, Row] = {}
    for name, row in ablation.rows.items():
        if name not in absent:
            changes, beside = changes_of(row), row.get(BESIDE)
            if beside:
                changes = changes | {EPOCHS: equal_epochs(name, changes, found[beside], ablation, paths)}
            found[name] = run_row(name, changes, seeds, ablation, paths)._replace(beside=beside)
    return list(found.values())


def equal_epochs(name: str, changes: Mapping[str, Any], beside: Row, ablation: Ablation, paths: Paths) -> float:
    """Epochs in which the row takes as many optimizer steps as the one beside. Its data are made for that."""
    assert beside.budget, "a row that was run has its budget"
    print(f"{name}, its data: ", end="")
    return epochs_for(beside.budget.steps, f"{slug(name)}-data", changes, given(changes, ablation), paths)


def given(changes: Mapping[str, Any], ablation: Ablation) -> list[Path]:
    """The folders that git does not hold and these changes name."""
    return [folder for folder in ablation.needs if str(folder) in changes.values()]


def run_row(name: str, changes: Mapping[str, Any], seeds: Sequence[int], ablation: Ablation, paths: Paths) -> Row:
    """Run the row with every seed.

    Raises:
        CalledProcessError: an experiment failed.
        ParamsError: it has not the protocols.
    """
    runs = [run_seed(name, changes, seed, given(changes, ablation)) for seed in seeds]
    metrics = [json.loads(read(run, paths.report / "metrics.json"))["protocols"] for run in runs]
    tables = [pq.read_table(pa.BufferReader(read(run, paths.report / "scores.parquet"))) for run in runs]
    found = {protocol: scored(metrics, tables, protocol) for protocol in ablation.protocols}
    return Row(name, changes, found, budget_of(runs[0], paths))


def run_seed(row: str, changes: Mapping[str, Any], seed: int, given: Sequence[Path]) -> str:
    """The name of the row's experiment, run or restored."""
    name = experiment_of(row, seed)
    print(f"{row}, seed {seed}: ", end="")
    run_experiment(name, {"train.seed": seed} | dict(changes), given)
    return name


def experiment_of(row: str, seed: int) -> str:
    return f"{slug(row)}-{seed}"


def slug(row: str) -> str:
    return f"ablation-{re.sub('[^a-z0-9]+', '-', row.lower())}"


def scored(metrics: Sequence[Mapping[str, Any]], tables: Sequence[pa.Table], protocol: str) -> Scored:
    """A protocol's part of each seed's metrics.json and scores.parquet."""
    if protocol not in metrics[0]:
        raise ParamsError(f"protocols: {protocol} was not scored; metrics.json has {', '.join(metrics[0])}")
    values = {score: found for score in SCORES if (found := known([one[protocol].get(score) for one in metrics]))}
    return Scored(values, summed([rows_of(one, protocol) for one in tables]))


def summed(tables: Sequence[pa.Table]) -> pa.Table:
    """The statistics of each pair added up over the seeds: sums over these pairs score all seeds together."""
    first, *others = [one.sort_by("id") for one in tables]
    columns: dict[str, Any] = {"protocol": first["protocol"], "id": first["id"]}
    for column in {of.column: None for of in resampled_scores(METRICS).values()}:
        parts = [part for one in (first, *others) if (part := sums_of(one, column)) is not None]
        if len(parts) == len(tables):
            columns[column] = np.sum(parts, axis=0).tolist()
    return pa.table(columns)


def table(rows: Sequence[Row], compare_with: Sequence[str], protocol: str) -> list[dict[str, Any]]:
    """Each row with its scores' mean, deviation and differences to the rows that are named and were run, and to the one
    that it stands beside."""
    found = []
    for row in rows:
        one = row.protocols[protocol]
        others = [other for other in rows if other is not row and other.name in (*compare_with, row.beside)]
        cells = {
            score: over_seeds(values)
            | {"differences": {other.name: differ(row, other, protocol, score) for other in others}}
            for score, values in one.scores.items()
        }
        told = {"row": row.name, "beside": row.beside, "changes": dict(row.changes), "pairs": one.pairs.num_rows}
        found.append(told | {"scores": cells})
    return found


def differ(row: Row, other: Row, protocol: str, score: str) -> dict[str, float] | None:
    """How much more the row has of a score; None where no interval can be given."""
    ours, theirs = (one.protocols[protocol].pairs for one in (row, other))
    of_sums = resampled_scores(METRICS).get(score)  # of the controls there are no sums over these pairs
    found = None if of_sums is None else compare(ours, theirs, protocol, of_sums)
    if found is None or found.interval is None:
        return None
    return {"gain": found.gain, "low": found.interval.low, "high": found.interval.high}


def lines(found: Sequence[Mapping[str, Any]], protocol: str, seeds: int) -> Iterator[str]:
    """The table as text; differences with their 95 % intervals over pairs."""
    yield f"{protocol}, {found[0]['pairs']} pairs, {counted(seeds)}, times 100"
    for row in found:
        yield row["row"]
        for score, cell in row["scores"].items():
            sd = f"  sd {100 * cell['sd']:.1f}" if cell["sd"] is not None else ""
            yield f"  {score:<24} {100 * cell['mean']:6.1f}{sd}"
            for name, other in cell["differences"].items():
                if other:
                    low, high = 100 * other["low"], 100 * other["high"]
                    yield f"    {100 * other['gain']:+.1f}  ({low:+.1f} to {high:+.1f})  to {name}"


def counted(seeds: int) -> str:
    return f"{seeds} seed{'s' * (seeds > 1)}"


BUDGET = {
    "pairs": "pairs that train",
    "epochs": "epochs",
    "steps": "optimizer steps",
    "captions": "captions trained on",
    "alignment_pairs": "pairs of the alignment before",
    "alignment_steps": "its steps",
}
"""The columns of `budget_table`, by the fields of a budget."""


def budget_table(budgets: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """What each row trained on; of the alignment where any row has one."""
    fields = [key for key in BUDGET if not key.startswith("alignment") or any(of[key] for of in budgets.values())]
    yield in_line("trained on", [BUDGET[key] for key in fields])
    yield "|---" * (1 + len(fields)) + "|"
    for name, of in budgets.items():
        yield in_line(name, [f"{of[key]:.3f}" if key == "epochs" else f"{of[key]:,}" for key in fields])


def markdown(
    found: Mapping[str, Sequence[Mapping[str, Any]]], compare_with: Sequence[str], seeds: int, absent: Mapping[str, str]
) -> Iterator[str]:
    """For each protocol a table of the scores, one of the differences to each row of `compare_with`, and one of those
    between rows that stand beside each other."""
    spread = ", mean ± standard deviation" if seeds > 1 else ""
    for protocol, rows in found.items():
        scores = shown(rows)
        yield from heading(f"`{protocol}`, {rows[0]['pairs']} pairs, {counted(seeds)}{spread}, times 100", scores)
        for row in rows:
            yield in_line(row["row"], [mean_text(score, row["scores"].get(score)) for score in scores])
        for name in [name for name in compare_with if name not in absent]:
            yield ""
            yield from heading(f"difference to *{name}* (95 % interval over pairs)", scores)
            for row in rows:
                if row["row"] != name:
                    yield in_line(row["row"], [gain_text(score, row["scores"].get(score), name) for score in scores])
        yield from beside_table(rows, scores)
        yield ""
    yield from (f"- {line}" for line in absent.values())


def beside_table(rows: Sequence[Mapping[str, Any]], scores: Sequence[str]) -> Iterator[str]:
    """How much more each row has than the one that it stands beside; nothing where none does."""
    pairs = [(row, row["beside"]) for row in rows if row.get("beside")]
    if pairs:
        yield ""
        yield from heading("difference on as many steps (95 % interval over pairs)", scores)
    for row, name in pairs:
        cells = [gain_text(score, row["scores"].get(score), name) for score in scores]
        yield in_line(f"{row['row']}, to *{name}*", cells)


def shown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The scores that any row has, in their order; a row of captions that cannot be read has few."""
    return [score for score in SCORES if any(score in row["scores"] for row in rows)]


def heading(corner: str, scores: Sequence[str]) -> Iterator[str]:
    yield in_line(corner, [SCORES[score].heading for score in scores])
    yield "|---" * (1 + len(scores)) + "|"


def in_line(first: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def mean_text(score: str, cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return ""
    text = SCORES[score].text
    return text(cell["mean"]) + (f" ± {text(cell['sd'])}" if cell["sd"] is not None else "")


def gain_text(score: str, cell: Mapping[str, Any] | None, name: str) -> str:
    other = cell["differences"].get(name) if cell else None
    if other is None:
        return ""
    gain, low, high = (SCORES[score].text(other[key], "+") for key in ("gain", "low", "high"))
    return f"{gain} ({low} to {high})"


def plot(found: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """A line of panels for each protocol, a panel for each score: each row's seeds as dots, their mean as a bar."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ablation"
    import matplotlib.pyplot as plt

    across = max(len(shown(rows)) for rows in found.values())
    most = max(len(rows) for rows in found.values())
    size = (2.6 * across + 2.2, (0.32 * most + 1.1) * len(found))
    figure, grid = plt.subplots(len(found), across, figsize=size, sharey="row", squeeze=False)
    for (protocol, rows), panels in zip(found.items(), grid, strict=True):
        places = range(len(rows))[::-1]
        panels[0].set_yticks(list(places), [row["row"] for row in rows])
        panels[0].set_title(protocol, fontsize=10, loc="right", x=-0.04, fontweight="bold")
        scores = shown(rows)
        for panel, score in zip(panels, scores, strict=False):
            bars(panel, score, [row["scores"].get(score) for row in rows], places)
        for panel in panels[len(scores) :]:
            panel.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")  # a long name of a protocol, too
    plt.close(figure)


def bars(panel: Any, score: str, cells: Sequence[Mapping[str, Any] | None], places: Sequence[int]) -> None:
    """A score's panel, times 100; the mean stands right of bar and dots."""
    column = SCORES[score]
    values = [[100 * value for value in cell["values"]] if cell else [] for cell in cells]
    panel.barh(places, [100 * cell["mean"] if cell else 0.0 for cell in cells], height=0.62, color="#9db8c9")
    for place, cell, dots in zip(places, cells, values, strict=True):
        if cell:
            panel.plot(dots, [place] * len(dots), "o", color="#17455c", markersize=3)
            right = max(dots)
            panel.annotate(column.text(cell["mean"]), (right, place), (5, 0), textcoords="offset points",
                           va="center", fontsize=8)  # fmt: skip
    panel.set_title(column.heading, fontsize=10)
    panel.set_xlim(0, 1.22 * max((value for dots in values for value in dots), default=1) or 1)
    panel.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())

"""What each part brings: `make ablation` trains every row of infra/ablation.yaml and compares it with the first.

Each row is an experiment of DVC in a folder of its own (`dvc exp show` lists them, `dvc exp apply` brings one back), so
a row that was run before is restored and not trained again. The table has each row's scores on a protocol, over several
seeds their mean and standard deviation, and the difference to the first row with its interval over pairs. It is printed
and written to benchmarks/results/ablation.json, with a plot beside it.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from components.evaluate.bootstrap import Difference, compare, resampled_scores, rows_of
from components.evaluate.bootstrap import statistics as sums_of
from components.evaluate.metrics import METRICS
from components.files import write_atomic
from components.params import ParamsError, load_params
from infra.seeds import known, over_seeds

ROWS = Path(__file__).with_suffix(".yaml")
RESULTS = Path("benchmarks/results/ablation.json")
PARAMS = Path("params.yaml")
SCORES = ("CIDEr", "change_type_accuracy", "change_exact_accuracy", "no_change_recall", "multi_change_exact_f1")


class Row(NamedTuple):
    """Scores of a row by seed, and its pairs' statistics summed over the seeds."""

    name: str
    changes: Mapping[str, Any]
    scores: dict[str, list[float]]
    pairs: pa.Table  # as scores.parquet


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("seeds", type=int, nargs="?", default=1, help="that of the parameters and those that follow it")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the rows")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the table as JSON; the plot stands beside it")
    args = parser.parse_args(argv)
    try:
        params = load_params(PARAMS)
        named = read_rows(args.rows)
        seeds = range(params.train.seed, params.train.seed + args.seeds)
        protocol = params.promote.protocol
        rows = [run_row(name, changes, seeds, protocol, params.paths.report) for name, changes in named.items()]
    except (ParamsError, OSError) as error:
        print(f"make ablation: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"make ablation: `{' '.join(error.cmd)}` ended with {error.returncode}", file=sys.stderr)
        return error.returncode
    found = table(rows, protocol)
    print("\n".join(lines(found, protocol, len(seeds))))
    facts = {"command": f"make ablation N={args.seeds}", "protocol": protocol, "seeds": list(seeds), "rows": found}
    write_atomic(args.out, json.dumps(facts, indent=1) + "\n")
    plot(found, protocol, args.out.with_suffix(".svg"))
    print(f"written to {args.out} and {args.out.with_suffix('.svg')}")
    return 0


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """What each row changes, by its name.

    Raises:
        ParamsError: the file has no two rows, or one that is no mapping.
    """
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(rows, dict) or len(rows) < 2 or not all(isinstance(changes, dict) for changes in rows.values()):
        raise ParamsError(f"{path}: expected two rows or more, each a name and what it changes")
    return rows


def run_row(name: str, changes: Mapping[str, Any], seeds: Sequence[int], protocol: str, report: Path) -> Row:
    """Run the row with every seed.

    Raises:
        CalledProcessError: an experiment failed.
    """
    tables, scores = [], []
    for seed in seeds:
        experiment = run_experiment(name, changes, seed)
        scores.append(json.loads(read(experiment, report / "metrics.json"))["protocols"][protocol])
        tables.append(rows_of(pq.read_table(pa.BufferReader(read(experiment, report / "scores.parquet"))), protocol))
    values = {score: found for score in SCORES if (found := known([one.get(score) for one in scores]))}
    return Row(name, changes, values, summed(tables))


def run_experiment(row: str, changes: Mapping[str, Any], seed: int) -> str:
    """The name of the row's experiment, run or restored."""
    name = f"ablation-{re.sub('[^a-z0-9]+', '-', row.lower())}-{seed}"
    settings = [f"{key}={value}" for key, value in ({"train.seed": seed} | dict(changes)).items()]
    print(f"{row}, seed {seed}: dvc exp run --name {name} {' '.join(settings)}", flush=True)
    chosen = [part for setting in settings for part in ("-S", setting)]
    dvc("exp", "remove", "--quiet", name, check=False)  # its stages stay in the run cache
    dvc("exp", "run", "--temp", "--name", name, *chosen)
    return name


def dvc(*arguments: str, check: bool = True) -> None:
    out = None if check else subprocess.DEVNULL
    subprocess.run([sys.executable, "-m", "dvc", *arguments], check=check, stdout=out, stderr=out)


def read(experiment: str, path: Path) -> bytes:
    from dvc.api import DVCFileSystem

    with DVCFileSystem(rev=experiment).open(path.as_posix(), "rb") as file:
        return file.read()


def summed(tables: Sequence[pa.Table]) -> pa.Table:
    """The statistics of each pair added up over the seeds: sums over these pairs score all seeds together."""
    first, *others = [one.sort_by("id") for one in tables]
    columns: dict[str, Any] = {"protocol": first["protocol"], "id": first["id"]}
    for column in {of.column: None for of in resampled_scores(METRICS).values()}:
        parts = [sums_of(one, column) for one in (first, *others)]
        if all(part is not None for part in parts):
            columns[column] = np.sum(parts, axis=0).tolist()
    return pa.table(columns)


def table(rows: Sequence[Row], protocol: str) -> list[dict[str, Any]]:
    """Each row with its scores' mean, deviation and difference to the first row."""
    scores = resampled_scores(METRICS)
    found = []
    for row in rows:
        cells = {}
        for score, values in row.scores.items():
            other = compare(row.pairs, rows[0].pairs, protocol, scores[score]) if row is not rows[0] else None
            cells[score] = over_seeds(values) | {"difference": as_json(other)}
        found.append({"row": row.name, "changes": dict(row.changes), "pairs": row.pairs.num_rows, "scores": cells})
    return found


def as_json(other: Difference | None) -> dict[str, float] | None:
    if other is None or other.interval is None:
        return None
    return {"gain": other.gain, "low": other.interval.low, "high": other.interval.high}


def lines(found: Sequence[Mapping[str, Any]], protocol: str, seeds: int) -> list[str]:
    """The table as text; differences are to the first row, with their 95 % intervals over pairs."""
    written = [f"{protocol}, {found[0]['pairs']} pairs, {seeds} seed{'s' * (seeds > 1)}; differences to the first row"]
    for row in found:
        written.append(row["row"])
        for score, cell in row["scores"].items():
            line = f"  {score:<24} {cell['mean']:8.4f}"
            line += f"  sd {cell['sd']:.4f}" if cell["sd"] is not None else ""
            if other := cell["difference"]:
                line += f"   {other['gain']:+.4f}  ({other['low']:+.4f} to {other['high']:+.4f})"
            written.append(line)
    return written


def plot(found: Sequence[Mapping[str, Any]], protocol: str, path: Path) -> None:
    """A panel per score: each row's seeds as dots, their mean as a bar."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ablation"
    import matplotlib.pyplot as plt

    scores = list(found[0]["scores"])
    figure, panels = plt.subplots(1, len(scores), figsize=(3.2 * len(scores), 0.5 * len(found) + 1.6), sharey=True)
    places = range(len(found))[::-1]
    for panel, score in zip(np.atleast_1d(panels), scores, strict=True):
        cells = [row["scores"].get(score) for row in found]
        means = [cell["mean"] if cell else 0.0 for cell in cells]
        panel.barh(places, means, height=0.6, color="#9db8c9")
        for place, cell in zip(places, cells, strict=True):
            if cell:
                panel.plot(cell["values"], [place] * len(cell["values"]), "o", color="#17455c", markersize=4)
                panel.annotate(f"{cell['mean']:.3g}", (cell["mean"], place), (-4, 0), textcoords="offset points",
                               ha="right", va="center", fontsize=8)  # fmt: skip
        panel.set_title(score, fontsize=10)
        panel.set_xlim(left=0)
        panel.set_yticks(list(places), [row["row"] for row in found])
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(protocol, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())

"""Variants x seeds -> runs -> a table: `make experiment NAME=ablation`.

An experiment is a file of benchmarks/experiments. Each variant changes params.yaml and is trained from each seed, as an
experiment of DVC in a folder of its own: `dvc exp show` lists them, and what ran before is restored. The table has the
mean and standard deviation of each score over the seeds, and differences with their intervals over pairs. It is printed
and written to benchmarks/results/NAME.json, with the same as Markdown.

Next to its changes of params.yaml a variant may have two keys:

    synthetic: [minichange_edits]  # datasets of profiles/made-data.yaml whose training pairs train, too
    same_steps_as: M3Diff          # a variant above it, with which it is compared on as many optimizer steps:
                                   # its train.epochs follow from how many pairs it has
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
from pydantic import Field, ValidationError

from benchmarks.experiments import cost, page
from benchmarks.experiments.page import SCORES
from benchmarks.experiments.runs import (
    PARAMS,
    Budget,
    Targets,
    budget_of,
    dvc,
    epochs_for,
    over_seeds,
    reached,
    read,
    run,
)
from m3diff.records.files import sha256_of_folder, write_atomic
from m3diff.scoring.bootstrap import compare, resampled_scores, rows_of
from m3diff.scoring.bootstrap import statistics as sums_of
from m3diff.scoring.metrics import METRICS
from m3diff.settings.load import load_params, resolve
from m3diff.settings.section import ParamsError, Section, closest, explain
from m3diff.settings.tree import Params

HERE, RESULTS = Path(__file__).parent, Path("benchmarks/results")
SYNTHETIC_DATA = Path("profiles/made-data.yaml")
SYNTHETIC, SAME_STEPS, EPOCHS = "synthetic", "same_steps_as", "train.epochs"


class Experiment(Section):
    """A file of benchmarks/experiments."""

    title: str
    note: str = ""  # below the title
    protocols: tuple[str, ...]  # the parts of metrics.json that are compared
    variants: dict[str, dict[str, Any]] = Field(min_length=1)  # what each changes of params.yaml
    seeds: int = Field(default=1, ge=1)  # that of params.yaml and those that follow it
    compare_with: tuple[str, ...] = ()  # variants with which every other is compared
    needs: dict[Path, str] = {}  # folders that git does not hold, and the command that makes each
    curves: bool = False  # of the training, among the results
    equal_seconds: float | None = Field(default=None, ge=0)  # cost is measured; what is slower than the first of
    # `compare_with` by this share is trained once more, on fewer epochs, for as long
    targets: Targets | None = None  # on new scenes


class Run(NamedTuple):
    """A variant that was run with every seed."""

    name: str
    changes: Mapping[str, Any]
    experiments: list[str]  # of DVC, a seed each
    metrics: list[Mapping[str, Any]]  # each seed's scores by protocol
    pairs: dict[str, pa.Table]  # by protocol the statistics of each pair, summed over the seeds
    budget: Budget
    same_steps_as: str | None = None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", help="a file of benchmarks/experiments without .yaml")
    parser.add_argument("--seeds", type=int, help="how many, in place of the file's")
    args = parser.parse_args(argv)
    out = RESULTS / f"{args.name}.json"
    try:
        params = load_params(PARAMS)
        cfg = read_experiment(args.name, args.seeds)
        check_synthetic(cfg, params)
        found = conduct(args.name, cfg, params)
    except (ParamsError, OSError) as error:
        print(f"make experiment: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"make experiment: `{' '.join(error.cmd)}` ended with {error.returncode}", file=sys.stderr)
        return error.returncode
    command = f"make experiment NAME={args.name}" + (f" N={args.seeds}" if args.seeds else "")
    found = {"title": cfg.title, "note": cfg.note, "command": command} | found
    write_atomic(out, json.dumps(found, indent=1) + "\n")
    print(page.write(found, out))
    return 0


# The file


def read_experiment(name: str, seeds: int | None = None) -> Experiment:
    """The experiment of this name, with this number of seeds where one is given.

    Raises:
        ParamsError: there is none, or its file is not valid.
    """
    path = HERE / f"{name}.yaml"
    if not path.is_file():
        raise ParamsError(f"NAME: {closest(name, [each.stem for each in HERE.glob('*.yaml')])}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        cfg = Experiment.model_validate(values | ({"seeds": seeds} if seeds else {}))
    except (yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        raise ParamsError(f"{path}: not a valid YAML mapping: {error}") from error
    except ValidationError as error:
        faults = explain(error, values, Experiment)
        raise ParamsError(f"{path}: {'; '.join(faults)}") from error
    if faults := list(faults_of(cfg)):
        raise ParamsError(f"{path}: {'; '.join(faults)}")
    return cfg


def faults_of(cfg: Experiment) -> Iterator[str]:
    """Faults between fields."""
    for name in cfg.compare_with:
        if name not in cfg.variants:
            yield f"compare_with: {closest(name, cfg.variants)}"
    for number, (name, entry) in enumerate(cfg.variants.items()):
        above, synthetic = list(cfg.variants)[:number], entry.get(SYNTHETIC, [])
        known = resolve(SYNTHETIC_DATA)["augment"] if synthetic else ()
        if not isinstance(synthetic, list) or not set(synthetic) <= set(known):
            wanted = f"expected a list of datasets of {SYNTHETIC_DATA}: {', '.join(known)}"
            yield f"variants.{name}.{SYNTHETIC}: {wanted}; found {synthetic!r}"
        if entry.get(SAME_STEPS, name) not in (*above, name) or entry.get(SAME_STEPS) == name:
            yield f"variants.{name}.{SAME_STEPS}: {closest(entry[SAME_STEPS], above, 'expected a variant above it:')}"


def check_synthetic(cfg: Experiment, params: Params) -> None:
    """Raises ParamsError where params.yaml has a variant's synthetic dataset: the other variants would train on it."""
    for name, entry in cfg.variants.items():
        for dataset in entry.get(SYNTHETIC, ()):
            if dataset in params.ingest.datasets or dataset in params.augment:
                raise ParamsError(
                    f"variants.{name}.{SYNTHETIC}: {PARAMS} has {dataset!r} already, so that variants without it would "
                    "train on it, too; start from parameters without it: `m3diff profile embedded`"
                )


def changes_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A variant's changes of params.yaml, those for its synthetic datasets included. These are made of training pairs
    alone, so that every variant is validated and tested on the same pairs."""
    changes = {key: value for key, value in entry.items() if key not in (SYNTHETIC, SAME_STEPS)}
    for name in entry.get(SYNTHETIC, ()):
        profile = resolve(SYNTHETIC_DATA)
        profile["augment"][name]["source"]["splits"] = ["train"]
        changes[f"+augment.{name}"] = profile["augment"][name]
        changes[f"+ingest.datasets.{name}"] = profile["ingest"]["datasets"][name]
        if name in profile["convert"]["sources"]:
            changes[f"+convert.sources.{name}"] = profile["convert"]["sources"][name]
    return changes


def left_out(cfg: Experiment) -> dict[str, str]:
    """The variants that cannot run here, and why."""
    absent: dict[str, str] = {}
    for name, entry in cfg.variants.items():
        for folder, makes in cfg.needs.items():
            if str(folder) in entry.values() and not folder.is_dir():
                absent[name] = f"left out: {name}: {folder} is not there; make it with `{makes}`"
        if entry.get(SAME_STEPS) in absent:
            absent[name] = f"left out: {name}: {entry[SAME_STEPS]}, with which it is compared, is left out"
    return absent


# The runs


def conduct(experiment: str, cfg: Experiment, params: Params) -> dict[str, Any]:
    """Run every variant with every seed; the results.

    Raises:
        CalledProcessError: a run failed.
        ParamsError: it has not the protocols.
    """
    absent = left_out(cfg)
    print("\n".join(absent.values()), end="\n" * bool(absent), flush=True)
    runs: list[Run] = []
    for name, entry in cfg.variants.items():
        if name not in absent:
            runs.append(run_variant(experiment, name, entry, cfg, params, runs))
    bases = {str(folder): sha256_of_folder(folder) for folder in cfg.needs if folder.is_dir()}
    found: dict[str, Any] = {"seeds": seeds_of(cfg, params), "compare_with": list(cfg.compare_with)}
    found |= {"left_out": absent, "bases": bases}
    if cfg.curves:
        found["curves"] = {one.name: cost.learning_curve(one.experiments[0], params.paths) for one in runs}
    if cfg.equal_seconds is not None:
        found |= measured(experiment, cfg, params, runs)
    if cfg.targets:
        models = dict(zip(found["seeds"], runs[0].experiments, strict=True))
        found["targets"] = reached(cfg.targets, models, params.paths)
    found["budgets"] = {one.name: one.budget._asdict() for one in runs}
    found["protocols"] = {protocol: table(runs, cfg.compare_with, protocol) for protocol in cfg.protocols}
    return found


def seeds_of(cfg: Experiment, params: Params) -> list[int]:
    return list(range(params.train.seed, params.train.seed + cfg.seeds))


def run_variant(
    experiment: str, name: str, entry: Mapping[str, Any], cfg: Experiment, params: Params, before: Sequence[Run]
) -> Run:
    """Run a variant with every seed, or restore it.

    Args:
        before: the variants that ran before it.
    """
    slug = re.sub("[^a-z0-9]+", "-", f"{experiment}-{name}".lower())
    changes, other = changes_of(entry), entry.get(SAME_STEPS)
    folders = [folder for folder in cfg.needs if str(folder) in changes.values()]
    if other:
        steps = next(one.budget.steps for one in before if one.name == other)
        print(f"{name}, its data: ", end="")
        changes[EPOCHS] = epochs_for(steps, f"{slug}-data", changes, folders, params.paths)
    names = []
    for seed in seeds_of(cfg, params):
        print(f"{name}, seed {seed}: ", end="")
        run(f"{slug}-{seed}", {"train.seed": seed} | changes, folders)
        names.append(f"{slug}-{seed}")
    metrics = [json.loads(read(one, params.paths.report / "metrics.json"))["protocols"] for one in names]
    for protocol in cfg.protocols:
        if protocol not in metrics[0]:
            raise ParamsError(f"protocols: {protocol} was not scored; metrics.json has {', '.join(metrics[0])}")
    tables = [pq.read_table(pa.BufferReader(read(one, params.paths.report / "scores.parquet"))) for one in names]
    pairs = {protocol: summed([rows_of(one, protocol) for one in tables]) for protocol in cfg.protocols}
    return Run(name, changes, names, metrics, pairs, budget_of(names[0], params.paths), other)


def measured(experiment: str, cfg: Experiment, params: Params, runs: list[Run]) -> dict[str, Any]:
    """Cost of each variant, and every metric with its interval. Variants that are slower than the first of
    `compare_with` are run once more in as many seconds; these runs are added to `runs`."""
    dvc("repro", "convert")  # the measurements read this checkout's data
    costs = {one.name: cost.measure(one.experiments[0], one.changes, cfg.protocols, params) for one in runs}
    own = costs[cfg.compare_with[0]]["step_s"]
    epochs = {
        name: round(params.train.epochs * own / of["step_s"], 3)
        for name, of in costs.items()
        if of["step_s"] > (1 + (cfg.equal_seconds or 0)) * own
    }
    for name, fewer in epochs.items():
        runs.append(
            run_variant(experiment, f"{name}, equal seconds", cfg.variants[name] | {EPOCHS: fewer}, cfg, params, runs)
        )
    return {
        "epochs": {"equal pairs": params.train.epochs, "equal seconds": epochs},
        "measured": costs,
        "scores": {one.name: with_intervals(one.metrics[0], cfg.protocols) for one in runs},
    }


# The table


def summed(tables: Sequence[pa.Table]) -> pa.Table:
    """The statistics of each pair added up over the seeds: sums over these pairs score all seeds together."""
    first, *others = [one.sort_by("id") for one in tables]
    columns: dict[str, Any] = {"protocol": first["protocol"], "id": first["id"]}
    for column in {of.column: None for of in resampled_scores(METRICS).values()}:
        parts = [part for one in (first, *others) if (part := sums_of(one, column)) is not None]
        if len(parts) == len(tables):
            columns[column] = np.sum(parts, axis=0).tolist()
    return pa.table(columns)


def table(runs: Sequence[Run], compare_with: Sequence[str], protocol: str) -> list[dict[str, Any]]:
    """For each variant each score that every seed has: mean, deviation, values, and the differences to the variants
    that it is compared with."""
    found = []
    for one in runs:
        others = [other for other in runs if other is not one and other.name in (*compare_with, one.same_steps_as)]
        seeds = [metrics[protocol] for metrics in one.metrics]
        cells = {
            score: over_seeds(values)
            | {"differences": {other.name: differ(one, other, protocol, score) for other in others}}
            for score in seeds[0]
            if score not in ("pairs", "published_pairs") and (values := numbers([of.get(score) for of in seeds]))
        }
        told = {"row": one.name, "same_steps_as": one.same_steps_as, "changes": dict(one.changes)}
        found.append(told | {"pairs": one.pairs[protocol].num_rows, "scores": cells})
    return found


def numbers(values: Sequence[Any]) -> list[float]:
    """The values where all are numbers, else none."""
    return [float(value) for value in values] if all(isinstance(value, int | float) for value in values) else []


def differ(one: Run, other: Run, protocol: str, score: str) -> dict[str, float] | None:
    """Gain of the variant in a score; None where no interval can be given, and of scores that are not
    shown."""
    of_sums = resampled_scores(METRICS).get(score)  # of the controls there are no sums over these pairs
    if of_sums is None or score not in SCORES:
        return None
    found = compare(one.pairs[protocol], other.pairs[protocol], protocol, of_sums)
    if found is None or (interval := found[2]) is None:
        return None
    return {"gain": found[0] - found[1], "low": interval.low, "high": interval.high}


def with_intervals(metrics: Mapping[str, Any], protocols: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By protocol the metrics that were computed: `score`, `low` and `high` (None for too few pairs)."""
    found: dict[str, dict[str, Any]] = {protocol: {} for protocol in protocols}
    for protocol, shown in found.items():
        scores = metrics[protocol]
        for name in page.METRICS:
            if scores.get(name) is not None:
                bounds = scores["intervals"].get(name) or {"low": None, "high": None}
                shown[name] = {"score": scores[name]} | bounds
    return found


if __name__ == "__main__":
    sys.exit(main())

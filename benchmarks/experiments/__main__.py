"""Train the variants of an experiment with several seeds and compare them: `make experiment NAME=ablation`.

An experiment is a file in benchmarks/experiments with several variants. A variant is a set of changes to params.yaml.
It is trained with each seed, as a DVC experiment in a separate folder. `dvc exp show` lists the DVC experiments, and
stages that have already run are restored from DVC's cache. The table shows the mean and standard deviation of each
score over the seeds, and differences between variants with confidence intervals over pairs. The table is printed and
written to benchmarks/results as NAME.json and NAME.md.

In addition to changes to params.yaml, a variant may have two keys:

    synthetic: [minichange_edits]  # also train on the training pairs of these datasets in profiles/made-data.yaml
    same_steps_as: M3Diff          # compare with this earlier variant after the same number of optimizer steps, by
                                   # setting train.epochs according to the number of pairs
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
    check_targets,
    dvc,
    epochs_for,
    over_seeds,
    read,
    run_experiment,
)
from m3diff.records.errors import Fault, ParamsError, cause_of
from m3diff.records.files import sha256_of_folder, write_atomic
from m3diff.runtime import prepare
from m3diff.scoring.bootstrap import compare, resampled_scores, rows_of
from m3diff.scoring.bootstrap import statistics as statistics_of_pairs
from m3diff.scoring.metrics import METRICS
from m3diff.scoring.retention import rows_with_base_answers
from m3diff.settings.load import complete_values, load_params
from m3diff.settings.section import Section, faults_of_validation_error, suggest_name
from m3diff.settings.tree import Params

FOLDER = Path(__file__).parent
RESULTS = Path("benchmarks/results")
SYNTHETIC_DATA = Path("profiles/made-data.yaml")
SYNTHETIC = "synthetic"
SAME_STEPS = "same_steps_as"
EPOCHS = "train.epochs"


class Experiment(Section):
    """The settings in an experiment file."""

    title: str
    """Title of the page."""

    note: str = ""
    """Text below the title."""

    protocols: tuple[str, ...]
    """Protocols whose scores are compared. A protocol is a set of test pairs with the rules for scoring them, such as
    `minichange/total`."""

    variants: dict[str, dict[str, Any]] = Field(min_length=1)
    """Maps the name of each variant to its changes to params.yaml."""

    seeds: int = Field(default=1, ge=1)
    """Number of seeds. The first seed is the one in params.yaml, and the other seeds are the next whole numbers."""

    compare_with: tuple[str, ...] = ()
    """Names of the reference variants, with which all other variants are compared."""

    needs: dict[Path, str] = {}
    """Folders that variants use and git does not track, each with the command that creates it."""

    curves: bool = False
    """Whether to include the learning curves in the results."""

    equal_seconds: float | None = Field(default=None, ge=0)
    """If set, the cost of each variant is measured. The value is the share by which a variant's training step may be
    slower than that of the first variant in `compare_with`. A slower variant is trained a second time for fewer epochs,
    so that it takes as much time as the first variant in `compare_with`."""

    targets: Targets | None = None
    """Targets for the first variant's scores on new scenes."""


class VariantRun(NamedTuple):
    """A variant that has been run with every seed.

    Attributes:
        changes: changes to params.yaml.
        experiments: name of the DVC experiment for each seed.
        metrics: for each seed, the scores by protocol.
        pairs: for each protocol, a table with the statistics of each pair, summed over the seeds.
        budget: the amount of data and the number of steps.
        same_steps_as: name of the variant that was trained for the same number of optimizer steps, or None.
        of_base: for each protocol of a retention dataset, the scores and pairs of the base, which is not trained.
    """

    name: str
    changes: Mapping[str, Any]
    experiments: list[str]
    metrics: list[Mapping[str, Any]]
    pairs: dict[str, pa.Table]
    budget: Budget
    same_steps_as: str | None = None
    of_base: Mapping[str, "BaseAnswers"] = {}


class BaseAnswers(NamedTuple):
    """The answers of the base to the records of a retention dataset: its scores, and the statistics of each record."""

    scores: Mapping[str, float]
    pairs: pa.Table


def main(argv: list[str] | None = None) -> int:
    """Run an experiment, write the results and print them as a page. Return the exit code."""
    prepare()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", help="name of a file in benchmarks/experiments, without .yaml")
    parser.add_argument("--seeds", type=int, help="number of seeds; default: as in the file")
    args = parser.parse_args(argv)
    out = RESULTS / f"{args.name}.json"
    try:
        params = load_params(PARAMS)
        cfg = read_experiment(args.name, args.seeds)
        check_synthetic(cfg, params)
        results = run_variants(args.name, cfg, params)
    except (ParamsError, OSError) as error:
        print(f"make experiment: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        fault = Fault("experiments.command_failed", command=" ".join(error.cmd), exit_code=error.returncode)
        print(f"make experiment: {fault}", file=sys.stderr)
        return error.returncode
    command = f"make experiment NAME={args.name}" + (f" N={args.seeds}" if args.seeds else "")
    results = {"title": cfg.title, "note": cfg.note, "command": command} | results
    write_atomic(out, json.dumps(results, indent=1) + "\n")
    print(page.write(results, out))
    return 0


# The file


def read_experiment(name: str, seeds: int | None = None) -> Experiment:
    """Return the experiment with this name.

    Args:
        seeds: the number of seeds. If None, use the number in the file.

    Raises:
        ParamsError: no experiment has this name, or its file is invalid.
    """
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        hint = suggest_name(name, [file.stem for file in FOLDER.glob("*.yaml")])
        raise ParamsError("experiments.unknown_experiment", value=name, hint=hint)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        cfg = Experiment.model_validate(values | ({"seeds": seeds} if seeds else {}))
    except (yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        raise ParamsError("experiments.not_a_mapping", path=path, cause=cause_of(error)) from error
    except ValidationError as error:
        faults = faults_of_validation_error(error, values, Experiment)
        raise ParamsError("experiments.invalid_file", path=path, faults=faults) from error
    if faults_of_fields := list(faults_of(cfg)):
        raise ParamsError("experiments.invalid_file", path=path, faults=faults_of_fields)
    return cfg


def faults_of(cfg: Experiment) -> Iterator[Fault]:
    """Yield the faults that validation of single fields cannot find, such as references to missing variants."""
    for name in cfg.compare_with:
        if name not in cfg.variants:
            hint = suggest_name(name, cfg.variants)
            yield Fault("experiments.unknown_variant", key="compare_with", value=name, hint=hint)
    for number, (name, entry) in enumerate(cfg.variants.items()):
        earlier_names = list(cfg.variants)[:number]
        synthetic = entry.get(SYNTHETIC, [])
        datasets = complete_values(SYNTHETIC_DATA)["augment"] if synthetic else ()
        if not isinstance(synthetic, list) or not set(synthetic) <= set(datasets):
            key = f"variants.{name}.{SYNTHETIC}"
            names = list(datasets)
            yield Fault("experiments.not_made_data", key=key, value=synthetic, file=SYNTHETIC_DATA, names=names)
        if entry.get(SAME_STEPS, name) not in (*earlier_names, name) or entry.get(SAME_STEPS) == name:
            key = f"variants.{name}.{SAME_STEPS}"
            code = "experiments.not_a_variant_above" if earlier_names else "experiments.no_variant_above"
            yield Fault(code, key=key, value=entry[SAME_STEPS], names=earlier_names)


def check_synthetic(cfg: Experiment, params: Params) -> None:
    """Check that params.yaml does not contain the synthetic datasets of any variant.

    Otherwise, variants without these datasets would also be trained on them.

    Raises:
        ParamsError: params.yaml already contains such a dataset.
    """
    for name, entry in cfg.variants.items():
        for dataset in entry.get(SYNTHETIC, ()):
            if dataset in params.ingest.datasets or dataset in params.augment:
                key = f"variants.{name}.{SYNTHETIC}"
                raise ParamsError("experiments.made_data_in_params", key=key, value=dataset, file=PARAMS)


def changes_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a variant's changes to params.yaml. Each synthetic dataset is expanded into the entries that it needs.

    Synthetic datasets are made only from training pairs, so all variants are validated and tested on the same pairs.
    """
    changes = {key: value for key, value in entry.items() if key not in (SYNTHETIC, SAME_STEPS)}
    for name in entry.get(SYNTHETIC, ()):
        profile = complete_values(SYNTHETIC_DATA)
        profile["augment"][name]["source"]["splits"] = ["train"]
        changes[f"+augment.{name}"] = profile["augment"][name]
        changes[f"+ingest.datasets.{name}"] = profile["ingest"]["datasets"][name]
        if name in profile["convert"]["sources"]:
            changes[f"+convert.sources.{name}"] = profile["convert"]["sources"][name]
    return changes


def find_missing_variants(cfg: Experiment) -> dict[str, str]:
    """Return the names of the variants that cannot run on this machine, each with the reason."""
    absent: dict[str, str] = {}
    for name, entry in cfg.variants.items():
        for folder, command in cfg.needs.items():
            if str(folder) in entry.values() and not folder.is_dir():
                absent[name] = f"left out: {name}: {folder} does not exist; create it with `{command}`"
        if entry.get(SAME_STEPS) in absent:
            absent[name] = f"left out: {name}: its reference {entry[SAME_STEPS]} is left out"
    return absent


# The runs


def run_variants(experiment: str, cfg: Experiment, params: Params) -> dict[str, Any]:
    """Run every variant of an experiment with every seed and return the results.

    Raises:
        CalledProcessError: a run failed.
        ParamsError: a run did not compute scores for one of the protocols.
    """
    absent = find_missing_variants(cfg)
    for reason in absent.values():
        print(reason, flush=True)
    runs: list[VariantRun] = []
    for name, entry in cfg.variants.items():
        if name not in absent:
            runs.append(run_variant(experiment, name, entry, cfg, params, runs))
    bases = {str(folder): sha256_of_folder(folder) for folder in cfg.needs if folder.is_dir()}
    seeds = seeds_of(cfg, params)
    results: dict[str, Any] = {
        "seeds": seeds,
        "compare_with": list(cfg.compare_with),
        "left_out": absent,
        "bases": bases,
    }
    if cfg.curves:
        results["curves"] = {run.name: cost.learning_curve(run.experiments[0], params.paths) for run in runs}
    if cfg.equal_seconds is not None:
        results |= measure_costs(experiment, cfg, params, runs)
    if cfg.targets:
        models = dict(zip(seeds, runs[0].experiments, strict=True))
        results["targets"] = check_targets(cfg.targets, models, params.paths)
    results["budgets"] = {run.name: run.budget._asdict() for run in runs}
    results["protocols"] = {protocol: comparison_rows(runs, cfg.compare_with, protocol) for protocol in cfg.protocols}
    return results


def seeds_of(cfg: Experiment, params: Params) -> list[int]:
    """Return the seeds of the experiment, starting with the seed in params.yaml."""
    return list(range(params.train.seed, params.train.seed + cfg.seeds))


def run_variant(
    experiment: str,
    name: str,
    entry: Mapping[str, Any],
    cfg: Experiment,
    params: Params,
    earlier_runs: Sequence[VariantRun],
) -> VariantRun:
    """Run a variant with every seed. Stages that have already run are restored from DVC's cache.

    Args:
        entry: the variant's entry in the experiment file.
        earlier_runs: the variants that have already been run.
    """
    slug = re.sub("[^a-z0-9]+", "-", f"{experiment}-{name}".lower())
    changes = changes_of(entry)
    same_steps_as = entry.get(SAME_STEPS)
    folders = [folder for folder in cfg.needs if str(folder) in changes.values()]
    if same_steps_as:
        steps = next(earlier.budget.steps for earlier in earlier_runs if earlier.name == same_steps_as)
        print(f"{name}, its data: ", end="")
        changes[EPOCHS] = epochs_for(steps, f"{slug}-data", changes, folders, params.paths)
    experiments = []
    for seed in seeds_of(cfg, params):
        print(f"{name}, seed {seed}: ", end="")
        run_experiment(f"{slug}-{seed}", {"train.seed": seed} | changes, folders)
        experiments.append(f"{slug}-{seed}")
    reports = []
    tables = []
    for seed_experiment in experiments:
        reports.append(json.loads(read(seed_experiment, params.paths.report / "metrics.json")))
        tables.append(pq.read_table(pa.BufferReader(read(seed_experiment, params.paths.report / "scores.parquet"))))
    metrics = [report["protocols"] | scores_of_retention(report, "model") for report in reports]
    for protocol in cfg.protocols:
        if protocol not in metrics[0]:
            names = list(metrics[0])
            raise ParamsError("experiments.protocol_not_scored", key="protocols", value=protocol, names=names)
    pairs = {}
    of_base = {}
    base_scores = scores_of_retention(reports[0], "base")
    for protocol in cfg.protocols:
        pairs[protocol] = sum_over_seeds([rows_of(table, protocol) for table in tables])
        if protocol in base_scores:
            rows_of_base = [rows_with_base_answers(table, protocol) for table in tables]
            of_base[protocol] = BaseAnswers(base_scores[protocol], sum_over_seeds(rows_of_base))
    return VariantRun(
        name=name,
        changes=changes,
        experiments=experiments,
        metrics=metrics,
        pairs=pairs,
        budget=budget_of(experiments[0], params.paths),
        same_steps_as=same_steps_as,
        of_base=of_base,
    )


def scores_of_retention(report: Mapping[str, Any], model: Literal["model", "base"]) -> dict[str, dict[str, float]]:
    """Return the scores of the trained model or of its base on retention datasets, by protocol.

    Args:
        report: content of metrics.json.
        model: which of the two models.
    """
    scores_by_protocol = {}
    for protocol, values in report.get("retention", {}).items():
        scores_by_protocol[protocol] = {
            name: score[model] for name, score in values.items() if isinstance(score, dict) and model in score
        }
    return scores_by_protocol


def measure_costs(experiment: str, cfg: Experiment, params: Params, runs: list[VariantRun]) -> dict[str, Any]:
    """Measure the cost of each variant. Return the costs, and every metric with its confidence interval.

    Variants that are slower than the first variant in `compare_with` (see `equal_seconds`) are run a second time for
    fewer epochs, so that they take as many seconds as that variant. The second runs are added to `runs`.
    """
    dvc("repro", "convert")  # the measurements read this checkout's data
    costs = {run.name: cost.measure(run.experiments[0], run.changes, cfg.protocols, params) for run in runs}
    reference_s = costs[cfg.compare_with[0]]["step_s"]
    longest_s = (1 + (cfg.equal_seconds or 0)) * reference_s
    epochs = {}
    for name, variant_cost in costs.items():
        step_s = variant_cost["step_s"]
        if step_s > longest_s:
            epochs[name] = round(params.train.epochs * reference_s / step_s, 3)
    for name, fewer_epochs in epochs.items():
        entry = cfg.variants[name] | {EPOCHS: fewer_epochs}
        runs.append(run_variant(experiment, f"{name}, equal seconds", entry, cfg, params, runs))
    return {
        "epochs": {"equal pairs": params.train.epochs, "equal seconds": epochs},
        "measured": costs,
        "scores": {run.name: scores_with_intervals(run.metrics[0], cfg.protocols) for run in runs},
    }


# The table


def sum_over_seeds(tables: Sequence[pa.Table]) -> pa.Table:
    """Return a table with the statistics of each pair, summed over the seeds.

    Scores that combine all seeds are computed from this table.

    Args:
        tables: the statistics of each pair for each seed.
    """
    sorted_tables = [table.sort_by("id") for table in tables]
    columns: dict[str, Any] = {"protocol": sorted_tables[0]["protocol"], "id": sorted_tables[0]["id"]}
    for statistic in resampled_scores(METRICS).values():
        column = statistic.column
        if column in columns:
            continue  # several scores use the same column
        statistics = [statistics_of_pairs(table, column) for table in sorted_tables]
        if all(values is not None for values in statistics):
            columns[column] = np.sum(statistics, axis=0).tolist()
    return pa.table(columns)


def comparison_rows(runs: Sequence[VariantRun], compare_with: Sequence[str], protocol: str) -> list[dict[str, Any]]:
    """Return a row for each variant, with all scores that are available for every seed.

    A score has a mean and standard deviation over the seeds, the value for each seed, and the differences from the
    reference variants. For a protocol of a retention dataset, the first row is the base, with which every variant is
    compared.
    """
    rows = []
    answers_of_base = runs[0].of_base.get(protocol)
    if answers_of_base is not None:
        base = runs[0]._replace(
            name=page.BASE,
            changes={},
            metrics=[{protocol: answers_of_base.scores}] * len(runs[0].metrics),
            pairs={protocol: answers_of_base.pairs},
            same_steps_as=None,
        )
        runs = [base, *runs]
    for run in runs:
        reference_names = (page.BASE, *compare_with, run.same_steps_as)
        references = [reference for reference in runs if reference is not run and reference.name in reference_names]
        seed_scores = [metrics[protocol] for metrics in run.metrics]
        cells = {}
        for score in seed_scores[0]:
            values = floats_or_nothing([scores.get(score) for scores in seed_scores])
            if score not in ("pairs", "published_pairs") and values:
                differences = {}
                for reference in references:
                    differences[reference.name] = gain_over_reference(run, reference, protocol, score)
                cells[score] = over_seeds(values) | {"differences": differences}
        rows.append(
            {
                "row": run.name,
                "same_steps_as": run.same_steps_as,
                "changes": dict(run.changes),
                "pairs": run.pairs[protocol].num_rows,
                "scores": cells,
            }
        )
    return rows


def floats_or_nothing(values: Sequence[Any]) -> list[float]:
    """Return the values as floats if all of them are numbers, otherwise an empty list."""
    if not all(isinstance(value, int | float) for value in values):
        return []
    return [float(value) for value in values]


def gain_over_reference(run: VariantRun, reference: VariantRun, protocol: str, score: str) -> dict[str, float] | None:
    """Return a variant's gain over a reference variant in a score, with the gain's confidence interval.

    The result is None for scores that the page does not show and for scores that do not have an interval.
    """
    statistic = resampled_scores(METRICS).get(score)  # None for scores of the controls, which are not sums over pairs
    if statistic is None or score not in SCORES:
        return None
    comparison = compare(run.pairs[protocol], reference.pairs[protocol], protocol, statistic)
    if comparison is None:
        return None
    run_score, reference_score, interval = comparison
    if interval is None:
        return None
    return {"gain": run_score - reference_score, "low": interval.low, "high": interval.high}


def scores_with_intervals(metrics: Mapping[str, Any], protocols: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return each protocol's metrics as dictionaries with the keys `score`, `low` and `high`.

    `low` and `high` are the bounds of the confidence interval, or None if there are too few pairs for an interval.
    """
    by_protocol = {}
    for protocol in protocols:
        scores = metrics[protocol]
        cells = {}
        for name in page.METRICS:
            if scores.get(name) is not None:
                bounds = scores["intervals"].get(name) or {"low": None, "high": None}
                cells[name] = {"score": scores[name]} | bounds
        by_protocol[protocol] = cells
    return by_protocol


if __name__ == "__main__":
    sys.exit(main())

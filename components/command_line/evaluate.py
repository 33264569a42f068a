"""`m3diff evaluate`: score the predictions of the run or of any model, and write the report."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from m3diff.command_line.arguments import FOLDER
from m3diff.command_line.command import Command, argument
from m3diff.command_line.train import describe_training_run
from m3diff.records.errors import ParamsError

if TYPE_CHECKING:
    from m3diff.scoring.results import RetentionScores
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.settings.rules import check_paths

    check_paths(params, "evaluate")
    if args.model is not None:
        _evaluate_model(params, args)
        return
    if args.out or args.base:
        raise ParamsError("command.output_of_no_model")
    _evaluate_run(params)


def _evaluate_model(params: Params, args: argparse.Namespace) -> None:
    from m3diff.commands.rescore import score_model

    folder, scores = score_model(params, args.model, args.base or params.train.base, args.out)
    _print_scores(scores, folder / "report")


def _evaluate_run(params: Params) -> None:
    """Evaluate the predictions of the current run, and add the scores to the run's entry in MLflow."""
    from m3diff.registry.tracking import log_evaluation
    from m3diff.report.origin import read_origin, write_creation_note
    from m3diff.scoring.results import headline_scores
    from m3diff.stages.evaluate.stage import evaluate

    paths = params.paths
    origin = read_origin(paths.model)
    report = evaluate(
        params.evaluate, params.compute, paths.records, paths.clean, paths.predictions, paths.report, origin
    )
    write_creation_note(paths.report)
    _print_scores(headline_scores(report), paths.report)
    _print_retention(report.retention)
    log_evaluation(describe_training_run(params), paths.model, paths.report / "metrics.json")


def _print_scores(scores: Mapping[str, Mapping[str, float]], report_folder: Path) -> None:
    for protocol, values in scores.items():
        print(f"{protocol}, times 100: " + ", ".join(f"{name} {value:.1f}" for name, value in values.items()))
    print(f"report: {report_folder / 'report.html'}")


def _print_retention(retention: Mapping[str, RetentionScores]) -> None:
    """Print the first score of each retention dataset: what the model keeps of what its base could do."""
    for protocol, scores in retention.items():
        for name, score in list(scores.scores.items())[:1]:
            values = f"{name} {100 * score.model:.1f} (base {100 * score.base:.1f})"
            print(f"{protocol}, kept of the base, times 100: {values}")


COMMAND = Command(
    run=_run,
    reads=(
        "data/02_records (paths.records), data/03_clean (paths.clean), data/06_predictions (paths.predictions), and "
        "the curves and report of data/05_model (paths.model)"
    ),
    writes="report.html, scores and tables, data/07_report (paths.report); scores in MLflow (register.tracking_uri)",
    needs="`m3diff predict`; Java for METEOR and SPICE",
    sections="evaluate and compute",
    arguments=(
        argument(
            "--model", help="caption and score with this version or checkpoint folder; the run's files stay as is"
        ),
        argument("--base", **FOLDER, help="with --model: base model of adapters; default: train.base"),
        argument("--out", **FOLDER, help="with --model: folder for captions and report"),
    ),
    examples=(
        "m3diff evaluate",
        "m3diff evaluate --model champion",
        "m3diff evaluate --model 12 --out runs/12",
    ),
)

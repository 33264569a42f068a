"""`m3diff convert`: turn clean records into the mixture, the samples for training and testing."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from m3diff.command_line.command import Command
from m3diff.command_line.report_lines import format_report

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.settings.rules import check_paths, missing_inputs

    check_paths(params, "convert")
    from m3diff.stages.convert.stage import convert

    report = convert(params.convert, params.ingest.datasets, params.paths.clean, params.paths.mixture)
    print(format_report(report))
    # `dvc repro` stops before the training stage if a file is missing, but does not say what to do
    for fault in missing_inputs(params, "train"):
        print(f"convert: the training cannot start yet: {fault}", file=sys.stderr)


COMMAND = Command(
    run=_run,
    reads="data/03_clean (paths.clean) and the questions, profiles/questions.yaml (convert.questions)",
    writes="samples by split and a report, data/04_mixture (paths.mixture)",
    needs="`m3diff validate`",
    sections="convert and ingest.datasets",
    examples=("m3diff convert",),
)

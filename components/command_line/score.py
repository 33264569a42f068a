"""`m3diff score`: score captions from any source with a benchmark's protocol."""

from __future__ import annotations

import argparse
from pathlib import Path

from m3diff.command_line.arguments import FOLDER, JSON
from m3diff.command_line.command import Command, argument, flag
from m3diff.command_line.exit_codes import DATA_REFUSED
from m3diff.records.errors import ParamsError


def _run(args: argparse.Namespace) -> int:
    if args.check_spice:
        return _check_spice(args)
    if args.predictions is None:
        raise ParamsError("command.no_captions")
    from m3diff.commands import score

    report = score.score(
        args.predictions,
        args.benchmark,
        args.protocol,
        args.references,
        args.data,
        args.spice_dir,
        args.allow_faults,
    )
    print(report.model_dump_json(indent=2) if args.json else "\n".join(report.lines()))
    return 0


def _check_spice(args: argparse.Namespace) -> int:
    from m3diff.scoring.metrics.spice import check_spice

    lines, is_working = check_spice(args.spice_dir)
    print("\n".join(lines))
    return 0 if is_working else DATA_REFUSED


COMMAND = Command(
    run=_run,
    arguments=(
        argument(
            "predictions", type=Path, nargs="?", help="COCO results or {id: caption}: .json, .jsonl, .csv or .tsv"
        ),
        argument("--benchmark", metavar="B", help="such as spot_the_diff; any other word lists all"),
        argument("--protocol", metavar="P", help="one of the benchmark's protocols; any other word lists all"),
        argument(
            "--references", type=Path, metavar="FILE", help="a table of your pairs or COCO captions to score against"
        ),
        argument("--data", **FOLDER, help="the dataset's annotation files (no images needed), or records from ingest"),
        argument("--spice-dir", **FOLDER, help="folder of the jars of SPICE; adds it"),
        flag("--check-spice", "show what SPICE needs, what is missing and where to put it"),
        flag("--allow-faults", "score despite faults, and report them"),
        JSON,
    ),
    examples=(
        "m3diff score captions.json --benchmark spot_the_diff --data spot-the-diff/",
        "m3diff score captions.csv --references references.json --json",
        "m3diff score answers.json --data data/02_records/my-questions",
    ),
    extra="score",
    parameters="none",
)

"""`m3diff ingest`: read raw datasets into records."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from m3diff.command_line.arguments import find_entry
from m3diff.command_line.command import Command, argument
from m3diff.command_line.report_lines import format_report

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.settings.rules import check_paths

    entries = params.ingest.datasets
    if args.name is not None:
        entries = {args.name: find_entry("ingest.datasets", entries, args.name)}
    check_paths(params, *(f"ingest@{name}" for name in entries))
    from m3diff.stages.ingest.stage import ingest

    for name, entry in entries.items():
        report = ingest(name, entry, params.compute.image_cache, params.paths.records)
        print(format_report(report))


COMMAND = Command(
    run=_run,
    reads="raw datasets, such as data/01_raw/minichange (ingest.datasets.minichange.root)",
    writes="records by dataset and a report, data/02_records (paths.records)",
    needs="the datasets fetched or generated; `m3diff data check FOLDER` checks your own data first",
    sections="ingest.datasets",
    arguments=(argument("name", nargs="?", help="an entry of `ingest.datasets`; default: all"),),
    examples=("m3diff ingest", "m3diff ingest minichange"),
)

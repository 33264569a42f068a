"""`m3diff validate`: check records and images."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from m3diff.command_line.command import Command
from m3diff.command_line.report_lines import format_report

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.stages.validate.stage import validate

    report = validate(
        params.validate_,
        params.ingest.datasets,
        params.compute.image_cache,
        params.paths.records,
        params.paths.clean,
        params.promote.protocol,
    )
    print(format_report(report))
    print(f"validate: the page: {params.paths.clean / 'docs' / 'index.html'}")


COMMAND = Command(
    run=_run,
    reads="data/02_records (paths.records) and the images that they name",
    writes="clean records, the quarantine, a page and a report, data/03_clean (paths.clean)",
    needs="`m3diff ingest`",
    sections="validate and ingest.datasets",
    examples=("m3diff validate",),
)

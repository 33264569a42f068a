"""`m3diff augment`: generate synthetic pairs from a raw dataset."""

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

    settings = find_entry("augment", params.augment, args.name)
    check_paths(params, f"augment@{args.name}")
    from m3diff.stages.augment.stage import augment

    report = augment(args.name, settings, params.compute)
    print(format_report(report))
    for reason in report.reasons():
        print(f"augment: rejected: {reason}")


COMMAND = Command(
    run=_run,
    reads="the raw dataset augment.<name>.source.root, and the models that the entry names",
    writes="images and captions (augment.<name>.root), with a report beside them",
    needs="the source fetched or generated; docs/made-data.md has entries to copy",
    sections="augment.<name> and compute",
    arguments=(argument("name", help="an entry of the section `augment`"),),
    examples=("m3diff --params profiles/made-data.yaml augment minichange_edits",),
    extra="augment",
)

"""`m3diff export-llava`: write the mixture as LLaVA records."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from m3diff.command_line.arguments import ALLOW_UNLICENSED
from m3diff.command_line.command import Command, argument, flag

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.commands.export.llava import export_llava
    from m3diff.settings.rules import entries_by_original_reader

    export_llava(
        entries_by_original_reader(params), params.paths.mixture, args.out, args.allow_unlicensed, args.absolute
    )


COMMAND = Command(
    run=_run,
    arguments=(
        argument("out", type=Path, help="folder to write"),
        flag("--absolute", "absolute image paths; default: relative to the project"),
        ALLOW_UNLICENSED,
    ),
    examples=("m3diff export-llava llava/ --absolute",),
)

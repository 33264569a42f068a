"""`m3diff export`: copy the trained model, for this project or for others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from m3diff.command_line.arguments import ALLOW_UNLICENSED
from m3diff.command_line.command import Command, argument, flag

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    if args.hub:
        from m3diff.commands.export.hub import export_hub

        for notice in export_hub(params, args.out, args.allow_unlicensed):
            print(notice)
        return
    from m3diff.models.checkpoint import export_checkpoint

    export_checkpoint(params.paths.model / "checkpoint", args.out, args.adapters)


COMMAND = Command(
    run=_run,
    arguments=(
        argument("out", type=Path, help="folder to write"),
        [
            flag("--adapters", "only the trained weights, not merged into the base"),
            flag("--hub", "a folder that others load without this project, with code and model card"),
        ],
        ALLOW_UNLICENSED,
    ),
    examples=("m3diff export shared/model", "m3diff export shared/hub --hub", "m3diff export small --adapters"),
)

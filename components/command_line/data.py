"""`m3diff data`: check a dataset's folder, or compute statistics of the clean records."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from m3diff.command_line.arguments import FOLDER
from m3diff.command_line.command import Command, argument
from m3diff.command_line.exit_codes import DATA_REFUSED
from m3diff.datasets import DATASETS
from m3diff.records.errors import ParamsError

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> int:
    if args.action == "statistics":
        return _write_statistics(params)
    if args.root is None:
        raise ParamsError("check.no_folder_named")
    return _check_folder(params, args)


def _write_statistics(params: Params) -> int:
    from m3diff.commands.inspect.statistics import write_statistics

    write_statistics(params.paths.clean)
    print(f"written to {params.paths.clean / 'statistics.html'}")
    return 0


def _check_folder(params: Params, args: argparse.Namespace) -> int:
    from m3diff.commands.inspect import StageLimits, check

    stage_limits = StageLimits(
        limits=params.validate_, image_cache=params.compute.image_cache, protocol=params.promote.protocol
    )
    lines, is_sound = check(args.root, params.ingest.datasets, args.reader, stage_limits)
    print("\n".join(lines))
    return 0 if is_sound else DATA_REFUSED


COMMAND = Command(
    run=_run,
    arguments=(
        argument(
            "action", metavar="ACTION", choices=lambda: ("check", "statistics"), help="check FOLDER, or statistics"
        ),
        argument("root", **FOLDER, nargs="?", help="folder of one dataset, to check"),
        argument("--reader", metavar="NAME", choices=lambda: DATASETS, help="its layout, if not recognised: {choices}"),
    ),
    examples=(
        "m3diff data check data/01_raw/mine",
        "m3diff data check mine --reader pairs",
        "m3diff data statistics",
    ),
    parameters="optional",
)

"""`m3diff prune`: remove old versions, weights, branches and data."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from m3diff.command_line.arguments import parse_count
from m3diff.command_line.command import Command, argument, flag
from m3diff.command_line.exit_codes import USAGE
from m3diff.records.errors import Fault

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> int:
    from m3diff.registry.prune import prune

    removed_versions, lines = prune(params.register_, args.keep, args.yes and not args.dry_run)
    print("\n".join(lines))
    if not removed_versions or args.dry_run or args.yes:
        return 0
    print(f"m3diff prune: {Fault('command.prune_not_confirmed')}", file=sys.stderr)
    return USAGE


COMMAND = Command(
    run=_run,
    arguments=(
        argument(
            "--keep", type=parse_count, default=5, metavar="N", help="how many of the newest to keep (default: 5)"
        ),
        flag("--dry-run", "only show what would be removed"),
        flag("--yes", "remove it"),
    ),
    examples=("m3diff prune --keep 5 --dry-run", "m3diff prune --keep 5 --yes"),
)

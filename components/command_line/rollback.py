"""`m3diff rollback`: restore the previous champion."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from m3diff.command_line.command import Command, argument

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.registry.promote import rollback

    print(rollback(params, args.to, args.why))


COMMAND = Command(
    run=_run,
    arguments=(
        argument("--to", type=int, metavar="VERSION", help="the version to restore; default: the previous champion"),
        argument("--why", default="", metavar="TEXT", help="the reason, kept in the record"),
    ),
    examples=(
        "m3diff rollback --why 'worse on the new camera'",
        "m3diff rollback --to 9 --why 'requested by the team'",
    ),
)

"""`m3diff promote`: make the challenger the champion if it is significantly better."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from m3diff.command_line.command import Command, argument, flag
from m3diff.command_line.exit_codes import GATE_REFUSED

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> int:
    from m3diff.commands.rescore import rescore
    from m3diff.registry.promote import promote

    decision = promote(params, rescore, args.version, args.again)
    print(decision)
    return GATE_REFUSED if decision.outcome == "refused" else 0


COMMAND = Command(
    run=_run,
    reads="the scores, pair by pair, of the challenger and the champion, in MLflow (register.tracking_uri)",
    writes="the aliases champion and previous, and the decision, in the branch runs/history",
    needs="`m3diff register`",
    sections="promote and register",
    arguments=(
        argument("--version", type=int, metavar="N", help="the version to test; default: the challenger"),
        flag("--again", "even if the version was champion and was rolled back"),
    ),
    examples=("m3diff promote", "m3diff promote --version 12"),
)

"""`m3diff lineage`: show and verify how the scores of a version follow from the raw data, step by step."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from m3diff.command_line.command import Command, argument
from m3diff.command_line.exit_codes import DATA_REFUSED

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> int:
    from m3diff.registry.verification import all_ok, verify_lineage

    checks = verify_lineage(params.register_, args.version)
    print("\n".join(str(check) for check in checks))
    return 0 if all_ok(checks) else DATA_REFUSED


COMMAND = Command(
    run=_run,
    arguments=(argument("version", help="number or alias, such as champion"),),
    examples=("m3diff lineage champion",),
)

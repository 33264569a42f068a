"""`m3diff restore`: restore the data, parameters and checkpoint of a version."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from m3diff.command_line.arguments import FOLDER
from m3diff.command_line.command import Command, argument
from m3diff.command_line.exit_codes import DATA_REFUSED

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> int:
    from m3diff.registry.restore import restore
    from m3diff.registry.verification import all_ok

    folder, checks = restore(params.register_, args.version, args.into)
    is_restored = all_ok(checks)
    print("\n".join(str(check) for check in checks))
    print(f"\n{'restored to' if is_restored else 'NOT restored, see above:'} {folder}")
    return 0 if is_restored else DATA_REFUSED


COMMAND = Command(
    run=_run,
    arguments=(
        argument("version", help="number or alias; without MLflow, a branch runs/<flow run> or a commit"),
        argument("--into", **FOLDER, help="new folder; default: next to the project"),
    ),
    examples=("m3diff restore 12", "m3diff restore champion --into ../twelve"),
)

"""`m3diff profile`: use the parameters of a profile for the next run."""

from __future__ import annotations

import argparse
from pathlib import Path

from m3diff.command_line.command import Command, argument
from m3diff.command_line.distribution import find_profiles_folder


def _run(args: argparse.Namespace) -> None:
    from m3diff.settings.load import find_profile, load_params, use_profile
    from m3diff.settings.rules import missing_inputs

    folder = find_profiles_folder()
    params = load_params(find_profile(args.name, folder))
    changes = use_profile(args.name, args.params, folder)
    if changes:
        print("\n".join(changes), end="\n\n")
    print(f"{args.params} has the values of the profile {args.name} {'now' if changes else 'already'}")
    for fault in missing_inputs(params, "train"):
        print(f"not here yet: {fault}")


COMMAND = Command(
    run=_run,
    arguments=(
        argument("name", help="a file in profiles/, without .yaml"),
        argument(
            "--params",
            type=Path,
            metavar="FILE",
            default=argparse.SUPPRESS,  # keeps the value of an option --params before the command
            help="the file to write; default: params.yaml",
        ),
    ),
    examples=("m3diff profile one-gpu",),
    parameters="none",
)

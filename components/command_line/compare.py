"""`m3diff compare`: compare two runs on the same test pairs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from m3diff.command_line.command import Command, argument

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.commands.compare import compare, format_table

    tables = compare(args.first, args.second, params.paths.records, params.paths.clean, args.out)
    print("\n\n".join(format_table(protocol, table) for protocol, table in tables.items()))
    print(f"\npair by pair: {args.out}")


COMMAND = Command(
    run=_run,
    arguments=(
        argument("first", type=Path, help="report folder of a run, with its scores.parquet"),
        argument("second", type=Path, help="report folder of another run"),
        argument("--out", type=Path, default=Path("compare.html"), help="page to write (default: compare.html)"),
    ),
    examples=("m3diff compare runs/a/report data/07_report --out compare.html",),
)

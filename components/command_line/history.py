"""`m3diff history`: list all decisions about which version is the champion."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from m3diff.command_line.arguments import JSON
from m3diff.command_line.command import Command
from m3diff.command_line.exit_codes import DATA_REFUSED


def _run(args: argparse.Namespace) -> int:
    from m3diff.registry.decisions import find_pending_move, format_table, numbering_faults, read_decisions

    entries = read_decisions()
    record_faults = numbering_faults()
    unfinished = find_pending_move(Path("."))
    if args.json:
        print(json.dumps([entry.model_dump(by_alias=True) for entry in entries], indent=2))
    else:
        print(format_table(entries))
    for fault in record_faults:
        print(f"m3diff history: {fault}", file=sys.stderr)
    if unfinished is not None:
        print(
            f"m3diff history: decision {unfinished.number} may still be under way; promote finishes it",
            file=sys.stderr,
        )
    return DATA_REFUSED if record_faults else 0


COMMAND = Command(
    run=_run,
    arguments=(JSON,),
    examples=("m3diff history", "m3diff history --json"),
    parameters="none",
)

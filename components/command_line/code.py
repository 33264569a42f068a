"""`m3diff code`: record which code each stage runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from m3diff.command_line.command import Command

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.stages.code import code

    code(params)


COMMAND = Command(
    run=_run,
    reads="the Python files of components/ that the parameters name",
    writes="code/<stage>.json, a hash for each file",
    needs="nothing; `dvc repro` runs it first",
    sections="train.model, ingest.datasets, synthesize, augment and evaluate.metrics",
    examples=("m3diff code",),
)

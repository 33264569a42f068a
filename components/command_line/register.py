"""`m3diff register`: log the current run to MLflow and register its checkpoint as a new version of the model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from m3diff.command_line.command import Command

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.stages.register.stage import register

    print(register(params))


COMMAND = Command(
    run=_run,
    reads="dvc.lock, data/05_model (paths.model) and data/07_report (paths.report)",
    writes="a run and a version of the model with the alias challenger, in MLflow (register.tracking_uri)",
    needs="`dvc repro`, with every stage up to date; an MLflow server if tracking_uri names one (`make up`)",
    sections="register",
    examples=("m3diff register",),
)

"""`m3diff pretrain`: pre-train the tiny base model, which training then fine-tunes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from m3diff.command_line.command import Command

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.stages.pretrain.stage import pretrain

    pretrain(params.pretrain, params.paths.base)


COMMAND = Command(
    run=_run,
    reads="nothing: it draws its own scenes",
    writes="the tiny base, data/00_base (paths.base)",
    needs="only a change of the base; a clone has its output, and `dvc repro` leaves it as it is",
    sections="pretrain",
    examples=("m3diff pretrain", "m3diff --params infra/base-blip2idc.yaml pretrain"),
)

"""`m3diff predict`: caption the pairs of the test split with the trained model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from m3diff.command_line.command import Command

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.stages.predict.stage import predict

    paths = params.paths
    predict(params.predict, params.compute, paths.mixture, paths.model, paths.predictions)


COMMAND = Command(
    run=_run,
    reads="the test split of data/04_mixture (paths.mixture), and the checkpoint in data/05_model (paths.model)",
    writes="captions, those of two controls, saliency maps and a report, data/06_predictions (paths.predictions)",
    needs="`m3diff train`, and a test pair in the mixture",
    sections="predict and compute",
    examples=("m3diff predict",),
)

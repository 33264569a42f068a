"""`m3diff plan`: estimate a training run before it starts."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from m3diff.command_line.command import Command, argument

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.commands.plan import Run, check_fits, plan_alignment, plan_run, print_plan
    from m3diff.models.checkpoint import check_base
    from m3diff.settings.compute import GPUS

    check_base(params.train.base)
    gpu_kind = args.gpu or params.compute.gpu_kind
    gpu = GPUS[gpu_kind] if gpu_kind else None
    planned_run = Run.from_params(params)
    alignment_plan = plan_alignment(planned_run)
    training_plan = plan_run(planned_run)
    if alignment_plan is not None:
        print("the alignment before the fine-tuning")
        print_plan(alignment_plan, params.compute, gpu, args.utilisation)
    print("the fine-tuning")
    print_plan(training_plan, params.compute, gpu, args.utilisation)
    if params.compute.gpu and gpu:
        if alignment_plan is not None:
            check_fits(params.compute, alignment_plan, gpu.memory_gb)
        check_fits(params.compute, training_plan, gpu.memory_gb)


def gpu_kinds() -> Iterable[str]:
    """Return the kinds of GPU that `--gpu` accepts."""
    from m3diff.settings.compute import GPUS

    return GPUS


COMMAND = Command(
    run=_run,
    arguments=(
        argument("--gpu", choices=gpu_kinds, metavar="KIND", help="one of {choices}; default: compute.gpu_kind"),
        argument("--utilisation", type=float, default=0.45, help="share of the GPU's peak, recomputed FLOPs included"),
    ),
    examples=("m3diff --params profiles/paper.yaml plan", "m3diff plan --gpu H100-80GB --utilisation 0.4"),
)

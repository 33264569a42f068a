"""`m3diff train`: fine-tune the model on the mixture."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from m3diff.command_line.command import Command

if TYPE_CHECKING:
    from m3diff.registry.tracking import RunDescription
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.settings.rules import check_paths

    check_paths(params, "train")
    from m3diff.commands.plan import Run, check_memory, warnings_before_training
    from m3diff.models import FAMILIES
    from m3diff.models.checkpoint import check_base
    from m3diff.registry.tracking import log_curves_while_training
    from m3diff.settings.section import ParamsError, prefix_key
    from m3diff.stages.convert.stage import require_test_pairs
    from m3diff.stages.train.stage import train

    paths = params.paths
    require_test_pairs(paths.mixture, params.promote.protocol)
    check_base(params.train.base)
    planned_run = Run.from_params(params)
    try:
        FAMILIES[planned_run.settings.family].check_base(params.train.base, planned_run.settings)
    except ParamsError as error:
        raise ParamsError(prefix_key(f"models.{params.train.model}", error.fault)) from error
    check_memory(planned_run)
    warnings = warnings_before_training(planned_run)
    for warning in warnings:
        print(f"train: warning: {warning}", flush=True)
    follow = partial(log_curves_while_training, describe_training_run(params), paths.model)
    train(params.train, planned_run.settings, params.compute, paths.mixture, paths.model, follow, warnings)


def describe_training_run(params: Params) -> RunDescription:
    """Return the name and parameters of the training run in MLflow."""
    from m3diff.registry.tracking import RunDescription

    sections = params.model_dump(mode="json")
    model = params.train.model
    logged_sections = {name: sections[name] for name in ("convert", "train", "predict", "evaluate")}
    logged_sections["models"] = {model: sections["models"][model]}
    return RunDescription(
        tracking_uri=params.register_.tracking_uri,
        experiment=params.register_.experiment,
        model=model,
        params=logged_sections,
        max_new_tokens=params.predict.max_new_tokens,
    )


COMMAND = Command(
    run=_run,
    reads="data/04_mixture (paths.mixture), the base model data/00_base (train.base), and the images",
    writes=(
        "checkpoint, curves.csv and a report, data/05_model (paths.model); curves in MLflow (register.tracking_uri); "
        "a killed run goes on from runs (compute.scratch)"
    ),
    needs="`m3diff convert`, and a base (`make base`, or a published one); `m3diff plan` says how much memory and time",
    sections="train (epochs, batch, ...), models.<train.model> (rates, LoRA, module) and compute (workers, GPU)",
    examples=("m3diff train", "m3diff --params profiles/one-gpu.yaml train"),
)

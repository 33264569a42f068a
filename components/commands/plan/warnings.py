"""Warnings about a training run before it starts: too few steps, or words that the base does not know."""

import math
from collections.abc import Iterator
from contextlib import suppress

from m3diff.commands.plan.figures import BasicPlan, Run, count_steps
from m3diff.commands.plan.mixture import counted_workload, has_mixture
from m3diff.commands.plan.unknown_words import count_words
from m3diff.commands.plan.workload import ESTIMATED_LENGTHS
from m3diff.records.errors import Fault
from m3diff.settings.section import ParamsError
from m3diff.stages.train.params import ENOUGH_STEPS, FEW_STEPS


def warnings_before_training(run: Run) -> list[str]:
    """Return the warnings about a training run that is about to start.

    This takes a few seconds at most, because it does not build a model. Without a mixture there are no warnings.

    Raises:
        DataError: a file of the mixture or the base's tokenizer cannot be read.
    """
    if not has_mixture(run.mixture):
        return []
    warnings: list[Fault | None] = []
    align = run.settings.align
    with suppress(ParamsError):  # no samples are left for the fine-tuning; the training itself raises that error
        workload = counted_workload(run.mixture / "train", ESTIMATED_LENGTHS, align.datasets if align else ())
        sequences = workload.sequences(run.train.max_captions_per_sequence)
        steps = count_steps(run.train, sequences)
        warnings.append(short_run_warning(steps, run.train.epochs, "train.epochs"))
    words = count_words(run.train.base, run.mixture)
    warnings.append(words.warning() if words else None)
    return [str(warning) for warning in warnings if warning is not None]


def warnings_of_plan(plan: BasicPlan) -> Iterator[Fault]:
    """Yield the warnings shown in a printed plan."""
    steps_warning = short_run_warning(plan.steps, plan.train.epochs, plan.epochs_parameter)
    if steps_warning is not None:
        yield steps_warning
    if plan.epochs_parameter != "train.epochs":  # only the fine-tuning's plan warns about words
        return
    words = count_words(plan.train.base, plan.run.mixture)
    words_warning = words.warning() if words else None
    if words_warning is not None:
        yield words_warning


def short_run_warning(steps: int, epochs: float, parameter: str) -> Fault | None:
    """Return a warning if the run takes too few optimizer steps to learn from.

    Args:
        parameter: parameter that sets the number of epochs.
    """
    if steps >= FEW_STEPS:
        return None
    enough_epochs = math.ceil(epochs * ENOUGH_STEPS / steps)
    return Fault(
        "plan.few_steps",
        steps=steps,
        limit=FEW_STEPS,
        field=parameter,
        value=epochs,
        expected=enough_epochs,
        enough_steps=ENOUGH_STEPS,
    )

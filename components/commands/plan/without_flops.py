"""Plan a run of a family whose FLOPs and activations cannot be counted. Its tokens are measured on samples of the run.

The tokens of such a family depend on the images. A few image sets of the mixture are therefore encoded with the
processor of the base, as in training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m3diff.commands.plan.figures import BasicPlan, Run, count_parameters, has_base, make_plan, static_memory_gb
from m3diff.commands.plan.find_workload import find_workload
from m3diff.commands.plan.mixture import has_mixture
from m3diff.commands.plan.workload import ESTIMATED_LENGTHS
from m3diff.models import FAMILIES
from m3diff.models.cached_prompts import count_packed_tokens
from m3diff.models.device import Device
from m3diff.models.tuning import meta_model
from m3diff.stages.train.batches import Loader, Samples, read_samples
from m3diff.stages.train.job import DatasetFilter

MEASURED_SEQUENCES = 32  # maximum number of sequences whose images are prepared to measure tokens

# Name of the group of parameters that the family never trains because the model does not use them for images
UNUSED = "other parts"


@dataclass(frozen=True)
class MeasuredTokens:
    """The tokens of some sequences of a run, on average.

    Attributes:
        sequences: number of measured sequences.
        image_tokens: visual tokens of a sequence, each image once.
        packed_tokens: tokens that the model reads for a sequence.
        separate_tokens: tokens that it would read if each sample were a row of its own.
    """

    sequences: int
    image_tokens: float
    packed_tokens: float
    separate_tokens: float


def plan_run(run: Run) -> BasicPlan:
    """Return the plan of the fine-tuning: with FLOPs and activations if the family can count them, otherwise without.

    Raises:
        DataError: the base or the mixture cannot be read.
        ParamsError: there is no mixture, and the datasets cannot be counted either.
    """
    if FAMILIES[run.settings.family].count_flops is not None:
        return make_plan(run)
    return plan_without_flops(run)


def plan_without_flops(run: Run) -> BasicPlan:
    """Return the plan without FLOPs and activations. Without a base, it has no parameters and no memory.

    Raises: see `plan_run`.
    """
    family = FAMILIES[run.settings.family]
    base = run.train.base
    workload = find_workload(run.mixture, run.entries, run.convert, ESTIMATED_LENGTHS)
    parameters: dict[str, int] = {}
    memory_gb: dict[str, float] = {}
    if has_base(base):
        model = meta_model(family.planned_config(base, run.settings), family, run.settings, run.train.precision)
        parameters = count_parameters(model, family, UNUSED)
        memory_gb = static_memory_gb(run.train, run.compute, parameters)
    return BasicPlan(
        run=run,
        base_origin=str(base),
        workload=workload,
        parameters=parameters,
        sequences=workload.sequences(run.train.max_captions_per_sequence),
        memory_gb=memory_gb,
    )


def measure_tokens(run: Run) -> MeasuredTokens | None:
    """Return the tokens of up to MEASURED_SEQUENCES sequences of the mixture, drawn by the seed of the training.

    None if there is no base, or no mixture of this run.

    Raises:
        DataError: the base's processor, the mixture or an image cannot be read.
        ParamsError: a setting of the processor or the template is unknown.
    """
    if not has_base(run.train.base) or not has_mixture(run.mixture):
        return None
    samples = read_samples(run.mixture / "train", DatasetFilter(tuple(run.entries), excludes=False))
    if not len(samples):
        return None
    family = FAMILIES[run.settings.family]
    config = family.planned_config(run.train.base, run.settings)
    processor: Any = family.load_processor(run.train.base, config, run.settings)
    loader = Loader(samples, processor, family.packing(), 1, Device(False, run.train.precision))
    counts = []
    for rows in draw_sequences(samples, run.train.max_captions_per_sequence, run.train.seed):
        branches = loader.encode(rows, loader.prepare_images(rows, None).marks)
        image_tokens = processor.count_image_tokens(branches[0].ids)
        packed_tokens = count_packed_tokens(branches, processor.image_token_id)
        counts.append((image_tokens, packed_tokens, sum(len(branch.ids) for branch in branches)))
    image_tokens, packed_tokens, separate_tokens = np.mean(counts, axis=0).tolist()
    return MeasuredTokens(len(counts), image_tokens, packed_tokens, separate_tokens)


def draw_sequences(samples: Samples, max_captions: int | None, seed: int) -> Sequence[np.ndarray]:
    """Return the rows of up to MEASURED_SEQUENCES random sequences, at most one of each image set.

    The first samples of an image set are taken, because all of its sequences have about the same number of tokens.
    """
    image_sets = samples.image_sets()
    rng = np.random.default_rng(seed)
    numbers = rng.permutation(len(image_sets))[:MEASURED_SEQUENCES]
    return [image_sets[number][:max_captions] for number in sorted(numbers.tolist())]

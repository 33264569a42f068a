"""Calculate the figures of a training run before it starts: parameters, tokens, steps, FLOPs and memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from m3diff.commands.plan.find_workload import find_workload
from m3diff.commands.plan.memory import count_activations
from m3diff.commands.plan.mixture import count_test_pairs
from m3diff.commands.plan.workload import SampleGroup, TokenCounter, Workload
from m3diff.models import FAMILIES
from m3diff.models.family import Family, Settings
from m3diff.models.flops import ADAPTERS, Term
from m3diff.models.tuning import meta_model
from m3diff.records.sample import PAIR
from m3diff.settings.compute import Compute
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params
from m3diff.stages.convert.params import Convert
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.train.job import alignment_sections
from m3diff.stages.train.params import MOMENTS, Train

GIGA = 1e9
TERA = 1e12

# Bytes per trained parameter: the fp32 master weight with the optimizer's fp32 moments, and the fp32 gradient
OPTIMIZER_BYTES = 4 * (1 + len(MOMENTS))
GRADIENT_BYTES = 4

FROZEN = " (frozen)"  # suffix of the name of a group of frozen parameters


@dataclass(frozen=True)
class Run:
    """The sections of the parameters that determine the cost of a run.

    Attributes:
        settings: entry of the section `models` that `train.model` names.
        entries: datasets of the run. Their samples are counted if there is no mixture.
        mixture: folder of the mixture, with the subfolders `train` and `test`.
    """

    train: Train
    settings: Settings
    compute: Compute
    entries: Mapping[str, DatasetEntry]
    convert: Convert
    mixture: Path

    @classmethod
    def from_params(cls, params: Params) -> "Run":
        """Return the relevant sections of the parameters, with the model that `train.model` names."""
        return cls(
            train=params.train,
            settings=params.models[params.train.model],
            compute=params.compute,
            entries=params.ingest.datasets,
            convert=params.convert,
            mixture=params.paths.mixture,
        )


@dataclass(frozen=True)
class SequenceFigures:
    """The mean figures of the sequences whose image sets have the same number of images.

    Attributes:
        images: number of images.
        sequences: number of these sequences per epoch.
        prompt_tokens: number of tokens that do not count in the loss, including visual tokens.
        supervised_tokens: number of tokens that count in the loss.
        max_supervised_tokens: number of tokens that count in the loss of the longest sequence, or of a mean sequence if
            only sums are known.
        terms: FLOPs of one sequence, without recomputation.
    """

    images: int
    sequences: int
    prompt_tokens: float
    supervised_tokens: float
    max_supervised_tokens: float
    terms: Sequence[Term]

    @property
    def tokens(self) -> float:
        """Mean number of tokens per sequence."""
        return self.prompt_tokens + self.supervised_tokens


@dataclass(frozen=True, kw_only=True)
class BasicPlan:
    """The figures of one phase of a run that are known for every family, without FLOPs and activations.

    Attributes:
        run: parameters of the phase. The fine-tuning and the alignment that precedes it for some models differ in their
            epochs, batch size and learning rates.
        base_origin: text that says where the shapes of the model come from.
        parameters: number of parameters by group. A part's frozen parameters are a separate group whose name ends with
            FROZEN. Empty if the shapes of the model are unknown.
        sequences: number of sequences per epoch.
        memory_gb: memory on one GPU by purpose, in GB. Empty if the shapes of the model are unknown.
        epochs_parameter: parameter that sets the number of epochs.
    """

    run: Run
    base_origin: str
    workload: Workload
    parameters: Mapping[str, int]
    sequences: int
    memory_gb: Mapping[str, float]
    epochs_parameter: str = "train.epochs"

    @property
    def train(self) -> Train:
        """The section `train` of the run, which differs between alignment and fine-tuning."""
        return self.run.train

    @property
    def devices(self) -> int:
        """Number of devices used for training: GPUs, or processes on a CPU."""
        return max(1, self.run.compute.workers)

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps per epoch. The last one may have fewer sequences than the others."""
        return count_steps_per_epoch(self.train, self.sequences)

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the run."""
        return count_steps(self.train, self.sequences)

    @property
    def memory_total_gb(self) -> float:
        """Memory that the run needs on one GPU, in GB."""
        return sum(self.memory_gb.values())

    @property
    def references_per_sequence(self) -> float:
        """Mean number of references per sequence."""
        return self.workload.references / self.sequences


@dataclass(frozen=True, kw_only=True)
class Plan(BasicPlan):
    """The figures of one phase of a run, with FLOPs and activations.

    Attributes:
        sequences_by_images: figures of the sequences of each group of the workload.
        terms: FLOPs of a mean sequence, without recomputation.
        tokens_per_sequence: mean number of tokens per sequence.
        supervised_tokens: mean number of tokens per sequence that count in the loss.
        max_references: number of references in the longest sequence, for which the memory is computed. None if only
            sums are known. The memory is then computed for a mean sequence.
        model_flops: FLOPs of the run without recomputation. Frozen weights cost two thirds, because they need no
            gradient.
        run_flops: FLOPs of the run including recomputation.
        activations_gb: activations of a micro-batch by part of the model, in GB.
        test_pairs: number of pairs to caption; None if unknown.
        caption_flops: FLOPs for reading a pair's images and prompt after the LoRA adapters are merged into the weights.
            If the run has no pairs, those of the most frequent kind of image set. This excludes decoding, which is
            limited by memory bandwidth, and the saliency map, which adds under 1 %.
    """

    sequences_by_images: Sequence[SequenceFigures]
    terms: Sequence[Term]
    tokens_per_sequence: float
    supervised_tokens: float
    max_references: int | None
    model_flops: float
    run_flops: float
    activations_gb: Mapping[str, float]
    test_pairs: int | None
    caption_flops: float

    @property
    def most_frequent_sequence(self) -> SequenceFigures:
        """The figures of the most frequent kind of sequence."""
        return max(self.sequences_by_images, key=lambda figures: figures.sequences)

    def gpu_hours(self, peak_tflops: float, hfu: float) -> float:
        """Return the hours that the run takes on one GPU.

        Args:
            peak_tflops: peak of the GPU, in TFLOP/s.
            hfu: share of the peak that the run reaches, including recomputation (hardware FLOPs utilisation).
        """
        return self.run_flops / (peak_tflops * TERA * hfu) / 3600

    def mfu(self, hfu: float) -> float:
        """Convert a hardware FLOPs utilisation into the model FLOPs utilisation, which excludes recomputation."""
        return hfu * self.model_flops / self.run_flops


def make_plan(run: Run, excluded_datasets: Sequence[str] = ()) -> Plan:
    """Calculate the plan of the fine-tuning. `plan_alignment` calculates the plan of the alignment.

    The family must be able to count FLOPs.

    Args:
        excluded_datasets: datasets that are not counted. If the model has an alignment, the alignment's datasets are
            excluded instead.

    Raises:
        ParamsError: there is no mixture, and the datasets cannot be counted either.
    """
    family = FAMILIES[run.settings.family]
    config = family.planned_config(run.train.base, run.settings)
    workload = _workload_of(run, family, config, excluded_datasets)
    max_captions = run.train.max_captions_per_sequence
    sequences = workload.sequences(max_captions)
    model = meta_model(config, family, run.settings, run.train.precision)
    figures = [_sequence_figures(group, max_captions, config, family, model) for group in workload.groups]
    terms = mean_terms(figures)
    caption_flops = _caption_flops(family, model, figures)

    # Must come after all FLOPs: counting activations fuses kernels into the model, and `count_flops` does not see
    # the matrix products inside them
    longest = max(figures, key=lambda sequence: sequence.prompt_tokens + sequence.max_supervised_tokens)
    activations_gb = _activations_gb(run, model, longest)
    parameters = count_parameters(model, family)
    memory_gb = static_memory_gb(run.train, run.compute, parameters)
    memory_gb["activations"] = sum(activations_gb.values())

    flops_per_sequence = sum(term.total for term in terms)
    recomputed_per_sequence = recomputed_flops(terms, run.compute.activation_checkpointing)
    sequences_in_run = run.train.epochs * sequences
    return Plan(
        run=run,
        base_origin=_origin_of_shapes(run.train.base, config),
        workload=workload,
        parameters=parameters,
        sequences_by_images=figures,
        terms=terms,
        tokens_per_sequence=sum(sequence.sequences * sequence.tokens for sequence in figures) / sequences,
        supervised_tokens=sum(sequence.sequences * sequence.supervised_tokens for sequence in figures) / sequences,
        max_references=workload.max_references(max_captions),
        sequences=sequences,
        model_flops=sequences_in_run * flops_per_sequence,
        run_flops=sequences_in_run * (flops_per_sequence + recomputed_per_sequence),
        memory_gb=memory_gb,
        activations_gb=activations_gb,
        test_pairs=count_test_pairs(run.mixture, run.entries),
        caption_flops=caption_flops,
    )


def plan_alignment(run: Run) -> Plan | None:
    """Return the plan of the alignment, a phase before the fine-tuning that trains on other datasets.

    Returns None if the model has no alignment. If the alignment's datasets cannot be counted, prints the reason and
    returns None.
    """
    align = run.settings.align
    if align is None:
        return None
    phase_train, phase_settings = alignment_sections(run.train, run.settings)
    phase_run = replace(run, train=phase_train, settings=phase_settings)
    excluded_datasets = [name for name in run.entries if name not in align.datasets]
    try:
        plan = make_plan(phase_run, excluded_datasets)
    except ParamsError as error:
        print(f"there is no plan of the alignment: {error}")
        return None
    return replace(plan, epochs_parameter=f"models.{run.train.model}.align.epochs")


def count_steps_per_epoch(train: Train, sequences: int) -> int:
    """Return the number of optimizer steps in an epoch of `sequences` sequences."""
    return math.ceil(sequences / train.global_batch)


def count_steps(train: Train, sequences: int) -> int:
    """Return the number of optimizer steps of a run, counted in the same way as in the training loop.

    The last batch of an epoch may be smaller than the others.

    Args:
        sequences: number of sequences per epoch.
    """
    return math.ceil(train.epochs * count_steps_per_epoch(train, sequences))


def _workload_of(run: Run, family: Family, config: Any, excluded_datasets: Sequence[str]) -> Workload:
    processor = family.load_processor(run.train.base, config) if has_base(run.train.base) else None
    if run.settings.align:
        excluded_datasets = run.settings.align.datasets
    tokens = TokenCounter(processor, config.image_tokens_of)
    workload = find_workload(run.mixture, run.entries, run.convert, tokens, excluded_datasets)
    if processor is None and family.prompt_tokens is not None:
        return replace(
            workload, groups=[replace(group, prompt_tokens=family.prompt_tokens) for group in workload.groups]
        )
    return workload


def _sequence_figures(
    group: SampleGroup, max_captions: int | None, config: Any, family: Family, model: Any
) -> SequenceFigures:
    """Return the figures of the sequences of a group of image sets."""
    sequences = group.sequences(max_captions)
    references_per_sequence = group.references / sequences
    prompt_tokens = group.prompts_per_sequence(max_captions) * group.prompt_tokens
    prompt_tokens += config.image_tokens_of(group.images)
    supervised_tokens = references_per_sequence * group.reference_tokens
    max_references = group.max_references(max_captions) or references_per_sequence
    return SequenceFigures(
        images=group.images,
        sequences=sequences,
        prompt_tokens=prompt_tokens,
        supervised_tokens=supervised_tokens,
        max_supervised_tokens=max_references * group.reference_tokens,
        terms=_count_flops(family, model, prompt_tokens + supervised_tokens, supervised_tokens, group.images),
    )


def _count_flops(family: Family, model: Any, tokens: float, supervised_tokens: float, images: int) -> list[Term]:
    assert family.count_flops is not None, "`plan_run` makes plans of families whose FLOPs cannot be counted"
    return family.count_flops(model, family, tokens, supervised_tokens, images)


def mean_terms(figures: Sequence[SequenceFigures]) -> list[Term]:
    """Return the FLOPs of a mean sequence."""
    if len(figures) == 1:
        return list(figures[0].terms)
    terms: dict[str, Term] = {}
    total = sum(sequence.sequences for sequence in figures)
    for sequence in figures:
        share = sequence.sequences / total
        for term in sequence.terms:
            mean = terms.setdefault(term.name, Term(term.name))
            mean.forward += share * term.forward
            mean.backward += share * term.backward
            mean.recomputed += share * term.recomputed
    return list(terms.values())


def has_base(base: Path) -> bool:
    """Return whether the base folder has a config.json, so that shapes and tokenizer can be read from it."""
    return (base / "config.json").is_file()


def _origin_of_shapes(base: Path, config: Any) -> str:
    if has_base(base):
        return str(base)
    name = config.name_or_path
    command = f" (`hf download {name} --local-dir {base}` downloads it)" if "/" in name else ""
    return f"published shapes of {name}, because there is no base in {base}{command}"


def _activations_gb(run: Run, model: Any, sequence: SequenceFigures) -> dict[str, float]:
    """Return the memory in GB that a micro-batch holds for its backward pass, by part of the model."""
    family = FAMILIES[run.settings.family]
    checkpointing = run.compute.activation_checkpointing
    supervised_tokens = math.ceil(sequence.max_supervised_tokens)
    tokens = math.ceil(sequence.prompt_tokens) + supervised_tokens
    sequence_bytes = count_activations(model, family, checkpointing, tokens, supervised_tokens, sequence.images)
    return {name: run.compute.micro_batch * size / GIGA for name, size in sequence_bytes.items()}


def _caption_flops(family: Family, model: Any, figures: Sequence[SequenceFigures]) -> float:
    pairs = [sequence for sequence in figures if sequence.images == PAIR]
    sequence = max(pairs or figures, key=lambda sequence: sequence.sequences)
    terms = _count_flops(family, model, sequence.prompt_tokens, 1, sequence.images)
    return sum(term.forward for term in terms if term.name != ADAPTERS)


def count_parameters(model: Any, family: Family, unused_group: str | None = None) -> dict[str, int]:
    """Return the number of parameters by part.

    A part's frozen parameters are counted separately, under a name that ends with FROZEN.

    Args:
        unused_group: name of the group of the family's `unused_parameters`. None counts them in their parts.
    """
    groups: dict[str, int] = {}
    for part in family.parts:
        groups[part] = 0
        groups[f"{part}{FROZEN}"] = 0
    for name, parameter in model.named_parameters():
        part = family.part_of(name)
        group = part if parameter.requires_grad else f"{part}{FROZEN}"
        if unused_group is not None and name.startswith(family.unused_parameters):
            group = f"{unused_group}{FROZEN}"
        groups[group] = groups.get(group, 0) + parameter.numel()
    return {group: count for group, count in groups.items() if count}


def recomputed_flops(terms: Sequence[Term], activation_checkpointing: str) -> float:
    """Return the FLOPs of one sequence's forward pass that are repeated in the backward pass.

    `selective` recomputes only norms and elementwise products, which are not counted as FLOPs.
    """
    return sum(term.recomputed for term in terms) if activation_checkpointing == "full" else 0.0


def static_memory_gb(train: Train, compute: Compute, parameters: Mapping[str, int]) -> dict[str, float]:
    """Return the memory in GB that weights, gradients and optimizer take on one GPU.

    ZeRO stage 1 partitions the master weights and moments, stage 2 also the gradients, and stage 3 also the weights.
    """
    ranks = max(1, compute.workers)
    total = sum(parameters.values())
    trained = sum(count for group, count in parameters.items() if not group.endswith(FROZEN))
    weight_bytes = 2 if train.precision == "bf16" else 4
    return {
        "weights": weight_bytes * total / (ranks if compute.zero_stage >= 3 else 1) / GIGA,
        "gradients": GRADIENT_BYTES * trained / (ranks if compute.zero_stage >= 2 else 1) / GIGA,
        "optimizer": OPTIMIZER_BYTES * trained / (ranks if compute.zero_stage >= 1 else 1) / GIGA,
    }

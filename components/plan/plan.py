"""What a training run will cost, before it starts: parameters, tokens, FLOPs, memory and hours (`m3diff plan`)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.compute import Compute
from components.convert.params import Convert
from components.ingest.params import DatasetEntry
from components.models import FAMILIES
from components.models.family import Family, Settings, Term
from components.plan.workload import Workload, find_workload
from components.section import ParamsError
from components.train.params import Train

TERA, GIGA = 1e12, 1e9
OPTIMIZER_BYTES, GRADIENT_BYTES = 12, 4  # of a trained parameter: fp32 master and AdamW's two moments; fp32 gradient
ACTIVATION_FACTOR = {"none": 34.0, "selective": 15.0, "full": 1.0}
"""Activations kept per token, in units of layers x width x 2 bytes: eager 6.8 MB a token at 7B; norms and SwiGLU
products recomputed 3.0 MB; layer inputs alone 0.2 MB. Estimates, to be checked on the GPU at hand."""
RESERVE = 0.08  # of the GPU: context, workspaces, fragmentation


class DoesNotFit(ParamsError):
    """The run needs more memory than its GPUs have."""


@dataclass(frozen=True)
class Plan:
    """The figures of a run.

    Attributes:
        base: what the shapes are those of, in words.
        parameters: parameters by group; the frozen ones of a part have "(frozen)" in the group's name.
        terms: FLOPs of one sequence, without recomputation.
        branches: references of a sequence, mean.
        tokens: of a sequence, mean.
        sequences: of an epoch.
        steps: of the run.
        run_flops: of the run, with what is recomputed.
        memory_gb: on one GPU, by what it is for.
    """

    base: str
    workload: Workload
    parameters: Mapping[str, int]
    terms: Sequence[Term]
    branches: float
    tokens: float
    sequences: int
    steps: int
    run_flops: float
    memory_gb: Mapping[str, float]
    gpus: int

    @property
    def memory_total_gb(self) -> float:
        return sum(self.memory_gb.values())

    def gpu_hours(self, peak_tflops: float, mfu: float) -> float:
        """Hours of one GPU that computes at a share (MFU) of its peak."""
        return self.run_flops / (peak_tflops * TERA * mfu) / 3600


def make_plan(
    train: Train,
    settings: Settings,
    compute: Compute,
    entries: Mapping[str, DatasetEntry],
    convert: Convert,
    mixture: Path,
) -> Plan:
    """Count what the run will read and compute.

    Args:
        settings: of the model family, the entry of the section `models` that `train.model` names.
        entries: the datasets of the run, whose published counts count where `mixture/train` is not there.

    Raises:
        ParamsError: there is no mixture, and a dataset has no published counts.
    """
    family = FAMILIES[settings.family]
    config = family.planned_config(train.base, settings)
    processor = family.load_processor(train.base) if _is_here(train.base) else None
    load = find_workload(mixture, entries, convert, processor, family.image_tokens(config))
    sequences = load.sequences(train.max_captions_per_sequence)
    branches = load.references / sequences
    tokens = family.image_tokens(config) + load.prompt_tokens + branches * load.reference_tokens
    terms = family.flops(config, tokens, branches * load.reference_tokens, settings.lora.rank)
    parameters = count_parameters(config, family, settings)
    return Plan(
        base=str(train.base) if _is_here(train.base) else f"published shapes, {train.base} is not here",
        workload=load,
        parameters=parameters,
        terms=terms,
        branches=branches,
        tokens=tokens,
        sequences=sequences,
        steps=math.ceil(train.epochs * math.ceil(sequences / train.global_batch)),  # as the loop counts them
        run_flops=train.epochs * sequences * flops_of_sequence(terms, compute.activation_checkpointing),
        memory_gb=memory_of_gpu(train, compute, parameters, tokens, config.get_text_config()),
        gpus=max(1, compute.workers),
    )


def _is_here(base: Path) -> bool:
    return (base / "config.json").is_file()


def count_parameters(config: Any, family: Family, settings: Settings) -> dict[str, int]:
    """Parameters by part, those that train and those that are frozen, counted on a model without storage."""
    import torch

    from components.models.tuning import prepare

    with torch.device("meta"):
        model = family.build(config)
        prepare(model, family, settings)
    groups = {group: 0 for part in family.parts for group in (part, f"{part} (frozen)")}
    for name, parameter in model.named_parameters():
        part = family.part_of(name)
        groups[part if parameter.requires_grad else f"{part} (frozen)"] += parameter.numel()
    return {group: count for group, count in groups.items() if count}


def flops_of_sequence(terms: Sequence[Term], activation_checkpointing: str) -> float:
    """Full recomputation runs the forward pass again, all but the head, which is the last term."""
    again = sum(term.forward for term in terms[:-1]) if activation_checkpointing == "full" else 0.0
    return sum(term.total for term in terms) + again


def memory_of_gpu(
    train: Train, compute: Compute, parameters: Mapping[str, int], tokens: float, text: Any
) -> dict[str, float]:
    """GB on one GPU: ZeRO 1 shares out master weights and moments (12 bytes), 2 gradients too, 3 weights too."""
    ranks = max(1, compute.workers)
    total = sum(parameters.values())
    trained = sum(count for group, count in parameters.items() if not group.endswith("(frozen)"))
    width = 2 if train.precision == "bf16" else 4
    per_token = ACTIVATION_FACTOR[compute.activation_checkpointing] * text.num_hidden_layers * text.hidden_size * width
    return {
        "weights": width * total / (ranks if compute.zero_stage >= 3 else 1) / GIGA,
        "gradients": GRADIENT_BYTES * trained / (ranks if compute.zero_stage >= 2 else 1) / GIGA,
        "optimizer": OPTIMIZER_BYTES * trained / (ranks if compute.zero_stage >= 1 else 1) / GIGA,
        "activations": compute.micro_batch * tokens * per_token / GIGA,
    }


def check_fits(compute: Compute, plan: Plan) -> None:
    """Raises DoesNotFit, naming what is needed, what there is and what to lower."""
    room = compute.gpu_memory_gb * (1 - RESERVE)
    if compute.gpu and plan.memory_total_gb > room:
        parts = ", ".join(f"{name} {size:.1f}" for name, size in plan.memory_gb.items())
        raise DoesNotFit(
            f"compute: needs {plan.memory_total_gb:.1f} GB a GPU ({parts}) but {compute.gpu_memory_gb:g} GB hold "
            f"{room:.1f}; lower compute.micro_batch (now {compute.micro_batch}), raise compute.zero_stage (now "
            f"{compute.zero_stage}) or set compute.activation_checkpointing to selective or full (now "
            f"{compute.activation_checkpointing})"
        )


def print_plan(train: Train, compute: Compute, plan: Plan, peak_tflops: float, mfu: float) -> None:
    """Print the plan as tables; times are at a share (MFU) of the GPUs' peak."""
    print("\n".join([*_parameter_lines(plan), *_workload_lines(train, plan), *_flops_lines(plan)]))
    print("\n".join([*_memory_lines(compute, plan), _time_line(train, plan, peak_tflops, mfu)]))


def _parameter_lines(plan: Plan) -> list[str]:
    rows = [f"  {name:<28} {count / 1e6:>12,.2f} M" for name, count in plan.parameters.items()]
    return [f"parameters: {plan.base}", *rows]


def _workload_lines(train: Train, plan: Plan) -> list[str]:
    load, most = plan.workload, train.max_captions_per_sequence
    rows = [
        f"  {name:<28} {source.pairs:>9,} pairs {source.references:>9,} references"
        for name, source in load.sources.items()
    ]
    return [
        f"counted: {load.counted}",
        *rows,
        f"workload: {load.pairs:,} pairs, {load.references:,} references, {load.references_per_pair:.2f} a pair; "
        f"{load.prompt_tokens:.1f} tokens a prompt, {load.reference_tokens:.1f} a reference",
        f"  max_captions_per_sequence {'all' if most is None else most}: {plan.sequences:,} sequences of "
        f"{plan.tokens:,.0f} tokens, {plan.branches:.2f} references each; {plan.steps:,} steps of {train.global_batch}",
    ]


def _flops_lines(plan: Plan) -> list[str]:
    forward, total = sum(term.forward for term in plan.terms), sum(term.total for term in plan.terms)
    full = flops_of_sequence(plan.terms, "full")
    rows = [f"  {term.name:<28} {term.forward / TERA:>9.3f} {term.total / TERA:>9.3f}" for term in plan.terms]
    return [
        f"FLOPs of one sequence, TFLOP   {'forward':>9} {'total':>9}",
        *rows,
        f"  {'sum without recomputation':<28} {forward / TERA:>9.2f} {total / TERA:>9.2f}",
        f"  {'sum, full recomputation':<28} {'':>9} {full / TERA:>9.2f}",
        f"  per reference {total / plan.branches / TERA:.2f} TFLOP; the run {plan.run_flops / 1e18:.2f} EFLOP",
    ]


def _memory_lines(compute: Compute, plan: Plan) -> list[str]:
    rows = [f"  {name:<28} {size:>9.1f}" for name, size in plan.memory_gb.items()]
    total = f"  {'sum':<28} {plan.memory_total_gb:>9.1f} of {compute.gpu_memory_gb:g}"
    return ["memory of one GPU, GB", *rows, total]


def _time_line(train: Train, plan: Plan, peak_tflops: float, mfu: float) -> str:
    hours = plan.gpu_hours(peak_tflops, mfu)
    speed = plan.workload.references * train.epochs / hours / 3600
    return (
        f"time at {mfu:.0%} of {peak_tflops:g} TFLOP/s: {hours:.1f} GPU-hours, "
        f"{hours / plan.gpus:.1f} h on {plan.gpus} GPU(s), {speed:.1f} captions/s a GPU"
    )

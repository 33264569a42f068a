"""What a training run will cost, before it starts: parameters, tokens, FLOPs, memory and hours (`m3diff plan`)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from m3diff.commands.plan.workload import Workload, count_test_pairs, find_workload
from m3diff.models import FAMILIES
from m3diff.models.family import ADAPTERS, Family, Settings, Term
from m3diff.settings.compute import Compute
from m3diff.settings.gpus import GPUS, Gpu
from m3diff.settings.section import ParamsError
from m3diff.stages.convert.paper_mixture import PAIRS, SAMPLES, SOURCES
from m3diff.stages.convert.params import Convert
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.train.params import Train
from m3diff.stages.train.phase import of_alignment

GIGA, TERA, EXA = 1e9, 1e12, 1e18
OPTIMIZER_BYTES, GRADIENT_BYTES = 12, 4  # of a trained parameter: fp32 master and AdamW's two moments; fp32 gradient
RESERVE = 0.08  # of the GPU: context, workspaces, fragmentation


FEW_STEPS = 100
"""Of fewer optimizer steps a model learns little: the embedded run takes 1,097, the paper's 3,500."""


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
        longest: references of the longest sequence, which the memory is for; None where only sums are known, and it is
            for a mean one.
        sequences: of an epoch.
        steps: of the run.
        model_flops: of the run, without recomputation; frozen weights cost 2 of 3, as their gradient is not computed.
        run_flops: with what is recomputed.
        memory_gb: on one GPU, by what it is for.
        activations_gb: that part of it, for a micro-batch, by where it arises.
        test_pairs: pairs to caption; None where their number is not known.
        caption_flops: of a pair's images and prompt, by the merged model; the images are encoded once. Not counted are
            decoding, which is bound by memory, and the saliency map, under 1 % more.
    """

    base: str
    workload: Workload
    parameters: Mapping[str, int]
    terms: Sequence[Term]
    branches: float
    tokens: float
    longest: int | None
    sequences: int
    steps: int
    model_flops: float
    run_flops: float
    memory_gb: Mapping[str, float]
    activations_gb: Mapping[str, float]
    test_pairs: int | None
    caption_flops: float
    gpus: int

    @property
    def memory_total_gb(self) -> float:
        return sum(self.memory_gb.values())

    def gpu_hours(self, peak_tflops: float, hfu: float) -> float:
        """Hours of one GPU that computes, recomputation counted, at a share of its peak (hardware FLOPs utilisation,
        HFU)."""
        return self.run_flops / (peak_tflops * TERA * hfu) / 3600

    def caption_minutes(self, peak_tflops: float, hfu: float, pairs: int) -> float:
        """Minutes in which one GPU reads so many pairs of images with their prompts."""
        return pairs * self.caption_flops / (peak_tflops * TERA * hfu) / 60

    def mfu(self, hfu: float) -> float:
        """The share of the peak that the model's own FLOPs then come to (model FLOPs utilisation)."""
        return hfu * self.model_flops / self.run_flops


def make_plan(
    train: Train,
    settings: Settings,
    compute: Compute,
    entries: Mapping[str, DatasetEntry],
    convert: Convert,
    mixture: Path,
    left_out: Sequence[str] = (),
) -> Plan:
    """Count what the fine-tuning will read, compute and hold; of an alignment before it `plan_alignment` does.

    Args:
        settings: of the model family, the entry of the section `models` that `train.model` names.
        entries: the datasets of the run, whose published counts count where `mixture/train` is not there.
        left_out: datasets that do not count; of a model with an alignment, those that it takes.

    Raises:
        ParamsError: there is no mixture, and a dataset has no published counts.
    """
    family = FAMILIES[settings.family]
    config = family.planned_config(train.base, settings)
    processor = family.load_processor(train.base, config) if _is_here(train.base) else None
    others = settings.align.datasets if settings.align else left_out
    load = find_workload(mixture, entries, convert, processor, family.image_tokens(config), others)
    if processor is None and family.prompt_tokens is not None:
        load = replace(load, prompt_tokens=family.prompt_tokens)
    sequences = load.sequences(train.max_captions_per_sequence)
    branches, prompt = load.references / sequences, family.image_tokens(config) + load.prompt_tokens
    tokens = prompt + branches * load.reference_tokens
    terms = family.flops(config, tokens, branches * load.reference_tokens, settings)
    longest = load.longest(train.max_captions_per_sequence)
    supervised = (longest or branches) * load.reference_tokens
    model = meta_model(config, family, settings, train.precision)
    activations = activations_of(model, family, compute, prompt, supervised)
    parameters = parameters_of(model, family)
    run, total = train.epochs * sequences, sum(term.total for term in terms)
    return Plan(
        base=str(train.base) if _is_here(train.base) else _published(config, train.base),
        workload=load,
        parameters=parameters,
        terms=terms,
        branches=branches,
        tokens=tokens,
        longest=longest,
        sequences=sequences,
        steps=math.ceil(train.epochs * math.ceil(sequences / train.global_batch)),  # as the loop counts them
        model_flops=run * total,
        run_flops=run * (total + recomputed_flops(terms, compute.activation_checkpointing)),
        memory_gb=static_memory(train, compute, parameters) | {"activations": sum(activations.values())},
        activations_gb=activations,
        test_pairs=count_test_pairs(mixture, entries),
        caption_flops=sum(term.forward for term in family.flops(config, prompt, 1, settings) if term.name != ADAPTERS),
        gpus=max(1, compute.workers),
    )


def plan_alignment(
    train: Train,
    settings: Settings,
    compute: Compute,
    entries: Mapping[str, DatasetEntry],
    convert: Convert,
    mixture: Path,
) -> tuple[Plan | None, str]:
    """The plan of the phase before the fine-tuning, on its own datasets, or why it has none: they cannot be counted."""
    if settings.align is None:
        return None, "the model has no alignment"
    phase, aligned = of_alignment(train, settings)
    others = [name for name in entries if name not in settings.align.datasets]
    try:
        return make_plan(phase, aligned, compute, entries, convert, mixture, others), ""
    except ParamsError as error:
        return None, str(error).removeprefix("plan: ")


def activations_of(model: Any, family: Family, compute: Compute, prompt: float, supervised: float) -> dict[str, float]:
    """GB that a micro-batch of sequences of so many tokens keeps for its backward pass, by where they arise."""
    from m3diff.commands.plan.memory import count_activations

    last = math.ceil(supervised)
    kept = count_activations(model, family, compute.activation_checkpointing, math.ceil(prompt) + last, last)
    return {name: compute.micro_batch * size / GIGA for name, size in kept.items()}


def _published(config: Any, base: Path) -> str:
    name = config.name_or_path
    fetch = f" (`hf download {name} --local-dir {base}`)" if "/" in name else ""
    return f"published shapes of {name}, {base} is not here{fetch}"


def _is_here(base: Path) -> bool:
    return (base / "config.json").is_file()


def meta_model(config: Any, family: Family, settings: Settings, precision: str) -> Any:
    """The model as it trains, without storage and without peft's wrapper."""
    import torch

    from m3diff.models.tuning import prepare

    with torch.device("meta"):
        model = family.build(config)
        prepare(model, family, settings)
    return model.to(torch.bfloat16 if precision == "bf16" else torch.float32)


def parameters_of(model: Any, family: Family) -> dict[str, int]:
    """Parameters by part, those that train and those that are frozen."""
    groups = {group: 0 for part in family.parts for group in (part, f"{part} (frozen)")}
    for name, parameter in model.named_parameters():
        part = family.part_of(name)
        groups[part if parameter.requires_grad else f"{part} (frozen)"] += parameter.numel()
    return {group: count for group, count in groups.items() if count}


def recomputed_flops(terms: Sequence[Term], activation_checkpointing: str) -> float:
    """FLOPs of one sequence's forward that backward runs again; the norms and products of `selective` count as none."""
    return sum(term.forward for term in terms if term.recomputed and activation_checkpointing == "full")


def static_memory(train: Train, compute: Compute, parameters: Mapping[str, int]) -> dict[str, float]:
    """GB on one GPU: ZeRO 1 shares out master weights and moments (12 bytes), 2 gradients too, 3 weights too."""
    ranks = max(1, compute.workers)
    total = sum(parameters.values())
    trained = sum(count for group, count in parameters.items() if not group.endswith("(frozen)"))
    width = 2 if train.precision == "bf16" else 4
    return {
        "weights": width * total / (ranks if compute.zero_stage >= 3 else 1) / GIGA,
        "gradients": GRADIENT_BYTES * trained / (ranks if compute.zero_stage >= 2 else 1) / GIGA,
        "optimizer": OPTIMIZER_BYTES * trained / (ranks if compute.zero_stage >= 1 else 1) / GIGA,
    }


def check_memory(
    train: Train,
    settings: Settings,
    compute: Compute,
    entries: Mapping[str, DatasetEntry],
    convert: Convert,
    mixture: Path,
) -> None:
    """Refuse a run that its GPUs cannot hold, before anything is loaded. Takes seconds; nothing without `compute.gpu`.

    The memory of one GPU is that of the smallest that torch finds here, else of `compute.gpu_kind`. Where neither is
    known nothing is refused.

    Raises:
        DoesNotFit: names what is needed, what there is and what to lower.
    """
    if not compute.gpu:
        return
    kind = GPUS.get(compute.gpu_kind or "")
    if room := found_memory_gb() or (kind and kind.memory_gb):
        before, _ = plan_alignment(train, settings, compute, entries, convert, mixture)
        for plan in (before, make_plan(train, settings, compute, entries, convert, mixture)):
            if plan is not None:
                check_fits(compute, plan, room)


def found_memory_gb() -> float | None:
    """Memory of the smallest GPU of this machine, None where torch finds none."""
    import torch

    sizes = [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())]
    return min(sizes) / GIGA if sizes else None


def check_fits(compute: Compute, plan: Plan, memory_gb: float) -> None:
    """Raises DoesNotFit, naming what is needed, what there is and what to lower."""
    room = memory_gb * (1 - RESERVE)
    if plan.memory_total_gb <= room:
        return
    parts = ", ".join(f"{name} {size:.1f}" for name, size in plan.memory_gb.items())
    raise DoesNotFit(
        f"compute: needs {plan.memory_total_gb:.1f} GB a GPU ({parts}) but {memory_gb:.4g} GB hold {room:.1f}; "
        + " or ".join([*_remedies(compute, plan), "take larger GPUs"])
    )


def _remedies(compute: Compute, plan: Plan) -> list[str]:
    """What would lower the memory; nothing that has no effect."""
    way = compute.activation_checkpointing
    stronger = {"none": "selective or full", "selective": "full"}.get(way)
    remedies = {
        f"lower compute.micro_batch (now {compute.micro_batch})": compute.micro_batch > 1,
        f"raise compute.zero_stage (now {compute.zero_stage})": compute.zero_stage < 3 and plan.gpus > 1,
        f"set compute.activation_checkpointing to {stronger} (now {way})": stronger is not None,
        "lower train.max_captions_per_sequence": plan.branches > 1,
    }
    return [remedy for remedy, helps in remedies.items() if helps]


def print_plan(train: Train, compute: Compute, plan: Plan, gpu: Gpu | None, hfu: float) -> None:
    """Print the plan as tables; times are for a kind of GPU, at a share of its peak (hardware FLOPs utilisation,
    HFU)."""
    recomputation = compute.activation_checkpointing
    print("\n".join([*_parameter_lines(plan), *_workload_lines(train, plan), *_flops_lines(plan, recomputation)]))
    print("\n".join([*_memory_lines(plan, gpu), *_time_lines(train, plan, gpu, hfu)]))


def _parameter_lines(plan: Plan) -> list[str]:
    rows = [f"  {name:<28} {count / 1e6:>12,.2f} M" for name, count in plan.parameters.items()]
    return [f"parameters: {plan.base}", *rows]


def _workload_lines(train: Train, plan: Plan) -> list[str]:
    load, most = plan.workload, train.max_captions_per_sequence
    return [
        f"counted: {load.counted}",
        *(_split_lines(load) if load.splits else _source_lines(load)),
        f"workload: {load.pairs:,} pairs, {load.references:,} references, {load.references_per_pair:.2f} a pair; "
        f"{load.prompt_tokens:.1f} tokens a prompt, {load.reference_tokens:.1f} a reference",
        f"  max_captions_per_sequence {'all' if most is None else most}: {plan.sequences:,} sequences of "
        f"{plan.tokens:,.0f} tokens, {plan.branches:.2f} references each; {plan.steps:,} steps of {train.global_batch}",
    ]


def _source_lines(load: Workload) -> list[str]:
    return [
        f"  {name:<28} {source.pairs:>9,} pairs {source.references:>9,} references"
        for name, source in load.sources.items()
    ]


def _split_lines(load: Workload) -> list[str]:
    """What trains of each split beside the published pairs, the sums, and the paper's where the sources are its own."""
    rows = [
        f"  {f'{use.dataset} {use.split}':<28} {use.used.pairs:>9,} pairs {use.used.references:>9,} references of "
        f"{use.published:,} published pairs{'' if use.counted else '; references estimated'}"
        for use in load.splits
    ]
    published = sum(use.published for use in load.splits)
    rows.append(
        f"  {'sum':<28} {load.pairs:>9,} pairs {load.references:>9,} references of {published:,} published pairs"
    )
    if set(load.sources) == set(SOURCES):
        rows.append(f"  {'the paper':<28} {f'{PAIRS // 1000}k':>9} pairs {f'{SAMPLES // 1000}k':>9} references")
    return rows


def _flops_lines(plan: Plan, recomputation: str) -> list[str]:
    forward, total = sum(term.forward for term in plan.terms), sum(term.total for term in plan.terms)
    again = recomputed_flops(plan.terms, recomputation)
    rows = [f"  {term.name:<28} {term.forward / TERA:>9.3f} {term.total / TERA:>9.3f}" for term in plan.terms]
    return [
        f"FLOPs of one sequence, TFLOP   {'forward':>9} {'total':>9}",
        *rows,
        f"  {'sum of the model':<28} {forward / TERA:>9.2f} {total / TERA:>9.2f}",
        f"  {f'recomputation, {recomputation}':<28} {'':>9} {again / TERA:>9.2f}",
        f"  per reference {(total + again) / plan.branches / TERA:.2f} TFLOP; "
        f"the run {plan.run_flops / EXA:.2f} EFLOP, {plan.model_flops / EXA:.2f} of them the model's",
    ]


def _memory_lines(plan: Plan, gpu: Gpu | None) -> list[str]:
    counted = "the mean sequence" if plan.longest is None else f"the longest sequence, {plan.longest} reference(s)"
    rows = [f"  {name:<28} {size:>9.1f}" for name, size in plan.memory_gb.items()]
    parts = [f"    {name:<26} {size:>9.2f}" for name, size in plan.activations_gb.items()]
    room = f" of {gpu.memory_gb * (1 - RESERVE):.1f}, {gpu.name} less {RESERVE:.0%}" if gpu else ""
    return [
        f"memory of one GPU, GB; activations counted for {counted}",
        *rows,
        *parts,
        f"  {'sum':<28} {plan.memory_total_gb:>9.1f}{room}",
    ]


def _time_lines(train: Train, plan: Plan, gpu: Gpu | None, hfu: float) -> list[str]:
    if gpu is None:
        return [f"time: name a kind of GPU by --gpu or compute.gpu_kind: {', '.join(GPUS)}"]
    if train.precision != "bf16":
        return [f"time: peaks are known for bf16, and train.precision is {train.precision}"]
    hours = plan.gpu_hours(gpu.bf16_tflops, hfu)
    speed = plan.workload.references * train.epochs / hours / 3600
    return [
        f"time on {gpu.name} ({gpu.bf16_tflops:g} TFLOP/s dense bf16) at {hfu:.0%} HFU, which is {plan.mfu(hfu):.1%} "
        "MFU (without recomputation):",
        f"  {_took(hours, plan.gpus)} on {plan.gpus} GPU(s), {speed:.1f} captions/s a GPU",
        *_caption_lines(plan, gpu, hfu),
    ]


def alignment_lines(
    train: Train, settings: Settings, plan: Plan | None, uncounted: str, gpu: Gpu | None, hfu: float
) -> list[str]:
    """What trains before the fine-tuning, and what it costs, or why that is not known; nothing without it."""
    if settings.align is None:
        return []
    align = settings.align
    rates = ", ".join(f"{part} {rate:g}" for part, rate in align.rates.items() if rate is not None)
    what = (
        f"before it an alignment: {align.epochs:g} epoch(s) of {', '.join(align.datasets)}, "
        f"{align.global_batch} sequences a step ({rates})"
    )
    if plan is None:
        return [what, f"  not counted: {uncounted}"]
    load = plan.workload
    took = ""
    if gpu and train.precision == "bf16":  # no other peak is known
        took = f", {_took(plan.gpu_hours(gpu.bf16_tflops, hfu), plan.gpus)} on {plan.gpus} GPU(s)"
    return [
        what,
        f"  {load.pairs:,} pairs, {load.references:,} references, {plan.steps:,} steps; "
        f"{plan.run_flops / EXA:.2f} EFLOP{took}; memory of one GPU {plan.memory_total_gb:.1f} GB",
    ]


def short_run(train: Train, plan: Plan) -> str | None:
    """In words, where the run takes too few steps to learn from."""
    if plan.steps >= FEW_STEPS:
        return None
    epochs = math.ceil(train.epochs * 3 * FEW_STEPS / plan.steps)
    return (
        f"the run takes {plan.steps} optimizer step(s), in which a model learns little; a small collection wants more "
        f"epochs: train.epochs {epochs} is about {3 * FEW_STEPS} steps"
    )


def _took(hours: float, gpus: int) -> str:
    """`26.1 GPU-hours, 3.3 h`; of a short run in minutes."""
    if hours >= 0.1:
        return f"{hours:.1f} GPU-hours, {hours / gpus:.1f} h"
    return f"{60 * hours:.2f} GPU-minutes, {60 * hours / gpus:.2f} min"


def _caption_lines(plan: Plan, gpu: Gpu, hfu: float) -> list[str]:
    if not plan.test_pairs:
        return []
    minutes = plan.caption_minutes(gpu.bf16_tflops, hfu, plan.test_pairs)
    return [
        f"captions of {plan.test_pairs:,} test pairs: {plan.caption_flops / TERA:.1f} TFLOP a pair to read, "
        f"{minutes:.1f} GPU-minutes, {minutes / plan.gpus:.1f} min on {plan.gpus} GPU(s); decoding and the control "
        "come on top",
    ]

"""Describe a plan as text. Time, cost, warnings and memory come first, then the details."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from m3diff.commands.plan.figures import FROZEN, GIGA, TERA, BasicPlan, Plan, has_base, recomputed_flops
from m3diff.commands.plan.fit import RESERVE, GpuMemory, smallest_gpu_gb
from m3diff.commands.plan.speed import Duration, UnknownDuration, estimate_duration, format_devices
from m3diff.commands.plan.warnings import warnings_of_plan
from m3diff.commands.plan.without_flops import MeasuredTokens, measure_tokens
from m3diff.commands.plan.workload import LENGTHS_ESTIMATED, DatasetShare
from m3diff.models import FAMILIES
from m3diff.models.flops import ADAPTERS
from m3diff.records.errors import Fault, format_count
from m3diff.records.sample import PAIR
from m3diff.settings.compute import Compute, Gpu
from m3diff.stages.convert.stage import PAPER_DATASETS, PAPER_SAMPLES
from m3diff.stages.predict.stage import CONTROL_PAIRS

UNIT_PREFIXES = ("", "k", "M", "G", "T", "P", "E")

PAPER_ROW = "published in the paper"  # name of the row with the counts of the M3Diff paper
PAPER_PAIRS = 145_000  # pairs in the mixture of the M3Diff paper

CENT = 0.01

# What image sets are called, by their number of images
KINDS_OF_IMAGE_SETS = {0: "texts", 1: "images", PAIR: "pairs"}


@dataclass(frozen=True)
class Unit:
    """A unit of measure and its size."""

    name: str
    size: float


def choose_unit(value: float, name: str, largest_prefix: str = "E") -> Unit:
    """Return the largest unit, up to `largest_prefix`, in which the value is at least 1: GFLOP for 3e9 FLOP."""
    power = 0
    while value >= 1000 ** (power + 1) and UNIT_PREFIXES[power] != largest_prefix:
        power += 1
    return Unit(name=f"{UNIT_PREFIXES[power]}{name}", size=1000.0**power)


def format_amount(value: float, name: str, decimals: int = 2) -> str:
    """Return a value in the unit that fits, such as `3.00 GFLOP`."""
    unit = choose_unit(value, name)
    return f"{value / unit.size:,.{decimals}f} {unit.name}"


def format_estimate(value: float) -> str:
    """Return a number with two significant digits, because an estimate is not more precise than that."""
    if value <= 0:
        return "0"
    digits = 1 - math.floor(math.log10(value))
    return f"{round(value, digits):,.{max(0, digits)}f}"


def format_duration(hours: float, device: str = "") -> str:
    """Return a duration with two significant digits in the unit that fits, such as `4.7 GPU-hours` or `40 seconds`.

    Args:
        device: type of device whose time is meant, such as GPU; empty for elapsed time.
    """
    prefix = f"{device}-" if device else ""
    if hours >= 1:
        return f"{format_estimate(hours)} {prefix}hours"
    if hours >= 1 / 60:
        return f"{format_estimate(60 * hours)} {prefix}minutes"
    return f"{format_estimate(3600 * hours)} {prefix}seconds"


def print_plan(plan: BasicPlan, compute: Compute, gpu: Gpu | None, hfu: float) -> None:
    """Print the plan: time, cost, warnings and memory, then the details. Time and cost are unknown without FLOPs.

    Args:
        gpu: kind of GPU to plan for; None uses what is known about this machine.
        hfu: assumed share of the GPU's peak (hardware FLOPs utilisation).
    """
    if gpu is not None and not compute.gpu:  # the user asks how long the run would take on this kind of GPU
        gpu_compute = compute.model_copy(update={"gpu": True})
        plan = replace(plan, run=replace(plan.run, compute=gpu_compute))
    machine_gb = smallest_gpu_gb() if compute.gpu and gpu is None else None
    gpu_memory = None
    if gpu is not None:
        gpu_memory = GpuMemory(name=gpu.name, memory_gb=gpu.memory_gb)
    elif machine_gb is not None:
        gpu_memory = GpuMemory(name="this machine's GPU", memory_gb=machine_gb)
    warnings = list(warnings_of_plan(plan))
    if isinstance(plan, Plan):
        lines = plan_lines(plan, estimate_duration(plan, gpu, hfu), gpu_memory, warnings)
    else:
        lines = lines_without_flops(plan, measure_tokens(plan.run), gpu_memory, warnings)
    print("\n".join(lines))


def plan_lines(
    plan: Plan, duration: Duration | UnknownDuration, gpu_memory: GpuMemory | None, warnings: Sequence[Fault]
) -> Iterator[str]:
    """Yield the plan as lines of text.

    Args:
        gpu_memory: memory of the GPU that the run must fit into; None if it is unknown or the run does not use a GPU.
    """
    yield from _time_lines(plan, duration)
    yield from (f"  warning: {warning}" for warning in warnings)
    yield from _memory_summary(plan, gpu_memory)
    yield _steps_line(plan)
    yield from _workload_lines(plan)
    yield from _memory_lines(plan)
    yield from _flops_lines(plan)
    yield from _parameter_lines(plan)


def lines_without_flops(
    plan: BasicPlan, tokens: MeasuredTokens | None, gpu_memory: GpuMemory | None, warnings: Sequence[Fault]
) -> Iterator[str]:
    """Yield the plan of a family whose FLOPs and activations cannot be counted as lines of text.

    Args:
        tokens: the tokens of some sequences; None if there is no base or no mixture.
        gpu_memory: memory of the GPU that the run must fit into; None if it is unknown or the run does not use a GPU.
    """
    family = plan.run.settings.family
    yield f"  FLOPs, activations and hours are not estimated for models of the family {family}"
    yield from (f"  warning: {warning}" for warning in warnings)
    base = plan.train.base
    if plan.parameters:
        yield from _memory_summary(plan, gpu_memory)
    else:
        yield f"  memory: unknown, because there is no base in {base}"
    yield _steps_line(plan)
    yield _packing_line(plan, tokens)
    yield f"data: {plan.workload.origin.replace(f', {LENGTHS_ESTIMATED}', '')}"
    yield from _share_lines(plan)
    yield f"  {_sequences_text(plan)}, each with {plan.references_per_sequence:.2f} {_answers(plan)} on average"
    if plan.parameters:
        yield f"memory of each {_device(plan)} in {_memory_unit(plan).name}, without activations"
        yield from _memory_table(plan)
        yield f"parameters in millions: {plan.base_origin}"
        for group, count in plan.parameters.items():
            name = group.replace(FROZEN, ", frozen") if group.endswith(FROZEN) else f"{group}, trained"
            yield f"  {name:<28} {count / 1e6:>12,.2f}"


def _packing_line(plan: BasicPlan, tokens: MeasuredTokens | None) -> str:
    """Return the line that says how sequences are packed and how many tokens that saves."""
    if tokens is None:
        missing = "no mixture of this run"
        remedy = "run `dvc repro convert` first"
        if not has_base(plan.train.base):
            missing = "no base"
            remedy = "download it first"
        folder = plan.run.mixture if has_base(plan.train.base) else plan.train.base
        return f"  packed by the model's own cache: tokens unknown, because there is {missing} in {folder}; {remedy}"
    times = tokens.separate_tokens / tokens.packed_tokens
    packed_tokens = format_count(round(tokens.packed_tokens), "token")
    return (
        f"  packed by the model's own cache: {packed_tokens} per sequence in place of "
        f"{round(tokens.separate_tokens):,} with separate samples ({times:.1f} times fewer), of which "
        f"{round(tokens.image_tokens):,} are visual; measured on {format_count(tokens.sequences, 'image set')}"
    )


def _device(plan: BasicPlan) -> str:
    return "GPU" if plan.run.compute.gpu else "process"


def _time_lines(plan: Plan, duration: Duration | UnknownDuration) -> Iterator[str]:
    if isinstance(duration, UnknownDuration):
        yield f"  time: unknown; {duration.remedy}"
        return
    device = _device(plan)
    hours = duration.device_hours
    captions_per_second = plan.workload.references * plan.train.epochs / hours / 3600
    total = ""
    if device == "GPU" and plan.devices > 1:
        total = f" ({format_duration(hours, device)} in total)"
    devices = format_devices(plan.devices, plan.run.compute.gpu)
    yield (
        f"  time: about {format_duration(hours / plan.devices)} on {devices}{total}, "
        f"{format_estimate(captions_per_second)} captions per second on each {device}"
    )
    yield f"    {duration.basis}"
    if plan.test_pairs:
        controls = 2 * min(plan.test_pairs, CONTROL_PAIRS)
        caption_hours = duration.caption_hours(plan, plan.test_pairs + controls)
        yield (
            f"    captioning {format_count(plan.test_pairs, 'test pair')} and "
            f"{format_count(controls, 'control pair')}: about "
            f"{format_duration(caption_hours)} on one {device} to read images and prompts. Writing the captions is not "
            "included and takes most of the time"
        )
    compute = plan.run.compute
    if compute.gpu and compute.gpu_hour_price is not None:
        cost = hours * compute.gpu_hour_price
        amount = f"about {format_estimate(cost)}" if cost >= CENT else f"under {CENT:g}"
        currency = compute.gpu_hour_currency
        price = f"{compute.gpu_hour_price:g} {currency}"
        yield f"  cost: {amount} {currency}, at {price} per GPU-hour (compute.gpu_hour_price)"


def _memory_summary(plan: BasicPlan, gpu_memory: GpuMemory | None) -> Iterator[str]:
    total = format_amount(plan.memory_total_gb * GIGA, "B", decimals=1)
    if not isinstance(plan, Plan):
        total += " without activations"
    if gpu_memory is None:
        yield f"  memory: {total} on each {_device(plan)}"
        return
    verdict = "fits" if plan.memory_total_gb <= gpu_memory.usable_gb else "DOES NOT FIT"
    yield (
        f"  memory: {total} on each GPU: {verdict} into {gpu_memory.usable_gb:.1f} GB ({gpu_memory.name} has "
        f"{gpu_memory.memory_gb:.4g} GB, of which {RESERVE:.0%} is reserved for CUDA and fragmentation)"
    )


def _steps_line(plan: BasicPlan) -> str:
    workload = plan.workload
    pairs = format_count(workload.pairs, "pair" if workload.has_only_pairs else "image set")
    captions = format_count(workload.references, "caption" if workload.has_only_pairs else "sample")
    steps_per_epoch = format_count(plan.steps_per_epoch, "step")
    batch = format_count(plan.train.global_batch, "sequence")
    steps = format_count(plan.steps, "step")
    epochs = format_count(plan.train.epochs, "epoch")
    return f"  data: {pairs} with {captions}; {steps_per_epoch} of {batch} per epoch, {steps} in {epochs}"


def _workload_lines(plan: Plan) -> Iterator[str]:
    workload = plan.workload
    answers = _answers(plan)
    yield f"data: {workload.origin}"
    yield from _share_lines(plan)
    answer = answers.removesuffix("s")
    yield f"  {workload.prompt_tokens:.1f} tokens per prompt, {workload.reference_tokens:.1f} tokens per {answer}"
    tokens = format_count(round(plan.tokens_per_sequence), "token")
    yield (f"  {_sequences_text(plan)}, each with {tokens} and {plan.references_per_sequence:.2f} {answers} on average")
    if len(plan.sequences_by_images) > 1:
        for sequence in plan.sequences_by_images:
            images = format_count(sequence.images, "image")
            tokens = format_count(round(sequence.tokens), "token")
            tflops = sum(term.total for term in sequence.terms) / TERA
            yield f"  {sequence.sequences:>9,} with {images}, {tokens} and {tflops:.3g} TFLOP each"


def _answers(plan: BasicPlan) -> str:
    """Return what the samples of a run are called in the plural."""
    return "references" if plan.workload.has_only_pairs else "samples"


def _share_lines(plan: BasicPlan) -> Iterator[str]:
    """Yield a line for the image sets and samples of each dataset, and their sum."""
    workload = plan.workload
    answers = _answers(plan)
    for share in workload.shares:
        noun = "published pair" if share.images == PAIR else "published row"
        note = f" of {format_count(share.published_pairs, noun)}" if share.published_pairs else ""
        if not share.is_counted:
            note += "; references estimated"
        name = f"{share.dataset} {share.split}"
        yield f"  {name:<28} {share.pairs:>9,} {_kind_of(share)} {share.references:>9,} {answers}{note}"
    published_pairs = sum(share.published_pairs for share in workload.shares)
    noun = "published pair" if workload.has_only_pairs else "published row"
    note = f" of {format_count(published_pairs, noun)}" if published_pairs else ""
    pairs = "pairs" if workload.has_only_pairs else "image sets"
    yield f"  {'sum ':<28} {workload.pairs:>9,} {pairs} {workload.references:>9,} {answers}{note}"
    if set(workload.counts_by_dataset) == set(PAPER_DATASETS):
        pairs = f"{PAPER_PAIRS // 1000}k"
        references = f"{PAPER_SAMPLES // 1000}k"
        yield f"  {PAPER_ROW:<28} {pairs:>9} pairs {references:>9} references"


def _sequences_text(plan: BasicPlan) -> str:
    max_captions = plan.train.max_captions_per_sequence
    limit = "all" if max_captions is None else max_captions
    return f"max_captions_per_sequence {limit}: {format_count(plan.sequences, 'sequence')}"


def _kind_of(share: DatasetShare) -> str:
    """Return what the image sets of a share are called in the plural."""
    if share.are_couples:
        return "couples"
    return KINDS_OF_IMAGE_SETS[share.images]


def _memory_lines(plan: Plan) -> Iterator[str]:
    sequence = "a sequence of mean length"
    if plan.max_references is not None:
        sequence = f"the longest sequence, with {format_count(plan.max_references, 'reference')}"
    yield f"memory of each {_device(plan)} in {_memory_unit(plan).name}, with the activations of {sequence}"
    yield from _memory_table(plan, plan.activations_gb)


def _memory_unit(plan: BasicPlan) -> Unit:
    return choose_unit(plan.memory_total_gb * GIGA, "B", largest_prefix="G")


def _memory_table(plan: BasicPlan, activations_gb: Mapping[str, float] | None = None) -> Iterator[str]:
    """Yield a line for each purpose of memory, for each part's activations, and for the sum."""
    unit = _memory_unit(plan)
    for name, size in plan.memory_gb.items():
        yield f"  {name:<28} {size * GIGA / unit.size:>9.1f}"
    for name, size in (activations_gb or {}).items():
        yield f"    {name:<26} {size * GIGA / unit.size:>9.2f}"
    yield f"  {'sum':<28} {plan.memory_total_gb * GIGA / unit.size:>9.1f}"


def _flops_lines(plan: Plan) -> Iterator[str]:
    checkpointing = plan.run.compute.activation_checkpointing
    forward = sum(term.forward for term in plan.terms)
    total = sum(term.total for term in plan.terms)
    recomputed = recomputed_flops(plan.terms, checkpointing)
    unit = choose_unit(total, "FLOP", largest_prefix="T")
    yield f"{f'FLOPs of one sequence, {unit.name}':<30} {'forward':>9} {'total':>9}"
    for term in plan.terms:
        name = "LoRA adapters" if term.name == ADAPTERS else term.name
        yield f"  {name:<28} {term.forward / unit.size:>9.3f} {term.total / unit.size:>9.3f}"
    yield f"  {'sum of the model':<28} {forward / unit.size:>9.3f} {total / unit.size:>9.3f}"
    yield f"  {f'recomputation, {checkpointing}':<28} {'':>9} {recomputed / unit.size:>9.3f}"
    run_amount = format_amount(plan.run_flops, "FLOP")
    caption_amount = format_amount(plan.caption_flops, "FLOP", decimals=1)
    yield f"  whole run: {run_amount}; reading the images and the prompt of a pair to caption: {caption_amount}"


def _parameter_lines(plan: Plan) -> Iterator[str]:
    settings = plan.run.settings
    parts_with_adapters = FAMILIES[settings.family].lora_targets if settings.lora.rank else {}
    has_adapters = False
    yield f"parameters in millions: {plan.base_origin}"
    for group, count in plan.parameters.items():
        name = group.replace(FROZEN, ", frozen")
        if group in parts_with_adapters:
            name = f"{group}, LoRA adapters"
            has_adapters = True
        yield f"  {name:<28} {count / 1e6:>12,.2f}"
    if has_adapters:
        yield "  LoRA adapters are small matrices that are trained instead of the LLM's own matrices, which are frozen"

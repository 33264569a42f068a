"""What a run comes to, printed before its first step, and the line printed of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m3diff.models.family import MODULE_UPDATE_RATIO, Family, Settings
from m3diff.settings.gpus import gpu_of
from m3diff.stages.train.batches import Loader, Schedule
from m3diff.stages.train.packing import pack

COUNTED = 2048
"""Sequences whose tokens are counted; the mean of these stands for a longer epoch."""


@dataclass(frozen=True)
class Work:
    """A run in numbers. Tokens and FLOPs are means of one sequence."""

    accumulation: int
    pairs: int
    references: int
    sequences: int  # an epoch
    tokens: float
    supervised: float
    flops: float


def measure(
    schedule: Schedule, loader: Loader, accumulation: int, family: Family, config: Any, settings: Settings
) -> Work:
    """Count the first epoch; of more than COUNTED sequences, the tokens of as many in its order."""
    sequences = schedule.epoch(0)
    lengths = []
    for rows in sequences[:COUNTED]:
        packed = pack([loader.pairs_of(rows)])
        lengths.append((packed.input_ids.shape[1], len(packed.labels)))
    tokens, supervised = (float(value) for value in np.mean(lengths, axis=0))
    return Work(
        accumulation=accumulation,
        pairs=len(schedule.samples.pairs()),
        references=len(schedule.samples),
        sequences=len(sequences),
        tokens=tokens,
        supervised=supervised,
        flops=sum(term.total for term in family.flops(config, tokens, supervised, settings)),
    )


def describe(work: Work, schedule: Schedule, parameters: Mapping[str, int]) -> list[str]:
    """The lines before the first step. `parameters` as `tuning.parameter_counts` gives them."""
    about = "" if work.sequences <= COUNTED else "about "
    trains = {part: n for part, n in parameters.items() if part not in ("trainable", "frozen") and n}
    batch = schedule.global_batch
    return [
        f"{batch} sequences a step = {schedule.micro_batch} micro-batch x {work.accumulation} accumulated "
        f"x {schedule.ranks} worker(s)",
        f"{work.pairs:,} pairs, {work.references:,} references in {work.sequences:,} sequences an epoch",
        f"{about}{work.tokens * work.sequences:,.0f} tokens an epoch ({work.tokens:.1f} a sequence, "
        f"{work.supervised:.1f} of them supervised)",
        f"{schedule.epochs:g} epoch(s) x {schedule.steps_per_epoch:,} steps = {schedule.steps:,} steps",
        f"{parameters['trainable']:,} parameters train ("
        + ", ".join(f"{part} {n:,}" for part, n in trains.items())
        + f"), {parameters['frozen']:,} are frozen",
        f"{flop(work.flops * batch)} a step",
    ]


def flop(count: float) -> str:
    """`7.15 GFLOP`, `3.2 PFLOP`."""
    unit, name = next((u, n) for u, n in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (0, "")) if count >= u)
    return f"{count / (unit or 1):.3g} {name}FLOP"


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of one device at its best, None where it is not known. Kinds that differ in memory alone have one peak."""
    gpu = gpu_of(device_name, memory_gb=0)
    return gpu.bf16_tflops * 1e12 if gpu and precision == "bf16" else None


def mfu(work: Work, global_batch: int, seconds_per_step: float, peak: float | None, ranks: int) -> float | None:
    """Model FLOPs utilisation: the share of the devices' peak that the step's own FLOPs come to."""
    return None if peak is None else work.flops * global_batch / seconds_per_step / (peak * ranks)


def progress_line(
    step: int,
    steps: int,
    values: Mapping[str, float],
    updates: Sequence[float],
    rates: Mapping[str, float],
    captions_per_s: float,
    seconds_per_step: float,
    used: float | None,
) -> str:
    """`step 20/1810 (1.1 %)  loss 1.2345  grad_norm 2.10  module_update_ratio 0.21  lr_vision 4.00e-05  85 captions/s
    MFU 41 %  ETA 11 min`, in one line; of several levels of the module all `updates`, in their order."""
    named = "".join(f"  {name} {value:.4f}" for name, value in values.items())
    named += f"  {MODULE_UPDATE_RATIO} {' '.join(f'{ratio:.2g}' for ratio in updates)}" if updates else ""
    speeds = "".join(f"  {name} {rate:.2e}" for name, rate in rates.items())
    share = "" if used is None else f"  MFU {used:.0%}"
    left = eta((steps - step) * seconds_per_step)
    return (
        f"step {step}/{steps} ({step / steps:.1%}){named}{speeds}  {captions_per_s:.0f} captions/s{share}  ETA {left}"
    )


def eta(seconds: float) -> str:
    """`45 s`, `11 min`, `3 h 20 min`."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"

"""Figures of a run: what it comes to, printed before its first step; the line of a step; and the curves."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from m3diff.models.family import MODULE_UPDATE_RATIO
from m3diff.records.files import write_atomic
from m3diff.settings.compute import gpu_of
from m3diff.stages.train.batches import Loader, Schedule
from m3diff.stages.train.packing import pack

COUNTED = 2048
"""Sequences whose tokens are counted; their mean stands for a longer epoch."""

NOTHING = 2.0**-8
"""Half the relative distance of neighbouring numbers in bf16: a feature in bf16 to which less is added stays the same.
A module in use is far from it: the embedded one starts at 0.5 and ends there."""


def mean_tokens(schedule: Schedule, loader: Loader) -> tuple[float, float]:
    """Return the tokens of a sequence and those of them that are supervised: the means of the first epoch, or of its
    first COUNTED sequences."""
    packed = [pack([loader.pairs_of(rows)]) for rows in schedule.epoch(0)[:COUNTED]]
    tokens, supervised = np.mean([(each.tokens, len(each.labels)) for each in packed], axis=0).tolist()
    return tokens, supervised


def describe(
    schedule: Schedule, tokens: float, supervised: float, accumulated: int, flops: float, parameters: Mapping[str, int]
) -> list[str]:
    """Return the lines before the first step.

    Args:
        tokens: of a sequence, `supervised` of them.
        accumulated: micro-batches of a worker in a step.
        flops: of a step.
        parameters: as `tuning.parameter_counts` gives them.
    """
    sequences, pairs, references = len(schedule.epoch(0)), len(schedule.samples.pairs()), len(schedule.samples)
    about = "" if sequences <= COUNTED else "about "
    trains = [f"{part} {n:,}" for part, n in parameters.items() if part not in ("trainable", "frozen") and n]
    return [
        f"{schedule.global_batch} sequences a step = {schedule.micro_batch} micro-batch x {accumulated} accumulated "
        f"x {schedule.ranks} worker(s)",
        f"{pairs:,} pairs, {references:,} references in {sequences:,} sequences an epoch",
        f"{about}{tokens * sequences:,.0f} tokens an epoch ({tokens:.1f} a sequence, {supervised:.1f} of them "
        "supervised)",
        f"{schedule.epochs:g} epoch(s) x {schedule.steps_per_epoch:,} steps = {schedule.steps:,} steps",
        f"{parameters['trainable']:,} parameters train ({', '.join(trains)}), {parameters['frozen']:,} are frozen",
        f"{flops / 1e12:.3g} TFLOP a step",
    ]


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of one device, None where it is not known. Kinds that differ in memory have one peak."""
    gpu = gpu_of(device_name)
    return gpu.bf16_tflops * 1e12 if gpu and precision == "bf16" else None


def columns(parts: Iterable[str], module: Iterable[str], datasets: Iterable[str]) -> tuple[str, ...]:
    """Return the curves' columns: step, epoch, loss, a learning rate for each part, grad_norm, the `module`'s numbers,
    val_loss over all and of each dataset, val_cider."""
    rates, losses = [f"lr_{part}" for part in parts], [f"val_loss_{dataset}" for dataset in datasets]
    return ("step", "epoch", "loss", *rates, "grad_norm", *module, "val_loss", *losses, "val_cider")


class Curve:
    """The run's curves, a row of text per step; what a step does not have stays empty. They travel with each
    checkpoint, so that a resumed run loses none."""

    def __init__(self, names: Sequence[str], rows: list[dict[str, str]] | None = None) -> None:
        self.names, self.rows = tuple(names), rows or []

    def add(self, values: Mapping[str, float | None]) -> None:
        """Add a step's row."""
        self.rows.append({name: "" for name in self.names})
        self.fill(values)

    def fill(self, values: Mapping[str, float | None]) -> None:
        """Fill in more values of the last row."""
        unknown = values.keys() - set(self.names)
        assert not unknown, f"no such columns: {sorted(unknown)}"
        self.rows[-1] |= {name: f"{value:.6g}" for name, value in values.items() if value is not None}

    def last(self, column: str) -> float:
        """Return the last value of a column, NaN where it has none."""
        return next((float(row[column]) for row in reversed(self.rows) if row[column]), float("nan"))

    def latest(self, wanted: Iterable[str]) -> dict[str, float]:
        """Return `step` and the columns of the last row that has a value in all of them; nothing where no row has."""
        wanted = ("step", *wanted)
        found = next((row for row in reversed(self.rows) if all(row[name] for name in wanted)), None)
        return {name: float(found[name]) for name in wanted} if found else {}

    def read(self, path: Path) -> None:
        """Take the rows of an earlier part of the run; columns that are not this run's are left out."""
        self.rows = [{name: row.get(name, "") for name in self.names} for row in read_rows(path)]

    def write(self, path: Path) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomic(path, text.getvalue())


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file of curves."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def with_alignment(alignment: Path, curves: Path) -> None:
    """Put the rows of the alignment's curves before those of `curves`, in place: its last step is 0."""
    first, second = read_rows(alignment), read_rows(curves)
    last = int(first[-1]["step"])
    before = [row | {"step": str(int(row["step"]) - last)} for row in first]
    Curve(list(dict.fromkeys([*second[0], *first[0]])), [*before, *second]).write(curves)


def update_ratios(values: Mapping[str, float]) -> dict[str, float]:
    """Return the sizes of the module's updates among named numbers."""
    return {name: value for name, value in values.items() if name.startswith(MODULE_UPDATE_RATIO)}

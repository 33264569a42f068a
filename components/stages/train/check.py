"""A check at first use: packing references into one sequence leaves the loss as it is, on this machine too.

What a kernel does with the mask depends on the device and its software, which no test elsewhere has seen. The check
takes a forward of one packed micro-batch and of each of its references, without gradients, and touches no random state.
"""

from typing import Any

import numpy as np
import torch

from m3diff.models.device import Device
from m3diff.models.family import PairProcessor
from m3diff.settings.section import ParamsError
from m3diff.stages.train.batches import Loader, MicroBatch, Schedule
from m3diff.stages.train.loss import token_loss

ROUNDING = {"fp32": 1e-4, "bf16": 1e-2}
"""The largest relative difference that rounding explains, by precision: sums of other lengths differ by some 1e-6 in
fp32 and, with three significant digits in every layer, by some 1e-3 in bf16. A token that sees what it should not, or
stands at a wrong place, moves the loss of a pre-trained model by more."""


class PackingError(ParamsError):
    """The packed loss is not that of one sequence per reference."""


def check_packing(
    model: Any, schedule: Schedule, loader: Loader, processor: PairProcessor, device: Device
) -> str | None:
    """Compare the loss of the schedule's first sequence with several references, and of the one after it where a
    micro-batch holds two, with the sum over their references, one sequence each. Every worker compares the same.

    Returns: what was compared, in words; None where no sequence has several references.

    Raises:
        PackingError: the two differ by more than rounding explains; has both, the kernel and the way out.
    """
    chosen = several(schedule)
    if not chosen:
        return None
    alone = [rows[n : n + 1] for rows in chosen for n in range(len(rows))]
    packed = loss_of(model, loader.build([(rows, 1) for rows in chosen]), processor, device)
    apart = sum(loss_of(model, loader.build([(rows, 1)]), processor, device) for rows in alone)
    found, most = abs(packed - apart) / abs(apart), ROUNDING[device.precision]
    told = f"{packed:.6g} packed, {apart:.6g} as {len(alone)} sequences of one reference"
    if not found <= most:
        raise PackingError(
            f"the loss of {len(chosen)} packed sequence(s) is not that of their references: {told} (attention "
            f"{device.attention}, {device.precision}; relative difference {found:.2g}, rounding explains {most:g}). "
            f"Nothing was trained; {way_out(device)}, and report it"
        )
    return f"packing checked, attention {device.attention}: loss {told} (relative difference {found:.1g})"


def several(schedule: Schedule) -> list[np.ndarray]:
    """The first sequence of the run with several references and, where a micro-batch holds two, its successor."""
    sequences = schedule.epoch(0)
    packed = np.flatnonzero(np.diff(sequences.offsets) > 1)
    if not len(packed):
        return []
    first = int(packed[0])
    return [sequences[number] for number in range(first, min(first + min(2, schedule.micro_batch), len(sequences)))]


@torch.no_grad()
def loss_of(model: Any, batch: MicroBatch, processor: PairProcessor, device: Device) -> float:
    return float(token_loss(model, batch, processor, device))


def way_out(device: Device) -> str:
    """The parameter that avoids what was found to be wrong."""
    if device.attention != "sdpa":
        return "set compute.attention to sdpa"
    return "set train.max_captions_per_sequence to 1"

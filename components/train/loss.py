"""The loss of a micro-batch: the model names no family here."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from components.device import Device
from components.models.attention import RECURRING
from components.models.family import PairProcessor
from components.models.fused import fused_attention
from components.train.batches import MicroBatch
from components.train.packing import Packed


def token_loss(model: nn.Module, batch: MicroBatch, processor: PairProcessor, device: Device) -> Tensor:
    """Summed cross-entropy over the micro-batch's weighted supervised tokens; logits on those positions alone."""
    packed = batch.packed
    if device.attention == "flex":
        packed = packed.rounded_up(RECURRING, processor.pad_id)
    images = processor.image_inputs(device.move(torch.from_numpy(batch.images)))
    with fused_attention():
        logits = model(
            input_ids=device.move(packed.input_ids),
            position_ids=device.move(packed.position_ids),
            logits_to_keep=packed.supervised,  # on the CPU: its places are known without waiting for a GPU
            use_cache=False,
            **attention_inputs(packed, device),
            **images,
        ).logits
    losses = F.cross_entropy(logits.float(), device.move(packed.labels), reduction="none")
    return (losses * device.move(batch.weights)).sum()


def attention_inputs(packed: Packed, device: Device) -> dict[str, Any]:
    """The mask, which chooses the kernel (`components.models.attention`), and the layout that SDPA needs beside it."""
    if device.attention == "flex":
        return {"attention_mask": packed.block_mask(device.torch)}
    layout = packed.layout().to(device.torch)
    return {"attention_mask": layout.attention_mask(), "layout": layout}


def sum_over_ranks(value: Tensor, ranks: int) -> Tensor:
    """`value`, on the CPU, added up in place over the workers."""
    if ranks > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        summed = value.to(device)
        dist.all_reduce(summed)
        value.copy_(summed)
    return value

"""The loss of a micro-batch: the model names no family here."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from m3diff.models.device import Device
from m3diff.models.family import PairProcessor
from m3diff.models.fused import fused_attention
from m3diff.stages.train.batches import MicroBatch


def token_loss(model: nn.Module, batch: MicroBatch, processor: PairProcessor, device: Device) -> Tensor:
    """Summed cross-entropy over the micro-batch's weighted supervised tokens; logits on those positions alone.

    Args:
        batch: complete, for this device (`m3diff.stages.train.batches.complete`): here it is copied there, no more.
    """
    packed = batch.packed
    images = processor.image_inputs(device.move(batch.images))
    with fused_attention():
        logits = model(
            input_ids=device.move(packed.input_ids),
            position_ids=device.move(packed.position_ids),
            tokens=packed.input_ids,  # on the CPU, as the next: places are known without waiting for a GPU
            logits_to_keep=packed.supervised,
            use_cache=False,
            **attention_inputs(batch, device),
            **images,
        ).logits
    losses = F.cross_entropy(logits.float(), device.move(packed.labels), reduction="none")
    return (losses * device.move(batch.weights)).sum()


def attention_inputs(batch: MicroBatch, device: Device) -> dict[str, Any]:
    """The mask, which chooses the kernel (`m3diff.models.attention`), and the layout that SDPA needs beside it."""
    if device.attention == "flex":
        return {"attention_mask": batch.packed.block_mask(device)}
    assert batch.layout is not None, "a micro-batch that is not complete"
    layout = batch.layout.each(device.move)
    return {"attention_mask": layout.attention_mask(), "layout": layout}


def sum_over_ranks(value: Tensor, ranks: int) -> Tensor:
    """`value`, on the CPU, added up in place over the workers."""
    if ranks > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        summed = value.to(device)
        dist.all_reduce(summed)
        value.copy_(summed)
    return value

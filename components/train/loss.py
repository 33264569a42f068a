"""The loss of a micro-batch: the model names no family here."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from components.models.family import PairProcessor
from components.models.fused import fused_attention
from components.train.batches import MicroBatch


def token_loss(model: nn.Module, batch: MicroBatch, processor: PairProcessor, device: torch.device) -> Tensor:
    """Summed cross-entropy over the micro-batch's weighted supervised tokens; logits on those positions alone."""
    packed = batch.packed
    images = {name: value.to(device) for name, value in processor.image_inputs(batch.images).items()}
    with fused_attention():
        logits = model(
            input_ids=packed.input_ids.to(device),
            position_ids=packed.position_ids.to(device),
            attention_mask=packed.mask(device, flex=device.type == "cuda"),
            logits_to_keep=packed.supervised.to(device),
            use_cache=False,
            **images,
        ).logits
    losses = F.cross_entropy(logits.float(), packed.labels.to(device), reduction="none")
    return (losses * batch.weights.to(device)).sum()


def sum_over_ranks(value: Tensor, ranks: int) -> Tensor:
    """`value`, on the CPU, added up in place over the workers."""
    if ranks > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        summed = value.to(device)
        dist.all_reduce(summed)
        value.copy_(summed)
    return value

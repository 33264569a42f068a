"""Train each branch in a row of its own, which any model supports. No part of a row is shared.

The rows of a micro-batch are padded on the right to the length of the longest row:

    row 0    images, question, answer
    row 1    images, question, answer, padding
    row 2    question, answer, padding

Loss and gradients are the same as with `MaskedRows`, but the images and the question are processed once for each
branch, and the padding is processed too. Use this packing for a model that does not use the attention of
`m3diff.models.fused`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m3diff.models.contract import Processor, TrainingSequence
from m3diff.models.device import Device
from m3diff.models.fused import require_fused_attention
from m3diff.records.sample import PAIR


@dataclass(frozen=True)
class SeparateBatch:
    """A micro-batch with one row per branch: B rows of T tokens.

    Attributes:
        input_ids: [B, T].
        attention_mask: [B, T]; 1 for tokens, 0 for padding.
        supervised: [B, T] bool; true at positions whose next token is part of an answer.
        images: the images of all rows, as the processor's `collate` returns them.
        labels: [supervised tokens]; the next token at each supervised position, row by row.
        weights: [supervised tokens]; weight of each token in the loss.
    """

    input_ids: Tensor
    attention_mask: Tensor
    supervised: Tensor
    images: dict[str, Tensor]
    labels: Tensor
    weights: Tensor

    @property
    def kept_tokens(self) -> int:
        """Number of last positions of a row that include all its supervised positions."""
        first_position = int(self.supervised.any(dim=0).nonzero()[0])
        return self.supervised.shape[1] - first_position

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> SeparateBatch:
        """Return a copy with the function applied to each tensor."""
        return SeparateBatch(
            input_ids=function(self.input_ids),
            attention_mask=function(self.attention_mask),
            supervised=function(self.supervised),
            images={name: function(tensor) for name, tensor in self.images.items()},
            labels=function(self.labels),
            weights=function(self.weights),
        )


class SeparateRows:
    """Packing in which each branch is a row with its own copy of the images."""

    shares_prompts = False

    def batch(self, sequences: Sequence[TrainingSequence], processor: Processor, device: Device) -> SeparateBatch:
        """Return a micro-batch; see `Packing.batch`.

        A micro-batch without a pair gets a blank pair, which does not affect the loss; see `MaskedRows.batch`.
        """
        rows = [(sequence, branch) for sequence in sequences for branch in sequence.branches]
        length = max(len(branch.ids) - 1 for _, branch in rows)  # the last token of a branch is only a label
        input_ids = torch.full((len(rows), length), processor.pad_id)
        attention_mask = torch.zeros_like(input_ids)
        supervised = torch.zeros_like(input_ids, dtype=torch.bool)
        labels: list[int] = []
        weights: list[int] = []
        for number, (sequence, branch) in enumerate(rows):
            tokens = branch.ids[:-1]
            input_ids[number, : len(tokens)] = torch.tensor(tokens)
            attention_mask[number, : len(tokens)] = 1
            for start, end in branch.spans:
                supervised[number, start - 1 : end - 1] = True
                labels += branch.ids[start:end]
                weights += [sequence.weight] * (end - start)
        prepared = [sequence.prepared for sequence, _ in rows]
        if not any(len(images.marks) == PAIR for images in prepared):
            prepared.append(processor.blank_pair())
        batch = SeparateBatch(
            input_ids=input_ids,
            attention_mask=attention_mask,
            supervised=supervised,
            images=processor.collate(prepared),
            labels=torch.tensor(labels),
            weights=torch.tensor(weights, dtype=torch.float32),
        )
        return batch.map_tensors(device.pin)

    @require_fused_attention()
    def logits(self, model: Any, batch: SeparateBatch, processor: Processor, device: Device) -> Tensor:
        """Return the logits of the supervised tokens; see `Packing.logits`."""
        kept_tokens = batch.kept_tokens
        output = model(
            input_ids=device.move(batch.input_ids),
            attention_mask=device.move(batch.attention_mask),
            # on the CPU, so that looking up positions in it does not wait for the GPU
            tokens=batch.input_ids,
            logits_to_keep=kept_tokens,
            use_cache=False,
            **{name: device.move(types) for name, types in processor.token_types(batch.input_ids).items()},
            **processor.image_inputs(batch.images, device.torch),
        )
        return output.logits[device.move(batch.supervised[:, -kept_tokens:])]

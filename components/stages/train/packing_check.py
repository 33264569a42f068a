"""Compare a packing with separate passes on a few sequences of a run, on the run's own device.

The packing of the family `auto` relies on the code of transformers for each architecture. The comparison finds a base
whose cache does not continue a sequence exactly, before anything is trained with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from m3diff.models.contract import TrainingSequence
from m3diff.models.device import Device
from m3diff.models.family import Family
from m3diff.models.tuning import unwrap_model

# On the nine bases of docs/any-model.md, rounding in fp32 causes relative differences of 4e-7 to 5e-6 in the gradients
# of adapters. Packing may differ by more than these limits only if separate passes in another order differ as well.
MAX_LOSS_DIFFERENCE = 1e-5
MAX_GRADIENT_DIFFERENCE = 1e-3
ORDER_FACTOR = 10


@dataclass(frozen=True)
class Pass:
    """The loss of some sequences, summed over their supervised tokens, and the gradient of each part as one vector."""

    loss: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Differences:
    """Relative differences between two passes: of the loss, and of the gradient of each part, as norms."""

    loss: float
    gradients: dict[str, float]

    @classmethod
    def between(cls, other_pass: Pass, reference_pass: Pass) -> Differences:
        """Return the differences of a pass from the reference."""
        gradients = {}
        for part, gradient in reference_pass.gradients.items():
            gradients[part] = float((other_pass.gradients[part] - gradient).norm() / gradient.norm().clamp_min(1e-30))
        return cls(loss=abs(other_pass.loss - reference_pass.loss) / abs(reference_pass.loss), gradients=gradients)


@dataclass(frozen=True)
class PackingComparison:
    """How much the packing and another order of separate passes differ from separate passes.

    Attributes:
        packing: differences of the packing.
        order: differences of separate passes in another order, which are rounding alone.
    """

    packing: Differences
    order: Differences

    def excesses(self) -> list[str]:
        """Return the differences that are larger than rounding explains, in words."""
        texts = []
        limit = max(MAX_LOSS_DIFFERENCE, ORDER_FACTOR * self.order.loss)
        if not self.packing.loss <= limit:
            texts.append(f"loss {self.packing.loss:.1e} (limit {limit:.1e})")
        for part, difference in self.packing.gradients.items():
            limit = max(MAX_GRADIENT_DIFFERENCE, ORDER_FACTOR * self.order.gradients[part])
            if not difference <= limit:
                texts.append(f"gradients of {part} {difference:.1e} (limit {limit:.1e})")
        return texts

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {difference:.1e}" for part, difference in self.packing.gradients.items())
        between_orders = max([self.order.loss, *self.order.gradients.values()])
        return (
            f"packed and separate passes differ by {self.packing.loss:.1e} in the loss and, in the gradients, by "
            f"{parts}; two orders of separate passes differ by at most {between_orders:.1e}"
        )


def compare_with_separate_passes(
    model: Any,
    sequences: Sequence[TrainingSequence],
    packing: Any,
    processor: Any,
    family: Family,
    device: Device,
) -> PackingComparison:
    """Compute the loss and gradients of some sequences packed and in separate passes. The gradients are removed.

    Args:
        model: the model, with or without peft's wrapper, on the device and not yet within DeepSpeed's engine.
        sequences: the sequences.
        packing: the packing to be checked. It has a method `separate_logits`, so that the code of this packing is not a
            part of runs of other families (`m3diff.provenance.code`).
        processor: processor of the model.
        family: family of the model.
        device: device of the model.
    """

    def packed() -> None:
        batch = packing.batch(sequences, processor, device)
        add_loss(packing.logits(model, batch, processor, device), batch.labels)

    def apart(order: int) -> None:
        branches = [sequence._replace(branches=[branch]) for sequence in sequences for branch in sequence.branches]
        for sequence in branches[::order]:
            add_loss(*packing.separate_logits(model, sequence, processor, device))

    losses: list[float] = []

    def add_loss(logits: Tensor, labels: Tensor) -> None:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        loss = nn.functional.cross_entropy(logits.to(dtype), device.move(labels), reduction="sum")
        loss.backward()
        losses.append(loss.item())

    take_gradients(model, family)  # of earlier steps
    passes = []
    for compute in (packed, lambda: apart(1), lambda: apart(-1)):
        losses.clear()
        compute()
        passes.append(Pass(sum(losses), take_gradients(model, family)))
    packed_pass, first_order, second_order = passes
    return PackingComparison(
        packing=Differences.between(packed_pass, first_order), order=Differences.between(second_order, first_order)
    )


def take_gradients(model: Any, family: Family) -> dict[str, Tensor]:
    """Return the gradients of each part as one vector, and remove them from the model."""
    vectors: dict[str, list[Tensor]] = {}
    for name, parameter in unwrap_model(model).named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        vectors.setdefault(family.part_of(name), []).append(gradient.flatten())
        parameter.grad = None
    return {part: torch.cat(gradients) for part, gradients in vectors.items()}

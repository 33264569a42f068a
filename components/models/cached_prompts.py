"""Train several branches after one pass over the prompt that they share, with the model's own cache.

A sequence takes two passes. The first one reads the tokens that all branches begin with, including the images, and
fills the cache that `generate` also uses. The second one continues from it with a row for each branch:

    prefix      images, question
    branch 0    last token of the question, answer 0
    branch 1    last token of the question, answer 1, padding

Gradients flow back through the cache. What is exact in generation is exact in training, so this packing needs no mask,
no attention kernel and no knowledge of the architecture. Sequences whose images end at the same token are read
together. Where nothing is shared, a branch is read in one pass without a cache: if it is the only one of its sequence,
or if it has an image that not all branches begin with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from os.path import commonprefix
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from m3diff.models.contract import Branch, Prepared, TrainingSequence
from m3diff.models.device import Device
from m3diff.models.tuning import unwrap_model
from m3diff.records.sample import Turn


class UnitKind(IntEnum):
    """What the passes of a unit run: two passes with a cache or one pass, with or without the vision encoder."""

    PROMPTS_WITH_IMAGES = 0
    PROMPTS = 1
    BRANCHES_WITH_IMAGES = 2
    BRANCHES = 3

    @classmethod
    def choose(cls, has_images: bool, is_shared: bool) -> UnitKind:
        """Return the kind of sequences with or without images, and with or without a shared prompt."""
        if is_shared:
            return cls.PROMPTS_WITH_IMAGES if has_images else cls.PROMPTS
        return cls.BRANCHES_WITH_IMAGES if has_images else cls.BRANCHES

    @property
    def has_images(self) -> bool:
        """Whether the vision encoder runs."""
        return self in (UnitKind.PROMPTS_WITH_IMAGES, UnitKind.BRANCHES_WITH_IMAGES)

    @property
    def is_shared(self) -> bool:
        """Whether branches continue from the cache of a shared prompt."""
        return self in (UnitKind.PROMPTS_WITH_IMAGES, UnitKind.PROMPTS)


@dataclass(frozen=True)
class Unit:
    """Sequences that are read in the same passes: S prefixes of n tokens, and R branches of up to T further tokens.

    Attributes:
        kind: what the passes run. If no prompt is shared, each sequence has one branch and no prefix.
        prefix_ids: [S, n]; the tokens that the branches of each sequence begin with.
        branch_ids: [R, T]; the further tokens of each branch, padded at the end.
        token_types: which of these tokens belong to images, [S, n] and [R, T], by the name of the model's argument.
            Empty if the processor has no such input.
        images: the images, as the processor's `collate` returns them. Empty without images.
        grids: for each sequence, the tensors of its images that are integers, from which a model computes positions.
        sequence_of_branch: [R]; number of the prefix that each branch continues.
        supervised: [R, T] bool; true at positions whose next token is part of an answer. All false in a unit that only
            keeps workers in step.
        labels: [supervised tokens]; the next token at each supervised position, row by row.
        weights: [supervised tokens]; weight of each token in the loss.
    """

    kind: UnitKind
    prefix_ids: Tensor
    branch_ids: Tensor
    token_types: dict[str, tuple[Tensor, Tensor]]
    images: dict[str, Tensor]
    grids: list[dict[str, Tensor]]
    sequence_of_branch: Tensor
    supervised: Tensor
    labels: Tensor
    weights: Tensor

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Unit:
        """Return a copy with the function applied to each tensor that is copied to the device."""
        types = {name: (function(prefix), function(branch)) for name, (prefix, branch) in self.token_types.items()}
        return Unit(
            kind=self.kind,
            prefix_ids=function(self.prefix_ids),
            branch_ids=function(self.branch_ids),
            token_types=types,
            images={name: function(tensor) for name, tensor in self.images.items()},
            grids=self.grids,
            sequence_of_branch=function(self.sequence_of_branch),
            supervised=function(self.supervised),
            labels=self.labels,
            weights=self.weights,
        )


@dataclass(frozen=True)
class CachedBatch:
    """A micro-batch as units, those with images first.

    Attributes:
        labels: the supervised tokens of all units, [supervised tokens].
        weights: the weight of each supervised token in the loss, [supervised tokens].
    """

    units: list[Unit]
    labels: Tensor
    weights: Tensor


class CachedPrompts:
    """The packing in which the branches of a sequence continue from the cache of their shared prompt."""

    shares_prompts = True

    def batch(self, sequences: Sequence[TrainingSequence], processor: Any, device: Device) -> CachedBatch:
        """Return a micro-batch; see `Packing.batch`.

        A micro-batch without an image gets a unit with blank images and no supervised token. Otherwise, the weights of
        the vision encoder would have no gradient in such a step, which the optimizer treats unlike a gradient of zero.
        """
        units = make_units(sequences, processor)
        if not any(unit.images for unit in units):
            units.insert(0, blank_unit(UnitKind.PROMPTS_WITH_IMAGES, processor))
        return CachedBatch(
            units=[unit.map_tensors(device.pin) for unit in units],
            labels=device.pin(torch.cat([unit.labels for unit in units])),
            weights=device.pin(torch.cat([unit.weights for unit in units])),
        )

    def logits(self, model: Any, batch: CachedBatch, processor: Any, device: Device) -> Tensor:
        """Return the logits of the supervised tokens; see `Packing.logits`."""
        supervised_logits = []
        unused_logits = []
        for unit in with_units_of_other_workers(batch.units, model, processor, device):
            logits = read_unit(model, unit, processor, device)
            if len(unit.labels):
                supervised_logits.append(logits[device.move(unit.supervised[:, -logits.shape[1] :])])
            else:
                unused_logits.append(logits)
        all_logits = torch.cat(supervised_logits)
        for logits in unused_logits:
            all_logits = all_logits + 0 * logits.sum()
        return all_logits

    def separate_logits(
        self, model: Any, sequence: TrainingSequence, processor: Any, device: Device
    ) -> tuple[Tensor, Tensor]:
        """Return logits and labels of the supervised tokens of a sequence with one branch, read without a cache."""
        kind = UnitKind.choose(bool(sequence.prepared.marks), is_shared=False)
        unit = make_unit(kind, [sequence], 0, processor)
        logits = read_unit(model, unit, processor, device)
        return logits[device.move(unit.supervised[:, -logits.shape[1] :])], unit.labels


def make_units(sequences: Iterable[TrainingSequence], processor: Any) -> list[Unit]:
    """Return the units of a micro-batch, those with images first and those without a cache last."""
    # by kind and end of the images: the sequences, each with the length of its prefix
    groups: dict[tuple[UnitKind, int], list[tuple[TrainingSequence, int]]] = {}
    for sequence in sequences:
        ends = [end_of_images(branch.ids, processor.image_token_id) for branch in sequence.branches]
        length = shared_length(sequence.branches)
        has_images = bool(sequence.prepared.marks)
        if len(sequence.branches) > 1 and length and max(ends) <= length:
            kind = UnitKind.choose(has_images, is_shared=True)
            groups.setdefault((kind, ends[0]), []).append((sequence, length))
            continue
        kind = UnitKind.choose(has_images, is_shared=False)
        for branch, end in zip(sequence.branches, ends, strict=True):
            groups.setdefault((kind, end), []).append((sequence._replace(branches=[branch]), 0))
    units = []
    for (kind, _), group in sorted(groups.items(), key=lambda item: item[0][0]):
        shortest_length = min(length for _, length in group)
        units.append(make_unit(kind, [sequence for sequence, _ in group], shortest_length, processor))
    return units


def end_of_images(ids: Sequence[int], image_token_id: int) -> int:
    """Return the position after the last visual token, or 0 if there is none."""
    for position in range(len(ids), 0, -1):
        if ids[position - 1] == image_token_id:
            return position
    return 0


def shared_length(branches: Sequence[Branch]) -> int:
    """Return the number of tokens that all branches begin with and that are before the last token of each prompt.

    The last token of a prompt belongs to the branch, because its logits predict the first token of the answer.
    """
    common_ids = commonprefix([branch.ids for branch in branches])
    return min(len(common_ids), *(branch.spans[0][0] - 1 for branch in branches))


def count_packed_tokens(branches: Sequence[Branch], image_token_id: int) -> int:
    """Return the number of tokens that are read for the branches of one sequence, without padding.

    The last token of a branch, which is only a label, is counted as well.
    """
    lengths = [len(branch.ids) for branch in branches]
    length = shared_length(branches)
    if max(end_of_images(branch.ids, image_token_id) for branch in branches) > length:
        return sum(lengths)
    return sum(lengths) - length * (len(branches) - 1)


def make_unit(kind: UnitKind, sequences: Sequence[TrainingSequence], length: int, processor: Any) -> Unit:
    """Return the unit of sequences, which are read together.

    Args:
        length: number of tokens of the prefix, n.
    """
    rows: list[tuple[int, TrainingSequence, Branch]] = []
    for number, sequence in enumerate(sequences):
        rows += [(number, sequence, branch) for branch in sequence.branches]
    width = max(len(branch.ids) - 1 for _, _, branch in rows) - length  # the last token of a branch is only a label
    branch_ids = torch.full((len(rows), width), processor.pad_id)
    supervised = torch.zeros(len(rows), width, dtype=torch.bool)
    labels: list[int] = []
    weights: list[int] = []
    types_of_branches: dict[str, Tensor] = {}
    for row, (_, sequence, branch) in enumerate(rows):
        tokens = branch.ids[length:-1]
        branch_ids[row, : len(tokens)] = torch.tensor(tokens)
        for start, end in branch.spans:
            supervised[row, start - 1 - length : end - 1 - length] = True
            labels += branch.ids[start:end]
            weights += [sequence.weight] * (end - start)
        for name, types in processor.token_types(torch.tensor([branch.ids[:-1]])).items():
            all_types = types_of_branches.setdefault(name, torch.zeros(len(rows), width + length, dtype=types.dtype))
            all_types[row, : types.shape[1]] = types[0]
    numbers = [number for number, _, _ in rows]
    first_rows = first_row_of_each(numbers)
    prefixes = [sequence.branches[0].ids[:length] for sequence in sequences]
    return Unit(
        kind=kind,
        prefix_ids=torch.tensor(prefixes, dtype=torch.long),
        branch_ids=branch_ids,
        token_types={
            name: (types[first_rows, :length], types[:, length:]) for name, types in types_of_branches.items()
        },
        images=processor.collate([sequence.prepared for sequence in sequences]),
        grids=[grids_of(sequence.prepared) for sequence in sequences],
        sequence_of_branch=torch.tensor(numbers),
        supervised=supervised,
        labels=torch.tensor(labels, dtype=torch.long),
        weights=torch.tensor(weights, dtype=torch.float32),
    )


def first_row_of_each(numbers: Sequence[int]) -> list[int]:
    """Return the first row of each sequence, given the number of the sequence of each row."""
    return [numbers.index(number) for number in sorted(set(numbers))]


def grids_of(prepared: Prepared) -> dict[str, Tensor]:
    """Return the tensors of an image set that are integers, such as the number of its patches."""
    return {name: tensor for name, tensor in prepared.tensors.items() if not tensor.is_floating_point()}


def blank_unit(kind: UnitKind, processor: Any) -> Unit:
    """Return a unit of this kind without supervised tokens, about blank images if the kind has images."""
    prepared = processor.blank_pair() if kind.has_images else Prepared({}, ())
    prompt = list(processor.encode_prompt((Turn(""),), prepared.marks))
    # the last token is only a label, which has no span
    branch = Branch([*prompt, processor.end_id], [])
    length = len(prompt) - 1 if kind.is_shared else 0
    return make_unit(kind, [TrainingSequence(prepared, [branch], 0)], length, processor)


def with_units_of_other_workers(units: Sequence[Unit], model: Any, processor: Any, device: Device) -> list[Unit]:
    """Return the units, with ZeRO followed by blank units, so that all workers run the same passes.

    With ZeRO 3, each layer gathers its weights from all workers. A worker with fewer passes would block the others
    forever. With ZeRO 1 and 2, DeepSpeed 0.19 adds up the workers' gradients in the order in which the backward pass
    completes them. In another order, a worker would add its gradients to those of other weights, without an error.
    """
    uses_zero = hasattr(model, "zero_optimization_stage") and model.zero_optimization_stage() > 0
    if not (uses_zero and dist.is_initialized() and dist.get_world_size() > 1):
        return list(units)
    counts = torch.bincount(torch.tensor([unit.kind for unit in units]), minlength=len(UnitKind))
    largest_counts = counts.to(device.torch)
    dist.all_reduce(largest_counts, op=dist.ReduceOp.MAX)
    all_units: list[Unit] = []
    for kind, count in zip(UnitKind, largest_counts.tolist(), strict=True):
        own_units = [unit for unit in units if unit.kind is kind]
        all_units += own_units
        all_units += [blank_unit(kind, processor)] * (count - len(own_units))
    return all_units


def read_unit(model: Any, unit: Unit, processor: Any, device: Device) -> Tensor:
    """Return the logits of the last positions of each branch, [R, kept positions, vocabulary].

    The kept positions include all supervised ones.
    """
    first_position = int(unit.supervised.any(dim=0).to(torch.uint8).argmax())
    kept_positions = unit.branch_ids.shape[1] - first_position
    image_inputs = processor.image_inputs(unit.images, device.torch)
    if not unit.kind.is_shared:
        return model(
            input_ids=device.move(unit.branch_ids),
            use_cache=False,
            logits_to_keep=kept_positions,
            **move_types(unit, 1, model, device),
            **image_inputs,
        ).logits
    positions_of_prefix, positions_of_branches = positions_of(model, unit, processor, device)
    cache = new_cache(model)
    model(
        input_ids=device.move(unit.prefix_ids),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **positions_of_prefix,
        **move_types(unit, 0, model, device),
        **image_inputs,
    )
    repeat_cache(cache, device.move(unit.sequence_of_branch))
    return model(
        input_ids=device.move(unit.branch_ids),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=kept_positions,
        **positions_of_branches,
        **move_types(unit, 1, model, device),
    ).logits


def move_types(unit: Unit, pass_number: int, model: Any, device: Device) -> dict[str, Tensor]:
    """Return the token types of the first or second pass on the device, if the model's `forward` takes them."""
    arguments = inspect.signature(bare_model(model).forward).parameters
    return {name: device.move(types[pass_number]) for name, types in unit.token_types.items() if name in arguments}


def positions_of(model: Any, unit: Unit, processor: Any, device: Device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the argument `position_ids` of both passes, or no argument if the model numbers tokens from 0.

    They are those of each whole branch, computed by the model on the CPU.
    """
    inner_model = bare_model(model).model
    if not hasattr(inner_model, "get_rope_index"):
        return {}, {}
    length = unit.prefix_ids.shape[1]
    positions = []
    for row, number in enumerate(unit.sequence_of_branch.tolist()):
        ids = [*unit.prefix_ids[number].tolist(), *unit.branch_ids[row].tolist()]
        positions.append(rope_positions(inner_model, processor, ids, unit.grids[number]))
    positions_of_rows = torch.cat(positions, dim=-2)  # [3, R, n + T]
    first_rows = first_row_of_each(unit.sequence_of_branch.tolist())
    prefix = device.move(positions_of_rows[..., first_rows, :length])
    return {"position_ids": prefix}, {"position_ids": device.move(positions_of_rows[..., length:])}


def rope_positions(inner_model: Any, processor: Any, ids: Sequence[int], grids: Mapping[str, Tensor]) -> Tensor:
    """Return the positions of a sequence of T tokens in time, rows and columns, [3, 1, T], as the model computes them.

    Args:
        inner_model: the model without its head, which has the method `get_rope_index`.
        grids: the sizes of the images in patches, by the name of the method's argument.
    """
    input_ids = torch.tensor([list(ids)])
    inputs = {"input_ids": input_ids, **processor.token_types(input_ids), **grids}
    names = inspect.signature(inner_model.get_rope_index).parameters
    positions, _ = inner_model.get_rope_index(**{name: inputs[name] for name in names if name in inputs})
    return positions


def bare_model(model: Any) -> Any:
    """Return the model of transformers within DeepSpeed's engine and peft's wrapper."""
    return unwrap_model(model.module if isinstance(getattr(model, "module", None), nn.Module) else model)


def new_cache(model: Any) -> DynamicCache:
    """Return an empty cache for a pass over a prefix whose states need gradients."""
    cache = DynamicCache(config=bare_model(model).config.get_text_config(decoder=True))
    # Otherwise, layers with a convolution would copy their states into a buffer, which has no gradient history
    cache.activate_past_recording()
    return cache


def repeat_cache(cache: DynamicCache, rows: Tensor) -> None:
    """Give the cache one row per branch: row r becomes a copy of row `rows[r]`.

    Args:
        rows: [R] int64.
    """
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for number, states in layer.conv_states.items():
                size = layer.conv_kernel_size[number]
                if states is not None and size is not None:
                    layer.conv_states[number] = last_states(states, size)
            # transformers would overwrite the states in place, but the backward pass still needs them
            layer.update_recurrent_state = keep_states  # type: ignore[method-assign,assignment]
    cache.reorder_cache(cast(torch.LongTensor, rows))


def last_states(states: Tensor, size: int) -> Tensor:
    """Return the last `size` states of a convolution, [..., size], with zeros before the first token."""
    missing = size - states.shape[-1]
    return nn.functional.pad(states, (missing, 0)) if missing > 0 else states[..., -size:]


def keep_states(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return new recurrent states, which nothing reads after the second pass."""
    return states

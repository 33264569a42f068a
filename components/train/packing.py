"""Shared-prefix packing: the references of one pair in one sequence, as branches on the prefix they share.

The images and the question are read once; each reference is a branch that attends to the prefix and to itself, never to
its siblings, and whose positions restart where the prefix ends. Loss and gradients equal those of one sequence per
reference. Shapes: B sequences, S tokens; `-1` marks padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

PREFIX, PAD = 0, -1


@dataclass(frozen=True)
class Packed:
    """Model inputs of B packed sequences.

    Attributes:
        input_ids, position_ids: [B, S].
        segments: [B, S]; 0 the shared prefix, 1, 2, ... the branches, -1 padding.
        supervised: [B, S] bool; positions whose next token is part of an answer.
        labels: [supervised tokens], in the order of `supervised`.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Tensor
    supervised: Tensor
    labels: Tensor

    @property
    def is_plain(self) -> bool:
        """No sequence has a second branch, so causal attention alone is right."""
        return int(self.segments.max()) <= 1

    def mask(self, device: torch.device | str = "cpu", flex: bool = False) -> "Tensor | BlockMask | None":
        """Who attends to whom: [B, 1, S, S] bool, FlexAttention's form of it, or None where causal attention alone is
        right."""
        if self.is_plain:
            return None
        segments = self.segments.to(device)
        return flex_mask(segments) if flex else prefix_mask(segments)


def prefix_rule(segments: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Each token sees the prefix and its own branch, up to itself. Padding sees itself, so that no row is empty.

    The rule takes batch, head, query and key indices that broadcast, as FlexAttention's `mask_mod` does.
    """

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        of_query, of_key = segments[batch, query], segments[batch, key]
        branch = ((of_key == PREFIX) | (of_key == of_query)) & (of_key != PAD)
        return ((key <= query) & branch) | (key == query)

    return sees


def prefix_mask(segments: Tensor) -> Tensor:
    """The rule as a dense mask, [B, 1, S, S] bool."""
    batch = torch.arange(segments.shape[0], device=segments.device)[:, None, None, None]
    place = torch.arange(segments.shape[1], device=segments.device)
    return prefix_rule(segments)(batch, batch, place[:, None], place)


def flex_mask(segments: Tensor) -> BlockMask:
    """The rule for FlexAttention, which skips the blocks where no token sees another."""
    count, size = segments.shape
    return create_block_mask(prefix_rule(segments), count, None, size, size, device=str(segments.device))


def pack(groups: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]], pad_id: int) -> Packed:
    """Pack each group of (prompt, answer) token ids into one sequence.

    The prefix is what all prompts of the group share, less the last prompt token: that is repeated in every branch,
    or no branch could be asked for its first answer token.
    """
    rows = [_pack_one(group) for group in groups]
    size = max(len(row.ids) for row in rows)
    shape = (len(rows), size)
    input_ids, position_ids = torch.full(shape, pad_id), torch.zeros(shape, dtype=torch.long)
    segments, supervised = torch.full(shape, PAD), torch.zeros(shape, dtype=torch.bool)
    for number, row in enumerate(rows):
        length = len(row.ids)
        input_ids[number, :length] = torch.tensor(row.ids)
        position_ids[number, :length] = torch.tensor(row.positions)
        segments[number, :length] = torch.tensor(row.segments)
        supervised[number, row.supervised] = True
    labels = torch.tensor([label for row in rows for label in row.labels])
    assert int(supervised.sum()) == len(labels), f"{int(supervised.sum())} supervised positions, {len(labels)} labels"
    return Packed(input_ids, position_ids, segments, supervised, labels)


@dataclass(frozen=True)
class _Row:
    ids: list[int]
    positions: list[int]
    segments: list[int]
    supervised: list[int]
    labels: list[int]


def _pack_one(group: Sequence[tuple[Sequence[int], Sequence[int]]]) -> _Row:
    prompts = [list(prompt) for prompt, _ in group]
    shared = min(len(commonprefix(prompts)), *(len(prompt) - 1 for prompt in prompts))
    row = _Row(prompts[0][:shared], list(range(shared)), [PREFIX] * shared, [], [])
    for branch, (prompt, answer) in enumerate(group, start=1):
        tail = [*prompt[shared:], *answer[:-1]]
        first = len(row.ids) + len(prompt) - shared - 1
        row.supervised.extend(range(first, first + len(answer)))
        row.labels.extend(answer)
        row.ids.extend(tail)
        row.positions.extend(range(shared, shared + len(tail)))
        row.segments.extend([branch] * len(tail))
    return row

"""Shared-prefix packing: the captions of one pair in one sequence, as branches on the prefix they share.

The images and the question are read once; each caption is a branch that attends to the prefix and to itself, never to
its siblings, and whose positions restart where the prefix ends. Loss and gradients equal those of one sequence per
caption. Shapes: B sequences, S tokens; `-1` marks padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

import torch
from torch import Tensor

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

    def mask(self) -> Tensor | None:
        """Who attends to whom, [B, 1, S, S] bool, or None where causal attention alone is right."""
        return None if self.is_plain else prefix_mask(self.segments)


def prefix_mask(segments: Tensor) -> Tensor:
    """Each token sees the prefix and its own branch, up to itself. Padding sees itself, so that no row is empty."""
    size = segments.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
    queries, keys = segments[:, :, None], segments[:, None, :]
    sees = causal & ((keys == PREFIX) | (keys == queries)) & (keys != PAD)
    return (sees | torch.eye(size, dtype=torch.bool, device=segments.device))[:, None]


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

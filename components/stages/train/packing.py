"""Shared-prefix packing: the references of one pair in one sequence, as branches on the prefix they share.

The images and the question are read once; each reference is a branch that attends to the prefix and to itself, never to
its siblings, and whose positions restart where the prefix ends. Loss and gradients equal those of one sequence per
reference. The B sequences of a micro-batch lie end to end in one row of T tokens, so no token is padding but for a few
at its end where lengths are to recur.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from os.path import commonprefix

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from m3diff.models.attention import Layout
from m3diff.models.device import Device

PREFIX, PAD = 0, -1

MOST_RECTANGLES, FEWEST_SEQUENCES = 4, 4
"""Of a micro-batch for SDPA: more rectangles have less padding and more kernels."""


@dataclass(frozen=True)
class Packed:
    """Model inputs of B packed sequences, end to end.

    Attributes:
        input_ids, position_ids: [1, T].
        sequences: [T]; the number of each token's sequence, rising; -1 padding at the end of the row.
        segments: [T]; 0 the shared prefix, 1, 2, ... the branches, -1 padding.
        supervised: [1, T] bool; positions whose next token is part of an answer.
        labels: [supervised tokens], in the order of `supervised`.
    """

    input_ids: Tensor
    position_ids: Tensor
    sequences: Tensor
    segments: Tensor
    supervised: Tensor
    labels: Tensor

    @property
    def tokens(self) -> int:
        """T, padding included."""
        return self.input_ids.shape[1]

    def rounded_up(self, multiple: int, pad_id: int) -> "Packed":
        """The same with padding at the end of the row, so that T is a multiple and shapes recur."""
        extra = -self.tokens % multiple
        if not extra:
            return self
        return Packed(
            F.pad(self.input_ids, (0, extra), value=pad_id),
            F.pad(self.position_ids, (0, extra)),
            F.pad(self.sequences, (0, extra), value=PAD),
            F.pad(self.segments, (0, extra), value=PAD),
            F.pad(self.supervised, (0, extra)),
            self.labels,
        )

    def layout(self) -> Layout:
        """The sequences in rectangles, for attention kernels that know no other shape; padding is in none."""
        lengths = torch.bincount(self.sequences[self.sequences != PAD])
        starts = lengths.cumsum(0) - lengths
        count = max(1, min(MOST_RECTANGLES, len(lengths) // FEWEST_SEQUENCES))
        rows, inside, shapes, masks = [], [], [], []
        for chosen in lengths.argsort(stable=True).tensor_split(count):
            place = torch.arange(int(lengths[chosen].max()))
            there = place < lengths[chosen, None]
            tokens = (starts[chosen, None] + place) * there
            segments = self.segments[tokens].masked_fill(~there, PAD)
            shapes.append((len(chosen), len(place)))
            masks.append(prefix_mask(segments) if int(segments.max()) > 1 else None)
            rows.append(tokens.flatten())
            inside.append(there.flatten())
        tokens, there = torch.cat(rows), torch.cat(inside)
        places = torch.empty(int(lengths.sum()), dtype=torch.long)
        places[tokens[there]] = there.nonzero().flatten()
        return Layout(tokens, places, tuple(shapes), tuple(masks))

    def mask(self) -> Tensor:
        """Who attends to whom in the whole row, [1, 1, T, T] bool: the rule, for any kernel that takes a mask."""
        place = torch.arange(self.tokens)
        return row_rule(self.sequences, self.segments)(torch.tensor(0), torch.tensor(0), place[:, None], place)[
            None, None
        ]

    def each(self, taken: Callable[[Tensor], Tensor]) -> "Packed":
        """The same of what `taken` makes of each tensor."""
        return Packed(**{field.name: taken(getattr(self, field.name)) for field in fields(self)})

    def block_mask(self, device: Device) -> BlockMask:
        """The rule over the whole row for FlexAttention, which skips the blocks where no token sees another. Made on
        the device, which it keeps busy and does not wait for."""
        rule = row_rule(device.move(self.sequences), device.move(self.segments))
        return create_block_mask(rule, None, None, self.tokens, self.tokens, device=str(device.torch))


def prefix_rule(segments: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Each token sees the prefix and its own branch, up to itself. Padding sees itself, so that no row is empty.

    The rule takes batch, head, query and key indices that broadcast, as FlexAttention's `mask_mod` does.
    """

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        of_query, of_key = segments[batch, query], segments[batch, key]
        branch = ((of_key == PREFIX) | (of_key == of_query)) & (of_key != PAD)
        return ((key <= query) & branch) | (key == query)

    return sees


def row_rule(sequences: Tensor, segments: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The same over sequences end to end: a token sees its own sequence alone."""
    within = prefix_rule(segments[None])

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return within(batch * 0, head, query, key) & (sequences[query] == sequences[key])

    return sees


def prefix_mask(segments: Tensor) -> Tensor:
    """The rule for [B, S] segments as a dense mask, [B, 1, S, S] bool."""
    batch = torch.arange(segments.shape[0], device=segments.device)[:, None, None, None]
    place = torch.arange(segments.shape[1], device=segments.device)
    return prefix_rule(segments)(batch, batch, place[:, None], place)


def pack(groups: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]]) -> Packed:
    """Pack each group of (prompt, answer) token ids into one sequence.

    The prefix is what all prompts of the group share, less the last prompt token: that is repeated in every branch,
    or no branch could be asked for its first answer token.
    """
    packed = [_pack_one(group) for group in groups]
    supervised = torch.cat([torch.zeros(len(one.ids), dtype=torch.bool) for one in packed])
    start = 0
    for one in packed:
        supervised[[start + place for place in one.supervised]] = True
        start += len(one.ids)
    labels = torch.tensor([label for one in packed for label in one.labels])
    assert int(supervised.sum()) == len(labels), f"{int(supervised.sum())} supervised positions, {len(labels)} labels"
    return Packed(
        input_ids=torch.tensor([[token for one in packed for token in one.ids]]),
        position_ids=torch.tensor([[place for one in packed for place in one.positions]]),
        sequences=torch.repeat_interleave(torch.tensor([len(one.ids) for one in packed])),
        segments=torch.tensor([segment for one in packed for segment in one.segments]),
        supervised=supervised[None],
        labels=labels,
    )


@dataclass(frozen=True)
class _Sequence:
    ids: list[int]
    positions: list[int]
    segments: list[int]
    supervised: list[int]
    labels: list[int]


def _pack_one(group: Sequence[tuple[Sequence[int], Sequence[int]]]) -> _Sequence:
    prompts = [list(prompt) for prompt, _ in group]
    shared = min(len(commonprefix(prompts)), *(len(prompt) - 1 for prompt in prompts))
    one = _Sequence(prompts[0][:shared], list(range(shared)), [PREFIX] * shared, [], [])
    for branch, (prompt, answer) in enumerate(group, start=1):
        tail = [*prompt[shared:], *answer[:-1]]
        first = len(one.ids) + len(prompt) - shared - 1
        one.supervised.extend(range(first, first + len(answer)))
        one.labels.extend(answer)
        one.ids.extend(tail)
        one.positions.extend(range(shared, shared + len(tail)))
        one.segments.extend([branch] * len(tail))
    return one

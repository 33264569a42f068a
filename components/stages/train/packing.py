"""Shared-prefix packing: the references of one pair in one sequence, as branches on the prefix they share.

The images and the question are read once; each reference is a branch that attends to the prefix and to itself, never to
its siblings, and whose positions restart where the prefix ends. Loss and gradients equal those of one sequence per
reference. The B sequences of a micro-batch lie end to end in one row of T tokens, so no token is padding but for a few
at its end where lengths are to recur.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from os.path import commonprefix

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from m3diff.models.device import Device
from m3diff.models.fused import Layout

PREFIX, PAD = 0, -1

# Limits of a micro-batch for SDPA: more rectangles have less padding and more kernels
MOST_RECTANGLES, FEWEST_SEQUENCES = 4, 4


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
        """Return T, padding included."""
        return self.input_ids.shape[1]

    def rounded_up(self, multiple: int, pad_id: int) -> "Packed":
        """Return it with padding at the end of the row, so that T is a multiple and shapes recur."""
        extra = -self.tokens % multiple
        values = {"input_ids": pad_id, "position_ids": 0, "sequences": PAD, "segments": PAD, "supervised": 0}
        padded = {name: F.pad(getattr(self, name), (0, extra), value=value) for name, value in values.items()}
        return replace(self, **padded) if extra else self

    def layout(self) -> Layout:
        """Return the sequences in rectangles, for attention kernels that know no other shape; padding is in none."""
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
            masks.append(dense(prefix_rule(segments), *segments.shape) if int(segments.max()) > 1 else None)
            rows.append(tokens.flatten())
            inside.append(there.flatten())
        tokens, there = torch.cat(rows), torch.cat(inside)
        places = torch.empty(int(lengths.sum()), dtype=torch.long)
        places[tokens[there]] = there.nonzero().flatten()
        return Layout(tokens, places, tuple(shapes), tuple(masks))

    def each(self, taken: Callable[[Tensor], Tensor]) -> "Packed":
        return Packed(**{field.name: taken(getattr(self, field.name)) for field in fields(self)})

    def block_mask(self, device: Device) -> BlockMask:
        """Return the rule over the whole row for FlexAttention, which skips the blocks where no token sees another.
        Made on the device, which it keeps busy and does not wait for."""
        rule = row_rule(device.move(self.sequences), device.move(self.segments))
        return create_block_mask(rule, None, None, self.tokens, self.tokens, device=str(device.torch))


# A function of batch, head, query and key indices that broadcast, as FlexAttention's `mask_mod` takes them
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def prefix_rule(segments: Tensor) -> Rule:
    """Return the rule of [B, S] segments: each token sees the prefix and its own branch, up to itself. Padding sees
    itself, so that no row is empty."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        of_query, of_key = segments[batch, query], segments[batch, key]
        branch = ((of_key == PREFIX) | (of_key == of_query)) & (of_key != PAD)
        return ((key <= query) & branch) | (key == query)

    return sees


def row_rule(sequences: Tensor, segments: Tensor) -> Rule:
    """Return the rule over sequences end to end: a token sees its own sequence alone."""
    within = prefix_rule(segments[None])

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return within(batch * 0, head, query, key) & (sequences[query] == sequences[key])

    return sees


def dense(rule: Rule, sequences: int, length: int) -> Tensor:
    """Return a rule as a mask, [B, 1, S, S] bool."""
    batch, place = torch.arange(sequences)[:, None, None, None], torch.arange(length)
    return rule(batch, batch, place[:, None], place)


def pack(groups: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]]) -> Packed:
    """Pack each group of (prompt, answer) token ids into one sequence.

    The prefix is the part that all prompts of the group share, less the last prompt token: that is repeated in every
    branch, or no branch could be asked for its first answer token.
    """
    lists: list[list[int]] = [[] for _ in range(6)]
    ids, positions, segments, supervised, labels, lengths = lists
    for group in groups:
        start = len(ids)
        prompts = [list(prompt) for prompt, _ in group]
        shared = min(len(commonprefix(prompts)), *(len(prompt) - 1 for prompt in prompts))
        ids += prompts[0][:shared]
        positions += range(shared)
        segments += [PREFIX] * shared
        for branch, (prompt, answer) in enumerate(group, start=1):
            tail = [*prompt[shared:], *answer[:-1]]
            first = len(ids) + len(prompt) - shared - 1
            supervised += range(first, first + len(answer))
            labels += answer
            ids += tail
            positions += range(shared, shared + len(tail))
            segments += [branch] * len(tail)
        lengths.append(len(ids) - start)
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[supervised] = True
    assert int(mask.sum()) == len(labels), f"{int(mask.sum())} supervised positions, {len(labels)} labels"
    return Packed(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        sequences=torch.repeat_interleave(torch.tensor(lengths)),
        segments=torch.tensor(segments),
        supervised=mask[None],
        labels=torch.tensor(labels),
    )

"""Pack all references of an image pair into one sequence, so that its images and question are processed only once.

The images and the question are the prefix of the sequence. Each reference is a branch, which attends to the prefix and
to itself but not to other branches. Its positions continue from the end of the prefix. Loss and gradients equal those
of one sequence per reference.

The B sequences of a micro-batch are concatenated into one row of T tokens. Padding is only needed for FlexAttention, at
the end of the row, where it reduces the number of distinct row lengths.
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

PREFIX = 0
PAD = -1

# SDPA requires rectangles, each made of sequences that are padded to the same length. These are the maximum number of
# rectangles per micro-batch and the minimum number of sequences per rectangle. More rectangles mean less padding but
# more kernel launches
MOST_RECTANGLES = 4
FEWEST_SEQUENCES = 4


@dataclass(frozen=True)
class Packed:
    """Model inputs of B packed sequences, concatenated into one row of T tokens.

    Attributes:
        input_ids, position_ids: [1, T].
        sequences: [T]; the number of the sequence that each token belongs to, ascending; -1 for padding at the end of
            the row.
        segments: [T]; 0 for the shared prefix; 1, 2, ... for the branches; -1 for padding.
        supervised: [1, T] bool; true at positions whose next token is part of an answer.
        labels: [supervised tokens]; the next token at each supervised position.
    """

    input_ids: Tensor
    position_ids: Tensor
    sequences: Tensor
    segments: Tensor
    supervised: Tensor
    labels: Tensor

    @property
    def tokens(self) -> int:
        """Number of tokens T, including padding."""
        return self.input_ids.shape[1]

    def rounded_up(self, multiple: int, pad_id: int) -> "Packed":
        """Return a copy whose row is padded to a multiple of `multiple` tokens, which limits the number of shapes."""
        extra = -self.tokens % multiple
        values = {"input_ids": pad_id, "position_ids": 0, "sequences": PAD, "segments": PAD, "supervised": 0}
        padded = {name: F.pad(getattr(self, name), (0, extra), value=value) for name, value in values.items()}
        return replace(self, **padded) if extra else self

    def layout(self) -> Layout:
        """Return a layout that arranges the sequences in rectangles, as SDPA's kernels require.

        Padding at the end of the row is dropped.
        """
        lengths = torch.bincount(self.sequences[self.sequences != PAD])
        starts = lengths.cumsum(0) - lengths
        count = max(1, min(MOST_RECTANGLES, len(lengths) // FEWEST_SEQUENCES))
        rows = []
        inside = []
        shapes = []
        masks = []
        for chosen in lengths.argsort(stable=True).tensor_split(count):
            place = torch.arange(int(lengths[chosen].max()))
            there = place < lengths[chosen, None]
            tokens = (starts[chosen, None] + place) * there
            segments = self.segments[tokens].masked_fill(~there, PAD)
            shapes.append((len(chosen), len(place)))
            masks.append(dense(prefix_rule(segments), *segments.shape) if int(segments.max()) > 1 else None)
            rows.append(tokens.flatten())
            inside.append(there.flatten())
        tokens = torch.cat(rows)
        there = torch.cat(inside)
        places = torch.empty(int(lengths.sum()), dtype=torch.long)
        places[tokens[there]] = there.nonzero().flatten()
        return Layout(tokens, places, tuple(shapes), tuple(masks))

    def each(self, taken: Callable[[Tensor], Tensor]) -> "Packed":
        """Return a copy with the function `taken` applied to each tensor."""
        return Packed(**{field.name: taken(getattr(self, field.name)) for field in fields(self)})

    def block_mask(self, device: Device) -> BlockMask:
        """Return the FlexAttention mask of the row. The kernel skips blocks in which no token attends to another token.

        The mask is created on the device, without waiting for the device to finish.
        """
        rule = row_rule(device.move(self.sequences), device.move(self.segments))
        return create_block_mask(rule, None, None, self.tokens, self.tokens, device=str(device.torch))


# Says whether a query token attends to a key token, given broadcastable batch, head, query and key indices, as
# FlexAttention's `mask_mod` does
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def prefix_rule(segments: Tensor) -> Rule:
    """Return the rule for padded sequences: a token attends to itself and to earlier tokens of its prefix and branch.

    Padding tokens attend to themselves, so that no row of the mask is empty.

    Args:
        segments: [B, S]; the segment of each token, as in `Packed`.
    """

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        of_query = segments[batch, query]
        of_key = segments[batch, key]
        branch = ((of_key == PREFIX) | (of_key == of_query)) & (of_key != PAD)
        return ((key <= query) & branch) | (key == query)

    return sees


def row_rule(sequences: Tensor, segments: Tensor) -> Rule:
    """Return the rule for a row of concatenated sequences: `prefix_rule`, but no attention between sequences."""
    within = prefix_rule(segments[None])

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return within(batch * 0, head, query, key) & (sequences[query] == sequences[key])

    return sees


def dense(rule: Rule, sequences: int, length: int) -> Tensor:
    """Return a rule as a boolean mask, [B, 1, S, S], for B sequences of S tokens."""
    batch = torch.arange(sequences)[:, None, None, None]
    place = torch.arange(length)
    return rule(batch, batch, place[:, None], place)


def pack(groups: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]]) -> Packed:
    """Pack each group of (prompt, answer) token ids into one sequence.

    The prefix consists of the first tokens that all prompts of the group share, but never includes a prompt's last
    token. The rest of each prompt belongs to the branch, because the last prompt token predicts the first token of the
    answer.
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

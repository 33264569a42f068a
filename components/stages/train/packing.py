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
        tokens_by_rectangle = []
        is_token_by_rectangle = []
        shapes = []
        masks = []
        for sequences in lengths.argsort(stable=True).tensor_split(count):
            slots = torch.arange(int(lengths[sequences].max()))
            is_token = slots < lengths[sequences, None]  # false for padding at the end of a sequence
            tokens = (starts[sequences, None] + slots) * is_token
            segments = self.segments[tokens].masked_fill(~is_token, PAD)
            has_branches = int(segments.max()) > 1  # a sequence with a single branch needs only causal attention
            masks.append(dense(prefix_rule(segments), *segments.shape) if has_branches else None)
            shapes.append((len(sequences), len(slots)))
            tokens_by_rectangle.append(tokens.flatten())
            is_token_by_rectangle.append(is_token.flatten())
        token_of_slot = torch.cat(tokens_by_rectangle)
        is_token_in_slot = torch.cat(is_token_by_rectangle)
        slot_of_token = torch.empty(int(lengths.sum()), dtype=torch.long)
        slot_of_token[token_of_slot[is_token_in_slot]] = is_token_in_slot.nonzero().flatten()
        return Layout(token_of_slot, slot_of_token, tuple(shapes), tuple(masks))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "Packed":
        """Return a copy with the function applied to each tensor."""
        return Packed(**{field.name: function(getattr(self, field.name)) for field in fields(self)})

    def block_mask(self, device: Device) -> BlockMask:
        """Return the FlexAttention mask of the row. The kernel skips blocks in which no token attends to another token.

        The mask is created on the device, without waiting for the device to finish.
        """
        rule = row_rule(device.move(self.sequences), device.move(self.segments))
        return create_block_mask(rule, None, None, self.tokens, self.tokens, device=str(device.torch))


# Returns whether a query token attends to a key token, given broadcastable batch, head, query and key indices, like
# FlexAttention's `mask_mod`
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def prefix_rule(segments: Tensor) -> Rule:
    """Return the rule for padded sequences: a token attends to itself and to earlier tokens of its prefix and branch.

    Padding tokens attend to themselves, so that no row of the mask is empty.

    Args:
        segments: [B, S]; the segment of each token, as in `Packed`.
    """

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query_segment = segments[batch, query]
        key_segment = segments[batch, key]
        is_in_prefix_or_branch = ((key_segment == PREFIX) | (key_segment == query_segment)) & (key_segment != PAD)
        return ((key <= query) & is_in_prefix_or_branch) | (key == query)

    return attends


def row_rule(sequences: Tensor, segments: Tensor) -> Rule:
    """Return the rule for a row of concatenated sequences: `prefix_rule`, but no attention between sequences."""
    rule_within_sequence = prefix_rule(segments[None])

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return rule_within_sequence(batch * 0, head, query, key) & (sequences[query] == sequences[key])

    return attends


def dense(rule: Rule, sequences: int, length: int) -> Tensor:
    """Return a rule as a boolean mask, [B, 1, S, S], for B sequences of S tokens."""
    batch = torch.arange(sequences)[:, None, None, None]
    positions = torch.arange(length)
    return rule(batch, batch, positions[:, None], positions)


def pack(groups: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]]) -> Packed:
    """Pack each group of (prompt, answer) token ids into one sequence.

    The prefix consists of the first tokens that all prompts of the group share, but never includes a prompt's last
    token. The rest of each prompt belongs to the branch, because the last prompt token predicts the first token of the
    answer.
    """
    ids: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    supervised: list[int] = []  # positions in the row
    labels: list[int] = []
    lengths: list[int] = []
    for group in groups:
        start = len(ids)
        prompts = [list(prompt) for prompt, _ in group]
        shared_tokens = min(len(commonprefix(prompts)), *(len(prompt) - 1 for prompt in prompts))
        ids += prompts[0][:shared_tokens]
        positions += range(shared_tokens)
        segments += [PREFIX] * shared_tokens
        for branch, (prompt, answer) in enumerate(group, start=1):
            branch_ids = [*prompt[shared_tokens:], *answer[:-1]]
            first_position = len(ids) + len(prompt) - shared_tokens - 1
            supervised += range(first_position, first_position + len(answer))
            labels += answer
            ids += branch_ids
            positions += range(shared_tokens, shared_tokens + len(branch_ids))
            segments += [branch] * len(branch_ids)
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

"""Pack all branches of an image set into one sequence, so that its images are processed only once.

The first tokens that all branches share, which are mostly the images and the question, are the prefix of the sequence.
Each branch attends to the prefix and to itself but not to other branches. Its positions continue from the end of the
prefix. Loss and gradients are the same as with one sequence per branch.

The B sequences of a micro-batch are concatenated into one row of T tokens. Padding is only needed for FlexAttention, at
the end of the row, where it reduces the number of distinct row lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from m3diff.models.contract import Branch, Processor, TrainingSequence
from m3diff.models.device import Device
from m3diff.models.fused import FLEX_BLOCK, Layout, PackedAttention, require_fused_attention
from m3diff.records.errors import ParamsError
from m3diff.records.sample import PAIR

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


def count_shared_tokens(branches: Sequence[Branch]) -> int:
    """Return the length of the prefix that the branches of a sequence share.

    The prefix never includes the last prompt token of a branch, because this token predicts the first token of the
    answer.
    """
    first_answers = [branch.spans[0][0] for branch in branches]
    return min(len(commonprefix([branch.ids for branch in branches])), min(first_answers) - 1)


def pack(sequences: Sequence[Sequence[Branch]]) -> Packed:
    """Pack sequences, each given as its branches. The last token of a branch is only a label."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    supervised: list[int] = []  # positions in the row
    labels: list[int] = []
    lengths: list[int] = []
    for branches in sequences:
        start = len(ids)
        shared_tokens = count_shared_tokens(branches)
        ids += branches[0].ids[:shared_tokens]
        positions += range(shared_tokens)
        segments += [PREFIX] * shared_tokens
        for segment, branch in enumerate(branches, start=1):
            shift = len(ids) - shared_tokens  # from a position in the branch to a position in the row
            for answer_start, answer_end in branch.spans:
                supervised += range(shift + answer_start - 1, shift + answer_end - 1)
                labels += branch.ids[answer_start:answer_end]
            last_token = len(branch.ids) - 1
            ids += branch.ids[shared_tokens:last_token]
            positions += range(shared_tokens, last_token)
            segments += [segment] * (last_token - shared_tokens)
        lengths.append(len(ids) - start)
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[supervised] = True
    assert int(mask.sum()) == len(labels), f"supervised positions: {int(mask.sum())}, labels: {len(labels)}"
    return Packed(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        sequences=torch.repeat_interleave(torch.tensor(lengths)),
        segments=torch.tensor(segments),
        supervised=mask[None],
        labels=torch.tensor(labels),
    )


@dataclass(frozen=True)
class RowBatch:
    """A micro-batch whose sequences are one row of tokens.

    Attributes:
        packed: the tokens. For FlexAttention, the row is padded.
        images: the images of all sequences, as the processor's `collate` returns them.
        weights: [supervised tokens]; weight of each token in the loss.
        layout: layout of the row for SDPA; None for FlexAttention.
    """

    packed: Packed
    images: dict[str, Tensor]
    weights: Tensor
    layout: Layout | None

    @property
    def labels(self) -> Tensor:
        """The supervised tokens, [supervised tokens]."""
        return self.packed.labels

    def attention_inputs(self, device: Device) -> dict[str, Any]:
        """Return the model's attention arguments: the mask and, for SDPA, the layout.

        The mask selects the kernel (see `m3diff.models.fused`).
        """
        if self.layout is None:
            return {"attention_mask": self.packed.block_mask(device)}
        layout = self.layout.map_tensors(device.move)
        return {"attention_mask": layout.attention_mask(), "layout": layout}


class MaskedRows:
    """Packing in one row with an attention mask. It requires the fused attention of `m3diff.models.fused`.

    A model whose layers ignore the layout or the mask would attend to other sequences and to later tokens, without an
    error. The first forward pass therefore counts the layers that follow the packing. A model with other layers needs
    another packing, such as `m3diff.models.separate_rows.SeparateRows`.
    """

    shares_prompts = True

    def __init__(self) -> None:
        self.is_checked = False

    def batch(self, sequences: Sequence[TrainingSequence], processor: Processor, device: Device) -> RowBatch:
        """Return a micro-batch; see `Packing.batch`.

        A micro-batch without a pair gets a blank pair, which does not affect the loss. Each micro-batch therefore runs
        the same parts of the model: with ZeRO 3, a part that only some workers run would block them forever, and
        without a gradient, a part would skip the weight decay of a step.
        """
        packed = pack([sequence.branches for sequence in sequences])
        weights: list[int] = []
        for sequence in sequences:
            tokens = sum(end - start for branch in sequence.branches for start, end in branch.spans)
            weights += [sequence.weight] * tokens
        prepared = [sequence.prepared for sequence in sequences]
        if not any(len(images.marks) == PAIR for images in prepared):
            prepared.append(processor.blank_pair())
        images = {name: device.pin(tensor) for name, tensor in processor.collate(prepared).items()}
        layout = None
        if device.attention == "flex":
            packed = packed.rounded_up(FLEX_BLOCK, processor.pad_id)
        else:
            layout = packed.layout().map_tensors(device.pin)
        weight_of_token = torch.tensor(weights, dtype=torch.float32)
        return RowBatch(packed.map_tensors(device.pin), images, device.pin(weight_of_token), layout)

    @require_fused_attention()
    def logits(self, model: Any, batch: RowBatch, processor: Processor, device: Device) -> Tensor:
        """Return the logits of the supervised tokens; see `Packing.logits`.

        Raises:
            ParamsError: a layer of the model ignores the packing.
        """
        packed = batch.packed
        calls_before = PackedAttention.calls
        logits = model(
            input_ids=device.move(packed.input_ids),
            position_ids=device.move(packed.position_ids),
            # these two stay on the CPU, so that looking up positions in them does not wait for the GPU
            tokens=packed.input_ids,
            logits_to_keep=packed.supervised,
            use_cache=False,
            **batch.attention_inputs(device),
            **processor.image_inputs(batch.images, device.torch),
        ).logits
        if not self.is_checked:
            require_packed_attention(model, PackedAttention.calls - calls_before)
            self.is_checked = True
        return logits


def require_packed_attention(model: Any, layers: int) -> None:
    """Check that each layer of an LLM followed the packing.

    Args:
        model: the model, or DeepSpeed's engine around it.
        layers: number of layers that followed the packing in one forward pass.

    Raises:
        ParamsError: there are fewer such layers than the LLM has. A layer without attention counts too, because its
            state would pass from one sequence to the next.
    """
    unwrapped_model = getattr(model, "module", model)  # DeepSpeed's engine has a `config` of its own
    expected_layers = unwrapped_model.config.get_text_config(decoder=True).num_hidden_layers
    if layers < expected_layers:
        raise ParamsError("models.packing_ignored", value=layers, expected=expected_layers)

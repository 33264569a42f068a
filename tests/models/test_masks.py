"""Packed sequences: their tokens, attention rule and layout."""

import numpy as np
import torch

from m3diff.models.contract import Branch
from m3diff.models.fused import FLEX_BLOCK
from m3diff.models.masks import PAD, Packed, dense, pack, row_rule
from tests.tiny import SIDE, pair_branch

IMAGE = [3] * ((SIDE // 8) ** 2 + 1)


def group(captions: int, seed: int) -> list[Branch]:
    """Return the branches of a pair, with one question and answers of different lengths."""
    rng = np.random.default_rng(seed)
    question = rng.integers(10, 600, 4).tolist()
    answers = [rng.integers(10, 600, rng.integers(1, 9)).tolist() for _ in range(captions)]
    return [pair_branch([7, *IMAGE, *IMAGE, *question, 9], answer) for answer in answers]


def mask_of(packed: Packed) -> torch.Tensor:
    """Return which tokens of the whole row attend to which, [1, 1, T, T] bool."""
    return dense(row_rule(packed.sequences, packed.segments), 1, packed.tokens)


def test_branches_do_not_see_each_other_nor_another_sequence():
    packed = pack([group(3, seed=0), group(1, seed=1)]).rounded_up(FLEX_BLOCK, pad_id=0)
    mask = mask_of(packed)[0, 0]
    sequences = packed.sequences.tolist()
    segments = packed.segments.tolist()
    assert sequences[-1] == segments[-1] == PAD
    for query in range(packed.tokens):
        for key in range(packed.tokens):
            branch = segments[key] != PAD and segments[key] in (0, segments[query])
            allowed = key <= query and sequences[key] == sequences[query] and branch
            assert bool(mask[query, key]) == (allowed or key == query)


def test_a_pack_holds_sequences_end_to_end_each_branch_after_a_shared_prompt():
    packed = pack([[pair_branch([1, 2, 3], [4, 5, 6]), pair_branch([1, 2, 3], [7, 8])], [pair_branch([1, 9], [4, 6])]])
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 3, 7, 1, 9, 4]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2]]
    assert packed.sequences.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert packed.segments.tolist() == [0, 0, 1, 1, 1, 2, 2, 0, 1, 1]
    assert packed.supervised.int().tolist() == [[0, 0, 1, 1, 1, 1, 1, 0, 1, 1]]
    assert packed.labels.tolist() == [4, 5, 6, 7, 8, 4, 6]
    assert packed.input_ids.dtype == torch.long
    assert packed.labels.dtype == torch.long
    assert packed.tokens == 10


def test_branches_begin_where_their_prompts_differ():
    unlike = pack([[pair_branch([1, 2, 3], [4]), pair_branch([1, 5, 3], [6])]])
    assert unlike.input_ids.tolist() == [[1, 2, 3, 5, 3]]
    assert unlike.position_ids.tolist() == [[0, 1, 2, 1, 2]]
    assert unlike.segments.tolist() == [0, 1, 1, 2, 2]
    assert unlike.labels.tolist() == [4, 6]


def test_the_layout_is_one_sequence_a_row():
    packed = pack([[pair_branch([1, 2], [4, 5]), pair_branch([1, 2], [7])], [pair_branch([1, 9], [4])]])
    packed = packed.rounded_up(8, pad_id=0)
    layout = packed.layout()
    assert layout.shapes == ((2, 4),)
    assert layout.token_of_slot.tolist() == [4, 5, 0, 0, 0, 1, 2, 3], "the shorter first"
    assert layout.slot_of_token.tolist() == [4, 5, 6, 7, 0, 1]
    (mask,) = layout.masks
    assert mask is not None
    assert mask.int().tolist()[1] == [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]]
    assert mask.int().tolist()[0] == [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]], (
        "no token sees the padding"
    )
    everything = layout.attention_mask()
    assert everything.shape == (1, 1, 6, 6)
    assert everything.untyped_storage().nbytes() == 1, "no memory for what holds nothing"


def test_sequences_of_about_one_length_share_a_rectangle():
    lengths = [5, 20, 6, 19, 5, 20, 6, 18]
    packed = pack([[pair_branch([1] * (length - 1), [2, 3])] for length in lengths])
    layout = packed.layout()
    assert layout.shapes == ((4, 6), (4, 20))
    assert layout.masks == (None, None), "one caption a sequence is plain causal attention"
    tokens = layout.token_of_slot[layout.slot_of_token]
    assert tokens.tolist() == list(range(sum(lengths))), "each token is at its place"
    assert packed.sequences[layout.token_of_slot[24:44]].tolist() == [7] * 18 + [0, 0]

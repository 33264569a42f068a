"""BLIP2IDC packs as M3Diff does: loss and gradients of one sequence per reference, with OPT's learnt positions too."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from m3diff.models import FAMILIES
from m3diff.models.attention import KERNELS
from m3diff.models.device import Device
from m3diff.models.fused import fused_attention
from m3diff.models.tuning import prepare
from m3diff.stages.train.batches import MicroBatch, complete
from m3diff.stages.train.engine import attention_inputs
from m3diff.stages.train.packing import Packed, pack
from tests.models.blip2idc.test_family import pictures
from tests.tiny_blip2 import QUERIES, TEXTS, blip2_settings, randomised, tiny_config

FAMILY = FAMILIES["blip2idc"]


def group(captions: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """One pair's (prompt, answer) tokens, answers of different lengths."""
    rng = np.random.default_rng(seed)
    answers = [[int(t) for t in rng.integers(10, 250, rng.integers(1, 9))] for _ in range(captions)]
    return [([tiny_config().image_token_index] * QUERIES + [2], answer) for answer in answers]


def tiny_model(llm: str, dtype: torch.dtype, way: str = "none") -> torch.nn.Module:
    """As it trains, with adapters that have moved."""
    torch.manual_seed(0)
    config = tiny_config(llm)
    config._attn_implementation = KERNELS
    model = randomised(FAMILY.build(config))
    prepare(model, FAMILY, blip2_settings())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    FAMILY.fuse(model, way)
    return model.to(dtype).train()


def summed_loss(model: torch.nn.Module, packed: Packed, pixels: Tensor, kernel: str) -> Tensor:
    device = Device(False, "fp32", kernel)  # type: ignore[arg-type]
    batch = complete(MicroBatch(packed, torch.empty(0), torch.empty(0)), device, pad_id=1)
    asked: dict[str, Any] = attention_inputs(batch, device)
    with fused_attention():
        logits = model(
            input_ids=batch.packed.input_ids,
            position_ids=batch.packed.position_ids,
            pixel_values=pixels,
            logits_to_keep=batch.packed.supervised,
            use_cache=False,
            **asked,
        ).logits
    return F.cross_entropy(logits, batch.packed.labels, reduction="sum")


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("captions", [(1,), (2,), (2, 5), (1, 3)])
@pytest.mark.parametrize("llm", TEXTS)
@pytest.mark.parametrize(
    ("dtype", "kernel"), [(torch.float32, "sdpa"), (torch.float64, "sdpa"), (torch.float64, "flex")]
)
def test_packed_equals_unpacked(captions: tuple[int, ...], llm: str, dtype: torch.dtype, kernel: str) -> None:
    model = tiny_model(llm, dtype)
    groups = [group(count, seed) for seed, count in enumerate(captions)]
    pixels = pictures(len(groups)).to(dtype)
    packed_loss = summed_loss(model, pack(groups), pixels, kernel)
    packed = gradients(model, packed_loss)
    assert len(packed) == sum(p.requires_grad for p in model.parameters())
    unpacked_loss = torch.zeros((), dtype=dtype)  # each alone, so that no other can be of influence
    for number, members in enumerate(groups):
        for one in members:
            unpacked_loss = unpacked_loss + summed_loss(model, pack([[one]]), pixels[number : number + 1], "sdpa")
    unpacked = gradients(model, unpacked_loss)
    # a branch that saw a sibling, or a position off by one, moves loss and gradients by more than 1e-3 of their size
    loss_tolerance, tolerance = (1e-6, 1e-5) if dtype == torch.float32 else (1e-14, 1e-12)
    torch.testing.assert_close(packed_loss, unpacked_loss, rtol=loss_tolerance, atol=0)
    whole = torch.stack([gradient.norm() for gradient in unpacked.values()]).norm()
    for name, gradient in unpacked.items():
        scale = max(gradient.norm(), 1e-3 * whole)
        assert (packed[name] - gradient).norm() < tolerance * scale, name


@pytest.mark.parametrize("llm", TEXTS)
def test_each_sequence_of_a_row_has_its_own_picture(llm: str) -> None:
    model, groups, pixels = tiny_model(llm, torch.float64), [group(2, 0), group(1, 1)], pictures(2).double()
    with torch.no_grad():
        apart = sum(summed_loss(model, pack([one]), pixels[n : n + 1], "sdpa") for n, one in enumerate(groups))
        torch.testing.assert_close(summed_loss(model, pack(groups), pixels, "sdpa"), apart)
        swapped = summed_loss(model, pack(groups), pixels.flip(0), "sdpa")
    assert abs(float(swapped - apart)) > 1e-3


def test_positions_of_a_branch_are_read_where_opt_would_count_the_row_through() -> None:
    model, packed = tiny_model("opt", torch.float64), pack([group(3, 0)])
    counted = Packed(**{**vars(packed), "position_ids": torch.arange(packed.tokens)[None]})
    with torch.no_grad():
        right, wrong = (summed_loss(model, each, pictures(1).double(), "sdpa") for each in (packed, counted))
    assert abs(float(right - wrong)) > 1e-3


@pytest.mark.parametrize("llm", TEXTS)
def test_full_recomputation_changes_no_gradient(llm: str) -> None:
    packed, pixels = pack([group(2, 0), group(3, 1)]), pictures(2).double()
    found = []
    for way in ("none", "full"):
        model = tiny_model(llm, torch.float64, way)
        found.append(gradients(model, summed_loss(model, packed, pixels, "sdpa")))
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-9, atol=1e-12)


def test_without_training_the_same_logits_are_kept() -> None:
    model, packed = tiny_model("qwen2", torch.float64), pack([group(2, 0)])
    pixels = pictures(1).double()
    with torch.no_grad():
        trains = summed_loss(model, packed, pixels, "sdpa")
        torch.testing.assert_close(summed_loss(model.eval(), packed, pixels, "sdpa"), trains, rtol=1e-6, atol=0)

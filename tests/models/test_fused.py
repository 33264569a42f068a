"""Fused kernels compared with those of transformers and peft: logits, gradients and stored activations."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention.flex_attention import create_mask
from transformers.pytorch_utils import Conv1D

from m3diff.models import FAMILIES
from m3diff.models.device import Device
from m3diff.models.fused import (
    FLEX_BLOCK,
    FusedEncoderLayer,
    FusedLora,
    SwiGLU,
    does_folding_pay,
    make_fused,
    recompute_in_backward,
    require_fused_attention,
    swiglu,
)
from m3diff.models.masks import Packed, RowBatch, pack
from m3diff.models.tuning import prepare_for_training, suppress_adapter_warnings, unwrap_model
from tests.models.test_masks import group, mask_of
from tests.tiny import MDP, SIDE, pair_branch, tiny_model, tiny_settings


def summed_loss(model: torch.nn.Module, packed: Packed, pixels: Tensor, kernel: str = "rule") -> Tensor:
    """Return the loss, with the rule as one mask over the whole row or with a kernel's inputs."""
    inputs: dict[str, Any] = {"attention_mask": mask_of(packed)}
    if kernel != "rule":
        device = Device(False, "fp32", kernel)  # type: ignore[arg-type]
        if kernel == "flex":
            packed = packed.rounded_up(FLEX_BLOCK, pad_id=0)
        layout = packed.layout() if kernel == "sdpa" else None
        inputs = RowBatch(packed, {}, torch.empty(0), layout).attention_inputs(device)
    inputs |= {"pixel_values": pixels, "batch_num_images": [2] * (len(pixels) // 2), "use_cache": False}
    inputs |= {"input_ids": packed.input_ids, "position_ids": packed.position_ids}
    logits = model(**inputs, logits_to_keep=packed.supervised).logits
    return nn.functional.cross_entropy(logits, packed.labels, reduction="sum")


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def adapted_model(dtype: torch.dtype, rank: int = 2) -> nn.Module:
    model = tiny_model(MDP)
    adapted = prepare_for_training(model, FAMILIES["m3diff"], tiny_settings(rank=rank))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    return adapted.to(dtype).train()


def batch(dtype: torch.dtype) -> tuple[Packed, Tensor]:
    torch.manual_seed(0)
    return pack([group(3, seed=0), group(1, seed=1)]), torch.randn(4, 3, SIDE, SIDE, dtype=dtype)


@pytest.mark.parametrize("rank", [0, 2, 5], ids=["without adapters", "added", "folded in fp32"])
@pytest.mark.parametrize("activation_checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
# in float64 the stock norm still rounds to float32
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-6), (torch.float32, 2e-5)])
def test_every_way_gives_the_stock_loss_and_gradients(activation_checkpointing, kernel, rank, dtype, rtol):
    model = adapted_model(dtype, rank)
    (packed, pixels) = batch(dtype)
    make_fused(unwrap_model(model), stock=True)
    stock_loss = summed_loss(model, packed, pixels)
    stock_gradients = gradients(model, stock_loss)
    make_fused(unwrap_model(model), activation_checkpointing)
    folds = rank == 5 and activation_checkpointing == "none" and dtype == torch.float32
    llm = unwrap_model(model).model.language_model.layers[0]
    encoder = unwrap_model(model).model.vision_tower.encoder
    assert llm.folds_adapters == folds
    assert llm.is_selective == (activation_checkpointing == "selective")
    assert isinstance(encoder.layers[0], FusedEncoderLayer) == folds
    loss = summed_loss(model, packed, pixels, kernel)
    gradients_by_name = gradients(model, loss)
    torch.testing.assert_close(loss, stock_loss, rtol=rtol, atol=0)
    assert gradients_by_name.keys() == stock_gradients.keys()
    total_norm = torch.stack([gradient.float().norm() for gradient in stock_gradients.values()]).norm()
    for name, gradient in stock_gradients.items():
        # an adapter without its scaling (2 here), or a norm without its weight, is off by half and more
        assert (gradients_by_name[name] - gradient).norm() <= rtol * max(gradient.norm(), 0.03 * total_norm), name


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["kept", "recomputed"])
def test_a_recomputed_product_is_not_kept_for_backward(is_recomputed):
    down = nn.Linear(8, 4)
    gate, up = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    product = SwiGLU.apply(gate, up)
    storage = StorageWeakRef(product.untyped_storage())
    with recompute_in_backward(product, SwiGLU.apply, gate, up) if is_recomputed else nullcontext():
        out = down(product)
    del product
    assert storage.expired() == is_recomputed
    out.sum().backward()
    torch.testing.assert_close(down.weight.grad, swiglu(gate, up).sum(0).expand(4, 8))


def test_the_backward_of_swiglu_is_right():
    gate, up = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(SwiGLU.apply, (gate, up))


def test_flex_attentions_rule_is_the_dense_mask():
    packed = pack([group(3, seed=0), group(1, seed=1), group(7, seed=2)]).rounded_up(FLEX_BLOCK, pad_id=0)
    blocks = packed.block_mask(Device(False, "fp32"))
    rule = create_mask(blocks.mask_mod, None, None, packed.tokens, packed.tokens, device="cpu")
    assert torch.equal(rule, mask_of(packed))


def test_flex_attention_skips_the_blocks_in_which_no_token_sees_another():
    two_answers = [pair_branch([1] * 301, [2] * 200), pair_branch([1] * 301, [3] * 200)]
    packed = pack([two_answers, [pair_branch([1] * 150, [2] * 40)]]).rounded_up(FLEX_BLOCK, pad_id=0)
    blocks = packed.block_mask(Device(False, "fp32")).to_dense()[0, 0].bool()
    count = packed.tokens // 128
    tiles = mask_of(packed)[0, 0].view(count, 128, count, 128).any(dim=3).any(dim=1)
    assert torch.equal(blocks, tiles)
    assert not blocks.all()


def test_only_a_fused_attention_kernel_is_let_run():
    model = adapted_model(torch.float32)
    (packed, pixels) = batch(torch.float32)
    with require_fused_attention():
        summed_loss(model, packed, pixels).backward()
        query = torch.randn(1, 2, 4, 8)
        score = torch.randn(1, 1, 4, 4, requires_grad=True)  # no fused kernel gives a mask's gradient
        with pytest.raises(RuntimeError, match="No available kernel"):
            nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=score)


class TwoLayers(nn.Module):
    """A linear layer, then GPT-2's layer with a transposed weight. Both are square, so no shape shows a mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.transposed = Conv1D(6, 6)
        nn.init.normal_(self.transposed.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.transposed(self.linear(x))

    def activation_checkpointing_disable(self) -> None: ...


def adapted_layers(*names: str) -> nn.Module:
    """Return the two layers with adapters of rank 4 on some of them, for which folding pays."""
    torch.manual_seed(0)
    layers = TwoLayers()
    config = LoraConfig(r=4, target_modules=list(names), init_lora_weights=False)
    with suppress_adapter_warnings():
        get_peft_model(layers, config)  # type: ignore[arg-type]
    return layers.train()


def test_an_adapter_of_a_transposed_weight_stays_stock():
    layers: Any = adapted_layers("linear", "transposed")
    x = torch.randn(3, 6)
    expected = layers(x)
    make_fused(layers)
    torch.testing.assert_close(layers(x), expected)
    assert type(layers.linear) is FusedLora
    assert type(layers.transposed) is not FusedLora


@pytest.mark.parametrize(
    ("names", "pays"), [(["linear"], True), (["transposed"], False), (["linear", "transposed"], False)]
)
def test_folding_pays_only_if_all_adapters_are_of_linear_layers(names, pays):
    assert does_folding_pay(adapted_layers(*names)) == pays

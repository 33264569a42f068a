"""Frozen products in FP8 against the same in bf16: within e4m3's rounding, row by row, and nothing of it on disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from components.models import FAMILIES, fp8
from components.models.checkpoint import save_checkpoint
from components.models.device import Device, DeviceError
from components.models.fp8 import (
    FLOAT8,
    Fp8AdaptedLinear,
    Fp8Lora,
    Rounded,
    copies_bytes,
    fp8_linears,
    fp8_product,
    rounded,
    use_fp8,
    without_fp8,
)
from components.models.fused import AdaptedLinear, make_fused
from components.models.tuning import prepare, unwrapped
from tests.models.test_fused import adapted_model, batch
from tests.tiny import BASE, MDP, WIDTH, tiny_model, tiny_settings
from tests.train.test_packing import gradients, summed_loss

CPU = Device(gpu=False, precision="bf16")
LARGEST = torch.finfo(FLOAT8).max
HALF_STEP = 2.0**-4
"""Of the nearest e4m3 number, with three bits behind the leading one: relative."""
BF16 = 2.0**-8
TOKENS, IN, OUT, RANK = 50, 64, 48, 4
IN_FP8 = 10
"""Linears of the tiny model's two layers without keys and values, whose 8 outputs the kernel does not take."""


def bf16_model(way: str = "none") -> nn.Module:
    model = adapted_model(torch.bfloat16)
    make_fused(unwrapped(model), way)
    return model


def fp8_model(way: str = "none") -> nn.Module:
    model = bf16_model(way)
    assert use_fp8(model, CPU) == IN_FP8
    return model


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def in_fp8(weight: Tensor) -> Rounded:
    return Rounded(*rounded(weight))


def test_a_row_has_a_scale_of_its_own_and_each_number_three_bits() -> None:
    sizes = torch.tensor([1e-20, 1e-3, 1.0, 1e20])[:, None]
    matrix = (noise(4, 300).float() * sizes).bfloat16()
    values, scales = rounded(matrix)
    assert torch.equal(scales, scales.log2().round().exp2()), "powers of two"
    largest = (matrix.float().abs() / scales).amax(dim=1)
    assert ((largest > LARGEST / 2) & (largest <= LARGEST)).all()
    error = (values.float() * scales - matrix.float()).abs()
    subnormal = 2.0**-10 * scales  # half of the smallest step
    assert (error <= torch.maximum(HALF_STEP * matrix.float().abs(), subnormal)).all()
    assert error.max() > 0


def test_zeros_stay_and_what_is_not_finite_is_seen() -> None:
    matrix = noise(4, IN)
    matrix[0] = 0
    matrix[1, 3], matrix[2, 5] = float("inf"), float("nan")
    product = fp8_product(matrix, in_fp8(noise(OUT, IN, seed=1)))
    assert torch.equal(product[0], torch.zeros(OUT, dtype=torch.bfloat16))
    assert not product[1:3].isfinite().any()
    assert product[3].isfinite().all()


def test_a_rows_product_does_not_depend_on_the_other_rows() -> None:
    matrix, weight = noise(TOKENS, IN), in_fp8(noise(OUT, IN, seed=1))
    want = fp8_product(matrix, weight)
    matrix[7] *= 1e4
    got = fp8_product(matrix, weight)
    others = [row for row in range(TOKENS) if row != 7]
    assert torch.equal(got[others], want[others])
    assert not torch.equal(got[7], want[7])
    assert torch.equal(fp8_product(matrix[20:], weight), want[20:])


def test_an_outlier_of_the_weight_spoils_its_own_output_alone() -> None:
    matrix, weight = noise(TOKENS, IN), noise(OUT, IN, seed=1)
    want = fp8_product(matrix, in_fp8(weight))
    weight[5, 2] = 1e4
    got = fp8_product(matrix, in_fp8(weight))
    others = [column for column in range(OUT) if column != 5]
    assert torch.equal(got[:, others], want[:, others])


def test_forward_and_backward_are_bf16s_within_the_rounding() -> None:
    x, weight, bias = noise(TOKENS, IN), noise(OUT, IN, seed=1), noise(OUT, seed=2, scale=5.0)
    grad = noise(TOKENS, OUT, seed=3)
    lora_a, lora_b = noise(RANK, IN, seed=4, scale=0.3), noise(OUT, RANK, seed=5, scale=0.3)

    def run(function: Any, *frozen: Any) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (x, lora_a, lora_b)]
        output = function.apply(leaves[0], *frozen, bias, *leaves[1:], 2.0)
        output.backward(grad)
        return [output.detach(), *(leaf.grad for leaf in leaves)]

    want = run(AdaptedLinear, weight)
    got = run(Fp8AdaptedLinear, in_fp8(weight), in_fp8(weight.t().contiguous()))
    for place, (left, right) in {0: (x, weight.t()), 1: (grad, weight)}.items():
        error = (got[place].float() - want[place].float()).abs()
        most = left.float().abs() @ right.float().abs()  # every term off by as much as both roundings allow
        assert (error <= (2 * HALF_STEP + HALF_STEP**2) * most + 4 * BF16 * want[place].float().abs() + 0.1).all()
        # e4m3's rounding is 2.6 % in the mean square, of two factors 3.7 %; a whole adapter or bias is more than 20 %
        exact = (left.float() @ right.float()).norm()
        assert 0.02 < error.norm() / exact < 0.05
    assert torch.equal(got[2], want[2])
    assert torch.equal(got[3], want[3])


@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
def test_a_model_in_fp8_has_nearly_the_loss_and_the_gradients(kernel: str) -> None:
    packed, pixels = batch(torch.bfloat16)
    model = bf16_model()
    want_loss = summed_loss(model, packed, pixels, kernel)
    want = gradients(model, want_loss)
    use_fp8(model, CPU)
    loss = summed_loss(model, packed, pixels, kernel)
    got = gradients(model, loss)
    assert float(loss.detach()) == pytest.approx(float(want_loss.detach()), rel=1e-2)
    assert got.keys() == want.keys()
    ours, theirs = (torch.cat([part[name].float().flatten() for name in want]) for part in (got, want))
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.98
    assert (ours - theirs).norm() > 0.003 * theirs.norm(), "in backward, too"


@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
@pytest.mark.parametrize("way", ["selective", "full"])
def test_recomputation_changes_nothing(way: str, kernel: str) -> None:
    packed, pixels = batch(torch.bfloat16)
    runs = []
    for model in (fp8_model(), fp8_model(way)):
        loss = summed_loss(model, packed, pixels, kernel)
        runs.append((loss.detach(), gradients(model, loss)))
    (want_loss, want), (loss, got) = runs
    assert torch.equal(loss, want_loss)
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=2e-2, atol=1e-2 * float(gradient.abs().max()))


@pytest.mark.slow(45)
def test_compiled_layers_give_the_same() -> None:
    packed, pixels = batch(torch.bfloat16)
    model = fp8_model()
    want_loss = summed_loss(model, packed, pixels, "flex")
    want = gradients(model, want_loss)
    for layer in unwrapped(model).model.language_model.layers:
        layer.compile(backend="aot_eager", dynamic=True)
    loss = summed_loss(model, packed, pixels, "flex")
    got = gradients(model, loss)
    torch.compiler.reset()
    torch.testing.assert_close(loss, want_loss, rtol=1e-2, atol=0)
    ours, theirs = (torch.cat([part[name].float().flatten() for name in want]) for part in (got, want))
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.999


def test_every_product_goes_through_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, product = [], fp8.fp8_product

    def counted(matrix: Tensor, weight: Rounded, *rest: Any, **options: Any) -> Tensor:
        shapes.append(tuple(weight.values.shape))
        return product(matrix, weight, *rest, **options)

    monkeypatch.setattr(fp8, "fp8_product", counted)
    model = fp8_model()
    loss = summed_loss(model, *batch(torch.bfloat16))
    linears = [(linear.out_features, linear.in_features) for linear in fp8_linears(model)]
    assert sorted(shapes) == sorted(linears)
    shapes.clear()
    loss.backward()
    assert sorted(shapes) == sorted((columns, rows) for rows, columns in linears)


def test_evaluation_computes_by_the_bf16_weights() -> None:
    def projected(model: nn.Module) -> Tensor:
        return unwrapped(model).model.language_model.layers[0].mlp.gate_proj(noise(TOKENS, WIDTH))

    assert torch.equal(projected(fp8_model().eval()), projected(bf16_model().eval()))
    assert not torch.equal(projected(fp8_model()), projected(bf16_model()))


def test_weights_with_a_side_that_the_kernel_does_not_take_stay_in_bf16() -> None:
    sizes = {"narrow_in": (8, 16), "narrow_out": (16, 8), "taken": (16, 32)}
    plain = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
    model = get_peft_model(plain, LoraConfig(r=2, target_modules=list(sizes)))  # type: ignore[arg-type]
    assert [(linear.in_features, linear.out_features) for linear in fp8_linears(model)] == [(16, 32)]


def test_what_is_exported_is_bf16s_to_the_bit(tmp_path: Path) -> None:
    settings, processor = tiny_settings(), FAMILIES["m3diff"].load_processor(BASE)
    exported = []
    for name, make in {"bf16": bf16_model, "fp8": fp8_model}.items():
        model = make()
        assert all(value.dtype == torch.bfloat16 for value in model.state_dict().values() if value.is_floating_point())
        save_checkpoint(model, processor, tmp_path / name, family=settings.family, base=BASE, base_sha256="0" * 64)
        exported.append(load_file(tmp_path / name / "model.safetensors"))
    want, got = exported
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], weight) for name, weight in want.items())


def test_fp8_can_be_undone_and_gives_its_memory_back() -> None:
    model = bf16_model()
    want = [type(module) for module in model.modules()]
    use_fp8(model, CPU)
    without_fp8(model)
    assert [type(module) for module in model.modules()] == want
    assert not any("copies" in vars(module) for module in model.modules())


def test_the_memory_of_the_copies_is_counted() -> None:
    model = bf16_model()
    counted = copies_bytes(model)
    use_fp8(model, CPU)
    tensors = [
        tensor for module in model.modules() if isinstance(module, Fp8Lora) for copy in module.copies for tensor in copy
    ]
    assert counted == sum(tensor.untyped_storage().nbytes() for tensor in tensors) > 0


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (7, 5)])
def test_a_gpu_without_fp8_is_refused(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, capability)
    with pytest.raises(DeviceError, match=rf"train.fp8: true, but Some GPU \(.* {capability[0]}\.{capability[1]}\)"):
        use_fp8(bf16_model(), Device(gpu=True, precision="bf16"))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_a_gpu_with_fp8_is_taken(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, capability)
    assert use_fp8(bf16_model(), Device(gpu=True, precision="bf16")) == IN_FP8


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def partitioned() -> nn.Module:
    model = bf16_model()
    next(p for name, p in model.named_parameters() if "q_proj.base_layer" in name).ds_id = 0  # type: ignore[attr-defined]
    return model


def folded() -> nn.Module:
    model = bf16_model()
    make_fused(unwrapped(model), adapters="folded")
    return model


def without_adapters() -> nn.Module:
    return prepare(tiny_model(MDP), FAMILIES["m3diff"], tiny_settings(rank=0)).bfloat16().train()


@pytest.mark.parametrize(
    ("make", "precision", "said"),
    [
        (bf16_model, "fp32", "train.fp8: is for train.precision bf16, found fp32"),
        (partitioned, "bf16", "train.fp8: ZeRO 3 holds the weights in parts; set compute.zero_stage to 2"),
        (folded, "bf16", "train.fp8: the adapters are folded into the weights"),
        (without_adapters, "bf16", "train.fp8: no linear of the model has an adapter and sides .* multiples of 16"),
    ],
)
def test_what_has_no_frozen_weights_in_bf16_is_refused(make: Any, precision: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        use_fp8(make(), Device(gpu=False, precision=precision))

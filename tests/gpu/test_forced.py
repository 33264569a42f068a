"""Run the tests in tests/gpu on a CPU, and test branches that a CPU never takes with tensors without storage."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from m3diff.models import FAMILIES, fused
from m3diff.models.device import Device, process_environment
from m3diff.models.layers import insert_visual_tokens
from m3diff.models.tuning import unwrap_model
from m3diff.stages.train import job
from m3diff.stages.train.engine import token_loss
from m3diff.stages.train.loop import prepare_model
from m3diff.stages.train.state import MOMENTS, start_moments
from tests.family_cases import tiny
from tests.gpu import test_gpu
from tests.gpu.test_gpu import first_batch
from tests.stages.train.toy import recipe, run
from tests.tiny import MDP, tiny_settings


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU compute although a GPU is requested."""
    monkeypatch.setattr(Device, "torch", torch.device("cpu"))
    monkeypatch.setattr(Device, "backend", "gloo")
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")
    monkeypatch.setattr(job, "process_environment", lambda gpu: process_environment(gpu=False))
    init_process_group = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", lambda _, **options: init_process_group("gloo", **options))


@pytest.mark.parametrize("attention", test_gpu.ATTENTION)
@pytest.mark.parametrize("captions", [None, 1])
def test_loss_and_gradients(attention, captions, mixture, cpu, forced):
    test_gpu.test_loss_and_gradients_are_the_cpus(attention, "none", captions, mixture, cpu)


@pytest.mark.parametrize("attention", test_gpu.ATTENTION)
def test_bf16(attention, mixture, cpu, forced):
    test_gpu.test_bf16_is_close_to_fp32(attention, "selective", mixture, cpu)


def test_captions(tmp_path, forced):
    test_gpu.test_captions_in_bf16(tmp_path)


@pytest.mark.slow(60)
def test_a_run_beside_one_on_the_cpu(mixture, tmp_path, forced):
    test_gpu.test_a_run_on_the_gpu_trains_as_one_on_the_cpu(mixture, tmp_path)


@pytest.mark.slow(60)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resume(precision, mixture, tmp_path, monkeypatch, forced):
    test_gpu.test_a_killed_run_resumes_with_the_same_weights(precision, mixture, tmp_path, monkeypatch)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_resumed_states_of_adamw_are_on_the_device_of_its_fused_kernel(device):
    weight = torch.nn.Parameter(torch.zeros(3))
    adamw = torch.optim.AdamW([weight], fused=True)
    adamw.param_groups[0]["params"] = [weight.to(device)]
    engine: Any = SimpleNamespace(optimizer=SimpleNamespace(), basic_optimizer=adamw)
    start_moments(engine, 7)
    (state,) = adamw.state.values()
    for name in ("step", *MOMENTS):
        assert state[name].device.type == device
        assert state[name].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_mask", [False, True])
def test_no_kernel_gets_fewer_key_heads_in_fp32_or_with_a_mask(dtype, has_mask, monkeypatch):
    heads: list[tuple[int, int, bool]] = []
    stock_kernel = F.scaled_dot_product_attention

    def kernel(query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        heads.append((key.shape[1], value.shape[1], options["enable_gqa"]))
        return stock_kernel(query, key, value, mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    with FakeTensorMode():
        query = torch.empty(2, 4, 5, 8, dtype=dtype, device="cuda")
        key = torch.empty(2, 2, 5, 8, dtype=dtype, device="cuda")
        mask = torch.empty(2, 1, 5, 5, dtype=torch.bool, device="cuda") if has_mask else None
        assert fused.sdpa(query, key, key, mask, None).shape == (2, 5, 4, 8)
    is_grouped = dtype == torch.bfloat16 and not has_mask
    assert heads == [(2, 2, True) if is_grouped else (4, 4, False)]


class NoWaiting(TorchDispatchMode):
    """Raise an error if the CPU would wait for the device in order to read a value or a size."""

    OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "masked_scatter_backward", "equal", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        is_on_device = any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves)
        waits = is_on_device and func.overloadpacket.__name__ in self.OPERATIONS
        assert not waits, f"{func} waits for the device"
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("case", ["m3diff", "onediff on LLaVA-1.5", "blip2idc on Qwen2"])
def test_a_micro_batch_waits_for_nothing(case, mixture, tmp_path, monkeypatch):
    """Run forward and backward on a device without values, with and without recording the module's contribution."""
    base, settings = tiny(case, tmp_path / "base")
    family = FAMILIES[settings.family]
    device = Device(gpu=False, precision="bf16")
    if case == "m3diff":
        settings = tiny_settings(MDP | {"pos_embed_scale": 3.0})
    training = recipe(base, model=settings, precision="bf16", micro_batch=4)
    model, processor = prepare_model(training.cfg, training.model, training.compute, family)
    batch = first_batch(training, mixture, processor, device)
    model.to("meta")
    monkeypatch.setattr(Device, "torch", torch.device("meta"))
    monkeypatch.setattr(Device, "move", lambda self, tensor: tensor.to("meta"))
    recordings: list[Any] = [nullcontext()]
    if family.contribution:
        recordings.append(family.contribution.record(unwrap_model(model)))
    for recording in recordings:
        with recording, NoWaiting():
            token_loss(model, batch, test_gpu.PACKING, processor, device).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" in name:
            assert parameter.grad is not None, name


def test_visual_tokens_equal_those_of_masked_scatter_bit_for_bit():
    torch.manual_seed(0)
    ids = torch.tensor([[3, 9, 9, 1, 9, 3], [9, 3, 9, 9, 1, 1]])
    visual = torch.randn(6, 4, requires_grad=True)
    embeds = torch.randn(2, 6, 4, requires_grad=True)
    weight = torch.randn(2, 6, 4)
    scattered = insert_visual_tokens(embeds, visual, ids, 9)
    expected = embeds.masked_scatter((ids == 9)[..., None], visual)
    assert scattered.equal(expected)
    gradients = torch.autograd.grad((scattered * weight).sum(), (embeds, visual))
    expected_gradients = torch.autograd.grad((expected * weight).sum(), (embeds, visual))
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert gradient.equal(expected_gradient)


def test_a_step_of_deepspeed_never_waits_for_the_device(mixture, tmp_path, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    waits: list[int] = []
    monkeypatch.setattr(type(get_accelerator()), "synchronize", lambda *_: waits.append(1))
    run(recipe(tmp_path / "base", zero_stage=2, precision="bf16", micro_batch=1, epochs=2), mixture, tmp_path)
    assert not waits


def test_a_gpu_uses_compiled_kernels_and_too_many_graphs_are_an_error(monkeypatch):
    with FakeTensorMode():
        tensor = torch.empty(2, device="cuda")
    assert fused.compile_on_gpu(fused.swiglu, tensor) is fused.compile_once(fused.swiglu)
    assert fused.compile_on_gpu(fused.swiglu, torch.empty(2)) is fused.swiglu
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", False)
    kernel = fused.compile_once(lambda x, text: x * len(text))  # compiled again for each length of the text
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        [kernel(torch.ones(3), "a" * number) for number in range(12)]


def test_a_gpus_memory_grows_in_segments_unless_the_user_sets_the_allocator(monkeypatch):
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    assert process_environment(gpu=True)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert process_environment(gpu=True)["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"

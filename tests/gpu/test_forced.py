"""Tests of tests/gpu forced on a CPU, and the branches that a CPU never takes, on tensors without storage."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
from tests.gpu import test_gpu
from tests.gpu.test_gpu import first_batch
from tests.stages.train.toy import recipe, run
from tests.tiny import MDP, tiny, tiny_settings


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is asked for, and the CPU computes."""
    monkeypatch.setattr(Device, "torch", torch.device("cpu"))
    monkeypatch.setattr(Device, "backend", "gloo")
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")
    monkeypatch.setattr(job, "process_environment", lambda gpu: process_environment(gpu=False))


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
def test_what_a_resume_gives_adamw_lies_where_its_fused_kernel_reads_it(device):
    weight = torch.nn.Parameter(torch.zeros(3))
    adamw = torch.optim.AdamW([weight], fused=True)
    adamw.param_groups[0]["params"] = [weight.to(device)]
    engine: Any = SimpleNamespace(optimizer=SimpleNamespace(), basic_optimizer=adamw)
    start_moments(engine, 7)
    ((_, held),) = adamw.state.items()
    assert {name: (held[name].device.type, held[name].dtype) for name in ("step", *MOMENTS)} == dict.fromkeys(
        ("step", *MOMENTS), (device, torch.float32)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_no_kernel_gets_fewer_key_heads_in_fp32_or_with_a_mask(dtype, masked, monkeypatch):
    heads: list[tuple[int, int, bool]] = []
    stock = F.scaled_dot_product_attention

    def kernel(query: Any, key: Any, value: Any, mask: Any, **how: Any) -> Any:
        heads.append((key.shape[1], value.shape[1], how["enable_gqa"]))
        return stock(query, key, value, mask, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    with FakeTensorMode():
        query, key = (torch.empty(2, n, 5, 8, dtype=dtype, device="cuda") for n in (4, 2))
        mask = torch.empty(2, 1, 5, 5, dtype=torch.bool, device="cuda") if masked else None
        assert fused.sdpa(query, key, key, mask, None).shape == (2, 5, 4, 8)
    assert heads == [(2, 2, True) if dtype == torch.bfloat16 and not masked else (4, 4, False)]


class Waits(TorchDispatchMode):
    """Raises where a CPU would wait for what a device computes: to read a value, or to know a size."""

    OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "masked_scatter_backward", "equal", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs)))
        assert not (there and func.overloadpacket.__name__ in self.OPERATIONS), f"{func} waits for the device"
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("case", ["m3diff", "onediff on LLaVA-1.5", "blip2idc on Qwen2"])
def test_a_micro_batch_waits_for_nothing(case, mixture, tmp_path, monkeypatch):
    """Forward and backward on a device without values, while the module's contribution is recorded too."""
    base, settings = tiny(case, tmp_path / "base")
    family = FAMILIES[settings.family]
    device = Device(gpu=False, precision="bf16")
    if case == "m3diff":
        settings = tiny_settings(MDP | {"pos_embed_scale": 3.0})
    made = recipe(base, model=settings, precision="bf16", micro_batch=4)
    model, processor = prepare_model(made.cfg, made.model, made.compute, family)
    batch = first_batch(made, mixture, processor, device)
    model.to("meta")
    monkeypatch.setattr(Device, "torch", torch.device("meta"))
    monkeypatch.setattr(Device, "move", lambda self, tensor: tensor.to("meta"))
    for is_recorded in (False, True):
        recording: Any = Waits()
        if is_recorded and family.contribution:
            recording = family.contribution.record(unwrap_model(model))
        with recording, Waits():
            token_loss(model, batch, processor, device).backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if p.requires_grad and "lora_" in n)


def test_visual_tokens_are_where_masked_scatter_has_them_to_the_bit():
    torch.manual_seed(0)
    ids = torch.tensor([[3, 9, 9, 1, 9, 3], [9, 3, 9, 9, 1, 1]])
    visual = torch.randn(6, 4, requires_grad=True)
    embeds = torch.randn(2, 6, 4, requires_grad=True)
    weight = torch.randn(2, 6, 4)
    found = insert_visual_tokens(embeds, visual, ids, 9)
    wanted = embeds.masked_scatter((ids == 9)[..., None], visual)
    assert found.equal(wanted)
    given = (embeds, visual)
    both = (torch.autograd.grad((made * weight).sum(), given) for made in (found, wanted))
    assert all(ours.equal(theirs) for ours, theirs in zip(*both, strict=True))


def test_a_step_of_deepspeed_never_waits_for_the_device(mixture, tmp_path, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    waits: list[int] = []
    monkeypatch.setattr(type(get_accelerator()), "synchronize", lambda *_: waits.append(1))
    run(recipe(tmp_path / "base", zero_stage=2, precision="bf16", micro_batch=1, epochs=2), mixture, tmp_path)
    assert not waits


def test_a_gpu_computes_by_compiled_kernels_and_a_graph_for_each_length_is_an_error(monkeypatch):
    with FakeTensorMode():
        tensor = torch.empty(2, device="cuda")
    assert fused.compile_on_gpu(fused.swiglu, tensor) is fused.compile_once(fused.swiglu)
    assert fused.compile_on_gpu(fused.swiglu, torch.empty(2)) is fused.swiglu
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", False)
    kernel = fused.compile_once(lambda x, text: x * len(text))  # a graph for each value of Python
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        [kernel(torch.ones(3), "a" * number) for number in range(12)]


def test_a_gpus_memory_grows_in_segments_unless_its_allocator_is_told_otherwise(monkeypatch):
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    assert process_environment(gpu=True)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert process_environment(gpu=True)["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"

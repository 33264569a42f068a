"""The device of a process: its environment, its kernels, and tensors on it."""

import pytest
import torch

from m3diff.models.device import Device, DeviceError, process_environment
from m3diff.models.fused import choose_attention
from tests.errors import raises

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def test_a_process_without_a_gpu_sees_none():
    assert process_environment(gpu=False) == {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("variable", "allocator"),
    [(None, "expandable_segments:True"), *((name, "max_split_size_mb:64") for name in ALLOCATOR_VARIABLES)],
    ids=["none", "the new name", "the old name"],
)
def test_a_process_with_a_gpu_has_the_allocator_that_the_user_configured(variable, allocator, monkeypatch):
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, allocator)
    assert process_environment(gpu=True) == {"DS_ACCELERATOR": "cuda", "PYTORCH_ALLOC_CONF": allocator}


def test_a_cpu_neither_copies_nor_pins_a_tensor():
    device = Device(gpu=False, precision="fp32")
    tensor = torch.ones(2)
    assert device.torch == torch.device("cpu")
    assert device.move(tensor) is tensor
    assert device.pin(tensor) is tensor


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_precision_is_a_type_of_torch(precision, dtype):
    assert Device(gpu=False, precision=precision).dtype == dtype


@pytest.mark.parametrize(("gpu", "backend"), [(False, "gloo"), (True, "nccl")], ids=["CPU", "GPU"])
def test_workers_talk_by_the_library_of_their_device(gpu, backend):
    assert Device(gpu=gpu, precision="fp32").backend == backend


def test_a_gpu_that_torch_cannot_find_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises(DeviceError, "models.no_gpu", key="compute.gpu", version=str(torch.__version__)):
        _ = Device(gpu=True, precision="fp32").torch


@pytest.mark.parametrize(
    ("choice", "gpu", "max_captions", "kernel"),
    [
        ("auto", True, None, "flex"),
        ("auto", True, 2, "flex"),
        ("auto", True, 1, "sdpa"),
        ("auto", False, None, "sdpa"),
        ("flex", False, 1, "flex"),
        ("sdpa", True, None, "sdpa"),
    ],
)
def test_attention_is_flexible_for_branches_on_a_gpu_unless_a_kernel_is_chosen(choice, gpu, max_captions, kernel):
    assert choose_attention(choice, gpu, max_captions) == kernel

"""The device and precision of a model, which depend only on the parameters, not on the machine.

A run therefore gives the same result on machines with and without a GPU, unless `compute.gpu` is true. torch is
imported only when it is needed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from m3diff.records.errors import CodedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Precision = Literal["fp32", "bf16"]


class DeviceError(CodedError, ValueError):
    """`compute.gpu` is true, but torch cannot find a GPU."""


@dataclass(frozen=True)
class Device:
    """The device that this process computes on. Code that differs between GPU and CPU uses this object.

    Attributes:
        gpu: whether the device is the current GPU. Otherwise, it is the CPU.
        precision: precision of the weights in computations.
        attention: attention kernel of the LLM in training (components/models/fused.py).
    """

    gpu: bool
    precision: Precision
    attention: Literal["sdpa", "flex"] = "sdpa"

    @property
    def dtype(self) -> torch.dtype:
        """The precision as a torch dtype."""
        import torch

        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def backend(self) -> str:
        """Name of the `torch.distributed` backend."""
        return "nccl" if self.gpu else "gloo"

    @property
    def torch(self) -> torch.device:
        """The device as a torch.device. Raises DeviceError if it is a GPU and torch cannot find one."""
        import torch

        if not self.gpu:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise DeviceError("models.no_gpu", key="compute.gpu", version=str(torch.__version__))
        return torch.device("cuda", torch.cuda.current_device())

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a copy in pinned memory, which a GPU can read asynchronously. On a CPU, return the tensor itself.

        The copy takes CPU time, so call this method in the threads that load data.
        """
        return tensor.pin_memory() if self.gpu else tensor

    def move(self, tensor: Tensor) -> Tensor:
        """Move the tensor to this device. Copying from pinned memory overlaps with computation."""
        return tensor.to(self.torch, non_blocking=True) if self.gpu else tensor


def process_environment(gpu: bool) -> dict[str, str]:
    """Return the environment variables to set for a process before it imports torch or DeepSpeed.

    DeepSpeed uses the first accelerator that it finds, and Ray no longer hides the GPUs from workers without a GPU.
    These variables select the device explicitly. Sequence lengths vary between steps, which would fragment the GPU
    memory, so the allocator is set to use expandable segments unless the user has configured it.

    Args:
        gpu: whether the process runs on a GPU.
    """
    if not gpu:
        return {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return {"DS_ACCELERATOR": "cuda", "PYTORCH_ALLOC_CONF": allocator or "expandable_segments:True"}

"""The device and precision of a model: chosen once from the parameters, never from what the machine has.

A machine with a GPU gives the same run as one without unless `compute.gpu` asks for it. Imports torch when called.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Precision = Literal["fp32", "bf16"]


class DeviceError(ValueError):
    """A GPU is asked for and there is none."""


@dataclass(frozen=True)
class Device:
    """A device of this process. Everything that would differ on a GPU asks it.

    Attributes:
        gpu: the current GPU, else the CPU.
        precision: of the weights that the model computes with.
        attention: the kernel of the LLM while it trains (components/models/fused.py).
    """

    gpu: bool
    precision: Precision
    attention: Literal["sdpa", "flex"] = "sdpa"

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def backend(self) -> str:
        return "nccl" if self.gpu else "gloo"

    @property
    def torch(self) -> torch.device:
        """Raises DeviceError where a GPU is asked for and torch sees none."""
        import torch

        if not self.gpu:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise DeviceError(
                f"compute.gpu: true, but torch {torch.__version__} sees no GPU; install a CUDA build of torch and "
                "check `nvidia-smi`, or set compute.gpu to false"
            )
        return torch.device("cuda", torch.cuda.current_device())

    def pinned(self, tensor: Tensor) -> Tensor:
        """The tensor in memory that a GPU copies from by itself; on a CPU as it is. It takes the CPU a copy: for the
        threads that load."""
        return tensor.pin_memory() if self.gpu else tensor

    def move(self, tensor: Tensor) -> Tensor:
        """The tensor on this device. From pinned memory the copy runs beside the computation, from other memory once
        the CPU has read it."""
        return tensor.to(self.torch, non_blocking=True) if self.gpu else tensor


def environment(gpu: bool) -> dict[str, str]:
    """Environment variables of a process that computes there, to be set before it imports torch or DeepSpeed.

    DeepSpeed takes the first accelerator that it finds, and Ray no longer hides the GPUs from a worker that asked for
    none, so both are told. Lengths vary from step to step, so that a GPU's memory would fall into pieces: its segments
    grow instead, unless torch's allocator is told otherwise already.
    """
    if not gpu:
        return {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    told = (os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return {"DS_ACCELERATOR": "cuda", "PYTORCH_ALLOC_CONF": next(filter(None, told), "expandable_segments:True")}

"""GPUs as data: memory and peak of each kind, for plans before a run and utilisation during one.

Peaks are dense (data sheets also give twice as much, for sparse matrices) and with sums in fp32. NVIDIA publishes them
in data sheets and product pages (nvidia.com/en-us/data-center: a100, a10, l4, l40s, h100, h200; HGX B200 and GB200
NVL72, of which a GPU is an eighth and a 72nd) and in the papers on its architectures: Hopper, Ada and Ampere GA102.
A GeForce sums in fp32 at half the rate of fp16, so its peak is SMs x 4 tensor cores x 64 multiply-adds x boost clock:
128 x 2.52 GHz in the RTX 4090, 82 x 1.695 GHz in the RTX 3090.
"""

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """A kind of GPU.

    Attributes:
        name: its key in `GPUS`: the words that torch's name of the device has, and the memory.
        memory_gb: as sold, 1e9 bytes.
        bf16_tflops: dense peak.
        source: where the numbers stand, in words.
    """

    name: str
    memory_gb: float
    bf16_tflops: float
    source: str


_KINDS = (
    Gpu("A100-40GB", 40, 312, "NVIDIA A100 data sheet; PCIe and SXM alike"),
    Gpu("A100-80GB", 80, 312, "NVIDIA A100 data sheet; PCIe and SXM alike"),
    Gpu("H100-80GB", 80, 989, "NVIDIA H100 data sheet, SXM; half of the figures with sparsity"),
    Gpu("H100-PCIe-80GB", 80, 756, "NVIDIA H100 PCIe data sheet; half of the figures with sparsity"),
    Gpu("H100-NVL-94GB", 94, 835, "NVIDIA H100 data sheet, NVL; half of the figures with sparsity"),
    Gpu("H200-141GB", 141, 989, "NVIDIA H200 data sheet, SXM; half of the figures with sparsity"),
    Gpu("H200-NVL-141GB", 141, 835, "NVIDIA H200 data sheet, NVL; half of the figures with sparsity"),
    Gpu("B200-180GB", 180, 2250, "NVIDIA HGX B200 data sheet, an eighth of it; half of the sparse figures"),
    Gpu("GB200-186GB", 186, 2500, "NVIDIA GB200 NVL72 data sheet, one of 72; half of the figures with sparsity"),
    Gpu("L40S-48GB", 48, 362, "NVIDIA L40S data sheet, without sparsity"),
    Gpu("A10-24GB", 24, 125, "NVIDIA A10 data sheet, without sparsity"),
    Gpu("L4-24GB", 24, 121, "NVIDIA L4 data sheet; half of the figures with sparsity"),
    Gpu("RTX-4090-24GB", 24, 165, "NVIDIA Ada architecture paper, RTX 4090, sums in fp32"),
    Gpu("RTX-3090-24GB", 24, 71, "NVIDIA GA102 architecture paper, RTX 3090, sums in fp32"),
)
GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _KINDS}

OTHER_CHIPS = {"LAPTOP", "MAX-Q", "MOBILE", "D"}
"""Words of devices that share a name with a larger chip."""


def gpu_of(device_name: str, memory_gb: float | None = None) -> Gpu | None:
    """The kind of a device by the name that torch gives it; None where it is not known.

    `NVIDIA H100 80GB HBM3` is H100-80GB. Of kinds that differ in memory alone, the name's memory decides, else
    `memory_gb`, what torch finds; where neither is known there is no answer.
    """
    words = set(re.split(r"[\s-]+", device_name.upper()))
    models = {gpu: set(gpu.name.upper().split("-")[:-1]) for gpu in GPUS.values()}  # a name without its memory
    known = [gpu for gpu, model in models.items() if model <= words and not words & OTHER_CHIPS]
    longest = max((len(models[gpu]) for gpu in known), default=0)
    kinds = [gpu for gpu in known if len(models[gpu]) == longest]
    if len(kinds) > 1:
        named = [gpu for gpu in kinds if gpu.name.rpartition("-")[2] in words]
        if not named and memory_gb is not None:
            named = [min(kinds, key=lambda gpu: abs(gpu.memory_gb - memory_gb))]
        kinds = named
    return kinds[0] if kinds else None

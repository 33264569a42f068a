"""The section `compute`: how a run is computed, not what, and the kinds of GPU that it may name. DVC does not watch it
and no run starts over for it.

Changing workers, batch split, ZeRO stage, recomputation, intervals, retries or sizes of validation changes neither the
data order nor the loss; sums may round differently.
"""

import re
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from m3diff.settings.section import Section, one_of


class Gpu(NamedTuple):
    """A kind of GPU: its memory as sold (1e9 bytes), and its dense peak with sums in fp32.

    Data sheets also give twice the peak, for sparse matrices. NVIDIA publishes them in data sheets and product pages
    (nvidia.com/en-us/data-center: a100, a10, l4, l40s, h100, h200; HGX B200 and GB200 NVL72, of which a GPU is an
    eighth and a 72nd) and in the papers on its architectures: Hopper, Ada and Ampere GA102. A GeForce sums in fp32 at
    half the rate of fp16, so its peak is SMs x 4 tensor cores x 64 multiply-adds x boost clock: 128 x 2.52 GHz in the
    RTX 4090, 82 x 1.695 GHz in the RTX 3090.
    """

    name: str  # the words that torch's name of the device has, and the memory
    memory_gb: float
    bf16_tflops: float


GPUS = {  # the kinds by name, with NVIDIA's data sheet or architecture paper that has the numbers
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40GB", 40, 312),  # NVIDIA A100 data sheet; PCIe and SXM alike
        Gpu("A100-80GB", 80, 312),  # NVIDIA A100 data sheet; PCIe and SXM alike
        Gpu("H100-80GB", 80, 989),  # NVIDIA H100 data sheet, SXM; half of the figures with sparsity
        Gpu("H100-PCIe-80GB", 80, 756),  # NVIDIA H100 PCIe data sheet; half of the figures with sparsity
        Gpu("H100-NVL-94GB", 94, 835),  # NVIDIA H100 data sheet, NVL; half of the figures with sparsity
        Gpu("H200-141GB", 141, 989),  # NVIDIA H200 data sheet, SXM; half of the figures with sparsity
        Gpu("H200-NVL-141GB", 141, 835),  # NVIDIA H200 data sheet, NVL; half of the figures with sparsity
        Gpu("B200-180GB", 180, 2250),  # NVIDIA HGX B200 data sheet, an eighth of it; half of the sparse figures
        Gpu("GB200-186GB", 186, 2500),  # NVIDIA GB200 NVL72 data sheet, one of 72; half of the figures with sparsity
        Gpu("L40S-48GB", 48, 362),  # NVIDIA L40S data sheet, without sparsity
        Gpu("A10-24GB", 24, 125),  # NVIDIA A10 data sheet, without sparsity
        Gpu("L4-24GB", 24, 121),  # NVIDIA L4 data sheet; half of the figures with sparsity
        Gpu("RTX-4090-24GB", 24, 165),  # NVIDIA Ada architecture paper, RTX 4090, sums in fp32
        Gpu("RTX-3090-24GB", 24, 71),  # NVIDIA GA102 architecture paper, RTX 3090, sums in fp32
    )
}

OTHER_CHIPS = {"LAPTOP", "D"}  # words of devices that share a name with a larger chip


def gpu_of(device_name: str) -> Gpu | None:
    """The kind of a device by the name that torch gives it (`NVIDIA H100 80GB HBM3`); None where it is not known. Of
    kinds that differ in memory alone it is the smallest: their peak is the same."""
    words = set(re.split(r"[\s-]+", device_name.upper()))
    models = {gpu: set(gpu.name.upper().split("-")[:-1]) for gpu in GPUS.values()}  # a name without its memory
    known = [gpu for gpu, model in models.items() if model <= words and not words & OTHER_CHIPS]
    return max(known, key=lambda gpu: len(models[gpu]), default=None)


class Compute(Section):
    scratch: Path  # folder for checkpoints in flight, caches and logs; never an output of DVC
    workers: int = Field(ge=0)  # Ray Train workers; 0 runs the loop in a plain process
    cpus_per_worker: int = Field(ge=1)
    gpu: bool
    gpu_kind: Annotated[str, one_of(GPUS)] | None  # for the plan; null: training takes what it finds
    micro_batch: int = Field(ge=1)  # sequences on one worker at a time
    attention: Literal["auto", "flex", "sdpa"]  # the LLM's kernel; auto: flex for branches on a GPU, else sdpa
    zero_stage: Literal[0, 1, 2, 3]
    activation_checkpointing: Literal["none", "selective", "full"]
    checkpoint_every_steps: int = Field(ge=1)
    max_failures: int = Field(ge=0)  # restarts of a training run; workers that may die in a run of predict
    val_pairs: int = Field(ge=0)  # validation pairs of each dataset behind val_loss
    caption_val_pairs: int = Field(ge=0)  # validation pairs of each dataset that are captioned and scored; 0: none
    caption_every_checkpoints: int = Field(ge=1)
    spice_dir: Path | None  # folder with the jars that `m3diff score --check-spice` names
    scorer_timeout_s: int = Field(ge=1)  # of each program; SPICE has more, by its captions

    @property
    def image_cache(self) -> Path:
        return self.scratch / "image_cache.parquet"

"""The section `compute`: how a run is computed, and the supported kinds of GPU.

DVC does not watch this section, so changing it never restarts a run. The number of workers, micro-batches, the ZeRO
stage, recomputation, intervals, retries and the amount of validation do not affect the order of the data or the loss,
except for rounding differences in sums. However, if `train.export` is `best`, `checkpoint_every_steps`,
`caption_val_pairs` and `caption_every_checkpoints` determine which checkpoint is exported.
"""

import re
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from m3diff.settings.section import Section, name_validator


class Gpu(NamedTuple):
    """A kind of GPU.

    The figures come from NVIDIA's data sheets and product pages (nvidia.com/en-us/data-center: a100, a10, l4, l40s,
    h100, h200; one eighth of HGX B200, one 72nd of GB200 NVL72) and from NVIDIA's papers on the architectures Hopper,
    Ada and Ampere GA102. Data sheets also list peaks for sparse matrices, which are twice as high. GeForce GPUs
    accumulate in fp32 at half the rate of fp16. Their peak, in operations per second, is 2 x SMs x 4 tensor cores x 64
    multiply-adds x boost clock: 128 SMs at 2.52 GHz in the RTX 4090, 82 SMs at 1.695 GHz in the RTX 3090.

    Attributes:
        name: words that occur in the device name in torch, followed by the memory size.
        memory_gb: nominal memory, in 1e9 bytes.
        bf16_tflops: peak throughput of dense bf16 products with fp32 accumulation, in 1e12 operations per second.
    """

    name: str
    memory_gb: float
    bf16_tflops: float


# Kinds of GPU by name. The comments name the source of each figure
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40GB", 40, 312),  # NVIDIA A100 data sheet; PCIe and SXM alike
        Gpu("A100-80GB", 80, 312),  # NVIDIA A100 data sheet; PCIe and SXM alike
        Gpu("H100-80GB", 80, 989),  # NVIDIA H100 data sheet, SXM; half of the figures with sparsity
        Gpu("H100-PCIe-80GB", 80, 756),  # NVIDIA H100 PCIe data sheet; half of the figures with sparsity
        Gpu("H100-NVL-94GB", 94, 835),  # NVIDIA H100 data sheet, NVL; half of the figures with sparsity
        Gpu("H200-141GB", 141, 989),  # NVIDIA H200 data sheet, SXM; half of the figures with sparsity
        Gpu("H200-NVL-141GB", 141, 835),  # NVIDIA H200 data sheet, NVL; half of the figures with sparsity
        Gpu("B200-180GB", 180, 2250),  # NVIDIA HGX B200 data sheet, one of 8 GPUs; half of the sparse figures
        Gpu("GB200-186GB", 186, 2500),  # NVIDIA GB200 NVL72 data sheet, one of 72 GPUs; half of the sparse figures
        Gpu("L40S-48GB", 48, 362),  # NVIDIA L40S data sheet, without sparsity
        Gpu("A10-24GB", 24, 125),  # NVIDIA A10 data sheet, without sparsity
        Gpu("L4-24GB", 24, 121),  # NVIDIA L4 data sheet; half of the figures with sparsity
        Gpu("RTX-4090-24GB", 24, 165),  # NVIDIA Ada architecture paper, RTX 4090, sums in fp32
        Gpu("RTX-3090-24GB", 24, 71),  # NVIDIA GA102 architecture paper, RTX 3090, sums in fp32
    )
}

SMALLER_CHIP_WORDS = {"LAPTOP", "D"}  # a device with such a word in its name has a smaller chip than the device without


def gpu_of(device_name: str) -> Gpu | None:
    """Return the kind of GPU for a device name, or None if it is unknown.

    If several kinds differ only in memory, return the kind with the least memory. Their peak throughput is the same.

    Args:
        device_name: name of the device in torch, such as `NVIDIA H100 80GB HBM3`.
    """
    device_words = set(re.split(r"[\s-]+", device_name.upper()))
    if device_words & SMALLER_CHIP_WORDS:
        return None
    best_gpu = None
    best_words: set[str] = set()
    for gpu in GPUS.values():
        *words, _ = gpu.name.upper().split("-")  # without the memory size
        if device_words.issuperset(words) and len(words) > len(best_words):
            best_gpu = gpu
            best_words = set(words)
    return best_gpu


class Compute(Section):
    """The hardware of a run, how work is distributed over it, and how often training is saved and validated."""

    scratch: Path = Path("runs")
    """Folder for checkpoints of unfinished runs, caches and logs. DVC never tracks this folder."""

    workers: int = Field(default=0, ge=0)
    """Number of Ray Train workers, with one GPU each if `gpu` is true. 0 trains in this process, without Ray."""

    cpus_per_worker: int = Field(default=1, ge=1)
    """CPU threads per worker, for loading images and, without a GPU, for training."""

    gpu: bool = False
    """If true, workers and the server use GPUs."""

    gpu_kind: Annotated[str, name_validator(GPUS)] | None = None
    """Kind of GPU for which `m3diff plan` estimates a run, a key of GPUS. null means unknown. Training ignores this
    setting and uses the GPUs that it finds."""

    gpu_hour_price: float | None = Field(default=None, ge=0)
    """Price of one GPU for one hour, for `m3diff plan`. With null, the plan does not include the cost."""

    gpu_hour_currency: str = Field(default="USD", min_length=1)
    """Currency of `gpu_hour_price`."""

    micro_batch: int = Field(default=8, ge=1)
    """Number of sequences that a worker processes at once. A larger number is faster and takes more memory, but does
    not affect the weights."""

    attention: Literal["auto", "flex", "sdpa"] = "auto"
    """Attention kernel of the LLM. `auto` selects flex if references are packed and a GPU is used, otherwise sdpa."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """ZeRO stage of DeepSpeed. Stage 1 divides the optimizer states among the workers, stage 2 also the gradients, and
    stage 3 also the weights. Higher stages take less memory per worker, but more communication."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Which activations are recomputed in the backward pass instead of stored: `none`, `selective` (norms and SwiGLU
    products) or `full` (whole layers). Recomputing more saves memory but takes more time."""

    checkpoint_every_steps: int = Field(default=400, ge=1)
    """Number of training steps between checkpoints. A killed run loses at most this many steps."""

    max_failures: int = Field(default=2, ge=0)
    """How often a training run is restarted after failures, and how many workers may die in one run of predict."""

    val_pairs: int = Field(default=64, ge=0)
    """Number of validation pairs per dataset on which `val_loss` is measured at every checkpoint. 0 turns this off."""

    caption_val_pairs: int = Field(default=32, ge=0)
    """Number of validation pairs per dataset that are captioned and scored with CIDEr during training. 0 turns this
    off. `train.export: best` requires such pairs."""

    caption_every_checkpoints: int = Field(default=2, ge=1)
    """Number of checkpoints from one captioning of validation pairs to the next. 1 captions them at every
    checkpoint."""

    spice_dir: Path | None = None
    """Folder with the jars that SPICE requires (`m3diff score --check-spice` lists them). null leaves out SPICE."""

    scorer_timeout_s: int = Field(default=300, ge=1)
    """Time limit for each Java program of a metric, in seconds. SPICE gets 1 additional second for each caption that it
    parses."""

    @property
    def image_cache(self) -> Path:
        """The Parquet file that caches verdicts on images."""
        return self.scratch / "image_cache.parquet"

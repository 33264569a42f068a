"""The section `train`: settings that determine the trained weights.

Settings of the hardware are in `components/settings/compute.py`.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from m3diff.settings.section import Section

# A model learns little in fewer optimizer steps than this: after 180 steps on photographs, CIDEr was still 0.0. The
# embedded run takes over 1,000 steps, the paper's 3,500
FEW_STEPS = 200
# Number of steps that the warning about too few steps recommends
ENOUGH_STEPS = 600

# The moments that the optimizer (`build_optimizer` in engine.py) keeps for each trained parameter, by their names in
# torch's AdamW. Checkpoints store them. Preflight and `m3diff plan` compute the optimizer's memory from their number
MOMENTS = ("exp_avg", "exp_avg_sq")

# Captions with a CIDEr below this have nothing in common with their references. Good captions reach 1 on this scale
NO_CIDER = 0.01


class Train(Section):
    """Model, data order, optimizer and learning rate schedule of the fine-tuning."""

    model: str
    """Name of an entry in the section `models`."""

    base: Path
    """Folder of the pre-trained model that training starts from."""

    seed: int = Field(default=7407, ge=0)
    """Seed for the initial values of new weights, the order of the samples and the choice of validation pairs."""

    max_captions_per_sequence: int | None = Field(default=None, ge=1)
    """Maximum number of samples of an image set, such as the references of a pair, that are packed behind one shared
    prefix; null packs all of them. A larger number makes training cheaper per sample, but the samples in a step are
    then more correlated."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum length of a sample in tokens, including the visual tokens. Training does not start if a sample is longer,
    and never cuts one. null allows any length."""

    global_batch: int = Field(default=16, ge=1)
    """Number of sequences per optimizer step, over all workers. Must be a multiple of `compute.micro_batch` times the
    number of workers. A sequence is a pair with its packed references."""

    epochs: float = Field(default=1.0, gt=0)
    """Number of passes over the training mixture. Fractions are allowed."""

    warmup_share: float = Field(default=0.05, ge=0, le=1)
    """Share of the steps during which the learning rates rise linearly. Raise it if training diverges early."""

    schedule: Literal["cosine", "constant"] = "cosine"
    """How the learning rates change after the warm-up: `cosine` decays them to zero, `constant` keeps them."""

    weight_decay: float = Field(default=0.01, ge=0)
    """AdamW's decoupled weight decay, multiplied by the learning rate of each part of the model."""

    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Maximum norm of the gradient of a step; a larger gradient is clipped to it. null disables clipping."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of the forward and backward passes. bf16 halves the memory of weights and activations; it is faster
    only on a GPU that supports it natively."""

    export: Literal["last", "best"] = "last"
    """Checkpoint that the stage outputs: `last`, or `best` for the one with the highest CIDEr on the captioned
    validation pairs. If the mixture has only questions of datasets, `best` is the one with the most exact answers."""

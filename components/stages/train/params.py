"""The section `train`: what decides the weights. How they are computed stands in `components/settings/compute.py`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from m3diff.settings.section import Section


class Train(Section):
    model: str  # one of the section `models`
    base: Path  # folder of the pre-trained model
    seed: int = Field(ge=0)
    max_captions_per_sequence: int | None = Field(ge=1)  # references packed on their pair's prefix; null: all
    global_batch: int = Field(ge=1)  # sequences a step, over all workers
    epochs: float = Field(gt=0)
    warmup_share: float = Field(ge=0, le=1)
    schedule: Literal["cosine", "constant"]  # of the rates after the warm-up: to zero, or as they are
    weight_decay: float = Field(ge=0)
    max_grad_norm: float | None = Field(gt=0)  # to which a step's gradient is clipped; null: never
    precision: Literal["fp32", "bf16"]
    export: Literal["last", "best"]  # which checkpoint becomes the output; best is by CIDEr on the validation pairs

"""The section `compute`: how a run is computed, not what. DVC does not watch it and no run starts over for it.

Changing workers, batch split, ZeRO stage, recomputation, intervals, retries or sizes of validation changes neither the
data order nor the loss; sums may round differently.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from m3diff.settings.section import Section


class Compute(Section):
    scratch: Path  # folder for checkpoints in flight, caches and logs; never an output of DVC
    workers: int = Field(ge=0)  # Ray Train workers; 0 runs the loop in a plain process
    cpus_per_worker: int = Field(ge=1)
    gpu: bool
    gpu_kind: str | None  # one of components/settings/gpus.py, for the plan; null: training takes what it finds
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
        """The file with the checks of images, by their content."""
        return self.scratch / "image_cache.parquet"

"""Parameters in the section `pretrain`: sizes and training schedule of the tiny base model.

The quick-start runs (profiles `embedded*`) start from this base.
"""

from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from m3diff.settings.section import Section

Level = Literal["grid", "free"]
TaskName = Literal["image", "asked for in two", "side by side", "asked for", "two images", "sentence"]
TASKS: tuple[TaskName, ...] = get_args(TaskName)


class Blip2(Section):
    """Sizes of a BLIP-2, in addition to those in `Pretrain`.

    The vision encoder, LLM and tokenizer are taken from a LLaVA-OneVision created by `pretrain`. The Q-Former is new.
    """

    start: Path
    """Folder of the LLaVA-OneVision to start from."""

    queries: int = Field(ge=1)
    """Number of learnt queries of the Q-Former, which are the visual tokens that the LLM reads."""

    qformer_layers: int = Field(ge=2)
    """Number of layers of the Q-Former. Every second layer reads the picture."""

    stacked: bool
    """Whether the encoder learns to segment pictures of two stacked images in addition to pictures of one image."""


class Pretrain(Section):
    """Settings of a LLaVA-OneVision with 1.4 M parameters or a BLIP-2 with 2 M."""

    seed: int = Field(default=2417, ge=0)
    """Random seed of the scenes, the initial weights and the order of training."""

    image_px: int = Field(default=128, ge=32)
    """Side of a rendered image, in pixels. Use the image size of MiniChange."""

    levels: tuple[Level, ...] = Field(default=("grid", "free"), min_length=1)
    """Levels of MiniChange. Scenes are drawn from each level in turn."""

    tasks: tuple[TaskName, ...] = TASKS
    """Tasks from `stage.make_curriculum` to learn. They should include `image`. Leave out tasks to create a base for a
    control run."""

    vision_px: int = Field(default=100, ge=8)
    """Side of the image that the vision encoder reads, in pixels."""

    patch_px: int = Field(default=20, ge=4)
    """Side of a patch, in pixels. The number of visual tokens is (vision_px / patch_px) squared."""

    width: int = Field(default=128, ge=8)
    """Hidden size of the vision encoder, the projector and the LLM."""

    vision_layers: int = Field(default=4, ge=1)
    """Number of transformer layers of the vision encoder."""

    text_layers: int = Field(default=4, ge=1)
    """Number of transformer layers of the LLM."""

    scenes: int = Field(default=60_000, ge=1)
    """Number of scenes to draw. All images are kept in memory."""

    held_out: int = Field(default=1024, ge=1)
    """Number of scenes that are excluded from training and used to measure the accuracy in the log."""

    images_per_batch: int = Field(default=64, ge=1)
    """Number of images per optimizer step."""

    segmentation_steps: int = Field(default=8000, ge=0)
    """Number of steps in which the vision encoder alone learns to segment scenes. They precede the `steps` of the whole
    model."""

    steps: int = Field(default=5000, ge=1)
    """Number of optimizer steps of the whole model."""

    first_task_steps: int = Field(default=600, ge=0)
    """Number of initial steps in which only the first task is trained. If all tasks are trained from the start, the
    model does not learn shapes (LOG.md)."""

    lr_matrices: float = Field(default=0.0025, gt=0)
    """Peak learning rate of Muon, which optimizes the matrices."""

    lr: float = Field(default=0.002, gt=0)
    """Peak learning rate of AdamW, which optimizes the embeddings, convolutions, norms and biases."""

    warmup_steps: int = Field(default=100, ge=1)
    """Number of steps in which both learning rates increase from zero to their peak."""

    weight_decay: float = Field(default=0.05, ge=0)
    """Decoupled weight decay of both optimizers, Muon and AdamW."""

    blip2: Blip2 | None = None
    """Sizes of a BLIP-2 to create, or null to create a LLaVA-OneVision."""

    threads: int = Field(default=1, ge=1)
    """Number of threads that torch uses. Two threads are only a third faster than one thread, and make sums depend on
    the machine."""

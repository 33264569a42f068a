"""The section `pretrain`: sizes and schedule of the tiny base model that the embedded run starts from."""

from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from m3diff.settings.section import Section

Level = Literal["grid", "free"]
TaskName = Literal["image", "asked for in two", "side by side", "asked for", "two images", "sentence"]
TASKS: tuple[TaskName, ...] = get_args(TaskName)


class Blip2(Section):
    """Sizes of a BLIP-2, beside those of `Pretrain`. Its vision encoder's layers, LLM and tokenizer are those of a
    LLaVA-OneVision as `pretrain` makes it, its Q-Former is new."""

    start: Path  # the folder of that LLaVA-OneVision
    queries: int = Field(ge=1)
    qformer_layers: int = Field(ge=2)  # every second one reads the picture
    stacked: bool  # its encoder sees two images as one picture, too; false: tasks of one image alone


class Pretrain(Section):
    """A LLaVA-OneVision of 1.4 M parameters, or a BLIP-2 of 2 M."""

    seed: int = Field(ge=0)
    image_px: int = Field(ge=32)  # as MiniChange is drawn
    levels: tuple[Level, ...] = Field(("grid",), min_length=1)  # of MiniChange, of which scenes are drawn in turn
    tasks: tuple[TaskName, ...] = TASKS  # of `stage.curriculum`, "image" among them; fewer make a control
    vision_px: int = Field(ge=8)
    patch_px: int = Field(ge=4)  # 24: 9 patches, one to a place of the 3 x 3 grid
    width: int = Field(ge=8)
    vision_layers: int = Field(ge=1)
    text_layers: int = Field(ge=1)
    scenes: int = Field(ge=1)
    held_out: int = Field(ge=1)  # scenes that do not train
    images_per_batch: int = Field(ge=1)
    segmentation_steps: int = Field(0, ge=0)  # of the vision encoder alone, before `steps` of the whole model
    steps: int = Field(ge=1)
    first_task_steps: int = Field(ge=0)  # the first task alone; with all from the start, shapes are not learnt (LOG.md)
    lr_matrices: float = Field(gt=0)
    lr: float = Field(gt=0)
    warmup_steps: int = Field(ge=1)
    weight_decay: float = Field(ge=0)
    blip2: Blip2 | None = None  # without it: a LLaVA-OneVision
    threads: int = Field(ge=1)  # two are a third faster, no more, and the sums then depend on the machine

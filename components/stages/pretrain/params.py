"""The section `pretrain`: sizes and schedule of the tiny base model that the embedded run starts from."""

from pathlib import Path
from typing import Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from m3diff.settings.section import Section

Level = Literal["grid", "free"]
TaskName = Literal["image", "asked for in two", "side by side", "asked for", "two images", "sentence"]
TASKS: tuple[TaskName, ...] = get_args(TaskName)
OF_TWO_IMAGES = ("asked for in two", "side by side", "two images")


class Blip2(Section):
    """Sizes of a BLIP-2, beside those of `Pretrain`. Its vision encoder's layers, LLM and tokenizer are those of a
    LLaVA-OneVision as `pretrain` makes it, its Q-Former is new."""

    start: Path  # the folder of that LLaVA-OneVision
    queries: int = Field(ge=1)
    qformer_layers: int = Field(ge=2)  # every second one reads the picture
    stacked: bool  # two images of a task as one picture, one below the other; false: tasks of one image alone


class Pretrain(Section):
    """A LLaVA-OneVision of 1.4 M parameters, or a BLIP-2 of 2 M."""

    seed: int = Field(ge=0)
    image_px: int = Field(ge=32)  # as MiniChange is drawn
    levels: tuple[Level, ...] = Field(("grid",), min_length=1)  # of MiniChange, of which scenes are drawn in turn
    tasks: tuple[TaskName, ...] = TASKS  # of `curriculum.py`; fewer make a control, such as one without two images
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

    @field_validator("levels", "tasks")
    @classmethod
    def none_twice(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        """Each name once."""
        if len(set(names)) < len(names):
            raise ValueError(f"expected each name once, found {', '.join(names)}")
        return names

    @field_validator("tasks")
    @classmethod
    def with_first_task(cls, tasks: tuple[TaskName, ...]) -> tuple[TaskName, ...]:
        """To describe one image is what a base learns first and is measured by."""
        if "image" not in tasks:
            raise ValueError(f"expected 'image' among the tasks, found {', '.join(tasks) or 'none'}")
        return tasks

    @model_validator(mode="after")
    def two_images_stacked(self) -> Self:
        """A BLIP-2 sees one picture."""
        if self.blip2 is None:
            return self
        if not self.blip2.stacked and (two := [name for name in self.tasks if name in OF_TWO_IMAGES]):
            raise ValueError(f"blip2.stacked: false shows one image, and tasks has {', '.join(two)}; leave them out")
        if self.vision_px % (2 * self.patch_px):
            raise ValueError(
                f"vision_px: a BLIP-2's picture of two images needs an even number of rows of patches of patch_px: "
                f"{self.patch_px}, found {self.vision_px}"
            )
        return self

"""The section `pretrain`: sizes and schedule of the tiny base model that the embedded run starts from."""

from typing import Literal, get_args

from pydantic import Field, field_validator

from components.section import Section

Level = Literal["grid", "free"]
TaskName = Literal["image", "asked for in two", "side by side", "asked for", "two images", "sentence"]
TASKS: tuple[TaskName, ...] = get_args(TaskName)


class Pretrain(Section):
    """A LLaVA-OneVision of 1.4 M parameters."""

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

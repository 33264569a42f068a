"""The section `pretrain`: sizes and schedule of the tiny base model that the embedded run starts from."""

from pydantic import Field

from components.section import Section


class Pretrain(Section):
    """A LLaVA-OneVision of 1.4 M parameters."""

    seed: int = Field(ge=0)
    image_px: int = Field(ge=32)  # as MiniChange is drawn
    vision_px: int = Field(ge=8)
    patch_px: int = Field(ge=4)  # 24: 9 patches, one to a place of the 3 x 3 grid
    width: int = Field(ge=8)
    vision_layers: int = Field(ge=1)
    text_layers: int = Field(ge=1)
    scenes: int = Field(ge=1)
    held_out: int = Field(ge=1)  # scenes that do not train
    images_per_batch: int = Field(ge=1)
    steps: int = Field(ge=1)
    first_task_steps: int = Field(ge=0)  # the first task alone; with all from the start, shapes are not learnt (LOG.md)
    lr_matrices: float = Field(gt=0)
    lr: float = Field(gt=0)
    warmup_steps: int = Field(ge=1)
    weight_decay: float = Field(ge=0)
    threads: int = Field(ge=1)  # two are a third faster, no more, and the sums then depend on the machine

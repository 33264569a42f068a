"""InstructPix2Pix (Brooks et al., CVPR 2023) as diffusers has it, without a safety checker.

Each edit has a random state of its own: the same seed gives the same edit, whatever was edited before.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3diff.images.open import load_image
from m3diff.stages.augment.params import InstructPix2Pix
from m3diff.stages.augment.weights import identity

if TYPE_CHECKING:
    from PIL import Image

    from m3diff.models.device import Device

MULTIPLE = 8  # of the sides that a latent diffusion model takes, in pixels


class Pix2PixEditor:
    def __init__(self, cfg: InstructPix2Pix, device: Device) -> None:
        self.cfg, self.identity, self.device = cfg, identity(cfg), device
        self.pipeline: Any = None

    def edit(self, image: Path, instruction: str, seed: int) -> Image.Image | None:
        import torch
        from PIL import Image

        original = load_image(image)
        generator = torch.Generator("cpu").manual_seed(seed)  # the same numbers on every device
        made = self._loaded()(
            instruction,
            image=original.resize(fitted(original.size, self.cfg.image_px), Image.Resampling.LANCZOS),
            num_inference_steps=self.cfg.steps,
            guidance_scale=self.cfg.guidance,
            image_guidance_scale=self.cfg.image_guidance,
            generator=generator,
        )
        edited: Image.Image = made.images[0]
        return edited.convert("RGB").resize(original.size, Image.Resampling.BICUBIC)

    def _loaded(self) -> Any:
        """The pipeline; it is loaded for the first edit, since a run that goes on may have none to make."""
        if self.pipeline is None:
            import torch
            from diffusers import StableDiffusionInstructPix2PixPipeline

            self.pipeline = StableDiffusionInstructPix2PixPipeline.from_pretrained(
                str(self.cfg.model),
                torch_dtype=torch.float16 if self.device.gpu else torch.float32,
                local_files_only=True,
                use_safetensors=True,
                safety_checker=None,
                requires_safety_checker=False,
            ).to(self.device.torch)
            self.pipeline.set_progress_bar_config(disable=True)
        return self.pipeline


def fitted(size: tuple[int, int], longer: int) -> tuple[int, int]:
    """Width and height with the longer side as given, both multiples of 8 and nearest to the shape."""
    scale = longer / max(size)
    width, height = (max(MULTIPLE, round(side * scale / MULTIPLE) * MULTIPLE) for side in size)
    return width, height

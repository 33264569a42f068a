"""Editors: an image and an instruction to an edited image. A new one has its settings in `params.py` and a line in
`load_editor`.

`DrawnEditor` needs no weights: it carries MiniChange's instructions out on the scene behind an image, and draws it
anew. As any photograph of the benchmark, an edit has a camera, light and noise of its own; what an instruction leaves
open (where in its place a new object is, which way a new arrow points) follows from the seed. `Pix2PixEditor` is
InstructPix2Pix (Brooks et al., CVPR 2023) as diffusers has it, without a safety checker.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from m3diff.datasets.minichange.generate import FILE, read_scenes
from m3diff.datasets.minichange.language import name
from m3diff.datasets.minichange.levels import LAMP_ON, LEVELS, SEEN, sample_free_thing, sample_grid_thing, seen, square
from m3diff.datasets.minichange.render import render
from m3diff.datasets.minichange.scene import STATES, Change, Scene, Thing, View, pick
from m3diff.images.open import load_image
from m3diff.records.files import sha256
from m3diff.stages.augment.params import Drawn, InstructPix2Pix, Source
from m3diff.stages.augment.words import read_instruction

if TYPE_CHECKING:
    from PIL import Image

    from m3diff.models.device import Device

TRIES = 400
MULTIPLE = 8  # of the sides that a latent diffusion model takes, in pixels


class Editor(Protocol):
    @property
    def identity(self) -> str:
        """Digest of what decides its edits in addition to the parameters."""

    def edit(self, image: Path, instruction: str, seed: int) -> Image.Image | None:
        """The edited image, RGB, of the original's size; None where it cannot carry the instruction out.

        Raises:
            ImageError: the image cannot be read.
        """


def load_editor(cfg: Drawn | InstructPix2Pix, source: Source, device: Device) -> Editor:
    """Raises ParamsError where its model is not there or another one, DataError where the source holds no scenes."""
    return DrawnEditor(source.root) if isinstance(cfg, Drawn) else Pix2PixEditor(cfg, device)


class DrawnEditor:
    """Edits the images of one MiniChange on disk.

    Raises:
        DataError: it holds no scenes.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.scenes = root, read_scenes(root)
        self.identity = sha256(root / FILE)

    def edit(self, image: Path, instruction: str, seed: int) -> Image.Image | None:
        scene = self.scenes.of.get(image.relative_to(self.root).as_posix())
        rng = np.random.default_rng(seed)
        edited = carry_out(scene, instruction, rng) if scene else None
        return render(edited, self.scenes.image_px, rng, self.scenes.domain) if edited else None


def carry_out(scene: Scene, instruction: str, rng: np.random.Generator) -> Scene | None:
    """The scene after the changes of an instruction, under a camera and light that have moved a little.

    None where the instruction is not in MiniChange's words, or cannot be carried out: no object, or more than one, has
    its name at its place; the lamp is so already; a new object finds no room.
    """
    after: Scene | None = scene
    for change in read_instruction(instruction) or ():
        after = _changed(after, change, scene.view, rng) if after else None
    if after is None or after is scene:
        return None
    return replace(after, view=LEVELS[scene.level].jitter(rng, after.view))


def _changed(scene: Scene, change: Change, seen_by: View, rng: np.random.Generator) -> Scene | None:
    """The scene after one change; places are meant as the camera before, `seen_by`, sees them."""
    level = LEVELS[scene.level]
    if change.type == "viewpoint":
        return replace(scene, view=level.moved(scene.view, change.word))
    if change.type == "illumination":
        is_so = (change.word == "on") == (scene.view.brightness > LAMP_ON)
        return None if is_so else replace(scene, view=level.lit(scene.view, change.word))
    if change.before is None:
        assert change.after is not None
        if (new := _new_thing(scene, change.after, seen_by, rng)) is None:
            return None
        return level.in_order(replace(scene, things=(*scene.things, new)))
    said = change.before
    meant = [
        at
        for at, thing in enumerate(scene.things)
        if (thing.cell, name(thing)) == (said.cell, name(said)) and said.state in (None, thing.state)
    ]
    if len(meant) != 1:
        return None
    thing, things, marks = scene.things[meant[0]], list(scene.things), scene.marks
    things[meant[0] : meant[0] + 1] = [_altered(thing, change.type, change.after, rng)] if change.after else []
    if change.type == "removal":  # it leaves a print
        marks += (level.mark(thing),)
    return replace(scene, things=tuple(things), marks=marks)


def _altered(thing: Thing, change_type: str, after: Thing, rng: np.random.Generator) -> Thing:
    if change_type == "substitution":
        state = pick(rng, STATES[after.kind]) if after.kind in STATES else None
        return replace(thing, kind=after.kind, color=after.color, size=after.size, state=state)
    if change_type in ("size", "color"):
        return replace(thing, **{change_type: getattr(after, change_type)})
    return replace(thing, state=after.state)


def _new_thing(scene: Scene, wanted: Thing, seen_by: View, rng: np.random.Generator) -> Thing | None:
    """An object of this name somewhere at its place; None where there is no room."""
    looks: dict[str, Any] = {"color": wanted.color, "size": wanted.size}
    if scene.level == "grid":
        taken = {thing.cell for thing in scene.things} | {mark.cell for mark in scene.marks}
        new = replace(sample_grid_thing(rng, wanted.cell, wanted.kind), **looks)
        return None if wanted.cell in taken else new
    for _ in range(TRIES):
        thing = replace(sample_free_thing(rng, seen_by, wanted.kind), **looks)
        squares = [square(each) for each in (*scene.things, thing)]
        is_seen = all(seen(each, squares[at + 1 :]) >= SEEN for at, each in enumerate(squares))
        if thing.cell == wanted.cell and is_seen:
            return thing
    return None


class Pix2PixEditor:
    """Each edit has a random state of its own: the same seed gives the same edit, whatever was edited before."""

    def __init__(self, cfg: InstructPix2Pix, device: Device) -> None:
        self.cfg, self.identity, self.device = cfg, cfg.identity(), device
        self.pipeline: Any = None

    def edit(self, image: Path, instruction: str, seed: int) -> Image.Image | None:
        import torch
        from PIL import Image

        original = load_image(image)
        made = self._loaded()(
            instruction,
            image=original.resize(fitted(original.size, self.cfg.image_px), Image.Resampling.LANCZOS),
            num_inference_steps=self.cfg.steps,
            guidance_scale=self.cfg.guidance,
            image_guidance_scale=self.cfg.image_guidance,
            generator=torch.Generator("cpu").manual_seed(seed),  # the same numbers on every device
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

"""An editor without weights: carries MiniChange's instructions out on the scene behind an image, and draws it anew.

As any photograph of the benchmark, an edit has a camera, light and noise of its own. What an instruction leaves open
(where in its place a new object stands, which way a new arrow points) is the seed's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from m3diff.datasets.minichange import free
from m3diff.datasets.minichange.generate import FILE, Scenes, read_scenes
from m3diff.datasets.minichange.language import name
from m3diff.datasets.minichange.levels import LEVELS
from m3diff.datasets.minichange.render import render
from m3diff.datasets.minichange.scene import (
    CAMERA_MOVES,
    LIT,
    STATES,
    ZOOMS,
    Change,
    Mark,
    Scene,
    Thing,
    View,
    jitter,
    pick,
    sample_thing,
)
from m3diff.records.files import sha256
from m3diff.stages.augment.words import read_instruction

if TYPE_CHECKING:
    from PIL import Image

TRIES = 400
LAMP_ON = 0.7  # brightness above which a lamp can go out


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
        return drawn(self.scenes, edited, rng) if edited else None


def drawn(scenes: Scenes, scene: Scene, rng: np.random.Generator) -> Image.Image:
    return render(scene, scenes.image_px, rng, scenes.domain)


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
    view = free.jitter(rng, after.view) if scene.level == "free" else jitter(rng, replace(after.view, noise=0.0))
    return replace(after, view=view)


def _changed(scene: Scene, change: Change, seen_by: View, rng: np.random.Generator) -> Scene | None:
    """The scene after one change; places are meant as the camera before, `seen_by`, sees them."""
    if change.type in ("viewpoint", "illumination"):
        view = _moved(scene, change.word) if change.type == "viewpoint" else _lit(scene, change.word)
        return replace(scene, view=view) if view else None
    if change.before is None:
        new = _new_thing(scene, change.after, seen_by, rng)
        return replace(scene, things=_in_order((*scene.things, new), scene.level)) if new else None
    meant = [at for at, thing in enumerate(scene.things) if _is_meant(thing, change.before)]
    if len(meant) != 1:
        return None
    thing, things = scene.things[meant[0]], list(scene.things)
    things[meant[0] : meant[0] + 1] = [_altered(thing, change, rng)] if change.after else []
    marks = scene.marks
    if change.type == "removal":  # it leaves a print
        marks += (Mark(thing.cell, thing.dx, thing.dy) if scene.level == "free" else Mark(thing.cell),)
    return replace(scene, things=tuple(things), marks=marks)


def _in_order(things: tuple[Thing, ...], level: str) -> tuple[Thing, ...]:
    """On the grid things stand in the order of their places; on the free level a later one covers an earlier one."""
    return things if level == "free" else tuple(sorted(things, key=lambda thing: thing.cell))


def _is_meant(thing: Thing, said: Thing) -> bool:
    return (thing.cell, name(thing)) == (said.cell, name(said)) and said.state in (None, thing.state)


def _altered(thing: Thing, change: Change, rng: np.random.Generator) -> Thing:
    after = change.after
    assert after is not None
    if change.type == "substitution":
        state = pick(rng, STATES[after.kind]) if after.kind in STATES else None
        return replace(thing, kind=after.kind, color=after.color, size=after.size, state=state)
    if change.type in ("size", "color"):
        return replace(thing, **{change.type: getattr(after, change.type)})
    return replace(thing, state=after.state)


def _moved(scene: Scene, word: str) -> View:
    view, of_free = scene.view, scene.level == "free"
    if word in ZOOMS:
        return replace(view, zoom=view.zoom * ZOOMS[word] if of_free else ZOOMS[word])
    x, y = (free.CAMERA_MOVES if of_free else CAMERA_MOVES)[word]
    return replace(view, x=view.x + x, y=view.y + y)


def _lit(scene: Scene, word: str) -> View | None:
    """None where the lamp is so already."""
    view, dark = scene.view, LEVELS[scene.level].dark
    if (word == "out") != (view.brightness > LAMP_ON):
        return None
    if scene.level == "free":
        return view.dimmed(view.brightness * (dark if word == "out" else 1 / dark))
    return view.dimmed(dark if word == "out" else LIT)


def _new_thing(scene: Scene, wanted: Thing | None, seen_by: View, rng: np.random.Generator) -> Thing | None:
    """An object of this name somewhere at its place; None where there is no room."""
    assert wanted is not None
    if scene.level == "grid":
        taken = {thing.cell for thing in scene.things} | {mark.cell for mark in scene.marks}
        new = replace(sample_thing(rng, wanted.cell, wanted.kind), color=wanted.color, size=wanted.size)
        return None if wanted.cell in taken else new
    for _ in range(TRIES):
        thing = replace(free.sample_thing(rng, seen_by, wanted.kind), color=wanted.color, size=wanted.size)
        squares = [free.square(each) for each in (*scene.things, thing)]
        seen = all(free.seen(each, squares[at + 1 :]) >= free.SEEN for at, each in enumerate(squares))
        if thing.cell == wanted.cell and seen:
            return thing
    return None

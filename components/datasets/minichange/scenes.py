"""The scenes behind MiniChange's images as JSON, as CLEVR gives them: for who edits or describes an image.

    scenes.json    {"level": "grid", "domain": "standard", "image_px": 128, "scenes":
                    {"images/CLEVR_default_000123.png": {"things": [{"kind": "ball", ...}, ...], "marks": [...], ...}}}

Numbers are written in full: a scene that is read back is drawn as the one that was written.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.datasets.files import read_json, read_splits
from m3diff.datasets.minichange.language import describe_scene
from m3diff.datasets.minichange.scene import Mark, Scene, Thing, View
from m3diff.datasets.minichange.settings import Domain, MiniChange
from m3diff.datasets.rows import Single

FILE = "scenes.json"
FOLDERS = {"images": "default", "sc_images": "semantic", "nsc_images": "nonsemantic"}
"""Folders of images before, after the changes, and as a distractor, with the word in the names of their files."""


class Scenes(NamedTuple):
    """What each image shows, by its path in the dataset's root, and how it was drawn."""

    domain: Domain
    image_px: int
    of: dict[str, Scene]


def image_paths(number: int) -> list[str]:
    """Paths of the images of one scene, in the order of FOLDERS."""
    return [f"{folder}/CLEVR_{word}_{number:06d}.png" for folder, word in FOLDERS.items()]


def as_json(settings: MiniChange, scenes: Iterable[tuple[str, Scene]]) -> str:
    """The text of the file, a line for each image."""
    head = {"level": settings.level, "domain": settings.domain, "image_px": settings.image_px}
    lines = ",\n".join(f"{json.dumps(path)}: {json.dumps(_plain(scene))}" for path, scene in scenes)
    return f'{json.dumps(head)[:-1]}, "scenes": {{\n{lines}\n}}}}\n'


def _plain(scene: Scene) -> dict[str, Any]:
    return {name: value for name, value in asdict(scene).items() if name != "level"}


def read_scenes(root: Path) -> Scenes:
    """The scenes of a MiniChange on disk.

    Raises:
        DataError: there is no such file, or it is no JSON object.
    """
    found = read_json(root / FILE, dict)
    scenes = {path: _scene(values, found["level"]) for path, values in found["scenes"].items()}
    return Scenes(found["domain"], found["image_px"], scenes)


def _scene(values: dict[str, Any], level: Any) -> Scene:
    things = tuple(Thing(**thing) for thing in values["things"])
    marks = tuple(Mark(*mark) for mark in values["marks"])
    return Scene(things, marks, values["background"], View(**values["view"]), level, values["cloth"])


def read_singles(root: Path) -> Iterator[Single]:
    """Every image with the description of its scene, in the order of `splits.json`: before, after, distractor."""
    scenes = read_scenes(root).of
    for split, numbers in read_splits(root / "splits.json").items():
        for number in numbers:
            for path in image_paths(number):
                yield Single(path, split, f"{number:06d}", path, [describe_scene(scenes[path])], f"{FILE}, {path}")

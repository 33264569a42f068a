"""MiniChange: the built-in benchmark of generated images. Small scenes on a table have one to three changes, or none.

Page: this folder. Licence: Apache-2.0, like the project. The files have CLEVR-Change's layout and are read by its
reader. There are two additional files, grammar.json and scenes.json:

    images/CLEVR_default_000123.png           before
    sc_images/CLEVR_semantic_000123.png       after: the changes, and a small movement of camera and light
    nsc_images/CLEVR_nonsemantic_000123.png   distractor: after only a small movement, which is not a change
    change_captions.json      {"CLEVR_default_000123.png": ["at the top the small red box turned blue", ...], ...}
    no_change_captions.json   with the same keys: ["nothing changed", ...]
    splits.json               {"train": [123, ...], "val": [...], "test": [...]}
    type_mapping.json         {"color": ["000123.png", ...], ...}; a pair with several changes is listed under each
    grammar.json              rules that parse a caption into changes: type, object, place, old and new value
    scenes.json               the content of each image (`Scenes`), for programs that edit or describe images

`scene.py` describes how each of OmniDiff's twelve change types is drawn. The number of scenes is a parameter, so there
are no published counts. The seed determines every byte: each scene has its own random generator, so the order of the
scenes and the number of processes do not matter.

There are two levels. *Grid*: three to five objects, each in its own cell, and a camera that hardly moves, so a change
is visible as a difference of pixels. *Free*: six to eight objects anywhere in the frame, which may overlap and have
three sizes and several textures. Between any two images, the movement of camera and light affects more pixels than the
smallest changes do. Both levels have the same words and grammar, except for the third size.

With `domain: shifted`, the same scenes, changes and words are drawn in other shades, on darker, chequered tables, and
seen by a turned and tilted camera (`render.SHADES`). The profile `embedded` draws such a dataset, `minichange_shifted`,
only for testing. The drop in scores shows how much the model depends on the look of the training images.
"""

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from m3diff.datasets.clevr_change import read
from m3diff.datasets.files import read_json, read_splits
from m3diff.datasets.minichange.language import describe_scene, grammar, references
from m3diff.datasets.minichange.scene import LEVELS, WIDTHS, Domain, Mark, MiniChange, Scene, Thing, View, sample_types
from m3diff.datasets.spec import DatasetSpec, Licence, Permission, Protocol, Row
from m3diff.records.errors import DataError
from m3diff.records.files import write_atomic
from m3diff.records.machine import usable_cpus
from m3diff.records.progress import progress
from m3diff.records.schemas import CHANGE_TYPES

FILE = "scenes.json"
# Folders of the images before, the images after the changes, and the distractors, with the word in their file names
FOLDERS = {"images": "default", "sc_images": "semantic", "nsc_images": "nonsemantic"}


class Scenes(NamedTuple):
    """How the images of a dataset were drawn. `of` maps the path of each image, relative to the root, to its scene."""

    domain: Domain
    image_px: int
    of: dict[str, Scene]


def image_paths(number: int) -> list[str]:
    """Return the paths of a scene's images, in the order of FOLDERS."""
    return [f"{folder}/CLEVR_{word}_{number:06d}.png" for folder, word in FOLDERS.items()]


def read_scenes(root: Path) -> Scenes:
    """Return the scenes of a MiniChange dataset on disk.

    Raises:
        DataError: the file is missing or does not contain a JSON object.
    """
    found = read_json(root / FILE, dict)
    scenes = {}
    for path, values in found["scenes"].items():
        things = tuple(Thing(**thing) for thing in values.pop("things"))
        marks = tuple(Mark(*mark) for mark in values.pop("marks"))
        scenes[path] = Scene(things, marks, view=View(**values.pop("view")), level=found["level"], **values)
    return Scenes(found["domain"], found["image_px"], scenes)


def read_singles(root: Path) -> Iterator[Row]:
    """Yield every image as a pair with itself, with a description of its scene as the caption.

    The scenes are in the order of `splits.json`. The images of a scene are in the order before, after, distractor.
    """
    scenes = read_scenes(root).of
    for split, numbers in read_splits(root / "splits.json").items():
        for number in numbers:
            for path in image_paths(number):
                text = describe_scene(scenes[path])
                yield Row(path, split, f"{number:06d}", path, path, [text], [], f"{FILE}, {path}")


ANNOTATIONS = ("change_captions.json", "no_change_captions.json", "splits.json", "type_mapping.json", "grammar.json")


# Files and folders that MiniChange writes
OWN_NAMES = {*FOLDERS, *ANNOTATIONS, FILE}
IMAGE_NAME = re.compile("|".join(f"{folder}/CLEVR_{word}_[0-9]{{6,}}[.]png" for folder, word in FOLDERS.items()))


def generate(settings: MiniChange) -> None:
    """Write a dataset of `settings.scenes` scenes. Each scene has an image before, an image after, and a distractor.

    Files of an earlier dataset in the folder are removed.

    Raises:
        DataError: the folder contains a file that does not belong to MiniChange. In this case nothing is removed.
    """
    _empty(settings.root)
    train, val, test = (settings.scenes[split] for split in ("train", "val", "test"))
    total = train + val + test  # train has the last numbers, so a larger train split does not change val and test
    splits = {"train": range(total - train, total), "val": range(test, test + val), "test": range(test)}
    with ProcessPoolExecutor(max_workers=usable_cpus()) as pool:
        written = pool.map(partial(_write_scene, settings, splits["train"]), range(total), chunksize=32)
        scenes = list(progress(written, "synthesize", total=total, unit="scene"))
    no_change = references((), settings.references)
    annotations = {
        "change_captions.json": {f"CLEVR_default_{name}.png": texts for name, _, texts, _ in scenes},
        "no_change_captions.json": {f"CLEVR_default_{name}.png": no_change for name, *_ in scenes},
        "splits.json": {split: list(numbers) for split, numbers in splits.items()},
        "type_mapping.json": {
            each: [f"{name}.png" for name, types, *_ in scenes if each in types] for each in CHANGE_TYPES
        },
        "grammar.json": grammar(tuple(WIDTHS[settings.level])),
    }
    for name, content in annotations.items():
        write_atomic(settings.root / name, json.dumps(content, indent=1) + "\n")
    head = json.dumps({"level": settings.level, "domain": settings.domain, "image_px": settings.image_px})
    lines = []
    for number, (*_, shown) in enumerate(scenes):
        for path, scene in zip(image_paths(number), shown, strict=True):
            values = {name: value for name, value in asdict(scene).items() if name != "level"}
            lines.append(f"{json.dumps(path)}: {json.dumps(values)}")
    write_atomic(settings.root / FILE, f'{head[:-1]}, "scenes": {{\n' + ",\n".join(lines) + "\n}}\n")


def _empty(root: Path) -> None:
    # Hidden files of a file browser, such as .DS_Store, do not count
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if not path.name.startswith("."))
    foreign_names = [name for name in names if name not in OWN_NAMES and not IMAGE_NAME.fullmatch(name)]
    if foreign_names:
        raise DataError("datasets.foreign_file_in_minichange", path=root, value=foreign_names[0])
    shutil.rmtree(root, ignore_errors=True)
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True)


def _write_scene(
    settings: MiniChange, training: range, number: int
) -> tuple[str, tuple[str, ...], list[str], tuple[Scene, ...]]:
    """Write the images of a scene. Return its six-digit number, its change types, references, and drawn scenes."""
    # Imported here, because checking the parameters must not require Pillow
    from m3diff.datasets.minichange.render import render

    rng = np.random.default_rng([settings.seed, number])
    deck = CHANGE_TYPES + (settings.oversample_types if number in training else ())
    types = sample_types(rng, number, settings.multi_change_share, deck)
    before, after, distractor, changes = LEVELS[settings.level].sample_pair(rng, types)
    shown = (before, after, distractor)
    for name, scene in zip(image_paths(number), shown, strict=True):
        render(scene, settings.image_px, rng, settings.domain).save(settings.root / name, compress_level=4)
    return f"{number:06d}", types, references(changes, settings.references), shown


ALLOWED = Permission("yes", "drawn by this project, under its licence")
SPEC = DatasetSpec(
    title="MiniChange",
    page="components/datasets/minichange",
    paper=None,
    licence=Licence.of("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0", ALLOWED),
    read=read,
    files=ANNOTATIONS,
    protocols=(
        Protocol("total", n=None),
        Protocol("semantic", n=None, ids=r"\d+\.png", pairs="pairs with a change"),
        Protocol("distractor", n=None, ids=r"\d+\.png_n", pairs="pairs without a change"),
    ),
    grammar=lambda root: read_json(root / "grammar.json", dict),
    singles=read_singles,
    generate=generate,
)

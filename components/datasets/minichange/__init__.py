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
    scenes.json               the content of each image (`DrawnScenes`), for programs that edit or describe images

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
from typing import Any, NamedTuple

import numpy as np

from m3diff.datasets.clevr_change import FILES, read, recognise
from m3diff.datasets.files import read_json, read_splits
from m3diff.datasets.minichange.language import describe_scene, grammar, references
from m3diff.datasets.minichange.scene import (
    SAMPLERS,
    WIDTHS,
    Domain,
    Mark,
    MiniChange,
    Scene,
    Thing,
    View,
    sample_types,
)
from m3diff.datasets.spec import DatasetSpec, Licence, Permission, Protocol, Row
from m3diff.records.errors import DataError
from m3diff.records.files import write_atomic
from m3diff.records.machine import usable_cpus
from m3diff.records.progress import progress
from m3diff.records.schemas import CHANGE_TYPES

SCENES_FILE = "scenes.json"
# Folders of the images before, the images after the changes, and the distractors, with the word in their file names
FOLDERS = {"images": "default", "sc_images": "semantic", "nsc_images": "nonsemantic"}


class DrawnScenes(NamedTuple):
    """The scenes from which the images of a dataset were drawn.

    Attributes:
        domain: look of the images.
        image_px: width and height of an image, in pixels.
        scene_by_path: scene of each image. The keys are paths relative to the root of the dataset.
    """

    domain: Domain
    image_px: int
    scene_by_path: dict[str, Scene]


class WrittenScene(NamedTuple):
    """A scene whose images are written.

    Attributes:
        name: the scene's number with six digits.
        types: the change types of the pair with changes.
        references: the captions of this pair.
        scenes: the scenes in the images, in the order of FOLDERS.
    """

    name: str
    types: tuple[str, ...]
    references: list[str]
    scenes: tuple[Scene, ...]


def image_paths(number: int) -> list[str]:
    """Return the paths of a scene's images, in the order of FOLDERS."""
    return [f"{folder}/CLEVR_{word}_{number:06d}.png" for folder, word in FOLDERS.items()]


def read_scenes(root: Path) -> DrawnScenes:
    """Read the scenes of a MiniChange dataset on disk.

    Raises:
        DataError: the file is missing or does not contain a JSON object.
    """
    content = read_json(root / SCENES_FILE, dict)
    scene_by_path = {}
    for path, values in content["scenes"].items():
        things = tuple(Thing(**thing) for thing in values.pop("things"))
        marks = tuple(Mark(*mark) for mark in values.pop("marks"))
        view = View(**values.pop("view"))
        scene_by_path[path] = Scene(things, marks, view=view, level=content["level"], **values)
    return DrawnScenes(content["domain"], content["image_px"], scene_by_path)


def read_singles(root: Path) -> Iterator[Row]:
    """Yield every image as a pair with itself, with a description of its scene as the caption.

    The scenes are in the order of `splits.json`. The images of a scene are in the order before, after, distractor.
    """
    scene_by_path = read_scenes(root).scene_by_path
    for split, numbers in read_splits(root / "splits.json").items():
        for number in numbers:
            for path in image_paths(number):
                yield Row(
                    name=path,
                    split=split,
                    scene=f"{number:06d}",
                    images=(path, path),
                    references=[describe_scene(scene_by_path[path])],
                    source=f"{SCENES_FILE}, {path}",
                )


ANNOTATIONS = (*FILES, "grammar.json")

# Files and folders that MiniChange writes, besides the images
WRITTEN_NAMES = {*FOLDERS, *ANNOTATIONS, SCENES_FILE}
IMAGE_NAME = re.compile("|".join(f"{folder}/CLEVR_{word}_[0-9]{{6,}}[.]png" for folder, word in FOLDERS.items()))


def generate(settings: MiniChange) -> None:
    """Write a dataset of `settings.scenes` scenes. Each scene has an image before, an image after, and a distractor.

    Files of an earlier dataset in the folder are removed.

    Raises:
        DataError: the folder contains a file that does not belong to MiniChange. In this case nothing is removed.
    """
    _empty_folder(settings.root)
    splits = _scene_numbers(settings)
    total = sum(len(numbers) for numbers in splits.values())
    write_scene = partial(_write_scene, settings, splits["train"])
    with ProcessPoolExecutor(max_workers=usable_cpus()) as pool:
        results = pool.map(write_scene, range(total), chunksize=32)
        written_scenes = list(progress(results, "synthesize", total=total, unit="scene"))
    for name, content in _annotations(settings, splits, written_scenes).items():
        write_atomic(settings.root / name, json.dumps(content, indent=1) + "\n")
    _write_scenes_file(settings, written_scenes)


def _scene_numbers(settings: MiniChange) -> dict[str, range]:
    """Return the numbers of the scenes in each split.

    The train split has the last numbers, so a larger train split does not change the val and test splits.
    """
    test = settings.scenes["test"]
    val = settings.scenes["val"]
    total = settings.scenes["train"] + val + test
    return {"train": range(test + val, total), "val": range(test, test + val), "test": range(test)}


def _annotations(settings: MiniChange, splits: dict[str, range], written_scenes: list[WrittenScene]) -> dict[str, Any]:
    """Return the content of each annotation file by its name."""
    no_change_sentences = references((), settings.references)
    captions = {}
    no_change_captions = {}
    images_by_type: dict[str, list[str]] = {change_type: [] for change_type in CHANGE_TYPES}
    for scene in written_scenes:
        captions[f"CLEVR_default_{scene.name}.png"] = scene.references
        no_change_captions[f"CLEVR_default_{scene.name}.png"] = no_change_sentences
        for change_type in scene.types:
            images_by_type[change_type].append(f"{scene.name}.png")
    return {
        "change_captions.json": captions,
        "no_change_captions.json": no_change_captions,
        "splits.json": {split: list(numbers) for split, numbers in splits.items()},
        "type_mapping.json": images_by_type,
        "grammar.json": grammar(tuple(WIDTHS[settings.level])),
    }


def _write_scenes_file(settings: MiniChange, written_scenes: list[WrittenScene]) -> None:
    """Write scenes.json with one line per image. `json.dumps` has no format with one line per entry."""
    header = json.dumps({"level": settings.level, "domain": settings.domain, "image_px": settings.image_px})
    lines = []
    for number, written_scene in enumerate(written_scenes):
        for path, scene in zip(image_paths(number), written_scene.scenes, strict=True):
            values = asdict(scene)
            del values["level"]  # all scenes have the level in the header
            lines.append(f"{json.dumps(path)}: {json.dumps(values)}")
    scenes = ",\n".join(lines)
    open_header = header.removesuffix("}")
    write_atomic(settings.root / SCENES_FILE, f'{open_header}, "scenes": {{\n{scenes}\n}}}}\n')


def _empty_folder(root: Path) -> None:
    """Replace the folder by an empty one with the folders of the images. See `generate` for the error."""
    # Hidden files of a file browser, such as .DS_Store, do not count
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if not path.name.startswith("."))
    foreign_names = [name for name in names if name not in WRITTEN_NAMES and not IMAGE_NAME.fullmatch(name)]
    if foreign_names:
        raise DataError("datasets.foreign_file_in_minichange", path=root, value=foreign_names[0])
    shutil.rmtree(root, ignore_errors=True)
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True)


def _write_scene(settings: MiniChange, train_numbers: range, number: int) -> WrittenScene:
    """Sample a scene and write its images. Only scenes of the train split use `settings.oversample_types`."""
    # Imported here, because checking the parameters must not require Pillow
    from m3diff.datasets.minichange.render import render

    rng = np.random.default_rng([settings.seed, number])
    oversampled_types = settings.oversample_types if number in train_numbers else ()
    types = sample_types(rng, number, settings.multi_change_share, CHANGE_TYPES + oversampled_types)
    sample = SAMPLERS[settings.level].sample_pair(rng, types)
    scenes = (sample.before, sample.after, sample.distractor)
    for name, scene in zip(image_paths(number), scenes, strict=True):
        image = render(scene, settings.image_px, rng, settings.domain)
        image.save(settings.root / name, compress_level=4)
    return WrittenScene(f"{number:06d}", types, references(sample.changes, settings.references), scenes)


PERMISSION = Permission("yes", "this project draws the images and licenses them")
SPEC = DatasetSpec(
    title="MiniChange",
    page="components/datasets/minichange",
    paper=None,
    licence=Licence.for_every_use("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0", PERMISSION),
    read=read,
    files=ANNOTATIONS,
    recognise=recognise,
    protocols=(
        Protocol("total", published_pairs=None),
        Protocol("semantic", published_pairs=None, ids=r"\d+\.png", pairs="pairs with a change"),
        Protocol("distractor", published_pairs=None, ids=r"\d+\.png_n", pairs="pairs without a change"),
    ),
    grammar=lambda root: read_json(root / "grammar.json", dict),
    singles=read_singles,
    generate=generate,
)

"""MiniChange: the embedded benchmark, which draws itself: small scenes on a table, one to three changes or none.

Page: this folder. Licence: Apache-2.0, as the project's. Written in CLEVR-Change's layout and read by its reader, with
two files more:

    images/CLEVR_default_000123.png           before
    sc_images/CLEVR_semantic_000123.png       after: the changes, and a small move of camera and light
    nsc_images/CLEVR_nonsemantic_000123.png   after: the small move only
    change_captions.json      {"CLEVR_default_000123.png": ["at the top the small red box turned blue", ...], ...}
    no_change_captions.json   the same keys: ["nothing changed", ...]
    splits.json               {"train": [123, ...], "val": [...], "test": [...]}
    type_mapping.json         {"color": ["000123.png", ...], ...}; a pair with several changes stands under each
    grammar.json              rules that read a caption back into changes: type, object, place, what it was and became
    scenes.json               what each image shows (`Scenes`): for who edits an image or describes it

`scene.py` says how each of OmniDiff's twelve change types is drawn. The number of scenes is a parameter, so no count is
published. Every byte follows from the seed: each scene has a random generator of its own, so their order and the number
of processes do not matter.

Two levels. *Grid*: three to five objects, each in a cell of its own, under a camera that hardly moves; a change shows
in the pixels. *Free*: six to eight objects anywhere, overlapping, of three sizes and several textures,
under a camera and a light that move more between any two images than the smallest changes do. Words and grammar are the
same but for a third size.

With `domain: shifted` the same scenes, changes and words are drawn in other shades, on darker, chequered tables and by
a turned and tilted camera (`render.LOOKS`). The embedded run draws such a dataset for tests alone,
`minichange_shifted`: how far its scores fall says how much of what a model learnt is the look of the training images.
"""

import json
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
# Folders of images before, after the changes, and as a distractor, with the word in the names of their files
FOLDERS = {"images": "default", "sc_images": "semantic", "nsc_images": "nonsemantic"}


class Scenes(NamedTuple):
    """The scene of each image, by its path in the dataset's root, and the way it was drawn."""

    domain: Domain
    image_px: int
    of: dict[str, Scene]


def image_paths(number: int) -> list[str]:
    """Paths of the images of one scene, in the order of FOLDERS."""
    return [f"{folder}/CLEVR_{word}_{number:06d}.png" for folder, word in FOLDERS.items()]


def read_scenes(root: Path) -> Scenes:
    """The scenes of a MiniChange on disk.

    Raises:
        DataError: there is no such file, or it is no JSON object.
    """
    found = read_json(root / FILE, dict)
    scenes = {}
    for path, values in found["scenes"].items():
        things = tuple(Thing(**thing) for thing in values.pop("things"))
        marks = tuple(Mark(*mark) for mark in values.pop("marks"))
        scenes[path] = Scene(things, marks, view=View(**values.pop("view")), level=found["level"], **values)
    return Scenes(found["domain"], found["image_px"], scenes)


def read_singles(root: Path) -> Iterator[Row]:
    """Every image as a pair with itself, described by its scene, in the order of `splits.json`: before, after,
    distractor."""
    scenes = read_scenes(root).of
    for split, numbers in read_splits(root / "splits.json").items():
        for number in numbers:
            for path in image_paths(number):
                text = describe_scene(scenes[path])
                yield Row(path, split, f"{number:06d}", path, path, [text], [], f"{FILE}, {path}")


ANNOTATIONS = ("change_captions.json", "no_change_captions.json", "splits.json", "type_mapping.json", "grammar.json")


def generate(settings: MiniChange) -> None:
    """Write `settings.scenes` scenes, each before, after its changes, and as a distractor, with references and splits.

    Raises:
        DataError: the folder holds something that MiniChange does not write; nothing is removed then.
    """
    _empty(settings.root)
    train, val, test = (settings.scenes[split] for split in ("train", "val", "test"))
    total = train + val + test  # training comes last, so that more of it leaves val and test as they are
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
    ours = {*FOLDERS, *ANNOTATIONS, FILE}
    if strange := sorted(path.name for path in root.glob("[!.]*") if path.name not in ours):
        raise DataError(f"{root}: holds {strange[0]!r}, which MiniChange does not write; name another root")
    shutil.rmtree(root, ignore_errors=True)
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True)


def _write_scene(
    settings: MiniChange, training: range, number: int
) -> tuple[str, tuple[str, ...], list[str], tuple[Scene, ...]]:
    """The number in six digits, change types, references, and the scenes of the images that are written."""
    from m3diff.datasets.minichange.render import render  # Pillow, which a check of the parameters does without

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
        Protocol("semantic", n=None, ids=r"\d+\.png"),
        Protocol("distractor", n=None, ids=r"\d+\.png_n"),
    ),
    grammar=lambda root: read_json(root / "grammar.json", dict),
    singles=read_singles,
    generate=generate,
)

"""MiniChange's images one by one, with questions that the base learned to answer, to measure what a model still knows.

Page: components/datasets/minichange. Licence: Apache-2.0, like the project. `root` is the folder of a MiniChange
dataset. Only two of its files are read, besides the images:

    images/CLEVR_default_000123.png           the image before, which is the one that the questions are about
    scenes.json                               the content of each image, from which the answers are derived
    splits.json                               {"train": [123, ...], "val": [...], "test": [...]}

Each scene gives one question about one image, of a kind that the base learned in its pre-training (`questions.py`).
The kinds take turns by the number of the scene:

    describe    "Describe the image."                   "at the top a small red box, at the left a large blue cone"
    objects     "Describe the red box, the mark, ..."   "at the top a small red box, nothing, ..."

The objects in a question are drawn at random, seeded by the number of the scene, so equal scenes give equal questions.
Every answer is unique: the objects of a description are in reading order.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from m3diff.datasets.files import read_splits
from m3diff.datasets.minichange import PERMISSION, SCENES_FILE, image_paths, read_scenes
from m3diff.datasets.minichange.questions import ask_for_images, ask_for_objects
from m3diff.datasets.spec import DatasetSpec, Licence, Protocol, Row

SEED = 4127
ASK = {"describe": ask_for_images, "objects": ask_for_objects}  # functions that ask, by kind of question
KINDS = tuple(ASK)


def read(root: Path) -> Iterator[Row]:
    """Yield one row per scene, in the order of `splits.json`."""
    scene_by_path = read_scenes(root).scene_by_path
    for split, numbers in read_splits(root / "splits.json").items():
        for number in numbers:
            path = image_paths(number)[0]
            kind = KINDS[number % len(KINDS)]
            question, answer = ASK[kind](np.random.default_rng([SEED, number]), [scene_by_path[path]])
            yield Row(
                name=f"{number:06d}?{kind}",
                split=split,
                scene=f"{number:06d}",
                image_set=f"{number:06d}",
                images=(path,),
                question=question,
                references=[answer],
                kind=kind,
                source=f"{SCENES_FILE}, {path}",
            )


SPEC = DatasetSpec(
    title="MiniChange images",
    page="components/datasets/minichange",
    paper=None,
    licence=Licence.for_every_use("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0", PERMISSION),
    read=read,
    files=(SCENES_FILE,),
    recognise=lambda root: False,  # such a folder is a MiniChange dataset, unless an entry names this reader
    protocols=(Protocol("test", published_pairs=None),),
)

"""Write MiniChange to disk in CLEVR-Change's own layout, so that the reader of real data reads the benchmark too.

Every byte follows from the seed: each scene draws from a generator of its own, so their order and the number of
processes do not matter. Run: `m3diff synthesize`.
"""

import json
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from components.datasets.minichange.settings import Synthesize
from components.progress import progress
from components.files import write_atomic
from components.records import CHANGE_TYPES
from components.datasets.minichange.change import sample_pair
from components.datasets.minichange.render import render
from components.datasets.minichange.language import captions, grammar

FOLDERS = {"images": "default", "sc_images": "semantic", "nsc_images": "nonsemantic"}


class Drawn(NamedTuple):
    number: int
    types: tuple[str, ...]
    captions: list[str]


def synthesize(cfg: Synthesize, out: Path) -> None:
    """Draw `cfg.scenes` scenes, each before, after its changes, and as a distractor, with captions and splits."""
    shutil.rmtree(out, ignore_errors=True)
    for folder in FOLDERS:
        (out / folder).mkdir(parents=True)
    splits = split_scenes(cfg)
    total = sum(cfg.scenes.values())
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        drawn = pool.map(partial(_draw_scene, cfg, splits["train"], out), range(total), chunksize=32)
        scenes = list(progress(drawn, "synthesize", total=total, unit="scene"))
    _write_annotations(cfg, scenes, splits, out)


def split_scenes(cfg: Synthesize) -> dict[str, range]:
    """The numbers of each split's scenes. Training comes last, so that more of it leaves val and test as they are."""
    val = cfg.scenes["test"]
    train = val + cfg.scenes["val"]
    return {"train": range(train, train + cfg.scenes["train"]), "val": range(val, train), "test": range(val)}


def _draw_scene(cfg: Synthesize, training: range, out: Path, number: int) -> Drawn:
    rng = np.random.default_rng([cfg.seed, number])
    deck = CHANGE_TYPES + (tuple(cfg.oversample_types) if number in training else ())
    types = choose_types(rng, number, cfg.multi_change_share, deck)
    before, after, distractor, changes = sample_pair(rng, types)
    for (folder, word), scene in zip(FOLDERS.items(), (before, after, distractor), strict=True):
        render(scene, cfg.image_px, rng).save(out / folder / f"CLEVR_{word}_{number:06d}.png", compress_level=4)
    return Drawn(number, types, captions(changes, cfg.references))


def choose_types(
    rng: np.random.Generator, number: int, multi_change_share: float, deck: tuple[str, ...] = CHANGE_TYPES
) -> tuple[str, ...]:
    """One to three distinct change types; the first runs through `deck`, by number."""
    first = deck[number % len(deck)]
    if rng.random() >= multi_change_share:
        return (first,)
    rest = [change_type for change_type in CHANGE_TYPES if change_type != first]
    extra = rng.choice(len(rest), size=int(rng.integers(1, 3)), replace=False)
    return (first, *(rest[int(k)] for k in extra))


def _write_annotations(cfg: Synthesize, scenes: list[Drawn], splits: dict[str, range], out: Path) -> None:
    key = "CLEVR_default_{:06d}.png".format
    no_change = captions((), cfg.references)
    files = {
        "change_captions.json": {key(scene.number): scene.captions for scene in scenes},
        "no_change_captions.json": {key(scene.number): no_change for scene in scenes},
        "splits.json": {split: list(numbers) for split, numbers in splits.items()},
        "type_mapping.json": {
            change_type: [f"{scene.number:06d}.png" for scene in scenes if change_type in scene.types]
            for change_type in CHANGE_TYPES
        },
        "grammar.json": grammar(),
    }
    for name, content in files.items():
        write_atomic(out / name, json.dumps(content, indent=1) + "\n")

"""The levels of MiniChange, by name: how a scene and a pair of scenes are sampled."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from components.datasets.minichange import change, free, scene
from components.datasets.minichange.scene import Change, Scene

Pair = tuple[Scene, Scene, Scene, tuple[Change, ...]]
"""Before, after its changes, distractor, and the changes."""


class Sampler(NamedTuple):
    """How a level's scenes are made."""

    sample_scene: Callable[[np.random.Generator], Scene]
    sample_pair: Callable[[np.random.Generator, tuple[str, ...]], Pair]  # with changes of these types
    dark: float  # brightness when the lamp is out


LEVELS: dict[str, Sampler] = {
    "grid": Sampler(scene.sample_scene, change.sample_pair, scene.DARK),
    "free": Sampler(free.sample_scene, free.sample_pair, free.DARK),
}

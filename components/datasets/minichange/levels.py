"""The levels of MiniChange, by name: how a scene and a pair of scenes are sampled."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from components.datasets.minichange import change, free, scene
from components.datasets.minichange.scene import Change, Scene

Pair = tuple[Scene, Scene, Scene, tuple[Change, ...]]


class Sampler(NamedTuple):
    """A scene; and before, after its changes of the given types, distractor and changes."""

    sample_scene: Callable[[np.random.Generator], Scene]
    sample_pair: Callable[[np.random.Generator, tuple[str, ...]], Pair]


LEVELS: dict[str, Sampler] = {
    "grid": Sampler(scene.sample_scene, change.sample_pair),
    "free": Sampler(free.sample_scene, free.sample_pair),
}

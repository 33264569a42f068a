"""The levels of MiniChange, by name: how a scene and a pair of scenes are sampled."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from m3diff.datasets.minichange.change import sample_pair as sample_grid_pair
from m3diff.datasets.minichange.free import DARK as FREE_DARK
from m3diff.datasets.minichange.free import sample_pair as sample_free_pair
from m3diff.datasets.minichange.free import sample_scene as sample_free_scene
from m3diff.datasets.minichange.scene import DARK, Change, Scene, sample_scene

Pair = tuple[Scene, Scene, Scene, tuple[Change, ...]]
"""Before, after its changes, distractor, and the changes."""


class Sampler(NamedTuple):
    """How a level's scenes are made."""

    sample_scene: Callable[[np.random.Generator], Scene]
    sample_pair: Callable[[np.random.Generator, tuple[str, ...]], Pair]  # with changes of these types
    dark: float  # brightness when the lamp is out


LEVELS: dict[str, Sampler] = {
    "grid": Sampler(sample_scene, sample_grid_pair, DARK),
    "free": Sampler(sample_free_scene, sample_free_pair, FREE_DARK),
}

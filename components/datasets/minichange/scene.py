"""Scenes of MiniChange and what may change in them, as data; `render.py` paints them, `language.py` puts them in words.

A scene is objects on a table under a lamp and a camera: three to five on a 3 x 3 grid, as this module samples them, or
more of them anywhere. Coordinates are in frame units: the resting camera sees [0, 1] x [0, 1], x to the
right and y down.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator

from m3diff.records.schemas import SPLITS, ChangeType
from m3diff.settings.section import Section

KINDS = ("ball", "box", "cone", "star", "arrow", "doll", "sign", "die")
COLORS = ("red", "green", "blue", "yellow", "purple", "white")
Level = Literal["grid", "free"]
WIDTHS: dict[str, dict[str, float]] = {
    "grid": {"small": 0.185, "large": 0.285},
    "free": {"small": 0.16, "medium": 0.23, "large": 0.32},
}
"""How wide an object of each size is, in frame units, by level."""

MARK_WIDTH = 0.17
SIZES = tuple(WIDTHS["grid"])
DIRECTIONS = ("up", "right", "down", "left")
POSES = ("down", "up", "waving")
GLYPHS = tuple("AEKS2479")
COUNTS = (2, 3, 4, 5, 6)
STATES: dict[str, tuple] = {"arrow": DIRECTIONS, "doll": POSES, "sign": GLYPHS, "die": COUNTS}
"""What the kinds with an inner state can show: where an arrow points, a doll's arms, a sign's text, a die's dots."""

PLACES = (
    *("at the top left", "at the top", "at the top right"),
    *("at the left", "in the centre", "at the right"),
    *("at the bottom left", "at the bottom", "at the bottom right"),
)
BACKGROUNDS = ("linen", "sand", "slate", "sage")
ZOOMS = {"in": 1.4, "out": 0.72}
LIT = 1.0


def cell_center(cell: int) -> tuple[float, float]:
    """Centre of a cell of the 3 x 3 grid, in frame units."""
    return 0.5 + 0.3 * (cell % 3 - 1), 0.5 + 0.3 * (cell // 3 - 1)


@dataclass(frozen=True)
class Thing:
    """An object: `cell` is its place (index of PLACES), `dx`, `dy` its offset from the cell's centre. No word names
    its texture."""

    kind: str
    color: str
    size: str
    cell: int
    state: object = None
    dx: float = 0.0
    dy: float = 0.0
    texture: str = "plain"

    @property
    def center(self) -> tuple[float, float]:
        """In frame units."""
        x, y = cell_center(self.cell)
        return x + self.dx, y + self.dy


class Mark(NamedTuple):
    """The print of an object taken away, at a place and an offset from its cell's centre."""

    cell: int
    dx: float = 0.0
    dy: float = 0.0

    @property
    def center(self) -> tuple[float, float]:
        """In frame units."""
        x, y = cell_center(self.cell)
        return x + self.dx, y + self.dy


@dataclass(frozen=True)
class View:
    """Camera and light: shift in frame units, zoom as a factor, brightness 1 when the lamp is on, lamp angle in
    radians, and the standard deviation of sensor noise in grey levels."""

    x: float = 0.0
    y: float = 0.0
    zoom: float = 1.0
    brightness: float = LIT
    lamp: float = -2.2
    noise: float = 0.0

    def project(self, point: tuple[float, float]) -> tuple[float, float]:
        """The point of this camera's frame where a point of the scene falls."""
        return (point[0] - self.x - 0.5) * self.zoom + 0.5, (point[1] - self.y - 0.5) * self.zoom + 0.5


@dataclass(frozen=True)
class Scene:
    """The objects, the table they are on, and the view of them. Of two things that overlap, the later covers the
    earlier."""

    things: tuple[Thing, ...]
    marks: tuple[Mark, ...] = ()
    background: str = "linen"
    view: View = field(default_factory=View)
    level: Level = "grid"
    cloth: str = "weave"  # the table's pattern, which no word names


@dataclass(frozen=True)
class Change:
    """A change: its OmniDiff type, the thing before and after (None where there is none), and for camera and lamp
    the word that says what happened to it."""

    type: str
    before: Thing | None = None
    after: Thing | None = None
    word: str = ""

    @property
    def order(self) -> tuple[int, float]:
        """References name the camera first, then the lamp, then the things in reading order: by place, and from left to
        right within one."""
        thing = self.before or self.after
        if thing is None:
            return (-1 if self.type == "illumination" else -2), 0.0
        return thing.cell, thing.center[0]


def pick(rng: np.random.Generator, options: tuple | list) -> Any:
    """Pick an option, all equally likely."""
    return options[int(rng.integers(len(options)))]


def other(rng: np.random.Generator, options: tuple, than: object) -> Any:
    """Pick an option that is not `than`."""
    return pick(rng, [option for option in options if option != than])


Domain = Literal["standard", "shifted"]
"""How scenes look: `render.LOOKS`."""


class MiniChange(Section):
    """The number, size and changes of the scenes that are drawn."""

    root: Path  # the folder to write
    seed: int = Field(ge=0)
    scenes: Mapping[Literal["train", "val", "test"], int]  # each gives two pairs: a change and a distractor
    image_px: int = Field(ge=32)
    references: int = Field(ge=1, le=5)  # captions of a pair
    multi_change_share: float = Field(ge=0, le=1)  # of scenes with two or three changes
    oversample_types: tuple[ChangeType, ...]  # twice as often as the others in training; val and test stay even
    level: Level = "grid"  # free: more objects, anywhere and overlapping, under a camera and light that move more
    domain: Domain = "standard"  # shifted: palette, tables and camera that the standard one does not have

    @field_validator("scenes")
    @classmethod
    def every_split(cls, scenes: dict[str, int]) -> dict[str, int]:
        """All three splits, none below 0, at least one scene."""
        if set(scenes) != set(SPLITS) or min(scenes.values()) < 0 or not any(scenes.values()):
            raise ValueError(f"expected {', '.join(SPLITS)}, each 0 or more and one of them more than 0")
        return scenes

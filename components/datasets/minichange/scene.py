"""Scenes of MiniChange and how they are sampled and changed, as data; `render.py` paints them, `language.py` puts them
in words.

A scene is objects on a table under a lamp and a camera. Coordinates are in frame units: the resting camera sees
[0, 1] x [0, 1], x to the right and y down.

The twelve change types of OmniDiff on the grid:

- *viewpoint*: the camera moves by a fifth of the frame or zooms by 1.4 / 0.72; the jitter of distractors is at most a
  twentieth of that.
- *illumination*: the lamp goes out (brightness 0.42) or comes on; jitter of the light stays within 4 %.
- *addition*: a new object stands in an empty cell.
- *disappearance*: an object is gone and the table where it stood is clean.
- *removal*: an object is gone and has left its print, a pale ring with a cross, where it stood. The print is the only
  thing that tells removal from disappearance. Scenes may hold older prints, so a print alone does not betray a removal.
- *substitution*: another kind of object stands in the same cell, in a colour of its own.
- *size*: small becomes large, or large small.
- *color*: the colour alone differs.
- *orientation*: an arrow points in another of four directions.
- *pose*: a doll holds its arms up, down, or waves with one.
- *ocr*: the letter or number printed on a sign differs.
- *counting*: the number of dots on a die differs.

The level *free*: six to eight objects anywhere in the frame, overlapping, of three sizes and several textures.

Places have the same nine words as on the grid: an object is "at the top" whose centre is in that third of the frame as
the camera before sees it, and several may be. What tells a change from a distractor is not how many pixels differ: from
one image to the next the camera shifts by up to 5 % of the frame and zooms by up to 5 %, the light changes by up to
10 % and the lamp goes round by up to 23 degrees. A camera that is said to have moved goes more than four times as far,
and a lamp that went out leaves less than two thirds of the light.

What a reference speaks of can be seen and told apart in both images: see `_is_clear`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator

from m3diff.records.schemas import CHANGE_TYPES, SPLITS, ChangeType, Split
from m3diff.settings.section import Section

KINDS = ("ball", "box", "cone", "star", "arrow", "doll", "sign", "die")
COLORS = ("red", "green", "blue", "yellow", "purple", "white")
Level = Literal["grid", "free"]
WIDTHS: dict[str, dict[str, float]] = {  # how wide an object of each size is, in frame units, by level
    "grid": {"small": 0.185, "large": 0.285},
    "free": {"small": 0.16, "medium": 0.23, "large": 0.32},
}

MARK_WIDTH = 0.17
SIZES = tuple(WIDTHS["grid"])
STATES: dict[str, tuple] = {  # what the kinds with an inner state can show
    "arrow": ("up", "right", "down", "left"),  # where it points
    "doll": ("down", "up", "waving"),  # its arms
    "sign": tuple("AEKS2479"),
    "die": (2, 3, 4, 5, 6),  # its dots
}

PLACES = (
    *("at the top left", "at the top", "at the top right"),
    *("at the left", "in the centre", "at the right"),
    *("at the bottom left", "at the bottom", "at the bottom right"),
)
BACKGROUNDS = ("linen", "sand", "slate", "sage")
ZOOMS = {"in": 1.4, "out": 0.72}
LIT = 1.0


def cell_center(cell: int, dx: float = 0.0, dy: float = 0.0) -> tuple[float, float]:
    """Centre of a cell of the 3 x 3 grid, or a point at this offset from it, in frame units."""
    return 0.5 + 0.3 * (cell % 3 - 1) + dx, 0.5 + 0.3 * (cell // 3 - 1) + dy


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
        return cell_center(self.cell, self.dx, self.dy)


def name(thing: Thing) -> str:
    """Size, colour and kind: "small red box"."""
    return f"{thing.size} {thing.color} {thing.kind}"


class Mark(NamedTuple):
    """The print of an object taken away, at a place and an offset from its cell's centre."""

    cell: int
    dx: float = 0.0
    dy: float = 0.0

    @property
    def center(self) -> tuple[float, float]:
        """In frame units."""
        return cell_center(self.cell, self.dx, self.dy)


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

    def project(self, point: tuple[Any, Any]) -> tuple[Any, Any]:
        """The point of this camera's frame where a point of the scene falls; of arrays, their points."""
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


Domain = Literal["standard", "shifted"]  # how scenes look: `render.LOOKS`


class MiniChange(Section):
    """The number, size and changes of the scenes that are drawn."""

    root: Path  # the folder to write
    seed: int = Field(ge=0)
    scenes: Mapping[Split, int]  # each gives two pairs: a change and a distractor
    image_px: int = Field(ge=32)
    references: int = Field(ge=1, le=5)  # captions of a pair
    multi_change_share: float = Field(ge=0, le=1)  # of scenes with two or three changes
    oversample_types: tuple[ChangeType, ...]  # twice as often as the others in training; val and test stay even
    level: Level = "grid"  # free: more objects, anywhere and overlapping, under a camera and light that move more
    domain: Domain = "standard"  # shifted: palette, tables and camera that the standard one does not have

    @field_validator("scenes")
    @classmethod
    def every_split(cls, scenes: dict[str, int]) -> dict[str, int]:
        if set(scenes) != set(SPLITS) or min(scenes.values()) < 0 or not any(scenes.values()):
            raise ValueError(f"expected {', '.join(SPLITS)}, each 0 or more and one of them more than 0")
        return scenes


def pick(rng: np.random.Generator, options: tuple | list) -> Any:
    return options[int(rng.integers(len(options)))]


def other(rng: np.random.Generator, options: tuple, than: object) -> Any:
    """Pick an option that is not `than`."""
    return pick(rng, [option for option in options if option != than])


# Types that need an object of a certain kind in the scene
NEEDS = {"orientation": "arrow", "pose": "doll", "ocr": "sign", "counting": "die"}

MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # directions in which a camera moves, by word


@dataclass(frozen=True)
class Sampler:
    """A level: its camera, lamp and sizes, and how scenes are sampled.

    On the free level the camera zooms, and the lamp goes out or on, from what they are.
    """

    name: str
    sample_scene: Callable[..., Scene]  # with these kinds in it
    is_clear: Callable[[Scene, Scene, list[Change]], bool]
    move: float  # of the camera, in frame units
    dark: float  # brightness when the lamp is out, or the factor to it
    tries: int  # to change one scene before another is sampled
    shift: tuple[float, float, float]  # of a distractor's camera: most in x and in y, least and most in all
    jitter_by: tuple[float, float, float]  # most of a distractor's zoom, brightness (both a share) and lamp (radians)

    def sample_pair(
        self, rng: np.random.Generator, types: tuple[str, ...]
    ) -> tuple[Scene, Scene, Scene, tuple[Change, ...]]:
        """Sample a scene and change it.

        Returns: the scene before, the scene after the changes of `types`, the distractor (the scene before under
        another camera and light), and the changes in the order in which references name them.
        """
        while True:
            before = self.sample_scene(rng, tuple(NEEDS[t] for t in types if t in NEEDS))
            for _ in range(self.tries):
                if changed := self._apply(rng, before, types):
                    after, changes = changed
                    distractor = replace(before, view=self.jitter(rng, before.view))
                    return before, after, distractor, tuple(sorted(changes, key=lambda change: change.order))

    def moved(self, view: View, word: str) -> View:
        """The view after the camera has moved or zoomed as the word says."""
        if word in ZOOMS:
            return replace(view, zoom=view.zoom * ZOOMS[word] if self.name == "free" else ZOOMS[word])
        x, y = MOVES[word]
        return replace(view, x=view.x + self.move * x, y=view.y + self.move * y)

    def lit(self, view: View, word: str) -> View:
        """The view after the lamp went "out" or came "on"."""
        if self.name == "free":
            return replace(view, brightness=view.brightness * (self.dark if word == "out" else 1 / self.dark))
        return replace(view, brightness=self.dark if word == "out" else LIT)

    def jitter(self, rng: np.random.Generator, view: View) -> View:
        """The view after a shift of camera, light and noise that is a distractor and never mentioned."""
        by, least, most = self.shift
        while True:
            x, y = (float(value) for value in rng.uniform(-by, by, 2))
            if least**2 <= x * x + y * y <= most**2:
                break
        zoom, brightness = (float(rng.uniform(1 - by, 1 + by)) for by in self.jitter_by[:2])
        lamp = self.jitter_by[2]
        return replace(
            view,
            x=view.x + x,
            y=view.y + y,
            zoom=view.zoom * zoom,
            brightness=view.brightness * brightness,
            lamp=view.lamp + float(rng.uniform(-lamp, lamp)),
            noise=_noise(rng),
        )

    def in_order(self, scene: Scene) -> Scene:
        """On the grid things are in the order of their places; on the free level a later one covers an earlier one."""
        if self.name == "free":
            return scene
        things = sorted(scene.things, key=lambda thing: thing.cell)
        return replace(scene, things=tuple(things), marks=tuple(sorted(scene.marks)))

    def _apply(
        self, rng: np.random.Generator, before: Scene, types: tuple[str, ...]
    ) -> tuple[Scene, list[Change]] | None:
        """Apply the types to things of their own; None where the scene has no room, or not all can be told apart."""
        things: list[Thing | None] = list(before.things)
        marks, view = list(before.marks), before.view
        untouched = set(range(len(things)))
        changes: list[Change] = []
        for change_type in types:
            if change_type == "illumination":
                word = "out" if view.brightness > LAMP_ON else "on"
                view, change = self.lit(view, word), Change(change_type, word=word)
            elif change_type == "viewpoint":
                word = str(pick(rng, (*MOVES, *ZOOMS)))
                view, change = self.moved(view, word), Change(change_type, word=word)
            elif change_type == "addition":
                if self.name == "free":
                    new = sample_free_thing(rng, before.view)
                else:
                    touched = [*things, *marks, *(change.before for change in changes)]
                    taken = {each.cell for each in touched if each is not None}
                    new = sample_grid_thing(rng, pick(rng, [cell for cell in range(9) if cell not in taken]))
                change = Change(change_type, after=new)
                things.append(new)
            else:
                fitting = [k for k in sorted(untouched) if NEEDS.get(change_type) in (None, before.things[k].kind)]
                if not fitting:
                    return None
                chosen = pick(rng, fitting)
                untouched.discard(chosen)
                thing = before.things[chosen]
                things[chosen] = self._changed(rng, thing, change_type)
                change = Change(change_type, before=thing, after=things[chosen])
                if change_type == "removal":
                    marks.append(self.mark(thing))
            changes.append(change)
        left = tuple(thing for thing in things if thing is not None)
        after = self.in_order(replace(before, things=left, marks=tuple(marks), view=self.jitter(rng, view)))
        return (after, changes) if self.is_clear(before, after, changes) else None

    def mark(self, thing: Thing) -> Mark:
        """The print that an object leaves which is removed."""
        return Mark(thing.cell, thing.dx, thing.dy) if self.name == "free" else Mark(thing.cell)

    def _changed(self, rng: np.random.Generator, thing: Thing, change_type: str) -> Thing | None:
        """The object gone, replaced, in another size or colour; by any other type, in another state of its kind."""
        if change_type in ("disappearance", "removal"):
            return None
        if change_type == "substitution":
            kind = str(other(rng, KINDS, thing.kind))
            if self.name == "grid":
                return replace(sample_grid_thing(rng, thing.cell, kind), size=thing.size, dx=thing.dx, dy=thing.dy)
            state = pick(rng, STATES[kind]) if kind in STATES else None
            color, texture = str(pick(rng, COLORS)), str(pick(rng, TEXTURES))
            return replace(thing, kind=kind, state=state, color=color, texture=texture)
        if change_type == "size":
            return replace(thing, size=str(other(rng, tuple(WIDTHS[self.name]), thing.size)))
        if change_type == "color":
            return replace(thing, color=str(other(rng, COLORS, thing.color)))
        return replace(thing, state=other(rng, STATES[thing.kind], thing.state))


LAMP_ON = 0.7  # brightness above which a lamp can go out


def sample_types(
    rng: np.random.Generator, number: int, multi_change_share: float, deck: tuple[str, ...] = CHANGE_TYPES
) -> tuple[str, ...]:
    """Sample one to three distinct change types; the first runs through `deck`, by number."""
    first = deck[number % len(deck)]
    if rng.random() >= multi_change_share:
        return (first,)
    rest = [change_type for change_type in CHANGE_TYPES if change_type != first]
    return (first, *(rest[int(k)] for k in rng.choice(len(rest), size=int(rng.integers(1, 3)), replace=False)))


# A changed object's centre keeps this distance from the frame's border in both images of the grid, in frame units
VISIBLE = 0.1


def sample_grid_thing(rng: np.random.Generator, cell: int, kind: str | None = None) -> Thing:
    """An object of this kind, or of any, somewhere near the middle of its cell."""
    kind = kind or str(pick(rng, KINDS))
    state = pick(rng, STATES[kind]) if kind in STATES else None
    dx, dy = rng.uniform(-0.025, 0.025, 2)
    return Thing(kind, str(pick(rng, COLORS)), str(pick(rng, tuple(WIDTHS["grid"]))), cell, state, float(dx), float(dy))


def _on_grid(rng: np.random.Generator, must_hold: tuple[str, ...] = ()) -> Scene:
    count = max(int(rng.integers(3, 6)), len(must_hold))
    cells = rng.permutation(9)
    kinds = list(must_hold) + [None] * (count - len(must_hold))
    things = [sample_grid_thing(rng, int(cell), kind) for cell, kind in zip(cells, kinds, strict=False)]
    marks = (Mark(int(cells[count])),) if rng.random() < 0.2 else ()
    view = LEVELS["grid"].jitter(rng, View(brightness=LEVELS["grid"].dark if rng.random() < 0.1 else LIT))
    things.sort(key=lambda thing: thing.cell)
    return Scene(tuple(things), marks, str(pick(rng, BACKGROUNDS)), view)


def _in_frame(before: Scene, after: Scene, changes: list[Change]) -> bool:
    centers = [thing.center for change in changes if (thing := change.before or change.after)]
    places = [view.project(center) for center in centers for view in (before.view, after.view)]
    return all(VISIBLE < value < 1 - VISIBLE for place in places for value in place)


# the level free

TEXTURES = ("plain", "striped", "banded", "chequered", "dotted")
CLOTHS = ("weave", "checks", "planks", "dots")

THIRDS = (1 / 3, 2 / 3)
# The centre of what stands in a scene keeps this distance from the borders of the frame's thirds, in frame units
MARGIN = 0.03
EDGE = 0.1  # and this from the frame's border
SEEN = 0.5  # share of any object that nothing covers; of its square, of which a form fills less
# Share of a changed object, and of its counterpart, that is in the frame and that nothing covers, in both images
SEEN_CHANGED = 0.65
SEEN_STATE = 0.85  # the same where an arrow's direction, a doll's arms, a letter or dots change
APART = 0.2  # of what came and what went in one pair, the centres are this far apart: else they would be a substitution
TRIES = 60


def _freely(rng: np.random.Generator, must_hold: tuple[str, ...] = ()) -> Scene:
    """A scene of six to eight things, `must_hold` naming the kinds that have to be among them; if one of them finds no
    room, another scene."""
    view = View(
        x=float(rng.uniform(-0.02, 0.02)),
        y=float(rng.uniform(-0.02, 0.02)),
        zoom=float(rng.uniform(0.97, 1.03)),
        brightness=(LEVELS["free"].dark if rng.random() < 0.1 else LIT) * float(rng.uniform(0.95, 1.05)),
        lamp=float(rng.uniform(-3.0, -0.1)),
        noise=_noise(rng),
    )
    kinds = list(must_hold) + [None] * (pick(rng, (6, 7, 8)) - len(must_hold))
    things: list[Thing] = []
    for place in rng.permutation(len(kinds)):
        for _ in range(TRIES):
            thing = sample_free_thing(rng, view, kinds[place])
            if are_open([*things, thing], SEEN_SCENE):
                break
        else:
            return _freely(rng, must_hold)
        things.append(thing)
    marks: list[Mark] = []
    for _ in range(int(rng.integers(1, 3)) if rng.random() < 0.4 else 0):
        mark = Mark(*_spot(rng, view))
        if _mark_is_clear(mark, things, marks):
            marks.append(mark)
    background, cloth = str(pick(rng, BACKGROUNDS)), str(pick(rng, CLOTHS))
    return Scene(tuple(things), tuple(marks), background, view, "free", cloth)


SEEN_SCENE = 0.6  # as SEEN, where a scene is first laid out: changes may cover a little more


def sample_free_thing(rng: np.random.Generator, view: View, kind: str | None = None) -> Thing:
    """An object of this kind, or of any, somewhere in this camera's frame."""
    kind = kind or str(pick(rng, KINDS))
    state = pick(rng, STATES[kind]) if kind in STATES else None
    color, size, texture = (str(pick(rng, options)) for options in (COLORS, tuple(WIDTHS["free"]), TEXTURES))
    cell, dx, dy = _spot(rng, view)
    return Thing(kind, color, size, cell, state, dx, dy, texture)


def _spot(rng: np.random.Generator, view: View) -> tuple[int, float, float]:
    """A point that this camera sees well inside a third of its frame: the place, and the offset from its cell's centre
    on the table."""
    while True:
        u, v = (float(value) for value in rng.uniform(EDGE, 1 - EDGE, 2))
        if _inside_third(u) and _inside_third(v):
            break
    cell = place_of((u, v))
    x, y = ((value - 0.5) / view.zoom + 0.5 + shift for value, shift in ((u, view.x), (v, view.y)))
    middle = cell_center(cell)
    return cell, x - middle[0], y - middle[1]


def place_of(point: tuple[float, float]) -> int:
    """Index of PLACES: in which third of the frame a point is, across and down."""
    across, down = (sum(value > border for border in THIRDS) for value in point)
    return across + 3 * down


def _inside_third(value: float, margin: float = MARGIN) -> bool:
    return all(abs(value - border) >= margin for border in THIRDS)


def _noise(rng: np.random.Generator) -> float:
    return float(rng.uniform(0.5, 2.0)) if rng.random() < 0.3 else 0.0


def _width(of: Thing | Mark) -> float:
    return MARK_WIDTH if isinstance(of, Mark) else WIDTHS["free"][of.size]


POINTS = (np.arange(12) + 0.5) / 12 - 0.5


def _seen(what: Thing | Mark, above: Iterable[Thing], view: View | None = None) -> float:
    """Share of a thing's square that no square above it covers and, where a view is given, that is in its frame."""
    x, y = (middle + POINTS * _width(what) for middle in what.center)
    clear = np.ones((len(POINTS), len(POINTS)), dtype=bool)
    for each in above:
        middle, half = each.center, 0.5 * _width(each)
        clear &= ~((np.abs(y - middle[1]) < half)[:, None] & (np.abs(x - middle[0]) < half)[None, :])
    if view is not None:
        u, v = view.project((x, y))
        clear &= ((v > 0) & (v < 1))[:, None] & ((u > 0) & (u < 1))[None, :]
    return int(clear.sum()) / clear.size


def are_open(things: Sequence[Thing], least: float) -> bool:
    """True if at least this share of each thing is covered by none of the later ones."""
    return all(_seen(thing, things[place + 1 :]) >= least for place, thing in enumerate(things))


def _mark_is_clear(mark: Mark, things: Sequence[Thing], marks: Sequence[Mark], view: View | None = None) -> bool:
    alone = all(_distance(mark.center, each.center) > MARK_WIDTH for each in marks if each != mark)
    return alone and _seen(mark, things, view) >= SEEN_CHANGED


def _distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    return max(abs(a[0] - b[0]), abs(a[1] - b[1]))


def _is_clear(before: Scene, after: Scene, changes: list[Change]) -> bool:
    """True if a person can see what changed, and know which object and place a reference means.

    Every object is partly open in both scenes and every mark mostly. A changed object and its counterpart are mostly
    open and in the frame in both images, touch nothing of their own colour, have a name that no other object at their
    place has, and are in the same third of both frames, unless the camera is said to have moved. What came and what
    went are apart.
    """
    if not all(are_open(scene.things, SEEN) for scene in (before, after)):
        return False
    views = [before.view] if any(change.type == "viewpoint" for change in changes) else [before.view, after.view]
    for change in changes:
        sides = [(scene, thing) for scene, thing in ((before, change.before), (after, change.after)) if thing]
        least = SEEN_STATE if change.type in NEEDS else SEEN_CHANGED
        if not all(_stands_out(scene, thing, least, (before.view, after.view)) for scene, thing in sides):
            return False
        for at, cell in ((view.project(thing.center), thing.cell) for _, thing in sides for view in views):
            if place_of(at) != cell or not all(_inside_third(value, MARGIN / 2) for value in at):
                return False
    gone = [change.before.center for change in changes if change.before and not change.after]
    came = [change.after.center for change in changes if change.after and not change.before]
    if any(_distance(a, b) < APART for a in gone for b in came):
        return False
    for mark in after.marks:
        if not _mark_is_clear(mark, after.things, after.marks, None if mark in before.marks else after.view):
            return False
    return True


def _stands_out(scene: Scene, thing: Thing, least: float, views: tuple[View, View]) -> bool:
    """Open enough in both frames, touching nothing of its colour, and the only one of its name at its place."""
    others = [each for each in scene.things if each != thing]
    if any((each.cell, name(each)) == (thing.cell, name(thing)) for each in others):
        return False
    of_color = [each for each in others if each.color == thing.color]
    if any(_distance(each.center, thing.center) < (_width(each) + _width(thing)) / 2 for each in of_color):
        return False
    above = scene.things[scene.things.index(thing) + 1 :]
    return all(_seen(thing, above, view) >= least for view in views)


LEVELS: dict[str, Sampler] = {
    "grid": Sampler(
        "grid", _on_grid, _in_frame, move=0.2, dark=0.42, tries=1, shift=(0.01, 0, 0.0142), jitter_by=(0.015, 0.04, 0.3)
    ),
    "free": Sampler(
        "free", _freely, _is_clear, move=0.22, dark=0.58, tries=4, shift=(0.05, 0.02, 0.05), jitter_by=(0.05, 0.1, 0.4)
    ),
}

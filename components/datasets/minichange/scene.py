"""Sample and change the scenes of MiniChange. `render.py` paints the scenes, `language.py` describes them in words.

A scene consists of objects on a table, a lamp and a camera. It also has a distractor: the same objects, seen after a
small movement of camera and light that does not count as a change. Coordinates are in frame units: the camera at rest
sees [0, 1] x [0, 1], with x to the right and y down.

OmniDiff's twelve change types on the grid:

- *viewpoint*: the camera moves by a fifth of the frame or zooms by a factor of 1.4 or 0.72. In distractors it moves by
  at most a twentieth of that.
- *illumination*: the lamp goes out (brightness 0.42) or comes on. In distractors the brightness varies by at most 4 %.
- *addition*: a new object appears in an empty cell.
- *disappearance*: an object is missing, and the table is clean where it stood.
- *removal*: an object is missing and has left a mark where it stood, a pale ring with a cross. Only the mark
  distinguishes a removal from a disappearance. Scenes may contain older marks, so a mark alone proves nothing.
- *substitution*: an object is replaced by an object of another kind, in any colour.
- *size*: small becomes large, or large becomes small.
- *color*: only the colour differs.
- *orientation*: an arrow turns to another of four directions.
- *pose*: a doll changes its arms, which are both up, both down, or waving.
- *ocr*: the letter or number on a sign differs.
- *counting*: the number of dots on a die differs.

On the level *free* there are six to eight objects anywhere in the frame, which may overlap and have three sizes and
several textures.

Places have the same nine names as on the grid. An object is "at the top" if its centre is in that third of the frame of
the image before; several objects may share a place. The number of different pixels does not distinguish a change from a
distractor: from one image to the next the camera shifts by up to 5 % of the frame and zooms by up to 5 %, the light
changes by up to 10 %, and the lamp turns by up to 23 degrees. A movement of the camera that a reference mentions is
more than four times as far. After a reference says that the lamp went out, less than two thirds of the light remain.

Everything that a reference mentions is visible and distinguishable in both images: see `_is_clear`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator

from m3diff.records.errors import ValueFault
from m3diff.records.schemas import CHANGE_TYPES, SPLITS, ChangeType, Split
from m3diff.settings.section import Section

KINDS = ("ball", "box", "cone", "star", "arrow", "doll", "sign", "die")
COLORS = ("red", "green", "blue", "yellow", "purple", "white")
Level = Literal["grid", "free"]
WIDTHS: dict[str, dict[str, float]] = {  # width of an object of each size, in frame units, by level
    "grid": {"small": 0.185, "large": 0.285},
    "free": {"small": 0.16, "medium": 0.23, "large": 0.32},
}

MARK_WIDTH = 0.17
SIZES = tuple(WIDTHS["grid"])
STATES: dict[str, tuple] = {  # the states that some kinds of objects can have
    "arrow": ("up", "right", "down", "left"),  # direction
    "doll": ("down", "up", "waving"),  # arms
    "sign": tuple("AEKS2479"),
    "die": (2, 3, 4, 5, 6),  # number of dots
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
    """Return the centre of a cell in the 3 x 3 grid, or a point at an offset from it, in frame units."""
    return 0.5 + 0.3 * (cell % 3 - 1) + dx, 0.5 + 0.3 * (cell // 3 - 1) + dy


@dataclass(frozen=True)
class Thing:
    """An object on the table. Captions never mention its texture.

    cell: the object's place, as an index into PLACES.
    dx, dy: offset of the object's centre from the cell's centre, in frame units.
    """

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
        """The centre in frame units."""
        return cell_center(self.cell, self.dx, self.dy)


def name(thing: Thing) -> str:
    """Return the name of an object in captions, which consists of size, colour and kind: "small red box"."""
    return f"{thing.size} {thing.color} {thing.kind}"


class Mark(NamedTuple):
    """The mark that a removed object leaves on the table: its place and its offset from the cell's centre."""

    cell: int
    dx: float = 0.0
    dy: float = 0.0

    @property
    def center(self) -> tuple[float, float]:
        """The centre in frame units."""
        return cell_center(self.cell, self.dx, self.dy)


@dataclass(frozen=True)
class View:
    """Camera and light.

    x, y: shift of the camera in frame units.
    zoom: zoom factor.
    brightness: 1 if the lamp is on.
    lamp: angle of the lamp in radians.
    noise: standard deviation of the sensor noise in grey levels.
    """

    x: float = 0.0
    y: float = 0.0
    zoom: float = 1.0
    brightness: float = LIT
    lamp: float = -2.2
    noise: float = 0.0

    def project(self, point: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the position in this camera's frame of a point in the scene, or of arrays of points."""
        return (point[0] - self.x - 0.5) * self.zoom + 0.5, (point[1] - self.y - 0.5) * self.zoom + 0.5


@dataclass(frozen=True)
class Scene:
    """Objects on a table, and the camera's view. If two objects overlap, the later one covers the earlier one."""

    things: tuple[Thing, ...]
    marks: tuple[Mark, ...] = ()
    background: str = "linen"
    view: View = field(default_factory=View)
    level: Level = "grid"
    cloth: str = "weave"  # pattern of the table, which is never mentioned in captions


@dataclass(frozen=True)
class Change:
    """A change between two scenes.

    type: one of OmniDiff's twelve change types.
    before, after: the object before and after; None if there is none.
    word: what happened to the camera ("left", "in", ...) or lamp ("on", "out"); empty for a change of an object.
    """

    type: str
    before: Thing | None = None
    after: Thing | None = None
    word: str = ""

    @property
    def order(self) -> tuple[int, float]:
        """Sort key: first the camera, then the lamp, then objects by place and from left to right within a place."""
        thing = self.before or self.after
        if thing is None:
            return (-1 if self.type == "illumination" else -2), 0.0
        return thing.cell, thing.center[0]


Domain = Literal["standard", "shifted"]  # look of the scenes: see `render.SHADES`


class MiniChange(Section):
    """Settings for generating a MiniChange dataset."""

    root: Path
    """Folder to write."""

    seed: int = Field(ge=0)
    """Seed of all scenes. A different seed draws a different dataset."""

    scenes: Mapping[Split, int]
    """Number of scenes per split, 0 or more. Each scene gives two pairs: one with changes, and a distractor."""

    image_px: int = Field(ge=32)
    """Width and height of an image, in pixels."""

    references: int = Field(ge=1, le=5)
    """Number of captions per pair."""

    multi_change_share: float = Field(ge=0, le=1)
    """Share of scenes with two or three changes instead of one."""

    oversample_types: tuple[ChangeType, ...]
    """Change types that are drawn twice as often as the others in the training split. In val and test, all types are
    equally frequent."""

    level: Level = "grid"
    """`grid` places objects on a 3 x 3 grid. `free` has more objects, which may overlap, and larger movements of camera
    and light."""

    domain: Domain = "standard"
    """Look of the scenes: the colours, tables and camera of `shifted` differ from those of `standard`."""

    @field_validator("scenes")
    @classmethod
    def every_split(cls, scenes: dict[str, int]) -> dict[str, int]:
        """Require a number of scenes for each split.

        Raises:
            ValueFault: a split is missing or unknown, a number is negative, or all numbers are 0.
        """
        if set(scenes) != set(SPLITS) or min(scenes.values()) < 0 or not any(scenes.values()):
            raise ValueFault("datasets.no_number_of_scenes", names=list(SPLITS))
        return scenes


def pick(rng: np.random.Generator, options: tuple | list) -> Any:
    """Return a random option. All options are equally likely."""
    return options[int(rng.integers(len(options)))]


def other(rng: np.random.Generator, options: tuple, than: object) -> Any:
    """Return a random option that is not `than`."""
    return pick(rng, [option for option in options if option != than])


# Change types that require an object of a certain kind in the scene
NEEDS = {"orientation": "arrow", "pose": "doll", "ocr": "sign", "counting": "die"}

MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # directions of a camera movement


@dataclass(frozen=True)
class Sampler:
    """Samples scenes and changes of a level. The fields are the level's limits for camera and lamp.

    On the level free, zoom and brightness change relative to their current values.
    """

    name: str
    sample_scene: Callable[..., Scene]  # takes the kinds of objects that the scene must contain
    is_clear: Callable[[Scene, Scene, list[Change]], bool]
    move: float  # distance of a camera movement, in frame units
    dark: float  # brightness with the lamp out; on the level free, the factor by which the brightness is multiplied
    tries: int  # number of attempts to change a scene before another scene is sampled
    shift: tuple[float, float, float]  # camera shift in `jitter`: maximum in x and y, minimum and maximum distance
    # Maximum changes in `jitter`: of zoom and brightness relative to their values, of the lamp in radians
    jitter_by: tuple[float, float, float]

    def sample_pair(
        self, rng: np.random.Generator, types: tuple[str, ...]
    ) -> tuple[Scene, Scene, Scene, tuple[Change, ...]]:
        """Sample a scene and change it.

        Returns:
            The scene before, the scene after the changes of `types`, the distractor (the scene before with another
            camera and light), and the changes in the order in which references mention them.
        """
        while True:
            before = self.sample_scene(rng, tuple(NEEDS[t] for t in types if t in NEEDS))
            for _ in range(self.tries):
                if changed := self._apply(rng, before, types):
                    after, changes = changed
                    distractor = replace(before, view=self.jitter(rng, before.view))
                    return before, after, distractor, tuple(sorted(changes, key=lambda change: change.order))

    def moved(self, view: View, word: str) -> View:
        """Return the view after a camera movement: "left", "right", "up", "down", "in" or "out"."""
        if word in ZOOMS:
            return replace(view, zoom=view.zoom * ZOOMS[word] if self.name == "free" else ZOOMS[word])
        x, y = MOVES[word]
        return replace(view, x=view.x + self.move * x, y=view.y + self.move * y)

    def lit(self, view: View, word: str) -> View:
        """Return the view after the lamp was switched "on" or "out"."""
        if self.name == "free":
            return replace(view, brightness=view.brightness * (self.dark if word == "out" else 1 / self.dark))
        return replace(view, brightness=self.dark if word == "out" else LIT)

    def jitter(self, rng: np.random.Generator, view: View) -> View:
        """Return the view with small changes of camera, light and noise, which references never mention."""
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
        """Sort objects and marks by place on the grid. On the level free, keep their order, which decides overlaps."""
        if self.name == "free":
            return scene
        things = sorted(scene.things, key=lambda thing: thing.cell)
        return replace(scene, things=tuple(things), marks=tuple(sorted(scene.marks)))

    def _apply(
        self, rng: np.random.Generator, before: Scene, types: tuple[str, ...]
    ) -> tuple[Scene, list[Change]] | None:
        """Apply each change type to a different object, or to the camera or lamp. Return the new scene and the changes.

        Return None if no object fits a change type, or if the changes would not be clear.
        """
        things: list[Thing | None] = list(before.things)
        marks = list(before.marks)
        view = before.view
        untouched = set(range(len(things)))
        changes: list[Change] = []
        for change_type in types:
            if change_type == "illumination":
                word = "out" if view.brightness > LAMP_ON else "on"
                view = self.lit(view, word)
                change = Change(change_type, word=word)
            elif change_type == "viewpoint":
                word = str(pick(rng, (*MOVES, *ZOOMS)))
                view = self.moved(view, word)
                change = Change(change_type, word=word)
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
        """Return the mark that an object leaves when it is removed."""
        return Mark(thing.cell, thing.dx, thing.dy) if self.name == "free" else Mark(thing.cell)

    def _changed(self, rng: np.random.Generator, thing: Thing, change_type: str) -> Thing | None:
        """Apply a change type to an object. Return the new object, or None if the object disappears or is removed.

        Orientation, pose, ocr and counting change the object's state.
        """
        if change_type in ("disappearance", "removal"):
            return None
        if change_type == "substitution":
            kind = str(other(rng, KINDS, thing.kind))
            if self.name == "grid":
                return replace(sample_grid_thing(rng, thing.cell, kind), size=thing.size, dx=thing.dx, dy=thing.dy)
            state = pick(rng, STATES[kind]) if kind in STATES else None
            color = str(pick(rng, COLORS))
            texture = str(pick(rng, TEXTURES))
            return replace(thing, kind=kind, state=state, color=color, texture=texture)
        if change_type == "size":
            return replace(thing, size=str(other(rng, tuple(WIDTHS[self.name]), thing.size)))
        if change_type == "color":
            return replace(thing, color=str(other(rng, COLORS, thing.color)))
        return replace(thing, state=other(rng, STATES[thing.kind], thing.state))


LAMP_ON = 0.7  # brightness above which the lamp counts as on


def sample_types(
    rng: np.random.Generator, number: int, multi_change_share: float, deck: tuple[str, ...] = CHANGE_TYPES
) -> tuple[str, ...]:
    """Sample one to three distinct change types. The first type is taken from `deck`, by the number of the scene."""
    first = deck[number % len(deck)]
    if rng.random() >= multi_change_share:
        return (first,)
    rest = [change_type for change_type in CHANGE_TYPES if change_type != first]
    return (first, *(rest[int(k)] for k in rng.choice(len(rest), size=int(rng.integers(1, 3)), replace=False)))


# Minimum distance of a changed object's centre from the edge of the frame in both images, on the grid, in frame units
VISIBLE = 0.1


def sample_grid_thing(rng: np.random.Generator, cell: int, kind: str | None = None) -> Thing:
    """Return an object of the given kind, or of a random kind, near the centre of its cell."""
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


# The level free

TEXTURES = ("plain", "striped", "banded", "chequered", "dotted")
CLOTHS = ("weave", "checks", "planks", "dots")

THIRDS = (1 / 3, 2 / 3)
# Minimum distance of an object's centre from the borders between the thirds of the frame, in frame units
MARGIN = 0.03
EDGE = 0.1  # minimum distance of an object's centre from the edge of the frame, in frame units
SEEN = 0.5  # minimum visible share of an object's square. The form itself fills less than its square
# Minimum share of a changed object, before and after the change, that is in the frame and not covered, in both images
SEEN_CHANGED = 0.65
SEEN_STATE = 0.85  # like SEEN_CHANGED, for changes of an arrow's direction, a doll's arms, a letter or dots
# Minimum distance between added and missing objects in a pair. If they were closer, they would look like a substitution
APART = 0.2
TRIES = 60


def _freely(rng: np.random.Generator, must_hold: tuple[str, ...] = ()) -> Scene:
    """Return a scene of six to eight objects, including one of each kind in `must_hold`.

    If there is no room for an object, another scene is sampled.
    """
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
    background = str(pick(rng, BACKGROUNDS))
    cloth = str(pick(rng, CLOTHS))
    return Scene(tuple(things), tuple(marks), background, view, "free", cloth)


SEEN_SCENE = 0.6  # like SEEN, for a new scene. After the changes, objects may cover a little more of each other


def sample_free_thing(rng: np.random.Generator, view: View, kind: str | None = None) -> Thing:
    """Return an object of the given kind, or of a random kind, somewhere in the camera's frame."""
    kind = kind or str(pick(rng, KINDS))
    state = pick(rng, STATES[kind]) if kind in STATES else None
    color, size, texture = (str(pick(rng, options)) for options in (COLORS, tuple(WIDTHS["free"]), TEXTURES))
    cell, dx, dy = _spot(rng, view)
    return Thing(kind, color, size, cell, state, dx, dy, texture)


def _spot(rng: np.random.Generator, view: View) -> tuple[int, float, float]:
    """Sample a point well inside one of the nine fields of the camera's frame.

    Return its place, and its offset in x and y from the centre of the place's cell on the table.
    """
    while True:
        u, v = (float(value) for value in rng.uniform(EDGE, 1 - EDGE, 2))
        if _inside_third(u) and _inside_third(v):
            break
    cell = place_of((u, v))
    x, y = ((value - 0.5) / view.zoom + 0.5 + shift for value, shift in ((u, view.x), (v, view.y)))
    middle = cell_center(cell)
    return cell, x - middle[0], y - middle[1]


def place_of(point: tuple[float, float]) -> int:
    """Return the index into PLACES of a point in the frame."""
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
    """Return the share of an object's square that the squares of the objects above it do not cover.

    With a view, only the part inside its frame counts.
    """
    x, y = (middle + POINTS * _width(what) for middle in what.center)
    clear = np.ones((len(POINTS), len(POINTS)), dtype=bool)
    for each in above:
        middle = each.center
        half = 0.5 * _width(each)
        clear &= ~((np.abs(y - middle[1]) < half)[:, None] & (np.abs(x - middle[0]) < half)[None, :])
    if view is not None:
        u, v = view.project((x, y))
        clear &= ((v > 0) & (v < 1))[:, None] & ((u > 0) & (u < 1))[None, :]
    return int(clear.sum()) / clear.size


def are_open(things: Sequence[Thing], least: float) -> bool:
    """Return True if later objects leave at least the share `least` of every object uncovered."""
    return all(_seen(thing, things[place + 1 :]) >= least for place, thing in enumerate(things))


def _mark_is_clear(mark: Mark, things: Sequence[Thing], marks: Sequence[Mark], view: View | None = None) -> bool:
    alone = all(_distance(mark.center, each.center) > MARK_WIDTH for each in marks if each != mark)
    return alone and _seen(mark, things, view) >= SEEN_CHANGED


def _distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    return max(abs(a[0] - b[0]), abs(a[1] - b[1]))


def _is_clear(before: Scene, after: Scene, changes: list[Change]) -> bool:
    """Return True if a person can see the changes and know which object and place a reference means.

    The requirements are: Every object is partly visible in both scenes, and every mark is mostly visible. A changed
    object is mostly visible in both images, before and after the change. It does not touch an object of the same
    colour, and no other object at its place has the same name. Unless the camera moved, it is in the same third of both
    frames. Added and missing objects are not close to each other.
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
    """Return True if an object is visible in both frames, unique at its place, and touches no object of its colour."""
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

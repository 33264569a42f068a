"""Sample and change the scenes of MiniChange. `render.py` paints the scenes, `language.py` describes them in words.

A scene consists of objects on a table, a lamp and a camera. It also has a distractor: the same objects, seen after a
small movement of camera and light that does not count as a change. Coordinates are in frame units: the camera at rest
sees [0, 1] x [0, 1], with x to the right and y down.

OmniDiff's twelve change types on the level `grid`:

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

On the level `free`, there are six to eight objects anywhere in the frame, which may overlap and have three sizes and
several textures.

Places have the same nine names as on the grid. An object is "at the top" if its centre is in that third of the frame of
the image before; several objects may share a place. The number of different pixels does not distinguish a change from a
distractor: from one image to the next the camera shifts by up to 5 % of the frame and zooms by up to 5 %, the light
changes by up to 10 %, and the lamp turns by up to 23 degrees. A movement of the camera that a reference mentions is
more than four times as far. After a reference says that the lamp went out, less than two thirds of the light remain.

Everything that a reference mentions is visible and distinguishable in both images: see `_free_changes_are_clear`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
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
# Width of an object of each size, in frame units, by level
WIDTHS: dict[str, dict[str, float]] = {
    "grid": {"small": 0.185, "large": 0.285},
    "free": {"small": 0.16, "medium": 0.23, "large": 0.32},
}

MARK_WIDTH = 0.17
SIZES = tuple(WIDTHS["grid"])
# The states of the kinds of objects that have a state
STATES: dict[str, tuple] = {
    "arrow": ("up", "right", "down", "left"),  # direction
    "doll": ("down", "up", "waving"),  # arms
    "sign": tuple("AEKS2479"),
    "die": (2, 3, 4, 5, 6),  # number of dots
}

PLACE_NAMES = (
    *("at the top left", "at the top", "at the top right"),
    *("at the left", "in the centre", "at the right"),
    *("at the bottom left", "at the bottom", "at the bottom right"),
)
BACKGROUNDS = ("linen", "sand", "slate", "sage")
# Camera movements that a reference mentions: direction in x and y, or zoom factor
MOVE_DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
ZOOM_FACTORS = {"in": 1.4, "out": 0.72}
FULL_BRIGHTNESS = 1.0  # brightness of a new scene whose lamp is on
LAMP_THRESHOLD = 0.7  # the lamp counts as on if the brightness is above this value


def cell_center(cell: int, dx: float = 0.0, dy: float = 0.0) -> tuple[float, float]:
    """Return the centre of a cell in the 3 x 3 grid, or a point at an offset from it, in frame units."""
    return 0.5 + 0.3 * (cell % 3 - 1) + dx, 0.5 + 0.3 * (cell // 3 - 1) + dy


@dataclass(frozen=True)
class Thing:
    """An object on the table. Captions never mention its texture.

    cell: the object's place, as an index into PLACE_NAMES.
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


def name_thing(thing: Thing) -> str:
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
    brightness: float = FULL_BRIGHTNESS
    lamp: float = -2.2
    noise: float = 0.0

    def project(self, point: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the position in this camera's frame of a point in the scene, or of arrays of points."""
        return (point[0] - self.x - 0.5) * self.zoom + 0.5, (point[1] - self.y - 0.5) * self.zoom + 0.5

    def unproject(self, point: tuple[float, float]) -> tuple[float, float]:
        """Return the point in the scene that this camera sees at a position in its frame."""
        return (point[0] - 0.5) / self.zoom + 0.5 + self.x, (point[1] - 0.5) / self.zoom + 0.5 + self.y


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
    before, after: the object before and after the change, or None if the scene does not contain it.
    word: what happened to the camera ("left", "in", ...) or lamp ("on", "out"); empty for a change of an object.
    """

    type: str
    before: Thing | None = None
    after: Thing | None = None
    word: str = ""

    @property
    def order(self) -> tuple[int, float]:
        """Sort key: the camera comes first, then the lamp, then objects by place and from left to right in a place."""
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
    def require_number_per_split(cls, scenes: dict[str, int]) -> dict[str, int]:
        """Check that every split has a number of scenes.

        Raises:
            ValueFault: a split is missing or unknown, a number is negative, or all numbers are 0.
        """
        if set(scenes) != set(SPLITS) or min(scenes.values()) < 0 or not any(scenes.values()):
            raise ValueFault("datasets.no_number_of_scenes", names=list(SPLITS))
        return scenes


def pick(rng: np.random.Generator, options: tuple | list) -> Any:
    """Return a random option. All options are equally likely."""
    return options[int(rng.integers(len(options)))]


def pick_other(rng: np.random.Generator, options: tuple, current: object) -> Any:
    """Return a random option that differs from the current one."""
    return pick(rng, [option for option in options if option != current])


def sample_state(rng: np.random.Generator, kind: str) -> object:
    """Return a random state for an object of this kind. Return None without a random draw if the kind has no states."""
    return pick(rng, STATES[kind]) if kind in STATES else None


# Change types that apply only to one kind of object
REQUIRED_KINDS = {"orientation": "arrow", "pose": "doll", "ocr": "sign", "counting": "die"}


class SampledScenes(NamedTuple):
    """A scene, its changed copy and its distractor, with the changes in the order in which references mention them.

    The distractor is the scene before the changes, seen with slightly different camera and light.
    """

    before: Scene
    after: Scene
    distractor: Scene
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class SceneSampler:
    """Samples and changes the scenes of one level.

    On the level `free`, zoom and brightness change relative to their current values.

    level: the level.
    sample_scene: samples a scene, given the kinds of objects that the scene must contain.
    are_clear: returns True if a person can see the changes between two scenes and can tell which objects they concern.
    move_distance: distance of a camera movement that a reference mentions, in frame units.
    dark_brightness: brightness after the lamp went out. On the level `free`, the brightness is multiplied by it.
    attempts_per_scene: number of attempts to change a scene before another scene is sampled.

    Small movements, which references never mention, have these limits:

    max_shift: maximum shift of the camera in x, and in y, in frame units.
    min_shift_distance, max_shift_distance: minimum and maximum length of this shift, in frame units.
    max_zoom_jitter, max_brightness_jitter: maximum relative change of zoom and brightness.
    max_lamp_turn: maximum turn of the lamp in radians.
    """

    level: Level
    sample_scene: Callable[..., Scene]
    are_clear: Callable[[Scene, Scene, list[Change]], bool]
    move_distance: float
    dark_brightness: float
    attempts_per_scene: int
    max_shift: float
    min_shift_distance: float
    max_shift_distance: float
    max_zoom_jitter: float
    max_brightness_jitter: float
    max_lamp_turn: float

    def sample_pair(self, rng: np.random.Generator, types: tuple[str, ...]) -> SampledScenes:
        """Sample a scene, apply a change of each of these types to it, and sample its distractor."""
        required_kinds = tuple(REQUIRED_KINDS[change_type] for change_type in types if change_type in REQUIRED_KINDS)
        while True:
            before = self.sample_scene(rng, required_kinds)
            for _ in range(self.attempts_per_scene):
                change_result = self._apply_changes(rng, before, types)
                if change_result is None:
                    continue
                after, changes = change_result
                distractor = replace(before, view=self.jitter(rng, before.view))
                ordered_changes = tuple(sorted(changes, key=lambda change: change.order))
                return SampledScenes(before, after, distractor, ordered_changes)

    def move_camera(self, view: View, word: str) -> View:
        """Return the view after a camera movement: "left", "right", "up", "down", "in" or "out"."""
        if word in ZOOM_FACTORS:
            zoom = ZOOM_FACTORS[word]
            if self.level == "free":
                zoom = view.zoom * zoom
            return replace(view, zoom=zoom)
        x, y = MOVE_DIRECTIONS[word]
        return replace(view, x=view.x + self.move_distance * x, y=view.y + self.move_distance * y)

    def switch_lamp(self, view: View, word: str) -> View:
        """Return the view after the lamp was switched "on" or "out"."""
        if self.level == "free":
            factor = self.dark_brightness if word == "out" else 1 / self.dark_brightness
            return replace(view, brightness=view.brightness * factor)
        brightness = self.dark_brightness if word == "out" else FULL_BRIGHTNESS
        return replace(view, brightness=brightness)

    def jitter(self, rng: np.random.Generator, view: View) -> View:
        """Return the view with small changes of camera, light and noise, which references never mention."""
        while True:
            x, y = (float(value) for value in rng.uniform(-self.max_shift, self.max_shift, 2))
            if self.min_shift_distance**2 <= x * x + y * y <= self.max_shift_distance**2:
                break
        zoom_factor = float(rng.uniform(1 - self.max_zoom_jitter, 1 + self.max_zoom_jitter))
        brightness_factor = float(rng.uniform(1 - self.max_brightness_jitter, 1 + self.max_brightness_jitter))
        return replace(
            view,
            x=view.x + x,
            y=view.y + y,
            zoom=view.zoom * zoom_factor,
            brightness=view.brightness * brightness_factor,
            lamp=view.lamp + float(rng.uniform(-self.max_lamp_turn, self.max_lamp_turn)),
            noise=_sample_noise(rng),
        )

    def sort_by_place(self, scene: Scene) -> Scene:
        """Return a scene with its objects and marks sorted by place, as on the level `grid`.

        On the level `free`, return the scene as it is, because the order of its objects decides which one covers which.
        """
        if self.level == "free":
            return scene
        things = sorted(scene.things, key=lambda thing: thing.cell)
        return replace(scene, things=tuple(things), marks=tuple(sorted(scene.marks)))

    def _apply_changes(
        self, rng: np.random.Generator, before: Scene, types: tuple[str, ...]
    ) -> tuple[Scene, list[Change]] | None:
        """Apply each change type to a different object, or to the camera or lamp. Return the new scene and the changes.

        Return None if no object fits a change type, or if the changes would not be clear.
        """
        # Objects keep their index, so an object that disappears becomes None until all changes are applied
        things: list[Thing | None] = list(before.things)
        marks = list(before.marks)
        view = before.view
        unchanged_indices = set(range(len(things)))
        changes: list[Change] = []
        for change_type in types:
            if change_type == "illumination":
                word = "out" if view.brightness > LAMP_THRESHOLD else "on"
                view = self.switch_lamp(view, word)
                change = Change(change_type, word=word)
            elif change_type == "viewpoint":
                word = str(pick(rng, (*MOVE_DIRECTIONS, *ZOOM_FACTORS)))
                view = self.move_camera(view, word)
                change = Change(change_type, word=word)
            elif change_type == "addition":
                new_thing = self._sample_new_thing(rng, before.view, things, marks, changes)
                change = Change(change_type, after=new_thing)
                things.append(new_thing)
            else:
                required_kind = REQUIRED_KINDS.get(change_type)
                candidates = [
                    index for index in sorted(unchanged_indices) if required_kind in (None, before.things[index].kind)
                ]
                if not candidates:
                    return None
                index = pick(rng, candidates)
                unchanged_indices.discard(index)
                old_thing = before.things[index]
                things[index] = self._change_thing(rng, old_thing, change_type)
                change = Change(change_type, before=old_thing, after=things[index])
                if change_type == "removal":
                    marks.append(self.mark_of(old_thing))
            changes.append(change)
        things_after = tuple(thing for thing in things if thing is not None)
        unsorted_scene = replace(before, things=things_after, marks=tuple(marks), view=self.jitter(rng, view))
        after = self.sort_by_place(unsorted_scene)
        return (after, changes) if self.are_clear(before, after, changes) else None

    def _sample_new_thing(
        self, rng: np.random.Generator, view: View, things: list[Thing | None], marks: list[Mark], changes: list[Change]
    ) -> Thing:
        """Sample an object to add. On the grid, its cell was empty before the changes and is still empty."""
        if self.level == "free":
            return sample_free_thing(rng, view)
        occupants = [*things, *marks, *(change.before for change in changes)]
        occupied_cells = {occupant.cell for occupant in occupants if occupant is not None}
        empty_cells = [cell for cell in range(9) if cell not in occupied_cells]
        return sample_grid_thing(rng, pick(rng, empty_cells))

    def mark_of(self, thing: Thing) -> Mark:
        """Return the mark that an object leaves when it is removed."""
        return Mark(thing.cell, thing.dx, thing.dy) if self.level == "free" else Mark(thing.cell)

    def _change_thing(self, rng: np.random.Generator, thing: Thing, change_type: str) -> Thing | None:
        """Apply a change type to an object. Return the new object, or None if the object disappears or is removed.

        Orientation, pose, ocr and counting change the object's state.
        """
        if change_type in ("disappearance", "removal"):
            return None
        if change_type == "substitution":
            return self._substitute_thing(rng, thing)
        if change_type == "size":
            return replace(thing, size=str(pick_other(rng, tuple(WIDTHS[self.level]), thing.size)))
        if change_type == "color":
            return replace(thing, color=str(pick_other(rng, COLORS, thing.color)))
        return replace(thing, state=pick_other(rng, STATES[thing.kind], thing.state))

    def _substitute_thing(self, rng: np.random.Generator, thing: Thing) -> Thing:
        """Return an object of another kind and any colour, with the size and position of the old object."""
        kind = str(pick_other(rng, KINDS, thing.kind))
        if self.level == "grid":
            substitute = sample_grid_thing(rng, thing.cell, kind)
            return replace(substitute, size=thing.size, dx=thing.dx, dy=thing.dy)
        state = sample_state(rng, kind)
        color = str(pick(rng, COLORS))
        texture = str(pick(rng, TEXTURES))
        return replace(thing, kind=kind, state=state, color=color, texture=texture)


def sample_types(
    rng: np.random.Generator, number: int, multi_change_share: float, deck: tuple[str, ...] = CHANGE_TYPES
) -> tuple[str, ...]:
    """Sample one to three distinct change types. The first type is taken from `deck`, by the number of the scene."""
    main_type = deck[number % len(deck)]
    if rng.random() >= multi_change_share:
        return (main_type,)
    other_types = [change_type for change_type in CHANGE_TYPES if change_type != main_type]
    additional_count = int(rng.integers(1, 3))
    indices = rng.choice(len(other_types), size=additional_count, replace=False)
    return (main_type, *(other_types[int(index)] for index in indices))


# The level `grid`

# Minimum distance of a changed object's centre from the edge of the frame in both images, in frame units
MIN_EDGE_DISTANCE_GRID = 0.1


def sample_grid_thing(rng: np.random.Generator, cell: int, kind: str | None = None) -> Thing:
    """Return an object of the given kind, or of a random kind, near the centre of its cell."""
    kind = kind or str(pick(rng, KINDS))
    state = sample_state(rng, kind)
    dx, dy = rng.uniform(-0.025, 0.025, 2)
    color = str(pick(rng, COLORS))
    size = str(pick(rng, tuple(WIDTHS["grid"])))
    return Thing(kind, color, size, cell, state, float(dx), float(dy))


def _sample_grid_scene(rng: np.random.Generator, required_kinds: tuple[str, ...] = ()) -> Scene:
    """Return a scene of three to five objects in different cells, including one of each required kind."""
    sampler = SAMPLERS["grid"]
    count = max(int(rng.integers(3, 6)), len(required_kinds))
    cells = rng.permutation(9)
    kinds = [*required_kinds] + [None] * (count - len(required_kinds))
    things = [sample_grid_thing(rng, int(cell), kind) for cell, kind in zip(cells, kinds, strict=False)]
    things.sort(key=lambda thing: thing.cell)
    has_mark = rng.random() < 0.2
    marks = (Mark(int(cells[count])),) if has_mark else ()
    brightness = sampler.dark_brightness if rng.random() < 0.1 else FULL_BRIGHTNESS
    view = sampler.jitter(rng, View(brightness=brightness))
    background = str(pick(rng, BACKGROUNDS))
    return Scene(tuple(things), marks, background, view)


def _changed_things_are_in_frame(before: Scene, after: Scene, changes: list[Change]) -> bool:
    """Return True if the centres of all changed objects are well inside the frame of both images."""
    for change in changes:
        thing = change.before or change.after
        if thing is None:
            continue
        for view in (before.view, after.view):
            point = view.project(thing.center)
            if not all(MIN_EDGE_DISTANCE_GRID < value < 1 - MIN_EDGE_DISTANCE_GRID for value in point):
                return False
    return True


# The level `free`

TEXTURES = ("plain", "striped", "banded", "chequered", "dotted")
CLOTHS = ("weave", "checks", "planks", "dots")

THIRD_BORDERS = (1 / 3, 2 / 3)
# Minimum distance of an object's centre from the borders between the thirds of the frame, in frame units
MIN_BORDER_DISTANCE = 0.03
MIN_EDGE_DISTANCE_FREE = 0.1  # minimum distance of an object's centre from the edge of the frame, in frame units
# Minimum visible share of an object's square. The form itself fills less than its square
MIN_VISIBLE_SHARE = 0.5
# The same for a new scene. After the changes, objects may cover a little more of each other
MIN_VISIBLE_SHARE_NEW_SCENE = 0.6
# Minimum share of a changed object, before and after the change, that is in the frame and not covered, in both images
MIN_VISIBLE_SHARE_CHANGED = 0.65
# The same for a change of an arrow's direction, a doll's arms, a letter or dots
MIN_VISIBLE_SHARE_STATE = 0.85
# Minimum distance between added and missing objects in a pair. If they were closer, they would look like a substitution
MIN_DISTANCE_ADDED_MISSING = 0.2
PLACEMENT_ATTEMPTS = 60  # number of attempts to find room for an object before another scene is sampled


def _sample_free_scene(rng: np.random.Generator, required_kinds: tuple[str, ...] = ()) -> Scene:
    """Return a scene of six to eight objects, including one of each required kind.

    If there is no room for an object, another scene is sampled.
    """
    view = View(
        x=float(rng.uniform(-0.02, 0.02)),
        y=float(rng.uniform(-0.02, 0.02)),
        zoom=float(rng.uniform(0.97, 1.03)),
        brightness=_sample_free_brightness(rng),
        lamp=float(rng.uniform(-3.0, -0.1)),
        noise=_sample_noise(rng),
    )
    kinds = [*required_kinds] + [None] * (pick(rng, (6, 7, 8)) - len(required_kinds))
    things: list[Thing] = []
    for index in rng.permutation(len(kinds)):
        for _ in range(PLACEMENT_ATTEMPTS):
            thing = sample_free_thing(rng, view, kinds[index])
            if are_uncovered([*things, thing], MIN_VISIBLE_SHARE_NEW_SCENE):
                break
        else:
            return _sample_free_scene(rng, required_kinds)
        things.append(thing)
    marks: list[Mark] = []
    mark_count = int(rng.integers(1, 3)) if rng.random() < 0.4 else 0
    for _ in range(mark_count):
        mark = Mark(*_sample_position(rng, view))
        if _mark_is_clear(mark, things, marks):
            marks.append(mark)
    background = str(pick(rng, BACKGROUNDS))
    cloth = str(pick(rng, CLOTHS))
    return Scene(tuple(things), tuple(marks), background, view, "free", cloth)


def _sample_free_brightness(rng: np.random.Generator) -> float:
    """Return the brightness of a new scene. In a tenth of the scenes, the lamp is out."""
    brightness = SAMPLERS["free"].dark_brightness if rng.random() < 0.1 else FULL_BRIGHTNESS
    return brightness * float(rng.uniform(0.95, 1.05))


def sample_free_thing(rng: np.random.Generator, view: View, kind: str | None = None) -> Thing:
    """Return an object of the given kind, or of a random kind, somewhere in the camera's frame."""
    kind = kind or str(pick(rng, KINDS))
    state = sample_state(rng, kind)
    color = str(pick(rng, COLORS))
    size = str(pick(rng, tuple(WIDTHS["free"])))
    texture = str(pick(rng, TEXTURES))
    cell, dx, dy = _sample_position(rng, view)
    return Thing(kind, color, size, cell, state, dx, dy, texture)


def _sample_position(rng: np.random.Generator, view: View) -> tuple[int, float, float]:
    """Sample a point well inside one of the nine fields of the camera's frame.

    Return its place, and its offset in x and y from the centre of the place's cell on the table.
    """
    while True:
        u, v = (float(value) for value in rng.uniform(MIN_EDGE_DISTANCE_FREE, 1 - MIN_EDGE_DISTANCE_FREE, 2))
        if _is_inside_third(u) and _is_inside_third(v):
            break
    cell = place_of_point((u, v))
    x, y = view.unproject((u, v))
    center = cell_center(cell)
    return cell, x - center[0], y - center[1]


def place_of_point(point: tuple[float, float]) -> int:
    """Return the index into PLACE_NAMES of a point in the frame."""
    x, y = point
    column = sum(x > border for border in THIRD_BORDERS)
    row = sum(y > border for border in THIRD_BORDERS)
    return column + 3 * row


def _is_inside_third(value: float, min_distance: float = MIN_BORDER_DISTANCE) -> bool:
    """Return True if a coordinate in the frame is far enough from the borders between the thirds."""
    return all(abs(value - border) >= min_distance for border in THIRD_BORDERS)


def _sample_noise(rng: np.random.Generator) -> float:
    """Return the noise of an image: none in most cases, otherwise 0.5 to 2 grey levels."""
    return float(rng.uniform(0.5, 2.0)) if rng.random() < 0.3 else 0.0


def _width(item: Thing | Mark) -> float:
    """Return the width of an object or mark on the level `free`, in frame units."""
    return MARK_WIDTH if isinstance(item, Mark) else WIDTHS["free"][item.size]


# Offsets from the centre of a square, relative to its width. The visible share is measured at 12 x 12 points
POINT_OFFSETS = (np.arange(12) + 0.5) / 12 - 0.5


def _visible_share(item: Thing | Mark, covering_things: Iterable[Thing], view: View | None = None) -> float:
    """Return the share of an item's square that the squares of the covering objects leave visible.

    With a view, only the part inside its frame counts.
    """
    x, y = (center + POINT_OFFSETS * _width(item) for center in item.center)
    visible = np.ones((len(POINT_OFFSETS), len(POINT_OFFSETS)), dtype=bool)
    for thing in covering_things:
        center_x, center_y = thing.center
        half_width = 0.5 * _width(thing)
        covered_rows = np.abs(y - center_y) < half_width
        covered_columns = np.abs(x - center_x) < half_width
        visible &= ~(covered_rows[:, None] & covered_columns[None, :])
    if view is not None:
        u, v = view.project((x, y))
        rows_in_frame = (v > 0) & (v < 1)
        columns_in_frame = (u > 0) & (u < 1)
        visible &= rows_in_frame[:, None] & columns_in_frame[None, :]
    return int(visible.sum()) / visible.size


def are_uncovered(things: Sequence[Thing], min_share: float) -> bool:
    """Return True if later objects leave at least the share `min_share` of every object uncovered."""
    return all(_visible_share(thing, things[index + 1 :]) >= min_share for index, thing in enumerate(things))


def _mark_is_clear(mark: Mark, things: Sequence[Thing], marks: Sequence[Mark], view: View | None = None) -> bool:
    """Return True if a mark overlaps no other mark and is mostly visible."""
    other_marks = [other_mark for other_mark in marks if other_mark != mark]
    if any(_distance(mark.center, other_mark.center) <= MARK_WIDTH for other_mark in other_marks):
        return False
    return _visible_share(mark, things, view) >= MIN_VISIBLE_SHARE_CHANGED


def _distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Return the larger of the distances in x and y. Squares overlap if it is below their mean width."""
    return max(abs(a[0] - b[0]), abs(a[1] - b[1]))


def _free_changes_are_clear(before: Scene, after: Scene, changes: list[Change]) -> bool:
    """Return True if a person can see the changes and know which object and place a reference means.

    The requirements are: Every object is partly visible in both scenes, and every mark is mostly visible. A changed
    object is mostly visible in both images, before and after the change. It does not touch an object of the same
    colour, and no other object at its place has the same name. Unless the camera moved, it is in the same third of both
    frames. Added and missing objects are not close to each other.
    """
    if not all(are_uncovered(scene.things, MIN_VISIBLE_SHARE) for scene in (before, after)):
        return False
    camera_moved = any(change.type == "viewpoint" for change in changes)
    views_of_place = [before.view] if camera_moved else [before.view, after.view]
    for change in changes:
        min_share = MIN_VISIBLE_SHARE_STATE if change.type in REQUIRED_KINDS else MIN_VISIBLE_SHARE_CHANGED
        for scene, thing in ((before, change.before), (after, change.after)):
            if thing is None:
                continue
            if not _stands_out(scene, thing, min_share, (before.view, after.view)):
                return False
            if not all(_is_at_its_place(thing, view) for view in views_of_place):
                return False
    missing_things = [change.before for change in changes if change.before and not change.after]
    added_things = [change.after for change in changes if change.after and not change.before]
    for missing_thing, added_thing in product(missing_things, added_things):
        if _distance(missing_thing.center, added_thing.center) < MIN_DISTANCE_ADDED_MISSING:
            return False
    for mark in after.marks:
        view = None if mark in before.marks else after.view
        if not _mark_is_clear(mark, after.things, after.marks, view):
            return False
    return True


def _is_at_its_place(thing: Thing, view: View) -> bool:
    """Return True if an object appears at the place that captions mention, and not near the border of that place."""
    point = view.project(thing.center)
    is_inside = all(_is_inside_third(value, MIN_BORDER_DISTANCE / 2) for value in point)
    return is_inside and place_of_point(point) == thing.cell


def _stands_out(scene: Scene, thing: Thing, min_share: float, views: tuple[View, View]) -> bool:
    """Return True if an object is visible in both frames, unique at its place, and touches no object of its colour."""
    for other_thing in scene.things:
        if other_thing == thing:
            continue
        if other_thing.cell == thing.cell and name_thing(other_thing) == name_thing(thing):
            return False
        touches = _distance(other_thing.center, thing.center) < (_width(other_thing) + _width(thing)) / 2
        if touches and other_thing.color == thing.color:
            return False
    covering_things = scene.things[scene.things.index(thing) + 1 :]
    return all(_visible_share(thing, covering_things, view) >= min_share for view in views)


SAMPLERS: dict[str, SceneSampler] = {
    "grid": SceneSampler(
        level="grid",
        sample_scene=_sample_grid_scene,
        are_clear=_changed_things_are_in_frame,
        move_distance=0.2,
        dark_brightness=0.42,
        attempts_per_scene=1,
        max_shift=0.01,
        min_shift_distance=0,
        max_shift_distance=0.0142,
        max_zoom_jitter=0.015,
        max_brightness_jitter=0.04,
        max_lamp_turn=0.3,
    ),
    "free": SceneSampler(
        level="free",
        sample_scene=_sample_free_scene,
        are_clear=_free_changes_are_clear,
        move_distance=0.22,
        dark_brightness=0.58,
        attempts_per_scene=4,
        max_shift=0.05,
        min_shift_distance=0.02,
        max_shift_distance=0.05,
        max_zoom_jitter=0.05,
        max_brightness_jitter=0.1,
        max_lamp_turn=0.4,
    ),
}

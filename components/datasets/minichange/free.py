"""The level *free*: six to eight objects anywhere in the frame, overlapping, of three sizes and several textures.

Places have the same nine words as on the grid: an object is "at the top" whose centre is in that third of the frame as
the camera before sees it, and several may be. What tells a change from a distractor is not how many pixels differ: from
one image to the next the camera shifts by up to 5 % of the frame and zooms by up to 5 %, the light changes by up to
10 % and the lamp goes round by up to 23 degrees. A camera that is said to have moved goes more than four times as far,
and a lamp that went out leaves less than two thirds of the light.

What a reference speaks of can be seen and told apart in both images: see `_clear`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from m3diff.datasets.minichange.change import NEEDS, changed_looks
from m3diff.datasets.minichange.language import name
from m3diff.datasets.minichange.scene import (
    BACKGROUNDS,
    COLORS,
    KINDS,
    LIT,
    MARK_WIDTH,
    STATES,
    WIDTHS,
    ZOOMS,
    Change,
    Mark,
    Scene,
    Thing,
    View,
    cell_center,
    other,
    pick,
)

SIZES = tuple(WIDTHS["free"])
TEXTURES = ("plain", "striped", "banded", "chequered", "dotted")
CLOTHS = ("weave", "checks", "planks", "dots")
OBJECTS = (6, 7, 8)
DARK = 0.58  # brightness when the lamp is out
CAMERA_MOVES = {"left": (-0.22, 0.0), "right": (0.22, 0.0), "up": (0.0, -0.22), "down": (0.0, 0.22)}

THIRDS = (1 / 3, 2 / 3)
MARGIN = 0.03
"""The centre of what stands in a scene keeps this distance from the borders of the frame's thirds, in frame units."""
EDGE = 0.1
"""And this from the frame's border."""
SEEN = 0.5
"""Share of any object that nothing covers; of its square, of which a form fills less."""
SEEN_CHANGED = 0.65
"""Share of a changed object, and of its counterpart, that is in the frame and that nothing covers, in both images."""
SEEN_STATE = 0.85
"""The same where an arrow's direction, a doll's arms, a letter or dots change."""
APART = 0.2
"""Of what came and what went in one pair, the centres are this far apart: else they would be a substitution."""
TRIES = 60


class Square(NamedTuple):
    """Where something is on the table: centre and width, in frame units."""

    x: float
    y: float
    width: float


def sample_scene(rng: np.random.Generator, must_hold: tuple[str, ...] = ()) -> Scene:
    """A scene of six to eight things, `must_hold` naming the kinds that have to be among them."""
    while True:
        scene = _sample_scene(rng, must_hold)
        if scene is not None:
            return scene


def _sample_scene(rng: np.random.Generator, must_hold: tuple[str, ...]) -> Scene | None:
    """None where a thing found no room."""
    view = View(
        x=float(rng.uniform(-0.02, 0.02)),
        y=float(rng.uniform(-0.02, 0.02)),
        zoom=float(rng.uniform(0.97, 1.03)),
        brightness=(DARK if rng.random() < 0.1 else LIT) * float(rng.uniform(0.95, 1.05)),
        lamp=float(rng.uniform(-3.0, -0.1)),
        noise=_noise(rng),
    )
    kinds = list(must_hold) + [None] * (pick(rng, OBJECTS) - len(must_hold))
    things: list[Thing] = []
    for place in rng.permutation(len(kinds)):
        for _ in range(TRIES):
            thing = sample_thing(rng, view, kinds[place])
            squares = [square(each) for each in (*things, thing)]
            if all(seen(each, squares[k + 1 :]) >= SEEN_SCENE for k, each in enumerate(squares)):
                break
        else:
            return None
        things.append(thing)
    marks: list[Mark] = []
    for _ in range(int(rng.integers(1, 3)) if rng.random() < 0.4 else 0):
        mark = Mark(*_spot(rng, view))
        if _mark_is_clear(mark, things, marks):
            marks.append(mark)
    background, cloth = str(pick(rng, BACKGROUNDS)), str(pick(rng, CLOTHS))
    return Scene(tuple(things), tuple(marks), background, view, "free", cloth)


SEEN_SCENE = 0.6
"""As SEEN, where a scene is first laid out: changes may cover a little more."""


def sample_thing(rng: np.random.Generator, view: View, kind: str | None = None) -> Thing:
    """An object of this kind, or of any, somewhere in this camera's frame."""
    kind = kind or str(pick(rng, KINDS))
    state = pick(rng, STATES[kind]) if kind in STATES else None
    color, size, texture = (str(pick(rng, options)) for options in (COLORS, SIZES, TEXTURES))
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


def jitter(rng: np.random.Generator, view: View) -> View:
    """The shift of camera, light and noise that is a distractor and never mentioned."""
    while True:
        x, y = (float(value) for value in rng.uniform(-0.05, 0.05, 2))
        if 0.02**2 <= x * x + y * y <= 0.05**2:
            break
    return replace(
        view,
        x=view.x + x,
        y=view.y + y,
        zoom=view.zoom * float(rng.uniform(0.95, 1.05)),
        brightness=view.brightness * float(rng.uniform(0.9, 1.1)),
        lamp=view.lamp + float(rng.uniform(-0.4, 0.4)),
        noise=_noise(rng),
    )


def _noise(rng: np.random.Generator) -> float:
    return float(rng.uniform(0.5, 2.0)) if rng.random() < 0.3 else 0.0


def square(of: Thing | Mark) -> Square:
    """Where a thing or a mark is, and how wide."""
    return Square(*of.center, MARK_WIDTH if isinstance(of, Mark) else WIDTHS["free"][of.size])


POINTS = (np.arange(12) + 0.5) / 12 - 0.5


def seen(what: Square, above: Iterable[Square], view: View | None = None) -> float:
    """Share of a square that none of the squares above it covers and, where a view is given, that is in its frame."""
    x, y = what.x + POINTS * what.width, what.y + POINTS * what.width
    clear = np.ones((len(POINTS), len(POINTS)), dtype=bool)
    for each in above:
        clear &= ~((np.abs(y - each.y) < 0.5 * each.width)[:, None] & (np.abs(x - each.x) < 0.5 * each.width)[None, :])
    if view is not None:
        u, v = (x - view.x - 0.5) * view.zoom + 0.5, (y - view.y - 0.5) * view.zoom + 0.5
        clear &= ((v > 0) & (v < 1))[:, None] & ((u > 0) & (u < 1))[None, :]
    return int(clear.sum()) / clear.size


def _mark_is_clear(mark: Mark, things: Sequence[Thing], marks: Sequence[Mark], view: View | None = None) -> bool:
    """No other mark is near, and things leave most of it open."""
    alone = all(_distance(mark.center, each.center) > MARK_WIDTH for each in marks if each != mark)
    return alone and seen(square(mark), map(square, things), view) >= SEEN_CHANGED


def _distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    return max(abs(a[0] - b[0]), abs(a[1] - b[1]))


def sample_pair(rng: np.random.Generator, types: tuple[str, ...]) -> tuple[Scene, Scene, Scene, tuple[Change, ...]]:
    """Sample a scene and change it.

    Returns: the scene before, the scene after the changes of `types`, the distractor (the scene before under another
    camera and light), and the changes in the order in which references name them.
    """
    while True:
        before = sample_scene(rng, tuple(NEEDS[t] for t in types if t in NEEDS))
        for _ in range(4):
            changed = _apply(rng, before, types)
            if changed is not None:
                after, changes = changed
                distractor = replace(before, view=jitter(rng, before.view))
                return before, after, distractor, tuple(sorted(changes, key=lambda change: change.order))


def _apply(rng: np.random.Generator, before: Scene, types: tuple[str, ...]) -> tuple[Scene, list[Change]] | None:
    """Apply the types to things of their own; None where not all of it can be seen or told apart."""
    things: list[Thing | None] = list(before.things)
    marks, view = list(before.marks), before.view
    untouched = set(range(len(things)))
    changes: list[Change] = []
    for change_type in types:
        if change_type in ("viewpoint", "illumination"):
            view, change = _change_view(rng, view, change_type)
        elif change_type == "addition":
            change = Change(change_type, after=sample_thing(rng, before.view))
            things.append(change.after)
        else:
            fitting = [
                k for k in sorted(untouched) if before.things[k].kind == NEEDS.get(change_type, before.things[k].kind)
            ]
            if not fitting:
                return None
            chosen = pick(rng, fitting)
            untouched.discard(chosen)
            change = _change_thing(rng, before.things[chosen], change_type)
            things[chosen] = change.after
        if change_type == "removal":
            assert change.before is not None
            marks.append(Mark(change.before.cell, change.before.dx, change.before.dy))
        changes.append(change)
    left = tuple(thing for thing in things if thing is not None)
    after = replace(before, things=left, marks=tuple(marks), view=jitter(rng, view))
    return (after, changes) if _clear(before, after, changes) else None


def _change_view(rng: np.random.Generator, view: View, change_type: str) -> tuple[View, Change]:
    if change_type == "illumination":
        word, factor = ("out", DARK) if view.brightness > 0.7 else ("on", 1 / DARK)
        return replace(view, brightness=view.brightness * factor), Change(change_type, word=word)
    word = str(pick(rng, (*CAMERA_MOVES, *ZOOMS)))
    if word in ZOOMS:
        return replace(view, zoom=view.zoom * ZOOMS[word]), Change(change_type, word=word)
    x, y = CAMERA_MOVES[word]
    return replace(view, x=view.x + x, y=view.y + y), Change(change_type, word=word)


def _change_thing(rng: np.random.Generator, thing: Thing, change_type: str) -> Change:
    if change_type in ("disappearance", "removal"):
        return Change(change_type, before=thing)
    if change_type == "substitution":
        kind = str(other(rng, KINDS, thing.kind))
        state = pick(rng, STATES[kind]) if kind in STATES else None
        color, texture = str(pick(rng, COLORS)), str(pick(rng, TEXTURES))
        after = replace(thing, kind=kind, state=state, color=color, texture=texture)
    else:
        after = changed_looks(rng, thing, change_type, SIZES)
    return Change(change_type, before=thing, after=after)


def _clear(before: Scene, after: Scene, changes: list[Change]) -> bool:
    """Can a person see what changed, and know which object and place a reference means?

    Every object is partly open in both scenes and every mark mostly. A changed object and its counterpart are mostly
    open and in the frame in both images, touch nothing of their own colour, have a name that no other object at their
    place has, and are in the same third of both frames, unless the camera is said to have moved. What came and what
    went are apart.
    """
    for scene in (before, after):
        squares = [square(thing) for thing in scene.things]
        if any(seen(each, squares[k + 1 :]) < SEEN for k, each in enumerate(squares)):
            return False
    moved = any(change.type == "viewpoint" for change in changes)
    views = [before.view] if moved else [before.view, after.view]
    for change in changes:
        sides = [(scene, thing) for scene, thing in ((before, change.before), (after, change.after)) if thing]
        least = SEEN_STATE if change.type in NEEDS else SEEN_CHANGED
        if not all(_stands_out(scene, thing, least, (before.view, after.view)) for scene, thing in sides):
            return False
        if not all(_same_third(thing, view) for _, thing in sides for view in views):
            return False
    gone = [change.before.center for change in changes if change.before and not change.after]
    came = [change.after.center for change in changes if change.after and not change.before]
    if any(_distance(a, b) < APART for a in gone for b in came):
        return False
    new = {mark for mark in after.marks if mark not in before.marks}
    return all(
        _mark_is_clear(mark, after.things, after.marks, after.view if mark in new else None) for mark in after.marks
    )


def _stands_out(scene: Scene, thing: Thing, least: float, views: tuple[View, View]) -> bool:
    """Open enough in both frames, touching nothing of its colour, and the only one of its name at its place."""
    others = [each for each in scene.things if each != thing]
    if any((each.cell, name(each)) == (thing.cell, name(thing)) for each in others):
        return False
    if any(_overlap(square(each), square(thing)) for each in others if each.color == thing.color):
        return False
    above = [square(each) for each in scene.things[scene.things.index(thing) + 1 :]]
    return all(seen(square(thing), above, view) >= least for view in views)


def _overlap(a: Square, b: Square) -> bool:
    return _distance(a[:2], b[:2]) < (a.width + b.width) / 2


def _same_third(thing: Thing, view: View) -> bool:
    """In the third of this frame that its place names, and not on its border."""
    point = view.project(thing.center)
    return place_of(point) == thing.cell and all(_inside_third(value, MARGIN / 2) for value in point)

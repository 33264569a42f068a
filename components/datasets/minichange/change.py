"""The twelve change types of OmniDiff as edits of a MiniChange scene of the level *grid*; `free.py` has the other.

How each looks:

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
"""

from dataclasses import replace

import numpy as np

from m3diff.datasets.minichange.scene import (
    CAMERA_MOVES,
    COLORS,
    DARK,
    KINDS,
    LIT,
    SIZES,
    STATES,
    ZOOMS,
    Change,
    Mark,
    Scene,
    Thing,
    View,
    jitter,
    other,
    pick,
    sample_scene,
    sample_thing,
)
from m3diff.records.schemas import CHANGE_TYPES

NEEDS = {"orientation": "arrow", "pose": "doll", "ocr": "sign", "counting": "die"}
"""Types that need an object of a certain kind in the scene."""

VISIBLE = 0.1
"""A changed object's centre keeps this distance from the frame's border in both images, in frame units."""


def sample_types(
    rng: np.random.Generator, number: int, multi_change_share: float, deck: tuple[str, ...] = CHANGE_TYPES
) -> tuple[str, ...]:
    """One to three distinct change types; the first runs through `deck`, by number."""
    first = deck[number % len(deck)]
    if rng.random() >= multi_change_share:
        return (first,)
    rest = [change_type for change_type in CHANGE_TYPES if change_type != first]
    extra = rng.choice(len(rest), size=int(rng.integers(1, 3)), replace=False)
    return (first, *(rest[int(k)] for k in extra))


def sample_pair(rng: np.random.Generator, types: tuple[str, ...]) -> tuple[Scene, Scene, Scene, tuple[Change, ...]]:
    """Sample a scene and change it.

    Returns: the scene before, the scene after the changes of `types`, the distractor (the scene before under a
    slightly other camera and light), and the changes in the order in which references name them.
    """
    while True:
        before = sample_scene(rng, tuple(NEEDS[t] for t in types if t in NEEDS))
        changed = _apply(rng, before, types)
        if changed is not None:
            after, changes = changed
            distractor = replace(before, view=jitter(rng, replace(before.view, noise=0.0)))
            return before, after, distractor, tuple(sorted(changes, key=lambda change: change.order))


def _apply(rng: np.random.Generator, before: Scene, types: tuple[str, ...]) -> tuple[Scene, list[Change]] | None:
    """Apply the types one after another to things not yet touched; None where the scene offers no room."""
    things, marks, view = (
        {thing.cell: thing for thing in before.things},
        {mark.cell for mark in before.marks},
        before.view,
    )
    untouched = set(things)
    changes: list[Change] = []
    for change_type in types:
        if change_type in ("viewpoint", "illumination"):
            view, change = _change_view(rng, view, change_type)
        elif change_type == "addition":
            empty = [
                cell for cell in range(9) if cell not in things and cell not in marks and cell not in _gone(changes)
            ]
            change = Change(change_type, after=sample_thing(rng, pick(rng, empty)))
        else:
            kind = NEEDS.get(change_type)
            cells = [cell for cell in sorted(untouched) if kind is None or things[cell].kind == kind]
            if not cells:
                return None
            change = _change_thing(rng, things[pick(rng, cells)], change_type)
        changes.append(change)
        _settle(change, things, marks, untouched)
    after = replace(
        before,
        things=tuple(things[cell] for cell in sorted(things)),
        marks=tuple(Mark(cell) for cell in sorted(marks)),
        view=jitter(rng, replace(view, noise=0.0)),
    )
    return (after, changes) if all(_in_frame(change, before.view, after.view) for change in changes) else None


def _gone(changes: list[Change]) -> set[int]:
    return {change.before.cell for change in changes if change.before is not None}


def _settle(change: Change, things: dict[int, Thing], marks: set[int], untouched: set[int]) -> None:
    if change.before is not None:
        untouched.discard(change.before.cell)
        del things[change.before.cell]
    if change.after is not None:
        things[change.after.cell] = change.after
    if change.type == "removal":
        assert change.before is not None
        marks.add(change.before.cell)


def _change_view(rng: np.random.Generator, view: View, change_type: str) -> tuple[View, Change]:
    if change_type == "illumination":
        word, brightness = ("out", DARK) if view.brightness > 0.7 else ("on", LIT)
        return replace(view, brightness=brightness), Change(change_type, word=word)
    word = str(pick(rng, (*CAMERA_MOVES, *ZOOMS)))
    if word in ZOOMS:
        return replace(view, zoom=ZOOMS[word]), Change(change_type, word=word)
    x, y = CAMERA_MOVES[word]
    return replace(view, x=view.x + x, y=view.y + y), Change(change_type, word=word)


def _change_thing(rng: np.random.Generator, thing: Thing, change_type: str) -> Change:
    if change_type in ("disappearance", "removal"):
        return Change(change_type, before=thing)
    if change_type == "substitution":
        kind = str(other(rng, KINDS, thing.kind))
        after = replace(sample_thing(rng, thing.cell, kind), size=thing.size, dx=thing.dx, dy=thing.dy)
    else:
        after = changed_looks(rng, thing, change_type, SIZES)
    return Change(change_type, before=thing, after=after)


def changed_looks(rng: np.random.Generator, thing: Thing, change_type: str, sizes: tuple[str, ...]) -> Thing:
    """The object in another size or colour; by any other type, in another state of its kind."""
    if change_type == "size":
        return replace(thing, size=str(other(rng, sizes, thing.size)))
    if change_type == "color":
        return replace(thing, color=str(other(rng, COLORS, thing.color)))
    return replace(thing, state=other(rng, STATES[thing.kind], thing.state))


def _in_frame(change: Change, *views: View) -> bool:
    thing = change.before or change.after
    if thing is None:
        return True
    return all(VISIBLE < value < 1 - VISIBLE for view in views for value in view.project(thing.center))

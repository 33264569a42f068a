"""A parser for MiniChange's sentences, and an editor that carries out instructions on its scenes.

MiniChange is a dataset of drawn scenes whose sentences follow a small grammar. An instruction such as a caption is
parsed into changes, and a description of an image into objects. `DrawnEditor` applies the changes to the scene that an
image shows and draws the changed scene. The camera, the light and the noise vary slightly, as in every pair of
MiniChange. A seed determines what an instruction does not specify, such as the exact position of a new object or the
direction of a new arrow.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from m3diff.datasets.minichange import FILE, language, read_scenes
from m3diff.datasets.minichange.render import render
from m3diff.datasets.minichange.scene import (
    COLORS,
    KINDS,
    LAMP_ON,
    LEVELS,
    PLACES,
    SEEN,
    STATES,
    WIDTHS,
    Change,
    Scene,
    Thing,
    View,
    are_open,
    name,
    pick,
    sample_free_thing,
    sample_grid_thing,
)
from m3diff.records.files import sha256

SIZES = tuple(WIDTHS["free"])  # sizes in free scenes, which include the sizes in grid scenes
WORDINGS = 5  # number of wordings that MiniChange has for each change
PLACEMENT_TRIES = 400  # number of attempts to find room for a new object

# The objects in an image, without their exact positions, and the grid cells that contain a mark. A mark is what a
# removed object leaves behind
Description = tuple[list[Thing], list[int]]


def _any(words: Iterable[object]) -> str:
    return "|".join(sorted(map(str, words), key=len, reverse=True))


ITEM = re.compile(
    f"(?P<place>{_any(PLACES)}) a (?:mark|(?P<name>(?:{_any(SIZES)}) (?:{_any(COLORS)}) (?:{_any(KINDS)}))"
    f"(?: pointing (?P<direction>{_any(STATES['arrow'])})| with arms (?P<arms>up|down)|(?P<waving> waving)"
    f"| reading (?P<glyph>{_any(STATES['sign'])})| with (?P<count>{_any(language.NUMBERS)}) dots)?)"
)


def read_description(text: str) -> Description | None:
    """Return the objects and marks that a text by `describe_scene` lists, or None if the text has another form."""
    things = []
    marks = []
    for item in text.split(", "):
        match = ITEM.fullmatch(item)
        if match is None:
            return None
        words = match.groupdict()
        cell = PLACES.index(words["place"])
        if words["name"]:
            things.append(_thing(words["name"], cell, _state(words)))
        else:
            marks.append(cell)
    return things, marks


def _thing(text: str, cell: int, state: object = None) -> Thing:
    """Return the object with a name such as "small red arrow"."""
    size, color, kind = text.split()
    return Thing(kind, color, size, cell, state)


def _state(words: dict[str, Any]) -> object:
    """Return the state of an object from the matched groups of ITEM, or None if the text does not mention a state."""
    if words["waving"]:
        return "waving"
    if words["count"]:
        return language.NUMBERS.index(words["count"])
    return words["direction"] or words["arms"] or words["glyph"]


PATTERNS = [(clause["type"], re.compile(clause["pattern"])) for clause in language.grammar(SIZES)["clauses"]]


def read_instruction(text: str) -> tuple[Change, ...] | None:
    """Return the changes in a caption of MiniChange.

    Return None if a clause is not in MiniChange's vocabulary, or if the caption says that nothing changed. If a clause
    does not mention an object's state before the change, such as the direction of an arrow, that state is None.
    """
    changes = []
    for clause in text.split(language.SEPARATOR):
        change = _read_clause(clause)
        if change is None:
            return None
        changes.append(change)
    return tuple(changes)


def _read_clause(clause: str) -> Change | None:
    """Return the change that a clause of a caption describes, or None if no pattern matches."""
    for kind, pattern in PATTERNS:
        match = pattern.fullmatch(clause)
        if match is not None:
            return _change(kind, match.groupdict())
    return None


def _change(kind: str, words: dict[str, Any]) -> Change:
    """Return the change of a given type from the matched groups of its pattern."""
    if kind in ("viewpoint", "illumination"):
        phrases = language.CAMERA if kind == "viewpoint" else language.LAMP
        return Change(kind, word=next(word for word, phrase in phrases.items() if phrase == words["after"]))
    thing = _thing(words["object"], PLACES.index(words["place"]))
    if kind == "addition":
        return Change(kind, after=thing)
    if kind in ("disappearance", "removal"):
        return Change(kind, before=thing)
    if kind == "substitution":
        return Change(kind, before=thing, after=_thing(words["after"], thing.cell))
    if kind in ("size", "color"):
        return Change(kind, before=thing, after=replace(thing, **{kind: words["after"]}))
    before = replace(thing, state=_value(kind, words.get("before")))
    return Change(kind, before=before, after=replace(thing, state=_value(kind, words["after"])))


def _value(kind: str, word: str | None) -> object:
    """Convert the word for a state in a caption to the state of an object, such as a number of dots."""
    if word is None:
        return None
    if kind == "pose":
        return next(pose for pose, phrase in language.ARMS.items() if phrase == word)
    return language.NUMBERS.index(word) if kind == "counting" else word


def paraphrase(text: str, caption: str | None = None) -> list[str]:
    """Return MiniChange's other wordings of an instruction. Wordings that mention an unknown fact are left out.

    The list is empty if the instruction is not in MiniChange's vocabulary.

    Args:
        text: the instruction.
        caption: description of the before image by `describe_scene`. It supplies facts that are missing from the
            instruction, such as the direction in which an arrow pointed.
    """
    changes = read_instruction(text)
    if not changes:
        return []
    description = read_description(caption) if caption else None
    things = description[0] if description else []
    changes = tuple(_with_old_state(change, things) for change in changes)
    # Some templates mention the old state of an object, which may be unknown. The old size and colour are always known,
    # because they are part of the object's name
    without_state = [
        change
        for change in changes
        if change.type not in ("size", "color") and getattr(change.before, "state", None) is None
    ]
    wordings = []
    for number, wording in enumerate(language.references(changes, WORDINGS)):
        needs_state = any("{old_" in language.TEMPLATES[change.type][number] for change in without_state)
        if wording != text and not needs_state:
            wordings.append(wording)
    return wordings


def _with_old_state(change: Change, things: Sequence[Thing]) -> Change:
    """Return the change with the old state of the changed object, if it can be determined.

    This requires that exactly one of the objects has the same name and cell. Otherwise, return the change as it is.
    """
    before = change.before
    if before is None or before.state is not None:
        return change
    matching = [thing for thing in things if thing.cell == before.cell and name(thing) == name(before)]
    if len(matching) != 1:
        return change
    return replace(change, before=replace(before, state=matching[0].state))


def difference(first: str, second: str, count: int) -> list[str]:
    """Return sentences that describe how the second description differs from the first.

    There are at most `count` and at most WORDINGS sentences. The list is empty if the descriptions do not differ, if
    there are more than three changes, or if MiniChange cannot describe a change.
    """
    before = read_description(first)
    after = read_description(second)
    changes = changes_between(before, after) if before and after else None
    return language.references(changes, min(count, WORDINGS)) if changes else []


def changes_between(before: Description, after: Description) -> tuple[Change, ...] | None:
    """Return the changes between two descriptions, in the order in which references list them.

    Return None if MiniChange cannot describe a change, or if there are more than three changes, which is the maximum in
    its pairs.
    """
    old_things, old_marks = before
    new_things, new_marks = after
    vanished = list((Counter(old_things) - Counter(new_things)).elements())
    appeared = list((Counter(new_things) - Counter(old_things)).elements())
    unexplained_marks = [cell for cell in new_marks if cell not in old_marks]
    if not set(old_marks) <= {*new_marks, *(thing.cell for thing in appeared)}:
        return None
    changes: list[Change] = []
    for thing in vanished:
        in_same_cell = [other for other in appeared if other.cell == thing.cell]
        if in_same_cell:
            changed = _first_change(thing, in_same_cell)
            if changed is None:
                return None
            changes.append(changed)
            appeared.remove(changed.after)  # type: ignore[arg-type]  # a change of an object always has `after`
        elif thing.cell in unexplained_marks:
            unexplained_marks.remove(thing.cell)
            changes.append(Change("removal", before=thing))
        else:
            changes.append(Change("disappearance", before=thing))
    changes += [Change("addition", after=thing) for thing in appeared]
    if unexplained_marks or len(changes) > 3:
        return None
    return tuple(sorted(changes, key=lambda change: change.order))


def _first_change(before: Thing, candidates: Sequence[Thing]) -> Change | None:
    """Return the change from an object to the first candidate that MiniChange can describe, or None."""
    for after in candidates:
        change = _change_of_thing(before, after)
        if change is not None:
            return change
    return None


def _change_of_thing(before: Thing, after: Thing) -> Change | None:
    """Return the change that turns one object into another, or None if MiniChange cannot describe the change."""
    if before.kind != after.kind:
        return Change("substitution", before=before, after=after)
    differs = [field for field in ("size", "color", "state") if getattr(before, field) != getattr(after, field)]
    if len(differs) != 1:
        return None
    states = {"arrow": "orientation", "doll": "pose", "sign": "ocr", "die": "counting"}
    return Change(states[before.kind] if differs == ["state"] else differs[0], before=before, after=after)


class DrawnEditor:
    """Edits images of a MiniChange dataset on disk by drawing changed scenes.

    `identity` is the digest of the dataset's file of scenes.

    Raises:
        DataError: the folder does not contain scenes.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.scenes = read_scenes(root)
        self.identity = sha256(root / FILE)

    def edit(self, image: Path, instruction: str, seed: int) -> Image.Image | None:
        """Return the edited image, or None if the instruction cannot be carried out."""
        scene = self.scenes.of.get(image.relative_to(self.root).as_posix())
        rng = np.random.default_rng(seed)
        edited = carry_out(scene, instruction, rng) if scene else None
        return render(edited, self.scenes.image_px, rng, self.scenes.domain) if edited else None


def carry_out(scene: Scene, instruction: str, rng: np.random.Generator) -> Scene | None:
    """Apply the changes in an instruction to a scene and return the new scene, with slightly changed camera and light.

    Return None if the instruction is not in MiniChange's vocabulary or cannot be carried out. It cannot be carried out
    if the named cell does not contain exactly one object with the given name, if the lamp is already in the requested
    state, or if there is no room for a new object.
    """
    after: Scene | None = scene
    for change in read_instruction(instruction) or ():
        after = _changed(after, change, scene.view, rng) if after else None
    if after is None or after is scene:
        return None
    return replace(after, view=LEVELS[scene.level].jitter(rng, after.view))


def _changed(scene: Scene, change: Change, seen_by: View, rng: np.random.Generator) -> Scene | None:
    """Return the scene after one change, or None if the change cannot be carried out."""
    level = LEVELS[scene.level]
    if change.type == "viewpoint":
        return replace(scene, view=level.moved(scene.view, change.word))
    if change.type == "illumination":
        is_on = scene.view.brightness > LAMP_ON
        if is_on == (change.word == "on"):
            return None
        return replace(scene, view=level.lit(scene.view, change.word))
    if change.before is None:
        assert change.after is not None
        new_thing = _new_thing(scene, change.after, seen_by, rng)
        if new_thing is None:
            return None
        return level.in_order(replace(scene, things=(*scene.things, new_thing)))
    number = _number_of_thing(scene, change.before)
    if number is None:
        return None
    thing = scene.things[number]
    things = list(scene.things)
    marks = scene.marks
    target = change.after
    if target is None:
        del things[number]
        if change.type == "removal":  # unlike an object that disappears, a removed object leaves a mark
            marks += (level.mark(thing),)
        return replace(scene, things=tuple(things), marks=marks)
    changed = replace(thing, kind=target.kind, color=target.color, size=target.size)
    if change.type == "substitution":
        changed = replace(changed, state=pick(rng, STATES[target.kind]) if target.kind in STATES else None)
    elif change.type not in ("size", "color"):
        changed = replace(changed, state=target.state)
    things[number] = changed
    return replace(scene, things=tuple(things))


def _number_of_thing(scene: Scene, described: Thing) -> int | None:
    """Return the index of the only object that matches the description, or None if zero or several objects match."""
    matching = [
        number
        for number, thing in enumerate(scene.things)
        if thing.cell == described.cell and name(thing) == name(described) and described.state in (None, thing.state)
    ]
    return matching[0] if len(matching) == 1 else None


def _new_thing(scene: Scene, described: Thing, seen_by: View, rng: np.random.Generator) -> Thing | None:
    """Return a new object that matches the description and fits into the scene, or None if its cell has no room."""
    looks: dict[str, Any] = {"color": described.color, "size": described.size}
    if scene.level == "grid":
        occupied_cells = {thing.cell for thing in scene.things} | {mark.cell for mark in scene.marks}
        thing = replace(sample_grid_thing(rng, described.cell, described.kind), **looks)
        return None if described.cell in occupied_cells else thing
    for _ in range(PLACEMENT_TRIES):
        thing = replace(sample_free_thing(rng, seen_by, described.kind), **looks)
        if thing.cell == described.cell and are_open([*scene.things, thing], SEEN):
            return thing
    return None

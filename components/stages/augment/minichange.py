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

from m3diff.datasets.minichange import SCENES_FILE, language, read_scenes
from m3diff.datasets.minichange.render import render
from m3diff.datasets.minichange.scene import (
    COLORS,
    KINDS,
    LAMP_THRESHOLD,
    MIN_VISIBLE_SHARE,
    PLACE_NAMES,
    SAMPLERS,
    STATES,
    WIDTHS,
    Change,
    Scene,
    Thing,
    View,
    are_uncovered,
    name_thing,
    sample_free_thing,
    sample_grid_thing,
    sample_state,
)
from m3diff.records.files import sha256

SIZES = tuple(WIDTHS["free"])  # sizes in free scenes, which include the sizes in grid scenes
WORDINGS = 5  # number of wordings that MiniChange has for each change
PLACEMENT_ATTEMPTS = 400  # number of attempts to find room for a new object

# The objects in an image, without their exact positions, and the grid cells that contain a mark. A mark is what a
# removed object leaves behind
Description = tuple[list[Thing], list[int]]


def _alternatives(words: Iterable[object]) -> str:
    """Return a pattern that matches one of the words. "at the top left" comes before "at the top", as it is longer."""
    return "|".join(sorted(map(str, words), key=len, reverse=True))


NAME_PATTERN = f"(?:{_alternatives(SIZES)}) (?:{_alternatives(COLORS)}) (?:{_alternatives(KINDS)})"
STATE_PATTERN = (
    f" pointing (?P<direction>{_alternatives(STATES['arrow'])})| with arms (?P<arms>up|down)|(?P<waving> waving)"
    f"| reading (?P<glyph>{_alternatives(STATES['sign'])})| with (?P<count>{_alternatives(language.NUMBERS)}) dots"
)
# An object or mark in a description
ITEM = re.compile(f"(?P<place>{_alternatives(PLACE_NAMES)}) a (?:mark|(?P<name>{NAME_PATTERN})(?:{STATE_PATTERN})?)")


def read_description(text: str) -> Description | None:
    """Return the objects and marks that a text by `describe_scene` lists, or None if the text has another form."""
    things = []
    marks = []
    for item in text.split(", "):
        match = ITEM.fullmatch(item)
        if match is None:
            return None
        words = match.groupdict()
        cell = PLACE_NAMES.index(words["place"])
        if words["name"]:
            things.append(_read_thing(words["name"], cell, _read_state(words)))
        else:
            marks.append(cell)
    return things, marks


def _read_thing(text: str, cell: int, state: object = None) -> Thing:
    """Return the object with a name such as "small red arrow"."""
    size, color, kind = text.split()
    return Thing(kind, color, size, cell, state)


def _read_state(words: dict[str, Any]) -> object:
    """Return the state of an object from the matched groups of ITEM, or None if the text does not mention a state."""
    if words["waving"]:
        return "waving"
    if words["count"]:
        return language.NUMBERS.index(words["count"])
    return words["direction"] or words["arms"] or words["glyph"]


PATTERNS = [(clause["type"], re.compile(clause["pattern"])) for clause in language.grammar(SIZES)["clauses"]]


def read_instruction(text: str) -> tuple[Change, ...] | None:
    """Return the changes that an instruction asks for. Instructions have the form of MiniChange's captions.

    Return None if a clause is not in MiniChange's vocabulary, or if the text says that nothing changes. If a clause
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
    """Return the change that a clause of an instruction describes, or None if no pattern matches."""
    for kind, pattern in PATTERNS:
        match = pattern.fullmatch(clause)
        if match is not None:
            return _build_change(kind, match.groupdict())
    return None


def _build_change(kind: str, words: dict[str, Any]) -> Change:
    """Return the change of a given type from the matched groups of its pattern."""
    if kind == "viewpoint":
        return Change(kind, word=_key_of(language.CAMERA, words["after"]))
    if kind == "illumination":
        return Change(kind, word=_key_of(language.LAMP, words["after"]))
    thing = _read_thing(words["object"], PLACE_NAMES.index(words["place"]))
    if kind == "addition":
        return Change(kind, after=thing)
    if kind in ("disappearance", "removal"):
        return Change(kind, before=thing)
    if kind == "substitution":
        return Change(kind, before=thing, after=_read_thing(words["after"], thing.cell))
    if kind in ("size", "color"):
        return Change(kind, before=thing, after=replace(thing, **{kind: words["after"]}))
    before = replace(thing, state=_convert_state(kind, words.get("before")))
    return Change(kind, before=before, after=replace(thing, state=_convert_state(kind, words["after"])))


def _convert_state(kind: str, word: str | None) -> object:
    """Convert the word for a state in an instruction to the state of an object, such as a number of dots."""
    if word is None:
        return None
    if kind == "pose":
        return _key_of(language.ARMS, word)
    return language.NUMBERS.index(word) if kind == "counting" else word


def _key_of(phrases: dict[str, str], phrase: str) -> str:
    """Return the key of a phrase, such as "in" for "zoomed in"."""
    return next(key for key, value in phrases.items() if value == phrase)


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
    changes = tuple(_add_old_state(change, things) for change in changes)
    wordings = []
    for number, wording in enumerate(language.references(changes, WORDINGS)):
        needs_unknown_state = any(_needs_unknown_state(change, number) for change in changes)
        if wording != text and not needs_unknown_state:
            wordings.append(wording)
    return wordings


def _needs_unknown_state(change: Change, number: int) -> bool:
    """Return True if a template of the change mentions the old state of an object, and this state is unknown.

    The old size and colour are always known, because they are part of the object's name.
    """
    if change.type in ("size", "color"):
        return False
    has_old_state = change.before is not None and change.before.state is not None
    return not has_old_state and "{old_" in language.TEMPLATES[change.type][number]


def _add_old_state(change: Change, things: Sequence[Thing]) -> Change:
    """Return the change with the old state of the changed object, if it can be determined.

    This requires that exactly one of the objects has the same name and cell. Otherwise, return the change as it is.
    """
    before = change.before
    if before is None or before.state is not None:
        return change
    matching_things = [
        thing for thing in things if thing.cell == before.cell and name_thing(thing) == name_thing(before)
    ]
    if len(matching_things) != 1:
        return change
    return replace(change, before=replace(before, state=matching_things[0].state))


def describe_difference(text_before: str, text_after: str, count: int) -> list[str]:
    """Return sentences that describe the changes between two descriptions of images by `describe_scene`.

    There are at most `count` and at most WORDINGS sentences. The list is empty if the descriptions do not differ, if
    there are more than three changes, or if MiniChange cannot describe a change.
    """
    before = read_description(text_before)
    after = read_description(text_after)
    changes = changes_between(before, after) if before and after else None
    return language.references(changes, min(count, WORDINGS)) if changes else []


def changes_between(before: Description, after: Description) -> tuple[Change, ...] | None:
    """Return the changes between two descriptions, in the order in which references list them.

    Return None if MiniChange cannot describe a change, or if there are more than three changes, which is the maximum in
    its pairs.
    """
    old_things, old_marks = before
    new_things, new_marks = after
    missing_things = list((Counter(old_things) - Counter(new_things)).elements())
    additional_things = list((Counter(new_things) - Counter(old_things)).elements())
    unexplained_marks = [cell for cell in new_marks if cell not in old_marks]
    # An old mark may only be missing if a new object covers it
    cells_with_mark_or_new_thing = {*new_marks, *(thing.cell for thing in additional_things)}
    if not cells_with_mark_or_new_thing.issuperset(old_marks):
        return None
    changes: list[Change] = []
    for thing in missing_things:
        candidates = [candidate for candidate in additional_things if candidate.cell == thing.cell]
        if candidates:
            change = _first_change(thing, candidates)
            if change is None:
                return None
            changes.append(change)
            additional_things.remove(change.after)  # type: ignore[arg-type]  # this change always has `after`
        elif thing.cell in unexplained_marks:
            unexplained_marks.remove(thing.cell)
            changes.append(Change("removal", before=thing))
        else:
            changes.append(Change("disappearance", before=thing))
    changes += [Change("addition", after=thing) for thing in additional_things]
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
    differing_fields = [
        field for field in ("size", "color", "state") if getattr(before, field) != getattr(after, field)
    ]
    if len(differing_fields) != 1:
        return None
    change_type = differing_fields[0]
    if change_type == "state":
        types_by_kind = {"arrow": "orientation", "doll": "pose", "sign": "ocr", "die": "counting"}
        change_type = types_by_kind[before.kind]
    return Change(change_type, before=before, after=after)


class DrawnEditor:
    """Edits images of a MiniChange dataset on disk by drawing changed scenes.

    `identity` is the digest of the dataset's file of scenes.

    Raises:
        DataError: the folder does not contain scenes.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.scenes = read_scenes(root)
        self.identity = sha256(root / SCENES_FILE)

    def edit(self, image: Path, instruction: str, seed: int) -> Image.Image | None:
        """Return the edited image, or None if the instruction cannot be carried out."""
        scene = self.scenes.scene_by_path.get(image.relative_to(self.root).as_posix())
        if scene is None:
            return None
        rng = np.random.default_rng(seed)
        edited_scene = carry_out(scene, instruction, rng)
        if edited_scene is None:
            return None
        return render(edited_scene, self.scenes.image_px, rng, self.scenes.domain)


def carry_out(scene: Scene, instruction: str, rng: np.random.Generator) -> Scene | None:
    """Apply the changes in an instruction to a scene and return the new scene, with slightly changed camera and light.

    Return None if the instruction is not in MiniChange's vocabulary or cannot be carried out. It cannot be carried out
    if the named cell does not contain exactly one object with the given name, if the lamp is already in the requested
    state, or if there is no room for a new object.
    """
    changes = read_instruction(instruction)
    if not changes:
        return None
    after = scene
    for change in changes:
        changed_scene = _apply_change(after, change, scene.view, rng)
        if changed_scene is None:
            return None
        after = changed_scene
    return replace(after, view=SAMPLERS[scene.level].jitter(rng, after.view))


def _apply_change(scene: Scene, change: Change, original_view: View, rng: np.random.Generator) -> Scene | None:
    """Return the scene after one change, or None if the change cannot be carried out.

    Args:
        scene: the scene, which may already have other changes of the instruction.
        change: the change to apply.
        original_view: camera and light before all changes, which determine the place that an instruction means.
        rng: samples what the instruction does not specify.
    """
    sampler = SAMPLERS[scene.level]
    if change.type == "viewpoint":
        return replace(scene, view=sampler.move_camera(scene.view, change.word))
    if change.type == "illumination":
        is_on = scene.view.brightness > LAMP_THRESHOLD
        if is_on == (change.word == "on"):
            return None
        return replace(scene, view=sampler.switch_lamp(scene.view, change.word))
    if change.before is None:
        assert change.after is not None
        new_thing = _place_new_thing(scene, change.after, original_view, rng)
        if new_thing is None:
            return None
        return sampler.sort_by_place(replace(scene, things=(*scene.things, new_thing)))
    index = _index_of_thing(scene, change.before)
    if index is None:
        return None
    old_thing = scene.things[index]
    things = list(scene.things)
    if change.after is not None:
        things[index] = _change_thing(old_thing, change.type, change.after, rng)
        return replace(scene, things=tuple(things))
    del things[index]
    marks = scene.marks
    if change.type == "removal":  # unlike an object that disappears, a removed object leaves a mark
        marks += (sampler.mark_of(old_thing),)
    return replace(scene, things=tuple(things), marks=marks)


def _change_thing(thing: Thing, change_type: str, described: Thing, rng: np.random.Generator) -> Thing:
    """Return the object with the kind, colour, size and state of the description. Its position does not change.

    An instruction does not mention the state of a substitute, so its state is random.
    """
    new_thing = replace(thing, kind=described.kind, color=described.color, size=described.size)
    if change_type == "substitution":
        return replace(new_thing, state=sample_state(rng, described.kind))
    if change_type in ("size", "color"):
        return new_thing
    return replace(new_thing, state=described.state)


def _index_of_thing(scene: Scene, described: Thing) -> int | None:
    """Return the index of the only object that matches the description, or None if zero or several objects match."""
    indices = [
        index
        for index, thing in enumerate(scene.things)
        if thing.cell == described.cell
        and name_thing(thing) == name_thing(described)
        and described.state in (None, thing.state)
    ]
    return indices[0] if len(indices) == 1 else None


def _place_new_thing(scene: Scene, described: Thing, view: View, rng: np.random.Generator) -> Thing | None:
    """Return a new object that matches the description and fits into the scene, or None if its cell has no room.

    On the level `free`, the cell is a third of the view's frame in both directions.
    """
    if scene.level == "grid":
        occupied_cells = {thing.cell for thing in scene.things} | {mark.cell for mark in scene.marks}
        if described.cell in occupied_cells:
            return None
        thing = sample_grid_thing(rng, described.cell, described.kind)
        return replace(thing, color=described.color, size=described.size)
    for _ in range(PLACEMENT_ATTEMPTS):
        thing = replace(sample_free_thing(rng, view, described.kind), color=described.color, size=described.size)
        if thing.cell == described.cell and are_uncovered([*scene.things, thing], MIN_VISIBLE_SHARE):
            return thing
    return None

"""MiniChange's words read back: an instruction as changes, which `DrawnEditor` carries out on the scene behind an image
and draws anew; a description as things; and what two descriptions tell.

As any photograph of the benchmark, an edit has a camera, light and noise of its own; what an instruction leaves open
(where in its place a new object is, which way a new arrow points) follows from the seed.
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

SIZES = tuple(WIDTHS["free"])  # those of both levels
WORDS = 5  # ways to say each change
TRIES = 400  # to find room for a new object


Description = tuple[list[Thing], list[int]]  # the things of an image, offsets left out, and the places of its marks


def _any(words: Iterable[object]) -> str:
    return "|".join(sorted(map(str, words), key=len, reverse=True))


ITEM = re.compile(
    f"(?P<place>{_any(PLACES)}) a (?:mark|(?P<name>(?:{_any(SIZES)}) (?:{_any(COLORS)}) (?:{_any(KINDS)}))"
    f"(?: pointing (?P<direction>{_any(STATES['arrow'])})| with arms (?P<arms>up|down)|(?P<waving> waving)"
    f"| reading (?P<glyph>{_any(STATES['sign'])})| with (?P<count>{_any(language.NUMBERS)}) dots)?)"
)


def read_description(text: str) -> Description | None:
    """A text of `describe_scene` read back; None where it is not in its words."""
    found = [ITEM.fullmatch(item) for item in text.split(", ")]
    if not all(found):
        return None
    groups = [each.groupdict() for each in found if each]
    things = [_thing(each["name"], PLACES.index(each["place"]), _state(each)) for each in groups if each["name"]]
    return things, [PLACES.index(each["place"]) for each in groups if not each["name"]]


def _thing(text: str, cell: int, state: object = None) -> Thing:
    size, color, kind = text.split()
    return Thing(kind, color, size, cell, state)


def _state(words: dict[str, Any]) -> object:
    if words["waving"]:
        return "waving"
    if words["count"]:
        return language.NUMBERS.index(words["count"])
    return words["direction"] or words["arms"] or words["glyph"]


PATTERNS = [(clause["type"], re.compile(clause["pattern"])) for clause in language.grammar(SIZES)["clauses"]]


def read_instruction(text: str) -> tuple[Change, ...] | None:
    """The changes that a caption of MiniChange names; None where a clause is not in its words or nothing changed.

    The state that an object had is None where the clause does not say it.
    """
    changes = []
    for clause in text.split(language.SEPARATOR):
        found = ((kind, pattern.fullmatch(clause)) for kind, pattern in PATTERNS)
        change = next((_change(kind, match.groupdict()) for kind, match in found if match), None)
        if change is None:
            return None
        changes.append(change)
    return tuple(changes)


def _change(kind: str, words: dict[str, Any]) -> Change:
    if kind in ("viewpoint", "illumination"):
        said = language.CAMERA if kind == "viewpoint" else language.LAMP
        return Change(kind, word=next(word for word, phrase in said.items() if phrase == words["after"]))
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
    if word is None:
        return None
    if kind == "pose":
        return next(pose for pose, phrase in language.ARMS.items() if phrase == word)
    return language.NUMBERS.index(word) if kind == "counting" else word


def paraphrase(text: str, caption: str | None = None) -> list[str]:
    """Every other wording of an instruction that its facts allow; none where it is not in MiniChange's words.

    Args:
        caption: what the image shows before, in the words of `describe_scene`: it may say what the instruction does
            not, such as where an arrow pointed.
    """
    changes = read_instruction(text) or ()
    shown = read_description(caption) if caption else None
    known = tuple(_informed(change, shown[0] if shown else ()) for change in changes)
    # templates that say what an object was need its state, which may not be known; its name holds size and colour
    stateless = [
        each for each in known if each.type not in ("size", "color") and getattr(each.before, "state", None) is None
    ]
    found = []
    for number, said in enumerate(language.references(known, WORDS) if known else []):
        if said != text and not any("{old_" in language.TEMPLATES[each.type][number] for each in stateless):
            found.append(said)
    return found


def _informed(change: Change, things: Sequence[Thing]) -> Change:
    before = change.before
    if before is None or before.state is not None:
        return change
    meant = [thing for thing in things if (thing.cell, name(thing)) == (before.cell, name(before))]
    return replace(change, before=replace(before, state=meant[0].state)) if len(meant) == 1 else change


def difference(first: str, second: str, count: int) -> list[str]:
    """The difference of the second description from the first, in so many wordings, five at most; none where there is
    none, or more than three changes, or one that MiniChange's words cannot tell."""
    before, after = read_description(first), read_description(second)
    changes = changes_between(before, after) if before and after else None
    return language.references(changes, min(count, WORDS)) if changes else []


def changes_between(before: Description, after: Description) -> tuple[Change, ...] | None:
    """The changes from one description to the other, in the order of references; None where no clause tells one."""
    (things, old_marks), (new_things, new_marks) = before, after
    gone = list((Counter(things) - Counter(new_things)).elements())
    came = list((Counter(new_things) - Counter(things)).elements())
    marks = [place for place in new_marks if place not in old_marks]
    if not set(old_marks) <= {*new_marks, *(thing.cell for thing in came)}:
        return None
    changes: list[Change] = []
    for thing in gone:
        same_place = [other for other in came if other.cell == thing.cell]
        told = [change for other in same_place if (change := _became(thing, other))]
        if same_place and not told:
            return None
        if told:
            changes.append(told[0])
            came.remove(told[0].after)  # type: ignore[arg-type]  # such a change has both
        elif thing.cell in marks:
            marks.remove(thing.cell)
            changes.append(Change("removal", before=thing))
        else:
            changes.append(Change("disappearance", before=thing))
    changes += [Change("addition", after=thing) for thing in came]
    if marks or len(changes) > 3:  # the benchmark's pairs have no more
        return None
    return tuple(sorted(changes, key=lambda change: change.order))


def _became(before: Thing, after: Thing) -> Change | None:
    if before.kind != after.kind:
        return Change("substitution", before=before, after=after)
    differs = [field for field in ("size", "color", "state") if getattr(before, field) != getattr(after, field)]
    if len(differs) != 1:
        return None
    states = {"arrow": "orientation", "doll": "pose", "sign": "ocr", "die": "counting"}
    return Change(states[before.kind] if differs == ["state"] else differs[0], before=before, after=after)


class DrawnEditor:
    """Edits the images of one MiniChange on disk.

    Raises:
        DataError: it holds no scenes.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.scenes, self.identity = root, read_scenes(root), sha256(root / FILE)

    def edit(self, image: Path, instruction: str, seed: int) -> Image.Image | None:
        scene = self.scenes.of.get(image.relative_to(self.root).as_posix())
        rng = np.random.default_rng(seed)
        edited = carry_out(scene, instruction, rng) if scene else None
        return render(edited, self.scenes.image_px, rng, self.scenes.domain) if edited else None


def carry_out(scene: Scene, instruction: str, rng: np.random.Generator) -> Scene | None:
    """The scene after the changes of an instruction, under a camera and light that have moved a little.

    None where the instruction is not in MiniChange's words, or cannot be carried out: no object, or more than one, has
    its name at its place; the lamp is so already; a new object finds no room.
    """
    after: Scene | None = scene
    for change in read_instruction(instruction) or ():
        after = _changed(after, change, scene.view, rng) if after else None
    if after is None or after is scene:
        return None
    return replace(after, view=LEVELS[scene.level].jitter(rng, after.view))


def _changed(scene: Scene, change: Change, seen_by: View, rng: np.random.Generator) -> Scene | None:
    level = LEVELS[scene.level]
    if change.type == "viewpoint":
        return replace(scene, view=level.moved(scene.view, change.word))
    if change.type == "illumination":
        is_so = (change.word == "on") == (scene.view.brightness > LAMP_ON)
        return None if is_so else replace(scene, view=level.lit(scene.view, change.word))
    if change.before is None:
        assert change.after is not None
        if (new := _new_thing(scene, change.after, seen_by, rng)) is None:
            return None
        return level.in_order(replace(scene, things=(*scene.things, new)))
    said = change.before
    meant = [
        at
        for at, thing in enumerate(scene.things)
        if (thing.cell, name(thing)) == (said.cell, name(said)) and said.state in (None, thing.state)
    ]
    if len(meant) != 1:
        return None
    thing, things, marks, wanted = scene.things[meant[0]], list(scene.things), scene.marks, change.after
    if wanted is None:
        del things[meant[0]]
        if change.type == "removal":  # it leaves a print
            marks += (level.mark(thing),)
        return replace(scene, things=tuple(things), marks=marks)
    new = replace(thing, kind=wanted.kind, color=wanted.color, size=wanted.size)
    if change.type == "substitution":
        new = replace(new, state=pick(rng, STATES[wanted.kind]) if wanted.kind in STATES else None)
    elif change.type not in ("size", "color"):
        new = replace(new, state=wanted.state)
    things[meant[0]] = new
    return replace(scene, things=tuple(things))


def _new_thing(scene: Scene, wanted: Thing, seen_by: View, rng: np.random.Generator) -> Thing | None:
    looks: dict[str, Any] = {"color": wanted.color, "size": wanted.size}
    if scene.level == "grid":
        taken = {thing.cell for thing in scene.things} | {mark.cell for mark in scene.marks}
        new = replace(sample_grid_thing(rng, wanted.cell, wanted.kind), **looks)
        return None if wanted.cell in taken else new
    for _ in range(TRIES):
        thing = replace(sample_free_thing(rng, seen_by, wanted.kind), **looks)
        if thing.cell == wanted.cell and are_open([*scene.things, thing], SEEN):
            return thing
    return None

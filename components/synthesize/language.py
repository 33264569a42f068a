"""MiniChange in words: exact captions from the scene, paraphrased, and the grammar that reads them back.

A clause has a referring part (which object, where, before the change) and a change part (from what, to what), as
OmniDiff's captions do. The grammar written beside the data is made from the same templates, so that a caption's change
type, object and place can be read without knowing how it was made.
"""

import re

from components.records import CHANGE_TYPES
from components.synthesize.scene import COLORS, DIRECTIONS, GLYPHS, KINDS, PLACES, POSES, SIZES, Change, Scene, Thing

SEPARATOR = ", and "
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
ARMS = {"up": "raised its arms", "down": "lowered its arms", "waving": "started to wave"}
CAMERA = {
    "left": "moved to the left",
    "right": "moved to the right",
    "up": "moved up",
    "down": "moved down",
    "in": "zoomed in",
    "out": "zoomed out",
}
LAMP = {"out": "went out", "on": "came on"}

NO_CHANGE = (
    "nothing changed",
    "there is no change",
    "the two scenes are the same",
    "no change was made",
    "everything stayed the same",
    "nothing is different",
)

TEMPLATES: dict[str, tuple[str, ...]] = {
    "viewpoint": (
        "the camera {camera}",
        "the viewpoint changed because the camera {camera}",
        "the camera has {camera}",
        "the scene is seen anew since the camera {camera}",
        "the view changed as the camera {camera}",
    ),
    "illumination": (
        "the lamp {lamp}",
        "the light changed because the lamp {lamp}",
        "the lamp just {lamp}",
        "the brightness changed since the lamp {lamp}",
        "the light changed as the lamp {lamp}",
    ),
    "addition": (
        "a {new} appeared {place}",
        "a {new} was added {place}",
        "there is a new {new} {place}",
        "a new {new} appeared {place}",
        "a {new} was placed {place}",
    ),
    "disappearance": (
        "the {object} {place} disappeared",
        "the {object} {place} vanished",
        "the {object} {place} is gone without a trace",
        "the {object} {place} has disappeared",
        "the {object} {place} vanished without a trace",
    ),
    "removal": (
        "the {object} {place} was removed and left a mark",
        "the {object} {place} was taken away and left a mark",
        "the {object} {place} was removed leaving a mark",
        "only a mark is left of the {object} {place}",
        "the {object} {place} has been removed and left a mark",
    ),
    "substitution": (
        "the {object} {place} was replaced by a {new}",
        "the {object} {place} became a {new}",
        "a {new} took the place of the {object} {place}",
        "the {object} {place} has been replaced by a {new}",
        "the {object} {place} was swapped for a {new}",
    ),
    "size": (
        "the {object} {place} became {size}",
        "the {object} {place} is now {size}",
        "the {object} {place} has become {size}",
        "the {object} {place} changed its size and is now {size}",
        "the {object} {place} turned {size}",
    ),
    "color": (
        "the {object} {place} turned {color}",
        "the {object} {place} became {color}",
        "the {object} {place} changed its color to {color}",
        "the {object} {place} is now {color}",
        "the {object} {place} was painted {color}",
    ),
    "orientation": (
        "the {object} {place} turned to point {direction}",
        "the {object} {place} now points {direction}",
        "the {object} {place} was rotated to point {direction}",
        "the {object} {place} was turned and now points {direction}",
        "the {object} {place} has turned to point {direction}",
    ),
    "pose": (
        "the {object} {place} {arms}",
        "the {object} {place} has {arms}",
        "the {object} {place} moved and {arms}",
        "the {object} {place} changed its pose and {arms}",
        "the {object} {place} just {arms}",
    ),
    "ocr": (
        "the text on the {object} {place} changed from {old_glyph} to {glyph}",
        "the {object} {place} now reads {glyph} instead of {old_glyph}",
        "the {object} {place} changed its text from {old_glyph} to {glyph}",
        "the text on the {object} {place} was changed from {old_glyph} to {glyph}",
        "the {object} {place} shows {glyph} instead of {old_glyph}",
    ),
    "counting": (
        "the number of dots on the {object} {place} changed from {old_count} to {count}",
        "the {object} {place} now has {count} dots instead of {old_count}",
        "the dots on the {object} {place} changed from {old_count} to {count}",
        "the number of dots on the {object} {place} went from {old_count} to {count}",
        "the {object} {place} shows {count} dots instead of {old_count}",
    ),
}
assert tuple(TEMPLATES) == CHANGE_TYPES, "a template for each change type, in the order of CHANGE_TYPES"


def name(thing: Thing) -> str:
    return f"{thing.size} {thing.color} {thing.kind}"


def captions(changes: tuple[Change, ...], count: int) -> list[str]:
    """`count` paraphrases of all the changes of a pair; with no change, `count` ways to say so."""
    if not changes:
        return list(NO_CHANGE[:count])
    return [
        SEPARATOR.join(TEMPLATES[change.type][k % 5].format_map(_slots(change)) for change in changes)
        for k in range(count)
    ]


def _slots(change: Change) -> dict[str, str]:
    before, after = change.before, change.after
    slots = {"camera": CAMERA.get(change.word, ""), "lamp": LAMP.get(change.word, "")}
    if before is not None:
        slots |= {"object": name(before), "place": PLACES[before.cell]}
        slots |= {"old_glyph": str(before.state), "old_count": _number(before.state)}
    if after is not None:
        slots |= {"new": name(after), "size": after.size, "color": after.color, "direction": str(after.state)}
        slots |= {"arms": ARMS.get(str(after.state), ""), "glyph": str(after.state), "count": _number(after.state)}
        slots.setdefault("place", PLACES[after.cell])
    return slots


def _number(state: object) -> str:
    return NUMBERS[state] if isinstance(state, int) else ""


def grammar() -> dict:
    """The captions' grammar as JSON: sentences for no change, the separator, and per template a regular expression
    with the groups `object` and `place` (for camera and lamp: the thing and what it did)."""
    thing = f"(?:{'|'.join(SIZES)}) (?:{'|'.join(COLORS)}) (?:{'|'.join(KINDS)})"
    words = {
        "{object}": f"(?P<object>{thing})",
        "{place}": f"(?P<place>{'|'.join(sorted(PLACES, key=len, reverse=True))})",
        "{size}": f"(?:{'|'.join(SIZES)})",
        "{color}": f"(?:{'|'.join(COLORS)})",
        "{direction}": f"(?:{'|'.join(DIRECTIONS)})",
        "{arms}": f"(?:{'|'.join(ARMS[pose] for pose in POSES)})",
        "{camera}": f"(?P<place>{'|'.join(CAMERA.values())})",
        "{lamp}": f"(?P<place>{'|'.join(LAMP.values())})",
    }
    words |= {slot: f"(?:{'|'.join(GLYPHS)})" for slot in ("{glyph}", "{old_glyph}")}
    words |= {slot: f"(?:{'|'.join(NUMBERS[2:])})" for slot in ("{count}", "{old_count}")}
    clauses = []
    for change_type, templates in TEMPLATES.items():
        for template in templates:
            new = f"(?P<object>{thing})" if change_type == "addition" else thing
            pattern = re.sub(r"\{\w+\}", lambda slot, n=new: words.get(slot[0], n), template)
            pattern = re.sub(r"\b(camera|lamp) (?=\(\?P<place>|has \(|just \()", r"(?P<object>\1) ", pattern)
            clauses.append({"type": change_type, "pattern": pattern})
    return {"clause_separator": SEPARATOR, "no_change": list(NO_CHANGE), "clauses": clauses}


def describe(scene: Scene) -> str:
    """The scene in words, thing by thing in reading order: what the base model learns to say of one image."""
    parts = {thing.cell: _describe_thing(thing) for thing in scene.things}
    parts |= {cell: "a mark" for cell in scene.marks}
    return ", ".join(f"{PLACES[cell]} {parts[cell]}" for cell in sorted(parts))


def _describe_thing(thing: Thing) -> str:
    state = {
        "arrow": lambda: f" pointing {thing.state}",
        "doll": lambda: " waving" if thing.state == "waving" else f" with arms {thing.state}",
        "sign": lambda: f" reading {thing.state}",
        "die": lambda: f" with {_number(thing.state)} dots",
    }.get(thing.kind, lambda: "")
    return f"a {name(thing)}{state()}"

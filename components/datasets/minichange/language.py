"""Write the references of MiniChange, each in several paraphrases, and the grammar that parses them.

As in OmniDiff's captions, a clause first refers to an object (where it is, and what it was before the change) and then
describes the change (from what to what). The grammar in the dataset is built from the same templates. It allows
programs to read the change type, object, place, and old and new value without knowing how references are written.
"""

import re

from m3diff.datasets.minichange.scene import COLORS, KINDS, PLACES, SIZES, STATES, Change, Scene, name
from m3diff.records.schemas import CHANGE_TYPES

SEPARATOR = ", and "
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
ARMS = {"down": "lowered its arms", "up": "raised its arms", "waving": "started to wave"}
CAMERA = {"left": "moved to the left", "right": "moved to the right", "up": "moved up", "down": "moved down"}
CAMERA |= {"in": "zoomed in", "out": "zoomed out"}
LAMP = {"out": "went out", "on": "came on"}
OPPOSITES = {"left": "right", "right": "left", "up": "down", "down": "up", "in": "out", "out": "in"}
# Descriptions of an object's state, by kind. A waving doll is described as "waving" instead
STATE = {"arrow": " pointing {}", "doll": " with arms {}", "sign": " reading {}", "die": " with {} dots"}

# The change type if the two images are swapped. `words` maps each movement of the camera or lamp to the opposite one. A
# removal has no inverse, because no sentence describes an object that takes the place of a mark
INVERSE: dict[str, dict] = {
    "viewpoint": {"type": "viewpoint", "words": {CAMERA[one]: CAMERA[other] for one, other in OPPOSITES.items()}},
    "illumination": {"type": "illumination", "words": {LAMP["out"]: LAMP["on"], LAMP["on"]: LAMP["out"]}},
    "addition": {"type": "disappearance"},
    "disappearance": {"type": "addition"},
    **{kind: {"type": kind} for kind in ("substitution", "size", "color", "orientation", "pose", "ocr", "counting")},
}

NO_CHANGE_SENTENCES = (
    *("nothing changed", "nothing has changed", "nothing is different", "nothing changed at all"),
    "nothing changed between the images",
)

# For each change type, the beginning of its paraphrases and their five endings, one of which may be empty. Paraphrases
# of a type begin alike and differ towards the end. A greedy decoder therefore first decides between the change types,
# and a type with one frequent wording has no advantage over a type with five equally frequent ones
WORDING = """
viewpoint | the camera {camera} | | between the images | and the view changed | so the view changed
  | before the second image

illumination | the lamp {lamp} | | between the images | and the light changed | so the light changed
  | before the second image

addition | {place} a {new} appeared | | on the table | where nothing stood | from nowhere | in the second image

disappearance | {place} the {object} disappeared
  | | without a trace | from the table | and left no mark | in the second image

removal | {place} the {object} was removed | and left a mark | leaving a mark | and only a mark is left
  | and its mark stayed | from the table and left a mark

substitution | {place} the {object} was replaced | by a {new} | with a {new} | and is now a {new}
  | by another object a {new} | in its place by a {new}

size | {place} the {object} became {size}
  | | in size | instead of {old_size} | and was {old_size} before | in the second image

color | {place} the {object} turned {color}
  | | in color | instead of {old_color} | and was {old_color} before | in the second image

orientation | {place} the {object} points {direction} | now | instead of {old_direction} | after a turn
  | and pointed {old_direction} before | in the second image

pose | {place} the {object} {arms}
  | | and changed its pose | between the images | in another pose | in the second image

ocr | {place} the {object} reads {glyph} | instead of {old_glyph} | and no longer {old_glyph}
  | where it read {old_glyph} | and read {old_glyph} before | in the second image and {old_glyph} in the first

counting | {place} the {object} shows {count} dots | instead of {old_count} | and no longer {old_count}
  | where it had {old_count} | and had {old_count} before | in the second image and {old_count} in the first
"""
TEMPLATES: dict[str, tuple[str, ...]] = {}
for block in WORDING.strip().split("\n\n"):
    kind, start, *endings = (" ".join(part.split()) for part in block.split("|"))
    TEMPLATES[kind] = tuple(f"{start} {ending}".strip() for ending in endings)
assert tuple(TEMPLATES) == CHANGE_TYPES, "a wording for each change type, in the order of CHANGE_TYPES"


def references(changes: tuple[Change, ...], count: int) -> list[str]:
    """Return `count` paraphrases of all changes of a pair. Without changes, return `count` sentences that say so."""
    if not changes:
        return list(NO_CHANGE_SENTENCES[:count])
    return [
        SEPARATOR.join(TEMPLATES[change.type][k % 5].format_map(_slots(change)) for change in changes)
        for k in range(count)
    ]


def _slots(change: Change) -> dict[str, str]:
    before = change.before
    after = change.after
    slots = {"camera": CAMERA.get(change.word, ""), "lamp": LAMP.get(change.word, "")}
    if before is not None:
        slots |= {"object": name(before), "place": PLACES[before.cell]}
        slots |= {"old_size": before.size, "old_color": before.color, "old_direction": str(before.state)}
        slots |= {"old_glyph": str(before.state), "old_count": _number(before.state)}
    if after is not None:
        slots |= {"new": name(after), "size": after.size, "color": after.color, "direction": str(after.state)}
        slots |= {"arms": ARMS.get(str(after.state), ""), "glyph": str(after.state), "count": _number(after.state)}
        slots.setdefault("place", PLACES[after.cell])
    return slots


def _number(state: object) -> str:
    return NUMBERS[state] if isinstance(state, int) else ""


def grammar(sizes: tuple[str, ...] = SIZES) -> dict:
    """Return the grammar of the references as JSON.

    It contains the sentences for no change, the separator between clauses, a regular expression per template, and the
    inverse of each change type.

    The expressions have these groups: `object` is what changed, and `place` is where it is, or what the camera or lamp
    did. `before` and `after` are the old and new value, if the template names them. If only the object's name contains
    the old value, the group `before` is inside the group `object`.

    Args:
        sizes: names of the sizes that objects have.
    """
    clauses = [
        {"type": change_type, "pattern": _pattern(change_type, template, sizes)}
        for change_type, templates in TEMPLATES.items()
        for template in templates
    ]
    no_change = list(NO_CHANGE_SENTENCES)
    return {"clause_separator": SEPARATOR, "no_change": no_change, "clauses": clauses, "inverse": INVERSE}


def _pattern(change_type: str, template: str, sizes: tuple[str, ...]) -> str:
    was = _thing(sizes)  # the object before; its name contains the old value if no other word does
    if "{old_" not in template and change_type in ("size", "color"):
        was = _thing(sizes, change_type)
    elif change_type == "substitution":
        was = f"(?P<before>{was})"
    words = {
        "{object}": f"(?P<object>{was})",
        "{new}": f"(?P<{'object' if change_type == 'addition' else 'after'}>{_thing(sizes)})",
        "{place}": f"(?P<place>{'|'.join(sorted(PLACES, key=len, reverse=True))})",
        "{camera}": f"(?P<place>(?P<after>{'|'.join(CAMERA.values())}))",
        "{lamp}": f"(?P<place>(?P<after>{'|'.join(LAMP.values())}))",
        "{arms}": f"(?P<after>{'|'.join(ARMS.values())})",
    }
    values = {"size": sizes, "color": COLORS, "direction": STATES["arrow"], "glyph": STATES["sign"]}
    values |= {"count": NUMBERS[2:]}
    for slot, known in values.items():
        words |= {f"{{{slot}}}": f"(?P<after>{'|'.join(known)})", f"{{old_{slot}}}": f"(?P<before>{'|'.join(known)})"}
    pattern = re.sub(r"\{\w+\}", lambda slot: words[slot[0]], template)
    return re.sub(r"\b(camera|lamp) (?=\(\?P<place>)", r"(?P<object>\1) ", pattern)


def _thing(sizes: tuple[str, ...], before: str = "") -> str:
    """Return a pattern for an object's size, colour and kind.

    Args:
        before: the part of the name that becomes the group `before`; empty if there is no such group.
    """
    parts = {"size": sizes, "color": COLORS, "kind": KINDS}
    return " ".join(f"({'?P<before>' if part == before else '?:'}{'|'.join(known)})" for part, known in parts.items())


def describe_scene(scene: Scene) -> str:
    """Describe a scene object by object in reading order. The base model learns these descriptions of single images."""
    return ", ".join(f"{PLACES[cell]} {text}" for cell, text in describe_things(scene))


def describe_things(scene: Scene) -> list[tuple[int, str]]:
    """Return the place and description of each object and mark in reading order, within a place from left to right."""
    told = []
    for thing in scene.things:
        state = STATE[thing.kind].format(_number(thing.state) or thing.state) if thing.kind in STATE else ""
        told.append((thing.cell, thing.center[0], f"a {name(thing)}{' waving' if thing.state == 'waving' else state}"))
    told += [(mark.cell, mark.center[0], "a mark") for mark in scene.marks]
    return [(cell, text) for cell, _, text in sorted(told)]


def describe_cells(scene: Scene) -> dict[int, str]:
    """Return a description of the objects at each place, in reading order. Empty places are left out."""
    places: dict[int, str] = {}
    for cell, text in describe_things(scene):
        places[cell] = f"{places[cell]} and {text}" if cell in places else text
    return places

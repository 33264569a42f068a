"""Write the references of MiniChange, each in several paraphrases, and the grammar that parses them.

As in OmniDiff's captions, a clause first refers to an object (where it is, and what it was before the change) and then
describes the change (from what to what). The grammar in the dataset is built from the same templates. It allows
programs to read the change type, object, place, and old and new value without knowing how references are written.
"""

import re

from m3diff.datasets.minichange.scene import COLORS, KINDS, PLACE_NAMES, SIZES, STATES, Change, Scene, Thing, name_thing
from m3diff.records.schemas import CHANGE_TYPES

SEPARATOR = ", and "
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
ARMS = {"down": "lowered its arms", "up": "raised its arms", "waving": "started to wave"}
CAMERA = {"left": "moved to the left", "right": "moved to the right", "up": "moved up", "down": "moved down"}
CAMERA |= {"in": "zoomed in", "out": "zoomed out"}
LAMP = {"out": "went out", "on": "came on"}
OPPOSITE_MOVEMENTS = {"left": "right", "right": "left", "up": "down", "down": "up", "in": "out", "out": "in"}
# Descriptions of an object's state, by kind. A waving doll is described as "waving" instead
STATE_DESCRIPTIONS = {"arrow": " pointing {}", "doll": " with arms {}", "sign": " reading {}", "die": " with {} dots"}

# The change type if the two images are swapped. `words` maps each phrase for the camera or lamp to the opposite phrase.
# A removal has no inverse, because no sentence describes an object that takes the place of a mark
INVERSE: dict[str, dict] = {
    "viewpoint": {
        "type": "viewpoint",
        "words": {CAMERA[word]: CAMERA[opposite] for word, opposite in OPPOSITE_MOVEMENTS.items()},
    },
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
    slots = [_fill_slots(change) for change in changes]
    texts = []
    for number in range(count):
        templates = [TEMPLATES[change.type][number % 5] for change in changes]
        clauses = [template.format_map(values) for template, values in zip(templates, slots, strict=True)]
        texts.append(SEPARATOR.join(clauses))
    return texts


def _fill_slots(change: Change) -> dict[str, str]:
    """Return the words of a change for the slots of the templates, such as `object` and `old_color`."""
    before = change.before
    after = change.after
    slots = {"camera": CAMERA.get(change.word, ""), "lamp": LAMP.get(change.word, "")}
    if before is not None:
        slots |= {"object": name_thing(before), "place": PLACE_NAMES[before.cell]}
        slots |= {"old_size": before.size, "old_color": before.color, "old_direction": str(before.state)}
        slots |= {"old_glyph": str(before.state), "old_count": _number_word(before.state)}
    if after is not None:
        slots |= {"new": name_thing(after), "size": after.size, "color": after.color, "direction": str(after.state)}
        slots |= {"arms": ARMS.get(str(after.state), ""), "glyph": str(after.state), "count": _number_word(after.state)}
        slots.setdefault("place", PLACE_NAMES[after.cell])
    return slots


def _number_word(state: object) -> str:
    """Return the number of dots on a die as a word, or an empty string for the state of another object."""
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
    clauses = []
    for change_type, templates in TEMPLATES.items():
        for template in templates:
            clauses.append({"type": change_type, "pattern": _clause_pattern(change_type, template, sizes)})
    no_change = list(NO_CHANGE_SENTENCES)
    return {"clause_separator": SEPARATOR, "no_change": no_change, "clauses": clauses, "inverse": INVERSE}


def _clause_pattern(change_type: str, template: str, sizes: tuple[str, ...]) -> str:
    """Return the regular expression that matches the clauses of a template. `grammar` describes its groups."""
    new_thing = _thing_pattern(sizes)
    old_thing = new_thing
    if "{old_" not in template and change_type in ("size", "color"):
        # Only the name of the object contains the old value
        old_thing = _thing_pattern(sizes, change_type)
    elif change_type == "substitution":
        old_thing = f"(?P<before>{old_thing})"
    slot_patterns = {
        "object": f"(?P<object>{old_thing})",
        "new": f"(?P<{'object' if change_type == 'addition' else 'after'}>{new_thing})",
        "place": f"(?P<place>{'|'.join(sorted(PLACE_NAMES, key=len, reverse=True))})",
        "camera": f"(?P<place>(?P<after>{'|'.join(CAMERA.values())}))",
        "lamp": f"(?P<place>(?P<after>{'|'.join(LAMP.values())}))",
        "arms": f"(?P<after>{'|'.join(ARMS.values())})",
    }
    values = {
        "size": sizes,
        "color": COLORS,
        "direction": STATES["arrow"],
        "glyph": STATES["sign"],
        "count": NUMBERS[2:],
    }
    for slot, words in values.items():
        slot_patterns[slot] = f"(?P<after>{'|'.join(words)})"
        slot_patterns[f"old_{slot}"] = f"(?P<before>{'|'.join(words)})"
    pattern = re.sub(r"\{(\w+)\}", lambda match: slot_patterns[match[1]], template)
    # The object of a change of the view or the light is the word "camera" or "lamp", which is no slot
    return re.sub(r"\b(camera|lamp) (?=\(\?P<place>)", r"(?P<object>\1) ", pattern)


def _thing_pattern(sizes: tuple[str, ...], before: str = "") -> str:
    """Return a pattern for an object's size, colour and kind.

    Args:
        sizes: names of the sizes that objects have.
        before: the part of the name that becomes the group `before`; empty if there is no such group.
    """
    words_of_part = {"size": sizes, "color": COLORS, "kind": KINDS}
    patterns = []
    for part, words in words_of_part.items():
        group = "?P<before>" if part == before else "?:"
        patterns.append(f"({group}{'|'.join(words)})")
    return " ".join(patterns)


def describe_scene(scene: Scene) -> str:
    """Describe a scene object by object in reading order. The base model learns these descriptions of single images."""
    return ", ".join(f"{PLACE_NAMES[cell]} {text}" for cell, text in describe_things(scene))


def describe_things(scene: Scene) -> list[tuple[int, str]]:
    """Return the place and description of each object and mark in reading order, within a place from left to right."""
    # The cell, the position from left to right, and the description
    descriptions = [(thing.cell, thing.center[0], _describe_thing(thing)) for thing in scene.things]
    descriptions += [(mark.cell, mark.center[0], "a mark") for mark in scene.marks]
    return [(cell, text) for cell, _, text in sorted(descriptions)]


def _describe_thing(thing: Thing) -> str:
    """Describe an object and its state: "a small red arrow pointing up"."""
    state = ""
    if thing.state == "waving":
        state = " waving"
    elif thing.kind in STATE_DESCRIPTIONS:
        state = STATE_DESCRIPTIONS[thing.kind].format(_number_word(thing.state) or thing.state)
    return f"a {name_thing(thing)}{state}"


def describe_cells(scene: Scene) -> dict[int, str]:
    """Return a description of the objects at each place, in reading order. Empty places are left out."""
    texts_of_cell: dict[int, list[str]] = {}
    for cell, text in describe_things(scene):
        texts_of_cell.setdefault(cell, []).append(text)
    return {cell: " and ".join(texts) for cell, texts in texts_of_cell.items()}

"""Which pairs the report draws, and what it says beside each: marks for right and wrong, the nearest reference."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from components.evaluate.figures import Attention, data_uri, load_image, overlay
from components.evaluate.grammar import UNREADABLE, Clause, ParsedCaption, type_order
from components.evaluate.pairs import Pair

SECTIONS = {
    "types": (
        "One of each kind",
        "Of each change type, or dataset where types are unknown, the pair with the median CIDEr.",
    ),
    "worst": ("Where it fails", "The lowest CIDEr of pairs with one change."),
    "best": ("Where it shines", "The highest CIDEr of pairs with one change."),
    "several": ("Several changes at once", "The worst, the best and those between."),
    "distractors": ("Nothing changed", "Only the camera, the light or the noise differ a little. False alarms first."),
}
ROUND = (*["types"] * 6, "worst", "worst", "best", "several", "several", "distractors")
"""The gallery fills in rounds of this shape; a section that runs dry leaves its places to the others."""


@dataclass(frozen=True)
class Mark:
    what: str
    right: bool


@dataclass(frozen=True)
class Card:
    """One pair as the report shows it; images are data URIs, `where` the after-image under its heat."""

    pair: Pair
    before: str
    after: str
    where: str | None
    clauses: list[tuple[str, list[Mark]]]
    missed: int
    reference: str
    others: list[str]
    cider: float


def choose(
    pairs: list[Pair], cider: dict[str, float], parsed: dict[str, ParsedCaption], size: int
) -> dict[str, list[Pair]]:
    """At most `size` pairs, each once, by section of the gallery."""
    queues = {name: iter(queue) for name, queue in candidates(pairs, cider, parsed).items()}
    chosen: dict[str, list[Pair]] = {name: [] for name in SECTIONS}
    taken: set[str] = set()
    while queues and len(taken) < size:
        for name in ROUND:
            pair = next((pair for pair in queues.get(name, iter(())) if pair.id not in taken), None)
            if pair is None:
                queues.pop(name, None)
            elif len(taken) < size:
                taken.add(pair.id)
                chosen[name].append(pair)
    return {name: members for name, members in chosen.items() if members}


def candidates(pairs: list[Pair], cider: dict[str, float], parsed: dict[str, ParsedCaption]) -> dict[str, list[Pair]]:
    """For each section all that it may show, the most wanted first."""
    ranked = sorted(pairs, key=lambda pair: (cider[pair.id], pair.id))
    single = [pair for pair in ranked if not pair.is_distractor and len(pair.changes) < 2]
    by_type: dict[str, list[Pair]] = defaultdict(list)
    for pair in single:
        by_type[next(iter(pair.changes), pair.dataset)].append(pair)
    alarms = [p for p in ranked if p.is_distractor and p.id in parsed and not parsed[p.id].says_no_change]
    return {
        "types": [
            members[len(members) // 2] for _, members in sorted(by_type.items(), key=lambda item: type_order(item[0]))
        ],
        "worst": single,
        "best": single[::-1],
        "several": spread([pair for pair in ranked if len(pair.changes) > 1]),
        "distractors": alarms[:1] + spread([pair for pair in ranked if pair.is_distractor]),
    }


def spread(ranked: list[Pair]) -> list[Pair]:
    """Last, first, middle, then the quarters, and so on: any few of them show the whole range."""
    order = [1.0, 0.0] + [k / 2**level for level in range(1, 6) for k in range(1, 2**level, 2)]
    places = dict.fromkeys(round(share * (len(ranked) - 1)) for share in order) if ranked else {}
    return [ranked[place] for place in places]


def draw(pair: Pair, reading: ParsedCaption | None, cider: float, attention: Attention | None) -> Card:
    after = load_image(pair.after)
    heat = attention.heat(pair.id, after.size) if attention else None
    reference, *others = by_likeness(pair.caption, pair.references)
    return Card(
        pair=pair,
        before=data_uri(load_image(pair.before)),
        after=data_uri(after),
        where=None if heat is None else data_uri(overlay(after, heat)),
        clauses=mark(pair, reading),
        missed=reading.truth.total() - reading.found[0] if reading else 0,
        reference=reference,
        others=others,
        cider=cider,
    )


def mark(pair: Pair, reading: ParsedCaption | None) -> list[tuple[str, list[Mark]]]:
    """The caption clause by clause, each with its marks; no marks where no grammar reads it."""
    if reading is None:
        return [(pair.caption, [])]
    if reading.says_no_change:
        return [(pair.caption, [Mark("nothing changed", pair.is_distractor)])]
    return [(text, marks(reading, clause)) for text, clause in zip(reading.parts, reading.said, strict=True)]


def marks(reading: ParsedCaption, clause: Clause) -> list[Mark]:
    if clause.type == UNREADABLE:
        return [Mark("not understood", False)]
    known, named, placed = reading.agrees(clause)
    found = [Mark(clause.type, known)]
    if known and clause.object:
        found.append(Mark("object", named))
    if known and clause.place:
        found.append(Mark("place", placed))
    return found


def by_likeness(caption: str, references: Iterable[str]) -> list[str]:
    """References, the one that shares most words with the caption first."""
    words = set(caption.casefold().split())

    def likeness(reference: str) -> float:
        theirs = set(reference.casefold().split())
        return len(words & theirs) / (len(words | theirs) or 1)

    return sorted(references, key=likeness, reverse=True)

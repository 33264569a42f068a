"""Which pairs the report draws, and what it says beside each: marks for right and wrong, the nearest reference."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from components.evaluate.grammar import UNREADABLE, Clause, ParsedCaption, type_order
from components.evaluate.pairs import EvalPair
from components.evaluate.report.figures import SaliencyMaps, data_uri, load_image, overlay

SECTIONS = {
    "types": (
        "One of each kind",
        "Of each change type, or dataset where types are unknown, the pair with the median {score}.",
    ),
    "worst": ("Where it fails", "The lowest {score} of pairs with one change."),
    "best": ("Where it shines", "The highest {score} of pairs with one change."),
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
    """One pair as the report shows it. Its images are data URIs, None where the licence forbids showing them."""

    pair: EvalPair
    before: str | None
    after: str | None
    saliency: str | None  # the after-image under its saliency map; None where there is no map either
    clauses: list[tuple[str, list[Mark]]]  # of the prediction
    missed: int  # changes that the prediction does not name
    reference: str  # the one most like the prediction
    others: list[str]
    score: float


def choose(
    pairs: list[EvalPair], ranking: dict[str, float], parsed: Mapping[str, ParsedCaption], size: int
) -> dict[str, list[EvalPair]]:
    """At most `size` pairs, each once, by section of the gallery; `ranking` is a score by pair id."""
    queues = {name: iter(queue) for name, queue in candidates(pairs, ranking, parsed).items()}
    chosen: dict[str, list[EvalPair]] = {name: [] for name in SECTIONS}
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


def candidates(
    pairs: list[EvalPair], ranking: dict[str, float], parsed: Mapping[str, ParsedCaption]
) -> dict[str, list[EvalPair]]:
    """For each section all that it may show, the most wanted first."""
    ranked = sorted(pairs, key=lambda pair: (ranking[pair.id], pair.id))
    single = [pair for pair in ranked if not pair.is_distractor and len(pair.changes) < 2]
    by_type: dict[str, list[EvalPair]] = defaultdict(list)
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


def spread(ranked: list[EvalPair]) -> list[EvalPair]:
    """Last, first, middle, then the quarters, and so on: any few of them show the whole range."""
    order = [1.0, 0.0] + [k / 2**level for level in range(1, 6) for k in range(1, 2**level, 2)]
    places = dict.fromkeys(round(fraction * (len(ranked) - 1)) for fraction in order) if ranked else {}
    return [ranked[place] for place in places]


def make_card(
    pair: EvalPair, parsed: ParsedCaption | None, score: float, saliency: SaliencyMaps | None, show: bool
) -> Card:
    """`show`: whether the licence of the pair's dataset lets its images stand on the page."""
    before, after, heat = draw_images(pair, saliency) if show else (None, None, None)
    reference, *others = most_similar_first(pair.prediction, pair.references)
    return Card(
        pair=pair,
        before=before,
        after=after,
        saliency=heat,
        clauses=mark(pair, parsed),
        missed=parsed.true_types.total() - parsed.changes_found[0] if parsed else 0,
        reference=reference,
        others=others,
        score=score,
    )


def draw_images(pair: EvalPair, saliency: SaliencyMaps | None) -> tuple[str, str, str | None]:
    """The image before, the image after, and the latter under its saliency map, as data URIs."""
    after = load_image(pair.after, pair.after_sha256)
    heat = saliency.heat(pair.id, after.size) if saliency else None
    before = load_image(pair.before, pair.before_sha256)
    return data_uri(before), data_uri(after), None if heat is None else data_uri(overlay(after, heat))


def mark(pair: EvalPair, parsed: ParsedCaption | None) -> list[tuple[str, list[Mark]]]:
    """The prediction clause by clause, each with its marks; no marks where no grammar reads it."""
    if parsed is None:
        return [(pair.prediction, [])]
    if parsed.says_no_change:
        return [(pair.prediction, [Mark("nothing changed", pair.is_distractor)])]
    clauses = zip(parsed.parts, parsed.predicted_clauses, strict=True)
    return [(text, marks(parsed, clause)) for text, clause in clauses]


def marks(parsed: ParsedCaption, clause: Clause) -> list[Mark]:
    if clause.type == UNREADABLE:
        return [Mark("not understood", False)]
    known, named, placed = parsed.agrees(clause)
    found = [Mark(clause.type, known)]
    if known and clause.object:
        found.append(Mark("object", named))
    if known and clause.place:
        found.append(Mark("place", placed))
    return found


def most_similar_first(prediction: str, references: Iterable[str]) -> list[str]:
    """References, the one that shares most words with the prediction first."""
    words = set(prediction.casefold().split())

    def similarity(reference: str) -> float:
        theirs = set(reference.casefold().split())
        return len(words & theirs) / (len(words | theirs) or 1)

    return sorted(references, key=similarity, reverse=True)

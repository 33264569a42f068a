from pathlib import Path

from components.evaluate.gallery import Mark, by_likeness, choose, draw, mark, spread
from components.evaluate.grammar import parse_predictions
from components.evaluate.pairs import Pair
from tests.evaluate import bench

COLOUR = "the red cube at the left turned blue"
KINDS = [["color"], ["removal"], ["illumination"], ["color", "removal"], ["none"]]


def many(count: int) -> tuple[list[Pair], dict[str, float]]:
    pairs = [bench.pair(COLOUR, [COLOUR], KINDS[number % 5], f"{number:03d}") for number in range(count)]
    return pairs, {pair.id: float(number) for number, pair in enumerate(pairs)}


def test_the_gallery_is_as_large_as_asked_and_shows_no_pair_twice():
    pairs, cider = many(60)
    for size in (0, 1, 7, 24, 60):
        shown = [pair.id for section in choose(pairs, cider, {}, size).values() for pair in section]
        assert len(shown) == len(set(shown)) == size


def test_a_small_benchmark_is_shown_whole():
    pairs, cider = many(4)
    assert sum(map(len, choose(pairs, cider, {}, 24).values())) == 4


def test_each_type_is_shown_by_its_median_pair():
    pairs, cider = many(60)
    chosen = choose(pairs, cider, {}, 24)["types"]
    assert [(pair.changes, pair.id) for pair in chosen] == [
        (["illumination"], "toy/032"),
        (["removal"], "toy/031"),
        (["color"], "toy/030"),
    ]


def test_best_worst_and_several_changes_are_what_they_say():
    pairs, cider = many(60)
    chosen = choose(pairs, cider, {}, 24)
    assert [pair.id for pair in chosen["worst"]][:2] == ["toy/000", "toy/001"]
    assert [pair.id for pair in chosen["best"]][:2] == ["toy/057", "toy/056"]
    assert [pair.id for pair in chosen["several"]][:3] == ["toy/058", "toy/003", "toy/033"]


def test_a_false_alarm_is_shown_first_among_distractors():
    pairs = bench.pairs()
    cider = {pair.id: 1.0 for pair in pairs}
    chosen = choose(pairs, cider, parse_predictions(bench.grammar(), pairs), 6)["distractors"]
    assert chosen[0].id == "toy/5"


def test_spread_begins_with_the_ends_and_the_middle():
    pairs, _ = many(9)
    assert [pair.id for pair in spread(pairs)][:5] == ["toy/008", "toy/000", "toy/004", "toy/002", "toy/006"]
    assert spread([]) == []


def marks_of(number: int) -> list[list[Mark]]:
    pair = bench.pairs()[number]
    reading = parse_predictions(bench.grammar(), [pair])[pair.id]
    return [marks for _, marks in mark(pair, reading)]


def test_marks_say_which_part_of_each_clause_is_right():
    assert marks_of(0) == [[Mark("color", True), Mark("object", True), Mark("place", True)]]
    assert marks_of(1) == [[Mark("removal", True), Mark("object", True), Mark("place", False)]]
    assert marks_of(2) == [[Mark("nothing changed", False)]]
    assert marks_of(3) == [
        [Mark("color", True), Mark("object", True), Mark("place", True)],
        [Mark("illumination", False)],
    ]
    assert marks_of(4) == [[Mark("nothing changed", True)]]
    assert marks_of(5) == [[Mark("color", False)]]


def test_a_card_counts_the_changes_that_are_not_named(tmp_path: Path):
    bench.write(tmp_path)
    pair = bench.pairs(tmp_path)[3]
    card = draw(pair, parse_predictions(bench.grammar(), [pair])[pair.id], 1.0, None)
    assert card.missed == 1
    assert card.where is None
    assert card.before.startswith("data:image/webp;base64,")


def test_the_reference_nearest_to_the_caption_comes_first():
    assert by_likeness("the red cube is gone", ["it vanished", "the cube is gone"])[0] == "the cube is gone"

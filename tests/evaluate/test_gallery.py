import pytest

from components.evaluate.pairs import EvalPair
from components.evaluate.report.figures import data_uri, load_image
from components.evaluate.report.gallery import (
    Mark,
    candidates,
    choose,
    make_card,
    mark,
    most_similar_first,
    spread,
)
from tests.evaluate import bench

COLOUR = "the red cube at the left turned blue"
KINDS = [["color"], ["removal"], ["illumination"], ["color", "removal"], ["none"]]


def many(count: int) -> tuple[list[EvalPair], dict[str, float]]:
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
    chosen = choose(pairs, cider, bench.parse(pairs), 6)["distractors"]
    assert chosen[0].id == "toy/5"


def test_spread_begins_with_the_ends_and_the_middle():
    pairs, _ = many(9)
    assert [pair.id for pair in spread(pairs)][:5] == ["toy/008", "toy/000", "toy/004", "toy/002", "toy/006"]
    assert spread([]) == []


def marks_of(number: int) -> list[list[Mark]]:
    pair = bench.pairs()[number]
    parsed = bench.parse([pair])[pair.id]
    return [marks for _, marks in mark(pair, parsed)]


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


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> list[EvalPair]:
    root = tmp_path_factory.mktemp("gallery")
    bench.write(root)
    return bench.pairs(root)


def test_a_card_counts_the_changes_that_are_not_named(toy: list[EvalPair]):
    parsed = bench.parse(toy)
    assert [make_card(pair, parsed[pair.id], 1.0, None, show=False).missed for pair in toy] == [0, 0, 1, 1, 0, 0]
    assert make_card(toy[2], None, 1.0, None, show=False).missed == 0


def test_a_card_shows_each_image_in_its_place(toy: list[EvalPair]):
    card = make_card(toy[3], None, 0.7, None, show=True)
    assert card.before == data_uri(load_image(toy[3].before, toy[3].before_sha256))
    assert card.after == data_uri(load_image(toy[3].after, toy[3].after_sha256))
    assert card.before != card.after
    assert (card.saliency, card.score, card.pair) == (None, 0.7, toy[3])


def test_a_card_without_permission_opens_no_image(toy: list[EvalPair]):
    gone = bench.pair("x", ["y"], ["color"], "nowhere")
    card = make_card(gone, None, 1.0, None, show=False)
    assert (card.before, card.after, card.saliency) == (None, None, None)


def test_without_a_grammar_the_prediction_has_no_marks(toy: list[EvalPair]):
    assert mark(toy[0], None) == [(toy[0].prediction, [])]


def test_marks_stand_beside_the_words_of_their_clause():
    pair = bench.pairs()[3]
    texts = [text for text, _ in mark(pair, bench.parse([pair])[pair.id])]
    assert texts == ["the red ball at the top turned green", "the lamp went out"]


def test_what_no_pattern_matches_is_marked_as_not_understood():
    pair = bench.pair("the the cube", [COLOUR], ["color"])
    assert mark(pair, bench.parse([pair])[pair.id]) == [("the the cube", [Mark("not understood", False)])]


def test_the_reference_most_like_the_prediction_comes_first_and_the_others_follow():
    references = ["it vanished", "the cube is gone", "the red cube is gone away now my friend"]
    assert most_similar_first("the red cube is gone", references) == [references[1], references[2], references[0]]
    card = make_card(bench.pair("the red cube is gone", references, []), None, 1.0, None, show=False)
    assert (card.reference, card.others) == (references[1], [references[2], references[0]])


def test_the_reference_of_a_prediction_without_words_is_the_first():
    assert most_similar_first("", ["", "a"]) == ["", "a"]


def test_sections_fill_in_rounds_and_leave_their_places_when_they_are_empty():
    pairs, ranking = many(60)
    chosen = choose(pairs, ranking, {}, 13)
    assert {name: len(members) for name, members in chosen.items()} == {
        "types": 3,
        "worst": 4,
        "best": 2,
        "several": 3,
        "distractors": 1,
    }
    assert list(chosen) == ["types", "worst", "best", "several", "distractors"]
    assert [pair.id for pair in chosen["worst"]] == ["toy/000", "toy/001", "toy/002", "toy/005"]


def test_pairs_of_one_score_are_ranked_by_id_and_unknown_types_by_dataset():
    pairs = [bench.pair("x", ["y"], [], name) for name in "cab"]
    found = candidates(pairs, dict.fromkeys([pair.id for pair in pairs], 1.0), {})
    assert [pair.id for pair in found["worst"]] == ["toy/a", "toy/b", "toy/c"]
    assert [pair.id for pair in found["best"]] == ["toy/c", "toy/b", "toy/a"]
    assert [pair.id for pair in found["types"]] == ["toy/b"]
    assert found["several"] == found["distractors"] == []


def test_the_types_stand_in_their_order_each_by_its_median():
    pairs = [bench.pair("x", ["y"], [kind], f"{kind}{number}") for kind in ("size", "color") for number in range(4)]
    found = candidates(pairs, {pair.id: float(pair.id[-1]) for pair in pairs}, {})
    assert [pair.id for pair in found["types"]] == ["toy/size2", "toy/color2"]

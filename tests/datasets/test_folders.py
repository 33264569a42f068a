"""Pair the images of two folders by their names: common naming schemes, and names that must never be paired."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3diff.datasets.folders import match_names

# The names of the images before and after, in the order of their pairs
PAIRED = {
    "equal names": (["0001", "0002"], ["0001", "0002"]),
    "another case and sign": (["IMG_7", "IMG_8"], ["img-7", "img-8"]),
    "padding": (["7", "12"], ["007", "012"]),
    "composed and decomposed letters": (["für_1", "für_2"], ["fu\u0308r_1", "fu\u0308r_2"]),
    "CLEVR-Change": (
        ["CLEVR_default_000000", "CLEVR_default_000001"],
        ["CLEVR_semantic_000000", "CLEVR_semantic_000001"],
    ),
    "CLEVR-Change, one pair": (["CLEVR_default_000004"], ["CLEVR_nonsemantic_000004"]),
    "words of time behind": (["0001_before", "0002_before"], ["0001_after", "0002_after"]),
    "words of time in front": (["before_1", "before_2"], ["after_1", "after_2"]),
    "words of time in the middle": (["a_before_1", "b_before_2"], ["a_after_1", "b_after_2"]),
    "a word on one side": (["kitchen", "garden"], ["kitchen_edited", "garden_edited"]),
    "another word": (["photo1", "photo2"], ["1", "2"]),
    "letters": (["img_a_12", "img_a_13"], ["img_b_12", "img_b_13"]),
    "Spot-the-Diff": (["1234", "1235"], ["1234_2", "1235_2"]),
    "Spot-the-Diff with a word": (["img1234", "img1235"], ["img1234_2", "img1235_2"]),
    "frames": (["scene_3_1", "scene_4_1"], ["scene_3_2", "scene_4_2"]),
    "years": (["2019_site7", "2019_site8"], ["2023_site7", "2023_site8"]),
    "dates": (["2019-05-01 site7", "2019-05-01 site8"], ["2023-06-12 site7", "2023-06-12 site8"]),
    "times": (["t1_7", "t1_8"], ["t2_7", "t2_8"]),
    "words of the image on one side": (["001_kitchen", "002_garden"], ["IMG_001", "IMG_002"]),
    "one pair of opposite words": (["kitchen_before"], ["kitchen_after"]),
}

NEVER_PAIRED = {
    "a running number": (["IMG_1001", "IMG_1002"], ["IMG_2001", "IMG_2002"]),
    "a running number that overlaps": (["IMG_1", "IMG_2", "IMG_3"], ["IMG_2", "IMG_3", "IMG_4"]),
    "one image more": (["1", "2", "3"], ["1", "2"]),
    "as many, but other ones": (["1", "2", "3"], ["1", "2", "4"]),
    "other scenes": (["scene5_1", "scene5_2"], ["scene7_1", "scene7_2"]),
    "other scenes that look like an order": (["scene1_7", "scene1_8"], ["scene2_7", "scene2_8"]),
    "other scenes without a word that look like an order": (["1_7", "1_8"], ["2_7", "2_8"]),
    "other cameras behind": (["1_5", "2_5"], ["1_7", "2_7"]),
    "a scene's number on one side": (["1", "2"], ["5_1", "5_2"]),
    "a number more on one side": (["5_1", "5_2"], ["5_1_1", "5_1_2"]),
    "words that are turned round": (["kitchen_1", "garden_2"], ["garden_1", "kitchen_2"]),
    "words that contradict": (["1_day", "2_night"], ["1_night", "2_day"]),
    "hashes behind": (["0001_ab", "0002_cd"], ["0001_ef", "0002_gh"]),
    "times of the clock": (
        ["IMG_20230512_101500", "IMG_20230512_101730"],
        ["IMG_20240612_091200", "IMG_20240612_091500"],
    ),
    "one number in two spellings": (["1", "01"], ["1", "001"]),
    "two numbers that one number could be": (["a1", "b1"], ["1", "2"]),
    "single images": (["cat"], ["dog"]),
    "single images of other numbers": (["IMG_1"], ["IMG_7"]),
    "single images of the next number": (["IMG_1"], ["IMG_2"]),
    "a name inside another": (["1", "1_2"], ["2", "2_1"]),
}


@pytest.mark.parametrize(("before", "after"), PAIRED.values(), ids=PAIRED)
def test_names_of_one_scheme_are_paired(before, after):
    assert match_names(before, after).pairs == dict(zip(before, after, strict=True))


@pytest.mark.parametrize(("before", "after"), PAIRED.values(), ids=PAIRED)
def test_the_order_of_the_names_never_makes_a_pair(before, after):
    expected_pairs = dict(zip(before, after, strict=True))
    for order in permutations(after):
        assert match_names(before[::-1], list(order)).pairs == expected_pairs


@pytest.mark.parametrize(("before", "after"), PAIRED.values(), ids=PAIRED)
def test_the_folders_may_be_given_in_either_order(before, after):
    assert match_names(after, before).pairs == dict(zip(after, before, strict=True))


@pytest.mark.parametrize(("before", "after"), NEVER_PAIRED.values(), ids=NEVER_PAIRED)
def test_names_that_do_not_say_which_belong_together_are_not_paired(before, after):
    for names, other_names in ((before, after), (after, before)):
        match = match_names(names, other_names)
        assert match.pairs == {}
        assert match.unmatched[0] or match.unmatched[1] or match.ambiguous


def test_names_without_a_partner_are_those_of_the_rule_that_fits_best():
    before = [f"CLEVR_default_{number:06}" for number in range(20)]
    after = [f"CLEVR_semantic_{number:06}" for number in range(20) if number != 13]
    match = match_names(before, after)
    assert match.unmatched == (["CLEVR_default_000013"], [])


def test_names_that_mean_one_image_are_named():
    match = match_names(["1", "01"], ["001", "0001"])
    assert match.pairs == {}
    assert match.ambiguous == ["0001", "001", "01", "1"]


NAMES = st.lists(st.text("ab1 2_", min_size=1, max_size=6), min_size=1, max_size=5, unique=True)


@settings(max_examples=300, deadline=None)
@given(NAMES, NAMES)
def test_what_is_paired_is_every_name_once_and_equal_names_with_each_other(before, after):
    pairs = match_names(before, after).pairs
    if pairs:
        assert sorted(pairs) == sorted(before)
        assert sorted(pairs.values()) == sorted(after)
        assert [pairs[name] for name in before if name in after] == [name for name in before if name in after]

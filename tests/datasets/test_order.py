"""Decide by names which of two images is before. The order of the columns must not matter."""

import json
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3diff.commands.inspect import check
from m3diff.datasets.guess import guess_table
from m3diff.datasets.order import NOUNS, ORDER_WORDS, choose_sides
from tests.layouts import save_picture

SURE = [
    # two words of opposite sense
    ("pre_disaster", "post_disaster"),
    ("undamaged", "damaged"),
    ("src_img", "edited_img"),
    ("prior", "current"),
    ("current", "next"),
    ("past", "present"),
    ("then", "now"),
    ("early", "late"),
    ("first", "last"),
    ("first_image", "second_image"),
    ("reference", "target"),
    ("alt", "neu"),
    ("untouched", "retouched"),
    ("in", "out"),
    ("image_from", "image_to"),
    ("posted_before", "prepared_after"),
    # a stem, and the stem with a word of the sense after
    ("photo", "photo_edited"),
    ("photo", "after_photo"),
    ("image", "image_out"),
    ("image_file", "edited_file"),
    ("frame", "frame_next"),
    ("before", "before_edited"),
    # a stem with small steps or two years
    ("img_00", "img_01"),
    ("img_01", "img_02"),
    ("v1", "v2"),
    ("input_1", "input_2"),
    ("source_a", "source_b"),
    ("1998", "2002"),
    ("scan_2019_05", "scan_2019_11"),
    ("s2_20190512_b", "s2_20200103_b"),
    ("t1_2019", "t2_2020"),
]
OPEN = [
    # a word of time beside one that is not listed
    ("damaged", "repaired"),
    ("edited", "restored"),
    ("modified", "reverted"),
    ("output", "expected"),
    ("post_disaster", "recovery"),
    ("original", "restored"),
    ("old", "restored"),
    ("source", "processed"),
    ("input", "predicted"),
    ("image", "target"),
    ("new", "photo"),
    # words whose sense depends on what is beside them
    ("original", "damaged"),
    ("before", "damaged"),
    ("current", "edited"),
    ("current", "target"),
    ("latest", "current"),
    ("last_image", "current_image"),
    ("present", "absent"),
    ("output", "target"),
    ("reference", "output"),
    ("alt", "new"),
    ("zoom_in", "zoom_out"),
    ("walk_from", "walk_to"),
    # sequences of events
    ("damage", "repair"),
    ("disaster", "recovery"),
    ("flood", "reconstruction"),
    # other numbers
    ("img_98", "img_02"),
    ("img_2", "img_3"),
    ("img_0", "img_2"),
    ("img_10", "img_11"),
    ("second_image", "third_image"),
    ("image", "image_2"),
    ("t1_2019", "t2_2018"),
    ("img_1_2", "img_2_1"),
    ("12_05_2019", "03_01_2020"),
    ("img_201905", "img_202001"),
    ("p_1", "q_2"),
    # a stem with another word
    ("photo", "photo_before"),
    ("image", "original_image"),
    ("photo", "photo_damaged"),
    ("photo", "photo_alt"),
    ("photo", "photo_current"),
    ("photo", "photo_edited_sky"),
    ("edited", "edited_final"),
    # two images of one side
    ("before_1", "before_2"),
    ("edit_a", "edit_b"),
    ("first_edit", "second_edit"),
    # names that contradict themselves
    ("new_before", "after"),
    ("old_edited", "photo"),
]


def _id(names: tuple[str, str]) -> str:
    return " ".join(names)


@pytest.mark.parametrize("names", SURE, ids=_id)
def test_names_that_say_the_order_are_read_in_it(names):
    assert choose_sides(names) == [names]
    assert choose_sides(names[::-1]) == [names]


@pytest.mark.parametrize("names", OPEN, ids=_id)
def test_names_that_do_not_say_the_order_leave_both_orders_open(names):
    assert {*choose_sides(names)} == {names, names[::-1]}
    assert {*choose_sides(names[::-1])} == {names, names[::-1]}


@pytest.mark.parametrize(
    ("names", "pairs"),
    [
        (("before", "after", "mask"), {("before", "after")}),
        (("t1", "t2", "mask_1", "mask_2"), {("t1", "t2")}),
        (("A", "B", "label"), {("A", "B")}),
        (("photo", "before", "after"), {("before", "after")}),
        (("before", "during", "after"), {("before", "after")}),
        (("source", "target", "result"), {("source", "target"), ("source", "result")}),
        (("original", "edited_1", "edited_2"), {("original", "edited_1"), ("original", "edited_2")}),
        (("2015", "2018", "2021"), {("2015", "2018"), ("2015", "2021"), ("2018", "2021")}),
        (("t1", "t2", "t3"), {("t1", "t2"), ("t1", "t3"), ("t3", "t1"), ("t2", "t3"), ("t3", "t2")}),
        (
            ("first", "second", "third"),
            {("first", "second"), ("first", "third"), ("third", "first"), ("second", "third"), ("third", "second")},
        ),
        (("damaged", "repaired", "mask"), {("damaged", "repaired"), ("repaired", "damaged")}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_of_several_images_a_pair_is_taken_only_if_no_other_could_be(names, pairs):
    for permuted in permutations(names):
        assert {*choose_sides(permuted)} == pairs


STEMS = st.sampled_from(["", "photo", "img", "street", "repaired", "expected", "cam_l"])
MARKS = st.one_of(
    st.sampled_from(sorted(ORDER_WORDS)),
    st.sampled_from(["", "a", "b", "c", "third", "2019", "2020_05", "20200103", "98", "02", *NOUNS]),
    st.integers(0, 12).map(str),
)
NAMES = st.builds(lambda parts: "_".join(filter(None, parts)) or "x", st.tuples(STEMS, MARKS, MARKS))


@settings(max_examples=400, deadline=None, database=None, derandomize=True)
@given(st.lists(NAMES, min_size=2, max_size=4, unique=True), st.randoms(use_true_random=False))
def test_exchanging_columns_never_changes_which_is_called_before(names, random):
    exchanged = list(names)
    random.shuffle(exchanged)
    assert {*choose_sides(exchanged)} == {*choose_sides(names)}


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(st.sampled_from(sorted(ORDER_WORDS)), st.sampled_from(["repaired", "expected", "recovery", "left", "zz", "7"]))
def test_no_single_word_of_time_beside_an_unknown_one_is_sure(word, unknown):
    assert {*choose_sides([word, unknown])} == {(word, unknown), (unknown, word)}


def write_table(root: Path, name: str, other_name: str, nested: bool = False) -> None:
    rows = []
    for number in range(4):
        for shade, side in enumerate((name, other_name)):
            save_picture(root / side / f"{number}.png", number, 90 * shade)
        images = {name: f"{name}/{number}.png", other_name: f"{other_name}/{number}.png"}
        split = ("train", "train", "val", "test")[number]
        rows.append({**({"images": images} if nested else images), "caption": "the dent is gone", "split": split})
    (root / "data.json").write_text(json.dumps(rows))


def write_folders(root: Path, name: str, other_name: str) -> None:
    for number in range(4):
        for shade, side in enumerate((name, other_name)):
            save_picture(root / side / f"{number}.png", number, 90 * shade)
    lines = [f"{number},the dent is gone,train" for number in range(4)]
    (root / "pairs.csv").write_text("\n".join(["name,caption,split", *lines]) + "\n")


def write_nested(root: Path, name: str, other_name: str) -> None:
    write_table(root, name, other_name, nested=True)


WRITERS = {"columns": write_table, "nested": write_nested, "folders": write_folders}


@pytest.mark.parametrize("names", [("damaged", "repaired"), ("img_98", "img_02"), ("output", "expected")], ids=_id)
@pytest.mark.parametrize("kind", WRITERS)
def test_check_asks_with_both_orders_and_calls_neither_before(tmp_path, kind, names):
    WRITERS[kind](tmp_path, *names)
    lines, is_sound = check(tmp_path, {})
    assert not is_sound
    (doubt,) = guess_table(tmp_path).doubts
    befores = {answer["columns"]["before"] for answer in doubt.answers}
    assert len(befores) == 2
    assert not any("before is" in line for line in lines)


@pytest.mark.parametrize("names", [("undamaged", "damaged"), ("img_1998", "img_2002"), ("second", "first")], ids=_id)
@pytest.mark.parametrize("kind", WRITERS)
def test_check_reads_names_that_say_the_order_without_a_question(tmp_path, kind, names):
    WRITERS[kind](tmp_path, *names)
    is_sound = check(tmp_path, {})[1]
    assert is_sound
    before = guess_table(tmp_path).options["columns"]["before"]
    assert ("first" if "first" in names else names[0]) in before


SURE_ORDERS = """before_path after_path, original edited, start end, previous_frame current_frame, current next, t1 t2,
    T0 T1, pre post, img_2019 img_2023, scan_2019_05 scan_2020_01, sourceImg targetImg, first last,
    picture picture_edited, posted_before prepared_after, folder_1 folder_2, image_one image_two, imageA imageB,
    beforeimg afterimg, vorher nachher, avant après, 变化前 变化后, input.url output.url"""
# Whole words decide: `new` and `pre` are no words of newspaper and prediction; `last` may be the one before
UNSURE_ORDERS = """left_cam right_cam, x y, photo picture, newspaper prediction, forward starter,
    last_image current_image, before_old before_older, new_before picture, p_12 q_11"""


@pytest.mark.parametrize("names", [tuple(names.split()) for names in SURE_ORDERS.split(",")], ids=" ".join)
def test_words_of_two_names_tell_which_is_before_in_any_order_and_beside_a_mask(names):
    for permuted in (names, names[::-1]):
        assert choose_sides(permuted) == [names]
        assert choose_sides([*permuted, "after_mask"]) == [names]


@pytest.mark.parametrize("names", [tuple(names.split()) for names in UNSURE_ORDERS.split(",")], ids=" ".join)
def test_names_that_do_not_tell_leave_both_orders_open(names):
    for permuted in (names, names[::-1]):
        assert choose_sides(permuted) == [permuted, permuted[::-1]]
        assert choose_sides([*permuted, "after_mask"]) == [permuted, permuted[::-1]]


def test_two_names_that_tell_their_order_come_before_a_name_that_does_not():
    assert choose_sides(["photo", "before", "after"]) == [("before", "after")]

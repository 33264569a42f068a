"""Questions about single images of MiniChange: what they ask, and answers that the scenes of the images give."""

from pathlib import Path

import numpy as np
import pytest

from m3diff.datasets.minichange import generate, image_paths, read_scenes, read_singles
from m3diff.datasets.minichange.language import describe_cells, describe_scene, describe_things
from m3diff.datasets.minichange.questions import ask_for_images, ask_for_objects, ask_for_places
from m3diff.datasets.minichange.scene import PLACE_NAMES, MiniChange, Scene
from m3diff.datasets.minichange_images import SPEC, read
from m3diff.datasets.spec import Row

SCENES = {"train": 3, "val": 1, "test": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minichange") / "drawn"
    values = {"root": folder, "seed": 5, "scenes": SCENES, "image_px": 64, "references": 1}
    generate(MiniChange.model_validate(values | {"multi_change_share": 0.2, "oversample_types": []}))
    return folder


@pytest.fixture(scope="module")
def rows(root: Path) -> list[Row]:
    return list(read(root))


def test_the_kinds_of_questions_about_first_images_alternate_from_scene_to_scene(rows, root):
    names = ["000003?objects", "000004?describe", "000005?objects", "000002?describe", "000000?describe"]
    assert [row.name for row in rows] == [*names, "000001?objects"]
    assert [row.split for row in rows] == ["train"] * 3 + ["val"] + ["test"] * 2
    for row in rows:
        assert row.images == (f"images/CLEVR_default_{row.scene}.png",)
        assert (root / row.images[0]).is_file()
        assert row.image_set == row.scene
        assert row.kind == row.name.partition("?")[2]


def test_a_description_names_all_objects_of_the_image(rows, root):
    scenes = read_scenes(root).scene_by_path
    for row in rows:
        if row.kind == "describe":
            assert row.question == "Describe the image."
            assert row.references == [describe_scene(scenes[image_paths(int(row.scene))[0]])]


def test_an_answer_has_one_part_per_object_of_the_question(rows):
    for row in rows:
        if row.kind == "objects":
            asked_objects = row.question.removeprefix("Describe the ").removesuffix(".").split(", the ")
            answers = row.references[0].split(", ")
            assert len(answers) == len(asked_objects) == 4
            for asked_object, answer in zip(asked_objects, answers, strict=True):
                assert answer == "nothing" or set(asked_object.split()) <= set(answer.split())


def test_the_questions_of_a_scene_depend_on_nothing_else(rows, root):
    objects = {row.scene: row.question for row in rows if row.kind == "objects"}
    assert len(set(objects.values())) == len(objects), "each scene has objects of its own"
    assert [row.question for row in read(root)] == [row.question for row in rows]


def test_a_folder_is_not_recognised_as_such_questions(root):
    assert not SPEC.recognise(root)


def test_every_image_alone_is_a_row_in_the_order_of_the_splits(root):
    scenes = read_scenes(root).scene_by_path
    singles = list(read_singles(root))
    numbers = [(split, number) for split, names in (("train", "345"), ("val", "2"), ("test", "01")) for number in names]
    expected = []
    for split, number in numbers:
        expected += [
            (path, split, f"00000{number}", [describe_scene(scenes[path])]) for path in image_paths(int(number))
        ]
    assert [(row.name, row.split, row.scene, row.references) for row in singles] == expected
    for row in singles:
        assert row.images == (row.name, row.name)
        assert row.source.endswith(row.name)


# Questions about two images


@pytest.fixture(scope="module")
def two_scenes(root: Path) -> list[Scene]:
    scenes = read_scenes(root).scene_by_path
    return [scenes[image_paths(number)[0]] for number in (0, 3)]


def test_two_images_are_described_one_after_the_other(two_scenes):
    question, answer = ask_for_images(np.random.default_rng(1), two_scenes)
    first_scene, second_scene = two_scenes
    assert question == "Describe both images."
    assert answer == f"image 1: {describe_scene(first_scene)}; image 2: {describe_scene(second_scene)}"


def test_two_images_are_described_place_by_place_in_a_random_order(two_scenes):
    first_objects, second_objects = (describe_cells(scene) for scene in two_scenes)
    expected = set()
    for cell in first_objects.keys() | second_objects.keys():
        texts = (first_objects.get(cell, "nothing"), second_objects.get(cell, "nothing"))
        expected.add(f"{PLACE_NAMES[cell]} {' then '.join(texts)}")
    answers = [ask_for_places(np.random.default_rng(seed), two_scenes)[1].split(", ") for seed in range(3)]
    for answer in answers:
        assert set(answer) == expected
        assert len(answer) == len(expected)
    assert answers[0] != answers[1]


def test_an_object_that_is_asked_for_is_in_the_images_once_or_not_at_all(two_scenes):
    objects = [(cell, text) for scene in two_scenes for cell, text in describe_things(scene)]
    appearances = set()
    for seed in range(40):
        question, answer = ask_for_objects(np.random.default_rng(seed), two_scenes)
        asked_objects = question.removeprefix("Describe the ").removesuffix(".").split(", the ")
        for asked_object, part in zip(asked_objects, answer.split(", "), strict=True):
            words = set(asked_object.split())
            matches = [f"{PLACE_NAMES[cell]} {text}" for cell, text in objects if words <= set(text.split()[1:4])]
            assert matches in ([], [part])
            assert matches or part == "nothing"
            appearances.add((len(words), bool(matches)))
    assert {(1, False), (2, True), (2, False), (3, True)} <= appearances

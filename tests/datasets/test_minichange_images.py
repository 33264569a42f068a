"""Questions about single images of MiniChange: what they ask, and answers that the scenes of the images give."""

from pathlib import Path

import pytest

from m3diff.datasets.minichange import generate, image_paths, read_scenes
from m3diff.datasets.minichange.language import describe_scene
from m3diff.datasets.minichange.scene import MiniChange
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

"""The editor without weights: an instruction is carried out on the scene, and on nothing else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m3diff.datasets.minichange.generate import image_paths, read_scenes, read_singles
from m3diff.datasets.minichange.language import describe_scene, references
from m3diff.datasets.minichange.levels import LEVELS
from m3diff.datasets.minichange.render import render
from m3diff.datasets.minichange.scene import LIT, ZOOMS, Mark, Scene, Thing
from m3diff.records.errors import DataError
from m3diff.records.schemas import CHANGE_TYPES
from m3diff.stages.augment.editors import DrawnEditor, carry_out
from tests.stages.augment.small import draw
from tests.stages.augment.test_words import pairs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "raw")


@pytest.mark.parametrize("level", LEVELS)
def test_an_instruction_gives_the_scene_that_it_describes(level: str):
    same = 0
    for number, (before, after, changes) in enumerate(pairs(level)):
        for text in references(changes, 3):
            edited = carry_out(before, text, np.random.default_rng(number))
            assert edited is not None, text
            if all(change.type not in ("addition", "substitution") for change in changes):
                assert describe_scene(edited) == describe_scene(after), text
                same += 1
            moved = {change.word for change in changes if change.type == "viewpoint"} & ZOOMS.keys()
            for word in moved:
                assert edited.view.zoom == pytest.approx(before.view.zoom * ZOOMS[word], rel=0.08)
    assert same > 60


@pytest.mark.parametrize("change_type", CHANGE_TYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_each_type_of_change_leaves_all_other_things_where_they_are(level: str, change_type: str):
    for number in range(4):
        rng = np.random.default_rng([3, number])
        before, _, _, changes = LEVELS[level].sample_pair(rng, (change_type,))
        edited = carry_out(before, references(changes, 1)[0], rng)
        assert edited is not None
        gone = [thing for thing in before.things if thing not in edited.things]
        came = [thing for thing in edited.things if thing not in before.things]
        assert gone == ([changes[0].before] if changes[0].before else [])
        assert len(came) == (1 if changes[0].after else 0)
        assert len(edited.marks) - len(before.marks) == (change_type == "removal")
        assert edited.view != before.view, "another photograph"


SCENE = Scene((Thing("ball", "red", "small", 0), Thing("arrow", "blue", "large", 4, "up")), (Mark(8),))


@pytest.mark.parametrize(
    "text",
    [
        "at the top the small red ball turned blue",  # not there
        "at the top left the large red ball turned blue",  # nor so
        "in the centre the large blue arrow points left instead of down",  # it points up
        "in the centre a small red cone appeared",  # the place is taken
        "at the bottom right a small red cone appeared",  # by a mark
        "the lamp came on",  # it is
        "nothing changed",
        "make the ball blue",
    ],
)
def test_what_cannot_be_carried_out_is_not(text: str):
    assert carry_out(SCENE, text, np.random.default_rng(0)) is None


def test_of_two_of_one_name_at_one_place_neither_is_meant():
    ball = Thing("ball", "red", "small", 0)
    scene = Scene((ball, replace(ball, dx=0.1)), level="free")
    assert carry_out(scene, "at the top left the small red ball turned blue", np.random.default_rng(0)) is None


def test_the_lamp_goes_out_and_comes_on():
    out = carry_out(SCENE, "the lamp went out", np.random.default_rng(0))
    assert out is not None
    assert out.view.brightness == pytest.approx(LEVELS["grid"].dark, rel=0.05)
    on = carry_out(out, "the lamp came on", np.random.default_rng(0))
    assert on is not None
    assert on.view.brightness == pytest.approx(LIT, rel=0.05)


def test_the_seed_decides_what_the_instruction_leaves_open(root: Path):
    editor = DrawnEditor(root)
    path = image_paths(0)[0]
    text = references((next(c for _, _, cs in pairs("grid") for c in cs if c.type == "viewpoint"),), 1)[0]
    first, again, other = (editor.edit(root / path, text, seed) for seed in (1, 1, 2))
    assert first is not None
    assert again is not None
    assert other is not None
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()
    assert first.size == Image.open(root / path).size


@pytest.mark.parametrize("changes", [{}, {"level": "free"}, {"domain": "shifted"}])
def test_the_scenes_that_are_written_draw_the_images_that_are_written(changes: dict[str, str], tmp_path: Path):
    root = draw(tmp_path / "raw", **changes)
    scenes, same = read_scenes(root), 0
    for path, scene in scenes.of.items():
        if not scene.view.noise:
            drawn = render(scene, scenes.image_px, np.random.default_rng(0), scenes.domain)
            assert drawn.tobytes() == Image.open(root / path).convert("RGB").tobytes(), path
            same += 1
    assert same > 40
    assert len(scenes.of) == 120


def test_each_image_has_the_description_of_its_own_scene(root: Path):
    scenes = read_scenes(root)
    singles = list(read_singles(root))
    assert len(singles) == 120
    assert {single.split for single in singles} == {"train", "val", "test"}
    for single in singles:
        assert single.captions == [describe_scene(scenes.of[single.image])]
        assert single.scene in single.image


def test_an_image_without_a_scene_is_not_edited_and_a_dataset_without_scenes_is_refused(root: Path, tmp_path: Path):
    assert DrawnEditor(root).edit(root / "images/other.png", "the lamp went out", 0) is None
    with pytest.raises(DataError, match=r"scenes\.json"):
        DrawnEditor(tmp_path)

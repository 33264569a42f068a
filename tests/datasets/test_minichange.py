"""MiniChange: its bytes, its scenes on both levels, and references from which the grammar reads the true changes."""

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from m3diff.datasets.minichange import SPEC, generate, language
from m3diff.datasets.minichange.language import describe_cells, describe_scene, grammar, references
from m3diff.datasets.minichange.scene import (
    PLACE_NAMES,
    SAMPLERS,
    WIDTHS,
    Change,
    Mark,
    MiniChange,
    Scene,
    Thing,
    View,
    name_thing,
    sample_types,
)
from m3diff.records.errors import DataError, Fault
from m3diff.records.schemas import SPLITS
from m3diff.scoring.grammar import Clause, Grammar
from tests.errors import raises

FREE = SAMPLERS["free"]
SMALL = {"seed": 5, "scenes": {"train": 20, "val": 4, "test": 6}, "image_px": 64, "references": 5}
SMALL |= {"multi_change_share": 0.2, "oversample_types": ["size"]}
PINNED = {  # level, domain -> digest of all files
    ("grid", "standard"): "f3779d72c0f50e5db0bc0457cbbb924a",
    ("grid", "shifted"): "f43fd5c8954bbe43e83da5c42dcc9e0d",
    ("free", "standard"): "0c126dd26a131376676c892c9773eecf",
    ("free", "shifted"): "11c7b6d290547f1d0e9fe83f9d0e642b",
}


def settings(root: Path, **changes) -> MiniChange:
    return MiniChange.model_validate(SMALL | {"root": root} | changes)


def digest(root: Path) -> str:
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    assert len(files) == 3 * 30 + 6
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:32]


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Generate a small benchmark of each level and domain. One of them replaces an older and larger benchmark."""
    roots = {key: tmp_path_factory.mktemp("-".join(key)) / key[0] for key in PINNED}
    generate(settings(roots["grid", "standard"], scenes={"train": 0, "val": 0, "test": 31}, image_px=32))
    for (level, domain), root in roots.items():
        generate(settings(root, level=level, domain=domain))
    return roots


@pytest.fixture(params=SAMPLERS)
def small(request: pytest.FixtureRequest, benchmarks: dict[tuple[str, str], Path]) -> Path:
    return benchmarks[request.param, "standard"]


def test_the_bytes_of_a_small_benchmark_are_pinned(benchmarks):
    assert {key: digest(root) for key, root in benchmarks.items()} == PINNED


def test_its_reader_reads_what_it_wrote(small):
    rows = list(SPEC.read(small))
    assert Counter(row.split for row in rows) == {"train": 40, "val": 8, "test": 12}
    assert SPEC.grammar(small) == grammar(tuple(WIDTHS[small.name]))
    for row in rows:
        assert not row.fault
        assert len(set(row.references)) == len(row.references) == 5
        assert all((small / image).is_file() for image in row.images)


def truth(change: Change, text: str) -> Clause:
    """Return the clause that the grammar must read from a sentence about a change.

    Args:
        change: the true change.
        text: the part of the sentence after the name of the object. Some sentences do not mention the old value.
    """
    before = change.before
    after = change.after
    if change.type == "viewpoint":
        return Clause(change.type, "camera", language.CAMERA[change.word], None, language.CAMERA[change.word])
    if change.type == "illumination":
        return Clause(change.type, "lamp", language.LAMP[change.word], None, language.LAMP[change.word])
    thing = before or after
    place_name = PLACE_NAMES[thing.cell]
    thing_name = name_thing(thing)
    values: dict[str, tuple[str | None, str | None]]
    values = dict.fromkeys(("addition", "disappearance", "removal"), (None, None))
    if before and after:
        was = str(before.state)
        now = str(after.state)
        values |= {"substitution": (name_thing(before), name_thing(after)), "size": (before.size, after.size)}
        values |= {"color": (before.color, after.color), "orientation": (was if was in text else None, now)}
        values |= {"pose": (None, language.ARMS.get(now)), "ocr": (was.lower(), now.lower())}
        states = before.state, after.state
        values["counting"] = tuple(language.NUMBERS[state] if isinstance(state, int) else None for state in states)
    return Clause(change.type, thing_name, place_name, *values[change.type])


def test_every_reference_reads_back_to_exactly_the_true_changes(small):
    rules = Grammar.load(small / "grammar.json")
    rng = np.random.default_rng(17)
    for number in range(96):
        changes = SAMPLERS[small.name].sample_pair(rng, sample_types(rng, number, multi_change_share=0.3)).changes
        assert [change.order for change in changes] == sorted(change.order for change in changes)
        texts = references(changes, 5)
        assert len(set(texts)) == 5
        for text in texts:
            clauses = rules.parse_clauses(text)
            parts = rules.split_clauses(text)
            assert len(clauses) == len(changes)
            for clause, change, part in zip(clauses, changes, parts, strict=True):
                text_of_values = part.removeprefix(PLACE_NAMES[change.order[0]])
                if change.before:
                    # The name of an object may contain the word for a state
                    text_of_values = text_of_values.split(name_thing(change.before))[-1]
                assert clause == truth(change, text_of_values), text


@pytest.mark.parametrize("name", ["thesis.tex", "images/thesis.tex", "images/CLEVR_semantic_000001.png"])
def test_a_folder_with_other_files_is_refused_and_nothing_of_it_removed(name, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / name).write_text("years of work")
    with raises(DataError, "datasets.foreign_file_in_minichange", path=tmp_path, value=name):
        generate(settings(tmp_path))
    assert (tmp_path / name).read_text() == "years of work"


def test_a_folder_of_its_own_is_replaced(tmp_path):
    generate(settings(tmp_path))
    (tmp_path / ".DS_Store").touch()
    generate(settings(tmp_path))
    assert not (tmp_path / ".DS_Store").exists()


@pytest.mark.parametrize("scenes", [{"train": 1}, {"train": -1, "val": 1, "test": 1}, dict.fromkeys(SPLITS, 0)])
def test_scenes_are_of_all_three_splits_and_at_least_one(tmp_path, scenes):
    with pytest.raises(ValidationError) as refused:
        settings(tmp_path, scenes=scenes)
    (fault,) = refused.value.errors()
    assert fault["ctx"]["error"].fault == Fault("datasets.no_number_of_scenes", names=["train", "val", "test"])


RED_BALL = Thing("ball", "red", "small", 4, dx=-0.1)
BLUE_BOX = Thing("box", "blue", "small", 4, dx=0.1)
BLUE_BALL = replace(RED_BALL, color="blue")


@pytest.mark.parametrize(
    ("other_things", "is_clear"),
    [
        ((BLUE_BOX,), True),
        ((replace(RED_BALL, dx=0.1),), False),  # a second small red ball in the centre
        ((replace(RED_BALL, dx=0.1, size="medium"),), True),
        ((replace(RED_BALL, cell=3),), True),  # one more at the left
        ((replace(BLUE_BALL, dx=0.1),), False),  # the counterpart would be a second small blue ball in the centre
        ((replace(BLUE_BOX, color="red", dx=0.02),), False),  # red, and touches
        ((replace(BLUE_BOX, color="white", dx=0.02),), True),
        ((replace(BLUE_BOX, color="white", dx=-0.08),), False),  # covers most of it
    ],
)
def test_a_change_of_an_object_that_cannot_be_distinguished_is_not_clear(other_things, is_clear):
    before = Scene((RED_BALL, *other_things), level="free")
    after = Scene((BLUE_BALL, *other_things), level="free")
    assert FREE.are_clear(before, after, [Change("color", RED_BALL, BLUE_BALL)]) is is_clear


@pytest.mark.parametrize(("camera_change", "is_clear"), [([], False), ([Change("viewpoint", word="right")], True)])
def test_an_object_has_the_same_place_in_both_images_unless_the_camera_moved(camera_change, is_clear):
    ball = replace(RED_BALL, dx=0.0)
    blue_ball = replace(ball, color="blue")
    before = Scene((ball,), level="free")
    after = Scene((blue_ball,), level="free", view=View(x=0.25))  # the ball is now at the left
    assert FREE.are_clear(before, after, [*camera_change, Change("color", ball, blue_ball)]) is is_clear


BOX = Thing("box", "red", "small", 2)
SIGN = Thing("sign", "blue", "large", 7, "K")


def test_a_scene_is_described_in_reading_order_and_from_left_to_right_at_one_place():
    things = (
        *(SIGN, BOX, Thing("arrow", "red", "small", 0, "up"), Thing("doll", "white", "large", 1, "waving")),
        *(Thing("doll", "white", "large", 3, "down"), Thing("die", "green", "small", 8, 4)),
        *(Thing("ball", "red", "medium", 0, dx=0.05), Thing("cone", "white", "large", 0, dx=-0.04)),
    )
    scene = Scene(things, marks=(Mark(5), Mark(0, dx=0.08)), level="free")
    assert list(describe_cells(scene)) == [0, 1, 2, 3, 5, 7, 8]
    assert describe_cells(scene)[0].startswith("a large white cone and a small red arrow pointing up and a medium red")
    assert describe_scene(scene) == (
        "at the top left a large white cone, at the top left a small red arrow pointing up, "
        "at the top left a medium red ball, at the top left a mark, at the top a large white doll waving, "
        "at the top right a small red box, at the left a large white doll with arms down, at the right a mark, "
        "at the bottom a large blue sign reading K, at the bottom right a small green die with four dots"
    )

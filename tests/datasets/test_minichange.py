"""MiniChange: every byte follows from the seed, each type changes what it says, references read back to the change."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from PIL import Image

from m3diff.datasets.minichange import SPEC
from m3diff.datasets.minichange.generate import _write_scene, generate, split_scenes
from m3diff.datasets.minichange.language import (
    ARMS,
    CAMERA,
    LAMP,
    NO_CHANGE_SENTENCES,
    NUMBERS,
    TEMPLATES,
    describe_cells,
    describe_scene,
    grammar,
    name,
    references,
)
from m3diff.datasets.minichange.levels import LEVELS, VISIBLE, sample_types
from m3diff.datasets.minichange.render import LOOKS, render
from m3diff.datasets.minichange.scene import (
    PLACES,
    ZOOMS,
    Change,
    Domain,
    Mark,
    MiniChange,
    Scene,
    Thing,
    View,
    cell_center,
)
from m3diff.records.errors import DataError
from m3diff.records.files import sha256
from m3diff.records.schemas import CHANGE_TYPES

GRID = LEVELS["grid"]
sample_pair, sample_scene, jitter, CAMERA_MOVES, DARK = (
    GRID.sample_pair,
    GRID.sample_scene,
    GRID.jitter,
    GRID.moves,
    GRID.dark,
)

SMALL = {
    "seed": 5,
    "scenes": {"train": 20, "val": 4, "test": 6},
    "image_px": 64,
    "references": 5,
    "multi_change_share": 0.2,
    "oversample_types": ["size"],
}
EMBEDDED = {
    "seed": 2503,
    "scenes": {"train": 2200, "val": 60, "test": 240},
    "image_px": 128,
    "references": 5,
    "multi_change_share": 0.15,
    "oversample_types": ["substitution", "size", "color", "viewpoint"],
}
SMALL_FILES = {
    "change_captions.json": "c2e94e5507250e7a15c98161c1e899e9c3eb563005bb403fa7a21233965be017",
    "grammar.json": "7b20d538bbb9dd0f637d5acbe9a08249913d00cb0bb8a169bae0d21700e24ac1",
    "no_change_captions.json": "cb4f98273204f8c2c3231be108e6b0cfed598234ea0574b26dea1161e758377c",
    "scenes.json": "590f6703064b1208cf55100ef75bfe0e38a15f5b33f536f7a84602c86d0d2c1d",
    "splits.json": "b9468a60a433da70dd02510cdff900e6a9566b29a97bd362e65d556b4bfffa16",
    "type_mapping.json": "27a3e0228dd80decea5d82e588a89772fffce47f4cc94dde42338079d0b1fd0d",
}
SMALL_IMAGES = "7208e621cac80996a58b8fd34103c6f442d768a56088e3870b4fdb970d8f3450"
EMBEDDED_SCENES = {  # number -> first 16 digits of the digests of before, after, distractor; types; first reference
    0: ("63d529f0c5ad6045", "e7b5488d24d714be", "9ce02bf1bc1bf90e", "viewpoint", "the camera moved to the right"),
    7: (
        "0e5cbc776a5f42a8",
        "d3ba77b227490194",
        "b46692bd1b1be51f",
        "color viewpoint",
        "the camera zoomed out, and at the bottom right the large yellow sign turned purple",
    ),
    299: (
        "612749d013e65595",
        "7d22f94e653e30d7",
        "121f329750143277",
        "counting",
        "at the left the small purple die shows four dots instead of two",
    ),
    300: (
        "982b46f7113882a6",
        "a8aa0edd17c567e3",
        "fa9f3d376ae2c51b",
        "substitution",
        "at the top right the large purple cone was replaced by a large yellow die",
    ),
    1111: (
        "36aea0a611162e55",
        "cdafc46951adbb94",
        "9f4c5e99b3c10d6b",
        "color",
        "at the right the large blue star turned green",
    ),
    2499: (
        "88364ae145293f9f",
        "25d82ac16e14a8da",
        "a3907ea10e2036ed",
        "disappearance removal substitution",
        "at the top left the large red doll was replaced by a large yellow cone, and at the bottom left the small red "
        "star disappeared, and at the bottom right the large yellow box was removed and left a mark",
    ),
}


def settings(root: Path, **changes) -> MiniChange:
    return MiniChange.model_validate(SMALL | {"root": root} | changes)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("minichange") / "small"
    generate(settings(root))
    return root


def test_the_bytes_of_a_small_benchmark_are_pinned(small):
    files = sorted(path for path in small.rglob("*") if path.is_file())
    assert {path.name: sha256(path) for path in files if path.suffix == ".json"} == SMALL_FILES
    images = [path for path in files if path.suffix == ".png"]
    assert len(images) == 3 * 30
    assert len(files) == 3 * 30 + 6
    assert hashlib.sha256(b"".join(path.read_bytes() for path in images)).hexdigest() == SMALL_IMAGES


DRAW = """
import hashlib, sys
import numpy as np
from m3diff.datasets.minichange.levels import LEVELS, sample_types
from m3diff.datasets.minichange.render import LOOKS, render

digest = hashlib.sha256()
for number in range(int(sys.argv[1])):
    rng = np.random.default_rng([2503, number])
    for level in LEVELS.values():
        for domain in LOOKS:
            for scene in level.sample_pair(rng, sample_types(rng, number, 0.15))[:3]:
                digest.update(render(scene, 128, rng, domain).tobytes())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("scenes", [8, pytest.param(200, marks=pytest.mark.slow(90))])
def test_the_bytes_are_the_same_on_a_cpu_without_the_newest_vector_instructions(scenes):
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    newest = " ".join(name for name in __cpu_dispatch__ if __cpu_features__.get(name))
    drawn = [
        subprocess.run(
            [sys.executable, "-c", DRAW, str(scenes)],
            env=os.environ | disabled,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for disabled in ({}, {"NPY_DISABLE_CPU_FEATURES": newest})
    ]
    assert drawn[0] == drawn[1]


def test_scenes_of_the_embedded_benchmark_are_pinned(tmp_path):
    embedded = MiniChange.model_validate(EMBEDDED | {"root": tmp_path})
    folders = {"images": "default", "sc_images": "semantic", "nsc_images": "nonsemantic"}
    for folder in folders:
        (tmp_path / folder).mkdir()
    training = split_scenes(embedded)["train"]
    assert training == range(300, 2500)
    for number, (*digests, types, reference) in EMBEDDED_SCENES.items():
        scene = _write_scene(embedded, training, number)
        paths = [tmp_path / folder / f"CLEVR_{kind}_{number:06d}.png" for folder, kind in folders.items()]
        assert [sha256(path)[:16] for path in paths] == digests, number
        assert (scene.number, " ".join(sorted(scene.types)), scene.references[0]) == (number, types, reference)


def given(name: str) -> dict:
    import yaml

    return yaml.safe_load(Path("params.yaml").read_text())["synthesize"][name]


def test_the_parameters_of_the_embedded_run_are_the_pinned_ones():
    settings = given("minichange")
    assert MiniChange.model_validate(settings) == MiniChange.model_validate(EMBEDDED | {"root": settings["root"]})


def test_nothing_trains_on_the_shifted_domain_and_its_scenes_are_of_a_seed_of_its_own():
    one, other = (MiniChange.model_validate(given(name)) for name in ("minichange", "minichange_shifted"))
    assert (one.domain, other.domain) == ("standard", "shifted")
    assert (other.scenes["train"], other.scenes["val"]) == (0, 0)
    assert other.scenes["test"] >= 100
    assert one.seed != other.seed


def test_each_domain_has_a_look_and_the_shifted_one_no_shade_table_or_camera_of_the_other():
    assert tuple(LOOKS) == get_args(Domain)
    standard, shifted = LOOKS["standard"], LOOKS["shifted"]
    assert standard.rgb.keys() == shifted.rgb.keys()
    assert standard.table.keys() == shifted.table.keys()
    far = 25.0  # grey levels, of 441
    for mine, theirs in ((standard.rgb, shifted.rgb), (standard.table, shifted.table)):
        for shade in mine:
            distances = {other: float(np.linalg.norm(np.subtract(theirs[shade], mine[other]))) for other in mine}
            assert min(distances.values()) > far, shade
            if mine is standard.rgb:
                assert min(distances, key=distances.get) == shade, "a person would call it by another name"
    assert standard.tilt is None
    assert shifted.tilt is not None


def test_the_shifted_domain_has_the_scenes_and_words_of_the_standard_one_in_other_pixels(tmp_path):
    few = {"scenes": {"train": 0, "val": 0, "test": 12}, "image_px": 64}
    roots = {domain: tmp_path / domain for domain in LOOKS}
    for domain, root in roots.items():
        generate(settings(root, domain=domain, **few))
    for file in SMALL_FILES:
        standard, shifted = ((root / file).read_text() for root in roots.values())
        assert standard == shifted.replace('"domain": "shifted"', '"domain": "standard"')
    for path in roots["standard"].rglob("*.png"):
        one, two = (
            np.asarray(Image.open(at), dtype=int)
            for at in (path, roots["shifted"] / path.relative_to(tmp_path / "standard"))
        )
        assert one.shape == two.shape
        assert np.abs(one - two).mean() > 10
    assert Counter(row.split for row in SPEC.read(roots["shifted"])) == {"test": 24}


def test_a_tilted_camera_sees_the_same_places_turned_and_the_far_ones_smaller():
    def center(cell: int) -> tuple[float, float, int]:
        image = render(Scene((Thing("ball", "red", "large", cell),)), 192, np.random.default_rng(0), "shifted")
        pixels = np.asarray(image, dtype=int)
        rows, columns = np.nonzero(pixels[..., 0] - pixels[..., 1] > 70)
        return columns.mean() / 192, rows.mean() / 192, len(rows)

    seen = {cell: center(cell) for cell in range(9)}
    assert seen[4][:2] == pytest.approx((0.5, 0.5), abs=0.03)
    for cell, (x, y, _) in seen.items():
        assert (x, y) == pytest.approx(cell_center(cell), abs=0.09), "a place is still where its words say"
    assert seen[2][1] > seen[0][1] + 0.02, "the right hangs lower"
    assert all(seen[far][2] < 0.95 * seen[near][2] for far, near in ((0, 6), (1, 7), (2, 8)))


@pytest.mark.parametrize("domain", LOOKS)
@pytest.mark.parametrize("color", LOOKS["standard"].rgb)
def test_an_object_has_the_shade_of_its_domain(color, domain):
    image = render(Scene((Thing("box", color, "large", 4),)), 96, np.random.default_rng(0), domain)
    shade = np.asarray(image, dtype=float)[48, 48] / 0.85  # a box is shaded towards the lower right
    assert np.abs(shade - LOOKS[domain].rgb[color]).max() < 12


@pytest.mark.parametrize("domain", LOOKS)
@pytest.mark.parametrize("word", [*CAMERA_MOVES, *ZOOMS])
def test_no_camera_looks_beyond_its_table(domain, word):
    x, y = CAMERA_MOVES.get(word, (0.0, 0.0))
    for side in (-0.02, 0.02):
        view = View(x=x + side, y=y + side, zoom=ZOOMS.get(word, 1.0) * 0.97)
        render(Scene((), view=view), 32, np.random.default_rng(0), domain)


def test_its_reader_reads_what_it_wrote(small):
    rows = list(SPEC.read(small))
    assert Counter(row.split for row in rows) == {"train": 40, "val": 8, "test": 12}
    assert not any(row.fault for row in rows)
    assert all(len(row.references) == 5 and len(set(row.references)) == 5 for row in rows)
    assert all((small / row.before).is_file() and (small / row.after).is_file() for row in rows)
    captions = json.loads((small / "change_captions.json").read_text())
    assert rows[0].references == captions["CLEVR_default_000010.png"]
    assert rows[0].change_types == ["orientation", "pose", "ocr"]


def test_every_reference_of_the_benchmark_reads_back_to_the_types_of_its_pair(small):
    rules = SPEC.grammar(small)
    assert rules == json.loads((small / "grammar.json").read_text()) == grammar()
    for row in SPEC.read(small):
        for text in row.references:
            if row.change_types == ["none"]:
                assert text in rules["no_change"]
                continue
            clauses = text.split(rules["clause_separator"])
            found = [next(r["type"] for r in rules["clauses"] if re.fullmatch(r["pattern"], c)) for c in clauses]
            assert sorted(found) == sorted(row.change_types), text


SAYS: dict[str, tuple[str, ...]] = {  # property of the thing before and of the thing after
    "size": ("size",),
    "color": ("color",),
    "substitution": ("size", "color", "kind"),
    "orientation": ("state",),
    "ocr": ("state",),
}


@pytest.mark.parametrize("change_type", CHANGE_TYPES)
def test_every_reference_reads_back_to_what_changed_from_what_to_what(change_type):
    rules = [rule for rule in grammar()["clauses"] if rule["type"] == change_type]
    for *_, change in changed_pairs(change_type):
        for number, text in enumerate(references((change,), 5)):
            found = re.fullmatch(rules[number]["pattern"], text).groupdict()
            before, after = found.get("before"), found.get("after")
            fields = SAYS.get(change_type, ())
            if fields:
                assert after == " ".join(str(getattr(change.after, field)) for field in fields)
                was = " ".join(str(getattr(change.before, field)) for field in fields)
                assert before == was or (before is None and change_type == "orientation" and number in (0, 2, 4))
            elif change_type == "counting":
                assert (before, after) == (NUMBERS[change.before.state], NUMBERS[change.after.state])
            elif change_type == "pose":
                assert (before, after) == (None, ARMS[change.after.state])
            elif change.word:
                assert (before, after) == (None, found["place"])
                assert after == (CAMERA if change_type == "viewpoint" else LAMP)[change.word]
            else:
                assert (before, after) == (None, None)
                assert found["object"] == name(change.before or change.after)


def test_a_folder_with_other_files_is_refused_and_nothing_of_it_removed(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"holds 'thesis\.tex', which MiniChange does not write; name another root"):
        generate(settings(tmp_path))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_older_benchmark_in_the_folder_is_replaced(tmp_path):
    few = {"train": 1, "val": 0, "test": 1}
    for scenes in (few | {"test": 3}, few):
        generate(settings(tmp_path / "mini", scenes=scenes, image_px=32))
    assert len(list((tmp_path / "mini/images").iterdir())) == 2


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("scenes", {"train": 1}, "expected train, val, test"),
        ("scenes", {"train": -1, "val": 1, "test": 1}, "each 0 or more"),
        ("scenes", {"train": 0, "val": 0, "test": 0}, "one of them more than 0"),
        ("scenes", {"train": 1, "val": 0, "dev": 1}, "scenes"),
        ("references", 6, "less than or equal to 5"),
        ("references", 0, "greater than or equal to 1"),
        ("image_px", 31, "greater than or equal to 32"),
        ("multi_change_share", 1.1, "less than or equal to 1"),
        ("multi_change_share", -0.1, "greater than or equal to 0"),
        ("seed", -1, "greater than or equal to 0"),
        ("domain", "moon", "'standard' or 'shifted'"),
        ("oversample_types", ["shape"], "oversample_types"),
    ],
)
def test_settings_beyond_their_limits_are_refused(tmp_path, field, value, message):
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, **{field: value})


def test_settings_at_their_limits_are_taken_and_frozen(tmp_path):
    edge = settings(tmp_path, scenes={"train": 0, "val": 0, "test": 1}, references=1, image_px=32, seed=0)
    assert edge.scenes == {"train": 0, "val": 0, "test": 1}
    with pytest.raises(TypeError, match="frozen"):
        edge.scenes["train"] = 3


def test_types_run_through_the_deck_by_number_and_others_come_on_top():
    rng = np.random.default_rng(0)
    deck = (*CHANGE_TYPES, "size")
    assert [sample_types(rng, n, 0.0, deck) for n in range(13)] == [(each,) for each in deck]
    several = [sample_types(rng, n, 1.0) for n in range(240)]
    assert all(types[0] == CHANGE_TYPES[n % 12] for n, types in enumerate(several))
    assert all(len(set(types)) == len(types) for types in several)
    assert 90 < Counter(len(types) for types in several)[2] < 150
    assert {len(types) for types in several} == {2, 3}
    third = sum(len(sample_types(rng, 0, 0.3)) > 1 for _ in range(400)) / 400
    assert third == pytest.approx(0.3, abs=0.07)


def changed_pairs(change_type: str, count: int = 12) -> list[tuple[Scene, Scene, Scene, Change]]:
    rng = np.random.default_rng(3)
    sampled = [sample_pair(rng, (change_type,)) for _ in range(count)]
    assert all(len(changes) == 1 and changes[0].type == change_type for *_, changes in sampled)
    return [(before, after, distractor, changes[0]) for before, after, distractor, changes in sampled]


def by_cell(scene: Scene) -> dict[int, Thing]:
    return {thing.cell: thing for thing in scene.things}


@pytest.mark.parametrize("change_type", CHANGE_TYPES)
def test_only_what_the_change_says_differs_between_the_scenes(change_type):
    for before, after, distractor, change in changed_pairs(change_type):
        one, two = by_cell(before), by_cell(after)
        differing = {cell for cell in {*one, *two} if one.get(cell) != two.get(cell)}
        said = change.before or change.after
        assert differing == ({said.cell} if said else set())
        assert (distractor.things, distractor.marks) == (before.things, before.marks)
        assert after.background == before.background == distractor.background
        if said:
            assert (one.get(said.cell), two.get(said.cell)) == (change.before, change.after)
            for view in (before.view, after.view):
                assert all(VISIBLE < value < 1 - VISIBLE for value in view.project(said.center))
        left = {said.cell} if change_type == "removal" else set()
        assert {mark.cell for mark in after.marks} == {*(mark.cell for mark in before.marks), *left}
        assert list(after.marks) == sorted(after.marks)
        assert [thing.cell for thing in after.things] == sorted(two)


SAME = {
    "size": ("kind", "color", "cell", "state", "dx", "dy"),
    "color": ("kind", "size", "cell", "state", "dx", "dy"),
    "orientation": ("kind", "color", "size", "cell", "dx", "dy"),
    "pose": ("kind", "color", "size", "cell", "dx", "dy"),
    "ocr": ("kind", "color", "size", "cell", "dx", "dy"),
    "counting": ("kind", "color", "size", "cell", "dx", "dy"),
    "substitution": ("size", "cell", "dx", "dy"),
}
DIFFERENT = {"size": "size", "color": "color", "substitution": "kind"}
KIND = {"orientation": "arrow", "pose": "doll", "ocr": "sign", "counting": "die"}


@pytest.mark.parametrize("change_type", SAME)
def test_an_object_keeps_all_but_the_property_that_changes(change_type):
    for *_, change in changed_pairs(change_type):
        before, after = change.before, change.after
        assert [getattr(after, field) for field in SAME[change_type]] == [
            getattr(before, field) for field in SAME[change_type]
        ]
        field = DIFFERENT.get(change_type, "state")
        assert getattr(after, field) != getattr(before, field)
        assert KIND.get(change_type) in (None, before.kind)


def test_an_addition_stands_where_nothing_was():
    for before, _, _, change in changed_pairs("addition", 40):
        assert change.before is None
        assert change.after.cell not in {*by_cell(before), *(mark.cell for mark in before.marks)}


def test_an_object_added_beside_another_change_takes_no_cell_that_was_just_freed():
    rng = np.random.default_rng(2)
    for _ in range(60):
        *_, changes = sample_pair(rng, ("disappearance", "addition", "removal"))
        cells = [(change.before or change.after).cell for change in changes]
        assert len(set(cells)) == 3


def test_several_changes_touch_different_objects_and_stand_in_reading_order():
    rng = np.random.default_rng(4)
    for _ in range(30):
        *_, changes = sample_pair(rng, ("color", "illumination", "size"))
        assert [change.order for change in changes] == sorted(change.order for change in changes)
        assert changes[0].type == "illumination"
        assert changes[1].before.cell < changes[2].before.cell


def test_the_lamp_goes_out_where_it_is_on_and_comes_on_where_it_is_off():
    seen = set()
    for before, after, _, change in changed_pairs("illumination", 60):
        lit = before.view.brightness > 0.7
        assert change.word == ("out" if lit else "on")
        assert (after.view.brightness > 0.7) is not lit
        seen.add(lit)
    assert seen == {True, False}


def test_the_camera_goes_where_the_word_says():
    seen = set()
    for before, after, _, change in changed_pairs("viewpoint", 60):
        seen.add(change.word)
        x, y = CAMERA_MOVES.get(change.word, (0, 0))
        assert after.view.x - before.view.x == pytest.approx(x, abs=0.011)
        assert after.view.y - before.view.y == pytest.approx(y, abs=0.011)
        if change.word in ZOOMS:
            assert after.view.zoom == pytest.approx(ZOOMS[change.word], rel=0.016)
    assert seen == {*CAMERA_MOVES, *ZOOMS}


def test_a_distractor_moves_camera_and_light_by_less_than_a_change():
    rng = np.random.default_rng(1)
    noises = []
    for _ in range(200):
        view = jitter(rng, View())
        assert max(abs(view.x), abs(view.y)) <= 0.01
        assert 0.985 <= view.zoom <= 1.015
        assert 0.96 <= view.brightness <= 1.04
        assert abs(view.lamp + 2.2) <= 0.3
        noises.append(view.noise)
    assert 0.2 < np.mean([noise > 0 for noise in noises]) < 0.4
    assert {0.0} < set(noises)
    assert max(noises) <= 2.0
    assert min(n for n in noises if n) >= 0.5


def test_scenes_hold_three_to_five_objects_each_in_a_cell_of_its_own_and_what_must_be_there():
    rng = np.random.default_rng(6)
    scenes = [sample_scene(rng, ("die", "doll")) for _ in range(200)]
    assert {len(scene.things) for scene in scenes} == {3, 4, 5}
    for scene in scenes:
        cells = [thing.cell for thing in scene.things]
        assert cells == sorted(set(cells))
        assert not set(cells) & {mark.cell for mark in scene.marks}
        assert {"die", "doll"} <= {thing.kind for thing in scene.things}
    assert 0.1 < np.mean([bool(scene.marks) for scene in scenes]) < 0.3
    assert 0.04 < np.mean([scene.view.brightness < 0.7 for scene in scenes]) < 0.2


def test_places_are_cells_in_reading_order_and_the_camera_projects_them():
    assert [cell_center(cell) for cell in (0, 4, 5, 8)] == [
        pytest.approx(center) for center in ((0.2, 0.2), (0.5, 0.5), (0.8, 0.5), (0.8, 0.8))
    ]
    assert PLACES[5] == "at the right"
    assert PLACES[6] == "at the bottom left"
    assert Thing("box", "red", "small", 2, dx=0.01, dy=-0.02).center == pytest.approx((0.81, 0.18))
    assert View(x=0.2, y=-0.1, zoom=1.4).project((0.8, 0.2)) == pytest.approx((0.64, 0.22))
    assert View(zoom=1.3).dimmed(DARK) == View(zoom=1.3, brightness=DARK)


BOX, SIGN = Thing("box", "red", "small", 2), Thing("sign", "blue", "large", 7, "K")
BY_HAND = {
    "addition": (Change("addition", None, BOX), "at the top right a small red box appeared on the table"),
    "disappearance": (
        Change("disappearance", BOX),
        "at the top right the small red box disappeared without a trace",
    ),
    "removal": (Change("removal", BOX), "at the top right the small red box was removed leaving a mark"),
    "substitution": (
        Change("substitution", BOX, replace(BOX, kind="cone", color="white")),
        "at the top right the small red box was replaced with a small white cone",
    ),
    "size": (
        Change("size", BOX, replace(BOX, size="large")),
        "at the top right the small red box became large in size",
    ),
    "color": (
        Change("color", BOX, replace(BOX, color="green")),
        "at the top right the small red box turned green in color",
    ),
    "orientation": (
        Change("orientation", Thing("arrow", "red", "small", 0, "up"), Thing("arrow", "red", "small", 0, "left")),
        "at the top left the small red arrow points left instead of up",
    ),
    "pose": (
        Change("pose", Thing("doll", "red", "small", 4, "up"), Thing("doll", "red", "small", 4, "down")),
        "in the centre the small red doll lowered its arms and changed its pose",
    ),
    "ocr": (
        Change("ocr", SIGN, replace(SIGN, state="2")),
        "at the bottom the large blue sign reads 2 and no longer K",
    ),
    "counting": (
        Change("counting", Thing("die", "red", "small", 3, 2), Thing("die", "red", "small", 3, 6)),
        "at the left the small red die shows six dots and no longer two",
    ),
    "viewpoint": (Change("viewpoint", word="in"), "the camera zoomed in between the images"),
    "illumination": (Change("illumination", word="out"), "the lamp went out between the images"),
}


@pytest.mark.parametrize("change_type", CHANGE_TYPES)
def test_the_second_paraphrase_of_each_type_by_hand(change_type):
    change, text = BY_HAND[change_type]
    assert references((change,), 2)[1] == text


@pytest.mark.parametrize("change_type", CHANGE_TYPES)
def test_each_reference_reads_back_to_its_change(change_type):
    rules = grammar()
    assert len(set(TEMPLATES[change_type])) == 5
    for *_, change in changed_pairs(change_type, 10):
        for text in references((change,), 5):
            read = [(c["type"], m) for c in rules["clauses"] if (m := re.fullmatch(c["pattern"], text))]
            assert {found for found, _ in read} == {change_type}, text
            thing = change.before or change.after
            if thing is not None:
                assert {(m["object"], m["place"]) for _, m in read} == {(name(thing), PLACES[thing.cell])}, text
            else:
                assert {m["object"] for _, m in read} == {text.split()[1]}


def test_several_changes_stand_one_after_another():
    rules = grammar()
    _, _, _, changes = sample_pair(np.random.default_rng(1), ("color", "removal", "illumination"))
    for text in references(changes, 5):
        clauses = text.split(rules["clause_separator"])
        read = [next(c["type"] for c in rules["clauses"] if re.fullmatch(c["pattern"], clause)) for clause in clauses]
        assert read == [change.type for change in changes]
        assert sorted(read) == ["color", "illumination", "removal"]


def test_no_change_is_said_in_sentences_that_the_grammar_knows():
    assert references((), 5) == list(NO_CHANGE_SENTENCES) == grammar()["no_change"]
    assert references((), 2) == ["nothing changed", "nothing has changed"]


def test_a_scene_is_described_cell_by_cell_in_reading_order():
    things = (
        SIGN,
        BOX,
        Thing("arrow", "red", "small", 0, "up"),
        Thing("doll", "white", "large", 1, "waving"),
        Thing("doll", "white", "large", 3, "down"),
        Thing("die", "green", "small", 8, 4),
    )
    scene = Scene(things, marks=(Mark(5),))
    assert list(describe_cells(scene)) == [0, 1, 2, 3, 5, 7, 8]
    assert describe_scene(scene) == (
        "at the top left a small red arrow pointing up, at the top a large white doll waving, "
        "at the top right a small red box, at the left a large white doll with arms down, at the right a mark, "
        "at the bottom a large blue sign reading K, at the bottom right a small green die with four dots"
    )


@pytest.mark.parametrize("domain", LOOKS)
@pytest.mark.parametrize("change_type", CHANGE_TYPES)
def test_a_change_moves_more_pixels_than_its_distractor(change_type, domain):
    """The largest local difference (over 4 x 4 pixels, in the channel that differs most) is the change's, but in one
    pair of five: raised arms and a red box that turns purple are small."""
    rng = np.random.default_rng(8)
    won = 0
    for _ in range(20):
        before, after, distractor, _ = sample_pair(rng, (change_type,))
        frames = [np.asarray(render(s, 96, rng, domain), dtype=np.float32) for s in (before, after, distractor)]
        changed, jittered = (
            np.abs(frame - frames[0]).max(-1).reshape(24, 4, 24, 4).mean((1, 3)).max() for frame in frames[1:]
        )
        won += changed > jittered
    assert won >= 16


def test_an_object_is_painted_in_its_colour_where_it_stands():
    image = render(Scene((Thing("box", "red", "large", 6),)), 96, np.random.default_rng(0))
    assert isinstance(image, Image.Image)
    assert (image.mode, image.size) == ("RGB", (96, 96))
    pixels = np.asarray(image, dtype=int)
    redness = pixels[..., 0] - pixels[..., 1]
    rows, columns = np.nonzero(redness > 60)
    assert (rows.mean() / 96, columns.mean() / 96) == pytest.approx((0.8, 0.2), abs=0.03)
    assert (columns.max() - columns.min()) / 96 == pytest.approx(0.285, abs=0.03)

"""MiniChange: its bytes, its scenes on both levels, and references that read back to exactly what changed."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m3diff.datasets.minichange import SPEC, language
from m3diff.datasets.minichange.generate import generate
from m3diff.datasets.minichange.language import describe_cells, describe_scene, grammar, name, references
from m3diff.datasets.minichange.levels import LEVELS, MOVES, VISIBLE, Pair, sample_types
from m3diff.datasets.minichange.render import MARGINS, render
from m3diff.datasets.minichange.scene import LIT, PLACES, WIDTHS, ZOOMS, Change, Mark, MiniChange, Scene, Thing, View
from m3diff.records.errors import DataError
from m3diff.records.schemas import CHANGE_TYPES, SPLITS
from m3diff.scoring.grammar import Clause, Grammar

FREE = LEVELS["free"]
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
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """A small benchmark of each level and domain, written over an older and larger one."""
    roots = {key: tmp_path_factory.mktemp("-".join(key)) / key[0] for key in PINNED}
    generate(settings(roots["grid", "standard"], scenes={"train": 0, "val": 0, "test": 31}, image_px=32))
    for (level, domain), root in roots.items():
        generate(settings(root, level=level, domain=domain))
    return roots


@pytest.fixture(params=LEVELS)
def small(request: pytest.FixtureRequest, made: dict[tuple[str, str], Path]) -> Path:
    """A small benchmark of each level."""
    return made[request.param, "standard"]


@pytest.fixture(scope="module", params=LEVELS)
def pairs(request: pytest.FixtureRequest) -> list[Pair]:
    """Of every type as many, some with several changes."""
    rng = np.random.default_rng(7)
    sampler = LEVELS[request.param]
    return [sampler.sample_pair(rng, sample_types(rng, number, multi_change_share=0.3)) for number in range(96)]


def test_the_bytes_of_a_small_benchmark_are_pinned(made):
    assert {key: digest(root) for key, root in made.items()} == PINNED


def test_the_bytes_are_the_same_on_a_cpu_without_the_newest_vector_instructions(tmp_path):
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    newest = " ".join(name for name in __cpu_dispatch__ if __cpu_features__.get(name))
    code = "import sys, tests.datasets.test_minichange as t; t.generate(t.settings(sys.argv[1], domain='shifted'))"
    environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": newest}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "mini")], env=environment, check=True)
    assert digest(tmp_path / "mini") == PINNED["grid", "shifted"]


def test_the_shifted_domain_has_the_scenes_and_words_of_the_standard_one_in_other_pixels(made):
    one, two = made["grid", "standard"], made["grid", "shifted"]
    for file in ("scenes.json", *SPEC.files):
        assert (one / file).read_text() == (two / file).read_text().replace('domain": "shifted', 'domain": "standard')
    for path in one.rglob("*.png"):
        images = (np.asarray(Image.open(at), dtype=int) for at in (path, two / path.relative_to(one)))
        assert np.abs(np.subtract(*images)).mean() > 10


@pytest.mark.parametrize("domain", MARGINS)
@pytest.mark.parametrize(("level", "shift", "zoom"), [("grid", 0.02, 0.97), ("free", 0.08, 0.97 * 0.94)])
def test_no_camera_looks_beyond_its_table(domain, level, shift, zoom):
    for word in (*MOVES, *ZOOMS):
        for side in (-shift, shift):
            view = LEVELS[level].moved(View(x=side, y=side), word)
            view = replace(view, zoom=view.zoom * zoom)
            render(Scene((), view=view, level=level), 32, np.random.default_rng(0), domain)


def test_its_reader_reads_what_it_wrote(small):
    rows = list(SPEC.read(small))
    assert Counter(row.split for row in rows) == {"train": 40, "val": 8, "test": 12}
    assert SPEC.grammar(small) == grammar(tuple(WIDTHS[small.name]))
    for row in rows:
        assert not row.fault
        assert len(set(row.references)) == len(row.references) == 5
        assert (small / row.before).is_file()
        assert (small / row.after).is_file()


def truth(change: Change, text: str) -> Clause:
    """What a reader should get of a change from a sentence, by the words that the sentence has room for."""
    before, after = change.before, change.after
    if change.type == "viewpoint":
        return Clause(change.type, "camera", language.CAMERA[change.word], None, language.CAMERA[change.word])
    if change.type == "illumination":
        return Clause(change.type, "lamp", language.LAMP[change.word], None, language.LAMP[change.word])
    thing = before or after
    place, said = PLACES[thing.cell], name(thing)
    told: dict[str, tuple[str | None, str | None]]
    told = dict.fromkeys(("addition", "disappearance", "removal"), (None, None))
    if before and after:
        was, now = str(before.state), str(after.state)
        told |= {"substitution": (name(before), name(after)), "size": (before.size, after.size)}
        told |= {"color": (before.color, after.color), "orientation": (was if was in text else None, now)}
        told |= {"pose": (None, language.ARMS.get(now)), "ocr": (was.lower(), now.lower())}
        states = before.state, after.state
        told["counting"] = tuple(language.NUMBERS[each] if isinstance(each, int) else None for each in states)
    return Clause(change.type, said, place, *told[change.type])


def test_every_reference_reads_back_to_exactly_the_true_changes(small):
    rules = Grammar.load(small / "grammar.json")
    rng = np.random.default_rng(17)
    for number in range(96):
        changes = LEVELS[small.name].sample_pair(rng, sample_types(rng, number, multi_change_share=0.3))[3]
        assert [change.order for change in changes] == sorted(change.order for change in changes)
        texts = references(changes, 5)
        assert len(set(texts)) == 5
        for text in texts:
            found, parts = rules.read(text), rules.parts(text)
            assert len(found) == len(changes)
            for clause, change, part in zip(found, changes, parts, strict=True):
                words = part.removeprefix(PLACES[change.order[0]]).split(name(change.before) if change.before else "\0")
                assert clause == truth(change, words[-1]), text


def test_a_folder_with_other_files_is_refused_and_nothing_of_it_removed(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"holds 'thesis\.tex', which MiniChange does not write; name another root"):
        generate(settings(tmp_path))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("scenes", [{"train": 1}, {"train": -1, "val": 1, "test": 1}, dict.fromkeys(SPLITS, 0)])
def test_scenes_are_of_all_three_splits_and_at_least_one(tmp_path, scenes):
    with pytest.raises(ValueError, match="expected train, val, test, each 0 or more and one of them more than 0"):
        settings(tmp_path, scenes=scenes)


def test_types_run_through_the_deck_by_number_and_others_come_on_top():
    rng = np.random.default_rng(0)
    deck = (*CHANGE_TYPES, "size")
    assert [sample_types(rng, n, 0.0, deck) for n in range(13)] == [(each,) for each in deck]
    several = [sample_types(rng, n, 1.0) for n in range(240)]
    assert all(types[0] == CHANGE_TYPES[n % 12] for n, types in enumerate(several))
    assert all(len(set(types)) == len(types) for types in several)
    assert 90 < Counter(len(types) for types in several)[2] < 150
    assert {len(types) for types in several} == {2, 3}
    assert 90 < sum(len(sample_types(rng, 0, 0.3)) > 1 for _ in range(400)) < 150


def test_only_what_the_changes_say_differs_between_the_scenes(pairs):
    is_free = pairs[0][0].level == "free"
    says = {"size": {"size"}, "color": {"color"}, "substitution": {"kind", "color", "state", "texture"}}
    assert {change.type for *_, changes in pairs if len(changes) == 1 for change in changes} == {*CHANGE_TYPES}
    for before, after, distractor, changes in pairs:
        gone, came = (Counter(a.things) - Counter(b.things) for a, b in ((before, after), (after, before)))
        assert (gone, came) == tuple(
            Counter(thing for change in changes if (thing := getattr(change, side))) for side in ("before", "after")
        )
        removed = [change.before for change in changes if change.type == "removal"]
        left = [Mark(thing.cell, *((thing.dx, thing.dy) if is_free else ())) for thing in removed]
        assert Counter(after.marks) == Counter([*before.marks, *left])
        assert (distractor.things, distractor.marks) == (before.things, before.marks)
        assert len({(scene.background, scene.cloth) for scene in (before, after, distractor)}) == 1
        if not is_free:
            cells = [thing.cell for thing in after.things]
            assert cells == sorted({*cells} - {mark.cell for mark in after.marks})
            assert list(after.marks) == sorted(after.marks)
            touched = [change.before or change.after for change in changes]
            seen_at = [view.project(thing.center) for thing in touched if thing for view in (before.view, after.view)]
            assert all(VISIBLE < value < 1 - VISIBLE for point in seen_at for value in point)
        for change in changes:
            if change.before and change.after:
                one, two = vars(change.before), vars(change.after)
                differing = {field for field in one if one[field] != two[field]}
                allowed = says.get(change.type, {"state"})
                assert differing <= allowed
                assert differing & ({"kind"} if change.type == "substitution" else allowed)


@pytest.mark.parametrize(
    ("level", "least", "most", "zoom", "light"), [("grid", 0, 0.0142, 0.015, 0.04), ("free", 0.02, 0.05, 0.05, 0.1)]
)
def test_a_distractor_moves_camera_and_light_by_less_than_a_quarter_of_a_change(level, least, most, zoom, light):
    rng, sampler = np.random.default_rng(1), LEVELS[level]
    views = [sampler.jitter(rng, View()) for _ in range(300)]
    shifts = [np.hypot(view.x, view.y) for view in views]
    assert least <= min(shifts) < max(shifts) <= most < sampler.move / 4
    assert 0.8 * zoom < max(abs(view.zoom - 1) for view in views) <= zoom
    assert 0.8 * light < max(abs(view.brightness - LIT) for view in views) <= light
    assert (ZOOMS["out"] * (1 + zoom) < 0.8, ZOOMS["in"] * (1 - zoom) > 1.3) == (True, True)
    assert sampler.dark * (1 + light) < 0.65
    noises = [view.noise for view in views]
    assert 0.2 < np.mean([noise > 0 for noise in noises]) < 0.4
    assert 0.5 <= min(filter(None, noises)) < max(noises) <= 2.0


ONE, NEAR = Thing("ball", "red", "small", 4, dx=-0.1), Thing("box", "blue", "small", 4, dx=0.1)
BLUE = replace(ONE, color="blue")


@pytest.mark.parametrize(
    ("others", "clear"),
    [
        ((NEAR,), True),
        ((replace(ONE, dx=0.1),), False),  # a second small red ball in the centre
        ((replace(ONE, dx=0.1, size="medium"),), True),
        ((replace(ONE, cell=3),), True),  # one more at the left
        ((replace(BLUE, dx=0.1),), False),  # the counterpart would be a second small blue ball in the centre
        ((replace(NEAR, color="red", dx=0.02),), False),  # red, and touches
        ((replace(NEAR, color="white", dx=0.02),), True),
        ((replace(NEAR, color="white", dx=-0.08),), False),  # covers most of it
    ],
)
def test_a_change_of_what_cannot_be_told_apart_is_not_taken(others, clear):
    before, after = (Scene((thing, *others), level="free") for thing in (ONE, BLUE))
    assert FREE.is_clear(before, after, [Change("color", ONE, BLUE)]) is clear


BOX, SIGN = Thing("box", "red", "small", 2), Thing("sign", "blue", "large", 7, "K")


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

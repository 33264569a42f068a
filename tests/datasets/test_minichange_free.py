"""MiniChange's level *free*: what a reference speaks of is seen, named by one object alone and read back exactly."""

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m3diff.datasets.minichange import SPEC, levels
from m3diff.datasets.minichange.generate import generate
from m3diff.datasets.minichange.language import (
    ARMS,
    CAMERA,
    LAMP,
    NUMBERS,
    describe_cells,
    describe_scene,
    grammar,
    name,
    references,
)
from m3diff.datasets.minichange.levels import CLOTHS, LEVELS, TEXTURES, Pair, place_of, sample_types, seen, square
from m3diff.datasets.minichange.render import INK, LOOKS, render, sprite
from m3diff.datasets.minichange.scene import LIT, PLACES, WIDTHS, ZOOMS, Change, Mark, MiniChange, Scene, Thing, View
from m3diff.records.files import sha256
from m3diff.records.schemas import CHANGE_TYPES
from m3diff.scoring.grammar import Clause, Grammar
from m3diff.scoring.metrics.pixel_threshold import DIFFERENCES, roc_auc

FREE = LEVELS["free"]
sample_pair, sample_scene, jitter, CAMERA_MOVES, DARK = (
    FREE.sample_pair,
    FREE.sample_scene,
    FREE.jitter,
    FREE.moves,
    FREE.dark,
)

SMALL = {
    "level": "free",
    "seed": 5,
    "scenes": {"train": 8, "val": 2, "test": 14},
    "image_px": 64,
    "references": 5,
    "multi_change_share": 0.3,
    "oversample_types": [],
}
SMALL_ANNOTATIONS = "08baeb4cfb07ee30c708a0a50534da59ebd87966f1f60eac49f92bd23216b8b1"
SMALL_IMAGES = "0d002dddff1f766354ed7b715fbd910fbdf3feb10692a8d2ccd96f4af9f5e0b7"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("free") / "small"
    generate(MiniChange.model_validate(SMALL | {"root": root}))
    return root


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """Of every type as many, some with several changes."""
    rng = np.random.default_rng(7)
    return [sample_pair(rng, sample_types(rng, number, multi_change_share=0.3)) for number in range(96)]


def changed(pairs: list[Pair]) -> list[tuple[Scene, Thing, Scene, Scene, Change]]:
    """Every object that changed or came of it: its scene, itself, the scenes before and after, and the change."""
    return [
        (scene, thing, before, after, change)
        for before, after, _, changes in pairs
        for change in changes
        for scene, thing in ((before, change.before), (after, change.after))
        if thing is not None
    ]


def test_the_bytes_of_a_small_benchmark_are_pinned(small):
    files = sorted(path for path in small.rglob("*") if path.is_file())
    images = b"".join(path.read_bytes() for path in files if path.suffix == ".png")
    annotations = "".join(sha256(path) for path in files if path.suffix == ".json" and path.name != "scenes.json")
    assert len(files) == 3 * 24 + 6
    assert hashlib.sha256(annotations.encode()).hexdigest() == SMALL_ANNOTATIONS
    assert hashlib.sha256(images).hexdigest() == SMALL_IMAGES


def test_its_reader_reads_what_it_wrote(small):
    rows = list(SPEC.read(small))
    assert not any(row.fault for row in rows)
    assert Counter(row.split for row in rows) == {"train": 16, "val": 4, "test": 28}
    assert SPEC.grammar(small) == grammar(("small", "medium", "large")) != grammar()


def test_a_setting_that_names_no_level_is_of_the_grid(tmp_path):
    without = {key: value for key, value in SMALL.items() if key != "level"}
    assert MiniChange.model_validate(without | {"root": tmp_path}).level == "grid"
    with pytest.raises(ValueError, match="'grid' or 'free'"):
        MiniChange.model_validate(SMALL | {"root": tmp_path, "level": "hard"})


def truth(change: Change, text: str) -> Clause:
    """What a reader should get of a change from a sentence, by the words that the sentence has room for."""
    before, after = change.before, change.after
    if change.type == "viewpoint":
        return Clause(change.type, "camera", CAMERA[change.word], None, CAMERA[change.word])
    if change.type == "illumination":
        return Clause(change.type, "lamp", LAMP[change.word], None, LAMP[change.word])
    thing = before or after
    place, said = PLACES[thing.cell], name(thing)
    told: dict[str, tuple[str | None, str | None]] = {
        "addition": (None, None),
        "disappearance": (None, None),
        "removal": (None, None),
    }
    if before and after:
        told |= {
            "substitution": (name(before), name(after)),
            "size": (before.size, after.size),
            "color": (before.color, after.color),
            "orientation": (str(before.state) if text.count(str(before.state)) else None, str(after.state)),
            "pose": (None, ARMS.get(str(after.state))),
            "ocr": (str(before.state).lower(), str(after.state).lower()),
            "counting": tuple(NUMBERS[s] if isinstance(s, int) else None for s in (before.state, after.state)),
        }
    return Clause(change.type, said, place, *told[change.type])


@pytest.mark.parametrize("scenes", [96, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_reference_reads_back_to_exactly_the_true_changes(small, scenes):
    rules = Grammar.load(small / "grammar.json")
    rng = np.random.default_rng(17)
    for number in range(scenes):
        changes = sample_pair(rng, sample_types(rng, number, multi_change_share=0.3))[3]
        texts = references(changes, 5)
        assert len(set(texts)) == 5
        for text in texts:
            found, parts = rules.read(text), rules.parts(text)
            assert len(found) == len(changes)
            for clause, change, part in zip(found, changes, parts, strict=True):
                words = part.removeprefix(PLACES[change.order[0]]).split(name(change.before) if change.before else "\0")
                assert clause == truth(change, words[-1]), text


def test_scenes_hold_six_to_eight_objects_of_every_look_and_most_overlap():
    rng = np.random.default_rng(0)
    scenes = [sample_scene(rng, ("die", "doll")) for _ in range(120)]
    things = [thing for scene in scenes for thing in scene.things]
    assert {len(scene.things) for scene in scenes} == {6, 7, 8}
    assert {thing.size for thing in things} == {"small", "medium", "large"}
    assert {thing.texture for thing in things} == set(TEXTURES)
    assert {scene.cloth for scene in scenes} == set(CLOTHS)
    assert all({"die", "doll"} <= {thing.kind for thing in scene.things} for scene in scenes)
    covered = [
        seen(square(thing), map(square, scene.things[k + 1 :])) < 0.98
        for scene in scenes
        for k, thing in enumerate(scene.things)
    ]
    assert 0.2 < np.mean(covered) < 0.6
    crowded = [max(Counter(thing.cell for thing in scene.things).values()) > 1 for scene in scenes]
    assert np.mean(crowded) > 0.75
    assert 0.04 < np.mean([scene.view.brightness < 0.7 for scene in scenes]) < 0.2
    assert {len(scene.marks) for scene in scenes} == {0, 1, 2}


def test_an_object_stands_in_the_third_of_the_frame_that_its_place_names_and_not_on_a_border():
    rng = np.random.default_rng(1)
    for scene in (sample_scene(rng) for _ in range(60)):
        for each in (*scene.things, *scene.marks):
            x, y = scene.view.project(each.center)
            assert each.cell == int(x * 3) + 3 * int(y * 3)
            assert min(abs(value - border) for value in (x, y) for border in (1 / 3, 2 / 3)) > 0.029
            assert 0.099 < min(x, y) < max(x, y) < 0.901
    assert [place_of(point) for point in ((0.1, 0.1), (0.5, 0.1), (0.9, 0.5), (0.2, 0.9))] == [0, 1, 5, 6]


def opened(scene: Scene, thing: Thing, view: View) -> float:
    """Share of an object's form that is in the frame and not behind another's, by the forms that are painted."""
    side = 96
    whole = open_ = None
    for each in scene.things[scene.things.index(thing) :]:
        width = round(WIDTHS["free"][each.size] * view.zoom * side)
        form = sprite("standard", each.kind, each.color, each.state, width).getchannel("A")
        canvas = Image.new("L", (3 * side, 3 * side), 0)
        x, y = view.project(each.center)
        canvas.paste(form, (round((x + 1) * side - width / 2), round((y + 1) * side - width / 2)))
        mask = np.asarray(canvas) > 127
        if each is thing:
            whole = mask.sum()
            open_ = mask.copy()
            frame = np.zeros_like(mask)
            frame[side : 2 * side, side : 2 * side] = True
            open_ &= frame
        else:
            open_ &= ~mask
    return float(open_.sum() / whole)


def test_what_changed_is_open_to_view_in_both_images(pairs):
    for scene, thing, before, after, change in changed(pairs):
        least = 0.8 if change.type in ("orientation", "pose", "ocr", "counting") else 0.58
        for view in (before.view, after.view):
            assert opened(scene, thing, view) >= least, (change, scene)


def test_no_object_is_hidden_in_either_scene(pairs):
    for before, after, _, _ in pairs[:36]:
        for scene in (before, after):
            assert min(opened(scene, thing, View()) for thing in scene.things if min(thing.center) > 0.2) > 0.25


def test_a_changed_object_has_a_name_and_a_colour_of_its_own_around_it(pairs):
    for scene, thing, *_ in changed(pairs):
        same = [each for each in scene.things if (each.cell, name(each)) == (thing.cell, name(thing))]
        assert same == [thing]
        for each in scene.things:
            apart = max(abs(a - b) for a, b in zip(each.center, thing.center, strict=True))
            reach = (WIDTHS["free"][each.size] + WIDTHS["free"][thing.size]) / 2
            assert each is thing or each.color != thing.color or apart >= reach


def test_a_changed_object_is_in_its_third_in_both_images_unless_the_camera_is_said_to_move(pairs):
    for _, thing, before, after, _ in changed(pairs):
        moved = any(c.type == "viewpoint" for b, a, _, changes in pairs if b is before for c in changes)
        for view in (before.view,) if moved else (before.view, after.view):
            x, y = view.project(thing.center)
            assert int(x * 3) + 3 * int(y * 3) == thing.cell


@pytest.mark.parametrize("change_type", CHANGE_TYPES)
def test_only_what_the_change_says_differs_between_the_scenes(pairs, change_type):
    mine = [pair for pair in pairs if [change.type for change in pair[3]] == [change_type]]
    assert len(mine) >= 3
    for before, after, distractor, (change,) in mine:
        gone, came = (list(Counter(a.things) - Counter(b.things)) for a, b in ((before, after), (after, before)))
        assert (gone, came) == tuple([thing] if thing else [] for thing in (change.before, change.after))
        assert (distractor.things, distractor.marks) == (before.things, before.marks)
        left = [Mark(change.before.cell, change.before.dx, change.before.dy)] if change_type == "removal" else []
        assert list(after.marks) == [*before.marks, *left]
        assert before.background == after.background == distractor.background
        assert before.cloth == after.cloth == distractor.cloth
        if change.before and change.after:
            says = {"size": {"size"}, "color": {"color"}, "substitution": {"kind", "color", "state", "texture"}}
            differing = {f for f in vars(change.before) if getattr(change.before, f) != getattr(change.after, f)}
            assert differing <= says.get(change_type, {"state"})
            assert differing & ({"kind"} if change_type == "substitution" else says.get(change_type, {"state"}))
            assert after.things.index(change.after) == before.things.index(change.before), "its height in the pile"


def test_a_mark_that_a_removal_left_is_open_and_apart_from_others(pairs):
    removals = [pair for pair in pairs if any(change.type == "removal" for change in pair[3])]
    assert len(removals) >= 8
    for _, after, _, _ in removals:
        mark = after.marks[-1]
        assert seen(square(mark), map(square, after.things), after.view) >= 0.65
        for each in after.marks[:-1]:
            assert max(abs(a - b) for a, b in zip(each.center, mark.center, strict=True)) > 0.17


ONE = Thing("ball", "red", "small", 4, dx=-0.1)
NEAR = Thing("box", "blue", "small", 4, dx=0.1)
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
    assert levels._is_clear(before, after, [Change("color", ONE, BLUE)]) is clear


def test_what_came_and_what_went_in_one_pair_are_apart():
    rng = np.random.default_rng(3)
    for _ in range(15):
        *_, changes = sample_pair(rng, ("disappearance", "addition"))
        went, came = (next(c for c in changes if c.type == kind) for kind in ("disappearance", "addition"))
        assert max(abs(a - b) for a, b in zip(went.before.center, came.after.center, strict=True)) >= 0.2


def test_a_distractor_moves_camera_and_light_by_less_than_a_quarter_of_a_change():
    rng = np.random.default_rng(1)
    views = [jitter(rng, View()) for _ in range(300)]
    shifts = [np.hypot(view.x, view.y) for view in views]
    assert 0.02 <= min(shifts) < max(shifts) <= 0.05 < min(np.hypot(*move) for move in CAMERA_MOVES.values()) / 4
    zooms, lights = ([getattr(view, field) for view in views] for field in ("zoom", "brightness"))
    assert 0.95 <= min(zooms) < 0.96
    assert 1.04 < max(zooms) <= 1.05
    assert ZOOMS["out"] * 1.05 < 0.8
    assert ZOOMS["in"] * 0.95 > 1.3
    assert LIT * 0.9 <= min(lights) < 0.91
    assert 1.09 < max(lights) <= LIT * 1.1
    assert DARK * 1.1 < 0.65


def test_camera_and_lamp_do_what_the_word_says(pairs):
    seen_words = set()
    rng = np.random.default_rng(2)
    for change_type in ("viewpoint", "illumination") * 20:
        before, after, _, (change,) = sample_pair(rng, (change_type,))
        seen_words.add(change.word)
        ratio = after.view.brightness / before.view.brightness
        if change_type == "illumination":
            assert (ratio < 0.7) if change.word == "out" else (ratio > 1.4)
            continue
        assert 0.89 < ratio < 1.11
        x, y = CAMERA_MOVES.get(change.word, (0.0, 0.0))
        assert abs(after.view.x - before.view.x - x) <= 0.05
        assert abs(after.view.y - before.view.y - y) <= 0.05
        assert after.view.zoom / before.view.zoom == pytest.approx(ZOOMS.get(change.word, 1.0), rel=0.051)
    assert seen_words == {*CAMERA_MOVES, *ZOOMS, "out", "on"}


@pytest.mark.parametrize("domain", LOOKS)
@pytest.mark.parametrize("word", [*CAMERA_MOVES, *ZOOMS])
def test_no_camera_looks_beyond_its_table(domain, word):
    x, y = CAMERA_MOVES.get(word, (0.0, 0.0))
    for side in (-0.08, 0.08):
        view = View(x=x + side, y=y + side, zoom=ZOOMS.get(word, 1.0) * 0.97 * 0.94)
        render(Scene((), view=view, level="free"), 32, np.random.default_rng(0), domain)


def test_the_later_of_two_objects_covers_the_earlier():
    below, above = (
        Thing("box", "red", "large", 4),
        Thing("box", "blue", "medium", 4),
    )
    shades = []
    for things in ((below, above), (above, below)):
        image = render(Scene(things, level="free"), 96, np.random.default_rng(0))
        shades.append(np.asarray(image, dtype=int)[48, 48])
    assert shades[0][2] - shades[0][0] > 60
    assert shades[1][0] - shades[1][2] > 60


@pytest.mark.parametrize("size", WIDTHS["free"])
def test_sizes_are_as_wide_as_they_say(size):
    image = render(Scene((Thing("box", "red", size, 4),), level="free"), 200, np.random.default_rng(0))
    pixels = np.asarray(image, dtype=int)
    columns = np.nonzero((pixels[..., 0] - pixels[..., 1] > 60).any(0))[0]
    assert (columns.max() - columns.min() + 1) / 200 == pytest.approx(WIDTHS["free"][size], abs=0.02)
    assert min(b / a for a, b in zip(*(list(WIDTHS["free"].values())[k:] for k in (0, 1)), strict=False)) > 1.3


@pytest.mark.parametrize("texture", TEXTURES)
@pytest.mark.parametrize("color", LOOKS["standard"].rgb)
def test_a_texture_is_of_shades_of_the_named_colour_and_leaves_letters_alone(texture, color):
    plain, own = (
        np.asarray(sprite("standard", "sign", color, "8", 60, each), dtype=int) for each in ("plain", texture)
    )
    assert (plain[..., 3] == own[..., 3]).all()
    differs = (plain != own).any(-1)
    assert (differs.mean() == 0) if texture == "plain" else (0.05 < differs.mean() < 0.6)
    ratio = own[differs][:, :3] / np.maximum(plain[differs][:, :3], 1)
    assert not differs.any() or (0.7 < np.median(ratio) < 0.85)
    ink = np.array(INK.get(color, (250, 248, 240)))
    letter = (
        np.abs(np.asarray(sprite("standard", "sign", color, "8", 60, "plain"), dtype=int)[..., :3] - ink).max(-1) < 10
    )
    assert not (letter & differs).any()


def test_no_word_names_a_texture_or_a_table():
    scene = sample_scene(np.random.default_rng(4))
    plain = replace(scene, cloth="weave", things=tuple(replace(thing, texture="plain") for thing in scene.things))
    assert describe_scene(plain) == describe_scene(scene)


def test_several_objects_at_one_place_are_described_from_left_to_right():
    things = (
        Thing("box", "red", "medium", 1, dx=0.05),
        Thing("ball", "blue", "small", 0, dx=0.02),
        Thing("cone", "white", "large", 1, dx=-0.04),
    )
    scene = Scene(things, marks=(Mark(1, dx=0.08),), level="free")
    assert describe_scene(scene) == (
        "at the top left a small blue ball, at the top a large white cone, at the top a medium red box, "
        "at the top a mark"
    )
    assert describe_cells(scene) == {
        0: "a small blue ball",
        1: "a large white cone and a medium red box and a mark",
    }


@pytest.mark.parametrize("scenes", [240, pytest.param(1200, marks=pytest.mark.slow)])
def test_a_threshold_on_pixels_does_not_find_the_changes_of_free_and_finds_those_of_the_grid(scenes):
    areas = {}
    for level, sampler in LEVELS.items():
        scores: dict[str, list[tuple[float, float]]] = {kind: [] for kind in DIFFERENCES}
        for number in range(scenes):
            rng = np.random.default_rng([12, number])
            types = sample_types(rng, number, multi_change_share=0.15)
            before, after, distractor = (render(each, 48, rng) for each in sampler.sample_pair(rng, types)[:3])
            for kind, differ in DIFFERENCES.items():
                scores[kind].append((differ(before, after), differ(before, distractor)))
        for kind, pairs in scores.items():
            one, two = (list(each) for each in zip(*pairs, strict=True))
            areas[level, kind] = roc_auc(one, two)
    assert areas["grid", "window"] > 0.85
    assert areas["grid", "mean"] > 0.72
    assert areas["free", "mean"] <= 0.70
    assert areas["free", "window"] <= 0.70

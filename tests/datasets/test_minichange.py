"""MiniChange: every byte follows from the seed, splits share no scene, captions read back to what was changed."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from components.datasets.minichange.settings import Synthesize
from components.records import CHANGE_TYPES
from components.datasets.minichange.change import sample_pair
from components.datasets.minichange.render import render
from components.datasets.minichange.language import NO_CHANGE, captions, grammar, name
from components.datasets.minichange.scene import PLACES
from components.synthesize.stage import synthesize

SMALL = Synthesize(
    seed=5,
    scenes={"train": 20, "val": 4, "test": 6},
    image_px=64,
    references=5,
    multi_change_share=0.2,
    oversample_types=["size"],
)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for folder, seed in (("a", 5), ("b", 5), ("c", 6)):
        synthesize(SMALL.model_copy(update={"seed": seed}), tmp_path / folder)
    a, b, c = (digests(tmp_path / folder) for folder in "abc")
    assert a == b
    assert a.keys() == c.keys()
    assert a["change_captions.json"] != c["change_captions.json"]
    images = [file for file in a if file.endswith(".png")]
    assert len(images) == 3 * 30
    assert all(a[image] != c[image] for image in images)


def test_no_scene_is_in_two_splits(tmp_path: Path) -> None:
    synthesize(SMALL, tmp_path)
    splits = json.loads((tmp_path / "splits.json").read_text())
    assert {split: len(numbers) for split, numbers in splits.items()} == SMALL.scenes
    together = [number for numbers in splits.values() for number in numbers]
    assert sorted(together) == sorted(set(together))


def test_more_training_scenes_leave_the_held_out_ones_as_they_are(tmp_path: Path) -> None:
    for folder, train in (("few", 2), ("more", 5)):
        synthesize(SMALL.model_copy(update={"scenes": SMALL.scenes | {"train": train}}), tmp_path / folder)
    few, more = (json.loads((tmp_path / folder / "splits.json").read_text()) for folder in ("few", "more"))
    assert (few["val"], few["test"]) == (more["val"], more["test"])
    images = {name: content for name, content in digests(tmp_path / "few").items() if name.endswith(".png")}
    assert images.items() <= digests(tmp_path / "more").items()


def test_what_trains_twice_is_drawn_twice_as_often_for_training_alone(tmp_path: Path) -> None:
    scenes = {"train": 260, "val": 0, "test": 120}
    synthesize(SMALL.model_copy(update={"scenes": scenes, "image_px": 32, "multi_change_share": 0.0}), tmp_path)
    splits = json.loads((tmp_path / "splits.json").read_text())
    drawn = json.loads((tmp_path / "type_mapping.json").read_text())
    of_size = {int(name.removesuffix(".png")) for name in drawn["size"]}
    assert len(of_size & set(splits["train"])) == 2 * 260 / 13
    assert len(of_size & set(splits["test"])) == 120 / 12


@pytest.mark.parametrize("change_type", CHANGE_TYPES)
def test_each_caption_reads_back_to_its_change(change_type: str) -> None:
    rules = grammar()
    rng = np.random.default_rng(3)
    for _ in range(10):
        _, _, _, changes = sample_pair(rng, (change_type,))
        for caption in captions(changes, 5):
            read = [(c["type"], m) for c in rules["clauses"] if (m := re.fullmatch(c["pattern"], caption))]
            assert {found for found, _ in read} == {change_type}, caption
            thing = changes[0].before or changes[0].after
            if thing is not None:
                assert {(m["object"], m["place"]) for _, m in read} == {(name(thing), PLACES[thing.cell])}, caption


def test_several_changes_are_said_one_after_another() -> None:
    rules = grammar()
    _, _, _, changes = sample_pair(np.random.default_rng(1), ("color", "removal", "illumination"))
    for caption in captions(changes, 5):
        clauses = caption.split(rules["clause_separator"])
        read = {c["type"] for clause in clauses for c in rules["clauses"] if re.fullmatch(c["pattern"], clause)}
        assert len(clauses) == 3
        assert read == {"color", "removal", "illumination"}


def test_no_change_is_said_in_words_that_the_grammar_knows() -> None:
    assert captions((), 5) == list(NO_CHANGE) == grammar()["no_change"]


@pytest.mark.parametrize("change_type", CHANGE_TYPES)
def test_a_change_moves_more_pixels_than_its_distractor(change_type: str) -> None:
    """The largest local difference (over 4 x 4 pixels, in the channel that differs most) is the change's, but in one
    pair of five: raised arms and a red box that turns purple are small."""
    rng = np.random.default_rng(8)
    won = 0
    for _ in range(20):
        before, after, distractor, _ = sample_pair(rng, (change_type,))
        frames = [np.asarray(render(s, 96, rng), dtype=np.float32) for s in (before, after, distractor)]
        changed, jittered = (
            np.abs(frame - frames[0]).max(-1).reshape(24, 4, 24, 4).mean((1, 3)).max() for frame in frames[1:]
        )
        won += changed > jittered
    assert won >= 16

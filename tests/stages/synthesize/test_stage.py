"""The stage: the reader's dataset writes itself; equal settings give equal bytes, splits share no scene."""

import json
from pathlib import Path

import pytest

from m3diff.datasets import DATASETS
from m3diff.datasets.minichange.scene import MiniChange
from m3diff.datasets.spec import Generator
from m3diff.records.files import sha256
from m3diff.settings.section import ParamsError, Section
from m3diff.stages.synthesize.stage import synthesize

SMALL = {
    "seed": 5,
    "scenes": {"train": 6, "val": 2, "test": 3},
    "image_px": 32,
    "references": 2,
    "multi_change_share": 0.2,
    "oversample_types": [],
}


def make(root: Path, **changes) -> Path:
    synthesize("mini", "minichange", MiniChange.model_validate(SMALL | {"root": root} | changes))
    return root


def digests(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("synthesize") / "mini")


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(made, tmp_path):
    a, b, c = digests(made), digests(make(tmp_path / "b")), digests(make(tmp_path / "c", seed=6))
    assert a == b
    assert a.keys() == c.keys()
    assert a["change_captions.json"] != c["change_captions.json"]
    images = [file for file in a if file.endswith(".png")]
    assert len(images) == 3 * 11
    assert all(a[image] != c[image] for image in images)


def test_no_scene_is_in_two_splits_and_training_comes_last(made):
    splits = json.loads((made / "splits.json").read_text())
    assert splits == {"train": [5, 6, 7, 8, 9, 10], "val": [3, 4], "test": [0, 1, 2]}
    assert list(splits) == ["train", "val", "test"]


def test_as_many_references_as_asked_for(made):
    for file in ("change_captions.json", "no_change_captions.json"):
        captions = json.loads((made / file).read_text())
        assert list(captions) == [f"CLEVR_default_{number:06d}.png" for number in range(11)]
        assert {len(texts) for texts in captions.values()} == {2}


def test_more_training_scenes_leave_the_held_out_ones_as_they_are(made, tmp_path):
    more = make(tmp_path / "more", scenes=SMALL["scenes"] | {"train": 9})
    few_splits, more_splits = (json.loads((root / "splits.json").read_text()) for root in (made, more))
    assert (few_splits["val"], few_splits["test"]) == (more_splits["val"], more_splits["test"])
    images = {file: digest for file, digest in digests(made).items() if file.endswith(".png")}
    assert images.items() <= digests(more).items()


def test_each_scene_has_the_type_of_its_place_in_the_deck_and_oversampled_ones_come_twice_in_training(tmp_path):
    scenes = {"train": 26, "val": 12, "test": 12}
    root = make(tmp_path / "even", scenes=scenes, multi_change_share=0.0, oversample_types=["size"])
    drawn = json.loads((root / "type_mapping.json").read_text())
    numbers = {kind: [int(file.removesuffix(".png")) for file in files] for kind, files in drawn.items()}
    order = list(numbers)
    assert order[0] == "viewpoint"
    assert order[6] == "size"
    assert len(order) == 12
    deck = [*order, "size"]
    for number in range(24):
        assert [kind for kind in numbers if number in numbers[kind]] == [order[number % 12]]
    for number in range(24, 50):
        assert [kind for kind in numbers if number in numbers[kind]] == [deck[number % 13]]


def test_a_dataset_that_cannot_make_itself_is_refused_with_those_that_can():
    cfg = MiniChange.model_validate(SMALL | {"root": "nowhere"})
    for reader in ("clevr_change", "clever_change"):
        with pytest.raises(ParamsError, match=rf"synthesize\.mini: '{reader}' cannot make itself; .* from minichange"):
            synthesize("mini", reader, cfg)


def test_settings_of_another_generator_are_refused():
    with pytest.raises(ParamsError, match=r"synthesize\.mini: expected MiniChange, found Section"):
        synthesize("mini", "minichange", Section())


def test_the_stage_calls_the_generator_of_the_reader_whatever_the_dataset_is_called(monkeypatch, tmp_path):
    class Toy(Section):
        root: Path

    calls = []
    spec = DATASETS["pairs"].__class__(
        "Toy", None, None, DATASETS["pairs"].licence, DATASETS["pairs"].read, (), generate=Generator(Toy, calls.append)
    )
    monkeypatch.setitem(DATASETS, "toy", spec)
    synthesize("anything", "toy", Toy(root=tmp_path))
    assert calls == [Toy(root=tmp_path)]

"""What makes with weights: InstructPix2Pix and features on tiny models, the search for neighbours, and writers."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from m3diff.datasets.minichange import image_paths
from m3diff.endpoint.answers import EndpointAnswer
from m3diff.images.open import ImageError
from m3diff.models.device import Device
from m3diff.settings.section import ParamsError
from m3diff.stages.augment import weights as module
from m3diff.stages.augment.params import EndpointWriterSettings, FeatureModel, InstructPix2Pix
from m3diff.stages.augment.weights import Features, Pix2PixEditor, nearest, size_for_editor
from m3diff.stages.augment.writers import LanguageModel, read_texts, select_texts
from tests.chat import chat_server
from tests.stages.augment.toys import BASE, clip, draw, instruct_pix2pix, siglip

CPU = Device(gpu=False, precision="fp32")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("models") / "raw", image_px=128)


@pytest.fixture(scope="module")
def images(root: Path) -> list[Path]:
    return [root / path for number in range(40) for path in image_paths(number)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {make: make(folder / make.__name__) for make in (instruct_pix2pix, clip, siglip)}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 50, 3), np.uint8)).save(tmp_path / "image.png")
    return tmp_path / "image.png"


def editor(model: Path, **changes: Any) -> Pix2PixEditor:
    values = {"kind": "instruct_pix2pix", "model": model, "steps": 2, "image_px": 32} | changes
    return Pix2PixEditor(InstructPix2Pix(**values), CPU)


def test_the_same_seed_gives_the_same_edit_whatever_was_edited_before(folders, image):
    one = editor(folders[instruct_pix2pix])
    assert "pipeline" not in vars(one), "weights are loaded for the first edit"
    assert len(one.identity) == 64, "weights are loaded for the first edit"
    first, other, again = (one.edit(image, "make it red", seed) for seed in (1, 2, 1))
    alone = editor(folders[instruct_pix2pix]).edit(image, "make it red", 1)
    assert one.pipeline.safety_checker is None
    assert first.size == (50, 30)
    assert first.mode == "RGB"
    sizes = [((50, 30), 32, (32, 16)), ((300, 400), 512, (384, 512)), ((900, 9), 64, (64, 8))]
    assert all(size_for_editor(size, longer) == fitted for size, longer, fitted in sizes), "multiples of eight"
    assert first.tobytes() == again.tobytes() == alone.tobytes() != other.tobytes()


def test_original_instruction_steps_and_both_guidances_reach_the_pipeline(folders, image):
    def edit(text: str = "make it red", color: str | None = None, **changes: Any) -> bytes:
        shown = image.with_name("other.png") if color else image
        if color:
            Image.new("RGB", (50, 30), color).save(shown)
        return editor(folders[instruct_pix2pix], **changes).edit(shown, text, 1).tobytes()

    changes = [{"text": "add a cat"}, {"color": "blue"}, {"steps": 3}, {"guidance": 2.0}, {"image_guidance": 3.0}]
    found = [edit(**change) for change in ({}, *changes, {"image_px": 64})]
    assert len(set(found)) == 7


def test_a_missing_model_another_model_and_a_bad_image_are_refused(folders, tmp_path):
    (tmp_path / "no.png").write_text("no image")
    with pytest.raises(ParamsError, match=re.escape(str(tmp_path))):
        editor(tmp_path)
    with pytest.raises(ParamsError, match="0" * 64):
        editor(folders[instruct_pix2pix], sha256="0" * 64)
    with pytest.raises(ImageError):
        editor(folders[instruct_pix2pix]).edit(tmp_path / "no.png", "make it red", 1)
    with pytest.raises(ParamsError, match="1" * 64):
        Features(FeatureModel(kind="encoder", model=BASE, sha256="1" * 64), CPU)
    with pytest.raises(ImageError):
        Features(FeatureModel(kind="encoder", model=BASE), CPU).features([tmp_path / "no.png"])


def test_the_bases_features_put_the_same_scene_above_another_one(images):
    """Each scene has three images: before, after, and a distractor that shows the first again."""
    found = Features(FeatureModel(kind="encoder", model=BASE), CPU).features(images)
    assert found.shape == (120, 25 * 128)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    cosines = (found @ found.T).reshape(40, 3, 40, 3)
    distractors = np.array([cosines[at, 0, at, 2] for at in range(40)])
    others = np.array([np.delete(cosines[at, 0, :, 0], at).max() for at in range(40)])
    assert np.median(others) < 0.75 < 0.98 < np.median(distractors)
    assert (distractors > others).all()


@pytest.mark.parametrize("make", [clip, siglip])
def test_clip_and_siglip_give_their_image_embedding(make, folders, images, monkeypatch):
    from transformers import AutoImageProcessor, AutoModel

    monkeypatch.setattr(module, "BATCH", 2)
    found = Features(FeatureModel(kind="clip", model=folders[make]), CPU).features(images[:9])
    model, processor = (kind.from_pretrained(folders[make]) for kind in (AutoModel, AutoImageProcessor))
    pixels = processor(images=[module.load_image(image) for image in images[:9]], return_tensors="pt")["pixel_values"]
    expected = torch.nn.functional.normalize(model.get_image_features(pixel_values=pixels).pooler_output, dim=1)
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-5)


def points(count: int, width: int = 16, groups: int = 40) -> np.ndarray:
    rng = np.random.default_rng(0)
    middles = rng.normal(size=(groups, width))
    found = middles[rng.integers(groups, size=count)] + 0.3 * rng.normal(size=(count, width))
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(("block", "cells"), [(1, 2**25), (7, 2**25), (1000, 2**25), (1000, 2000)])
def test_the_search_finds_the_nearest_others_in_order(block, cells, monkeypatch):
    monkeypatch.setattr(module, "MAX_BLOCK_ROWS", block)
    monkeypatch.setattr(module, "MAX_BLOCK_CELLS", cells)
    features = points(200)
    cosines, numbers = nearest(features, 5)
    whole = (features @ features.T).astype(np.float64)
    np.fill_diagonal(whole, -2)
    assert (numbers == np.argsort(-whole, axis=1, kind="stable")[:, :5]).mean() > 0.999
    np.testing.assert_allclose(cosines, np.take_along_axis(whole, numbers, axis=1), atol=1e-6)
    equal = np.tile(points(1), (6, 1))
    assert nearest(equal, 9)[1].tolist() == [[n for n in range(6) if n != row] for row in range(6)]
    assert nearest(points(1), 9)[0].shape == (1, 0), "no more neighbours than others"


def test_the_facts_of_each_task_and_how_many_are_asked_for_are_in_the_question(tmp_path):
    with chat_server('["one", "two"]') as server:
        writer = LanguageModel(
            EndpointWriterSettings(kind="endpoint", url=server.url, model="m"), 3, tmp_path / "answers.jsonl"
        )
        writer.write("difference", [{"first": "a {cup}", "second": "two men"}], 7)
        writer.write("paraphrase", [{"text": "add a cat", "first": "a sofa"}], 4)
    assert "FIRST IMAGE: a {cup}\nSECOND IMAGE: two men\n" in server.texts[0]
    assert " 7 " in server.texts[0]
    assert "INSTRUCTION: add a cat\n" in server.texts[1]
    assert [(body["seed"], body["messages"][0]["role"]) for body in server.asked] == [(3, "system")] * 2


@pytest.mark.parametrize(
    ("said", "texts"),
    [
        ('["a", "b"]', ["a", "b"]),
        ('Sure! ```json\n["a"]\n```', ["a"]),
        ("1. Put it there\n2) Or here\n", ["Put it there", "Or here"]),
        ('Here:\n- "a b"\n* c', ["a b", "c"]),
        ("1. Add a [red] hat\n2. Add a hat", ["Add a [red] hat", "Add a hat"]),
        ('Here [2]:\n```json\n["a", "b [c]"]\n```\nAll are neutral [as asked].', ["a", "b [c]"]),
        ('{"variations": ["a", "b"]}', ["a", "b"]),
        ("I cannot do that", []),
        ('["a", ', []),
        ("[]", []),
        ("[" * 3000, []),
    ],
)
def test_texts_are_read_from_a_list_in_json_or_lines(said, texts):
    assert read_texts(said) == texts


def test_of_the_texts_of_an_answer_empty_repeated_and_surplus_ones_are_dropped():
    said = '["Add a cat!", "put  a\\ncat", "", "Put a cat.", "place a cat", "a cat, please"]'
    written = select_texts(EndpointAnswer("text", said), 2, "add a cat")
    assert written.texts == ("put a cat", "place a cat")
    assert written.dropped == {"repeated": 2, "empty": 1, "more than asked for": 1}
    unreadable = select_texts(EndpointAnswer("text", "no list"), 2, "add a cat")
    assert not unreadable.texts
    assert unreadable.dropped == {"unreadable": 1}
    truncated = select_texts(EndpointAnswer("cut", '["put a cat"]'), 2, "add a cat")
    assert not truncated.texts
    assert truncated.dropped == {"cut": 1}

"""The parts of augment that use models: InstructPix2Pix, image features, the search for neighbours, and writers."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from m3diff.datasets.minichange import image_paths
from m3diff.endpoint.answers import EndpointAnswer
from m3diff.images.open import ImageError
from m3diff.models.device import Device
from m3diff.models.foreign_code import ForeignCodeError
from m3diff.settings.section import ParamsError
from m3diff.stages.augment import weights as module
from m3diff.stages.augment.params import EndpointWriterSettings, FeatureModel, InstructPix2Pix
from m3diff.stages.augment.weights import Features, Pix2PixEditor, find_nearest, size_for_editor
from m3diff.stages.augment.writers import LanguageModel, read_texts, select_texts
from tests.chat import chat_server
from tests.errors import raises
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
    pix2pix = editor(folders[instruct_pix2pix])
    assert "pipeline" not in vars(pix2pix), "weights are loaded for the first edit"
    assert len(pix2pix.identity) == 64, "weights are loaded for the first edit"
    edit = pix2pix.edit(image, "make it red", 1)
    edit_with_other_seed = pix2pix.edit(image, "make it red", 2)
    repeated_edit = pix2pix.edit(image, "make it red", 1)
    edit_by_new_editor = editor(folders[instruct_pix2pix]).edit(image, "make it red", 1)
    assert pix2pix.pipeline.safety_checker is None
    assert edit.size == (50, 30)
    assert edit.mode == "RGB"
    sizes = [((50, 30), 32, (32, 16)), ((300, 400), 512, (384, 512)), ((900, 9), 64, (64, 8))]
    assert all(size_for_editor(size, longer) == fitted for size, longer, fitted in sizes), "multiples of eight"
    assert edit.tobytes() == repeated_edit.tobytes() == edit_by_new_editor.tobytes()
    assert edit.tobytes() != edit_with_other_seed.tobytes()


def test_original_instruction_steps_and_both_guidances_reach_the_pipeline(folders, image):
    def edit(text: str = "make it red", color: str | None = None, **changes: Any) -> bytes:
        original = image
        if color:
            original = image.with_name("other.png")
            Image.new("RGB", (50, 30), color).save(original)
        return editor(folders[instruct_pix2pix], **changes).edit(original, text, 1).tobytes()

    changes = [{"text": "add a cat"}, {"color": "blue"}, {"steps": 3}, {"guidance": 2.0}, {"image_guidance": 3.0}]
    edits = [edit(**change) for change in ({}, *changes, {"image_px": 64})]
    assert len(set(edits)) == 7


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


def test_a_pipeline_that_names_foreign_code_is_refused(tmp_path):
    component = ["evil", "Evil"]
    (tmp_path / "model_index.json").write_text(json.dumps({"unet": component}))
    with raises(ForeignCodeError, "models.field_names_code", field="unet", value=component):
        _ = editor(tmp_path).pipeline


@pytest.mark.parametrize(("gpu", "dtype"), [(True, torch.float16), (False, torch.float32)], ids=["GPU", "CPU"])
def test_a_pipeline_has_half_precision_on_a_gpu_and_is_read_from_safetensors(gpu, dtype, tmp_path, monkeypatch):
    from diffusers import StableDiffusionInstructPix2PixPipeline

    (tmp_path / "model_index.json").write_text("{}")
    options: dict[str, Any] = {}

    class Pipeline:
        def to(self, device: torch.device) -> "Pipeline":
            return self

        def set_progress_bar_config(self, disable: bool) -> None: ...

    def load(folder: str, **load_options: Any) -> Pipeline:
        options.update(load_options)
        return Pipeline()

    monkeypatch.setattr(StableDiffusionInstructPix2PixPipeline, "from_pretrained", load)
    device: Any = SimpleNamespace(gpu=gpu, torch=torch.device("meta"))
    _ = Pix2PixEditor(InstructPix2Pix(kind="instruct_pix2pix", model=tmp_path), device).pipeline
    assert options["torch_dtype"] == dtype
    assert options["use_safetensors"] is True
    assert options["local_files_only"] is True
    assert options["trust_remote_code"] is False


EDITOR_MINIMUMS = {"steps": 1, "guidance": 1, "image_guidance": 1, "image_px": 8}
WRITER_MINIMUMS = {"timeout_s": 1, "max_tokens": 1}


def test_settings_of_editors_and_writers_have_a_minimum():
    editor_fields = {"kind": "instruct_pix2pix", "model": BASE}
    writer_fields = {"kind": "endpoint", "url": "http://127.0.0.1:1/v1", "model": "m"}
    sections = [
        (InstructPix2Pix, editor_fields, EDITOR_MINIMUMS),
        (EndpointWriterSettings, writer_fields, WRITER_MINIMUMS),
    ]
    for section, fields, minimums in sections:
        for field, minimum in minimums.items():
            assert getattr(section.model_validate(fields | {field: minimum}), field) == minimum
            with pytest.raises(ValidationError, match=field):
                section.model_validate(fields | {field: minimum - 1})


def test_the_bases_features_put_the_same_scene_above_another_one(images):
    """Each scene has three images: before, after, and a distractor that shows the first again."""
    features = Features(FeatureModel(kind="encoder", model=BASE), CPU).features(images)
    assert features.shape == (120, 25 * 128)
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1, atol=1e-5)
    cosines = (features @ features.T).reshape(40, 3, 40, 3)
    cosines_to_distractor = np.array([cosines[scene, 0, scene, 2] for scene in range(40)])
    cosines_to_nearest_scene = np.array([np.delete(cosines[scene, 0, :, 0], scene).max() for scene in range(40)])
    assert np.median(cosines_to_nearest_scene) < 0.75
    assert np.median(cosines_to_distractor) > 0.98
    assert (cosines_to_distractor > cosines_to_nearest_scene).all()


@pytest.mark.parametrize("make", [clip, siglip])
def test_clip_and_siglip_give_their_image_embedding(make, folders, images, monkeypatch):
    from transformers import AutoImageProcessor, AutoModel

    monkeypatch.setattr(module, "BATCH", 2)
    features = Features(FeatureModel(kind="clip", model=folders[make]), CPU).features(images[:9])
    model = AutoModel.from_pretrained(folders[make])
    processor = AutoImageProcessor.from_pretrained(folders[make])
    pixels = processor(images=[module.load_image(image) for image in images[:9]], return_tensors="pt")["pixel_values"]
    expected = torch.nn.functional.normalize(model.get_image_features(pixel_values=pixels).pooler_output, dim=1)
    np.testing.assert_allclose(features, expected.detach().numpy(), atol=1e-5)


def points(count: int, width: int = 16, groups: int = 40) -> np.ndarray:
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(groups, width))
    vectors = centers[rng.integers(groups, size=count)] + 0.3 * rng.normal(size=(count, width))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(("block", "cells"), [(1, 2**25), (7, 2**25), (1000, 2**25), (1000, 2000)])
def test_the_search_finds_the_nearest_others_in_order(block, cells, monkeypatch):
    monkeypatch.setattr(module, "MAX_BLOCK_ROWS", block)
    monkeypatch.setattr(module, "MAX_BLOCK_CELLS", cells)
    features = points(200)
    cosines, numbers = find_nearest(features, 5)
    all_cosines = (features @ features.T).astype(np.float64)
    np.fill_diagonal(all_cosines, -2)
    assert (numbers == np.argsort(-all_cosines, axis=1, kind="stable")[:, :5]).mean() > 0.999
    np.testing.assert_allclose(cosines, np.take_along_axis(all_cosines, numbers, axis=1), atol=1e-6)
    equal_features = np.tile(points(1), (6, 1))
    assert find_nearest(equal_features, 9)[1].tolist() == [[n for n in range(6) if n != row] for row in range(6)]
    assert find_nearest(points(1), 9)[0].shape == (1, 0), "no more neighbours than others"


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
    assert [(body["seed"], body["messages"][0]["role"]) for body in server.requests] == [(3, "system")] * 2


@pytest.mark.parametrize(
    ("answer", "texts"),
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
def test_texts_are_read_from_a_list_in_json_or_lines(answer, texts):
    assert read_texts(answer) == texts


def test_of_the_texts_of_an_answer_empty_repeated_and_surplus_ones_are_dropped():
    answer = '["Add a cat!", "put  a\\ncat", "", "Put a cat.", "place a cat", "a cat, please"]'
    output = select_texts(EndpointAnswer("text", answer), 2, "add a cat")
    assert output.texts == ("put a cat", "place a cat")
    assert output.dropped_texts == {"repeated": 2, "empty": 1, "more than asked for": 1}
    unreadable = select_texts(EndpointAnswer("text", "no list"), 2, "add a cat")
    assert not unreadable.texts
    assert unreadable.dropped_texts == {"unreadable": 1}
    truncated = select_texts(EndpointAnswer("cut", '["put a cat"]'), 2, "add a cat")
    assert not truncated.texts
    assert truncated.dropped_texts == {"cut": 1}

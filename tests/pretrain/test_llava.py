"""The tiny LLaVA-1.5 of OneDiff: what it takes of the LLaVA-OneVision, that others and the family read it alike."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from transformers import AutoProcessor, LlavaForConditionalGeneration

from components.datasets.minichange.render import render
from components.datasets.minichange.scene import sample_scene
from components.models import FAMILIES
from components.models.family import Lora, Rates
from components.models.m3diff.processing import M3DiffProcessor
from components.models.onediff.settings import OneDiffSettings
from components.params import ParamsError, load_params
from components.pretrain import stage
from components.pretrain.architecture import architecture_of
from components.pretrain.llava import LlavaBase
from components.pretrain.params import Llava, Pretrain
from components.pretrain.stage import pretrain
from tests.pretrain.test_stage import CFG as SMALL

START = Path("data/00_base")
SIZES = {"vision_px": 100, "patch_px": 20, "width": 128, "vision_layers": 4, "text_layers": 4}
RATES = {"segmentation_steps": 8, "steps": 16, "first_task_steps": 4, "lr_matrices": 0.0005, "lr": 0.0005}
CFG = Pretrain(**SMALL.model_dump() | SIZES | RATES | {"image_px": 128, "llava": {"start": START}})


@pytest.fixture(scope="module")
def base() -> LlavaBase:
    made = architecture_of(CFG)
    assert isinstance(made, LlavaBase)
    return made


@pytest.fixture(scope="module")
def model(base: LlavaBase) -> Any:
    torch.manual_seed(0)
    return base.make_model().eval()


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [render(sample_scene(rng), 128, rng) for _ in range(4)]


@pytest.fixture(scope="module")
def prepared(base: LlavaBase, images: list[Image.Image]) -> np.ndarray:
    return np.stack([base.prepare_image(image) for image in images])


def test_an_image_has_the_embeddings_of_the_siglip_before_the_norm(base: LlavaBase, model: Any, images: list) -> None:
    """Through other means and deviations of the pixels, and a filter without a bias."""
    known = M3DiffProcessor.from_pretrained(START)
    theirs = known.image_processor.preprocess(images)["pixel_values"]
    mine = base.processor.image_processor.preprocess(images)["pixel_values"]
    assert (mine - theirs).abs().max() > 0.1
    found = model.model.vision_tower.embeddings(mine)
    want = base.start.model.vision_tower.embeddings(theirs)
    torch.testing.assert_close(found[:, 1:], want, rtol=1e-4, atol=1e-4)


def test_layers_projector_and_llm_are_those_of_the_llava_onevision(base: LlavaBase, model: Any) -> None:
    layers, known = model.model.vision_tower.encoder.layers, base.start.model
    theirs = known.vision_tower.encoder.layers
    assert len(layers) == len(theirs) + 1
    for mine, other in zip(layers[:-1], theirs, strict=True):
        theirs_by_name = other.state_dict()
        assert mine.state_dict().keys() == theirs_by_name.keys()
        assert all(torch.equal(weight, theirs_by_name[name]) for name, weight in mine.state_dict().items())
    assert not torch.equal(layers[-1].mlp.fc1.weight, layers[-2].mlp.fc1.weight)
    seen = torch.randn(2, 25, 128)
    assert torch.equal(model.model.multi_modal_projector(seen), known.multi_modal_projector(seen))
    ids = torch.tensor([base.encode_reference("the small red box moved to the top")])
    assert torch.equal(model(input_ids=ids).logits, base.start(input_ids=ids).logits)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_the_segmentation_reads_the_last_layer_and_the_llm_the_one_before(
    base: LlavaBase, model: Any, prepared: np.ndarray
) -> None:
    encoder = model.model.vision_tower
    states = encoder(pixel_values=base.pixels(prepared), output_hidden_states=True).hidden_states
    assert torch.equal(base.patches(encoder, prepared, 1), states[-1][:, 1:])
    ids = torch.tensor([base.encode_prompt("Describe the image.", 1)] * 4)
    every = torch.ones_like(ids, dtype=torch.bool)
    before = base.logits(model, prepared, 1, ids, every)
    with torch.no_grad():
        kept = encoder.encoder.layers[-1].mlp.fc2.bias.clone()
        encoder.encoder.layers[-1].mlp.fc2.bias.add_(1.0)
        after = base.logits(model, prepared, 1, ids, every)
        encoder.encoder.layers[-1].mlp.fc2.bias.copy_(kept)
    assert torch.equal(before, after)
    assert not torch.allclose(before, base.logits(model, prepared[::-1].copy(), 1, ids, every)), "images are read"


def test_what_is_written_transformers_and_onediff_read_alike(
    base: LlavaBase, model: Any, images: list[Image.Image], tmp_path: Path
) -> None:
    base.write(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["vision_config"]["model_type"]) == ("llava", "clip_vision_model")
    assert (config["vision_feature_layer"], config["vision_feature_select_strategy"]) == (-2, "default")
    stock, theirs = LlavaForConditionalGeneration.from_pretrained(tmp_path), AutoProcessor.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "LlavaProcessor"
    without = {"vision": None, "projector": 1e-3, "module": None, "llm": 1e-3}
    settings = OneDiffSettings(family="onediff", module=None, lora=Lora(rank=0, alpha=1), rates=Rates(**without))
    own = FAMILIES["onediff"].load_base(tmp_path, settings, torch.float32, "sdpa").eval()
    inputs = FAMILIES["onediff"].load_processor(tmp_path, own.config)([(images[0], images[1])], ["What changed?"])
    assert base.encode_prompt("What changed?", 2) == tuple(inputs["input_ids"][0].tolist())
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What changed?"}]
    text = theirs.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    given = theirs(images=images[:2], text=text, return_tensors="pt")
    assert torch.equal(given["input_ids"], inputs["input_ids"])
    torch.testing.assert_close(given["pixel_values"], inputs["pixel_values"])
    with torch.no_grad():
        want = stock.eval()(input_ids=inputs["input_ids"], pixel_values=inputs["pixel_values"]).logits
        torch.testing.assert_close(own(**inputs).logits, want)
    every = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    prepared = np.stack([base.prepare_image(image) for image in images[:2]])
    torch.testing.assert_close(base.logits(model, prepared, 2, inputs["input_ids"], every), want.flatten(0, 1))


@pytest.mark.slow(20)
def test_a_whole_small_run_comes_out_the_same_twice(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "LOG_EVERY", 8)
        for name in "ab":
            pretrain(CFG, tmp_path / name, tmp_path / "scratch")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert one == other
    rows = list(csv.DictReader((tmp_path / "a" / "segmentation_log.csv").open()))
    assert [row["step"] for row in rows] == ["8"]
    rows = list(csv.DictReader((tmp_path / "a" / "training_log.csv").open()))
    assert float(rows[1]["loss: image"]) < float(rows[0]["loss: image"])
    assert Pretrain.model_validate_json((tmp_path / "a" / "recipe.json").read_text()) == CFG


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    both = {"blip2": {"start": START, "queries": 6, "qformer_layers": 2, "stacked": True}, "llava": {"start": START}}
    with pytest.raises(ValidationError, match="expected one of llava and blip2, found both"):
        Pretrain.model_validate(CFG.model_dump() | both)
    absent = CFG.model_copy(update={"llava": Llava(start=tmp_path)})
    with pytest.raises(ParamsError, match=r"pretrain.llava.start: .* has no config.json; name a base as `make base`"):
        architecture_of(absent)
    other = CFG.model_copy(update={"width": 64, "patch_px": 10})
    with pytest.raises(ParamsError, match=r"of other sizes: pretrain.width: write 128, pretrain.patch_px: write 20"):
        architecture_of(other)


def test_the_recipe_is_the_lessons_of_the_llava_onevision_and_the_base_that_is_here_is_its() -> None:
    params = load_params(Path("infra/base-onediff.yaml"))
    recipe, embedded = params.pretrain, load_params(Path("profiles/embedded.yaml")).pretrain
    assert (recipe.tasks, recipe.levels, recipe.blip2) == (embedded.tasks, embedded.levels, None)
    assert recipe.llava == Llava(start=START)
    if (params.paths.base / "recipe.json").is_file():
        assert Pretrain.model_validate_json((params.paths.base / "recipe.json").read_text()) == recipe

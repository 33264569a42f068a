"""The tiny base of BLIP2IDC: what it takes of the LLaVA-OneVision, what it is shown and asked, a whole small run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoProcessor,
    Blip2ForConditionalGeneration,
    Blip2VisionConfig,
    Blip2VisionModel,
)

from m3diff.datasets.minichange.levels import LEVELS
from m3diff.datasets.minichange.render import render
from m3diff.models import FAMILIES
from m3diff.settings.load import load_params
from m3diff.stages.pretrain import stage
from m3diff.stages.pretrain.bases import Blip2Base, architecture_of, take_vision_encoder
from m3diff.stages.pretrain.curriculum import DESCRIBE, QUESTIONS
from m3diff.stages.pretrain.params import Blip2, Pretrain
from m3diff.stages.pretrain.stage import pretrain
from tests.stages.pretrain.test_stage import CFG as LLAVA
from tests.stages.pretrain.test_stage import assert_log

OWN = Blip2(start=Path("data/00_base"), queries=6, qformer_layers=2, stacked=True)
SIZES = {"vision_px": 48, "patch_px": 12, "width": 128, "vision_layers": 4, "text_layers": 4}
CFG = Pretrain(
    **LLAVA.model_dump()
    | SIZES
    | {"segmentation_steps": 12, "steps": 16, "lr_matrices": 0.0025, "lr": 0.002, "blip2": OWN.model_dump()}
)
SINGLE = {"blip2": OWN.model_copy(update={"stacked": False}), "tasks": ("image", "asked for", "sentence")}


@pytest.fixture(scope="module")
def base() -> Blip2Base:
    made = architecture_of(CFG)
    assert isinstance(made, Blip2Base)
    return made


@pytest.fixture(scope="module")
def model(base: Blip2Base) -> Any:
    torch.manual_seed(0)
    return base.make_model().eval()


@pytest.fixture(scope="module")
def pictures(base: Blip2Base) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack([base.prepare_image(render(LEVELS["grid"].sample_scene(rng), 64, rng)) for _ in range(4)])


def test_the_llm_answers_and_each_layer_of_the_encoder_sees_as_the_llava_onevision_s(
    base: Blip2Base, model: Any
) -> None:
    ids = torch.tensor([base.processor.encode_reference("the small red box moved to the top")])
    assert torch.equal(model.language_model(input_ids=ids).logits, base.llava(input_ids=ids).logits)
    assert model.language_model.lm_head.weight is model.get_input_embeddings().weight
    seen, encoders = torch.randn(2, 5, 128), (model.vision_model.encoder, base.llava.model.vision_tower.encoder)
    for mine, theirs in zip(*(encoder.layers for encoder in encoders), strict=True):
        torch.testing.assert_close(mine(seen), theirs(seen, attention_mask=None), rtol=1e-5, atol=1e-5)
    queries = model.query_tokens[0]
    assert queries.shape == (6, 128)
    assert torch.cdist(queries, queries)[~torch.eye(6, dtype=torch.bool)].min() > 0.05, "queries start unlike"
    assert 0.015 < queries.std() < 0.025


def test_patches_of_the_same_size_are_read_alike(base: Blip2Base) -> None:
    """Those of another size: see the logs below."""
    theirs = base.llava.model.vision_tower
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    same = Blip2VisionModel(Blip2VisionConfig(image_size=100, patch_size=20, **sizes))
    take_vision_encoder(same, theirs)
    pixels = torch.randn(1, 3, 100, 100)
    torch.testing.assert_close(same.embeddings(pixels)[:, 1:], theirs.embeddings(pixels), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(same.post_layernorm.weight, theirs.post_layernorm.weight)


def test_a_caption_is_not_asked_for_and_what_names_something_follows_the_start_token(base: Blip2Base) -> None:
    image, start = base.processor.prompt[0], base.processor.start_id
    for question in (*DESCRIBE, *QUESTIONS):
        assert base.encode_prompt(question, 1) == base.processor.encode_prompt(question)
        assert base.encode_prompt(question, 0) == (start,)
    asked = base.encode_prompt("Describe the small red box.", 2)
    assert asked[:7] == (image,) * 6 + (start,)
    assert base.processor.tokenizer.decode(asked[7:]) == "Describe the small red box.\n"


def test_two_images_are_stacked_as_the_family_stacks_a_pair(base: Blip2Base, pictures: np.ndarray) -> None:
    pairs = torch.from_numpy(np.stack([base.processor.prepare_image(Image.fromarray(each)) for each in pictures]))
    want = base.processor.image_inputs(pairs)["pixel_values"]
    assert torch.equal(base.pixels(pictures, 2), want)
    assert want.shape == (2, 3, 48, 48)
    single = base.pixels(pictures[:1], 1)
    stretched = np.asarray(Image.fromarray(pictures[0]).resize((48, 48), Image.Resampling.BICUBIC))
    assert torch.equal(single[0], base.processor.image_processor.to_pixels(torch.tensor(stretched)))


@pytest.mark.parametrize("stacked", [True, False])
def test_a_whole_small_run_is_a_blip_2_that_learns(
    stacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = CFG if stacked else CFG.model_copy(update=SINGLE)
    monkeypatch.setattr(stage, "LOG_EVERY", 6)
    pretrain(cfg, tmp_path)
    if stacked:
        assert_log(tmp_path, "segmentation", "6,48,8.5463,0.1019", "12,96,7.9072,0.1019")
        assert_log(
            tmp_path,
            "training",
            "6,48,0.9018,,,,,,0.0",
            "12,88,0.6854,1.3199,1.4238,1.3274,1.2394,2.1684,0.0",
            "16,112,0.711,0.6922,1.0995,,,1.5894,0.0",
        )
    else:
        assert_log(tmp_path, "segmentation", "6,48,8.5311,0.1005", "12,96,7.7314,0.0978")
        assert_log(
            tmp_path, "training", "6,48,0.902,,,0.0", "12,80,0.7153,1.1404,1.8539,0.0", "16,104,0.717,0.6437,1.1989,0.0"
        )
    stock = Blip2ForConditionalGeneration.from_pretrained(tmp_path)
    own = FAMILIES["blip2idc"].load_processor(tmp_path)
    assert (stock.config.num_query_tokens, own.end_id) == (6, stock.config.text_config.eos_token_id)
    assert own.decode(torch.tensor([own.encode_reference("a small red box")])) == ["a small red box"]
    assert type(AutoProcessor.from_pretrained(tmp_path)).__name__ == "Blip2Processor"
    assert Pretrain.model_validate_json((tmp_path / "recipe.json").read_text()) == cfg


@pytest.mark.parametrize(("name", "stacked"), [("blip2idc", False), ("blip2idc-stacked", True)])
def test_the_recipes_differ_in_what_is_shown_alone_and_the_bases_that_are_here_are_theirs(
    name: str, stacked: bool
) -> None:
    params = load_params(Path(f"infra/base-{name}.yaml"))
    recipe = params.pretrain
    assert recipe.blip2 is not None
    assert recipe.blip2.stacked is stacked
    other = load_params(Path("infra/base-blip2idc.yaml")).pretrain
    shown = {"tasks": other.tasks, "blip2": other.blip2}
    assert recipe.model_copy(update=shown) == other
    if (params.paths.base / "recipe.json").is_file():
        assert Pretrain.model_validate_json((params.paths.base / "recipe.json").read_text()) == recipe

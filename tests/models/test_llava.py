"""M3Diff and OneDiff on LLaVA: independence of pairs, positions of delta tokens, prompts, and BERT weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoProcessor

from m3diff.models import FAMILIES
from m3diff.models.layers import image_pairs
from m3diff.models.onediff_model import OneDiffConfig
from tests.models.llava15 import write_llava15
from tests.models.test_modules import bert
from tests.tiny import (
    MDP,
    SEPARATE,
    SIDE,
    VDM,
    noise_image,
    onediff_settings,
    pair_prompt,
    saliency_map,
    tiny_base,
    tiny_model,
    tiny_trained,
)
from tests.tiny import pair_inputs as inputs_of

PATCHES = (SIDE // 8) ** 2


def pair_inputs(pairs: int = 2, seed: int = 0) -> dict:
    torch.manual_seed(seed)
    image = [3] * (PATCHES + 1)
    ids = torch.tensor([[7, *image, *image, 9, 11 + row, 13] for row in range(pairs)])
    pixels = torch.randn(2 * pairs, 3, SIDE, SIDE)
    sizes = torch.full((2 * pairs, 2), SIDE)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "image_sizes": sizes}
    return inputs | {"batch_num_images": torch.full((pairs,), 2)}


def test_the_image_path_is_llava_onevisions_multi_image_path(tmp_path):
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    image_processor = FAMILIES["m3diff"].load_processor(tiny_base(tmp_path)).image_processor
    stock = LlavaOnevisionImageProcessorPil(
        size=image_processor.size,
        image_mean=image_processor.image_mean,
        image_std=image_processor.image_std,
        resample=3,
    )
    images = [noise_image(1, (60, 37)), noise_image(2, (31, 50))]
    expected = torch.as_tensor(stock([images], return_tensors="np")["pixel_values"]).reshape(2, 3, SIDE, SIDE)
    actual = image_processor.preprocess(images)["pixel_values"]
    # one grey level is 0.0078 here; the stock path rounds once more on its way
    torch.testing.assert_close(actual, expected.float(), rtol=0, atol=0.016)


def test_before_and_after_come_in_turn_and_each_image_keeps_its_place():
    """The reference applies the module to the hidden states of transformers."""
    model = tiny_model({**MDP, "vision_feature_layers": [0, 2]})
    pixels = torch.randn(6, 3, SIDE, SIDE)
    with torch.no_grad():
        states = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
        before = [0, 2, 4]
        after = [1, 3, 5]
        levels = [states[0], states[2]]
        before_levels = [f[before] for f in levels]
        after_levels = [f[after] for f in levels]
        want_1, want_2 = model.model.mdp(before_levels, after_levels, states[-1][before], states[-1][after])
        actual = model.model.perceive(pixels, image_pairs(6, None))
        torch.testing.assert_close(actual[before], want_1)
        torch.testing.assert_close(actual[after], want_2)
        maps = saliency_map(model, pixels)
        assert maps.shape == (3, 3, 3)
        with model.model.mdp.record_maps() as levels:
            model.model.mdp(before_levels, after_levels, states[-1][before], states[-1][after])
        torch.testing.assert_close(maps.flatten(1), sum(levels) / 2)


ONEDIFF = FAMILIES["onediff"]
QUESTION = "What changed?"
PAIRS = [(noise_image(2 * n), noise_image(2 * n + 1)) for n in range(2)]


@pytest.fixture(scope="module")
def onevision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("onevision") / "base")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava15(tmp_path_factory.mktemp("llava") / "llava-1.5-7b-hf")


@pytest.fixture(params=["onevision", "llava"])
def base(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_the_prompt_is_llavas_own(llava):
    processor: Any = ONEDIFF.load_processor(llava, ONEDIFF.planned_config(llava, onediff_settings(None)))
    stock = AutoProcessor.from_pretrained(llava)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUESTION}]
    text = stock.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    expected = stock.tokenizer(text.replace("<image>", "<image>" * 4))["input_ids"]
    assert list(pair_prompt(processor, QUESTION)) == expected
    assert processor.end_id == 2
    assert processor.pad_id == processor.tokenizer.convert_tokens_to_ids("<pad>")


@pytest.mark.parametrize("module", [VDM, SEPARATE | {"projection": "shared"}], ids=["own", "shared"])
@pytest.mark.parametrize("delta_place", ["after", "between", "before"])
def test_the_llm_sees_patches_and_delta_tokens_in_their_order(delta_place, module, base):
    model = tiny_trained(base, onediff_settings(module | {"place": delta_place})).get_base_model()
    config = model.config
    inner = model.model
    image_tokens = config.patches + config.newline
    before_tokens, after_tokens = config.visual_token_counts()
    assert before_tokens == (image_tokens if delta_place == "after" else image_tokens + 3)
    assert after_tokens == (image_tokens + 3 if delta_place == "after" else image_tokens)
    processor: Any = ONEDIFF.load_processor(base, config)
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert pair_prompt(processor, QUESTION).count(image) == 2 * image_tokens + 3 == config.image_tokens_of(2)
    inputs = inputs_of(processor, PAIRS, [QUESTION] * 2)
    pixels = inputs["pixel_values"]
    with torch.no_grad():
        states = inner.vision_hidden_states(pixels)
        images = inner.multi_modal_projector(states[config.vision_feature_layer])
        if config.newline:
            images = torch.cat([images, inner.image_newline.expand(len(images), 1, -1)], dim=1)
        before = images[0::2]
        after = images[1::2]
        taps = [states[layer] for layer in (1, 2)]
        delta = inner.vdm([tap[0::2] for tap in taps], [tap[1::2] for tap in taps])
        delta = inner.multi_modal_projector(delta) if "projection" in module else delta
        order = {"after": [before, after, delta], "between": [before, delta, after], "before": [delta, before, after]}
        actual = inner.get_image_features(pixels, batch_num_images=[2, 2]).pooler_output
        rows = [torch.cat(list(actual[2 * n : 2 * n + 2])) for n in range(2)]
        torch.testing.assert_close(torch.stack(rows), torch.cat(order[delta_place], dim=1))
        swapped = inputs | {"pixel_values": pixels.unflatten(0, (2, 2)).flip(1).flatten(0, 1)}
        assert (model(**swapped).logits - model(**inputs).logits).abs().max() > 1e-4


def test_the_module_starts_as_the_bert_in_the_bases_folder(onevision, tmp_path):
    folder = shutil.copytree(onevision, tmp_path / "base")
    settings = onediff_settings(VDM | {"start": "bert", "heads": 3})
    assert list(ONEDIFF.base_files(settings, None)) == ["bert/config.json", "bert/model.safetensors"]
    assert ONEDIFF.base_files(settings, {"vdm": {}}) == ONEDIFF.base_files(onediff_settings(), None) == {}
    bert_model = bert(folder / "bert")
    model = ONEDIFF.load_base(folder, settings, torch.float32, "sdpa")
    weight = model.model.vdm.layers[3].mlp[0].weight
    assert torch.equal(weight, bert_model.encoder.layer[3].intermediate.dense.weight)
    with torch.no_grad():
        weight.add_(1.0)
    model.save_pretrained(tmp_path / "trained")
    again = ONEDIFF.load_base(tmp_path / "trained", settings, torch.float32, "sdpa")
    assert torch.equal(again.model.vdm.layers[3].mlp[0].weight, weight)
    shutil.rmtree(folder / "bert")
    bare = ONEDIFF.load(folder, torch.float32, tmp_path / "trained")  # as under adapters, which hold its weights
    assert json.dumps(bare.config.vdm, sort_keys=True) == json.dumps(model.config.vdm, sort_keys=True)


# Numbers of parameters: those published for Qwen2 and Llama, plus the rows that LLaVA adds to their vocabularies
PUBLISHED_PARAMETERS = {
    "llava-onevision-qwen2-7b-ov-hf": 7_615_616_512,
    "llava-onevision-qwen2-0.5b-ov-hf": 494_032_768 + 64 * 896,
    "llava-1.5-7b-hf": 6_738_415_616 + 64 * 2 * 4096,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED_PARAMETERS.items(), ids=PUBLISHED_PARAMETERS)
def test_the_llm_of_a_published_base_has_as_many_parameters_as_published(name, parameters):
    config = OneDiffConfig.for_published_base(name, None)
    assert config.name_or_path == f"llava-hf/{name}"
    with torch.device("meta"):
        llm = AutoModelForCausalLM.from_config(config.text_config, trust_remote_code=False)
    assert sum(weight.numel() for weight in llm.parameters()) == parameters


def test_a_base_of_an_unknown_name_is_planned_like_the_first_published_one():
    config = OneDiffConfig.for_published_base("own-base", None)
    assert config.name_or_path == f"llava-hf/{OneDiffConfig.BASES[0]}"

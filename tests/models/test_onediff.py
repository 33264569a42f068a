"""OneDiff on LLaVA-OneVision and on LLaVA-1.5: the places of its delta tokens, and the BERT that it starts as."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from m3diff.models import FAMILIES
from m3diff.models.checkpoint import ADAPTERS
from m3diff.models.tuning import prepare
from tests.models.llava15 import write_llava15
from tests.models.test_modules import bert
from tests.tiny import (
    SEPARATE,
    VDM,
    noise_image,
    onediff_settings,
    pair_inputs,
    tiny_base,
    tiny_checkpoint,
    tiny_trained,
)

FAMILY = FAMILIES["onediff"]
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


def test_the_prompt_is_llavas_own(llava: Path) -> None:
    processor: Any = FAMILY.load_processor(llava, FAMILY.planned_config(llava, onediff_settings(None)))
    stock = AutoProcessor.from_pretrained(llava)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUESTION}]
    text = stock.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    want = stock.tokenizer(text.replace("<image>", "<image>" * 4))["input_ids"]
    assert list(processor.encode_prompt(QUESTION)) == want
    assert (processor.end_id, processor.pad_id) == (2, processor.tokenizer.convert_tokens_to_ids("<pad>"))


@pytest.mark.parametrize("module", [VDM, SEPARATE | {"projection": "shared"}], ids=["own", "shared"])
@pytest.mark.parametrize("place", ["after", "between", "before"])
def test_the_llm_sees_patches_and_delta_tokens_in_their_order(place: str, module: dict, base: Path) -> None:
    model = tiny_trained(base, onediff_settings(module | {"place": place})).get_base_model()
    config, inner = model.config, model.model
    each = config.patches + config.newline
    assert config.places() == ((each, each + 3) if place == "after" else (each + 3, each))
    processor: Any = FAMILY.load_processor(base, config)
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert processor.encode_prompt(QUESTION).count(image) == 2 * each + 3 == config.image_tokens
    inputs = pair_inputs(processor, PAIRS, [QUESTION] * 2)
    pixels = inputs["pixel_values"]
    with torch.no_grad():
        states = inner.vision_hidden_states(pixels)
        images = inner.multi_modal_projector(states[config.vision_feature_layer])
        if config.newline:
            images = torch.cat([images, inner.image_newline.expand(len(images), 1, -1)], dim=1)
        before, after, taps = images[0::2], images[1::2], [states[layer] for layer in (1, 2)]
        delta = inner.vdm([tap[0::2] for tap in taps], [tap[1::2] for tap in taps])
        delta = inner.multi_modal_projector(delta) if "projection" in module else delta
        order = {"after": [before, after, delta], "between": [before, delta, after], "before": [delta, before, after]}
        got = inner.get_image_features(pixels, batch_num_images=[2, 2]).pooler_output
        rows = [torch.cat(list(got[2 * n : 2 * n + 2])) for n in range(2)]
        torch.testing.assert_close(torch.stack(rows), torch.cat(order[place], dim=1))
        swapped = inputs | {"pixel_values": pixels.unflatten(0, (2, 2)).flip(1).flatten(0, 1)}
        assert (model(**swapped).logits - model(**inputs).logits).abs().max() > 1e-4


def test_rank_0_trains_the_whole_llm_and_adapters_only_the_linears(base: Path, tmp_path: Path) -> None:
    names = {}
    for rank in (0, 2):
        made = onediff_settings(rank=rank, vision=None)
        model = prepare(FAMILY.load_base(base, made, torch.float32, "sdpa"), FAMILY, made)
        names[rank] = {name for name, p in model.named_parameters() if p.requires_grad}
        assert not [name for name in names[rank] if "vision_tower" in name]
        assert (tiny_checkpoint(base, tmp_path / str(rank), made) / ADAPTERS).is_dir() == (rank == 2)
    whole = {"lm_head.weight", "model.language_model.embed_tokens.weight", "model.language_model.norm.weight"}
    assert whole <= names[0]
    assert not [name for name in names[2] if "language_model" in name and "lora_" not in name]


def test_the_module_starts_as_the_bert_in_the_bases_folder(onevision: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(onevision, tmp_path / "base")
    made = onediff_settings(VDM | {"start": "bert", "heads": 3})
    assert list(FAMILY.base_files(made, None)) == ["bert/config.json", "bert/model.safetensors"]
    assert FAMILY.base_files(made, {"vdm": {}}) == FAMILY.base_files(onediff_settings(), None) == {}
    with pytest.raises(ValueError, match="no BERT there"):
        FAMILY.load_base(folder, made, torch.float32, "sdpa")
    theirs = bert(folder / "bert")
    model = FAMILY.load_base(folder, made, torch.float32, "sdpa")
    weight = model.model.vdm.layers[3].mlp[0].weight
    assert torch.equal(weight, theirs.encoder.layer[3].intermediate.dense.weight)
    with torch.no_grad():
        weight.add_(1.0)
    model.save_pretrained(tmp_path / "trained")
    again = FAMILY.load_base(tmp_path / "trained", made, torch.float32, "sdpa")
    assert torch.equal(again.model.vdm.layers[3].mlp[0].weight, weight)
    shutil.rmtree(folder / "bert")
    bare = FAMILY.load(folder, torch.float32, tmp_path / "trained")  # as under adapters, which hold its weights
    assert json.dumps(bare.config.vdm, sort_keys=True) == json.dumps(model.config.vdm, sort_keys=True)

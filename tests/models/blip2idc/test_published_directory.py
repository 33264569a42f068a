"""A miniature of Salesforce/blip2-opt-2.7b, file by file: names of files and of weights, shards, OPT's tied head."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Blip2ForConditionalGeneration

from m3diff.models import FAMILIES
from m3diff.models.blip2idc_model import Blip2IDCForConditionalGeneration
from tests.tiny import noise_image
from tests.tiny_blip2 import blip2_settings

FAMILY = FAMILIES["blip2idc"]
FILES = {
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
}
NAMES = {
    "query_tokens",
    "language_projection.bias",
    "vision_model.embeddings.class_embedding",
    "vision_model.embeddings.position_embedding",
    "vision_model.encoder.layers.0.self_attn.qkv.weight",
    "vision_model.encoder.layers.0.self_attn.qkv.bias",
    "vision_model.post_layernorm.weight",
    "qformer.layernorm.weight",
    "qformer.encoder.layer.0.attention.attention.query.weight",
    "qformer.encoder.layer.0.crossattention.attention.key.weight",
    "qformer.encoder.layer.1.output_query.LayerNorm.weight",
    "language_model.model.decoder.embed_positions.weight",
    "language_model.model.decoder.layers.1.self_attn.out_proj.bias",
    "language_model.model.decoder.final_layer_norm.weight",
}


@pytest.fixture
def copied(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "copied"))


def names(folder: Path) -> set[str]:
    return set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])


def test_every_weight_is_loaded_and_the_head_is_the_embeddings(base: Path) -> None:
    model = FAMILY.load_base(base, blip2_settings(), torch.float32, "sdpa")
    assert type(model) is Blip2IDCForConditionalGeneration
    stored = {name: weight for shard in base.glob("*.safetensors") for name, weight in load_file(shard).items()}
    ours = dict(model.named_parameters())
    assert ours.keys() == stored.keys()
    assert all(torch.equal(ours[name], weight) for name, weight in stored.items())
    llm = model.language_model
    assert llm.lm_head.weight is llm.model.decoder.embed_tokens.weight


def test_no_dropout_is_left_though_the_directory_has_some(base: Path) -> None:
    stock = Blip2ForConditionalGeneration.from_pretrained(base)
    assert stock.config.qformer_config.hidden_dropout_prob == 0.1
    assert stock.config.text_config.dropout == 0.1
    assert stock.config.vision_config.attention_dropout == 0.1
    model = FAMILY.load_base(base, blip2_settings(), torch.float32, "sdpa").train()
    assert model.config.vision_config.attention_dropout == 0.0
    rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert set(rates) == {0.0}
    own = ("dropout", "attention_dropout", "layerdrop")
    assert not any(getattr(module, name, 0.0) for module in model.modules() for name in own if name != "dropout")
    pixels, ids = torch.randn(1, 3, 32, 32), torch.tensor([[*[304] * 5, 2, 9, 10]])
    with torch.no_grad():
        logits = [model(pixel_values=pixels, input_ids=ids).logits for _ in range(2)]
    assert torch.equal(*logits)


def test_the_directory_captions_as_transformers_own_class_does(either: Path) -> None:
    processor = FAMILY.load_processor(either)
    images = np.stack([processor.prepare_image(noise_image(k, (40, 30))) for k in range(6)])
    inputs = {**processor.prompt_inputs(["?"] * 3), **processor.image_inputs(torch.from_numpy(images))}
    decoding = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": processor.end_id, "pad_token_id": 1}
    stock = Blip2ForConditionalGeneration.from_pretrained(either).eval()
    want = stock.generate(**inputs, **decoding)
    model = FAMILY.load(either, torch.float32, None).eval()
    tokens, maps = FAMILY.generate(model, inputs, False, decoding)
    assert torch.equal(tokens, want[:, inputs["input_ids"].shape[1] :])
    assert tokens.shape[1] > 1
    assert len({tuple(row) for row in tokens.tolist()}) > 1, "captions that are all alike would show nothing"
    assert maps is None
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, stock(**inputs).logits)


def test_a_directory_with_weights_of_another_shape_is_refused(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    config["num_query_tokens"] += 1
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="of another shape than its config.json says: .*query_tokens"):
        FAMILY.load(copied, torch.float32, None)


def test_a_head_of_its_own_is_loaded_where_there_is_one(copied: Path) -> None:
    """An LLM whose embeddings are not its head, as Llama's: here OPT told so."""
    config = json.loads((copied / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = False
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"weights missing .*lm_head"):
        FAMILY.load(copied, torch.float32, None)

"""BLIP2IDC against its equations in float64, written out from the papers: a ViT, BLIP-2's Q-Former, OPT, LoRA.

x is [tokens, width] of one pair throughout. Weights are read by the names of the published files.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Blip2Config

from m3diff.models import FAMILIES
from m3diff.models.tuning import prepare, unwrapped
from tests.tiny import noise_image, saliency_map
from tests.tiny_blip2 import PATCH, QUERIES, SIDE, TEXTS, blip2_settings

FAMILY = FAMILIES["blip2idc"]
Weights = Mapping[str, Tensor]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    """W x + b, and beside an adapter alpha / r B A x."""
    if f"{name}.lora_A.default.weight" not in w:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)
    a, b = w[f"{name}.lora_A.default.weight"], w[f"{name}.lora_B.default.weight"]
    return linear(w, f"{name}.base_layer", x) + 2 * (x @ a.T) @ b.T  # alpha is twice the rank


def norm(w: Weights, name: str, x: Tensor, epsilon: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / ((centred**2).mean(-1, keepdim=True) + epsilon) ** 0.5
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool = False) -> Tensor:
    """softmax(Q K' / sqrt(d)) V of each head, side by side."""
    out = []
    for head in torch.arange(q.shape[1]).chunk(heads):
        scores = q[:, head] @ k[:, head].T / len(head) ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        out.append(torch.exp(scores - scores.logsumexp(1, keepdim=True)) @ v[:, head])
    return torch.cat(out, dim=1)


def vision(w: Weights, picture: Tensor, layers: int = 2, heads: int = 2) -> Tensor:
    """A pre-norm transformer over patches and a class token, with learnt positions and a norm at the end."""
    name, rows = "vision_model.embeddings", range(0, SIDE, PATCH)
    patches = [picture[:, top : top + PATCH, left : left + PATCH].flatten() for top in rows for left in rows]
    kernel = w[f"{name}.patch_embedding.weight"].flatten(1)
    x = torch.stack(patches) @ kernel.T + w[f"{name}.patch_embedding.bias"]
    x = torch.cat([w[f"{name}.class_embedding"][0], x]) + w[f"{name}.position_embedding"][0]
    for number in range(layers):
        at = f"vision_model.encoder.layers.{number}"
        q, k, v = linear(w, f"{at}.self_attn.qkv", norm(w, f"{at}.layer_norm1", x, 1e-6)).chunk(3, dim=1)
        x = x + linear(w, f"{at}.self_attn.projection", attention(q, k, v, heads))
        x = x + linear(w, f"{at}.mlp.fc2", gelu(linear(w, f"{at}.mlp.fc1", norm(w, f"{at}.layer_norm2", x, 1e-6))))
    return norm(w, "vision_model.post_layernorm", x, 1e-6)


def added(w: Weights, name: str, change: Tensor, x: Tensor) -> Tensor:
    """BERT's block: a linear, the residual, then the norm."""
    return norm(w, f"{name}.LayerNorm", linear(w, f"{name}.dense", change) + x, 1e-12)


def qformer(w: Weights, patches: Tensor, layers: int = 3, heads: int = 4) -> Tensor:
    """BERT on the learnt queries; in every second layer, from the first, they read the patches too."""
    x = norm(w, "qformer.layernorm", w["query_tokens"][0], 1e-12)
    for number in range(layers):
        at = f"qformer.encoder.layer.{number}"
        for block, read in (("attention", None), ("crossattention", patches))[: 2 - number % 2]:
            of = x if read is None else read
            own = f"{at}.{block}.attention"
            q, k, v = linear(w, f"{own}.query", x), linear(w, f"{own}.key", of), linear(w, f"{own}.value", of)
            x = added(w, f"{at}.{block}.output", attention(q, k, v, heads), x)
        x = added(w, f"{at}.output_query", gelu(linear(w, f"{at}.intermediate_query.dense", x)), x)
    return x


def opt(w: Weights, x: Tensor, layers: int = 2, heads: int = 2) -> Tensor:
    """A pre-norm decoder with learnt positions, the first two of which are no places; its head is its embeddings."""
    at = "language_model.model.decoder"
    x = x + w[f"{at}.embed_positions.weight"][2 : 2 + len(x)]
    for number in range(layers):
        own = f"{at}.layers.{number}"
        before = norm(w, f"{own}.self_attn_layer_norm", x, 1e-5)
        q, k, v = (linear(w, f"{own}.self_attn.{name}_proj", before) for name in "qkv")
        x = x + linear(w, f"{own}.self_attn.out_proj", attention(q, k, v, heads, causal=True))
        wide = linear(w, f"{own}.fc1", norm(w, f"{own}.final_layer_norm", x, 1e-5))
        x = x + linear(w, f"{own}.fc2", wide.clamp(min=0))
    return norm(w, f"{at}.final_layer_norm", x, 1e-5) @ w[f"{at}.embed_tokens.weight"].T


def answers(w: Weights, picture: Tensor, ids: list[int]) -> Tensor:
    """Logits [tokens, vocabulary] of a prompt of queries, start token and caption."""
    visual = linear(w, "language_projection", qformer(w, vision(w, picture)))
    words = w["language_model.model.decoder.embed_tokens.weight"][ids[QUERIES:]]
    return opt(w, torch.cat([visual, words]))


@pytest.fixture(scope="module", params=[False, True], ids=["published", "adapted"])
def model(request: pytest.FixtureRequest, base: Path) -> torch.nn.Module:
    made = FAMILY.load(base, torch.float64, None)
    if request.param:
        torch.manual_seed(4)
        made = prepare(made, FAMILY, blip2_settings())
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.2)
    return made.eval()


@pytest.mark.parametrize("is_fused", [False, True], ids=["stock", "fused, training"])
def test_the_logits_are_those_of_the_equations(is_fused: bool, model: torch.nn.Module, base: Path) -> None:
    processor = FAMILY.load_processor(base)
    if is_fused:
        FAMILY.fuse(unwrapped(model), "none")
    model.train(is_fused)
    images = np.stack([processor.prepare_image(noise_image(seed, (40, 30))) for seed in range(4)])
    inputs = processor.image_inputs(torch.from_numpy(images))
    pixels = inputs["pixel_values"].double()
    captions = [processor.encode_reference(text) for text in ("the red ball moved", "the star is gone")]
    w = dict(unwrapped(model).named_parameters())
    for number, caption in enumerate(captions):
        ids = [*processor.encode_prompt("What changed?"), *caption]
        with torch.no_grad():
            got = model(
                pixel_values=pixels[number : number + 1],
                input_ids=torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            ).logits[0]
            want = answers(w, pixels[number], ids)
            other = answers(w, pixels[number].roll(SIDE // 2, dims=1), ids)  # after above before
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        assert (other - want).abs().max() > 1e-2, "which image is on top shows"
    model.eval()


def test_the_map_is_the_queries_attention_on_both_images_of_a_place(base: Path) -> None:
    """Eager attention gives its weights itself."""
    model, eager = (FAMILY.load(base, torch.float32) for _ in range(2))
    eager.set_attn_implementation("eager")
    pixels, rows = torch.randn(3, 3, SIDE, SIDE), SIDE // PATCH
    with torch.no_grad():
        patches = eager.eval().vision_model(pixel_values=pixels).last_hidden_state
        queries = eager.query_tokens.expand(len(pixels), -1, -1)
        read = eager.qformer(query_embeds=queries, encoder_hidden_states=patches, output_attentions=True)
    weights = torch.stack(read.cross_attentions).mean(dim=(0, 2, 3))[:, 1:]  # layers, heads, queries; no class token
    before, after = weights.reshape(-1, rows, rows).split(rows // 2, dim=1)
    both = before + after
    maps = saliency_map(model.eval(), pixels)
    torch.testing.assert_close(maps, both / both.sum(dim=(1, 2), keepdim=True))
    assert (maps[0] - maps[1]).abs().max() > 1e-3, "maps that are all alike would show nothing"


def test_no_dropout_is_left_though_the_directory_has_some(base: Path) -> None:
    stock = Blip2Config.from_pretrained(base)
    assert (stock.qformer_config.hidden_dropout_prob, stock.text_config.dropout) == (0.1, 0.1)
    model = FAMILY.load(base, torch.float32).train()
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}
    pixels, ids = torch.randn(1, 3, 32, 32), torch.tensor([[*[model.config.image_token_index] * QUERIES, 2, 9, 10]])
    with torch.no_grad():
        assert torch.equal(*(model(pixel_values=pixels, input_ids=ids).logits for _ in range(2)))


@pytest.mark.parametrize(
    ("section", "field", "value", "words"),
    [
        (None, "num_query_tokens", QUERIES + 1, "of another shape than its config.json says: .*query_tokens"),
        ("text_config", "tie_word_embeddings", False, r"weights missing .*lm_head"),
    ],
)
def test_a_directory_with_other_weights_than_its_configuration_says_is_refused(
    section: str | None, field: str, value: object, words: str, base: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(base, tmp_path / "copied")
    config = json.loads((folder / "config.json").read_text())
    (config[section] if section else config)[field] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        FAMILY.load(folder, torch.float32)


@pytest.mark.parametrize("llm", TEXTS)
def test_the_adapters_are_on_queries_keys_and_values(llm: str, bases: dict[str, Path]) -> None:
    model = prepare(FAMILY.load(bases[llm], torch.float32), FAMILY, blip2_settings()).get_base_model()
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    layers = "language_model.model.decoder.layers" if llm == "opt" else "language_model.model.layers"
    own, across = "attention.attention", "crossattention.attention"
    want = {f"vision_model.encoder.layers.{n}.self_attn.qkv" for n in range(2)}
    want |= {f"qformer.encoder.layer.{n}.{own}.{name}" for n in range(3) for name in ("key", "value")}
    want |= {f"qformer.encoder.layer.{n}.{across}.{name}" for n in (0, 2) for name in ("query", "key", "value")}
    assert adapted == want | {f"{layers}.{n}.self_attn.{name}_proj" for n in range(2) for name in "qkv"}
    assert not [name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]


def test_without_adapters_the_same_linears_train_in_full(base: Path) -> None:
    model = prepare(FAMILY.load(base, torch.float32), FAMILY, blip2_settings(rank=0))
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "vision_model.encoder.layers.0.self_attn.qkv.bias" in trains
    assert not any(name.startswith("query_tokens") or ".fc1." in name for name in trains)


def test_the_picture_is_the_image_before_over_the_image_after(base: Path) -> None:
    processor = FAMILY.load_processor(base)
    images = torch.stack([torch.full((SIDE // 2, SIDE, 3), value, dtype=torch.uint8) for value in (10, 200, 30, 250)])
    pixels = processor.image_inputs(images)["pixel_values"]
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    grey = (pixels * std[:, None, None] + mean[:, None, None]) * 255
    for picture, (before, after) in zip(grey, ((10, 200), (30, 250)), strict=True):
        torch.testing.assert_close(picture[:, : SIDE // 2], torch.full((3, SIDE // 2, SIDE), float(before)))
        torch.testing.assert_close(picture[:, SIDE // 2 :], torch.full((3, SIDE // 2, SIDE), float(after)))

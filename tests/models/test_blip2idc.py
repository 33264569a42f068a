"""BLIP2IDC: logits against the papers' equations in float64 (x is [tokens, width] of one pair), images and texts."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, Blip2Config, Blip2Processor

from m3diff.models import FAMILIES
from m3diff.models.blip2idc import Augment
from m3diff.models.blip2idc_model import (
    Blip2IDCImageProcessor,
    Blip2IDCProcessor,
    augment_pair,
    blur,
    compress_as_jpeg,
    token_id,
)
from m3diff.models.contract import Prepared
from m3diff.models.tuning import prepare_for_training, unwrap_model
from m3diff.records.errors import ValueFault
from tests.errors import raises
from tests.tiny import image_inputs, noise_image, pair_prompt, saliency_map
from tests.tiny_blip2 import PATCH, QUERIES, SIDE, TEXTS, blip2_settings, tiny_blip2


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("blip2")
    return {llm: tiny_blip2(root / llm, llm) for llm in TEXTS}


@pytest.fixture(scope="module")
def base(bases: dict[str, Path]) -> Path:
    """Return the base with OPT, like the published one."""
    return bases["opt"]


FAMILY = FAMILIES["blip2idc"]
Weights = Mapping[str, Tensor]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    """Return W x + b, plus alpha / r B A x if the layer has an adapter."""
    if f"{name}.lora_A.default.weight" not in w:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)
    a = w[f"{name}.lora_A.default.weight"]
    b = w[f"{name}.lora_B.default.weight"]
    return linear(w, f"{name}.base_layer", x) + 2 * (x @ a.T) @ b.T  # alpha is twice the rank


def norm(w: Weights, name: str, x: Tensor, epsilon: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / ((centred**2).mean(-1, keepdim=True) + epsilon) ** 0.5
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool = False) -> Tensor:
    """Return softmax(Q K' / sqrt(d)) V of all heads, concatenated."""
    out = []
    for head in torch.arange(q.shape[1]).chunk(heads):
        scores = q[:, head] @ k[:, head].T / len(head) ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        out.append(torch.exp(scores - scores.logsumexp(1, keepdim=True)) @ v[:, head])
    return torch.cat(out, dim=1)


def vision(w: Weights, picture: Tensor, layers: int = 2, heads: int = 2) -> Tensor:
    """Return a pre-norm transformer over patches and a class token, with learnt positions and a last norm."""
    name = "vision_model.embeddings"
    rows = range(0, SIDE, PATCH)
    patches = [picture[:, row : row + PATCH, column : column + PATCH].flatten() for row in rows for column in rows]
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
    """Return the output of BERT's block: a linear layer, the residual, then the norm."""
    return norm(w, f"{name}.LayerNorm", linear(w, f"{name}.dense", change) + x, 1e-12)


def qformer(w: Weights, patches: Tensor, layers: int = 3, heads: int = 4) -> Tensor:
    """Return the output of BERT on the learnt queries. In layers 0, 2, ... the queries also read the patches."""
    x = norm(w, "qformer.layernorm", w["query_tokens"][0], 1e-12)
    for number in range(layers):
        at = f"qformer.encoder.layer.{number}"
        for block, read in (("attention", None), ("crossattention", patches))[: 2 - number % 2]:
            source = x if read is None else read
            layer_name = f"{at}.{block}.attention"
            q = linear(w, f"{layer_name}.query", x)
            k = linear(w, f"{layer_name}.key", source)
            v = linear(w, f"{layer_name}.value", source)
            x = added(w, f"{at}.{block}.output", attention(q, k, v, heads), x)
        x = added(w, f"{at}.output_query", gelu(linear(w, f"{at}.intermediate_query.dense", x)), x)
    return x


def opt(w: Weights, x: Tensor, layers: int = 2, heads: int = 2) -> Tensor:
    """Return the logits of a pre-norm decoder with learnt positions (the first two are unused) and tied embeddings."""
    at = "language_model.model.decoder"
    x = x + w[f"{at}.embed_positions.weight"][2 : 2 + len(x)]
    for number in range(layers):
        layer_name = f"{at}.layers.{number}"
        before = norm(w, f"{layer_name}.self_attn_layer_norm", x, 1e-5)
        q, k, v = (linear(w, f"{layer_name}.self_attn.{name}_proj", before) for name in "qkv")
        x = x + linear(w, f"{layer_name}.self_attn.out_proj", attention(q, k, v, heads, causal=True))
        wide = linear(w, f"{layer_name}.fc1", norm(w, f"{layer_name}.final_layer_norm", x, 1e-5))
        x = x + linear(w, f"{layer_name}.fc2", wide.clamp(min=0))
    return norm(w, f"{at}.final_layer_norm", x, 1e-5) @ w[f"{at}.embed_tokens.weight"].T


def answers(w: Weights, picture: Tensor, ids: list[int]) -> Tensor:
    """Return the logits, [tokens, vocabulary], of queries, start token and caption."""
    visual = linear(w, "language_projection", qformer(w, vision(w, picture)))
    words = w["language_model.model.decoder.embed_tokens.weight"][ids[QUERIES:]]
    return opt(w, torch.cat([visual, words]))


@pytest.fixture(scope="module", params=[False, True], ids=["published", "adapted"])
def model(request: pytest.FixtureRequest, base: Path) -> torch.nn.Module:
    model = FAMILY.load(base, torch.float64, None)
    if request.param:
        torch.manual_seed(4)
        model = prepare_for_training(model, FAMILY, blip2_settings())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.2)
    return model.eval()


@pytest.mark.parametrize("is_fused", [False, True], ids=["stock", "fused, training"])
def test_the_logits_are_those_of_the_equations(is_fused, model, base):
    processor = FAMILY.load_processor(base)
    if is_fused:
        FAMILY.fuse(unwrap_model(model), "none")
    model.train(is_fused)
    images = [noise_image(seed, (40, 30)) for seed in range(4)]
    pixels = image_inputs(processor, [images[:2], images[2:]])["pixel_values"].double()
    captions = [processor.encode_answer(text) for text in ("the red ball moved", "the star is gone")]
    w = dict(unwrap_model(model).named_parameters())
    for number, caption in enumerate(captions):
        ids = [*pair_prompt(processor, "What changed?"), *caption]
        with torch.no_grad():
            actual = model(
                pixel_values=pixels[number : number + 1],
                input_ids=torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            ).logits[0]
            expected = answers(w, pixels[number], ids)
            swapped = answers(w, pixels[number].roll(SIDE // 2, dims=1), ids)  # after above before
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
        assert (swapped - expected).abs().max() > 1e-2, "which image is on top shows"
    model.eval()


def test_the_map_is_the_queries_attention_on_both_images_of_a_place(base):
    """Eager attention returns its weights, which are the reference here."""
    model, eager = (FAMILY.load(base, torch.float32) for _ in range(2))
    eager.set_attn_implementation("eager")
    pixels = torch.randn(3, 3, SIDE, SIDE)
    rows = SIDE // PATCH
    with torch.no_grad():
        patches = eager.eval().vision_model(pixel_values=pixels).last_hidden_state
        queries = eager.query_tokens.expand(len(pixels), -1, -1)
        read = eager.qformer(query_embeds=queries, encoder_hidden_states=patches, output_attentions=True)
    weights = torch.stack(read.cross_attentions).mean(dim=(0, 2, 3))[:, 1:]  # layers, heads, queries; no class token
    before, after = weights.reshape(-1, rows, rows).split(rows // 2, dim=1)
    attention = before + after
    maps = saliency_map(model.eval(), pixels)
    torch.testing.assert_close(maps, attention / attention.sum(dim=(1, 2), keepdim=True))
    assert (maps[0] - maps[1]).abs().max() > 1e-3, "maps that are all alike would show nothing"


def test_no_dropout_is_left_though_the_directory_has_some(base):
    stock = Blip2Config.from_pretrained(base)
    assert stock.qformer_config.hidden_dropout_prob == 0.1
    assert stock.text_config.dropout == 0.1
    model = FAMILY.load(base, torch.float32).train()
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}
    pixels = torch.randn(1, 3, 32, 32)
    ids = torch.tensor([[*[model.config.image_token_index] * QUERIES, 2, 9, 10]])
    with torch.no_grad():
        assert torch.equal(*(model(pixel_values=pixels, input_ids=ids).logits for _ in range(2)))


@pytest.mark.parametrize("llm", TEXTS)
def test_the_adapters_are_on_queries_keys_and_values(llm, bases):
    model = prepare_for_training(FAMILY.load(bases[llm], torch.float32), FAMILY, blip2_settings()).get_base_model()
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    layers = "language_model.model.decoder.layers" if llm == "opt" else "language_model.model.layers"
    self_attention = "attention.attention"
    cross_attention = "crossattention.attention"
    expected = {f"vision_model.encoder.layers.{n}.self_attn.qkv" for n in range(2)}
    expected |= {f"qformer.encoder.layer.{n}.{self_attention}.{name}" for n in range(3) for name in ("key", "value")}
    expected |= {
        f"qformer.encoder.layer.{n}.{cross_attention}.{name}" for n in (0, 2) for name in ("query", "key", "value")
    }
    assert adapted == expected | {f"{layers}.{n}.self_attn.{name}_proj" for n in range(2) for name in "qkv"}
    assert not [name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]


HALF = SIDE // 2


@pytest.fixture(scope="module")
def processor(base: Path) -> Blip2IDCProcessor:
    return FAMILY.load_processor(base)  # type: ignore[return-value]


def smooth(seed: int, size: tuple[int, int]) -> Image.Image:
    """Return an image with few details. In noise, the effect of the bicubic filter at the edges would not show."""
    return noise_image(seed, (5, 4)).resize(size, Image.Resampling.BICUBIC)


def authors_picture(before: Image.Image, after: Image.Image) -> np.ndarray:
    """Return the authors' picture before normalisation: the first image is resized like the second."""
    stacked = Image.new("RGB", (after.width, 2 * after.height))
    stacked.paste(before.resize(after.size, Image.Resampling.BICUBIC), (0, 0))
    stacked.paste(after, (0, after.height))
    return np.asarray(stacked.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).astype(int)


def prepared_picture(processor: Blip2IDCProcessor, before: Image.Image, after: Image.Image) -> np.ndarray:
    return processor.prepare((before, after)).tensors["pixels"].flatten(0, 1).numpy().astype(int)


@pytest.mark.parametrize("size", [(64, 48), (40, 90), (200, 200), (SIDE, HALF), (8, 8)])
def test_images_of_one_size_make_the_authors_picture_except_at_the_seam(size, processor):
    """The seam has two rows on each side, or more if the images are enlarged."""
    before = smooth(1, size)
    after = smooth(2, size)
    difference = np.abs(prepared_picture(processor, before, after) - authors_picture(before, after))
    reach = max(2, SIDE // size[1])
    assert difference[: HALF - reach].max() <= 1
    assert difference[HALF + reach :].max() <= 1
    if size[1] == HALF:
        assert difference.max() == 0, "nothing is resized in height"
    else:
        assert difference[HALF - reach : HALF + reach].max() > 3, "there the authors' filter mixes the two images"


def test_a_text_ends_with_the_line_break_that_opt_stops_at(processor):
    reference = processor.encode_answer("the red ball moved")
    assert reference[-1] == processor.end_id == processor.tokenizer.convert_tokens_to_ids("Ċ")
    assert processor.start_id not in reference
    assert processor.tokenizer.decode(reference) == "the red ball moved\n"
    padded = torch.tensor([[*reference, processor.pad_id], [*reference[:-2], processor.end_id, processor.pad_id, 1]])
    assert processor.decode(padded) == ["the red ball moved", "the red ball"]
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert pair_prompt(processor, "What changed?") == (image,) * QUERIES + (2,)
    assert processor.decode(torch.tensor([processor.encode_answer("Ünknown ✓ words")])) == ["Ünknown ✓ words"]


def test_the_tokens_of_a_configuration_are_the_processors(bases):
    processor: Any = FAMILY.load_processor(bases["qwen2"])
    assert processor.end_id == 2
    assert pair_prompt(processor, "")[-1] == 2
    assert processor.pad_id == 1


@pytest.mark.parametrize(
    ("configured", "expected"), [([7, 8], 7), (None, 2), (0, 0)], ids=["the first of several", "none", "zero"]
)
def test_a_token_of_the_configuration_counts_and_else_the_tokenizers(configured, expected):
    assert token_id(configured, 2) == expected


@pytest.mark.parametrize("size", [{"height": 31, "width": 31}, {"height": 32, "width": 64}])
def test_an_image_of_no_even_square_is_refused(size):
    with raises(ValueFault, "models.size_not_an_even_square", value=size):
        Blip2IDCImageProcessor(size, [0.5] * 3, [0.5] * 3)


def test_what_is_saved_is_blip2s_own_and_gives_the_same(processor, base, tmp_path):
    processor.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "processor_config.json").read_text())
    assert fields["processor_class"] == "Blip2Processor"
    assert fields["num_query_tokens"] == QUERIES
    (tmp_path / "config.json").write_text((base / "config.json").read_text())
    again = FAMILY.load_processor(tmp_path)
    assert again.encode_answer("the ball") == processor.encode_answer("the ball")
    assert pair_prompt(again, "") == pair_prompt(processor, "")
    image = smooth(1, (30, 20))
    assert np.array_equal(prepared_picture(again, image, image), prepared_picture(processor, image, image))
    stock = AutoProcessor.from_pretrained(tmp_path)
    assert isinstance(stock, Blip2Processor)
    picture = Image.fromarray(prepared_picture(processor, image, image).astype(np.uint8))
    pixels = stock(images=picture, return_tensors="pt")["pixel_values"]
    own_pixels = image_inputs(processor, [(image, image)])["pixel_values"]
    torch.testing.assert_close(pixels, own_pixels, rtol=0, atol=1e-5)


ALWAYS = Augment(blur=1.0, jpeg=1.0)
NEVER = Augment(blur=0.0, jpeg=0.0)


def pair(seed: int = 0, rows: int = 16, columns: int = 24) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (2, rows, columns, 3), dtype=np.uint8)


def visit(*numbers: int) -> np.random.Generator:
    return np.random.default_rng(numbers)


def test_a_visit_gives_the_same_pixels_again_and_another_visit_others():
    images = pair()
    copy = images.copy()
    augmented = augment_pair(ALWAYS, images, visit(3, 0, 7))
    augmented_again = augment_pair(ALWAYS, images, visit(3, 0, 7))
    augmented_elsewhere = augment_pair(ALWAYS, images, visit(3, 1, 7))
    assert np.array_equal(augmented, augmented_again)
    assert not np.array_equal(augmented, augmented_elsewhere)
    assert augmented.shape == images.shape
    assert augmented.dtype == np.uint8
    assert np.array_equal(images, copy), "what is cached stays as it is"
    assert np.array_equal(augment_pair(NEVER, images, visit(1)), images)


def changes(augment: Augment, row: int) -> bool:
    return not np.array_equal(augment_pair(augment, pair(), visit(2, row)), pair())


def test_about_the_asked_share_is_blurred_and_compressed_each_by_itself():
    visible_sigma = (0.4, 0.5)  # a narrower Gaussian may leave every pixel as it is
    smooth = Augment(blur=0.3, sigma=visible_sigma, jpeg=0.0)
    hard = Augment(blur=0.0, jpeg=0.6)
    for augment, share in ((smooth, 0.3), (hard, 0.6)):
        assert abs(np.mean([changes(augment, row) for row in range(300)]) - share) < 0.08
    # of what is drawn, neither choice moves the other's
    blur_and_jpeg = Augment(blur=0.3, sigma=visible_sigma, jpeg=0.6)
    for row in range(40):
        assert changes(blur_and_jpeg, row) == (changes(smooth, row) or changes(hard, row))


def test_both_images_are_changed_alike_as_one_picture():
    """Equal images stay equal except near the seam and the border, where the filter reads other pixels."""
    same = np.stack([pair()[0]] * 2)
    augmented = augment_pair(Augment(blur=1.0, jpeg=0.0), same, visit(5)).astype(int)
    assert np.abs(augmented - same).max() > 0
    assert np.array_equal(augmented[0, 1:-1], augmented[1, 1:-1])


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.5])
def test_the_blur_is_a_gaussian_of_three_pixels_mirrored_at_the_edges(sigma):
    picture = pair()[0]
    weights = np.exp(-0.5 * (np.array([-1, 0, 1]) / sigma) ** 2)
    weights /= weights.sum()
    (rows, columns, _) = picture.shape
    padded = np.pad(picture.astype(float), ((1, 1), (1, 1), (0, 0)), "reflect")
    expected = np.zeros(picture.shape)
    for down in range(3):
        for right in range(3):
            expected += weights[down] * weights[right] * padded[down : down + rows, right : right + columns]
    expected = np.rint(expected)
    blurred = blur(picture, sigma)
    assert np.abs(blurred.astype(int) - expected).max() <= 1
    assert (blurred != expected).mean() < 0.01
    if sigma == 0.1:
        assert np.array_equal(blurred, picture), "a Gaussian so narrow leaves the pixels alone"


def test_compression_is_a_jpeg_file_of_the_quality():
    picture = pair(rows=32, columns=32)[0]
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=70)
    assert np.array_equal(compress_as_jpeg(picture, 70), np.asarray(Image.open(file)))
    images = pair()
    once = augment_pair(Augment(blur=0.0, jpeg=1.0, quality=(70, 70)), images, visit(1))
    assert np.array_equal(
        once.reshape(-1, *images.shape[2:]), compress_as_jpeg(images.reshape(-1, *images.shape[2:]), 70)
    )
    error = [np.abs(compress_as_jpeg(picture, quality).astype(int) - picture).mean() for quality in (95, 75, 50)]
    assert error == sorted(error)
    assert error[0] > 0


def test_the_family_augments_as_its_settings_say_and_m3diff_not_at_all():
    augment = FAMILY.augment
    assert augment is not None
    images = pair()
    prepared = Prepared({"pixels": torch.from_numpy(images.copy())}, ("", ""))
    assert augment(blip2_settings(), prepared, visit(1)) is prepared, "null: not at all"
    augmented = augment(blip2_settings(augment=ALWAYS), prepared, visit(1))
    assert np.array_equal(augmented.tensors["pixels"], augment_pair(ALWAYS, images, visit(1)))
    assert augmented.marks == prepared.marks
    assert np.array_equal(prepared.tensors["pixels"], images), "what is cached stays as it is"
    assert FAMILIES["m3diff"].augment is None

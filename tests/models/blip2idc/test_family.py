"""BLIP2IDC as a family of functions: what it plans, counts and fuses, and where it looks."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from m3diff.models import FAMILIES
from m3diff.models.blip2idc_model import Blip2IDCConfig
from m3diff.models.fused import FusedDecoderLayer, FusedLora
from m3diff.models.tuning import parameter_counts, prepare, unwrapped
from tests.tiny import noise_image
from tests.tiny_blip2 import PATCH, QUERIES, SIDE, TEXTS, WIDTH, blip2_settings, randomised, tiny_config

FAMILY = FAMILIES["blip2idc"]
PATCHES = (SIDE // PATCH) ** 2 + 1


def tiny_model(llm: str = "opt", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return randomised(FAMILY.build(tiny_config(llm))).eval()


def pictures(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def test_the_published_shapes_have_the_published_number_of_parameters_and_the_papers_share_trains(
    tmp_path: Path,
) -> None:
    config = FAMILY.planned_config(tmp_path / "blip2-opt-2.7b", blip2_settings())
    assert config.name_or_path == "Salesforce/blip2-opt-2.7b"
    with torch.device("meta"):
        counts = parameter_counts(prepare(FAMILY.build(config), FAMILY, blip2_settings(rank=8)), FAMILY)
    trained = {part: counts[part] for part in FAMILY.parts}
    assert trained == {
        "vision": 39 * 8 * 4 * 1408,
        "module": 8 * ((2 * 12 + 6) * 2 * 768 + 2 * 6 * (1408 + 768)),
        "projector": 0,
        "llm": 32 * 8 * 3 * 2 * 2560,
    }
    assert counts["frozen"] == 3_744_761_856  # Salesforce/blip2-opt-2.7b: 3.74 B
    assert counts["trainable"] == pytest.approx(6.3e6, rel=0.01)  # "0.1 % of parameters"


def test_a_base_that_is_there_is_planned_as_it_is(either: Path) -> None:
    config = FAMILY.planned_config(either, blip2_settings())
    assert (config.vision_config.hidden_size, config.num_query_tokens) == (WIDTH, QUERIES)
    assert config.image_tokens == QUERIES
    assert Blip2IDCConfig.published("", None).image_tokens == 32


def test_blank_images_are_those_that_the_processor_makes_of_a_pair(base: Path) -> None:
    processor = FAMILY.load_processor(base)
    prepared = np.stack([processor.prepare_image(noise_image(seed)) for seed in (0, 1)])
    made = processor.image_inputs(torch.from_numpy(prepared))
    blank = FAMILY.classes()[0].blank_images(FAMILY.planned_config(base, blip2_settings()), "meta")
    assert blank.keys() == made.keys()
    assert (blank["pixel_values"].shape, blank["pixel_values"].dtype) == (made["pixel_values"].shape, torch.float32)
    assert blank["pixel_values"].is_meta


@pytest.mark.parametrize("llm", TEXTS)
def test_every_parameter_is_in_one_part_and_the_adapters_are_on_queries_keys_and_values(llm: str) -> None:
    model = tiny_model(llm)
    parts = {FAMILY.part_of(name) for name, _ in model.named_parameters()}
    assert parts == set(FAMILY.parts)
    prepare(model, FAMILY, blip2_settings())
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    llm_layers = "language_model.model.decoder.layers" if llm == "opt" else "language_model.model.layers"
    own, across = "attention.attention", "crossattention.attention"
    want = {f"vision_model.encoder.layers.{n}.self_attn.qkv" for n in range(2)}
    want |= {f"qformer.encoder.layer.{n}.{own}.{name}" for n in range(3) for name in ("key", "value")}
    want |= {f"qformer.encoder.layer.{n}.{across}.{name}" for n in (0, 2) for name in ("query", "key", "value")}
    want |= {f"{llm_layers}.{n}.self_attn.{name}_proj" for n in range(2) for name in "qkv"}
    assert adapted == want
    assert not [name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]


def forward_flops(model: nn.Module, **inputs: object) -> Callable[[nn.Module], int]:
    """FLOPs of the modules in a forward pass, as torch counts them."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(**inputs)
    counts, names = counter.get_flop_counts(), {module: name for name, module in model.named_modules()}
    return lambda module: sum(counts[f"{type(model).__name__}.{names[module]}"].values())


def inputs(tokens: int, supervised: int) -> dict[str, object]:
    ids = torch.full((1, tokens), 9)
    ids[:, :QUERIES] = tiny_config().image_token_index
    keep = (torch.arange(tokens) >= tokens - supervised)[None]
    places = torch.arange(tokens)[None]
    more = {"attention_mask": None, "logits_to_keep": keep, "use_cache": False, "position_ids": places}
    return {"input_ids": ids, "pixel_values": pictures(1), **more}


@pytest.mark.parametrize("llm", TEXTS)
def test_flops_are_those_that_torch_counts(llm: str) -> None:
    model = tiny_model(llm).requires_grad_(False)
    counted = forward_flops(model, **inputs(20, 4))
    terms = {term.name: term.forward for term in FAMILY.flops(model.config, 20, 4, blip2_settings(rank=0))}
    vision, llm_layers = model.vision_model, unwrapped(model).language_model.model
    layers = llm_layers.decoder.layers if llm == "opt" else llm_layers.layers
    found = counted(vision.embeddings) + sum(map(counted, vision.encoder.layers))
    assert terms["vision encoder"] + terms["vision encoder attention"] == found
    assert terms["Q-Former"] + terms["Q-Former attention"] == sum(map(counted, model.qformer.encoder.layer))
    assert terms["projector"] == counted(model.language_projection)
    found = sum(map(counted, layers))
    assert terms["LLM linears"] + 2 * terms["LLM attention"] == found, "torch counts the whole square"
    assert terms["head, supervised tokens"] == counted(model.language_model.lm_head)
    assert "LoRA" not in terms
    bare = sum(counted(part) for part in (vision, model.qformer, *layers))
    prepare(model, FAMILY, blip2_settings(rank=3))
    model.requires_grad_(False)
    again = forward_flops(model, **inputs(20, 4))
    with_adapters = sum(again(part) for part in (vision, model.qformer, *layers))
    lora = next(term for term in FAMILY.flops(model.config, 20, 4, blip2_settings(rank=3)) if term.name == "LoRA")
    assert lora.forward == with_adapters - bare


def test_frozen_linears_cost_two_of_three_and_the_pictures_do_not_grow_with_the_text() -> None:
    short, long = (
        {term.name: term for term in FAMILY.flops(tiny_config(), n, 5, blip2_settings(rank=2))} for n in (20, 40)
    )
    factors = {name: term.backward_factor for name, term in short.items()}
    twice = {"LLM attention", "LoRA", "vision encoder attention", "Q-Former attention"}
    assert factors == {name: 2 if name in twice else 1 for name in short}
    same = {name for name in short if short[name].forward == long[name].forward}
    assert same == {name for name in short if name.startswith(("vision", "Q-Former", "projector", "head"))}
    assert {name for name, term in short.items() if not term.recomputed} == {"projector", "head, supervised tokens"}


def test_a_part_that_does_not_train_has_no_adapters_and_no_backward_that_nothing_needs() -> None:
    def terms(**rates: float | None) -> dict:
        return {term.name: term for term in FAMILY.flops(tiny_config(), 20, 5, blip2_settings(2, **rates))}

    every, frozen = terms(), terms(vision=None)
    encoder = {"vision encoder", "vision encoder attention"}
    assert {name for name in every if every[name].total != frozen[name].total} == {"LoRA", *encoder}
    assert not any(frozen[name].backward_factor or frozen[name].recomputed for name in encoder)
    alone = terms(vision=None, module=None)  # the LLM's adapters alone
    names = ("Q-Former", "Q-Former attention", "projector", "LLM linears", "LoRA")
    assert [alone[name].backward_factor for name in names] == [0, 0, 0, 1, 2]
    assert alone["LoRA"].forward == 2 * (2 * 3 * 2 * 2 * WIDTH) * 20


@pytest.mark.parametrize("llm", TEXTS)
def test_fusing_changes_classes_and_no_number(llm: str) -> None:
    model = tiny_model(llm)
    prepare(model, FAMILY, blip2_settings())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    model.double()
    asked, found = inputs(20, 4), []
    for way in (None, "none", "full"):
        if way:
            FAMILY.fuse(model, way)
            assert model.is_gradient_checkpointing == (way == "full")
            assert sum(isinstance(module, FusedLora) for module in model.modules()) == 2 + 12 + 6
            assert any(isinstance(module, FusedDecoderLayer) for module in model.modules()) == (llm == "qwen2")
        model.train()
        model.zero_grad()
        logits = model(**asked).logits
        logits.square().sum().backward()
        found.append(
            (logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
        )
    for logits, gradients in found[1:]:
        # stock Qwen2 rounds its norms to fp32 on the way
        tolerance = 1e-5 if llm == "qwen2" else 1e-12
        assert float((logits - found[0][0]).norm()) < tolerance * float(found[0][0].norm())
        whole = max(float(gradient.norm()) for gradient in gradients.values())
        for name, gradient in gradients.items():
            assert float((gradient - found[0][1][name]).norm()) < tolerance * whole, name


def test_selective_recomputation_is_refused_in_words_where_the_llm_has_no_such_kernels() -> None:
    with pytest.raises(ValueError, match="activation_checkpointing: selective .* this one is opt; write none or full"):
        FAMILY.fuse(tiny_model("opt"), "selective")
    FAMILY.fuse(tiny_model("qwen2"), "selective")


def by_hand(model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """Eager attention gives its weights itself."""
    eager = FAMILY.build(tiny_config())
    eager.load_state_dict(model.state_dict())
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        patches = eager.eval().vision_model(pixel_values=pixels).last_hidden_state
        queries = eager.query_tokens.expand(len(pixels), -1, -1)
        read = eager.qformer(query_embeds=queries, encoder_hidden_states=patches, output_attentions=True)
    weights = torch.stack(read.cross_attentions).mean(dim=(0, 2, 3))[:, 1:]  # layers, heads, queries; no class token
    rows = SIDE // PATCH
    before, after = weights.reshape(-1, rows, rows).split(rows // 2, dim=1)
    both = before + after
    return both / both.sum(dim=(1, 2), keepdim=True)


def test_the_map_is_the_queries_attention_on_both_images_of_a_place() -> None:
    model, pixels = tiny_model(), pictures(3)
    maps = model.saliency_map(pixels)
    assert maps.shape == (3, SIDE // PATCH // 2, SIDE // PATCH)
    torch.testing.assert_close(maps, by_hand(model, pixels))
    torch.testing.assert_close(maps.sum(dim=(1, 2)), torch.ones(3))
    assert (maps[0] - maps[1]).abs().max() > 1e-3, "maps that are all alike would show nothing"


def test_captions_and_maps_of_one_pass_are_to_the_bit_those_of_two(base: Path) -> None:
    processor, model = FAMILY.load_processor(base), FAMILY.load(base, torch.float32, None).eval()
    asked = {**processor.prompt_inputs(["?"] * 3), "pixel_values": pictures(3)}
    decoding = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": processor.end_id, "pad_token_id": 1}
    runs = []
    hook = model.vision_model.register_forward_hook(lambda *_: runs.append(1))
    tokens, maps = FAMILY.generate(model, asked, True, decoding)
    assert len(runs) == 1, "the pictures are encoded once for both"
    hook.remove()
    alone, none = FAMILY.generate(model, asked, False, decoding)
    assert none is None
    assert torch.equal(tokens, alone)
    assert torch.equal(maps, model.saliency_map(asked["pixel_values"]))

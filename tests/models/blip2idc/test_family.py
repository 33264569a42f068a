"""BLIP2IDC as a family of functions: what it plans, counts and fuses, and where it looks."""

from pathlib import Path

import pytest
import torch
from torch import nn

from m3diff.models import FAMILIES
from m3diff.models.tuning import parameter_counts, prepare
from tests.tiny import saliency_map
from tests.tiny_blip2 import PATCH, SIDE, TEXTS, WIDTH, blip2_settings, randomised, tiny_config

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
    maps = saliency_map(model, pixels)
    assert maps.shape == (3, SIDE // PATCH // 2, SIDE // PATCH)
    torch.testing.assert_close(maps, by_hand(model, pixels))
    torch.testing.assert_close(maps.sum(dim=(1, 2)), torch.ones(3))
    assert (maps[0] - maps[1]).abs().max() > 1e-3, "maps that are all alike would show nothing"

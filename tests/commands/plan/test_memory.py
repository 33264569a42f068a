"""Bytes that backward keeps, counted on shapes: against a real forward pass of tiny models, and by hand at 7 B."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from m3diff.commands.plan.memory import (
    LOGITS,
    ONE_LAYER,
    OnShapes,
    count_activations,
    recomputed_layers,
)
from m3diff.models import FAMILIES
from m3diff.models.fused import fused_attention
from m3diff.models.tuning import meta_model, prepare
from tests import tiny_blip2
from tests.tiny import MDP, tiny_config, tiny_settings

FAMILY, BLIP2 = FAMILIES["m3diff"], FAMILIES["blip2idc"]
TOKENS, SUPERVISED = 90, 30
WAYS = ("none", "selective", "full")
TOY = FAMILY, tiny_config(MDP), tiny_settings(), 20  # family, config, settings, places of the images
BLIPS = {
    llm: (BLIP2, tiny_blip2.tiny_config(llm), tiny_blip2.blip2_settings(), tiny_blip2.QUERIES)
    for llm in tiny_blip2.TEXTS
}
CASES = [(TOY, way) for way in WAYS] + [(BLIPS["opt"], "none"), (BLIPS["qwen2"], "selective")]


class NormInOneKernel(OnShapes):
    """A CPU's RMS norm is many kernels; everything else is left as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = super().__torch_function__
        return shapes(func, types, args, kwargs) if func is F.rms_norm else func(*args, **kwargs or {})


def real_step(case: tuple[Any, ...], way: str, precision: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model with values on the CPU, and the inputs of one pair."""
    family, config, settings, places = case
    torch.manual_seed(0)
    model = family.build(config)
    prepare(model, family, settings)
    model = model.to(torch.bfloat16 if precision == "bf16" else torch.float32).train()
    family.fuse(model, way)
    ids = torch.full((1, TOKENS), 9)
    ids[:, :places] = getattr(model.config, "image_token_index", 3)
    return model, {
        "input_ids": ids,
        "position_ids": torch.arange(TOKENS)[None],
        "logits_to_keep": (torch.arange(TOKENS) >= TOKENS - SUPERVISED)[None],
        "use_cache": False,
        **family.classes()[0].blank_images(model.config, "cpu"),
    }


def counted(case: tuple[Any, ...], way: str, precision: str = "bf16", **settings: Any) -> dict[str, int]:
    """The same on shapes."""
    family, config, given, _ = case
    model = meta_model(config, family, tiny_settings(**settings) if settings else given, precision)
    return count_activations(model, family, way, TOKENS, SUPERVISED)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("case", "way"), CASES, ids=[*WAYS, "opt", "qwen2 selective"])
def test_what_is_counted_on_shapes_is_what_a_real_forward_pass_leaves_allocated(case, way, precision):
    model, inputs = real_step(case, way, precision)
    with NormInOneKernel(), fused_attention():
        model(**inputs)  # what is made once and cached
        gc.collect()  # what another test left would be freed within
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            logits = model(**inputs).logits
    left = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    left -= len(recomputed_layers(model)) * torch.get_rng_state().nbytes  # each layer's, on the CPU on a GPU too
    held = counted(case, way, precision)
    lasting = sum(size for name, size in held.items() if name not in (LOGITS, ONE_LAYER))
    assert lasting == pytest.approx(left - logits.untyped_storage().nbytes(), rel=0.03 if case is TOY else 0.05)


def test_recomputation_lowers_what_is_kept_and_names_the_layer_that_is_computed_again():
    held = {way: counted(TOY, way) for way in WAYS}
    assert held["none"]["llm"] > held["selective"]["llm"] > held["full"]["llm"]
    assert held["none"]["vision"] == held["selective"]["vision"] > held["full"]["vision"]
    assert held["none"]["module"] == held["full"]["module"]
    assert [ONE_LAYER in held[way] for way in WAYS] == [False, False, True]
    bare = counted(TOY, "none", vision=None, module=None, projector=None)
    assert {"vision", "module", "projector"} & bare.keys() == set(), "what does not train keeps nothing below it"


def test_attention_keeps_its_inputs_its_output_and_a_float_a_query_and_no_square():
    half = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = torch.empty(2, 8, 50, 16, **half), torch.empty(2, 4, 70, 16, **half), torch.empty(2, 4, 70, 16, **half)
    kept: list[Tensor] = []
    with OnShapes(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda _: None):
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert output.shape == q.shape
    found = sorted((tuple(tensor.shape), str(tensor.dtype)) for tensor in kept)
    wanted = [(tuple(tensor.shape), "torch.bfloat16") for tensor in (q, k, v, output)]
    assert found == sorted([*wanted, ((2, 8, 50), "torch.float32")])


WIDTH, HIDDEN, KEYS, RANK = 3584, 18_944, 512, 128
LAYER = 1579 * 2 * (6 * WIDTH + 2 * KEYS + 3 * HIDDEN + 7 * RANK) / 1e9
"""GB that one LLM layer keeps in bf16: its input, two normed inputs, queries, attention's output, the sum
after attention; keys and values; gate, up and their product; seven adapters' low ranks."""


@pytest.mark.slow(15)
def test_a_pair_at_7b_with_six_captions_of_15_tokens_keeps_what_is_counted_by_hand():
    settings = tiny_settings({}, rank=RANK)
    model = meta_model(FAMILY.planned_config(Path("none"), settings), FAMILY, settings, "bf16")
    held = {}
    for way in WAYS:
        found = count_activations(model, FAMILY, way, 1460 + 29 + 90, 90)
        held[way] = {name: size / 1e9 for name, size in found.items()}
    plain, full = held["none"], held["full"]
    assert 27 * LAYER < plain["llm"] < 28 * LAYER * 1.01  # the last layer may work on supervised tokens alone
    assert plain["vision"] == pytest.approx(1.36, rel=0.01)
    assert plain["projector"] == pytest.approx(2 * 2 * 729 * (1152 + 2 * WIDTH) / 1e9, rel=0.15)
    assert plain["module"] == pytest.approx(0.86, rel=0.02)
    assert plain["logits"] == pytest.approx(90 * 152_064 * 3 * 4 / 1e9, rel=0.01)  # fp32: softmax and two gradients
    kept = LAYER - 1579 * 2 * (2 * WIDTH + HIDDEN) / 1e9
    assert 27 * kept < held["selective"]["llm"] < 28 * kept * 1.01, "no norm and no product"
    assert full[ONE_LAYER] == pytest.approx(LAYER, rel=0.01)
    assert full["llm"] == pytest.approx(28 * 1579 * 2 * WIDTH / 1e9, rel=0.06), "the layers' inputs"
    assert full["vision"] == pytest.approx(26 * 2 * 729 * 1152 * 2 / 1e9, rel=0.06)
    assert full["module"] == pytest.approx(0.86, rel=0.02)

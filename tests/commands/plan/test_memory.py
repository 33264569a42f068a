"""Bytes that backward keeps, counted on shapes: against a real forward pass of tiny models, and by hand at 7 B."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from m3diff.commands.plan.memory import LOGITS, RECOMPUTED_LAYER, OnShapes, count_activations, recomputed_layers
from m3diff.models import FAMILIES
from m3diff.models.fused import require_fused_attention
from m3diff.models.tuning import meta_model, prepare_for_training
from tests import tiny_blip2
from tests.tiny import MDP, tiny_config, tiny_settings

FAMILY = FAMILIES["m3diff"]
BLIP2 = FAMILIES["blip2idc"]
TOKENS = 90
SUPERVISED = 30
WAYS = ("none", "selective", "full")
TOY = FAMILY, tiny_config(MDP), tiny_settings(), 20  # family, config, settings, places of the images
SETTINGS = tiny_blip2.blip2_settings()
PLACES = tiny_blip2.QUERIES
BLIPS = {llm: (BLIP2, tiny_blip2.tiny_config(llm), SETTINGS, PLACES) for llm in tiny_blip2.TEXTS}
CASES = [(TOY, way) for way in WAYS] + [(BLIPS["opt"], "none"), (BLIPS["qwen2"], "selective")]


class NormInOneKernel(OnShapes):
    """A CPU's RMS norm is many kernels; everything else is left as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = super().__torch_function__
        return shapes(func, types, args, kwargs) if func is F.rms_norm else func(*args, **kwargs or {})


def real_step(case: tuple[Any, ...], way: str, precision: str) -> tuple[nn.Module, dict[str, Any]]:
    family, config, settings, places = case
    torch.manual_seed(0)
    model = family.build(config)
    prepare_for_training(model, family, settings)
    model = model.to(torch.bfloat16 if precision == "bf16" else torch.float32).train()
    family.fuse(model, way)
    ids = torch.full((1, TOKENS), 9)
    ids[:, :places] = getattr(model.config, "image_token_index", 3)
    places = torch.arange(TOKENS)[None]
    inputs = {"input_ids": ids, "position_ids": places, "logits_to_keep": places >= TOKENS - SUPERVISED}
    return model, inputs | {"use_cache": False} | family.classes()[0].blank_images(model.config, "cpu")


def counted(case: tuple[Any, ...], way: str, precision: str = "bf16", **settings: Any) -> dict[str, int]:
    family, config, given, _ = case
    model = meta_model(config, family, tiny_settings(**settings) if settings else given, precision)
    return count_activations(model, family, way, TOKENS, SUPERVISED)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize(("case", "way"), CASES, ids=[*WAYS, "opt", "qwen2 selective"])
def test_what_is_counted_on_shapes_is_what_a_real_forward_pass_leaves_allocated(case, way, precision):
    model, inputs = real_step(case, way, precision)
    with NormInOneKernel(), require_fused_attention():
        model(**inputs)  # what is made once and cached
        gc.collect()  # what another test left would be freed within
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            logits = model(**inputs).logits
    left = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    left -= len(recomputed_layers(model)) * torch.get_rng_state().nbytes  # each layer's, on the CPU on a GPU too
    held = counted(case, way, precision)
    lasting = sum(size for name, size in held.items() if name not in (LOGITS, RECOMPUTED_LAYER))
    assert lasting == pytest.approx(left - logits.untyped_storage().nbytes(), rel=0.03 if case is TOY else 0.05)


def test_recomputation_holds_less_and_names_the_recomputed_layer():
    held = {way: counted(TOY, way) for way in WAYS}
    assert held["none"]["llm"] > held["selective"]["llm"] > held["full"]["llm"]
    assert held["none"]["vision"] == held["selective"]["vision"] > held["full"]["vision"]
    assert held["none"]["module"] == held["full"]["module"]
    assert [RECOMPUTED_LAYER in held[checkpointing] for checkpointing in WAYS] == [False, False, True]
    bare = counted(TOY, "none", vision=None, module=None, projector=None)
    assert {"vision", "module", "projector"} & bare.keys() == set(), "what does not train keeps nothing below it"

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
CHECKPOINTING = ("none", "selective", "full")
TOY = FAMILY, tiny_config(MDP), tiny_settings(), 20  # family, config, settings, tokens of the images
SETTINGS = tiny_blip2.blip2_settings()
IMAGE_TOKENS = tiny_blip2.QUERIES
BLIPS = {llm: (BLIP2, tiny_blip2.tiny_config(llm), SETTINGS, IMAGE_TOKENS) for llm in tiny_blip2.TEXTS}
CASES = [
    pytest.param(TOY, "none", id="none", marks=pytest.mark.slow(3)),
    pytest.param(TOY, "selective", id="selective"),
    pytest.param(TOY, "full", id="full", marks=pytest.mark.slow(3)),
    pytest.param(BLIPS["opt"], "none", id="opt"),
    pytest.param(BLIPS["qwen2"], "selective", id="qwen2 selective"),
]


class NormInOneKernel(OnShapes):
    """A CPU's RMS norm is many kernels; everything else is left as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = super().__torch_function__
        return shapes(func, types, args, kwargs) if func is F.rms_norm else func(*args, **kwargs or {})


def real_step(case: tuple[Any, ...], checkpointing: str, precision: str) -> tuple[nn.Module, dict[str, Any]]:
    family, config, settings, image_tokens = case
    torch.manual_seed(0)
    model = family.build(config)
    prepare_for_training(model, family, settings)
    model = model.to(torch.bfloat16 if precision == "bf16" else torch.float32).train()
    family.fuse(model, checkpointing)
    ids = torch.full((1, TOKENS), 9)
    ids[:, :image_tokens] = getattr(model.config, "image_token_index", 3)
    positions = torch.arange(TOKENS)[None]
    inputs = {"input_ids": ids, "position_ids": positions, "logits_to_keep": positions >= TOKENS - SUPERVISED}
    return model, inputs | {"use_cache": False} | family.classes()[0].blank_images(model.config, "cpu")


def counted(case: tuple[Any, ...], checkpointing: str, precision: str = "bf16", **settings: Any) -> dict[str, int]:
    family, config, model_settings, _ = case
    model = meta_model(config, family, tiny_settings(**settings) if settings else model_settings, precision)
    return count_activations(model, family, checkpointing, TOKENS, SUPERVISED)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize(("case", "checkpointing"), CASES)
def test_what_is_counted_on_shapes_is_what_a_real_forward_pass_leaves_allocated(case, checkpointing, precision):
    model, inputs = real_step(case, checkpointing, precision)
    with NormInOneKernel(), require_fused_attention():
        model(**inputs)  # what is made once and cached
        gc.collect()  # what another test left would be freed within
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            logits = model(**inputs).logits
    allocated_bytes = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    # each recomputed layer keeps a random state, which is on the CPU even if the model is on a GPU
    allocated_bytes -= len(recomputed_layers(model)) * torch.get_rng_state().nbytes
    counted_bytes = counted(case, checkpointing, precision)
    lasting = sum(size for name, size in counted_bytes.items() if name not in (LOGITS, RECOMPUTED_LAYER))
    expected_bytes = allocated_bytes - logits.untyped_storage().nbytes()
    assert lasting == pytest.approx(expected_bytes, rel=0.03 if case is TOY else 0.05)


def test_recomputation_holds_less_and_names_the_recomputed_layer():
    counted_bytes = {checkpointing: counted(TOY, checkpointing) for checkpointing in CHECKPOINTING}
    assert counted_bytes["none"]["llm"] > counted_bytes["selective"]["llm"] > counted_bytes["full"]["llm"]
    assert counted_bytes["none"]["vision"] == counted_bytes["selective"]["vision"] > counted_bytes["full"]["vision"]
    assert counted_bytes["none"]["module"] == counted_bytes["full"]["module"]
    assert [RECOMPUTED_LAYER in counted_bytes[checkpointing] for checkpointing in CHECKPOINTING] == [False, False, True]
    bare = counted(TOY, "none", vision=None, module=None, projector=None)
    assert {"vision", "module", "projector"} & bare.keys() == set(), "what does not train keeps nothing below it"

"""What backward keeps, counted on shapes: against a real forward pass of a tiny model, and by hand at 7 B."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    parts_of_modules,
    recomputed_layers,
)
from m3diff.commands.plan.plan import meta_model
from m3diff.models import FAMILIES
from m3diff.models.fused import fused_attention
from m3diff.models.tuning import prepare
from tests.tiny import MDP, tiny_config, tiny_settings

FAMILY = FAMILIES["m3diff"]
TOKENS, SUPERVISED, IMAGE_TOKENS = 90, 30, 20
WAYS = ("none", "selective", "full")


class NormInOneKernel(OnShapes):
    """A CPU's RMS norm is many kernels; everything else is left as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            super().__torch_function__(func, types, args, kwargs) if func is F.rms_norm else func(*args, **kwargs or {})
        )


@contextmanager
def saved(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Tensor]]:
    """Every storage that autograd is handed to keep, by its address; hooks inside hooks hand on what they keep."""
    held: dict[int, Tensor] = {}
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    stock = torch.autograd.graph.saved_tensors_hooks

    class Counted(stock):
        def __init__(self, pack: Any, unpack: Any) -> None:
            def count(tensor: Tensor) -> Any:
                kept = pack(tensor)
                if isinstance(kept, Tensor) and kept.untyped_storage()._cdata not in known:
                    held[kept.untyped_storage()._cdata] = kept
                return kept

            super().__init__(count, unpack)

    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", Counted)
    with Counted(lambda tensor: tensor, lambda kept: kept):
        yield held


def real_step(way: str, precision: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model with values on the CPU, and the inputs of one pair."""
    torch.manual_seed(0)
    model = FAMILY.build(tiny_config(MDP))
    prepare(model, FAMILY, tiny_settings())
    model = model.to(torch.bfloat16 if precision == "bf16" else torch.float32).train()
    FAMILY.fuse(model, way)
    ids = torch.cat([torch.full((IMAGE_TOKENS,), 3), torch.randint(5, 600, (TOKENS - IMAGE_TOKENS,))])[None]
    return model, {
        "input_ids": ids,
        "position_ids": torch.arange(TOKENS)[None],
        "logits_to_keep": (torch.arange(TOKENS) >= TOKENS - SUPERVISED)[None],
        "use_cache": False,
        **FAMILY.classes()[0].blank_images(model.config, "cpu"),
    }


def counted_bytes(way: str, precision: str) -> int:
    """The same on shapes, without what is held for a moment alone."""
    model = meta_model(tiny_config(MDP), FAMILY, tiny_settings(), precision)
    held = count_activations(model, FAMILY, way, TOKENS, SUPERVISED)
    return sum(size for name, size in held.items() if name not in (LOGITS, ONE_LAYER))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_counted_on_shapes_is_what_a_real_forward_pass_leaves_allocated(way, precision):
    model, inputs = real_step(way, precision)
    with NormInOneKernel(), fused_attention():
        model(**inputs)  # what is made once and cached
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            logits = model(**inputs).logits
    left = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    left -= len(recomputed_layers(model)) * torch.get_rng_state().nbytes  # each layer's, on the CPU on a GPU too
    assert counted_bytes(way, precision) == pytest.approx(left - logits.untyped_storage().nbytes(), rel=0.03)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["none", "selective"])
def test_what_is_counted_on_shapes_is_what_autograd_is_handed_to_keep(way, precision, monkeypatch):
    model, inputs = real_step(way, precision)
    given = {tensor.untyped_storage()._cdata for tensor in inputs.values() if isinstance(tensor, Tensor)}
    with saved(model, monkeypatch) as held, NormInOneKernel(), fused_attention():
        model(**inputs)
    kept = sum(tensor.untyped_storage().nbytes() for address, tensor in held.items() if address not in given)
    assert counted_bytes(way, precision) == pytest.approx(kept, rel=0.03)


def test_recomputation_lowers_what_is_kept_and_names_the_layer_that_is_computed_again():
    model = meta_model(tiny_config(MDP), FAMILY, tiny_settings(), "bf16")
    held = {way: count_activations(model, FAMILY, way, TOKENS, SUPERVISED) for way in WAYS}
    assert held["none"]["llm"] > held["selective"]["llm"] > held["full"]["llm"]
    assert held["none"]["vision"] == held["selective"]["vision"] > held["full"]["vision"]
    assert held["none"]["module"] == held["full"]["module"]
    assert ONE_LAYER in held["full"]
    assert ONE_LAYER not in held["none"].keys() | held["selective"].keys()


def test_attention_keeps_its_inputs_its_output_and_a_float_a_query_and_no_square():
    q = torch.empty(2, 8, 50, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.empty(2, 4, 70, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    kept: list[Tensor] = []
    with OnShapes(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda _: None):
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert output.shape == q.shape
    found = sorted(((tuple(tensor.shape), tensor.dtype) for tensor in kept), key=str)
    half = torch.bfloat16
    assert found == [
        ((2, 4, 70, 16), half),
        ((2, 4, 70, 16), half),
        ((2, 8, 50), torch.float32),
        ((2, 8, 50, 16), half),
        ((2, 8, 50, 16), half),
    ]


def test_what_does_not_train_keeps_nothing_below_it():
    settings = tiny_settings(vision=None, module=None, projector=None)
    model = meta_model(tiny_config(MDP), FAMILY, settings, "bf16")
    held = count_activations(model, FAMILY, "none", TOKENS, SUPERVISED)
    assert {"vision", "module", "projector"} & held.keys() == set()
    assert held["llm"] > 0


def test_every_module_of_a_part_is_counted_under_it():
    model = meta_model(tiny_config(MDP), FAMILY, tiny_settings(), "bf16")
    parts = parts_of_modules(model, FAMILY)
    assert parts["model.vision_tower.encoder.layers.0"] == "vision"
    assert parts["model.mdp"] == parts["model.mdp.levels.0"] == "module"
    assert parts["lm_head"] == parts["model.language_model.layers.1.mlp"] == "llm"
    assert "model" not in parts


@pytest.fixture(scope="module")
def seven_b():
    """The paper's model on shapes: (way) -> GB of a pair with six captions of 15 tokens."""
    settings = tiny_settings({}, rank=128)
    model = meta_model(FAMILY.planned_config(Path("none"), settings), FAMILY, settings, "bf16")

    def count(way: str) -> dict[str, float]:
        started = time.process_time()
        held = count_activations(model, FAMILY, way, 1460 + 29 + 90, 90)
        assert time.process_time() - started < 10
        return {name: size / 1e9 for name, size in held.items()}

    return count


WIDTH, HIDDEN, KEYS, RANK = 3584, 18_944, 512, 128
LAYER = 1579 * 2 * (6 * WIDTH + 2 * KEYS + 3 * HIDDEN + 7 * RANK) / 1e9
"""What one LLM layer keeps in bf16: its input, two normed inputs, queries, attention's output, the sum after attention;
keys and values; gate, up and their product; seven adapters' low ranks."""


def test_a_pair_at_7b_keeps_what_is_counted_by_hand(seven_b):
    held = seven_b("none")
    assert 27 * LAYER < held["llm"] < 28 * LAYER * 1.01  # the last layer may work on supervised tokens alone
    assert held["vision"] == pytest.approx(1.36, rel=0.01)
    assert held["projector"] == pytest.approx(2 * 2 * 729 * (1152 + 2 * WIDTH) / 1e9, rel=0.15)
    assert held["module"] == pytest.approx(0.86, rel=0.02)
    assert held["logits"] == pytest.approx(90 * 152_064 * 3 * 4 / 1e9, rel=0.01)  # fp32: softmax and two gradients


def test_selective_recomputation_at_7b_keeps_no_norm_and_no_product(seven_b):
    kept = LAYER - 1579 * 2 * (2 * WIDTH + HIDDEN) / 1e9
    assert 27 * kept < seven_b("selective")["llm"] < 28 * kept * 1.01


def test_full_recomputation_at_7b_keeps_the_layers_inputs_and_one_layer(seven_b):
    held = seven_b("full")
    assert held[ONE_LAYER] == pytest.approx(LAYER, rel=0.01)
    assert held["llm"] == pytest.approx(28 * 1579 * 2 * WIDTH / 1e9, rel=0.06)
    assert held["vision"] == pytest.approx(26 * 2 * 729 * 1152 * 2 / 1e9, rel=0.06)
    assert held["module"] == pytest.approx(0.86, rel=0.02)

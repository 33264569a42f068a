"""Trained parameters, learning rates, adapters, and parameter counts of published models."""

import json
import warnings
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from m3diff.models import FAMILIES
from m3diff.models.foreign_code import CheckpointError
from m3diff.models.fused import make_fused
from m3diff.models.m3diff import LARGE_BASE
from m3diff.models.settings import VDMConfig
from m3diff.models.tuning import (
    parameter_counts,
    prepare_for_training,
    read_adapter_config,
    should_train,
    suppress_adapter_warnings,
    trainable_groups,
    trainable_names,
    unwrap_model,
)
from m3diff.records.errors import ValueFault
from tests.errors import raises
from tests.models.test_llava import pair_inputs
from tests.tiny import MDP, onediff_settings, tiny_model, tiny_settings
from tests.tiny_blip2 import blip2_settings

LINEARS = 2 * 7  # of two LLM layers


def prepared(rank: int = 2, mdp: dict | None = MDP, **rates: float | None) -> tuple:
    settings = tiny_settings(mdp, rank, **rates)
    return prepare_for_training(tiny_model(mdp), FAMILY, settings), settings


def names_by_part(model: torch.nn.Module) -> dict[str, list[str]]:
    names = trainable_names(model)
    return {part: [name for name in names if name.startswith(FAMILY.parts[part])] for part in FAMILY.parts}


def test_with_rank_0_the_same_linears_train_in_full():
    model, _ = prepared(rank=0)
    adapted, _ = prepared(rank=2)
    linears = {name.split(".lora_")[0] for name in names_by_part(adapted)["llm"]}
    assert {name.rsplit(".", 1)[0] for name in names_by_part(model)["llm"]} == linears
    biases = [name for name in names_by_part(model)["llm"] if name.endswith(".bias")]
    assert len(biases) == 2 * 3, "queries, keys and values have a bias"
    assert model is unwrap_model(model), "no wrapper of peft's"


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("frozen", ["vision", "module", "projector", "llm"])
def test_a_part_without_a_rate_is_frozen_and_the_others_train_as_ever(frozen, rank):
    everything = names_by_part(prepared(rank)[0])
    model, settings = prepared(rank, **{frozen: None})
    trained = names_by_part(model)
    assert trained.pop(frozen) == []
    everything.pop(frozen)
    assert trained == everything
    if frozen == "llm":
        assert model is unwrap_model(model), "a frozen LLM has no adapters"
    groups = trainable_groups(model, FAMILY, settings)
    assert frozen not in [part for group in groups for part in group.parts]


@pytest.mark.parametrize(
    ("rates", "delay", "expected_groups"),
    [
        ((1.0, 2.0, 1.0, 2.0), 0.0, [("vision+projector", 1.0, 0.0), ("module+llm", 2.0, 0.0)]),
        ((1.0, 1.0, 1.0, 1.0), 0.0, [("vision+module+projector+llm", 1.0, 0.0)]),
        ((None, 3.0, None, 1.0), 0.0, [("module", 3.0, 0.0), ("llm", 1.0, 0.0)]),
        ((None, None, 2.0, None), 0.0, [("projector", 2.0, 0.0)]),
        ((1.0, 1.0, 1.0, 2.0), 0.25, [("vision+projector", 1.0, 0.0), ("module", 1.0, 0.25), ("llm", 2.0, 0.0)]),
    ],
)
def test_parts_of_equal_rate_and_delay_share_a_group(rates, delay, expected_groups):
    model, settings = prepared(**dict(zip(("vision", "module", "projector", "llm"), rates, strict=True)))
    groups = trainable_groups(model, FAMILY, replace(settings, delays={"module": delay}))
    assert [("+".join(group.parts), group.lr, group.delay) for group in groups] == expected_groups
    for group in groups:
        expected_ids = []
        for name, parameter in unwrap_model(model).named_parameters():
            if parameter.requires_grad and FAMILY.part_of(name) in group.parts:
                expected_ids.append(id(parameter))
        assert [id(parameter) for parameter in group.parameters] == expected_ids, "in the model's order"


def test_a_parameter_that_is_in_no_part_is_noticed():
    with pytest.raises(AssertionError, match="every parameter is in one part"):
        should_train("model.qformer.weight", FAMILY, tiny_settings(), FAMILY.lora_targets)


def test_adapters_have_the_rank_and_strength_of_the_settings_and_no_dropout():
    model, _ = prepared(rank=3)
    config = model.peft_config["default"]
    assert config.r == 3
    assert config.lora_alpha == 4
    assert config.lora_dropout == 0.0
    assert config.bias == "none"
    linear = unwrap_model(model).model.language_model.layers[1].mlp.up_proj
    assert linear.lora_A["default"].weight.shape == (3, 16)
    assert linear.scaling["default"] == 4 / 3
    half = prepare_for_training(tiny_model(MDP).bfloat16(), FAMILY, tiny_settings())
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.filterwarnings("error::FutureWarning")
def test_adapters_are_added_without_a_warning_of_the_libraries_to_each_other():
    prepared(rank=2)


def test_the_transposed_layers_that_peft_reports_in_a_configuration_can_be_loaded(tmp_path):
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}))
    assert read_adapter_config(file).fan_in_fan_out


def test_a_configuration_of_adapters_without_fields_is_refused(tmp_path):
    file = tmp_path / "adapter_config.json"
    file.write_text("[]")
    with raises(CheckpointError, "models.no_fields_of_adapters", path=file):
        read_adapter_config(file)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_warning_of_anything_else_is_shown_where_adapters_are_added():
    with pytest.raises(FutureWarning, match="something else"), suppress_adapter_warnings():
        warnings.warn("something else is deprecated", FutureWarning, stacklevel=1)


def moved_adapters(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**pair_inputs()).logits.square().mean().backward()
    return {name: p.grad.clone() for name, p in unwrap_model(model).named_parameters() if p.grad is not None}


def test_every_trainable_tensor_gets_a_gradient():
    model = moved_adapters(prepared()[0])
    actual = gradients(model)
    without = [name for name in trainable_names(model) if name not in actual or not actual[name].any()]
    # key biases shift all scores of a query alike, so softmax cancels them
    assert [name for name in without if "k_proj" not in name] == []


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("frozen", [("vision",), ("vision", "projector"), ("vision", "module"), ("llm",)])
def test_the_gradients_of_the_rest_are_right_where_a_part_is_frozen(frozen, checkpointing):
    torch.manual_seed(0)
    model = moved_adapters(prepared()[0])
    make_fused(unwrap_model(model), checkpointing)
    expected = gradients(model.train())
    for name, parameter in unwrap_model(model).named_parameters():
        parameter.requires_grad = parameter.requires_grad and FAMILY.part_of(name) not in frozen
    actual = gradients(model)
    assert actual.keys() == {name for name in expected if FAMILY.part_of(name) not in frozen}
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-8)


def test_a_lora_target_that_matches_nothing_is_an_error():
    family = replace(FAMILY, lora_targets={"llm": r"model\.language_model\.none"})
    with raises(ValueFault, "models.no_linear_for_adapters", part="llm", value=r"model\.language_model\.none"):
        prepare_for_training(tiny_model(MDP), family, tiny_settings())


FAMILY = FAMILIES["m3diff"]


PUBLISHED: dict[str, tuple[Any, int, dict[str, Any]]] = {
    f"llava-hf/{LARGE_BASE}": (
        tiny_settings(None, rank=128),
        1460,
        {"llm": 128 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)), "whole": (8.03e9, 0.005)},
    ),
    "llava-hf/llava-1.5-7b-hf": (
        onediff_settings(asdict(VDMConfig()), rank=0, vision=None),
        2 * 576 + 32,
        # the VDM: 6 layers of BERT 42.5 M, three cross-attentions, the linear to the LLM
        {"module": (54e6, 0.02), "whole": (7.06e9, 0.002), "llm": (6.74e9, 0.002), "vision": 0},
    ),
    "Salesforce/blip2-opt-2.7b": (
        blip2_settings(rank=8),
        32,
        {"vision": 39 * 8 * 4 * 1408, "module": 8 * ((2 * 12 + 6) * 2 * 768 + 2 * 6 * (1408 + 768)), "projector": 0}
        # of its page: 3.74 B parameters, of the paper: "0.1 %" train
        | {"llm": 32 * 8 * 3 * 2 * 2560, "frozen": 3_744_761_856, "trainable": (6.3e6, 0.01)},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_give_the_published_counts(name, tmp_path):
    settings, image_tokens, expected_counts = PUBLISHED[name]
    family = FAMILIES[settings.family]
    config = family.planned_config(tmp_path / name.partition("/")[2], settings)
    assert config.name_or_path == name
    assert config.image_tokens_of(2) == image_tokens
    with torch.device("meta"):
        counts = parameter_counts(prepare_for_training(family.build(config), family, settings), family)
    new = counts["llm"] if settings.family == "m3diff" else counts["module"]
    counts["whole"] = counts["trainable"] + counts["frozen"] - new
    for part, count in expected_counts.items():
        assert counts[part] == (pytest.approx(count[0], rel=count[1]) if isinstance(count, tuple) else count), part


def test_the_contribution_has_a_name_for_each_level_and_none_without_a_module():
    contribution = FAMILY.contribution
    assert contribution is not None
    settings = tiny_settings({**MDP, "vision_feature_layers": [0, 2]})
    names = ("module_update_ratio/0", "module_update_ratio/2", "module_score/0", "module_score/2")
    assert contribution.names(settings) == names
    assert contribution.names(tiny_settings(None)) == ()
    sums = torch.tensor([[4.0, 2.0], [16.0, 6.0], [64.0, 8.0]])
    assert contribution.figures(sums) == [0.25, 0.5, 0.25, 0.75]

"""Which parameters train, at which rates, with which adapters."""

from dataclasses import replace

import pytest
import torch

from m3diff.models import FAMILIES
from m3diff.models.fused import make_fused
from m3diff.models.settings import Delays
from m3diff.models.tuning import (
    is_adapter,
    parameter_counts,
    prepare,
    should_train,
    trainable_groups,
    trainable_names,
    unwrapped,
)
from tests.models.test_modeling import pair_inputs
from tests.tiny import MDP, tiny_model, tiny_settings

FAMILY = FAMILIES["m3diff"]
LINEARS = 2 * 7  # of two LLM layers


def prepared(rank: int = 2, mdp: dict | None = MDP, **rates: float | None) -> tuple:
    settings = tiny_settings(mdp, rank, **rates)
    return prepare(tiny_model(mdp), FAMILY, settings), settings


def names_by_part(model: torch.nn.Module) -> dict[str, list[str]]:
    names = trainable_names(model)
    return {part: [name for name in names if name.startswith(FAMILY.parts[part])] for part in FAMILY.parts}


def test_vision_projector_and_module_train_in_full_and_the_llm_by_its_adapters() -> None:
    model, _ = prepared()
    trained = names_by_part(model)
    full = [name for name, _ in unwrapped(model).named_parameters() if not name.startswith(FAMILY.parts["llm"])]
    never = [name for name in full if "post_layernorm" in name]
    assert never
    assert sorted(trained["vision"] + trained["projector"] + trained["module"]) == sorted(set(full) - set(never))
    assert "model.image_newline" in trained["projector"]
    assert len(trained["module"]) == len(list(unwrapped(model).model.mdp.parameters()))
    assert len(trained["llm"]) == 2 * LINEARS
    assert all(is_adapter(name) for name in trained["llm"])
    assert not any("embed_tokens" in name or "lm_head" in name or "base_layer" in name for name in trained["llm"])
    assert len(trainable_names(model)) == sum(len(names) for names in trained.values())


def test_with_rank_0_the_same_linears_train_in_full() -> None:
    model, _ = prepared(rank=0)
    adapted, _ = prepared(rank=2)
    linears = {name.split(".lora_")[0] for name in names_by_part(adapted)["llm"]}
    assert {name.rsplit(".", 1)[0] for name in names_by_part(model)["llm"]} == linears
    biases = [name for name in names_by_part(model)["llm"] if name.endswith(".bias")]
    assert len(biases) == 2 * 3, "queries, keys and values have a bias"
    assert model is unwrapped(model), "no wrapper of peft's"


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("frozen", ["vision", "module", "projector", "llm"])
def test_a_part_without_a_rate_is_frozen_and_the_others_train_as_ever(frozen: str, rank: int) -> None:
    everything = names_by_part(prepared(rank)[0])
    model, settings = prepared(rank, **{frozen: None})
    trained = names_by_part(model)
    assert trained.pop(frozen) == []
    everything.pop(frozen)
    assert trained == everything
    if frozen == "llm":
        assert model is unwrapped(model), "a frozen LLM has no adapters"
    groups = trainable_groups(model, FAMILY, settings)
    assert frozen not in [part for group in groups for part in group.parts]


def test_there_is_one_group_for_each_rate_in_the_order_of_the_parts() -> None:
    model, settings = prepared(vision=1e-4, module=1e-5, projector=1e-3, llm=1e-3)
    groups = trainable_groups(model, FAMILY, settings)
    assert [(group.name, group.parts, group.lr) for group in groups] == [
        ("vision", ("vision",), 1e-4),
        ("module", ("module",), 1e-5),
        ("projector+llm", ("projector", "llm"), 1e-3),
    ]
    named = [(name, p) for name, p in unwrapped(model).named_parameters() if p.requires_grad]
    for group in groups:
        prefixes = tuple(prefix for part in group.parts for prefix in FAMILY.parts[part])
        own = [id(p) for name, p in named if name.startswith(prefixes)]
        assert [id(p) for p in group.parameters] == own, "in the model's order"
    assert sum(len(group.parameters) for group in groups) == len(named)


@pytest.mark.parametrize(
    ("rates", "delay", "wanted"),
    [
        ((1.0, 2.0, 1.0, 2.0), 0.0, [("vision+projector", 1.0, 0.0), ("module+llm", 2.0, 0.0)]),
        ((1.0, 1.0, 1.0, 1.0), 0.0, [("vision+module+projector+llm", 1.0, 0.0)]),
        ((None, 3.0, None, 1.0), 0.0, [("module", 3.0, 0.0), ("llm", 1.0, 0.0)]),
        ((None, None, 2.0, None), 0.0, [("projector", 2.0, 0.0)]),
        ((1.0, 1.0, 1.0, 2.0), 0.25, [("vision+projector", 1.0, 0.0), ("module", 1.0, 0.25), ("llm", 2.0, 0.0)]),
    ],
)
def test_parts_of_equal_rate_and_delay_share_a_group(rates: tuple, delay: float, wanted: list) -> None:
    model, settings = prepared(**dict(zip(("vision", "module", "projector", "llm"), rates, strict=True)))
    groups = trainable_groups(model, FAMILY, replace(settings, delays=Delays(module=delay)))
    assert [(group.name, group.lr, group.delay) for group in groups] == wanted


def test_a_parameter_that_trains_against_the_settings_or_is_in_no_part_is_noticed() -> None:
    model, settings = prepared()
    unwrapped(model).lm_head.weight.requires_grad = True
    with pytest.raises(AssertionError, match="not the intended one"):
        trainable_groups(model, FAMILY, settings)
    with pytest.raises(AssertionError, match="every parameter is in one part"):
        should_train("model.qformer.weight", FAMILY, settings)


def test_counts_are_of_what_trains_and_of_what_does_not() -> None:
    model, _ = prepared(vision=None)
    counts = parameter_counts(model, FAMILY)
    sizes = {name: p.numel() for name, p in unwrapped(model).named_parameters()}
    by_part = {part: sum(sizes[name] for name in names) for part, names in names_by_part(model).items()}
    assert by_part["vision"] == 0 < by_part["llm"]
    assert (
        counts == {"trainable": sum(by_part.values()), "frozen": sum(sizes.values()) - sum(by_part.values())} | by_part
    )


def test_adapters_have_the_rank_and_strength_of_the_settings_and_no_dropout() -> None:
    model, _ = prepared(rank=3)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout, config.bias) == (3, 4, 0.0, "none")
    linear = unwrapped(model).model.language_model.layers[1].mlp.up_proj
    assert linear.lora_A["default"].weight.shape == (3, 16)
    assert linear.scaling["default"] == 4 / 3
    half = prepare(tiny_model(MDP).bfloat16(), FAMILY, tiny_settings())
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def moved_adapters(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**pair_inputs()).logits.square().mean().backward()
    return {name: p.grad.clone() for name, p in unwrapped(model).named_parameters() if p.grad is not None}


def test_every_trainable_tensor_gets_a_gradient() -> None:
    model = moved_adapters(prepared()[0])
    found = gradients(model)
    without = [name for name in trainable_names(model) if name not in found or not found[name].any()]
    # key biases shift all scores of a query alike, so softmax cancels them
    assert [name for name in without if "k_proj" not in name] == []


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("frozen", [("vision",), ("vision", "projector"), ("vision", "module"), ("llm",)])
def test_the_gradients_of_the_rest_are_right_where_a_part_is_frozen(frozen: tuple, checkpointing: str) -> None:
    torch.manual_seed(0)
    model = moved_adapters(prepared()[0])
    make_fused(unwrapped(model), checkpointing)
    want = gradients(model.train())
    for name, parameter in unwrapped(model).named_parameters():
        parameter.requires_grad = parameter.requires_grad and FAMILY.part_of(name) not in frozen
    found = gradients(model)
    assert found.keys() == {name for name in want if FAMILY.part_of(name) not in frozen}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-5, atol=1e-8)


def test_a_lora_target_that_matches_nothing_is_an_error() -> None:
    family = replace(FAMILY, lora_targets={"llm": r"model\.language_model\.none"})
    with pytest.raises(ValueError, match="LoRA targets of the part llm match 0 linears"):
        prepare(tiny_model(MDP), family, tiny_settings())


def test_adapters_can_be_on_more_than_one_part() -> None:
    targets = {"vision": r"model\.vision_tower\.encoder\.layers\.\d+\.self_attn\.(q|v)_proj", **FAMILY.lora_targets}
    family, settings = replace(FAMILY, lora_targets=targets), tiny_settings()
    model = prepare(tiny_model(MDP), family, settings)
    names = [name for name in trainable_names(model) if name.startswith("model.vision_tower.")]
    assert len(names) == 2 * 2 * 2
    assert all(is_adapter(name) for name in names)
    frozen = prepare(tiny_model(MDP), family, tiny_settings(vision=None))
    assert not any("vision_tower" in name and is_adapter(name) for name, _ in frozen.named_parameters())

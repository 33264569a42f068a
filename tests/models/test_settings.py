"""Settings of families: values in `params.yaml`, and faults of the settings or the base."""

import json
import pickle
from dataclasses import asdict
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from m3diff.models import FAMILIES
from m3diff.models.blip2idc import Augment
from m3diff.models.settings import Align, DifferenceConfig, Lora, MDPConfig, VDMConfig, module_config
from m3diff.records.errors import Fault, ValueFault
from tests.errors import Message, raises
from tests.tiny import MDP, SEPARATE, VDM, onediff_settings, tiny_settings
from tests.tiny_blip2 import blip2_settings, published_config

TRAINED = json.loads(json.dumps(asdict(MDPConfig(**MDP))))  # as a trained model's config.json has it

GOOD = {
    "family": "m3diff",
    "module": {"vision_feature_layers": [4], "layers": 2, "heads": 4, "pos_embed_scale": 3.0, "init_gain": 2.0},
    "lora": {"rank": 32, "alpha": 256},
    "rates": {"vision": 0.0004, "projector": 0.0014, "module": 0.0001, "llm": None},
}


BLIP2: dict[str, Any] = {
    "family": "blip2idc",
    "lora": {"rank": 8, "alpha": 16},
    "rates": {"vision": 0.0001, "projector": None, "module": 0.0001, "llm": 0.0001},
}


def read(values: dict, good: dict = GOOD) -> Any:
    return TypeAdapter(FAMILIES[good["family"]].settings).validate_python(values)


DIFFERENCE = {"kind": "difference", "vision_feature_layers": [2, 4], "init_gain": 2.0}


def test_settings_are_read_from_plain_values():
    settings = read(GOOD)
    assert settings.module == MDPConfig((4,), layers=2, heads=4, pos_embed_scale=3.0, init_gain=2.0)
    assert settings.lora == Lora(rank=32, alpha=256)


def test_a_part_without_a_rate_is_frozen_and_without_a_delay_starts_at_once():
    family = FAMILIES["m3diff"]
    align = {"datasets": ["a"], "epochs": 1.0, "global_batch": 2, "rates": {"projector": 0.001}}
    short = GOOD | {"rates": {"module": 0.0001, "projector": 0.0014}, "delays": {"module": 0.2}, "align": align}
    settings = family.complete_settings(read(short))
    assert list(settings.rates.items()) == [("vision", None), ("module", 0.0001), ("projector", 0.0014), ("llm", None)]
    assert settings.delays == {"vision": 0.0, "module": 0.2, "projector": 0.0, "llm": 0.0}
    assert settings.align.rates == {"vision": None, "module": None, "projector": 0.001, "llm": None}


def test_a_part_of_the_alignment_that_fine_tuning_does_not_name_is_refused():
    align = {"datasets": ["a"], "epochs": 1.0, "global_batch": 2, "rates": {"vision": 0.001}}
    settings = read(GOOD | {"rates": {"module": 0.0001}, "align": align})
    with raises(ValueFault, "models.part_of_alignment_frozen", field="align.rates.vision"):
        FAMILIES["m3diff"].complete_settings(settings)


def test_a_rate_of_an_alignment_that_is_not_positive_is_refused_by_its_name():
    align = {"datasets": ["a"], "epochs": 1.0, "global_batch": 2, "rates": {"projector": 0.0}}
    with pytest.raises(ValidationError) as refused:
        read(GOOD | {"align": align})
    fault = Message("models.rate_not_positive", field="align.rates.projector", value=0.0)
    assert fault.in_text(str(refused.value))


def test_an_alignment_cannot_train_an_llm_that_gets_adapters():
    align = {"datasets": ["a"], "epochs": 1.0, "global_batch": 2, "rates": {"llm": 0.001}}
    values = GOOD | {"rates": GOOD["rates"] | {"llm": 0.0001}, "align": align}
    assert read(values | {"lora": {"rank": 0, "alpha": 256}}).align.rates["llm"] == 0.001
    with pytest.raises(ValidationError) as refused:
        read(values)
    fault = Message("models.llm_trains_in_alignment", field="align.rates.llm", value=0.001)
    assert fault.in_text(str(refused.value))


def test_settings_are_equal_whether_or_not_they_name_frozen_parts():
    """The name of a run in the scratch folder is a hash of the settings."""
    family = FAMILIES["m3diff"]
    long = GOOD | {"rates": dict.fromkeys(family.parts) | {"module": 0.0001}, "delays": dict.fromkeys(family.parts, 0)}
    short = GOOD | {"rates": {"module": 0.0001}}
    assert asdict(family.complete_settings(read(short))) == asdict(family.complete_settings(read(long)))


def test_the_bare_difference_is_read_from_plain_values():
    settings = read(GOOD | {"module": DIFFERENCE})
    assert settings.module == DifferenceConfig("difference", (2, 4), share_levels=True, init_gain=2.0)


@pytest.mark.parametrize("module", [GOOD["module"], DIFFERENCE], ids=["MDP", "difference"])
def test_settings_are_written_back_as_plain_values(module):
    settings = read(GOOD | {"module": module})
    assert read(asdict(settings)) == settings
    assert module_config(**asdict(settings.module)) == settings.module


def test_settings_are_pickled():
    settings = read(GOOD)
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_a_module_without_a_kind_is_the_mdp_module():
    assert type(module_config(**asdict(read(GOOD).module))) is MDPConfig


def test_the_bare_difference_reads_the_levels_of_the_mdp_module_by_default():
    assert read(GOOD | {"module": {"kind": "difference"}}).module == DifferenceConfig()
    assert DifferenceConfig().vision_feature_layers == MDPConfig().vision_feature_layers


def test_the_defaults_of_the_mdp_module_are_the_papers():
    assert read(GOOD | {"module": {}}).module == MDPConfig((17, 20, 23, 26), 2, 16, True, "scalar", 4, True, 0.0, 0.0)


def test_blip2idc_has_no_module_and_no_delays_by_default():
    settings = read(BLIP2, BLIP2)
    assert settings.module is None
    assert settings.delays == {}


def test_blip2idc_augments_by_default():
    assert read(BLIP2, BLIP2).augment == Augment(blur=0.5, sigma=(0.1, 0.5), jpeg=0.5, quality=(60, 95))


def test_the_augmentation_is_read_from_plain_values():
    assert read(BLIP2 | {"augment": None}, BLIP2).augment is None
    augment = {"blur": 1, "sigma": [0.2, 0.4], "jpeg": 0, "quality": [70, 70]}
    assert read(BLIP2 | {"augment": augment}, BLIP2).augment == Augment(1, (0.2, 0.4), 0, (70, 70))


def too_small(field: str, value: float, limit: int) -> Fault:
    return Fault("models.too_small", field=field, value=value, limit=limit)


def broken(name: str, field: str, value: Any) -> Fault:
    return Fault(f"models.{name}", field=field, value=value)


def errors_of(values: dict, good: dict) -> list[Any]:
    with pytest.raises(ValidationError) as refused:
        read(values, good)
    return refused.value.errors()


@pytest.mark.parametrize(
    ("good", "section", "values", "faults"),
    [
        *(
            (GOOD, "module", {"vision_feature_layers": f}, [broken("layers_not_rising", "vision_feature_layers", f)])
            for f in ([3, 2], [2, 2], [-1, 2], [])
        ),
        (GOOD, "module", {"layers": 0, "heads": 0}, [too_small("layers", 0, 1), too_small("heads", 0, 1)]),
        (
            GOOD,
            "module",
            {"mlp_ratio": 0, "init_gain": -0.5},
            [too_small("mlp_ratio", 0, 1), too_small("init_gain", -0.5, 0)],
        ),
        (GOOD, "module", {"pos_embed_scale": -1}, [too_small("pos_embed_scale", -1, 0)]),
        (GOOD, "module", None, [broken("rate_without_module", "rates.module", 0.0001)]),
        (GOOD, "lora", {"rank": -1, "alpha": 0}, [too_small("rank", -1, 0), too_small("alpha", 0, 1)]),
        (
            GOOD,
            "rates",
            {**GOOD["rates"], "vision": 0, "llm": -1},
            [broken("rate_not_positive", "rates.vision", 0), broken("rate_not_positive", "rates.llm", -1)],
        ),
        (GOOD, "rates", dict.fromkeys(GOOD["rates"]), [Fault("models.no_part_trains", field="rates")]),
        (GOOD, "rates", {}, [Fault("models.no_part_trains", field="rates")]),
        (BLIP2, "delays", {"vision": 1.0}, [broken("delay_not_a_share", "delays.vision", 1.0)]),
        (
            BLIP2,
            "augment",
            {"blur": 1.5, "jpeg": -0.1},
            [broken("not_a_probability", "blur", 1.5), broken("not_a_probability", "jpeg", -0.1)],
        ),
        (BLIP2, "augment", {"sigma": [0.5, 0.1]}, [broken("wrong_range_of_sigma", "sigma", [0.5, 0.1])]),
        (BLIP2, "augment", {"sigma": [0, 0.1]}, [broken("wrong_range_of_sigma", "sigma", [0, 0.1])]),
        (BLIP2, "augment", {"quality": [90, 60]}, [broken("wrong_range_of_quality", "quality", [90, 60])]),
        (BLIP2, "augment", {"quality": [0, 101]}, [broken("wrong_range_of_quality", "quality", [0, 101])]),
    ],
)
def test_every_broken_rule_is_named(good, section, values, faults):
    (error,) = errors_of(good | {section: values}, good)
    fault = error["ctx"]["error"].fault
    assert fault.fields.get("faults", [fault]) == faults


@pytest.mark.parametrize(
    ("good", "section", "values", "names"),
    [
        (GOOD, "family", "m3dif", ["family"]),
        (GOOD, "module", {"score": "vector"}, ["score"]),
        (GOOD, "module", {"kind": "mdp"}, ["kind"]),
        (GOOD, "module", {"kind": "difference", "layers": 2}, ["layers"]),
        (GOOD, "lora", {"rank": 2, "alpha": 4, "dropout": 0.1}, ["dropout"]),
        (GOOD, "rates", {"vision": "fast", "llm": float("inf")}, ["vision", "llm"]),
        (GOOD, "delays", {"module": float("nan")}, ["module"]),
        (BLIP2, "module", {"layers": 2}, ["module"]),
    ],
)
def test_a_key_or_a_type_that_is_wrong_is_named(good, section, values, names):
    assert [error["loc"][-1] for error in errors_of(good | {section: values}, good)] == names


@pytest.mark.parametrize(
    ("make_module", "fields", "code", "field", "value"),
    [
        (module_config, {"layers": 0}, "models.too_small", "layers", 0),
        (module_config, {"kind": "mdp"}, "models.not_a_choice", "kind", "mdp"),
        (VDMConfig, {"layers": 3}, "models.more_levels_than_reading_layers", "vision_feature_layers", 3),
        (VDMConfig, {"heads": 5}, "models.heads_do_not_divide_width", "heads", 5),
        (VDMConfig, {"init_gain": 1.0}, "models.init_gain_needs_separate_images", "init_gain", 1.0),
        (VDMConfig, {"start": "bert", "norm": "pre"}, "models.bert_needs_norm_post", "norm", "pre"),
        (VDMConfig, {"tokens": 0}, "models.too_small", "tokens", 0),
        (VDMConfig, {"place": "end"}, "models.not_a_choice", "place", "end"),
    ],
)
def test_a_wrong_value_in_a_configuration_is_named(make_module, fields, code, field, value):
    with raises(ValueFault, code, field=field, value=value):
        make_module(**fields)


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"tap": 1}, "tap"), ({"kind": "difference", "layers": 2}, "layers")],
    ids=["MDP", "difference"],
)
def test_an_unknown_field_in_a_configuration_is_named(fields, name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        module_config(**fields)


@pytest.mark.parametrize(
    ("align", "faults"),
    [
        ({"datasets": ()}, [Fault("models.alignment_without_dataset", field="datasets")]),
        ({"epochs": 0.0, "global_batch": 0}, [broken("not_positive", "epochs", 0.0), too_small("global_batch", 0, 1)]),
    ],
    ids=["no dataset", "no step"],
)
def test_an_alignment_of_nothing_is_refused(align, faults):
    rates = {"projector": 1e-3}
    with pytest.raises(ValueFault) as refused:
        Align(**{"datasets": ("toy",), "epochs": 1.0, "global_batch": 4, "rates": rates} | align)
    assert refused.value.fields.get("faults", [refused.value.fault]) == faults


def vision(layers: int, width: int = 16) -> dict[str, Any]:
    return {"vision_config": {"num_hidden_layers": layers, "hidden_size": width}}


CLIP = {"model_type": "clip_vision_model", "num_hidden_layers": 4, "image_size": 28, "patch_size": 14}
LLAVA = {"model_type": "llava", "vision_config": CLIP, "vision_feature_layer": -2}
PUBLISHED = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
PAPER = asdict(VDMConfig())
DEEP = VDM | {"vision_feature_layers": (1, 5)}
BLIP = published_config()


def other_base(family: str, value: str, *names: str) -> Fault:
    return Fault("models.other_base", family=family, value=value, names=list(names))


def no_such_layer(value: int, limit: int) -> Fault:
    return Fault("models.no_such_layer", field="module.vision_feature_layers", value=value, limit=limit)


def heads_do_not_divide(value: int, width: int) -> Fault:
    return Fault("models.heads_do_not_divide_encoder", field="module.heads", value=value, width=width)


def other_module(value: dict | None, expected: dict | None) -> Fault:
    return Fault("models.base_has_other_module", field="module", value=value, expected=expected)


FAULTS: dict[Any, list[tuple[dict | None, dict | None, Fault | None]]] = {
    tiny_settings: [
        (MDP, None, None),
        (MDP, vision(2), None),
        (MDP, vision(1), no_such_layer(2, 1)),
        (MDP, vision(2, 15), heads_do_not_divide(2, 15)),
        ({"vision_feature_layers": [26]}, {}, None),
        ({"vision_feature_layers": [27]}, {}, no_such_layer(27, 26)),
        ({"vision_feature_layers": [1], "heads": 7}, {}, heads_do_not_divide(7, 1152)),
        (None, vision(0), None),
        ({"kind": "difference", "vision_feature_layers": [27]}, {}, no_such_layer(27, 26)),
        (MDP, {"mdp": None, **vision(2)}, other_module(TRAINED, None)),
        (None, {"mdp": None}, None),
        (MDP, {"mdp": TRAINED, **vision(2)}, None),
        (MDP, {"mdp": TRAINED | {"heads": 4}}, other_module(TRAINED, TRAINED | {"heads": 4})),
        (None, {"mdp": {"heads": 4}}, other_module(None, {"heads": 4})),
        (MDP, {"model_type": "onediff", "vdm": {}}, other_base("m3diff", "onediff", "LLaVA-OneVision", "M3Diff")),
        (None, {"model_type": "m3diff"}, None),
    ],
    onediff_settings: [
        (VDM, LLAVA, None),
        (PAPER, PUBLISHED, None),
        (DEEP, None, None),
        (DEEP, LLAVA, no_such_layer(5, 4)),
        (DEEP, {"model_type": "onediff", "vision_config": {"model_type": "siglip_vision_model"}}, None),
        (
            SEPARATE | {"pos_embed_scale": 3.0, "tokens": 7},
            LLAVA,
            Fault("models.tokens_are_not_patches", field="module.tokens", value=7, expected=4),
        ),
        (
            VDM,
            {"model_type": "llava", "vision_config": {"model_type": "dinov2"}},
            Fault("models.other_encoder", value="dinov2"),
        ),
        (
            PAPER,
            PUBLISHED | {"vdm": PAPER | {"tokens": 16}},
            other_module(json.loads(json.dumps(PAPER)), PAPER | {"tokens": 16}),
        ),
        (
            VDM,
            LLAVA | {"model_type": "m3diff"},
            other_base("onediff", "m3diff", "LLaVA-OneVision", "LLaVA-1.5", "OneDiff"),
        ),
    ],
    lambda _: blip2_settings(): [
        (None, None, None),
        (None, BLIP, None),
        (None, {"model_type": "blip-2", "image_token_index": 50265}, None),
        (None, BLIP | {"model_type": "llava"}, other_base("blip2idc", "llava", "BLIP-2")),
        (
            None,
            BLIP | {"text_config": {"model_type": "t5"}},
            Fault("models.llm_with_encoder", field="text_config.model_type", value="t5"),
        ),
        (
            None,
            BLIP | {"image_token_index": None},
            Fault("models.base_without_image_token", field="image_token_index"),
        ),
    ],
}


@pytest.mark.parametrize(
    ("make", "module", "base", "fault"), [(make, *case) for make, cases in FAULTS.items() for case in cases]
)
def test_what_the_base_cannot_give_is_a_fault(make, module, base, fault):
    settings = make(module)
    faults = FAMILIES[settings.family].faults(settings, base)
    assert faults == ([] if fault is None else [fault])

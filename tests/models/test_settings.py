"""Settings of families: plain values in `params.yaml`, and every fault in them or in the base."""

import json
import pickle
from dataclasses import asdict
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from m3diff.models import FAMILIES
from m3diff.models.blip2idc import Augment
from m3diff.models.settings import DifferenceConfig, Lora, MDPConfig, VDMConfig, module_config
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


def test_settings_of_either_module_are_read_from_plain_values_and_written_back():
    settings = read(GOOD)
    assert settings.module == MDPConfig((4,), layers=2, heads=4, pos_embed_scale=3.0, init_gain=2.0)
    assert settings.lora == Lora(rank=32, alpha=256)
    assert dict(settings.rates) == GOOD["rates"]
    assert len(settings.rates) == 4
    assert settings.rates == GOOD["rates"]
    with pytest.raises(KeyError, match="decoder"):
        settings.rates["decoder"]
    assert read(asdict(settings)) == settings
    assert pickle.loads(pickle.dumps(settings)) == settings
    fields = {"kind": "difference", "vision_feature_layers": [2, 4], "init_gain": 2.0}
    settings = read(GOOD | {"module": fields})
    assert settings.module == DifferenceConfig("difference", (2, 4), share_levels=True, init_gain=2.0)
    assert read(asdict(settings)) == settings
    assert module_config(**asdict(settings.module)) == settings.module
    assert type(module_config(**asdict(read(GOOD).module))) is MDPConfig
    assert read(GOOD | {"module": {"kind": "difference"}}).module == DifferenceConfig()
    assert DifferenceConfig().vision_feature_layers == MDPConfig().vision_feature_layers


def test_what_is_left_out_is_the_papers():
    assert read(GOOD | {"module": {}}).module == MDPConfig((17, 20, 23, 26), 2, 16, True, "scalar", 4, True, 0.0, 0.0)
    settings = read(BLIP2, BLIP2)
    assert settings.augment == Augment(blur=0.5, sigma=(0.1, 0.5), jpeg=0.5, quality=(60, 95))
    assert (settings.module, dict(settings.delays)) == (None, dict.fromkeys(settings.rates, 0.0))
    assert read(BLIP2 | {"augment": None}, BLIP2).augment is None
    augment = {"blur": 1, "sigma": [0.2, 0.4], "jpeg": 0, "quality": [70, 70]}
    assert read(BLIP2 | {"augment": augment}, BLIP2).augment == Augment(1, (0.2, 0.4), 0, (70, 70))


@pytest.mark.parametrize(
    ("good", "section", "values", "faults"),
    [
        (GOOD, "family", "m3dif", ["'m3diff'"]),
        *((GOOD, "module", {"vision_feature_layers": f}, [f"found {f}"]) for f in ([3, 2], [2, 2], [-1, 2], [])),
        (GOOD, "module", {"layers": 0, "heads": 0}, ["layers must be 1 or more, found 0", "heads must be 1 or more"]),
        (GOOD, "module", {"score": "vector"}, ["'scalar' or 'channel'"]),
        (GOOD, "module", {"kind": "mdp"}, ["Input should be 'difference'"]),
        (GOOD, "module", {"kind": "difference", "layers": 2}, ["layers"]),
        (GOOD, "module", {"mlp_ratio": 0, "init_gain": -0.5}, ["mlp_ratio must be 1 or more", "init_gain must be"]),
        (GOOD, "module", {"pos_embed_scale": -1}, ["pos_embed_scale must be 0 or more, found -1"]),
        (GOOD, "module", None, ["module is 0.0001 but there is no module; set it to null"]),
        (GOOD, "lora", {"rank": -1, "alpha": 0}, ["rank must be 0 or more, found -1", "alpha must be 1 or more"]),
        (GOOD, "lora", {"rank": 2, "alpha": 4, "dropout": 0.1}, ["dropout"]),
        (GOOD, "rates", {**GOOD["rates"], "decoder": 1.0}, ["decoder"]),
        (GOOD, "rates", {"vision": 1e-3, "module": 1e-3}, ["projector", "llm"]),
        (GOOD, "rates", {**GOOD["rates"], "vision": 0, "llm": -1}, ["vision must be above 0", "llm must be above 0"]),
        (GOOD, "rates", dict.fromkeys(GOOD["rates"]), ["no part trains"]),
        (BLIP2, "module", {"layers": 2}, ["None"]),
        (BLIP2, "delays", {"vision": 1.0}, ["vision must be 0 or more and under 1"]),
        (BLIP2, "augment", {"blur": 1.5, "jpeg": -0.1}, ["blur must be from 0 to 1, found 1.5", "jpeg must be from"]),
        (BLIP2, "augment", {"sigma": [0.5, 0.1]}, ["sigma must be above 0, the least first, found [0.5, 0.1]"]),
        (BLIP2, "augment", {"sigma": [0, 0.1]}, ["found [0.0, 0.1]"]),
        (BLIP2, "augment", {"quality": [90, 60]}, ["quality must be from 1 to 100, the least first, found [90, 60]"]),
        (BLIP2, "augment", {"quality": [0, 101]}, ["found [0, 101]"]),
    ],
)
def test_every_fault_is_named(good, section, values, faults):
    with pytest.raises(ValidationError) as refused:
        read(good | {section: values}, good)
    assert all(fault in str(refused.value) for fault in faults)


@pytest.mark.parametrize(
    ("made", "fields", "fault"),
    [
        (module_config, {"layers": 0}, "layers must be 1 or more, found 0"),
        (module_config, {"tap": 1}, "unexpected keyword argument 'tap'"),
        (module_config, {"kind": "difference", "layers": 2}, "unexpected keyword argument 'layers'"),
        (module_config, {"kind": "mdp"}, "kind must be difference, found 'mdp'"),
        (VDMConfig, {"layers": 3}, "3 of them, but only 2 of the layers read the images"),
        (VDMConfig, {"heads": 5}, "heads: 5 does not divide width 768"),
        (VDMConfig, {"init_gain": 1.0}, "init_gain above 0 needs images separate and norm size"),
        (VDMConfig, {"start": "bert", "norm": "pre"}, "start: bert needs norm post"),
        (VDMConfig, {"tokens": 0}, "tokens must be 1 or more, found 0"),
        (VDMConfig, {"place": "end"}, "place must be after or between or before, found 'end'"),
    ],
)
def test_a_wrong_field_in_a_configuration_is_named(made, fields, fault):
    with pytest.raises((TypeError, ValueError), match=fault):
        made(**fields)


def vision(layers: int, width: int = 16) -> dict[str, Any]:
    return {"vision_config": {"num_hidden_layers": layers, "hidden_size": width}}


CLIP = {"model_type": "clip_vision_model", "num_hidden_layers": 4, "image_size": 28, "patch_size": 14}
LLAVA = {"model_type": "llava", "vision_config": CLIP, "vision_feature_layer": -2}
PUBLISHED = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
PAPER = asdict(VDMConfig())
DEEP = VDM | {"vision_feature_layers": (1, 5)}
BLIP = published_config()
FAULTS: dict[Any, list[tuple[dict | None, dict | None, str]]] = {
    tiny_settings: [
        (MDP, None, ""),
        (MDP, vision(2), ""),
        (MDP, vision(1), "2 lies beyond the 1 layers"),
        (MDP, vision(2, 15), "2 does not divide 15"),
        ({"vision_feature_layers": [26]}, {}, ""),
        ({"vision_feature_layers": [27]}, {}, "27 lies beyond the 26 layers"),
        ({"vision_feature_layers": [1], "heads": 7}, {}, "7 does not divide 1152"),
        (None, vision(0), ""),
        ({"kind": "difference", "vision_feature_layers": [27]}, {}, "27 lies beyond the 26 layers"),
        (MDP, {"mdp": None, **vision(2)}, "set None instead of {'vision_feature_layers'"),
        (None, {"mdp": None}, ""),
        (MDP, {"mdp": TRAINED, **vision(2)}, ""),
        (MDP, {"mdp": TRAINED | {"heads": 4}}, "which it keeps; set {"),
        (None, {"mdp": {"heads": 4}}, "which it keeps; set {'heads': 4} instead of None"),
        (MDP, {"model_type": "onediff", "vdm": {}}, "LLaVA-OneVision, M3Diff in train.base, and it has a onediff"),
        (None, {"model_type": "m3diff"}, ""),
    ],
    onediff_settings: [
        (VDM, LLAVA, ""),
        (PAPER, PUBLISHED, ""),
        (DEEP, None, ""),
        (DEEP, LLAVA, "5 lies beyond the 4 layers of the vision encoder"),
        (DEEP, {"model_type": "onediff", "vision_config": {"model_type": "siglip_vision_model"}}, ""),
        (SEPARATE | {"pos_embed_scale": 3.0, "tokens": 7}, LLAVA, "binds each to a patch, so set them to 4, not 7"),
        (VDM, {"model_type": "llava", "vision_config": {"model_type": "dinov2"}}, "and train.base has dinov2"),
        (PAPER, PUBLISHED | {"vdm": PAPER | {"tokens": 16}}, "'tokens': 16"),
        (VDM, LLAVA | {"model_type": "m3diff"}, "one of LLaVA-OneVision, LLaVA-1.5, OneDiff in train.base"),
    ],
    lambda _: blip2_settings(): [
        (None, None, ""),
        (None, BLIP, ""),
        (None, {"model_type": "blip-2", "image_token_index": 50265}, ""),
        (None, BLIP | {"model_type": "llava"}, "needs a BLIP-2 in train.base, which is a llava"),
        (None, BLIP | {"text_config": {"model_type": "t5"}}, "LLM is a t5, an encoder with a decoder"),
        (None, BLIP | {"image_token_index": None}, "no image_token_index: a release from before"),
    ],
}


@pytest.mark.parametrize(
    ("make", "module", "base", "fault"), [(make, *case) for make, cases in FAULTS.items() for case in cases]
)
def test_what_the_base_cannot_give_is_a_fault(make, module, base, fault):
    settings = make(module)
    found = FAMILIES[settings.family].faults(settings, base)
    assert len(found) == bool(fault)
    assert fault in "".join(found)

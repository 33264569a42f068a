"""BLIP2IDC's settings: what `params.yaml` may say, and every fault of what it may not."""

import json
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from m3diff.models import FAMILIES
from m3diff.models.blip2idc import Augment, Blip2IDCSettings
from m3diff.models.settings import Lora
from tests.tiny_blip2 import blip2_settings, published_config

GOOD: dict[str, Any] = {
    "family": "blip2idc",
    "lora": {"rank": 8, "alpha": 16},
    "rates": {"vision": 0.0001, "projector": None, "module": 0.0001, "llm": 0.0001},
}


def read(values: dict) -> Blip2IDCSettings:
    return TypeAdapter(FAMILIES["blip2idc"].settings).validate_python(values)


def test_settings_are_read_from_plain_values_and_written_back() -> None:
    augment = {"blur": 1, "sigma": [0.2, 0.4], "jpeg": 0, "quality": [70, 70]}
    settings = read(GOOD | {"module": None, "augment": augment})
    assert settings.lora == Lora(8, 16)
    assert dict(settings.rates) == GOOD["rates"]
    assert settings.augment == Augment(1, (0.2, 0.4), 0, (70, 70))
    assert read(asdict(settings)) == settings
    assert read(json.loads(json.dumps(asdict(settings)))) == settings
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_what_is_left_out_is_the_recipes_augmentation_and_no_delay() -> None:
    settings = read(GOOD)
    assert settings.augment == Augment(blur=0.5, sigma=(0.1, 0.5), jpeg=0.5, quality=(60, 95))
    assert settings.module is None
    assert not any(settings.delays.values())
    assert read(GOOD | {"augment": None}).augment is None


def test_the_q_former_has_a_rate_though_the_settings_name_no_module() -> None:
    assert read(GOOD).rates["module"] == 0.0001
    assert set(read(GOOD).rates) == set(FAMILIES["blip2idc"].parts)


@pytest.mark.parametrize(
    ("section", "values", "faults"),
    [
        ("family", "m3diff", ["'blip2idc'"]),
        ("module", {"layers": 2}, ["None"]),
        ("lora", {"rank": -1, "alpha": 16}, ["rank must be 0 or more, found -1"]),
        ("rates", {"vision": 1e-4, "module": 1e-4}, ["projector", "llm"]),
        ("rates", dict.fromkeys(GOOD["rates"]), ["no part trains"]),
        ("rates", {**GOOD["rates"], "llm": 0}, ["llm must be above 0"]),
        ("delays", {"vision": 1.0}, ["vision must be 0 or more and under 1"]),
        ("augment", {"flip": 0.5}, ["flip"]),
        ("augment", {"blur": 1.5, "jpeg": -0.1}, ["blur must be from 0 to 1, found 1.5; jpeg must be from 0 to 1"]),
        ("augment", {"sigma": [0.5, 0.1]}, ["sigma must be above 0, the least first, found [0.5, 0.1]"]),
        ("augment", {"sigma": [0, 0.1]}, ["found [0.0, 0.1]"]),
        ("augment", {"quality": [90, 60]}, ["quality must be from 1 to 100, the least first, found [90, 60]"]),
        ("augment", {"quality": [0, 101]}, ["found [0, 101]"]),
    ],
)
def test_every_fault_is_named(section: str, values: object, faults: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        read(GOOD | {section: values})
    for fault in faults:
        assert fault in str(refused.value)


def changed(**sections: Any) -> dict[str, Any]:
    config = published_config()
    for name, value in sections.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    return config


@pytest.mark.parametrize(
    ("base", "fault"),
    [
        (None, None),
        ({}, "no image_token_index"),
        (published_config(), None),
        ({"model_type": "blip-2", "image_token_index": 50265}, None),
        (changed(model_type="llava_onevision"), "needs a BLIP-2 in train.base, which is a llava_onevision"),
        (changed(text_config={"model_type": "t5"}), "LLM is a t5, an encoder with a decoder"),
        (changed(image_token_index=None), "no image_token_index: a release from before"),
        (changed(vision_config={"patch_size": 6}), "5 rows of patches, which two images cannot share"),
    ],
)
def test_a_base_that_cannot_be_used_is_a_fault(base: dict | None, fault: str | None) -> None:
    found = FAMILIES["blip2idc"].faults(blip2_settings(), base)
    assert len(found) == (fault is not None)
    assert not fault or fault in found[0]


def test_the_settings_of_a_run_are_told_apart_by_their_augmentation(base: Path) -> None:
    from m3diff.stages.train.stage import run_key
    from tests.stages.train.toy import recipe

    made = recipe(base, model=blip2_settings())
    keys = {
        run_key(made.cfg, settings, base, "")
        for settings in (blip2_settings(), blip2_settings(augment=Augment()), blip2_settings(augment=Augment(jpeg=1.0)))
    }
    assert len(keys) == 3

"""M3Diff's settings: what `params.yaml` may say of a model, and every fault of what it may not."""

import json
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from m3diff.models import FAMILIES
from m3diff.models.m3diff_settings import DifferenceConfig, M3DiffSettings, MDPConfig, module_config
from m3diff.models.settings import Delays, Lora, Rates
from tests.tiny import MDP, tiny_settings

TRAINED = json.loads(json.dumps(asdict(MDPConfig(**MDP))))
"""A module as the config.json of a trained model has it."""

GOOD = {
    "family": "m3diff",
    "module": {"vision_feature_layers": [4], "layers": 2, "heads": 4, "pos_embed_scale": 3.0, "init_gain": 2.0},
    "lora": {"rank": 32, "alpha": 256},
    "rates": {"vision": 0.0004, "projector": 0.0014, "module": 0.0001, "llm": None},
}


def read(values: dict) -> M3DiffSettings:
    return TypeAdapter(FAMILIES["m3diff"].settings).validate_python(values)


def test_settings_are_read_from_plain_values_and_written_back() -> None:
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


def test_the_control_has_no_module() -> None:
    settings = read(GOOD | {"module": None, "rates": GOOD["rates"] | {"module": None}})
    assert settings.module is None
    assert settings.rates["module"] is None


def test_the_bare_difference_is_another_kind_of_module() -> None:
    fields = {"kind": "difference", "vision_feature_layers": [2, 4], "init_gain": 2.0}
    settings = read(GOOD | {"module": fields})
    assert settings.module == DifferenceConfig("difference", (2, 4), share_levels=True, init_gain=2.0)
    assert read(asdict(settings)) == settings
    assert module_config(asdict(settings.module)) == settings.module
    assert type(module_config(asdict(read(GOOD).module))) is MDPConfig
    assert read(GOOD | {"module": {"kind": "difference"}}).module == DifferenceConfig()
    assert DifferenceConfig().vision_feature_layers == MDPConfig().vision_feature_layers


def test_a_module_without_a_rate_is_allowed() -> None:
    assert read(GOOD | {"rates": GOOD["rates"] | {"module": None}}).module == read(GOOD).module


def test_the_defaults_are_the_papers_module() -> None:
    assert read(GOOD | {"module": {}}).module == MDPConfig((17, 20, 23, 26), 2, 16, True, "scalar", 4, True, 0.0, 0.0)


def test_settings_cannot_be_changed() -> None:
    settings = read(GOOD)
    for target, name in ((settings, "family"), (settings.rates, "llm"), (settings.module, "heads")):
        with pytest.raises(FrozenInstanceError):
            setattr(target, name, 1)
    with pytest.raises(TypeError):
        settings.rates["llm"] = 1.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("section", "values", "faults"),
    [
        ("family", "m3dif", ["'m3diff'"]),
        ("module", {"taps": [4]}, ["taps"]),
        ("module", {"vision_feature_layers": [3, 2]}, ["distinct, rising and not negative, found [3, 2]"]),
        ("module", {"vision_feature_layers": [2, 2]}, ["found [2, 2]"]),
        ("module", {"vision_feature_layers": [-1, 2]}, ["found [-1, 2]"]),
        ("module", {"vision_feature_layers": []}, ["found []"]),
        ("module", {"layers": 0, "heads": 0}, ["layers must be at least 1, found 0", "heads must be at least 1"]),
        ("module", {"score": "vector"}, ["'scalar' or 'channel'"]),
        ("module", {"kind": "mdp"}, ["kind must be difference, or not be there for the MDP module"]),
        ("module", {"kind": "difference", "layers": 2}, ["layers"]),
        (
            "module",
            {"kind": "difference", "vision_feature_layers": [-1], "init_gain": -1},
            ["distinct, rising and not negative, found [-1]; init_gain must be 0 or more, found -1"],
        ),
        (
            "module",
            {"mlp_ratio": 0, "init_gain": -0.5},
            ["mlp_ratio must be at least 1", "init_gain must be 0 or more"],
        ),
        ("module", {"pos_embed_scale": -1}, ["pos_embed_scale must be 0 or more, found -1"]),
        ("module", None, ["module is 0.0001 but there is no module; set it to null"]),
        ("lora", {"rank": -1, "alpha": 0}, ["rank must be 0 or more, found -1", "alpha must be 1 or more, found 0"]),
        ("lora", {"rank": 2}, ["alpha"]),
        ("lora", {"rank": 2, "alpha": 4, "dropout": 0.1}, ["dropout"]),
        ("rates", {**GOOD["rates"], "decoder": 1.0}, ["decoder"]),
        ("rates", {"vision": 1e-3, "module": 1e-3}, ["projector", "llm"]),
        ("rates", {**GOOD["rates"], "vision": 0, "llm": -1}, ["vision must be above 0", "llm must be above 0"]),
        ("rates", dict.fromkeys(GOOD["rates"]), ["no part trains"]),
    ],
)
def test_every_fault_is_named(section: str, values: object, faults: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        read(GOOD | {section: values})
    for fault in faults:
        assert fault in str(refused.value)


def test_faults_of_all_sections_are_named_at_once() -> None:
    with pytest.raises(ValidationError) as refused:
        read({"family": "m3diff", "module": {"layers": 0}, "lora": {"rank": -1, "alpha": 4}, "rates": {"llm": 1}})
    assert {fault["loc"][0] for fault in refused.value.errors()} == {"module", "lora", "rates"}


def test_edges_are_allowed() -> None:
    edges = {"vision_feature_layers": [0], "layers": 1, "heads": 1, "mlp_ratio": 1, "score": "channel"}
    assert read(GOOD | {"module": edges, "lora": {"rank": 0, "alpha": 1}}).lora.rank == 0


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"vision_feature_layers": [3, 2]}, "distinct, rising"),
        ({"taps": [1]}, "mdp: unknown field 'taps'"),
        ({"layers": 0, "tap": 1}, "unknown field 'tap'; layers must be at least 1"),
        ({"score": "vector"}, "scalar or channel, found 'vector'"),
        ({"kind": "difference", "layers": 2, "init_gain": -1}, "unknown field 'layers'; init_gain must be 0 or more"),
        ({"kind": "difference", "vision_feature_layers": [2, 1]}, "distinct, rising"),
        ({"kind": "mdp"}, "mdp: kind must be difference, or not be there for the MDP module, found 'mdp'"),
    ],
)
def test_a_wrong_field_in_a_configuration_is_named(fields: dict, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        module_config(fields)


@pytest.mark.parametrize(
    ("module", "base", "faults"),
    [
        (MDP, None, []),
        (MDP, {"vision_config": {"num_hidden_layers": 2, "hidden_size": 16}}, []),
        (
            MDP,
            {"vision_config": {"num_hidden_layers": 1, "hidden_size": 15}},
            ["2 lies beyond the 1 layers", "2 does not"],
        ),
        ({"vision_feature_layers": [26]}, {}, []),
        ({"vision_feature_layers": [27], "heads": 7}, {}, ["27 lies beyond the 26 layers", "7 does not divide 1152"]),
        (None, {"vision_config": {"num_hidden_layers": 0}}, []),
        ({"kind": "difference", "vision_feature_layers": [27]}, {}, ["27 lies beyond the 26 layers"]),
        (
            MDP,
            {"mdp": None, "vision_config": {"num_hidden_layers": 2}},
            ["set null instead of {'vision_feature_layers'"],
        ),
        (None, {"mdp": None}, []),
        (MDP, {"mdp": TRAINED, "vision_config": {"num_hidden_layers": 2, "hidden_size": 16}}, []),
        (MDP, {"mdp": TRAINED | {"heads": 4}}, ["which it keeps; set heads to 4 instead of 2"]),
        (
            MDP,
            {"model_type": "onediff", "vdm": {}},
            ["needs a LLaVA-OneVision in train.base, or an M3Diff, and it has"],
        ),
        (None, {"model_type": "llava"}, ["or an M3Diff, and it has a llava"]),
        (None, {"model_type": "m3diff"}, []),
        (None, {"vision_feature_layer": [1, 2], "vision_config": {"num_hidden_layers": 2}}, ["found [1, 2]"]),
        (None, {"vision_feature_layer": -4, "vision_config": {"num_hidden_layers": 2}}, ["from -3 to 2, found -4"]),
        (None, {"mdp": {"heads": 4}}, ["which it keeps; set {'heads': 4} instead of null"]),
    ],
)
def test_what_the_base_cannot_give_is_a_fault(module: dict | None, base: dict | None, faults: list[str]) -> None:
    found = FAMILIES["m3diff"].faults(tiny_settings(module), base)
    assert len(found) == len(faults)
    for text, fault in zip(found, faults, strict=True):
        assert fault in text


def test_the_list_of_families_loads_nothing_heavy() -> None:
    script = (
        "import sys, m3diff.models, m3diff.models.m3diff_settings\n"
        "print(sorted({'torch', 'transformers', 'peft', 'numpy', 'PIL', 'pydantic'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, text=True, capture_output=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("delay", [-0.1, 1.0])
def test_a_delay_is_a_share_of_the_steps(delay: float) -> None:
    with pytest.raises(ValueError, match=f"delays: module must be 0 or more and under 1, .*found {delay}"):
        replace(tiny_settings(), delays=Delays(module=delay))


def test_rates_is_a_mapping_of_its_parts() -> None:
    rates = Rates(vision=1.0, projector=None, module=2.0, llm=3.0)
    assert list(rates.items()) == [("vision", 1.0), ("projector", None), ("module", 2.0), ("llm", 3.0)]
    assert set(rates) == set(FAMILIES["m3diff"].parts)

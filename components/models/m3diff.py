"""The M3Diff model family (arXiv 2503.11093): LLaVA-OneVision with the Multi-scale Differential Perception module.

This module does not import torch or transformers until a model is needed. The functions `llava_*` are shared by all
families that are based on LLaVA.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from m3diff.models.contract import Model, Processor
from m3diff.models.family import MAPS_OF_MODEL, MODULE_UPDATE_RATIO, Contribution, Family, module_fields
from m3diff.models.settings import MDPConfig, ModuleByKind, ModuleConfig, Settings
from m3diff.records.errors import Fault

if TYPE_CHECKING:
    from torch import Tensor

# Layers that get adapters: all seven linear layers of every LLM layer, because the paper does not say which layers have
# adapters. The pattern matches full names, because SigLIP's projections have the same short names.
LORA_TARGETS = {"llm": r"model\.language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"}

# Parameters of the vision encoder that LLaVA-OneVision does not use, because it reads a hidden state of the encoder and
# not the encoder's output
UNUSED_PARAMETERS = ("model.vision_tower.post_layernorm.", "model.vision_tower.head.")

# Shape of LLaVA-OneVision-7B's vision encoder. Configurations omit fields that have these default values.
SIGLIP_SO400M = {"num_hidden_layers": 26, "hidden_size": 1152}

# Folder names of the published bases, which are also their names on the hub
SMALL_BASE = "llava-onevision-qwen2-0.5b-ov-hf"
LARGE_BASE = "llava-onevision-qwen2-7b-ov-hf"


@dataclass(frozen=True)
class M3DiffSettings(Settings):
    """Settings of M3Diff.

    module: settings of the new MDP module, or for control runs, settings of the bare difference, or null for the base
        without a module.
    lora: adapters of the LLM's linear layers.
    """

    family: Literal["m3diff"]
    module: Annotated[ModuleConfig | None, ModuleByKind()]


def llava_parts(module: str) -> dict[str, tuple[str, ...]]:
    """Return the parts of a LLaVA-based model with a new module `model.<module>`: part -> parameter prefixes."""
    return {
        "vision": ("model.vision_tower.",),
        "module": (f"model.{module}.",),
        "projector": ("model.multi_modal_projector.", "model.image_newline"),
        "llm": ("model.language_model.", "lm_head."),
    }


def classes() -> tuple[type[Model], type[Processor]]:
    """Return the model class and the processor class."""
    from transformers import AutoConfig

    from m3diff.models.m3diff_model import M3DiffConfig, M3DiffForConditionalGeneration
    from m3diff.models.processing import M3DiffProcessor

    # AutoTokenizer uses the configuration's class to find the tokenizer in a folder
    AutoConfig.register(M3DiffConfig.model_type, M3DiffConfig, exist_ok=True)
    return M3DiffForConditionalGeneration, M3DiffProcessor


def llava_base_faults(
    settings: Settings, base: Mapping[str, Any], field: str, base_names: Mapping[str, str]
) -> list[Fault]:
    """Return the reasons why a LLaVA-based family cannot use a base: an unsupported type or a different module.

    Args:
        settings: settings of the family.
        base: fields of the base's config.json.
        field: name of the config.json field for the module's settings. A base has this field if it was trained with a
            module.
        base_names: `model_type` -> name of each supported base. The first type is assumed if config.json has none.
    """
    model_type = base.get("model_type", next(iter(base_names)))
    if model_type not in base_names:
        names = list(base_names.values())
        return [Fault("models.other_base", family=settings.family, value=model_type, names=names)]
    module = json.loads(json.dumps(module_fields(settings)))  # turns tuples into lists, as config.json holds them
    base_module = base.get(field, module)
    if base_module == module:
        return []
    return [Fault("models.base_has_other_module", field="module", value=module, expected=base_module)]


def llava_layer_faults(settings: Settings, layers: int) -> list[Fault]:
    """Return a fault if the module reads a layer that the vision encoder does not have.

    Args:
        settings: settings of the family.
        layers: number of layers of the vision encoder.
    """
    if settings.module is None:
        return []
    deepest = settings.module.vision_feature_layers[-1]
    if deepest <= layers:
        return []
    return [Fault("models.no_such_layer", field="module.vision_feature_layers", value=deepest, limit=layers)]


def faults(settings: M3DiffSettings, base: Mapping[str, Any] | None) -> list[Fault]:
    """Return the reasons why the settings do not fit the base, or an empty list if the base is not known yet."""
    if base is None:
        return []
    base_names = {"llava_onevision": "LLaVA-OneVision", "m3diff": "M3Diff"}
    base_faults = llava_base_faults(settings, base, "mdp", base_names)
    if base_faults:
        return base_faults
    encoder = SIGLIP_SO400M | base.get("vision_config", {})
    module_faults = llava_layer_faults(settings, encoder["num_hidden_layers"])
    width = encoder["hidden_size"]
    module = settings.module
    if isinstance(module, MDPConfig) and width % module.heads:
        fault = Fault("models.heads_do_not_divide_encoder", field="module.heads", value=module.heads, width=width)
        module_faults.append(fault)
    return module_faults


def contribution_names(settings: M3DiffSettings) -> tuple[str, ...]:
    """Return the names of the module's metrics: the update ratio of each level, then the score of each level.

    A level is named after its layer of the vision encoder, such as `module_update_ratio/17`. Only the MDP module has
    metrics.
    """
    if not isinstance(settings.module, MDPConfig):
        return ()
    levels = settings.module.vision_feature_layers
    ratios = [f"{MODULE_UPDATE_RATIO}/{level}" for level in levels]
    scores = [f"module_score/{level}" for level in levels]
    return (*ratios, *scores)


def contribution_figures(sums: "Tensor") -> list[float]:
    """Return the values of the module's metrics in the order of `contribution_names`.

    An update ratio is the RMS of the level's update in equation (8), divided by the RMS of the encoder's last features.
    A score is the mean of equation (7).

    Args:
        sums: sum of the tensors from `record_contribution`, [levels + 1, 2].
    """
    levels = sums[:-1]
    feature_squares, score_count = sums[-1]
    ratios = (levels[:, 0] / feature_squares).sqrt()
    scores = levels[:, 1] / score_count
    return [*ratios.tolist(), *scores.tolist()]


CONTRIBUTION = Contribution(
    names=contribution_names,
    record=lambda model: model.model.mdp.record_contribution(),
    figures=contribution_figures,
    remedy="Raise the module's rate (rates.module), or start it above zero (module.init_gain).",
)

FAMILY = Family(
    settings=M3DiffSettings,
    parts=llava_parts("mdp"),
    lora_targets=LORA_TARGETS,
    classes=classes,
    faults=faults,
    unused_parameters=UNUSED_PARAMETERS,
    contribution=CONTRIBUTION,
    maps=MAPS_OF_MODEL,
    new_parts=("module",),
    model_types=("m3diff", "llava_onevision"),
)

"""M3Diff (arXiv 2503.11093) as a model family: LLaVA-OneVision with the Multi-scale Differential Perception module.

Light to import: torch and transformers come with the first call. `llava_*` are of every family on LLaVA's parts.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from m3diff.models.family import MODULE_UPDATE_RATIO, Contribution, Family, module_fields
from m3diff.models.settings import ByKind, MDPConfig, ModuleConfig, Settings

if TYPE_CHECKING:
    from torch import Tensor

# The seven linears of every LLM layer; the paper does not name its targets. A full path, because SigLIP's projections
# have the same short names.
LORA_TARGETS = {"llm": r"model\.language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"}

# Parts of the vision encoder that LLaVA-OneVision never runs: it takes a hidden state, not the encoder's output
NEVER_RUN = ("model.vision_tower.post_layernorm.", "model.vision_tower.head.")

# The vision encoder of LLaVA-OneVision-7B: what its configuration leaves out where it is the default
SIGLIP_SO400M = {"num_hidden_layers": 26, "hidden_size": 1152}

# Folder names of the published bases; a hub's page of the same name has the model
SMALL_BASE, LARGE_BASE = "llava-onevision-qwen2-0.5b-ov-hf", "llava-onevision-qwen2-7b-ov-hf"


@dataclass(frozen=True)
class M3DiffSettings(Settings):
    """Settings of M3Diff.

    module: the new MDP module; or a control: the bare difference, or None for the base without a module.
    lora: adapters of the LLM's linears.
    """

    family: Literal["m3diff"]
    module: Annotated[ModuleConfig | None, ByKind()]


def llava_parts(module: str) -> dict[str, tuple[str, ...]]:
    """The parts of a model on LLaVA's, whose new module is `model.<module>`."""
    return {
        "vision": ("model.vision_tower.",),
        "module": (f"model.{module}.",),
        "projector": ("model.multi_modal_projector.", "model.image_newline"),
        "llm": ("model.language_model.", "lm_head."),
    }


def classes() -> tuple[Any, Any]:
    from transformers import AutoConfig

    from m3diff.models.m3diff_model import M3DiffConfig, M3DiffForConditionalGeneration
    from m3diff.models.processing import M3DiffProcessor

    AutoConfig.register(M3DiffConfig.model_type, M3DiffConfig, exist_ok=True)  # AutoTokenizer reads a folder's by it
    return M3DiffForConditionalGeneration, M3DiffProcessor


def llava_base_faults(settings: Settings, base: Mapping[str, Any], field: str, kinds: Mapping[str, str]) -> list[str]:
    """Why a base of LLaVA's parts is another than a family needs: of another kind, or trained with another module.

    Args:
        field: of config.json with the fields of the module that a base was trained with.
        kinds: names of kinds of base by `model_type`, the first where config.json is silent.
    """
    if (kind := base.get("model_type", next(iter(kinds)))) not in kinds:
        names = ", ".join(kinds.values())
        return [f"family {settings.family} needs one of {names} in train.base, and it has a {kind}"]
    ours = json.loads(json.dumps(module_fields(settings)))  # lists for tuples
    if (theirs := base.get(field, ours)) == ours:
        return []
    return [f"module: the base was trained with another one, which it keeps; set {theirs} instead of {ours}"]


def llava_layer_faults(settings: Settings, layers: int) -> list[str]:
    """Layers that a vision encoder of so many cannot give to the module."""
    if settings.module is None or (deepest := settings.module.vision_feature_layers[-1]) <= layers:
        return []
    return [f"module.vision_feature_layers: {deepest} lies beyond the {layers} layers of the vision encoder"]


def faults(settings: M3DiffSettings, base: Mapping[str, Any] | None) -> list[str]:
    """Why these settings and this base cannot go together; nothing where the base is not known."""
    if base is None:
        return []
    if found := llava_base_faults(settings, base, "mdp", {"llava_onevision": "LLaVA-OneVision", "m3diff": "M3Diff"}):
        return found
    encoder = SIGLIP_SO400M | base.get("vision_config", {})
    found = llava_layer_faults(settings, encoder["num_hidden_layers"])
    width, module = encoder["hidden_size"], settings.module
    if isinstance(module, MDPConfig) and width % module.heads:
        found.append(f"module.heads: {module.heads} does not divide {width}, the width of the vision encoder")
    return found


def contribution_names(settings: M3DiffSettings) -> tuple[str, ...]:
    levels = settings.module.vision_feature_layers if isinstance(settings.module, MDPConfig) else ()
    return tuple(f"{figure}/{level}" for figure in (MODULE_UPDATE_RATIO, "module_score") for level in levels)


def contribution_figures(sums: "Tensor") -> list[float]:
    """The numbers of the curve: of each level, the RMS of its update over the RMS of the encoder's last features; then
    each level's mean score.

    Args:
        sums: what `recorded_contribution` of the module gave, added up: [levels + 1, 2].
    """
    levels, (squares, scores) = sums[:-1], sums[-1]
    return [*(levels[:, 0] / squares).sqrt().tolist(), *(levels[:, 1] / scores).tolist()]


# Of each level, called by its layer of the vision encoder: `module_update_ratio/17`, the RMS of the level's update in
# equation (8) over the RMS of the encoder's last features, and `module_score/17`, the mean score of equation (7).
CONTRIBUTION = Contribution(
    names=contribution_names,
    recorded=lambda model: model.model.mdp.recorded_contribution(),
    figures=contribution_figures,
    remedy="Raise the module's rate (rates.module), or start it above zero (module.init_gain).",
)

FAMILY = Family(
    settings=M3DiffSettings,
    parts=llava_parts("mdp"),
    lora_targets=LORA_TARGETS,
    classes=classes,
    faults=faults,
    frozen=NEVER_RUN,
    contribution=CONTRIBUTION,
    new=("module",),
)

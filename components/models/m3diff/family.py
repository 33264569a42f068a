"""M3Diff as a model family. Light to import: torch and transformers come with the first call."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3diff.models.family import MODULE_UPDATE_RATIO, Contribution, Family, Settings, Term
from m3diff.models.m3diff.settings import M3DiffSettings, MDPConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from m3diff.models.m3diff.configuration import M3DiffConfig
    from m3diff.models.m3diff.modeling import M3DiffForConditionalGeneration
    from m3diff.models.m3diff.processing import M3DiffProcessor

PARTS = {
    "vision": ("model.vision_tower.",),
    "module": ("model.mdp.",),
    "projector": ("model.multi_modal_projector.", "model.image_newline"),
    "llm": ("model.language_model.", "lm_head."),
}

LORA_TARGETS = {"llm": r"model\.language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"}
"""The seven linears of every LLM layer; the paper does not name its targets. A full path, because SigLIP's projections
have the same short names."""

BASES = ("llava_onevision", "m3diff")
"""What the config.json of a base may call itself; the first where it is silent."""


NEVER_RUN = ("model.vision_tower.post_layernorm.", "model.vision_tower.head.")
"""Parts of the vision encoder that LLaVA-OneVision never runs: it takes a hidden state, not the encoder's output."""

SMALL_BASE, LARGE_BASE = "llava-onevision-qwen2-0.5b-ov-hf", "llava-onevision-qwen2-7b-ov-hf"
"""Bases whose shapes are known without their folder, which then must bear this name; any other is planned as the large
one, and the plan says so."""

SIGLIP_SO400M = {"num_hidden_layers": 26, "hidden_size": 1152}
"""The vision encoder of LLaVA-OneVision-7B: what its configuration leaves out where it is the default."""


def build(config: M3DiffConfig) -> M3DiffForConditionalGeneration:
    from m3diff.models.m3diff.modeling import M3DiffForConditionalGeneration

    return M3DiffForConditionalGeneration(config)


def load_base(
    folder: Path, settings: M3DiffSettings, dtype: torch.dtype, attn_implementation: str | dict[str, str]
) -> M3DiffForConditionalGeneration:
    from m3diff.models.m3diff.modeling import M3DiffForConditionalGeneration

    return M3DiffForConditionalGeneration.from_pretrained(
        folder, mdp=_module(settings), dtype=dtype, attn_implementation=attn_implementation
    )


def load(folder: Path, dtype: torch.dtype, configuration: Path | None = None) -> M3DiffForConditionalGeneration:
    from m3diff.models.m3diff.configuration import M3DiffConfig
    from m3diff.models.m3diff.modeling import M3DiffForConditionalGeneration

    config = M3DiffConfig.of_checkpoint(str(configuration)) if configuration else None
    return M3DiffForConditionalGeneration.from_pretrained(folder, config=config, dtype=dtype)


def load_processor(folder: Path, config: M3DiffConfig | None = None) -> M3DiffProcessor:
    from m3diff.models.m3diff.processing import M3DiffProcessor

    return M3DiffProcessor.from_pretrained(folder)


def fuse(model: M3DiffForConditionalGeneration, activation_checkpointing: str) -> None:
    from m3diff.models.fused import make_fused

    make_fused(model, activation_checkpointing)


def generate(
    model: M3DiffForConditionalGeneration, inputs: Mapping[str, Tensor], saliency: bool, decoding: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    asked: dict[str, Any] = {**inputs, **decoding}
    tokens, maps = model.generate_with_maps(**asked) if saliency else (model.generate(**asked), None)  # type: ignore[misc]
    return tokens[:, inputs["input_ids"].shape[1] :], maps


def planned_config(base: Path, settings: M3DiffSettings) -> M3DiffConfig:
    from m3diff.models.m3diff.configuration import M3DiffConfig, half_b_config, seven_b_config

    if (base / "config.json").is_file():
        return M3DiffConfig.on_base(str(base), _module(settings))
    small = base.name == SMALL_BASE
    config = (half_b_config if small else seven_b_config)(_module(settings))
    config.name_or_path = f"llava-hf/{SMALL_BASE if small else LARGE_BASE}"
    return config


def flops(config: M3DiffConfig, tokens: float, supervised: float, settings: Settings) -> list[Term]:
    from m3diff.models.m3diff.flops import flops

    return flops(config, tokens, supervised, settings)


def image_tokens(config: M3DiffConfig) -> int:
    from m3diff.models.m3diff.flops import image_tokens

    return image_tokens(config)


def blank_images(config: M3DiffConfig, device: torch.device | str) -> dict[str, Tensor]:
    import torch

    side = config.vision_config.image_size
    return {
        "pixel_values": torch.zeros(2, 3, side, side, device=device),
        "batch_num_images": torch.tensor([2], device="cpu"),  # its value is read
    }


def faults(settings: M3DiffSettings, base: Mapping[str, Any] | None) -> list[str]:
    """That the base is of another kind, what its vision encoder cannot give, and what of the module of a base that was
    trained is another; nothing where the base is not known."""
    if base is None:
        return []
    if (kind := base.get("model_type", BASES[0])) not in BASES:
        return [f"family m3diff needs a LLaVA-OneVision in train.base, or an M3Diff, and it has a {kind}"]
    if "mdp" in base and (differs := other_fields(base["mdp"], _module(settings))):
        return [f"module: the base was trained with another one, which it keeps; {differs}"]
    encoder = SIGLIP_SO400M | base.get("vision_config", {})
    layers, width = encoder["num_hidden_layers"], encoder["hidden_size"]
    found = feature_layer_faults(base, layers)
    if settings.module is None:
        return found
    if (deepest := settings.module.vision_feature_layers[-1]) > layers:
        found.append(f"module.vision_feature_layers: {deepest} lies beyond the {layers} layers of the vision encoder")
    if isinstance(settings.module, MDPConfig) and width % settings.module.heads:
        found.append(f"module.heads: {settings.module.heads} does not divide {width}, the width of the vision encoder")
    return found


def feature_layer_faults(base: Mapping[str, Any], layers: int) -> list[str]:
    """What is wrong with the hidden state that the base's projector reads, of a vision encoder of so many layers."""
    layer = base.get("vision_feature_layer", -1)
    if isinstance(layer, int) and -layers - 1 <= layer <= layers:
        return []
    return [
        f"its base's vision_feature_layer must be one whole number from {-layers - 1} to {layers}, found {layer}: "
        "a LLaVA whose projector reads several layers is not known here; take another base"
    ]


def other_fields(theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> str:
    """What the module of a trained base and that of the settings differ in, in words; nothing where they are the same.
    None is none: a base that was trained without one takes none up either."""
    if theirs is None or ours is None:
        words = ["null" if fields is None else str(dict(fields)) for fields in (theirs, ours)]
        return "" if theirs is ours else f"set {words[0]} instead of {words[1]}"
    here = {name: list(value) if isinstance(value, tuple) else value for name, value in ours.items()}
    names = [name for name in sorted(theirs.keys() | here.keys()) if theirs.get(name) != here.get(name)]
    return ", ".join(f"set {name} to {theirs.get(name)} instead of {here.get(name)}" for name in names)


def contribution_names(settings: M3DiffSettings) -> tuple[str, ...]:
    levels = settings.module.vision_feature_layers if isinstance(settings.module, MDPConfig) else ()
    return tuple(f"{figure}/{level}" for figure in (MODULE_UPDATE_RATIO, "module_score") for level in levels)


def recorded_contribution(model: M3DiffForConditionalGeneration) -> AbstractContextManager[list[Tensor]]:
    from m3diff.models.m3diff.mdp import DifferentialPerception

    assert isinstance(model.model.mdp, DifferentialPerception), "a model without an MDP module has no numbers of it"
    return model.model.mdp.recorded_contribution()


def contribution_figures(sums: Tensor) -> list[float]:
    from m3diff.models.m3diff.mdp import contribution

    ratios, scores = contribution(sums)
    return ratios + scores


CONTRIBUTION = Contribution(
    names=contribution_names,
    recorded=recorded_contribution,
    figures=contribution_figures,
    remedy="Raise the module's rate (rates.module), or start it above zero (module.init_gain).",
)
"""Of each level, called by its layer of the vision encoder: `module_update_ratio/17`, the RMS of the level's update in
equation (8) over the RMS of the encoder's last features, and `module_score/17`, the mean score of equation (7)."""


def _module(settings: M3DiffSettings) -> dict[str, Any] | None:
    return None if settings.module is None else asdict(settings.module)


FAMILY = Family(
    settings=M3DiffSettings,
    parts=PARTS,
    lora_targets=LORA_TARGETS,
    frozen=NEVER_RUN,
    build=build,
    load_base=load_base,
    load=load,
    load_processor=load_processor,
    fuse=fuse,
    generate=generate,
    planned_config=planned_config,
    flops=flops,
    image_tokens=image_tokens,
    blank_images=blank_images,
    faults=faults,
    contribution=CONTRIBUTION,
    new=("module",),
)

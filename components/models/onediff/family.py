"""OneDiff as a model family. Light to import: torch and transformers come with the first call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3diff.models.family import Settings, Term
from m3diff.models.m3diff.family import FAMILY as M3DIFF
from m3diff.models.m3diff.family import (
    LARGE_BASE,
    LORA_TARGETS,
    SIGLIP_SO400M,
    SMALL_BASE,
    feature_layer_faults,
    other_fields,
)
from m3diff.models.onediff.settings import OneDiffSettings

if TYPE_CHECKING:
    import torch

    from m3diff.models.onediff.configuration import OneDiffConfig
    from m3diff.models.onediff.modeling import OneDiffForConditionalGeneration
    from m3diff.models.onediff.processing import OneDiffProcessor

PARTS = {
    "vision": ("model.vision_tower.",),
    "module": ("model.vdm.",),
    "projector": ("model.multi_modal_projector.", "model.image_newline"),
    "llm": ("model.language_model.", "lm_head."),
}


LLAVA_BASE = "llava-1.5-7b-hf"
"""The paper's base in all but name; its shapes are known without its folder, as LLaVA-OneVision's are by theirs."""

BASES = ("llava_onevision", "llava", "onediff")
"""What the config.json of a base may call itself; the first where it is silent."""

CLASS_TOKEN_DROPPED, VDM = "default", "vdm"
"""Strategies of a base with a CLIP, which has a class token: LLaVA-1.5's, which leaves it out of every hidden state, as
is done here; and what a OneDiff with a module is written with."""

CLIP = "clip_vision_model"
CLIP_L = {"num_hidden_layers": 24, "hidden_size": 1024, "image_size": 336, "patch_size": 14}
ENCODERS = {
    CLIP: CLIP_L,
    "siglip_vision_model": {"image_size": 384, "patch_size": 14, **SIGLIP_SO400M},
}
"""Of a base's vision encoder: what its configuration leaves out where it is the default."""


def build(config: OneDiffConfig) -> OneDiffForConditionalGeneration:
    from m3diff.models.onediff.modeling import OneDiffForConditionalGeneration

    return OneDiffForConditionalGeneration(config)


def load_base(
    folder: Path, settings: OneDiffSettings, dtype: torch.dtype, attn_implementation: str | dict[str, str]
) -> OneDiffForConditionalGeneration:
    from m3diff.models.onediff.modeling import OneDiffForConditionalGeneration

    return OneDiffForConditionalGeneration.from_pretrained(
        folder, vdm=_module(settings), dtype=dtype, attn_implementation=attn_implementation
    )


def load(folder: Path, dtype: torch.dtype, configuration: Path | None = None) -> OneDiffForConditionalGeneration:
    from m3diff.models.onediff.configuration import OneDiffConfig
    from m3diff.models.onediff.modeling import OneDiffForConditionalGeneration

    config = OneDiffConfig.of_checkpoint(str(configuration)) if configuration else None
    return OneDiffForConditionalGeneration.from_pretrained(folder, config=config, vdm=None, dtype=dtype)


def load_processor(folder: Path, config: OneDiffConfig | None = None) -> OneDiffProcessor:
    from m3diff.models.onediff.processing import OneDiffProcessor

    return OneDiffProcessor.from_pretrained(folder, config)


def planned_config(base: Path, settings: OneDiffSettings) -> OneDiffConfig:
    from m3diff.models.m3diff.configuration import half_b_config, seven_b_config
    from m3diff.models.onediff.configuration import OneDiffConfig, llava_config

    if (base / "config.json").is_file():
        return OneDiffConfig.on_base(str(base), _module(settings))
    shapes = {SMALL_BASE: half_b_config, LARGE_BASE: seven_b_config}.get(base.name)
    config = (
        OneDiffConfig.on_fields(shapes(None).to_dict(), _module(settings))
        if shapes
        else llava_config(_module(settings))
    )
    config.name_or_path = f"llava-hf/{base.name if shapes else LLAVA_BASE}"
    return config


def flops(config: OneDiffConfig, tokens: float, supervised: float, settings: Settings) -> list[Term]:
    from m3diff.models.onediff.flops import flops

    return flops(config, tokens, supervised, settings)


def image_tokens(config: OneDiffConfig) -> int:
    from m3diff.models.onediff.flops import image_tokens

    return image_tokens(config)


def faults(settings: OneDiffSettings, base: Mapping[str, Any] | None) -> list[str]:
    """That the base is of another kind, what its vision encoder cannot give, and what of the module of a base that was
    trained is another; nothing where the base is not known."""
    if base is None:
        return []
    if (kind := base.get("model_type", BASES[0])) not in BASES:
        return [f"family onediff needs a LLaVA-1.5 or LLaVA-OneVision in train.base, or a OneDiff, and it has a {kind}"]
    if "vdm" in base and (differs := other_fields(base["vdm"], _module(settings))):
        return [f"module: the base was trained with another one, which it keeps; {differs}"]
    vision = base.get("vision_config", {})
    if (kind := vision.get("model_type")) not in ENCODERS:
        return [
            f"family onediff reads the encoders of LLaVA-1.5 and LLaVA-OneVision, and train.base has {kind or 'none'}"
        ]
    cfg, encoder = settings.module, ENCODERS[kind] | vision
    layers, patches = encoder["num_hidden_layers"], (encoder["image_size"] // encoder["patch_size"]) ** 2
    found = feature_layer_faults(base, layers)
    strategy = base.get("vision_feature_select_strategy", CLASS_TOKEN_DROPPED)
    if kind == CLIP and strategy not in (CLASS_TOKEN_DROPPED, VDM):
        found.append(
            f"its base's vision_feature_select_strategy is {strategy}, which keeps CLIP's class token; family onediff "
            f"leaves it out, as a base of strategy {CLASS_TOKEN_DROPPED} does"
        )
    if cfg is None:
        return found
    if (deepest := cfg.vision_feature_layers[-1]) > layers:
        found.append(f"module.vision_feature_layers: {deepest} lies beyond the {layers} layers of the vision encoder")
    if cfg.pos_embed_scale and cfg.tokens != patches:
        found.append(
            f"module.tokens: pos_embed_scale binds each to a patch, so set them to {patches}, not {cfg.tokens}"
        )
    return found


def base_files(settings: OneDiffSettings, base: Mapping[str, Any] | None) -> dict[str, str]:
    """The BERT that a new module starts as; a base that was trained has its module already."""
    if settings.module is None or settings.module.start != "bert" or (base is not None and "vdm" in base):
        return {}
    source = "copy it from bert-base-uncased, or set module.start to random"
    return {f"bert/{file}": source for file in ("config.json", "model.safetensors")}


def _module(settings: OneDiffSettings) -> dict[str, Any] | None:
    return None if settings.module is None else asdict(settings.module)


FAMILY = replace(
    M3DIFF,
    settings=OneDiffSettings,
    parts=PARTS,
    lora_targets=LORA_TARGETS,
    whole_without_adapters=("llm",),
    build=build,
    load_base=load_base,
    load=load,
    load_processor=load_processor,
    planned_config=planned_config,
    flops=flops,
    image_tokens=image_tokens,
    faults=faults,
    contribution=None,
    base_files=base_files,
)
"""What is LLaVA's is M3Diff's: kernels, generation with maps, blank images. Its delta tokens stand beside the images'
features and change none, so how much the module contributes has no ratio to them."""

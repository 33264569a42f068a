"""OneDiff (arXiv 2407.05645) as a model family: a LLaVA that reads, beside two images, tokens of the difference between
them. Light to import: torch and transformers come with the first call.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from m3diff.models.family import Family
from m3diff.models.m3diff import (
    LORA_TARGETS,
    NEVER_RUN,
    SIGLIP_SO400M,
    llava_base_faults,
    llava_layer_faults,
    llava_parts,
)
from m3diff.models.settings import Settings, VDMConfig

# The paper's base in all but name; its shapes are known without its folder, as LLaVA-OneVision's are by theirs
LLAVA_BASE = "llava-1.5-7b-hf"

BASES = {"llava_onevision": "LLaVA-OneVision", "llava": "LLaVA-1.5", "onediff": "OneDiff"}

ENCODERS = {  # of a base's vision encoder: what its configuration leaves out where it is the default
    "clip_vision_model": {"num_hidden_layers": 24, "hidden_size": 1024, "image_size": 336, "patch_size": 14},
    "siglip_vision_model": {"image_size": 384, "patch_size": 14, **SIGLIP_SO400M},
}


@dataclass(frozen=True)
class OneDiffSettings(Settings):
    """Settings of OneDiff.

    module: the new VDM, or None for the base without one.
    lora: adapters of the LLM's linears; the paper has none (rank 0): it trains the LLM in full.
    rates: the paper says twice that the vision encoder is frozen (section 4.2) and once that everything trains (5.1);
        the profile has it frozen.
    align: stage I, Coupled Sample Training; None goes straight to stage II.
    """

    family: Literal["onediff"]
    module: VDMConfig | None


def classes() -> tuple[Any, Any]:
    from transformers import AutoConfig

    from m3diff.models.onediff_model import OneDiffConfig, OneDiffForConditionalGeneration
    from m3diff.models.processing import OneDiffProcessor

    AutoConfig.register(OneDiffConfig.model_type, OneDiffConfig, exist_ok=True)  # AutoTokenizer reads a folder's by it
    return OneDiffForConditionalGeneration, OneDiffProcessor


def faults(settings: OneDiffSettings, base: Mapping[str, Any] | None) -> list[str]:
    """Why these settings and this base cannot go together; nothing where the base is not known."""
    if base is None:
        return []
    if found := llava_base_faults(settings, base, "vdm", BASES):
        return found
    vision = base.get("vision_config", {})
    if (kind := vision.get("model_type")) not in ENCODERS:
        return [
            f"family onediff reads the encoders of LLaVA-1.5 and LLaVA-OneVision, and train.base has {kind or 'none'}"
        ]
    cfg, encoder = settings.module, ENCODERS[kind] | vision
    found = llava_layer_faults(settings, encoder["num_hidden_layers"])
    count = (encoder["image_size"] // encoder["patch_size"]) ** 2
    if cfg is not None and cfg.pos_embed_scale and cfg.tokens != count:
        found.append(f"module.tokens: pos_embed_scale binds each to a patch, so set them to {count}, not {cfg.tokens}")
    return found


def base_files(settings: OneDiffSettings, base: Mapping[str, Any] | None) -> dict[str, str]:
    """The BERT that a new module starts as; a base that was trained has its module already."""
    if settings.module is None or settings.module.start != "bert" or (base is not None and "vdm" in base):
        return {}
    source = "copy it from bert-base-uncased, or set module.start to random"
    return {f"bert/{file}": source for file in ("config.json", "model.safetensors")}


# Its delta tokens stand beside the images' features and change none, so how much the module contributes has no ratio to
# them
FAMILY = Family(
    settings=OneDiffSettings,
    parts=llava_parts("vdm"),
    lora_targets=LORA_TARGETS,
    classes=classes,
    faults=faults,
    frozen=NEVER_RUN,
    new=("module",),
    whole_without_adapters=("llm",),
    base_files=base_files,
)

"""The OneDiff model family (arXiv 2407.05645): LLaVA with additional tokens that encode the images' difference.

This module does not import torch or transformers until a model is needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from m3diff.models.contract import Model, Processor
from m3diff.models.family import MAPS_OF_MODEL, Family
from m3diff.models.m3diff import (
    LORA_TARGETS,
    SIGLIP_SO400M,
    UNUSED_PARAMETERS,
    llava_base_faults,
    llava_layer_faults,
    llava_parts,
)
from m3diff.models.settings import Settings, VDMConfig
from m3diff.records.errors import Fault

# The base that the paper uses but does not name. `llava.PUBLISHED_LLMS` contains its LLM configuration.
LLAVA_BASE = "llava-1.5-7b-hf"

# `model_type` -> name of the base
BASE_NAMES = {"llava_onevision": "LLaVA-OneVision", "llava": "LLaVA-1.5", "onediff": "OneDiff"}

# Shapes of the bases' vision encoders. Configurations omit fields that have these default values.
ENCODERS = {
    "clip_vision_model": {"num_hidden_layers": 24, "hidden_size": 1024, "image_size": 336, "patch_size": 14},
    "siglip_vision_model": {"image_size": 384, "patch_size": 14, **SIGLIP_SO400M},
}


@dataclass(frozen=True)
class OneDiffSettings(Settings):
    """Settings of OneDiff.

    module: settings of the new Visual Delta Module (VDM), or null for the base without a module.
    lora: adapters of the LLM's linear layers. The paper does not use adapters (rank 0) and trains the LLM in full.
    rates: learning rate of each part; null, or no rate, freezes a part. The paper says twice that the vision encoder is
        frozen (section 4.2), and once that everything is trained (5.1). This project's profile freezes it.
    align: settings of the alignment, the paper's stage I (Coupled Sample Training), or null to start with stage II.
    """

    family: Literal["onediff"]
    module: VDMConfig | None


def classes() -> tuple[type[Model], type[Processor]]:
    """Return the model class and the processor class."""
    from transformers import AutoConfig

    from m3diff.models.onediff_model import OneDiffConfig, OneDiffForConditionalGeneration
    from m3diff.models.processing import OneDiffProcessor

    # AutoTokenizer uses the configuration's class to find the tokenizer in a folder
    AutoConfig.register(OneDiffConfig.model_type, OneDiffConfig, exist_ok=True)
    return OneDiffForConditionalGeneration, OneDiffProcessor


def faults(settings: OneDiffSettings, base: Mapping[str, Any] | None) -> list[Fault]:
    """Return the reasons why the settings do not fit the base, or an empty list if the base is not known yet."""
    if base is None:
        return []
    base_faults = llava_base_faults(settings, base, "vdm", BASE_NAMES)
    if base_faults:
        return base_faults
    vision_config = base.get("vision_config", {})
    encoder_type = vision_config.get("model_type")
    if encoder_type not in ENCODERS:
        return [Fault("models.other_encoder", value=encoder_type or "none")]
    cfg = settings.module
    encoder = ENCODERS[encoder_type] | vision_config
    module_faults = llava_layer_faults(settings, encoder["num_hidden_layers"])
    patches = (encoder["image_size"] // encoder["patch_size"]) ** 2
    if cfg is not None and cfg.pos_embed_scale and cfg.tokens != patches:
        fault = Fault("models.tokens_are_not_patches", field="module.tokens", value=cfg.tokens, expected=patches)
        module_faults.append(fault)
    return module_faults


def base_files(settings: OneDiffSettings, base: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the BERT files that a new module is initialised from, each with instructions on where to get it.

    A trained base already has a module and does not need these files.
    """
    is_trained = base is not None and "vdm" in base
    if settings.module is None or settings.module.start != "bert" or is_trained:
        return {}
    source = "copy it from bert-base-uncased, or set module.start to random"
    return {f"bert/{file}": source for file in ("config.json", "model.safetensors")}


# OneDiff has no contribution metrics, because its delta tokens do not change the features of the images
FAMILY = Family(
    settings=OneDiffSettings,
    parts=llava_parts("vdm"),
    lora_targets=LORA_TARGETS,
    classes=classes,
    faults=faults,
    unused_parameters=UNUSED_PARAMETERS,
    new_parts=("module",),
    whole_parts_without_adapters=("llm",),
    maps=MAPS_OF_MODEL,
    base_files=base_files,
    model_types=("onediff", "llava_onevision", "llava"),
)

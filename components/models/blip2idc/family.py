"""BLIP2IDC as a model family. Light to import: torch and transformers come with the first call.

BLIP-2 as it is: the two images, stacked into one picture, meet in the vision encoder's first layer, and low-rank
adapters of queries, keys and values in all three parts are all that trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3diff.models.blip2idc.settings import Blip2IDCSettings
from m3diff.models.family import Family, Settings, Term

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from m3diff.models.blip2idc.configuration import Blip2IDCConfig
    from m3diff.models.blip2idc.modeling import Blip2IDCForConditionalGeneration
    from m3diff.models.blip2idc.processing import Blip2IDCProcessor

PARTS = {
    "vision": ("vision_model.",),
    "module": ("qformer.", "query_tokens"),
    "projector": ("language_projection.",),
    "llm": ("language_model.",),
}

CROSSING = r"crossattention\.attention"
LORA_TARGETS = {
    "vision": r"vision_model\.encoder\.layers\.\d+\.self_attn\.qkv",
    "module": rf"qformer\.encoder\.layer\.\d+\.((attention\.attention|{CROSSING})\.(key|value)|{CROSSING}\.query)",
    "llm": r"language_model\.model\.(decoder\.)?layers\.\d+\.self_attn\.(q|k|v)_proj",
}
"""As the authors' code names them: queries, keys and values of all parts, but for the queries of the Q-Former's
self-attention. In the vision encoder the three are one linear."""

EVA = {"image_size": 224, "patch_size": 14}
"""The vision encoder of the published BLIP-2: what its configuration leaves out where it is the default."""


def build(config: Blip2IDCConfig) -> Blip2IDCForConditionalGeneration:
    from m3diff.models.blip2idc.modeling import Blip2IDCForConditionalGeneration

    return Blip2IDCForConditionalGeneration(config)


def load_base(
    folder: Path, settings: Blip2IDCSettings, dtype: torch.dtype, attn_implementation: str | dict[str, str]
) -> Blip2IDCForConditionalGeneration:
    from m3diff.models.blip2idc.modeling import Blip2IDCForConditionalGeneration

    return Blip2IDCForConditionalGeneration.from_pretrained(
        folder, dtype=dtype, attn_implementation=attn_implementation
    )


def load(folder: Path, dtype: torch.dtype, configuration: Path | None = None) -> Blip2IDCForConditionalGeneration:
    from m3diff.models.blip2idc.configuration import Blip2IDCConfig
    from m3diff.models.blip2idc.modeling import Blip2IDCForConditionalGeneration

    config = Blip2IDCConfig.on_base(str(configuration)) if configuration else None
    return Blip2IDCForConditionalGeneration.from_pretrained(folder, config=config, dtype=dtype)


def load_processor(folder: Path, config: Blip2IDCConfig | None = None) -> Blip2IDCProcessor:
    from m3diff.models.blip2idc.processing import Blip2IDCProcessor

    return Blip2IDCProcessor.from_pretrained(folder)


def fuse(model: Blip2IDCForConditionalGeneration, activation_checkpointing: str) -> None:
    """Fused adapters in all parts, and the kernels of a Qwen2 LLM. Raises ValueError for `selective` with another LLM:
    it is of these kernels."""
    from m3diff.models.fused import make_fused

    if found := checkpointing_faults(activation_checkpointing, model.config.to_dict()):
        raise ValueError(f"compute.activation_checkpointing: {found[0]}")
    make_fused(model, activation_checkpointing)


def generate(
    model: Blip2IDCForConditionalGeneration, inputs: Mapping[str, Tensor], saliency: bool, decoding: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    asked: dict[str, Any] = {**inputs, **decoding}
    tokens, maps = model.generate_with_maps(**asked) if saliency else (model.generate(**asked), None)
    return tokens[:, inputs["input_ids"].shape[1] :], maps


def planned_config(base: Path, settings: Blip2IDCSettings) -> Blip2IDCConfig:
    from m3diff.models.blip2idc.configuration import Blip2IDCConfig, opt_2_7b_config

    if (base / "config.json").is_file():
        return Blip2IDCConfig.on_base(str(base))
    return opt_2_7b_config()


def flops(config: Blip2IDCConfig, tokens: float, supervised: float, settings: Settings) -> list[Term]:
    from m3diff.models.blip2idc.flops import flops

    return flops(config, tokens, supervised, settings)


def image_tokens(config: Blip2IDCConfig) -> int:
    return config.num_query_tokens


def blank_images(config: Blip2IDCConfig, device: torch.device | str) -> dict[str, Tensor]:
    import torch

    side = config.vision_config.image_size
    return {"pixel_values": torch.zeros(1, 3, side, side, device=device)}


def faults(settings: Blip2IDCSettings, base: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with the base, in words; nothing where it is not known."""
    if base is None:
        return []
    kind, text = base.get("model_type", "blip-2"), base.get("text_config", {}).get("model_type", "opt")
    if kind != "blip-2":
        return [f"family blip2idc needs a BLIP-2 in train.base, which is a {kind}; name one there"]
    found = []
    if text == "t5":
        found.append("its base's LLM is a t5, an encoder with a decoder; take one with a decoder alone, as OPT")
    if base.get("image_token_index") is None:
        found.append(
            "its base has no image_token_index: a release from before BLIP-2's processor knew <image>; take a later one"
        )
    encoder = EVA | base.get("vision_config", {})
    if (rows := encoder["image_size"] // encoder["patch_size"]) % 2:
        found.append(f"its base's vision encoder has {rows} rows of patches, which two images cannot share alike")
    return found


def checkpointing_faults(activation_checkpointing: str, base: Mapping[str, Any] | None) -> list[str]:
    """Why the base's LLM cannot be recomputed so; the published one's where the base is not known."""
    kind = (base or {}).get("text_config", {}).get("model_type", "opt")
    if activation_checkpointing != "selective" or kind == "qwen2":
        return []
    return [f"selective recomputes the norms and products of a Qwen2 LLM, and this one is {kind}; write none or full"]


def augment(settings: Blip2IDCSettings, pair: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    from m3diff.models.blip2idc.augmentation import augmented

    return pair if settings.augment is None else augmented(settings.augment, pair, rng)


FAMILY = Family(
    settings=Blip2IDCSettings,
    parts=PARTS,
    lora_targets=LORA_TARGETS,
    frozen=(),
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
    augment=augment,
    checkpointing_faults=checkpointing_faults,
    prompt_tokens=1.0,
)
"""Its prompt is the token that BLIP-2 begins texts with, and no question."""

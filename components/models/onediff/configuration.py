"""OneDiff's configuration: that of the LLaVA-OneVision or LLaVA-1.5 underneath, with the VDM's fields under `vdm`."""

from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, LlavaConfig, LlavaOnevisionConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from m3diff.models.onediff.settings import VDMConfig, vdm_config

PAPER: dict[str, Any] = {}
"""Fields of the paper's VDM: every default of `VDMConfig`. None, everywhere, is no module."""

ARCHITECTURES = {
    LlavaOnevisionConfig.model_type: "LlavaOnevisionForConditionalGeneration",
    LlavaConfig.model_type: "LlavaForConditionalGeneration",
}
STRATEGY, NAME = "vision_feature_select_strategy", "vdm"


class OneDiffConfig(LlavaOnevisionConfig):
    """Configuration of OneDiff.

    Attributes:
        vdm: fields of `VDMConfig`, or None where there is no module and the model is the base.
        newline: whether each image ends with LLaVA-OneVision's newline; LLaVA-1.5 has none.
    """

    model_type = "onediff"

    vdm: dict | None = None
    newline: bool = True
    if TYPE_CHECKING:
        text_config: Any
        vision_config: Any
        vision_feature_layer: Any

    def to_dict(self) -> dict[str, Any]:
        """As it is written: LLaVA's own code refuses it with a module, for it knows no strategy called NAME, and loads
        it without."""
        values = super().to_dict()
        if self.vdm is None:
            kind = LlavaOnevisionConfig.model_type if self.newline else LlavaConfig.model_type
            return values | {"model_type": kind, "architectures": [ARCHITECTURES[kind]]}
        return values | {STRATEGY: NAME}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return super().from_dict(_as_computed(config_dict), **kwargs)

    @classmethod
    def on_base(cls, folder: str, vdm: dict | None) -> "OneDiffConfig":
        """The configuration of the LLaVA in `folder`, with a VDM of these fields, or without one."""
        found, _ = cls.get_config_dict(folder)
        return cls.on_fields(found, vdm)

    @classmethod
    def on_fields(cls, found: dict[str, Any], vdm: dict | None) -> "OneDiffConfig":
        """The same on the fields of a config.json."""
        if found.get("model_type") == LlavaConfig.model_type:
            found = LlavaConfig.from_dict(found).to_dict() | {"newline": False}
        values = {name: value for name, value in found.items() if name not in ("model_type", "architectures")}
        return cls(**_as_computed(values) | {"vdm": vdm})

    @classmethod
    def of_checkpoint(cls, folder: str) -> "OneDiffConfig":
        """The configuration that a trained model, or its adapters, was written with."""
        found, _ = cls.get_config_dict(folder)
        return cls.on_fields(found, found.get("vdm"))

    def vdm_config(self) -> VDMConfig | None:
        """Raises ValueError where a layer lies beyond the vision encoder, the positions want another number of tokens,
        or a field is unknown."""
        if self.vdm is None:
            return None
        cfg = vdm_config(self.vdm)
        layer, deepest = cfg.vision_feature_layers[-1], self.vision_config.num_hidden_layers
        if layer > deepest:
            raise ValueError(f"vdm: vision feature layer {layer} lies beyond the vision encoder's {deepest} layers")
        if cfg.pos_embed_scale and cfg.tokens != self.patches:
            raise ValueError(
                f"vdm: pos_embed_scale binds tokens to patches: set tokens to {self.patches}, not {cfg.tokens}"
            )
        return cfg

    @property
    def patches(self) -> int:
        """Patches of one image."""
        return (self.vision_config.image_size // self.vision_config.patch_size) ** 2

    def places(self) -> tuple[int, int]:
        """Visual tokens in the places of the image before and of the image after."""
        cfg, each = self.vdm_config(), self.patches + self.newline
        beside = cfg.tokens if cfg else 0
        after = cfg is not None and cfg.place == "after"
        return (each, each + beside) if after else (each + beside, each)


def _as_computed(values: dict[str, Any]) -> dict[str, Any]:
    """With a strategy that LLaVA-OneVision's own code knows, in the place of what `to_dict` writes for others."""
    return {name: value for name, value in values.items() if (name, value) != (STRATEGY, NAME)}


AutoConfig.register(OneDiffConfig.model_type, OneDiffConfig)


def llava_config(vdm: dict | None = PAPER) -> OneDiffConfig:
    """OneDiff at its true size: the shapes of llava-hf/llava-1.5-7b-hf, for plans."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32_064}
    return OneDiffConfig.on_fields({"model_type": LlavaConfig.model_type, "text_config": text}, vdm)


# The weights lie on disk under the names of LLaVA's first releases; OneDiff reads and writes the same names.
register_checkpoint_conversion_mapping(
    OneDiffConfig.model_type, get_checkpoint_conversion_mapping(LlavaOnevisionConfig.model_type), overwrite=True
)

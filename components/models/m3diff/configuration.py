"""M3Diff's configuration: LLaVA-OneVision's, with the fields of the MDP module under `mdp`."""

from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, LlavaOnevisionConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from m3diff.models.m3diff.settings import ModuleConfig, module_config

PAPER: dict[str, Any] = {}
"""Fields of the paper's MDP module: every default of `MDPConfig`. None, everywhere, is no module."""

LLAVA = "LlavaOnevisionForConditionalGeneration"
STRATEGY, NAME = "vision_feature_select_strategy", "mdp"


class M3DiffConfig(LlavaOnevisionConfig):
    """Configuration of M3Diff.

    Attributes:
        mdp: fields of `MDPConfig` or `DifferenceConfig`, or None where there is no module and the model is the base.
    """

    model_type = "m3diff"

    mdp: dict | None = None
    if TYPE_CHECKING:
        text_config: Any
        vision_config: Any

    def to_dict(self) -> dict[str, Any]:
        """As it is written: LLaVA-OneVision's own code refuses it with a module and loads it without.

        LLaVA-OneVision would take the weights and drop the module's, but it knows no strategy called NAME. Without a
        module it is told its own name, for by M3Diff's it does not find the head.
        """
        fields = super().to_dict()
        if self.mdp is None:
            return fields | {"model_type": LlavaOnevisionConfig.model_type, "architectures": [LLAVA]}
        return fields | {STRATEGY: NAME}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return super().from_dict(_as_computed(config_dict), **kwargs)

    @classmethod
    def on_base(cls, folder: str, mdp: dict | None) -> "M3DiffConfig":
        """The configuration of the LLaVA-OneVision in `folder`, with an MDP module of these fields, or without one."""
        found, _ = cls.get_config_dict(folder)
        fields = {name: value for name, value in found.items() if name not in ("model_type", "architectures")}
        return cls(**_as_computed(fields) | {"mdp": mdp})

    @classmethod
    def of_checkpoint(cls, folder: str) -> "M3DiffConfig":
        """The configuration that a trained model, or its adapters, was written with."""
        found, _ = cls.get_config_dict(folder)
        return cls.on_base(folder, found.get("mdp"))

    def mdp_config(self) -> ModuleConfig | None:
        """Raises ValueError where a layer lies beyond the vision encoder, or a field is unknown."""
        if self.mdp is None:
            return None
        cfg = module_config(self.mdp)
        layer, deepest = cfg.vision_feature_layers[-1], self.vision_config.num_hidden_layers
        if layer > deepest:
            raise ValueError(f"mdp: vision feature layer {layer} lies beyond the vision encoder's {deepest} layers")
        return cfg


def _as_computed(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what `to_dict` writes for others: the model computes with LLaVA-OneVision's own strategy."""
    return {name: value for name, value in fields.items() if (name, value) != (STRATEGY, NAME)}


AutoConfig.register("m3diff", M3DiffConfig)


def seven_b_config(mdp: dict | None = PAPER) -> M3DiffConfig:
    """M3Diff at its true size: the shapes of llava-hf/llava-onevision-qwen2-7b-ov-hf, for plans and benchmarks."""
    return _on_qwen2(
        mdp,
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    )


def half_b_config(mdp: dict | None = PAPER) -> M3DiffConfig:
    """The shapes of llava-hf/llava-onevision-qwen2-0.5b-ov-hf: the same vision encoder, a Qwen2 of 0.5 B parameters
    whose embeddings are its head's weights."""
    return _on_qwen2(
        mdp,
        vocab_size=152_000,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


def _on_qwen2(mdp: dict | None, **shapes: Any) -> M3DiffConfig:
    """LLaVA-OneVision's vision encoder and a Qwen2 of these shapes."""
    alike = {
        "model_type": "qwen2",
        "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "rms_norm_eps": 1e-6,
    }
    return M3DiffConfig(text_config=alike | shapes, mdp=mdp)  # type: ignore[call-arg]


# LLaVA-OneVision's weights lie on disk under the names of its first release; M3Diff reads and writes the same names.
register_checkpoint_conversion_mapping(
    M3DiffConfig.model_type, get_checkpoint_conversion_mapping(LlavaOnevisionConfig.model_type), overwrite=True
)

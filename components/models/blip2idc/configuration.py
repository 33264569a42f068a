"""BLIP2IDC's configuration: BLIP-2's own, of a base's folder or of the published shapes, without dropout."""

from typing import TYPE_CHECKING, Any

from transformers import Blip2Config

BLIP2 = "Blip2ForConditionalGeneration"
PUBLISHED = "Salesforce/blip2-opt-2.7b"
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "layerdrop")


class Blip2IDCConfig(Blip2Config):
    """Configuration of BLIP2IDC.

    Every dropout is 0, whatever the base says (0.1 in the Q-Former and OPT): packing captions behind one prefix is
    exact only so. Written, it is BLIP-2's: transformers alone reads what was trained as a BLIP-2.
    """

    if TYPE_CHECKING:
        text_config: Any
        vision_config: Any
        qformer_config: Any

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.qformer_config.hidden_dropout_prob = 0.0
        self.qformer_config.attention_probs_dropout_prob = 0.0
        for part in (self.text_config, self.vision_config):
            for name in DROPOUTS:
                if hasattr(part, name):
                    setattr(part, name, 0.0)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"architectures": [BLIP2]}

    @classmethod
    def on_base(cls, folder: str) -> "Blip2IDCConfig":
        """The configuration of the BLIP-2 in `folder`."""
        return cls.from_pretrained(folder)


def opt_2_7b_config() -> Blip2IDCConfig:
    """The shapes of Salesforce/blip2-opt-2.7b, for plans: transformers' defaults but for OPT-2.7B."""
    text = {
        "model_type": "opt",
        "vocab_size": 50_304,
        "hidden_size": 2560,
        "ffn_dim": 10_240,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "word_embed_proj_dim": 2560,
        "eos_token_id": 50_118,
    }
    config = Blip2IDCConfig(text_config=text, image_token_index=50_265)  # type: ignore[call-arg]
    config.name_or_path = PUBLISHED
    return config

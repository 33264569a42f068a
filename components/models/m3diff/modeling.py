"""M3Diff on transformers' LLaVA-OneVision: the MDP module stands between vision encoder and projector.

Shapes: B pairs, N patches per image, D the vision encoder's width; images come as before, after, before, after, ...
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from m3diff.models.llava import LlavaOfPairs, LlavaOfPairsForGeneration
from m3diff.models.m3diff.configuration import PAPER, M3DiffConfig
from m3diff.models.m3diff.difference import new_module


class M3DiffModel(LlavaOfPairs):
    """LLaVA-OneVision without its head; for pairs of images the MDP module works on the vision encoder's features."""

    config: M3DiffConfig

    def __init__(self, config: M3DiffConfig) -> None:
        super().__init__(config)
        self.mdp = new_module(config.mdp_config(), config.vision_config.hidden_size)

    def visual_tokens(self, pixel_values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """As of `LlavaOfPairs`: in each image's places its patches and the newline, [N + 1, W]."""
        projected = self.multi_modal_projector(self.perceive(pixel_values))
        newline = self.image_newline.to(projected.dtype).expand(len(projected), 1, -1)
        return projected, list(torch.cat([projected, newline], dim=1).unbind(0))

    def recorded_maps(self) -> AbstractContextManager[list[Tensor]]:
        return nullcontext([]) if self.mdp is None else self.mdp.recorded_maps()

    @property
    def maps_of_a_pass(self) -> int:  # type: ignore[override]
        return len(self.mdp.cfg.vision_feature_layers) if self.mdp is not None else 0

    def perceive(self, pixel_values: Tensor) -> Tensor:
        """The vision encoder's features after equation (8), [images, N, D], images interleaved as they came; without
        an MDP module, the encoder's own."""
        states = self.vision_hidden_states(pixel_values)
        layer = self.config.vision_feature_layer
        assert isinstance(layer, int), f"one feature layer, not {layer}"
        last = states[layer]
        if self.mdp is None:
            return last
        levels = [states[layer] for layer in self.mdp.cfg.vision_feature_layers]
        fused = self.mdp([f[0::2] for f in levels], [f[1::2] for f in levels], last[0::2], last[1::2])
        return torch.stack(fused, dim=1).flatten(0, 1)


class M3DiffForConditionalGeneration(LlavaOfPairsForGeneration):
    """M3Diff with its language-model head: two images and a question in, what changed out."""

    config: M3DiffConfig
    MODEL = M3DiffModel
    NEW = "model.mdp."

    @classmethod
    def from_pretrained(  # type: ignore[override]  # M3Diff's own configuration and arguments
        cls,
        pretrained_model_name_or_path: str | Path,
        *args: Any,
        config: M3DiffConfig | None = None,
        mdp: dict | None = PAPER,
        **kwargs: Any,
    ) -> Any:
        """Load M3Diff, or a LLaVA-OneVision to which a new MDP module is added, and log which of the two it was.

        Args:
            mdp: fields of the module new to a LLaVA-OneVision directory; the paper's by default, None for none.
        Raises ValueError where weights other than the new module's are missing, or none match. Safetensors only.
        """
        name = str(pretrained_model_name_or_path)
        if config is None:
            found, _ = M3DiffConfig.get_config_dict(name)
            config = M3DiffConfig.on_base(name, found.get("mdp") if "mdp" in found else mdp)
        return cls.load_weights(name, *args, config=config, **kwargs)


AutoModelForImageTextToText.register(M3DiffConfig, M3DiffForConditionalGeneration)

"""OneDiff on transformers' LLaVA: the Visual Delta Module stands beside the vision encoder, and its tokens beside those
of the images.

Shapes: B pairs, N patches per image, D the vision encoder's width, W the LLM's, T delta tokens; images come as before,
after, before, after, ...
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from m3diff.models.llava import LlavaOfPairs, LlavaOfPairsForGeneration
from m3diff.models.onediff.configuration import PAPER, OneDiffConfig
from m3diff.models.onediff.vdm import VisualDeltaModule


class OneDiffModel(LlavaOfPairs):
    """LLaVA without its head; for pairs of images with the delta tokens of the VDM."""

    config: OneDiffConfig

    def __init__(self, config: OneDiffConfig) -> None:
        super().__init__(config)
        if not config.newline:
            del self.image_newline
        cfg, widths = config.vdm_config(), (config.vision_config.hidden_size, config.text_config.hidden_size)
        self.vdm = None if cfg is None else VisualDeltaModule(cfg, *widths)

    def visual_tokens(self, pixel_values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """As of `LlavaOfPairs`: in the images' places their patches, LLaVA-OneVision's newline, and beside one of them
        the delta tokens."""
        states = self.vision_hidden_states(pixel_values)
        projected = self.multi_modal_projector(states[self.config.vision_feature_layer])
        images = projected
        if self.config.newline:
            newline = self.image_newline.to(projected.dtype).expand(len(projected), 1, -1)
            images = torch.cat([projected, newline], dim=1)
        if self.vdm is None:
            return projected, list(images.unbind(0))
        return projected, beside(images[0::2], images[1::2], self.delta_tokens(states), self.vdm.cfg.place)

    def delta_tokens(self, states: list[Tensor]) -> Tensor:
        """Equation (4), [B, T, W], from the hidden states of the vision encoder."""
        assert self.vdm is not None, "a model without a VDM has no delta tokens"
        read = [states[layer] for layer in self.vdm.cfg.vision_feature_layers]
        delta = self.vdm([f[0::2] for f in read], [f[1::2] for f in read])
        return self.multi_modal_projector(delta) if self.vdm.cfg.projection == "shared" else delta

    def recorded_maps(self) -> AbstractContextManager[list[Tensor]]:
        return nullcontext([]) if self.vdm is None else self.vdm.recorded_maps()

    @property
    def maps_of_a_pass(self) -> int:  # type: ignore[override]
        return self.vdm.cfg.reading_layers if self.vdm is not None else 0


def beside(before_BNW: Tensor, after_BNW: Tensor, delta_BTW: Tensor, place: str) -> list[Tensor]:
    """What stands in the places of each image, before and after by turns, with the delta tokens at `place`."""
    delta = delta_BTW.to(before_BNW.dtype)
    first = {"before": [delta, before_BNW], "between": [before_BNW, delta], "after": [before_BNW]}[place]
    second = [after_BNW, delta] if place == "after" else [after_BNW]
    both = zip(torch.cat(first, dim=1), torch.cat(second, dim=1), strict=True)
    return [tokens for pair in both for tokens in pair]


class OneDiffForConditionalGeneration(LlavaOfPairsForGeneration):
    """OneDiff with its language-model head: two images and a question in, what changed out."""

    config: OneDiffConfig
    MODEL = OneDiffModel
    BASES = "LLaVA-OneVision or LLaVA-1.5"
    NEW = "model.vdm."

    @classmethod
    def from_pretrained(  # type: ignore[override]  # OneDiff's own configuration and arguments
        cls,
        pretrained_model_name_or_path: str | Path,
        *args: Any,
        config: OneDiffConfig | None = None,
        vdm: dict | None = PAPER,
        **kwargs: Any,
    ) -> Any:
        """Load OneDiff, or a LLaVA-OneVision or LLaVA-1.5 to which a new VDM is added, and log which of them it was.

        Args:
            config: of a trained OneDiff; without it the folder's own.
            vdm: fields of the module new to a LLaVA directory; the paper's by default, None for none. Where it begins
                as a BERT, this lies in the folder `bert` of the directory.
        Raises ValueError where weights other than the new module's are missing, none match, or there is no such BERT.
        Safetensors only.
        """
        name = str(pretrained_model_name_or_path)
        new = False
        if config is None:
            found, _ = OneDiffConfig.get_config_dict(name)
            new = "vdm" not in found
            config = OneDiffConfig.on_fields(found, vdm if new else found["vdm"])
        loaded = cls.load_weights(name, *args, config=config, **kwargs)
        if new and config.vdm is not None and config.vdm_config().start == "bert":  # type: ignore[union-attr]
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            model.model.vdm.start_as_bert(Path(name) / "bert")
        return loaded


AutoModelForImageTextToText.register(OneDiffConfig, OneDiffForConditionalGeneration)

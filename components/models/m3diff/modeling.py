"""M3Diff on transformers' LLaVA-OneVision: the MDP module stands between vision encoder and projector.

Shapes: B pairs, N patches per image, D the vision encoder's width; images come as before, after, before, after, ...
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForImageTextToText,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionModel,
)
from transformers import logging as transformers_logging
from transformers.modeling_outputs import BaseModelOutputWithPooling

from components.models.fused import trims
from components.models.m3diff.configuration import PAPER, M3DiffConfig
from components.models.m3diff.difference import new_module
from components.models.m3diff.mdp import Projection

logger = logging.getLogger(__name__)


class NewModuleInit:
    """The MDP module's linears initialise themselves; transformers asks whichever model holds them."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Projection):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]


class M3DiffModel(NewModuleInit, LlavaOnevisionModel):
    """LLaVA-OneVision without its head; for pairs of images the MDP module works on the vision encoder's features."""

    config: M3DiffConfig

    def __init__(self, config: M3DiffConfig) -> None:
        super().__init__(config)
        self.mdp = new_module(config.mdp_config(), config.vision_config.hidden_size)

    def get_image_features(
        self,
        pixel_values: Tensor,
        image_sizes: Tensor | None = None,
        batch_num_images: Tensor | list[int] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Visual tokens of each image.

        Args:
            pixel_values: [images, 3, H, W] or [images, 1, 3, H, W].
            batch_num_images: images in each sample; where all are 2, the images are pairs.
        Returns: `pooler_output` holds one [N + 1, D_llm] tensor per image (its patches and the newline).
        """
        if not _are_pairs(batch_num_images):
            return super().get_image_features(
                pixel_values, image_sizes=image_sizes, batch_num_images=batch_num_images, **kwargs
            )
        projected = self.multi_modal_projector(self.perceive(pixel_values))
        newline = self.image_newline.to(projected.dtype).expand(len(projected), 1, -1)
        tokens = torch.cat([projected, newline], dim=1)
        return BaseModelOutputWithPooling(last_hidden_state=projected, pooler_output=list(tokens.unbind(0)))  # type: ignore[arg-type]

    def get_placeholder_mask(
        self, input_ids: Any, inputs_embeds: Tensor, image_features: Any = None, video_features: Any = None
    ) -> Any:
        """The places of the visual tokens, [B, T, 1]. While training their number is that of the prompt, by the
        processor: counting them again would wait for the GPU."""
        if not self.training or input_ids is None or video_features is not None:
            return super().get_placeholder_mask(input_ids, inputs_embeds, image_features, video_features)
        return (input_ids == self.config.image_token_id)[..., None], None

    def vision_hidden_states(self, pixel_values: Tensor) -> list[Tensor]:
        """The vision encoder's hidden states: the embedding and each layer's output, every one [images, N, D]."""
        pixels = pixel_values.flatten(0, 1) if pixel_values.dim() == 5 else pixel_values
        states = [self.vision_tower.embeddings(pixels)]
        for layer in self.vision_tower.encoder.layers:
            states.append(layer(states[-1], attention_mask=None))
        return states

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


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' table of missing keys: `from_pretrained` above judges them itself."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _are_pairs(batch_num_images: Tensor | list[int] | None) -> bool:
    counts = batch_num_images.tolist() if isinstance(batch_num_images, Tensor) else batch_num_images  # one GPU wait
    return counts is not None and all(count == 2 for count in counts)


class M3DiffForConditionalGeneration(NewModuleInit, LlavaOnevisionForConditionalGeneration):
    """M3Diff with its language-model head: two images and a question in, what changed out."""

    config: M3DiffConfig

    def __init__(self, config: M3DiffConfig) -> None:
        super(LlavaOnevisionForConditionalGeneration, self).__init__(config)  # builds no second LLaVA-OneVision
        self.model = M3DiffModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

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
        kwargs["use_safetensors"] = True
        wants_info = kwargs.pop("output_loading_info", False)
        with _quiet():
            loaded: Any = super().from_pretrained(name, *args, config=config, output_loading_info=True, **kwargs)
        model, info = loaded
        new = sorted(key for key in info["missing_keys"] if key.startswith("model.mdp."))
        lost = sorted(set(info["missing_keys"]) - set(new)) + sorted(str(key) for key in info["mismatched_keys"])
        if lost:
            raise ValueError(
                f"{name}: weights missing or of another shape, no LLaVA-OneVision of this configuration: {lost[:5]}"
            )
        parameters = sum(p.numel() for p in model.parameters())
        logger.info("%s: %s parameters loaded, %d tensors of the MDP module new", name, f"{parameters:,}", len(new))
        return (model, info) if wants_info else model

    def _supports_mm_encoder_outputs(self) -> bool:
        """`generate` encodes the images within `forward`, where ZeRO 3 has the weights together."""
        return False

    @wraps(LlavaOnevisionForConditionalGeneration.forward)  # `generate` reads the arguments off the signature
    def forward(  # type: ignore[override]
        self, *args: Any, logits_to_keep: int | Tensor = 0, **kwargs: Any
    ) -> Any:
        """As LLaVA-OneVision's. While training with a mask of the logits to keep, [B, T] bool, the LLM's last layer and
        head work on those tokens alone; the logits are [tokens kept, vocabulary]."""
        if not self.training or isinstance(logits_to_keep, int) or not trims(self.model.language_model):
            return super().forward(*args, logits_to_keep=logits_to_keep, **kwargs)
        kept = logits_to_keep.flatten().nonzero().flatten().to(self.lm_head.weight.device, non_blocking=True)
        output = super().forward(*args, kept=kept, **kwargs)
        output.logits = output.logits.flatten(0, 1)
        return output

    def generate_with_maps(self, *, pixel_values: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """`generate`, and `saliency_map` from the same pass of the vision encoder and the MDP module."""
        with self._recorded_maps() as maps:
            tokens: Any = self.generate(pixel_values=pixel_values, **inputs)  # type: ignore[misc]
        return tokens, self._mean_map(maps, pixel_values)

    @torch.no_grad()
    def saliency_map(self, pixel_values: Tensor) -> Tensor:
        """Where the model looks for the difference of each pair, averaged over the levels: [B, rows, columns] over the
        patch grid, sums to 1; everywhere alike without an MDP module.

        Args:
            pixel_values: [2 B, 3, H, W]: before, after, before, after, ...
        """
        with self._recorded_maps() as maps:
            self.model.perceive(pixel_values)
        return self._mean_map(maps, pixel_values)

    def _recorded_maps(self) -> AbstractContextManager[list[Tensor]]:
        return nullcontext([]) if self.model.mdp is None else self.model.mdp.recorded_maps()

    def _mean_map(self, maps: list[Tensor], pixel_values: Tensor) -> Tensor:
        side = self.config.vision_config.image_size // self.config.vision_config.patch_size
        if self.model.mdp is None:
            return torch.full((len(pixel_values) // 2, side, side), 1 / side**2, device=pixel_values.device)
        levels = len(self.model.mdp.cfg.vision_feature_layers)
        assert len(maps) == levels, f"{len(maps)} maps of {levels} levels: the encoder runs once"
        return torch.stack(maps).mean(dim=0).unflatten(1, (side, side))


AutoModelForImageTextToText.register(M3DiffConfig, M3DiffForConditionalGeneration)

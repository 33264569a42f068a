"""LLaVA on pairs of images, transformers' LLaVA-OneVision underneath: what families on LLaVA's parts have in common.

Shapes: B pairs, N patches per image, D the vision encoder's width, W the LLM's; images come as before, after, before,
after, ...
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlavaOnevisionForConditionalGeneration, LlavaOnevisionModel
from transformers import logging as transformers_logging
from transformers.modeling_outputs import BaseModelOutputWithPooling

from m3diff.models.fused import trims
from m3diff.models.layers import OwnStart, Projection, with_visual_tokens

logger = logging.getLogger(__name__)


class NewModuleInit:
    """A new module's parts initialise themselves; transformers asks whichever model holds them."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Projection | OwnStart):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]


class LlavaOfPairs(NewModuleInit, LlavaOnevisionModel):
    """LLaVA-OneVision without its head. A family says what the LLM sees of a pair, and where its module looks.

    Attributes:
        maps_of_a_pass: how many maps `recorded_maps` gets of one pass.
    """

    config: Any
    maps_of_a_pass: Any

    def visual_tokens(self, pixel_values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The projected features of the images, [2 B, N, W], and what stands in each image's places, [places, W]
        each."""
        raise NotImplementedError

    def recorded_maps(self) -> AbstractContextManager[list[Tensor]]:
        """Within it, each pass adds where its module looks for the difference, maps of [B, N] that sum to 1; nothing
        without a module."""
        raise NotImplementedError

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
        Returns: `pooler_output` holds a tensor per image, [places, W].
        """
        if not _are_pairs(batch_num_images):
            return super().get_image_features(
                pixel_values, image_sizes=image_sizes, batch_num_images=batch_num_images, **kwargs
            )
        projected, tokens = self.visual_tokens(pixel_values)
        return BaseModelOutputWithPooling(last_hidden_state=projected, pooler_output=tokens)  # type: ignore[arg-type]

    @wraps(LlavaOnevisionModel.forward)  # transformers reads the arguments off the signature
    def forward(  # type: ignore[override]
        self, input_ids: Any = None, pixel_values: Any = None, **kwargs: Any
    ) -> Any:
        """As LLaVA-OneVision's. With `tokens`, the ids of `input_ids` on the CPU, nothing waits for a GPU."""
        tokens = kwargs.pop("tokens", None)
        if tokens is None:
            return super().forward(input_ids, pixel_values, **kwargs)
        found = self.get_image_features(pixel_values, batch_num_images=kwargs.pop("batch_num_images"))
        visual: Any = torch.cat(list(found.pooler_output))  # type: ignore[arg-type]
        embeds = self.get_input_embeddings()(input_ids)
        embeds = with_visual_tokens(embeds, visual, tokens, self.config.image_token_id)
        return super().forward(**kwargs | {"inputs_embeds": embeds})

    def get_placeholder_mask(
        self, input_ids: Any, inputs_embeds: Tensor, image_features: Any = None, video_features: Any = None
    ) -> Any:
        """The places of the visual tokens, [B, T, 1]. While training their number is that of the prompt, by the
        processor: counting them again would wait for the GPU."""
        if not self.training or input_ids is None or video_features is not None:
            return super().get_placeholder_mask(input_ids, inputs_embeds, image_features, video_features)
        return (input_ids == self.config.image_token_id)[..., None], None

    def vision_hidden_states(self, pixel_values: Tensor) -> list[Tensor]:
        """The vision encoder's hidden states: the embedding and each layer's output, every one [images, N, D]. A CLIP
        has a norm before its first layer, and a class token, which is left out of each."""
        encoder: Any = self.vision_tower
        is_clip = hasattr(encoder, "pre_layrnorm")
        pixels = pixel_values.flatten(0, 1) if pixel_values.dim() == 5 else pixel_values
        states = [encoder.embeddings(pixels)]
        if is_clip:
            states = [encoder.pre_layrnorm(states[0])]
        for layer in encoder.encoder.layers:
            states.append(layer(states[-1], attention_mask=None))
        return [state[:, 1:] for state in states] if is_clip else states


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' table of missing keys: `from_pretrained` below judges them itself."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _are_pairs(batch_num_images: Tensor | list[int] | None) -> bool:
    counts = batch_num_images.tolist() if isinstance(batch_num_images, Tensor) else batch_num_images  # one GPU wait
    return counts is not None and all(count == 2 for count in counts)


class LlavaOfPairsForGeneration(NewModuleInit, LlavaOnevisionForConditionalGeneration):
    """The same with its language-model head: two images and a question in, what changed out.

    Attributes:
        MODEL: the family's class of the model without its head.
        BASES: the models that it is built on, in words.
        NEW: prefix of the names of its new module's weights.
    """

    config: Any
    MODEL: type[LlavaOfPairs] = LlavaOfPairs
    BASES = "LLaVA-OneVision"
    NEW = ""

    def __init__(self, config: Any) -> None:
        super(LlavaOnevisionForConditionalGeneration, self).__init__(config)  # builds no second LLaVA-OneVision
        self.model = self.MODEL(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def load_weights(cls, name: str, *args: Any, **kwargs: Any) -> Any:
        """transformers' `from_pretrained` of a folder in which a new module's weights may be missing; logs whether they
        are.

        Raises ValueError where other weights are missing, or none match. Safetensors only.
        """
        kwargs["use_safetensors"] = True
        wants_info = kwargs.pop("output_loading_info", False)
        with _quiet():
            loaded: Any = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        made = sorted(key for key in info["missing_keys"] if key.startswith(cls.NEW))
        lost = sorted(set(info["missing_keys"]) - set(made)) + sorted(str(key) for key in info["mismatched_keys"])
        if lost:
            raise ValueError(
                f"{name}: weights missing or of another shape, no {cls.BASES} of this configuration: {lost[:5]}"
            )
        parameters = sum(p.numel() for p in model.parameters())
        logger.info("%s: %s parameters loaded, %d tensors of the new module", name, f"{parameters:,}", len(made))
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
        """`generate`, and `saliency_map` from the same pass of the vision encoder and the module."""
        with self.model.recorded_maps() as maps:
            tokens: Any = self.generate(pixel_values=pixel_values, **inputs)  # type: ignore[misc]
        return tokens, self._mean_map(maps, pixel_values)

    @torch.no_grad()
    def saliency_map(self, pixel_values: Tensor) -> Tensor:
        """Where the model looks for the difference of each pair, averaged over its maps: [B, rows, columns] over the
        patch grid, sums to 1; everywhere alike without a module.

        Args:
            pixel_values: [2 B, 3, H, W]: before, after, before, after, ...
        """
        with self.model.recorded_maps() as maps:
            self.model.visual_tokens(pixel_values)
        return self._mean_map(maps, pixel_values)

    def _mean_map(self, maps: list[Tensor], pixel_values: Tensor) -> Tensor:
        side = self.config.vision_config.image_size // self.config.vision_config.patch_size
        pairs = len(pixel_values) // 2
        if not maps:
            return torch.full((pairs, side, side), 1 / side**2, device=pixel_values.device)
        assert len(maps) == self.model.maps_of_a_pass, f"{len(maps)} maps: the encoder runs once"
        return torch.stack(maps).mean(dim=0).unflatten(1, (side, side))

"""BLIP2IDC on transformers' BLIP-2, whose modules, weights and numbers it has; it is asked as this project trains.

One picture holds both images of a pair, before on top. Shapes: B pairs, N patches of a picture and its class token, Q
queries, T tokens, D the LLM's width.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Blip2ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling

from m3diff.models.blip2idc.configuration import Blip2IDCConfig
from m3diff.models.fused import trims
from m3diff.models.layers import with_visual_tokens

logger = logging.getLogger(__name__)


class Blip2IDCForConditionalGeneration(Blip2ForConditionalGeneration):
    """BLIP-2: a picture of two images in, what changed out. The LLM is a decoder: OPT, Qwen2, Llama."""

    config: Blip2IDCConfig

    @classmethod
    def from_pretrained(  # type: ignore[override]  # a directory alone
        cls, folder: str | Path, *, config: Blip2IDCConfig | None = None, **kwargs: Any
    ) -> Any:
        """Load a BLIP-2 directory, safetensors only. Raises ValueError where weights are missing or of another
        shape."""
        config = config or Blip2IDCConfig.on_base(str(folder))
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
        loaded: Any = super().from_pretrained(str(folder), config=config, **kwargs)
        model, info = loaded
        if lost := sorted(str(key) for key in [*info["missing_keys"], *info["mismatched_keys"]]):
            raise ValueError(f"{folder}: weights missing or of another shape than its config.json says: {lost[:5]}")
        logger.info("%s: %s parameters loaded", folder, f"{sum(p.numel() for p in model.parameters()):,}")
        return model

    def get_image_features(  # type: ignore[override]  # without BLIP-2's other outputs
        self, pixel_values: Tensor, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """Visual tokens of each picture: `pooler_output` is [B, Q, D].

        As BLIP-2's own, but that the queries see every patch without a mask of ones: reading it would wait for a GPU.
        """
        patches = self.vision_model(pixel_values=pixel_values).last_hidden_state
        queries = self.query_tokens.expand(len(patches), -1, -1)
        read = self.qformer(query_embeds=queries, encoder_hidden_states=patches).last_hidden_state
        projected = self.language_projection(read.to(patches.dtype))
        return BaseModelOutputWithPooling(last_hidden_state=patches, pooler_output=projected)

    def forward(  # type: ignore[override]  # what this project asks of it
        self,
        *,
        pixel_values: Tensor,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        logits_to_keep: int | Tensor = 0,
        tokens: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """What BLIP-2 answers, [B, T, vocabulary]; without `input_ids` the visual tokens alone.

        Args:
            pixel_values: [B, 3, side, side].
            input_ids: [B, T], or [1, T] of B sequences end to end; each with Q places of its picture.
            logits_to_keep: or a mask of the logits to keep, [1, T] bool: they are [tokens kept, vocabulary] then.
            tokens: the ids of `input_ids` on the CPU: with them nothing waits for a GPU.
        """
        features = self.get_image_features(pixel_values)
        if input_ids is None:
            return features
        embeds = self.embeds(input_ids, features.pooler_output, tokens)
        asked = {"inputs_embeds": embeds, "attention_mask": attention_mask}
        if isinstance(logits_to_keep, int):
            return self.language_model(**asked, logits_to_keep=logits_to_keep, **kwargs)
        places = logits_to_keep.flatten().nonzero().flatten().to(pixel_values.device, non_blocking=True)
        trimmed = self.training and trims(decoder_of(self))
        output = self.language_model(**asked, **{"kept" if trimmed else "logits_to_keep": places}, **kwargs)
        output.logits = output.logits.flatten(0, 1)
        return output

    def embeds(self, input_ids: Tensor, visual: Any, tokens: Tensor | None = None) -> Tensor:
        """The LLM's inputs [., T, D]: embeddings of the tokens, with the visual tokens [B, Q, D] at their places."""
        embeddings = self.get_input_embeddings()(input_ids)
        if tokens is not None:
            return with_visual_tokens(embeddings, visual.flatten(0, 1), tokens, self.config.image_token_index)
        places: Tensor = input_ids == self.config.image_token_index  # type: ignore[assignment]
        return embeddings.masked_scatter(places[..., None], visual.to(embeddings.dtype))

    @torch.no_grad()
    def generate(  # type: ignore[override]  # as above
        self, *, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor, **decoding: Any
    ) -> Tensor:
        """Tokens of the prompts and of what the LLM answers, [B, tokens], as BLIP-2's own `generate` gives them. The
        pictures are encoded within `forward`, where ZeRO 3 has the queries together."""
        visual = self(pixel_values=pixel_values).pooler_output
        return self.language_model.generate(
            input_ids=input_ids,
            inputs_embeds=self.embeds(input_ids, visual),
            attention_mask=attention_mask,
            **decoding,
        )

    def generate_with_maps(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        """`generate`, and `saliency_map` from the same pass of vision encoder and Q-Former."""
        with self.recorded_attention() as recorded:
            tokens = self.generate(**inputs)
        return tokens, self.mean_map(recorded)

    @torch.no_grad()
    def saliency_map(self, pixel_values: Tensor) -> Tensor:
        """What the queries read of each pair: [B, rows, columns] over the patches of one image, sums to 1.

        The share of its attention that the Q-Former gives to each patch, the mean over queries, heads and layers with
        cross-attention, the class token left out; a place's two patches, of before and after, added up. The picture is
        two images high, so an image has half the rows of the patch grid. It says where the model reads, changed or not:
        BLIP-2 has no place where the images are compared.
        """
        with self.recorded_attention() as recorded:
            self(pixel_values=pixel_values)
        return self.mean_map(recorded)

    @contextmanager
    def recorded_attention(self) -> Iterator[list[Tensor]]:
        """Within it, each cross-attention of the Q-Former adds what its queries give to each patch, [B, N]."""
        recorded: list[Tensor] = []

        def add(attention: Any, _: Any, inputs: dict[str, Any], result: Any) -> None:
            recorded.append(patch_attention(attention, inputs["hidden_states"], inputs["encoder_hidden_states"]))

        layers: Any = self.qformer.encoder.layer
        hooks = [
            layer.crossattention.attention.register_forward_hook(add, with_kwargs=True)
            for layer in layers
            if layer.has_cross_attention
        ]
        try:
            yield recorded
        finally:
            for hook in hooks:
                hook.remove()

    def mean_map(self, recorded: list[Tensor]) -> Tensor:
        side = self.config.vision_config.image_size // self.config.vision_config.patch_size
        patches = torch.stack(recorded).mean(dim=0)[:, 1:].unflatten(1, (2, side // 2, side))
        return patches.sum(dim=1) / patches.sum(dim=(1, 2, 3))[:, None, None]


def patch_attention(attention: Any, queries: Tensor, patches: Tensor) -> Tensor:
    """Softmax of queries and keys, the mean over heads and queries: [B, Q, .] and [B, N, .] to [B, N] in fp32."""

    def heads(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (attention.num_attention_heads, -1)).transpose(1, 2)

    scores = heads(attention.query(queries)) @ heads(attention.key(patches)).transpose(-1, -2)
    return (scores.float() * attention.scaling).softmax(dim=-1).mean(dim=(1, 2))


def decoder_of(model: Any) -> Any:
    """The LLM without its head, which has the `layers`; OPT's stand a level deeper."""
    llm = model.language_model.model
    return llm.decoder if hasattr(llm, "decoder") else llm

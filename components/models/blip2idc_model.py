"""BLIP2IDC on transformers' BLIP-2, whose modules, weights and numbers it has: configuration, augmentation of pairs,
processor and model.

One picture holds both images of a pair, before on top. The authors resize the image before to the size of the one
after (bicubic), stack them, and stretch the stack to the square of BLIP-2. Here each image is stretched to half of the
square by itself and then stacked, so that an image is prepared once, whatever it is paired with. Where both have one
size this is the same picture but for the rows of the square that the bicubic filter mixes over the seam: two on each
side where the images are made smaller, side / height where they are made larger. Where their sizes differ, the authors
resize the one before twice, which blurs it a little.

The prompt is the places of the queries and the token that BLIP-2 begins texts with: the authors' code throws its
question away, and so does this, whatever is asked. A text ends with the end token of the LLM's configuration: with OPT
the line break (50118) that BLIP-2 was pre-trained to end with and its generation stops at, not OPT's </s>.

Shapes: B pairs, N patches of a picture and its class token, Q queries, T tokens, D the LLM's width.
"""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, Blip2Config, Blip2ForConditionalGeneration, Blip2Processor

from m3diff.models.layers import recorded, trims, with_visual_tokens
from m3diff.models.processing import NormalisedImages, PairProcessor

if TYPE_CHECKING:
    from PIL import Image

BLIP2, PUBLISHED = "Blip2ForConditionalGeneration", "Salesforce/blip2-opt-2.7b"
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
    def on_base(cls, folder: str, module: None) -> Blip2IDCConfig:
        """The configuration of the BLIP-2 in `folder`."""
        return cls.from_pretrained(folder)

    @classmethod
    def published(cls, name: str, module: None) -> Blip2IDCConfig:
        """The shapes of PUBLISHED, for plans: transformers' defaults but for OPT-2.7B."""
        text = {
            "model_type": "opt",
            "vocab_size": 50_304,
            "hidden_size": 2560,
            "ffn_dim": 10_240,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "word_embed_proj_dim": 2560,
        }
        config = cls(text_config=text, image_token_index=50_265)  # type: ignore[call-arg]
        config.name_or_path = PUBLISHED
        return config

    @property
    def image_tokens(self) -> int:
        """Tokens of a pair that the LLM sees."""
        return self.num_query_tokens


def augmented(augment: Any, pair: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A pair of prepared images, uint8 [2, rows, columns, 3], as it trains: blurred and compressed as a JPEG.

    Both work on the stacked picture, as the authors' blur does, so that both images of a pair are changed alike and no
    difference is made between them. Which pairs, and how much, follows from the random numbers.
    """
    is_blurred, is_compressed = rng.random(2) < (augment.blur, augment.jpeg)
    worst, best = augment.quality
    sigma, quality = rng.uniform(*augment.sigma), int(rng.integers(worst, best, endpoint=True))
    picture = pair.reshape(-1, *pair.shape[2:])
    if is_blurred:
        picture = blurred(picture, sigma)
    if is_compressed:
        picture = compressed(picture, quality)
    return picture.reshape(pair.shape)


def blurred(picture: np.ndarray, sigma: float) -> np.ndarray:
    """uint8 [rows, columns, 3] through a Gaussian of 3 x 3 pixels, mirrored at the edges."""
    beside = np.exp(-0.5 / sigma**2)
    middle, beside = 1 / (1 + 2 * beside), beside / (1 + 2 * beside)
    framed = np.pad(picture.astype(np.float64), [(1, 1), (1, 1), (0, 0)], mode="reflect")
    rows = middle * framed[1:-1] + beside * (framed[:-2] + framed[2:])
    return np.rint(middle * rows[:, 1:-1] + beside * (rows[:, :-2] + rows[:, 2:])).astype(np.uint8)


def compressed(picture: np.ndarray, quality: int) -> np.ndarray:
    """uint8 [rows, columns, 3] as a JPEG file of this quality gives it back."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file, formats=["JPEG"]).convert("RGB"))


class Blip2IDCImageProcessor(NormalisedImages):
    """Stretch, stack, normalise; read and written as BLIP-2's own.

    Args:
        size: {"height": px, "width": px}, equal and even.
        image_mean, image_std: per RGB channel, in [0, 1].
    """

    def __init__(self, size: dict[str, int], image_mean: list[float], image_std: list[float], **kwargs: Any) -> None:
        super().__init__()
        self.side = size["height"]
        if size["width"] != self.side or self.side % 2:
            raise ValueError(f"preprocessor_config.json: size must be a square of an even side, found {size}")
        self.image_mean, self.image_std = image_mean, image_std

    def to_dict(self) -> dict[str, Any]:
        """The file of BLIP-2's own processor, which would resize a stacked picture to the same square."""
        return {
            "image_processor_type": "BlipImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"height": self.side, "width": self.side},
            "resample": 3,  # bicubic
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
        }

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """The image as half of the square: [side / 2, side, 3] uint8."""
        from PIL import Image

        return np.asarray(image.convert("RGB").resize((self.side, self.side // 2), Image.Resampling.BICUBIC))


class Blip2IDCProcessor(PairProcessor):
    """Pairs of images to model inputs, texts to tokens and back."""

    def __init__(self, image_processor: Blip2IDCImageProcessor, tokenizer: Any, config: Blip2IDCConfig) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.queries = config.num_query_tokens
        self.start_id = first_of(config.text_config.bos_token_id, tokenizer.bos_token_id)
        self.end_id = first_of(config.text_config.eos_token_id, tokenizer.eos_token_id)
        place: Any = config.image_token_index
        self.prompt: tuple[int, ...] = (place,) * self.queries + (self.start_id,)

    @classmethod
    def of_folder(cls, folder: str, config: Blip2IDCConfig) -> Blip2IDCProcessor:
        """Load from the folder of a BLIP-2, trained or not."""
        return cls(Blip2IDCImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), config)

    def save_pretrained(self, folder: str | Path) -> None:
        """Written as BLIP-2's processor, which transformers loads by itself."""
        Blip2Processor(self.image_processor, self.tokenizer, num_query_tokens=self.queries).save_pretrained(folder)

    def encode_prompt(self, question: str) -> tuple[int, ...]:
        """The same for every question: the places of the queries and the start token."""
        return self.prompt

    def image_inputs(self, prepared: Tensor) -> dict[str, Tensor]:
        """`pixel_values` of B pairs of prepared images, uint8 [2 B, side / 2, side, 3], on the device where they are:
        [B, 3, side, side], before on top."""
        return {"pixel_values": self.image_processor.to_pixels(prepared.unflatten(0, (-1, 2)).flatten(1, 2))}


def first_of(configured: int | list[int] | None, tokenizers: int) -> int:
    """The token of the LLM's configuration, the first of several; else the tokenizer's."""
    found = configured[0] if isinstance(configured, list) else configured
    return tokenizers if found is None else found


class Blip2IDCForConditionalGeneration(Blip2ForConditionalGeneration):
    """BLIP-2: a picture of two images in, what changed out. The LLM is a decoder: OPT, Qwen2, Llama."""

    config_class = Blip2IDCConfig

    @classmethod
    def from_pretrained(  # type: ignore[override]  # a directory alone
        cls, folder: str | Path, *, config: Blip2IDCConfig | None = None, module: None = None, **kwargs: Any
    ) -> Any:
        """Load a BLIP-2 directory, safetensors only. Raises ValueError where weights are missing or of another
        shape."""
        config = config or Blip2IDCConfig.on_base(str(folder), None)
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
        loaded: Any = super().from_pretrained(str(folder), config=config, **kwargs)
        model, info = loaded
        if lost := sorted(str(key) for key in [*info["missing_keys"], *info["mismatched_keys"]]):
            raise ValueError(f"{folder}: weights missing or of another shape than its config.json says: {lost[:5]}")
        return model

    @staticmethod
    def blank_images(config: Blip2IDCConfig, device: Any) -> dict[str, Tensor]:
        """Image inputs of one pair, as the processor makes them, without content; for counting on "meta"."""
        side = config.vision_config.image_size
        return {"pixel_values": torch.zeros(1, 3, side, side, device=device)}

    def visual_tokens(self, pixel_values: Tensor) -> Tensor:
        """Visual tokens of each picture, [B, Q, D].

        As BLIP-2's own, but that the queries see every patch without a mask of ones: reading it would wait for a GPU.
        """
        patches = self.vision_model(pixel_values=pixel_values).last_hidden_state
        queries = self.query_tokens.expand(len(patches), -1, -1)
        read = self.qformer(query_embeds=queries, encoder_hidden_states=patches).last_hidden_state
        return self.language_projection(read.to(patches.dtype))

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
        """BLIP-2's logits, [B, T, vocabulary]; without `input_ids` the visual tokens alone.

        Args:
            pixel_values: [B, 3, side, side].
            input_ids: [B, T], or [1, T] of B sequences end to end; each with Q places of its picture.
            logits_to_keep: or a mask of the logits to keep, [1, T] bool: they are [tokens kept, vocabulary] then.
            tokens: the ids of `input_ids` on the CPU: with them nothing waits for a GPU.
        """
        visual = self.visual_tokens(pixel_values)
        if input_ids is None:
            return visual
        embeds = self.embeds(input_ids, visual, tokens)
        asked = {"inputs_embeds": embeds, "attention_mask": attention_mask}
        if isinstance(logits_to_keep, int):
            return self.language_model(**asked, logits_to_keep=logits_to_keep, **kwargs)
        places = logits_to_keep.flatten().nonzero().flatten().to(pixel_values.device, non_blocking=True)
        llm = self.language_model.model
        trimmed = self.training and trims(getattr(llm, "decoder", llm))  # OPT's layers lie a level deeper
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
        embeds = self.embeds(input_ids, self(pixel_values=pixel_values))
        asked = {"input_ids": input_ids, "inputs_embeds": embeds, "attention_mask": attention_mask}
        return self.language_model.generate(**asked, **decoding)

    def recorded_maps(self) -> AbstractContextManager[list[Tensor]]:
        """Within it, each cross-attention of the Q-Former adds what its queries give to each patch, [B, N]."""
        layers: Any = self.qformer.encoder.layer
        across = [layer.crossattention.attention for layer in layers if layer.has_cross_attention]
        return recorded(across, patch_attention)

    def mean_map(self, maps: list[Tensor], pairs: int) -> Tensor:
        """The attention of the queries on each pair: [B, rows, columns] over the patches of one image, sums to 1.

        The share of its attention that the Q-Former gives to each patch, the mean over queries, heads and layers with
        cross-attention, the class token left out; a place's two patches, of before and after, added up. The picture is
        two images high, so an image has half the rows of the patch grid. It says where the model reads, changed or not:
        BLIP-2 has no place where the images are compared.
        """
        vision: Any = self.config.vision_config
        side = vision.image_size // vision.patch_size
        patches = torch.stack(maps).mean(dim=0)[:, 1:].unflatten(1, (2, side // 2, side))
        return patches.sum(dim=1) / patches.sum(dim=(1, 2, 3))[:, None, None]


def patch_attention(attention: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, **rest: Any) -> Tensor:
    """Softmax of queries and keys, the mean over heads and queries: [B, Q, .] and [B, N, .] to [B, N] in fp32."""
    queries, keys = (
        projected.unflatten(-1, (attention.num_attention_heads, -1)).transpose(1, 2)
        for projected in (attention.query(hidden_states), attention.key(encoder_hidden_states))
    )
    return ((queries @ keys.transpose(-1, -2)).float() * attention.scaling).softmax(dim=-1).mean(dim=(1, 2))

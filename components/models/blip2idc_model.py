"""BLIP2IDC, built on transformers' BLIP-2 with the same modules, weights and outputs.

This file contains the configuration, the augmentation of image pairs, the processor and the model.

Both images of a pair are stacked into one picture, with the image before on top. The authors resize the first image to
the size of the second image (bicubic), stack the two images, and stretch the result to BLIP-2's square. Here, each
image is first stretched to half of the square and then stacked, so that an image has to be prepared only once for all
its pairs. If both images have the same size, the picture differs from the authors' only in the rows that the bicubic
filter mixes across the seam: two on each side when the images are downscaled, side / height when they are upscaled. If
the sizes differ, the authors resize the first image twice, which blurs it slightly.

The prompt consists of one placeholder per query and BLIP-2's start token. Like the authors' code, this code ignores the
question. Each text ends with the end token in the LLM's configuration. For OPT, this is the line break (50118) rather
than </s>, because BLIP-2 was pre-trained to end texts with a line break and stops generating there.

Shapes: B pairs, N tokens of a picture (its patches and the class token), Q queries, T tokens, D width of the LLM.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, Blip2Config, Blip2ForConditionalGeneration, Blip2Processor

from m3diff.models.layers import can_trim_last_layer, insert_visual_tokens, record_tensors
from m3diff.models.prepared import Prepared
from m3diff.models.processing import NormalisedImages, TextProcessor
from m3diff.records.errors import DataError, ValueFault
from m3diff.records.sample import Turn

if TYPE_CHECKING:
    from PIL import Image

BLIP2 = "Blip2ForConditionalGeneration"
MAX_EXAMPLES = 5  # maximum number of weights that an error message lists
PUBLISHED_BASE = "Salesforce/blip2-opt-2.7b"
DROPOUT_FIELDS = ("dropout", "attention_dropout", "activation_dropout", "layerdrop")


class Blip2IDCConfig(Blip2Config):
    """Configuration of BLIP2IDC.

    All dropout rates are set to 0, even if the base uses dropout (0.1 in the Q-Former and OPT). Shared-prefix packing,
    which trains all captions of a pair in one sequence, is exact only without dropout. The configuration is saved as a
    BLIP-2 configuration, so that transformers can load a trained model as BLIP-2 without this project.
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
            for name in DROPOUT_FIELDS:
                if hasattr(part, name):
                    setattr(part, name, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of config.json."""
        return super().to_dict() | {"architectures": [BLIP2]}

    @classmethod
    def from_folder(cls, folder: str, module: dict[str, Any] | None) -> Blip2IDCConfig:
        """Read the configuration from the folder of a BLIP-2 model."""
        return cls.from_pretrained(folder, trust_remote_code=False)

    @classmethod
    def for_published_base(cls, name: str, module: dict[str, Any] | None) -> Blip2IDCConfig:
        """Return the published base's configuration for planning: transformers' defaults with OPT-2.7B's shapes."""
        text_config = {
            "model_type": "opt",
            "vocab_size": 50_304,
            "hidden_size": 2560,
            "ffn_dim": 10_240,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "word_embed_proj_dim": 2560,
        }
        config = cls(text_config=text_config, image_token_index=50_265)  # type: ignore[call-arg]
        config.name_or_path = PUBLISHED_BASE
        return config

    def image_tokens_of(self, images: int) -> int:
        """Return the number of visual tokens of an image set, which is always a pair."""
        return self.num_query_tokens


def augment_pair(augment: Any, pair: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Randomly blur and JPEG-compress a pair of prepared images.

    Both operations are applied to the stacked picture, like the authors' blur. They affect both images in the same way,
    so they do not add a difference between them.

    Args:
        augment: the `Augment` settings.
        pair: prepared images, uint8 [2, rows, columns, 3].
        rng: generator that decides whether and how strongly the pair is blurred and compressed.
    """
    is_blurred, is_compressed = rng.random(2) < (augment.blur, augment.jpeg)
    lowest_quality, highest_quality = augment.quality
    sigma = rng.uniform(*augment.sigma)
    quality = int(rng.integers(lowest_quality, highest_quality, endpoint=True))
    picture = pair.reshape(-1, *pair.shape[2:])
    if is_blurred:
        picture = blur(picture, sigma)
    if is_compressed:
        picture = compress_as_jpeg(picture, quality)
    return picture.reshape(pair.shape)


def blur(picture: np.ndarray, sigma: float) -> np.ndarray:
    """Blur a picture, uint8 [rows, columns, 3], with a 3 x 3 Gaussian filter that mirrors the picture at the edges."""
    ratio = np.exp(-0.5 / sigma**2)  # weight of a neighbour, divided by the weight of the pixel itself
    pixel_weight = 1 / (1 + 2 * ratio)
    neighbour_weight = ratio / (1 + 2 * ratio)
    padded_picture = np.pad(picture.astype(np.float64), [(1, 1), (1, 1), (0, 0)], mode="reflect")
    rows = pixel_weight * padded_picture[1:-1] + neighbour_weight * (padded_picture[:-2] + padded_picture[2:])
    pixels = pixel_weight * rows[:, 1:-1] + neighbour_weight * (rows[:, :-2] + rows[:, 2:])
    return np.rint(pixels).astype(np.uint8)


def compress_as_jpeg(picture: np.ndarray, quality: int) -> np.ndarray:
    """Compress a picture, uint8 [rows, columns, 3], as a JPEG of the given quality and decode it again."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file, formats=["JPEG"]).convert("RGB"))


class Blip2IDCImageProcessor(NormalisedImages):
    """Stretches, stacks and normalises images. It is saved as BLIP-2's image processor.

    Args:
        size: {"height": px, "width": px}. Both values must be equal and even.
        image_mean: mean of each RGB channel, in [0, 1].
        image_std: standard deviation of each RGB channel, in [0, 1].
    """

    def __init__(self, size: dict[str, int], image_mean: list[float], image_std: list[float], **kwargs: Any) -> None:
        super().__init__()
        self.side = size["height"]
        if size["width"] != self.side or self.side % 2:
            raise ValueFault("models.size_not_an_even_square", field="size", value=dict(size))
        self.image_mean = image_mean
        self.image_std = image_std

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of BLIP-2's image processor, which resizes a stacked picture to the same square."""
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
        """Stretch the image to half of the square and return it as uint8 [side / 2, side, 3]."""
        from PIL import Image

        return np.asarray(image.convert("RGB").resize((self.side, self.side // 2), Image.Resampling.BICUBIC))


class Blip2IDCProcessor(TextProcessor):
    """Converts image pairs into model inputs, texts into tokens, and tokens into texts."""

    def __init__(self, image_processor: Blip2IDCImageProcessor, tokenizer: Any, config: Blip2IDCConfig) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.queries = config.num_query_tokens
        self.start_id = token_id(config.text_config.bos_token_id, tokenizer.bos_token_id)
        self.end_id = token_id(config.text_config.eos_token_id, tokenizer.eos_token_id)
        image_token: Any = config.image_token_index
        self.prompt: tuple[int, ...] = (image_token,) * self.queries + (self.start_id,)

    @classmethod
    def of_folder(cls, folder: str, config: Blip2IDCConfig) -> Blip2IDCProcessor:
        """Load the processor from the folder of a trained model or a BLIP-2 base."""
        images = Blip2IDCImageProcessor.from_pretrained(folder, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return cls(images, tokenizer, config)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the processor as BLIP-2's processor, which transformers can load without this project."""
        Blip2Processor(self.image_processor, self.tokenizer, num_query_tokens=self.queries).save_pretrained(folder)

    def blank_pair(self) -> Prepared:
        """Return a prepared pair of black images."""
        side = self.image_processor.side
        return Prepared({"pixels": torch.zeros(2, side // 2, side, 3, dtype=torch.uint8)}, self.marks(2))

    def marks(self, images: int) -> tuple[str, ...]:
        """Return an empty mark for each image, because no text represents it: the prompt is always the same."""
        return ("",) * images

    def encode_prompt(self, turns: Sequence[Turn], marks: Sequence[str]) -> tuple[int, ...]:
        """Return the token ids of the prompt, which is the same for every question."""
        return self.prompt

    def collate(self, prepared: Sequence[Prepared]) -> dict[str, Tensor]:
        """Combine the images of B pairs to `pixels`, [2 B, side / 2, side, 3] uint8."""
        return {"pixels": torch.cat([images.tensors["pixels"] for images in prepared])}

    def image_inputs(self, images: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return the model input `pixel_values`, [B, 3, side, side], with the image before on top."""
        pictures = images["pixels"].to(device, non_blocking=True).unflatten(0, (-1, 2)).flatten(1, 2)
        return {"pixel_values": self.image_processor.to_pixels(pictures)}


def token_id(configured_id: int | list[int] | None, default: int) -> int:
    """Return the configured token id, or the first if there are several, or the default if there is none."""
    first_id = configured_id[0] if isinstance(configured_id, list) else configured_id
    return default if first_id is None else first_id


class Blip2IDCForConditionalGeneration(Blip2ForConditionalGeneration):
    """BLIP-2 that describes the change between two stacked images. Its LLM is a decoder: OPT, Qwen2 or Llama."""

    config_class = Blip2IDCConfig

    @classmethod
    def from_pretrained(  # type: ignore[override]  # accepts only a folder
        cls, folder: str | Path, *, config: Any = None, module: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """Load a BLIP-2 model from the safetensors files in a folder.

        Raises:
            DataError: weights are missing or have the wrong shape.
        """
        config = config or Blip2IDCConfig.from_folder(str(folder), None)
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
        kwargs.pop("trust_remote_code", None)  # this class never loads other code
        model_and_info: Any = super().from_pretrained(str(folder), config=config, trust_remote_code=False, **kwargs)
        model, loading_info = model_and_info
        unusable_keys = [*loading_info["missing_keys"], *loading_info["mismatched_keys"]]
        if unusable_keys:
            names = sorted(str(key) for key in unusable_keys)
            raise DataError(
                "models.weights_missing",
                path=Path(folder),
                value=len(names),
                expected="BLIP-2",
                names=names[:MAX_EXAMPLES],
            )
        return model

    @staticmethod
    def blank_images(config: Blip2IDCConfig, device: Any, images: int = 2) -> dict[str, Tensor]:
        """Return zeros in the shape of one pair's image inputs, used to count FLOPs on the "meta" device."""
        side = config.vision_config.image_size
        return {"pixel_values": torch.zeros(1, 3, side, side, device=device)}

    def visual_tokens(self, pixel_values: Tensor) -> Tensor:
        """Return the visual tokens of each picture, [B, Q, D].

        The result is the same as BLIP-2's. BLIP-2's mask of ones over the patches is omitted, because reading it would
        synchronise with the GPU.
        """
        patches = self.vision_model(pixel_values=pixel_values).last_hidden_state
        queries = self.query_tokens.expand(len(patches), -1, -1)
        outputs = self.qformer(query_embeds=queries, encoder_hidden_states=patches).last_hidden_state
        return self.language_projection(outputs.to(patches.dtype))

    def forward(  # type: ignore[override]  # the arguments differ from BLIP-2's
        self,
        *,
        pixel_values: Tensor,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        logits_to_keep: int | Tensor = 0,
        tokens: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return BLIP-2's output with logits, [B, T, vocabulary], or only the visual tokens if `input_ids` is None.

        Args:
            pixel_values: stacked and normalised pictures, [B, 3, side, side].
            input_ids: token ids, [B, T], or [1, T] with B sequences laid end to end. Each sequence has Q image tokens.
            logits_to_keep: number of last positions whose logits are computed, or a mask of positions, [1, T] bool.
                With a mask, the logits are [kept positions, vocabulary].
            tokens: copy of `input_ids` on the CPU, which avoids synchronising with the GPU.
        """
        visual = self.visual_tokens(pixel_values)
        if input_ids is None:
            return visual
        embeddings = self.embed_inputs(input_ids, visual, tokens)
        inputs = {"inputs_embeds": embeddings, "attention_mask": attention_mask}
        if isinstance(logits_to_keep, int):
            return self.language_model(**inputs, logits_to_keep=logits_to_keep, **kwargs)
        kept_positions = logits_to_keep.flatten().nonzero().flatten().to(pixel_values.device, non_blocking=True)
        llm = self.language_model.model
        llm = getattr(llm, "decoder", llm)  # OPT's layers are one level deeper
        if self.training and can_trim_last_layer(llm):
            output = self.language_model(**inputs, kept_positions=kept_positions, **kwargs)
        else:
            output = self.language_model(**inputs, logits_to_keep=kept_positions, **kwargs)
        output.logits = output.logits.flatten(0, 1)
        return output

    def embed_inputs(self, input_ids: Tensor, visual: Any, tokens: Tensor | None = None) -> Tensor:
        """Return the LLM's inputs, [B, T, D]: the token embeddings, with visual tokens in place of image tokens.

        Args:
            input_ids: [B, T].
            visual: visual tokens of the pictures, [B, Q, D].
            tokens: copy of `input_ids` on the CPU, which avoids synchronising with the GPU.
        """
        embeddings = self.get_input_embeddings()(input_ids)
        if tokens is not None:
            return insert_visual_tokens(embeddings, visual.flatten(0, 1), tokens, self.config.image_token_index)
        is_image_token: Tensor = input_ids == self.config.image_token_index  # type: ignore[assignment]
        return embeddings.masked_scatter(is_image_token[..., None], visual.to(embeddings.dtype))

    @torch.no_grad()
    def generate(  # type: ignore[override]  # the arguments differ from BLIP-2's
        self, *, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor, **decoding: Any
    ) -> Tensor:
        """Generate answers and return the tokens of prompts and answers, [B, tokens], as BLIP-2's `generate` does.

        The pictures are encoded by calling `forward`, because ZeRO 3 gathers the query tokens only there.
        """
        embeddings = self.embed_inputs(input_ids, self(pixel_values=pixel_values))
        inputs = {"input_ids": input_ids, "inputs_embeds": embeddings, "attention_mask": attention_mask}
        return self.language_model.generate(**inputs, **decoding)

    def record_maps(self) -> AbstractContextManager[list[Tensor]]:
        """Record the queries' attention to each patch, as one map [B, N] per cross-attention layer of the Q-Former."""
        layers: Any = self.qformer.encoder.layer
        cross_attentions = [layer.crossattention.attention for layer in layers if layer.has_cross_attention]
        return record_tensors(cross_attentions, patch_attention)

    def mean_map(self, maps: list[Tensor], pairs: int) -> Tensor:
        """Return the queries' mean attention over the patches of one image, [B, rows, columns], with sum 1.

        The mean is over the queries, heads and cross-attention layers, and excludes the class token. The attention to
        the patches before and after at the same position is added up. The picture is two images high, so an image has
        half of the grid's rows. The map shows where the model reads, whether or not something changed there, because
        no part of BLIP-2 compares the images explicitly.
        """
        vision_config: Any = self.config.vision_config
        side = vision_config.image_size // vision_config.patch_size
        attention = torch.stack(maps).mean(dim=0)[:, 1:]  # without the class token
        attention = attention.unflatten(1, (2, side // 2, side))  # [B, images, rows, columns]
        return attention.sum(dim=1) / attention.sum(dim=(1, 2, 3))[:, None, None]


def patch_attention(attention: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, **options: Any) -> Tensor:
    """Return the attention weights of a cross-attention layer, averaged over heads and queries, [B, N] in fp32.

    Args:
        attention: the cross-attention layer.
        hidden_states: states of the queries, [B, Q, width].
        encoder_hidden_states: states of the patches, [B, N, width].
    """
    heads = attention.num_attention_heads
    queries = attention.query(hidden_states).unflatten(-1, (heads, -1)).transpose(1, 2)
    keys = attention.key(encoder_hidden_states).unflatten(-1, (heads, -1)).transpose(1, 2)
    scores = (queries @ keys.transpose(-1, -2)).float() * attention.scaling  # [B, heads, Q, N]
    return scores.softmax(dim=-1).mean(dim=(1, 2))

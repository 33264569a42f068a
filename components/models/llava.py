"""LLaVA on pairs of images, transformers' LLaVA-OneVision underneath: configuration and model that the families on
LLaVA's parts have in common.

Shapes: B pairs, N patches per image, D the vision encoder's width, W the LLM's; images come as before, after, before,
after, ...
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import LlavaConfig, LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, LlavaOnevisionModel
from transformers import logging as transformers_logging
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import BaseModelOutputWithPooling

from m3diff.models.layers import OwnStart, Projection, trims, with_visual_tokens

STRATEGY = "vision_feature_select_strategy"
ONEVISION, LLAVA = LlavaOnevisionConfig.model_type, LlavaConfig.model_type
ARCHITECTURES = {ONEVISION: "LlavaOnevisionForConditionalGeneration", LLAVA: "LlavaForConditionalGeneration"}

# Shapes of the LLMs of llava-hf's models, for plans and benchmarks without their folders; the rest is transformers'
# defaults
PUBLISHED: dict[str, dict[str, Any]] = {
    "llava-onevision-qwen2-7b-ov-hf": {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "llava-onevision-qwen2-0.5b-ov-hf": {
        "model_type": "qwen2",
        "vocab_size": 152_000,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "llava-1.5-7b-hf": {"model_type": "llama", "vocab_size": 32_064},
}


class LlavaOfPairsConfig(LlavaOnevisionConfig):
    """LLaVA's configuration with the fields of a family's own module.

    Attributes:
        MODULE: name of the field that holds them, and of the module in the model. None there is no module, and the
            model is the base.
        read_module: makes the module's settings of its fields.
        BASES: names of published bases; the shapes of the first are planned with where the base is unknown.
        newline: whether each image ends with LLaVA-OneVision's newline.
    """

    MODULE: ClassVar[str] = ""
    read_module: ClassVar[Any] = dict
    BASES: ClassVar[tuple[str, ...]] = ("llava-onevision-qwen2-7b-ov-hf", "llava-onevision-qwen2-0.5b-ov-hf")
    newline: ClassVar[bool] = True
    if TYPE_CHECKING:
        text_config: Any
        vision_config: Any
        vision_feature_layer: Any

    def to_dict(self) -> dict[str, Any]:
        """The fields as they are written: LLaVA's own code refuses it with a module and loads it without.

        LLaVA would take the weights and drop the module's, but it knows no strategy called as the module. Without a
        module it is told its own name, for by another it does not find the head.
        """
        values = super().to_dict()
        if getattr(self, self.MODULE) is not None:
            return values | {STRATEGY: self.MODULE}
        kind = ONEVISION if self.newline else LLAVA
        return values | {"model_type": kind, "architectures": [ARCHITECTURES[kind]]}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return super().from_dict(cls._as_computed(config_dict), **kwargs)

    @classmethod
    def _as_computed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Without what `to_dict` writes for others: the model computes with LLaVA-OneVision's own strategy."""
        return {name: value for name, value in values.items() if (name, value) != (STRATEGY, cls.MODULE)}

    @classmethod
    def on_fields(cls, found: dict[str, Any], module: dict | None) -> Self:
        """The configuration of a config.json, whose own module, where it has one, comes before `module`."""
        values = {name: value for name, value in found.items() if name not in ("model_type", "architectures")}
        return cls(**{cls.MODULE: module} | cls._as_computed(values))

    @classmethod
    def on_base(cls, folder: str, module: dict | None) -> Self:
        """The configuration of a folder, trained or a base's; with a new module of these fields where it has none."""
        return cls.on_fields(cls.get_config_dict(folder)[0], module)

    @classmethod
    def published(cls, name: str, module: dict | None) -> Self:
        """The shapes of a published base, by the name of its folder; by another name those of the first."""
        name = name if name in cls.BASES else cls.BASES[0]
        kind = LLAVA if PUBLISHED[name]["model_type"] == "llama" else ONEVISION
        config = cls.on_fields({"model_type": kind, "text_config": PUBLISHED[name]}, module)
        config.name_or_path = f"llava-hf/{name}"
        return config

    def module_config(self) -> Any:
        """The settings of the module, or None. Raises TypeError or ValueError for a field that is unknown or
        impossible."""
        values = getattr(self, self.MODULE)
        return None if values is None else self.read_module(**values)

    @property
    def patches(self) -> int:
        """Patches of one image."""
        return (self.vision_config.image_size // self.vision_config.patch_size) ** 2

    def places(self) -> tuple[int, int]:
        """Visual tokens in the places of the image before and of the image after."""
        each = self.patches + self.newline
        return each, each

    @property
    def image_tokens(self) -> int:
        return sum(self.places())


class NewModuleInit:
    """A new module's parts initialise themselves; transformers asks whichever model holds them."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Projection | OwnStart):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]


class LlavaOfPairs(NewModuleInit, LlavaOnevisionModel):
    """LLaVA-OneVision without its head. A family says what the LLM sees of a pair."""

    config: Any

    def visual_tokens(self, pixel_values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The projected features of the images, [2 B, N, W], and the tokens in each image's places, [places, W]
        each."""
        raise NotImplementedError

    def with_newline(self, projected: Tensor) -> Tensor:
        """Features of images [2 B, N, W], each followed by LLaVA-OneVision's newline, [2 B, N + 1, W]."""
        if not self.config.newline:
            return projected
        newline = self.image_newline.to(projected.dtype).expand(len(projected), 1, -1)
        return torch.cat([projected, newline], dim=1)

    def get_image_features(
        self,
        pixel_values: Tensor,
        image_sizes: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Visual tokens of pairs of images [2 B, 3, H, W]: `pooler_output` holds a tensor per image, [places, W]."""
        projected, tokens = self.visual_tokens(pixel_values)
        return BaseModelOutputWithPooling(last_hidden_state=projected, pooler_output=tokens)  # type: ignore[arg-type]

    @wraps(LlavaOnevisionModel.forward)  # transformers reads the arguments off the signature
    def forward(  # type: ignore[override]
        self, input_ids: Any = None, pixel_values: Any = None, **kwargs: Any
    ) -> Any:
        """LLaVA-OneVision's forward. With `tokens`, the ids of `input_ids` on the CPU, nothing waits for a GPU."""
        tokens = kwargs.pop("tokens", None)
        if tokens is None:
            return super().forward(input_ids, pixel_values, **kwargs)
        visual: Any = torch.cat(self.get_image_features(pixel_values).pooler_output)  # type: ignore[arg-type]
        embeds = with_visual_tokens(self.get_input_embeddings()(input_ids), visual, tokens, self.config.image_token_id)
        return super().forward(**kwargs | {"inputs_embeds": embeds})

    def vision_hidden_states(self, pixel_values: Tensor) -> list[Tensor]:
        """The vision encoder's hidden states: the embedding and each layer's output, every one [images, N, D]. A CLIP
        has a norm before its first layer, and a class token, which is left out of each."""
        encoder: Any = self.vision_tower
        is_clip = hasattr(encoder, "pre_layrnorm")
        states = [encoder.embeddings(pixel_values)]
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


class LlavaOfPairsForGeneration(NewModuleInit, LlavaOnevisionForConditionalGeneration):
    """The same with its language-model head: two images and a question in, what changed out.

    Attributes:
        MODEL: the family's class of the model without its head.
        BASES: the models that it is built on, in words.
    """

    config: Any
    MODEL: type[LlavaOfPairs] = LlavaOfPairs
    BASES = "LLaVA-OneVision"

    def __init__(self, config: Any) -> None:
        super(LlavaOnevisionForConditionalGeneration, self).__init__(config)  # builds no second LLaVA-OneVision
        self.model = self.MODEL(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_pretrained(  # type: ignore[override]  # a configuration and arguments of its own
        cls,
        pretrained_model_name_or_path: str | Path,
        *args: Any,
        config: Any = None,
        module: dict | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load a trained model, or a base to which a new module is added.

        Args:
            config: of the model; by default the folder's.
            module: fields of the module new to a base's folder, None for none. With `config`, anything but None says
                that the folder is a base's.

        Raises ValueError where weights other than a new module's are missing or of another shape. Safetensors only.
        """
        kind: Any = cls.config_class
        name, new, begins = str(pretrained_model_name_or_path), module is not None, config is None
        if begins:
            found, _ = kind.get_config_dict(name)
            new = new and kind.MODULE not in found
            config = kind.on_fields(found, module)
        kwargs |= {"config": config, "use_safetensors": True, "output_loading_info": True}
        with _quiet():
            loaded: Any = super().from_pretrained(name, *args, **kwargs)
        model, info = loaded
        made = {key for key in info["missing_keys"] if new and key.startswith(f"model.{kind.MODULE}.")}
        if lost := sorted(map(str, {*info["missing_keys"], *info["mismatched_keys"]} - made)):
            raise ValueError(
                f"{name}: {len(lost)} weights are missing or of another shape, so it is no {cls.BASES} of this "
                f"configuration: {lost[:5]}; fetch or export the folder again"
            )
        if made and begins:
            model.begin(Path(name))
        return model

    def begin(self, folder: Path) -> None:
        """Give a new module weights that the base's folder has for it."""

    def _supports_mm_encoder_outputs(self) -> bool:
        """`generate` encodes the images within `forward`, where ZeRO 3 has the weights together."""
        return False

    @staticmethod
    def blank_images(config: Any, device: Any) -> dict[str, Tensor]:
        """Image inputs of one pair, as the processor makes them, without content; for counting on "meta"."""
        side = config.vision_config.image_size
        count = torch.tensor([2], device="cpu")  # its value is read
        return {"pixel_values": torch.zeros(2, 3, side, side, device=device), "batch_num_images": count}

    @wraps(LlavaOnevisionForConditionalGeneration.forward)  # `generate` reads the arguments off the signature
    def forward(  # type: ignore[override]
        self, *args: Any, logits_to_keep: int | Tensor = 0, **kwargs: Any
    ) -> Any:
        """LLaVA-OneVision's forward. While training with a mask of the logits to keep, [B, T] bool, the LLM's last
        layer and head work on those tokens alone; the logits are [tokens kept, vocabulary]."""
        if not self.training or isinstance(logits_to_keep, int) or not trims(self.model.language_model):
            return super().forward(*args, logits_to_keep=logits_to_keep, **kwargs)
        kept = logits_to_keep.flatten().nonzero().flatten().to(self.lm_head.weight.device, non_blocking=True)
        output = super().forward(*args, kept=kept, **kwargs)
        output.logits = output.logits.flatten(0, 1)
        return output

    def recorded_maps(self) -> AbstractContextManager[list[Tensor]]:
        """Within it, each pass adds where its module looks for the difference, maps of [B, N] that sum to 1."""
        module = getattr(self.model, self.config.MODULE)
        return nullcontext([]) if module is None else module.recorded_maps()

    def mean_map(self, maps: list[Tensor], pairs: int) -> Tensor:
        """The places where the model looks for the difference of each pair, averaged over its maps: [B, rows, columns]
        over the patch grid, sums to 1; everywhere alike without a module."""
        side = self.config.vision_config.image_size // self.config.vision_config.patch_size
        if not maps:
            return torch.full((pairs, side, side), 1 / side**2, device=self.device)
        return torch.stack(maps).mean(dim=0).unflatten(1, (side, side))


def keep_names(config: type[LlavaOfPairsConfig]) -> None:
    """Let a model's weights lie on disk under the names of LLaVA's first releases, which it reads and writes."""
    names = get_checkpoint_conversion_mapping(ONEVISION)
    register_checkpoint_conversion_mapping(config.model_type, names, overwrite=True)

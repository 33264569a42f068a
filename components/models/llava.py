"""LLaVA for image pairs: the configuration and model shared by all families that are based on LLaVA.

The classes extend transformers' LLaVA-OneVision. The module of a family compares the two images of each pair. Other
images of a batch have the base's visual tokens.

Shapes: I images, P pairs among them, N patches per image, D width of the vision encoder, W width of the LLM. The images
of an image set are adjacent; the images of a pair are ordered before, after.
"""

from collections.abc import Iterator, Sequence
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

from m3diff.models.layers import (
    Projection,
    SelfInitialisedLayer,
    can_trim_last_layer,
    image_pairs,
    insert_visual_tokens,
)
from m3diff.records.errors import DataError

MAX_EXAMPLES = 5  # maximum number of weights that an error message lists
STRATEGY_FIELD = "vision_feature_select_strategy"
ONEVISION = LlavaOnevisionConfig.model_type
LLAVA = LlavaConfig.model_type
ARCHITECTURES = {ONEVISION: "LlavaOnevisionForConditionalGeneration", LLAVA: "LlavaForConditionalGeneration"}

# LLM configurations of llava-hf's models, so that planning and benchmarks do not need the models' folders. Fields that
# are not listed have transformers' defaults.
PUBLISHED_LLMS: dict[str, dict[str, Any]] = {
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
    """LLaVA's configuration with the settings of a family's module.

    Attributes:
        MODULE: name of the model's attribute for the module, and of the configuration field with the module's settings.
            The field is None for a base without a module.
        read_module: function that creates the module's settings from the values of this field.
        BASES: names of the published bases. The first is used for planning if the base is unknown.
        newline: whether each image ends with LLaVA-OneVision's newline token.
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
        """Return the fields of config.json.

        LLaVA's own code must reject a model with a module, because it would load the model without the module's
        weights. The feature strategy is therefore set to the module's name, which LLaVA does not support. A model
        without a module gets LLaVA's `model_type`, because transformers' LLaVA would not find the language-model head
        otherwise.
        """
        values = super().to_dict()
        if getattr(self, self.MODULE) is not None:
            return values | {STRATEGY_FIELD: self.MODULE}
        model_type = ONEVISION if self.newline else LLAVA
        return values | {"model_type": model_type, "architectures": [ARCHITECTURES[model_type]]}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Create the configuration from the fields of config.json, with LLaVA-OneVision's default feature strategy."""
        return super().from_dict(cls._without_module_strategy(config_dict), **kwargs)

    @classmethod
    def _without_module_strategy(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the fields without the feature strategy that `to_dict` sets."""
        return {name: value for name, value in values.items() if (name, value) != (STRATEGY_FIELD, cls.MODULE)}

    @classmethod
    def from_fields(cls, fields: dict[str, Any], module: dict | None) -> Self:
        """Create the configuration from the fields of config.json.

        Args:
            fields: fields from the config.json of a trained model or a base.
            module: settings of a new module, which are used if `fields` does not contain a module.
        """
        values = {name: value for name, value in fields.items() if name not in ("model_type", "architectures")}
        return cls(**{cls.MODULE: module} | cls._without_module_strategy(values))

    @classmethod
    def from_folder(cls, folder: str, module: dict | None) -> Self:
        """Read the configuration from the folder of a trained model or a base; see `from_fields`."""
        fields, _ = cls.get_config_dict(folder)
        return cls.from_fields(fields, module)

    @classmethod
    def for_published_base(cls, name: str, module: dict | None) -> Self:
        """Return the configuration of the published base with this name, or of the first base if it is unknown."""
        base = name if name in cls.BASES else cls.BASES[0]
        llm_fields = PUBLISHED_LLMS[base]
        model_type = LLAVA if llm_fields["model_type"] == "llama" else ONEVISION
        config = cls.from_fields({"model_type": model_type, "text_config": llm_fields}, module)
        config.name_or_path = f"llava-hf/{base}"
        return config

    def module_config(self) -> Any:
        """Return the settings of the module, or None if there is no module.

        Raises:
            TypeError: a field is unknown.
            ValueError: a value is invalid.
        """
        values = getattr(self, self.MODULE)
        return None if values is None else self.read_module(**values)

    @property
    def patches(self) -> int:
        """Number of patches per image."""
        return (self.vision_config.image_size // self.vision_config.patch_size) ** 2

    def visual_token_counts(self) -> tuple[int, int]:
        """Return the number of visual tokens for the image before and for the image after."""
        tokens = self.patches + self.newline
        return tokens, tokens

    def image_tokens_of(self, images: int) -> int:
        """Return the number of visual tokens of an image set with this number of images."""
        counts_of_pair = self.visual_token_counts()
        return sum(counts_of_pair) if images == len(counts_of_pair) else images * (self.patches + self.newline)


class NewModuleInit:
    """Mixin for models with a new module whose layers initialise themselves.

    To initialise a layer, transformers calls `_init_weights` of the outermost model.
    """

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Projection | SelfInitialisedLayer):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]


class LlavaOfPairs(NewModuleInit, LlavaOnevisionModel):
    """LLaVA-OneVision without its language-model head. Each family defines the visual tokens of a pair."""

    config: Any

    def __init__(self, config: LlavaOfPairsConfig) -> None:
        register_weight_names(type(config))
        super().__init__(config)

    def visual_tokens(self, pixel_values: Tensor, pairs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the projected features of the images, [I, N, W], and each image's visual tokens, [tokens, W].

        Args:
            pixel_values: normalised images, [I, 3, height, width].
            pairs: numbers of the two images of each pair, [P, 2] int64 on the CPU.
        """
        raise NotImplementedError

    def append_newline(self, features: Tensor) -> Tensor:
        """Append LLaVA-OneVision's newline token to each image: [I, N, W] to [I, N + 1, W]."""
        if not self.config.newline:
            return features
        newline = self.image_newline.to(features.dtype).expand(len(features), 1, -1)
        return torch.cat([features, newline], dim=1)

    def get_image_features(
        self,
        pixel_values: Tensor,
        image_sizes: Tensor | None = None,
        batch_num_images: Tensor | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Return the visual tokens of images. transformers calls this method.

        Args:
            pixel_values: normalised images, [I, 3, height, width].
            image_sizes: ignored.
            batch_num_images: number of images of each image set, on the CPU. None if all images are in pairs.

        Returns:
            An output whose `pooler_output` is a list with the visual tokens of each image, [tokens, W].
        """
        pairs = image_pairs(len(pixel_values), batch_num_images)
        projected_features, tokens = self.visual_tokens(pixel_values, pairs)
        return BaseModelOutputWithPooling(last_hidden_state=projected_features, pooler_output=tokens)  # type: ignore[arg-type]

    @wraps(LlavaOnevisionModel.forward)  # transformers inspects the signature
    def forward(  # type: ignore[override]
        self, input_ids: Any = None, pixel_values: Any = None, **kwargs: Any
    ) -> Any:
        """Run LLaVA-OneVision's forward pass.

        If `tokens`, a copy of `input_ids` on the CPU, is passed, the forward pass does not synchronise with the GPU.
        """
        tokens = kwargs.pop("tokens", None)
        if tokens is None:
            return super().forward(input_ids, pixel_values, **kwargs)
        features = self.get_image_features(pixel_values, batch_num_images=kwargs.pop("batch_num_images", None))
        visual = torch.cat(features.pooler_output)  # type: ignore[arg-type]
        embeddings = self.get_input_embeddings()(input_ids)
        embeddings = insert_visual_tokens(embeddings, visual, tokens, self.config.image_token_id)
        return super().forward(**kwargs | {"inputs_embeds": embeddings})

    def vision_hidden_states(self, pixel_values: Tensor) -> list[Tensor]:
        """Return the vision encoder's hidden states: the embedding and the output of each layer, each [images, N, D].

        A CLIP encoder also has a norm before its first layer and a class token, which is removed from each state.
        """
        encoder: Any = self.vision_tower
        is_clip = hasattr(encoder, "pre_layrnorm")
        embeddings = encoder.embeddings(pixel_values)
        states = [encoder.pre_layrnorm(embeddings) if is_clip else embeddings]
        for layer in encoder.encoder.layers:
            states.append(layer(states[-1], attention_mask=None))
        return [state[:, 1:] for state in states] if is_clip else states


@contextmanager
def _suppress_loading_report() -> Iterator[None]:
    """Suppress transformers' report of missing keys within the block, because `from_pretrained` checks the keys."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


class LlavaOfPairsForGeneration(NewModuleInit, LlavaOnevisionForConditionalGeneration):
    """A `LlavaOfPairs` model with a language-model head. It answers questions about images.

    Attributes:
        MODEL: the family's model class without the head.
        BASES: the base models of the family, for error messages.
    """

    config: Any
    MODEL: type[LlavaOfPairs] = LlavaOfPairs
    BASES = "LLaVA-OneVision"

    def __init__(self, config: Any) -> None:
        # skips the parent's __init__, which would build a second LLaVA-OneVision
        super(LlavaOnevisionForConditionalGeneration, self).__init__(config)
        self.model = self.MODEL(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_pretrained(  # type: ignore[override]  # has additional arguments
        cls,
        pretrained_model_name_or_path: str | Path,
        *args: Any,
        config: Any = None,
        module: dict | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load a trained model, or a base with a new module, from safetensors files.

        Args:
            pretrained_model_name_or_path: folder of the model.
            config: configuration of the model. By default, it is read from the folder.
            module: settings of the new module to add to a base, or None to add no module. If `config` is given, its
                settings are used instead. Any value other than None then only means that the folder is a base, which
                may lack the weights of the module.

        Raises:
            DataError: weights have the wrong shape, or weights other than those of a new module are missing.
        """
        config_class: Any = cls.config_class
        folder = str(pretrained_model_name_or_path)
        may_lack_module = module is not None
        reads_config = config is None
        if reads_config:
            fields, _ = config_class.get_config_dict(folder)
            may_lack_module = may_lack_module and config_class.MODULE not in fields
            config = config_class.from_fields(fields, module)
        kwargs |= {"config": config, "use_safetensors": True, "output_loading_info": True}
        kwargs.pop("trust_remote_code", None)  # this class never loads other code
        with _suppress_loading_report():
            model_and_info: Any = super().from_pretrained(folder, *args, trust_remote_code=False, **kwargs)
        model, loading_info = model_and_info
        missing_keys = set(loading_info["missing_keys"])
        module_keys: set[str] = set()  # keys of a new module, which a base does not have
        if may_lack_module:
            module_keys = {key for key in missing_keys if key.startswith(f"model.{config_class.MODULE}.")}
        unusable_keys = (missing_keys | set(loading_info["mismatched_keys"])) - module_keys
        if unusable_keys:
            names = sorted(str(key) for key in unusable_keys)
            raise DataError(
                "models.weights_missing",
                path=Path(folder),
                value=len(names),
                expected=cls.BASES,
                names=names[:MAX_EXAMPLES],
            )
        if module_keys and reads_config:
            model.start_new_module(Path(folder))
        return model

    def start_new_module(self, folder: Path) -> None:
        """Load the initial weights of a new module from the base's folder. The default implementation does nothing."""

    def _supports_mm_encoder_outputs(self) -> bool:
        """Return False, so that `generate` encodes the images within `forward`, where ZeRO 3 gathers the weights."""
        return False

    @staticmethod
    def blank_images(config: Any, device: Any, images: int = 2) -> dict[str, Tensor]:
        """Return zeros in the shape of the image inputs of one image set, used to count FLOPs on the "meta" device."""
        if not images:
            return {}
        side = config.vision_config.image_size
        count = torch.tensor([images], device="cpu")  # transformers reads the value, and "meta" tensors have none
        return {"pixel_values": torch.zeros(images, 3, side, side, device=device), "batch_num_images": count}

    @wraps(LlavaOnevisionForConditionalGeneration.forward)  # `generate` inspects the signature
    def forward(  # type: ignore[override]
        self, *args: Any, logits_to_keep: int | Tensor = 0, **kwargs: Any
    ) -> Any:
        """Run LLaVA-OneVision's forward pass.

        In training, `logits_to_keep` may be a mask of positions, [B, T] bool. The LLM's last layer and head then
        compute only these positions, and the logits are [kept positions, vocabulary].
        """
        can_trim = self.training and can_trim_last_layer(self.model.language_model)
        if isinstance(logits_to_keep, int) or not can_trim:
            return super().forward(*args, logits_to_keep=logits_to_keep, **kwargs)
        kept_positions = logits_to_keep.flatten().nonzero().flatten()
        kept_positions = kept_positions.to(self.lm_head.weight.device, non_blocking=True)
        output = super().forward(*args, kept_positions=kept_positions, **kwargs)
        output.logits = output.logits.flatten(0, 1)
        return output

    def record_maps(self) -> AbstractContextManager[list[Tensor]]:
        """Record where the module looks for the difference. Each forward pass adds maps [B, N] with sum 1."""
        module = getattr(self.model, self.config.MODULE)
        return nullcontext([]) if module is None else module.record_maps()

    def mean_map(self, maps: list[Tensor], pairs: int) -> Tensor:
        """Return the mean of the recorded maps over the patch grid, [pairs, rows, columns], with sum 1.

        The map is uniform for a model without a module, which does not record maps.
        """
        side = self.config.vision_config.image_size // self.config.vision_config.patch_size
        if not maps:
            return torch.full((pairs, side, side), 1 / side**2, device=self.device)
        return torch.stack(maps).mean(dim=0).unflatten(1, (side, side))


def register_weight_names(config: type[LlavaOfPairsConfig]) -> None:
    """Register the weight names of LLaVA's first releases, which the published bases use, for loading and saving."""
    names = get_checkpoint_conversion_mapping(ONEVISION)
    register_checkpoint_conversion_mapping(config.model_type, names, overwrite=True)

"""The family `auto`: any vision-language model of transformers, with its own code, processor and chat template.

A base is a folder that `AutoModelForImageTextToText` and `AutoProcessor` can load. The model is trained with its own
forward pass and adapters of peft, and the trained folder has the base's own class. This module does not import torch or
transformers until a model is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from m3diff.models.contract import Packing, Processor, Takes
from m3diff.models.decoding import decode_greedily
from m3diff.models.family import Family
from m3diff.models.foreign_code import SAFETENSORS, CheckpointError, read_json, refuse_foreign_code
from m3diff.models.settings import Settings
from m3diff.records.errors import Fault

if TYPE_CHECKING:
    from m3diff.models.contract import Model

# Names of the parts in transformers, as components of a parameter's full name. The names of encoders and decoders are
# those that `PreTrainedModel.get_encoder` and `get_decoder` look for. A projector may be within an encoder, so its
# names come first.
PART_NAMES = {
    "projector": (
        "multi_modal_projector",
        "connector",
        "merger",
        "deepstack_merger_list",
        "aligner",
        "embed_vision",
        "image_newline",
    ),
    "vision": ("vision_tower", "visual", "vision_model", "vision_encoder", "image_tower"),
    "llm": ("language_model", "text_model", "decoder", "text_decoder", "lm_head"),
}
# Parts of models that also hear, which are never trained
SOUND = ("model.audio_tower.", "model.embed_audio.")

MAX_EXAMPLES = 3  # maximum number of names that an error message lists


@dataclass(frozen=True)
class AutoSettings(Settings):
    """Settings of any vision-language model of transformers, the family `auto`.

    module: always null.
    align: always null.
    lora: adapters of the linear layers of each part that has a learning rate. A part without linear layers is trained
        in full, and rank 0 trains all parts in full.
    processor: settings of the base's image processor, in its own words, such as {max_pixels: 401408}, with {} for those
        of its folder. They bound the resolution, and are saved with the model.
    template: arguments of the base's chat template, such as {enable_thinking: false}, with {} for none. They are saved
        with the model.
    """

    family: Literal["auto"]
    module: None
    processor: Mapping[str, Any] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)


class AutoFamily(Family):
    """The functions of the family `auto`, whose model class depends on the base."""

    def part_of(self, name: str) -> str:
        """Return the part that the parameter with this name belongs to.

        A parameter with an unknown name belongs to the projector, because it is in no encoder or decoder.
        """
        components = name.split(".")
        for part, names in PART_NAMES.items():
            if any(component in names for component in components):
                return part
        return "projector"

    def adapter_targets(self, model: Any) -> dict[str, str | list[str]]:
        """Return the full names of the linear layers of each part that has any."""
        from torch import nn

        head = model.get_output_embeddings()
        targets: dict[str, list[str]] = {}
        for name, layer in model.named_modules():
            if not isinstance(layer, nn.Linear) or layer is head or name.startswith(self.unused_parameters):
                continue
            if ".lora_" not in name:
                layer_name = name.removesuffix(".base_layer")  # of a layer that already has an adapter
                targets.setdefault(self.part_of(f"{layer_name}."), []).append(layer_name)
        return {part: targets[part] for part in self.parts if part in targets}

    def check(self, name: str, model: Any, processor: Processor) -> None:
        """Check the processor before a training. The model is of a class of transformers."""
        from m3diff.models.conformity import check_processor

        check_processor(name, processor)

    def check_base(self, folder: Path, settings: Settings) -> Processor:
        """Check a base without loading its weights, and return its processor; see `Family.check_base`."""
        import torch

        config = stock_config(folder)
        require_safetensors(folder)
        processor = self.load_processor(folder, config, settings)
        with torch.device("meta"):
            model = self.build(config)
        check_parts(self, model, folder)
        return processor

    def build(self, config: Any) -> Any:
        """Return a new model with this configuration and freshly initialised weights."""
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText.from_config(config, trust_remote_code=False)

    def load_base(self, folder: Path, settings: Settings, dtype: Any, attn_implementation: Any) -> Any:
        """Load the base. It uses the attention of transformers, so `attn_implementation` is ignored."""
        return self.load(folder, dtype)

    def load(self, folder: Path, dtype: Any, configuration: Path | None = None) -> Any:
        """Load a model without adapters.

        Args:
            folder: folder of the weights.
            dtype: data type of the weights.
            configuration: ignored, because a trained model has the configuration of its base.

        Raises:
            CheckpointError: transformers has no class for the model, weights are missing, or a part is not found.
        """
        refuse_foreign_code(folder)
        model = load_stock_model(folder, dtype)
        check_parts(self, model, folder)
        return decode_greedily(model, folder)

    def load_processor(self, folder: Path, config: Any = None, settings: Settings | None = None) -> Processor:
        """Load the processor from a folder; see `Family.load_processor`."""
        from m3diff.models.auto_processor import ChatTemplateProcessor

        refuse_foreign_code(folder)
        own_config = config or self.planned_config(folder, settings)
        if isinstance(settings, AutoSettings):
            return ChatTemplateProcessor.of_folder(str(folder), own_config, settings.processor, settings.template)
        return ChatTemplateProcessor.of_folder(str(folder), own_config)

    def load_processor_of_base(self, checkpoint: Path, base: Path, config: Any) -> Processor:
        """Load the checkpoint's processor, whose settings its base may lack."""
        return self.load_processor(checkpoint, config)

    def planned_config(self, base: Path, settings: Settings | None) -> Any:
        """Return the configuration of the base.

        Raises:
            CheckpointError: there is no base, or transformers does not know its `model_type`.
        """
        from transformers import AutoConfig

        if not (base / "config.json").is_file():
            raise CheckpointError("models.no_base_folder", path=base)
        refuse_foreign_code(base)
        try:
            return AutoConfig.from_pretrained(base, trust_remote_code=False)
        except (ValueError, KeyError) as error:
            raise not_a_vlm(base) from error


def stock_config(folder: Path) -> Any:
    """Return the configuration of a model that transformers can load with AutoModelForImageTextToText.

    Raises:
        CheckpointError: there is no config.json, or transformers has no class for the model.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    config = FAMILY.planned_config(folder, None)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or config.is_encoder_decoder:
        raise not_a_vlm(folder)
    return config


def require_safetensors(folder: Path) -> None:
    """Check that a folder contains weights.

    Raises:
        CheckpointError: there is no safetensors file.
    """
    if not any(folder.glob(f"*{SAFETENSORS}")):
        raise CheckpointError("models.no_weights_of_base", path=folder)


def load_stock_model(folder: Path, dtype: Any) -> Any:
    """Load a model with transformers' class for it, from safetensors files.

    Raises:
        CheckpointError: transformers has no class for the model, or weights are missing or have the wrong shape.
    """
    from transformers import AutoModelForImageTextToText

    stock_config(folder)
    require_safetensors(folder)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="sdpa",
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    model, info = loaded
    unusable_names = sorted(str(name) for name in {*info["missing_keys"], *info["mismatched_keys"]})
    if unusable_names:
        names = unusable_names[:MAX_EXAMPLES]
        raise CheckpointError("models.weights_of_base_missing", path=folder, value=len(unusable_names), names=names)
    return model


def not_a_vlm(folder: Path) -> CheckpointError:
    """Return the error for a folder whose model cannot be trained by this family."""
    import transformers

    fields = read_json(folder / "config.json")
    model_type = fields.get("model_type") if isinstance(fields, dict) else None
    path = folder / "config.json"
    version = transformers.__version__
    return CheckpointError("models.not_a_vlm", path=path, field="model_type", value=model_type, version=version)


def check_parts(family: AutoFamily, model: Any, folder: Path) -> None:
    """Check that the encoder and the LLM of a model are found by their names.

    Raises:
        CheckpointError: a part is not found, so that its layers would get the learning rate of another part.
    """
    names = {id(module): name for name, module in model.named_modules()}
    modules = {"vision": model.get_encoder(modality="image"), "llm": model.get_decoder()}
    for part, module in modules.items():
        name = names.get(id(module), "")
        if not name or family.part_of(f"{name}.") != part:
            raise CheckpointError(
                "models.part_not_found", path=folder, part=part, value=type(module).__name__, name=name
            )
    if not hasattr(model, "get_image_features"):
        raise CheckpointError("models.no_image_features", path=folder, value=type(model).__name__)


def setting_faults(settings: AutoSettings, base: Mapping[str, Any] | None) -> list[Fault]:
    """Return a fault if the settings have an alignment.

    An alignment trains new parts before the fine-tuning, and this family has none. The adapters that it would train
    would be merged before the fine-tuning, so that the saved adapters could not restore the model from its base.
    """
    return [] if settings.align is None else [Fault("models.no_alignment_of_stock_model", field="align")]


def classes() -> tuple[type[Model], type[Processor]]:
    """The family has no classes of its own, because each base has another class of model."""
    raise NotImplementedError("the family `auto` loads its models by `load`")


def cached_prompts() -> Packing:
    """Return the packing by the model's own cache."""
    from m3diff.models.cached_prompts import CachedPrompts

    return CachedPrompts()


FAMILY = AutoFamily(
    settings=AutoSettings,
    parts={"vision": (), "projector": (), "llm": ()},
    lora_targets={},
    whole_parts_without_adapters=("vision", "projector", "llm"),
    classes=classes,
    faults=setting_faults,
    unused_parameters=SOUND,
    takes=Takes(fixed_marks=False),
    packing=cached_prompts,
    fuse=lambda model, activation_checkpointing: None,
    count_flops=None,
    checks_packing=True,
    recomputes_activations=False,
)

"""The interface between model families and the rest of the project.

Training, prediction, planning and registration do not refer to any specific family. They look up the family in
`m3diff.models.FAMILIES`. This file and the file of each family (such as `m3diff.py`) are cheap to import, because torch
is imported only when it is needed.

A base is the published model that training starts from. The module is the part that compares the two images. The other
parts are the vision encoder, the projector and the LLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3diff.models.contract import Model, Packing, Prepared, Processor, Takes
from m3diff.models.decoding import decode_greedily
from m3diff.models.foreign_code import refuse_foreign_code
from m3diff.models.settings import Settings
from m3diff.records.sample import PAIR

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from m3diff.models.flops import Term
    from m3diff.records.errors import Fault


# Prefix of the metrics that measure the size of a module's updates
MODULE_UPDATE_RATIO = "module_update_ratio"


@dataclass(frozen=True)
class Contribution:
    """Functions that measure how much a family's module contributes to the model, for the training curves.

    Attributes:
        names: (settings) -> names of the metrics, empty if there is no module. A metric whose name begins with
            MODULE_UPDATE_RATIO is the RMS of what the module adds to the features, divided by the RMS of these
            features. Training warns if all of these ratios stay near zero.
        record: (model) -> context manager that returns a list. Each forward pass within the block appends a tensor of
            sums to the list. The tensors are detached, on the model's device, all of the same shape, and computed
            without synchronising with the device. They are added up over the forward passes of a step and over the
            workers.
        figures: (sums on the CPU) -> values of the metrics, in the order of `names`.
        remedy: a sentence that says what to try if the module contributes nothing.
    """

    names: Callable[[Any], tuple[str, ...]]
    record: Callable[[Any], AbstractContextManager[list[Tensor]]]
    figures: Callable[[Tensor], list[float]]
    remedy: str


def masked_rows() -> Packing:
    """Return the packing for models that are loaded with the attention of `m3diff.models.fused`."""
    from m3diff.models.masks import MaskedRows

    return MaskedRows()


def separate_rows() -> Packing:
    """Return the packing for all other models. It is slower, because branches share nothing."""
    from m3diff.models.separate_rows import SeparateRows

    return SeparateRows()


@dataclass(frozen=True)
class SaliencyMaps:
    """Functions that compute where a model looks for differences while it generates answers about pairs.

    Attributes:
        record: (model) -> context manager that returns a list. Each forward pass within the block may append maps to
            it.
        mean: (model, recorded list, number of pairs) -> maps, [pairs, rows, columns] over the patch grid of an image,
            each with sum 1.
    """

    record: Callable[[Any], AbstractContextManager[list[Tensor]]]
    mean: Callable[[Any, list[Tensor], int], Tensor]


# The maps of models with the methods `record_maps` and `mean_map`
MAPS_OF_MODEL = SaliencyMaps(
    record=lambda model: model.record_maps(),
    mean=lambda model, maps, pairs: model.mean_map(maps, pairs),
)


def use_fused_kernels(model: Any, activation_checkpointing: str) -> None:
    """Switch a model to fused kernels, in place; see `make_fused`. Layers without such a kernel stay as they are."""
    from m3diff.models.fused import make_fused

    make_fused(model, activation_checkpointing)


def count_products(
    model: Any, family: Family, tokens: float, supervised_tokens: float, images: int = PAIR
) -> list[Term]:
    """Return the FLOPs of each part for one training sequence; see `count_flops`."""
    from m3diff.models.flops import count_flops

    return count_flops(model, family, tokens, supervised_tokens, images)


@dataclass(frozen=True)
class Family:
    """The data and functions that define a model family.

    Attributes:
        settings: frozen dataclass of the family's settings in `params.yaml`.
        parts: part -> prefixes of its parameter names. Each part has its own learning rate, and every parameter belongs
            to exactly one part. The optimizer's groups have the same order.
        lora_targets: part -> regular expression that matches the full names of the linear layers that get adapters
            (rank above 0) or are trained in full (rank 0). The other weights of the part are frozen. Parts without an
            entry are trained in full.
        classes: () -> the model class and the processor class; see `Model` and `Processor` in `contract.py`.
        faults: (settings, the base's config.json or None) -> reasons why the settings do not fit the base.
        unused_parameters: prefixes of parameters that are never trained because the model does not use them.
        contribution: how to measure the contribution of the module in training, or None if it is not measured.
        new_parts: parts that the base does not have. The `adapters/` folder of a checkpoint contains their weights even
            if they are frozen, because they cannot be loaded from the base.
        whole_parts_without_adapters: parts of `lora_targets` in which rank 0 trains all weights instead of only the
            matching linear layers.
        takes: the samples that the family can process.
        packing: () -> how several branches about the same images are trained in one pass: `masked_rows`,
            `separate_rows`, or a packing of the family.
        maps: how to compute saliency maps, or None if the model has none.
        fuse: (model, `compute.activation_checkpointing`) -> None. Switches the model to fused kernels and switches
            activation checkpointing, in place.
        count_flops: (model from `meta_model`, family, tokens of a sequence, supervised tokens, images) -> the FLOPs of
            one training sequence about an image set with this number of images. None if they cannot be counted.
        checks_packing: whether each training run first compares the packing with separate passes, because the model's
            code is that of transformers.
        recomputes_activations: whether `compute.activation_checkpointing` can be used.
        augment: (settings, prepared images of an image set, random generator) -> the augmented images, as new tensors
            of the same shapes. The generator depends only on the seed, epoch and sequence, so a resumed run sees the
            same images on any number of workers. Validation and prediction do not use this function. None if the
            family does not augment images.
        base_files: (settings, the base's config.json or None) -> additional files that the base's folder must contain,
            each with instructions on where to get it. None if there are no such files.
        prompt_tokens: length of a prompt in tokens, without the images, if the model does not read a question. None if
            the model reads a question, because the length then varies.
        model_types: supported values of `model_type` in the config.json of a checkpoint. The first is assumed if the
            file does not contain this field. Empty if any value may be supported.
    """

    settings: type[Settings]
    parts: Mapping[str, tuple[str, ...]]
    lora_targets: Mapping[str, str]
    classes: Callable[[], tuple[type[Model], type[Processor]]]
    faults: Callable[[Any, Mapping[str, Any] | None], list[Fault]]
    unused_parameters: tuple[str, ...] = ()
    contribution: Contribution | None = None
    new_parts: tuple[str, ...] = ()
    whole_parts_without_adapters: tuple[str, ...] = ()
    takes: Takes = Takes()
    packing: Callable[[], Packing] = masked_rows
    maps: SaliencyMaps | None = None
    fuse: Callable[[Any, str], None] = use_fused_kernels
    count_flops: Callable[[Any, Family, float, float, int], list[Term]] | None = count_products
    checks_packing: bool = False
    recomputes_activations: bool = True
    augment: Callable[[Any, Prepared, np.random.Generator], Prepared] | None = None
    base_files: Callable[[Any, Mapping[str, Any] | None], Mapping[str, str]] | None = None
    prompt_tokens: float | None = None
    model_types: tuple[str, ...] = ()

    @property
    def reads_question(self) -> bool:
        """Whether the answer depends on the question."""
        return self.takes.questions

    def complete_settings(self, settings: Settings) -> Settings:
        """Return the settings with a learning rate and a delay for every part, in the order of `parts`.

        A part without a rate is frozen (None), and a part without a delay is trained from the first step (0.0).
        Settings with equal values are therefore equal, whether or not they name these parts.
        """
        align = settings.align
        if align is not None:
            align = replace(align, rates={part: align.rates.get(part) for part in self.parts})
        rates = {part: settings.rates.get(part) for part in self.parts}
        delays = {part: settings.delays.get(part, 0.0) for part in self.parts}
        return replace(settings, rates=rates, delays=delays, align=align)

    def part_of(self, name: str) -> str:
        """Return the part that the parameter with this name belongs to."""
        parts = [part for part, prefixes in self.parts.items() if name.startswith(prefixes)]
        assert len(parts) == 1, f"{name}: every parameter is in one part, this one in {parts}"
        return parts[0]

    def adapter_targets(self, model: Any) -> Mapping[str, str | list[str]]:
        """Return the linear layers of each part that get adapters: a regular expression, or their full names.

        Args:
            model: the model, with or without adapters, but without peft's wrapper.
        """
        return self.lora_targets

    def check(self, name: str, model: Any, processor: Processor) -> None:
        """Check a model and its processor before a training.

        Args:
            name: name of the family.
            model: the model, without peft's wrapper.
            processor: processor of the model.

        Raises:
            ParamsError: a class lacks a member that the rest of the project uses.
        """
        from m3diff.models.conformity import check_family

        check_family(name, model, processor)

    def check_base(self, folder: Path, settings: Settings) -> Processor | None:
        """Check a base before its weights are loaded, as far as the family can.

        Args:
            folder: folder of the base.
            settings: settings of the run.

        Returns:
            The processor of the run if the check has loaded it, otherwise None.

        Raises:
            DataError: the base cannot be trained.
            ParamsError: a setting does not fit the base.
        """
        return None

    def build(self, config: Any) -> Any:
        """Return a new model with this configuration and freshly initialised weights."""
        model_class, _ = self.classes()
        return model_class(config)

    def load_base(self, folder: Path, settings: Settings, dtype: Any, attn_implementation: Any) -> Any:
        """Load the base and add a new module if the settings have one.

        The module's initial weights depend on torch's random state.
        """
        refuse_foreign_code(folder)
        model_class, _ = self.classes()
        model = model_class.from_pretrained(
            folder,
            module=module_fields(settings),
            trust_remote_code=False,
            dtype=dtype,
            attn_implementation=attn_implementation,
        )
        return decode_greedily(model, folder)

    def load(self, folder: Path, dtype: Any, configuration: Path | None = None) -> Any:
        """Load a model without adapters.

        Args:
            folder: folder of the weights.
            dtype: data type of the weights.
            configuration: folder of the model's config.json. By default, `folder`. If given, `folder` is a base, which
                may lack the weights of the model's module.
        """
        refuse_foreign_code(folder)
        if configuration is not None:
            refuse_foreign_code(configuration)
        model_class, _ = self.classes()
        config = model_class.config_class.from_folder(str(configuration or folder), None)
        # a module other than None tells the model that the folder is a base, which may lack the module's weights
        module: dict[str, Any] | None = None if configuration is None else {}
        model = model_class.from_pretrained(folder, config=config, module=module, dtype=dtype, trust_remote_code=False)
        return decode_greedily(model, folder)

    def load_processor(self, folder: Path, config: Any = None, settings: Settings | None = None) -> Processor:
        """Load the processor from a folder.

        Args:
            folder: folder of a trained model or a base.
            config: configuration of the model. By default, it is read from the folder.
            settings: settings of a run that trains the base. A trained model keeps those that it was trained with.
        """
        refuse_foreign_code(folder)
        model_class, processor_class = self.classes()
        if not config:
            config = model_class.config_class.from_folder(str(folder), None)
        return processor_class.of_folder(str(folder), config)

    def load_processor_of_base(self, checkpoint: Path, base: Path, config: Any) -> Processor:
        """Load the processor with which the base of a checkpoint answers the questions that the model was asked.

        Args:
            checkpoint: folder of the trained model.
            base: folder of its base.
            config: configuration of the base.
        """
        return self.load_processor(base, config)

    def planned_config(self, base: Path, settings: Settings) -> Any:
        """Return the configuration of the model that a run would train.

        If the base's folder does not exist, return the published configuration for the folder's name. In this case,
        `name_or_path` is the name of the published model.
        """
        model_class, _ = self.classes()
        config_class = model_class.config_class
        if (base / "config.json").is_file():
            refuse_foreign_code(base)
            return config_class.from_folder(str(base), module_fields(settings))
        return config_class.for_published_base(base.name, module_fields(settings))


def module_fields(settings: Settings) -> dict[str, Any] | None:
    """Return the module's settings as a dictionary for the model's configuration, or None if there is no module."""
    return None if settings.module is None else asdict(settings.module)

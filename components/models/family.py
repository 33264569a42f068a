"""What a model family is: the few functions that the rest of the project needs of it.

Training, prediction, planning and registration name no family: they take one from `m3diff.models.FAMILIES`. This
module and the `family.py` and `settings.py` of each family import nothing heavy; the functions import torch when they
are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

Value = TypeVar("Value")

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor

    ImagePair = tuple[Image.Image, Image.Image]
    """Two images: before, after."""


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters. Rank 0 adds none: the linears that would have them train in full."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    rank: int
    alpha: int

    def __post_init__(self) -> None:
        faults = [f"rank must be 0 or more, found {self.rank}"] if self.rank < 0 else []
        faults += [f"alpha must be 1 or more, found {self.alpha}"] if self.alpha < 1 else []
        if faults:
            raise ValueError("; ".join(faults))


@dataclass(frozen=True, eq=False)
class ByPart(Mapping[str, Value], Generic[Value]):
    """A mapping of the fields of its subclass: a value for each part."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __getitem__(self, part: str) -> Value:
        if part not in self.__dataclass_fields__:
            raise KeyError(part)
        return getattr(self, part)

    def __iter__(self) -> Iterator[str]:
        return iter(each.name for each in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


@dataclass(frozen=True, eq=False)
class Rates(ByPart[float | None]):
    """Learning rate of each part; None is frozen, which of the module means: as it starts, for ever."""

    vision: float | None
    projector: float | None
    module: float | None
    llm: float | None


@dataclass(frozen=True, eq=False)
class Delays(ByPart[float]):
    """Share of the steps before a part begins to train, in [0, 1); its warm-up follows. A part that begins at random
    learns from gradients that mean little until the others can use what it says."""

    vision: float = 0.0
    projector: float = 0.0
    module: float = 0.0
    llm: float = 0.0


@dataclass(frozen=True)
class Align:
    """A phase of training before the fine-tuning, on datasets of its own, with rates of its own: OneDiff's stage I,
    Coupled Sample Training (arXiv 2407.05645, section 4.2), which lets new parts find their way to a frozen LLM. No
    adapters train in it. The fine-tuning goes on from its weights, on the other datasets.

    datasets: names of `ingest.datasets` whose training samples are this phase's, and no other's.
    rates: a part with a rate must have one in the fine-tuning, too: adapters hold what the last phase trained.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    datasets: tuple[str, ...]
    epochs: float
    global_batch: int
    rates: Rates

    def __post_init__(self) -> None:
        object.__setattr__(self, "datasets", tuple(self.datasets))
        rules = {
            "datasets must name at least one dataset": bool(self.datasets),
            f"epochs must be above 0, found {self.epochs}": self.epochs > 0,
            f"global_batch must be 1 or more, found {self.global_batch}": self.global_batch >= 1,
        }
        if found := [rule for rule, kept in rules.items() if not kept]:
            raise ValueError("; ".join(found))


class Settings(Protocol):
    """What every family's settings have, beside fields of its own. A frozen dataclass of plain values."""

    @property
    def family(self) -> str: ...

    @property
    def module(self) -> Any: ...  # settings of the family's own module, or None: the base alone

    @property
    def lora(self) -> Lora: ...

    @property
    def rates(self) -> Mapping[str, float | None]: ...  # learning rate of each part; None: the part is frozen

    @property
    def delays(self) -> Mapping[str, float]: ...  # share of the steps before each part begins to train

    @property
    def align(self) -> Align | None: ...  # a phase of training before, or None


class PairProcessor(Protocol):
    """Pairs of images and texts to what the model takes, and back."""

    @property
    def pad_id(self) -> int: ...

    @property
    def end_id(self) -> int: ...

    def encode_prompt(self, question: str) -> tuple[int, ...]:
        """Token ids of the prompt up to where the answer starts, with the places of the images."""

    def encode_reference(self, text: str) -> list[int]:
        """Token ids of a reference with its end token: what the loss is taken on."""

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """One image as uint8 [rows, columns, 3], of the same shape whatever its size."""

    def image_inputs(self, prepared: Tensor) -> dict[str, Tensor]:
        """Model inputs of prepared images, uint8 [2 B, rows, columns, 3]: before, after, before, after, ... On a GPU
        where the images are; normalising is done there."""

    def prompt_inputs(self, questions: list[str]) -> dict[str, Tensor]:
        """Model inputs of the prompts of generation, one for each pair, left-padded."""

    def decode(self, tokens: Tensor) -> list[str]:
        """The texts of generated token ids [B, tokens], without special tokens and outer blanks."""

    def save_pretrained(self, folder: Path, /) -> Any: ...


ADAPTERS = "LoRA"
"""Name of the term of a sequence's adapters, which a merged model has not."""


@dataclass(frozen=True)
class Term:
    """FLOPs of one part for one sequence.

    Attributes:
        backward_factor: how many forwards' worth the backward takes: 2, or 1 where the weights are frozen.
        recomputed: activation checkpointing `full` runs the forward again.
    """

    name: str
    forward: float
    backward_factor: float
    recomputed: bool = False

    @property
    def total(self) -> float:
        return self.forward * (1 + self.backward_factor)


MODULE_UPDATE_RATIO = "module_update_ratio"


@dataclass(frozen=True)
class Contribution:
    """What a family's module contributes while it trains, as numbers that become columns of the training curve.

    Attributes:
        names: (settings) -> the numbers' names; none without a module. Those that begin with MODULE_UPDATE_RATIO are
            the RMS of what the module adds to features over the RMS of these: where all of them stay at nothing, train
            warns.
        recorded: (model) -> context manager that gives a list, to which each forward within it adds a tensor of sums,
            all of one shape, detached, on the model's device and without waiting for it. They are added up over the
            forwards of a step and the workers.
        figures: (sums, on the CPU) -> the numbers, in the order of `names`.
        remedy: what to try where the module adds nothing, as a sentence.
    """

    names: Callable[[Any], tuple[str, ...]]
    recorded: Callable[[Any], AbstractContextManager[list[Tensor]]]
    figures: Callable[[Tensor], list[float]]
    remedy: str


@dataclass(frozen=True)
class Family:
    """A model family as data and functions. `model` is a transformers PreTrainedModel, `config` its configuration.

    Attributes:
        settings: the frozen dataclass of its settings in `params.yaml` (see `Settings`).
        parts: the parts that have a learning rate each, with the prefixes of their parameters' names; every parameter
            is in one part. Its order is the order of the optimizer's groups.
        lora_targets: part -> regular expression of the full names of its linears that have adapters (rank above 0) or
            train in full (rank 0); nothing else of that part trains. Other parts train in full.
        frozen: prefixes of parameters that never train: the model never runs them.
        build: (config) -> model with weights from the random state, as for a new module; for counting on "meta".
        load_base: (folder of the base, settings, dtype, attn_implementation) -> the base with a new module, whose
            weights follow from torch's random state.
        load: (folder of weights, dtype, folder of the configuration or None: the same) -> model without adapters.
        load_processor: (folder, the model's configuration, by default the folder's) -> processor.
        fuse: (model, activation_checkpointing) -> None; makes it compute by fused kernels, in place.
        generate: (model, inputs, saliency, options of transformers' `generate`) -> (tokens, maps): the answers alone,
            ids [pairs, tokens], and where the model looks for the difference, [pairs, rows, columns], each with sum 1.
            The images are encoded once for both. Maps are None where `saliency` is false or the family has none.
            `inputs` are those of the processor's `prompt_inputs` and `image_inputs`.
        planned_config: (folder of the base, settings) -> the configuration that would train: the base's where its
            folder is there, else published shapes by the folder's name; `name_or_path` then says whose.
        flops: (config, tokens, supervised tokens, settings) -> the terms of one training sequence.
        image_tokens: (config) -> visual tokens of a pair.
        blank_images: (config, device) -> image inputs of one pair, as the processor makes them, without content; for
            counting on "meta".
        faults: (settings, the base's config.json or None) -> what makes the two impossible together, in words.
        contribution: what its module contributes while it trains; None: it is not measured.
        new: parts that the base does not have. Adapters hold their weights whether they train or not: a module that is
            frozen as it starts, to see what its training brings, is nowhere else.
        whole_without_adapters: parts of `lora_targets` that train whole with rank 0, not in those linears alone.
        augment: (settings, a pair of prepared images [2, rows, columns, 3], random numbers) -> the pair as it trains, a
            new array of the same shape. The random numbers follow from seed, epoch and sequence alone, so a run that
            resumes, on any number of workers, sees the same. Never at validation or prediction. None: as it is.
        base_files: (settings, the base's config.json or None) -> what must lie in the base's folder beside the base's
            own files, each with where it comes from. None: nothing.
        checkpointing_faults: (activation_checkpointing, the base's config.json or None) -> why the base's LLM cannot be
            recomputed so, in words. None: every one can.
        prompt_tokens: of every prompt, without the images, where no question is asked. None: as the question is long.
    """

    settings: type
    parts: Mapping[str, tuple[str, ...]]
    lora_targets: Mapping[str, str]
    frozen: tuple[str, ...]
    build: Callable[[Any], Any]
    load_base: Callable[[Path, Any, Any, Any], Any]
    load: Callable[[Path, Any, Path | None], Any]
    load_processor: Callable[..., PairProcessor]
    fuse: Callable[[Any, str], None]
    generate: Callable[[Any, Mapping[str, Any], bool, Mapping[str, Any]], tuple[Any, Any | None]]
    planned_config: Callable[[Path, Any], Any]
    flops: Callable[[Any, float, float, Settings], Sequence[Term]]
    image_tokens: Callable[[Any], int]
    blank_images: Callable[[Any, Any], dict[str, Any]]
    faults: Callable[[Any, Mapping[str, Any] | None], list[str]]
    contribution: Contribution | None = None
    new: tuple[str, ...] = ()
    whole_without_adapters: tuple[str, ...] = ()
    augment: Callable[[Any, np.ndarray, np.random.Generator], np.ndarray] | None = None
    base_files: Callable[[Any, Mapping[str, Any] | None], Mapping[str, str]] | None = None
    checkpointing_faults: Callable[[str, Mapping[str, Any] | None], list[str]] | None = None
    prompt_tokens: float | None = None

    @property
    def reads_question(self) -> bool:
        """Whether what the model says depends on what it is asked."""
        return self.prompt_tokens is None

    def part_of(self, name: str) -> str:
        """The part that a parameter is in."""
        parts = [part for part, prefixes in self.parts.items() if name.startswith(prefixes)]
        assert len(parts) == 1, f"{name}: every parameter is in one part, this one in {parts}"
        return parts[0]


def layer_faults(layers: tuple[int, ...]) -> list[str]:
    """What is wrong with the layers of the vision encoder that a module reads."""
    if bool(layers) and list(layers) == sorted(set(layers)) and layers[0] >= 0:
        return []
    return [f"vision_feature_layers must be distinct, rising and not negative, found {list(layers)}"]


def settings_faults(settings: Settings) -> list[str]:
    """What is wrong with the fields that every family has."""
    faults = [f"rates: {fault}" for fault in rate_faults(settings.rates, settings.module)]
    faults += [f"delays: {fault}" for fault in delay_faults(settings.delays)]
    if settings.align is not None:
        faults += [f"align: {fault}" for fault in align_faults(settings.align, settings)]
    return faults


def align_faults(align: Align, settings: Settings) -> list[str]:
    """What is wrong with a first phase beside the second."""
    faults = [f"rates: {fault}" for fault in rate_faults(align.rates, settings.module)]
    lost = [part for part, rate in align.rates.items() if rate is not None and settings.rates[part] is None]
    faults += [f"rates.{part}: trains, so it must have a rate in the fine-tuning, too" for part in lost]
    if align.rates["llm"] is not None and settings.lora.rank:
        faults.append("rates.llm must be null: the adapters of the fine-tuning are new and need the base's own weights")
    return faults


def rate_faults(rates: Mapping[str, float | None], module: object) -> list[str]:
    """What is wrong with the learning rates of the parts of a family that has a module of its own."""
    faults = [
        f"{part} must be above 0, or null for a frozen part; found {rate}"
        for part, rate in rates.items()
        if rate is not None and not rate > 0
    ]
    if module is None and rates.get("module") is not None:
        faults.append(f"module is {rates['module']} but there is no module; set it to null")
    if all(rate is None for rate in rates.values()):
        faults.append("no part trains; give one of them a rate")
    return faults


def delay_faults(delays: Mapping[str, float]) -> list[str]:
    """What is wrong with the shares of the steps before parts begin to train."""
    return [
        f"{part} must be 0 or more and under 1, a share of the steps; found {delay}"
        for part, delay in delays.items()
        if not 0 <= delay < 1
    ]

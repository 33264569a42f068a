"""A model family: what the rest of the project needs of it.

Training, prediction, planning and registration name no family: they take one from `m3diff.models.FAMILIES`. This
module and each family's own (`m3diff.py`) import nothing heavy; torch comes with the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3diff.models.decoding import decode_greedily
from m3diff.models.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor

    from m3diff.models.flops import Term
    from m3diff.models.processing import PairProcessor

    ImagePair = tuple[Image.Image, Image.Image]  # before, after


MODULE_UPDATE_RATIO = "module_update_ratio"


@dataclass(frozen=True)
class Contribution:
    """Contribution of a family's module while it trains, as numbers that become columns of the training curve.

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
    """A model family as data and functions. `config` is a configuration of its own class.

    Attributes:
        settings: the frozen dataclass of its settings in `params.yaml`.
        parts: the parts that have a learning rate each, with the prefixes of their parameters' names; every parameter
            is in one part. Its order is the order of the optimizer's groups.
        lora_targets: part -> regular expression of the full names of its linears that have adapters (rank above 0) or
            train in full (rank 0); nothing else of that part trains. Other parts train in full.
        classes: () -> the classes of its model (a transformers PreTrainedModel, see `llava.py`) and its processor.
        faults: (settings, the base's config.json or None) -> what makes the two impossible together, in words.
        frozen: prefixes of parameters that never train: the model never runs them.
        contribution: how much its module contributes while it trains; None: it is not measured.
        new: parts that the base does not have. Adapters hold their weights whether they train or not: a module that is
            frozen as it starts, to see what its training brings, is nowhere else.
        whole_without_adapters: parts of `lora_targets` that train whole with rank 0, not in those linears alone.
        augment: (settings, a pair of prepared images [2, rows, columns, 3], random numbers) -> the pair as it trains, a
            new array of the same shape. The random numbers follow from seed, epoch and sequence alone, so a run that
            resumes, on any number of workers, sees the same. Never at validation or prediction. None: as it is.
        base_files: (settings, the base's config.json or None) -> files required in the base's folder beside the base's
            own, each with where it comes from. None: nothing.
        prompt_tokens: of every prompt, without the images, where no question is asked. None: as the question is long.
    """

    settings: type[Settings]
    parts: Mapping[str, tuple[str, ...]]
    lora_targets: Mapping[str, str]
    classes: Callable[[], tuple[Any, Any]]
    faults: Callable[[Any, Mapping[str, Any] | None], list[str]]
    frozen: tuple[str, ...] = ()
    contribution: Contribution | None = None
    new: tuple[str, ...] = ()
    whole_without_adapters: tuple[str, ...] = ()
    augment: Callable[[Any, np.ndarray, np.random.Generator], np.ndarray] | None = None
    base_files: Callable[[Any, Mapping[str, Any] | None], Mapping[str, str]] | None = None
    prompt_tokens: float | None = None

    @property
    def reads_question(self) -> bool:
        """True where the answer depends on the question."""
        return self.prompt_tokens is None

    def part_of(self, name: str) -> str:
        """The part that a parameter is in."""
        parts = [part for part, prefixes in self.parts.items() if name.startswith(prefixes)]
        assert len(parts) == 1, f"{name}: every parameter is in one part, this one in {parts}"
        return parts[0]

    def build(self, config: Any) -> Any:
        """A model with weights from the random state, as for a new module; for counting on "meta"."""
        return self.classes()[0](config)

    def load_base(self, folder: Path, settings: Settings, dtype: Any, attn_implementation: Any) -> Any:
        """The base with a new module, whose weights follow from torch's random state."""
        options = {"dtype": dtype, "attn_implementation": attn_implementation}
        model = self.classes()[0].from_pretrained(folder, module=module_fields(settings), **options)
        return decode_greedily(model, folder)

    def load(self, folder: Path, dtype: Any, configuration: Path | None = None) -> Any:
        """A model without adapters. Where `configuration` is another folder, whose config.json is the model's, the
        weights of its new module may be missing from `folder`."""
        model, _ = self.classes()
        config = model.config_class.on_base(str(configuration or folder), None)
        loaded = model.from_pretrained(folder, config=config, module={} if configuration else None, dtype=dtype)
        return decode_greedily(loaded, folder)

    def load_processor(self, folder: Path, config: Any = None) -> PairProcessor:
        """The processor of a folder, for the model of `config`, by default the folder's."""
        model, processor = self.classes()
        return processor.of_folder(str(folder), config or model.config_class.on_base(str(folder), None))

    def planned_config(self, base: Path, settings: Settings) -> Any:
        """The configuration that would train: the base's where its folder is there, else published shapes by the
        folder's name; `name_or_path` then says whose."""
        config = self.classes()[0].config_class
        if (base / "config.json").is_file():
            return config.on_base(str(base), module_fields(settings))
        return config.published(base.name, module_fields(settings))

    def flops(self, model: Any, tokens: float, supervised: float) -> list[Term]:
        """The terms of one training sequence; see `count_flops`."""
        from m3diff.models.flops import count_flops

        return count_flops(model, self, tokens, supervised)

    def fuse(self, model: Any, activation_checkpointing: str) -> None:
        """Let a model compute by fused kernels, in place."""
        from m3diff.models.fused import make_fused

        make_fused(model, activation_checkpointing)


def module_fields(settings: Settings) -> dict[str, Any] | None:
    """The fields of the module as a configuration holds them."""
    return None if settings.module is None else asdict(settings.module)

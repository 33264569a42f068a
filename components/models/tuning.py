"""Select the weights of a model that are trained, add LoRA adapters, and group the weights for the optimizer.

Importing peft takes seconds, so it is imported only if a model has adapters. A merged checkpoint does not need peft.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from m3diff.models.family import Family, Settings
from m3diff.models.foreign_code import CheckpointError, read_json
from m3diff.records.errors import ValueFault

# Fields of adapter_config.json that `prepare_for_training` sets. All other fields have peft's defaults.
# peft itself sets `fan_in_fan_out`, which is true if the adapted layers are GPT-2's Conv1D.
ADAPTER_FIELDS = ("r", "lora_alpha", "lora_dropout", "target_modules", "bias", "fan_in_fan_out")
# Fields in which peft records the origin of adapters. They do not affect the weights, so this project ignores them.
ADAPTER_RECORDS = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_type",
    "peft_version",
    "revision",
    "task_type",
)


@dataclass(frozen=True)
class TrainableGroup:
    """Parameters that share a learning rate and a delay.

    Attributes:
        parts: the parts of the model that the parameters belong to.
        lr: learning rate.
        parameters: the parameters.
        delay: share of the steps before the training of these parameters starts.
    """

    parts: tuple[str, ...]
    lr: float
    parameters: list[nn.Parameter]
    delay: float = 0.0


def prepare_for_training(model: Any, family: Family, settings: Settings) -> Any:
    """Prepare a model for training: add LoRA adapters, set `requires_grad`, and return the model.

    If the rank is above 0, adapters are added to all parts with LoRA targets, except frozen parts.

    The adapters do not use dropout, because shared-prefix packing is exact only without dropout.

    Raises:
        ValueFault: a LoRA target does not match any linear layer.
    """
    targets = family.adapter_targets(model)
    adapted_targets: dict[str, str | list[str]] = {}
    if settings.lora.rank:
        adapted_targets = {part: target for part, target in targets.items() if settings.rates.get(part) is not None}
    module_names = [name for name, _ in model.named_modules()]
    for part, target in adapted_targets.items():
        if not any(is_target(name, target) for name in module_names):
            raise ValueFault("models.no_linear_for_adapters", part=part, value=target)
    adapted_model = model
    if adapted_targets:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=settings.lora.rank,
            lora_alpha=settings.lora.alpha,
            lora_dropout=0.0,
            target_modules=join_targets(list(adapted_targets.values())),
            bias="none",
        )
        with suppress_adapter_warnings():
            # otherwise, peft would keep the adapters of a bf16 model in fp32
            adapted_model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = should_train(name, family, settings, targets)
    return adapted_model


def is_target(name: str, target: str | list[str]) -> bool:
    """Return whether a layer is one of the targets: of a regular expression, or of a list of full names."""
    return name in target if isinstance(target, list) else re.fullmatch(target, name) is not None


def join_targets(targets: list[str | list[str]]) -> str | list[str]:
    """Return the targets of all parts as one, in the form that peft takes. All have the same form."""
    names = [name for target in targets if isinstance(target, list) for name in target]
    return names or "|".join(target for target in targets if isinstance(target, str))


@contextmanager
def suppress_adapter_warnings() -> Iterator[None]:
    """Suppress two warnings that users cannot act on, within a block in which peft wraps a model.

    peft 0.21 uses the old name of a property of transformers 5.23, which prints a warning of four lines. It can be
    removed when peft uses the new name. peft also warns when it adapts the setting `fan_in_fan_out` to the class of a
    layer.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)
        yield


def read_adapter_config(path: Path) -> Any:
    """Read the adapter_config.json of adapters that `prepare_for_training` created. Return it as a LoraConfig of peft.

    peft's own function imports modules and downloads files that the fields refer to. This function reads only the
    fields that `prepare_for_training` sets.

    Raises:
        CheckpointError: the file is not a valid adapter configuration, or another field differs from peft's default.
    """
    from peft import LoraConfig

    fields = read_json(path)
    if not isinstance(fields, dict):
        raise CheckpointError("models.no_fields_of_adapters", path=path)
    defaults = LoraConfig().to_dict()
    for field, value in fields.items():
        if field in ADAPTER_FIELDS or field in ADAPTER_RECORDS:
            continue
        # a field that the installed peft does not support is disabled if it is null, false or empty
        is_default = value == defaults[field] if field in defaults else not value
        if not is_default:
            raise CheckpointError("models.other_recipe_of_adapters", path=path, field=field, value=value)
    return LoraConfig(**{field: fields[field] for field in ADAPTER_FIELDS if field in fields})


def meta_model(config: Any, family: Family, settings: Settings, precision: str = "fp32") -> Any:
    """Create the model that a run trains, with adapters, on the "meta" device, where weights have shapes but no data.

    The model is returned without peft's wrapper.
    """
    with torch.device("meta"):
        model = family.build(config)
        prepare_for_training(model, family, settings)
    return model.to(torch.bfloat16 if precision == "bf16" else torch.float32)


def should_train(name: str, family: Family, settings: Settings, targets: Mapping[str, str | list[str]]) -> bool:
    """Return whether a parameter is trained.

    Args:
        name: name of the parameter in the model without peft's wrapper.
        family: family of the model.
        settings: settings of the family.
        targets: the result of the family's `adapter_targets` for the model.
    """
    part = family.part_of(name)
    if settings.rates.get(part) is None or name.startswith(family.unused_parameters):
        return False
    target = targets.get(part)
    if target is None:
        return True
    if settings.lora.rank:
        return is_adapter(name)
    layer, _, kind = name.rpartition(".")
    return part in family.whole_parts_without_adapters or (kind in ("weight", "bias") and is_target(layer, target))


def is_adapter(name: str) -> bool:
    """Return whether the parameter with this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def trainable_groups(model: nn.Module, family: Family, settings: Settings) -> list[TrainableGroup]:
    """Return the trained parameters as one group for each combination of learning rate and delay.

    The groups have the order of the family's parts, and the parameters in a group have the model's order.
    """
    parts_by_rate: dict[tuple[float, float], list[str]] = {}
    for part in family.parts:
        rate = settings.rates.get(part)
        if rate is not None:
            delay = settings.delays.get(part, 0.0)
            parts_by_rate.setdefault((rate, delay), []).append(part)

    groups = []
    for (rate, delay), parts in parts_by_rate.items():
        parameters = []
        for name, parameter in unwrap_model(model).named_parameters():
            if parameter.requires_grad and family.part_of(name) in parts:
                parameters.append(parameter)
        if parameters:
            groups.append(TrainableGroup(parts=tuple(parts), lr=rate, parameters=parameters, delay=delay))
    return groups


def unwrap_model(model: nn.Module) -> Any:
    """Return the model without peft's wrapper, but with its adapters."""
    return model.get_base_model() if is_adapted(model) else model  # type: ignore[operator]


def is_adapted(model: nn.Module) -> bool:
    """Return whether the model is wrapped by peft."""
    from peft import PeftModel

    return isinstance(model, PeftModel)


def trainable_names(model: nn.Module) -> list[str]:
    """Return the names of the trained parameters in the model without peft's wrapper."""
    return [name for name, parameter in unwrap_model(model).named_parameters() if parameter.requires_grad]


def parameter_counts(model: nn.Module, family: Family) -> dict[str, int]:
    """Return the number of `trainable` and `frozen` parameters, and the number of trained parameters of each part.

    Call this before the adapters are merged.
    """
    counts = {"trainable": 0, "frozen": 0} | dict.fromkeys(family.parts, 0)
    for name, parameter in unwrap_model(model).named_parameters():
        part = family.part_of(name)
        size = getattr(parameter, "ds_numel", parameter.numel())  # with ZeRO 3, `numel` counts only a partition
        if parameter.requires_grad:
            counts["trainable"] += size
            counts[part] += size
        else:
            counts["frozen"] += size
    return counts


@torch.no_grad()
def merge_adapters(model: nn.Module) -> Any:
    """Fold the adapters into the weights and return the model, which then does not need peft."""
    return model.merge_and_unload() if is_adapted(model) else model  # type: ignore[operator]

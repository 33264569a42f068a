"""Trainable weights of a model: its parts by their learning rates, LoRA adapters, the optimizer's groups. Names no
family.

peft takes seconds to import, and is where adapters are: a merged checkpoint captions without it.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from m3diff.models.family import Family, Settings


@dataclass(frozen=True)
class TrainableGroup:
    """Parameters of one learning rate, the parts that they are from, and the share of the steps before they train."""

    parts: tuple[str, ...]
    lr: float
    parameters: list[nn.Parameter]
    delay: float = 0.0


def prepare(model: Any, family: Family, settings: Settings) -> Any:
    """Add LoRA adapters to the linears of the parts that train with them, and mark what trains.

    Dropout is 0: shared-prefix packing is exact only so. Raises ValueError where a target matches no linear.
    """
    targets = {}
    if settings.lora.rank:
        targets = {part: linears for part, linears in family.lora_targets.items() if settings.rates[part] is not None}
    for part, target in targets.items():
        if not any(re.fullmatch(target, name) for name, _ in model.named_modules()):
            raise ValueError(f"LoRA targets of the part {part} match 0 linears: {target}")
    adapted = model
    if targets:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=settings.lora.rank,
            lora_alpha=settings.lora.alpha,
            lora_dropout=0.0,
            target_modules="|".join(targets.values()),
            bias="none",
        )
        adapted = get_peft_model(model, lora, autocast_adapter_dtype=False)  # in the weights' own precision
    for name, parameter in model.named_parameters():
        parameter.requires_grad = should_train(name, family, settings)
    return adapted


def meta_model(config: Any, family: Family, settings: Settings, precision: str = "fp32") -> Any:
    """The model as it trains, with adapters, without storage and without peft's wrapper."""
    with torch.device("meta"):
        model = family.build(config)
        prepare(model, family, settings)
    return model.to(torch.bfloat16 if precision == "bf16" else torch.float32)


def should_train(name: str, family: Family, settings: Settings) -> bool:
    """True where a parameter trains, by its name in the model without peft's wrapper around it."""
    part = family.part_of(name)
    if settings.rates[part] is None or name.startswith(family.frozen):
        return False
    target = family.lora_targets.get(part)
    if target is None:
        return True
    if settings.lora.rank:
        return is_adapter(name)
    return part in family.whole_without_adapters or re.fullmatch(rf"({target})\.(weight|bias)", name) is not None


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def trainable_groups(model: nn.Module, family: Family, settings: Settings) -> list[TrainableGroup]:
    """A group for each distinct learning rate and delay, in the order of the family's parts; parameters in the
    model's."""
    named = list(unwrapped(model).named_parameters())
    alike: dict[tuple[float, float], list[str]] = {}
    for part in family.parts:
        rate = settings.rates[part]
        if rate is not None:
            alike.setdefault((rate, settings.delays.get(part, 0.0)), []).append(part)
    groups = [
        TrainableGroup(
            tuple(parts),
            rate,
            [p for name, p in named if p.requires_grad and family.part_of(name) in parts],
            delay,
        )
        for (rate, delay), parts in alike.items()
    ]
    return [group for group in groups if group.parameters]


def unwrapped(model: nn.Module) -> Any:
    """The model without peft's wrapper around it; its adapters stay."""
    return model.get_base_model() if is_adapted(model) else model  # type: ignore[operator]


def is_adapted(model: nn.Module) -> bool:
    """True where peft's wrapper is around the model."""
    from peft import PeftModel

    return isinstance(model, PeftModel)


def trainable_names(model: nn.Module) -> list[str]:
    return [name for name, p in unwrapped(model).named_parameters() if p.requires_grad]


def parameter_counts(model: nn.Module, family: Family) -> dict[str, int]:
    """Parameters that train, those that do not, and those that train of each part; before adapters are merged."""
    counts = {"trainable": 0, "frozen": 0} | dict.fromkeys(family.parts, 0)
    for name, parameter in unwrapped(model).named_parameters():
        size = getattr(parameter, "ds_numel", parameter.numel())  # ZeRO 3 holds a part
        counts["trainable" if parameter.requires_grad else "frozen"] += size
        counts[family.part_of(name)] += size if parameter.requires_grad else 0
    return counts


@torch.no_grad()
def merge(model: nn.Module) -> Any:
    """Fold the adapters into the weights; the model then needs no peft."""
    return unwrapped(model.merge_and_unload() if is_adapted(model) else model)  # type: ignore[operator]

"""Train and load tiny bases of the family `auto` in tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode

from m3diff.models import FAMILIES
from m3diff.models.auto import AutoSettings
from m3diff.models.auto_processor import ChatTemplateProcessor
from m3diff.models.contract import Prepared, TrainingSequence
from m3diff.models.dialogue import encode_dialogue
from m3diff.models.settings import Lora
from m3diff.models.stock_processor import PIL, StockProcessor
from m3diff.models.tuning import prepare_for_training
from m3diff.records.sample import Turn
from tests.tiny_vlm import TEMPLATES, lfm2_vl_processor

RATES = {"vision": 2.0e-3, "projector": 2.0e-3, "llm": 4.0e-3}


class InDouble(TorchFunctionMode):
    """Computes in fp64 what a model of transformers computes in fp32 whatever the precision of its weights is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        doubled_args = [torch.float64 if value is torch.float32 else value for value in args]
        doubled_kwargs = {
            name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()
        }
        return func(*doubled_args, **doubled_kwargs)


def auto_settings(base: str, **changes: Any) -> AutoSettings:
    """Return settings that train all parts of a tiny base with adapters."""
    fields: dict[str, Any] = {"lora": Lora(rank=8, alpha=16), "rates": RATES, "template": TEMPLATES.get(base, {})}
    return AutoSettings(family="auto", module=None, **fields | changes)


def load_processor(base: str, folder: Path) -> ChatTemplateProcessor:
    """Return the processor of a tiny base. That of LFM2-VL has a stand-in that needs no torchvision."""
    settings = auto_settings(base)
    if base != "lfm2_vl":
        processor = FAMILIES["auto"].load_processor(folder, None, settings)
        assert isinstance(processor, ChatTemplateProcessor)
        return processor
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    stock = StockProcessor(lfm2_vl_processor(folder), PIL, None, False)
    return ChatTemplateProcessor(stock, folder, config.image_token_id)


def adapted_model(base: str, folder: Path, random_adapters: bool = True, **changes: Any) -> Any:
    """Return a tiny base with adapters, in training mode.

    Args:
        random_adapters: whether the adapters already change the model, so that all their weights have a gradient.
        changes: changed fields of the settings.
    """
    torch.manual_seed(0)
    settings = auto_settings(base, **changes)
    model = FAMILIES["auto"].load_base(folder, settings, torch.float32, None)
    adapted = prepare_for_training(model, FAMILIES["auto"], settings).train()
    if random_adapters:
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.05)
    return adapted


def training_sequence(
    processor: ChatTemplateProcessor, images: Sequence[Any], dialogues: Iterable[Sequence[Turn]], double: bool = False
) -> TrainingSequence:
    """Return an image set with its dialogues.

    Args:
        double: whether the images are in fp64.
    """
    prepared = processor.prepare(images)
    if double:
        tensors = {}
        for name, tensor in prepared.tensors.items():
            tensors[name] = tensor.double() if tensor.is_floating_point() else tensor
        prepared = Prepared(tensors, prepared.marks)
    branches = []
    for turns in dialogues:
        branches += encode_dialogue(processor.encode_prompt, processor.encode_answer, turns, prepared.marks)
    return TrainingSequence(prepared, branches)

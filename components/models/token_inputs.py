"""The inputs of a vision-language model that have one value for each token, besides the token ids.

They are computed as the base's own processor and model compute them, so that a packed sequence can use those of the
sequences it was made from.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from m3diff.models.auto_processor import ChatTemplateProcessor


def position_ids(
    processor: ChatTemplateProcessor, model: Any, ids: Sequence[int], images: Mapping[str, Tensor]
) -> Tensor:
    """Return the positions of the tokens of a sequence, as the model itself computes them, on the CPU.

    Args:
        processor: processor of the model.
        model: the model, with or without peft's wrapper.
        ids: the sequence: T tokens.
        images: the image arguments of the model for this sequence.

    Returns:
        [1, T], or [3, 1, T] for models that number time, rows and columns.
    """
    bare_model = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner_model = getattr(bare_model, "model", bare_model)
    if not hasattr(inner_model, "get_rope_index"):
        return torch.arange(len(ids))[None]
    input_ids = torch.tensor([list(ids)])
    inputs = {"input_ids": input_ids, **processor.token_types(input_ids), **images}
    names = inspect.signature(inner_model.get_rope_index).parameters
    positions, _ = inner_model.get_rope_index(**{name: inputs[name] for name in names if name in inputs})
    return positions

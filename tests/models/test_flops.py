"""FLOPs of layers that only some families have."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from m3diff.models.flops import count_flops
from m3diff.records.errors import ParamsError
from tests.errors import raises

TOKENS = 5


class Tiny(nn.Module):
    """A model with one layer, whose input is the last three dimensions of the blank images."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = layer
        self.shape = shape
        self.config = SimpleNamespace(image_tokens_of=lambda images: 0, image_token_index=0)

    def get_output_embeddings(self) -> None:
        return None

    def blank_images(self, config: Any, device: Any, images: int = 2) -> dict[str, Tensor]:
        return {"x": torch.zeros(self.shape, device=device, requires_grad=True)}

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return self.layer(x)


FAMILY = SimpleNamespace(parts={"part": ()}, part_of=lambda name: "part")


class OwnProduct(nn.Module):
    """A layer of an unknown class, with a matrix."""

    def __init__(self, matrix_name: str) -> None:
        super().__init__()
        setattr(self, matrix_name, nn.Parameter(torch.zeros(4, 4)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ next(self.parameters())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(4, 6), (1, TOKENS, 4)),
        (lambda: Conv1D(6, 4), (1, TOKENS, 4)),
        (lambda: nn.Conv3d(3, 6, 2, stride=2), (1, 3, 4, 4, 4)),
    ],
    ids=["linear", "transposed", "patches of frames"],
)
def test_the_flops_of_a_layer_are_those_that_torch_counts(layer, shape):
    with torch.device("meta"):
        model = Tiny(layer(), shape)
    (term,) = count_flops(model, FAMILY, TOKENS, 1)
    with FlopCounterMode(display=False) as counter:
        output = model(**model.blank_images(None, "meta"))
        assert term.forward == counter.get_total_flops()
        output.sum().backward()
    assert term.total == counter.get_total_flops()


@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
def test_a_trained_layer_that_is_not_counted_is_refused(is_trained):
    with torch.device("meta"):
        model = Tiny(OwnProduct("weight"), (1, TOKENS, 4)).requires_grad_(is_trained)
    if is_trained:
        with raises(ParamsError, "models.layer_not_counted", value=1, names=["layer"], classes=["OwnProduct"]):
            count_flops(model, FAMILY, TOKENS, 1)
    else:
        assert count_flops(model, FAMILY, TOKENS, 1) == []


@pytest.mark.parametrize("layer", [lambda: OwnProduct("queries"), lambda: nn.Linear(4, 4)], ids=["queries", "linear"])
def test_an_input_that_is_trained_is_no_layer(layer):
    with torch.device("meta"):
        count_flops(Tiny(layer(), (1, TOKENS, 4)), FAMILY, TOKENS, 1)

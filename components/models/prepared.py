"""The prepared images of an image set. Shared folders have a copy of this file (see `m3diff.commands.export`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Prepared(NamedTuple):
    """The images of one image set, prepared for a model. The tensors are on the CPU.

    Attributes:
        tensors: the images in the form of the family's processor, by name. Empty if there are no images.
        marks: for each image, the text that represents it in a prompt, such as 26 times "<image>".
    """

    tensors: dict[str, Tensor]
    marks: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

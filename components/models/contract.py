"""The interface between a model family and the code that trains it and generates answers with it.

A family's processor prepares the images of an image set once. Any number of questions is then encoded around them.
Packing combines several questions and answers about the same images into one sequence, so that the images and the
shared part of the prompts are processed only once. `m3diff.models.family.Family` defines the rest of a family.

This file imports torch and Pillow only for type checkers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from m3diff.models.prepared import Prepared
from m3diff.records.sample import Turn

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor

    from m3diff.models.device import Device


@dataclass(frozen=True)
class Takes:
    """The samples that a family can process.

    Attributes:
        images: possible numbers of images in an image set.
        questions: whether the answer depends on the question.
        turns: whether a question can have turns before it.
    """

    images: tuple[int, ...] = (0, 1, 2)
    questions: bool = True
    turns: bool = True


class Processor(Protocol):
    """Converts images and texts into model inputs, and generated tokens into texts."""

    tokenizer: Any
    places_images: bool
    """Whether an image can be anywhere in a prompt. Otherwise, all images come first."""

    @property
    def pad_id(self) -> int:
        """Id of the padding token."""

    @property
    def end_id(self) -> int:
        """Id of the token that ends an answer."""

    def prepare(self, images: Iterable[Image.Image]) -> Prepared:
        """Prepare the images of one image set.

        Args:
            images: the images. If it is an iterator that decodes them, a processor that prepares each image by itself
                holds only one decoded image at a time. The iterator may change an image once the next one is requested.
        """

    def blank_pair(self) -> Prepared:
        """Return a prepared pair of black images, for micro-batches without a pair."""

    def marks(self, images: int) -> tuple[str, ...]:
        """Return the marks of an image set with this number of images (see `Prepared`)."""

    def encode_prompt(self, turns: Sequence[Turn], marks: Sequence[str]) -> tuple[int, ...]:
        """Return the token ids of the prompt for the answer to the last question, exactly as generation gets it.

        Args:
            turns: the turns of a dialogue. The answer of the last turn is ignored.
            marks: marks of the images that the dialogue is about.

        Raises:
            ValueFault: a text contains a mark.
        """

    def encode_answer(self, text: str) -> list[int]:
        """Return the token ids of an answer, including the end token."""

    def collate(self, prepared: Sequence[Prepared]) -> dict[str, Tensor]:
        """Combine the images of several image sets, on the CPU and as compactly as they were prepared."""

    def image_inputs(self, images: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return the model's image arguments on the device.

        Args:
            images: the result of `collate`, possibly in pinned memory.
            device: device of the model.
        """

    def decode(self, tokens: Tensor) -> list[str]:
        """Decode generated token ids, [B, tokens], into texts without special tokens and surrounding whitespace."""

    def save_pretrained(self, folder: str | Path) -> Any:
        """Write the files of the processor to a folder."""


class Branch(NamedTuple):
    """A dialogue as token ids.

    Attributes:
        ids: the first prompt and its answer, followed by further prompts and answers if the dialogue has more turns.
        spans: [start, end) of each answer in `ids`, including its end token. The loss is computed on these tokens.
    """

    ids: list[int]
    spans: list[tuple[int, int]]


class TrainingSequence(NamedTuple):
    """An image set with the branches that are trained on it together.

    Attributes:
        weight: weight of its tokens in the loss: 1, or 0 if the sequence only pads a batch.
    """

    prepared: Prepared
    branches: list[Branch]
    weight: int = 1


class PackedBatch(Protocol):
    """A micro-batch in the form of a family's packing, ready for a training step."""

    @property
    def labels(self) -> Tensor:
        """The supervised tokens, branch by branch, [supervised tokens] int64."""

    @property
    def weights(self) -> Tensor:
        """The weight of each supervised token in the loss, [supervised tokens] float32."""


class Packing(Protocol):
    """Trains several branches on the same images in one pass. Loss and gradients equal those of separate passes."""

    def batch(self, sequences: Sequence[TrainingSequence], processor: Processor, device: Device) -> Any:
        """Return a `PackedBatch` for the device. If the device is a GPU, its tensors are in pinned memory."""

    def logits(self, model: Any, batch: Any, processor: Processor, device: Device) -> Tensor:
        """Return the logits of the supervised tokens, [supervised tokens, vocabulary], in the order of the labels.

        Args:
            model: the model, or DeepSpeed's engine around it.
            batch: a micro-batch from `batch` for the same device. It is copied to the device here.
            processor: processor of the model.
            device: device of the model.
        """

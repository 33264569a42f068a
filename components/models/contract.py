"""The interface between a model family and the code that trains it and generates answers with it.

A family's processor prepares the images of an image set once. Any number of questions is then encoded around them.
Packing combines several questions and answers about the same images into one sequence, so that the images and the
shared part of the prompts are processed only once. `ModelConfig` and `Model` list what the rest of the project uses of
a transformers model. `m3diff.models.family.Family` defines the rest of a family.

`m3diff.models.conformity` checks these protocols when a model is loaded for training. This file imports torch and
Pillow only for type checkers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

from m3diff.models.prepared import Prepared
from m3diff.records.sample import PAIR, Turn

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
        fixed_marks: whether the marks of an image set depend only on its number of images. Otherwise, they also depend
            on the sizes of the images, and `Processor.marks` returns the marks with the largest number of tokens.
    """

    images: tuple[int, ...] = (0, 1, 2)
    questions: bool = True
    turns: bool = True
    fixed_marks: bool = True


class Processor(Protocol):
    """Converts images and texts into model inputs, and generated tokens into texts."""

    tokenizer: Any
    places_images: bool
    """Whether an image can be anywhere in a prompt. Otherwise, all images come first."""

    @classmethod
    def of_folder(cls, folder: str, config: Any) -> Self:
        """Load the processor from the folder of a trained model or a base.

        Args:
            folder: the folder. Load from it with the literal argument `trust_remote_code=False`.
            config: the `ModelConfig` of the model.
        """

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
        """Return the marks of an image set with this number of images (see `Prepared`).

        If the marks depend on the sizes (`Takes.fixed_marks`), these are the marks of the largest number of tokens.
        """

    def encode_prompt(self, turns: Sequence[Turn], marks: Sequence[str]) -> tuple[int, ...]:
        """Return the token ids of the prompt for the answer to the last question, exactly as generation gets it.

        Args:
            turns: the turns of a dialogue. The answer of the last turn is ignored.
            marks: marks of the images that the dialogue is about.

        Raises:
            ValueFault: a text contains a mark.
        """

    def token_types(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return the arguments of the model that have one value per token besides the ids, [B, tokens].

        An example is which tokens belong to images. Empty if the model takes no such argument.
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

    def save_pretrained(self, folder: str | Path, /) -> Any:
        """Write the files of the processor to a folder."""


@runtime_checkable
class ScalesImages(Processor, Protocol):
    """A processor that chooses the number of visual tokens by the size of an image, within the bounds of its settings.

    The additional members are optional. They serve the log and the messages.
    """

    def prepare_with_scales(self, images: Iterable[Image.Image]) -> tuple[Prepared, tuple[float | None, ...]]:
        """Prepare the images of one image set, and return the factor by which the sides of each image are scaled.

        A factor is None if it is unknown.
        """

    def count_image_tokens(self, ids: Sequence[int]) -> int:
        """Return the number of tokens of a sequence that the model replaces by visual tokens."""

    def settings_that_bound_tokens(self, images: Sequence[Image.Image]) -> dict[str, Any]:
        """Return the settings whose reduction gives these images fewer tokens, with their values."""


class ModelConfig(Protocol):
    """The configuration of a model, a transformers `PreTrainedConfig`.

    The file of a family registers the class of the configuration with `AutoConfig.register`, because `AutoTokenizer`
    reads config.json to find the class of the tokenizer.
    """

    @property
    def name_or_path(self) -> Any:
        """Name of the published model, or the folder that the configuration was read from."""

    @property
    def image_token_index(self) -> Any:
        """Id of the token that represents a visual token in a prompt."""

    def image_tokens_of(self, images: int) -> int:
        """Return the number of visual tokens of an image set with this number of images.

        If the number depends on the images, return the largest number.
        """

    def get_text_config(self) -> Any:
        """Return the configuration of the LLM, whose `num_hidden_layers` is the number of its layers."""

    @classmethod
    def from_folder(cls, folder: str, module: dict[str, Any] | None) -> Self:
        """Read the configuration from the folder of a trained model or a base.

        Args:
            folder: the folder.
            module: settings of the family's module, which are used if config.json contains none. None adds no module.
        """

    @classmethod
    def for_published_base(cls, name: str, module: dict[str, Any] | None) -> Self:
        """Return the configuration of a published base, so that `m3diff plan` needs no folder.

        Args:
            name: name of the base's folder. If it is unknown, the family's usual base is described.
            module: see `from_folder`.
        """


class Model(Protocol):
    """A model, a transformers `PreTrainedModel`.

    `forward` takes FORWARD_ARGUMENTS and the result of the processor's `image_inputs`, by name, and returns an object
    with `logits`.
    """

    generation_config: Any
    config_class: Any
    """The `ModelConfig` class of the model."""

    def __init__(self, config: Any) -> None: ...

    @property
    def config(self) -> Any:
        """The `ModelConfig` of the model."""

    @property
    def device(self) -> Any:
        """Device of the model."""

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        /,
        *,
        config: Any = None,
        module: dict[str, Any] | None = None,
        dtype: Any = None,
        attn_implementation: Any = None,
        trust_remote_code: bool = False,
    ) -> Any:
        """Load a trained model, or a base with a new module, from safetensors files.

        Args:
            folder: folder of the model.
            config: configuration of the model. By default, it is read from the folder.
            module: settings of the family's module if the folder is a base, which may lack the module's weights.
            dtype: data type of the weights.
            attn_implementation: attention of the model or of each of its parts, as in transformers.
            trust_remote_code: always False. Call transformers' function with the literal `trust_remote_code=False`.

        Raises:
            DataError: weights are missing or have the wrong shape.
        """

    @staticmethod
    def blank_images(config: Any, device: Any, images: int = PAIR) -> dict[str, Tensor]:
        """Return zeros in the shape of one image set's inputs with `config.image_tokens_of(images)` visual tokens.

        Args:
            config: the `ModelConfig`.
            device: device of the images, such as "meta". Tensors whose values the model reads are on the CPU.
            images: number of images of the image set.
        """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tokens of prompts and answers, [B, tokens].

        Args:
            args: empty.
            kwargs: the prompts, padded on the left, as `input_ids` and `attention_mask`, [B, tokens], the image inputs,
                and options of transformers' `generate`.
        """

    def get_input_embeddings(self) -> Any:
        """Return the layer that embeds tokens."""

    def get_output_embeddings(self) -> Any:
        """Return the language-model head."""

    def save_pretrained(self, folder: Any, /) -> Any:
        """Write config.json and the weights to a folder."""


# Arguments of the model's `forward`. All are passed by name:
#
# input_ids, attention_mask: [B, T], as in transformers, or one row with the mask of a packing.
# position_ids: [B, T]; position of each token. By default, tokens are numbered from 0.
# tokens: copy of `input_ids` on the CPU, where image tokens can be found without waiting for a GPU. A model may ignore
#     it. Visual tokens beyond the image tokens belong to a blank pair, and must get a gradient of zero.
# use_cache: always False, except in `generate`.
# logits_to_keep: number of last positions with logits. With the packing `masked_rows`, also a mask [1, T] bool; the
#     logits are then [kept positions, vocabulary].
FORWARD_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "tokens", "use_cache", "logits_to_keep")


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
    """Trains several branches on the same images in one pass. Loss and gradients are the same as in separate passes.

    Attributes:
        shares_prompts: whether the branches of a sequence are one row, in which their common tokens and images are
            processed once. Otherwise, each branch is a row of its own.
    """

    shares_prompts: bool

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

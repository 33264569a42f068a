"""Answer questions about images with a checkpoint of any family, using batched greedy decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from m3diff.models.checkpoint import (
    convert_loading_errors,
    load_base_of_checkpoint,
    load_model,
    read_manifest,
    read_trained_on,
)
from m3diff.models.contract import Prepared, Processor
from m3diff.models.device import Device
from m3diff.models.family import Family
from m3diff.models.processing import pad_prompts
from m3diff.models.sample_batches import MAX_PREPARED_BYTES, split_by_bytes, split_by_shape
from m3diff.models.sample_limits import TrainedOn, fault_of_sample
from m3diff.records.errors import Fault
from m3diff.records.sample import Turn

if TYPE_CHECKING:
    from PIL import Image

# Default question of a model whose manifest names no question: the first question of the task `difference` in
# profiles/questions.yaml
QUESTION = "What has changed from the first image to the second?"

CACHED_PROMPTS = 256  # number of prompts whose tokens are kept, since most samples ask one of a few questions


class Captioner:
    """Answers questions about images with a model, by default the question that the model was trained on.

    Args:
        model: the model, which is put into evaluation mode.
        processor: processor of the model.
        family: family of the model.
        max_new_tokens: maximum length of an answer in tokens.
        trained_on: the samples that the model was trained on. By default, pairs and single questions.

    Attributes:
        question: the question that is asked by default: the trained question or, if it is unknown, QUESTION.
    """

    def __init__(
        self,
        model: Any,
        processor: Processor,
        family: Family,
        max_new_tokens: int,
        trained_on: TrainedOn | None = None,
    ) -> None:
        self.model = model.eval()
        self.processor = processor
        self.family = family
        self.max_new_tokens = max_new_tokens
        self.trained_on = trained_on or TrainedOn()
        self.question = self.trained_on.question or QUESTION

    def caption(self, image_sets: Sequence[Sequence[Image.Image]], question: str | None = None) -> list[str]:
        """Return the answer to a question about each image set, for example a caption for each pair (before, after).

        Args:
            image_sets: image sets with the same number of images. The prompts then need no padding, so the image sets
                of a batch do not affect each other's answers.
            question: the question about all image sets. None for the default question.
        """
        prepared = [self.processor.prepare(images) for images in image_sets]
        answers, _ = self.answer(prepared, [(self.ask(question),)] * len(prepared))
        return answers

    def ask(self, question: str | None) -> Turn:
        """Return the turn that asks a question, or the default question if it is None or empty."""
        return Turn(question or self.question)

    def fault_of_sample(self, images: int, question: str | None, earlier_turns: int = 0) -> Fault | None:
        """Return why the model cannot answer a sample, or None if it can. See `sample_limits.fault_of_sample`."""
        return fault_of_sample(self.family.takes, self.trained_on, images, question, earlier_turns)

    def encode_prompt(self, turns: Sequence[Turn], marks: Sequence[str]) -> tuple[int, ...]:
        """Return the token ids of the prompt for a dialogue. See the processor's `encode_prompt`.

        The tokens are cached, because callers also encode prompts to group them by length.

        Raises:
            ValueFault: a text contains a mark of an image.
        """
        return self._cached_encode_prompt(tuple(turns), tuple(marks))

    @cached_property
    def _cached_encode_prompt(self) -> Callable[[tuple[Turn, ...], tuple[str, ...]], tuple[int, ...]]:
        return lru_cache(maxsize=CACHED_PROMPTS)(self.processor.encode_prompt)

    @torch.inference_mode()
    def answer(
        self, prepared: Sequence[Prepared], dialogues: Sequence[Sequence[Turn]], saliency: bool = False
    ) -> tuple[list[str], np.ndarray | None]:
        """Answer the last question of each dialogue and, if requested, compute saliency maps.

        Answers and maps come from the same forward passes, so each image is encoded only once.

        Args:
            prepared: the image set of each dialogue, from the processor's `prepare`.
            dialogues: the turns of each dialogue. Those with prompts of the same length and the same number of images
                are answered together. No prompt is padded, so the samples do not affect each other's answers.
            saliency: whether to return maps that show where the model looks for differences. All image sets must then
                be pairs.

        Returns:
            An answer for each dialogue, and the maps, [pairs, rows, columns] float16 over the patch grid, each with
            sum 1. The maps are None if `saliency` is false or the family has no maps.
        """
        prompts = []
        shapes = []
        for images, turns in zip(prepared, dialogues, strict=True):
            prompt = self.encode_prompt(turns, images.marks)
            prompts.append(prompt)
            shapes.append((len(images.marks), len(prompt)))
        answers = [""] * len(prompts)
        maps: list[Any] = [None] * len(prompts)
        for positions in split_by_shape(shapes):
            prepared_group = [prepared[position] for position in positions]
            prompt_group = [prompts[position] for position in positions]
            answers_of_group, maps_of_group = self._answer_group(prepared_group, prompt_group, saliency)
            for number, position in enumerate(positions):
                answers[position] = answers_of_group[number]
                maps[position] = None if maps_of_group is None else maps_of_group[number]
        return answers, None if maps[0] is None else np.stack(maps)

    def _answer_group(
        self, prepared: Sequence[Prepared], prompts: Sequence[Sequence[int]], saliency: bool
    ) -> tuple[list[str], np.ndarray | None]:
        """Return the answers and maps of samples with prompts of the same length. See `answer`."""
        device = self.model.device
        inputs = pad_prompts(prompts, self.processor.pad_id)
        inputs |= self.processor.token_types(inputs["input_ids"])
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        inputs |= self.processor.image_inputs(self.processor.collate(prepared), device)
        decoding = {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": False,
            "eos_token_id": self.processor.end_id,
            "pad_token_id": self.processor.pad_id,
        }
        saliency_maps = self.family.maps if saliency else None
        recording: AbstractContextManager[list[torch.Tensor]] = nullcontext([])
        if saliency_maps is not None:
            recording = saliency_maps.record(self.model)
        with recording as recorded_maps:
            tokens = self.model.generate(**inputs, **decoding)
        answers = self.processor.decode(tokens[:, inputs["input_ids"].shape[1] :])
        if saliency_maps is None:
            return answers, None
        mean_maps = saliency_maps.mean(self.model, recorded_maps, len(tokens))
        # numpy does not support bfloat16
        return answers, mean_maps.float().cpu().numpy().astype(np.float16)

    def answer_in_parts(self, prepared: Iterable[Prepared], dialogues: Sequence[Sequence[Turn]]) -> list[str]:
        """Return the answer to the last question of each dialogue. See `answer`.

        Args:
            prepared: the image set of each dialogue. If it is an iterator that prepares them, it is stopped whenever
                the image sets take MAX_PREPARED_BYTES, until these are answered.
            dialogues: the turns of each dialogue.
        """
        answers: list[str] = []
        for part in split_by_bytes(prepared, MAX_PREPARED_BYTES):
            answers_of_part, _ = self.answer(part, dialogues[len(answers) : len(answers) + len(part)])
            answers += answers_of_part
        return answers


def load_captioner(
    checkpoint: Path, max_new_tokens: int = 64, device: Device | None = None, base: Path | None = None
) -> Captioner:
    """Load a checkpoint or a folder of adapters of any family, and return a captioner for it.

    Args:
        checkpoint: folder of the checkpoint or the adapters.
        max_new_tokens: maximum length of an answer in tokens.
        device: device and precision. By default, a GPU in bfloat16 if torch can find one, otherwise the CPU in float32.
        base: folder of the adapters' base model. By default, the path in the manifest is used.

    Raises:
        CheckpointError: the folder is incomplete or damaged, or the base is missing or is not the base that the
            adapters were trained on.
        DeviceError: `device` is a GPU, but torch cannot find one.
    """
    if device is None:
        device = Device(gpu=True, precision="bf16") if torch.cuda.is_available() else Device(False, "fp32")
    model, family = load_model(checkpoint, device.dtype, base)
    with convert_loading_errors(checkpoint):
        processor = family.load_processor(checkpoint, model.config)
        trained_on = read_trained_on(read_manifest(checkpoint))
    return Captioner(model.to(device.torch), processor, family, max_new_tokens, trained_on)


def load_base_captioner(checkpoint: Path, max_new_tokens: int, device: Device) -> Captioner:
    """Load the base that a checkpoint was trained from, without a new module, and return a captioner for it.

    Args:
        checkpoint: folder of the checkpoint.
        max_new_tokens: maximum length of an answer in tokens.
        device: device and precision.

    Raises:
        CheckpointError: the checkpoint's manifest or the base is missing, damaged, or not the one of the training.
        DeviceError: `device` is a GPU, but torch cannot find one.
    """
    model, processor, family = load_base_of_checkpoint(checkpoint, device.dtype)
    return Captioner(model.to(device.torch), processor, family, max_new_tokens)

"""Caption image pairs with a checkpoint of any family, using batched greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from m3diff.models.checkpoint import convert_loading_errors, load_model, read_manifest, trained_question
from m3diff.models.device import Device
from m3diff.models.family import Family
from m3diff.models.processing import PairProcessor

if TYPE_CHECKING:
    from m3diff.models.family import ImagePair

# Default question of a model whose manifest names no question: the first question of the task `difference` in
# profiles/questions.yaml
QUESTION = "What has changed from the first image to the second?"


class Captioner:
    """Describes image pairs with a model.

    Args:
        model: the model, which is put into evaluation mode.
        processor: processor of the model.
        family: family of the model.
        max_new_tokens: maximum length of a caption in tokens.
        trained_question: the question that the model was trained on. None if it is unknown.

    Attributes:
        question: the question that is asked by default: the trained question or, if it is unknown, QUESTION.
    """

    def __init__(
        self,
        model: Any,
        processor: PairProcessor,
        family: Family,
        max_new_tokens: int,
        trained_question: str | None = None,
    ) -> None:
        self.model = model.eval()
        self.processor = processor
        self.family = family
        self.max_new_tokens = max_new_tokens
        self.trained_question = trained_question
        self.question = trained_question or QUESTION

    def caption(self, pairs: Sequence[ImagePair], question: str | None = None) -> list[str]:
        """Return a caption for each image pair (before, after).

        All pairs have the same question, so the prompts are not padded and the pairs of a batch do not affect each
        other's captions.

        Args:
            question: the question for all pairs. None for the default question.
        """
        images = []
        for before, after in pairs:
            images.append(self.processor.prepare_image(before))
            images.append(self.processor.prepare_image(after))
        captions, _ = self.answer(images, question)
        return captions

    @torch.inference_mode()
    def answer(
        self, images: Sequence[np.ndarray], question: str | None = None, saliency: bool = False
    ) -> tuple[list[str], np.ndarray | None]:
        """Return captions and, if requested, saliency maps for pairs of prepared images.

        Captions and maps come from the same forward passes, so each image is encoded only once.

        Args:
            images: images from the processor's `prepare_image`, ordered before, after, before, after, ...
            question: the question for all pairs. None for the default question.
            saliency: whether to return maps that show where the model looks for differences.

        Returns:
            A caption for each pair, and the maps, [pairs, rows, columns] float16 over the patch grid, each with sum 1.
            The maps are None if `saliency` is false.
        """
        device = self.model.device
        prompts = self.processor.prompt_inputs([question or self.question] * (len(images) // 2))
        inputs = {name: value.to(device) for name, value in prompts.items()}
        inputs |= self.processor.image_inputs(torch.from_numpy(np.stack(images)).to(device))
        decoding = {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": False,
            "eos_token_id": self.processor.end_id,
            "pad_token_id": self.processor.pad_id,
        }
        recording = self.model.record_maps() if saliency else nullcontext()
        with recording as maps:
            tokens = self.model.generate(**inputs, **decoding)
        captions = self.processor.decode(tokens[:, inputs["input_ids"].shape[1] :])
        if maps is None:
            return captions, None
        mean_maps = self.model.mean_map(maps, len(tokens))
        # numpy does not support bfloat16
        return captions, mean_maps.float().cpu().numpy().astype(np.float16)


def load_captioner(
    checkpoint: Path, max_new_tokens: int = 64, device: Device | None = None, base: Path | None = None
) -> Captioner:
    """Load a checkpoint or a folder of adapters of any family, and return a captioner for it.

    Args:
        checkpoint: folder of the checkpoint or the adapters.
        max_new_tokens: maximum length of a caption in tokens.
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
        question = trained_question(read_manifest(checkpoint))
    return Captioner(model.to(device.torch), processor, family, max_new_tokens, question)

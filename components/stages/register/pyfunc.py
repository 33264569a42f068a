"""Caption images, or answer questions about them, with a registered model that MLflow loads.

Use it as `mlflow.pyfunc.load_model("models:/m3diff@champion").predict([{"before": ..., "after": ...}])`.

MLflow stores this file with the model ("models from code"), together with `components/models` and the checkpoint, so
the model can be loaded in a new process without the checkout. A version that stores only adapters (the trained weights)
also needs its base model. By default, the base is loaded from the folder where it was at registration. Another folder
can be set with `load_model(..., model_config={"base": FOLDER})`. The sha256 of the base is checked.
"""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel, PythonModelContext
from PIL import Image

LONGEST_PATH = 4096
BATCH_ROWS = 16
COLUMNS = ("before", "after", "images", "question", "history")


class PyfuncCaptioner(PythonModel):
    """Captions pairs of images with a sentence that describes what changed, or answers questions about images."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the checkpoint. Adapters are loaded on top of their base model."""
        from m3diff.runtime import prepare

        prepare()
        from m3diff.models.generation import load_captioner

        checkpoint = Path(context.artifacts["checkpoint"])
        cfg = context.model_config
        base_options: dict[str, Any] = {"base": Path(cfg["base"])} if cfg.get("base") else {}
        self.captioner = load_captioner(checkpoint, cfg["max_new_tokens"], **base_options)

    def predict(self, context: PythonModelContext, model_input: pd.DataFrame, params: dict | None = None) -> list[str]:
        """Return an answer for each row.

        Args:
            model_input: a table with one question per row. The columns `before` and `after`, or a list in the column
                `images`, contain the path of each image or its bytes in base64. The optional column `question` replaces
                the model's default question. The optional column `history` contains the turns before the question, as
                objects with `question` and `answer`. Rows with the same number of images and prompts of the same length
                are batched together.

        Raises:
            ValueFault: an image cannot be opened, a row has only one side of a pair, or the model was not made for or
                trained on such a row.
        """
        from m3diff.models.sample_batches import split_by_shape

        rows = model_input.reset_index(drop=True).reindex(columns=list(COLUMNS)).to_dict("records")
        samples = [self.read_row(row) for row in rows]
        shapes: list[tuple[int, int]] = []  # number of images and length of the prompt
        for images, turns in samples:
            prompt = self.captioner.encode_prompt(turns, self.captioner.processor.marks(len(images)))
            shapes.append((len(images), len(prompt)))
        answers: dict[int, str] = {}
        for batch in split_by_shape(shapes, BATCH_ROWS):
            prepared = (self.prepare_images(samples[number][0]) for number in batch)
            texts = self.captioner.answer_in_parts(prepared, [samples[number][1] for number in batch])
            answers |= dict(zip(batch, texts, strict=True))
        return [answers[number] for number in range(len(samples))]

    def prepare_images(self, images: list[str]) -> Any:
        """Return the prepared images of a row."""
        return self.captioner.processor.prepare(open_image(image) for image in images)

    def read_row(self, row: Mapping[Any, Any]) -> tuple[list[str], tuple[Any, ...]]:
        """Return the images of a row, each as a path or in base64, and the turns of its dialogue.

        Raises:
            ValueFault: the row has only one side of a pair, or the model was not made for or trained on such a row.
        """
        from m3diff.records.errors import ValueFault
        from m3diff.records.sample import Turn

        images = images_of_row(row)
        question = None if is_missing(row["question"]) else row["question"]
        history = [] if is_missing(row["history"]) else list(row["history"])
        fault = self.captioner.fault_of_sample(len(images), question, len(history))
        if fault is not None:
            raise ValueFault(fault)
        turns = [Turn(turn["question"], turn["answer"]) for turn in history]
        return images, (*turns, self.captioner.ask(question))


def images_of_row(row: Mapping[Any, Any]) -> list[str]:
    """Return the paths or base64 texts of a row's images: of `images`, or else of `before` and `after`.

    Raises:
        ValueFault: only one side of a pair is present.
    """
    from m3diff.records.errors import ValueFault

    if not is_missing(row["images"]):
        return list(row["images"])
    sides = [row[side] for side in ("before", "after") if not is_missing(row[side])]
    if len(sides) == 1:
        side = "after" if is_missing(row["after"]) else "before"
        raise ValueFault("registry.one_side_of_a_pair", key=side)
    return sides


def is_missing(value: Any) -> bool:
    """Return whether a cell of a table is empty: null, NaN or an empty text."""
    return value is None or value is pd.NA or isinstance(value, float) or (isinstance(value, str) and not value)


def open_image(value: str) -> Image.Image:
    """Open an image, given its path or its bytes in base64.

    Raises:
        ValueFault: `value` is neither the path of an image nor an image in base64.
    """
    from m3diff.images.open import load_image
    from m3diff.records.errors import ValueFault

    try:
        if len(value) <= LONGEST_PATH and Path(value).is_file():
            return load_image(value)
        return load_image(io.BytesIO(base64.b64decode(value, validate=True)))
    except (OSError, ValueError) as error:
        raise ValueFault("registry.neither_path_nor_base64", value=value[:60], cause=str(error)) from error


set_model(PyfuncCaptioner())

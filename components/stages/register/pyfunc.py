"""Caption images with a registered model that MLflow loads.

Use it as `mlflow.pyfunc.load_model("models:/m3diff@champion").predict([{"before": ..., "after": ...}])`.

MLflow stores this file with the model ("models from code"), together with `components/models` and the checkpoint, so
the model can be loaded in a new process without the checkout. A version that stores only adapters (the trained weights)
also needs its base model. By default, the base is loaded from the folder where it was at registration. Another folder
can be set with `load_model(..., model_config={"base": FOLDER})`. The sha256 of the base is checked.
"""

import base64
import io
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel, PythonModelContext
from PIL import Image

LONGEST_PATH = 4096
BATCH_PAIRS = 16


class PyfuncCaptioner(PythonModel):
    """Captions pairs of images with a sentence that describes what changed."""

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
        """Return a caption for each row.

        Args:
            model_input: a table with one pair of images per row. The columns `before` and `after` contain the path of
                each image or its bytes in base64. The optional column `question` replaces the model's default question.
                Rows with the same question are batched together.
        """
        rows = model_input.reset_index(drop=True).reindex(columns=["before", "after", "question"]).fillna("")
        captions: dict[int, str] = {}
        for question, question_rows in rows.groupby("question", sort=False):
            question_options = {"question": str(question)} if question else {}
            for start in range(0, len(question_rows), BATCH_PAIRS):
                batch = question_rows.iloc[start : start + BATCH_PAIRS]
                pairs = []
                for before, after in zip(batch["before"], batch["after"], strict=True):
                    pairs.append((open_image(before), open_image(after)))
                batch_captions = self.captioner.caption(pairs, **question_options)
                captions |= dict(zip(batch.index, batch_captions, strict=True))
        return [captions[row] for row in range(len(rows))]


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

"""The registered model: `mlflow.pyfunc.load_model("models:/m3diff@champion").predict([{"before": ..., "after": ...}])`.

This file travels with the model (MLflow's models from code), together with `components/models` and the checkpoint,
so it loads in a fresh process outside the checkout. A version that keeps adapters alone needs its base where it lay as
it was registered, or `load_model(..., model_config={"base": FOLDER})`; its sha256 is compared.
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
    """Two images in, a sentence of what changed out."""

    def load_context(self, context: PythonModelContext) -> None:
        from m3diff.models.generation import load_captioner

        checkpoint, cfg = Path(context.artifacts["checkpoint"]), context.model_config
        of_adapters: dict[str, Any] = {"base": Path(cfg["base"])} if cfg.get("base") else {}
        self.captioner = load_captioner(checkpoint, cfg["max_new_tokens"], **of_adapters)

    def predict(self, context: PythonModelContext, model_input: pd.DataFrame, params: dict | None = None) -> list[str]:
        """Caption each row.

        Columns `before` and `after` hold an image's path or its bytes in base64; `question`, where given, is what the
        model is asked instead of its usual question. Rows of one question share batches, as in the predict stage.
        """
        rows = model_input.reset_index(drop=True).reindex(columns=["before", "after", "question"]).fillna("")
        captions: dict[int, str] = {}
        for question, same in rows.groupby("question", sort=False):
            asked = {"question": str(question)} if question else {}
            for start in range(0, len(same), BATCH_PAIRS):
                batch = same.iloc[start : start + BATCH_PAIRS]
                pairs = [
                    (read(before), read(after)) for before, after in zip(batch["before"], batch["after"], strict=True)
                ]
                captions |= dict(zip(batch.index, self.captioner.caption(pairs, **asked), strict=True))
        return [captions[row] for row in range(len(rows))]


def read(value: str) -> Image.Image:
    """Open an image given as a path or in base64.

    Raises:
        ValueError: it is neither.
    """
    from m3diff.images.open import load_image

    try:
        if len(value) <= LONGEST_PATH and Path(value).is_file():
            return load_image(value)
        return load_image(io.BytesIO(base64.b64decode(value, validate=True)))
    except (OSError, ValueError) as error:
        raise ValueError(f"{value[:60]!r}: neither the path of an image nor an image in base64 ({error})") from error


set_model(PyfuncCaptioner())

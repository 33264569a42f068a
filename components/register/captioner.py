"""The registered model: `mlflow.pyfunc.load_model("models:/m3diff@champion").predict([{"before": ..., "after": ...}])`.

This file travels with the model (MLflow's models from code), together with `components/model` and the checkpoint, so
it loads in a fresh process outside the checkout.
"""

import base64
import binascii
import io
from pathlib import Path

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel, PythonModelContext
from PIL import Image

LONGEST_PATH = 4096


class Captioner(PythonModel):
    """Two images in, a sentence of what changed out."""

    def load_context(self, context: PythonModelContext) -> None:
        from components.model import load_captioner

        self.captioner = load_captioner(Path(context.artifacts["checkpoint"]))

    def predict(self, context: PythonModelContext, model_input: pd.DataFrame, params: dict | None = None) -> list[str]:
        """One caption for each row; columns `before` and `after` hold a file's path or its bytes in base64."""
        rows = model_input[["before", "after"]].itertuples(index=False)
        return self.captioner.caption([(read(before), read(after)) for before, after in rows])


def read(value: str) -> Image.Image:
    """Open an image given as a path or in base64.

    Raises:
        ValueError: it is neither.
    """
    if len(value) <= LONGEST_PATH and Path(value).is_file():
        return Image.open(value).convert("RGB")
    try:
        return Image.open(io.BytesIO(base64.b64decode(value, validate=True))).convert("RGB")
    except (binascii.Error, OSError) as error:
        raise ValueError(f"{value[:60]!r}: neither the path of an image nor an image in base64 ({error})") from error


set_model(Captioner())

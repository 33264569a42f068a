"""The model that is asked for: a version of the registry by number or alias, or a folder that holds a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING

from components.records import DataError
from components.register.params import Register

if TYPE_CHECKING:
    from components.models.generation import Captioner

CHAMPION = "champion"


def load(cfg: Register, model: str, base: Path, max_new_tokens: int) -> "Captioner":
    """Load it.

    Args:
        model: a folder, else a version's number or alias.
        base: where the base is, should the checkpoint be adapters alone.
        max_new_tokens: of a folder; a version knows its own.

    Raises:
        DataError: there is no such folder or version, or MLflow has lost its checkpoint.
        CheckpointError: the checkpoint is incomplete, or its base is not there or another.
        TrackingUnavailableError: MLflow does not answer.
    """
    from transformers.utils import logging

    from components.models.checkpoint import is_adapters
    from components.models.generation import load_captioner

    logging.disable_progress_bar()  # a second at most, and its line would stand beside the caption
    folder = Path(model)
    if not folder.is_dir():
        folder, max_new_tokens = _download(cfg, model, max_new_tokens)
    elif (folder / "checkpoint").is_dir():
        folder = folder / "checkpoint"
    return load_captioner(folder, max_new_tokens, base=base if is_adapters(folder) else None)


def _download(cfg: Register, model: str, max_new_tokens: int) -> tuple[Path, int]:
    """The checkpoint of a version, where MLflow keeps it if that is on this machine, and its limit of tokens."""
    from components import tracking  # MLflow takes seconds to import, and a folder needs none of it

    with tracking.connected(cfg.tracking_uri) as client:
        try:
            version = tracking.find_version(client, cfg.model_name, model)
        except DataError as error:
            told = f"{error}; name one of these, or a folder: --model data/05_model/checkpoint"
            raise DataError(told) from error
        found = tracking.download_checkpoint(version)
        if found is None:
            lost = f"{cfg.model_name} version {version.version}: MLflow has lost its checkpoint"
            raise DataError(f"{lost}; `m3diff restore {version.version}` may have it")
        return found, int(version.tags.get("predict.max_new_tokens", max_new_tokens))

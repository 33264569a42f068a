"""The model that is asked for: a version of the registry by number or alias, or a folder that holds a checkpoint."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from m3diff.records.errors import DataError

if TYPE_CHECKING:
    from m3diff.models.generation import Captioner


class Source(NamedTuple):
    """A checkpoint on this machine, and what it is called.

    Attributes:
        name: `<model>/<version>`; of a folder `<model>/sha256-<12 digits of its manifest>`.
        base: where the base of adapters is; None: the checkpoint is whole.
    """

    name: str
    folder: Path
    max_new_tokens: int
    base: Path | None


def find(tracking_uri: str, model_name: str, model: str, base: Path, max_new_tokens: int) -> Source:
    """Find it; a version's checkpoint is downloaded where it is not on this machine.

    Args:
        model: a folder, else a version's number or alias.
        base: where the base is, should the checkpoint be adapters alone.
        max_new_tokens: of a folder; a version knows its own.

    Raises:
        DataError: there is no such folder or version, MLflow has lost its checkpoint, or the folder holds no model.
        TrackingUnavailableError: MLflow does not answer.
    """
    from m3diff.models.checkpoint import is_adapters, read_manifest

    folder = Path(model)
    if folder.is_dir():
        folder = folder / "checkpoint" if (folder / "checkpoint").is_dir() else folder
        as_written = f"{json.dumps(read_manifest(folder), indent=2)}\n".encode()
        name = f"sha256-{hashlib.sha256(as_written).hexdigest()[:12]}"
    else:
        from mlflow.exceptions import MlflowException  # takes seconds to import, and a folder needs none of it

        from m3diff.registry.tracking import connected
        from m3diff.registry.versions import download_checkpoint, find_version

        with connected(tracking_uri) as client:
            try:
                version = find_version(client, model_name, model)
            except DataError as error:
                remedy = "name one of these, or a folder: --model data/05_model/checkpoint"
                raise DataError(f"{error}; {remedy}") from error
            try:
                folder = download_checkpoint(version)
            except (MlflowException, OSError) as error:
                lost = f"{model_name} version {version.version}: MLflow has lost its checkpoint"
                raise DataError(f"{lost}; `m3diff restore {version.version}` may have it") from error
        name = version.version
        max_new_tokens = int(version.tags.get("predict.max_new_tokens", max_new_tokens))
    return Source(f"{model_name}/{name}", folder, max_new_tokens, base if is_adapters(folder) else None)


def load(source: Source) -> "Captioner":
    """Load it.

    Raises:
        DataError: the checkpoint is incomplete or damaged, or its base is not there or another; names the file.
    """
    from transformers.utils import logging

    from m3diff.models.generation import load_captioner

    logging.disable_progress_bar()  # a second at most, and its line would stand beside the caption
    return load_captioner(source.folder, source.max_new_tokens, base=source.base)


def version_of(tracking_uri: str, model_name: str, alias: str) -> str:
    """`<model>/<version>` that an alias names at the moment.

    Raises:
        DataError: there is no such alias.
        TrackingUnavailableError: MLflow does not answer.
    """
    from m3diff.registry.tracking import connected
    from m3diff.registry.versions import find_version

    with connected(tracking_uri) as client:
        return f"{model_name}/{find_version(client, model_name, alias).version}"

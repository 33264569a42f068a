"""Find and load the model that a user specifies: a version by number or alias, or a folder with a checkpoint."""

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from m3diff.records.errors import DataError
from m3diff.registry.local_store import TOKEN_LIMIT_TAG, NoSuchVersionError, StoredVersion, find_stored_version

if TYPE_CHECKING:
    from m3diff.models.generation import Captioner


class Source(NamedTuple):
    """A checkpoint on this machine.

    Attributes:
        name: `<model>/<version>`, or for a folder `<model>/sha256-<12 digits of the manifest's sha256>`.
        folder: the folder of the checkpoint.
        max_new_tokens: the length limit of captions in tokens.
        base: the folder of the base model if the checkpoint contains only adapters (the trained weights), otherwise
            None.
    """

    name: str
    folder: Path
    max_new_tokens: int
    base: Path | None


def find(tracking_uri: str, model_name: str, model: str, base: Path, max_new_tokens: int) -> Source:
    """Find the checkpoint of a model. If it is the checkpoint of a version on a server, download it.

    A version in a local store is found without MLflow, because importing MLflow takes longer than loading a small
    model.

    Args:
        model: a folder, or the number or alias of a version.
        base: the folder of the base model, which is used if the checkpoint contains only adapters.
        max_new_tokens: the length limit in tokens. A limit in the tags of a version takes precedence.

    Raises:
        DataError: there is no such folder or version, MLflow has lost the checkpoint, or the folder contains no model.
        TrackingUnavailableError: MLflow does not respond.
    """
    _check_folder(model)
    folder = Path(model)
    version = None if folder.is_dir() else _find_version(tracking_uri, model_name, model)
    # Imported here because this module imports torch, which would delay the error for a missing version
    from m3diff.models.checkpoint import has_only_adapters, read_manifest

    if version is None:
        if (folder / "checkpoint").is_dir():
            folder = folder / "checkpoint"
        manifest_bytes = f"{json.dumps(read_manifest(folder), indent=2)}\n".encode()
        name = f"sha256-{hashlib.sha256(manifest_bytes).hexdigest()[:12]}"
    else:
        name = str(version.number)
        folder = version.checkpoint
        if version.max_new_tokens is not None:
            max_new_tokens = version.max_new_tokens
    return Source(
        name=f"{model_name}/{name}",
        folder=folder,
        max_new_tokens=max_new_tokens,
        base=base if has_only_adapters(folder) else None,
    )


def _check_folder(model: str) -> None:
    """Check that `model` is a folder if it is a path. It may also be the number or alias of a version.

    Text with a path separator is a path, because numbers and aliases never contain a separator.

    Raises:
        DataError: the path does not exist, or is a file.
    """
    folder = Path(model)
    if folder.is_dir() or not ("/" in model or os.sep in model or folder.is_file()):
        return
    if folder.is_file():
        raise DataError("registry.model_is_file", value=model, folder=folder.parent)
    raise DataError("registry.no_such_folder", value=model)


def _add_remedy(error: NoSuchVersionError) -> DataError:
    """Return the error for a version that does not exist, with a remedy for users of the command line."""
    code = "registry.name_another_model" if error.fields["numbers"] else "registry.no_model_yet"
    return DataError(code, fault=error.fault)


def _find_version(tracking_uri: str, model_name: str, version: str) -> StoredVersion:
    """Find a version by number or alias in the store on this machine, or else through MLflow."""
    try:
        stored = find_stored_version(tracking_uri, model_name, version)
    except NoSuchVersionError as error:
        raise _add_remedy(error) from error
    return stored or _download_version(tracking_uri, model_name, version)


def _download_version(tracking_uri: str, model_name: str, version: str) -> StoredVersion:
    """Find a version by number or alias through MLflow, and download its checkpoint."""
    from mlflow.exceptions import MlflowException  # takes seconds to import

    from m3diff.registry.tracking import connect
    from m3diff.registry.versions import download_checkpoint, find_version

    with connect(tracking_uri) as client:
        try:
            registered_version = find_version(client, model_name, version)
        except NoSuchVersionError as error:
            raise _add_remedy(error) from error
        try:
            folder = download_checkpoint(registered_version)
        except (MlflowException, OSError) as error:
            number = int(registered_version.version)
            raise DataError("registry.lost_checkpoint", model=model_name, version=number) from error
    limit = registered_version.tags.get(TOKEN_LIMIT_TAG)
    return StoredVersion(
        number=int(registered_version.version),
        checkpoint=folder,
        max_new_tokens=None if limit is None else int(limit),
    )


def load(source: Source) -> "Captioner":
    """Load the model of a checkpoint.

    Raises:
        DataError: the checkpoint is incomplete or damaged, or the base model is missing or differs from the base that
            the checkpoint was trained on. The error names the file.
    """
    from transformers.utils import logging

    from m3diff.models.generation import load_captioner

    logging.disable_progress_bar()  # loading takes at most a second, and the bar would clutter the output
    return load_captioner(source.folder, source.max_new_tokens, base=source.base)


def resolve_version(tracking_uri: str, model_name: str, alias: str) -> str:
    """Return `<model>/<version>` for the version that an alias points to now.

    Raises:
        DataError: there is no such alias.
        TrackingUnavailableError: MLflow does not respond.
    """
    stored = find_stored_version(tracking_uri, model_name, alias)
    if stored is not None:
        return f"{model_name}/{stored.number}"
    from m3diff.registry.tracking import connect
    from m3diff.registry.versions import find_version

    with connect(tracking_uri) as client:
        return f"{model_name}/{find_version(client, model_name, alias).version}"

"""A version of the registered model by its number or alias, and the checkpoint that MLflow keeps of it."""

from pathlib import Path

import mlflow
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from components.records import DataError


def find(client: MlflowClient, name: str, version: str) -> ModelVersion:
    """The version of a number or alias.

    Raises:
        DataError: there is none; lists those that are there.
    """
    try:
        if version.isdecimal():
            return client.get_model_version(name, version)
        return client.get_model_version_by_alias(name, version)
    except MlflowException as error:
        there = sorted((int(v.version) for v in client.search_model_versions(f"name = '{name}'")), reverse=True)
        raise DataError(f"model {name!r} has no version {version!r}; there are {there or 'none'}") from error


def commit_of(version: ModelVersion) -> str:
    commit = version.tags.get("git.commit")
    if commit is None:
        raise DataError(
            f"{version.name} version {version.version}: names no git.commit, so it was not made by register"
        )
    return commit


def download_checkpoint(version: ModelVersion, into: Path) -> Path | None:
    """The checkpoint as MLflow keeps it; None where it keeps none."""
    place = f"models:/{version.name}/{version.version}/artifacts/checkpoint"
    try:
        return Path(mlflow.artifacts.download_artifacts(artifact_uri=place, dst_path=str(into)))
    except (MlflowException, OSError):
        return None

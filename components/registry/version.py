"""What a version of the registered model says of how it was made."""

from mlflow.entities.model_registry import ModelVersion

from m3diff.records.schemas import DataError


def commit_of(version: ModelVersion) -> str:
    commit = version.tags.get("git.commit")
    if commit is None:
        raise DataError(
            f"{version.name} version {version.version}: names no git.commit, so it was not made by register"
        )
    return commit

"""The scores of a registered version, pair by pair, as MLflow keeps them."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from m3diff.records.errors import DataError, readable
from m3diff.registry import tracking

CHALLENGER = "challenger"
SCORES = "scores.parquet"


class CannotScoreAgain(Exception):
    """A version cannot be captioned and scored on the test set that lies here; the text says why."""


def test_set(version: ModelVersion) -> str:
    """sha256 of the pairs that the version was scored on when it was registered."""
    return version.tags.get("test_set.sha256", "unknown")


def stored_scores(client: MlflowClient, version: ModelVersion, on: str) -> pa.Table | None:
    """scores.parquet of a version on the test set `on`; None where MLflow has none, or has lost the version's run.

    Raises:
        DataError: MLflow's copy is damaged, or no scores.parquet.
    """
    if not version.run_id:  # made by hand, not by register
        return None
    places = [SCORES] if test_set(version) == on else []
    for place in [*places, f"{scored_again(on)}/{SCORES}"]:
        if has_artifact(client, run_of(version), place):
            with tempfile.TemporaryDirectory() as scratch:
                file = Path(client.download_artifacts(run_of(version), place, scratch))
                with readable(file, f"MLflow's copy in run {run_of(version)} is damaged: evaluate and register again"):
                    table = pq.read_table(file)
                    assert {"protocol", "id"} <= {*table.column_names}, "it has no columns protocol and id"
                    return table
    return None


def scored_again(on: str) -> str:
    """The folder of a run's artifacts that holds its model's scores on another test set than its own."""
    return f"scored_again/{on:.12}"


def run_of(version: ModelVersion) -> str:
    assert version.run_id is not None, (
        f"{version.name} version {version.version} was not made by register: it has no run"
    )
    return version.run_id


def has_artifact(client: MlflowClient, run_id: str, path: str) -> bool:
    folder = path.rpartition("/")[0] or None
    try:
        return any(artifact.path == path for artifact in client.list_artifacts(run_id, folder))
    except MlflowException as error:
        if error.error_code != tracking.GONE:
            raise
        return False  # the run itself


def find_alias(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    model = tracking.registered(client, name)
    version = model.aliases.get(alias) if model else None
    return client.get_model_version(name, str(version)) if version is not None else None


def set_alias(client: MlflowClient, name: str, alias: str, version: ModelVersion) -> None:
    """Let an alias name a version, where it does not yet."""
    aliases = client.get_registered_model(name).aliases
    if str(aliases.get(alias)) != str(version.version):
        client.set_registered_model_alias(name, alias, version.version)


def commit_of(version: ModelVersion) -> str:
    commit = version.tags.get("git.commit")
    if commit is None:
        raise DataError(
            f"{version.name} version {version.version}: names no git.commit, so it was not made by register"
        )
    return commit

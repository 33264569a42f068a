"""The scores of a registered version, pair by pair, as MLflow keeps them."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking import MlflowClient

from m3diff.records.readable import readable
from m3diff.stages.register.stage import SCORES, has_artifact, run_of


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

"""Find versions of the registered model by number or alias, and list them with their scores (`m3diff models`)."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from mlflow import MlflowClient, artifacts
from mlflow.entities import LoggedModel
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.entities import PagedList

from m3diff.records.errors import DataError
from m3diff.records.progress import align_columns
from m3diff.registry.local_store import no_such_version_error
from m3diff.registry.tracking import (
    CHECKPOINT_TAG,
    FLOW_RUN_TAG,
    NOT_FOUND_CODE,
    connect,
    find_registered_model,
    find_run,
)
from m3diff.stages.register.params import Register

CHAMPION = "champion"
PREVIOUS = "previous"
CHALLENGER = "challenger"
SCORES = "scores.parquet"
TEST_SET_TAG = "test_set.sha256"  # version tag that identifies the test pairs on which the version was scored
UNKNOWN_TEST_SET = "unknown"
STORED_MODEL_PREFIX = "models:/m-"  # prefix of a version's source if register stored the version's files
DASH = "–"  # text of an empty table cell
T = TypeVar("T")


def iterate_pages(search: Callable[..., PagedList[T]], *arguments: Any) -> Iterator[T]:
    """Call a search method of MLflow's client and yield the results of all pages."""
    page = search(*arguments)
    yield from page
    while page.token:
        page = search(*arguments, page_token=page.token)
        yield from page


def list_versions(client: MlflowClient, name: str, condition: str = "") -> list[ModelVersion]:
    """Return the versions of a registered model, newest first.

    Args:
        condition: text to append to MLflow's filter, such as ` and tags.a = 'b'`.
    """
    versions = iterate_pages(client.search_model_versions, f"name = '{name}'{condition}")
    return sorted(versions, key=lambda version: -int(version.version))


def find_version(client: MlflowClient, name: str, version: str) -> ModelVersion:
    """Find a version by its number or alias.

    Raises:
        NoSuchVersionError: there is no such version. The field `numbers` lists the existing versions.
    """
    try:
        if version.isdecimal():
            return client.get_model_version(name, version)
        return client.get_model_version_by_alias(name, version)
    except MlflowException as error:
        numbers = [int(existing.version) for existing in list_versions(client, name)]
        raise no_such_version_error(name, version, numbers) from error


def version_exists(client: MlflowClient, name: str, number: int) -> bool:
    """Return whether the registered model has a version with this number."""
    return any(int(version.version) == number for version in list_versions(client, name))


def resolve_alias(client: MlflowClient, name: str, alias: str) -> int | None:
    """Return the number of the version that an alias points to, or None if the alias or model does not exist."""
    model = find_registered_model(client, name)
    return int(model.aliases[alias]) if model and alias in model.aliases else None


def find_aliased_version(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """Return the version that an alias points to, or None if the alias or model does not exist."""
    number = resolve_alias(client, name, alias)
    return client.get_model_version(name, str(number)) if number is not None else None


def put_alias(client: MlflowClient, name: str, alias: str, version: int | None) -> None:
    """Point an alias to a version, or delete the alias if the version is None or no longer exists."""
    current_version = resolve_alias(client, name, alias)
    if version is None or not version_exists(client, name, version):
        if current_version is not None:
            client.delete_registered_model_alias(name, alias)
    elif version != current_version:
        client.set_registered_model_alias(name, alias, str(version))


def read_run_id(version: ModelVersion) -> str:
    """Return the id of the run that created a version."""
    assert version.run_id is not None, (
        f"register did not create {version.name} version {version.version}: it has no run"
    )
    return version.run_id


def read_commit(version: ModelVersion) -> str:
    """Return the git commit from which a version was registered.

    Raises:
        DataError: the version was not created by register.
    """
    commit = version.tags.get("git.commit")
    if commit is None:
        raise DataError("registry.no_commit_tag", model=version.name, version=int(version.version))
    return commit


# Per-pair scores


def read_test_set(version: ModelVersion) -> str:
    """Return the sha256 of the test set on which a version was scored, or UNKNOWN_TEST_SET if no tag names it."""
    return version.tags.get(TEST_SET_TAG) or UNKNOWN_TEST_SET


def rescored_folder(test_set: str) -> str:
    """Return the artifact folder for the scores of a version that was scored again on another test set."""
    return f"scored_again/{test_set:.12}"


def read_stored_scores(client: MlflowClient, version: ModelVersion, test_set: str) -> pa.Table | None:
    """Read a version's per-pair scores on a test set from MLflow.

    Args:
        test_set: the sha256 of the test set.

    Returns:
        the scores, or None if MLflow has no such file, the file is damaged, or the version's run is lost.
    """
    run_id = version.run_id
    if not run_id:  # the version was created by hand and not by register
        return None
    paths = [f"{rescored_folder(test_set)}/{SCORES}"]
    if read_test_set(version) == test_set:
        paths.insert(0, SCORES)
    for path in paths:
        if not has_artifact(client, run_id, path):
            continue
        scores = download_scores(client, run_id, path)
        if scores is not None:
            return scores
    return None


def download_scores(client: MlflowClient, run_id: str, path: str) -> pa.Table | None:
    """Read a Parquet file from a run's artifacts. Return None if the file is damaged."""
    with tempfile.TemporaryDirectory() as scratch:
        file = client.download_artifacts(run_id, path, scratch)
        try:
            # read_table would fail if a column name occurs twice, which the gate reports as a fault
            with pq.ParquetFile(file) as parquet:
                return parquet.read()
        except (pa.ArrowException, OSError) as error:  # the error's type depends on where the file is damaged
            print(f"MLflow's copy of {path} in run {run_id} is damaged and is ignored ({error})", flush=True)
    return None


def has_artifact(client: MlflowClient, run_id: str, path: str) -> bool:
    """Return whether a run has an artifact at a path. Return False if the run is missing from MLflow."""
    folder = path.rpartition("/")[0] or None
    try:
        return any(artifact.path == path for artifact in client.list_artifacts(run_id, folder))
    except MlflowException as error:
        if error.error_code != NOT_FOUND_CODE:
            raise
        return False


# The files of a version


def download_checkpoint(version: ModelVersion, into: Path | None = None) -> Path:
    """Download the checkpoint of a version and return its folder.

    Args:
        into: the folder to copy the checkpoint to. If None, files that MLflow stores on this machine are not copied.

    Raises:
        MlflowException: MLflow has no checkpoint of the version.
        OSError: the files of the checkpoint are missing.
    """
    uri = f"models:/{version.name}/{version.version}/artifacts/checkpoint"
    return Path(artifacts.download_artifacts(artifact_uri=uri, dst_path=str(into) if into else None))


def read_trained_question(version: ModelVersion) -> str | None:
    """Return the question that a version was trained on, or None if its checkpoint does not name one.

    Raises:
        MlflowException: MLflow has no checkpoint of the version.
        OSError: the manifest of the checkpoint is missing.
        ValueError: the manifest is not JSON.
    """
    from m3diff.models.checkpoint import MANIFEST, read_trained_on  # imports torch, which takes seconds

    uri = f"models:/{version.name}/{version.version}/artifacts/checkpoint/{MANIFEST}"
    with tempfile.TemporaryDirectory() as folder:
        manifest = json.loads(Path(artifacts.download_artifacts(artifact_uri=uri, dst_path=folder)).read_text())
    return read_trained_on(manifest).question if isinstance(manifest, dict) else None


def find_stored_model(client: MlflowClient, version: ModelVersion) -> LoggedModel:
    """Return MLflow's entry for the stored model (checkpoint and code) that a version refers to."""
    return client.get_logged_model((version.source or "").removeprefix("models:/"))


def delete_model(client: MlflowClient, model: LoggedModel) -> None:
    """Delete a stored model. Its files are deleted first, so that a later call can finish an interrupted deletion."""
    get_artifact_repository(model.artifact_location).delete_artifacts()
    client.delete_logged_model(model.model_id)


def count_stored_bytes(client: MlflowClient, version: ModelVersion) -> int:
    """Return the size of the files that MLflow stores for a version, in bytes.

    Return 0 if the files were deleted or were not stored by register.
    """
    if not (version.source or "").startswith(STORED_MODEL_PREFIX):
        return 0
    try:
        return count_bytes(get_artifact_repository(find_stored_model(client, version).artifact_location))
    except MlflowException:
        return 0


def count_bytes(repository: ArtifactRepository, folder: str | None = None) -> int:
    """Return the total size of all files in a folder of MLflow's artifacts, in bytes."""
    total = 0
    for file in repository.list_artifacts(folder):
        total += count_bytes(repository, file.path) if file.is_dir else file.file_size or 0
    return total


# `m3diff models`


def list_models(cfg: Register, protocol: str, scores: Sequence[str]) -> list[dict[str, Any]]:
    """Return a description of each version, newest first.

    Args:
        protocol: the protocol of the scores, as `<dataset>/<protocol>`.
        scores: the names of the scores to list. A score that is missing from a version's run is left out.

    Returns:
        one row per version, with unscaled scores and the registration time in UTC.

    Raises:
        TrackingUnavailableError: MLflow does not respond.
    """
    rows = []
    with connect(cfg.tracking_uri) as client:
        aliases = aliases_by_version(client, cfg.model_name)
        for version in list_versions(client, cfg.model_name):
            number = int(version.version)
            run = find_run(client, version.run_id)
            metrics = run.data.metrics if run else {}
            row = {
                "version": number,
                "aliases": aliases.get(number, []),
                "registered": time.strftime("%Y-%m-%d %H:%M", time.gmtime(version.creation_timestamp / 1000)),
                "scores": {name: metrics[f"{protocol}/{name}"] for name in scores if f"{protocol}/{name}" in metrics},
                "weights_bytes": count_stored_bytes(client, version),
                "commit": version.tags.get("git.commit"),
                "dirty": version.tags.get("git.dirty") == "true",  # parameters or code differed from the commit
                "run": run.info.run_name if run else None,
                "flow_run": version.tags.get(FLOW_RUN_TAG),
                "checkpoint": version.tags.get(CHECKPOINT_TAG),
            }
            rows.append(row)
    return rows


def aliases_by_version(client: MlflowClient, name: str) -> dict[int, list[str]]:
    """Return the sorted aliases of each version, by version number. Versions without an alias are left out."""
    model = find_registered_model(client, name)
    aliases: dict[int, list[str]] = {}
    if model is None:
        return aliases
    for alias, number in sorted(model.aliases.items()):
        aliases.setdefault(int(number), []).append(alias)
    return aliases


def format_table(rows: Sequence[Mapping[str, Any]], protocol: str, scores: Sequence[str]) -> str:
    """Format the rows of `list_models` for a terminal: one line per version, with scores multiplied by 100."""
    if not rows:
        return "no version is registered yet. Run `dvc repro`, then `m3diff register`"
    table: list[tuple[str, ...]] = [("version", "aliases", "registered", *scores, "weights", "commit", "run")]
    for row in rows:
        cells = [str(row["version"]), ", ".join(row["aliases"]) or DASH, row["registered"]]
        cells += [f"{100 * row['scores'][name]:.1f}" if name in row["scores"] else DASH for name in scores]
        cells.append(f"{row['weights_bytes'] / 1e9:.3g} GB")
        suffix = "+" if row["dirty"] else ""
        cells.append(f"{row['commit'][:8]}{suffix}" if row["commit"] else DASH)
        cells.append(row["run"] or DASH)
        table.append(tuple(cells))
    footer = f"\nscores on {protocol}, times 100. To verify the lineage of a version: m3diff lineage VERSION"
    return "\n".join([*align_columns(table), footer])

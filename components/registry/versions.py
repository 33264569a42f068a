"""The versions of the registered model: found by number or alias, listed with their scores, deleted."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import mlflow
import pyarrow as pa
import pyarrow.parquet as pq
from mlflow.entities import LoggedModel
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.entities import PagedList
from mlflow.tracking import MlflowClient

from m3diff.records.errors import DataError
from m3diff.records.tables import aligned
from m3diff.registry import tracking
from m3diff.registry.lineage import FLOW_RUN, VERSION
from m3diff.registry.tracking import registered
from m3diff.stages.register.params import Register

CHAMPION, PREVIOUS, CHALLENGER = "champion", "previous", "challenger"
SCORES = "scores.parquet"
STORED = "models:/m-"  # the source of a version whose files register stored
NONE = "–"
T = TypeVar("T")


def every_page(search: Callable[..., PagedList[T]], *asked: Any) -> Iterator[T]:
    """Yields what a search of MLflow's client finds, page by page."""
    page = search(*asked)
    yield from page
    while page.token:
        page = search(*asked, page_token=page.token)
        yield from page


def versions_of(client: MlflowClient, name: str, where: str = "") -> list[ModelVersion]:
    """Newest first."""
    found = every_page(client.search_model_versions, f"name = '{name}'{where}")
    return sorted(found, key=lambda version: -int(version.version))


def find_version(client: MlflowClient, name: str, version: str) -> ModelVersion:
    """The version of a number or alias.

    Raises:
        DataError: there is none; lists those that are there.
    """
    try:
        if version.isdecimal():
            return client.get_model_version(name, version)
        return client.get_model_version_by_alias(name, version)
    except MlflowException as error:
        there = [int(v.version) for v in versions_of(client, name)]
        raise DataError(f"model {name!r} has no version {version!r}; there are {there or 'none'}") from error


def exists(client: MlflowClient, name: str, version: int) -> bool:
    return any(int(found.version) == version for found in versions_of(client, name))


def alias_of(client: MlflowClient, name: str, alias: str) -> int | None:
    """The number of the version that an alias names."""
    model = registered(client, name)
    version = model.aliases.get(alias) if model else None
    return int(version) if version is not None else None


def find_alias(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    version = alias_of(client, name, alias)
    return client.get_model_version(name, str(version)) if version is not None else None


def put_alias(client: MlflowClient, name: str, alias: str, version: int | None) -> None:
    """Let an alias name a version, or nothing where there is none or none of that number any more."""
    now = alias_of(client, name, alias)
    wanted = version if version is not None and exists(client, name, version) else None
    if wanted is None and now is not None:
        client.delete_registered_model_alias(name, alias)
    elif wanted is not None and wanted != now:
        client.set_registered_model_alias(name, alias, str(wanted))


def run_of(version: ModelVersion) -> str:
    assert version.run_id is not None, f"{version.name} version {version.version} has no run: register did not make it"
    return version.run_id


def commit_of(version: ModelVersion) -> str:
    commit = version.tags.get("git.commit")
    if commit is None:
        raise DataError(f"{version.name} version {version.version}: has no git.commit: register did not make it")
    return commit


# Scores, pair by pair


def tested_on(version: ModelVersion) -> str:
    """sha256 of the pairs that the version was scored on when it was registered."""
    return version.tags.get("test_set.sha256", "unknown")


def scored_again(on: str) -> str:
    """The folder of a run's artifacts that holds its model's scores on another test set than its own."""
    return f"scored_again/{on:.12}"


def stored_scores(client: MlflowClient, version: ModelVersion, on: str) -> pa.Table | None:
    """scores.parquet of a version on the test set `on`; None where MLflow has none, a damaged one, or has lost the
    version's run."""
    if not (run := version.run_id):  # made by hand, not by register
        return None
    places = [SCORES] if tested_on(version) == on else []
    for place in [*places, f"{scored_again(on)}/{SCORES}"]:
        if has_artifact(client, run, place):
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    return pq.read_table(client.download_artifacts(run, place, scratch))
                except pa.ArrowInvalid as error:
                    print(f"MLflow's copy of {place} in run {run} is damaged ({error}); it is not read", flush=True)
    return None


def has_artifact(client: MlflowClient, run_id: str, path: str) -> bool:
    try:
        return any(found.path == path for found in client.list_artifacts(run_id, path.rpartition("/")[0] or None))
    except MlflowException as error:
        if error.error_code != tracking.GONE:
            raise
        return False  # the run itself


# The files of a version


def download_checkpoint(version: ModelVersion, into: Path | None = None) -> Path:
    """The checkpoint as MLflow keeps it, in `into`, else in place if that is on this machine.

    Raises:
        MlflowException: MLflow keeps none.
        OSError: its files are gone.
    """
    place = f"models:/{version.name}/{version.version}/artifacts/checkpoint"
    return Path(mlflow.artifacts.download_artifacts(artifact_uri=place, dst_path=str(into) if into else None))


def model_of(client: MlflowClient, version: ModelVersion) -> LoggedModel:
    """The stored model behind a version."""
    assert version.source is not None
    return client.get_logged_model(version.source.removeprefix("models:/"))


def delete_model(client: MlflowClient, model: LoggedModel) -> None:
    """Its files, then its entry, so that a kill in between leaves an entry to be found again."""
    get_artifact_repository(model.artifact_location).delete_artifacts()
    client.delete_logged_model(model.model_id)


def stored_bytes(client: MlflowClient, version: ModelVersion) -> int:
    def size_of(files: ArtifactRepository, folder: str | None = None) -> int:
        entries = files.list_artifacts(folder)
        return sum(size_of(files, entry.path) if entry.is_dir else entry.file_size or 0 for entry in entries)

    if not (version.source or "").startswith(STORED):
        return 0
    try:
        return size_of(get_artifact_repository(model_of(client, version).artifact_location))
    except MlflowException:
        return 0  # its files are gone already


def in_words(count: float) -> str:
    """Bytes as people write them."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


# `m3diff models`


def models(cfg: Register, protocol: str, scores: Sequence[str]) -> list[dict[str, Any]]:
    """Every version, newest first: number, aliases, time (UTC), scores as the scorers give them but for those that its
    run has not, bytes of weights as MLflow keeps them, and its origin.

    Args:
        protocol: "<dataset>/<protocol>" that the scores are of.

    Raises:
        TrackingUnavailableError: MLflow does not answer.
    """
    found = []
    with tracking.connected(cfg.tracking_uri) as client:
        aliases = aliases_of(client, cfg.model_name)
        for version in versions_of(client, cfg.model_name):
            number, tags = int(version.version), version.tags
            run = tracking.find_run(client, version.run_id)
            logged = run.data.metrics if run else {}
            facts = {
                "version": number,
                "aliases": aliases.get(number, []),
                "registered": time.strftime("%Y-%m-%d %H:%M", time.gmtime(version.creation_timestamp / 1000)),
                "scores": {name: logged[key] for name in scores if (key := f"{protocol}/{name}") in logged},
                "weights_bytes": stored_bytes(client, version),
                "commit": tags.get("git.commit"),
                "dirty": tags.get("git.dirty") == "true",  # parameters or code differed from the commit
                "run": run.info.run_name if run else None,
                "flow_run": tags.get(FLOW_RUN),
                "checkpoint": tags.get(VERSION),
            }
            found.append(facts)
    return found


def aliases_of(client: MlflowClient, name: str) -> dict[int, list[str]]:
    """The sorted aliases of each version that has any."""
    model = registered(client, name)
    found: dict[int, list[str]] = {}
    for alias, version in sorted(model.aliases.items()) if model else ():
        found.setdefault(int(version), []).append(alias)
    return found


def table(found: Sequence[Mapping[str, Any]], protocol: str, scores: Sequence[str]) -> str:
    """A line for each version; scores of the protocol, times 100."""
    if not found:
        return "no version is registered; `m3diff register` does, after `dvc repro`"
    rows = [("version", "aliases", "registered", *scores, "weights", "commit", "run")]
    for one in found:
        values = [one["scores"].get(name) for name in scores]
        shown = [NONE if value is None else f"{100 * value:.1f}" for value in values]
        commit = f"{one['commit'][:8]}{'+' if one['dirty'] else ''}" if one["commit"] else NONE
        head = (str(one["version"]), ", ".join(one["aliases"]) or NONE, one["registered"])
        rows.append((*head, *shown, in_words(one["weights_bytes"]), commit, one["run"] or NONE))
    footer = f"\nscores on {protocol}, times 100; the chain behind a version: m3diff lineage VERSION"
    return "\n".join([*aligned(rows), footer])

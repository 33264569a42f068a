"""Other registrations: at work at the same moment, on this machine or another, or killed half-way.

On one machine a lock lets one register at a time. Of several machines each looks again after it made a version: the
first one stays, and who made a later one takes it back. What a killed one left is taken up or removed by the next.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from mlflow.entities import LoggedModel, LoggedModelStatus, ViewType
from mlflow.entities.model_registry import ModelVersion
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import MlflowClient

from m3diff.registry.lineage import git
from m3diff.registry.tracking import PROCESS, is_over


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait until no other process registers from this repository. Its worktrees share the lock; a kill frees it."""
    with (Path(git("rev-parse", "--git-common-dir")) / "m3diff-register.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("register: waits for another registration of this repository", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_leftovers(client: MlflowClient, experiment: str, name: str) -> None:
    """What killed registrations of any training left open: stored models that are not whole go, runs end."""
    for model in stored_models(client, experiment, f"name = '{name}'"):
        unfinished = model.status != LoggedModelStatus.READY
        if unfinished and is_over(model.tags.get(PROCESS), model.creation_timestamp):
            delete_model(client, model)
    for run in client.search_runs([experiment], "attributes.status = 'RUNNING'", ViewType.ACTIVE_ONLY):
        process = run.data.tags.get(PROCESS)
        if process is not None and is_over(process, run.info.start_time):
            client.set_terminated(run.info.run_id, "KILLED")


def stored_models(client: MlflowClient, experiment: str, where: str) -> Iterator[LoggedModel]:
    token: str | None = None
    while True:
        page = client.search_logged_models([experiment], where, page_token=token)
        yield from page
        if not (token := page.token):
            return


def delete_model(client: MlflowClient, model: LoggedModel) -> None:
    """Its files, then its entry, so that a kill in between leaves an entry to be found again."""
    get_artifact_repository(model.artifact_location).delete_artifacts()
    client.delete_logged_model(model.model_id)


def take_back(client: MlflowClient, made: ModelVersion, first: ModelVersion) -> None:
    """Remove a version that was made at the same moment as an earlier one, with what the earlier one does not use."""
    client.delete_model_version(made.name, made.version)
    if made.source != first.source:
        delete_model(client, model_of(client, made))
    if made.run_id is not None and made.run_id != first.run_id:
        client.delete_run(made.run_id)


def remove_other_runs(client: MlflowClient, experiment: str, same: str, version: ModelVersion) -> None:
    """Remove the runs of the same training that its version does not use: `take_back` of another registration was cut
    off, or the store refused it in the middle. One that is still written to belongs to whom writes it."""
    for run in client.search_runs([experiment], same, ViewType.ACTIVE_ONLY):
        ours = run.info.run_id == version.run_id
        written_to = run.info.status == "RUNNING"
        if ours or (written_to and not is_over(run.data.tags.get(PROCESS), run.info.start_time)):
            continue
        for model in stored_models(client, experiment, f"source_run_id = '{run.info.run_id}'"):
            delete_model(client, model)
        client.delete_run(run.info.run_id)


def model_of(client: MlflowClient, version: ModelVersion) -> LoggedModel:
    """The stored model behind a version."""
    assert version.source is not None
    return client.get_logged_model(version.source.removeprefix("models:/"))

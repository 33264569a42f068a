"""MLflow: reach the store, open a run, log what a training left behind.

One process writes, rank 0: the local store is sqlite, which takes one writer at a time. Values go in batches.
"""

import fcntl
import importlib.util
import json
import logging
import os
import re
import shlex
import socket
import sqlite3
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import mlflow
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from m3diff.records.errors import DataError, redacted

SQLITE = "sqlite:///"
DELETED = "deleted"  # MLflow's word for an experiment or a run in its bin
GONE = "RESOURCE_DOES_NOT_EXIST"  # MLflow's error of what is not there
CURVE = "train/"  # before the name of a curve's column
EXPERIMENTS = (".dvc", "tmp", "exps")  # where DVC runs queued experiments, within the project
PROCESS = "register.process"  # tag of a run and of a stored model: who makes it
FORGOTTEN_S = 3600  # after which what another machine began, and did not end, is taken for left behind
PLACES = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}
"""Where MLflow's tables have the absolute places of artifacts."""
FORBIDDEN = re.compile(r"[^\w.\- :/]")  # in the name of a metric
PARAMS_BATCH, METRICS_BATCH = 100, 1000  # what MLflow takes in one request
REMEDY = "start it (`make up`) or correct register.tracking_uri, then run `m3diff register` again: nothing was lost"


class TrackingUnavailableError(ConnectionError):
    """The MLflow server does not answer. What DVC holds is safe, so that a later try starts from the same files."""


def resolve(tracking_uri: str) -> str:
    """The store's address with a relative sqlite file made absolute against the project, its folder made. Experiments
    that DVC runs in a copy of the project share the project's store.

    Raises:
        DataError: it is a sqlite file, and only MLflow's client is installed (the extra `serve`).
    """
    if not tracking_uri.startswith(SQLITE):
        return tracking_uri
    if importlib.util.find_spec("sqlalchemy") is None:
        raise DataError(
            f"register.tracking_uri {tracking_uri}: opening it needs the extra train (in a checkout: pip install -c "
            "constraints.txt -e '.[train]'); else name a server (http://...) there, or a checkpoint folder with --model"
        )
    database = (project(Path.cwd()) / tracking_uri.removeprefix(SQLITE)).resolve()
    database.parent.mkdir(parents=True, exist_ok=True)
    return f"{SQLITE}{database}"


def project(folder: Path) -> Path:
    """The project whose queued experiment runs in this folder, else the folder."""
    parts, length = folder.parts, len(EXPERIMENTS)
    for start in range(len(parts) - length + 1):
        if parts[start : start + length] == EXPERIMENTS:
            return Path(*parts[:start])
    return folder


def check_alive(uri: str) -> None:
    """Ask an HTTP store for its health.

    Raises:
        TrackingUnavailableError: it does not answer within five seconds.
    """
    if not uri.startswith("http"):
        return
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=5).close()
    except (urllib.error.URLError, OSError) as error:
        raise TrackingUnavailableError(redacted(f"MLflow at {uri} does not answer ({error}); {REMEDY}")) from error


def this_process() -> dict[str, str]:
    return {PROCESS: f"{socket.gethostname()}:{os.getpid()}"}


def is_over(process: str | None, begun_ms: int) -> bool:
    """Whether what this process (`host:pid`) began will not be ended by it. To be called under the lock."""
    host, _, pid = (process or "").rpartition(":")
    if host == socket.gethostname() and pid.isdecimal():
        return int(pid) == os.getpid() or not is_alive(int(pid))
    return time.time() - begun_ms / 1000 > FORGOTTEN_S


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def connected(tracking_uri: str) -> Iterator[MlflowClient]:
    """A client of the store, which is also what mlflow's own functions use meanwhile.

    Raises:
        TrackingUnavailableError: the server was not there, or went away in the middle.
    """
    uri = resolve(tracking_uri)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # mlflow's own 7 keep a user waiting for minutes
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    check_alive(uri)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    mlflow.set_tracking_uri(uri)
    client = make_client(uri)
    try:
        yield client
    except Exception:
        check_alive(uri)
        raise


def make_client(uri: str) -> MlflowClient:
    """A client, which makes the tables of a new sqlite store; one process at a time, since of two one would fail."""
    if not uri.startswith(SQLITE):
        return MlflowClient()
    with Path(f"{uri.removeprefix(SQLITE)}.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        client = MlflowClient()
        client.search_experiments(max_results=1)
        anchor(Path(uri.removeprefix(SQLITE)))
        return client


def anchor(database: Path) -> None:
    """Let the artifacts of a store that was copied or moved with its folder be those beside it, and none of the
    original's: MLflow keeps absolute places. One that artifacts have elsewhere stays."""
    here = f"{(database.parent / 'artifacts').as_uri()}/"
    name = "/".join(["", *here.split("/")[-4:]])  # /services/mlflow/artifacts/
    with closing(sqlite3.connect(database, timeout=20)) as store, store:
        kept = [place for (place,) in store.execute("SELECT artifact_location FROM experiments") if place]
        other = {place.partition(name)[0] + name for place in kept if place.startswith("file:") and name in place}
        for root in sorted(other - {here}):
            for table, columns in PLACES.items():
                for column in columns:
                    store.execute(
                        f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                        (here, len(root) + 1, len(root), root),
                    )
            print(f"{database}: came from {root}; its artifacts are those beside it now", file=sys.stderr)


def experiment_id(client: MlflowClient, name: str) -> str:
    """The experiment's id, made where there is none; beside a sqlite store its artifacts lie in `artifacts/`.

    Raises:
        DataError: somebody deleted it.
    """
    if (known := known_experiment(client, name)) is not None:
        return known
    store = mlflow.get_tracking_uri()
    if not store.startswith(SQLITE):
        return client.create_experiment(name)
    root = Path(store.removeprefix(SQLITE)).parent / "artifacts"
    return client.create_experiment(name, artifact_location=(root / name).as_uri())


def known_experiment(client: MlflowClient, name: str) -> str | None:
    """The experiment's id; None where there is none yet.

    Raises:
        DataError: somebody deleted it.
    """
    known = client.get_experiment_by_name(name)
    if known is not None and known.lifecycle_stage == DELETED:
        raise DataError(
            f"register.experiment: {name!r} was deleted in MLflow, which takes nothing of it until it is restored: "
            f"{restore('experiments', known.experiment_id)}, then `m3diff register` (nothing was lost)"
        )
    return known.experiment_id if known is not None else None


def restore(what: Literal["experiments", "runs"], key: str) -> str:
    """MLflow's command that brings back what somebody deleted."""
    store = re.sub(r"//[^/@]*@", "//USER:PASSWORD@", mlflow.get_tracking_uri())
    option = {"experiments": "--experiment-id", "runs": "--run-id"}[what]
    return f"MLFLOW_TRACKING_URI={shlex.quote(store)} mlflow {what} restore {option} {key}"


def lifecycle(client: MlflowClient, run_id: str | None) -> str | None:
    """Whether a run is `active` or `deleted`; None where MLflow has none, as after `mlflow gc`."""
    if not run_id:
        return None
    try:
        return str(client.get_run(run_id).info.lifecycle_stage)
    except MlflowException as error:
        if error.error_code != GONE:
            raise
        return None


def registered(client: MlflowClient, name: str) -> RegisteredModel | None:
    """The registered model with its aliases and tags; None where there is none."""
    return next(iter(client.search_registered_models(f"name = '{name}'")), None)


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
        there = sorted((int(v.version) for v in client.search_model_versions(f"name = '{name}'")), reverse=True)
        raise DataError(f"model {name!r} has no version {version!r}; there are {there or 'none'}") from error


def download_checkpoint(version: ModelVersion, into: Path | None = None) -> Path | None:
    """The checkpoint as MLflow keeps it, in `into`, else where it lies if that is on this machine; None where it keeps
    none."""
    place = f"models:/{version.name}/{version.version}/artifacts/checkpoint"
    try:
        return Path(mlflow.artifacts.download_artifacts(artifact_uri=place, dst_path=str(into) if into else None))
    except (MlflowException, OSError):
        return None


def flatten(tree: Any, prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Nested mappings and lists as one level: `{"a": {"b": 1}, "c": [2]}` to `{"a.b": 1, "c.0": 2}`."""
    if isinstance(tree, Mapping):
        pairs = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list):
        pairs = [(str(index), value) for index, value in enumerate(tree)]
    else:
        return {prefix: tree}
    return {
        name: leaf
        for key, value in pairs
        for name, leaf in flatten(value, f"{prefix}{separator}{key}" if prefix else key, separator).items()
    }


def log_params(client: MlflowClient, run_id: str, tree: Mapping[str, Any]) -> None:
    """Nested parameters by their path; what the run has stays, since MLflow takes a parameter once."""
    known = client.get_run(run_id).data.params
    params = [Param(name, str(value)) for name, value in flatten(tree).items() if name not in known]
    for start in range(0, len(params), PARAMS_BATCH):
        client.log_batch(run_id, params=params[start : start + PARAMS_BATCH])


def logged_points(client: MlflowClient, run_id: str) -> set[tuple[str, int]]:
    """The points of the training's curves that the run has: metric and step."""
    names = [name for name in client.get_run(run_id).data.metrics if name.startswith(CURVE)]
    return {(name, point.step) for name in names for point in client.get_metric_history(run_id, name)}


def log_rows(
    client: MlflowClient, run_id: str, rows: Iterable[Mapping[str, Any]], logged: set[tuple[str, int]]
) -> None:
    """Each column of a training's rows as a metric by `step`, but for the points that are `logged`, to which they are
    added."""
    now = int(time.time() * 1000)
    points = {
        (f"{CURVE}{name}", int(row["step"])): float(value)
        for row in rows
        for name, value in row.items()
        if name != "step"
    }
    new = [(at, value) for at, value in points.items() if at not in logged]
    for start in range(0, len(new), METRICS_BATCH):
        batch = new[start : start + METRICS_BATCH]
        client.log_batch(run_id, metrics=[Metric(name, value, now, step) for (name, step), value in batch])
        logged.update(at for at, _ in batch)


def log_scores(client: MlflowClient, run_id: str, metrics: Path, timestamp_ms: int) -> None:
    """`metrics.json`, nested parts as `part/score`, a protocol's as `dataset/protocol/score`; a score that is absent
    (null) or no number is left out. A letter that MLflow takes in no name becomes an underscore."""
    found = json.loads(metrics.read_text())
    protocols = found.pop("protocols", {})
    leaves = flatten(found | protocols, separator="/")
    scores = [
        Metric(FORBIDDEN.sub("_", name), float(leaf), timestamp_ms, 0)
        for name, leaf in leaves.items()
        if isinstance(leaf, int | float)
    ]
    for start in range(0, len(scores), METRICS_BATCH):
        client.log_batch(run_id, metrics=scores[start : start + METRICS_BATCH])


def log_dataset(client: MlflowClient, run_id: str, name: str, source: Path, digest: str) -> None:
    """The run's training data, named by DVC's hash of it."""
    dataset = Dataset(name, digest, source_type="dvc", source=json.dumps({"path": str(source), "md5": digest}))
    client.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])

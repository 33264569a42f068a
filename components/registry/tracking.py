"""MLflow: the connection to its store, and a training's run there.

A run is opened when the training begins, written to at checkpoints, and completed by evaluate. The files are the source
of truth: what MLflow misses while it does not answer is in them, and the training itself, evaluate or register, whoever
reaches it next, uploads what is missing. A run is known by the training's key, and later by its weights.

One process writes, rank 0: the local store is sqlite, which takes one writer at a time. Values go in batches.
"""

import csv
import hashlib
import importlib.util
import json
import logging
import os
import re
import shlex
import socket
import sqlite3
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
from mlflow import MlflowClient, get_tracking_uri, set_tracking_uri
from mlflow.entities import Metric, Param, Run
from mlflow.entities.model_registry import RegisteredModel
from mlflow.exceptions import MlflowException

from m3diff.records.errors import DataError, readable, redacted
from m3diff.records.files import lock_exclusively

SQLITE = "sqlite:///"
DELETED = "deleted"  # MLflow's word for an experiment or a run in its bin
GONE = "RESOURCE_DOES_NOT_EXIST"  # MLflow's error of what is not there
CURVE = "train/"  # before the name of a curve's column
EXPERIMENTS = "/.dvc/tmp/exps/"  # where DVC runs queued experiments, within the project
WEIGHTS = "weights.sha256"  # tag of a run whose training has ended
VERSION = "dvc.checkpoint"  # tag of a run that a version is made of
TOKENS = "predict.max_new_tokens"  # tag: the length limit that its scores were captioned with
FLOW_RUN = "prefect.flow_run"
KEY = "train.key"  # tag: what decides the weights, hashed
PROCESS = "register.process"  # tag of a run and of a stored model: who makes it
FORGOTTEN_S = 3600  # after which what another machine began, and did not end, is taken for left behind
EVERY_S = 15.0  # between two looks at the curves
PATIENCE_S = 30.0  # that the end of a training waits for the store
PLACES = (  # tables and columns of MLflow's store that have the absolute places of artifacts
    *(("experiments", "artifact_location"), ("runs", "artifact_uri"), ("logged_models", "artifact_location")),
    *(("model_versions", "source"), ("model_versions", "storage_location")),
)
FORBIDDEN = re.compile(r"[^\w.\- :/]")  # in the name of a metric
BATCH = {"params": 100, "metrics": 1000}  # what MLflow takes in one request
REMEDY = "start it (`make up`) or correct register.tracking_uri, then run `m3diff register` again: nothing was lost"


class TrackingUnavailableError(ConnectionError):
    """The MLflow server does not answer. What DVC holds is safe, so that a later try starts from the same files."""


# The connection


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
    database = Path(str(Path.cwd()).partition(EXPERIMENTS)[0], tracking_uri.removeprefix(SQLITE)).resolve()
    database.parent.mkdir(parents=True, exist_ok=True)
    return f"{SQLITE}{database}"


def check_alive(uri: str) -> None:
    """Ask an HTTP store for its health.

    Raises:
        TrackingUnavailableError: it does not answer within five seconds.
    """
    if not uri.startswith("http"):
        return
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=5).close()
    except OSError as error:
        raise TrackingUnavailableError(redacted(f"MLflow at {uri} does not answer ({error}); {REMEDY}")) from error


@contextmanager
def connected(tracking_uri: str) -> Iterator[MlflowClient]:
    """A client of the store, which is also what mlflow's own functions use meanwhile.

    MLflow leaves the code of a model that it loads at the front of `sys.path`, as it does to check an example, where a
    temporary folder is gone and anybody may make it again. The path is as it was afterwards.

    Raises:
        DataError: a file that is the store cannot be read.
        TrackingUnavailableError: the server was not there, or went away in the middle.
    """
    uri = resolve(tracking_uri)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # mlflow's own 7 keep a user waiting for minutes
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    check_alive(uri)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    set_tracking_uri(uri)
    if uri.startswith(SQLITE):
        with (
            Path(f"{uri.removeprefix(SQLITE)}.lock").open("a") as held,
            readable(
                Path(uri.removeprefix(SQLITE)),
                "if it is damaged, put back a backup of it, or move it away and run `m3diff register`",
            ),
        ):
            lock_exclusively(held)  # of two processes that make the tables of a new store one would fail
            MlflowClient().search_experiments(max_results=1)
            _anchor(Path(uri.removeprefix(SQLITE)))
    path = sys.path
    try:
        yield MlflowClient()
    except Exception:
        check_alive(uri)
        raise
    finally:
        sys.path = path


def _anchor(database: Path) -> None:
    """Let the artifacts of a store that was copied or moved with its folder be those beside it, and none of the
    original's: MLflow keeps absolute places. One that artifacts have elsewhere stays."""
    here = f"{(database.parent / 'artifacts').as_uri()}/"
    places = {"here": here, "name": "/".join(["", *here.split("/")[-4:]])}  # name: /services/mlflow/artifacts/
    with closing(sqlite3.connect(database, timeout=20)) as store, store:
        for table, column in PLACES:
            store.execute(
                f"UPDATE {table} SET {column} = :here || substr({column}, instr({column}, :name) + length(:name)) "
                f"WHERE {column} LIKE 'file:%' AND instr({column}, :name) AND NOT instr({column}, :here)",
                places,
            )
        if store.total_changes:
            print(f"{database}: came from elsewhere; its artifacts are those beside it now", file=sys.stderr)


# Experiments, runs, and who writes to them


def registered(client: MlflowClient, name: str) -> RegisteredModel | None:
    """The registered model with its aliases and tags; None where there is none."""
    return next(iter(client.search_registered_models(f"name = '{name}'")), None)


def experiment_id(client: MlflowClient, name: str) -> str:
    """The experiment's id, made where there is none; beside a sqlite store its artifacts are in `artifacts/`.

    Raises:
        DataError: somebody deleted it.
    """
    if (known := known_experiment(client, name)) is not None:
        return known
    store = get_tracking_uri()
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
        raise deleted(f"register.experiment: {name!r}", "experiments", known.experiment_id)
    return known.experiment_id if known is not None else None


def deleted(what: str, kind: Literal["experiments", "runs"], key: str) -> DataError:
    store = re.sub(r"//[^/@]*@", "//USER:PASSWORD@", get_tracking_uri())
    command = f"MLFLOW_TRACKING_URI={shlex.quote(store)} mlflow {kind} restore --{kind[:-1]}-id {key}"
    return DataError(
        f"{what} was deleted in MLflow, which takes nothing of it until it is restored: {command}, then `m3diff "
        "register` (nothing was lost)"
    )


def find_run(client: MlflowClient, run_id: str | None) -> Run | None:
    """The run; None where MLflow has no such run, as after `mlflow gc`."""
    try:
        return client.get_run(run_id) if run_id else None
    except MlflowException as error:
        if error.error_code != GONE:
            raise
        return None


def this_process() -> dict[str, str]:
    return {PROCESS: f"{socket.gethostname()}:{os.getpid()}"}


def is_over(tags: Mapping[str, str], begun_ms: int) -> bool:
    """True where the process that the tags name will not end what it began. To be called under register's lock."""
    host, _, pid = tags.get(PROCESS, "").rpartition(":")
    if host != socket.gethostname() or not pid.isdecimal():
        return time.time() - begun_ms / 1000 > FORGOTTEN_S
    return int(pid) == os.getpid() or not psutil.pid_exists(int(pid))


def taken_up(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> str:
    client.update_run(run_id, "RUNNING")
    for tag, value in tags.items():
        client.set_tag(run_id, tag, value)
    return run_id


def of_weights(client: MlflowClient, experiment: str, weights: str | None, max_new_tokens: str) -> str | None:
    """The newest run of these weights that was captioned with this limit, else one that was not captioned yet."""
    if not weights:
        return None
    found = client.search_runs([experiment], f"tags.`{WEIGHTS}` = '{weights}'", order_by=["attributes.start_time DESC"])
    for limit in (max_new_tokens, None):
        for run in found:
            if run.data.tags.get(TOKENS) == limit:
                return run.info.run_id
    return None


# What is logged


def weights_sha256(manifest: Path) -> str | None:
    """sha256 over the names and hashes of a checkpoint's weights, as its manifest lists them; None for none."""
    files = json.loads(manifest.read_text()).get("files", {})
    weights = {name: digest for name, digest in files.items() if name.endswith(".safetensors")}
    return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest() if weights else None


def flatten(tree: Any, prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Nested mappings and lists as one level: `{"a": {"b": 1}, "c": [2]}` to `{"a.b": 1, "c.0": 2}`."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    return {
        name: leaf
        for key, value in tree.items()
        for name, leaf in flatten(value, f"{prefix}{separator}{key}" if prefix else str(key), separator).items()
    }


def log_params(client: MlflowClient, run_id: str, tree: Mapping[str, Any]) -> None:
    """Nested parameters by their path; what the run has stays, since MLflow takes a parameter once."""
    known = client.get_run(run_id).data.params
    new = [Param(name, str(value)) for name, value in flatten(tree).items() if name not in known]
    _log(client, run_id, "params", new)


def log_curves(client: MlflowClient, run_id: str, curves: Path) -> None:
    """Each column of a training's `curves.csv` as a metric by `step`, but for the points that the run has. An empty
    cell is no point."""
    with curves.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in client.get_run(run_id).data.metrics if name.startswith(CURVE)]
    logged = {(name, point.step) for name in names for point in client.get_metric_history(run_id, name)}
    points = {
        (f"{CURVE}{name}", int(row["step"])): float(value)
        for row in rows
        for name, value in row.items()
        if value and name != "step"
    }
    now = int(time.time() * 1000)
    new = [Metric(name, value, now, step) for (name, step), value in points.items() if (name, step) not in logged]
    _log(client, run_id, "metrics", new)


def log_scores(client: MlflowClient, run_id: str, metrics: Path, timestamp_ms: int) -> None:
    """`metrics.json`, nested parts as `part/score`, a protocol's as `dataset/protocol/score`; a score that is absent
    (null) or no number is left out. A letter that MLflow takes in no name becomes an underscore."""
    found = json.loads(metrics.read_text())
    protocols = found.pop("protocols", {})
    leaves = flatten(found | protocols, separator="/")
    scores = {FORBIDDEN.sub("_", name): float(leaf) for name, leaf in leaves.items() if isinstance(leaf, int | float)}
    _log(client, run_id, "metrics", [Metric(name, value, timestamp_ms, 0) for name, value in scores.items()])


def _log(client: MlflowClient, run_id: str, kind: str, entries: list[Any]) -> None:
    for start in range(0, len(entries), BATCH[kind]):
        client.log_batch(run_id, **{kind: entries[start : start + BATCH[kind]]})  # type: ignore[arg-type]


# A training's run, while it trains and when its scores are there


class Description(NamedTuple):
    """A run's name and parameters, and where it is kept."""

    tracking_uri: str
    experiment: str
    model: str  # the entry of `models` that trains
    params: Mapping[str, Any]  # by section, nested
    max_new_tokens: int

    def open(self, client: MlflowClient, tags: dict[str, str]) -> str:
        """A new run's id. It bears DVC's name of the experiment, else model and time (UTC)."""
        name = os.environ.get("DVC_EXP_NAME") or f"{self.model} {time.strftime('%Y-%m-%d %H:%M', time.gmtime())}"
        experiment = experiment_id(client, self.experiment)
        return client.create_run(experiment, run_name=name, tags=self.tags() | tags).info.run_id

    def tags(self) -> dict[str, str]:
        flow_run = os.environ.get("M3DIFF_FLOW_RUN")
        return {FLOW_RUN: flow_run} if flow_run else {}


@contextmanager
def followed(description: Description, model: Path, key: str, curves: Path) -> Iterator[None]:
    """Within, the curves that a training writes at each checkpoint reach its run; a store that does not answer hinders
    nothing.

    Args:
        model: where the training writes `checkpoint` and `curves.csv` when it ends.
        key: names the training: a killed one that goes on goes on with its run.
        curves: the file that it writes at a checkpoint.
    """
    over = threading.Event()

    def log(file: Path, status: str | None = None) -> None:
        try:
            _bring_up(description, key, file, status, model / "checkpoint")
        except Exception as error:  # whatever MLflow raises, the training goes on
            print(f"train: MLflow does not take the curves now ({_reason(error)}); it gets them later", flush=True)

    def follow() -> None:
        seen = None
        while True:
            written = curves.stat().st_mtime_ns if curves.is_file() else 0
            if written != seen:
                seen = written
                log(curves)
            if over.wait(EVERY_S):
                return

    thread = threading.Thread(target=follow, name="mlflow", daemon=True)
    thread.start()
    file, status = curves, "FAILED"
    try:
        yield
        file, status = model / "curves.csv", "FINISHED"
    except SystemExit:
        status = "KILLED"  # asked to end; it goes on later
        raise
    finally:
        over.set()
        thread.join(PATIENCE_S)
        if not thread.is_alive():
            log(file, status)


def _bring_up(description: Description, key: str, curves: Path, status: str | None, checkpoint: Path) -> None:
    """Log what the training's run lacks of the curves and how the training ended. Its run is a new one, or the one of
    an attempt before."""
    with connected(description.tracking_uri) as client:
        experiment = experiment_id(client, description.experiment)
        known = client.search_runs([experiment], f"tags.`{KEY}` = '{key}'", order_by=["attributes.start_time ASC"])
        tags = description.tags() | {KEY: key} | this_process()
        run_id = taken_up(client, known[0].info.run_id, tags) if known else description.open(client, tags)
        log_params(client, run_id, description.params)
        if curves.is_file():
            log_curves(client, run_id, curves)
        if status == "FINISHED":
            client.set_tag(run_id, WEIGHTS, weights_sha256(checkpoint / "manifest.json") or "")
        if status:
            client.set_terminated(run_id, status)


def completed(description: Description, model: Path, metrics: Path) -> None:
    """Log the scores to the run of the training whose weights are in `model`, and end it; a run is made where the
    training was restored from DVC's cache, or the same weights were captioned with another length limit. Where MLflow
    does not take them, register logs what is in the files.

    Args:
        model: holds `checkpoint` and `curves.csv`.
        metrics: evaluate's `metrics.json`.
    """
    try:
        weights = weights_sha256(model / "checkpoint" / "manifest.json") or ""
        with connected(description.tracking_uri) as client:
            experiment = experiment_id(client, description.experiment)
            limit = str(description.max_new_tokens)
            run_id = of_weights(client, experiment, weights, limit) or description.open(client, {WEIGHTS: weights})
            client.set_tag(run_id, TOKENS, limit)
            log_params(client, run_id, description.params)
            log_curves(client, run_id, model / "curves.csv")
            log_scores(client, run_id, metrics, int(time.time() * 1000))
            client.set_terminated(run_id)
    except Exception as error:  # whatever MLflow raises, the scores are there
        print(
            f"evaluate: MLflow does not take the scores now ({_reason(error)}); `m3diff register` logs them", flush=True
        )


def _reason(error: Exception) -> str:
    return str(error).partition("; ")[0].partition("\n")[0]

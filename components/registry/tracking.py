"""Connect to MLflow and log training runs.

Training creates a run and logs to it at every checkpoint, and evaluate adds the scores. The files are the source of
truth: if MLflow does not respond, training, evaluate or register uploads the missing values later. During training, a
run is identified by a key, which is a hash of everything that determines the weights. After training, it is identified
by the digest of the weights.

Only rank 0 writes, because the local sqlite store accepts one writer at a time. Values are sent in batches.
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

from m3diff.records.errors import CodedError, DataError, data_error_if_unreadable, format_count, redact
from m3diff.records.files import lock_exclusively
from m3diff.records.installation import install_command
from m3diff.registry.local_store import SQLITE, TOKEN_LIMIT_TAG, database_path
from m3diff.settings.section import ParamsError

DELETED_STAGE = "deleted"  # MLflow's lifecycle stage of an experiment or a run that can be restored
NOT_FOUND_CODE = "RESOURCE_DOES_NOT_EXIST"  # MLflow's error code if a run or model does not exist
CURVE_PREFIX = "train/"  # prefix of training metrics
TIMES_100_PREFIX = "x100"  # prefix of scores multiplied by 100, as papers print them
WEIGHTS_TAG = "weights.sha256"  # tag with the digest of the weights, which a run gets when its training has finished
CHECKPOINT_TAG = "dvc.checkpoint"  # tag with DVC's hash of the checkpoint, which versions and their runs have
FLOW_RUN_TAG = "prefect.flow_run"
KEY_TAG = "train.key"  # tag with a hash of everything that determines the weights
PROCESS_TAG = "register.process"  # tag that names the process that is creating a run or stored model
ABANDONED_AFTER_S = 3600  # unfinished work of another machine counts as abandoned after this many seconds
CHECK_INTERVAL_S = 15.0  # interval at which the curves are checked for changes, in seconds
FINAL_WAIT_S = 30.0  # maximum time to wait for the store at the end of training, in seconds

# Tables and columns of MLflow's store that contain absolute paths of artifacts
PATH_COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
FORBIDDEN_CHARACTERS = re.compile(r"[^\w.\- :/]")  # characters that MLflow does not allow in metric names
MAX_NAME_CHARS = 250  # maximum length of a metric's name
MAX_BATCH_ENTRIES = {"params": 100, "metrics": 1000}  # maximum number of entries that MLflow accepts in one request
TRACKING_URI = "register.tracking_uri"  # key of the store's URI in params.yaml


class TrackingUnavailableError(CodedError, ConnectionError):
    """The MLflow server does not respond. No results are lost, because DVC keeps the files. Try again later."""


# The connection


def resolve_uri(tracking_uri: str) -> str:
    """Return the URI of the store. For a sqlite store, make the path absolute and create its folder.

    A relative path is resolved from the project folder, even if DVC runs an experiment in a copy of the project.

    Raises:
        DataError: the store is a sqlite file, but only MLflow's client is installed (the extra `serve`).
    """
    if not tracking_uri.startswith(SQLITE):
        return tracking_uri
    if importlib.util.find_spec("sqlalchemy") is None:
        raise DataError(
            "registry.needs_extra_train", key=TRACKING_URI, value=tracking_uri, command=install_command("train")
        )
    database = database_path(tracking_uri)
    database.parent.mkdir(parents=True, exist_ok=True)
    return f"{SQLITE}{database}"


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Rejects redirects, because MLflow's client would send runs, weights and the password to the new address."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        """Raise ParamsError with the address that the server redirects to."""
        requested_url = req.full_url.removesuffix("/health")
        address = newurl.removesuffix("/").removesuffix("/health")
        raise ParamsError(
            "registry.redirected",
            key=TRACKING_URI,
            value=redact(requested_url),
            target=redact(newurl),
            status=code,
            address=redact(address),
        )


def check_alive(uri: str) -> None:
    """Check that the store responds, if it is a server.

    Raises:
        ParamsError: the server redirects to another address.
        TrackingUnavailableError: the server does not respond within five seconds.
    """
    if not uri.startswith("http"):
        return
    try:
        urllib.request.build_opener(NoRedirect).open(f"{uri.rstrip('/')}/health", timeout=5).close()
    except OSError as error:
        cause = redact(str(error))
        raise TrackingUnavailableError("registry.mlflow_not_answering", value=redact(uri), cause=cause) from error


@contextmanager
def connect(tracking_uri: str) -> Iterator[MlflowClient]:
    """Connect to the store. Within the context, mlflow's module-level functions use this store too.

    Yields:
        a client of the store.

    Raises:
        DataError: the store is a file that cannot be read.
        TrackingUnavailableError: the server does not respond at the start, or stops responding within the context.
    """
    uri = resolve_uri(tracking_uri)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # MLflow's default of 7 takes minutes
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_ALLOW_HTTP_REDIRECTS", "false")  # send weights and password only to this address
    check_alive(uri)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    set_tracking_uri(uri)
    if uri.startswith(SQLITE):
        database = Path(uri.removeprefix(SQLITE))
        with (
            Path(f"{database}.lock").open("a") as lock_file,
            data_error_if_unreadable(database, "registry.unreadable_database"),
        ):
            # If two processes create the tables of a new store at once, one of them fails
            lock_exclusively(lock_file)
            MlflowClient().search_experiments(max_results=1)
            _relocate_artifacts(database)
    # MLflow leaves the code folder of each model that it loads at the front of sys.path, and it loads a model from a
    # temporary folder to check its input example. Restore sys.path, because anybody could recreate that folder later
    path = sys.path
    try:
        yield MlflowClient()
    except Exception:
        check_alive(uri)
        raise
    finally:
        sys.path = path


def _relocate_artifacts(database: Path) -> None:
    """Update the paths in a store that was copied or moved, so that it uses the artifacts next to its database.

    MLflow stores absolute paths, so a copy would write to the artifacts of the original. Paths to artifacts in other
    folders are not changed.
    """
    artifacts_uri = f"{(database.parent / 'artifacts').as_uri()}/"
    folder_name = "/".join(["", *artifacts_uri.split("/")[-4:]])  # such as /services/mlflow/artifacts/
    values = {"here": artifacts_uri, "name": folder_name}
    with closing(sqlite3.connect(database, timeout=20)) as store, store:
        for table, column in PATH_COLUMNS:
            store.execute(
                f"UPDATE {table} SET {column} = :here || substr({column}, instr({column}, :name) + length(:name)) "
                f"WHERE {column} LIKE 'file:%' AND instr({column}, :name) AND NOT instr({column}, :here)",
                values,
            )
        if store.total_changes:
            note = "the store was copied or moved. It now uses the artifacts in the folder next to it"
            print(f"{database}: {note}", file=sys.stderr)


# Experiments, runs, and the processes that write to them


def find_registered_model(client: MlflowClient, name: str) -> RegisteredModel | None:
    """Return the registered model with its aliases and tags, or None if nothing is registered under this name."""
    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != NOT_FOUND_CODE:
            raise
        return None


def experiment_id(client: MlflowClient, name: str) -> str:
    """Return the id of an experiment. Create the experiment if it does not exist.

    For a sqlite store, the artifacts of a new experiment are stored in the folder `artifacts` next to the database.

    Raises:
        DataError: somebody deleted the experiment.
    """
    existing_id = find_experiment(client, name)
    if existing_id is not None:
        return existing_id
    store = get_tracking_uri()
    if not store.startswith(SQLITE):
        return client.create_experiment(name)
    root = Path(store.removeprefix(SQLITE)).parent / "artifacts"
    return client.create_experiment(name, artifact_location=(root / name).as_uri())


def find_experiment(client: MlflowClient, name: str) -> str | None:
    """Return the id of an experiment, or None if it does not exist yet.

    Raises:
        DataError: somebody deleted the experiment.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return None
    if experiment.lifecycle_stage == DELETED_STAGE:
        command = command_to_restore("experiments", experiment.experiment_id)
        raise DataError("registry.deleted_experiment", key="register.experiment", name=name, command=command)
    return experiment.experiment_id


def command_to_restore(kind: Literal["experiments", "runs"], id_: str) -> str:
    """Return the shell command that restores an experiment or run that somebody deleted."""
    store = re.sub(r"//[^/@]*@", "//USER:PASSWORD@", get_tracking_uri())
    return f"MLFLOW_TRACKING_URI={shlex.quote(store)} mlflow {kind} restore --{kind[:-1]}-id {id_}"


def find_run(client: MlflowClient, run_id: str | None) -> Run | None:
    """Return a run, or None if the id is None or MLflow has lost the run, for example after `mlflow gc`."""
    try:
        return client.get_run(run_id) if run_id else None
    except MlflowException as error:
        if error.error_code != NOT_FOUND_CODE:
            raise
        return None


def process_tag() -> dict[str, str]:
    """Return the tag that identifies this process."""
    return {PROCESS_TAG: f"{socket.gethostname()}:{os.getpid()}"}


def is_abandoned(tags: Mapping[str, str], started_ms: int) -> bool:
    """Return whether unfinished work is abandoned, because the process named in its tags has ended.

    Work of another machine counts as abandoned after ABANDONED_AFTER_S. Call this only while holding register's lock.

    Args:
        tags: the tags of the unfinished run or stored model.
        started_ms: when the work started, in ms since 1970.
    """
    host, _, pid = tags.get(PROCESS_TAG, "").rpartition(":")
    if host != socket.gethostname() or not pid.isdecimal():
        return time.time() - started_ms / 1000 > ABANDONED_AFTER_S
    # Because this process holds register's lock, work that names this process comes from an earlier attempt
    return int(pid) == os.getpid() or not psutil.pid_exists(int(pid))


def resume_run(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> str:
    """Set a run to RUNNING, add tags and return its id."""
    client.update_run(run_id, "RUNNING")
    for tag, value in tags.items():
        client.set_tag(run_id, tag, value)
    return run_id


def find_run_of_weights(client: MlflowClient, experiment: str, weights: str | None, max_new_tokens: str) -> str | None:
    """Return the id of the newest run of these weights whose captions were generated with this length limit.

    If there is no such run, return the newest run of these weights for which no captions were generated. If there is no
    such run either, return None.

    Args:
        weights: the digest from `weights_sha256`. None or empty for a checkpoint without weights.
    """
    if not weights:
        return None
    runs = client.search_runs(
        [experiment], f"tags.`{WEIGHTS_TAG}` = '{weights}'", order_by=["attributes.start_time DESC"]
    )
    for limit in (max_new_tokens, None):
        for run in runs:
            if run.data.tags.get(TOKEN_LIMIT_TAG) == limit:
                return run.info.run_id
    return None


# Parameters, curves and scores


def weights_sha256(manifest: Path) -> str | None:
    """Return a digest of the weights listed in a checkpoint's manifest, or None if it lists no weights.

    The digest is the sha256 of the names and hashes of the files.
    """
    files = json.loads(manifest.read_text()).get("files", {})
    weights = {name: digest for name, digest in files.items() if name.endswith(".safetensors")}
    if not weights:
        return None
    return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()


def flatten(tree: Any, prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Flatten nested mappings and lists: `{"a": {"b": 1}, "c": [2]}` becomes `{"a.b": 1, "c.0": 2}`."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{separator}{key}" if prefix else str(key)
        leaves |= flatten(value, name, separator)
    return leaves


def log_params(client: MlflowClient, run_id: str, tree: Mapping[str, Any]) -> None:
    """Log nested parameters under dotted names. Skip those that the run already has: MLflow cannot change them."""
    logged_params = client.get_run(run_id).data.params
    new_params = {name: value for name, value in flatten(tree).items() if name not in logged_params}
    _log(client, run_id, "params", [Param(name, str(value)) for name, value in new_params.items()])


def log_curves(client: MlflowClient, run_id: str, curves: Path) -> None:
    """Log each column of a training run's `curves.csv` as a metric over `step`.

    Empty cells and points that were logged before are skipped.
    """
    with curves.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    logged_points: set[tuple[str, int]] = set()
    for name in client.get_run(run_id).data.metrics:
        if name.startswith(CURVE_PREFIX):
            logged_points |= {(name, point.step) for point in client.get_metric_history(run_id, name)}
    points: dict[tuple[str, int], float] = {}
    for row in rows:
        for column, value in row.items():
            if value and column != "step":
                points[f"{CURVE_PREFIX}{column}", int(row["step"])] = float(value)
    now_ms = int(time.time() * 1000)
    new_points: list[Metric] = []
    for (name, step), value in points.items():
        if (name, step) not in logged_points:
            new_points.append(Metric(name, value, now_ms, step))
    _log(client, run_id, "metrics", new_points)


def log_scores(client: MlflowClient, run_id: str, metrics: Path, timestamp_ms: int) -> None:
    """Log the scores in `metrics.json` and in `headline.json` next to it.

    Nested scores are logged as `part/score`, and the scores of a protocol as `dataset/protocol/score`. Values that are
    null or not numbers are left out. The scores in `headline.json`, which are multiplied by 100 as in papers, are
    logged as `x100/dataset/protocol/score`. Characters that MLflow does not allow in names are replaced by underscores.
    The names of kinds of questions come from the data, so a name that is too long for MLflow is left out.
    """
    report = json.loads(metrics.read_text())
    protocols = report.pop("protocols", {})
    leaves = flatten(report | protocols, separator="/")
    headline = metrics.with_name("headline.json")
    if headline.is_file():
        leaves |= flatten(json.loads(headline.read_text()), TIMES_100_PREFIX, separator="/")
    scores: dict[str, float] = {}
    for name, leaf in leaves.items():
        metric_name = clean_metric_name(name)
        if isinstance(leaf, int | float) and len(metric_name) <= MAX_NAME_CHARS:
            scores[metric_name] = float(leaf)
    _log(client, run_id, "metrics", [Metric(name, value, timestamp_ms, 0) for name, value in scores.items()])


def clean_metric_name(name: str) -> str:
    """Return a name that MLflow allows: without special characters, and without empty parts and dots as in a path."""
    parts = FORBIDDEN_CHARACTERS.sub("_", name).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))


def _log(client: MlflowClient, run_id: str, kind: str, entries: list[Any]) -> None:
    for start in range(0, len(entries), MAX_BATCH_ENTRIES[kind]):
        client.log_batch(run_id, **{kind: entries[start : start + MAX_BATCH_ENTRIES[kind]]})  # type: ignore[arg-type]


# Log a training run, during training and after the evaluation


class RunDescription(NamedTuple):
    """Describes a training run to MLflow: the store, the experiment, the model and the parameters.

    Attributes:
        model: the name of the trained model in the section `models`.
        params: nested parameters by section.
        max_new_tokens: the length limit of captions in tokens.
    """

    tracking_uri: str
    experiment: str
    model: str
    params: Mapping[str, Any]
    max_new_tokens: int

    def create_run(self, client: MlflowClient, tags: dict[str, str]) -> str:
        """Create a run and return its id. If DVC is running an experiment, the run gets the experiment's name."""
        name = os.environ.get("DVC_EXP_NAME") or self.run_name()
        experiment = experiment_id(client, self.experiment)
        return client.create_run(experiment, run_name=name, tags=self.tags() | tags).info.run_id

    def run_name(self) -> str:
        """Return a name made of the model, the time in UTC, and the parameters that are changed most often."""
        train = self.params.get("train", {})
        name = f"{self.model} {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())}"
        if "epochs" in train:
            name += f", {format_count(train['epochs'], 'epoch')}"
        if "seed" in train:
            name += f", seed {train['seed']}"
        return name

    def tags(self) -> dict[str, str]:
        """Return the tag with the flow run's id, or no tag if no flow runs the training."""
        flow_run = os.environ.get("M3DIFF_FLOW_RUN")
        return {FLOW_RUN_TAG: flow_run} if flow_run else {}


@contextmanager
def log_curves_while_training(description: RunDescription, model: Path, key: str, curves: Path) -> Iterator[None]:
    """Log the curves that training writes at each checkpoint. Training continues even if the store does not respond.

    Args:
        model: the folder where training writes `checkpoint` and `curves.csv` when it ends.
        key: the key of the training run. If training is resumed after it was killed, the MLflow run with this key is
            continued.
        curves: the file that training writes at each checkpoint.
    """
    is_over = threading.Event()

    def log(file: Path, status: str | None = None) -> None:
        try:
            _update_run(description, key, file, status, model / "checkpoint")
        except Exception as error:  # training continues, whatever MLflow raises
            print(
                f"train: MLflow did not accept the curves ({short_problem(error)}). They are logged later", flush=True
            )

    def follow() -> None:
        logged_time = None
        while True:
            written_time = curves.stat().st_mtime_ns if curves.is_file() else 0
            if written_time != logged_time:
                logged_time = written_time
                log(curves)
            if is_over.wait(CHECK_INTERVAL_S):
                return

    thread = threading.Thread(target=follow, name="mlflow", daemon=True)
    thread.start()
    file = curves
    status = "FAILED"
    try:
        yield
        file = model / "curves.csv"
        status = "FINISHED"
    except SystemExit:
        status = "KILLED"  # somebody stopped the training; it can be resumed
        raise
    finally:
        is_over.set()
        thread.join(FINAL_WAIT_S)
        # If the thread is still waiting for the store, do not write from two threads at the same time
        if not thread.is_alive():
            log(file, status)


def _update_run(description: RunDescription, key: str, curves: Path, status: str | None, checkpoint: Path) -> None:
    """Log new points of the training curves and, if training has ended, its final status.

    The MLflow run of an earlier attempt is reused. If there is no such run, a new run is created.
    """
    with connect(description.tracking_uri) as client:
        experiment = experiment_id(client, description.experiment)
        runs = client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{key}'", order_by=["attributes.start_time ASC"])
        tags = description.tags() | {KEY_TAG: key} | process_tag()
        run_id = resume_run(client, runs[0].info.run_id, tags) if runs else description.create_run(client, tags)
        log_params(client, run_id, description.params)
        if curves.is_file():
            log_curves(client, run_id, curves)
        if status == "FINISHED":
            client.set_tag(run_id, WEIGHTS_TAG, weights_sha256(checkpoint / "manifest.json") or "")
        if status:
            client.set_terminated(run_id, status)


def log_evaluation(description: RunDescription, model: Path, metrics: Path) -> None:
    """Log the scores to the MLflow run in which the weights were trained, and end the run.

    A new run is created if the weights were restored from DVC's cache, or if the existing run has captions of another
    length limit. If MLflow does not accept the scores, register logs them from the files later.

    Args:
        model: the folder with `checkpoint` and `curves.csv`.
        metrics: the file `metrics.json` written by evaluate.
    """
    try:
        weights = weights_sha256(model / "checkpoint" / "manifest.json") or ""
        with connect(description.tracking_uri) as client:
            experiment = experiment_id(client, description.experiment)
            limit = str(description.max_new_tokens)
            run_id = find_run_of_weights(client, experiment, weights, limit)
            if run_id is None:
                run_id = description.create_run(client, {WEIGHTS_TAG: weights})
            client.set_tag(run_id, TOKEN_LIMIT_TAG, limit)
            log_params(client, run_id, description.params)
            log_curves(client, run_id, model / "curves.csv")
            log_scores(client, run_id, metrics, int(time.time() * 1000))
            client.set_terminated(run_id)
    except Exception as error:  # the scores are in the files, whatever MLflow raises
        print(
            f"evaluate: MLflow did not accept the scores ({short_problem(error)}). `m3diff register` logs them",
            flush=True,
        )


def short_problem(error: Exception) -> str:
    """Return the first line of an error's message. If the error has a remedy, the remedy is left out."""
    text = error.fault.problem if isinstance(error, CodedError) else str(error)
    return text.partition("\n")[0]

"""A training's MLflow run: opened when it begins, written to at checkpoints, completed by evaluate.

The files are what counts: what the store misses while it does not answer lies in them, and whoever reaches it next logs
it, be it the training itself, evaluate or register. A run is known by the training's key, and later by its weights.
"""

import csv
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

KEY = "train.key"  # tag: what decides the weights, hashed
WEIGHTS = "weights.sha256"  # tag of a run whose training has ended
VERSION = "dvc.checkpoint"  # tag of a run that a version is made of
TOKENS = "predict.max_new_tokens"  # tag: the length limit that its scores were captioned with
FLOW_RUN = "prefect.flow_run"
EVERY_S = 15.0  # between two looks at the curves
PATIENCE_S = 30.0  # that the end of a training waits for the store


@dataclass(frozen=True)
class Description:
    """What a run says of itself, and where it is kept."""

    tracking_uri: str
    experiment: str
    model: str  # the entry of `models` that trains
    params: Mapping[str, Any]  # by section, nested
    max_new_tokens: int

    def name(self) -> str:
        """DVC's name of the experiment, else model and time (UTC)."""
        told = os.environ.get("DVC_EXP_NAME")
        return told or f"{self.model} {time.strftime('%Y-%m-%d %H:%M', time.gmtime())}"

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
    follower, over = Follower(description, key), threading.Event()

    def follow() -> None:
        follower.log(curves)
        while not over.wait(EVERY_S):
            follower.log(curves)

    thread = threading.Thread(target=follow, name="mlflow", daemon=True)
    thread.start()
    status = "FAILED"
    try:
        yield
        status = "FINISHED"
    except SystemExit:
        status = "KILLED"  # asked to end; it goes on later
        raise
    finally:
        over.set()
        thread.join(PATIENCE_S)
        if not thread.is_alive() and status == "FINISHED":
            follower.log(model / "curves.csv", status, model / "checkpoint")
        elif not thread.is_alive():
            follower.log(curves, status)


@dataclass
class Follower:
    """Brings a training's run up to what its files say."""

    description: Description
    key: str
    run_id: str | None = None
    logged: set[tuple[str, int]] = field(default_factory=set)
    told: bool = False

    def log(self, curves: Path, status: str | None = None, checkpoint: Path | None = None) -> None:
        """Log what the run lacks of the curves, how the training ended, and the weights that it made; a failure is said
        once."""
        try:
            self.write(curves, status, checkpoint)
        except Exception as error:  # whatever MLflow raises, the training goes on
            if not self.told:
                self.told = True
                print(f"train: MLflow does not take the curves now ({reason(error)}); it gets them later", flush=True)

    def write(self, curves: Path, status: str | None, checkpoint: Path | None) -> None:
        from m3diff.registry import tracking

        with tracking.connected(self.description.tracking_uri) as client:
            if self.run_id is None:
                run = open_run(client, self.description, self.key)
                self.run_id, self.logged = run.info.run_id, tracking.logged_points(client, run.info.run_id)
            if curves.is_file():
                tracking.log_rows(client, self.run_id, curve_rows(curves), self.logged)
            if checkpoint:
                client.set_tag(self.run_id, WEIGHTS, weights_sha256(checkpoint) or "")
            if status:
                client.set_terminated(self.run_id, status)


def curve_rows(curves: Path) -> Iterable[dict[str, Any]]:
    """The rows of `curves.csv`; what a step does not have is left out."""
    with curves.open(newline="", encoding="utf-8") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def open_run(client: "MlflowClient", description: Description, key: str) -> "Run":
    """The training's run, as running: a new one, or the one of an attempt before."""
    from m3diff.registry import tracking

    experiment = tracking.experiment_id(client, description.experiment)
    known = client.search_runs([experiment], f"tags.`{KEY}` = '{key}'", order_by=["attributes.start_time ASC"])
    tags = description.tags() | {KEY: key} | tracking.this_process()
    run = known[0] if known else client.create_run(experiment, run_name=description.name(), tags=tags)
    if known:
        client.update_run(run.info.run_id, "RUNNING")
        for tag, value in tags.items():
            client.set_tag(run.info.run_id, tag, value)
    tracking.log_params(client, run.info.run_id, description.params)
    return run


def completed(description: Description, model: Path, metrics: Path) -> None:
    """`complete`, where it can be; else register logs what is in the files."""
    try:
        complete(description, model, metrics)
    except Exception as error:  # whatever MLflow raises, the scores are there
        print(
            f"evaluate: MLflow does not take the scores now ({reason(error)}); `m3diff register` logs them", flush=True
        )


def reason(error: Exception) -> str:
    return str(error).partition("; ")[0].partition("\n")[0]


def complete(description: Description, model: Path, metrics: Path) -> str:
    """Log the scores to the run of the training whose weights lie in `model`, and end it; a run is made where the
    training was restored from DVC's cache, or the same weights were captioned with another length limit.

    Args:
        model: holds `checkpoint` and `curves.csv`.
        metrics: evaluate's `metrics.json`.
    Returns: the run's id.
    Raises:
        TrackingUnavailableError: MLflow does not answer; register logs it all.
    """
    from m3diff.registry import tracking

    with tracking.connected(description.tracking_uri) as client:
        experiment = tracking.experiment_id(client, description.experiment)
        weights = weights_sha256(model / "checkpoint") or ""
        run_id = of_weights(client, experiment, weights, description.max_new_tokens)
        if run_id is None:
            tags = description.tags() | {WEIGHTS: weights}
            run_id = client.create_run(experiment, run_name=description.name(), tags=tags).info.run_id
        client.set_tag(run_id, TOKENS, str(description.max_new_tokens))
        tracking.log_params(client, run_id, description.params)
        tracking.log_rows(client, run_id, curve_rows(model / "curves.csv"), tracking.logged_points(client, run_id))
        tracking.log_scores(client, run_id, metrics, int(time.time() * 1000))
        client.set_terminated(run_id)
        return run_id


def of_weights(client: "MlflowClient", experiment: str, weights: str, max_new_tokens: int) -> str | None:
    """The newest run of these weights that was captioned with this limit, else one that was not captioned yet."""
    if not weights:
        return None
    same = f"tags.`{WEIGHTS}` = '{weights}'"
    found = client.search_runs([experiment], same, order_by=["attributes.start_time DESC"])
    for limit in (str(max_new_tokens), None):
        for run in found:
            if run.data.tags.get(TOKENS) == limit:
                return run.info.run_id
    return None


def weights_sha256(checkpoint: Path) -> str | None:
    """sha256 over the names and hashes of a checkpoint's weights, as its manifest lists them; None for none."""
    files = json.loads((checkpoint / "manifest.json").read_text()).get("files", {})
    weights = {name: digest for name, digest in files.items() if name.endswith(".safetensors")}
    return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest() if weights else None

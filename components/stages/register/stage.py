"""Register: one MLflow run for a training, and its checkpoint as a version of the registered model.

The version is known by the DVC hash of its checkpoint, so registering twice gives one version, also at the same moment
and after a kill half-way: the version is the last thing written. What a later evaluation of the same checkpoint changed
is logged anew.
"""

import base64
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version as installed
from pathlib import Path
from typing import Literal, NamedTuple

import mlflow
import pandas as pd
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelStatus, ViewType
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.tracking import MlflowClient
from mlflow.types.schema import ColSpec, Schema

from m3diff.provenance.dvc import Lock
from m3diff.provenance.git import alone
from m3diff.records.copies import copy_folder
from m3diff.registry import lineage, tracking, versions
from m3diff.registry.versions import CHALLENGER, SCORES, delete_model, every_page, has_artifact, put_alias, run_of
from m3diff.settings.tree import Params, Paths
from m3diff.stages.register.params import Register

# What the code of the models imports of the rest of the package
SHARED_CODE = (
    *("__init__.py", "images/__init__.py", "images/open.py"),
    *("records/__init__.py", "records/copies.py", "records/errors.py"),
)

TRIES = 3  # MLflow fails where two machines make the same entry (of an experiment, an alias) at the same moment
Outcome = Literal["registered", "updated", "unchanged"]
REQUIREMENTS = ("mlflow", "torch", "transformers", "peft", "tokenizers", "safetensors", "pillow", "pandas")
SIGNATURE = ModelSignature(
    inputs=Schema(
        [ColSpec("string", "before"), ColSpec("string", "after"), ColSpec("string", "question", required=False)]
    ),
    outputs=Schema([ColSpec("string")]),
)


class Registration(NamedTuple):
    """The outcome of register; `unchanged` where the store held this checkpoint with these scores already."""

    outcome: Outcome
    model: str
    version: int
    run_id: str

    def __str__(self) -> str:
        return f"models:/{self.model}/{self.version} {self.outcome} (MLflow run {self.run_id})"


def register(params: Params) -> Registration:
    """Log the training in the working tree and register its checkpoint as the challenger.

    Raises:
        DataError: the working tree is not what `dvc.lock` says.
        TrackingUnavailableError: MLflow does not answer; nothing is lost, run it again.
    """
    lock = Lock()
    tags = lineage.read_lineage(params, lock)
    name = params.register_.model_name
    outcome: Outcome | None = None
    with tracking.connected(params.register_.tracking_uri) as client, alone("register"):
        for tries_left in reversed(range(TRIES)):
            try:
                version, made = find_or_create(client, params, tags, lock)
                outcome = outcome or made  # of the first try that came so far
                put_alias(client, name, CHALLENGER, int(version.version))
                break
            except MlflowException:
                if not tries_left:
                    raise
                tracking.check_alive(mlflow.get_tracking_uri())
    return Registration(outcome=outcome or made, model=name, version=int(version.version), run_id=run_of(version))


def find_or_create(
    client: MlflowClient, params: Params, tags: dict[str, str], lock: Lock
) -> tuple[ModelVersion, Outcome]:
    """The version of this checkpoint, with the results that are here. What a call before it began is ended."""
    cfg = params.register_
    experiment = tracking.experiment_id(client, cfg.experiment)
    remove_leftovers(client, experiment, cfg.model_name)
    version = find_version(client, cfg.model_name, tags)
    if version is None:
        return create_version(client, params, tags, lock), "registered"
    remove_other_runs(client, experiment, tags, version)
    results = {tag for tag in tags if tag in lineage.RESULTS or tag.startswith(lineage.RAW)}
    if all(version.tags.get(tag) == tags[tag] for tag in results) and has_artifact(client, run_of(version), SCORES):
        return version, "unchanged"
    update_results(client, params.paths, version, tags)
    return version, "updated"


def find_version(client: MlflowClient, name: str, tags: Mapping[str, str]) -> ModelVersion | None:
    """The version that holds this checkpoint and the code that runs it; the first where there are several. One whose
    run MLflow has lost does not count: nothing can be logged to it."""
    found = versions.versions_of(client, name, f" and {same_as(tags)}")
    return next((version for version in found[::-1] if tracking.find_run(client, version.run_id)), None)


def same_as(tags: Mapping[str, str]) -> str:
    """MLflow's filter for what was made of the same checkpoint with the same code."""
    return " and ".join(f"tags.`{tag}` = '{tags[tag]}'" for tag in lineage.IDENTITY)


def create_version(client: MlflowClient, params: Params, tags: dict[str, str], lock: Lock) -> ModelVersion:
    """Run, results and model; then the version, with its tags in the same request. Of several machines each looks again
    after it made a version: the first one stays, and who made a later one takes it back."""
    cfg, paths = params.register_, params.paths
    run_id = open_run(client, tracking.experiment_id(client, cfg.experiment), tags)
    tracking.log_params(client, run_id, lock.params(params.ingest.datasets))
    tracking.log_curves(client, run_id, paths.model / "curves.csv")
    data = {"path": str(paths.mixture / "train"), "md5": tags["dvc.data"]}
    dataset = Dataset(paths.mixture.name, data["md5"], source_type="dvc", source=json.dumps(data))
    client.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])
    log_results(client, run_id, paths)
    model_uri = log_model(client, run_id, cfg, paths, int(tags[tracking.TOKENS]), params.train.base)
    client.set_terminated(run_id)
    made = mlflow.register_model(model_uri, cfg.model_name, tags=tags)
    first = find_version(client, cfg.model_name, tags) or made
    if first.version != made.version:
        client.delete_model_version(made.name, made.version)
        if made.source != first.source:
            delete_model(client, versions.model_of(client, made))
        if made.run_id is not None and made.run_id != first.run_id:
            client.delete_run(made.run_id)
    return first


def open_run(client: MlflowClient, experiment: str, tags: dict[str, str]) -> str:
    """Id of this training's run: the one that an interrupted registration left, the one that the training opened, or a
    new one."""
    written = tags | tracking.this_process()
    for run in client.search_runs([experiment], same_as(tags), order_by=["attributes.start_time ASC"]):
        if run.info.status != "RUNNING" or tracking.is_over(run.data.tags, run.info.start_time):
            return tracking.taken_up(client, run.info.run_id, written)  # another machine writes to the others
    trained = tracking.of_weights(client, experiment, tags.get(tracking.WEIGHTS), tags[tracking.TOKENS])
    if trained and tracking.VERSION not in client.get_run(trained).data.tags:
        return tracking.taken_up(client, trained, written)
    return client.create_run(experiment, run_name=f"train {tags[tracking.VERSION][:8]}", tags=written).info.run_id


# Other registrations, killed half-way or at work on another machine


def remove_leftovers(client: MlflowClient, experiment: str, name: str) -> None:
    """End what killed registrations of any training left open: remove stored models that are not whole, end runs."""
    for model in every_page(client.search_logged_models, [experiment], f"name = '{name}'"):
        if model.status != LoggedModelStatus.READY and tracking.is_over(model.tags, model.creation_timestamp):
            delete_model(client, model)
    for run in client.search_runs([experiment], "attributes.status = 'RUNNING'", ViewType.ACTIVE_ONLY):
        if tracking.PROCESS in run.data.tags and tracking.is_over(run.data.tags, run.info.start_time):
            client.set_terminated(run.info.run_id, "KILLED")


def remove_other_runs(client: MlflowClient, experiment: str, tags: dict[str, str], version: ModelVersion) -> None:
    """Remove the runs of the same training that its version does not use: the end of another registration was cut off,
    or the store refused it in the middle. Skip runs that another process is still writing."""
    for run in client.search_runs([experiment], same_as(tags), ViewType.ACTIVE_ONLY):
        written_to = run.info.status == "RUNNING" and not tracking.is_over(run.data.tags, run.info.start_time)
        if run.info.run_id == version.run_id or written_to:
            continue
        for model in every_page(client.search_logged_models, [experiment], f"source_run_id = '{run.info.run_id}'"):
            delete_model(client, model)
        client.delete_run(run.info.run_id)


# What a version holds


def log_results(client: MlflowClient, run_id: str, paths: Paths) -> None:
    """Scores and report, which a new evaluation of the same checkpoint replaces; the gate compares pair by pair."""
    tracking.log_scores(client, run_id, paths.report / "metrics.json", int(time.time() * 1000))
    for name in ("report.html", SCORES):
        client.log_artifact(run_id, str(paths.report / name))
    if any((paths.report / "images").iterdir()):  # empty where the page holds its images itself
        client.log_artifacts(run_id, str(paths.report / "images"), "images")


def update_results(client: MlflowClient, paths: Paths, version: ModelVersion, tags: dict[str, str]) -> None:
    """The same checkpoint was evaluated anew: its run gets the new results, run and version the new tags.

    Raises:
        DataError: somebody deleted the run.
    """
    run = run_of(version)
    if client.get_run(run).info.lifecycle_stage == tracking.DELETED:
        raise tracking.deleted(f"{version.name} version {version.version}: its run", "runs", run)
    log_results(client, run, paths)
    for tag in version.tags.keys() - tags:
        if tag.startswith(lineage.RAW) or tag == tracking.FLOW_RUN:  # which an earlier evaluation left
            client.delete_tag(run, tag)
            client.delete_model_version_tag(version.name, version.version, tag)
    for tag, value in tags.items():
        client.set_tag(run, tag, value)
        client.set_model_version_tag(version.name, version.version, tag, value)


def log_model(client: MlflowClient, run_id: str, cfg: Register, paths: Paths, max_new_tokens: int, base: Path) -> str:
    """Store checkpoint and code as the run's model and return its URI; a model that is there in full is kept."""
    for model in every_page(
        client.search_logged_models, [client.get_run(run_id).info.experiment_id], f"source_run_id = '{run_id}'"
    ):
        if model.status == LoggedModelStatus.READY:
            return model.model_uri
    checkpoint, where = paths.model / "checkpoint", {}
    with tempfile.TemporaryDirectory() as scratch, mlflow.start_run(run_id=run_id):
        if adapters := lineage.kept_alone(cfg, checkpoint):
            where = {"base": str(base.resolve())}
            checkpoint = copy_folder(adapters, Path(scratch) / "checkpoint")
        return mlflow.pyfunc.log_model(
            name=cfg.model_name,
            python_model=str(Path(__file__).with_name("pyfunc.py")),
            artifacts={"checkpoint": str(checkpoint)},
            model_config={"max_new_tokens": max_new_tokens} | where,
            code_paths=[str(copy_code(Path(scratch)))],
            signature=SIGNATURE,
            input_example=example(paths),
            tags=tracking.this_process(),
            pip_requirements=[f"{package}=={installed(package).split('+')[0]}" for package in REQUIREMENTS],
        ).model_uri


def copy_code(scratch: Path) -> Path:
    """The part of `m3diff` that the model needs where there is no checkout."""
    package = scratch / "m3diff"
    copy_folder(lineage.MODEL_CODE, package / lineage.MODEL_CODE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for shared in SHARED_CODE:
        (package / shared).parent.mkdir(exist_ok=True)
        shutil.copyfile(lineage.MODEL_CODE.parent / shared, package / shared)
    return package


def example(paths: Paths) -> pd.DataFrame:
    record = next(lineage.captioned_records(paths))
    images = {side: base64.b64encode(Path(record[side]).read_bytes()).decode() for side in ("before", "after")}
    return pd.DataFrame([images])

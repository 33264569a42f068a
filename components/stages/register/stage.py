"""Register a checkpoint as a version of the registered model in MLflow, and log its training run.

A version is identified by the DVC hash of its checkpoint, its code and its length limit. Registering a checkpoint twice
therefore creates only one version. Because the version is created last, this holds even if two processes register at
the same time or if an attempt is killed. If the same checkpoint is evaluated again, the new results replace the results
of its version.
"""

import base64
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlflow
import pandas as pd
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelStatus, ViewType
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.tracking import MlflowClient
from mlflow.types.schema import Array, ColSpec, DataType, Object, Property, Schema

from m3diff.datasets.tables import SIDES
from m3diff.provenance.dvc import Lock
from m3diff.provenance.git import process_lock
from m3diff.records.copies import copy_folder
from m3diff.records.errors import DataError
from m3diff.registry import lineage, tracking, versions
from m3diff.registry.versions import (
    CHALLENGER,
    SCORES,
    delete_model,
    has_artifact,
    iterate_pages,
    put_alias,
    read_run_id,
)
from m3diff.settings.tree import Params, Paths
from m3diff.stages.register.description import write_description
from m3diff.stages.register.params import Register

# Files outside `components/models` that its code imports. They are stored with each model
SHARED_CODE = (
    "__init__.py",
    "runtime.py",
    "images/__init__.py",
    "images/colour.py",
    "images/jpeg.py",
    "images/open.py",
    "records/__init__.py",
    "records/contents.py",
    "records/copies.py",
    "records/errors.py",
    "records/messages.toml",
    "records/sample.py",
)

MAX_TRIES = 3  # MLflow may fail if two machines create the same entry, such as an experiment or alias, at the same time
Outcome = Literal["registered", "updated", "unchanged"]
REQUIREMENTS = ("mlflow", "torch", "transformers", "peft", "tokenizers", "safetensors", "pillow", "pandas")
TURN = Object([Property("question", DataType.string), Property("answer", DataType.string)])
MODEL_SIGNATURE = ModelSignature(
    inputs=Schema(
        [
            ColSpec(DataType.string, "before", required=False),
            ColSpec(DataType.string, "after", required=False),
            ColSpec(Array(DataType.string), "images", required=False),
            ColSpec(DataType.string, "question", required=False),
            ColSpec(Array(TURN), "history", required=False),
        ]
    ),
    outputs=Schema([ColSpec("string")]),
)


class Registration(NamedTuple):
    """The result of `register`. The outcome is `unchanged` if MLflow already had this checkpoint with these scores."""

    outcome: Outcome
    model: str
    version: int
    run_id: str

    def __str__(self) -> str:
        return f"models:/{self.model}/{self.version} {self.outcome} (MLflow run {self.run_id})"


def register(params: Params) -> Registration:
    """Log the working tree's training run to MLflow and register its checkpoint as the challenger.

    Raises:
        DataError: the working tree differs from `dvc.lock`.
        TrackingUnavailableError: MLflow does not respond. No data are lost, so the call can be repeated.
    """
    lock = Lock()
    tags = lineage.read_lineage(params, lock)
    name = params.register_.model_name
    first_outcome: Outcome | None = None
    with tracking.connect(params.register_.tracking_uri) as client, process_lock("register"):
        for tries_left in reversed(range(MAX_TRIES)):
            try:
                version, outcome = find_or_create(client, params, tags, lock)
                write_description(client, version, params.paths.report, params.paths.model)
                if first_outcome is None:  # a later try finds the version of this one and calls it unchanged
                    first_outcome = outcome
                put_alias(client, name, CHALLENGER, int(version.version))
                break
            except MlflowException:
                if not tries_left:
                    raise
                tracking.check_alive(mlflow.get_tracking_uri())
    assert first_outcome is not None
    return Registration(outcome=first_outcome, model=name, version=int(version.version), run_id=read_run_id(version))


def find_or_create(
    client: MlflowClient, params: Params, tags: dict[str, str], lock: Lock
) -> tuple[ModelVersion, Outcome]:
    """Return the version of this checkpoint, and whether it was registered, updated or unchanged.

    The version is created if it does not exist, and its results are updated if they are out of date. Work that an
    earlier call left unfinished is finished or removed.
    """
    cfg = params.register_
    experiment = tracking.experiment_id(client, cfg.experiment)
    remove_leftovers(client, experiment, cfg.model_name)
    version = find_registered_version(client, cfg.model_name, tags)
    if version is None:
        return create_version(client, params, tags, lock), "registered"
    remove_other_runs(client, experiment, tags, version)
    result_tags = {tag for tag in tags if tag in lineage.RESULT_TAGS or tag.startswith(lineage.RAW_DATA_PREFIX)}
    has_same_results = all(version.tags.get(tag) == tags[tag] for tag in result_tags)
    if has_same_results and has_artifact(client, read_run_id(version), SCORES):
        return version, "unchanged"
    update_results(client, params.paths, version, tags)
    return version, "updated"


def find_registered_version(client: MlflowClient, name: str, tags: Mapping[str, str]) -> ModelVersion | None:
    """Return the oldest version with the same checkpoint, code and length limit, or None if there is no such version.

    Versions whose run is missing from MLflow are skipped, because nothing can be logged to them.

    Args:
        tags: the lineage of the checkpoint.
    """
    candidates = versions.list_versions(client, name, f" and {build_identity_filter(tags)}")
    for version in reversed(candidates):
        if tracking.find_run(client, version.run_id):
            return version
    return None


def build_identity_filter(tags: Mapping[str, str]) -> str:
    """Return a search filter for MLflow that matches runs and versions with this checkpoint, code and length limit."""
    return " and ".join(f"tags.`{tag}` = '{tags[tag]}'" for tag in lineage.IDENTITY_TAGS)


def create_version(client: MlflowClient, params: Params, tags: dict[str, str], lock: Lock) -> ModelVersion:
    """Log the run, results and model, then create the version and its tags in one request. Return the version.

    If several machines do this at the same time, only the oldest version is kept, and every machine returns it. A
    machine that created a newer version deletes it.
    """
    cfg = params.register_
    paths = params.paths
    run_id = open_run(client, tracking.experiment_id(client, cfg.experiment), tags)
    tracking.log_params(client, run_id, lock.params(params.ingest.datasets))
    tracking.log_curves(client, run_id, paths.model / "curves.csv")
    source = {"path": str(paths.mixture / "train"), "md5": tags["dvc.data"]}
    dataset = Dataset(paths.mixture.name, source["md5"], source_type="dvc", source=json.dumps(source))
    client.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])
    log_results(client, run_id, paths)
    model_uri = log_model(client, run_id, cfg, paths, int(tags[tracking.TOKEN_LIMIT_TAG]), params.train.base)
    client.set_terminated(run_id)
    new_version = mlflow.register_model(model_uri, cfg.model_name, tags=tags)
    oldest_version = find_registered_version(client, cfg.model_name, tags) or new_version
    if oldest_version.version != new_version.version:
        client.delete_model_version(new_version.name, new_version.version)
        if new_version.source != oldest_version.source:
            delete_model(client, versions.find_stored_model(client, new_version))
        if new_version.run_id is not None and new_version.run_id != oldest_version.run_id:
            client.delete_run(new_version.run_id)
    return oldest_version


def open_run(client: MlflowClient, experiment: str, tags: dict[str, str]) -> str:
    """Return the id of the MLflow run to register, with the tags set.

    Use the run that an interrupted registration left behind. If there is none, use the run that training created, or
    create a new run.
    """
    run_tags = tags | tracking.process_tag()
    for run in client.search_runs([experiment], build_identity_filter(tags), order_by=["attributes.start_time ASC"]):
        # Skip a run that another machine is still writing to
        if run.info.status != "RUNNING" or tracking.is_abandoned(run.data.tags, run.info.start_time):
            return tracking.resume_run(client, run.info.run_id, run_tags)
    training_run_id = tracking.find_run_of_weights(
        client, experiment, tags.get(tracking.WEIGHTS_TAG), tags[tracking.TOKEN_LIMIT_TAG]
    )
    if training_run_id and tracking.CHECKPOINT_TAG not in client.get_run(training_run_id).data.tags:
        return tracking.resume_run(client, training_run_id, run_tags)
    return client.create_run(
        experiment, run_name=f"train {tags[tracking.CHECKPOINT_TAG][:8]}", tags=run_tags
    ).info.run_id


# Clean up after registrations that were killed, but not after those that are still running on another machine


def remove_leftovers(client: MlflowClient, experiment: str, name: str) -> None:
    """Clean up after registrations that were killed: remove their incomplete models and end their runs."""
    for model in iterate_pages(client.search_logged_models, [experiment], f"name = '{name}'"):
        if model.status != LoggedModelStatus.READY and tracking.is_abandoned(model.tags, model.creation_timestamp):
            delete_model(client, model)
    for run in client.search_runs([experiment], "attributes.status = 'RUNNING'", ViewType.ACTIVE_ONLY):
        if tracking.PROCESS_TAG in run.data.tags and tracking.is_abandoned(run.data.tags, run.info.start_time):
            client.set_terminated(run.info.run_id, "KILLED")


def remove_other_runs(client: MlflowClient, experiment: str, tags: dict[str, str], version: ModelVersion) -> None:
    """Remove runs of the same checkpoint that the version does not use, together with their models.

    A registration leaves such a run behind if it is killed or if the store rejects a request. Runs that another process
    is still writing to are kept.
    """
    for run in client.search_runs([experiment], build_identity_filter(tags), ViewType.ACTIVE_ONLY):
        is_in_use = run.info.status == "RUNNING" and not tracking.is_abandoned(run.data.tags, run.info.start_time)
        if run.info.run_id == version.run_id or is_in_use:
            continue
        for model in iterate_pages(client.search_logged_models, [experiment], f"source_run_id = '{run.info.run_id}'"):
            delete_model(client, model)
        client.delete_run(run.info.run_id)


# The contents of a version


def log_results(client: MlflowClient, run_id: str, paths: Paths) -> None:
    """Log the scores and the report, replacing earlier ones. The gate later reads the per-pair scores from MLflow."""
    tracking.log_scores(client, run_id, paths.report / "metrics.json", int(time.time() * 1000))
    for name in ("report.html", SCORES):
        client.log_artifact(run_id, str(paths.report / name))
    if any((paths.report / "images").iterdir()):  # empty if the page embeds its images
        client.log_artifacts(run_id, str(paths.report / "images"), "images")


def update_results(client: MlflowClient, paths: Paths, version: ModelVersion, tags: dict[str, str]) -> None:
    """Log a new evaluation of the same checkpoint to the version's run, and update the tags of the run and version.

    Raises:
        DataError: somebody deleted the run.
    """
    run_id = read_run_id(version)
    if client.get_run(run_id).info.lifecycle_stage == tracking.DELETED_STAGE:
        command = tracking.command_to_restore("runs", run_id)
        raise DataError("registry.deleted_run", model=version.name, version=int(version.version), command=command)
    log_results(client, run_id, paths)
    for tag in version.tags.keys() - tags:
        if tag.startswith(lineage.RAW_DATA_PREFIX) or tag == tracking.FLOW_RUN_TAG:  # left by an earlier evaluation
            client.delete_tag(run_id, tag)
            client.delete_model_version_tag(version.name, version.version, tag)
    for tag, value in tags.items():
        client.set_tag(run_id, tag, value)
        client.set_model_version_tag(version.name, version.version, tag, value)


def log_model(client: MlflowClient, run_id: str, cfg: Register, paths: Paths, max_new_tokens: int, base: Path) -> str:
    """Store the checkpoint and code as the run's model and return the model's URI.

    If an earlier call stored a complete model for this run, return that model's URI.
    """
    experiment = client.get_run(run_id).info.experiment_id
    for model in iterate_pages(client.search_logged_models, [experiment], f"source_run_id = '{run_id}'"):
        if model.status == LoggedModelStatus.READY:
            return model.model_uri
    checkpoint = paths.model / "checkpoint"
    model_config: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    adapters = lineage.find_adapters(cfg, checkpoint)
    with tempfile.TemporaryDirectory() as scratch, mlflow.start_run(run_id=run_id):
        if adapters is not None:
            model_config["base"] = str(base.resolve())
            checkpoint = copy_folder(adapters, Path(scratch) / "checkpoint")
        return mlflow.pyfunc.log_model(
            name=cfg.model_name,
            python_model=str(Path(__file__).with_name("pyfunc.py")),
            artifacts={"checkpoint": str(checkpoint)},
            model_config=model_config,
            code_paths=[str(copy_code(Path(scratch)))],
            signature=MODEL_SIGNATURE,
            input_example=build_example(paths),
            tags=tracking.process_tag(),
            pip_requirements=pin_requirements(),
        ).model_uri


def pin_requirements() -> list[str]:
    """Return the packages that a model needs, each with its installed version, such as `torch==2.9.1`."""
    requirements: list[str] = []
    for package in REQUIREMENTS:
        version, _, _ = installed_version(package).partition("+")  # leave out a local label such as `+cpu`
        requirements.append(f"{package}=={version}")
    return requirements


def copy_code(scratch: Path) -> Path:
    """Copy the part of `m3diff` that a model needs to run without a checkout, and return the folder of the copy."""
    package = scratch / "m3diff"
    copy_folder(
        lineage.MODEL_CODE_FOLDER,
        package / lineage.MODEL_CODE_FOLDER.name,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for shared in SHARED_CODE:
        (package / shared).parent.mkdir(exist_ok=True)
        shutil.copyfile(lineage.MODEL_CODE_FOLDER.parent / shared, package / shared)
    return package


def build_example(paths: Paths) -> pd.DataFrame:
    """Return an example input of the model: a record of the test split with its images in base64."""
    record = next(lineage.captioned_records(paths))
    images = [base64.b64encode(Path(image["uri"]).read_bytes()).decode() for image in record["images"]]
    example: dict[str, Any] = {"images": images}
    if len(images) == len(SIDES):
        example = dict(zip(SIDES, images, strict=True))
    if record["question"] is not None:
        example["question"] = record["question"]
    if record["history"]:
        example["history"] = record["history"]
    return pd.DataFrame([example])

"""Score a registered model or a model folder on the test set of this checkout.

The checkpoint is downloaded, the test set is captioned and the captions are scored. The test set is the test split of
the mixture, which convert wrote. The gate compares a new model with the champion, the version in use. If the champion
was tested on a different test set, the gate scores it again (`rescore`). Users can score any model (`m3diff evaluate
--model VERSION`). The files of the last run are not changed. The scores of a version are logged to its MLflow run,
where the gate looks for them.
"""

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from m3diff.records.copies import copy_folder
from m3diff.records.errors import CodedError, DataError, Fault
from m3diff.records.files import new_folder
from m3diff.registry import tracking
from m3diff.registry.lineage import hash_test_set
from m3diff.registry.model_source import Source, find
from m3diff.registry.promote import CannotScoreAgain
from m3diff.registry.versions import (
    SCORES,
    download_checkpoint,
    find_version,
    read_run_id,
    read_test_set,
    rescored_folder,
)
from m3diff.scoring.metrics.java import ScorerFailed
from m3diff.scoring.results import EvaluateReport, headline_scores
from m3diff.settings.tree import Params

Headline = dict[str, dict[str, float]]


def rescore(client: MlflowClient, params: Params, version: ModelVersion, test_set: str) -> pa.Table:
    """Caption this checkout's test set with a version's checkpoint, score the captions and log the scores to its run.

    Args:
        test_set: digest of the test set that must be scored.

    Returns:
        The version's scores, as in scores.parquet.

    Raises:
        CannotScoreAgain: the checkout has a different test set, or the checkpoint or the data cannot be used.
        ConnectionError: a worker or MLflow failed. Try again.
    """
    from m3diff.models.checkpoint import has_only_adapters  # imports torch, which takes seconds

    paths = params.paths
    try:
        present_test_set = hash_test_set(paths)
        if present_test_set != test_set:
            raise CannotScoreAgain(
                "rescore.other_test_set",
                value=present_test_set,
                expected=test_set,
                clean=paths.clean,
                predictions=paths.predictions,
            )
        reason = f"champion {version.version} has no scores on this test set ({test_set:.12})"
        print(f"promote: {reason}; the test set is captioned and scored with the current code", flush=True)
        scratch = params.compute.scratch / "promote"
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            checkpoint = download_checkpoint(version, Path(folder))
            max_new_tokens = int(version.tags.get(tracking.TOKEN_LIMIT_TAG, params.predict.max_new_tokens))
            base = params.train.base if has_only_adapters(checkpoint) else None
            evaluated = Path(folder) / "made"
            score(params, Source(version.name, checkpoint, max_new_tokens, base), evaluated)
            if tracking.find_run(client, version.run_id) is None:
                reason = f"MLflow has lost the run of version {version.version}"
                print(f"promote: {reason}, so its scores are not stored", flush=True)
            else:
                keep_scores(client, version, test_set, evaluated)
            return pq.read_table(evaluated / "report" / SCORES)
    except (ConnectionError, BlockingIOError):
        raise
    except (OSError, ValueError, MlflowException, ScorerFailed) as error:
        if isinstance(error, CodedError):
            raise CannotScoreAgain(error.fault) from error
        raise CannotScoreAgain("rescore.scoring_failed", cause=str(error)) from error


def score_model(params: Params, model: str, base: Path, out: Path | None = None) -> tuple[Path, Headline]:
    """Caption the mixture's test split with a model, score the captions, and write `predictions/` and `report/`.

    Args:
        model: path of a folder, or the number or alias of a version.
        base: base model of a checkpoint that contains only adapters.
        out: folder to create. None for a folder in the scratch folder, which is overwritten.

    Returns:
        The folder, and the scores that are used to compare runs, times 100.

    Raises:
        DataError: the model or the test set does not exist, or `out` already exists.
        TrackingUnavailableError: MLflow does not respond.
    """
    cfg = params.register_
    if out is not None and out.exists():
        raise DataError("rescore.out_exists", path=out)
    source = find(cfg.tracking_uri, cfg.model_name, model, base, params.predict.max_new_tokens)
    evaluated = out or params.compute.scratch / "evaluated" / source.name.replace("/", "-")
    with new_folder(evaluated) as folder:
        report = score(params, source, folder)
    if not Path(model).is_dir():
        test_set = hash_test_set(params.paths.model_copy(update={"predictions": evaluated / "predictions"}))
        with tracking.connect(cfg.tracking_uri) as client:
            version = find_version(client, cfg.model_name, source.name.rpartition("/")[2])
            if read_test_set(version) != test_set:
                keep_scores(client, version, test_set, evaluated)
    return evaluated, headline_scores(report)


def score(params: Params, source: Source, out: Path) -> EvaluateReport:
    """Caption the mixture's test split with a model and score it. Write `predictions/` and `report/` to `out`.

    Raises:
        CheckpointError: the checkpoint cannot be used.
    """
    from m3diff.models.checkpoint import CheckpointError, place_on_base, verify_files_to_load
    from m3diff.report.origin import Origin
    from m3diff.stages.evaluate.stage import evaluate
    from m3diff.stages.predict.stage import predict

    paths = params.paths
    # predict expects a folder that contains a checkpoint, like the output of train
    model = out.with_name(f"{out.name}.model")
    checkpoint = model / "checkpoint"
    model.mkdir()
    if source.base is None:
        checkpoint.symlink_to(source.folder.resolve())
    else:
        copy_folder(source.folder, checkpoint)
        place_on_base(checkpoint, verify_files_to_load(checkpoint), source.base)
    out.mkdir()
    cfg = params.predict.model_copy(update={"max_new_tokens": source.max_new_tokens})
    predictions = out / "predictions"
    report = out / "report"
    try:
        predict(cfg, params.compute, paths.mixture, model, predictions)
    except CheckpointError as error:
        # name the source's folder in the message, because the link to it is temporary and unknown to the user
        fault = error.fault
        for link in (checkpoint.absolute(), checkpoint):
            fault = with_another_path(fault, link, source.folder)
        raise CheckpointError(fault) from error
    origin = Origin(facts={"Model": source.name})
    return evaluate(params.evaluate, params.compute, paths.records, paths.clean, predictions, report, origin)


def with_another_path(fault: Fault, path: Path, replacement: Path) -> Fault:
    """Replace `path` by `replacement` in all texts and paths of a fault, including those in lists and nested faults."""
    fields = {name: replace_path(value, path, replacement) for name, value in fault.fields.items()}
    return Fault(fault.code, **fields)


def replace_path(value: Any, path: Path, replacement: Path) -> Any:
    """Replace `path` by `replacement` in the value of a fault's field."""
    match value:
        case Fault():
            return with_another_path(value, path, replacement)
        case list() | tuple():
            return [replace_path(item, path, replacement) for item in value]
        case Path():
            return Path(str(value).replace(str(path), str(replacement)))
        case str():
            return value.replace(str(path), str(replacement))
        case _:
            return value


def keep_scores(client: MlflowClient, version: ModelVersion, test_set: str, evaluated: Path) -> None:
    """Log the scores on a test set to the version's MLflow run.

    Args:
        evaluated: folder that contains `report/`.
    """
    for name in (SCORES, "metrics.json"):
        client.log_artifact(read_run_id(version), str(evaluated / "report" / name), rescored_folder(test_set))

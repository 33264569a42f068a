"""Score the champion on the current test set: fetch its checkpoint, caption the pairs, compute the metrics."""

import tempfile
from pathlib import Path

import mlflow
import pyarrow as pa
import pyarrow.parquet as pq
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from m3diff.provenance.code import edited
from m3diff.registry import tracking
from m3diff.registry.lineage import code_path, dvc_hash, hash_test_set
from m3diff.registry.versions import SCORES, CannotScoreAgain, run_of, scored_again
from m3diff.scoring.metrics.java import ScorerFailed
from m3diff.settings.tree import Params


def score_again(client: MlflowClient, params: Params, version: ModelVersion, on: str) -> pa.Table:
    """Caption the test set that lies here with a version's checkpoint, score it, and keep the scores in its run.

    Raises:
        CannotScoreAgain: another test set lies here than `on`, or checkpoint or data cannot be used.
        ConnectionError: a worker or MLflow died; try again.
    """
    try:
        return caption_and_score(client, params, version, on)
    except (ConnectionError, BlockingIOError):
        raise
    except (OSError, ValueError, MlflowException, ScorerFailed) as error:
        raise CannotScoreAgain(str(error)) from error


def caption_and_score(client: MlflowClient, params: Params, version: ModelVersion, on: str) -> pa.Table:
    from m3diff.models.checkpoint import is_adapters, place_on_base  # torch, which takes seconds to import
    from m3diff.stages.evaluate.stage import evaluate
    from m3diff.stages.predict.stage import predict

    paths = params.paths
    if (here := hash_test_set(paths)) != on:
        raise CannotScoreAgain(
            f"the challenger's test set is {on:.12}, but {paths.clean} and {paths.predictions} hold "
            f"{here:.12}; restore it with `git checkout` and `dvc checkout`"
        )
    said = f"promote: champion {version.version} has no scores on this test set ({on:.12}); it is captioned and scored"
    print(f"{said}{other_code(version)}", flush=True)
    scratch = params.compute.scratch / "promote"
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        model, predictions, report = (Path(folder) / name for name in ("model", "predictions", "report"))
        download_checkpoint(version, model)
        if is_adapters(model / "checkpoint"):
            place_on_base(model / "checkpoint", params.train.base)
        cfg = params.predict.model_copy(update=length_limit(version))
        predict(cfg, params.compute, paths.mixture, model, predictions)
        evaluate(params.evaluate, params.compute, paths.records, paths.clean, predictions, model, report)
        if tracking.lifecycle(client, version.run_id) is None:
            print(f"promote: MLflow has lost the run of version {version.version}; its scores are not kept", flush=True)
            return pq.read_table(report / SCORES)
        for name in (SCORES, "metrics.json"):
            client.log_artifact(run_of(version), str(report / name), scored_again(on))
        return pq.read_table(report / SCORES)


def download_checkpoint(version: ModelVersion, model: Path) -> None:
    """Write the version's checkpoint to `model/checkpoint`, as train would have."""
    model.mkdir()
    place = f"models:/{version.name}/{version.version}/artifacts/checkpoint"
    found = Path(mlflow.artifacts.download_artifacts(artifact_uri=place, dst_path=str(model)))
    if found != model / "checkpoint":
        found.rename(model / "checkpoint")


def length_limit(version: ModelVersion) -> dict[str, int]:
    """The version's own limit, which is part of what it answers."""
    limit = version.tags.get("predict.max_new_tokens")
    return {} if limit is None else {"max_new_tokens": int(limit)}


def other_code(version: ModelVersion) -> str:
    path = code_path(version.tags)
    same = path.exists() and version.tags.get("dvc.code") == dvc_hash(path) and not edited("predict")
    return "" if same else f"; {path} has changed since it was registered: its captions are those of today's code"

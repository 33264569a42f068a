"""Score a registered model, or a folder, on the test set that is here: fetch its checkpoint, caption, score.

The gate scores a champion of another test set so (`rescore`), a person any model (`m3diff evaluate --model VERSION`).
The run's own files stay as they are. Scores of a version are kept in its run, where the gate finds them.
"""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from m3diff.records.copies import copy_folder
from m3diff.records.errors import DataError
from m3diff.records.files import new_folder
from m3diff.registry import tracking
from m3diff.registry.lineage import hash_test_set
from m3diff.registry.model_source import Source, find
from m3diff.registry.promote import CannotScoreAgain
from m3diff.registry.versions import SCORES, download_checkpoint, find_version, run_of, scored_again, tested_on
from m3diff.scoring.metrics.java import ScorerFailed
from m3diff.scoring.run import EvaluateReport, headline
from m3diff.settings.tree import Params

Headline = dict[str, dict[str, float]]


def rescore(client: MlflowClient, params: Params, version: ModelVersion, on: str) -> pa.Table:
    """Caption the test set that is here with a version's checkpoint, score it, and keep the scores in its run.

    Raises:
        CannotScoreAgain: another test set is here than `on`, or checkpoint or data cannot be used.
        ConnectionError: a worker or MLflow died; try again.
    """
    from m3diff.models.checkpoint import is_adapters  # torch, which takes seconds to import

    paths = params.paths
    try:
        if (here := hash_test_set(paths)) != on:
            raise CannotScoreAgain(
                f"the challenger's test set is {on:.12}, but {paths.clean} and {paths.predictions} hold "
                f"{here:.12}; restore it with `git checkout` and `dvc checkout`"
            )
        said = f"champion {version.version} has no scores on this test set ({on:.12})"
        print(f"promote: {said}; it is captioned and scored by the code of today", flush=True)
        scratch = params.compute.scratch / "promote"
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            folder, made = download_checkpoint(version, Path(place)), Path(place) / "made"
            limit = int(version.tags.get(tracking.TOKENS, params.predict.max_new_tokens))
            score(params, Source(version.name, folder, limit, params.train.base if is_adapters(folder) else None), made)
            if tracking.find_run(client, version.run_id) is None:
                lost = f"MLflow has lost the run of version {version.version}"
                print(f"promote: {lost}; its scores are not kept", flush=True)
            else:
                keep(client, version, on, made)
            return pq.read_table(made / "report" / SCORES)
    except (ConnectionError, BlockingIOError):
        raise
    except (OSError, ValueError, MlflowException, ScorerFailed) as error:
        raise CannotScoreAgain(str(error)) from error


def score_model(params: Params, model: str, base: Path, out: Path | None = None) -> tuple[Path, Headline]:
    """Caption the mixture's test split, score it, and write `predictions/` and `report/`.

    Args:
        model: a folder, else a version's number or alias.
        base: where the base is, should the checkpoint be adapters alone.
        out: a folder that does not exist; None: one in the scratch folder, made anew.
    Returns: the folder, and the scores that runs are compared by, times 100.

    Raises:
        DataError: there is no such model, no test set, or `out` exists.
        TrackingUnavailableError: MLflow does not answer.
    """
    cfg = params.register_
    if out is not None and out.exists():
        raise DataError(f"{out}: exists; name a folder that does not")
    source = find(cfg.tracking_uri, cfg.model_name, model, base, params.predict.max_new_tokens)
    place = out or params.compute.scratch / "evaluated" / source.name.replace("/", "-")
    with new_folder(place) as made:
        report = score(params, source, made)
    if not Path(model).is_dir():
        on = hash_test_set(params.paths.model_copy(update={"predictions": place / "predictions"}))
        with tracking.connected(cfg.tracking_uri) as client:
            version = find_version(client, cfg.model_name, source.name.rpartition("/")[2])
            if tested_on(version) != on:
                keep(client, version, on, place)
    return place, headline(report)


def score(params: Params, source: Source, made: Path) -> EvaluateReport:
    """Write `predictions/` and `report/` of a model into a new folder."""
    from m3diff.models.checkpoint import place_on_base, verify_loaded
    from m3diff.stages.evaluate.stage import evaluate
    from m3diff.stages.predict.stage import predict

    held, paths = made.with_name(f"{made.name}.model"), params.paths
    held.mkdir()
    if source.base is None:
        (held / "checkpoint").symlink_to(source.folder.resolve())
    else:
        copy_folder(source.folder, held / "checkpoint")
        place_on_base(held / "checkpoint", verify_loaded(held / "checkpoint"), source.base)
    made.mkdir()
    cfg = params.predict.model_copy(update={"max_new_tokens": source.max_new_tokens})
    predictions, report = made / "predictions", made / "report"
    predict(cfg, params.compute, paths.mixture, held, predictions)
    return evaluate(params.evaluate, params.compute, paths.records, paths.clean, predictions, report)


def keep(client: MlflowClient, version: ModelVersion, on: str, place: Path) -> None:
    """Keep the scores on a test set in the version's run."""
    for name in (SCORES, "metrics.json"):
        client.log_artifact(run_of(version), str(place / "report" / name), scored_again(on))

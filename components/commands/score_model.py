"""Any model on the test set that lies here: `m3diff evaluate --model VERSION`, without a change of the run's own files.

A champion is scored so on a grown test set: its scores are kept in its run, and the gate finds them there.
"""

import shutil
import tempfile
from pathlib import Path

from m3diff.models.checkpoint import place_on_base
from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.lineage import hash_test_set
from m3diff.registry.model_source import Source, find
from m3diff.registry.versions import SCORES, run_of, scored_again
from m3diff.scoring.run import headline
from m3diff.settings.tree import Params
from m3diff.stages.evaluate.stage import evaluate
from m3diff.stages.predict.stage import predict

Headline = dict[str, dict[str, float]]


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
    cfg, paths = params.register_, params.paths
    if out is not None and out.exists():
        raise DataError(f"{out}: exists; name a folder that does not")
    source = find(cfg.tracking_uri, cfg.model_name, model, base, params.predict.max_new_tokens)
    place = out or params.compute.scratch / "evaluated" / source.name.replace("/", "-")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as scratch:
        held, made = Path(scratch) / "model", Path(scratch) / place.name
        lay(source, held)
        limit = params.predict.model_copy(update={"max_new_tokens": source.max_new_tokens})
        predict(limit, params.compute, paths.mixture, held, made / "predictions")
        report = evaluate(
            params.evaluate, params.compute, paths.records, paths.clean, made / "predictions", held, made / "report"
        )
        shutil.rmtree(place, ignore_errors=True)
        made.rename(place)
    if not Path(model).is_dir():
        keep(params, source, place)
    return place, headline(report)


def lay(source: Source, held: Path) -> None:
    """The checkpoint as `held/checkpoint`, where predict looks for it."""
    held.mkdir()
    if source.base is None:
        (held / "checkpoint").symlink_to(source.folder.resolve())
    else:
        shutil.copytree(source.folder, held / "checkpoint")
        place_on_base(held / "checkpoint", source.base)


def keep(params: Params, source: Source, place: Path) -> None:
    """Keep the scores in the version's run, where it was registered with another test set."""
    cfg = params.register_
    on = hash_test_set(params.paths.model_copy(update={"predictions": place / "predictions"}))
    with tracking.connected(cfg.tracking_uri) as client:
        version = tracking.find_version(client, cfg.model_name, source.name.rpartition("/")[2])
        if version.tags.get("test_set.sha256") == on:
            return
        for name in (SCORES, "metrics.json"):
            client.log_artifact(run_of(version), str(place / "report" / name), scored_again(on))

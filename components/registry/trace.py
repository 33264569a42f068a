"""The chain behind a version, each hash beside the one that it must equal: raw data, records, mixture, base,
checkpoint, predictions, scores, version.

Content in DVC's cache is hashed again, but for raw data, of which there may be hundreds of gigabytes; `m3diff restore`
hashes all.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion

from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.check import Check, compared
from m3diff.registry.commit import find_commit, read, read_lock
from m3diff.registry.lineage import ADAPTERS, LOCK, RAW, Lock, code_path, dvc_hash, hash_of_list
from m3diff.registry.objects import Objects, listing, object_file
from m3diff.registry.runs import weights_sha256
from m3diff.registry.versions import commit_of
from m3diff.stages.register.params import Register

NAMED = (
    ("mixture", "convert", "train", "dvc.data"),
    ("mixture", "convert", "val", "dvc.val_data"),
    ("checkpoint", "train", "checkpoint", "dvc.checkpoint"),
    ("metrics", "evaluate", "metrics.json", "dvc.metrics"),
)
"""What of the chain a version's tags name: its word, the stage and the last name of its output, the tag."""


def lineage(cfg: Register, version: str) -> list[Check]:
    """Every link of the version's chain, in order.

    Args:
        version: number or alias.

    Raises:
        DataError: there is no such version.
        TrackingUnavailableError: MLflow does not answer.
    """
    with tracking.connected(cfg.tracking_uri) as client:
        found = tracking.find_version(client, cfg.model_name, version)
        try:
            commit = find_commit(commit_of(found))
            lock = read_lock(commit)
        except DataError as error:
            return [Check(what="commit", where="git", hash=commit_of(found), outcome="missing", note=str(error))]
        return list(chain(found, commit, lock))


def chain(version: ModelVersion, commit: str, lock: Lock) -> Iterator[Check]:
    tags, objects = version.tags, Objects(commit, lock)
    named = [tag.removeprefix(RAW) for tag in tags if tag.startswith(RAW)]
    if not named:
        yield compared("raw data", "of each dataset", None, None)
    for name in sorted(named):
        yield from of_dataset(tags, objects, lock, name)
    yield from held(objects, lock, "records", "validate", "records.parquet")
    for split in ("train", "val", "test"):
        yield from held(objects, lock, "mixture", "convert", split, tags)
    yield from of_training(tags, objects, lock)
    yield from held(objects, lock, "checkpoint", "train", "checkpoint", tags)
    yield from of_stored(version, objects, tags.get("dvc.checkpoint", ""))
    yield from held(objects, lock, "predictions", "predict", "predictions.json")
    yield from held(objects, lock, "metrics", "evaluate", "metrics.json", tags)
    yield from of_commit(tags, commit)


def held(
    objects: Objects, lock: Lock, what: str, stage: str, name: str, tags: Mapping[str, str] | None = None
) -> Iterator[Check]:
    """An output of a stage, by its last name: the version's tag where there is one, dvc.lock, and the content."""
    path = output(lock, stage, name)
    if path is None:
        yield Check(what=what, where=name, hash="", outcome="missing", note=f"{LOCK} has no output {name} of {stage}")
        return
    recorded = lock.hashes(path)[f"{stage} outs"]
    tag = next((tag for _, *where, tag in NAMED if where == [stage, name]), None)
    if tags is not None and tag is not None and tags.get(tag) != recorded:
        yield compared(what, path, tags.get(tag), recorded, LOCK.name)
    else:
        yield objects.check(what, path, recorded)


def output(lock: Lock, stage: str, name: str) -> Path | None:
    """The path of a stage's output, by its last name."""
    outs = (Path(out["path"]) for out in lock.stages.get(stage, {}).get("outs", []))
    return next((path for path in outs if path.name == name), None)


def of_dataset(tags: Mapping[str, str], objects: Objects, lock: Lock, name: str) -> Iterator[Check]:
    """Raw data as ingest read them, and the records that it wrote."""
    entry = lock.stages.get(f"ingest@{name}", {})
    root = entry.get("params", {}).get("params.yaml", {}).get(f"ingest.datasets.{name}", {}).get("root", name)
    recorded = lock.hashes(Path(root)).get(f"ingest@{name} deps")
    if recorded is None or recorded != tags[f"{RAW}{name}"]:
        yield compared("raw data", root, tags[f"{RAW}{name}"], recorded, LOCK.name)
    else:
        yield objects.check("raw data", Path(root), recorded, read=False)
    yield from held(objects, lock, "records", f"ingest@{name}", name)


def of_training(tags: Mapping[str, str], objects: Objects, lock: Lock) -> Iterator[Check]:
    """The base and the code of the model, which training depends on."""
    entry = lock.stages.get("train", {})
    base = entry.get("params", {}).get("params.yaml", {}).get("train", {}).get("base", "")
    for what, path, tag in (("base", Path(base), "dvc.base"), ("model code", code_path(tags), "dvc.code")):
        found = lock.hashes(path)
        recorded = found.get("predict deps", found.get("train deps"))
        if recorded is None or recorded != tags.get(tag):
            yield compared(what, path, tags.get(tag), recorded, LOCK.name)
        else:
            yield objects.check(what, path, recorded)


def of_stored(version: ModelVersion, objects: Objects, checkpoint: str) -> Iterator[Check]:
    """The checkpoint that MLflow keeps, or its adapters alone, against DVC's, and its manifest against the version's
    tags."""
    kept = version.tags.get("dvc.adapters")
    with tempfile.TemporaryDirectory() as scratch:
        stored = tracking.download_checkpoint(version, Path(scratch))
        whole = None if stored is None else dvc_hash(stored)
        note = "MLflow's copy" if kept is None else "MLflow's copy, adapters alone"
        yield compared("stored model", f"models:/{version.name}/{version.version}", kept or checkpoint, whole, note)
    files = listing(objects.cache, checkpoint)
    if kept is not None and files:
        within = f"{ADAPTERS}/"
        inside = {name.removeprefix(within): md5 for name, md5 in files.items() if name.startswith(within)}
        yield compared("adapters", "the checkpoint's folder", kept, hash_of_list(inside))
    manifest = object_file(objects.cache, files.get("manifest.json", "none"))
    if manifest.is_file():
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "manifest.json").write_bytes(manifest.read_bytes())
            weights = weights_sha256(Path(scratch))
        base = json.loads(manifest.read_text()).get("base_sha256")
        yield compared("weights", "the checkpoint's manifest", version.tags.get("weights.sha256"), weights)
        yield compared("base", "the checkpoint's manifest", version.tags.get("base.sha256"), base)


def of_commit(tags: Mapping[str, str], commit: str) -> Iterator[Check]:
    yield compared("dvc.lock", commit[:12], tags.get("dvc.lock.sha256"), sha256_of(commit, LOCK), "the commit's")
    clean = tags.get("git.dirty") == "false"
    note = "" if clean else "parameters, code or a .dvc file were not committed when it was registered"
    yield Check(what="commit", where="git", hash=commit, outcome="ok" if clean else "differs", note=note)


def sha256_of(commit: str, path: Path) -> str | None:
    text = read(commit, path)
    return None if text is None else hashlib.sha256(text).hexdigest()

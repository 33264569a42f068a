"""The lineage of a model version: the hashes in `dvc.lock`, its base, the commit, the test set of its scores."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from m3diff.provenance.code import FOLDER, edited
from m3diff.provenance.dvc import Lock, dvc_hash
from m3diff.provenance.git import git
from m3diff.records.errors import DataError, readable
from m3diff.records.files import sha256_of_folder
from m3diff.settings.tree import Params, Paths
from m3diff.stages.register.params import Register

MODEL_CODE = Path("components/models")
PREDICT_CODE = FOLDER / "predict.json"
WEIGHTS = "weights.sha256"  # tag of a run whose training has ended
VERSION = "dvc.checkpoint"  # tag of a run that a version is made of
TOKENS = "predict.max_new_tokens"  # tag: the length limit that its scores were captioned with
FLOW_RUN = "prefect.flow_run"
RAW = "dvc.raw."
CODE = "dvc.code"
IDENTITY = (VERSION, CODE, TOKENS)
"""Tags that make two registrations the same version."""

RESULTS = ("dvc.data", "dvc.val_data", "dvc.metrics", "dvc.lock.sha256", "test_set.sha256")
"""Tags, with those of raw data, that a new evaluation of the same version changes."""

ADAPTERS = "adapters"
"""The folder in a checkpoint that holds what trained alone."""


def code_path(tags: Mapping[str, str]) -> Path:
    """The path whose hash a version's tag `dvc.code` is: the folder of the models, in versions of before the stage
    `code`."""
    return MODEL_CODE if tags.get(CODE, "").endswith(".dir") else PREDICT_CODE


def read_lineage(params: Params, lock: Lock) -> dict[str, str]:
    """The lineage of the checkpoint in the working tree: the tags of its version. A hash is DVC's (md5, `.dir` for a
    folder) where its tag does not name another.

    Raises:
        DataError: the working tree is not what `dvc.lock` says, or is no git repository.
    """
    if changed := edited("predict"):
        raise DataError(f"{changed[0]}: has changed since `dvc repro` ran; run it again")
    paths, base = params.paths, params.train.base
    checkpoint = paths.model / "checkpoint"
    adapters = kept_alone(params.register_, checkpoint)
    results = (paths.report / "report.html", paths.report / "scores.parquet")
    for seen in (paths.predictions, paths.model / "curves.csv", *results):
        lock.current(seen)
    code = git("status", "--porcelain", "--", ".", ":!dvc.lock", f":!{FOLDER}", ":!data")  # what DVC writes may differ
    data = git("status", "--porcelain", "--untracked-files=all", "--", "*.dvc")
    found = {
        VERSION: lock.current(checkpoint),
        CODE: lock.current(PREDICT_CODE),
        TOKENS: str(lock.params(())["predict"]["max_new_tokens"]),
        "dvc.data": lock.current(paths.mixture / "train"),  # the samples that trained
        "dvc.val_data": lock.current(paths.mixture / "val"),
        "dvc.base": lock.current(base),  # the pre-trained model that the training began with
        "base.sha256": read_base_sha256(checkpoint, base),
        "dvc.metrics": lock.current(paths.report / "metrics.json"),
        "dvc.lock.sha256": lock.sha256,
        "test_set.sha256": hash_test_set(paths),
        "git.commit": git("rev-parse", "HEAD"),
        "git.dirty": str(bool(code or data)).lower(),  # parameters, code or a `.dvc` file differ from the commit
        WEIGHTS: weights_sha256(checkpoint / "manifest.json"),
        "dvc.adapters": dvc_hash(adapters) if adapters else None,
        FLOW_RUN: os.environ.get("M3DIFF_FLOW_RUN"),
    }
    for name, entry in params.ingest.datasets.items():
        found[f"{RAW}{name}"] = lock.recorded(entry.root, f"ingest@{name} deps")  # as ingest read it
    return {tag: value for tag, value in found.items() if value is not None}


def kept_alone(cfg: Register, checkpoint: Path) -> Path | None:
    """The adapters, where a version keeps no more; None where it keeps the whole checkpoint, or there are none."""
    folder = checkpoint / ADAPTERS
    return folder if cfg.keeps == "adapters" and folder.is_dir() else None


def weights_sha256(manifest: Path) -> str | None:
    """sha256 over the names and hashes of a checkpoint's weights, as its manifest lists them; None for none."""
    files = json.loads(manifest.read_text()).get("files", {})
    weights = {name: digest for name, digest in files.items() if name.endswith(".safetensors")}
    return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest() if weights else None


def read_base_sha256(checkpoint: Path, base: Path) -> str:
    """The base's content hash in the checkpoint's manifest, which names the base that the training loaded.

    Raises:
        DataError: the manifest is missing, or the base on disk has other content.
    """
    manifest = checkpoint / "manifest.json"
    if not manifest.is_file():
        raise DataError(f"{manifest}: no such file, so the checkpoint is incomplete; run `dvc repro --force train`")
    with readable(manifest, "run `dvc repro --force train`"):
        trained_from = json.loads(manifest.read_text())["base_sha256"]
    on_disk = sha256_of_folder(base)
    if trained_from != on_disk:
        raise DataError(
            f"{base}: its sha256 is {on_disk:.12}, but {manifest} was trained from {trained_from:.12}; "
            "run `dvc repro --force train`"
        )
    return on_disk


def hash_test_set(paths: Paths) -> str:
    """sha256 over the pairs that were captioned: id, references and both images. Equal: two scores can be compared."""
    total = hashlib.sha256()
    for record in captioned_records(paths):
        images = [record[f"{side}_sha256"].hex() for side in ("before", "after")]
        total.update(json.dumps([record["id"], record["references"], *images]).encode())
    return total.hexdigest()


def captioned_records(paths: Paths) -> Iterator[dict[str, Any]]:
    """The clean records that `predict` captioned, by id."""
    with readable(paths.predictions / "predictions.json"):
        predictions = json.loads((paths.predictions / "predictions.json").read_text())
    columns = ["id", "before", "after", "before_sha256", "after_sha256", "references"]
    with readable(paths.clean / "records.parquet"):
        table = pq.read_table(paths.clean / "records.parquet", columns=columns).sort_by("id")
    captioned = pc.is_in(table["id"], pc.cast([row["image_id"] for row in predictions], "string"))
    yield from table.filter(captioned).to_pylist()

"""Collect the lineage of a model version: the hashes of its commit, data, code and checkpoint, stored as tags."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from m3diff.provenance.code import DIGEST_FOLDER, edited_files
from m3diff.provenance.dvc import Lock, dvc_hash
from m3diff.provenance.git import git
from m3diff.records.errors import DataError, data_error_if_unreadable
from m3diff.records.tables import read_table
from m3diff.registry.tracking import CHECKPOINT_TAG, FLOW_RUN_TAG, TOKEN_LIMIT_TAG, WEIGHTS_TAG, weights_sha256
from m3diff.settings.tree import Params, Paths
from m3diff.stages.register.params import Register

MODEL_CODE_FOLDER = Path("components/models")
PREDICT_CODE_DIGESTS = DIGEST_FOLDER / "predict.json"  # the digests of the code that runs the model
RAW_DATA_PREFIX = "dvc.raw."
CODE_TAG = "dvc.code"
# Two registrations are the same version if these tags are equal. The record of decisions stores a hash of them
IDENTITY_TAGS = (CHECKPOINT_TAG, CODE_TAG, TOKEN_LIMIT_TAG)

# Tags that may change when the same version is evaluated again. The tags of raw data may change too
RESULT_TAGS = ("dvc.data", "dvc.val_data", "dvc.metrics", "dvc.lock.sha256", "test_set.sha256")

ADAPTERS_FOLDER = "adapters"  # folder in a checkpoint that contains only the trained weights


def read_lineage(params: Params, lock: Lock) -> dict[str, str]:
    """Return the lineage of the checkpoint in the working tree, as tags for its version.

    Hashes are DVC's (MD5, with the suffix `.dir` for a folder) unless the name of the tag says otherwise.

    Raises:
        DataError: the working tree differs from `dvc.lock`, or is not in a git repository.
    """
    changed_files = edited_files("predict")
    if changed_files:
        raise DataError("registry.code_changed", path=changed_files[0])
    paths = params.paths
    base = params.train.base
    checkpoint = paths.model / "checkpoint"
    manifest = checkpoint / "manifest.json"
    adapters = find_adapters(params.register_, checkpoint)
    results = (paths.report / "report.html", paths.report / "scores.parquet")
    for logged_path in (paths.predictions, paths.model / "curves.csv", *results):
        lock.verified_hash(logged_path)
    tags = {
        CHECKPOINT_TAG: lock.verified_hash(checkpoint),
        CODE_TAG: lock.verified_hash(PREDICT_CODE_DIGESTS),
        TOKEN_LIMIT_TAG: str(lock.params(())["predict"]["max_new_tokens"]),
        "dvc.data": lock.verified_hash(paths.mixture / "train"),  # training samples
        "dvc.val_data": lock.verified_hash(paths.mixture / "val"),
        "dvc.base": lock.verified_hash(base),  # pre-trained model in the working tree
        "base.sha256": json.loads(manifest.read_text())["base_sha256"],  # pre-trained model that train loaded
        "dvc.metrics": lock.verified_hash(paths.report / "metrics.json"),
        "dvc.lock.sha256": lock.sha256,
        "test_set.sha256": hash_test_set(paths),
        "git.commit": git("rev-parse", "HEAD"),
        "git.dirty": str(has_uncommitted_changes()).lower(),
        WEIGHTS_TAG: weights_sha256(manifest),
        "dvc.adapters": dvc_hash(adapters) if adapters else None,
        FLOW_RUN_TAG: os.environ.get("M3DIFF_FLOW_RUN"),
    }
    for name, entry in params.ingest.datasets.items():
        # Use the hash that ingest recorded, because the raw data may have changed since
        tags[f"{RAW_DATA_PREFIX}{name}"] = lock.recorded_hash(entry.root, f"ingest@{name} deps")
    return {tag: value for tag, value in tags.items() if value is not None}


def has_uncommitted_changes() -> bool:
    """Return whether parameters, code or a `.dvc` file have changes that are not committed."""
    # Ignore changes to dvc.lock, the code digests and the data, because DVC writes them
    code_changes = git("status", "--porcelain", "--", ".", ":!dvc.lock", f":!{DIGEST_FOLDER}", ":!data")
    data_changes = git("status", "--porcelain", "--untracked-files=all", "--", "*.dvc")
    return bool(code_changes or data_changes)


def find_adapters(cfg: Register, checkpoint: Path) -> Path | None:
    """Return the folder with the adapters of a checkpoint, or None if a version stores the whole checkpoint."""
    folder = checkpoint / ADAPTERS_FOLDER
    return folder if cfg.keeps == "adapters" and folder.is_dir() else None


def hash_test_set(paths: Paths) -> str:
    """Return a sha256 that identifies the test set: ids, references, images and own questions of the captioned records.

    The scores of two models can be compared if the hashes of their test sets are equal.
    """
    digest = hashlib.sha256()
    for record in captioned_records(paths):
        identity = [record["id"], record["references"]]
        identity += [image["sha256"].hex() for image in record["images"]]
        # Only where present, so that a test set of captions keeps the hash that earlier releases registered
        if record["question"] is not None or record["history"]:
            turns = [[turn["question"], turn["answer"]] for turn in record["history"]]
            identity.append([record["question"], turns])
        digest.update(json.dumps(identity).encode())
    return digest.hexdigest()


def captioned_records(paths: Paths) -> Iterator[dict[str, Any]]:
    """Yield the records of the test pairs that the stage `predict` captioned, sorted by id."""
    predictions_file = paths.predictions / "predictions.json"
    with data_error_if_unreadable(predictions_file):
        predictions = json.loads(predictions_file.read_text())
    columns = ["id", "images", "history", "question", "references"]
    table = read_table(paths.clean / "records", columns).sort_by("id")
    # Cast, because an empty list would have the type null
    captioned_ids = pc.cast([prediction["image_id"] for prediction in predictions], "string")
    yield from table.filter(pc.is_in(table["id"], captioned_ids)).to_pylist()

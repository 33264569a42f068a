"""Verify the lineage of a model version (`m3diff lineage`).

The lineage is a chain from the raw data to the version, through records, mixture, base, checkpoint, predictions and
scores. For each link of the chain, the hash in the version's tags is compared with the hash in `dvc.lock`, and the
content with this hash is looked up in DVC's cache, in git and in the remote. Content in the cache is hashed again.
Raw data are not, because they may be hundreds of gigabytes, but `m3diff restore` hashes them.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from m3diff.provenance import dvc
from m3diff.provenance.dvc import DVC_LOCK, Lock, dvc_hash, read_file_list, tracked_outputs
from m3diff.provenance.git import find_commit, git, read_from_commit
from m3diff.records.errors import DataError, format_count
from m3diff.registry.lineage import CODE_TAG, PREDICT_CODE_DIGESTS, RAW_DATA_PREFIX
from m3diff.registry.tracking import CHECKPOINT_TAG, WEIGHTS_TAG, connect, weights_sha256
from m3diff.registry.versions import download_checkpoint, find_version, read_commit
from m3diff.stages.register.params import Register

Outcome = Literal["ok", "missing", "differs"]


class StageOutput(NamedTuple):
    """An output of a stage that is part of the chain.

    Attributes:
        part: the part of the chain, such as `mixture`.
        stage: the stage that writes the output.
        name: the last component of the output's path.
        tag: the version tag that holds the output's hash, or None if there is no such tag.
        older_names: the name in versions that earlier releases registered.
    """

    part: str
    stage: str
    name: str
    tag: str | None
    older_names: tuple[str, ...] = ()


OUTPUTS = (
    StageOutput(part="records", stage="validate", name="records", tag=None, older_names=("records.parquet",)),
    StageOutput(part="mixture", stage="convert", name="train", tag="dvc.data"),
    StageOutput(part="mixture", stage="convert", name="val", tag="dvc.val_data"),
    StageOutput(part="mixture", stage="convert", name="test", tag=None),
    StageOutput(part="checkpoint", stage="train", name="checkpoint", tag=CHECKPOINT_TAG),
    StageOutput(part="predictions", stage="predict", name="predictions.json", tag=None),
    StageOutput(part="metrics", stage="evaluate", name="metrics.json", tag="dvc.metrics"),
)


@dataclass(frozen=True)
class LineageCheck:
    """The result of checking one link of the chain, which `m3diff lineage` prints as one line.

    Attributes:
        part: the part of the chain, such as `raw data` or `checkpoint`.
        location: the path, commit or URI of the content.
        hash: the hash in the version's tags or in `dvc.lock`.
        note: where the content is stored, or what is wrong and how to fix it.
    """

    part: str
    location: Path | str
    hash: str
    outcome: Outcome
    note: str = ""

    def __str__(self) -> str:
        line = f"{self.outcome:8} {self.part:12} {self.location!s:38} {self.hash:<12.12}  {self.note}"
        return line.rstrip()


def all_ok(checks: Iterable[LineageCheck]) -> bool:
    """Return whether every check passed."""
    return all(check.outcome == "ok" for check in checks)


def compare_hashes(
    part: str, location: Path | str, expected: str | None, actual: str | None, note: str = ""
) -> LineageCheck:
    """Compare the expected hash of some content with its actual hash.

    Args:
        expected: the hash that the version refers to, or None if the version has no hash of this content.
        actual: the hash of the content, or None if the content is missing.
        note: where `actual` was looked up.
    """
    if expected is None:
        return LineageCheck(part, location, actual or "", "missing", "the version has no hash of it")
    if actual is None:
        return LineageCheck(part, location, expected, "missing", note or "does not exist")
    if expected != actual:
        return LineageCheck(part, location, expected, "differs", f"{note or 'its hash'} is {actual:.12}")
    return LineageCheck(part, location, expected, "ok", note)


def verify_lineage(cfg: Register, version: str) -> list[LineageCheck]:
    """Check every link of a version's chain, in order. If its commit cannot be read, report only that.

    Args:
        version: a version number or alias.

    Raises:
        DataError: there is no such version.
        TrackingUnavailableError: MLflow does not respond.
    """
    with connect(cfg.tracking_uri) as client:
        model_version = find_version(client, cfg.model_name, version)
        try:
            commit = find_commit(read_commit(model_version))
            contents = CommitContents(commit, dvc.read_lock(commit))
        except DataError as error:
            return [LineageCheck("commit", "git", read_commit(model_version), "missing", str(error))]
        return list(check_chain(model_version, contents))


def check_chain(version: ModelVersion, contents: "CommitContents") -> Iterator[LineageCheck]:
    """Check each link of the chain, from the raw data to the commit, and yield the results."""
    tags = version.tags
    commit = contents.commit
    for link in chain_links(tags, contents.lock):
        recorded_hash = contents.lock.hashes(link.path).get(link.lock_entry)
        expected_hash = tags.get(link.tag) if link.tag else recorded_hash
        if recorded_hash is None or recorded_hash != expected_hash:
            yield compare_hashes(link.part, link.path, expected_hash, recorded_hash, DVC_LOCK.name)
        else:
            yield contents.check(link.part, link.path, recorded_hash, rehash=link.part != "raw data")
        if link.part == "checkpoint":
            yield from check_stored_model(version, contents.cache)
    lock_text = read_from_commit(commit, DVC_LOCK)
    lock_hash = None if lock_text is None else hashlib.sha256(lock_text).hexdigest()
    yield compare_hashes("dvc.lock", commit[:12], tags.get("dvc.lock.sha256"), lock_hash, "the commit's")
    if tags.get("git.dirty") == "false":
        yield LineageCheck("commit", "git", commit, "ok")
    else:
        note = "parameters, code or a .dvc file were not committed when it was registered"
        yield LineageCheck("commit", "git", commit, "differs", note)


class ChainLink(NamedTuple):
    """One link of the chain.

    Attributes:
        part: the part of the chain, such as `checkpoint`.
        path: the path of the file or folder.
        lock_entry: the stage and kind of the path's entry in `dvc.lock`, such as `train outs`.
        tag: the version tag that holds the expected hash, or None if there is no such tag.
    """

    part: str
    path: Path
    lock_entry: str
    tag: str | None


def chain_links(tags: Mapping[str, str], lock: Lock) -> Iterator[ChainLink]:
    """Yield the links of a version's chain in order, from each dataset's raw data to the metrics."""
    raw_tags = [tag for tag in tags if tag.startswith(RAW_DATA_PREFIX)]
    for raw_tag in sorted(raw_tags):
        name = raw_tag.removeprefix(RAW_DATA_PREFIX)
        stage = f"ingest@{name}"
        root = lock.stage_params(stage).get(f"ingest.datasets.{name}", {}).get("root", name)
        yield ChainLink("raw data", Path(root), f"{stage} deps", raw_tag)
        yield ChainLink("records", lock.output(stage, name), f"{stage} outs", None)
    for output in OUTPUTS:
        if output.stage == "train":
            yield ChainLink("base", Path(lock.stage_params("train")["train"]["base"]), "train deps", "dvc.base")
            yield ChainLink("model code", PREDICT_CODE_DIGESTS, "predict deps", CODE_TAG)
        path = lock.output(output.stage, output.name, *output.older_names)
        yield ChainLink(output.part, path, f"{output.stage} outs", output.tag)


def check_stored_model(version: ModelVersion, cache: Path) -> Iterator[LineageCheck]:
    """Check that the checkpoint in MLflow, and its manifest in DVC's cache, match the version's tags."""
    tags = version.tags
    with tempfile.TemporaryDirectory() as scratch:
        try:
            stored_hash = dvc_hash(download_checkpoint(version, Path(scratch)))
        except (MlflowException, OSError):
            stored_hash = None
    expected_hash = tags.get(CHECKPOINT_TAG)
    note = "MLflow's copy"
    if "dvc.adapters" in tags:
        expected_hash = tags["dvc.adapters"]
        note = "MLflow's copy, only adapters"
    location = f"models:/{version.name}/{version.version}"
    yield compare_hashes("stored model", location, expected_hash, stored_hash, note)
    checkpoint_files = read_file_list(cache, tags.get(CHECKPOINT_TAG, ""))
    manifest = dvc.object_file(cache, checkpoint_files.get("manifest.json", "none"))
    if manifest.is_file():
        base_hash = json.loads(manifest.read_text()).get("base_sha256")
        yield compare_hashes("weights", "the checkpoint's manifest", tags.get(WEIGHTS_TAG), weights_sha256(manifest))
        yield compare_hashes("base", "the checkpoint's manifest", tags.get("base.sha256"), base_hash)


class CommitContents:
    """Looks up the data of one commit by path and hash: in DVC's cache, then in git, then in the remote."""

    def __init__(self, commit: str, lock: Lock) -> None:
        self.commit = commit
        self.lock = lock
        self.cache = dvc.cache_folder()
        self.tracked = tracked_outputs(commit, lock)

    def check(self, part: str, path: Path, hash_: str, rehash: bool = True) -> LineageCheck:
        """Check that the content of a path is in the cache, in git or in the remote.

        Args:
            rehash: whether to hash the content in the cache again to detect damage.
        """
        outcome, note = check_cached_object(self.cache, hash_, rehash)
        if outcome == "missing":
            # If the parts of a folder are tracked separately, the folder itself is not in the cache
            parts_below = [tracked_path for tracked_path in self.tracked if path in tracked_path.parents]
            if parts_below:
                outcome, note = self._check_parts(part, parts_below, rehash)
            elif dvc.hash_in_git(self.commit, path) == hash_:
                outcome = "ok"
                note = "in git"
            elif path in self.tracked and self._is_in_remote(path):
                outcome = "ok"
                note = "in the remote"
        return LineageCheck(part, path, hash_, outcome, note)

    def _check_parts(self, part: str, paths: list[Path], rehash: bool) -> tuple[Outcome, str]:
        checks = [self.check(part, path, self.tracked[path], rehash) for path in paths]
        failed_checks = [check for check in checks if check.outcome != "ok"]
        if not failed_checks:
            return "ok", f"all {format_count(len(checks), 'part is', 'parts are')} stored"
        notes = [f"{check.location}: {check.note}" for check in failed_checks]
        return failed_checks[0].outcome, "; ".join(notes)

    def _is_in_remote(self, path: Path) -> bool:
        states = {state for absent_path, state in self.absent_data.items() if absent_path.is_relative_to(path)}
        return states == {"deleted"}

    @cached_property
    def absent_data(self) -> dict[Path, str]:
        """DVC's state of each path whose data are missing from the cache or the remote.

        `deleted` data are missing only from the cache. `new` and `missing` data are missing from the remote. DVC
        considers a folder pushed if the remote has the folder's file list, which is sent after the files.
        """
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "tree"
            dvc.add_worktree(self.commit, folder)
            try:
                states = json.loads(dvc.run_dvc(folder, "status", "--cloud", "--json"))
            except DataError:
                states = {}  # there is no remote, or it does not respond
            finally:
                git("worktree", "remove", "--force", str(folder))
        return {Path(path): state for path, state in states.items()}


def check_cached_object(cache: Path, hash_: str, rehash: bool) -> tuple[Outcome, str]:
    """Check a file in the cache, or a folder's list and all of its files. Return the outcome and a note."""
    file = dvc.object_file(cache, hash_)
    if not file.is_file():
        return "missing", "neither in the cache nor in the remote"
    if rehash or hash_.endswith(".dir"):
        damage = dvc.fault_of_object(file, hash_)
        if damage is not None:
            return "differs", str(damage)
    for name, md5 in read_file_list(cache, hash_).items():
        outcome, note = check_cached_object(cache, md5, rehash)
        if outcome != "ok":
            return outcome, f"{name}: {note}"
    return "ok", "in the cache"

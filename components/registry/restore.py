"""Restore a model version in a separate working tree (`m3diff restore`): data, parameters and checkpoint.

All restored content is hashed, and the hashes are compared with those in the version's tags and `dvc.lock`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from m3diff.provenance import dvc
from m3diff.provenance.dvc import DVC_LOCK, Lock, dvc_hash, lookup, tracked_outputs
from m3diff.provenance.git import find_commit
from m3diff.records.errors import DataError
from m3diff.registry.lineage import CODE_TAG, PREDICT_CODE_DIGESTS
from m3diff.registry.tracking import connect
from m3diff.registry.verification import OUTPUTS, LineageCheck, compare_hashes
from m3diff.registry.versions import find_version, read_commit
from m3diff.stages.register.params import Register

REVISION = re.compile(r".*/.*|[0-9a-f]{40}")  # a branch such as `runs/x`, or the full hash of a commit


def restore(cfg: Register, version: str, into: Path | None) -> tuple[Path, list[LineageCheck]]:
    """Create a working tree at a version's commit and restore the data that DVC tracks there.

    Args:
        version: the number or alias of a version, a branch (`runs/...`), or the full hash of a commit. MLflow is needed
            only for a number or alias.
        into: the new folder. If None, a folder next to the project is created.

    Returns:
        the folder, and the results of checking everything that was restored.

    Raises:
        DataError: there is no such version or commit, the folder exists, or DVC cannot read the commit.
        TrackingUnavailableError: MLflow does not respond.
    """
    tags: dict[str, str] = {}
    if not REVISION.fullmatch(version):
        with connect(cfg.tracking_uri) as client:
            model_version = find_version(client, cfg.model_name, version)
            tags = model_version.tags | {"git.commit": read_commit(model_version)}
    commit = find_commit(tags.get("git.commit", version))
    project = Path.cwd()
    default_folder = project.parent / f"{project.name}-{version.replace('/', '-')}"
    folder = (into or default_folder).resolve()
    if folder.exists():
        raise DataError("registry.restore_folder_exists", path=folder)
    lock = dvc.read_lock(commit)
    dvc.add_worktree(commit, folder)
    faults: list[str] = []
    for command in (("fetch", "--quiet"), ("checkout", "--quiet", "--allow-missing")):
        try:
            dvc.run_dvc(folder, *command)
        except DataError as error:  # go on, because the remote may lack only a few files. All files are checked below
            faults.append(str(error))
    note_if_missing = faults[0] if faults else "does not exist"
    checks: list[LineageCheck] = []
    for check in check_restored(folder, commit, lock, tags):
        checks.append(replace(check, note=note_if_missing) if check.outcome == "missing" else check)
    return folder, checks


def check_restored(folder: Path, commit: str, lock: Lock, tags: Mapping[str, str]) -> Iterator[LineageCheck]:
    """Check the content of every tracked path, the parameters of every stage, and the hashes in the version's tags.

    Args:
        tags: the version's tags, or an empty mapping if a branch or commit was restored.
    """
    data_hashes = tracked_outputs(commit, lock)
    restored_hashes: dict[Path, str | None] = {}
    for path in (*data_hashes, PREDICT_CODE_DIGESTS):
        restored_path = folder / path
        restored_hashes[path] = dvc_hash(restored_path) if restored_path.exists() else None
    for path, expected_hash in data_hashes.items():
        yield compare_hashes("data", path, expected_hash, restored_hashes[path])
    values = yaml.safe_load((folder / "params.yaml").read_text(encoding="utf-8"))
    for stage in dvc.current_stages(commit, lock):
        changed_names = [name for name, value in lock.stage_params(stage).items() if lookup(values, name) != value]
        if changed_names:
            yield LineageCheck(
                "parameters", stage, "", "differs", f"ran with other values of {', '.join(changed_names)}"
            )
        else:
            yield LineageCheck("parameters", stage, "", "ok")
    if not tags:
        return
    yield compare_hashes("dvc.lock", DVC_LOCK, tags.get("dvc.lock.sha256"), Lock(folder / DVC_LOCK).sha256)
    yield compare_hashes("model code", PREDICT_CODE_DIGESTS, tags.get(CODE_TAG), restored_hashes[PREDICT_CODE_DIGESTS])
    for output in OUTPUTS:
        if output.tag:
            path = lock.output(output.stage, output.name)
            yield compare_hashes(output.part, path, tags.get(output.tag), restored_hashes.get(path), output.tag)

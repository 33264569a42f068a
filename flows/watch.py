"""Define the flow `watch`, which checks for changed data.

`prefect deployment run m3diff/watch` starts it. It also runs on its schedule.

Each check updates the imported sources with DVC and reads the drop folders, where users put new files. The `.dvc` files
of changed data are committed to the branch `runs/data`, where `m3diff/retrain` finds them. The branch main and the data
in the checkout are not changed. Retrain is started only once for the same data, so that a bad dataset causes only one
failed run.
"""

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from prefect import get_run_logger
from prefect.deployments import run_deployment
from prefect.runtime import deployment, flow_run
from prefect.states import Completed, State

from flows import alerts, dvc
from flows.pipeline import refuse_run, retrain
from flows.prepared_flow import flow
from flows.runtime import prepare
from flows.workspace import DATA_BRANCH, FLOWS_FOLDER, Workspace, read_json, workspace
from m3diff.provenance.dvc import require_own_code
from m3diff.provenance.git import git
from m3diff.records.errors import DataError, Fault
from m3diff.records.files import write_atomic
from m3diff.settings.section import ParamsError

STATE_FILE = FLOWS_FOLDER / "watch.json"
NO_COMMIT = "0" * 40  # tells git that a ref must not exist yet
NOTHING_CHANGED = "no source changed"
DATA_MESSAGE_PREFIX = "Data: "  # prefix of the commit messages on runs/data, followed by the reason
DROP_VARIABLE = "M3DIFF_DROP"
SETTLED_S = 60.0  # a drop folder must be unchanged for this long, because somebody may still be copying files into it


@flow(name="m3diff", persist_result=False, on_failure=[alerts.alert_failure], on_crashed=[alerts.alert_failure])
def watch() -> State:
    """Check all sources once, and start retrain if there are new data.

    If a source cannot be updated, the flow fails after the other sources have been updated. If a setting is invalid or
    the code belongs to another checkout, nothing is checked, and the flow is refused like a run.
    """
    prepare()
    log = get_run_logger()
    alerts.send_alert(log.warning)
    watch_state = read_json(STATE_FILE) or {}
    try:
        require_own_code()
    except DataError as error:
        return refuse_run(error)
    try:
        failures = update_changed_sources(watch_state, log.info)
    except ParamsError as error:
        return refuse_run(error)
    data_commit = find_data_commit()
    reason = ""
    if data_commit and data_commit != watch_state.get("started"):
        reason = git("log", "-1", "--format=%s", data_commit).removeprefix(DATA_MESSAGE_PREFIX)
        log.info(f"retrain, because {reason}")
        start_retrain(reason, data_commit)
        write_atomic(STATE_FILE, json.dumps(watch_state | {"started": data_commit}))
    if failures:
        names = [str(fault.fields["path"]) for fault in failures]
        raise DataError("flows.sources_not_updated", count=len(failures), names=names, faults=failures)
    if not reason:
        return Completed(name="Skipped", message=NOTHING_CHANGED)
    return Completed(message=f"retrain, because {reason}")


def update_changed_sources(watch_state: dict[str, Any], log: Callable[[str], None]) -> list[Fault]:
    """Update every source that may have changed and commit the changes. Return a fault for each failure.

    Args:
        watch_state: the state of the previous check. `folders` contains the fingerprint of each drop folder when it was
            last updated, by `.dvc` file. `data` is the commit of runs/data after that check. Both are updated in this
            mapping and in the state file.
        log: called with each message.
    """
    is_data_branch_known = watch_state.get("data") == find_data_commit()
    known_fingerprints = watch_state.get("folders", {}) if is_data_branch_known else {}
    sources = dict.fromkeys(imported_files(), "")
    for folder in drop_folders():
        fingerprint = compute_fingerprint(Path(folder))
        if not fingerprint:
            log(f"{folder} does not exist or is being written to; the next check looks at it again")
        elif fingerprint != known_fingerprints.get(f"{folder}.dvc"):
            sources[f"{folder}.dvc"] = fingerprint
    if not sources:
        return []
    with workspace(flow_run.get_id() or str(uuid.uuid4()), "HEAD", [], data=True) as work:
        failures, updated_sources = update_sources(work, sources, log)
    git("branch", "--quiet", "-D", work.branch)
    watch_state |= {"folders": known_fingerprints | updated_sources, "data": find_data_commit()}
    write_atomic(STATE_FILE, json.dumps(watch_state))
    return failures


def update_sources(
    work: Workspace, sources: Mapping[str, str], log: Callable[[str], None]
) -> tuple[list[Fault], dict[str, str]]:
    """Update the sources one by one in the worktree and commit the changed `.dvc` files to runs/data.

    Args:
        work: the workspace, whose worktree is the current directory.
        sources: the fingerprint of a drop folder, or an empty string for an imported source, by `.dvc` file.
        log: called with each message.

    Returns:
        a fault for each failure, and the entries of `sources` that were updated.
    """
    failures: list[Fault] = []
    updated_sources: dict[str, str] = {}
    for file, fingerprint in sources.items():
        folder = file.removesuffix(".dvc")
        try:
            with dvc.repository(command=f"dvc update {file}") as repo:
                if fingerprint:
                    shutil.copytree(work.checkout / folder, folder)
                    repo.add([folder])
                else:
                    repo.update([file])
        except dvc.DvcError as error:
            failures.append(Fault("flows.source_not_updated", path=file, fault=error.fault))
            continue
        if fingerprint and compute_fingerprint(work.checkout / folder) != fingerprint:
            log(f"{folder} changed during the update; the next check updates it")
        else:
            updated_sources[file] = fingerprint
    different_files = git("diff", "--name-only", "-z", "--", "*.dvc").split("\0")
    changed_files = [file for file in different_files if file in updated_sources]
    if changed_files:
        commit_data(work, changed_files)
    return failures, updated_sources


def commit_data(work: Workspace, changed_files: Sequence[str]) -> None:
    """Commit these `.dvc` files on top of the commit that the check started from, and point runs/data to the result."""
    previous_commit = find_data_commit()
    git("add", "--", *changed_files)
    reason = ", ".join(f"{file.removesuffix('.dvc')} changed" for file in changed_files)
    commit = git("commit-tree", git("write-tree"), "-p", work.commit, "-m", f"{DATA_MESSAGE_PREFIX}{reason}")
    git("update-ref", f"refs/heads/{DATA_BRANCH}", commit, previous_commit or NO_COMMIT)


def find_data_commit() -> str:
    """Return the commit of the branch runs/data, or an empty string if the branch does not exist."""
    return git("for-each-ref", "--format=%(objectname)", f"refs/heads/{DATA_BRANCH}")


def start_retrain(reason: str, commit: str) -> None:
    """Start retrain through its deployment, which allows one run at a time.

    If `watch` itself was not started by a deployment, retrain runs in this process.

    Args:
        reason: the reason for the run.
        commit: the commit of runs/data. If a check is killed and repeated, retrain is not started twice for the same
            commit.
    """
    if not deployment.get_id():
        retrain(reason=reason, return_state=True)
        return
    run_deployment(
        "m3diff/retrain", parameters={"reason": reason}, timeout=0, as_subflow=False, idempotency_key=f"data {commit}"
    )


# The sources


def compute_fingerprint(folder: Path) -> str:
    """Return a digest of the names, sizes and modification times of a folder's files, without reading the files.

    Return an empty string if the folder does not exist, or if anything in it changed within the last minute.
    """
    digest = hashlib.sha256()
    newest_ns = 0
    try:
        for path in [folder, *sorted(folder.rglob("*"))]:
            status = path.lstat()
            newest_ns = max(newest_ns, status.st_ctime_ns)  # unlike mtime, it cannot be set by users
            if not path.is_dir():
                name = path.relative_to(folder).as_posix()
                digest.update(f"{name}\0{status.st_size} {status.st_mtime_ns} {status.st_ino}\n".encode())
    except FileNotFoundError:  # a file was removed in the meantime
        return ""
    # Use the absolute value, because file times may be in the future if the clock was set back
    is_settled = abs(time.time() - newest_ns / 1e9) > SETTLED_S
    return digest.hexdigest() if is_settled else ""


def dvc_files() -> list[str]:
    """Return the `.dvc` files of the last commit."""
    return [path for path in git("ls-tree", "-r", "-z", "--name-only", "HEAD").split("\0") if path.endswith(".dvc")]


def imported_files() -> list[str]:
    """Return the `.dvc` files of the last commit that `dvc import` or `dvc import-url` created."""
    return [file for file in dvc_files() if "deps" in (yaml.safe_load(git("show", f"HEAD:{file}")) or {})]


def drop_folders() -> list[str]:
    """Return the folders listed in M3DIFF_DROP, relative to the checkout.

    Raises:
        ParamsError: one of the folders is not tracked by a `.dvc` file in the last commit.
    """
    parts = os.environ.get(DROP_VARIABLE, "").replace(os.pathsep, ",").split(",")
    folders = [Path(part.strip()).as_posix() for part in parts if part.strip()]
    tracked_files = dvc_files() if folders else []
    for folder in folders:
        if f"{folder}.dvc" not in tracked_files:
            raise ParamsError("flows.drop_folder_not_tracked", key=DROP_VARIABLE, folder=folder, checkout=Path.cwd())
    return folders

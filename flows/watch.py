"""Data that change by themselves: `prefect deployment run m3diff/watch`, or its schedule.

A look asks the imported sources and the drop folders. What changed is committed, the `.dvc` files alone, to the branch
`runs/data`, from where `m3diff/retrain` takes it up; main is never touched. Each content starts retrain once, so that a
bad dataset fails once. A look also tells of runs that crashed and of silence.
"""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.deployments import run_deployment
from prefect.runtime import flow_run
from prefect.states import Completed, State

from flows import dvc, lookback, notices, sources
from flows.retrain import retrain
from flows.schedule import coalesce_late, deployed_run
from flows.workspace import DATA, FLOWS, Workspace, read_json, workspace
from m3diff.provenance.git import git
from m3diff.provenance.guard import require_own_code
from m3diff.records.errors import DataError
from m3diff.records.files import write_atomic

STATE = FLOWS / "watch.json"
NOTHING = "no source changed"


@flow(name="m3diff", persist_result=False, on_failure=[notices.failed], on_crashed=[notices.failed])
def watch() -> State:
    """Look once. New data: start retrain. A source that cannot be asked fails the look, after the others had theirs."""
    require_own_code()
    log, checkout = get_run_logger(), Path.cwd()
    coalesce_late()
    notices.send_again(checkout, log.warning)
    if deployed_run():
        lookback.look_back(checkout, log.warning)
    kept = read_json(STATE) or {}
    failures = look(kept, log.info)
    found, reason = tip(), ""
    if found and found != kept.get("started"):
        reason = reason_of(found)
        log.info(f"retrain, because {reason}")
        start(reason, found)
        write_atomic(STATE, json.dumps(kept | {"started": found}))
    if failures:
        raise DataError("; ".join(failures))
    notices.forget("watch ", checkout)
    return Completed(message=f"retrain, because {reason}") if reason else Completed(name="Skipped", message=NOTHING)


def look(kept: dict[str, Any], log: Callable[[str], None]) -> list[str]:
    """Ask every source that may have changed, and commit what did; what could not be asked, in words.

    Args:
        kept: `folders`, the fingerprint of each drop folder when it was last taken up, and `data`, the commit of
            runs/data after that; written anew.
    """
    known = kept.get("folders", {}) if kept.get("data") == tip() else {}
    folders = {folder: found for folder in sources.drop_folders() if (found := changed_content(folder, known, log))}
    imports = sources.imports()
    if not imports and not folders:
        return []
    name = flow_run.get_id() or str(uuid.uuid4())
    with workspace(name, "HEAD", [], dirty=False, data=True) as work:
        failures, done = ask(work, imports, folders, log)
    git("branch", "--quiet", "-D", work.branch)
    kept |= {"folders": known | done, "data": tip()}
    write_atomic(STATE, json.dumps(kept))
    return failures


def changed_content(folder: str, known: Mapping[str, str], log: Callable[[str], None]) -> str | None:
    """The fingerprint of a drop folder's content where it is new and nothing is being written there."""
    if not Path(folder).is_dir():
        log(f"{folder} is not there, and is not looked at; `dvc checkout {folder}.dvc` brings it")
        return None
    found = sources.content(Path(folder))
    if not found.settled and found.fingerprint != known.get(folder):
        log(f"{folder} is being written to; the next look takes it up")
        return None
    return found.fingerprint if found.fingerprint != known.get(folder) else None


def ask(
    work: Workspace, imports: Sequence[str], folders: Mapping[str, str], log: Callable[[str], None]
) -> tuple[list[str], dict[str, str]]:
    """Ask the sources one by one in the worktree and commit what changed.

    Args:
        folders: fingerprint by drop folder.

    Returns:
        what failed, in words; the fingerprints of the folders that were taken up.
    """
    reasons, failures, done = {}, [], {}
    for file in imports:
        try:
            reasons[file] = sources.update(file)
        except dvc.DvcError as error:
            failures.append(f"{file}: {error}")
    for folder, fingerprint in folders.items():
        try:
            reason = sources.take_up(folder, work.checkout)
        except (dvc.DvcError, OSError) as error:
            failures.append(f"{folder}: {error}")
            continue
        if sources.content(work.checkout / folder).fingerprint == fingerprint:
            reasons[f"{folder}.dvc"], done[folder] = reason, fingerprint
        else:
            git("checkout", "--quiet", "HEAD", "--", f"{folder}.dvc")
            log(f"{folder} was written to meanwhile; the next look takes it up")
    for failure in failures:
        log(f"warning: {failure}")
    changed = [file for file in git("diff", "--name-only", "-z", "--", "*.dvc").split("\0") if file in reasons]
    if changed:
        commit(work, changed, [reasons[file] for file in changed])
    return failures, done


def commit(work: Workspace, changed: Sequence[str], reasons: Sequence[str]) -> None:
    """Make the branch runs/data the commit that the look began with, and these `.dvc` files."""
    before = tip()
    git("add", "--", *changed)
    message = "\n".join([f"Data: {reasons[0]}", "", *(f"Reason: {text}" for text in reasons)])
    made = git("commit-tree", git("write-tree"), "-p", work.commit, "-m", message)
    git("update-ref", f"refs/heads/{DATA}", made, before or "0" * 40)


def tip() -> str:
    """The commit of the branch runs/data; empty without one."""
    return git("for-each-ref", "--format=%(objectname)", f"refs/heads/{DATA}")


def reason_of(commit: str) -> str:
    """Why this commit of runs/data was made."""
    lines = git("log", "-1", "--format=%(trailers:key=Reason,valueonly,unfold)", commit).splitlines()
    return "; ".join(line for line in lines if line) or git("log", "-1", "--format=%s", commit)


def start(reason: str, commit: str) -> None:
    """Start retrain: where a server runs it by its own deployment, one at a time, else here.

    Args:
        commit: what it is started for, so that a look that was killed does not start it twice.
    """
    if deployed_run() is None:
        retrain(reason=reason, return_state=True)
        return
    run_deployment(
        "m3diff/retrain", parameters={"reason": reason}, timeout=0, as_subflow=False, idempotency_key=f"data {commit}"
    )

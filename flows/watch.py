"""Data that change by themselves: `prefect deployment run m3diff/watch`, or its schedule.

A look asks the imported sources, through DVC, and the drop folders, which people put files into. What changed is
committed, the `.dvc` files alone, to the branch `runs/data`, from where `m3diff/retrain` takes it up; main is never
touched, nor the person's data. Each content starts retrain once, so that a bad dataset fails once.
"""

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from prefect import flow, get_run_logger
from prefect.deployments import run_deployment
from prefect.runtime import deployment, flow_run
from prefect.states import Completed, State

from flows import dvc, report
from flows.pipeline import retrain
from flows.workspace import DATA, FLOWS, Workspace, read_json, workspace
from m3diff.provenance.dvc import require_own_code
from m3diff.provenance.git import git
from m3diff.records.errors import DataError
from m3diff.records.files import write_atomic
from m3diff.settings.section import ParamsError

STATE = FLOWS / "watch.json"
NOTHING = "no source changed"
DATA_CHANGED = "Data: "  # a commit of runs/data, then the reason
DROP = "M3DIFF_DROP"
SETTLED_S = 60.0  # without a change; a file that is half copied waits for the next look


@flow(name="m3diff", persist_result=False, on_failure=[report.failed], on_crashed=[report.failed])
def watch() -> State:
    """Look once. New data: start retrain. A source that cannot be asked fails the look, after the others had theirs."""
    require_own_code()
    log = get_run_logger()
    report.tell(log.warning)
    kept = read_json(STATE) or {}
    failures = look(kept, log.info)
    found, reason = tip(), ""
    if found and found != kept.get("started"):
        reason = git("log", "-1", "--format=%s", found).removeprefix(DATA_CHANGED)
        log.info(f"retrain, because {reason}")
        start(reason, found)
        write_atomic(STATE, json.dumps(kept | {"started": found}))
    if failures:
        raise DataError("; ".join(failures))
    return Completed(message=f"retrain, because {reason}") if reason else Completed(name="Skipped", message=NOTHING)


def look(kept: dict[str, Any], log: Callable[[str], None]) -> list[str]:
    """Ask every source that may have changed, and commit what did; what could not be asked, in words.

    Args:
        kept: `folders`, the fingerprint of each drop folder when it was last taken up, by its `.dvc` file, and `data`,
            the commit of runs/data after that; written anew.
    """
    known = kept.get("folders", {}) if kept.get("data") == tip() else {}
    sources = dict.fromkeys(imports(), "")
    for folder in drop_folders():
        found = content(Path(folder))
        if not found:
            log(f"{folder} is not there, or is being written to; the next look takes it up")
        elif found != known.get(f"{folder}.dvc"):
            sources[f"{folder}.dvc"] = found
    if not sources:
        return []
    with workspace(flow_run.get_id() or str(uuid.uuid4()), "HEAD", [], data=True) as work:
        failures, done = ask(work, sources, log)
    git("branch", "--quiet", "-D", work.branch)
    kept |= {"folders": known | done, "data": tip()}
    write_atomic(STATE, json.dumps(kept))
    return failures


def ask(work: Workspace, sources: Mapping[str, str], log: Callable[[str], None]) -> tuple[list[str], dict[str, str]]:
    """Ask the sources one by one in the worktree and commit what changed.

    Args:
        sources: `.dvc` files, with the fingerprint of a drop folder; empty for an imported source.

    Returns:
        what failed, in words; those that were taken up.
    """
    failures, done = list[str](), dict[str, str]()
    for file, fingerprint in sources.items():
        folder = file.removesuffix(".dvc")
        try:
            with dvc.repository(outside=f"dvc update {file}") as repo:
                if fingerprint:
                    shutil.copytree(work.checkout / folder, folder)
                    repo.add([folder])
                else:
                    repo.update([file])
        except dvc.DvcError as error:
            failures.append(f"{file}: {error}")
            continue
        if fingerprint and content(work.checkout / folder) != fingerprint:
            log(f"{folder} was written to meanwhile; the next look takes it up")
        else:
            done[file] = fingerprint
    changed = [file for file in git("diff", "--name-only", "-z", "--", "*.dvc").split("\0") if file in done]
    if changed:  # the commit that the look began with, and these files
        before = tip()
        git("add", "--", *changed)
        reason = ", ".join(f"{file.removesuffix('.dvc')} changed" for file in changed)
        made = git("commit-tree", git("write-tree"), "-p", work.commit, "-m", f"{DATA_CHANGED}{reason}")
        git("update-ref", f"refs/heads/{DATA}", made, before or "0" * 40)
    return failures, done


def tip() -> str:
    return git("for-each-ref", "--format=%(objectname)", f"refs/heads/{DATA}")


def start(reason: str, commit: str) -> None:
    """Start retrain: where a server runs it by its own deployment, one at a time, else here.

    Args:
        commit: what it is started for, so that a look that was killed does not start it twice.
    """
    if not deployment.get_id():
        retrain(reason=reason, return_state=True)
        return
    run_deployment(
        "m3diff/retrain", parameters={"reason": reason}, timeout=0, as_subflow=False, idempotency_key=f"data {commit}"
    )


# The sources


def content(folder: Path) -> str:
    """A fingerprint of the names, sizes and times of a folder's files, which are not read; empty where one changed of
    late, or the folder is not there."""
    digest, newest = hashlib.sha256(), 0
    try:
        for path in [folder, *sorted(folder.rglob("*"))]:
            found = path.lstat()
            newest = max(newest, found.st_ctime_ns)  # unlike the time of writing it cannot be set
            if not path.is_dir():
                facts = f"{path.relative_to(folder).as_posix()}\0{found.st_size} {found.st_mtime_ns} {found.st_ino}\n"
                digest.update(facts.encode())
    except FileNotFoundError:  # it went away meanwhile
        return ""
    return digest.hexdigest() if abs(time.time() - newest / 1e9) > SETTLED_S else ""  # also where a clock was set back


def dvc_files() -> list[str]:
    return [path for path in git("ls-tree", "-r", "-z", "--name-only", "HEAD").split("\0") if path.endswith(".dvc")]


def imports() -> list[str]:
    """The `.dvc` files of the last commit that name a source: those of `dvc import` and `dvc import-url`."""
    return [file for file in dvc_files() if "deps" in (yaml.safe_load(git("show", f"HEAD:{file}")) or {})]


def drop_folders() -> list[str]:
    """The folders that M3DIFF_DROP names, relative to the checkout.

    Raises:
        ParamsError: one is tracked by no `.dvc` file of the last commit.
    """
    parts = os.environ.get(DROP, "").replace(os.pathsep, ",").split(",")
    folders = [Path(part.strip()).as_posix() for part in parts if part.strip()]
    if unknown := [folder for folder in folders if f"{folder}.dvc" not in dvc_files()]:
        raise ParamsError(
            f"{DROP}: {unknown[0]} is tracked by no .dvc file of the last commit; "
            f"`dvc add {unknown[0]}`, commit {unknown[0]}.dvc, and give it relative to {Path.cwd()}"
        )
    return folders

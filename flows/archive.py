"""Keep the outputs of a run and take them up again: data and checkpoint in the DVC remote, `dvc.lock` and scores on the
branch of the run. The branch `runs/latest` is the newest whole run.

Flow runs never commit to main, so main's `dvc.lock` stays behind them, and a later run takes up that of `runs/latest`.
Its entries record what each stage read and wrote, by hash; DVC compares them with what is there, so that a wrong one
makes a stage run and never keeps it from running.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flows import dvc
from m3diff.provenance.git import GitError, git, has_branch, main_tree
from m3diff.records.errors import DataError
from m3diff.settings.section import ParamsError

LOCK = Path("dvc.lock")
LATEST = "runs/latest"
"""The branch of the newest run that went through every stage and had no parameters of its own."""

NO_REMOTE = "no DVC remote is set, so data and checkpoint stay on this machine (`dvc remote add -d NAME URL`)"


class NotPushedError(ConnectionError):
    """The DVC remote does not have all of it."""


def check_remote() -> None:
    """Ask each remote for the outputs that are no folders: they are few.

    Raises:
        ParamsError: one does not answer.
    """
    for name, stored in dvc.kept().items():
        try:
            if files := {path: md5 for path, md5 in stored.items() if not md5.endswith(".dir")}:
                dvc.not_in_remote(files, name)
        except dvc.DvcError as error:
            raise ParamsError(f"the DVC remote {name!r} does not answer, so nothing could be kept: {error}") from error


def push() -> tuple[str, str]:
    """Send what the remotes miss, then look for each of these files there; (Ran or Skipped, a sentence).

    Every remote is asked for every file, in every run: what it was seen to have may be gone, and a push that was cut
    off leaves a folder's list without some of its files.

    Raises:
        DataError: a file in the cache is damaged; nothing was sent.
        NotPushedError: something is missing there; what arrived is not sent again.
    """
    remotes, sent = dvc.kept(), list[str]()
    for name, stored in sorted(remotes.items()):
        try:
            missing = dvc.not_in_remote(dvc.files_of(stored), name)
            if bad := dvc.faults_in_cache(missing):  # DVC would send damaged bytes under the right name
                raise DataError("; ".join(bad))
            if missing:
                dvc.push(missing.values(), name)
                sent.append(name)
            left = dvc.not_in_remote(missing, name)
        except dvc.DvcError as error:
            raise NotPushedError(f"remote {name!r}: {error}") from error
        if left:
            raise NotPushedError(f"remote {name!r} is missing {len(left)} file(s) after the push: {sorted(left)[:5]}")
    if not remotes:
        return "Skipped", NO_REMOTE
    return ("Ran", f"sent to {', '.join(sent)}") if sent else ("Skipped", f"{', '.join(remotes)} had all of it")


def commit(message: str, links: Sequence[str]) -> str:
    """Commit `dvc.lock`, the one before where it is not whole, and what stages write beside DVC to the current branch;
    the commit.

    Args:
        links: folders of the checkout, which are no part of it.
    """
    ours = dvc.locked()
    if ours is None or set(dvc.locked("HEAD") or {}) - set(ours):  # DVC itself drops no stage
        LOCK.unlink(missing_ok=True)
        if git("ls-tree", "HEAD", "--", str(LOCK)):
            git("checkout", "--quiet", "HEAD", "--", str(LOCK))
    git("add", "--all", "--", ".")
    if links:  # where an older commit's .gitignore misses one
        git("rm", "--cached", "--quiet", "--ignore-unmatch", "--", *links)
    git("commit", "--quiet", "--allow-empty", "--message", message)
    return git("rev-parse", "HEAD")


def publish(branch: str, log: Callable[[str], None]) -> None:
    """Push the branch to the git remote that `git config m3diff.runs` names; without one it stays here."""
    name = git("config", "--default", "", "--get", "m3diff.runs")
    if not name:
        return
    try:
        git("push", "--quiet", name, f"refs/heads/{branch}:refs/heads/{branch}", cwd=main_tree(Path()))
    except GitError as error:
        log(f"warning: {branch} was not pushed to {name}: {error}; it is sent with the next run")


def take_up() -> dict[str, Any]:
    """Link the data in and take the `dvc.lock` of the latest run, with the metrics beside it, where it leaves fewer
    stages to do than the branch's own; what is left to do then, DVC's status by stage."""
    dvc.link_data()
    own = dvc.status()
    latest = (dvc.locked(LATEST) if own and has_branch(LATEST) else None) or {}
    if not latest or latest == dvc.locked():
        return own
    stages = dvc.stages()  # without frozen ones, whose outputs are the commit's
    written = [out["path"] for name in stages for out in latest.get(name, {}).get("outs", [])]
    files = git("ls-files", f"--with-tree={LATEST}", "--", *written).splitlines()  # here or there
    git("restore", f"--source={LATEST}", "--staged", "--worktree", "--", str(LOCK), *files)
    dvc.link_data()
    theirs = dvc.status()
    left = [
        sum(name in found or not before.isdisjoint(found) for name, before in stages.items()) for found in (theirs, own)
    ]
    if left[0] < left[1]:
        return theirs
    git("reset", "--hard", "--quiet")
    dvc.link_data()
    return own

"""Keep the outputs of a run and take them up again: data and checkpoint in the DVC remote, `dvc.lock` and scores on the
branch of the run. The branch `runs/latest` is the newest whole run.

Flow runs never commit to main, so main's `dvc.lock` stays behind them, and a later run takes up the entries of
`runs/latest`. An entry records what a stage read and wrote, by hash; DVC compares it with what is there, so that a
wrong one makes a stage run and never keeps it from running.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flows import dvc
from m3diff.provenance.dvc import object_file
from m3diff.provenance.git import GitError, git, has_branch, main_tree
from m3diff.records.errors import DataError
from m3diff.settings.section import ParamsError

LOCK = Path("dvc.lock")
LATEST = "runs/latest"
"""The branch of the newest run that went through every stage and had no parameters of its own."""

LOOKED_BACK = 20  # commits that changed it, for a whole one
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
    new: dict[str, int] = {}
    for name, stored in sorted(dvc.kept().items()):
        try:
            missing = dvc.not_in_remote(dvc.files_of(stored), name)
            if bad := dvc.faults_in_cache(missing):  # DVC would send damaged bytes under the right name
                raise DataError("; ".join(bad))
            if missing:
                dvc.push(missing.values(), name)
            left = dvc.not_in_remote(missing, name)
        except dvc.DvcError as error:
            raise NotPushedError(f"remote {name!r}: {error}") from error
        if left:
            raise NotPushedError(f"remote {name!r} is missing {len(left)} file(s) after the push: {sorted(left)[:5]}")
        new[name] = sum(any(file == path or file.startswith(f"{path}/") for file in missing) for path in stored)
    if not new:
        return "Skipped", NO_REMOTE
    said = ", ".join(f"remote {name!r} has all of it{f', {count} new' if count else ''}" for name, count in new.items())
    return ("Ran", said) if any(new.values()) else ("Skipped", f"{said} already")


def can_be_sent() -> bool:
    """Return whether cache or remote has every file that DVC keeps; else a stage has to make it again."""
    cache = dvc.cache_folder()
    for name, stored in dvc.kept().items():
        lacking = {path: md5 for path, md5 in dvc.files_of(stored).items() if not object_file(cache, md5).is_file()}
        if lacking and dvc.not_in_remote(lacking, name):
            return False
    return True


def commit(message: str, links: Sequence[str]) -> str:
    """Commit `dvc.lock`, where it is whole, and what stages write beside DVC to the current branch; the commit.

    Args:
        links: folders of the checkout, which are no part of it.
    """
    mend_lock()
    git("add", "--all", "--", ".")
    if links:  # where an older commit's .gitignore misses one
        git("rm", "--cached", "--quiet", "--ignore-unmatch", "--", *links)
    git("commit", "--quiet", "--allow-empty", "--message", message)
    return git("rev-parse", "HEAD")


def mend_lock() -> str | None:
    """Replace a `dvc.lock` that a kill left empty or cut short by the newest whole one of this branch; which commit's
    that is, None where nothing was wrong."""
    whole, before = None, dict[str, Any]()  # one that lost stages of those before it is not whole
    there = git("ls-tree", "HEAD", "--", str(LOCK))
    for commit in reversed(git("log", f"-{LOOKED_BACK}", "--format=%H", "--", str(LOCK)).splitlines() if there else []):
        found = dvc.locked(commit)
        if found is not None and not set(before) - set(found):
            whole, before = commit, found
    ours = dvc.locked()
    if ours is not None:
        with dvc.repository() as repo:  # the stages of which it does not know every output
            pipeline = dvc.of_pipeline(repo)
            lacking = {stage.addressing for stage in pipeline if not all(out.hash_info for out in stage.outs)}
        if all(ours.get(stage) == before.get(stage) for stage in lacking):
            return None
    if whole is not None:
        git("checkout", whole, "--", str(LOCK))
    elif LOCK.is_file():
        LOCK.unlink()
        whole = "no commit"
    return whole


def publish(branch: str, log: Callable[[str], None]) -> None:
    """Push the branch to the git remote that `git config m3diff.runs` names; without one it stays here."""
    name = git("config", "--default", "", "--get", "m3diff.runs")
    if not name:
        return
    try:
        git("push", "--quiet", name, f"refs/heads/{branch}:refs/heads/{branch}", cwd=main_tree(Path()))
    except GitError as error:
        log(f"warning: {branch} was not pushed to {name}: {error}; it is sent with the next run")


# What earlier runs left


def take_over() -> bool:
    """Take the `dvc.lock` of the latest run whole, with its metrics, where nothing is left to do then; whether so."""
    if not (theirs := latest()):
        return False
    git("checkout", LATEST, "--", str(LOCK), *metrics(theirs))
    if dvc.is_current():
        return True
    git("reset", "--hard", "--quiet")
    return False


def take_up(changed: Collection[str]) -> bool:
    """Replace the entries of the stages `changed` by those of the latest run; whether there was any."""
    ours, theirs = dvc.locked() or {}, latest()
    found = {stage: theirs[stage] for stage in changed if stage in theirs and theirs[stage] != ours.get(stage)}
    if not found:
        return False
    if ours | found == theirs:
        git("checkout", LATEST, "--", str(LOCK))  # DVC's own text, to the byte
    else:
        stages = {"schema": "2.0", "stages": ours | found}
        LOCK.write_text(yaml.safe_dump(stages, sort_keys=False), encoding="utf-8")
    if files := metrics(found):
        git("checkout", LATEST, "--", *files)
    dvc.link_data()
    return True


def latest() -> dict[str, Any]:
    """The stages of the latest run by name; none before the first, and where its `dvc.lock` is no lock."""
    return (dvc.locked(LATEST) if has_branch(LATEST) else None) or {}


def metrics(stages: Mapping[str, Any]) -> list[str]:
    """The files of these stages' outputs that the latest run has in git."""
    written = [out["path"] for entry in stages.values() for out in entry.get("outs", [])]
    return git("ls-tree", "-r", "--name-only", LATEST, "--", *written).splitlines() if written else []

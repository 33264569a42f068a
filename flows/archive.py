"""What a run made, kept: data and checkpoint in the DVC remote, `dvc.lock` and scores on the branch of the run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows import dvc, raw
from m3diff.provenance.dvc import listing, object_file, whole
from m3diff.provenance.git import GitError, git, main_tree
from m3diff.records.errors import DataError
from m3diff.settings.section import ParamsError

LOCK = Path("dvc.lock")
LOOKED_BACK = 20  # commits that changed it, for a whole one
NO_REMOTE = "no DVC remote is set, so data and checkpoint stay on this machine (`dvc remote add -d NAME URL`)"


class NotPushedError(ConnectionError):
    """The DVC remote does not have all of it."""


def check_remote() -> None:
    """See that each remote answers, by asking it for the files that are no folders: they are few.

    Raises:
        ParamsError: one does not.
    """
    for name, stored in by_remote().items():
        files = {path: md5 for path, md5 in stored.items() if not md5.endswith(".dir")}
        try:
            if files:
                dvc.not_in_remote(files, name)
        except dvc.DvcError as error:
            raise ParamsError(f"the DVC remote {name!r} does not answer, so nothing could be kept: {error}") from error


def by_remote() -> dict[str, dict[str, str]]:
    """What the cache holds of what DVC keeps of this commit: hashes by path, by the remote that they belong in."""
    cache = dvc.cache_folder()
    found: dict[str, dict[str, str]] = {}
    for path, (md5, remote) in dvc.kept().items():
        if remote is not None and object_file(cache, md5).is_file():
            found.setdefault(remote, {})[path] = md5
    return found


def push(log: Callable[[str], None]) -> tuple[str, str]:
    """Push what the remotes miss, then look for each of these files there; (Ran or Skipped, a sentence).

    Every remote is asked for every file, in every run: what it was seen to have may be gone. DVC takes a folder for
    whole where the remote has its list of files, so that only a look at each file finds a gap, as a push that was cut
    off leaves one, and only a push of that file closes it.

    Raises:
        DataError: a file in the cache is damaged; nothing was sent.
        NotPushedError: something is missing there; what arrived is not sent again.
    """
    remotes = by_remote()
    if not remotes:
        return "Skipped", NO_REMOTE
    new = {name: send(name, stored, log) for name, stored in sorted(remotes.items())}
    said = ", ".join(f"remote {name!r} has all of it{f', {count} new' if count else ''}" for name, count in new.items())
    return ("Ran", said) if any(new.values()) else ("Skipped", f"{said} already")


def send(name: str, stored: Mapping[str, str], log: Callable[[str], None]) -> int:
    """Let a remote have these outputs, hashes by path; of how many it missed something."""
    files = files_of(stored)
    try:
        missing = dvc.not_in_remote(files, name)
        if not missing:
            return 0
        check_cache(missing)
        new = [path for path in stored if any(file == path or file.startswith(f"{path}/") for file in missing)]
        said = dvc.ask("push", *new).strip()
        if left := dvc.not_in_remote(missing, name):
            dvc.push_objects(left.values(), name)
            left = dvc.not_in_remote(left, name)
    except dvc.DvcError as error:
        raise NotPushedError(f"remote {name!r}: {error}") from error
    if left:
        raise NotPushedError(f"remote {name!r} is missing {len(left)} file(s) after `dvc push`: {sorted(left)[:5]}")
    log(f"remote {name!r}: {said or 'nothing to send'}")
    return len(new)


def can_be_sent() -> bool:
    """Whether cache or remote has every file of what DVC keeps; else a stage has to make it again."""
    cache = dvc.cache_folder()
    for name, stored in by_remote().items():
        files = files_of(stored)
        if not raw.all_there(cache, files.values()):
            lacking = {path: md5 for path, md5 in files.items() if not object_file(cache, md5).is_file()}
            if dvc.not_in_remote(lacking, name):
                return False
    return True


def files_of(outputs: Mapping[str, str]) -> dict[str, str]:
    """These outputs, and the files of those that are folders: hashes by path."""
    cache = dvc.cache_folder()
    within = {f"{path}/{name}": md5 for path, hash_ in outputs.items() for name, md5 in listing(cache, hash_).items()}
    return {**outputs, **within}


def check_cache(hashes: Mapping[str, str]) -> None:
    """See that what is to be sent is what its name says: DVC would send damaged bytes under the right name.

    Args:
        hashes: DVC's, by path, of files and of folders' lists.

    Raises:
        DataError: it is not; every damaged file is named.
    """
    cache = dvc.cache_folder()
    files = {path: (object_file(cache, md5), md5) for path, md5 in hashes.items()}
    if bad := [
        f"{path}: {note}" for path, (file, md5) in files.items() if file.is_file() and (note := whole(file, md5))
    ]:
        raise DataError("; ".join(bad))


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
    commit, before = last_whole()
    text = LOCK.read_text(encoding="utf-8", errors="replace") if LOCK.is_file() else None
    if text is None and commit is None:
        return None
    if text is not None and dvc.is_lock(text):
        ours = dvc.entries(text)
        if not any(ours.get(stage) != before.get(stage) for stage in dvc.unfinished()):
            return None
    if commit is not None:
        git("checkout", commit, "--", str(LOCK))
        return commit
    LOCK.unlink()
    return "no commit"


def last_whole() -> tuple[str | None, dict[str, Any]]:
    """The newest commit of this branch whose `dvc.lock` is whole, and its stages: one that lost stages of those before
    it is not."""
    best, stages = None, dict[str, Any]()
    there = git("ls-tree", "HEAD", "--", str(LOCK))
    for commit in reversed(git("log", f"-{LOOKED_BACK}", "--format=%H", "--", str(LOCK)).splitlines() if there else []):
        text = dvc.lock_of(commit)
        if dvc.is_lock(text) and not set(stages) - set(dvc.entries(text)):
            best, stages = commit, dvc.entries(text)
    return best, stages


def publish(branch: str, log: Callable[[str], None]) -> None:
    """Push the branch to the git remote that `git config m3diff.runs` names; without one it stays here."""
    try:
        name = git("config", "--get", "m3diff.runs")
    except GitError:
        return
    try:
        git("push", "--quiet", name, f"refs/heads/{branch}:refs/heads/{branch}", cwd=main_tree(Path()))
    except GitError as error:
        log(f"warning: {branch} was not pushed to {name}: {error}; it is sent with the next run")

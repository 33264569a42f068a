"""What a run made, kept: data and checkpoint in the DVC remote, `dvc.lock` and scores on the branch of the run."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from components.archive.objects import in_cache, listing
from components.files import write_atomic
from components.records import DataError
from components.section import ParamsError
from flows import dvc
from flows.git import GitError, git

LOCK = Path("dvc.lock")
NO_REMOTE = "no DVC remote is set, so data and checkpoint stay on this machine (`dvc remote add -d NAME URL`)"


class NotPushedError(ConnectionError):
    """The DVC remote does not have all of it."""


def check_remote() -> None:
    """See that the remote answers, by asking it for the files that are no folders: they are few.

    Raises:
        ParamsError: it does not.
    """
    name = dvc.remote()
    if name is None:
        return
    files = [path for path, md5 in stored().items() if not md5.endswith(".dir")]
    if not files:
        return
    try:
        dvc.ask("status", "--cloud", "--json", *files)
    except dvc.DvcError as error:
        raise ParamsError(f"the DVC remote {name!r} does not answer, so nothing could be kept: {error}") from error


def stored() -> dict[str, str]:
    """What DVC keeps of this commit, by path: the hashes of `dvc.lock` and of every `.dvc` file whose object is in the
    cache. A stage's output in git alone is not."""
    files = [file for file in (LOCK, *map(Path, git("ls-files", "*.dvc").splitlines())) if file.is_file()]
    cache = dvc.cache_folder() / "files" / "md5"
    found = {path: md5 for file in files for path, md5 in outputs(file)}
    return {path: md5 for path, md5 in found.items() if (cache / md5[:2] / md5[2:]).is_file()}


def outputs(file: Path) -> Iterator[tuple[str, str]]:
    """(path from the project's root, md5) of the outputs that a `.dvc` file or `dvc.lock` names."""
    tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    for entry in tree["stages"].values() if "stages" in tree else [tree]:
        for out in entry.get("outs", []):
            if "md5" in out:
                yield (file.parent / out["path"]).as_posix(), out["md5"]


def push(record: Path, log: Callable[[str], None]) -> tuple[str, str]:
    """Push, then look for every file of what is new in the remote; (Ran or Skipped, a sentence).

    DVC takes a folder for whole where the remote has its list of files, so that only a look at each file finds a gap,
    as a push that was cut off leaves one, and only a push of that file closes it.

    Args:
        record: file of the hashes that each remote was seen to have.

    Raises:
        DataError: a file in the cache is damaged; nothing was sent.
        NotPushedError: something is missing there; what arrived is not sent again.
    """
    name = dvc.remote()
    if name is None:
        return "Skipped", NO_REMOTE
    seen = sent(record)
    new = unsent(seen.get(name, []))
    if not new:
        return "Skipped", f"remote {name!r} has all of it already"
    check_cache(new)
    try:
        said = dvc.ask("push", *new).strip()
        files = files_of(new)
        missing = dvc.not_in_remote(files)
        if missing:
            dvc.push_objects(missing.values())
            missing = dvc.not_in_remote(missing)
    except dvc.DvcError as error:
        raise NotPushedError(f"remote {name!r}: {error}") from error
    if missing:
        raise NotPushedError(
            f"remote {name!r} is missing {len(missing)} file(s) after `dvc push`: {sorted(missing)[:5]}"
        )
    write_atomic(record, json.dumps(seen | {name: sorted({*seen.get(name, []), *new.values()})}))
    log(f"remote {name!r}: {said or 'nothing to send'}")
    return "Ran", f"remote {name!r} has all of it, {len(new)} new"


def sent(record: Path) -> dict[str, list[str]]:
    """The hashes that each remote was seen to have."""
    return json.loads(record.read_text()) if record.is_file() else {}


def unsent(seen: Sequence[str]) -> dict[str, str]:
    """What DVC keeps of this commit, but for the hashes that the remote was seen to have: hashes by path."""
    return {path: md5 for path, md5 in stored().items() if md5 not in seen}


def can_be_sent(record: Path) -> bool:
    """Whether the cache has every file of what is still to be sent; else a stage has to make it again."""
    name = dvc.remote()
    new = unsent(sent(record).get(name, [])) if name else {}
    if not new:
        return True
    cache = dvc.cache_folder()
    return all(in_cache(cache, md5, read=False)[0] == "ok" for md5 in new.values())


def files_of(outputs: Mapping[str, str]) -> dict[str, str]:
    """These outputs, and the files of those that are folders: hashes by path."""
    cache = dvc.cache_folder()
    within = {f"{path}/{name}": md5 for path, hash_ in outputs.items() for name, md5 in listing(cache, hash_).items()}
    return {**outputs, **within}


def check_cache(hashes: Mapping[str, str]) -> None:
    """See that what is to be sent is what its name says: DVC would send damaged bytes under the right name.

    Args:
        hashes: DVC's, by path.

    Raises:
        DataError: it is not; every damaged file is named.
    """
    cache = dvc.cache_folder()
    found = {path: in_cache(cache, md5, read=True) for path, md5 in hashes.items()}
    if bad := [f"{path}: {note}" for path, (outcome, note) in found.items() if outcome == "differs"]:
        raise DataError("; ".join(bad))


def commit(message: str, links: Sequence[str]) -> str:
    """Commit `dvc.lock` and what stages write beside DVC to the current branch; the commit.

    Args:
        links: folders of the checkout, which are no part of it.
    """
    git("add", "--all", "--", ".")
    if links:  # where an older commit's .gitignore misses one
        git("rm", "--cached", "--quiet", "--ignore-unmatch", "--", *links)
    git("commit", "--quiet", "--allow-empty", "--message", message)
    return git("rev-parse", "HEAD")


def publish(branch: str, log: Callable[[str], None]) -> None:
    """Push the branch to the git remote that `git config m3diff.runs` names; without one it stays here."""
    try:
        name = git("config", "--get", "m3diff.runs")
    except GitError:
        return
    try:
        git("push", "--quiet", name, f"refs/heads/{branch}:refs/heads/{branch}")
    except GitError as error:
        log(f"warning: {branch} was not pushed to {name}: {error}; it is sent with the next run")

"""What a run made, kept: data and checkpoint in the DVC remote, `dvc.lock` and scores on the branch of the run."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from components.files import write_atomic
from components.section import ParamsError
from flows import dvc
from flows.git import GitError, git

LOCK = Path("dvc.lock")
NO_REMOTE = "no DVC remote is set, so data and checkpoint stay on this machine (`dvc remote add -d NAME URL`)"


class NotPushedError(ConnectionError):
    """The DVC remote does not have all of it."""


def remote() -> str | None:
    """The name of the default DVC remote."""
    try:
        return dvc.ask("config", "core.remote").strip() or None
    except dvc.DvcError:  # of a key that is not set
        return None


def check_remote() -> None:
    """See that the remote answers, by asking it for one small object.

    Raises:
        ParamsError: it does not.
    """
    if remote() is None:
        return
    smallest = min(outputs(), key=lambda out: out["size"], default=None)
    if smallest is None:
        return
    try:
        dvc.ask("status", "--cloud", "--json", smallest["path"])
    except dvc.DvcError as error:
        raise ParamsError(f"the DVC remote {remote()!r} does not answer, so nothing could be kept: {error}") from error


def outputs() -> Iterator[dict[str, Any]]:
    """What DVC stores of the stages' outputs, as `dvc.lock` has it."""
    if not LOCK.is_file():
        return
    for entries in yaml.safe_load(LOCK.read_text(encoding="utf-8")).get("stages", {}).values():
        yield from (out for out in entries.get("outs", []) if Path(out["path"]).exists())


def push(record: Path, log: Callable[[str], None]) -> tuple[str, str]:
    """Push, then ask the remote whether it has all; (Ran or Skipped, a sentence).

    Args:
        record: file that says what each remote is known to have.

    Raises:
        NotPushedError: something is missing there; what arrived is not sent again.
    """
    name = remote()
    if name is None:
        return "Skipped", NO_REMOTE
    now, known = tracked(), json.loads(record.read_text()) if record.is_file() else {}
    if known.get(name) == now:
        return "Skipped", f"remote {name!r} has all of it already"
    try:
        said = dvc.ask("push").strip()
        missing = json.loads(dvc.ask("status", "--cloud", "--json"))
    except dvc.DvcError as error:
        raise NotPushedError(f"remote {name!r}: {error}") from error
    if missing:
        raise NotPushedError(f"remote {name!r} is missing {', '.join(list(missing)[:5])} after `dvc push` ({said})")
    write_atomic(record, json.dumps(known | {name: now}))
    log(f"remote {name!r}: {said or 'nothing to send'}")
    return "Ran", f"remote {name!r} has all of it"


def tracked() -> str:
    """sha256 of what names the data: `dvc.lock` and every `.dvc` file."""
    files = [LOCK, *map(Path, git("ls-files", "*.dvc").splitlines())]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def commit(message: str, links: Sequence[str]) -> str:
    """Commit `dvc.lock` and what stages write beside DVC to the current branch; the commit.

    Args:
        links: folders of the checkout, which are no part of it.
    """
    git("add", "--all", "--", ".")
    git("rm", "--cached", "--quiet", "--ignore-unmatch", "--", *links)  # where an older commit's .gitignore misses one
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

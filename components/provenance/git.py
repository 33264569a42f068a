"""git as m3diff calls it: under a name of its own, without hooks, signing or questions, with errors in git's words."""

import getpass
import os
import shlex
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from m3diff.records.errors import DataError, redacted
from m3diff.records.files import lock_exclusively

CONFIG = ("commit.gpgsign=false", "core.hooksPath=/dev/null", "core.quotePath=off")
IDENTITY = {f"GIT_{role}_NAME": "m3diff" for role in ("AUTHOR", "COMMITTER")}
IDENTITY |= {f"GIT_{role}_EMAIL": "m3diff@localhost" for role in ("AUTHOR", "COMMITTER")}
# git's files byte for byte, whatever the person's settings say of line ends: another byte is another hash
AS_COMMITTED = ("-c", "core.autocrlf=false")

RUNS = "runs/"  # branches of flow runs, each with its dvc.lock


class GitError(DataError):
    """git refused; the text is its own."""


def run(
    *arguments: str, cwd: Path | None = None, stdin: bytes = b"", seconds: float | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a git command, whatever its exit code; 124 after `seconds`. A command with a time limit waits for a remote,
    and inherits no lock of `alone`."""
    config = [word for setting in CONFIG for word in ("-c", setting)]
    command = ["git", *(("-C", str(cwd)) if cwd else ()), *config, *arguments]
    environment = {**os.environ, **IDENTITY, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        return subprocess.run(
            command, input=stdin, capture_output=True, env=environment, timeout=seconds, close_fds=seconds is not None
        )
    except FileNotFoundError as error:
        raise GitError("git: not installed") from error
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, b"", f"no answer in {seconds:g} s".encode())


def words(done: subprocess.CompletedProcess[bytes]) -> str:
    """A command's error message on one line, without secrets."""
    said = done.stderr or done.stdout
    return redacted(" ".join(said.decode(errors="replace").split())) or f"exit code {done.returncode}"


def git(*arguments: str, cwd: Path | None = None, stdin: bytes = b"") -> str:
    """Output of a git command, without the last line's end.

    Raises:
        GitError: it ended with another code than 0, as where there is no repository.
    """
    done = run(*arguments, cwd=cwd, stdin=stdin)
    if b"not a git repository" in done.stderr:
        place = (cwd or Path()).resolve()
        raise GitError(f"{place}: no git repository; run this in a clone of the project, or make one: git init")
    if done.returncode:
        raise GitError(redacted(f"git {' '.join(arguments)}: {words(done)}"))
    return os.fsdecode(done.stdout).rstrip("\n")


def has_branch(name: str) -> bool:
    return bool(git("for-each-ref", "--format=%(refname)", f"refs/heads/{name}"))


def commit_at(name: str, cwd: Path | None = None) -> str | None:
    """The full hash of a commit, branch or tag of this clone; None where there is none."""
    done = run("rev-parse", "--quiet", "--verify", "--end-of-options", f"{name}^{{commit}}", cwd=cwd)
    return done.stdout.decode().strip() or None


def find_commit(name: str) -> str:
    """The full hash of a commit or branch; where it is not here, the remotes are asked for their branches runs/*.

    Raises:
        DataError: neither this clone nor a remote has it.
    """
    remotes = git("remote").split()
    said = []
    for remote in ["", *remotes]:
        if remote:
            branches = f"+refs/heads/{RUNS}*:refs/remotes/{remote}/{RUNS}*"
            done = run("fetch", "--quiet", remote, branches, cwd=main_tree())
            said += [f"{remote}: {words(done)}"] if done.returncode else []
        for spelled in (name, *(f"{known}/{name}" for known in remotes)):
            if commit := commit_at(spelled):
                return commit
    known = "; ".join(said or remotes) or "none"
    raise DataError(f"commit {name}: not in this clone, nor in its remotes ({known}); fetch the branch that holds it")


def read(commit: str, path: Path) -> bytes | None:
    """Content of a file of the commit; None where it has none."""
    done = run("cat-file", "blob", f"{commit}:./{path.as_posix()}")
    return None if done.returncode else done.stdout


def common_dir(cwd: Path | None = None) -> Path:
    """The folder `.git` that all worktrees of a repository share."""
    return Path(git("rev-parse", "--path-format=absolute", "--git-common-dir", cwd=cwd))


def main_tree(cwd: Path | None = None) -> Path:
    """The first working tree of a repository. A remote's relative path is meant from there; git itself takes it from
    whichever tree it runs in."""
    common = common_dir(cwd)
    return common.parent if common.name == ".git" else cwd or Path()


def require_own_repository() -> None:
    """Check that git and DVC can make working trees of this project.

    Raises:
        DataError: it is a folder or a submodule of a larger repository, one of sha256, or has a branch `runs`.
    """
    here, inside = Path.cwd(), git("rev-parse", "--show-prefix").rstrip("/")
    faults = {
        f"is the folder {inside} of a larger repository, and a run needs one of its own; at its top: `git subtree "
        f"split --prefix={shlex.quote(inside)} --branch=alone && git clone --branch=alone . FOLDER`": inside,
        f"is a submodule, whose working trees DVC cannot read; `git clone {shlex.quote(str(here))} FOLDER` makes a "
        "repository of its own": git("rev-parse", "--show-superproject-working-tree"),
        "DVC reads no repository of sha256; make one with `git init --object-format=sha1`": (
            git("rev-parse", "--show-object-format") != "sha1"
        ),
        "the branch `runs` is in the way of branches runs/*; `git branch -m runs OTHER` renames it": commit_at(
            "refs/heads/runs"
        ),
    }
    for fault, found in faults.items():
        if found:
            raise DataError(f"{here}: {fault}")


def who() -> str:
    """user@host; importing m3diff gives a user without a name one."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


@contextmanager
def alone(what: str, cwd: Path | None = None) -> Iterator[None]:
    """Let in one process of this machine at a time, from any worktree of the repository; the others wait, and say so.

    Raises:
        GitError: no git repository.
    """
    folder = common_dir(cwd) / "m3diff"
    folder.mkdir(exist_ok=True)
    with (folder / f"{what}.lock").open("a") as lock:
        os.set_inheritable(lock.fileno(), True)  # a git that outlives this process holds the lock until it ends
        try:
            lock_exclusively(lock, wait=False)
        except BlockingIOError:
            print(f"{what}: waiting for another one on this machine to end", flush=True)
            lock_exclusively(lock)
        yield

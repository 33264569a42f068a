"""Run git commands and report git's error messages.

Commits have m3diff as the author and are not signed. Git runs no hooks and never prompts for a password.
"""

import getpass
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from m3diff.records.errors import DataError, Fault, redact, shell_word
from m3diff.records.files import lock_exclusively

CONFIG = ("commit.gpgsign=false", "core.hooksPath=/dev/null", "core.quotePath=off")
IDENTITY = {f"GIT_{role}_NAME": "m3diff" for role in ("AUTHOR", "COMMITTER")}
IDENTITY |= {f"GIT_{role}_EMAIL": "m3diff@localhost" for role in ("AUTHOR", "COMMITTER")}
# Check out files byte for byte, because converting line endings, as a user may have configured, changes their hashes
AS_COMMITTED = ("-c", "core.autocrlf=false")

RUNS = "runs/"  # prefix of the branches that flow runs create. Each branch contains the dvc.lock of its run


class GitError(DataError):
    """A git command failed. The field `cause` contains git's error message."""


def run_git(
    *arguments: str, cwd: Path | None = None, stdin: bytes = b"", seconds: float | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a git command and return its result, whatever its exit code.

    Args:
        arguments: the git command and its arguments.
        cwd: the folder to run it in, by default the current one.
        stdin: the standard input.
        seconds: the time limit in seconds, after which the exit code is 124. There is no limit by default. Commands
            with a limit may wait for a remote, so they do not inherit the lock file of `process_lock`.

    Raises:
        GitError: git is not installed.
    """
    command = ["git"]
    if cwd:
        command += ["-C", str(cwd)]
    for setting in CONFIG:
        command += ["-c", setting]
    command += arguments
    environment = {**os.environ, **IDENTITY, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        return subprocess.run(
            command, input=stdin, capture_output=True, env=environment, timeout=seconds, close_fds=seconds is not None
        )
    except FileNotFoundError as error:
        raise GitError("git.not_installed") from error
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, b"", f"no answer in {seconds:g} s".encode())


def error_text(result: subprocess.CompletedProcess[bytes]) -> str:
    """Return a command's error message on one line with secrets removed, or its exit code if it printed nothing."""
    output = result.stderr or result.stdout
    on_one_line = " ".join(output.decode(errors="replace").split())
    return redact(on_one_line) or f"exit code {result.returncode}"


def git(*arguments: str, cwd: Path | None = None, stdin: bytes = b"") -> str:
    """Run a git command and return its output without trailing line breaks.

    Raises:
        GitError: the exit code is not 0, for example because the folder is not in a git repository.
    """
    result = run_git(*arguments, cwd=cwd, stdin=stdin)
    if b"not a git repository" in result.stderr:
        folder = (cwd or Path()).resolve()
        raise GitError("git.no_repository", path=folder)
    if result.returncode:
        raise GitError("git.command_failed", command=redact(f"git {' '.join(arguments)}"), cause=error_text(result))
    return os.fsdecode(result.stdout).rstrip("\n")


def has_branch(name: str) -> bool:
    """Return whether the repository has a local branch with this name."""
    ref = f"refs/heads/{name}"
    return ref in git("for-each-ref", "--format=%(refname)", ref).split()  # git also lists the branches below this name


def commit_at(name: str, cwd: Path | None = None) -> str | None:
    """Return the full commit hash of a commit, branch or tag, or None if this clone does not have it."""
    result = run_git("rev-parse", "--quiet", "--verify", "--end-of-options", f"{name}^{{commit}}", cwd=cwd)
    return result.stdout.decode().strip() or None


def find_commit(name: str) -> str:
    """Return the full commit hash of a commit or branch.

    If the commit is not in this clone, the branches `runs/*` are fetched from the remotes.

    Raises:
        DataError: the commit is neither in this clone nor on those branches.
    """
    remotes = git("remote").split()
    names = [name, *(f"{remote}/{name}" for remote in remotes)]
    commit = _first_commit(names)
    if commit is not None:
        return commit
    failures = []
    for remote in remotes:
        branches = f"+refs/heads/{RUNS}*:refs/remotes/{remote}/{RUNS}*"
        result = run_git("fetch", "--quiet", remote, branches, cwd=main_tree())
        if result.returncode:
            failures.append(f"{remote}: {error_text(result)}")
        commit = _first_commit(names)
        if commit is not None:
            return commit
    if not remotes:
        raise DataError("git.commit_not_in_clone", value=name)
    raise DataError("git.commit_not_in_remotes", value=name, remotes=failures or remotes)


def _first_commit(names: list[str]) -> str | None:
    commits = (commit_at(name) for name in names)
    return next((commit for commit in commits if commit is not None), None)


def read_from_commit(commit: str, path: Path) -> bytes | None:
    """Return the content of a file in a commit, or None if the commit does not contain the file."""
    result = run_git("cat-file", "blob", f"{commit}:./{path.as_posix()}")
    return None if result.returncode else result.stdout


def common_dir(cwd: Path | None = None) -> Path:
    """Return the `.git` folder that all working trees of a repository share."""
    return Path(git("rev-parse", "--path-format=absolute", "--git-common-dir", cwd=cwd))


def main_tree(cwd: Path | None = None) -> Path:
    """Return the folder of a repository's main working tree.

    Run `git fetch` and `git push` there. If the path of a remote is relative, git resolves it from the working tree in
    which it runs, but the path is meant to start from the main working tree.
    """
    common = common_dir(cwd)
    return common.parent if common.name == ".git" else cwd or Path()


def require_own_repository() -> None:
    """Check that git and DVC can create working trees of this project.

    Raises:
        DataError: the project is a subfolder or submodule of a larger repository, or the repository uses SHA-256 or has
            a branch named `runs`.
    """
    fault = _repository_fault()
    if fault is not None:
        raise DataError(fault)


def _repository_fault() -> Fault | None:
    folder = git("rev-parse", "--show-prefix").rstrip("/")
    if folder:
        split_command = f"git subtree split --prefix={shell_word(folder)} --branch=alone"
        command = f"{split_command} && git clone --branch=alone . FOLDER"
        return Fault("git.larger_repository", path=Path.cwd(), folder=folder, command=command)
    if git("rev-parse", "--show-superproject-working-tree"):
        return Fault("git.submodule", path=Path.cwd(), command=f"git clone {shell_word(Path.cwd())} FOLDER")
    if git("rev-parse", "--show-object-format") != "sha1":
        return Fault("git.sha256_repository", path=Path.cwd())
    if commit_at("refs/heads/runs"):
        return Fault("git.branch_in_the_way", path=Path.cwd())
    return None


def user_and_host() -> str:
    """Return `user@host` for this process. If the system has no name for the user, `runtime.prepare` has set a name."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


@contextmanager
def process_lock(name: str, cwd: Path | None = None) -> Iterator[None]:
    """Hold a lock within the context. Only one process on this machine can hold it at a time.

    All working trees of the repository share the lock. If this process has to wait for it, a message is printed.

    Args:
        name: the name of the lock, which is also used in the message.
        cwd: a folder in the repository, by default the current one.

    Raises:
        GitError: the folder is not in a git repository.
    """
    folder = common_dir(cwd) / "m3diff"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.lock").open("a") as lock:
        # Child processes inherit the lock, so a git process that outlives this process still holds it
        os.set_inheritable(lock.fileno(), True)
        try:
            lock_exclusively(lock, wait=False)
        except BlockingIOError:
            print(f"{name}: waiting until another {name} on this machine has ended", flush=True)
            lock_exclusively(lock)
        yield

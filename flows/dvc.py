"""DVC from outside: the stages in order, what is out of date, one stage reproduced in a process group of its own, and
the outputs of a run kept and taken up again: data and checkpoint in the remote, `dvc.lock` and scores on its branch.

DVC decides whether a stage runs; this module starts it, passes on what it prints, and leaves no process behind.

Flow runs never commit to main, so main's `dvc.lock` stays behind them, and a later run takes up that of the branch
`runs/latest`, the newest whole run. Its entries record what each stage read and wrote, by hash; DVC compares them with
what is there, so that a wrong one makes a stage run and never keeps it from running.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import networkx  # with DVC
from dvc.exceptions import DvcException
from dvc.repo import Repo
from dvc.stage import PipelineStage
from dvc_data.hashfile.hash_info import HashInfo
from dvc_data.hashfile.transfer import transfer

from m3diff.provenance.dvc import LOCK, Lock, listing, object_file, read_lock, whole
from m3diff.provenance.git import git, has_branch
from m3diff.records.errors import DataError, redacted
from m3diff.records.files import write_atomic
from m3diff.settings.section import ParamsError

Outcome = Literal["Ran", "Restored", "Skipped"]

# DVC releases its lock while a stage runs and acquires it again afterwards. Without --wait-for-lock a failed attempt
# discards the finished stage.
DVC = [sys.executable, "-m", "dvc", "--wait-for-lock"]
LATEST = "runs/latest"  # the branch of the newest run that went through every stage and had no parameters of its own
NO_REMOTE = "no DVC remote is set, so data and checkpoint stay on this machine (`dvc remote add -d NAME URL`)"

CODE = ("components", "code")  # the folders of code and of its digests: a change in them alone is no news of data
GRACE_S = 20  # from the signal that asks to the one that ends
PROGRESS_EVERY_S = 5.0

ANSI, PROGRESS_BAR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]"), re.compile(r"\d+%\|")
EXIT_CODE = re.compile(r"exited with (-?\d+)")
WORDS: dict[str, Outcome] = {
    "Running stage '{}':": "Ran",
    "Stage '{}' is cached - skipping run": "Restored",
    "Stage '{}' didn't change, skipping": "Skipped",
}


class DvcError(RuntimeError):
    """DVC or the stage under it failed. `code` is the stage's exit code (`components/__main__.py` lists them)."""

    def __init__(self, what: str, code: int, said: Iterable[str]) -> None:
        super().__init__(redacted(f"{what} exited with {code}\n" + "\n".join(said)))
        self.code = code


@contextmanager
def repository(outside: str = "") -> Iterator[Repo]:
    """DVC in this process: a process of its own takes a second to start, and a flow asks a dozen times.

    Args:
        outside: the command that a remote or another source is asked by. Each of their libraries has exceptions of its
            own, and all of them are a DvcError then.

    Raises:
        DvcError: DVC refused, with what the error and those behind it say.
    """
    try:
        with Repo(_wait_for_lock=True) as opened:
            yield opened
    except Exception as error:
        if not outside and not isinstance(error, DvcException):
            raise
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)
        raise DvcError(outside or "dvc", 255, [*map(str, causes), *broken_lock()]) from error


def of_pipeline(repo: Repo) -> list[PipelineStage]:
    """The stages of `dvc.yaml` in its order, one for each dataset where it has a loop (`ingest@minichange`).

    Frozen ones are left out: DVC never runs them.
    """
    return [stage for stage in repo.index.stages if isinstance(stage, PipelineStage) and not stage.frozen]


def stages() -> dict[str, set[str]]:
    """The stages that DVC may run, in the order of `dvc.yaml`, each with all those that it follows from."""
    with repository() as repo:
        ours, graph = of_pipeline(repo), repo.index.graph
        names = {stage: stage.addressing for stage in ours}
        return {
            name: {names[before] for before in networkx.descendants(graph, stage) if before in names}
            for stage, name in names.items()
        }


def status() -> dict[str, Any]:
    """Return DVC's entries for each stage that is out of date. Frozen stages are not looked at.

    Data that `.dvc` files track need not be there: the hash in that file is compared.
    """
    found: dict[str, Any] = {}
    with repository() as repo, repo.lock:
        ours = of_pipeline(repo)
        tracked = {
            out.fs_path: out.hash_info for stage in repo.index.stages if stage.is_data_source for out in stage.outs
        }
        for stage in ours:
            for entry in stage.status(check_updates=True).get(stage.addressing, []):
                said = entry.get("changed deps", {}) if isinstance(entry, dict) else {}
                for dep in [dep for dep in stage.deps if said.get(str(dep)) == "deleted" and dep.fs_path in tracked]:
                    said[str(dep)] = "modified"
                    if dep.hash_info == tracked[dep.fs_path]:
                        del said[str(dep)]
                if not isinstance(entry, dict) or any(entry.values()):
                    found.setdefault(stage.addressing, []).append(entry)
    return found


def news(status: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Any]]:
    """Changes of data and parameters, by DVC's status: stage, kind, path, and how. Changed code alone is no news,
    nor is the graph."""
    for stage, said in status.items():
        for entry in [entry for entry in said if isinstance(entry, dict)]:
            for kind, items in entry.items():
                yield from ((stage, kind, path, how) for path, how in items.items() if Path(path).parts[0] not in CODE)


def locked(commit: str = "") -> dict[str, Any] | None:
    """The stages by name of the `dvc.lock` that is here, or of a commit; None where it is not there, and empty or cut
    short: DVC writes it in place, and a kill leaves a part."""
    with suppress(DataError):
        return (read_lock(commit) if commit else Lock()).stages
    return None


def link_data() -> None:
    """Bring what `dvc.lock` and the `.dvc` files name into place, as far as the cache has it."""
    with repository() as repo:
        repo.checkout(allow_missing=True)


def cache_folder() -> Path:
    with repository() as repo:
        return Path(repo.cache.local_cache_dir)


def kept() -> dict[str, dict[str, str]]:
    """Return the outputs of this commit that DVC keeps and the cache holds: hashes by path, by the remote that they
    belong in. Outputs in git, outputs marked `push: false` and outputs without a remote are left out."""
    found: dict[str, dict[str, str]] = {}
    with repository() as repo:
        cache, default = Path(repo.cache.local_cache_dir), repo.config["core"].get("remote")
        for out in [out for out in repo.index.outs if out.use_cache and out.can_push and out.hash_info]:
            remote, hash_ = out.remote or default, out.hash_info.value
            if remote and out.hash_info.name == "md5" and object_file(cache, hash_).is_file():
                found.setdefault(remote, {})[os.path.relpath(out.fs_path, repo.root_dir)] = hash_
    return found


def not_in_remote(files: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the files, hashes by path, whose content a remote does not have.

    Raises:
        DvcError: the remote does not answer.
    """
    with repository(outside=f"dvc status --cloud --remote {name}") as repo:
        there = set(repo.cloud.get_remote_odb(name, "status").oids_exist(sorted(set(files.values()))))
    return {path: hash_ for path, hash_ in files.items() if hash_ not in there}


def send(hashes: Iterable[str], name: str) -> None:
    """Send files and folders' lists from the cache to a remote, whatever DVC remembers of what is there: the command
    `dvc push` sends nothing of a folder whose list the remote has, and no file that it once saw in it.

    Raises:
        DvcError: the remote refused.
    """
    what = f"dvc push --remote {name}"
    with repository(outside=what) as repo:
        remote = repo.cloud.get_remote_odb(name, "push")
        failed = transfer(repo.cache.local, remote, {HashInfo("md5", hash_) for hash_ in hashes}).failed
    if failed:
        raise DvcError(what, 255, [f"{len(failed)} files were refused"])


def repro(stage: str, log: Callable[[str], None]) -> Outcome:
    """Bring one stage up to date and say what DVC did.

    Raises:
        DataError: the cache holds damaged bytes of what the stage reads, which DVC does not see.
        DvcError: the stage failed; its processes are gone, and `dvc.lock` is as before.
    """
    Path(".dvc/tmp/rwlock").unlink(missing_ok=True)  # no other DVC works here, and a killed one may have left a part
    if damage := damaged(stage):
        raise DataError(f"stage {stage} was not begun: {'; '.join(damage)}")
    said: deque[str] = deque(maxlen=12)
    outcome: Outcome | None = None
    done, before = False, LOCK.read_bytes() if LOCK.is_file() else None
    process = subprocess.Popen(
        [*DVC, "repro", "--single-item", stage],
        env=environment(),
        errors="replace",  # text, with universal newlines: a progress bar's \r ends a line too
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        assert process.stdout is not None
        for line in readable(process.stdout):
            log(line)
            said.append(line)
            outcome = next((word for words, word in WORDS.items() if words.format(stage) in line), outcome)
        if process.wait():
            codes = [process.returncode, *(int(found[1]) for line in said if (found := EXIT_CODE.search(line)))]
            raise DvcError(f"stage {stage}", codes[-1], [*said, *broken_lock()])  # DVC has one for any failure
        done = True
    finally:
        try:
            end_group(process)
        finally:
            if not done and LOCK.is_file() and LOCK.read_bytes() != before:  # killed as it wrote: perhaps a part
                write_atomic(LOCK, before) if before is not None else LOCK.unlink()
    assert outcome is not None, f"none of {list(WORDS)} in what DVC said: {list(said)}"
    return outcome


def damaged(name: str) -> list[str]:
    """Describe each input of a stage whose content in the cache is damaged. DVC's links lead there,
    and DVC does not check it."""
    with repository() as repo:
        read = [dep.fs_path for stage in of_pipeline(repo) if stage.addressing == name for dep in stage.deps]
        outs = {
            os.path.relpath(out.fs_path): out.hash_info.value
            for out in repo.index.outs
            if out.use_cache and out.hash_info
            if any(Path(out.fs_path).is_relative_to(dep) or Path(dep).is_relative_to(out.fs_path) for dep in read)
        }
    return faults_in_cache(files_of(outs))


def files_of(outputs: Mapping[str, str]) -> dict[str, str]:
    """These outputs, and the files of those that are folders: hashes by path."""
    cache = cache_folder()
    within = {f"{path}/{name}": own for path, hash_ in outputs.items() for name, own in listing(cache, hash_).items()}
    return {**outputs, **within}


def faults_in_cache(hashes: Mapping[str, str]) -> list[str]:
    """Describe each of these files and folders' lists, hashes by path, that is damaged in the cache."""
    cache = cache_folder()
    files = {path: object_file(cache, hash_) for path, hash_ in hashes.items()}
    return [f"{path}: {note}" for path, file in files.items() if file.is_file() and (note := whole(file, hashes[path]))]


def broken_lock() -> list[str]:
    """Explain how to restore a `dvc.lock` that is not one, since DVC says too little; nothing where it is whole."""
    if not LOCK.is_file() or locked() is not None:
        return []
    return [
        f"{LOCK} is not DVC's lock file (empty, cut short, or with the marks of a merge conflict); restore it: "
        "`git log --oneline -- dvc.lock` lists its commits, `git checkout COMMIT -- dvc.lock` takes it from one"
    ]


def environment() -> dict[str, str]:
    """This environment's tools first on the path, and a shell that passes signals on."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return os.environ | {"PATH": tools, "SHELL": "/bin/bash", "PYTHONUNBUFFERED": "1"}


def die_with_parent() -> None:
    """Ask Linux to end DVC when the flow's process dies; the stage asks the same of DVC (`components/__main__.py`)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def readable(lines: Iterable[str]) -> Iterator[str]:
    """Lines without colours and blank ones; of a progress bar one state every few seconds."""
    shown = -PROGRESS_EVERY_S
    for line in lines:
        text = ANSI.sub("", line).rstrip()
        if PROGRESS_BAR.search(text):
            if time.monotonic() - shown < PROGRESS_EVERY_S:
                continue
            shown = time.monotonic()
        if text:
            yield redacted(text)


def end_group(process: subprocess.Popen) -> None:
    """End what is left of the group: ask, wait, then kill. After a success nothing is left."""
    deadline = time.monotonic() + GRACE_S
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# What a run keeps, and a later one takes up


def check_remote() -> None:
    """Ask each remote for the outputs that are no folders: they are few.

    Raises:
        ParamsError: one does not answer.
    """
    for name, stored in kept().items():
        try:
            if files := {path: md5 for path, md5 in stored.items() if not md5.endswith(".dir")}:
                not_in_remote(files, name)
        except DvcError as error:
            raise ParamsError(f"the DVC remote {name!r} does not answer, so nothing could be kept: {error}") from error


def push() -> tuple[str, str]:
    """Send what the remotes miss, then look for each of these files there; (Ran or Skipped, a sentence).

    Every remote is asked for every file, in every run: what it was seen to have may be gone, and a push that was cut
    off leaves a folder's list without some of its files.

    Raises:
        DataError: a file in the cache is damaged; nothing was sent.
        ConnectionError: something is missing there; what arrived is not sent again.
    """
    remotes, sent = kept(), list[str]()
    for name, stored in sorted(remotes.items()):
        try:
            missing = not_in_remote(files_of(stored), name)
            if bad := faults_in_cache(missing):  # DVC would send damaged bytes under the right name
                raise DataError("; ".join(bad))
            if missing:
                send(missing.values(), name)
                sent.append(name)
            left = not_in_remote(missing, name)
        except DvcError as error:
            raise ConnectionError(f"remote {name!r}: {error}") from error
        if left:
            raise ConnectionError(f"remote {name!r} is missing {len(left)} file(s) after the push: {sorted(left)[:5]}")
    if not remotes:
        return "Skipped", NO_REMOTE
    return ("Ran", f"sent to {', '.join(sent)}") if sent else ("Skipped", f"{', '.join(remotes)} had all of it")


def commit(message: str, links: Sequence[str]) -> None:
    """Commit `dvc.lock`, the one before where it is not whole, and what stages write beside DVC to the current branch.

    Args:
        links: folders of the checkout, which are no part of it.
    """
    ours = locked()
    if ours is None or set(locked("HEAD") or {}) - set(ours):  # DVC itself drops no stage
        LOCK.unlink(missing_ok=True)
        if git("ls-tree", "HEAD", "--", str(LOCK)):
            git("checkout", "--quiet", "HEAD", "--", str(LOCK))
    git("add", "--all", "--", ".")
    if links:  # where an older commit's .gitignore misses one
        git("rm", "--cached", "--quiet", "--ignore-unmatch", "--", *links)
    git("commit", "--quiet", "--allow-empty", "--message", message)


def take_up() -> dict[str, Any]:
    """Link the data in and take the `dvc.lock` of the latest run, with the metrics beside it, where it leaves fewer
    stages to do than the branch's own; what is left to do then, DVC's status by stage."""
    link_data()
    own = status()
    latest = (locked(LATEST) if own and has_branch(LATEST) else None) or {}
    if not latest or latest == locked():
        return own
    ours = stages()  # without frozen ones, whose outputs are the commit's
    written = [out["path"] for name in ours for out in latest.get(name, {}).get("outs", [])]
    files = git("ls-files", f"--with-tree={LATEST}", "--", *written).splitlines()  # here or there
    git("restore", f"--source={LATEST}", "--staged", "--worktree", "--", str(LOCK), *files)
    link_data()
    theirs = status()
    left = [sum(not {name, *before}.isdisjoint(found) for name, before in ours.items()) for found in (theirs, own)]
    if left[0] < left[1]:
        return theirs
    git("reset", "--hard", "--quiet")
    link_data()
    return own

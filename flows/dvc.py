"""Use DVC from the flows: list stages and their status, run one stage at a time, and reuse outputs of earlier runs.

DVC decides whether a stage has to run. This module starts DVC, forwards its output, and leaves no process behind. After
a run, the data and checkpoint are in the remote, and `dvc.lock` and the scores are on the branch of the run.

Flow runs never commit to main, so the `dvc.lock` on main becomes outdated. A later run therefore reuses the `dvc.lock`
of the newest complete run, which is on the branch `runs/latest`. DVC compares its hashes with the files, so a wrong
entry can only cause a stage to run again. It cannot cause a stage to be skipped.
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
from typing import Any, Literal, NamedTuple

import networkx  # a dependency of DVC
from dvc.exceptions import DvcException
from dvc.repo import Repo
from dvc.stage import PipelineStage
from dvc_data.hashfile.hash_info import HashInfo
from dvc_data.hashfile.transfer import transfer

from m3diff.provenance.dvc import DVC_LOCK, Lock, fault_of_object, object_file, read_file_list, read_lock
from m3diff.provenance.git import git, has_branch
from m3diff.records.errors import CodedError, DataError, Fault, format_count, redact
from m3diff.records.files import write_atomic
from m3diff.settings.section import ParamsError

Outcome = Literal["Ran", "Restored", "Skipped"]

# DVC releases its lock while a stage runs and acquires it again afterwards. Without --wait-for-lock, the result of the
# stage would be lost if another process holds the lock at that moment
DVC_COMMAND = [sys.executable, "-m", "dvc", "--wait-for-lock"]
LATEST = "runs/latest"  # branch of the newest run without overrides that completed every stage
NO_REMOTE_NOTE = "no DVC remote is set, so data and checkpoint stay on this machine (`dvc remote add -d NAME URL`)"
NO_DEFAULT_REMOTE_NOTE = (
    "no DVC remote is the default (remotes: {remotes}), so outputs without a remote of their own stay on this machine "
    "(`dvc remote default NAME`)"
)

CODE_FOLDERS = ("components", "code")  # code and its digests
GRACE_S = 20  # time between SIGTERM and SIGKILL, in seconds
PROGRESS_EVERY_S = 5.0

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PROGRESS_BAR = re.compile(r"\d+%\|")
EXIT_CODE = re.compile(r"exited with (-?\d+)")

# Messages that DVC prints about a stage, and the outcome that each message means
OUTCOME_MESSAGES: dict[str, Outcome] = {
    "Running stage '{}':": "Ran",
    "Stage '{}' is cached - skipping run": "Restored",
    "Stage '{}' didn't change, skipping": "Skipped",
}


class DvcError(CodedError, RuntimeError):
    """A DVC command or a stage failed. The fields are `command`, `exit_code` and `output`, with secrets removed."""

    @classmethod
    def of_command(cls, command: str, exit_code: int, output: Iterable[str]) -> "DvcError":
        """Return the error for a failed command.

        Args:
            command: the command, or the stage.
            exit_code: the exit code of the stage (listed in `components/command_line/exit_codes.py`), or of DVC.
            output: the last lines of output.
        """
        lines = redact("\n".join(output))
        return cls("flows.command_failed", command=redact(command), exit_code=exit_code, output=lines)


class RemoteError(CodedError, ConnectionError):
    """A DVC remote rejected files, or still lacks files after a push. Trying again later may help."""


@contextmanager
def repository(command: str = "") -> Iterator[Repo]:
    """Open the DVC repository in this process.

    Starting the command `dvc` instead would take a second each time, and a flow uses DVC a dozen times.

    Args:
        command: the equivalent command line, which is required if DVC accesses a remote or another source. Exceptions
            that the libraries for remotes raise are then turned into a DvcError with this command.

    Raises:
        DvcError: DVC failed. The output contains the messages of the exception and its causes.
    """
    try:
        with Repo(_wait_for_lock=True) as repo:
            yield repo
    except Exception as error:
        if not command and not isinstance(error, DvcException):
            raise
        messages: list[str] = []
        cause: BaseException | None = error
        while cause is not None:
            messages.append(str(cause))
            cause = cause.__cause__
        raise DvcError.of_command(command or "dvc", 255, messages + explain_broken_lock()) from error


def active_stages(repo: Repo) -> list[PipelineStage]:
    """Return the stages of `dvc.yaml` in order. A loop over datasets gives one stage per dataset.

    Frozen stages are left out, because DVC never runs them.
    """
    return [stage for stage in repo.index.stages if isinstance(stage, PipelineStage) and not stage.frozen]


def stages() -> dict[str, set[str]]:
    """Return the names of the stages that DVC may run, in order, and for each stage all stages that it depends on."""
    predecessors: dict[str, set[str]] = {}
    with repository() as repo:
        graph = repo.index.graph  # an edge leads from a stage to a stage whose output it reads
        names = {stage: stage.addressing for stage in active_stages(repo)}
        for stage, name in names.items():
            descendants = networkx.descendants(graph, stage)
            predecessors[name] = {names[predecessor] for predecessor in descendants if predecessor in names}
    return predecessors


def status() -> dict[str, Any]:
    """Return DVC's status entries of the stages that are out of date, by stage name. Frozen stages are left out.

    Data tracked by a `.dvc` file do not have to be checked out, because the hash in the `.dvc` file is compared.
    """
    outdated: dict[str, Any] = {}
    with repository() as repo, repo.lock:
        tracked_hashes: dict[str, HashInfo] = {}
        for stage in repo.index.stages:
            if stage.is_data_source:
                tracked_hashes |= {out.fs_path: out.hash_info for out in stage.outs}
        for stage in active_stages(repo):
            for entry in stage.status(check_updates=True).get(stage.addressing, []):
                if isinstance(entry, dict):
                    compare_absent_data(stage, entry, tracked_hashes)
                if not isinstance(entry, dict) or any(entry.values()):
                    outdated.setdefault(stage.addressing, []).append(entry)
    return outdated


def compare_absent_data(stage: PipelineStage, entry: dict[str, Any], tracked_hashes: Mapping[str, HashInfo]) -> None:
    """Correct DVC's entry for data that are tracked but not checked out, which DVC reports as deleted.

    The state becomes `modified` if the hash in the `.dvc` file differs from the hash that the stage read. Otherwise the
    data are unchanged, and the state is removed.
    """
    changed_deps = entry.get("changed deps", {})
    for dep in stage.deps:
        if changed_deps.get(str(dep)) != "deleted" or dep.fs_path not in tracked_hashes:
            continue
        if dep.hash_info == tracked_hashes[dep.fs_path]:
            del changed_deps[str(dep)]
        else:
            changed_deps[str(dep)] = "modified"


class StageChange(NamedTuple):
    """A change in DVC's status.

    Attributes:
        kind: the kind of change, such as `changed deps`.
        path: the path of the file or folder; `params.yaml` for parameters.
        detail: what changed, such as `modified`, or the names of the parameters.
    """

    stage: str
    kind: str
    path: str
    detail: Any


def data_and_parameter_changes(status: Mapping[str, Any]) -> Iterator[StageChange]:
    """Yield the changes to data and parameters in DVC's status. Changes to code and commands are left out."""
    for stage, entries in status.items():
        for entry in entries:
            if not isinstance(entry, dict):  # a text such as "changed command"
                continue
            for kind, details in entry.items():
                for path, detail in details.items():
                    if Path(path).parts[0] not in CODE_FOLDERS:
                        yield StageChange(stage=stage, kind=kind, path=path, detail=detail)


def locked_stages(commit: str = "") -> dict[str, Any] | None:
    """Return the stages listed in `dvc.lock`, by name.

    Args:
        commit: the commit whose `dvc.lock` is read. By default, the file in the current directory is read.

    Returns:
        the stages, or None if the file does not exist, is empty or is truncated. DVC writes it in place, so a killed
        process may leave only part of it.
    """
    with suppress(DataError):
        return (read_lock(commit) if commit else Lock()).stages
    return None


def link_data() -> None:
    """Check out the data listed in `dvc.lock` and the `.dvc` files. Data that are not in the cache are skipped."""
    with repository() as repo:
        repo.checkout(allow_missing=True)


def cache_folder() -> Path:
    """Return the folder of DVC's cache."""
    with repository() as repo:
        return Path(repo.cache.local_cache_dir)


def outputs_by_remote() -> dict[str, dict[str, str]]:
    """Return the outputs that should be in each remote.

    Outputs that are missing from the cache, stored in git, marked `push: false` or without a remote are left out.

    Returns:
        for each remote by name, the hash of each output by path.
    """
    outputs: dict[str, dict[str, str]] = {}
    with repository() as repo:
        cache = Path(repo.cache.local_cache_dir)
        default_remote = repo.config["core"].get("remote")
        for out in repo.index.outs:
            if not (out.use_cache and out.can_push and out.hash_info):
                continue
            remote = out.remote or default_remote
            hash_ = out.hash_info.value
            if remote and out.hash_info.name == "md5" and object_file(cache, hash_).is_file():
                outputs.setdefault(remote, {})[os.path.relpath(out.fs_path, repo.root_dir)] = hash_
    return outputs


def find_missing_files(files: Mapping[str, str], remote: str) -> dict[str, str]:
    """Return the files that are missing from a remote.

    Args:
        files: the hash of each file by path.
        remote: the name of the remote.

    Returns:
        the hash of each missing file by path.

    Raises:
        DvcError: the remote does not respond.
    """
    with repository(command=f"dvc status --cloud --remote {remote}") as repo:
        remote_store = repo.cloud.get_remote_odb(remote, "status")
        stored_hashes = set(remote_store.oids_exist(sorted(set(files.values()))))
    return {path: hash_ for path, hash_ in files.items() if hash_ not in stored_hashes}


def send_objects(hashes: Iterable[str], remote: str) -> None:
    """Send files and the file lists of folders from the cache to a remote.

    `dvc push` is not used, because it may skip files that are missing from the remote. It keeps an index of the files
    that it has seen there, and it skips all files of a folder if the folder's list is in the remote.

    Raises:
        DvcError: the remote rejected files.
    """
    command = f"dvc push --remote {remote}"
    with repository(command=command) as repo:
        objects = {HashInfo("md5", hash_) for hash_ in hashes}
        remote_store = repo.cloud.get_remote_odb(remote, "push")
        failed_objects = transfer(repo.cache.local, remote_store, objects).failed
    if failed_objects:
        raise DvcError.of_command(command, 255, [f"the remote rejected {format_count(len(failed_objects), 'file')}"])


def repro(stage: str, log: Callable[[str], None]) -> Outcome:
    """Bring one stage up to date and return what DVC did.

    Args:
        stage: the name of the stage.
        log: called with each line of output.

    Raises:
        DataError: an input of the stage is damaged in the cache. DVC does not check this itself.
        DvcError: the stage failed. Its processes have ended, and `dvc.lock` is unchanged.
    """
    # No other DVC process uses this worktree, but a killed process may have left a truncated file
    Path(".dvc/tmp/rwlock").unlink(missing_ok=True)
    damage = find_damaged_inputs(stage)
    if damage:
        raise DataError("flows.damaged_inputs", stage=stage, faults=damage)
    last_lines: deque[str] = deque(maxlen=12)
    outcome: Outcome | None = None
    is_done = False
    lock_before = DVC_LOCK.read_bytes() if DVC_LOCK.is_file() else None
    process = subprocess.Popen(
        [*DVC_COMMAND, "repro", "--single-item", stage],
        env=environment(),
        errors="replace",  # also selects text mode with universal newlines, so the \r of a progress bar ends a line
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        assert process.stdout is not None
        for line in readable_lines(process.stdout):
            log(line)
            last_lines.append(line)
            for message, outcome_of_message in OUTCOME_MESSAGES.items():
                if message.format(stage) in line:
                    outcome = outcome_of_message
        if process.wait():
            # DVC exits with the same code for any failure, but prints the exit code of the stage
            stage_codes = [int(match[1]) for match in map(EXIT_CODE.search, last_lines) if match]
            exit_code = stage_codes[-1] if stage_codes else process.returncode
            raise DvcError.of_command(f"stage {stage}", exit_code, [*last_lines, *explain_broken_lock()])
        is_done = True
    finally:
        try:
            end_group(process)
        finally:
            # DVC may have been killed while it was writing the file
            if not is_done and DVC_LOCK.is_file() and DVC_LOCK.read_bytes() != lock_before:
                if lock_before is None:
                    DVC_LOCK.unlink()
                else:
                    write_atomic(DVC_LOCK, lock_before)
    assert outcome is not None, f"none of {list(OUTCOME_MESSAGES)} in what DVC said: {list(last_lines)}"
    return outcome


def find_damaged_inputs(stage_name: str) -> list[Fault]:
    """Return a fault for each input of a stage that is damaged in the cache. The stage reads it through DVC's links."""
    with repository() as repo:
        inputs: list[Path] = []
        for stage in active_stages(repo):
            if stage.addressing == stage_name:
                inputs += [Path(dep.fs_path) for dep in stage.deps]
        hashes: dict[str, str] = {}
        for out in repo.index.outs:
            path = Path(out.fs_path)
            is_input = any(path.is_relative_to(dep) or dep.is_relative_to(path) for dep in inputs)
            if is_input and out.use_cache and out.hash_info:
                hashes[os.path.relpath(out.fs_path)] = out.hash_info.value
    return find_cache_faults(add_files_of_folders(hashes))


def add_files_of_folders(outputs: Mapping[str, str]) -> dict[str, str]:
    """Return the outputs and all files in output folders, as hashes by path.

    Args:
        outputs: the hashes of the outputs, by path.
    """
    cache = cache_folder()
    files = dict(outputs)
    for path, hash_ in outputs.items():
        files |= {f"{path}/{name}": file_hash for name, file_hash in read_file_list(cache, hash_).items()}
    return files


def find_cache_faults(hashes: Mapping[str, str]) -> list[Fault]:
    """Return a fault for each file or folder list that is damaged in the cache.

    Args:
        hashes: the hashes of the files and folders, by path.
    """
    cache = cache_folder()
    faults: list[Fault] = []
    for path, hash_ in hashes.items():
        file = object_file(cache, hash_)
        damage = fault_of_object(file, hash_) if file.is_file() else None
        if damage is not None:
            faults.append(damage.at(path=path))
    return faults


def explain_broken_lock() -> list[str]:
    """Return a line that explains how to restore a broken `dvc.lock`, because DVC's error does not.

    Return an empty list if the file is valid or does not exist.
    """
    if not DVC_LOCK.is_file() or locked_stages() is not None:
        return []
    return [str(Fault("flows.broken_lock", path=DVC_LOCK))]


def environment() -> dict[str, str]:
    """Return the environment for DVC, with this Python's tools first in PATH and a shell that passes signals on."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return os.environ | {"PATH": tools, "SHELL": "/bin/bash", "PYTHONUNBUFFERED": "1"}


def die_with_parent() -> None:
    """Make Linux kill DVC when the flow's process dies.

    In the same way, `components/__main__.py` makes Linux kill a stage when DVC dies.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def readable_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines with colours and secrets removed. Blank lines and most updates of a progress bar are skipped."""
    last_progress_s = -PROGRESS_EVERY_S
    for line in lines:
        text = ANSI.sub("", line).rstrip()
        if PROGRESS_BAR.search(text):
            if time.monotonic() - last_progress_s < PROGRESS_EVERY_S:
                continue
            last_progress_s = time.monotonic()
        if text:
            yield redact(text)


def end_group(process: subprocess.Popen) -> None:
    """End the remaining processes of a process group: SIGTERM, a grace period, then SIGKILL."""
    deadline = time.monotonic() + GRACE_S
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# Outputs of a run, which later runs reuse


def check_remotes() -> None:
    """Check that each remote responds, by looking up the outputs. Of a folder, only the file list is looked up.

    Raises:
        ParamsError: a remote does not respond.
    """
    for remote, outputs in outputs_by_remote().items():
        try:
            find_missing_files(outputs, remote)
        except DvcError as error:
            raise ParamsError("flows.remote_not_answering", remote=remote, fault=error.fault) from error


def push() -> tuple[str, str]:
    """Send the files that the remotes lack, then check that all of them arrived.

    Every run looks up every file, because a remote may have lost files, and an interrupted push may leave a folder's
    list in the remote without some of its files.

    Returns:
        `Ran` or `Skipped`, and a message.

    Raises:
        DataError: a file in the cache is damaged. Nothing is sent to its remote.
        RemoteError: a remote failed, or still lacks files after the push. The next push sends only the missing files.
    """
    outputs = outputs_by_remote()
    changed_remotes: list[str] = []
    for remote in sorted(outputs):
        try:
            missing_files = find_missing_files(add_files_of_folders(outputs[remote]), remote)
            faults = find_cache_faults(missing_files)
            if faults:  # DVC would send the damaged content under the expected hash
                raise DataError("flows.damaged_outputs", faults=faults)
            if missing_files:
                send_objects(missing_files.values(), remote)
                changed_remotes.append(remote)
            lost_files = find_missing_files(missing_files, remote)
        except DvcError as error:
            raise RemoteError("flows.push_failed", remote=remote, fault=error.fault) from error
        if lost_files:
            examples = sorted(lost_files)[:5]
            raise RemoteError("flows.missing_in_remote", remote=remote, count=len(lost_files), names=examples)
    notes: list[str] = []
    if changed_remotes:
        notes.append(f"sent to {', '.join(changed_remotes)}")
    elif outputs:
        notes.append(f"already in {', '.join(sorted(outputs))}")
    notes += notes_on_default_remote()
    return "Ran" if changed_remotes else "Skipped", "; ".join(notes) or "no outputs to send"


def notes_on_default_remote() -> list[str]:
    """Return a note if DVC has no default remote, because outputs without a remote of their own are then not sent."""
    with repository() as repo:
        default_remote = repo.config["core"].get("remote")
        remotes = sorted(repo.config["remote"])
    if default_remote:
        return []
    if not remotes:
        return [NO_REMOTE_NOTE]
    return [NO_DEFAULT_REMOTE_NOTE.format(remotes=", ".join(remotes))]


def commit(message: str, links: Sequence[str]) -> None:
    """Commit `dvc.lock` and all files that stages write outside DVC's cache to the current branch.

    A broken `dvc.lock` is replaced by the one in HEAD.

    Args:
        message: the commit message.
        links: links into the checkout, which are not committed.
    """
    current_stages = locked_stages()
    # A lock file that has lost a stage is broken too, because DVC never removes a stage
    if current_stages is None or set(locked_stages("HEAD") or {}) - set(current_stages):
        DVC_LOCK.unlink(missing_ok=True)
        if git("ls-tree", "HEAD", "--", str(DVC_LOCK)):
            git("checkout", "--quiet", "HEAD", "--", str(DVC_LOCK))
    git("add", "--all", "--", ".")
    if links:  # .gitignore may not cover all of them
        git("rm", "--cached", "--quiet", "--ignore-unmatch", "--", *links)
    git("commit", "--quiet", "--allow-empty", "--message", message)


def reuse_latest_run() -> dict[str, Any]:
    """Check out the data. Use the `dvc.lock` of `runs/latest` if fewer stages have to run with it.

    The metrics that the latest run committed with its `dvc.lock` are reused too.

    Returns:
        DVC's status by stage.
    """
    link_data()
    own_status = status()
    latest_stages = locked_stages(LATEST) if own_status and has_branch(LATEST) else None
    if not latest_stages or latest_stages == locked_stages():
        return own_status
    # Outputs of frozen stages belong to the commit, so they are not taken from the latest run
    predecessors = stages()
    outputs: list[str] = []
    for stage in predecessors:
        outputs += [out["path"] for out in latest_stages.get(stage, {}).get("outs", [])]
    files_in_git = git("ls-files", f"--with-tree={LATEST}", "--", *outputs).splitlines()  # in this or the latest commit
    git("restore", f"--source={LATEST}", "--staged", "--worktree", "--", str(DVC_LOCK), *files_in_git)
    link_data()
    latest_status = status()
    if count_stages_to_run(latest_status, predecessors) < count_stages_to_run(own_status, predecessors):
        return latest_status
    git("reset", "--hard", "--quiet")
    link_data()
    return own_status


def count_stages_to_run(status: Mapping[str, Any], predecessors: Mapping[str, set[str]]) -> int:
    """Count the stages that are out of date or depend on a stage that is out of date."""
    count = 0
    for stage, stage_predecessors in predecessors.items():
        if stage in status or not stage_predecessors.isdisjoint(status):
            count += 1
    return count

"""DVC from outside: the stages in order, what is out of date, and one stage reproduced in a process group of its own.

DVC decides whether a stage runs; this module starts it, passes on what it prints, and leaves no process behind.
"""

import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import psutil
import yaml

from m3diff.provenance.dvc import listing, object_file, whole
from m3diff.provenance.git import git
from m3diff.records.errors import DataError, redacted
from m3diff.records.files import write_atomic

if TYPE_CHECKING:
    from dvc.output import Output
    from dvc.repo import Repo
    from dvc.stage import PipelineStage

Outcome = Literal["Ran", "Restored", "Skipped"]

DVC = [
    sys.executable,
    "-m",
    "dvc",
    "--wait-for-lock",
]  # its lock is taken anew after a stage: to lose it loses the stage
CODE = ("components", "code")
"""The folders of code and of its digests: a change in them alone is no news of data."""
GRACE_S = 20  # from the signal that asks to the one that ends
PROGRESS_EVERY_S = 5.0

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PROGRESS_BAR = re.compile(r"\d+%\|")
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
def repository(folder: Path | None = None) -> Iterator["Repo"]:
    """DVC in this process, for what takes it a moment: a process of its own takes a second to start, and a flow asks a
    dozen times.

    Raises:
        DvcError: DVC refused.
    """
    from dvc.exceptions import DvcException  # half a second to import
    from dvc.repo import Repo

    try:
        with Repo(folder, _wait_for_lock=True) as opened:
            yield opened
    except DvcException as error:
        causes = chain_of(error)
        raise DvcError("dvc", 255, [*causes, *broken_lock(folder or Path())]) from error


def chain_of(error: BaseException | None) -> Iterator[str]:
    """What an error and those behind it say."""
    while error is not None:
        yield str(error)
        error = error.__cause__


def of_pipeline(repo: "Repo") -> list["PipelineStage"]:
    """The stages of `dvc.yaml` in its order, one for each dataset where it has a loop (`ingest@minichange`).

    Frozen ones are left out: DVC never runs them.
    """
    from dvc.stage import PipelineStage

    return [stage for stage in repo.index.stages if isinstance(stage, PipelineStage) and not stage.frozen]


def stages() -> dict[str, set[str]]:
    """The stages that DVC may run, in the order of `dvc.yaml`, each with all those that it follows from."""
    import networkx  # with DVC

    with repository() as repo:
        ours, graph = of_pipeline(repo), repo.index.graph
        names = {stage: stage.addressing for stage in ours}
        return {
            name: {names[before] for before in networkx.descendants(graph, stage) if before in names}
            for stage, name in names.items()
        }


def raw_data() -> dict[Path, tuple[str, set[str]]]:
    """The folders of datasets that `.dvc` files track: the hash of each, and the stages that read it."""
    here = Path.cwd()
    with repository() as repo:
        readers = {out: {stage.addressing for stage in of_pipeline(repo) if reads(stage, out)} for out in raw_of(repo)}
        return {Path(out.fs_path).relative_to(here): (out.hash_info.value, names) for out, names in readers.items()}


def raw_of(repo: "Repo") -> list["Output"]:
    """The folders that `.dvc` files track and the stage ingest reads."""
    from dvc.stage import PipelineStage

    imported = [stage for stage in repo.index.stages if not isinstance(stage, PipelineStage)]
    ingest = [stage for stage in of_pipeline(repo) if stage.name.partition("@")[0] == "ingest"]
    folders = [out for stage in imported for out in stage.outs if out.hash_info.isdir]
    return [out for out in folders if any(reads(stage, out) for stage in ingest)]


def reads(stage: "PipelineStage", out: "Output") -> bool:
    return any(dep.fs_path == out.fs_path for dep in stage.deps)


def status() -> dict[str, Any]:
    """What is out of date, by stage, in DVC's own words; empty where nothing is. Frozen stages are not looked at.

    Raw data need not be there: the hash in their `.dvc` file is compared.
    """
    found: dict[str, Any] = {}
    with repository() as repo, repo.lock:
        ours = of_pipeline(repo)
        for stage in ours:
            found |= stage.status(check_updates=True)
        hashes = {out.fs_path: out.hash_info for out in raw_of(repo)}
        for stage in ours:
            for entry in [entry for entry in found.get(stage.addressing, []) if isinstance(entry, dict)]:
                said = entry.get("changed deps", {})
                for dep in stage.deps:
                    if said.get(str(dep)) == "deleted" and dep.fs_path in hashes:
                        said[str(dep)] = "modified"
                        if dep.hash_info == hashes[dep.fs_path]:
                            del said[str(dep)]
        return {name: left for name, entries in found.items() if (left := [entry for entry in entries if says(entry)])}


def says(entry: Any) -> bool:
    """Whether an entry of DVC's status names anything."""
    return not isinstance(entry, dict) or any(entry.values())


def is_current() -> bool:
    """Whether DVC would run no stage, as far as `dvc.lock` and what lies in git tell. Data need not be there: to link
    them in takes a minute for 300,000 files, and to look at them as long."""
    with repository() as repo, repo.lock:
        ours = of_pipeline(repo)
        if not all(out.exists for stage in ours for out in stage.outs if not out.use_cache):
            return False  # a killed stage's, whose absence the run has committed
        with without_outputs_in_git(stage.addressing for stage in ours) as whole:
            all_ = repo.index.stages
            return whole and not any(stage.changed(allow_missing=True, upstream=all_) for stage in ours)


@contextmanager
def without_outputs_in_git(names: Iterable[str]) -> Iterator[bool]:
    """Within, the outputs of these stages that git keeps are away; whether they are what `dvc.lock` says.

    DVC passes over a folder that is missing, and takes one with only its file of counts for one that was changed.
    """
    from m3diff.provenance.dvc import md5

    of_git = set(git("ls-files", "-z").split("\0"))
    lock = locked()
    outputs = [out for name in names for out in lock.get(name, {}).get("outs", []) if out["path"] in of_git]
    whole = all(Path(out["path"]).is_file() and md5(Path(out["path"])) == out["md5"] for out in outputs)
    away: dict[Path, bytes] = {}
    try:
        for file in [Path(out["path"]) for out in outputs if Path(out["path"]).is_file()]:
            away[file] = file.read_bytes()
            file.unlink()
            with contextlib.suppress(OSError):
                file.parent.rmdir()  # where it is empty now
        yield whole
    finally:
        for file, content in away.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def locked() -> dict[str, Any]:
    """The stages of `dvc.lock` by name; none where there is no such file."""
    file = Path("dvc.lock")
    return entries(file.read_text(encoding="utf-8")) if file.is_file() else {}


def entries(text: str) -> dict[str, Any]:
    """The stages of the text of a `dvc.lock`; none of an empty one."""
    return (yaml.safe_load(text) or {}).get("stages", {})


def lock_of(commit: str) -> str:
    """The text of a commit's `dvc.lock`; empty where it has none."""
    return git("show", f"{commit}:./dvc.lock") if git("ls-tree", commit, "--", "dvc.lock") else ""


def unfinished() -> set[str]:
    """The stages of which `dvc.lock` does not know every output."""
    with repository() as repo:
        return {stage.addressing for stage in of_pipeline(repo) if not all(out.hash_info for out in stage.outs)}


def link_data(folder: Path | None = None) -> None:
    """Bring what `dvc.lock` and the `.dvc` files name into place, as far as the cache has it: this folder, else all but
    raw data, which are many files (`flows/raw.py`)."""
    with repository() as repo, without_warnings():
        raw = raw_of(repo)
        files = {stage.relpath for stage in repo.index.stages if not any(out in raw for out in stage.outs)}
        repo.checkout([str(folder)] if folder else sorted(files), allow_missing=True)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Within, DVC does not warn of each output that was never made."""
    logger = logging.getLogger("dvc_data")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def remember(folder: Path, hashes: Mapping[str, str]) -> None:
    """Tell DVC the hashes of the files of a folder, by name: it then does not read them."""
    from dvc_data.hashfile.hash_info import HashInfo

    root = folder.absolute()
    paths = {f"{root}/{name}": md5 for name, md5 in hashes.items()}
    facts = ((path, HashInfo("md5", md5), os.stat(path)) for path, md5 in paths.items())
    with repository() as repo:
        repo.state.save_many(
            ((path, md5, {"ino": at.st_ino, "mtime": at.st_mtime, "size": at.st_size}) for path, md5, at in facts),
            repo.fs,
        )


def cache_folder(folder: Path | None = None) -> Path:
    """The cache of the project in this folder, else in the current one."""
    with repository(folder) as repo:
        return Path(repo.cache.local_cache_dir)


class Kept(NamedTuple):
    """An output that DVC keeps: its hash, and the remote that it belongs in."""

    md5: str
    remote: str | None


def kept() -> dict[str, Kept]:
    """What DVC keeps of this commit, by path: what stages and `.dvc` files wrote, but for what git holds and what is
    marked `push: false`."""
    with repository() as repo:
        default = repo.config["core"].get("remote")
        return {
            os.path.relpath(out.fs_path, repo.root_dir): Kept(out.hash_info.value, out.remote or default)
            for out in repo.index.outs
            if out.use_cache and out.can_push and out.hash_info and out.hash_info.name == "md5"
        }


def ask(*arguments: str, cwd: Path | None = None) -> str:
    """What a command of DVC prints.

    Raises:
        DvcError: it ended with another code than 0.
    """
    done = subprocess.run(
        [*DVC, *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=die_with_parent,
    )
    if done.returncode:
        said = [*done.stderr.splitlines(), *broken_lock(cwd or Path())]
        raise DvcError(f"dvc {' '.join(arguments)}", done.returncode, said)
    return done.stdout


def not_in_remote(files: Mapping[str, str], name: str) -> dict[str, str]:
    """Of these files, hashes by path, those whose content a remote does not have.

    Raises:
        DvcError: the remote does not answer.
    """
    with repository() as repo, of_remote(f"dvc status --cloud --remote {name}"):
        there = set(repo.cloud.get_remote_odb(name, "status").oids_exist(sorted(set(files.values()))))
    return {path: md5 for path, md5 in files.items() if md5 not in there}


def push_objects(hashes: Iterable[str], name: str) -> None:
    """Send single files from the cache to a remote, whatever DVC remembers of what is there: `dvc push` sends nothing
    of a folder whose list the remote has, and no file that it once saw in it.

    Raises:
        DvcError: the remote refused.
    """
    from dvc_data.hashfile.hash_info import HashInfo
    from dvc_data.hashfile.transfer import transfer

    what = f"dvc push --remote {name} of single files"
    with repository() as repo, of_remote(what):
        remote = repo.cloud.get_remote_odb(name, "push")
        failed = transfer(repo.cache.local, remote, {HashInfo("md5", md5) for md5 in hashes}).failed
    if failed:
        raise DvcError(what, 255, [f"{len(failed)} of them were refused"])


@contextmanager
def of_remote(what: str) -> Iterator[None]:
    """Within, whatever the library of a remote raises is a DvcError: each has exceptions of its own."""
    try:
        yield
    except Exception as error:
        raise DvcError(what, 255, chain_of(error)) from error


def repro(stage: str, log: Callable[[str], None]) -> Outcome:
    """Bring one stage up to date and say what DVC did.

    Raises:
        DataError: the cache holds damaged bytes of what the stage reads, which DVC does not see.
        DvcError: the stage failed; its processes are gone, and `dvc.lock` is as before.
    """
    repair_rwlock(log)
    if damage := damaged(stage):
        raise DataError(f"stage {stage} was not begun: {'; '.join(damage)}")
    said: deque[str] = deque(maxlen=12)
    outcome: Outcome | None = None
    lock = Path("dvc.lock")
    before = lock.read_bytes() if lock.is_file() else None
    done = False
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
            raise DvcError(f"stage {stage}", stage_code(said, process.returncode), [*said, *broken_lock(Path())])
        done = True
    finally:
        try:
            end_group(process)
        finally:
            if not done and lock.is_file() and lock.read_bytes() != before:  # killed as it wrote: perhaps a part
                write_atomic(lock, before) if before is not None else lock.unlink()
    assert outcome is not None, f"none of {list(WORDS)} in what DVC said: {list(said)}"
    return outcome


def is_lock(text: str) -> bool:
    """Whether a `dvc.lock` is one, and not empty or cut short: DVC writes it in place, and a kill leaves a part."""
    try:
        return "stages" in yaml.safe_load(text)
    except (yaml.YAMLError, TypeError):
        return False


def damaged(name: str) -> list[str]:
    """What of a stage's inputs is damaged in the cache, to which DVC's links lead: it believes its own files."""
    with repository() as repo:
        cache = Path(repo.cache.local_cache_dir)
        read = [dep.fs_path for stage in of_pipeline(repo) if stage.addressing == name for dep in stage.deps]
        outs = {out.fs_path: out.hash_info.value for out in repo.index.outs if out.use_cache and out.hash_info}
    found = []
    for path, hash_ in outs.items():
        if any(Path(path).is_relative_to(dep) or Path(dep).is_relative_to(path) for dep in read):
            for part, md5 in {"": hash_, **listing(cache, hash_)}.items():
                file = object_file(cache, md5)
                if file.is_file() and (note := whole(file, md5)):
                    found.append(f"{os.path.relpath(os.path.join(path, part))}: {note}")
    return found


def broken_lock(folder: Path) -> list[str]:
    """What to do about a `dvc.lock` that is none, of which DVC says too little; nothing where it is whole."""
    file = folder / "dvc.lock"
    if not file.is_file() or is_lock(file.read_text(encoding="utf-8", errors="replace")):
        return []
    return [
        f"{file} is not DVC's lock file (empty, cut short, or with the marks of a merge conflict); restore it: "
        "`git log --oneline -- dvc.lock` lists its commits, `git checkout COMMIT -- dvc.lock` takes it from one"
    ]


def repair_rwlock(log: Callable[[str], None]) -> None:
    """Remove DVC's list of who reads and writes what, where a killed process left half of it, or one that names a
    process which has the number by now and is no DVC: with it every `dvc repro` fails, however long it waits."""
    file = Path(".dvc/tmp/rwlock")
    if not rwlock_fault(file):
        return
    time.sleep(1)  # DVC writes it in place: what is half now is whole in a moment
    if fault := rwlock_fault(file):
        file.unlink(missing_ok=True)
        log(f"removed {file}, which a killed process left: {fault}")


def rwlock_fault(file: Path) -> str | None:
    """Why DVC could not use this file; None where it can, or where one that it names is a DVC at work."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return "it is no JSON"
    holders = [*entries.get("write", {}).values(), *(who for all_ in entries.get("read", {}).values() for who in all_)]
    alive = {who["pid"]: command for who in holders if (command := command_of(who["pid"]))}
    if not alive or any("dvc" in command for command in alive.values()):
        return None
    return ", ".join(f"process {pid} is `{command}` now" for pid, command in alive.items())


def command_of(pid: int) -> str:
    """How a process was started; empty where there is none."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


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


def stage_code(said: Iterable[str], dvc_code: int) -> int:
    """The stage's own exit code from DVC's words, since DVC turns every failure into its own."""
    codes = [int(found[1]) for line in said if (found := EXIT_CODE.search(line))]
    return codes[-1] if codes else dvc_code


def end_group(process: subprocess.Popen) -> None:
    """End what is left of the group: ask, wait, then kill. After a success nothing is left."""
    deadline = time.monotonic() + GRACE_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

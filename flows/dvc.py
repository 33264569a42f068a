"""DVC from outside: the stages in order, what is out of date, and one stage reproduced in a process group of its own.

DVC decides whether a stage runs; this module starts it, passes on what it prints, and leaves no process behind.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from flows.git import git

Outcome = Literal["Ran", "Restored", "Skipped"]

DVC = [
    sys.executable,
    "-m",
    "dvc",
    "--wait-for-lock",
]  # its lock is taken anew after a stage: to lose it loses the stage
GRACE_S = 20  # from the signal that asks to the one that ends
PROGRESS_EVERY_S = 5.0

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PROGRESS_BAR = re.compile(r"\d+%\|")
EXIT_CODE = re.compile(r"exited with (-?\d+)")
NOTHING_TO_DO = "Data and pipelines are up to date."
WORDS: dict[str, Outcome] = {
    "Running stage '{}':": "Ran",
    "Stage '{}' is cached - skipping run": "Restored",
    "Stage '{}' didn't change, skipping": "Skipped",
}


class DvcError(RuntimeError):
    """DVC or the stage under it failed. `code` is the stage's exit code (`components/__main__.py` lists them)."""

    def __init__(self, what: str, code: int, said: Iterable[str]) -> None:
        super().__init__(f"{what} exited with {code}\n" + "\n".join(said))
        self.code = code


def stages() -> list[str]:
    """The stages of `dvc.yaml` in its order, one for each dataset where it has a loop (`ingest@minichange`).

    Frozen ones are left out: DVC never runs them.
    """
    graph = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]
    frozen = {name for name, entry in graph.items() if entry.get("do", entry).get("frozen")}
    return [name for name in ask("stage", "list", "--name-only").split() if name.partition("@")[0] not in frozen]


def status() -> dict[str, Any]:
    """What is out of date, by stage, in DVC's own words; empty where nothing is. Frozen stages are not looked at."""
    return json.loads(ask("status", "--json", *stages()))


def is_current() -> bool:
    """Whether DVC would run no stage, as far as `dvc.lock` and what lies in git tell. Data need not be there: to link
    them in takes a minute for 300,000 files, and to look at them as long."""
    names = stages()
    with without_outputs_in_git(names) as whole:
        command = [*DVC, "repro", "--dry", "--allow-missing", *names]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    return whole and done.returncode == 0 and NOTHING_TO_DO in done.stdout


@contextmanager
def without_outputs_in_git(names: Iterable[str]) -> Iterator[bool]:
    """Within, the outputs of these stages that git keeps are away; whether they are what `dvc.lock` says.

    DVC passes over a folder that is missing, and takes one with only its file of counts for one that was changed.
    """
    from components.register.lineage import md5  # with pyarrow, which `make run` does not wait for

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


def link_data() -> None:
    """Bring what `dvc.lock` and the `.dvc` files name into place, as far as the cache has it."""
    ask("checkout", "--allow-missing", "--quiet")


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


def push_objects(hashes: Iterable[str]) -> None:
    """Send single files from the cache to the default remote, whatever DVC remembers of what is there: `dvc push` sends
    nothing of a folder whose list the remote has, and no file that it once saw in it.

    Raises:
        DvcError: the remote refused.
    """
    from dvc.exceptions import DvcException  # seconds to import, and hardly ever needed
    from dvc.repo import Repo
    from dvc_data.hashfile.hash_info import HashInfo
    from dvc_data.hashfile.transfer import transfer

    try:
        with Repo() as repo:
            remote = repo.cloud.get_remote_odb(None, "push")
            failed = transfer(repo.cache.local, remote, {HashInfo("md5", md5) for md5 in hashes}).failed
    except (DvcException, OSError) as error:
        raise DvcError("dvc push of single files", 255, [str(error)]) from error
    if failed:
        raise DvcError("dvc push of single files", 255, [f"{len(failed)} of them were refused"])


def repro(stage: str, log: Callable[[str], None]) -> Outcome:
    """Bring one stage up to date and say what DVC did.

    Raises:
        DvcError: the stage failed; its processes are gone.
    """
    repair_rwlock(log)
    said: deque[str] = deque(maxlen=12)
    outcome: Outcome | None = None
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
    finally:
        end_group(process)
    assert outcome is not None, f"none of {list(WORDS)} in what DVC said: {list(said)}"
    return outcome


def broken_lock(folder: Path) -> list[str]:
    """What to do about a `dvc.lock` that is none, of which DVC says too little; nothing where it is whole."""
    file = folder / "dvc.lock"
    try:
        whole = not file.is_file() or "stages" in yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, TypeError):
        whole = False
    return (
        []
        if whole
        else [
            f"{file} is not DVC's lock file (empty, cut short, or with the marks of a merge conflict); restore it: "
            "`git log --oneline -- dvc.lock` lists its commits, `git checkout COMMIT -- dvc.lock` takes it from one"
        ]
    )


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
            yield text


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

"""Flows as processes of their own that can be killed, forked from a process that has imported what they need.

Run as a script inside a project this file is that process: it reads a request a line (the flow's arguments, a file for
what it prints, a mark) and forks. Beside the file come one with the flow's pid and, when it ended, one with its exit
code.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

MARK = "M3DIFF_TEST_FLOW"
"""The environment variable that every process of a flow bears, whatever becomes of its parents."""

START_S, QUIET_S = 300, 30


class Flow:
    """A flow run at work.

    Attributes:
        code: its exit code; None while it runs.
    """

    def __init__(self, pid: int, mark: str, log: Path) -> None:
        self.pid, self.mark, self.log = pid, mark, log
        self.process = psutil.Process(pid)
        self.code: int | None = None

    def ended(self, seconds: float) -> bool:
        """Return whether it ended, by itself or killed, within this time."""
        if self.code is None:
            self.code = number_in(self.log.with_suffix(".code"), seconds)
        return self.code is not None

    def state(self) -> str:
        """The name of its final state."""
        return self.log.read_text().splitlines()[-1]

    def processes(self) -> list[psutil.Process]:
        """All that lives of it, itself first."""
        found = [] if self.code is not None else [self.process]
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid != self.pid and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def quiet(self, seconds: float = QUIET_S) -> list[str]:
        """Wait until nothing of it lives; what still does after this time, which is then ended."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        said = [describe(process) for process in left]
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        return said


class Starter:
    """The process that flow runs of a project are forked from."""

    def __init__(self, project: Path, environment: dict[str, str]) -> None:
        self.project, self.number = project, 0
        environment = environment | {"PYTHONPATH": str(project)}
        pipe: Any = {"stdin": subprocess.PIPE, "text": True, "start_new_session": True}
        self.process = subprocess.Popen([sys.executable, __file__], cwd=project, env=environment, **pipe)

    def start(self, **arguments: Any) -> Flow:
        """Start `full` with these arguments."""
        self.number += 1
        mark, log = f"{self.process.pid}-{self.number}", self.project.parent / f"flow-{self.number:04d}.log"
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"arguments": arguments, "log": str(log), "mark": mark}) + "\n")
        self.process.stdin.flush()
        pid = number_in(log.with_suffix(".pid"), START_S)
        assert pid is not None, "the process that flows are forked from is gone"
        return Flow(pid, mark, log)


@contextmanager
def starter(project: Path, environment: dict[str, str]) -> Iterator[Starter]:
    opened = Starter(project, environment)
    try:
        yield opened
    finally:
        opened.process.communicate()


def number_in(file: Path, seconds: float) -> int | None:
    """The number in the file, once it is there."""
    deadline = time.monotonic() + seconds
    while not file.is_file():
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.05)
    return int(file.read_text())


def describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} {kind(process)}: {' '.join(process.cmdline()[-4:])[-80:]}"
    return f"{process.pid} gone"


def kind(process: psutil.Process) -> str:
    """flow, dvc, stage or git; else the command's name."""
    words = process.cmdline()
    if __file__ in words:
        return "flow"
    if "toy.py" in words:
        return "stage"
    return "dvc" if "dvc" in words else Path(words[0]).name if words else process.name()


def serve() -> None:
    """Fork a flow run for every line, and a process that waits for it. Exit codes are those of a command."""
    import mlflow.pyfunc  # noqa: F401  what register would import, as much as the rest together

    from flows.full import full
    from m3diff.records.files import write_atomic

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asked = json.loads(line)
            pid = os.fork()
            if pid == 0:
                os._exit(work(full, asked))
            log = Path(asked["log"])
            write_atomic(log.with_suffix(".pid"), str(pid))
            write_atomic(log.with_suffix(".code"), str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
            os._exit(0)


def work(flow: Any, asked: dict[str, Any]) -> int:
    os.setsid()
    os.environ[MARK] = asked["mark"]
    handle = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(handle, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        state = flow(**asked["arguments"], return_state=True)
        print(state.name, flush=True)
        return 0 if state.is_completed() else 1
    except BaseException:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    serve()

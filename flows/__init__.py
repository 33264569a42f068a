"""The flows. Importing this package guards the server that Prefect starts for a flow where it knows of none, from pages
of other sites, and lets a flow run outlive the worker that reads what it prints."""

import os
import sys
from collections.abc import Collection
from typing import Any, TextIO

import psutil

GUARD = "m3diff.serving.same_origin:Guarded"
"""A protocol of uvicorn, for a server that asks for no token."""

FLOW_RUN = "PREFECT__FLOW_RUN_ID"
"""The environment variable that Prefect's worker gives a flow's process, and this one to what it starts."""

os.environ.setdefault("UVICORN_HTTP", GUARD)


def at_work(flow_runs: Collection[str]) -> dict[str, int]:
    """The number of one process of each of these flow runs that has any on this machine."""
    found: dict[str, int] = {}
    for process in psutil.process_iter():
        try:
            flow_run = process.environ().get(FLOW_RUN, "")
        except (psutil.Error, OSError):  # another user's, or gone
            continue
        if flow_run in flow_runs and process.status() != psutil.STATUS_ZOMBIE:
            found.setdefault(flow_run, process.pid)
    return found


class Outliving:
    """A standard stream of a process whose reader may be killed: from then on what is printed goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._leave()

    def _leave(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


if FLOW_RUN in os.environ and not isinstance(sys.stdout, Outliving):
    sys.stdout, sys.stderr = Outliving(sys.stdout), Outliving(sys.stderr)  # type: ignore[assignment]

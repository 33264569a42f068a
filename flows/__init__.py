"""The flows. Importing this package guards the server that Prefect starts for a flow where it knows of none, from pages
of other sites, and lets a flow run outlive the worker that started it."""

import os
from pathlib import Path

import psutil

GUARD = "m3diff.serving.same_origin:Guarded"  # a protocol of uvicorn, for a server that asks for no token

# The environment variable that Prefect's worker gives a flow's process, and this one to what it starts
FLOW_RUN = "PREFECT__FLOW_RUN_ID"

WORKER_LOG = Path("services/worker.log")

os.environ.setdefault("UVICORN_HTTP", GUARD)

if FLOW_RUN in os.environ and WORKER_LOG.is_file():  # the pipe to the worker breaks when that is killed
    with WORKER_LOG.open("a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)


def processes_by(variable: str) -> dict[str, list[psutil.Process]]:
    """The processes of this machine that were started with an environment variable, by its value, the oldest first."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            value = process.environ().get(variable)
        except (psutil.Error, OSError):  # another user's, or gone
            continue
        if value and process.status() != psutil.STATUS_ZOMBIE:
            found.setdefault(value, []).append(process)
    for processes in found.values():
        processes.sort(key=psutil.Process.create_time)
    return found

"""The flows. Importing this package guards the server that Prefect starts for a flow where it knows of none, from pages
of other sites, and lets a flow run outlive the worker that started it."""

import os
from collections.abc import Collection
from pathlib import Path

import psutil

GUARD = "m3diff.serving.same_origin:Guarded"
"""A protocol of uvicorn, for a server that asks for no token."""

FLOW_RUN = "PREFECT__FLOW_RUN_ID"
"""The environment variable that Prefect's worker gives a flow's process, and this one to what it starts."""

WORKER_LOG = Path("services/worker.log")

os.environ.setdefault("UVICORN_HTTP", GUARD)

if FLOW_RUN in os.environ and WORKER_LOG.is_file():  # the pipe to the worker breaks when that is killed
    with WORKER_LOG.open("a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)


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

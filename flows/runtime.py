"""Prepare a process for running flows, before Prefect looks for a server."""

import os
from pathlib import Path

import m3diff.runtime
from flows import GUARD, PREFECT_FLOW_RUN_VARIABLE

WORKER_LOG = Path("services/worker.log")


def prepare() -> None:
    """Prepare this process for running flows, after calling `m3diff.runtime.prepare`. A second call changes nothing.

    If no Prefect server is configured, Prefect starts a temporary server. It is set to refuse requests from pages of
    other sites. In the process of a flow run, output is redirected to the worker's log.
    """
    m3diff.runtime.prepare()
    os.environ.setdefault("UVICORN_HTTP", GUARD)
    if PREFECT_FLOW_RUN_VARIABLE in os.environ:
        write_to_worker_log()


def write_to_worker_log() -> None:
    """Redirect stdout and stderr to the worker's log, if the log exists.

    By default, both streams are pipes to the worker. If the worker is killed, the pipes break, and the flow would fail
    when it prints the next line.
    """
    if not WORKER_LOG.is_file():
        return
    with WORKER_LOG.open("a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)

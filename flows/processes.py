"""The processes of this machine that work for a flow run: Prefect's for it, DVC, the stage and what these start."""

from collections.abc import Collection

import psutil

FLOW_RUN = "PREFECT__FLOW_RUN_ID"
"""The environment variable that Prefect's worker gives a flow's process, and this one to what it starts."""


def at_work(flow_runs: Collection[str]) -> dict[str, int]:
    """The number of one process of each of these flow runs that has any here."""
    found: dict[str, int] = {}
    for process in psutil.process_iter():
        try:
            flow_run = process.environ().get(FLOW_RUN, "")
        except (psutil.Error, OSError):  # another user's, or gone
            continue
        if flow_run in flow_runs and process.status() != psutil.STATUS_ZOMBIE:
            found.setdefault(flow_run, process.pid)
    return found

"""Prefect flows that run the pipeline, and a function that finds their processes.

Importing this package does not change the process; call `flows.runtime.prepare` for that.
"""

import psutil

# Protocol class for uvicorn, used by servers that require no token. It refuses requests from pages of other sites
GUARD = "m3diff.serving.same_origin:GuardedProtocol"

# Environment variable that Prefect's worker sets for the process of a flow. Child processes inherit it
PREFECT_FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"


def group_processes_by(variable: str) -> dict[str, list[psutil.Process]]:
    """Return the processes on this machine that have an environment variable, grouped by its value, oldest first."""
    processes: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            value = process.environ().get(variable)
        except (psutil.Error, OSError):  # the process belongs to another user, or has ended
            continue
        if value and process.status() != psutil.STATUS_ZOMBIE:
            processes.setdefault(value, []).append(process)
    for group in processes.values():
        group.sort(key=psutil.Process.create_time)
    return processes

"""Start worker processes for images, one per CPU that this process may use."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver

from m3diff.records.machine import usable_cpus


def worker_pool() -> ProcessPoolExecutor:
    """Return a pool of processes that do not inherit this process's threads."""
    return ProcessPoolExecutor(usable_cpus(), multiprocessing.get_context(_start_method()))


def _start_method() -> str:
    """Return the start method for workers: forkserver if possible, otherwise spawn.

    fork is not used, because it copies the locks of polars without the threads that release them, so workers would
    hang. spawn is slower than forkserver, because every worker imports everything again.
    """
    try:
        forkserver.ensure_running()
    except OSError:  # the file system of TMPDIR does not support sockets, or does not allow chmod on them
        return "spawn"
    return "forkserver"

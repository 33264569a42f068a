"""Worker processes for images, one for each CPU that this process may use."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver

from m3diff.records.machine import usable_cpus


def worker_pool() -> ProcessPoolExecutor:
    """A pool of workers that do not share this process's threads."""
    return ProcessPoolExecutor(usable_cpus(), multiprocessing.get_context(_start_method()))


def _start_method() -> str:
    """How workers start: fork would copy polars' threads half-way, and spawn imports everything in each worker."""
    try:
        forkserver.ensure_running()
    except OSError:  # TMPDIR is on a file system without sockets, or one that refuses the socket's chmod
        return "spawn"
    return "forkserver"

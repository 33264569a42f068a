"""Ray for the stages that compute in workers: the cluster of RAY_ADDRESS, or one of this process's own."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from components.compute import Compute


def on_one_machine() -> bool:
    """Whether this process starts a Ray of its own, whose workers are all on this machine."""
    return not os.environ.get("RAY_ADDRESS")


def start_ray(compute: Compute) -> None:
    """Connect to the cluster that RAY_ADDRESS names; without one, start one whose servers listen on 127.0.0.1 alone.

    Ray takes any name of this machine for its address in the network, 127.0.0.1 too; components/__init__.py says it
    shall not.
    """
    import ray

    cluster = os.environ.get("RAY_ADDRESS")
    cores = max(os.cpu_count() or 1, compute.workers * compute.cpus_per_worker)  # fewer: slower, not refused
    here = {"address": "local", "num_cpus": cores, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    with children_in_a_group_of_their_own():
        ray.init(
            **(here if on_one_machine() else {"address": cluster}),
            log_to_driver=True,
            logging_level=logging.WARNING,
            logging_config=ray.LoggingConfig(log_level="ERROR"),  # its cleaners warn of what is no fault
        )


@contextmanager
def children_in_a_group_of_their_own() -> Iterator[None]:
    """Within, processes are started outside this one's process group: a signal to the group reaches this process, which
    ends them when its work is done. They die with it in any case.

    A leader of a group, as what a shell starts by hand, has its children in it.
    """
    group = os.getpgrp()
    if group == os.getpid():
        yield
        return
    os.setpgid(0, 0)
    try:
        yield
    finally:
        os.setpgid(0, group)

"""Ray for the stages that compute in workers: the cluster of RAY_ADDRESS, or one of this process's own."""

import logging
import os

from components.compute import Compute


def start_ray(compute: Compute) -> None:
    """Connect to the cluster that RAY_ADDRESS names; without one, start one isolated from the network."""
    import ray

    cluster = os.environ.get("RAY_ADDRESS")
    cores = max(os.cpu_count() or 1, compute.workers * compute.cpus_per_worker)  # fewer: slower, not refused
    here = {"address": "local", "num_cpus": cores, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(
        **({"address": cluster} if cluster else here),
        log_to_driver=True,
        logging_level=logging.WARNING,
        logging_config=ray.LoggingConfig(log_level="ERROR"),  # its cleaners warn of what is no fault
    )

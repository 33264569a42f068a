"""A model in replicas of Ray Serve. Serve's own HTTP server is not started: components/serving/server.py listens."""

import asyncio
import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from m3diff.cluster import on_one_machine, start_ray
from m3diff.registry.model_source import Source
from m3diff.serving.asked import Asked
from m3diff.serving.params import Serve
from m3diff.serving.replica import Answer, Facts, Replica, Undecodable, Unloadable
from m3diff.settings.compute import Compute

BATCH_WAIT_S = 0.01
"""Seconds that a pair waits for others to share its batch."""

GPU_SHARE = 0.5
"""Of a GPU a replica: while a version takes over, both are loaded."""


class RayDeployed:
    """A deployment that is ready."""

    def __init__(self, app: str, handle: Any) -> None:
        self.app, self.handle = app, handle

    async def facts(self) -> Facts | Unloadable:
        return await self.handle.facts.remote()

    async def ask(self, asked: Asked) -> Answer | Undecodable:
        response = self.handle.remote(asked)
        try:
            return await response
        finally:
            response.cancel()  # of one that was answered nothing

    async def remove(self) -> None:
        from ray import serve

        await asyncio.to_thread(serve.delete, self.app)


@contextmanager
def ray_serve(compute: Compute) -> Iterator[None]:
    """Ray Serve without a proxy, on the cluster of RAY_ADDRESS or one of this process's own."""
    import ray
    from ray import serve

    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    start_ray(compute)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR", "enable_access_log": False})
        yield  # Serve itself ends with a Ray of our own; on a cluster it may be others', too
    finally:
        ray.shutdown()


class Deployer:
    """Deploys one checkpoint after the other, each as an application of its own."""

    def __init__(self, cfg: Serve, compute: Compute) -> None:
        import ray

        self.cfg, self.threads = cfg, compute.cpus_per_worker
        self.gpus = GPU_SHARE if ray.cluster_resources().get("GPU", 0) else 0
        self.numbers = itertools.count(1)

    def __call__(self, source: Source) -> RayDeployed:
        """Load it and wait until all replicas are ready.

        Raises:
            RuntimeError: a replica could not load it; the text says why.
        """
        from ray import serve

        app = f"m3diff-{os.getpid()}-{next(self.numbers)}"
        deployment = serve.deployment(Replica).options(  # type: ignore[attr-defined]
            name="captioner",
            num_replicas=self.cfg.replicas,
            max_ongoing_requests=self.cfg.max_queue,
            ray_actor_options={"num_cpus": 0, "num_gpus": self.gpus},
            graceful_shutdown_timeout_s=self.cfg.answer_s,
            graceful_shutdown_wait_loop_s=0.1,
            logging_config={"log_level": "ERROR", "enable_access_log": False},
        )
        here = listen_on_loopback if on_one_machine() else None
        bound = deployment.bind(source, self.cfg.batch_pairs, BATCH_WAIT_S, self.threads, here)
        try:
            return RayDeployed(app, serve.run(bound, name=app, route_prefix=None))
        except Exception:
            serve.delete(app)
            raise


def listen_on_loopback() -> None:
    """Have Ray Serve open a replica's port on 127.0.0.1. Ray 2.60 opens it on all addresses, and no setting says
    otherwise; it takes pickled calls, so whoever reaches it runs code here. Called in the replica's process.

    Raises:
        RuntimeError: this Ray opens the port in another way, so that nothing is known of where.
    """
    from ray.serve._private import replica

    inner = getattr(replica, "add_port_to_grpc_server", None)
    if inner is None:
        raise RuntimeError(
            "this version of Ray Serve opens ports in another way than 2.60; see components/serving/deploy.py"
        )

    def add_port(server: Any, address: str) -> int:
        return inner(server, f"127.0.0.1:{address.rpartition(':')[2]}")

    replica.add_port_to_grpc_server = add_port  # type: ignore[attr-defined]

"""Start or connect to Ray for the stages that compute in workers.

If RAY_ADDRESS is set, this process connects to that cluster. Otherwise it starts its own Ray on this machine.
"""

import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from m3diff.records.errors import CodedError, Fault
from m3diff.records.machine import usable_cpus
from m3diff.settings.compute import Compute

# Seconds to wait for a cluster to bring a node back or to add a new node
JOIN_S = 60

# Seconds to wait for the head of a cluster to answer
HEAD_TIMEOUT_S = 15


class NoRoomError(CodedError, BlockingIOError):
    """Ray does not start, or its nodes do not have enough resources for the workers. A later attempt may succeed."""


def on_one_machine() -> bool:
    """Return whether this process starts its own Ray, in which case all workers are on this machine."""
    return not os.environ.get("RAY_ADDRESS")


def start_ray(compute: Compute) -> None:
    """Connect to the cluster at RAY_ADDRESS, or start Ray on this machine with servers that listen on 127.0.0.1 only.

    Ray would replace 127.0.0.1 with the machine's network address if `m3diff.runtime.prepare` did not set
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER to 0. Without a token, Ray would write a new one to the user's home folder, so
    this function puts a token into the environment before it starts Ray.

    Raises:
        NoRoomError: Ray does not start, or the cluster does not answer.
    """
    import ray

    from m3diff.ray_logging import RayErrorsOnly

    cluster = os.environ.get("RAY_ADDRESS")
    if cluster:
        arguments: dict[str, Any] = {"address": cluster}
        require_head(HEAD_TIMEOUT_S)
        # otherwise Ray would retry 20 times, in three different places
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
        os.environ.setdefault("RAY_py_gcs_connect_timeout_s", "10")
    else:
        # if the machine has fewer cores than the workers need, the workers run more slowly instead of being refused
        cores = max(usable_cpus(), compute.workers * compute.cpus_per_worker)
        arguments = {
            "address": "local",
            "num_cpus": cores,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
        }
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex())
    with separate_process_group(), prevent_dashboard():
        try:
            ray.init(
                **arguments,
                log_to_driver=True,
                logging_level=logging.WARNING,
                logging_config=RayErrorsOnly(),
            )
        except Exception as error:  # Ray raises many types of errors, including a bare Exception
            ray.shutdown()
            cause = str(error).strip().partition("\n")[0]
            if cluster:
                raise NoRoomError("cluster.ray_does_not_connect", cause=cause, value=cluster) from error
            raise NoRoomError("cluster.ray_does_not_start", cause=cause, logs=ray_log_folder()) from error


def ray_log_folder() -> str:
    """Return Ray's log folder on this machine. The files in it show why a Ray process ended."""
    return f"{os.environ.get('RAY_TMPDIR') or os.environ.get('TMPDIR') or '/tmp'}/ray/session_latest/logs"


def require_head(seconds: float) -> None:
    """Wait up to `seconds` for a server to answer at RAY_ADDRESS. Return at once if the address has no port.

    Ray itself would keep trying for most of an hour.

    Raises:
        NoRoomError: no server answered in time.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    host_and_port = re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address)
    deadline = time.monotonic() + seconds
    while host_and_port:
        try:
            socket.create_connection((host_and_port[1], int(host_and_port[2])), timeout=5).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() >= deadline:
                raise NoRoomError("cluster.address_not_answering", value=address, cause=str(error)) from error
        time.sleep(1)


@contextmanager
def prevent_dashboard() -> Iterator[None]:
    """Prevent Ray from starting its dashboard process if Ray is started within the block.

    Ray 2.60 starts this process even with `include_dashboard=False`, and the process queries the metadata addresses of
    three cloud providers to find out where it runs. Instead, an address where nothing listens is recorded as the
    dashboard's address. Every second, Ray Train's cleanup thread asks at that address whether the training is still
    running; if no address is recorded, the thread ends with a traceback.
    """
    from ray._private import services
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    def record_dead_address(
        _include: Any, _raise: Any, _host: Any, gcs_address: str, *_: Any, **__: Any
    ) -> tuple[None, None]:
        GcsClient(address=gcs_address).internal_kv_put(b"dashboard", b"127.0.0.1:9", True, b"dashboard")
        return None, None

    start_api_server = services.start_api_server
    services.start_api_server = record_dead_address  # type: ignore[assignment]
    try:
        yield
    finally:
        services.start_api_server = start_api_server


def wait_for_room(compute: Compute, seconds: float) -> None:
    """Wait up to `seconds` until the nodes of the connected Ray have enough resources for the workers.

    Only the total resources of the nodes are considered, not what is in use. Ray itself would wait for minutes without
    giving a reason.

    Raises:
        NoRoomError: the nodes are too small. The error's field `nodes` lists the resources of each node, and `need`
            lists those that a worker needs.
    """
    import ray

    resources = worker_resources(compute)
    deadline = time.monotonic() + seconds
    has_printed = False
    needed_resources = [f"{amount} {name}" for name, amount in resources.items()]
    while True:
        nodes = [(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
        room = sum(workers_on_node(available, resources) for _, available in nodes)
        if room >= compute.workers:
            return
        node_texts = []
        for address, available in nodes:
            amounts = ", ".join(f"{available.get(name, 0):g} {name}" for name in resources)
            node_texts.append(f"{address} has {amounts}")
        no_room = Fault(
            "cluster.no_room", value=room, expected=compute.workers, need=needed_resources, nodes=node_texts
        )
        if time.monotonic() >= deadline:
            raise NoRoomError(no_room)
        if not has_printed:
            print(f"{no_room.problem}; waiting {seconds:.0f} s for a node to join", flush=True)
            has_printed = True
        time.sleep(min(1, seconds))


def workers_on_node(available: dict[str, float], resources: dict[str, int]) -> int:
    """Return how many workers fit on a node if each needs `resources`."""
    return min(int(available.get(name, 0) // amount) for name, amount in resources.items())


def worker_resources(compute: Compute) -> dict[str, int]:
    """Return the resources that Ray reserves for each worker, by name."""
    resources = {"CPU": compute.cpus_per_worker}
    if compute.gpu:
        resources["GPU"] = 1
    return resources


@contextmanager
def separate_process_group() -> Iterator[None]:
    """Start the child processes of the block in a new process group.

    A signal to the original group then reaches only this process, which ends its children when its work is done. The
    children also end if this process ends for another reason.

    If this process is a group leader, such as a command typed in a shell, the children stay in its group. At the end of
    the block, this process returns to its original group. It stays in the new group if the original group no longer
    exists, for example because the script that started this process in the background has ended.
    """
    group = os.getpgrp()
    if group == os.getpid():
        yield
        return
    os.setpgid(0, 0)
    try:
        yield
    finally:
        with suppress(PermissionError):  # the session no longer has this group
            os.setpgid(0, group)

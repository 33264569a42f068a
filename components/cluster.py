"""Ray for the stages that compute in workers: the cluster of RAY_ADDRESS, or one of this process's own."""

import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from m3diff.records.machine import usable_cpus
from m3diff.settings.compute import Compute

JOIN_S = 60  # seconds that a cluster is given to bring a node back, or another one

ANSWER_S = 15  # seconds that its head is given to answer


class NoRoomError(BlockingIOError):
    """Ray, or the nodes of the cluster, cannot take the workers; try again when they can."""


def on_one_machine() -> bool:
    """Return whether this process starts a Ray of its own, whose workers are all on this machine."""
    return not os.environ.get("RAY_ADDRESS")


def start_ray(compute: Compute) -> None:
    """Connect to the cluster that RAY_ADDRESS names; without one, start one whose servers listen on 127.0.0.1 alone.

    Ray takes any name of this machine for its address in the network, 127.0.0.1 too; components/__init__.py says it
    shall not. It asks for a token and would write a new one into the user's home; given one, it keeps that in memory.

    Raises:
        NoRoomError: Ray does not start, or the cluster does not answer.
    """
    import ray

    cluster = os.environ.get("RAY_ADDRESS")
    if cluster:
        place: dict[str, Any] = {"address": cluster}
        require_head(ANSWER_S)
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")  # attempts, of which Ray makes 20 in three places
        os.environ.setdefault("RAY_py_gcs_connect_timeout_s", "10")
    else:
        cores = max(usable_cpus(), compute.workers * compute.cpus_per_worker)  # fewer: slower, not refused
        place = {"address": "local", "num_cpus": cores, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex())
    with children_in_a_group_of_their_own(), without_dashboard():
        try:
            ray.init(
                **place,
                log_to_driver=True,
                logging_level=logging.WARNING,
                logging_config=ray.LoggingConfig(log_level="ERROR"),  # its cleaners warn of what is no fault
            )
        except Exception as error:  # Ray raises what comes, a bare Exception too
            ray.shutdown()
            said = str(error).strip().partition("\n")[0]
            remedy = f"RAY_ADDRESS={cluster}; correct it, or unset it" if cluster else f"see {logs()}"
            raise NoRoomError(f"Ray does not start: {said}; {remedy}") from error


def logs() -> str:
    """Return the folder where a Ray of this machine's own writes why a process of it ended."""
    return f"{os.environ.get('RAY_TMPDIR') or os.environ.get('TMPDIR') or '/tmp'}/ray/session_latest/logs"


def require_head(seconds: float) -> None:
    """See that something answers at RAY_ADDRESS, where that names a port; Ray itself would ask for most of an hour.

    Raises:
        NoRoomError: nothing does within `seconds`.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    named = re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address)
    deadline = time.monotonic() + seconds
    while named:
        try:
            socket.create_connection((named[1], int(named[2])), timeout=5).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() >= deadline:
                raise NoRoomError(
                    f"RAY_ADDRESS={address}: no cluster answers there ({error}); start its head, or "
                    "`unset RAY_ADDRESS` to compute on this machine"
                ) from error
        time.sleep(1)


@contextmanager
def without_dashboard() -> Iterator[None]:
    """Within, a Ray that starts has no process of its dashboard, which even without pages asks the metadata addresses
    of three clouds where it runs.

    An address where nothing listens is recorded for it: Ray Train's cleaner asks there each second whether the
    training lives, and where no address is recorded its thread ends with a traceback.
    """
    from ray._private import services
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    def record_nothing_listens(_page: Any, _must: Any, _host: Any, gcs: str, *_: Any, **__: Any) -> tuple[None, None]:
        GcsClient(address=gcs).internal_kv_put(b"dashboard", b"127.0.0.1:9", True, b"dashboard")
        return None, None

    start = services.start_api_server
    services.start_api_server = record_nothing_listens  # type: ignore[assignment]
    try:
        yield
    finally:
        services.start_api_server = start


def wait_for_room(compute: Compute, seconds: float) -> None:
    """Return when the nodes of the Ray that this process is connected to are large enough for the workers, were nothing
    else to run there. Ray itself would wait for minutes and not say for what.

    Raises:
        NoRoomError: they are not within `seconds`; what they have, and what a worker needs.
    """
    import ray

    needs, deadline, said = per_worker(compute), time.monotonic() + seconds, False
    need = ", ".join(f"{amount} {name}" for name, amount in needs.items())
    while True:
        nodes = [(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
        found = sum(min(int(has.get(name, 0) // needs[name]) for name in needs) for _, has in nodes)
        if found >= compute.workers:
            return
        named = (f"{node} has " + ", ".join(f"{has.get(name, 0):g} {name}" for name in needs) for node, has in nodes)
        lack = f"the nodes of Ray have room for {found} of {compute.workers} workers: a worker needs {need}; "
        lack += ", ".join(named)
        if time.monotonic() >= deadline:
            raise NoRoomError(f"{lack}; start another node and run again, or lower compute.workers or what each needs")
        if not said:
            print(f"{lack}; waiting {seconds:.0f} s for a node to join", flush=True)
            said = True
        time.sleep(min(1, seconds))


def per_worker(compute: Compute) -> dict[str, int]:
    """Return the resources that Ray sets aside for each worker."""
    return {"CPU": compute.cpus_per_worker} | ({"GPU": 1} if compute.gpu else {})


@contextmanager
def children_in_a_group_of_their_own() -> Iterator[None]:
    """Within, processes are started outside this one's process group: a signal to the group reaches this process, which
    ends them when its work is done. They die with it in any case.

    A leader of a group, as what a shell starts by hand, has its children in it. A group whose other members ended
    meanwhile, as that of a script which started this process in the background, is gone: this process then stays in
    the new one.
    """
    group = os.getpgrp()
    if group == os.getpid():
        yield
        return
    os.setpgid(0, 0)
    try:
        yield
    finally:
        with suppress(PermissionError):  # there is no such group in this session any more
            os.setpgid(0, group)

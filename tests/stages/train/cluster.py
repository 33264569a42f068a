"""A Ray cluster on this machine: `ray start` runs a head and nodes, each with a loopback address (Linux)."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

HEAD = "127.0.0.2"
ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # no shell of an operator has it
PATIENCE_S = 180
STORE_BYTES = 80_000_000  # the least that Ray takes is 75 MB


class Cluster:
    """A running cluster. Nodes have numbers from 3 on, which are the last part of their addresses."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind((HEAD, 0))
            self.address = f"{HEAD}:{free.getsockname()[1]}"
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        self.folder = folder
        shell = {name: value for name, value in os.environ.items() if name != ONE_MACHINE}
        heard = {"RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "2000"}  # by the head, of a node
        self.environment = shell | token | heard | {"DS_ACCELERATOR": "cpu"}
        self.nodes: dict[int, subprocess.Popen] = {}
        port = self.address.rpartition(":")[2]
        head = ["--head", "--node-ip-address", HEAD, "--port", port, "--include-dashboard", "false"]
        self._start(2, [*head, "--num-cpus", "0", "--temp-dir", str(folder / "ray")])

    @property
    def of_a_driver(self) -> dict[str, str]:
        """Return the environment of a process that connects to the cluster."""
        return self.environment | {"RAY_ADDRESS": self.address}

    def add(self, number: int, cpus: int = 1) -> None:
        """Add a node."""
        arguments = ["--address", self.address, "--node-ip-address", f"127.0.0.{number}"]
        self._start(number, [*arguments, "--num-cpus", str(cpus)])

    def _start(self, number: int, arguments: list[str]) -> None:
        """Start a node. Try again if it ends, because Ray gives it only 30 s, and the cores may be busy."""
        log = self.folder / f"node-{number}.log"
        deadline = time.monotonic() + PATIENCE_S
        while "Ray runtime started" not in (log.read_text() if log.exists() else ""):
            assert time.monotonic() < deadline, f"node {number} does not start: {log.read_text()[-3000:]}"
            if number not in self.nodes or self.nodes[number].poll() is not None:
                self.nodes[number] = self._launch(log, arguments)
            time.sleep(0.2)

    def _launch(self, log: Path, arguments: list[str]) -> subprocess.Popen:
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", *arguments, "--block", "--object-store-memory", str(STORE_BYTES)]
        with log.open("w") as out:
            return subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def kill(self, number: int) -> None:
        """Kill a node and all its processes, like a power failure."""
        node = self.nodes.pop(number)
        family = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family, timeout=20)

    def cut_off(self, number: int) -> None:
        """Cut a node off from the others, while its workers keep running."""
        for process in psutil.Process(self.nodes[number].pid).children(recursive=True):
            if process.name() == "raylet":
                process.suspend()

    def workers(self) -> dict[int, list[psutil.Process]]:
        """Return the training processes by node."""
        by_node: dict[int, list[psutil.Process]] = {}
        for number, node in self.nodes.items():
            for process in psutil.Process(node.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "TrainWorker" in " ".join([process.name(), *process.cmdline()]):
                        by_node.setdefault(number, []).append(process)
        return by_node


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Start a cluster that has only a head. In the block, nodes can be added and killed."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # a socket's path has at most 107 characters
        new_cluster = Cluster(Path(folder))
        try:
            yield new_cluster
        finally:
            for number in sorted(new_cluster.nodes, reverse=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    new_cluster.kill(number)

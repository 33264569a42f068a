"""Start, find, wait for and stop the processes of the services on this machine."""

import errno
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil

from flows import PREFECT_FLOW_RUN_VARIABLE, group_processes_by
from infra.apis import WORK_POOL, WORKER_NAME, is_worker_heard
from infra.environment import environment
from infra.errors import ServiceError
from infra.variables import (
    MLFLOW_PASSWORD,
    PREFECT_TOKEN,
    bin_folder,
    bind_address,
    max_flows,
    mlflow_port,
    own_host,
    prefect_port,
    server_url,
    services_folder,
)

START_S = 300  # seconds a service may take to start; the first start creates two databases, and the cores may be busy
PROGRESS_S = 15.0  # seconds between progress messages of `make up` about a service that is still starting
GRACE_S = 40  # seconds a service has to stop before it is killed; a stage in progress takes part of this time to stop
KILL_S = 10  # seconds to wait until a killed process is gone
MAX_LOG_BYTES = 30_000_000

# Environment variable that marks the processes of a service. Its value is the path services/<name> of the service
MARK_VARIABLE = "M3DIFF_SERVICE"

MLFLOW_AUTH = """[mlflow]
default_permission = READ
database_uri = sqlite:///{folder}/users.db
admin_username = admin
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
grant_default_workspace_access = false
"""


@dataclass(frozen=True)
class Service:
    """A service that runs as a process on this machine.

    Attributes:
        port: the port on which it listens, or None for the worker and the keeper.
        token: name of the environment variable that contains the service's secret, or an empty string if the service
            has no secret.
    """

    name: str
    command: list[str]
    port: int | None = None
    token: str = ""

    @property
    def url(self) -> str:
        """URL for reaching the service from this machine. The service must have a port."""
        assert self.port is not None, f"{self.name} does not listen"
        return server_url(self.port)

    @property
    def log(self) -> Path:
        """Path of the log file."""
        return services_folder() / f"{self.name}.log"

    @property
    def mark(self) -> str:
        """Value of MARK_VARIABLE in the environment of the service's processes."""
        return f"{services_folder()}/{self.name}"

    def answers(self) -> bool:
        """Return whether the service responds.

        A server responds if it answers a health check. The worker responds if Prefect's server has recently received a
        heartbeat from it. For the keeper, which has no such check, the result is always True.
        """
        if self.name == "keeper":
            return True
        with suppress(httpx.HTTPError):
            if self.port is None:
                return is_worker_heard()
            path = "/api/health" if self.name == "prefect" else "/health"
            return httpx.get(f"{self.url}{path}", timeout=5).is_success
        return False


def services() -> list[Service]:
    """Return the services in the order in which they are started. The worker comes last, since it needs both servers.

    Raises:
        ServiceError: an environment variable sets an invalid port or an invalid number of flows.
    """
    return [prefect_service(), mlflow_service(), worker_service()]


def prefect_service() -> Service:
    """Return Prefect's server.

    Raises:
        ServiceError: M3DIFF_PREFECT_PORT is not a valid port.
    """
    port = prefect_port()
    command = [
        f"{bin_folder()}/uvicorn",  # `prefect server start` does not read UVICORN_HTTP
        "--factory",
        "prefect.server.api.server:create_app",
        "--log-level",
        "warning",
        "--host",
        bind_address(),
        "--port",
        str(port),
    ]
    return Service("prefect", command, port, PREFECT_TOKEN)


def mlflow_service() -> Service:
    """Return MLflow's server, which requires a login if MLFLOW_AUTH_ADMIN_PASSWORD is set.

    Raises:
        ServiceError: M3DIFF_MLFLOW_PORT is not a valid port.
    """
    port = mlflow_port()
    command = [f"{bin_folder()}/mlflow", "server", "--workers", "1", "--no-serve-artifacts"]
    if MLFLOW_PASSWORD in os.environ:
        command += ["--app-name", "basic-auth"]
    command += ["--host", bind_address(), "--port", str(port)]
    return Service("mlflow", command, port, MLFLOW_PASSWORD)


def worker_service() -> Service:
    """Return the worker, which executes the flow runs in WORK_POOL, at most `max_flows()` at the same time.

    Raises:
        ServiceError: M3DIFF_FLOWS is not a valid number of flows.
    """
    command = [sys.executable, "-m", "flows.worker", "worker", "start", "--pool", WORK_POOL, "--name", WORKER_NAME]
    return Service("worker", [*command, "--limit", str(max_flows())])


def keeper_service() -> Service:
    """Return the keeper, which starts the other services and restarts any that stop."""
    return Service("keeper", [sys.executable, str(Path(__file__).resolve().with_name("services.py")), "keep"])


def running_processes(folder: Path | None = None) -> dict[str, list[psutil.Process]]:
    """Return the processes of each service, oldest first. Processes whose parent has ended are included.

    The processes of the worker's flow runs are listed under the key `flow`, not under `worker`.

    Args:
        folder: the services/ folder of another checkout. If None, use the folder of this checkout.
    """
    processes_by_mark = group_processes_by(MARK_VARIABLE)
    processes_by_name: dict[str, list[psutil.Process]] = {}
    for name in ("keeper", "worker", "mlflow", "prefect"):
        processes_by_name[name] = processes_by_mark.get(f"{folder or services_folder()}/{name}", [])
    processes_of_flows: set[psutil.Process] = set()
    for processes_of_run in group_processes_by(PREFECT_FLOW_RUN_VARIABLE).values():
        processes_of_flows.update(processes_of_run)
    worker_processes = processes_by_name["worker"]
    processes_by_name["flow"] = [process for process in worker_processes if process in processes_of_flows]
    processes_by_name["worker"] = [process for process in worker_processes if process not in processes_of_flows]
    return processes_by_name


def start_service(service: Service) -> psutil.Popen:
    """Start a service in a new session and write its output to services/<name>.log.

    Processes left over from an earlier start are killed first.

    Raises:
        ServiceError: the service's port is in use by another program.
    """
    end_leftovers(service)
    folder = services_folder() if service.port is None else services_folder() / service.name
    folder.mkdir(parents=True, exist_ok=True)
    if service.name == "mlflow":
        (folder / "auth.ini").write_text(MLFLOW_AUTH.format(folder=folder))
    if service.port is not None and is_port_taken(service.port):
        command = f"M3DIFF_{service.name.upper()}_PORT={service.port + 1} make up"
        raise ServiceError("infra.port_taken", service=service.name, port=service.port, command=command)
    rotate_log(service.log)
    service.log.touch(mode=0o600)
    variables = environment(service.name, service.token) | {MARK_VARIABLE: service.mark}
    with service.log.open("a") as log:
        log.write(f"--- {service.name} started {format_time(time.time())}\n")
        log.flush()
        return psutil.Popen(
            service.command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end_leftovers(service: Service) -> None:
    """Kill the processes of a service that an earlier start has left behind, such as a child that still uses its port.

    The flow runs of a worker keep running.
    """
    leftovers = running_processes()[service.name]
    for process in leftovers:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(leftovers, timeout=KILL_S)


def rotate_log(log: Path) -> None:
    """Move a log of MAX_LOG_BYTES or more to <name>.log.1, replacing the previous one.

    The log is copied and then truncated, because the service keeps the file open. A line that the service writes
    between these two steps is lost.
    """
    if log.exists() and log.stat().st_size >= MAX_LOG_BYTES:
        shutil.copyfile(log, f"{log}.1")
        os.truncate(log, 0)


def is_port_taken(port: int) -> bool:
    """Return whether a program is listening on a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1)
        # EAGAIN is a timeout, which happens if a program listens but does not accept connections
        return probe.connect_ex((own_host(), port)) in (0, errno.EAGAIN)


def wait_until_up(
    service: Service,
    process: psutil.Popen,
    log: Path,
    progress: Callable[[Service, float], None] = lambda service, seconds: None,
) -> None:
    """Wait until a service is running and responds.

    The search for its process is repeated, because the environment of a new process cannot be read immediately.

    Args:
        process: the process that is watched: the service, or the keeper that starts the service.
        log: the log of this process.
        progress: called every PROGRESS_S seconds with the service and the elapsed seconds.

    Raises:
        ServiceError: the service does not respond in time, or the process has ended. The error includes the last lines
            of the log.
    """
    start_time = time.monotonic()
    next_report_s = PROGRESS_S
    while not (running_processes()[service.name] and service.answers()):
        seconds = time.monotonic() - start_time
        if process.poll() is not None or seconds > START_S:
            last_lines = log.read_text(errors="replace").splitlines()[-10:]
            raise ServiceError("infra.service_not_started", service=service.name, path=log, last_lines=last_lines)
        if seconds >= next_report_s:
            progress(service, seconds)
            next_report_s += PROGRESS_S
        time.sleep(0.5)


def stop_service(name: str) -> bool:
    """Stop a service. For the worker, also stop its flow runs. Return whether any of these processes was running."""
    running = running_processes()
    processes = running[name] + (running["flow"] if name == "worker" else [])
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.parent() not in processes:  # parents stop their own children
                process.terminate()
    _, remaining_processes = psutil.wait_procs(processes, timeout=GRACE_S)
    for process in remaining_processes:
        process.kill()
    psutil.wait_procs(remaining_processes, timeout=KILL_S)
    return bool(processes)


def format_time(moment: float | str) -> str:
    """Return a time as text in UTC.

    Args:
        moment: seconds since the epoch, or an ISO time from Prefect's server.
    """
    time_of_day = datetime.fromisoformat(moment) if isinstance(moment, str) else datetime.fromtimestamp(moment, UTC)
    return time_of_day.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

"""The services of one machine: `make up` starts a Prefect server, an MLflow server and a worker, `make down` ends them.

Everything they keep lies under services/. Ports: M3DIFF_PREFECT_PORT (4200) and M3DIFF_MLFLOW_PORT (5000). The MLflow
server serves the store that `m3diff register` writes without it, so both show the same runs and versions.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil

from components import PRIVACY

HOST = "127.0.0.1"
POOL = "m3diff"
PATIENCE_S = 300  # a first start creates two databases, on cores that may be busy
GRACE_S = 40  # a stage in progress has its own grace inside
SERVICES = Path("services").resolve()
BIN = Path(sys.executable).parent


class ServiceError(RuntimeError):
    """A service cannot be started; the text says why and what to do."""


@dataclass(frozen=True)
class Service:
    name: str
    command: list[str]
    port: int | None  # None: it listens nowhere
    port_variable: str = ""

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def record(self) -> Path:
        return SERVICES / f"{self.name}.json"

    @property
    def log(self) -> Path:
        return SERVICES / f"{self.name}.log"

    def process(self) -> psutil.Process | None:
        """The process that `up` started, where it still runs; a number that another process took over is not it."""
        try:
            kept = json.loads(self.record.read_text())
            process = psutil.Process(kept["pid"])
            same = process.create_time() == kept["started"] and process.status() != psutil.STATUS_ZOMBIE
        except (FileNotFoundError, json.JSONDecodeError, psutil.NoSuchProcess):
            return None
        return process if same else None

    def healthy(self) -> bool:
        if self.port is None:
            return "started!" in self.log.read_text(errors="replace")
        path = "/api/health" if self.name == "prefect" else "/health"
        try:
            urllib.request.urlopen(self.address + path, timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True


def services() -> list[Service]:
    """In the order of their start: the worker needs both servers."""
    prefect, mlflow = (
        int(os.environ.get(f"M3DIFF_{name}_PORT", port)) for name, port in (("PREFECT", 4200), ("MLFLOW", 5000))
    )
    store = SERVICES / "mlflow"
    return [
        Service(
            "prefect",
            [f"{BIN}/prefect", "server", "start", "--host", HOST, "--port", str(prefect)],
            prefect,
            "M3DIFF_PREFECT_PORT",
        ),
        Service(
            "mlflow",
            [f"{BIN}/mlflow", "server", "--host", HOST, "--port", str(mlflow), "--workers", "1"]
            + ["--backend-store-uri", f"sqlite:///{store}/mlflow.db", "--no-serve-artifacts"]
            + ["--default-artifact-root", (store / "artifacts").as_uri()],
            mlflow,
            "M3DIFF_MLFLOW_PORT",
        ),
        Service("worker", [f"{BIN}/prefect", "worker", "start", "--pool", POOL, "--name", "this machine"], None),
    ]


def environment(prefect: Service) -> dict[str, str]:
    """What the services and the flows under them see: nothing sent out, everything under services/."""
    return (
        os.environ
        | PRIVACY
        | {
            "PREFECT_HOME": str(SERVICES / "prefect"),
            "PREFECT_API_URL": f"{prefect.address}/api",
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes for jobs that nothing here asks for
            "LC_ALL": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
        }
    )


def up() -> None:
    prefect, mlflow, worker = services()
    for folder in (SERVICES / "prefect", SERVICES / "mlflow"):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(environment(prefect))
    for server in (prefect, mlflow):
        start(server)
    for server in (prefect, mlflow):
        wait(server)
    deploy()
    start(worker)
    wait(worker)
    print(
        f"\nPrefect   {prefect.address}\nMLflow    {mlflow.address}\n\nnext, here or in a second shell in this folder:"
    )
    if prefect.port != 4200:
        print(f"  export PREFECT_API_URL={prefect.address}/api")
    print("  .venv/bin/prefect deployment run m3diff/full --watch\n  make down")


def start(service: Service) -> None:
    """Start in a session of its own, its output in services/<name>.log.

    Raises:
        ServiceError: something else listens on its port.
    """
    if service.process() is not None:
        if (port := json.loads(service.record.read_text())["port"]) != service.port:
            raise ServiceError(f"{service.name} is up already, on port {port}; `make down` first, or name that port")
        print(f"{service.name}: already up")
        return
    if service.port is not None and is_taken(service.port):
        raise ServiceError(
            f"{service.name}: port {service.port} is taken by another program; end that one, or choose a port: "
            f"{service.port_variable}={service.port + 1} make up"
        )
    with service.log.open("w") as log:
        child = subprocess.Popen(service.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    started = psutil.Process(child.pid).create_time()
    service.record.write_text(json.dumps({"pid": child.pid, "started": started, "port": service.port}))
    print(f"{service.name}: starting")


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def wait(service: Service) -> None:
    """Wait until it answers.

    Raises:
        ServiceError: it ended, or does not answer for too long.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not service.healthy():
        if service.process() is None or time.monotonic() > deadline:
            tail = "\n  ".join(service.log.read_text(errors="replace").splitlines()[-10:])
            raise ServiceError(f"{service.name} does not answer; the end of {service.log}:\n  {tail}")
        time.sleep(0.5)
    print(f"{service.name}: up")


def deploy() -> None:
    """Make the pool, the automation and the deployments of prefect.yaml known to the server at PREFECT_API_URL."""
    prepare_prefect()
    subprocess.run([f"{BIN}/prefect", "--no-prompt", "deploy", "--all"], check=True, stdout=subprocess.DEVNULL)


def prepare_prefect() -> None:
    """The work pool, one run at a time; and what ends a run whose machine died, which would keep its place for ever."""
    from prefect.automations import Automation
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import EventTrigger, Posture
    from prefect.events.schemas.events import ResourceSpecification
    from prefect.workers.process import ProcessWorker

    with get_client(sync_client=True) as client:
        template = ProcessWorker.get_default_base_job_template()
        pool = WorkPoolCreate(name=POOL, type="process", base_job_template=template, concurrency_limit=1)
        client.create_work_pool(pool, overwrite=True)
        known = client.read_automations_by_name("end runs without a heartbeat")
    if known:
        return
    ended = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    Automation(
        name="end runs without a heartbeat",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *ended},
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=90),
        ),
        actions=[ChangeFlowRunState(name=None, state=StateType.CRASHED, force=False, message="no heartbeat for 90 s")],
    ).create()


def down() -> None:
    """End what `up` started, the worker first, with everything under it; records of what is gone are removed."""
    for service in reversed(services()):
        process = service.process()
        if process is None:
            print(f"{service.name}: not up")
        else:
            end(process)
            print(f"{service.name}: ended")
        service.record.unlink(missing_ok=True)


def end(process: psutil.Process) -> None:
    family = [process, *process.children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=GRACE_S)
    for member in alive:
        member.kill()
    psutil.wait_procs(alive, timeout=10)


def main(what: str) -> int:
    try:
        {"up": up, "down": down, "deploy": deploy}[what]()
    except ServiceError as error:
        print(f"make {what}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

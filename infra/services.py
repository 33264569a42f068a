"""Run the services on one machine: a Prefect server, an MLflow server and a worker.

`make up` starts a keeper, which starts the services and restarts any service that stops. `make status` reports their
state, and `make down` stops them. On a permanent server, systemd runs the keeper (infra/m3diff@.service).

The services keep all their files in services/. The MLflow server uses the same store that `m3diff register` writes to
directly when no server is configured. Ports, databases and secrets are environment variables, set in the shell or in
services/environment. infra/README.md lists them.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

if __name__ == "__main__":  # the keeper runs this file as a script, so the checkout is not on the import path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from infra.access import select_visible_variables
from infra.apis import WORK_POOL
from infra.errors import ServiceError
from infra.mlflow_login import prepare_worker_user
from infra.processes import (
    START_S,
    Service,
    end_leftovers,
    format_time,
    keeper_service,
    rotate_log,
    running_processes,
    services,
    start_service,
    stop_service,
    wait_until_up,
)
from infra.status import OWN_FLOWS, addresses, print_last_training, print_status, require_all_up
from infra.variables import (
    PREFECT_LOGIN,
    PREFECT_TOKEN,
    bin_folder,
    check_settings,
    mlflow_admin,
    prefect_api,
    prefect_client_variables,
    prefect_login,
    read_settings,
    services_folder,
    worker_password_file,
)
from m3diff.records.errors import DataError, Fault, ParamsError
from m3diff.records.files import write_atomic
from m3diff.runtime import prepare

KEEP_S = 5  # seconds between checks by the keeper
MAX_PAUSE_S = 300  # maximum pause in seconds before a service that keeps stopping is restarted

# Template for the work pool's jobs. It has no variables, so that the person who starts a flow cannot choose the command
# or anything else about the job
JOB_TEMPLATE = {
    "job_configuration": {"env": {"DO_NOT_TRACK": "true", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}


# Up


def up() -> None:
    """Start the keeper and wait until all services respond.

    If the keeper is already running, print the state of each service instead. Then print the pages to open, the result
    of the last training run and the next commands. A failed training run is not an error here.

    Raises:
        ServiceError: a service does not respond, or is running on another port.
    """
    check_settings()
    if running_processes()["keeper"]:
        require_all_up()
    else:
        start_and_wait()
    try:
        print("\n" + "\n".join(addresses()))
        fault = print_last_training()
        if fault is not None:
            print(f"\n{fault}")
    except httpx.HTTPError as error:  # a server that has just started may be too busy to answer
        print(f"the last runs are not known yet ({error!r}); `make up` again prints them")
    print_next_commands()


def print_next_commands() -> None:
    """Print the usual commands after `make up`, and the variables needed to run `prefect` by hand."""
    print("\nnext, here or in a second shell in this folder:")
    prefect = services()[0]
    if prefect.port != 4200:
        print(f"  export PREFECT_API_URL={prefect_api()}   # for `prefect` typed by hand")
    if prefect_login():
        print(f"  export {PREFECT_LOGIN}=...   # {PREFECT_TOKEN}'s value, for `prefect` typed by hand")
    print("  make flow      # all stages as a flow of the last commit\n  make status\n  make down")


def start_and_wait() -> None:
    """Start the keeper, report each service as soon as it responds, then print the keeper's output.

    Raises:
        ServiceError: a service does not respond.
    """
    keeper = keeper_service()
    for service in services():
        end_leftovers(service)
    log_size = keeper.log.stat().st_size if keeper.log.exists() else 0
    print(f"starting; a first start makes two databases, which takes up to {START_S // 60} minutes", flush=True)
    process = start_service(keeper)
    for service in services():
        wait_until_up(service, process, keeper.log, progress=print_waiting)
        print(f"  {service.name:<9} up", flush=True)
    print(keeper.log.read_text()[log_size:], end="")


def print_waiting(service: Service, seconds: float) -> None:
    """Print how long a service has been starting, and the path of its log."""
    print(f"  {service.name:<9} starting, {seconds:.0f} s so far; its log: {service.log}", flush=True)


# The keeper


def keep() -> None:
    """Run as the keeper: start all services, then restart any that stops. This function does not return.

    Before the worker is started, the worker's MLflow user and the deployments are created.

    Raises:
        ServiceError: another keeper is running, a server does not start, or MLflow rejects the admin's login.
    """
    check_settings()
    if any(keeper.pid != os.getpid() for keeper in running_processes()["keeper"][:1]):
        raise ServiceError("infra.keeper_already_up")
    prefect, mlflow, worker = services()
    running = {server.name: start_service(server) for server in (prefect, mlflow)}
    for server in (prefect, mlflow):
        wait_until_up(server, running[server.name], server.log)
    if admin := mlflow_admin():
        prepare_worker_user(mlflow.url, admin, worker_password_file())
    deploy()
    running[worker.name] = start_service(worker)
    restarts = [Restart(service, running[service.name], server=prefect) for service in (prefect, mlflow, worker)]
    while True:
        time.sleep(KEEP_S)
        rotate_log(keeper_service().log)
        for restart in restarts:
            rotate_log(restart.service.log)
            restart.restart_if_stopped()


class Restart:
    """Restart a service when it stops.

    If the service keeps stopping, the pause before each restart doubles, up to MAX_PAUSE_S.

    Args:
        server: Prefect's server, which must respond before the worker is started.
    """

    def __init__(self, service: Service, process: psutil.Popen, server: Service) -> None:
        self.service = service
        self.process = process
        self.server = server
        self.pause_s = 0.0
        self.due = 0.0

    def restart_if_stopped(self) -> None:
        """Restart the service if it has stopped and the pause is over."""
        now = time.monotonic()
        if self.process.poll() is None:
            if now > self.due + MAX_PAUSE_S:
                self.pause_s = 0.0
            return
        if now < self.due:
            return
        if self.service.port is None and not self.server.answers():
            return
        self.pause_s = min(max(KEEP_S, 2 * self.pause_s), MAX_PAUSE_S)
        self.due = now + self.pause_s
        print(f"{format_time(time.time())}: {self.service.name} ended, and is started again", flush=True)
        try:
            self.process = start_service(self.service)
        except ServiceError as error:
            print(f"{format_time(time.time())}: {error}", flush=True)


# Deployments


def deploy() -> None:
    """Register the work pool and the deployments in prefect.yaml with this project's server.

    A deployment is updated only if its entry, its flow's parameters or the path of this folder has changed. Otherwise,
    changes that were made on Prefect's page are kept.
    """
    os.environ.update(prefect_client_variables())  # before the import, when Prefect reads its settings
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.client.schemas.filters import FlowFilter
    from prefect.exceptions import ObjectNotFound

    definitions = deployment_definitions()
    record_file = services_folder() / "deployed.json"
    recorded_definitions = json.loads(record_file.read_text()) if record_file.is_file() else {}
    with get_client(sync_client=True) as client:
        try:
            client.update_work_pool(WORK_POOL, WorkPoolUpdate(base_job_template=JOB_TEMPLATE))
        except ObjectNotFound:
            client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process", base_job_template=JOB_TEMPLATE))
        paused_names = [f"work pool {WORK_POOL}"] if client.read_work_pool(WORK_POOL).is_paused else []
        existing_deployments = client.read_deployments(flow_filter=FlowFilter.model_validate(OWN_FLOWS))
    unchanged_deployments = []
    for deployment in existing_deployments:
        definition = definitions.get(deployment.name)
        if definition is not None and recorded_definitions.get(deployment.name) == definition:
            unchanged_deployments.append(deployment)
    changed_names = definitions.keys() - {deployment.name for deployment in unchanged_deployments}
    if changed_names:
        deploy_by_name(sorted(changed_names))
        write_atomic(record_file, json.dumps(definitions, indent=1))
    for deployment in unchanged_deployments:
        if deployment.paused or not all(schedule.active for schedule in deployment.schedules):
            paused_names.append(f"m3diff/{deployment.name}")
    for name in paused_names:
        print(f"{name}: paused, as set on Prefect's page")


def deployment_definitions() -> dict[str, Any]:
    """Return the definition of each deployment by name.

    A definition consists of the entry in prefect.yaml, the flow's parameters and the path of this folder.
    """
    from prefect.utilities.callables import parameter_schema_from_entrypoint

    definitions: dict[str, Any] = {}
    for entry in yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]:
        parameters = parameter_schema_from_entrypoint(entry["entrypoint"]).model_dump(mode="json")
        definitions[entry["name"]] = {"entry": entry, "parameters": parameters, "folder": str(Path.cwd())}
    return definitions


def deploy_by_name(names: list[str]) -> None:
    """Run `prefect deploy` for these deployments."""
    command = [f"{bin_folder()}/prefect", "--no-prompt", "deploy"]
    for name in names:
        command += ["--name", name]
    # The command loads the flows, which do not need the servers' secrets
    variables = select_visible_variables("worker", os.environ) | prefect_client_variables()
    subprocess.run(command, env=variables, check=True, stdout=subprocess.DEVNULL)


# A flow


def run_flow(ref: str | None = None) -> None:
    """Run the deployment m3diff/full on the running services, print its log, and wait until it ends.

    Args:
        ref: commit, branch or tag. If None, HEAD is used, and there must not be uncommitted changes that affect a run.

    Raises:
        ServiceError: Prefect's server is not running, there are uncommitted changes, or the flow failed.
    """
    from flows.workspace import starting_commit

    prefect = services()[0]
    if not (running_processes()[prefect.name] and prefect.answers()):
        raise ServiceError("infra.prefect_not_up")
    try:
        starting_commit(ref)
    except (ParamsError, DataError) as error:
        raise ServiceError("infra.flow_not_started", cause=error.fault) from error
    command = [f"{bin_folder()}/prefect", "deployment", "run", "m3diff/full", "--watch"]
    if ref:
        command += ["--param", f"ref={json.dumps(ref)}"]
    if subprocess.run(command, env=os.environ | prefect_client_variables()).returncode != 0:
        raise ServiceError(print_last_training() or "infra.flow_failed")


# Down


def down() -> None:
    """Stop all services: first the keeper, then the worker with its flows, and finally the servers."""
    for name in ("keeper", "worker", "mlflow", "prefect"):
        print(f"{name}: {'ended' if stop_service(name) else 'not up'}")


COMMANDS = {"up": up, "down": down, "status": print_status, "keep": keep, "deploy": deploy, "flow": run_flow}


def main(command: str, *arguments: str) -> int:
    """Run a command and return its exit code."""
    prepare()
    try:
        read_settings()
        COMMANDS[command](*arguments)
    except ServiceError as error:
        print(f"make {command}: {error}", file=sys.stderr)
        return 1
    except httpx.HTTPError as error:
        fault = Fault("infra.prefect_gave_no_answer", cause=repr(error))
        print(f"make {command}: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

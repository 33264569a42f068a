"""The services of one machine: `make up` starts a keeper, which starts a Prefect server, an MLflow server and a worker,
and starts again what ends; `make status` reports how they are, `make down` ends them. Where the machine stays on,
systemd runs the keeper (infra/m3diff@.service).

Everything they keep is under services/. The MLflow server serves the store that `m3diff register` writes without it.
Ports, databases and secrets are variables, of the shell or of services/environment; infra/README.md lists them.
"""

import errno
import ipaddress
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from dotenv import dotenv_values

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as a script, as the unit and the keeper start it
from flows import FLOW_RUN, GUARD, processes_by
from m3diff import PRIVACY
from m3diff.records.files import write_atomic

HOST = "127.0.0.1"
POOL = FLOW = "m3diff"
OURS = {"name": {"any_": [FLOW]}}
WORKER = socket.gethostname()
PATIENCE_S = 300  # a first start creates two databases, on cores that may be busy
GRACE_S = 40  # a stage in progress has its own grace inside
SILENCE_S = 90  # a worker is heard every 30 s
KEEP_S, MOST_PAUSE_S = 5, 300  # the keeper's look, and its longest wait before what ends again and again
LOG_BYTES = 30_000_000
SERVICES = Path("services").resolve()
BIN = Path(sys.executable).parent
SETTINGS = SERVICES / "environment"
# The environment variable that names the service of a process: its folder in services/, by its path
MARK = "M3DIFF_SERVICE"

PREFECT_STORES = ("PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL")
TOKENS = ("PREFECT_SERVER_API_AUTH_STRING", "MLFLOW_AUTH_ADMIN_PASSWORD")
# What the worker, and so the code of a flow's commit, does not get to see
SERVERS_ONLY = (*PREFECT_STORES, *TOKENS, "M3DIFF_MLFLOW_STORE", "MLFLOW_FLASK_SERVER_SECRET_KEY")
SHORTEST_TOKEN = 16

AUTH = """[mlflow]
default_permission = READ
database_uri = sqlite:///{kept}/users.db
admin_username = admin
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
grant_default_workspace_access = false
"""

JOBS = {  # the template of the work pool's jobs, which take nothing from who asks for a flow run (a command, say)
    "job_configuration": {"env": {"DO_NOT_TRACK": "true", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}


class ServiceError(RuntimeError):
    """A service cannot be started or is not up; the text says why and what to do."""


@dataclass(frozen=True)
class Service:
    name: str
    command: list[str]
    port: int | None = None  # None: it serves nobody
    token: str = ""  # the variable of its secret

    @property
    def address(self) -> str:
        return f"http://{HOST if bind() == '0.0.0.0' else bind()}:{self.port}"

    @property
    def log(self) -> Path:
        return SERVICES / f"{self.name}.log"

    def answers(self) -> bool:
        """Return whether it answers: a server itself, the worker through Prefect's server, the keeper by running."""
        if self.name == "keeper":
            return True
        with suppress(httpx.HTTPError):
            if self.port is None:
                return is_heard()
            return httpx.get(f"{self.address}{'/api' * (self.name == 'prefect')}/health", timeout=5).is_success
        return False


def services() -> list[Service]:
    """In the order of their start: the worker needs both servers."""
    prefect, mlflow = number("M3DIFF_PREFECT_PORT", 4200, 65535), number("M3DIFF_MLFLOW_PORT", 5000, 65535)
    limit = number("M3DIFF_FLOWS", 2, 1000)
    server = [f"{BIN}/uvicorn", "--factory", "prefect.server.api.server:create_app"]  # whose own command takes no GUARD
    login = ["--app-name", "basic-auth"] if TOKENS[1] in os.environ else []
    tracking = [f"{BIN}/mlflow", "server", "--workers", "1", "--no-serve-artifacts", *login]
    work = [sys.executable, "-m", "flows.worker", "worker", "start", "--pool", POOL, "--name", WORKER]
    at = [["--host", bind(), "--port", str(port)] for port in (prefect, mlflow)]
    return [
        Service("prefect", [*server, "--log-level", "warning", *at[0]], prefect, TOKENS[0]),
        Service("mlflow", [*tracking, *at[1]], mlflow, TOKENS[1]),
        Service("worker", [*work, "--limit", str(limit)]),
    ]


def keeper() -> Service:
    return Service("keeper", [sys.executable, str(Path(__file__).resolve()), "keep"])


def number(variable: str, usual: int, most: int) -> int:
    given = os.environ.get(variable, str(usual))
    if not (given.isdecimal() and 0 < int(given) <= most):
        raise ServiceError(f"{variable}={given}: give a number from 1 to {most}")
    return int(given)


def bind() -> str:
    return os.environ.get("M3DIFF_BIND", HOST)


def processes(kept: Path | None = None) -> dict[str, list[psutil.Process]]:
    """The processes of each service of this checkout that are here, the oldest first, and those of its flow runs as
    `flow`; one that outlives its parent is among them.

    Args:
        kept: the folder services/ of another checkout.
    """
    marked = processes_by(MARK)
    of_flows = {process for found in processes_by(FLOW_RUN).values() for process in found}
    found = {name: marked.get(f"{kept or SERVICES}/{name}", []) for name in ("keeper", "worker", "mlflow", "prefect")}
    found["flow"] = [process for process in found["worker"] if process in of_flows]
    found["worker"] = [process for process in found["worker"] if process not in of_flows]
    return found


# What a service sees


def environment(service: Service) -> dict[str, str]:
    """Return the environment of a service, and of the flows under the worker: nothing is sent out, everything is under
    services/. Secrets are passed on here and never on a command line, which every user of the machine can read. Where a
    token is set, the servers' own logins are a client's, unless it was given another."""
    prefect, mlflow, _ = services()
    given, kept = os.environ | PRIVACY, SERVICES / "mlflow"
    found = {"PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{HOST}:{prefect.port},http://localhost:{prefect.port}"}
    if token := given.get(TOKENS[0]):
        found["PREFECT_API_AUTH_STRING"] = token
    if password := given.get(TOKENS[1]):
        user = given.get("MLFLOW_AUTH_ADMIN_USERNAME", "admin")
        found |= {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}
    found |= {name: value for name, value in given.items() if service.name != "worker" or name not in SERVERS_ONLY}
    if service.name == "mlflow":
        found["MLFLOW_BACKEND_STORE_URI"] = given.get("M3DIFF_MLFLOW_STORE", f"sqlite:///{kept}/mlflow.db")
        found["MLFLOW_DEFAULT_ARTIFACT_ROOT"] = given.get("M3DIFF_MLFLOW_ARTIFACTS", (kept / "artifacts").as_uri())
        if password:
            found["MLFLOW_AUTH_CONFIG_PATH"] = str(kept / "auth.ini")
            found["MLFLOW_FLASK_SERVER_SECRET_KEY"] = secrets.token_hex(32)  # of the page's forms, from start to start
    return found | {
        "PREFECT_HOME": str(SERVICES / "prefect"),
        "PREFECT_API_URL": f"{prefect.address}/api",
        "PATH": f"{BIN}{os.pathsep}{given.get('PATH', os.defpath)}",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes for jobs that nothing here asks for
        "UVICORN_HTTP": "auto" if service.token in given else GUARD,
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
    }


def read_settings() -> None:
    """Take the variables of services/environment into the environment; one that the shell has set stays.

    Raises:
        ServiceError: others can read the file, or a line has no value.
    """
    if not SETTINGS.exists():
        return
    if SETTINGS.stat().st_mode & 0o077:
        raise ServiceError(f"{SETTINGS} is for secrets, and others can read it: chmod 600 {SETTINGS}")
    for name, value in dotenv_values(SETTINGS, interpolate=False).items():
        if value is None:
            raise ServiceError(f"{SETTINGS}, {name}: expected NAME=value")
        os.environ.setdefault(name, value)


def check_settings() -> None:
    """Name every fault of the variables before anything is started.

    Raises:
        ServiceError: a number or address is none, or a server would be open to others without a token.
    """
    services()  # their numbers
    given, faults = os.environ, list[str]()
    if ":" in bind():
        faults.append(f"M3DIFF_BIND={bind()}: give an IPv4 address or a name")
    try:
        is_open = not ipaddress.ip_address(bind()).is_loopback
    except ValueError:
        is_open = bind() != "localhost"
    for name in TOKENS:
        token = given.get(name)
        if token is None and is_open:
            faults.append(
                f"M3DIFF_BIND={bind()} lets other machines in, and whoever reaches a server without a token runs code "
                f"here: set {name} in {SETTINGS}, or leave M3DIFF_BIND out"
            )
        elif token is not None and len(token.rpartition(":")[2]) < SHORTEST_TOKEN:
            make = "python -c 'import secrets; print(secrets.token_hex())'"
            faults.append(f"{name}: {SHORTEST_TOKEN} characters at least; {make} makes one")
    if ":" not in given.get(TOKENS[0], ":"):
        faults.append(f"{TOKENS[0]}: expected user:token")
    if faults:
        raise ServiceError("\n  ".join([f"{len(faults)} setting(s) to correct, nothing was started", *faults]))


# Up


def up() -> None:
    """Start the keeper, wait until all answer, and print what it said; where it is up already, how the services are.

    Raises:
        ServiceError: one does not answer, or is up on another port.
    """
    check_settings()
    own = keeper()
    if processes()["keeper"]:
        status()
    else:
        for service in services():
            end_left(service)
        said = own.log.stat().st_size if own.log.exists() else 0
        started = start(own)
        for service in services():
            wait(service, started, own.log)
        print(own.log.read_text()[said:])
    prefect, mlflow, _ = services()
    print(f"Prefect   {prefect.address}\nMLflow    {mlflow.address}\n\nnext, here or in a second shell in this folder:")
    if prefect.port != 4200:
        print(f"  export PREFECT_API_URL={prefect.address}/api")
    print("  .venv/bin/prefect deployment run m3diff/full --watch\n  make status\n  make down")


def start(service: Service) -> psutil.Popen:
    """Start in a session of its own, its output at the end of services/<name>.log, in place of what is left of it.

    Raises:
        ServiceError: something else listens on its port.
    """
    end_left(service)
    kept = SERVICES if service.port is None else SERVICES / service.name
    kept.mkdir(parents=True, exist_ok=True)
    if service.name == "mlflow":
        (kept / "auth.ini").write_text(AUTH.format(kept=kept))
    if service.port is not None and is_taken(service.port):
        raise ServiceError(
            f"{service.name}: port {service.port} is taken by another program; end that one, or choose a port: "
            f"M3DIFF_{service.name.upper()}_PORT={service.port + 1} make up"
        )
    rotate(service.log)
    service.log.touch(mode=0o600)
    given = environment(service) | {MARK: f"{SERVICES}/{service.name}"}
    with service.log.open("a") as log:
        log.write(f"--- {service.name} started {moment(time.time())}\n")
        log.flush()
        output = {"stdout": log, "stderr": subprocess.STDOUT}
        return psutil.Popen(service.command, env=given, stdin=subprocess.DEVNULL, start_new_session=True, **output)


def end_left(service: Service) -> None:
    """End what a killed keeper or server left, such as a child that holds its port. A worker's flows are no part of
    it."""
    left = processes()[service.name]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=10)


def rotate(log: Path) -> None:
    """Move a log that has grown past LOG_BYTES to <name>.log.1, in place of the one before. It is copied and emptied,
    since who writes it has it open; a line written in between is lost."""
    if log.exists() and log.stat().st_size >= LOG_BYTES:
        shutil.copyfile(log, f"{log}.1")
        os.truncate(log, 0)


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST if bind() == "0.0.0.0" else bind(), port)) in (0, errno.EAGAIN)  # or it hangs


def wait(service: Service, process: psutil.Popen, log: Path) -> None:
    """Wait until a service runs and answers. Raises ServiceError, with the end of the log, where that does not happen,
    or `process` (its keeper, else itself) ends. A new process's environment cannot be read at once, so it is asked."""
    deadline = time.monotonic() + PATIENCE_S
    while not (processes()[service.name] and service.answers()):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n  ".join(log.read_text(errors="replace").splitlines()[-10:])
            raise ServiceError(f"{service.name} does not answer; the end of {log}:\n  {tail}")
        time.sleep(0.5)


def keep() -> None:
    """Start the servers, make the deployments known, start the worker. Then start again what ended, the worker once the
    server answers; what ends again and again is waited with for longer each time, up to MOST_PAUSE_S. Raises
    ServiceError where another keeper is up, or a server does not start."""
    check_settings()
    if any(other.pid != os.getpid() for other in processes()["keeper"][:1]):
        raise ServiceError("the keeper is up already; `make down` first")
    prefect, mlflow, worker = services()
    running = {server.name: start(server) for server in (prefect, mlflow)}
    for server in (prefect, mlflow):
        wait(server, running[server.name], server.log)
    os.environ.update(environment(worker))
    deploy()
    running[worker.name] = start(worker)
    pauses, due = dict.fromkeys(running, 0.0), dict.fromkeys(running, 0.0)
    while True:
        time.sleep(KEEP_S)
        rotate(keeper().log)
        for service in (prefect, mlflow, worker):
            rotate(service.log)
            name, now = service.name, time.monotonic()
            if running[name].poll() is None:
                if now > due[name] + MOST_PAUSE_S:
                    pauses[name] = 0
            elif now >= due[name] and (service.port or prefect.answers()):
                pauses[name] = min(max(KEEP_S, 2 * pauses[name]), MOST_PAUSE_S)
                due[name] = now + pauses[name]
                print(f"{moment(time.time())}: {name} ended, and is started again", flush=True)
                try:
                    running[name] = start(service)
                except ServiceError as error:
                    print(f"{moment(time.time())}: {error}", flush=True)


def deploy() -> None:
    """Make the work pool and the deployments of prefect.yaml known to the server at PREFECT_API_URL. One is made anew
    only where its entry, its flow's parameters or this folder changed since: what a person changed on Prefect's page
    stays."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.client.schemas.filters import FlowFilter
    from prefect.exceptions import ObjectNotFound
    from prefect.utilities.callables import parameter_schema_from_entrypoint

    wanted: dict[str, Any] = {}
    for entry in yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]:
        parameters = parameter_schema_from_entrypoint(entry["entrypoint"]).model_dump(mode="json")
        wanted[entry["name"]] = {"entry": entry, "parameters": parameters, "folder": str(Path.cwd())}
    record = SERVICES / "deployed.json"
    last = json.loads(record.read_text()) if record.is_file() else {}
    with get_client(sync_client=True) as client:
        try:
            client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=JOBS))
        except ObjectNotFound:
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=JOBS))
        paused = [f"work pool {POOL}"] if client.read_work_pool(POOL).is_paused else []
        known = client.read_deployments(flow_filter=FlowFilter.model_validate(OURS))
    same = [found for found in known if found.name in wanted and last.get(found.name) == wanted[found.name]]
    if new := wanted.keys() - {found.name for found in same}:
        names = [word for name in sorted(new) for word in ("--name", name)]
        subprocess.run([f"{BIN}/prefect", "--no-prompt", "deploy", *names], check=True, stdout=subprocess.DEVNULL)
        write_atomic(record, json.dumps(wanted, indent=1))
    paused += [
        f"m3diff/{found.name}" for found in same if found.paused or not all(one.active for one in found.schedules)
    ]
    for what in paused:
        print(f"{what} stays as Prefect's page has it: paused")


# Status


def status() -> None:
    """Print of each service whether it is up, where and since when, and the last training.

    Raises:
        ServiceError: a service is not up or does not answer, or the last training ended badly.
    """
    down, found = {}, processes()
    for service in [*services(), keeper()]:
        process = next(iter(found[service.name]), None)
        word = "not up" if process is None else "up" if service.answers() else "not answering"
        since = f"since {moment(process.create_time())}" if process else ""
        place = service.address if service.port else f"pool {POOL}" if service.name == "worker" else ""
        print(f"{service.name:<9} {word:<14} {place:<24} {since:<32} {service.log}")
        if word != "up":
            down[service.name] = f"{service.name} is {word}"
    faults = [f"{', '.join(down.values())}; `make up`, or the end of its log says why"] if down else []
    if "prefect" not in down:
        faults += last_training()
    if faults:
        raise ServiceError("\n  ".join(faults))


def last_training() -> Iterator[str]:
    """Print the training that ended last, and name it where it ended badly."""
    ended = {"state": {"type": {"any_": ["COMPLETED", "CRASHED", "FAILED"]}}}
    trains = {"name": {"any_": ["full", "retrain"]}}
    asked = {"flows": OURS, "deployments": trains, "flow_runs": ended, "sort": "END_TIME_DESC", "limit": 1}
    for run in ask("/flow_runs/filter", asked):
        told = f"{run['name']}, {moment(run['end_time'])}, {run['state_name']}"
        print(f"last training: {told}")
        if run["state_type"] != "COMPLETED":
            why = (run["state"]["message"] or "").partition("\n")[0]
            yield f"{told}: {why} Once the cause is gone: .venv/bin/prefect deployment run m3diff/full"


def is_heard() -> bool:
    """Return whether the server heard this machine's worker lately."""
    known = ask(f"/work_pools/{POOL}/workers/filter", {})
    heard = [worker["last_heartbeat_time"] for worker in known if worker["name"] == WORKER]
    return any(datetime.fromisoformat(when).timestamp() >= time.time() - SILENCE_S for when in heard if when)


def ask(path: str, body: dict[str, Any]) -> Any:
    """Return the answer of Prefect's API to a POST; raises httpx.HTTPError where there is none, or a refusal."""
    login = environment(services()[-1]).get("PREFECT_API_AUTH_STRING", "")
    auth = httpx.BasicAuth(*login.split(":", 1)) if login else None
    return httpx.post(f"{services()[0].address}/api{path}", json=body, auth=auth, timeout=10).raise_for_status().json()


def moment(when: float | str) -> str:
    """A time, in seconds of the epoch or as the server writes it, in words."""
    at = datetime.fromisoformat(when) if isinstance(when, str) else datetime.fromtimestamp(when, UTC)
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# Down


def down() -> None:
    """End what `up` or the unit started, the keeper first, then the worker with its flows, the servers last."""
    for name in ("keeper", "worker", "mlflow", "prefect"):
        found = processes()
        family = found[name] + (found["flow"] if name == "worker" else [])
        for process in family:
            with suppress(psutil.NoSuchProcess):
                if process.parent() not in family:  # the others end by it
                    process.terminate()
        _, alive = psutil.wait_procs(family, timeout=GRACE_S)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=10)
        print(f"{name}: {'ended' if family else 'not up'}")


COMMANDS = {"up": up, "down": down, "status": status, "keep": keep, "deploy": deploy}


def main(what: str) -> int:
    try:
        read_settings()
        COMMANDS[what]()
    except ServiceError as error:
        print(f"make {what}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

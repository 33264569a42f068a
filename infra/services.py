"""The services of one machine: `make up` starts a keeper, which starts a Prefect server, an MLflow server and a worker,
and starts again what ends; `make status` reports how they are, `make down` ends them. infra/units.py has systemd run
the keeper, where the machine stays on.

Everything they keep is under services/. Ports: M3DIFF_PREFECT_PORT (4200) and M3DIFF_MLFLOW_PORT (5000). The MLflow
server serves the store that `m3diff register` writes without it, so both show the same runs and versions.

A team's own databases, places and secrets are variables, of the shell or of the file services/environment, which only
its owner may read; infra/README.md lists them.
"""

import errno
import ipaddress
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as a script, as the unit and the keeper start it
from flows import GUARD, at_work
from infra.deployments import FLOW, POOL, deploy
from m3diff import PRIVACY
from m3diff.records.files import write_atomic

HOST = "127.0.0.1"
OURS = {"name": {"any_": [FLOW]}}
WORKER = socket.gethostname()
PATIENCE_S = 300  # a first start creates two databases, on cores that may be busy
GRACE_S = 40  # a stage in progress has its own grace inside
SILENCE_S = 90  # a worker is heard every 30 s
KEEP_S, MOST_PAUSE_S = 5, 300  # the keeper's look, and its longest wait before what ends again and again
AT_WORK, ENDED_BADLY = ["PENDING", "RUNNING", "CANCELLING"], ["CRASHED", "FAILED"]
HANGS_S = 180  # the worker looks after its runs every 30 s, and the server ends what it did not hear of for 90 s
LOG_BYTES = 30_000_000
SERVICES = Path("services").resolve()
BIN = Path(sys.executable).parent
SETTINGS = SERVICES / "environment"

PREFECT_STORES = ("PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL")
TOKENS = ("PREFECT_SERVER_API_AUTH_STRING", "MLFLOW_AUTH_ADMIN_PASSWORD")
SERVERS_ONLY = (*PREFECT_STORES, *TOKENS, "M3DIFF_MLFLOW_STORE", "MLFLOW_FLASK_SERVER_SECRET_KEY")
"""What the worker, and so the code of a flow's commit, does not get to see."""
SHORTEST_TOKEN = 16

AUTH = """[mlflow]
default_permission = READ
database_uri = sqlite:///{kept}/users.db
admin_username = admin
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
grant_default_workspace_access = false
"""


class ServiceError(RuntimeError):
    """A service cannot be started or is not up; the text says why and what to do."""


@dataclass(frozen=True)
class Service:
    name: str
    command: list[str]
    port: int | None = None  # None: it serves nobody
    port_variable: str = ""
    token: str = ""  # the variable of its secret

    @property
    def address(self) -> str:
        return f"http://{HOST if bind() == '0.0.0.0' else bind()}:{self.port}"

    @property
    def record(self) -> Path:
        """The file that says which process was started last."""
        return SERVICES / f"{self.name}.json"

    @property
    def log(self) -> Path:
        return SERVICES / f"{self.name}.log"

    def kept(self) -> dict[str, Any]:
        """The record of the process that was started last; empty without one."""
        try:
            return json.loads(self.record.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def process(self) -> psutil.Process | None:
        """The process that was started last, where it still runs; a number that another process took over is not it."""
        kept = self.kept()
        if kept.get("of", str(SERVICES)) != str(SERVICES):  # a copied checkout has its original's
            return None
        with suppress(KeyError, psutil.NoSuchProcess):
            process = psutil.Process(kept["pid"])
            if process.create_time() == kept["started"] and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def healthy(self) -> bool:
        """Return whether it answers: a server itself, the worker through Prefect's server, the keeper by running."""
        process = self.process()
        if self.port is None:
            return process is not None and (self.name == "keeper" or is_heard(process.create_time()))
        with suppress(httpx.HTTPError):
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
        Service("prefect", [*server, "--log-level", "warning", *at[0]], prefect, "M3DIFF_PREFECT_PORT", TOKENS[0]),
        Service("mlflow", [*tracking, *at[1]], mlflow, "M3DIFF_MLFLOW_PORT", TOKENS[1]),
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
        ServiceError: others can read the file, or a line is not NAME=value.
    """
    if not SETTINGS.exists():
        return
    if SETTINGS.stat().st_mode & 0o077:
        raise ServiceError(f"{SETTINGS} is for secrets, and others can read it: chmod 600 {SETTINGS}")
    for number, line in enumerate(SETTINGS.read_text(encoding="utf-8").splitlines(), 1):
        with suppress(ValueError):  # of quotes without an end
            if not (words := shlex.split(line, comments=True)):
                continue
            name, equals, value = words[0].partition("=")
            if len(words) == 1 and equals and name.isidentifier():
                os.environ.setdefault(name, value)
                continue
        raise ServiceError(f"{SETTINGS}, line {number}: expected NAME=value, in quotes where it has a space")


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
    """Start the keeper, wait until all answer, and print what it said.

    Raises:
        ServiceError: one is up on another port, or does not answer.
    """
    check_settings()
    own, all_ = keeper(), services()
    said = own.log.stat().st_size if own.log.exists() else 0
    if own.process() is None:
        start(own)
    else:
        for service in (own, *all_):
            if service.process() and (port := service.kept()["port"]) != service.port:
                raise ServiceError(
                    f"{service.name} is up already, on port {port}; `make down` first, or name that port"
                )
            print(f"{service.name}: already up")
    for service in all_:
        wait(service, own)
    print(own.log.read_text()[said:])
    prefect, mlflow, _ = all_
    print(f"Prefect   {prefect.address}\nMLflow    {mlflow.address}\n\nnext, here or in a second shell in this folder:")
    if prefect.port != 4200:
        print(f"  export PREFECT_API_URL={prefect.address}/api")
    print("  .venv/bin/prefect deployment run m3diff/full --watch\n  make status\n  make down")


def start(service: Service) -> None:
    """Start in a session of its own, its output at the end of services/<name>.log, in place of what is left of it.

    Raises:
        ServiceError: something else listens on its port.
    """
    end_orphans(service)
    kept = SERVICES if service.port is None else SERVICES / service.name
    kept.mkdir(parents=True, exist_ok=True)
    if service.name == "mlflow":
        (kept / "auth.ini").write_text(AUTH.format(kept=kept))
    if service.port is not None and is_taken(service.port):
        raise ServiceError(
            f"{service.name}: port {service.port} is taken by another program; end that one, or choose a port: "
            f"{service.port_variable}={service.port + 1} make up"
        )
    rotate(service.log)
    service.log.touch(mode=0o600)
    with service.log.open("a") as log:
        log.write(f"--- {service.name} started {moment(time.time())}\n")
        log.flush()
        given, output = environment(service), {"stdout": log, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(service.command, env=given, stdin=subprocess.DEVNULL, start_new_session=True, **output)
    write_record(service, child.pid)


def end_orphans(service: Service) -> None:
    """End what a killed keeper or server left, such as a child that holds its port. A worker's flows are no part of
    it."""
    kept, process = service.kept(), service.process()
    if not kept or kept.get("of", str(SERVICES)) != str(SERVICES):  # a copied checkout has its original's
        return
    if service.port is None:
        if process is not None:
            process.kill()
        return
    with suppress(psutil.Error):
        if psutil.Process(kept["pid"]).create_time() != kept["started"]:
            return  # the number, and so the group, is another's by now
    with suppress(ProcessLookupError):
        os.killpg(kept["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 10
        while is_taken(service.port) and time.monotonic() < deadline:
            time.sleep(0.05)


def write_record(service: Service, pid: int, unit: bool = False) -> None:
    """Record who runs as this service, by number and time of start, and whether systemd does: for `status`, `down` and
    the keeper, who read it at any moment."""
    kept = {"pid": pid, "started": psutil.Process(pid).create_time(), "port": service.port, "of": str(SERVICES)}
    write_atomic(service.record, json.dumps(kept | {"unit": unit}))


def rotate(log: Path) -> None:
    """Move a log that has grown past LOG_BYTES to <name>.log.1, in place of the one before.

    It is copied and emptied, since who writes it has it open; a line written in between is lost.
    """
    if log.exists() and log.stat().st_size >= LOG_BYTES:
        shutil.copyfile(log, copy := log.with_name(f"{log.name}.copy"))
        copy.replace(log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST if bind() == "0.0.0.0" else bind(), port)) in (0, errno.EAGAIN)  # or it hangs


def wait(service: Service, runs: Service) -> None:
    """Wait until a service answers.

    Args:
        runs: it or its keeper, whose log is shown where it ends.

    Raises:
        ServiceError: that ended, or the service does not answer for too long.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not service.healthy():
        if runs.process() is None or time.monotonic() > deadline:
            tail = "\n  ".join(runs.log.read_text(errors="replace").splitlines()[-10:])
            raise ServiceError(f"{service.name} does not answer; the end of {runs.log}:\n  {tail}")
        time.sleep(0.5)


def keep(unit: bool = False) -> None:
    """Start the servers, make the deployments known, start the worker. Then start again what ended, the worker once the
    server answers; what ends again and again is waited with for longer each time, up to MOST_PAUSE_S.

    Args:
        unit: systemd runs it, and ends all that it started with it.
    """
    check_settings()
    if (other := keeper().process()) is not None and other.pid != os.getpid():
        raise ServiceError("keeper is up already; `make down` first")
    SERVICES.mkdir(exist_ok=True)
    write_record(keeper(), os.getpid(), unit)
    prefect, mlflow, worker = services()
    for server in (prefect, mlflow):
        start(server)
    for server in (prefect, mlflow):
        wait(server, server)
    os.environ.update(environment(worker))
    deploy()
    start(worker)
    pauses, due = dict.fromkeys((service.name for service in services()), 0.0), dict[str, float]()
    while True:
        time.sleep(KEEP_S)
        rotate(keeper().log)
        for service in services():
            rotate(service.log)
            now, process = time.monotonic(), service.process()
            if process is not None and time.time() - process.create_time() > MOST_PAUSE_S:
                pauses[service.name] = 0
            if process is not None or now < due.get(service.name, 0):
                continue
            if service.port is None and not services()[0].healthy():
                continue
            pauses[service.name] = min(max(KEEP_S, 2 * pauses[service.name]), MOST_PAUSE_S)
            due[service.name] = now + pauses[service.name]
            print(f"{moment(time.time())}: {service.name} ended, and is started again", flush=True)
            try:
                start(service)
            except ServiceError as error:
                print(f"{moment(time.time())}: {error}", flush=True)


# Status


def status() -> None:
    """Print of each service whether it is up, where and since when, and the last training.

    Raises:
        ServiceError: a service is not up or does not answer, a run hangs, or the last training ended badly.
    """
    down = {}
    for service in [*services(), keeper()]:
        process = service.process()
        word = "not up" if process is None else "up" if service.healthy() else "not answering"
        since = f"since {moment(process.create_time())}" if process else ""
        place = service.address if service.port else f"pool {POOL}" if service.name == "worker" else ""
        print(f"{service.name:<9} {word:<14} {place:<24} {since:<32} {service.log}")
        if word != "up":
            down[service.name] = f"{service.name} is {word}"
    faults = [f"{', '.join(down.values())}; `make up`, or the end of its log says why"] if down else []
    if "prefect" not in down:
        faults += [*hanging(), *last_training()]
    if faults:
        raise ServiceError("\n  ".join(faults))


def hanging() -> Iterator[str]:
    """Name the runs that the server calls at work, for so long, and that have no process here."""
    runs = ask("/flow_runs/filter", {"flows": OURS, "flow_runs": {"state": {"type": {"any_": AT_WORK}}}})
    here, oldest = at_work([run["id"] for run in runs]), datetime.now(UTC) - timedelta(seconds=HANGS_S)
    for run in runs:
        since, whose = run["state"]["timestamp"], run["labels"].get("prefect.worker.name", WORKER)
        if (
            run["deployment_id"]
            and run["id"] not in here
            and datetime.fromisoformat(since) < oldest
            and whose == WORKER
        ):
            how = f"{run['name']} is {run['state_name']} since {moment(since)}"
            yield f"{how}, and no process works for it: `make down`, `make up`"


def last_training() -> Iterator[str]:
    """Print the training that ended last, and name it where it ended badly."""
    ended = {"state": {"type": {"any_": ["COMPLETED", *ENDED_BADLY]}}}
    trains = {"name": {"any_": ["full", "retrain"]}}
    asked = {"flows": OURS, "deployments": trains, "flow_runs": ended, "sort": "END_TIME_DESC", "limit": 1}
    for run in ask("/flow_runs/filter", asked):
        told = f"{run['name']}, {moment(run['end_time'])}, {run['state_name']}"
        print(f"last training: {told}")
        if run["state_type"] in ENDED_BADLY:
            why = (run["state"]["message"] or "").partition("\n")[0]
            yield f"{told}: {why} Once the cause is gone: .venv/bin/prefect deployment run m3diff/full"


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the answer of Prefect's API to a POST with this body, or without one to a GET.

    Raises:
        httpx.HTTPError: it does not answer, or refuses.
    """
    login = environment(services()[-1]).get("PREFECT_API_AUTH_STRING", "")
    auth = httpx.BasicAuth(*login.split(":", 1)) if login else None
    address, how = f"{services()[0].address}/api{path}", "GET" if body is None else "POST"
    return httpx.request(how, address, json=body, auth=auth, timeout=10).raise_for_status().json()


def is_heard(since: float) -> bool:
    """Return whether the server heard this machine's worker since a time (seconds of the epoch), and lately."""
    try:
        known = ask(f"/work_pools/{POOL}/workers/filter", {})
    except httpx.HTTPError:
        return False
    oldest = max(since - 1, time.time() - SILENCE_S)
    heard = [worker["last_heartbeat_time"] for worker in known if worker["name"] == WORKER]
    return any(datetime.fromisoformat(moment).timestamp() >= oldest for moment in heard if moment)


def moment(when: float | str) -> str:
    """A time, in seconds of the epoch or as the server writes it, in words."""
    at = datetime.fromisoformat(when) if isinstance(when, str) else datetime.fromtimestamp(when, UTC)
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# Down


def down() -> None:
    """End what `up` started, the keeper first, then the worker, with everything under it; records of what is gone are
    removed. What systemd runs is left to it: it would be started again."""
    if keeper().process() and keeper().kept().get("unit"):
        print("the services run as a unit; `make uninstall-services`, or systemctl stop m3diff")
        return
    for service in (keeper(), *reversed(services())):
        process = service.process()
        if process is None:
            end_orphans(service)
            print(f"{service.name}: not up")
        else:
            family = [process] if service.name == "keeper" else [process, *process.children(recursive=True)]
            process.terminate()  # and with it the others, which it started
            _, alive = psutil.wait_procs(family, timeout=GRACE_S)
            for member in alive:
                member.kill()
            psutil.wait_procs(alive, timeout=10)
            print(f"{service.name}: ended")
        service.record.unlink(missing_ok=True)


COMMANDS = {"up": up, "down": down, "status": status, "run": partial(keep, unit=True), "keep": keep, "deploy": deploy}


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

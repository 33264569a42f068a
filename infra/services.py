"""The services of one machine: `make up` starts a Prefect server, an MLflow server, a worker and a keeper that starts
these again, `make status` says how they are, `make down` ends them. infra/units.py has systemd run the same commands,
without the keeper, where the machine stays on.

Everything they keep lies under services/. Ports: M3DIFF_PREFECT_PORT (4200) and M3DIFF_MLFLOW_PORT (5000). The MLflow
server serves the store that `m3diff register` writes without it, so both show the same runs and versions.

A team's own databases, places and secrets are variables, of the shell or of the file services/environment, which only
its owner may read; infra/README.md lists them.
"""

import base64
import fcntl
import importlib.util
import ipaddress
import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as a script, as units and the keeper start it
from flows import GUARD
from flows.processes import at_work
from infra.deployments import FLOW, POOL, deploy
from m3diff import PRIVACY
from m3diff.records.files import write_atomic

HOST = "127.0.0.1"
WORKER = socket.gethostname()
PATIENCE_S = 300  # a first start creates two databases, on cores that may be busy
GRACE_S = 40  # a stage in progress has its own grace inside
SILENCE_S = 90  # a worker is heard every 30 s
KEEP_S, MOST_PAUSE_S = 5, 300  # the keeper's look, and its longest wait before what ends again and again
AT_WORK, ENDED_BADLY = ("PENDING", "RUNNING", "CANCELLING"), ("CRASHED", "FAILED")
HANGS_S = 180  # the worker looks after its runs every 30 s, and the server ends what it did not hear of for 90 s
LOG_BYTES, LOGS_KEPT = 10_000_000, 5
SERVICES = Path("services").resolve()
BIN = Path(sys.executable).parent
SETTINGS = SERVICES / "environment"

PREFECT_STORES = ("PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL")
TOKENS = ("PREFECT_SERVER_API_AUTH_STRING", "MLFLOW_AUTH_ADMIN_PASSWORD")
SERVERS_ONLY = (*PREFECT_STORES, *TOKENS, "M3DIFF_MLFLOW_STORE", "MLFLOW_FLASK_SERVER_SECRET_KEY")
"""What the worker, and so the code of a flow's commit, does not get to see."""
SHORTEST_TOKEN = 16
NEW_TOKEN = "python -c 'import secrets; print(secrets.token_hex())'"


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
    port: int | None  # None: it serves nobody
    port_variable: str = ""
    token: str = ""  # the variable of its secret

    @property
    def address(self) -> str:
        return f"http://{reached_at()}:{self.port}"

    @property
    def record(self) -> Path:
        return SERVICES / f"{self.name}.json"

    @property
    def log(self) -> Path:
        return SERVICES / f"{self.name}.log"

    def process(self) -> psutil.Process | None:
        """The process that `up` or a unit started, where it still runs; a number that another process took over is
        not it."""
        try:
            kept = json.loads(self.record.read_text())
            process = psutil.Process(kept["pid"])
            same = process.create_time() == kept["started"] and process.status() != psutil.STATUS_ZOMBIE
            same = same and kept.get("of", str(SERVICES)) == str(SERVICES)  # a copied checkout has its original's
        except (FileNotFoundError, json.JSONDecodeError, psutil.NoSuchProcess):
            return None
        return process if same else None

    def by_systemd(self) -> bool:
        return self.process() is not None and json.loads(self.record.read_text()).get("unit", False)

    def healthy(self) -> bool:
        if self.name == "keeper":
            return self.process() is not None
        if self.port is None:
            return (process := self.process()) is not None and is_heard(process.create_time())
        path = "/api/health" if self.name == "prefect" else "/health"
        try:
            urllib.request.urlopen(self.address + path, timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True


def services() -> list[Service]:
    """In the order of their start: the worker needs both servers."""
    prefect, mlflow = port("M3DIFF_PREFECT_PORT", 4200), port("M3DIFF_MLFLOW_PORT", 5000)
    login = ["--app-name", "basic-auth"] if "MLFLOW_AUTH_ADMIN_PASSWORD" in os.environ else []
    return [
        Service(
            "prefect",
            [f"{BIN}/uvicorn", "--factory", "prefect.server.api.server:create_app", "--log-level", "warning"]
            + ["--host", bind(), "--port", str(prefect)],  # `prefect server start` takes no GUARD
            prefect,
            "M3DIFF_PREFECT_PORT",
            TOKENS[0],
        ),
        Service(
            "mlflow",
            [f"{BIN}/mlflow", "server", "--host", bind(), "--port", str(mlflow), "--workers", "1"]
            + ["--no-serve-artifacts", *login],
            mlflow,
            "M3DIFF_MLFLOW_PORT",
            TOKENS[1],
        ),
        Service(
            "worker",
            [sys.executable, "-m", "flows.worker", "worker", "start", "--pool", POOL, "--name", WORKER]
            + ["--limit", flows_at_once()],
            None,
        ),
    ]


def keeper() -> Service:
    return Service("keeper", [sys.executable, str(Path(__file__).resolve()), "keep"], None)


def flows_at_once() -> str:
    """How many flow runs this machine works on side by side; of equal ones all but one wait anyway."""
    given = os.environ.get("M3DIFF_FLOWS", "2")
    if not (given.isdecimal() and int(given) > 0):
        raise ServiceError(f"M3DIFF_FLOWS={given} is no number of flow runs; give 1 or more")
    return given


def port(variable: str, usual: int) -> int:
    given = os.environ.get(variable, str(usual))
    if not (given.isdecimal() and 0 < int(given) < 65536):
        raise ServiceError(f"{variable}={given} is no port; give a number from 1 to 65535")
    return int(given)


def bind() -> str:
    return os.environ.get("M3DIFF_BIND", HOST)


def reached_at() -> str:
    return HOST if bind() == "0.0.0.0" else bind()


def is_open() -> bool:
    """Whether other machines can reach the servers."""
    try:
        return not ipaddress.ip_address(bind()).is_loopback
    except ValueError:
        return bind() != "localhost"


def environment(service: Service) -> dict[str, str]:
    """What a service sees, and the flows under the worker: nothing sent out, everything under services/. Secrets are
    passed on here and never on a command line, which every user of the machine can read."""
    prefect, mlflow, _ = services()
    given = os.environ | PRIVACY
    if service.name == "worker":
        given = {name: value for name, value in given.items() if name not in SERVERS_ONLY}
    pages = ",".join(f"http://{name}:{prefect.port}" for name in (HOST, "localhost"))
    return (
        logins()
        | {"PREFECT_SERVER_CORS_ALLOWED_ORIGINS": pages}
        | given
        | (mlflow_store() if service.name == "mlflow" else {})
        | {
            "PREFECT_HOME": str(SERVICES / "prefect"),
            "PREFECT_API_URL": f"{prefect.address}/api",
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes for jobs that nothing here asks for
            "UVICORN_HTTP": "auto" if service.token in os.environ else GUARD,
            "LC_ALL": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
        }
    )


def logins() -> dict[str, str]:
    """What a client needs where a token is set: the servers' own, unless it was given another."""
    found = {}
    if token := os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        found["PREFECT_API_AUTH_STRING"] = token
    if password := os.environ.get("MLFLOW_AUTH_ADMIN_PASSWORD"):
        user = os.environ.get("MLFLOW_AUTH_ADMIN_USERNAME", "admin")
        found |= {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}
    return found


def mlflow_store() -> dict[str, str]:
    """Where MLflow keeps runs, artifacts and, with a password set, its users."""
    kept = SERVICES / "mlflow"
    store = {
        "MLFLOW_BACKEND_STORE_URI": os.environ.get("M3DIFF_MLFLOW_STORE", f"sqlite:///{kept}/mlflow.db"),
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": os.environ.get("M3DIFF_MLFLOW_ARTIFACTS", (kept / "artifacts").as_uri()),
    }
    if "MLFLOW_AUTH_ADMIN_PASSWORD" in os.environ:
        store["MLFLOW_AUTH_CONFIG_PATH"] = str(kept / "auth.ini")
        store["MLFLOW_FLASK_SERVER_SECRET_KEY"] = secrets.token_hex(32)  # of the page's forms, from start to start
    return store


def prepare(service: Service) -> None:
    """Make the folder that a service writes to, and MLflow's rules for its users."""
    kept = SERVICES if service.port is None else SERVICES / service.name
    kept.mkdir(parents=True, exist_ok=True)
    if service.name == "mlflow":
        (kept / "auth.ini").write_text(AUTH.format(kept=kept))


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
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = [""]
        if not words:
            continue
        name, equals, value = words[0].partition("=")
        if len(words) > 1 or not equals or not name.isidentifier():
            raise ServiceError(f"{SETTINGS}, line {number}: expected NAME=value, in quotes where it has a space")
        os.environ.setdefault(name, value)


def check_settings() -> None:
    """Name every fault of a team's variables before anything is started.

    Raises:
        ServiceError: a store that its server cannot use, a package that is missing, or a server that would be open to
            others without a token.
    """
    if faults := [*faults_of_stores(), *faults_of_tokens()]:
        raise ServiceError("\n  ".join([f"{len(faults)} setting(s) to correct, nothing was started", *faults]))


def faults_of_stores() -> list[str]:
    faults = []
    for name in PREFECT_STORES:
        if not os.environ.get(name, "postgresql+asyncpg://").startswith(
            ("postgresql+asyncpg://", "sqlite+aiosqlite://")
        ):
            faults.append(f"{name}: Prefect takes postgresql+asyncpg://user:password@host/database")
    store = os.environ.get("M3DIFF_MLFLOW_STORE", "sqlite:///")
    if not store.startswith(("postgresql://", "sqlite:////", "sqlite:///")):
        faults.append("M3DIFF_MLFLOW_STORE: give postgresql://user:password@host/database")
    artifacts = os.environ.get("M3DIFF_MLFLOW_ARTIFACTS", "file:///")
    if not artifacts.startswith(("s3://", "file:///")):
        faults.append(f"M3DIFF_MLFLOW_ARTIFACTS={artifacts}: give s3://bucket/folder or file:///folder")
    needed = {
        "psycopg2": store.startswith("postgresql"),
        "boto3": artifacts.startswith("s3:"),
        "flask_wtf": "MLFLOW_AUTH_ADMIN_PASSWORD" in os.environ,
    }
    missing = [
        package for package, is_needed in needed.items() if is_needed and importlib.util.find_spec(package) is None
    ]
    if missing:
        faults.append(f"{', '.join(missing)}: not installed; pip install -c constraints.txt -e '.[team]'")
    return faults


def faults_of_tokens() -> list[str]:
    faults = ["M3DIFF_BIND: give an IPv4 address or a name"] if ":" in bind() else []
    for name in TOKENS:
        token = os.environ.get(name)
        if token is None and is_open():
            faults.append(
                f"M3DIFF_BIND={bind()} lets other machines in, and whoever reaches a server without a token runs code "
                f"here: set {name} in {SETTINGS}, or leave M3DIFF_BIND out"
            )
        elif token is not None and len(token.rpartition(":")[2]) < SHORTEST_TOKEN:
            faults.append(f"{name}: {SHORTEST_TOKEN} characters at least; {NEW_TOKEN} makes one")
    if ":" not in os.environ.get("PREFECT_SERVER_API_AUTH_STRING", ":"):
        faults.append("PREFECT_SERVER_API_AUTH_STRING: expected user:token")
    return faults


def up() -> None:
    check_settings()
    prefect, mlflow, worker = services()
    for server in (prefect, mlflow):
        start(server)
    for server in (prefect, mlflow):
        wait(server)
    os.environ.update(environment(worker))
    deploy()
    start(worker)
    wait(worker)
    if not worker.by_systemd():
        start(keeper())
    print(
        f"\nPrefect   {prefect.address}\nMLflow    {mlflow.address}\n\nnext, here or in a second shell in this folder:"
    )
    if prefect.port != 4200:
        print(f"  export PREFECT_API_URL={prefect.address}/api")
    print("  .venv/bin/prefect deployment run m3diff/full --watch\n  make status\n  make down")


def start(service: Service) -> None:
    """Start in a session of its own, its output at the end of services/<name>.log.

    Raises:
        ServiceError: something else listens on its port.
    """
    prepare(service)
    with (SERVICES / "start.lock").open("a") as lock:  # `up` and the keeper may find it missing at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if service.process() is not None:
            if (port := json.loads(service.record.read_text())["port"]) != service.port:
                raise ServiceError(
                    f"{service.name} is up already, on port {port}; `make down` first, or name that port"
                )
            print(f"{service.name}: already up")
            return
        end_orphans(service)
        check_port(service)
        with open_log(service) as log:
            child = subprocess.Popen(
                service.command,
                env=environment(service),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        write_record(service, child.pid)
    print(f"{service.name}: starting")


def end_orphans(service: Service) -> None:
    """End what a server that was killed left of itself, such as a child that holds its port. A worker's flows are no
    part of it."""
    if service.port is None or not service.record.exists():
        return
    kept = json.loads(service.record.read_text())
    with suppress(psutil.Error):
        if psutil.Process(kept["pid"]).create_time() != kept["started"]:
            return  # the number, and so the session, is another's by now
    left = []
    for process in psutil.process_iter():
        with suppress(OSError):
            if os.getsid(process.pid) == kept["pid"] != process.pid:
                left.append(process)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=10)


def check_port(service: Service) -> None:
    if service.port is not None and is_taken(service.port):
        raise ServiceError(
            f"{service.name}: port {service.port} is taken by another program; end that one, or choose a port: "
            f"{service.port_variable}={service.port + 1} make up"
        )


def write_record(service: Service, pid: int) -> None:
    """Who runs as this service: the process by number and time of start, and whether systemd watches over it."""
    kept = {"pid": pid, "started": psutil.Process(pid).create_time(), "port": service.port, "of": str(SERVICES)}
    unit = "INVOCATION_ID" in os.environ and pid == os.getpid()
    write_atomic(service.record, json.dumps(kept | {"unit": unit}))  # `status` and the keeper read it at any moment


def open_log(service: Service) -> Any:
    """The service's log, opened to be appended to, with a line that says when this start was."""
    rotate(service.log)
    log = service.log.open("a")
    log.write(f"--- {service.name} started {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n")
    log.flush()
    return log


def rotate(log: Path) -> None:
    """Move a log that has grown past LOG_BYTES to <name>.log.1, older ones on by one, and keep LOGS_KEPT of them.

    It is copied and emptied, since who writes it has it open; a line written in between is lost.
    """
    if not log.exists() or log.stat().st_size < LOG_BYTES:
        return
    for number in range(LOGS_KEPT - 1, 0, -1):
        older = log.with_name(f"{log.name}.{number}")
        if older.exists():
            older.replace(log.with_name(f"{log.name}.{number + 1}"))
    copy = log.with_name(f"{log.name}.copy")
    shutil.copyfile(log, copy)
    copy.replace(log.with_name(f"{log.name}.1"))
    os.truncate(log, 0)


def rotate_all() -> None:
    for service in services():
        rotate(service.log)


def run(name: str) -> None:
    """Become one service, as a unit of systemd asks: the same command, environment and log as with `up`.

    Raises:
        ServiceError: it runs already, its port is taken, or, for the worker, Prefect's server does not answer.
    """
    check_settings()
    service = {service.name: service for service in services()}[name]
    if service.process() is not None:
        raise ServiceError(f"{name} is up already; `make down` first")
    check_port(service)
    prepare(service)
    if service.port is None:
        wait_for_server()
        os.environ.update(environment(service))
        deploy()
    with open_log(service) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    write_record(service, os.getpid())
    os.execve(service.command[0], service.command, environment(service))


def keep() -> None:
    """Start again what `up` started and what ended since, the worker once the server answers. What ends again and again
    is waited with for longer each time, up to MOST_PAUSE_S."""
    pauses, due = dict.fromkeys((service.name for service in services()), 0.0), dict[str, float]()
    while True:
        time.sleep(KEEP_S)
        for service in services():
            now, process = time.monotonic(), service.process()
            if process is not None and time.time() - process.create_time() > MOST_PAUSE_S:
                pauses[service.name] = 0
            if process is not None or not service.record.exists() or now < due.get(service.name, 0):
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


def wait_for_server() -> None:
    prefect = services()[0]
    deadline = time.monotonic() + PATIENCE_S
    while not prefect.healthy():
        if time.monotonic() > deadline:
            raise ServiceError(f"worker: Prefect at {prefect.address} did not answer within {PATIENCE_S} s")
        time.sleep(0.5)


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((reached_at(), port)) == 0


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


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    """What Prefect's server answers to a question of its API; without a body to a GET.

    Raises:
        OSError: it does not answer, or refuses.
    """
    sent = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"{services()[0].address}/api{path}", sent)
    asked.add_header("Content-Type", "application/json")
    if token := (logins() | dict(os.environ)).get("PREFECT_API_AUTH_STRING"):
        asked.add_header("Authorization", f"Basic {base64.b64encode(token.encode()).decode()}")
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return json.load(answer)


def is_heard(since: float) -> bool:
    """Whether the server has heard this machine's worker since a time (seconds of the epoch), and lately."""
    try:
        known = ask(f"/work_pools/{POOL}/workers/filter", {})
    except OSError:
        return False
    oldest = max(since - 1, time.time() - SILENCE_S)
    heard = [worker["last_heartbeat_time"] for worker in known if worker["name"] == WORKER]
    return any(datetime.fromisoformat(moment).timestamp() >= oldest for moment in heard if moment)


def status() -> None:
    """Say of each service whether it is up, where and since when, and of the flow the last runs, what waits since it is
    paused, and what hangs.

    Raises:
        ServiceError: one is not up or does not answer, or a run hangs.
    """
    shown = [*services(), *([] if any(service.by_systemd() for service in services()) else [keeper()])]
    found = {service.name: state(service) for service in shown}
    for service in shown:
        process = service.process()
        since = f"since {moment(process.create_time())}" if process else ""
        place = service.address if service.port else f"pool {POOL}" if service.name == "worker" else ""
        print(f"{service.name:<9} {found[service.name]:<14} {place:<24} {since:<32} {service.log}")
    faults = []
    if down := [f"{name} is {word}" for name, word in found.items() if word != "up"]:
        faults.append(f"{', '.join(down)}; `make up`, or the end of its log says why")
    if found["prefect"] == "up":
        print(f"last scheduled run:   {last_scheduled()}\nlast successful run:  {last_successful()}")
        faults += hanging()
    if faults:
        raise ServiceError("\n  ".join(faults))


def hanging() -> list[str]:
    """What hangs, each with what to do: runs of the last week that the server calls at work and that have no process
    here, runs that are due and that nobody takes, and trainings that ended badly with none that ended well since."""
    ours, now = {"flows": {"name": {"any_": [FLOW]}}}, datetime.now(UTC)
    week = {"after_": (now - timedelta(days=7)).isoformat(), "before_": now.isoformat()}
    wanted = {"state": {"type": {"any_": [*AT_WORK, *ENDED_BADLY, "SCHEDULED"]}}, "expected_start_time": week}
    asked = ours | {"flow_runs": wanted, "sort": "EXPECTED_START_TIME_DESC"}
    names = {one["id"]: one["name"] for one in ask("/deployments/filter", ours)}
    runs = [run for run in ask("/flow_runs/filter", asked) if run["deployment_id"] in names]
    here = at_work([run["id"] for run in runs])
    busy = here or any(run["state_type"] in AT_WORK for run in runs)
    found = []
    for run in [run for run in runs if run["id"] not in here or run["state_type"] == "FAILED"]:
        kind, what = run["state_type"], names[run["deployment_id"]]
        since = datetime.fromisoformat(run["expected_start_time"] if kind == "SCHEDULED" else run["state"]["timestamp"])
        named = f"{run['name']} of m3diff/{what} is {run['state_name']} since {moment(since.timestamp())}"
        mine = run["labels"].get("prefect.worker.name", WORKER) == WORKER
        if now - since < timedelta(seconds=HANGS_S) and kind != "FAILED":
            continue
        if kind in AT_WORK and mine:
            found.append(f"{named}, and no process works for it: `make down`, `make up`")
        elif kind == "SCHEDULED" and not busy and not is_paused():
            found.append(f"{named}, and nobody takes it: `make down`, `make up`")
        elif kind in ENDED_BADLY and what != "watch" and not went_well(since):
            why = (run["state"]["message"] or "").partition("\n")[0]
            found.append(f"{named}: {why} Once the cause is gone: .venv/bin/prefect deployment run m3diff/{what}")
    return found


def is_paused() -> bool:
    """Whether a person paused the work pool on Prefect's page, which is said."""
    paused = ask(f"/work_pools/{POOL}")["is_paused"]
    if paused:
        print(f"work pool {POOL} is paused on Prefect's page, and no run begins")
    return paused


def went_well(since: datetime) -> bool:
    """Whether a training completed since this time."""
    done = {"state": {"type": {"any_": ["COMPLETED"]}}, "end_time": {"after_": since.isoformat()}}
    trains = {"name": {"any_": ["full", "retrain"]}}
    return bool(ask("/flow_runs/filter", {"flow_runs": done, "deployments": trains, "limit": 1}))


def state(service: Service) -> str:
    if service.process() is None:
        return "not up"
    return "up" if service.healthy() else "not answering"


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def last_scheduled() -> str:
    due = {"expected_start_time": {"before_": datetime.now(UTC).isoformat()}, "tags": {"all_": ["auto-scheduled"]}}
    return last({"flow_runs": due, "sort": "EXPECTED_START_TIME_DESC"}, "expected_start_time")


def last_successful() -> str:
    return last({"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}, "sort": "END_TIME_DESC"}, "end_time")


def last(question: dict[str, Any], time_of: str) -> str:
    runs = ask("/flow_runs/filter", question | {"limit": 1})
    if not runs:
        return "none"
    when = moment(datetime.fromisoformat(runs[0][time_of]).timestamp())
    return f"{runs[0]['name']}, {when}, {runs[0]['state_name']}"


def down() -> None:
    """End what `up` started, the keeper first, then the worker, with everything under it; records of what is gone are
    removed.

    What systemd runs is left to it: it would be started again.
    """
    for service in (keeper(), *reversed(services())):
        process = service.process()
        if service.by_systemd():
            print(f"{service.name}: runs as a unit; `make uninstall-services`, or systemctl stop m3diff-{service.name}")
            continue
        if process is None:
            end_orphans(service)
            print(f"{service.name}: not up")
        else:
            end([process] if service.name == "keeper" else [process, *process.children(recursive=True)])
            print(f"{service.name}: ended")
        service.record.unlink(missing_ok=True)


def end(family: list[psutil.Process]) -> None:
    """End the first of these, and with it the others, which it started."""
    family[0].terminate()
    _, alive = psutil.wait_procs(family, timeout=GRACE_S)
    for member in alive:
        member.kill()
    psutil.wait_procs(alive, timeout=10)


COMMANDS = {"up": up, "down": down, "status": status, "deploy": deploy, "run": run, "keep": keep, "rotate": rotate_all}


def main(what: str, *names: str) -> int:
    try:
        read_settings()
        COMMANDS[what](*names)
    except ServiceError as error:
        print(f"make {what}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

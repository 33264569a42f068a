"""Servers for real, on this machine alone: those of `make up`, one of Prefect, a listener to notices, and a team's
(PostgreSQL, SSH, an S3-compatible store).

Each leaves nothing behind. What is not installed is named with the command that installs it.
"""

import contextlib
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import psutil

PATIENCE_S = 60
UNTIL_S = 400
REPOSITORY = Path(__file__).parents[1]
SECRET = "only-for-tests"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def until(condition: Callable[[], Any], seconds: float = UNTIL_S) -> Any:
    """Wait for what is true in the end, and give it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)
    return found


def ask_prefect(api: str, method: str, path: str, body: Any = None, login: str = "") -> Any:
    """The answer of a Prefect server, which is asked again where its SQLite is busy."""
    import httpx

    auth = tuple(login.split(":", 1)) if login else None
    for _ in range(20):
        answer = httpx.request(method, api + path, json=body, auth=auth, timeout=60)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            break
    return answer.raise_for_status().json() if answer.content else None


class Machine:
    """The project's folder as a person has it: `make up`, and a second shell."""

    def __init__(self, root: Path, **more: str) -> None:
        self.prefect = free_port()
        self.mlflow = free_port()
        ours = {"M3DIFF_PREFECT_PORT": self.prefect, "M3DIFF_MLFLOW_PORT": self.mlflow}
        self.root = root
        self.environment = os.environ | {name: str(port) for name, port in ours.items()} | more
        self.environment["PREFECT_API_URL"] = f"http://127.0.0.1:{self.prefect}/api"
        self.environment["PREFECT_WORKER_QUERY_SECONDS"] = "1"  # by default 10

    def run(self, *command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *command], cwd=self.root, env=self.environment, capture_output=True, text=True
        )

    def make(self, what: str) -> subprocess.CompletedProcess:
        return self.run(str(REPOSITORY / "infra" / "services.py"), what)

    def up(self) -> None:
        started = self.make("up")
        assert started.returncode == 0, started.stdout + started.stderr

    def ask(self, path: str, body: Any = None, method: str = "") -> Any:
        """The answer of Prefect's API; with a body by POST."""
        login = self.environment.get("PREFECT_API_AUTH_STRING", "")
        method = method or ("GET" if body is None else "POST")
        return ask_prefect(self.environment["PREFECT_API_URL"], method, path, body, login)

    def runs(self, *names: str) -> list[dict[str, Any]]:
        return self.ask("/flow_runs/filter", {"flow_runs": {"name": {"any_": [*names]}}})

    def states(self, *names: str) -> list[str]:
        return sorted(run["state_name"] for run in self.runs(*names))

    def begin(self, deployment: str, name: str, *more: str) -> dict[str, Any]:
        """Run a deployment from the second shell; the flow run."""
        done = self.run("-m", "prefect", "deployment", "run", deployment, "--flow-run-name", name, *more)
        assert done.returncode == 0, done.stdout + done.stderr + (self.root / "services" / "worker.log").read_text()
        (run,) = self.runs(name)
        return run

    def run_deployment(self, deployment: str, name: str) -> tuple[str, dict[str, str]]:
        """Run it to the end; the state of the flow run, and of each of its tasks, by name."""
        run = self.begin(deployment, name, "--watch")
        tasks = self.ask("/task_runs/filter", {"flow_runs": {"name": {"any_": [name]}}})
        return run["state_name"], {task["name"]: task["state_name"] for task in tasks}

    def process(self, service: str) -> psutil.Process:
        """The process of a service; raises IndexError where it is not up."""
        from infra.processes import running_processes

        return running_processes(self.root.resolve() / "services")[service][0]


@contextlib.contextmanager
def services_of(root: Path, **environment: str) -> Iterator[Machine]:
    """The services of `make up` in this project."""
    machine = Machine(root, **environment)
    try:
        machine.up()
        yield machine
    finally:
        machine.make("down")


@contextlib.contextmanager
def prefect_server(home: Path, port: int = 0) -> Iterator[dict[str, str]]:
    """A Prefect server of its own; the environment for those who use it."""
    home.mkdir(parents=True, exist_ok=True)
    given = str(port or free_port())
    ours = {"PREFECT_HOME": str(home), "PREFECT_API_URL": f"http://127.0.0.1:{given}/api", "DO_NOT_TRACK": "true"}
    environment = os.environ | ours | {"PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", given]
    health = f"{ours['PREFECT_API_URL']}/health"
    with started(command, home / "server.log", lambda: answers(health), 300, signal.SIGKILL, env=environment):
        yield environment


class Listener:
    """A web server on this machine that keeps what it is sent, or refuses it."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.code = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if outer.code == 200:
                    outer.got.append(json.loads(body))
                self.send_response(outer.code)
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"json://user:secret-word@127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


# A team's


class Postgres(NamedTuple):
    port: int
    user: str

    def create(self, database: str) -> str:
        """A new database; its address without the scheme's driver: `postgresql://...`."""
        import psycopg2

        connection = psycopg2.connect(self.url("postgres"))
        connection.autocommit = True
        connection.cursor().execute(f'CREATE DATABASE "{database}"')
        connection.close()
        return self.url(database)

    def url(self, database: str) -> str:
        return f"postgresql://{self.user}:{SECRET}@127.0.0.1:{self.port}/{database}"


class Ssh(NamedTuple):
    """`remote` has the options of a DVC remote that keeps its files under `folder`."""

    folder: Path
    remote: dict[str, str]


class S3(NamedTuple):
    """`environment` is what boto3, and so DVC and MLflow, read."""

    bucket: str
    environment: dict[str, str]


def program(name: str, package: str, *folders: str) -> str:
    """The program's path. Raises RuntimeError if it is not installed."""
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *folders]))
    if found is None:
        raise RuntimeError(f"{name} is not on this machine: apt-get install -y --no-install-recommends {package}")
    return found


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def started(
    command: list[str],
    log: Path,
    is_up: Callable[[], bool],
    patience_s: float = PATIENCE_S,
    *signs: int,
    **options: object,
) -> Iterator[None]:
    """Run a server while the block runs; SIGINT, then SIGKILL, or these signals end it with its group."""
    with log.open("ab") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, **options)
    deadline = time.monotonic() + patience_s
    try:
        while not is_up():
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} does not answer: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        for sign in signs or (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """PostgreSQL with a password; as root it runs as the package's own account, since it refuses to run as root."""
    bins = [str(path) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    server, initdb = (program(name, "postgresql", *bins) for name in ("postgres", "initdb"))
    account = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}
    user = "postgres" if account else getpass.getuser()
    with tempfile.TemporaryDirectory(prefix="m3diff-postgres-") as place:
        folder = Path(place)
        port = free_port()
        password = folder / "password"
        password.write_text(SECRET)
        if account:
            for path in (folder, password):
                shutil.chown(path, "postgres", "postgres")
        make = [initdb, "-D", str(folder / "data"), "-U", user, "--pwfile", str(password), "--auth=scram-sha-256"]
        subprocess.run(
            [*make, "--no-sync", "-E", "UTF8", "--locale=C"], check=True, capture_output=True, cwd=folder, **account
        )
        command = [server, "-D", str(folder / "data"), "-p", str(port), "-k", str(folder), "-h", "127.0.0.1"]
        found = Postgres(port, user)
        with started(command, folder.with_suffix(".log"), lambda: accepts(found), cwd=folder, **account):
            yield found
        folder.with_suffix(".log").unlink()


def accepts(server: Postgres) -> bool:
    """Whether PostgreSQL takes a connection: it listens before it is ready."""
    import psycopg2

    try:
        psycopg2.connect(server.url("postgres")).close()
    except psycopg2.OperationalError:
        return False
    return True


@contextlib.contextmanager
def ssh() -> Iterator[Ssh]:
    """An SSH server with keys of its own, which lets in the current user by one key and nobody by password."""
    sshd = program("sshd", "openssh-server", "/usr/sbin")
    keygen = program("ssh-keygen", "openssh-client")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd separates its privileges
    with tempfile.TemporaryDirectory(prefix="m3diff-ssh-") as place:
        folder = Path(place)
        port = free_port()
        for name in ("host", "client"):
            subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        (folder / "remote").mkdir()
        settings = {
            "Port": str(port),
            "ListenAddress": "127.0.0.1",
            "HostKey": str(folder / "host"),
            "AuthorizedKeysFile": str(folder / "client.pub"),
            "PidFile": str(folder / "pid"),
            "StrictModes": "no",  # the temporary folder's parents are everybody's
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "UsePAM": "no",
            "PermitRootLogin": "prohibit-password",
            "Subsystem": "sftp internal-sftp",
        }
        (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        command = [sshd, "-D", "-e", "-f", str(folder / "config")]
        with started(command, folder / "log", lambda: listens(port)):
            place = {"url": f"ssh://{getpass.getuser()}@127.0.0.1:{port}{folder}/remote", "allow_agent": "false"}
            yield Ssh(folder / "remote", place | {"keyfile": str(folder / "client")})


@contextlib.contextmanager
def s3(bucket: str = "m3diff") -> Iterator[S3]:
    """A store that speaks S3 (moto), in memory, with one empty bucket."""
    import boto3

    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
    with (
        tempfile.TemporaryDirectory(prefix="m3diff-s3-") as place,
        started(command, Path(place) / "log", lambda: answers(f"{address}/moto-api/")),
    ):
        given = {"aws_access_key_id": "test", "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=address, **given).create_bucket(Bucket=bucket)
        yield S3(bucket, keys | {"AWS_EC2_METADATA_DISABLED": "true", "MLFLOW_S3_ENDPOINT_URL": address})


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except OSError:
        return False
    return True

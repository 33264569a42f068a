"""Start real servers on this machine: those of `make up`, Prefect's server, a listener for alerts, and those of a team
(PostgreSQL, SSH, an S3-compatible store).

Each server ends with its block and leaves no files. If a program is missing, the error names the command that installs
it.
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition: Callable[[], Any], seconds: float = UNTIL_S) -> Any:
    """Wait until a condition is true, and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"the condition was not met within {seconds:.0f} s"
        time.sleep(0.2)
    return value


def ask_prefect(api: str, method: str, path: str, body: Any = None, login: str = "") -> Any:
    """Return the answer of a Prefect server. The request is sent again if the server's SQLite is busy."""
    import httpx

    auth = tuple(login.split(":", 1)) if login else None
    for _ in range(20):
        answer = httpx.request(method, api + path, json=body, auth=auth, timeout=60)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            break
    return answer.raise_for_status().json() if answer.content else None


class Machine:
    """A user's project folder with the services of `make up`, and a second shell."""

    def __init__(self, root: Path, **variables: str) -> None:
        self.prefect = free_port()
        self.mlflow = free_port()
        ports = {"M3DIFF_PREFECT_PORT": str(self.prefect), "M3DIFF_MLFLOW_PORT": str(self.mlflow)}
        self.root = root
        self.environment = os.environ | ports | variables
        self.environment["PREFECT_API_URL"] = f"http://127.0.0.1:{self.prefect}/api"
        self.environment["PREFECT_WORKER_QUERY_SECONDS"] = "1"  # by default 10

    def run(self, *command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *command], cwd=self.root, env=self.environment, capture_output=True, text=True
        )

    def make(self, target: str) -> subprocess.CompletedProcess:
        """Run `make up`, `make status` or `make down`."""
        return self.run(str(REPOSITORY / "infra" / "services.py"), target)

    def up(self) -> None:
        result = self.make("up")
        assert result.returncode == 0, result.stdout + result.stderr

    def ask(self, path: str, body: Any = None, method: str = "") -> Any:
        """Return the answer of Prefect's API. A request with a body is a POST by default."""
        login = self.environment.get("PREFECT_API_AUTH_STRING", "")
        method = method or ("GET" if body is None else "POST")
        return ask_prefect(self.environment["PREFECT_API_URL"], method, path, body, login)

    def runs(self, *names: str) -> list[dict[str, Any]]:
        return self.ask("/flow_runs/filter", {"flow_runs": {"name": {"any_": [*names]}}})

    def states(self, *names: str) -> list[str]:
        return sorted(run["state_name"] for run in self.runs(*names))

    def begin(self, deployment: str, name: str, *options: str) -> dict[str, Any]:
        """Run a deployment from the second shell and return the flow run."""
        result = self.run("-m", "prefect", "deployment", "run", deployment, "--flow-run-name", name, *options)
        if result.returncode:
            log = (self.root / "services" / "worker.log").read_text()
            raise AssertionError(result.stdout + result.stderr + log)
        (run,) = self.runs(name)
        return run

    def run_deployment(self, deployment: str, name: str) -> tuple[str, dict[str, str]]:
        """Run a deployment to its end. Return the state of the flow run, and the state of each task by name."""
        run = self.begin(deployment, name, "--watch")
        tasks = self.ask("/task_runs/filter", {"flow_runs": {"name": {"any_": [name]}}})
        return run["state_name"], {task["name"]: task["state_name"] for task in tasks}

    def process(self, service: str) -> psutil.Process:
        """Return the process of a service. Raise IndexError if the service is not running."""
        from infra.processes import running_processes

        return running_processes(self.root.resolve() / "services")[service][0]


@contextlib.contextmanager
def services_of(root: Path, **environment: str) -> Iterator[Machine]:
    """Start the services of `make up` in a project, and stop them after the block."""
    machine = Machine(root, **environment)
    try:
        machine.up()
        yield machine
    finally:
        machine.make("down")


@contextlib.contextmanager
def prefect_server(home: Path, port: int = 0) -> Iterator[dict[str, str]]:
    """Start a separate Prefect server and yield the environment of its clients."""
    home.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    api = f"http://127.0.0.1:{port}/api"
    variables = {"PREFECT_HOME": str(home), "PREFECT_API_URL": api, "DO_NOT_TRACK": "true"}
    environment = os.environ | variables | {"PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    health = f"{api}/health"
    with started(command, home / "server.log", lambda: answers(health), 300, signal.SIGKILL, env=environment):
        yield environment


class Listener:
    """A web server on this machine that records or refuses the alerts that it gets."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.code = 200
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if listener.code == 200:
                    listener.got.append(json.loads(body))
                self.send_response(listener.code)
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"json://user:secret-word@127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, args=[0.01], daemon=True).start()


# The servers of a team


class Postgres(NamedTuple):
    """A running PostgreSQL server."""

    port: int
    user: str

    def create(self, database: str) -> str:
        """Create a database and return its address without a driver: `postgresql://...`."""
        import psycopg2

        connection = psycopg2.connect(self.url("postgres"))
        connection.autocommit = True
        connection.cursor().execute(f'CREATE DATABASE "{database}"')
        connection.close()
        return self.url(database)

    def url(self, database: str) -> str:
        return f"postgresql://{self.user}:{SECRET}@127.0.0.1:{self.port}/{database}"


class Ssh(NamedTuple):
    """A running SSH server. `remote` has the options of a DVC remote that stores its files in `folder`."""

    folder: Path
    remote: dict[str, str]


class S3(NamedTuple):
    """A running S3 store. boto3, and so DVC and MLflow, read `environment`."""

    bucket: str
    environment: dict[str, str]


def program(name: str, package: str, *folders: str) -> str:
    """Return the path of a program. Raise RuntimeError if it is not installed."""
    search_path = os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])
    path = shutil.which(name, path=search_path)
    if path is None:
        raise RuntimeError(f"{name} is not on this machine: apt-get install -y --no-install-recommends {package}")
    return path


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
    """Run a server during the block. Then end its process group with `signs`, by default SIGINT and then SIGKILL."""
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
    """Start PostgreSQL with a password. It refuses to run as root, so it then runs as the user `postgres`."""
    bins = [str(path) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    server = program("postgres", "postgresql", *bins)
    initdb = program("initdb", "postgresql", *bins)
    account = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}
    user = "postgres" if account else getpass.getuser()
    with tempfile.TemporaryDirectory(prefix="m3diff-postgres-") as folder_name:
        folder = Path(folder_name)
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
        postgres_server = Postgres(port, user)
        log = folder.with_suffix(".log")
        with started(command, log, lambda: accepts_connections(postgres_server), cwd=folder, **account):
            yield postgres_server
        log.unlink()


def accepts_connections(server: Postgres) -> bool:
    """Return whether PostgreSQL accepts connections. It listens before it is ready."""
    import psycopg2

    try:
        psycopg2.connect(server.url("postgres")).close()
    except psycopg2.OperationalError:
        return False
    return True


@contextlib.contextmanager
def ssh() -> Iterator[Ssh]:
    """Start an SSH server with new keys. It accepts one key of the current user, and no passwords."""
    sshd = program("sshd", "openssh-server", "/usr/sbin")
    keygen = program("ssh-keygen", "openssh-client")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd needs this folder for privilege separation
    with tempfile.TemporaryDirectory(prefix="m3diff-ssh-") as folder_name:
        folder = Path(folder_name)
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
            "StrictModes": "no",  # everybody can write to the parents of the temporary folder
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "UsePAM": "no",
            "PermitRootLogin": "prohibit-password",
            "Subsystem": "sftp internal-sftp",
        }
        (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        command = [sshd, "-D", "-e", "-f", str(folder / "config")]
        with started(command, folder / "log", lambda: listens(port)):
            url = f"ssh://{getpass.getuser()}@127.0.0.1:{port}{folder}/remote"
            remote = {"url": url, "allow_agent": "false", "keyfile": str(folder / "client")}
            yield Ssh(folder / "remote", remote)


@contextlib.contextmanager
def s3(bucket: str = "m3diff") -> Iterator[S3]:
    """Start an S3-compatible store (moto) in memory with one empty bucket."""
    import boto3

    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
    with (
        tempfile.TemporaryDirectory(prefix="m3diff-s3-") as folder_name,
        started(command, Path(folder_name) / "log", lambda: answers(f"{address}/moto-api/")),
    ):
        login = {"aws_access_key_id": "test", "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=address, **login).create_bucket(Bucket=bucket)
        yield S3(bucket, keys | {"AWS_EC2_METADATA_DISABLED": "true", "MLFLOW_S3_ENDPOINT_URL": address})


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except OSError:
        return False
    return True

"""Servers of a team, for real, on this machine alone: PostgreSQL, SSH and an S3-compatible store.

Each is a context manager that starts the server in a temporary folder on a free port of 127.0.0.1, gives what a client
needs, and leaves nothing behind. What is not installed is named with the command that installs it.
"""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 60
SECRET = "only-for-tests"


class MissingPackageError(RuntimeError):
    """A server's program is not on this machine."""


@dataclass(frozen=True)
class Postgres:
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


@dataclass(frozen=True)
class Ssh:
    port: int
    user: str
    key: Path
    folder: Path

    @property
    def remote(self) -> dict[str, str]:
        """The options of a DVC remote that keeps its files under `folder`."""
        place = {"url": f"ssh://{self.user}@127.0.0.1:{self.port}{self.folder}", "keyfile": str(self.key)}
        return place | {"allow_agent": "false"}


@dataclass(frozen=True)
class S3:
    port: int
    bucket: str

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What boto3, and so DVC and MLflow, read."""
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "MLFLOW_S3_ENDPOINT_URL": self.endpoint,
        }

    @property
    def remote(self) -> dict[str, str]:
        """The options of a DVC remote in the bucket."""
        return {"url": f"s3://{self.bucket}/dvc", "endpointurl": self.endpoint}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def program(name: str, package: str, *folders: str) -> str:
    """The program's path.

    Raises:
        MissingPackageError: it is not installed.
    """
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *folders]))
    if found is None:
        raise MissingPackageError(
            f"{name} is not on this machine: apt-get install -y --no-install-recommends {package}"
        )
    return found


def wait(answers: Callable[[], bool], child: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not answers():
        if child.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{child.args[0]} does not answer: {log.read_text()[-2000:]}")
        time.sleep(0.1)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def started(command: list[str], log: Path, answers: Callable[[], bool], **options: object) -> Iterator[None]:
    """Run a server while the block runs; SIGINT, then SIGKILL, ends it with its group."""
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, **options)
    try:
        wait(answers, child, log)
        yield
    finally:
        for sign in (signal.SIGINT, signal.SIGKILL):
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
        folder, port = Path(place), free_port()
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
    try:
        import psycopg2
    except ModuleNotFoundError as error:
        raise MissingPackageError("psycopg2 is not installed: make install-team") from error
    try:
        psycopg2.connect(server.url("postgres")).close()
    except psycopg2.OperationalError:
        return False
    return True


@contextlib.contextmanager
def ssh() -> Iterator[Ssh]:
    """An SSH server with keys of its own, which lets in the current user by one key and nobody by password."""
    sshd, keygen = program("sshd", "openssh-server", "/usr/sbin"), program("ssh-keygen", "openssh-client")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd separates its privileges
    with tempfile.TemporaryDirectory(prefix="m3diff-ssh-") as place:
        folder, port = Path(place), free_port()
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
            yield Ssh(port, getpass.getuser(), folder / "client", folder / "remote")


@contextlib.contextmanager
def s3(bucket: str = "m3diff") -> Iterator[S3]:
    """A store that speaks S3 (moto), in memory, with one empty bucket."""
    try:
        import boto3
        import moto.server  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"{error.name} is not installed: make install-team") from error
    with tempfile.TemporaryDirectory(prefix="m3diff-s3-") as place:
        found = S3(free_port(), bucket)
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(found.port)]
        with started(command, Path(place) / "log", lambda: is_alive(found.endpoint)):
            keys = {"aws_access_key_id": "test", "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
            boto3.client("s3", endpoint_url=found.endpoint, **keys).create_bucket(Bucket=bucket)
            yield found


def is_alive(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=5).close()
    except OSError:
        return False
    return True

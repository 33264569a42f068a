"""Read and check the environment variables of the services: ports, addresses and logins.

The variables can also be set in the file services/environment. infra/README.md lists all variables.
"""

import importlib.util
import ipaddress
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dotenv import dotenv_values

from infra.errors import ServiceError
from infra.mlflow_login import WORKER_USER, Admin, read_password
from m3diff.records.errors import Fault

HOST = "127.0.0.1"

PREFECT_TOKEN = "PREFECT_SERVER_API_AUTH_STRING"
PREFECT_LOGIN = "PREFECT_API_AUTH_STRING"  # the login that clients use
MLFLOW_PASSWORD = "MLFLOW_AUTH_ADMIN_PASSWORD"
TOKENS = (PREFECT_TOKEN, MLFLOW_PASSWORD)
MIN_TOKEN_CHARS = 16
MAKE_TOKEN = "python -c 'import secrets; print(secrets.token_hex())'"

MAX_PORT = 65535


@dataclass(frozen=True)
class NeededPackage:
    """A package that is required if the environment variable `variable` has a value that starts with `beginning`.

    `make install-team` installs all of these packages.
    """

    variable: str
    beginning: str
    package: str


PACKAGES = (
    NeededPackage("PREFECT_API_DATABASE_CONNECTION_URL", "postgresql+asyncpg", "asyncpg"),
    NeededPackage("PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql+asyncpg", "asyncpg"),
    NeededPackage("M3DIFF_MLFLOW_STORE", "postgresql", "psycopg2"),
    NeededPackage("M3DIFF_MLFLOW_ARTIFACTS", "s3:", "boto3"),
    NeededPackage(MLFLOW_PASSWORD, "", "flask_wtf"),
)


# Folders


def services_folder() -> Path:
    """Return the folder where the services of this checkout keep all their files."""
    return Path("services").resolve()


def settings_file() -> Path:
    """Return the path of services/environment, a file that sets environment variables. Only its owner may read it."""
    return services_folder() / "environment"


def bin_folder() -> Path:
    """Return the folder that contains this Python interpreter and the commands of its packages."""
    return Path(sys.executable).parent  # `prepare` may have replaced the interpreter's path by a link


# Ports and addresses


def read_number(variable: str, default: int, maximum: int) -> int:
    """Return the number in an environment variable, or the default if the variable is not set.

    Raises:
        ServiceError: the value is not a whole number from 1 to `maximum`.
    """
    text = os.environ.get(variable, str(default))
    if not (text.isdecimal() and 0 < int(text) <= maximum):
        raise ServiceError("infra.number_out_of_range", key=variable, value=text, limit=maximum)
    return int(text)


def prefect_port() -> int:
    """Return the port of Prefect's server (4200 by default).

    Raises:
        ServiceError: M3DIFF_PREFECT_PORT is not a number from 1 to MAX_PORT.
    """
    return read_number("M3DIFF_PREFECT_PORT", 4200, MAX_PORT)


def mlflow_port() -> int:
    """Return the port of MLflow's server (5000 by default).

    Raises:
        ServiceError: M3DIFF_MLFLOW_PORT is not a number from 1 to MAX_PORT.
    """
    return read_number("M3DIFF_MLFLOW_PORT", 5000, MAX_PORT)


def max_flows() -> int:
    """Return the maximum number of flow runs that the worker executes at the same time (2 by default).

    Raises:
        ServiceError: M3DIFF_FLOWS is not a number from 1 to 1000.
    """
    return read_number("M3DIFF_FLOWS", 2, 1000)


def bind_address() -> str:
    """Return the address on which the servers listen."""
    return os.environ.get("M3DIFF_BIND", HOST)


def own_host() -> str:
    """Return the host name or address for reaching the servers from this machine."""
    return HOST if bind_address() == "0.0.0.0" else bind_address()


def server_url(port: int) -> str:
    """Return the URL for reaching the server on a port from this machine."""
    return f"http://{own_host()}:{port}"


def prefect_api() -> str:
    """Return the URL of Prefect's API."""
    return f"{server_url(prefect_port())}/api"


# Logins


def prefect_login() -> dict[str, str]:
    """Return the variable that lets a client log in to Prefect's server, or an empty dictionary if no token is set.

    Prefect's server has a single token for all users.
    """
    token = os.environ.get(PREFECT_LOGIN) or os.environ.get(PREFECT_TOKEN)
    return {PREFECT_LOGIN: token} if token else {}


def prefect_client_variables() -> dict[str, str]:
    """Return the variables that connect Prefect's client and command line to this project's server."""
    return prefect_login() | {"PREFECT_API_URL": prefect_api(), "PREFECT_HOME": str(services_folder() / "prefect")}


def mlflow_admin() -> Admin | None:
    """Return the login of MLflow's admin, or None if MLflow does not require logins."""
    password = os.environ.get(MLFLOW_PASSWORD)
    return Admin(os.environ.get("MLFLOW_AUTH_ADMIN_USERNAME", "admin"), password) if password else None


def worker_password_file() -> Path:
    """Return the path of the file with the password of the worker's MLflow user, which the keeper writes."""
    return services_folder() / "mlflow" / "worker.password"


def worker_login() -> dict[str, str]:
    """Return the variables that let the worker and its flows log in to MLflow.

    Raises:
        ServiceError: the keeper has not created the worker's user yet, or the password file was removed.
    """
    file = worker_password_file()
    password = read_password(file)
    if password is None:
        raise ServiceError("infra.no_password_of_worker", path=file, user=WORKER_USER)
    return {"MLFLOW_TRACKING_USERNAME": WORKER_USER, "MLFLOW_TRACKING_PASSWORD": password}


# Reading and checking


def read_settings() -> None:
    """Load the variables from services/environment. Variables that are already set in the shell are kept.

    Raises:
        ServiceError: other users can read the file, or a line has no value.
    """
    file = settings_file()
    if not file.exists():
        return
    if file.stat().st_mode & 0o077:
        raise ServiceError("infra.settings_readable_by_others", path=file)
    for name, value in dotenv_values(file, interpolate=False).items():
        if value is None:
            raise ServiceError("infra.setting_without_value", path=file, key=name)
        os.environ.setdefault(name, value)


def check_settings() -> None:
    """Check all variables before any service is started.

    Raises:
        ServiceError: a number, an address, a token or the name of MLflow's admin is invalid, a package is missing, or
            a server without a token would be open to other machines. The error lists all faults. An invalid number is
            reported alone, before the other checks.
    """
    prefect_port()
    mlflow_port()
    max_flows()
    faults = [*faults_of_address(), *faults_of_logins(), *missing_packages()]
    if faults:
        raise ServiceError("infra.wrong_settings", count=len(faults), faults=faults)


def faults_of_address() -> Iterator[Fault]:
    """Yield a fault if M3DIFF_BIND contains a colon. In that case, it is an IPv6 address or includes a port."""
    if ":" in bind_address():
        yield Fault("infra.address_with_colon", key="M3DIFF_BIND", value=bind_address())


def faults_of_logins() -> Iterator[Fault]:
    """Yield a fault for each missing or invalid token, and a fault if the name of MLflow's admin is invalid."""
    for name in TOKENS:
        token = os.environ.get(name)
        if token is None and is_open_to_others():
            yield Fault("infra.open_without_token", value=bind_address(), variable=name, file=settings_file())
        elif token is not None and len(token.rpartition(":")[2]) < MIN_TOKEN_CHARS:
            yield Fault("infra.token_too_short", key=name, limit=MIN_TOKEN_CHARS, command=MAKE_TOKEN)
    if ":" not in os.environ.get(PREFECT_TOKEN, ":"):
        yield Fault("infra.token_without_user", key=PREFECT_TOKEN)
    if os.environ.get("MLFLOW_AUTH_ADMIN_USERNAME") == WORKER_USER:
        yield Fault("infra.admin_is_worker", key="MLFLOW_AUTH_ADMIN_USERNAME", value=WORKER_USER)


def is_open_to_others() -> bool:
    """Return whether other machines can reach the servers."""
    try:
        return not ipaddress.ip_address(bind_address()).is_loopback
    except ValueError:
        return bind_address() != "localhost"


def missing_packages() -> Iterator[Fault]:
    """Yield a fault for each variable that requires a package that is not installed."""
    for needed in PACKAGES:
        value = os.environ.get(needed.variable)
        is_needed = value is not None and value.startswith(needed.beginning)
        if is_needed and importlib.util.find_spec(needed.package) is None:
            yield Fault("infra.package_not_installed", key=needed.variable, package=needed.package)

"""Manage the worker's MLflow user.

Flows run code from a commit, so they must not have the password of MLflow's admin. If MLflow requires logins, the
keeper creates a user with only the permissions that a run needs. The user's password is stored in a file that only this
account can read.

This module uses MLflow's REST API, because importing MLflow's Python client for users (`mlflow.server.auth`) also loads
much of the server.
"""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from infra.errors import ServiceError

WORKER_USER = "m3diff-worker"

# Maps MLflow's resource types to the permission that a run needs. A run writes to experiments of any user. It ends and
# deletes runs, logged models and versions (if a registration failed). It moves and removes model aliases, which
# requires MANAGE. It also creates experiments and models, which MLflow allows for every user
GRANTS = {
    "experiment": "EDIT",
    "run": "MANAGE",
    "logged_model": "MANAGE",
    "registered_model": "MANAGE",
    "registered_model_version": "MANAGE",
}
ALL_RESOURCES = "*"  # MLflow's pattern for all resources of a type
# Time limit of a request in seconds. It is long, because MLflow hashes the password in each request and the cores may
# be busy
REQUEST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Admin:
    """The login of MLflow's admin."""

    name: str
    password: str


def read_password(file: Path) -> str | None:
    """Return the password of the worker's user, or None if it has not been created yet."""
    if not file.is_file():
        return None
    return file.read_text(encoding="utf-8").strip() or None


def is_private(file: Path) -> bool:
    """Return whether a file exists and only this account can read it."""
    return file.is_file() and not file.stat().st_mode & 0o077


def write_password(file: Path, password: str) -> None:
    """Write the password to a file that only this account can read, and replace an existing file."""
    unfinished = file.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(f"{password}\n")
    unfinished.replace(file)


def prepare_worker_user(address: str, admin: Admin, file: Path) -> None:
    """Create the worker's MLflow user, or reset an existing user to the expected state.

    In this state, the user is not an admin, has the password in `file`, and has the permissions in GRANTS. Changes to
    these that were made on MLflow's page are undone.

    Args:
        address: URL of the MLflow server, which must be running.
        admin: login of a user who may create users.
        file: the file with the user's password. A new password is generated if the file is missing or if other accounts
            could read it.

    Raises:
        ServiceError: MLflow rejects the admin's login or refuses a change.
    """
    password = read_password(file) if is_private(file) else None
    if password is None:
        password = secrets.token_urlsafe(32)
        write_password(file, password)
    login = httpx.BasicAuth(admin.name, admin.password)
    try:
        with httpx.Client(base_url=f"{address}/api", auth=login, timeout=REQUEST_TIMEOUT_S) as client:
            require_admin(client, admin, file.parent)
            prepare_account(client, password)
            prepare_grants(client)
    except httpx.HTTPError as error:
        raise ServiceError(
            "infra.worker_user_not_made", address=address, user=WORKER_USER, cause=repr(error)
        ) from error


def require_admin(client: httpx.Client, admin: Admin, folder: Path) -> None:
    """Check that MLflow accepts the login and that the user is an admin.

    Raises:
        ServiceError: the password is wrong, or the user is not an admin.
    """
    response = client.get("/2.0/mlflow/users/current")
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ServiceError("infra.wrong_admin_password", user=admin.name, database=folder / "users.db")
    user = read_body(response)["user"]
    if not user["is_admin"]:
        raise ServiceError("infra.user_is_no_admin", user=admin.name)


def prepare_account(client: httpx.Client, password: str) -> None:
    """Create the worker's user, or correct the password and the admin flag of an existing user."""
    response = client.get("/2.0/mlflow/users/get", params={"username": WORKER_USER})
    if response.status_code == httpx.codes.NOT_FOUND:
        read_body(client.post("/2.0/mlflow/users/create", json={"username": WORKER_USER, "password": password}))
        return
    if read_body(response)["user"]["is_admin"]:
        read_body(client.patch("/2.0/mlflow/users/update-admin", json={"username": WORKER_USER, "is_admin": False}))
    own_login = client.get("/2.0/mlflow/users/current", auth=httpx.BasicAuth(WORKER_USER, password))
    if own_login.status_code == httpx.codes.UNAUTHORIZED:
        read_body(
            client.patch("/2.0/mlflow/users/update-password", json={"username": WORKER_USER, "password": password})
        )


def prepare_grants(client: httpx.Client) -> None:
    """Give the worker's user the permissions in GRANTS. Existing permissions at another level are replaced."""
    path = "/3.0/mlflow/users/permissions"
    rows = read_body(client.get(f"{path}/list", params={"username": WORKER_USER}))["permissions"]
    # MLflow stores the permissions of a single user in a role with this prefix. Other roles were created by people
    levels: dict[str, str] = {}
    for row in rows:
        if row["role_name"].startswith("__user_") and row["resource_pattern"] == ALL_RESOURCES:
            levels[row["resource_type"]] = row["permission"]
    for resource_type, level in GRANTS.items():
        if levels.get(resource_type) == level:
            continue
        permission = {"username": WORKER_USER, "resource_type": resource_type, "resource_id": ALL_RESOURCES}
        if resource_type in levels:
            read_body(client.post(f"{path}/revoke", json=permission))
        read_body(client.post(f"{path}/grant", json=permission | {"permission": level}))


def read_body(response: httpx.Response) -> Any:
    """Return the JSON body of a response, or an empty dictionary if there is none.

    Raises:
        ServiceError: MLflow refused the request.
    """
    if not response.is_success:
        raise ServiceError(
            "infra.mlflow_refused_request",
            request=f"{response.request.method} {response.request.url.path}",
            status=response.status_code,
            answer=response.text[:200],
        )
    return response.json() if response.content else {}

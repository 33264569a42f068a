"""The worker's MLflow user, with a fake server. tests/team/test_logins.py uses a real server."""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra import mlflow_login
from infra.errors import ServiceError
from infra.mlflow_login import GRANTS, WORKER_USER, Admin, prepare_worker_user, read_password, write_password
from tests.errors import raises

ADMIN = Admin("admin", "the admin's password")
ADDRESS = "http://127.0.0.1:5000"


@dataclass
class PretendedMlflow:
    """Replaces MLflow's REST API. It has users, passwords and permissions."""

    passwords: dict[str, str] = field(default_factory=lambda: {ADMIN.name: ADMIN.password})
    admins: set[str] = field(default_factory=lambda: {ADMIN.name})
    rights: dict[str, str] = field(default_factory=dict)  # of the worker's user, by kind
    changes: list[str] = field(default_factory=list)

    def answer(self, request: httpx.Request) -> httpx.Response:
        login = base64.b64decode(request.headers["Authorization"].removeprefix("Basic ")).decode()
        sender, _, password = login.partition(":")
        if self.passwords.get(sender) != password:
            return httpx.Response(401)
        action = request.url.path.removeprefix("/api/").partition("/mlflow/users/")[2]
        body = json.loads(request.content) if request.content else dict(request.url.params)
        if request.method != "GET":
            assert sender in self.admins, "only an admin changes users"
            self.changes.append(action)
        return self.take(action, sender, body)

    def take(self, action: str, sender: str, body: dict[str, Any]) -> httpx.Response:
        user = body.get("username", sender)
        if action in ("current", "get"):
            if user not in self.passwords:
                return httpx.Response(404, json={"error_code": "RESOURCE_DOES_NOT_EXIST"})
            return httpx.Response(200, json={"user": {"username": user, "is_admin": user in self.admins}})
        if action in ("create", "update-password"):
            self.passwords[user] = body["password"]
        elif action == "update-admin":
            (self.admins.add if body["is_admin"] else self.admins.discard)(user)
        elif action == "permissions/list":
            rows = [self.row("__user_2__", "*", kind, level) for kind, level in self.rights.items()]
            rows.append(self.row("a role of a person", "*", "experiment", "READ"))
            rows.append(self.row("__user_2__", "7", "experiment", "MANAGE"))
            return httpx.Response(200, json={"permissions": rows})
        elif action == "permissions/revoke":
            del self.rights[body["resource_type"]]
        elif action == "permissions/grant":
            if body["resource_type"] in self.rights:
                return httpx.Response(400, json={"error_code": "RESOURCE_ALREADY_EXISTS"})
            self.rights[body["resource_type"]] = body["permission"]
        return httpx.Response(200, json={})

    @staticmethod
    def row(role: str, pattern: str, kind: str, level: str) -> dict[str, str]:
        return {"role_name": role, "resource_pattern": pattern, "resource_type": kind, "permission": level}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> PretendedMlflow:
    server = PretendedMlflow()
    transport = httpx.MockTransport(lambda request: server.answer(request))
    client = httpx.Client
    monkeypatch.setattr(mlflow_login.httpx, "Client", lambda **options: client(transport=transport, **options))
    return server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "worker.password"


def is_ready(server: PretendedMlflow, file: Path) -> bool:
    """Return whether the user has the password in the file and exactly the permissions in GRANTS."""
    has_password = server.passwords[WORKER_USER] == read_password(file)
    return has_password and server.rights == GRANTS and WORKER_USER not in server.admins


def test_the_first_start_makes_a_user_without_rights_of_an_admin_and_a_private_file(server, file):
    prepare_worker_user(ADDRESS, ADMIN, file)
    assert is_ready(server, file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(server.passwords[WORKER_USER]) >= 32


def test_a_second_start_changes_nothing(server, file):
    prepare_worker_user(ADDRESS, ADMIN, file)
    password = read_password(file)
    server.changes.clear()
    prepare_worker_user(ADDRESS, ADMIN, file)
    assert server.changes == []
    assert read_password(file) == password


def other_password(server: PretendedMlflow, file: Path) -> None:
    server.passwords[WORKER_USER] = "set on MLflow's page"


def no_file(server: PretendedMlflow, file: Path) -> None:
    file.unlink()


def empty_file(server: PretendedMlflow, file: Path) -> None:
    write_password(file, "")


def became_admin(server: PretendedMlflow, file: Path) -> None:
    server.admins.add(WORKER_USER)


def right_removed(server: PretendedMlflow, file: Path) -> None:
    del server.rights["run"]


def right_lowered(server: PretendedMlflow, file: Path) -> None:
    server.rights["registered_model"] = "READ"


def right_raised(server: PretendedMlflow, file: Path) -> None:
    server.rights["experiment"] = "MANAGE"


def users_lost(server: PretendedMlflow, file: Path) -> None:
    del server.passwords[WORKER_USER]
    server.rights.clear()


DRIFTS = [
    other_password,
    no_file,
    empty_file,
    became_admin,
    right_removed,
    right_lowered,
    right_raised,
    users_lost,
]


@pytest.mark.parametrize("drift", DRIFTS, ids=[drift.__name__ for drift in DRIFTS])
def test_what_drifted_is_put_right(drift: Callable[[PretendedMlflow, Path], None], server, file):
    prepare_worker_user(ADDRESS, ADMIN, file)
    drift(server, file)
    prepare_worker_user(ADDRESS, ADMIN, file)
    assert is_ready(server, file)
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_password_that_others_could_read_is_replaced(mode, server, file):
    prepare_worker_user(ADDRESS, ADMIN, file)
    password = read_password(file)
    file.chmod(mode)
    prepare_worker_user(ADDRESS, ADMIN, file)
    assert read_password(file) != password
    assert is_ready(server, file)


def test_another_admins_password_is_named_with_what_to_do(server, file):
    server.passwords[ADMIN.name] = "of the first start"
    database = file.parent / "users.db"
    with raises(ServiceError, "infra.wrong_admin_password", user=ADMIN.name, database=database) as refused:
        prepare_worker_user(ADDRESS, ADMIN, file)
    assert ADMIN.password not in str(refused.value)


def test_a_user_who_is_no_admin_cannot_make_the_workers(server, file):
    server.admins.clear()
    with raises(ServiceError, "infra.user_is_no_admin", user="admin"):
        prepare_worker_user(ADDRESS, ADMIN, file)


def test_a_server_that_refuses_a_request_is_an_error_of_one_line(server, file, monkeypatch):
    monkeypatch.setattr(server, "answer", lambda request: httpx.Response(403, text="Invalid Host header"))
    refusal = {"request": "GET /api/2.0/mlflow/users/current", "status": 403, "answer": "Invalid Host header"}
    with raises(ServiceError, "infra.mlflow_refused_request", **refusal) as refused:
        prepare_worker_user(ADDRESS, ADMIN, file)
    assert "\n" not in str(refused.value)


def test_a_server_that_is_silent_is_an_error_of_one_line(server, file, monkeypatch):
    silence = httpx.ReadTimeout("no answer")

    def be_silent(request: httpx.Request) -> httpx.Response:
        raise silence

    monkeypatch.setattr(server, "answer", be_silent)
    expected = {"address": ADDRESS, "user": WORKER_USER, "cause": repr(silence)}
    with raises(ServiceError, "infra.worker_user_not_made", **expected) as refused:
        prepare_worker_user(ADDRESS, ADMIN, file)
    assert "\n" not in str(refused.value)

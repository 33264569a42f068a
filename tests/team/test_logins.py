"""Test what a flow sees and may do in MLflow if every server requires a login."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from infra.mlflow_login import GRANTS, WORKER_USER, read_password
from tests import toy
from tests.flows.test_services import RAN_STATES
from tests.servers import Machine

TOKEN = "m3diff:a-token-of-the-test"
PASSWORD = "a-password-of-the-test"
SERVE_TOKEN = "a-serve-token-of-the-test"

RECORD_ENVIRONMENTS = """def evaluate(params, paths):
    import os
    from flows import group_processes_by

    old(params, paths)
    family = group_processes_by("M3DIFF_SERVICE")[os.environ["M3DIFF_SERVICE"]]
    environments = [process.environ() for process in family]
    Path(os.environ["TOY_MARKS"], "environments.json").write_text(json.dumps(environments))
"""
"""A stage that records the environments of its process, of the flow and of the worker."""


@pytest.fixture
def machine(built_once: Path, tmp_path: Path) -> Iterator[Machine]:
    """Start the services with all tokens. The shell that starts them has the admin's login."""
    root = Path(shutil.copytree(built_once, tmp_path / "toy", symlinks=True))
    person = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": PASSWORD}
    machine = Machine(root, PREFECT_API_AUTH_STRING=TOKEN, TOY_MARKS=str(tmp_path), **person)
    settings = {
        "PREFECT_SERVER_API_AUTH_STRING": TOKEN,
        "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
        "M3DIFF_SERVE_TOKEN": SERVE_TOKEN,
    }
    file = root / "services" / "environment"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    file.chmod(0o600)
    toy.change(root, "register", tracking_uri=f"http://127.0.0.1:{machine.mlflow}")
    toy.replace_stage(root, "evaluate", RECORD_ENVIRONMENTS)
    toy.commit(root, "servers with logins")
    try:
        machine.up()
        yield machine
    finally:
        machine.make("down")


def client_of(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, password: str) -> MlflowClient:
    """Return a client that logs in as this user. All later requests of the test to MLflow use this login, too."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", name)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
    return MlflowClient(f"http://127.0.0.1:{machine.mlflow}")


def password_of_worker(machine: Machine) -> str:
    password = read_password(machine.root / "services/mlflow/worker.password")
    assert password is not None
    return password


@pytest.mark.team
@pytest.mark.slow(200)
def test_a_flow_runs_with_all_tokens_and_sees_no_secret_of_a_server(machine, tmp_path, monkeypatch):
    """The admin creates the experiment and the model, as in a store from before the worker had its own user."""
    admin = client_of(machine, monkeypatch, "admin", PASSWORD)
    admin.create_experiment("m3diff")
    admin.create_registered_model("m3diff")
    state, tasks = machine.run_deployment("m3diff/full", "first")
    assert state == "Completed"
    assert tasks == RAN_STATES
    environments = json.loads((tmp_path / "environments.json").read_text())
    assert len(environments) >= 3, "the stage, the flow, the worker"
    for environment in environments:
        values = " ".join(environment.values())
        assert PASSWORD not in values
        assert SERVE_TOKEN not in values
        assert "PREFECT_SERVER_API_AUTH_STRING" not in environment
        assert environment["PREFECT_API_AUTH_STRING"] == TOKEN, "Prefect has one token for all"
        assert environment["MLFLOW_TRACKING_USERNAME"] == WORKER_USER
        assert environment["MLFLOW_TRACKING_PASSWORD"] == password_of_worker(machine)
    logs = "".join(path.read_text(errors="replace") for path in (machine.root / "services").glob("*.log"))
    for secret in (PASSWORD, SERVE_TOKEN, TOKEN, password_of_worker(machine)):
        assert secret not in logs


@pytest.mark.team
@pytest.mark.slow(60)
def test_the_workers_user_may_do_what_a_run_does_and_is_no_admin(machine, monkeypatch):
    admin = client_of(machine, monkeypatch, "admin", PASSWORD)
    experiment = admin.create_experiment("m3diff")
    admin.create_registered_model("m3diff")
    worker = client_of(machine, monkeypatch, WORKER_USER, password_of_worker(machine))
    run = worker.create_run(experiment)
    worker.log_metric(run.info.run_id, "CIDEr", 1.0)
    version = worker.create_model_version("m3diff", f"{run.info.artifact_uri}/model", run.info.run_id)
    worker.set_registered_model_tag("m3diff", "decisions", "1")
    worker.set_registered_model_alias("m3diff", "champion", version.version)
    worker.delete_registered_model_alias("m3diff", "champion")
    worker.set_model_version_tag("m3diff", version.version, "note", "why")
    worker.delete_model_version_tag("m3diff", version.version, "note")
    worker.delete_model_version("m3diff", version.version)
    worker.delete_run(run.info.run_id)
    with pytest.raises(MlflowException, match="403|[Pp]ermission"):
        worker.delete_experiment(experiment)
    users = f"http://127.0.0.1:{machine.mlflow}/api/2.0/mlflow/users"
    login = (WORKER_USER, password_of_worker(machine))
    new_user = {"username": "another", "password": "a-password-of-another"}
    assert httpx.post(f"{users}/create", json=new_user, auth=login).status_code == 403
    admin_flag = {"username": WORKER_USER, "is_admin": True}
    assert httpx.patch(f"{users}/update-admin", json=admin_flag, auth=login).status_code == 403


@pytest.mark.team
@pytest.mark.slow(90)
def test_a_changed_login_is_corrected_by_the_next_start(machine):
    users = f"http://127.0.0.1:{machine.mlflow}/api/2.0/mlflow/users"
    rights = f"http://127.0.0.1:{machine.mlflow}/api/3.0/mlflow/users/permissions"
    admin = ("admin", PASSWORD)
    worker = {"username": WORKER_USER}
    changed_password = worker | {"password": "another-password"}
    httpx.patch(f"{users}/update-password", json=changed_password, auth=admin).raise_for_status()
    httpx.patch(f"{users}/update-admin", json=worker | {"is_admin": True}, auth=admin).raise_for_status()
    right = worker | {"resource_type": "run", "resource_id": "*"}
    httpx.post(f"{rights}/revoke", json=right, auth=admin).raise_for_status()
    machine.make("down")
    machine.up()
    login = (WORKER_USER, password_of_worker(machine))
    user = httpx.get(f"{users}/current", auth=login).raise_for_status().json()["user"]
    assert user["is_admin"] is False
    rows = httpx.get(f"{rights}/list", params=worker, auth=admin).raise_for_status().json()["permissions"]
    assert {row["resource_type"]: row["permission"] for row in rows} == GRANTS

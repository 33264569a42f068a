"""What a team has in place of files on one machine: PostgreSQL under both servers, SSH and S3 behind DVC."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import servers, toy
from tests.flows.test_services import Machine

pytestmark = pytest.mark.team

TOKEN, PASSWORD = "m3diff:a-token-of-the-test", "a-password-of-the-test"


def run(root: Path, *command: str, **environment: str) -> str:
    done = subprocess.run(command, cwd=root, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


def dvc(root: Path, *arguments: str, **environment: str) -> str:
    return run(root, sys.executable, "-m", "dvc", *arguments, **environment)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A repository of git and DVC with one file of data and one folder."""
    root = tmp_path / "first"
    (root / "folder").mkdir(parents=True)
    (root / "file.bin").write_bytes(bytes(range(256)) * 1000)
    for number in range(5):
        (root / "folder" / f"{number}.txt").write_text(f"file {number}")
    run(root, "git", "init", "-q")
    dvc(root, "init", "-q")
    dvc(root, "add", "-q", "file.bin", "folder")
    return root


def push_and_bring_back(root: Path, remote: dict[str, str], **environment: str) -> None:
    """Push to a remote, clone the repository elsewhere, pull there, and compare every byte."""
    dvc(root, "remote", "add", "-q", "-d", "team", remote["url"])
    for option, value in remote.items():
        if option != "url":
            dvc(root, "remote", "modify", "-q", "team", option, value)
    toy.commit(root, "data and where it is pushed")
    dvc(root, "push", "-q", **environment)
    clone = root.with_name("second")
    run(root, "git", "clone", "-q", str(root), str(clone))
    assert not (clone / "file.bin").exists()
    dvc(clone, "pull", "-q", **environment)
    for path in [root / "file.bin", *sorted((root / "folder").iterdir())]:
        assert (clone / path.relative_to(root)).read_bytes() == path.read_bytes()
    assert json.loads(dvc(clone, "data", "status", "--not-in-remote", "--json", **environment)) in ({}, {"git": {}})


@pytest.mark.slow(20)
def test_data_goes_to_a_remote_by_ssh_and_comes_back_in_another_clone(tiny):
    with servers.ssh() as server:
        push_and_bring_back(tiny, server.remote)
        assert len([path for path in server.folder.rglob("*") if path.is_file()]) == 7  # 6 files, and the folder's list


@pytest.mark.slow(20)
def test_data_goes_to_a_remote_by_s3_and_comes_back_in_another_clone(tiny):
    with servers.s3() as server:
        push_and_bring_back(tiny, server.remote, **server.environment)


@pytest.fixture
def postgres() -> Iterator[servers.Postgres]:
    with servers.postgres() as server:
        yield server


@pytest.fixture
def machine(postgres: servers.Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The toy project with its settings in services/environment, as a team has them, and nothing up yet."""
    root = toy.build(tmp_path / "toy")
    monkeypatch.chdir(root)
    settings = {
        "PREFECT_API_DATABASE_CONNECTION_URL": postgres.create("prefect").replace("://", "+asyncpg://"),
        "M3DIFF_MLFLOW_STORE": postgres.create("mlflow"),
        "PREFECT_SERVER_API_AUTH_STRING": TOKEN,
        "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
        "M3DIFF_BIND": "0.0.0.0",
    }
    (root / "services").mkdir()
    (root / "services" / "environment").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    (root / "services" / "environment").chmod(0o600)
    machine = Machine(root)
    yield machine
    machine.make("down")


def rows(postgres: servers.Postgres, database: str, table: str) -> int:
    import psycopg2  # an extra's

    connection = psycopg2.connect(postgres.url(database))
    with connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM {table}")
        (count,) = cursor.fetchone()
    connection.close()
    return count


@pytest.mark.slow(120)
def test_both_servers_keep_what_they_know_in_postgresql_and_answer_only_with_a_token(machine, postgres):
    started = machine.make("up")
    assert started.returncode == 0, started.stdout + started.stderr
    assert machine.make("status").returncode == 0
    prefect, mlflow = f"http://127.0.0.1:{machine.prefect}/api", f"http://127.0.0.1:{machine.mlflow}"
    assert httpx.post(f"{prefect}/deployments/filter", json={}).status_code == 401
    user, token = TOKEN.split(":")
    deployments = httpx.post(f"{prefect}/deployments/filter", json={}, auth=(user, token)).raise_for_status().json()
    assert rows(postgres, "prefect", "deployment") == len(deployments) > 0

    create = f"{mlflow}/api/2.0/mlflow/experiments/create"
    assert httpx.post(create, json={"name": "of a stranger"}).status_code == 401
    httpx.post(create, json={"name": "of the team"}, auth=("admin", PASSWORD)).raise_for_status()
    assert rows(postgres, "mlflow", "experiments") == 2  # MLflow makes one, `Default`
    assert list((machine.root / "services").glob("*/*.db")) == [machine.root / "services/mlflow/users.db"]


@pytest.mark.slow(20)
def test_a_teams_stores_are_made_once_and_a_second_time_changes_nothing(postgres, tmp_path):
    with servers.s3("other") as store:
        settings = store.environment | {
            "M3DIFF_MLFLOW_STORE": postgres.url("mlflow"),
            "M3DIFF_MLFLOW_ARTIFACTS": "s3://m3diff/mlflow",
            "PYTHONPATH": str(toy.REPOSITORY),
        }
        said = [run(tmp_path, sys.executable, "-m", "infra.services", "prepare-team", **settings) for _ in range(2)]
    assert said == ["database mlflow: made\nbucket m3diff: made\n", ""]
    import psycopg2

    psycopg2.connect(postgres.url("mlflow")).close()
    assert (tmp_path / "services" / "mlflow" / "auth.ini").exists()

"""Test a full run of a team: servers on PostgreSQL, data on SSH, models on S3, and commits on a git remote.

A second clone, which has only these remotes, restores the champion.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from m3diff.provenance.dvc import Lock, dvc_hash
from m3diff.provenance.git import git
from tests import servers, toy
from tests.flows.test_services import RAN_STATES
from tests.servers import Machine

TOKEN = "m3diff:a-token-of-the-test"
PASSWORD = "a-password-of-the-test"
DATA = "data/01_raw/minichange"
CHECKPOINT = "data/05_model/checkpoint"

LOAD = """
import json, sys
from pathlib import Path
from m3diff.images.open import load_image
from m3diff.models import generation
captioner = generation.load_captioner(Path("data/05_model/checkpoint"))
rows = json.loads(sys.argv[1])
pairs = [(load_image(row["before"]), load_image(row["after"])) for row in rows]
print(json.dumps(captioner.caption(pairs)))
"""


class Team:
    """What the members of a team share: the databases, the data by SSH, the bucket, and `origin.git`."""

    def __init__(self, folder: Path, postgres: servers.Postgres, ssh: servers.Ssh, s3: servers.S3) -> None:
        self.folder = folder
        self.postgres = postgres
        self.ssh = ssh
        self.s3 = s3
        self.machine = Machine(toy.build(folder / "first"), PREFECT_API_AUTH_STRING=TOKEN)
        settings = s3.environment | {
            "PREFECT_API_DATABASE_CONNECTION_URL": postgres.create("prefect").replace("://", "+asyncpg://"),
            "M3DIFF_MLFLOW_STORE": postgres.create("mlflow"),
            "M3DIFF_MLFLOW_ARTIFACTS": f"s3://{s3.bucket}/mlflow",
            "PREFECT_SERVER_API_AUTH_STRING": TOKEN,
            "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
        }
        root = self.machine.root
        file = root / "services" / "environment"
        file.parent.mkdir()
        file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        file.chmod(0o600)
        toy.change(root, "register", tracking_uri=f"http://127.0.0.1:{self.machine.mlflow}")
        toy.run(root, "dvc", "remote", "add", "-q", "-d", "team", ssh.remote["url"])
        self.give_key(root)  # the key is in no commit
        toy.commit(root, "the team's servers")
        toy.run(root, "git", "branch", "-M", "main")
        toy.run(folder, "git", "init", "-q", "--bare", "--initial-branch", "main", "origin.git")
        toy.run(root, "git", "remote", "add", "origin", str(folder / "origin.git"))
        toy.run(root, "git", "push", "-q", "origin", "main")
        toy.run(root, "git", "config", "m3diff.runs", "origin")

    def give_key(self, root: Path) -> None:
        for option, value in self.ssh.remote.items():
            if option != "url":
                toy.run(root, "dvc", "remote", "modify", "-q", "--local", "team", option, value)


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    with servers.postgres() as postgres, servers.ssh() as ssh, servers.s3() as s3:
        team = Team(tmp_path, postgres, ssh, s3)
        monkeypatch.chdir(team.machine.root)
        logins = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": PASSWORD}
        for name, value in (s3.environment | logins).items():  # as in a user's shell
            monkeypatch.setenv(name, value)
        yield team
        team.machine.make("down")


def python(root: Path, *arguments: str) -> str:
    """Run a command with the code of a working tree and return its output."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows_of(postgres: servers.Postgres, database: str, table: str) -> int:
    import psycopg2  # an extra's

    connection = psycopg2.connect(postgres.url(database))
    with connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM {table}")
        (count,) = cursor.fetchone()
    connection.close()
    return count


@pytest.mark.team
@pytest.mark.slow(150)
def test_a_run_on_a_teams_servers_comes_back_in_a_second_clone_with_only_the_remotes(team):
    first_clone = team.machine.root
    origin = team.folder / "origin.git"
    team.machine.up()
    prefect, mlflow = (f"http://127.0.0.1:{port}" for port in (team.machine.prefect, team.machine.mlflow))
    assert httpx.post(f"{prefect}/api/deployments/filter", json={}).status_code == 401, "it has no token"
    create_experiment = f"{mlflow}/api/2.0/mlflow/experiments/create"
    assert httpx.post(create_experiment, json={"name": "of a stranger"}).status_code == 401
    assert rows_of(team.postgres, "prefect", "deployment") == len(team.machine.ask("/deployments/filter", {})) > 0
    state, tasks = team.machine.run_deployment("m3diff/full", "first")
    assert state == "Completed"
    assert tasks == RAN_STATES | {"push": "Ran"}
    (run,) = team.machine.runs("first")
    assert rows_of(team.postgres, "mlflow", "registered_models") == 1
    assert [*first_clone.glob("services/*/*.db")] == [first_clone / "services/mlflow/users.db"]
    branch = f"runs/{run['id']}"
    branches = git("for-each-ref", "--format=%(refname:short)", cwd=origin).split()
    assert set(branches) == {"main", branch, "runs/history"}
    assert git("rev-parse", branch, cwd=origin) == git("rev-parse", branch, cwd=first_clone)
    assert len([path for path in team.ssh.folder.rglob("*") if path.is_file()]) > 20
    (first_clone / ".dvc" / "cache").rename(team.folder / "cache-that-nobody-reaches")

    clone = team.folder / "second"
    out = team.folder / "out"
    toy.run(team.folder, "git", "clone", "-q", "--single-branch", str(origin), "second")
    team.give_key(clone)
    assert not (clone / ".dvc" / "cache").exists()
    output = python(clone, "-m", "m3diff", "restore", "champion", "--into", str(out))
    assert f"restored to {out}" in output
    assert "missing" not in output

    lock = Lock(text=git("show", f"{branch}:dvc.lock", cwd=first_clone).encode() + b"\n")
    assert (out / "dvc.lock").read_bytes() == git("show", f"{branch}:dvc.lock", cwd=first_clone).encode() + b"\n"
    version = httpx.get(
        f"{mlflow}/api/2.0/mlflow/registered-models/alias",
        params={"name": "m3diff", "alias": "champion"},
        auth=("admin", PASSWORD),
    ).raise_for_status()
    tags = {tag["key"]: tag["value"] for tag in version.json()["model_version"]["tags"]}
    assert tags["prefect.flow_run"] == run["id"]
    assert dvc_hash(out / CHECKPOINT) == lock.recorded_hash(Path(CHECKPOINT), "train outs") == tags["dvc.checkpoint"]
    assert (
        dvc_hash(out / DATA) == lock.recorded_hash(Path(DATA), "ingest@minichange deps") == tags["dvc.raw.minichange"]
    )
    assert (out / "params.yaml").read_bytes() == (first_clone / "params.yaml").read_bytes()
    assert toy.status(out) == {}

    rows = toy.read_rows(out / "data" / "04_mixture" / "test" / "00000.parquet")
    paths = [[str(out / image["uri"]) for image in row["images"]] for row in rows]
    pairs = [{"before": before, "after": after} for before, after in paths]
    predictions = json.loads((out / "data" / "06_predictions" / "predictions.json").read_text())
    assert [row["image_id"] for row in predictions] == [row["id"] for row in rows]
    captions = [row["caption"] for row in predictions]
    assert len(set(captions)) > 1
    assert json.loads(python(out, "-c", LOAD, json.dumps(pairs))) == captions
    _, served_captions = toy.load_and_caption(mlflow, pairs, team.folder)
    assert served_captions == captions
    assert "ok       stored model" in python(clone, "-m", "m3diff", "lineage", "champion")
    toy.run(clone, "git", "fetch", "-q", "origin", "runs/history:runs/history")
    assert run["id"] in python(clone, "-m", "m3diff", "history")


@pytest.mark.parametrize(
    ("server", "package"), [(servers.postgres, "install .* postgresql$"), (servers.ssh, "install .* openssh-server$")]
)
def test_a_server_that_is_missing_is_named_with_the_command_that_installs_it(server, package, monkeypatch):
    monkeypatch.setattr(servers.shutil, "which", lambda name, path: None)
    with pytest.raises(RuntimeError, match=package), server():
        pass

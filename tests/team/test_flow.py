"""A team's whole flow: servers on PostgreSQL, data by SSH, models by S3, commits by a git remote; and a second clone,
which has nothing but these and brings the champion back."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from m3diff.provenance.dvc import Lock, dvc_hash
from m3diff.provenance.git import git
from tests import servers, toy
from tests.flows.test_services import RAN, Machine

pytestmark = pytest.mark.team

TOKEN, PASSWORD = "m3diff:a-token-of-the-test", "a-password-of-the-test"
DATA, CHECKPOINT = "data/01_raw/minichange", "data/05_model/checkpoint"

LOAD = """
import json, sys
from pathlib import Path
from m3diff.models import generation, images
captioner = generation.load_captioner(Path("data/05_model/checkpoint"))
rows = json.loads(sys.argv[1])
pairs = [(images.load_image(row["before"]), images.load_image(row["after"])) for row in rows]
print(json.dumps(captioner.caption(pairs)))
"""


class Team:
    """What its people share: the databases, the data by SSH, the bucket, and `origin.git`."""

    def __init__(self, folder: Path, postgres: servers.Postgres, ssh: servers.Ssh, s3: servers.S3) -> None:
        self.folder, self.postgres, self.ssh, self.s3 = folder, postgres, ssh, s3
        self.machine = Machine(toy.build(folder / "first"))
        self.machine.environment["PREFECT_API_AUTH_STRING"] = TOKEN
        self.settle()
        self.share()

    def settle(self) -> None:
        """What stands in services/environment."""
        settings = self.s3.environment | {
            "PREFECT_API_DATABASE_CONNECTION_URL": self.postgres.create("prefect").replace("://", "+asyncpg://"),
            "M3DIFF_MLFLOW_STORE": self.postgres.create("mlflow"),
            "M3DIFF_MLFLOW_ARTIFACTS": f"s3://{self.s3.bucket}/mlflow",
            "PREFECT_SERVER_API_AUTH_STRING": TOKEN,
            "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
        }
        file = self.machine.root / "services" / "environment"
        file.parent.mkdir()
        file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        file.chmod(0o600)

    def share(self) -> None:
        """Commit where data and MLflow are, and push; where this person's key lies is in no commit."""
        root, url = self.machine.root, self.ssh.remote["url"]
        params = yaml.safe_load((root / "params.yaml").read_text())
        params["register"]["tracking_uri"] = f"http://127.0.0.1:{self.machine.mlflow}"
        (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
        toy.run(root, "dvc", "remote", "add", "-q", "-d", "team", url)
        self.give_key(root)
        toy.commit(root, "the team's places")
        toy.run(root, "git", "branch", "-M", "main")
        toy.run(self.folder, "git", "init", "-q", "--bare", "--initial-branch", "main", "origin.git")
        toy.run(root, "git", "remote", "add", "origin", str(self.folder / "origin.git"))
        toy.run(root, "git", "push", "-q", "origin", "main")
        toy.run(root, "git", "config", "m3diff.runs", "origin")

    def give_key(self, root: Path) -> None:
        for option, value in self.ssh.remote.items():
            if option != "url":
                toy.run(root, "dvc", "remote", "modify", "-q", "--local", "team", option, value)

    @property
    def logins(self) -> dict[str, str]:
        """What a person's shell has."""
        return self.s3.environment | {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": PASSWORD}


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    with servers.postgres() as postgres, servers.ssh() as ssh, servers.s3() as s3:
        team = Team(tmp_path, postgres, ssh, s3)
        monkeypatch.chdir(team.machine.root)
        for name, value in team.logins.items():
            monkeypatch.setenv(name, value)
        yield team
        team.machine.make("down")


def m3diff(root: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "m3diff", *arguments]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def captions_of(root: Path, rows: list[dict[str, str]]) -> list[str]:
    """What the checkpoint that lies in a working tree says of pairs."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(rows)], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow(150)
def test_a_run_on_a_teams_servers_comes_back_in_a_second_clone_that_has_only_the_remotes(team):
    first, origin = team.machine.root, team.folder / "origin.git"
    started = team.machine.make("up")
    assert started.returncode == 0, started.stdout + started.stderr
    state, tasks = team.machine.run_deployment("m3diff/full", "first")
    assert (state, tasks) == ("Completed", RAN | {"push": "Ran"})
    (run,) = team.machine.ask("flow_runs", {"flow_runs": {"name": {"any_": ["first"]}}})
    branch = f"runs/{run['id']}"
    kept = git("for-each-ref", "--format=%(refname:short)", cwd=origin).split()
    assert set(kept) == {"main", branch, "runs/history"}
    assert git("rev-parse", branch, cwd=origin) == git("rev-parse", branch, cwd=first)
    assert len([path for path in team.ssh.folder.rglob("*") if path.is_file()]) > 20
    (first / ".dvc" / "cache").rename(team.folder / "cache-that-nobody-reaches")

    clone, out = team.folder / "second", team.folder / "out"
    toy.run(team.folder, "git", "clone", "-q", "--single-branch", str(origin), "second")
    team.give_key(clone)
    assert not (clone / ".dvc" / "cache").exists()
    said = m3diff(clone, "restore", "champion", "--into", str(out))
    assert f"restored to {out}" in said
    assert "missing" not in said

    lock = Lock(text=git("show", f"{branch}:dvc.lock", cwd=first).encode() + b"\n")
    assert (out / "dvc.lock").read_bytes() == git("show", f"{branch}:dvc.lock", cwd=first).encode() + b"\n"
    version = httpx.get(
        f"http://127.0.0.1:{team.machine.mlflow}/api/2.0/mlflow/registered-models/alias",
        params={"name": "m3diff", "alias": "champion"},
        auth=("admin", PASSWORD),
    ).raise_for_status()
    tags = {tag["key"]: tag["value"] for tag in version.json()["model_version"]["tags"]}
    assert tags["prefect.flow_run"] == run["id"]
    assert dvc_hash(out / CHECKPOINT) == lock.recorded(Path(CHECKPOINT), "train outs") == tags["dvc.checkpoint"]
    assert dvc_hash(out / DATA) == lock.recorded(Path(DATA), "ingest@minichange deps") == tags["dvc.raw.minichange"]
    assert (out / "params.yaml").read_bytes() == (first / "params.yaml").read_bytes()
    assert toy.status(out) == {}

    rows = toy.read_rows(out / "data" / "04_mixture" / "test" / "00000.parquet")
    pairs = [{side: str(out / row[side]) for side in ("before", "after")} for row in rows]
    wrote = json.loads((out / "data" / "06_predictions" / "predictions.json").read_text())
    assert [row["image_id"] for row in wrote] == [row["id"] for row in rows]
    wanted = [row["caption"] for row in wrote]
    assert len(set(wanted)) > 1
    assert captions_of(out, pairs) == wanted
    _, served = toy.load_and_caption(f"http://127.0.0.1:{team.machine.mlflow}", pairs, team.folder)
    assert served == wanted
    chain = m3diff(clone, "lineage", "champion")
    assert "ok       stored model" in chain
    toy.run(clone, "git", "fetch", "-q", "origin", "runs/history:runs/history")
    assert run["id"] in m3diff(clone, "history")

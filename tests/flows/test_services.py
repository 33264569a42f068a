"""The servers and the worker for real: up, the deployment twice, down."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from infra import units
from m3diff.provenance.git import git
from m3diff.registry.decisions import decisions
from tests import toy
from tests.servers import free_port
from tests.toy import REPOSITORY, load_and_caption, store

DATASETS = ("minichange", "minichange_free", "minichange_shifted")
MADE = [f"{stage}@{name}" for stage in ("synthesize", "ingest") for name in DATASETS]
STAGES = [*MADE, "validate", "convert", "train", "predict", "evaluate"]
RAN = {"preflight": "Completed", **dict.fromkeys(STAGES, "Ran"), "push": "Skipped", "register": "Ran", "promote": "Ran"}
RAN |= {"code": "Skipped"}  # the toy project has its digests
SKIPPED = {name: state if state == "Completed" else "Skipped" for name, state in RAN.items()}


class Machine:
    """The project's folder as a person has it: `make up`, and a second shell."""

    def __init__(self, root: Path) -> None:
        self.prefect, self.mlflow = free_port(), free_port()
        ours = {"M3DIFF_PREFECT_PORT": self.prefect, "M3DIFF_MLFLOW_PORT": self.mlflow}
        self.root, self.environment = root, os.environ | {name: str(port) for name, port in ours.items()}
        self.environment["PREFECT_API_URL"] = f"http://127.0.0.1:{self.prefect}/api"
        self.environment["PREFECT_WORKER_QUERY_SECONDS"] = "1"  # by default 10

    def make(self, what: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(REPOSITORY / "infra" / "services.py"), what]
        return subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True)

    def run_deployment(self, deployment: str, name: str) -> tuple[str, dict[str, str]]:
        """Run from the second shell to the end; the state of the flow run, and of each of its tasks, by name."""
        command = [sys.executable, "-m", "prefect", "deployment", "run", deployment, "--watch", "--flow-run-name", name]
        done = subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr + (self.root / "services" / "worker.log").read_text()
        (flow_run,) = self.ask("flow_runs", {"flow_runs": {"name": {"any_": [name]}}})
        tasks = self.ask("task_runs", {"flow_runs": {"name": {"any_": [name]}}})
        return flow_run["state_name"], {task["name"]: task["state_name"] for task in tasks}

    def process(self, service: str) -> psutil.Process:
        return psutil.Process(json.loads((self.root / "services" / f"{service}.json").read_text())["pid"])

    def ask(self, what: str, condition: dict[str, Any]) -> list[dict[str, Any]]:
        token = self.environment.get("PREFECT_API_AUTH_STRING")
        login = tuple(token.split(":", 1)) if token else None
        address = f"{self.environment['PREFECT_API_URL']}/{what}/filter"
        asked = httpx.post(address, json=condition, auth=login, timeout=60)
        return asked.raise_for_status().json()

    def scheduled(self) -> list[dict[str, Any]]:
        return self.ask("flow_runs", {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}})


@pytest.fixture
def machine(project: Path) -> Iterator[Machine]:
    machine = Machine(project)
    started = machine.make("up")
    assert started.returncode == 0, started.stdout + started.stderr
    yield machine
    machine.make("down")


@pytest.mark.fault("24", "32", "S1", "see")
@pytest.mark.slow(90)
def test_the_deployment_runs_the_pipeline_and_a_second_run_skips_every_stage_and_retrain_has_no_reason(
    machine, tmp_path
):
    assert machine.make("up").stdout.count("already up") == 4
    elsewhere = Machine(machine.root).make("up")
    assert elsewhere.returncode == 1
    assert f"prefect is up already, on port {machine.prefect}; `make down` first" in elsewhere.stderr

    before = git("status", "--porcelain", cwd=machine.root)
    assert machine.run_deployment("m3diff/full", "first") == ("Completed", RAN)
    (run,) = machine.ask("flow_runs", {"flow_runs": {"name": {"any_": ["first"]}}})
    branch = f"runs/{run['id']}"
    assert machine.run_deployment("m3diff/full", "second") == ("Skipped", SKIPPED)
    assert machine.run_deployment("m3diff/retrain", "third")[0] == "Skipped"

    assert git("status", "--porcelain", cwd=machine.root) == before
    branches = git("for-each-ref", "--format=%(refname:short)", "refs/heads/runs/", cwd=machine.root).split()
    assert set(branches) == {"runs/history", "runs/latest", branch}
    (version,) = store(machine.root).search_model_versions("name = 'm3diff'")
    assert version.tags["dvc.checkpoint"] in git("show", f"{branch}:dvc.lock", cwd=machine.root)
    assert version.tags["git.commit"] == git("rev-parse", f"{branch}^", cwd=machine.root)
    assert version.tags["git.dirty"] == "false"
    assert version.tags["prefect.flow_run"] == run["id"]
    (decision,) = decisions(machine.root)
    assert (decision.to, decision.flow_run) == (1, run["id"])
    pages = machine.ask("artifacts", {"artifacts": {"key": {"any_": ["run-report"]}}})
    assert sorted(page["data"].split(":")[0] for page in pages) == ["# Completed", "# Skipped"]

    back = tmp_path / "back"
    git("worktree", "add", "--quiet", str(back), branch, cwd=machine.root)
    toy.run(back, "dvc", "config", "--local", "cache.dir", str(machine.root / ".dvc/cache"))
    toy.run(back, "dvc", "checkout", "--quiet")
    images = [back / "data/01_raw/minichange" / folder / "2.png" for folder in ("images", "sc_images")]
    rows = [dict(zip(("before", "after"), map(str, images), strict=True))]
    _, captions = load_and_caption(f"http://127.0.0.1:{machine.mlflow}", rows, tmp_path)
    wrote = json.loads((back / "data/06_predictions/predictions.json").read_text())
    assert captions == [wrote[0]["caption"]]
    page = httpx.get(
        f"http://127.0.0.1:{machine.mlflow}/api/2.0/mlflow/registered-models/get", params={"name": "m3diff"}
    )
    assert {alias["alias"] for alias in page.json()["registered_model"]["aliases"]} == {"challenger", "champion"}
    assert machine.scheduled(), "the scheduler made no run of m3diff/retrain"

    machine.process("keeper").kill()
    machine.process("worker").kill()
    status = machine.make("status")
    assert status.returncode == 1
    assert "worker is not up, keeper is not up" in status.stderr
    assert "last successful run:  third, " in status.stdout
    assert machine.make("up").returncode == 0
    assert machine.make("status").returncode == 0
    log = (machine.root / "services" / "worker.log").read_text()
    assert log.count("--- worker started ") >= 2, "the log of the worker that died is gone"

    assert machine.make("down").stdout.count("ended") == 4
    assert machine.make("down").stdout.count("not up") == 4


@pytest.mark.slow(60)
def test_what_the_unit_has_systemd_start_comes_up_with_the_environment_that_systemd_gives(project):
    """systemd itself does not run in a test: its part is played by a process with the unit's folder and command."""
    machine = Machine(project)
    settings = project / "services" / "environment"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text(f"M3DIFF_PREFECT_PORT={machine.prefect}\nM3DIFF_MLFLOW_PORT={machine.mlflow}\n")
    settings.chmod(0o600)
    given = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(Path.home())}
    lines = units.unit(None).splitlines()
    (line,) = [line for line in lines if line.startswith("ExecStart=")]
    assert f"WorkingDirectory={project}" in lines
    command = shlex.split(line.removeprefix("ExecStart="))
    child = subprocess.Popen(command, cwd=project, env=given, start_new_session=True)
    try:
        status, deadline = machine.make("status"), time.monotonic() + 200
        while status.returncode:
            assert time.monotonic() < deadline, status.stdout + status.stderr
            assert child.poll() is None
            time.sleep(1)
            status = machine.make("status")
        assert machine.process("keeper").pid == child.pid
        assert "run as a unit" in machine.make("down").stdout
        assert machine.make("status").returncode == 0
        assert machine.scheduled(), "it made no deployments known"
    finally:
        family = [child.pid, *(each.pid for each in psutil.Process(child.pid).children(recursive=True))]
        for pid in family:  # systemd ends the whole control group
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()


def test_a_port_that_something_else_holds_is_named_with_the_way_out(project):
    machine = Machine(project)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", machine.prefect))
        stranger.listen()
        refused = machine.make("up")
    assert refused.returncode == 1
    assert f"port {machine.prefect} is taken by another program" in refused.stderr
    assert "M3DIFF_PREFECT_PORT=" in refused.stderr


def test_a_record_of_a_process_that_is_gone_or_of_another_with_its_number_is_not_taken_for_up(project):
    (project / "services").mkdir()
    for pid, started in ((2**22 - 1, 0.0), (os.getpid(), 0.0)):
        (project / "services" / "worker.json").write_text(json.dumps({"pid": pid, "started": started}))
        ended = Machine(project).make("down")
        assert ended.returncode == 0
        assert "worker: not up" in ended.stdout

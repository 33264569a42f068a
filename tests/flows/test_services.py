"""The servers and the worker for real: up, the deployment twice, down."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from infra import units
from m3diff.provenance.git import git
from m3diff.registry.decisions import decisions
from tests import toy
from tests.browser import Watch, chromium
from tests.servers import Machine, services_of, until
from tests.toy import load_and_caption, store

DATASETS = ("minichange", "minichange_free", "minichange_shifted")
MADE = [f"{stage}@{name}" for stage in ("synthesize", "ingest") for name in DATASETS]
STAGES = [*MADE, "validate", "convert", "train", "predict", "evaluate"]
RAN = {"preflight": "Completed", **dict.fromkeys(STAGES, "Ran"), "push": "Skipped", "register": "Ran", "promote": "Ran"}
RAN |= {"code": "Skipped"}  # the toy project has its digests
SKIPPED = {name: state if state == "Completed" else "Skipped" for name, state in RAN.items()}
SCHEDULED = {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}}
REPORTS = {"artifacts": {"key": {"any_": ["run-report"]}}}


@pytest.fixture
def machine(project: Path) -> Iterator[Machine]:
    with services_of(project) as machine:
        yield machine


@pytest.mark.fault("24", "32", "S1", "see")
@pytest.mark.slow(120)
def test_the_deployment_runs_the_pipeline_then_skips_it_and_retrain_has_no_reason(machine, tmp_path):
    root = machine.root
    assert machine.make("up").stdout.count("already up") == 4
    elsewhere = Machine(root).make("up")
    assert elsewhere.returncode == 1
    assert f"prefect is up already, on port {machine.prefect}; `make down` first" in elsewhere.stderr

    before = git("status", "--porcelain", cwd=root)
    assert machine.run_deployment("m3diff/full", "first") == ("Completed", RAN)
    (run,) = machine.runs("first")
    branch = f"runs/{run['id']}"
    assert machine.run_deployment("m3diff/full", "second") == ("Skipped", SKIPPED)
    assert machine.run_deployment("m3diff/retrain", "third")[0] == "Skipped"

    assert git("status", "--porcelain", cwd=root) == before
    branches = git("for-each-ref", "--format=%(refname:short)", "refs/heads/runs/", cwd=root).split()
    assert set(branches) == {"runs/history", "runs/latest", branch}
    (version,) = store(root).search_model_versions("name = 'm3diff'")
    assert version.tags["dvc.checkpoint"] in git("show", f"{branch}:dvc.lock", cwd=root)
    wanted = {"git.commit": git("rev-parse", f"{branch}^", cwd=root), "git.dirty": "false"}
    assert (wanted | {"prefect.flow_run": run["id"]}).items() <= version.tags.items()
    (decision,) = decisions(root)
    assert (decision.to, decision.flow_run) == (1, run["id"])
    pages = machine.ask("/artifacts/filter", REPORTS)
    assert sorted(page["data"].split(":")[0] for page in pages) == ["# Completed", "# Skipped"]

    back = tmp_path / "back"
    git("worktree", "add", "--quiet", str(back), branch, cwd=root)
    toy.run(back, "dvc", "config", "--local", "cache.dir", str(root / ".dvc/cache"))
    toy.run(back, "dvc", "checkout", "--quiet")
    images = [back / "data/01_raw/minichange" / folder / "2.png" for folder in ("images", "sc_images")]
    rows = [dict(zip(("before", "after"), map(str, images), strict=True))]
    mlflow = f"http://127.0.0.1:{machine.mlflow}"
    _, captions = load_and_caption(mlflow, rows, tmp_path)
    wrote = json.loads((back / "data/06_predictions/predictions.json").read_text())
    assert captions == [wrote[0]["caption"]]
    page = httpx.get(f"{mlflow}/api/2.0/mlflow/registered-models/get", params={"name": "m3diff"}).json()
    assert {alias["alias"] for alias in page["registered_model"]["aliases"]} == {"challenger", "champion"}
    assert machine.ask("/flow_runs/filter", SCHEDULED), "the scheduler made no run of m3diff/retrain"

    machine.process("keeper").kill()
    machine.process("worker").kill()
    status = machine.make("status")
    assert status.returncode == 1
    assert "worker is not up, keeper is not up" in status.stderr
    assert "last training: third, " in status.stdout
    machine.up()
    assert machine.make("status").returncode == 0
    log = (root / "services" / "worker.log").read_text()
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
    lines = units.unit().splitlines()
    (line,) = [line for line in lines if line.startswith("ExecStart=")]
    assert f"WorkingDirectory={project}" in lines
    command = shlex.split(line.removeprefix("ExecStart="))
    child = subprocess.Popen(command, cwd=project, env=given, start_new_session=True)
    try:
        until(lambda: machine.make("status").returncode == 0 or child.poll() is not None, 200)
        assert machine.process("keeper").pid == child.pid
        assert "run as a unit" in machine.make("down").stdout
        assert machine.make("status").returncode == 0
        assert machine.ask("/flow_runs/filter", SCHEDULED), "it made no deployments known"
    finally:
        family = [child.pid, *(each.pid for each in psutil.Process(child.pid).children(recursive=True))]
        for pid in family:  # systemd ends the whole control group
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()


PREFECT = (
    "/dashboard/runs/flows/deployments/work-pools/blocks/variables/automations/events/artifacts/concurrency-limits"
)
MLFLOW = ("", "#/experiments", "#/models", "#/models/m3diff", "#/models/m3diff/versions/1", "#/settings")
QUIET_MS = 1500


@pytest.mark.slow(90)
def test_no_page_of_the_servers_asks_a_host_that_is_not_this_machine(machine):
    machine.run_deployment("m3diff/full", "first")
    prefect, mlflow = (f"http://127.0.0.1:{port}/" for port in (machine.prefect, machine.mlflow))
    (run,) = machine.runs("first")
    (report,) = machine.ask("/artifacts/filter", REPORTS)
    ours = (f"runs/flow-run/{run['id']}", f"artifacts/artifact/{report['id']}")
    asked: dict[str, list[str]] = {}
    with chromium() as browser:
        for address in [prefect + path for path in (*PREFECT.split("/"), "settings", *ours)] + [
            mlflow + path for path in MLFLOW
        ]:
            page = browser.new_page()
            watch = Watch(page)
            page.goto(address)
            page.wait_for_load_state("load")
            page.wait_for_timeout(QUIET_MS)
            assert page.inner_text("body").strip(), f"{address}: an empty page"
            page.close()
            asked[address] = watch.left
    assert {page: requests for page, requests in asked.items() if requests} == {}

"""The servers and the worker as processes, deployments, and the worker's decisions about lost runs."""

import asyncio
import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import psutil
import pytest
import yaml
from prefect.cli.deploy._models import PrefectYamlModel
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling, Completed, Crashed, Pending, Running, State, Submitting
from prefect.utilities.dispatch import lookup_type, register_type
from prefect.workers.base import BaseWorker
from prefect.workers.process import ProcessWorker

from flows import alerts, worker
from flows.watch import SETTLED_S
from flows.worker import Worker
from infra.apis import WORK_POOL
from m3diff.provenance.git import git
from m3diff.records.errors import Fault
from m3diff.registry.decisions import read_decisions
from tests import toy
from tests.browser import Watch, chromium
from tests.servers import Listener, Machine, ask_prefect, prefect_server, services_of, until
from tests.toy import REPOSITORY, load_and_caption, store

DATASETS = ("minichange", "minichange_free", "minichange_shifted")
SYNTHESIZE_STAGES = [f"synthesize@{name}" for name in DATASETS]
INGEST_STAGES = [f"ingest@{name}" for name in (*DATASETS, "minichange_images")]
STAGES = [*SYNTHESIZE_STAGES, *INGEST_STAGES, "validate", "convert", "train", "predict", "evaluate"]
RAN_STATES = {
    "preflight": "Completed",
    **dict.fromkeys(STAGES, "Ran"),
    "push": "Skipped",
    "register": "Ran",
    "promote": "Ran",
}
RAN_STATES |= {"code": "Skipped"}  # the toy project has the digests of its code
SKIPPED_STATES = {name: state if state == "Completed" else "Skipped" for name, state in RAN_STATES.items()}
SCHEDULED = {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}}
TRAININGS = {"deployments": {"name": {"any_": ["full"]}}}
REPORTS = {"artifacts": {"key": {"any_": ["run-report"]}}}


@pytest.fixture
def servers(project: Path) -> Iterator[Machine]:
    with services_of(project) as machine:
        yield machine


@pytest.mark.fault("24", "32", "S1", "see")
@pytest.mark.slow(120)
def test_the_deployment_runs_the_pipeline_then_skips_it_and_retrain_has_no_reason(servers, tmp_path):
    machine = servers
    root = servers.root
    assert machine.make("up").stdout.count(" up  ") == 4, "the services are already up"
    second_make = Machine(root).make("up")
    assert second_make.returncode == 1
    for service in ("prefect", "mlflow", "worker"):
        assert str(Fault("infra.service_not_answering", service=service)) in second_make.stderr
    status_before = git("status", "--porcelain", cwd=root)
    assert machine.run_deployment("m3diff/full", "first") == ("Completed", RAN_STATES)
    (run,) = machine.runs("first")
    branch = f"runs/{run['id']}"
    assert machine.run_deployment("m3diff/full", "second") == ("Skipped", SKIPPED_STATES)
    assert machine.run_deployment("m3diff/retrain", "third")[0] == "Skipped"

    assert git("status", "--porcelain", cwd=root) == status_before
    branches = git("for-each-ref", "--format=%(refname:short)", "refs/heads/runs/", cwd=root).split()
    assert set(branches) == {"runs/history", "runs/latest", branch}
    (version,) = store(root).search_model_versions("name = 'm3diff'")
    assert version.tags["dvc.checkpoint"] in git("show", f"{branch}:dvc.lock", cwd=root)
    git_tags = {"git.commit": git("rev-parse", f"{branch}^", cwd=root), "git.dirty": "false"}
    assert (git_tags | {"prefect.flow_run": run["id"]}).items() <= version.tags.items()
    (decision,) = read_decisions(root)
    assert decision.target == 1
    assert decision.flow_run == run["id"]
    pages = machine.ask("/artifacts/filter", REPORTS)
    assert sorted(page["data"].split(":")[0] for page in pages) == ["# Completed", "# Skipped"]

    worktree = tmp_path / "back"
    git("worktree", "add", "--quiet", str(worktree), branch, cwd=root)
    toy.run(worktree, "dvc", "config", "--local", "cache.dir", str(root / ".dvc/cache"))
    toy.run(worktree, "dvc", "checkout", "--quiet")
    images = [worktree / "data/01_raw/minichange" / folder / "2.png" for folder in ("images", "sc_images")]
    rows = [dict(zip(("before", "after"), map(str, images), strict=True))]
    mlflow = f"http://127.0.0.1:{machine.mlflow}"
    _, captions = load_and_caption(mlflow, rows, tmp_path)
    predictions = json.loads((worktree / "data/06_predictions/predictions.json").read_text())
    assert captions == [predictions[0]["caption"]]
    page = httpx.get(f"{mlflow}/api/2.0/mlflow/registered-models/get", params={"name": "m3diff"}).json()
    assert {alias["alias"] for alias in page["registered_model"]["aliases"]} == {"challenger", "champion"}
    assert machine.ask("/flow_runs/filter", SCHEDULED), "the scheduler made no run of m3diff/retrain"

    machine.process("keeper").kill()
    machine.process("worker").kill()
    status = machine.make("status")
    assert status.returncode == 1
    faults = str(Fault("infra.service_not_up", service="worker")), str(Fault("infra.service_not_up", service="keeper"))
    assert ", ".join(faults) in status.stderr
    assert "last training: third, " in status.stdout
    machine.up()
    assert machine.make("status").returncode == 0
    log = (root / "services" / "worker.log").read_text()
    assert log.count("--- worker started ") >= 2, "the log of the killed worker is missing"

    assert machine.make("down").stdout.count("ended") == 4
    assert machine.make("down").stdout.count("not up") == 4


PREFECT = "/dashboard/runs/flows/deployments/work-pools/blocks/variables/automations/events/artifacts/settings"
PREFECT += "/concurrency-limits"
MLFLOW = (
    "",
    "#/experiments",
    "#/experiments/1/runs",
    "#/models",
    "#/models/m3diff",
    "#/models/m3diff/versions/1",
    "#/settings",
)


@pytest.mark.slow(150)
def test_no_page_of_the_servers_asks_a_host_that_is_not_this_machine(servers):
    servers.run_deployment("m3diff/full", "first")
    prefect, mlflow = (f"http://127.0.0.1:{port}/" for port in (servers.prefect, servers.mlflow))
    (run,) = servers.runs("first")
    (report,) = servers.ask("/artifacts/filter", REPORTS)
    run_pages = (f"runs/flow-run/{run['id']}", f"artifacts/artifact/{report['id']}")
    foreign_requests: dict[str, list[str]] = {}
    with chromium() as browser:
        for address in [
            *(prefect + path for path in (*PREFECT.split("/"), *run_pages)),
            *(mlflow + path for path in MLFLOW),
        ]:
            page = browser.new_page()
            watch = Watch(page)
            page.goto(address)
            page.wait_for_load_state("load")
            page.wait_for_timeout(1500)
            assert page.inner_text("body").strip(), f"{address}: an empty page"
            page.close()
            foreign_requests[address] = watch.foreign_requests
    assert {page: requests for page, requests in foreign_requests.items() if requests} == {}
    records = f"{mlflow}ajax-api/3.0/mlflow/ui-telemetry"  # MLflow's page would send its reports to this address
    assert httpx.get(records).json()["disable_ui_telemetry"] is True
    assert httpx.post(records, json={"records": []}).json() == {"status": "disabled"}


NOT_COMMITTED = Fault("flows.not_committed", names=["params.yaml"]).problem


@pytest.mark.fault("see")
@pytest.mark.slow(120)
def test_a_flow_that_is_refused_says_so_where_it_was_started(servers):
    """The checkout has an uncommitted edit. The flow is started with Prefect's command and with `make flow`."""
    params = servers.root / "params.yaml"
    params.write_text(params.read_text() + "# an edit\n")
    prefect_command = servers.run(
        "-m", "prefect", "deployment", "run", "m3diff/full", "--flow-run-name", "edited", "--watch"
    )
    output = prefect_command.stdout + prefect_command.stderr
    assert prefect_command.returncode == 1
    assert NOT_COMMITTED in " ".join(output.split())
    assert "Traceback" not in output
    assert servers.states("edited") == [f"Refused: {NOT_COMMITTED}"]
    status = servers.make("status")
    assert status.returncode == 1
    assert NOT_COMMITTED in status.stderr
    assert servers.make("up").returncode == 0, "the services are up"
    count = len(servers.ask("/flow_runs/filter", TRAININGS))
    make_flow = servers.make("flow")
    assert make_flow.returncode == 1
    assert NOT_COMMITTED in make_flow.stderr
    assert len(servers.ask("/flow_runs/filter", TRAININGS)) == count
    toy.commit(servers.root, "the edit")
    second_flow = servers.make("flow")
    assert second_flow.returncode == 0, second_flow.stdout + second_flow.stderr
    up = servers.make("up").stdout
    (experiment,) = store(servers.root).search_experiments(filter_string="name = 'm3diff'")
    (last_run,) = servers.ask("/flow_runs/filter", TRAININGS | {"sort": "START_TIME_DESC", "limit": 1})
    assert f"http://127.0.0.1:{servers.mlflow}/#/experiments/{experiment.experiment_id}/runs\n" in up
    assert f"http://127.0.0.1:{servers.mlflow}/#/models/m3diff\n" in up
    assert f"http://127.0.0.1:{servers.prefect}/runs/flow-run/{last_run['id']}\n" in up


MINE = Path("data/01_raw/mine")
MAX_CRASH_S = 120
MAX_CONTINUE_S = 300
FINAL_STATES = {"Completed", "Failed", "Crashed", "Cancelled", "Skipped", "Rejected"}


@contextmanager
def without_schedules(root: Path, **environment: str) -> Iterator[Machine]:
    """Run the services without schedules, so that only the runs of the test start."""
    with services_of(root, **environment) as machine:
        for name in ("retrain", "watch"):
            deployment = machine.ask(f"/deployments/name/m3diff/{name}")
            (schedule,) = deployment["schedules"]
            machine.ask(f"/deployments/{deployment['id']}/schedules/{schedule['id']}", {"active": False}, "PATCH")
        yield machine


def schedule_late_run(machine: Machine, deployment: str, run: str) -> Callable[[], str]:
    """Create a scheduled run that was due an hour ago. Return a function that returns its final state, or ""."""
    due = datetime.now(UTC) - timedelta(hours=1)
    id_ = machine.ask(f"/deployments/name/m3diff/{deployment}")["id"]
    state = {"type": "SCHEDULED", "name": "Late", "state_details": {"scheduled_time": due.isoformat()}}
    machine.ask(f"/deployments/{id_}/create_flow_run", {"name": run, "state": state, "tags": ["auto-scheduled"]})

    def final_state() -> str:
        state_name = machine.states(run)[0]
        return state_name if state_name in FINAL_STATES else ""

    return final_state


@pytest.mark.slow(95)
def test_a_late_run_runs_new_data_start_one_and_each_failure_is_told_once(project, listener: Listener):
    """A stage checks a drop folder, which has a bad file."""
    (project / MINE).mkdir(parents=True)
    (project / MINE / "bad.csv").write_text("1")
    toy.run(project, "dvc", "add", "-q", str(MINE))
    check = f"for path in pathlib.Path('{MINE}').glob('bad*'): sys.exit(f'{{path.name}} row 7: no image')"
    (project / "check.py").write_text(f"import pathlib, sys\n{check}\n")
    graph = yaml.safe_load((project / "dvc.yaml").read_text())
    graph["stages"] = {"check": {"cmd": "python check.py", "deps": [str(MINE)]}} | graph["stages"]
    (project / "dvc.yaml").write_text(yaml.safe_dump(graph, sort_keys=False))
    toy.commit(project, "an own dataset")
    (project / MINE / "bad.csv").rename(project / MINE / "bad2.csv")  # only in the checkout, until watch runs
    renamed = time.monotonic()
    with without_schedules(project, M3DIFF_DROP=str(MINE), M3DIFF_NOTIFY=listener.address) as machine:
        assert until(schedule_late_run(machine, "retrain", "night")) == "Failed"
        time.sleep(max(0.0, renamed + SETTLED_S + 1 - time.monotonic()))
        assert until(schedule_late_run(machine, "watch", "look")) == "Completed"
        assert git("diff", "--name-only", "HEAD", "runs/data", cwd=project) == f"{MINE}.dvc"
        until(lambda: listener.got[1:])
        assert until(schedule_late_run(machine, "watch", "another look")) == "Skipped"
        for alert, file in zip(listener.got, ("bad.csv", "bad2.csv"), strict=True):
            assert alert["title"] == "m3diff/retrain failed"
            assert "stage check " in alert["message"]
            assert f" {file} row 7: no image. " in alert["message"]
            assert f"http://127.0.0.1:{machine.prefect}/runs/flow-run/" in alert["message"]
        assert "secret-word" not in (project / "services/worker.log").read_text()


@pytest.fixture
def machine(project: Path, tmp_path: Path, listener: Listener) -> Iterator[Machine]:
    """Run the services of a project whose last stage waits for a file before it continues."""
    toy.replace_stage(project, "evaluate", toy.WAITS)
    toy.commit(project, "a slow stage")
    with services_of(project, TOY_MARKS=str(tmp_path), M3DIFF_NOTIFY=listener.address) as machine:
        yield machine


def history_of(machine: Machine, run: str) -> list[str]:
    """Return the names of all states that the run was in."""
    return [state["name"] for state in machine.ask(f"/flow_run_states/?flow_run_id={run}")]


def worker_processes(machine: Machine) -> list[psutil.Process]:
    """Return the worker and its descendants."""
    worker = machine.process("worker")
    return [worker, *worker.children(recursive=True)]


@pytest.mark.fault("04")
@pytest.mark.slow(200)
def test_a_run_whose_host_dies_crashes_in_two_minutes_and_goes_on_in_five(machine, tmp_path):
    """The worker is killed during a stage. A new worker starts the stage again."""
    run = machine.begin("m3diff/full", "first")["id"]
    marks = tmp_path
    until((marks / "began").exists)
    family = worker_processes(machine)
    died = time.monotonic()
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=20)
    (marks / "began").unlink()
    until(lambda: "Crashed" in history_of(machine, run))
    assert time.monotonic() - died < MAX_CRASH_S
    until((marks / "began").exists)
    assert time.monotonic() - died < MAX_CONTINUE_S
    (marks / "go").touch()
    until(lambda: machine.states("first") == ["Completed"])
    assert (marks / "ended").read_text() == "once "
    assert machine.runs("first")[0]["run_count"] == 2
    assert len(store(machine.root).search_model_versions("name = 'm3diff'")) == 1


@pytest.mark.fault("W2")
@pytest.mark.slow(120)
def test_a_run_whose_worker_dies_before_its_start_crashes_with_a_notice(machine, listener):
    """The keeper restarts the worker. m3diff/watch allows one run at a time and cancels others."""
    run = machine.begin("m3diff/watch", "first")["id"]
    until(lambda: machine.runs("first")[0]["state_type"] == "PENDING")
    for process in worker_processes(machine):
        process.kill()
    until(lambda: machine.runs("first")[0]["state_type"] == "CRASHED")
    machine.begin("m3diff/watch", "second")
    until(lambda: machine.states("second")[0] in ("Completed", "Skipped"))
    assert [alert["title"] for alert in listener.got if run in alert["message"]] == ["m3diff/watch crashed"]
    assert machine.make("status").returncode == 0


PREFECT_YAML = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())
DEPLOYMENTS = {entry["name"]: entry for entry in PREFECT_YAML["deployments"]}


@pytest.mark.fault("22", "m6", "29")
def test_prefect_accepts_the_file_with_its_limits_and_schedules_in_utc():
    definition = PrefectYamlModel.model_validate(PREFECT_YAML)
    assert [deployment.name for deployment in definition.deployments] == ["full", "retrain", "watch"]
    for entry in DEPLOYMENTS.values():
        module, _, function = entry["entrypoint"].rpartition(".")
        flow = getattr(importlib.import_module(module), function)
        assert flow.name == "m3diff"
        assert entry["work_pool"]["name"] == WORK_POOL
        assert set(entry.get("parameters", {})) <= set(flow.parameters.properties)
    single_run = {"limit": 1, "collision_strategy": "ENQUEUE"}
    limits = {name: entry.get("concurrency_limit") for name, entry in DEPLOYMENTS.items()}
    assert limits == {"full": None, "retrain": single_run, "watch": single_run | {"collision_strategy": "CANCEL_NEW"}}
    (nightly_schedule,) = DEPLOYMENTS["retrain"]["schedules"]
    (watch_schedule,) = DEPLOYMENTS["watch"]["schedules"]
    assert nightly_schedule["timezone"] == watch_schedule["timezone"] == "UTC"
    assert len(nightly_schedule["cron"].split()) == 5
    assert watch_schedule["interval"] == 900
    assert watch_schedule["active"]


# Deployments


@pytest.mark.slow(10)
def test_a_flow_that_prefect_loads_finds_dvc_and_not_the_module_flows_dvc():
    code = (
        "from prefect.flows import load_flow_from_entrypoint as load\n"
        f"for entrypoint in {[entry['entrypoint'] for entry in DEPLOYMENTS.values()]}: assert load(entrypoint).name\n"
        "from flows import dvc\n"
        "with dvc.repository() as repo: print(repo.root_dir)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout.strip() == str(REPOSITORY), done.stderr


NIGHTLY = {"cron": "30 4 * * *", "timezone": "UTC"}


@pytest.mark.fault("W3")
@pytest.mark.slow(120)
def test_a_persons_changes_stay_with_a_note_and_those_of_prefect_yaml_arrive(project, tmp_path):
    with prefect_server(tmp_path / "prefect") as environment:

        def ask(method: str, path: str, body: Any = None) -> Any:
            return ask_prefect(environment["PREFECT_API_URL"], method, path, body)

        def deploy() -> str:
            """Deploy like the keeper and return the output."""
            port = str(urlsplit(environment["PREFECT_API_URL"]).port)
            command = [sys.executable, str(REPOSITORY / "infra" / "services.py"), "deploy"]
            variables = environment | {"M3DIFF_PREFECT_PORT": port}
            done = subprocess.run(command, env=variables, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        def read_settings() -> list[Any]:
            """Return the settings of all deployments, the work pool and its queue that somebody can change."""
            settings = []
            for name in DEPLOYMENTS:
                entry = ask("GET", f"/deployments/name/m3diff/{name}")
                for schedule in entry["schedules"]:
                    schedule["schedule"].pop("anchor_date", None)
                keys = ("active", "schedule", "parameters", "slug")
                rules = [[schedule[key] for key in keys] for schedule in entry["schedules"]]
                limit = (entry["global_concurrency_limit"] or {}).get("limit")
                settings.append((name, entry["paused"], limit, entry["concurrency_options"], rules))
            pool = ask("GET", "/work_pools/m3diff")
            queue = ask("GET", "/work_pools/m3diff/queues/default")
            return [*settings, pool["is_paused"], pool["concurrency_limit"], queue["is_paused"]]

        assert "paused" not in deploy() + deploy(), "nobody changed anything"
        full, retrain, watch = (ask("GET", f"/deployments/name/m3diff/{name}") for name in DEPLOYMENTS)
        ask("PATCH", f"/deployments/{watch['id']}", {"paused": True})
        ask("DELETE", f"/deployments/{watch['id']}/schedules/{watch['schedules'][0]['id']}")
        ask("PATCH", f"/deployments/{full['id']}", {"concurrency_limit": 1})
        own_schedule = {"active": True, "schedule": NIGHTLY, "slug": "mine"}
        ask("POST", f"/deployments/{full['id']}/schedules", [own_schedule])
        ask("PATCH", f"/deployments/{retrain['id']}", {"concurrency_limit": 3})
        changed_schedule = {"active": False, "schedule": NIGHTLY, "parameters": {"warm_start": True}}
        ask("PATCH", f"/deployments/{retrain['id']}/schedules/{retrain['schedules'][0]['id']}", changed_schedule)
        ask("PATCH", "/work_pools/m3diff", {"is_paused": True, "concurrency_limit": 1})
        ask("PATCH", "/work_pools/m3diff/queues/default", {"is_paused": True})
        settings_before = read_settings()
        for _ in range(2):
            output = deploy()
            assert read_settings() == settings_before
            for words in ("m3diff/retrain", "m3diff/watch", "work pool m3diff"):
                assert f"{words}: paused, as set on Prefect's page" in output
        assert "command" not in ask("GET", "/work_pools/m3diff")["base_job_template"]["job_configuration"]

        file = project / "prefect.yaml"
        file.write_text(
            file.read_text().replace("limit: 1, collision_strategy: ENQ", "limit: 2, collision_strategy: ENQ")
        )
        deploy()
        deployment = ask("GET", "/deployments/name/m3diff/retrain")
        assert deployment["global_concurrency_limit"]["limit"] == 2
        assert deployment["schedules"][0]["active"]
        assert read_settings()[2] == settings_before[2], "the settings of another deployment, whose entry is unchanged"


DEPLOYED = {name: SimpleNamespace(id=uuid.uuid4(), name=name) for name in ("full", "retrain", "watch")}
THIS_WORKER = {"prefect.worker.name": "here"}
OTHER_WORKER = {"prefect.worker.name": "another"}


class Server:
    """Replaces Prefect's API. It has one run, which has been in this state for `minutes`."""

    def __init__(
        self, state: State, deployment: str, labels: dict, minutes: float, crashes: int, sends_heartbeats=False
    ) -> None:
        self.set: list[State[Any]] = []
        self.crashes = crashes
        self.is_down = False
        self.sends_heartbeats = sends_heartbeats
        since = datetime.now(UTC) - timedelta(minutes=minutes)
        state_fields = {"state": state.model_copy(update={"timestamp": since}), "state_type": state.type}
        deployment_id = DEPLOYED[deployment].id if deployment else None
        ids = {"id": uuid.uuid4(), "flow_id": uuid.uuid4(), "deployment_id": deployment_id}
        self.run = FlowRun(name="one", state_name=state.name, labels=labels, **state_fields, **ids)

    async def read_deployments(self, flow_filter: Any) -> list[Any]:
        return [*DEPLOYED.values()]

    async def read_flow_runs(self, flow_filter: Any, flow_run_filter: Any, sort: Any) -> list[FlowRun]:
        return [self.run] if self.run.state_type in flow_run_filter.state.type.any_ else []

    async def read_events(self, event_filter: Any, limit: int) -> Any:
        """Return the last heartbeat, one minute old if the run still sends heartbeats, otherwise two minutes old."""
        assert event_filter.event.name == ["prefect.flow-run.heartbeat"]
        assert event_filter.resource.id == [f"prefect.flow-run.{self.run.id}"]
        age = timedelta(minutes=1 if self.sends_heartbeats else 2)
        return SimpleNamespace(events=[1] * (event_filter.occurred.since < datetime.now(UTC) - age))

    async def read_flow_run_states(self, flow_run_id: uuid.UUID) -> list[State[Any]]:
        return [*([Running(), Crashed()] * self.crashes)]

    async def set_flow_run_state(self, flow_run_id: uuid.UUID, state: State[Any]) -> Any:
        self.set.append(state)
        return SimpleNamespace(status=SimpleNamespace(value="ACCEPT"))

    async def get_scheduled_flow_runs_for_work_pool(self, **options: Any) -> list[Any]:
        if self.is_down:
            raise httpx.ConnectError("no answer")
        return [SimpleNamespace(flow_run=self.run)]


def ask_worker(server: Server, call: Callable[[Worker], Coroutine[Any, Any, Any]], in_hand: bool = False) -> Any:
    """Return the result of a call of a worker. `in_hand` says whether the worker has already taken the run."""

    async def work() -> Any:
        worker = Worker(work_pool_name="m3diff", name="here", limit=2)
        # type: ignore[assignment]
        worker._client = server
        worker._limiter = anyio.CapacityLimiter(2)
        # type: ignore[assignment]
        worker._has_successfully_synced = True
        worker._runs_task_group = SimpleNamespace(start_soon=print)
        if in_hand:
            worker._limiter.acquire_on_behalf_of_nowait(server.run.id)
        return await call(worker)

    return asyncio.run(work())


@pytest.fixture
def notice_titles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    titles: list[str] = []
    monkeypatch.setattr(alerts, "send_alert", lambda log, key, title, *arguments: titles.append(title))
    return titles


@pytest.fixture
def process() -> Iterator[Callable[[uuid.UUID], None]]:
    """Return a function that starts a process for a run."""
    with contextlib.ExitStack() as stack:

        def start(run: uuid.UUID) -> None:
            code = "print(1, flush=True); import time; time.sleep(60)"
            environment = os.environ | {"PREFECT__FLOW_RUN_ID": str(run)}
            command: Any = [sys.executable, "-c", code]
            process: Any = stack.enter_context(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout.readline()

        yield start


LOST_RUNS = {
    "killed before it began": (Pending(), "watch", THIS_WORKER, 2, 0, "CRASHED"),
    "killed as it began": (Submitting(), "retrain", THIS_WORKER, 2, 0, "CRASHED"),
    "killed at work": (Running(), "full", THIS_WORKER, 2, 0, "CRASHED"),
    "killed at once, before it put its name to it": (Pending(), "retrain", {}, 2, 0, "CRASHED"),
    "killed while it was cancelled": (Cancelling(), "full", THIS_WORKER, 2, 0, "CANCELLED"),
    "another machine's, which is gone": (Running(), "full", OTHER_WORKER, 600, 0, "CRASHED"),
    "another machine's, which is gone, being cancelled": (Cancelling(), "full", OTHER_WORKER, 30, 0, "CANCELLED"),
    "crashed": (Crashed(), "full", THIS_WORKER, 0, 1, "SCHEDULED"),
    "crashed a moment after it told that it works": (Crashed(), "full", THIS_WORKER, 0, 1, True, "SCHEDULED"),
    "crashed on another machine": (Crashed(), "retrain", OTHER_WORKER, 30, 1, "SCHEDULED"),
    "crashed twice": (Crashed(), "full", THIS_WORKER, 0, 2, "SCHEDULED"),
    "crashed thrice": (Crashed(), "full", THIS_WORKER, 0, 3, "FAILED"),
}
RUNS_TO_LEAVE = {
    "another may be about to begin it": (Pending(), "retrain", {}, 0.5, 0),
    "one of the same name is about to begin it": (Submitting(), "retrain", THIS_WORKER, 0.5, 0),
    "one of the same name has just begun it": (Running(), "full", THIS_WORKER, 0.5, 0),
    "one of the same name is at work on it": (Running(), "full", THIS_WORKER, 600, 0, True),
    "one of the same name ends it": (Cancelling(), "full", THIS_WORKER, 10, 0, True),
    "crashed, and its machine slept only": (Crashed(), "full", OTHER_WORKER, 10, 1, True),
    "another machine's, about to begin": (Submitting(), "watch", OTHER_WORKER, 30, 0),
    "another machine's, at work": (Running(), "full", OTHER_WORKER, 600, 0, True),
    "another machine's, being cancelled": (Cancelling(), "full", OTHER_WORKER, 30, 0, True),
    "its schedule starts it again": (Crashed(), "watch", THIS_WORKER, 0, 1),
    "of the day before": (Crashed(), "full", THIS_WORKER, 1500, 1),
    "no deployment's: a person's own process": (Running(), "", {}, 0, 0),
    "at an end": (Completed(), "full", THIS_WORKER, 0, 0),
}


@pytest.mark.fault("W2", "W4")
@pytest.mark.parametrize("case", LOST_RUNS)
def test_a_run_whose_process_is_gone_ends_or_begins_again(case, notice_titles, process):
    *arguments, expected_state = LOST_RUNS[case]
    server = Server(*arguments)
    for in_hand in (True, False):
        assert server.set == [], "the worker has taken the run"
        ask_worker(server, Worker.look_after_runs, in_hand)
    assert [state.type.value for state in server.set] == [expected_state]
    final_states = [
        state.lower() for state in (arguments[0].type.value, expected_state) if state in ("CRASHED", "FAILED")
    ]
    assert notice_titles == [f"m3diff/{arguments[1]} {end}" for end in final_states]
    process(server.run.id)
    ask_worker(server, Worker.look_after_runs)
    assert len(server.set) == 1, "a process of the run is still running"


@pytest.mark.parametrize("case", RUNS_TO_LEAVE)
def test_a_run_that_is_not_lost_is_left_alone(case: str, notice_titles: list[str]) -> None:
    server = Server(*RUNS_TO_LEAVE[case])
    ask_worker(server, Worker.look_after_runs)
    assert server.set == []
    assert notice_titles == (["m3diff/watch crashed"] if "its schedule" in case else [])


@pytest.mark.fault("W1")
@pytest.mark.parametrize("case", ["free", "in hand", "a process of it is left", "the server is gone"])
def test_a_run_that_is_here_still_is_not_begun_again_and_the_worker_goes_on(case: str, process) -> None:
    server = Server(Pending(), "full", {}, 0, 0)
    server.is_down = case == "the server is gone"
    if case == "a process of it is left":
        process(server.run.id)
    submitted_runs = ask_worker(server, Worker.get_and_submit_flow_runs, in_hand=case == "in hand")
    assert [run.id for run in submitted_runs] == ([server.run.id] if case == "free" else [])


def test_processes_of_other_runs_do_not_count_as_those_of_a_run(monkeypatch):
    server = Server(Pending(), "full", {}, 0, 0)
    groups = {str(uuid.uuid4()): ["a process"], "no id": ["a process"]}
    monkeypatch.setattr(worker, "group_processes_by", lambda variable: groups)
    assert ask_worker(server, lambda worker: worker.ids_in_progress([server.run])) == set()
    groups[str(server.run.id)] = ["a process"]
    assert ask_worker(server, lambda worker: worker.ids_in_progress([server.run])) == {server.run.id}


def test_prefects_command_line_starts_this_worker_in_a_prepared_process(monkeypatch):
    started: list[Any] = []
    monkeypatch.setattr(worker, "prepare", lambda: started.append("prepared"))
    monkeypatch.setattr(worker, "app", lambda: started.append(lookup_type(BaseWorker, "process")))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            worker.main()
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            register_type(ProcessWorker)
    assert started == ["prepared", Worker]


@pytest.mark.fault("W4")
@pytest.mark.parametrize("set_up", [True, False])
def test_a_server_that_is_gone_ends_no_worker(set_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: Any) -> None:
        raise httpx.ConnectError("no answer")

    async def sync(worker: Worker) -> None:
        worker.is_setup = set_up
        await worker.sync_with_backend()

    monkeypatch.setattr("prefect.workers.base.BaseWorker.sync_with_backend", refuse)
    with contextlib.nullcontext() if set_up else pytest.raises(httpx.ConnectError):
        ask_worker(Server(Running(), "full", THIS_WORKER, 0, 0), sync)


PRINTS = (
    "import sys; from flows.runtime import prepare; prepare(); sys.stdin.readline(); print('printed'); "
    "print('told', file=sys.stderr)"
)


@pytest.mark.fault("W4")
def test_a_flow_goes_on_where_the_worker_that_reads_what_it_prints_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "services/worker.log"
    log.parent.mkdir()
    log.write_text("before\n")
    environment = os.environ | {"PREFECT__FLOW_RUN_ID": str(uuid.uuid4()), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", PRINTS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    flow: Any = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.STDOUT, **pipes)
    flow.stdout.close()
    flow.communicate(b"\n", 60)
    assert flow.returncode == 0
    assert sorted(log.read_text().splitlines()) == ["before", "printed", "told"]

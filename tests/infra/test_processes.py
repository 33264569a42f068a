"""Services as processes: waiting, logs, stopping, replacement and restarts."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest

from flows import PREFECT_FLOW_RUN_VARIABLE
from infra import apis, processes, services
from infra.errors import ServiceError
from infra.processes import Service, running_processes
from tests.errors import raises
from tests.infra.toy import names_of
from tests.servers import free_port, until
from tests.toy import REPOSITORY


def test_a_service_is_waited_for_while_the_process_that_runs_it_lives(folder, monkeypatch):
    process = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    looks = iter([[], [], [process]])
    monkeypatch.setattr(processes, "running_processes", lambda: {"worker": next(looks, [])})
    worker = SimpleNamespace(name="worker", answers=lambda: True)
    (folder / "worker.log").write_text("it ended\n")
    processes.wait_until_up(worker, process, folder / "worker.log")
    process.kill()
    process.wait()
    log = folder / "worker.log"
    with raises(ServiceError, "infra.service_not_started", service="worker", path=log, last_lines=["it ended"]):
        processes.wait_until_up(worker, process, log)


@pytest.mark.fault("S5")
def test_a_restart_adds_to_the_log(monkeypatch):
    service = Service("worker", [sys.executable, "-c", "print('a line')"])
    monkeypatch.setattr(processes, "environment", lambda service, token: dict(os.environ))
    for _ in range(2):
        processes.start_service(service).wait()
    lines = service.log.read_text().splitlines()
    assert [line for line in lines if line == "a line"] == ["a line"] * 2
    assert [line[:18] for line in lines[::2]] == ["--- worker started"] * 2


@pytest.mark.fault("S5")
def test_a_long_log_is_moved_while_it_is_written(folder, monkeypatch):
    monkeypatch.setattr(processes, "MAX_LOG_BYTES", 10)
    log = folder / "long.log"
    with log.open("a") as writer:
        for words in ("long line 0", "long line 1", "after"):
            print(words, file=writer, flush=True)
            processes.rotate_log(log)
    logs = {path.name: path.read_text() for path in folder.glob("long*")}
    assert logs == {"long.log": "after\n", "long.log.1": "long line 1\n"}


LISTENS = """
import os, socket, sys, time
if os.fork() == 0:
    with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
        print("listens", flush=True)
        time.sleep(600)
time.sleep(600)
"""


@pytest.mark.fault("S5")
@pytest.mark.parametrize("old_server", ["killed", "alive"])
def test_what_is_left_of_a_server_does_not_keep_its_port_from_the_next(old_server, folder, monkeypatch):
    """MLflow's process starts another process that listens. A killed keeper may leave the server running."""
    port = free_port()
    monkeypatch.setattr(processes, "GRACE_S", 1)
    service = Service("mlflow", [sys.executable, "-c", LISTENS, str(port)], port)
    names_of(monkeypatch, service)
    before = processes.start_service(service)
    until(lambda: "listens" in service.log.read_text())
    if old_server == "killed":
        before.kill()
        before.wait()
    try:
        assert processes.is_port_taken(port)
        after = processes.start_service(service)
        assert before.poll() is not None
        until(lambda: service.log.read_text().count("listens") == 2)
        assert after in running_processes()["mlflow"]
        assert len(running_processes()["mlflow"]) == 2
    finally:
        services.down()
    assert not processes.is_port_taken(port)


def test_a_taken_port_is_named(folder):
    with socket.create_server(("127.0.0.1", 0)) as other_program:
        port = other_program.getsockname()[1]
        command = f"M3DIFF_MLFLOW_PORT={port + 1} make up"
        with raises(ServiceError, "infra.port_taken", service="mlflow", port=port, command=command):
            processes.start_service(Service("mlflow", ["true"], port))


ENDS_WHEN_ASKED = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *words: sys.exit("asked"))
if sys.argv[1:]:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=os.environ | {sys.argv[1]: "a run"})
print("began", flush=True)
time.sleep(60)
"""


class Family(NamedTuple):
    """Start a keeper and a worker that stop on request, and a flow's process under the worker."""

    keeper: Service
    worker: Service
    worker_process: psutil.Process
    flow_process: psutil.Process


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    command = [sys.executable, "-c", ENDS_WHEN_ASKED]
    keeper = Service("keeper", command)
    worker = Service("worker", [*command, PREFECT_FLOW_RUN_VARIABLE])
    names_of(monkeypatch, keeper, worker)
    monkeypatch.setattr(processes, "GRACE_S", 1)
    processes.start_service(keeper)
    worker_process = processes.start_service(worker)
    (flow_process,) = until(lambda: running_processes()["flow"])
    yield Family(keeper, worker, worker_process, flow_process)
    services.down()


@pytest.mark.fault("S5")
def test_a_second_keeper_is_refused(family):
    with raises(ServiceError, "infra.keeper_already_up"):
        services.keep()


@pytest.mark.fault("S5")
def test_a_new_worker_replaces_the_old_one_and_leaves_its_flows_alone(family):
    new_worker = processes.start_service(family.worker)
    assert not family.worker_process.is_running()
    assert family.flow_process.is_running()
    assert running_processes()["worker"] == [new_worker]


@pytest.mark.fault("S5")
def test_down_asks_the_keeper_the_worker_and_its_flows_to_end(family, capsys):
    processes.start_service(family.worker)
    logs = (family.keeper.log, family.worker.log)
    until(lambda: sum(log.read_text().count("began") for log in logs) == 3)
    services.down()
    assert capsys.readouterr().out == "keeper: ended\nworker: ended\nmlflow: not up\nprefect: not up\n"
    assert not any(running_processes().values())
    assert [log.read_text().count("asked") for log in logs] == [1, 1]


def test_up_says_what_it_waits_for(folder, monkeypatch, capsys):
    looks = iter([[], [], [], [psutil.Process()]])
    monkeypatch.setattr(processes, "PROGRESS_S", 0.4)
    monkeypatch.setattr(processes, "running_processes", lambda: {"worker": next(looks)})
    worker = Service("worker", [])
    monkeypatch.setattr(Service, "answers", lambda service: True)
    process = SimpleNamespace(poll=lambda: None)
    processes.wait_until_up(worker, process, folder / "worker.log", progress=services.print_waiting)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("worker    starting" in line and str(worker.log) in line for line in lines)


KEEP = """
import sys
from pathlib import Path
from infra import processes, services
from infra.processes import Service
services.KEEP_S = 0.1
prefect = Service("prefect", [sys.executable, "-c", "import time; time.sleep(60)"], 1)
mlflow = Service("mlflow", [sys.executable, "-c", ""], 2)
worker = Service("worker", [sys.executable, "-c", "import time; time.sleep(60)"])
services.services = lambda: [prefect, mlflow, worker]
services.deploy = lambda: None
services.wait_until_up = lambda *arguments: None
processes.environment = lambda service, token: {}
processes.is_port_taken = lambda port: False
Service.answers = lambda service: Path(sys.argv[1]).exists()
services.keep()
"""


@pytest.mark.fault("S5", "W4")
def test_the_keeper_starts_what_ended_and_waits_before_what_ends_again(folder, tmp_path):
    command = [sys.executable, "-c", KEEP, str(tmp_path / "answers")]
    keeper = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.DEVNULL)

    def starts_of(name: str) -> int:
        log = folder / f"{name}.log"
        return log.read_text().count(f"--- {name} started ") if log.exists() else 0

    def process_of(name: str, starts: int) -> psutil.Process:
        until(lambda: starts_of(name) >= starts, 30)
        return until(lambda: running_processes()[name], 30)[0]

    try:
        worker = process_of("worker", 1)
        process_of("prefect", 1).kill()
        worker.kill()
        process_of("prefect", 2)
        until(lambda: starts_of("mlflow") >= 2, 30)
        assert starts_of("worker") == 1, "the server does not answer yet"
        (tmp_path / "answers").touch()
        process_of("worker", 2)
        time.sleep(2)
        assert starts_of("prefect") == starts_of("worker") == 2
        assert 2 <= starts_of("mlflow") <= 7, "it ended 20 times a second"
    finally:
        keeper.kill()
        keeper.wait()
        services.down()


def test_a_worker_answers_where_the_server_has_heard_this_one_lately(monkeypatch):
    lately, once = (datetime.now(UTC) - timedelta(seconds=ago) for ago in (10, apis.WORKER_SILENCE_S + 10))
    mine = apis.WORKER_NAME
    for name, when, heard in (("another", lately, False), (mine, once, False), (mine, lately, True)):
        worker = {"name": name, "last_heartbeat_time": when.isoformat()}
        monkeypatch.setattr(apis, "ask_prefect", lambda path, body, worker=worker: [worker])
        assert apis.is_worker_heard() == Service("worker", []).answers() == heard

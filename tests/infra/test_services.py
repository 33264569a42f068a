"""The parts that `make up` and the unit of systemd share: settings, environment, logs, the text of the unit. Only small
processes are started here; tests/flows/test_services.py has the servers for real."""

import configparser
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest

from infra import services, units
from infra.services import Service, ServiceError
from tests.servers import free_port, until
from tests.toy import REPOSITORY

TOKENS = {"PREFECT_SERVER_API_AUTH_STRING": "m3diff:" + "a" * 16, "MLFLOW_AUTH_ADMIN_PASSWORD": "b" * 16}
OURS = ("M3DIFF_", "PREFECT_", "MLFLOW_")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """services/ of a checkout of its own, the current folder; no variable of the tools is set."""
    kept = tmp_path / "services"
    kept.mkdir()
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(OURS)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # what is read into it ends with the test
    monkeypatch.setattr(services, "SERVICES", kept)
    monkeypatch.setattr(services, "SETTINGS", kept / "environment")
    return kept


def test_settings_are_read_from_the_file_and_a_shells_own_win_and_what_others_can_read_is_refused(folder, monkeypatch):
    monkeypatch.setenv("M3DIFF_PREFECT_PORT", "4300")
    file = folder / "environment"
    file.write_text("# ports\n\nM3DIFF_PREFECT_PORT=1\nM3DIFF_MLFLOW_PORT=5100\nM3DIFF_MLFLOW_STORE='postgresql://a b'")
    for mode in (0o640, 0o604):
        file.chmod(mode)
        with pytest.raises(ServiceError, match="environment is for secrets, .* chmod 600"):
            services.read_settings()
    file.chmod(0o600)
    services.read_settings()
    assert [service.port for service in services.services()] == [4300, 5100, None]
    assert os.environ["M3DIFF_MLFLOW_STORE"] == "postgresql://a b"
    for line in ("A", "A=1 B=2", "1A=2", "A='b", "export A=1"):
        file.write_text(f"B=1\n{line}\n")
        with pytest.raises(ServiceError, match="environment, line 2: expected NAME=value"):
            services.read_settings()
        assert "A" not in os.environ


@pytest.mark.parametrize("address", ["0.0.0.0", "192.168.1.2", "server.example"])
def test_a_server_that_others_reach_needs_both_tokens_and_on_loopback_none_is_asked_for(address, monkeypatch):
    for own in (None, "127.0.0.1", "127.0.0.2", "localhost"):
        if own:
            monkeypatch.setenv("M3DIFF_BIND", own)
        services.check_settings()
        for service in services.services()[:2]:
            assert service.command[service.command.index("--host") + 1] == (own or "127.0.0.1")
    monkeypatch.setenv("M3DIFF_BIND", address)
    for missing in ([*TOKENS], [*TOKENS][1:]):
        for action in (services.up, services.keep):
            with pytest.raises(ServiceError, match=f"{len(missing)} setting.s. to correct") as refused:
                action()
            assert [name for name in TOKENS if f"set {name} in" in str(refused.value)] == missing
        monkeypatch.setenv(missing[0], TOKENS[missing[0]])
    services.check_settings()


@pytest.mark.parametrize("given", [[], ["prefect"], ["mlflow"], ["prefect", "mlflow"]])
def test_a_server_without_a_token_is_guarded_whatever_the_shell_and_the_other_server_have(given, monkeypatch):
    """tests/flows/test_foreign_sites.py has the requests that the guard refuses."""
    monkeypatch.setenv("UVICORN_HTTP", "h11")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    tokens = dict(zip(("prefect", "mlflow"), TOKENS.items(), strict=True))
    for name in given:
        monkeypatch.setenv(*tokens[name])
    for service in services.services():
        environment = services.environment(service)
        assert services.PRIVACY.items() <= environment.items(), "nothing is sent out"
        assert (environment["UVICORN_HTTP"] == services.GUARD) == (service.name not in given)
    pages = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"  # which may read Prefect's answers
    assert environment[pages] == "http://127.0.0.1:4200,http://localhost:4200"
    monkeypatch.setenv(pages, "https://flows.example")
    assert services.environment(services.services()[0])[pages] == "https://flows.example"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PREFECT_SERVER_API_AUTH_STRING", "m3diff:short", "16 characters at least"),
        ("PREFECT_SERVER_API_AUTH_STRING", "c" * 20, "expected user:token"),
        ("MLFLOW_AUTH_ADMIN_PASSWORD", "short", "16 characters at least"),
        ("M3DIFF_BIND", "::", "give an IPv4 address"),
        ("M3DIFF_PREFECT_PORT", "http", "M3DIFF_PREFECT_PORT=http: give a number from 1 to 65535"),
        ("M3DIFF_FLOWS", "0", "M3DIFF_FLOWS=0: give a number from 1 to 1000"),
        ("M3DIFF_FLOWS", "", "M3DIFF_FLOWS=: give a number"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(name, value, words, folder, monkeypatch):
    monkeypatch.setenv(name, value)
    for what in ("up", "run"):
        with pytest.raises(ServiceError, match=words):
            services.COMMANDS[what]()
    assert list(folder.iterdir()) == []


def test_secrets_reach_the_servers_by_environment_never_by_command_and_the_worker_has_its_own_only(monkeypatch):
    given = TOKENS | {
        "M3DIFF_FLOWS": "7",
        "M3DIFF_MLFLOW_STORE": "postgresql://u:sesame@h/d",
        "PREFECT_API_DATABASE_CONNECTION_URL": "postgresql+asyncpg://u:sesame@h/d",
        "M3DIFF_MLFLOW_ARTIFACTS": "s3://bucket/runs",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    prefect, mlflow, worker = services.services()
    commands = " ".join(word for service in services.services() for word in service.command)
    assert not any(secret in commands for secret in ("sesame", "a" * 16, "b" * 16))
    assert "--app-name basic-auth" in " ".join(mlflow.command)
    assert worker.command[-2:] == ["--limit", "7"]
    database = "PREFECT_API_DATABASE_CONNECTION_URL"
    stores = {
        "MLFLOW_BACKEND_STORE_URI": given["M3DIFF_MLFLOW_STORE"],
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": "s3://bucket/runs",
    }
    assert stores.items() <= services.environment(mlflow).items()
    assert services.environment(prefect)[database] == given[database]
    seen = services.environment(worker)
    assert not [name for name, value in seen.items() if "sesame" in value or name in services.SERVERS_ONLY]
    logins = {"PREFECT_API_AUTH_STRING": TOKENS["PREFECT_SERVER_API_AUTH_STRING"], "MLFLOW_TRACKING_USERNAME": "admin"}
    assert (logins | {"MLFLOW_TRACKING_PASSWORD": "b" * 16}).items() <= seen.items()


def test_mlflows_rules_for_users_are_ones_that_mlflow_can_read(folder):
    read, shipped = configparser.ConfigParser(), configparser.ConfigParser()
    read.read_string(services.AUTH.format(kept=folder))
    assert read["mlflow"]["database_uri"] == f"sqlite:///{folder}/users.db"
    shipped.read(Path(mlflow.__file__).with_name("server") / "auth" / "basic_auth.ini")
    assert set(shipped["mlflow"]) == set(read["mlflow"])


def wait_for_end(service: Service) -> None:
    until(lambda: service.process() is None)


@pytest.mark.fault("S5")
def test_a_restart_adds_to_the_log_and_a_log_that_has_grown_is_moved_on_while_it_is_written(folder, monkeypatch):
    service = Service("small", [sys.executable, "-c", "print('a line')"])
    monkeypatch.setattr(services, "environment", lambda service: dict(os.environ))
    for _ in range(2):
        services.start(service)
        wait_for_end(service)
    lines = service.log.read_text().splitlines()
    assert [line for line in lines if line == "a line"] == ["a line"] * 2
    assert [line[:18] for line in lines[::2]] == ["--- small started "] * 2
    monkeypatch.setattr(services, "LOG_BYTES", 10)
    log = folder / "long.log"
    with log.open("a") as writer:
        for words in ("long line 0", "long line 1", "after"):
            print(words, file=writer, flush=True)
            services.rotate(log)
    kept = {path.name: path.read_text() for path in folder.glob("long*")}
    assert kept == {"long.log": "after\n", "long.log.1": "long line 1\n"}


LISTENS = """
import os, socket, sys, time
if os.fork() == 0:
    with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
        print("listens", flush=True)
        time.sleep(600)
time.sleep(600)
"""


@pytest.mark.fault("S5")
@pytest.mark.parametrize("left", ["killed", "alive"])
def test_what_is_left_of_a_server_does_not_keep_its_port_from_the_next(left, folder, monkeypatch):
    """MLflow's own process starts the one that listens; a server that is alive was left by a killed keeper."""
    port = free_port()
    monkeypatch.setattr(services, "GRACE_S", 1)
    service = Service("small", [sys.executable, "-c", LISTENS, str(port)], port)
    monkeypatch.setattr(services, "environment", lambda service: dict(os.environ))
    monkeypatch.setattr(services, "services", lambda: [service])
    services.start(service)
    until(lambda: "listens" in service.log.read_text())
    before = service.process()
    if left == "killed":
        before.kill()
        wait_for_end(service)
    try:
        assert services.is_taken(port)
        services.start(service)
        assert service.process() not in (before, None)
        until(lambda: service.log.read_text().count("listens") == 2)
    finally:
        services.down()
    assert not services.is_taken(port)


def test_a_taken_port_is_named_and_a_record_of_a_gone_process_is_not_taken_for_up(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServiceError, match=f"small: port {port} is taken by .*; .*SMALL={port + 1} make up"):
            services.start(Service("small", ["true"], port, "SMALL"))
    for pid in (2**22 - 1, os.getpid()):  # gone; of another process
        (folder / "worker.json").write_text(json.dumps({"pid": pid, "started": 0.0}))
        services.down()
        assert "worker: not up" in capsys.readouterr().out


def test_one_keeper_runs_and_what_systemd_runs_is_left_to_it(folder, monkeypatch, capsys):
    monkeypatch.setattr(services, "start", lambda service: pytest.fail(service.name))
    monkeypatch.setattr(services, "services", list)
    with pytest.raises(ValueError, match="unpack"):  # no servers to start
        services.keep(unit=True)
    assert services.keeper().process() == psutil.Process()
    services.down()
    assert "systemctl stop m3diff" in capsys.readouterr().out
    assert services.keeper().record.exists(), "`make down` ended what systemd would start again"
    services.write_record(services.keeper(), os.getppid())
    with pytest.raises(ServiceError, match="keeper is up already"):
        services.keep()


def test_status_says_what_is_up_what_is_not_and_what_does_not_answer(folder, monkeypatch, capsys):
    here = psutil.Process()
    for name in ("prefect", "mlflow"):
        kept = {"pid": here.pid, "started": here.create_time(), "port": 1}
        (folder / f"{name}.json").write_text(json.dumps(kept))
    monkeypatch.setattr(Service, "healthy", lambda service: service.name == "prefect")
    monkeypatch.setattr(services, "ask", lambda path, body: [])
    assert services.main("status") == 1
    said = capsys.readouterr()
    since = datetime.fromtimestamp(here.create_time(), UTC).strftime("since %Y-%m-%d %H:%M:%S UTC")
    assert said.out.count(since) == 2
    assert f"up             http://127.0.0.1:4200    {since}" in said.out
    assert "mlflow is not answering, worker is not up, keeper is not up" in said.err


RUNS: dict[str, tuple[str, float, dict[str, Any], str]] = {
    "pending": ("PENDING", 10, {}, "no process works for it: `make down`"),
    "running, and its process is here": ("RUNNING", 10, {"id": "here"}, ""),
    "pending since a moment": ("PENDING", 1, {}, ""),
    "running, on another machine": ("RUNNING", 600, {"labels": {"prefect.worker.name": "another"}}, ""),
    "no deployment's": ("RUNNING", 600, {"deployment_id": None}, ""),
    "crashed": ("CRASHED", 0, {}, "prefect deployment run m3diff/full"),
    "failed": ("FAILED", 0, {}, "row 7: no image Once the cause is gone: .venv/bin/prefect deployment run"),
    "completed": ("COMPLETED", 0, {}, ""),
}
"""The state of a run, for so many minutes, what else the server says, and the words of `status`."""


@pytest.mark.fault("W2", "W4")
@pytest.mark.parametrize("case", RUNS)
def test_status_names_a_run_that_hangs_and_a_training_that_ended_badly_and_exits_with_1(case, monkeypatch, capsys):
    kind, minutes, more, words = RUNS[case]
    when = (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat()
    run = {"id": "1", "name": "owl", "deployment_id": "2", "state_type": kind, "state_name": kind.title()}
    run |= {"state": {"timestamp": when, "message": "row 7: no image\nmore"}, "labels": {}, "end_time": when} | more

    def ask(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        assert ("deployments" in body) == ("limit" in body)
        return [run] if kind in body["flow_runs"]["state"]["type"]["any_"] else []

    monkeypatch.setattr(services, "at_work", lambda runs: {"here": 5})
    monkeypatch.setattr(services, "ask", ask)
    monkeypatch.setattr(Service, "process", lambda service: psutil.Process())
    monkeypatch.setattr(Service, "healthy", lambda service: True)
    assert services.main("status") == bool(words)
    said = capsys.readouterr()
    assert words in said.err
    assert ("owl" in said.err) == bool(words)
    assert ("last training: owl, " in said.out) == (minutes == 0)


KEEP = """
import sys
from pathlib import Path
from infra import services
services.SERVICES, services.KEEP_S = Path(sys.argv[1]), 0.1
mine = [services.Service("prefect", [sys.executable, "-c", "import time; time.sleep(60)"], 1)]
mine += [services.Service("mlflow", [sys.executable, "-c", ""], 2)]
mine += [services.Service("worker", [sys.executable, "-c", "import time; time.sleep(60)"])]
services.services, services.deploy = lambda: mine, lambda: None
services.environment, services.is_taken, services.wait = lambda service: {}, lambda port: False, lambda *words: None
services.Service.healthy = lambda service: Path(sys.argv[2]).exists()
services.keep()
"""


@pytest.mark.fault("S5", "W4")
def test_the_keeper_starts_what_ended_and_waits_before_what_ends_again(folder, tmp_path):
    command = [sys.executable, "-c", KEEP, str(folder), str(tmp_path / "answers")]
    keeper = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.DEVNULL)
    seen: list[psutil.Process] = []

    def starts_of(name: str) -> int:
        log = folder / f"{name}.log"
        return log.read_text().count(f"--- {name} started ") if log.exists() else 0

    def process_of(name: str, starts: int) -> psutil.Process:
        until(lambda: starts_of(name) >= starts, 30)
        pid = until(lambda: json.loads((folder / f"{name}.json").read_text())["pid"], 30)
        seen.append(psutil.Process(pid))
        return seen[-1]

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
        for process in seen:
            if process.is_running():
                process.kill()


@pytest.mark.parametrize(
    ("name", "ago", "heard"),
    [(services.WORKER, 10, True), (services.WORKER, services.SILENCE_S + 10, False), ("another", 1, False)],
)
def test_a_worker_answers_where_the_server_has_heard_this_one_lately(name, ago, heard, monkeypatch):
    when = datetime.fromtimestamp(time.time() - ago, UTC).isoformat()
    monkeypatch.setattr(services, "ask", lambda path, body: [{"name": name, "last_heartbeat_time": when}])
    assert services.is_heard(time.time() - 3600) == heard
    assert not services.is_heard(time.time()), "heard before this start"


# The unit of systemd


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A person's systemd that answers; what it was told."""
    told: list[str] = []
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(units.os, "getuid", lambda: 1000)
    monkeypatch.setattr(units, "systemctl", lambda *words: told.append(" ".join(words)))
    return told


@pytest.mark.fault("S5")
def test_a_unit_that_runs_what_make_up_starts_is_written_started_with_the_machine_and_removed(systemd, tmp_path):
    file = tmp_path / "systemd" / "user" / units.NAME
    for _ in range(2):  # again is allowed
        systemd.clear()
        units.install()
        assert systemd == ["--version", "daemon-reload", f"enable {units.NAME}", f"restart {units.NAME}"]
    lines = file.read_text().splitlines()
    (start,) = [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    assert shlex.split(start) == [sys.executable, services.__file__, "run"]
    asked = {"Restart=always", "KillMode=control-group", "NoNewPrivileges=yes", "StartLimitIntervalSec=0"}
    assert asked | {f"WorkingDirectory={tmp_path}", "OOMPolicy=continue"} <= {*lines}
    (stop,) = [line.partition("=")[2] for line in lines if line.startswith("TimeoutStopSec=")]
    assert int(stop) > services.GRACE_S, "a stage's grace would be cut short"
    systemd.clear()
    units.uninstall()
    assert systemd == [f"disable --now {units.NAME}", "daemon-reload"]
    assert not file.exists()


def test_no_unit_is_written_over_anothers_beside_make_up_or_by_root(systemd, folder, tmp_path, monkeypatch):
    units.install()
    systemd.clear()
    for place, words in (("other", "m3diff.service is not of this checkout"), ("a$b", "move the checkout")):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        for action in (units.install, units.uninstall):
            with pytest.raises(ServiceError, match=words):
                action()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(units.os, "getuid", lambda: 0)
    with pytest.raises(ServiceError, match="not as root"):
        units.install()
    here = psutil.Process()
    (folder / "mlflow.json").write_text(json.dumps({"pid": here.pid, "started": here.create_time(), "port": 1}))
    with pytest.raises(ServiceError, match="mlflow: up already by `make up`"):
        units.install()
    assert systemd == []


def test_a_machine_without_systemd_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setattr(units.os, "getuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServiceError, match="no systemd; `make up` works without"):
        units.install()

"""`make up` and the unit of systemd (tests/flows/test_services.py has the servers for real), `make install`, `make run`
and `bin/m3diff`; and the files of infra/ that no test runs agree with the rest: the lock has the tested versions."""

import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra import run as make_run
from infra import services, units
from infra.run import run, summary
from infra.services import Service, ServiceError
from m3diff import PRIVACY
from m3diff.settings.load import load_params
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
    database = "PREFECT_API_DATABASE_CONNECTION_URL"
    given = TOKENS | {"M3DIFF_FLOWS": "7", "M3DIFF_MLFLOW_STORE": "postgresql://u:sesame@h/d"}
    given |= {database: "postgresql+asyncpg://u:sesame@h/d", "M3DIFF_MLFLOW_ARTIFACTS": "s3://bucket/runs"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    prefect, mlflow, worker = services.services()
    commands = " ".join(word for service in services.services() for word in service.command)
    assert not any(secret in commands for secret in ("sesame", "a" * 16, "b" * 16))
    assert "--app-name basic-auth" in " ".join(mlflow.command)
    assert worker.command[-2:] == ["--limit", "7"]
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


@pytest.mark.fault("S5")
def test_a_restart_adds_to_the_log_and_a_log_that_has_grown_is_moved_on_while_it_is_written(folder, monkeypatch):
    service = Service("small", [sys.executable, "-c", "print('a line')"])
    monkeypatch.setattr(services, "environment", lambda service: dict(os.environ))
    for _ in range(2):
        services.start(service)
        until(lambda: service.process() is None)
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
        until(lambda: service.process() is None)
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


@pytest.mark.fault("W2", "W4")
@pytest.mark.parametrize(
    ("kind", "minutes", "more", "words"),
    [
        ("PENDING", 10, {}, "no process works for it: `make down`"),
        ("PENDING", 1, {}, ""),
        ("RUNNING", 10, {"id": "here"}, ""),  # of a process that is here
        ("RUNNING", 600, {"labels": {"prefect.worker.name": "another"}}, ""),
        ("RUNNING", 600, {"deployment_id": None}, ""),
        ("CRASHED", 0, {}, "prefect deployment run m3diff/full"),
        ("FAILED", 0, {}, "row 7: no image Once the cause is gone: .venv/bin/prefect deployment run"),
        ("COMPLETED", 0, {}, ""),
    ],
)
def test_status_names_a_run_that_hangs_and_a_training_that_ended_badly(kind, minutes, more, words, monkeypatch, capsys):
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


def test_a_worker_answers_where_the_server_has_heard_this_one_lately(monkeypatch):
    lately, once = (datetime.now(UTC) - timedelta(seconds=ago) for ago in (10, services.SILENCE_S + 10))
    mine = services.WORKER
    for name, when, heard in (("another", lately, False), (mine, once, False), (mine, lately, True)):
        seen = {"name": name, "last_heartbeat_time": when.isoformat()}
        monkeypatch.setattr(services, "ask", lambda path, body, seen=seen: [seen])
        assert services.is_heard(time.time() - 3600) == heard
    assert not services.is_heard(time.time()), "heard before this start"


@pytest.mark.fault("S5")
def test_a_unit_that_runs_what_make_up_starts_is_written_started_with_the_machine_and_removed(tmp_path, monkeypatch):
    systemd: list[str] = []
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(units.os, "getuid", lambda: 1000)
    monkeypatch.setattr(units, "systemctl", lambda *words: systemd.append(" ".join(words)))
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


def machine(folder: Path, **programs: str) -> str:
    """A PATH on which nothing stands but these shell scripts."""
    folder.mkdir()
    for name, script in programs.items():
        program = folder / name.replace("gxx", "g++")
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    return str(folder)


def checked(path: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": path}
    command = [sys.executable, str(REPOSITORY / "infra" / "check_system.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


JAVA = """echo 'openjdk version "17.0.15" 2025-04-15' >&2"""


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({"java": JAVA, "git": "", "gxx": ""}, []),
        ({"java": "exit 1", "git": "", "gxx": ""}, ["needs Java 17", "does not answer", "apt install openjdk-17"]),
        ({"java": JAVA.replace("17.0.15", "11.0.2"), "git": "", "gxx": ""}, ["needs Java 17", "found Java 11"]),
        ({}, [f"needs {name}" for name in ("Java 17", "git", "a C++ compiler")]),
    ],
)
def test_a_machine_that_has_everything_passes_and_what_is_missing_broken_or_old_is_named(tmp_path, tools, words):
    done = checked(machine(tmp_path / "bin", **tools))
    assert (done.returncode, done.stdout, bool(done.stderr)) == (bool(words), "", bool(words))
    assert [word for word in words if word not in done.stderr] == []


@pytest.mark.fault("P5")
@pytest.mark.parametrize(
    ("folder", "remedy"),
    [*((name, "move the checkout") for name in ("a:b", "$x", "US$")), ("no links", "git config core.symlinks true")],
)
def test_a_checkout_that_cannot_run_where_it_is_is_named(folder, remedy, tmp_path, monkeypatch):
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    if folder == "no links":
        Path("m3diff").write_text("components")
    done = checked(machine(tmp_path / "bin", java=JAVA, git="", gxx=""))
    assert (done.returncode, remedy in done.stderr) == (1, True)
    assert folder == "no links" or str(tmp_path / folder) in done.stderr


def test_bin_m3diff_installs_once_and_passes_arguments_folder_and_exit_code_on(tmp_path):
    (tmp_path / "a clone/bin").mkdir(parents=True)
    shutil.copy(REPOSITORY / "bin" / "m3diff", tmp_path / "a clone/bin")
    makes = (
        "install:\n\t@echo installing\n\t@mkdir -p .venv/bin\n\t@cp stand-in .venv/bin/m3diff\n\t@touch .venv/.ready\n"
    )
    (tmp_path / "a clone/Makefile").write_text(makes)
    (tmp_path / "a clone/stand-in").write_text("#!/bin/sh\npwd\nprintf '<%s>\\n' \"$@\"\nexit 3\n")
    (tmp_path / "a clone/stand-in").chmod(0o755)
    (tmp_path / "link").symlink_to("a clone/bin/m3diff")
    (tmp_path / "elsewhere").mkdir()
    given: Any = {"cwd": tmp_path / "elsewhere", "env": {"PATH": os.environ["PATH"]}, "capture_output": True}
    for said in ("installing", ""):
        done = subprocess.run([tmp_path / "link", "caption", "a b.png", ""], text=True, **given)
        assert (done.returncode, done.stdout) == (3, f"{tmp_path}/elsewhere\n<caption>\n<a b.png>\n<>\n")
        assert done.stderr.strip() == said


INFRA = REPOSITORY / "infra"
HEAD = "# This file was autogenerated by uv via the following command:\n#    make upgrade\n"
PACKAGE = re.compile(r"^([\w.-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})*)\n", re.MULTILINE)


def locked() -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each package of the lock, by name."""
    text = (REPOSITORY / "infra" / "lock.txt").read_text()
    found = {name: (version, hashes.count("--hash")) for name, version, hashes in PACKAGE.findall(text)}
    assert PACKAGE.sub("", text) == HEAD, "a line that is no package"
    return found


def constrained() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().split()
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def with_extras(asked: str) -> list[Requirement]:
    """The requirements of the project, or of its extras, without its own name."""
    need = Requirement(asked)
    if need.name != "m3diff":
        return [need]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in sorted(need.extras))]
    return [found for texts in lists for text in texts for found in with_extras(text)]


def test_the_lock_has_the_tested_versions_with_hashes_of_all_that_the_project_and_a_team_ask_for_and_no_more():
    tested, found = constrained(), locked()
    for name, (version, hashes) in found.items():
        assert hashes > 0, name
        assert name.startswith(("nvidia-", "cuda-", "triton")) or tested.get(name) == version, name
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [*with_extras("m3diff[team]"), *with_extras("m3diff[cluster]")]
    assert [str(need) for need in asked if not need.specifier.contains(found[canonicalize_name(need.name)][0])] == []
    assert {"psycopg2-binary", "asyncpg", "boto3", "dvc-s3", "dvc-ssh", "flask-wtf", "aiohttp-cors"} <= found.keys()
    only_here = {canonicalize_name(Requirement(text).name) for text in extras["dev"]} - {"m3diff"}
    assert found.keys().isdisjoint(only_here | {"moto"})
    for need in (need for extra in extras for need in with_extras(f"m3diff[{extra}]")):
        assert need.specifier.contains(tested.get(canonicalize_name(need.name), "0")), need


def test_env_offline_switches_off_what_the_package_switches_off_and_the_network():
    lines = [line for line in (INFRA / "env.offline").read_text().splitlines() if line and not line.startswith("#")]
    values = dict(line.split("=", 1) for line in lines)
    assert PRIVACY.items() <= values.items()
    off = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "PREFECT_SERVER_UI_V2_ENABLED"}
    assert set(values) - set(PRIVACY) == off


def cluster() -> tuple[dict[str, Any], dict[str, Any]]:
    """The volume claim and the RayJob."""
    claim, job = yaml.safe_load_all((INFRA / "kubernetes.yaml").read_text())
    return claim, job


def faults_of_cluster(*documents: dict[str, Any]) -> list[str]:
    schema = yaml.safe_load((REPOSITORY / "tests" / "infra" / "kubernetes.schema.yaml").read_text())
    return [best_match([fault]).message for one in documents for fault in Draft202012Validator(schema).iter_errors(one)]


def test_the_cluster_example_is_valid_and_asks_for_a_token_no_root_and_what_the_papers_profile_needs():
    compute = load_params(REPOSITORY / "profiles" / "paper.yaml").compute
    claim, document = cluster()
    assert faults_of_cluster(claim, document) == []
    job = document["spec"]["rayClusterSpec"]
    (group,) = job["workerGroupSpecs"]
    assert job["rayVersion"] == constrained()["ray"]
    assert job["authOptions"] == {"mode": "token"}
    for spec in (job["headGroupSpec"]["template"]["spec"], group["template"]["spec"]):
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    resources = group["template"]["spec"]["containers"][0]["resources"]
    assert int(resources["limits"]["nvidia.com/gpu"]) * group["replicas"] == compute.workers
    assert int(resources["requests"]["cpu"]) * group["replicas"] >= compute.workers * compute.cpus_per_worker


SAID = """
'data/01_raw/birds.dvc' didn't change, skipping
Stage 'synthesize@minichange' is cached - skipping run, checking out outputs
Stage 'ingest@minichange' didn't change, skipping
Running stage 'validate':
> python -m m3diff validate
validate:  45%|####      | 45/100 [00:03<00:04, 12.1it/s]
Running stage 'train':
train: step 20/1810 (1.1%)  loss 1.2345  grad_norm 2.1000  lr_llm 4.00e-05  85 captions/s  ETA 11 min
train: warning: the module changes nothing
Updating lock file 'dvc.lock'
"""


def saying(text: str, code: int = 0) -> list[str]:
    return [sys.executable, "-c", f"print({text!r}); raise SystemExit({code})"]


@pytest.mark.parametrize("code", [0, 3])
def test_stages_warnings_and_how_far_one_is_are_shown_the_log_has_everything_and_a_failure_its_end(tmp_path, code):
    out, log = io.StringIO(), tmp_path / "logs" / "run.log"
    assert run(saying(SAID, code), log, out) == code
    said = [line for line in SAID.splitlines() if line]
    kept = log.read_text().splitlines()
    assert [line[9:] for line in kept] == said
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in kept)
    shown = out.getvalue().splitlines()
    assert [line[9:] for line in shown[:6]] == [*said[1:4], said[5], said[6], said[8]], "a bar, and no step so soon"
    end = ["", *kept, "", f"make run: failed; all that was said: {log}"]
    assert shown[6:] == (end if code else [])


@pytest.mark.parametrize(("words", "warnings"), [(597, ["the module changes nothing."]), (152_000, [])])
def test_the_summary_says_scores_places_gate_warnings_and_limits(tmp_path, words, warnings):
    config = {"text_config": {"vocab_size": words}, "vision_config": {"image_size": 100}}
    scores = {"pairs": 480, "published_pairs": 3985, "CIDEr": 4.67036, "METEOR": None, "no_change_recall": 1}
    protocols = {"a/total": scores | {"intervals": {"CIDEr": {"low": 4.5, "high": 4.81}}}, "a/semantic": {"CIDEr": 9.9}}
    contents = {"config": config, "metrics": {"protocols": protocols}, "report": {"warnings": warnings}}
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    paths, store = SimpleNamespace(report=tmp_path, predictions=tmp_path, model=tmp_path), "store"
    of = {"train": SimpleNamespace(base=tmp_path), "register_": SimpleNamespace(tracking_uri=store)}
    made = SimpleNamespace(uri="models:/m/2", outcome="registered")
    text = summary(SimpleNamespace(paths=paths, **of), made, "m version 2 refused: why")
    numbers = "  CIDEr                   467.0   450.0 to 481.0\n  no_change_recall        100.0\n"
    assert text.startswith("\nscores on a/total, 480 pairs of 3985 that papers score")
    warned = "\nwarning      training: the module changes nothing.\n" if warnings else "\n"
    for line in (numbers, f"{tmp_path}/report.html\n", "models:/m/2 (registered) in store\n", f"refused: why{warned}"):
        assert line in text
    assert ("not good for other images or words: its base knows 597 tokens." in text) == (words == 597)
    assert "990.0" not in text, "one protocol of a dataset"


def test_a_pipeline_that_fails_registers_nothing_and_one_that_ends_is_summed_up(tmp_path, monkeypatch, capsys):
    (tmp_path / "params.yaml").write_text((REPOSITORY / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_run, "finish", lambda params: f"{params.train.model} is registered")
    for code, told in ((3, False), (0, True)):
        monkeypatch.setattr(make_run, "DVC", saying("", code))
        assert make_run.main() == code
        assert ("m3diff is registered" in capsys.readouterr().out) == told

    def refuse(params: object) -> str:
        raise ConnectionError("no server")

    monkeypatch.setattr(make_run, "finish", refuse)
    assert make_run.main() == 1
    assert capsys.readouterr().err == "make run: no server\n"

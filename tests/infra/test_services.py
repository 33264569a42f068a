"""`make up` and the unit of systemd (tests/flows/test_services.py has the servers for real), `make install`, `make run`
and `bin/m3diff`; and the files of infra/ that no test runs agree with the rest: the lock has the tested versions."""

import io
import json
import os
import re
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
from infra import services
from infra.run import run, summary
from infra.services import Service, ServiceError
from m3diff import PRIVACY
from m3diff.settings.load import load_params
from m3diff.stages.register.stage import Registration
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
    file.write_text("B=1\nA\n")
    with pytest.raises(ServiceError, match="environment, A: expected NAME=value"):
        services.read_settings()


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
    for what in ("up", "keep"):
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


def test_a_service_whose_mark_cannot_be_read_yet_is_waited_for_while_what_runs_it_lives(folder, monkeypatch):
    process = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    looks = iter([[], [], [process]])
    monkeypatch.setattr(services, "processes", lambda: {"worker": next(looks, [])})
    worker = SimpleNamespace(name="worker", answers=lambda: True)
    (folder / "worker.log").write_text("it ended\n")
    services.wait(worker, process, folder / "worker.log")
    process.kill()
    process.wait()
    with pytest.raises(ServiceError, match="worker does not answer; the end of .*\n  it ended"):
        services.wait(worker, process, folder / "worker.log")


@pytest.mark.fault("S5")
def test_a_restart_adds_to_the_log_and_a_log_that_has_grown_is_moved_on_while_it_is_written(folder, monkeypatch):
    service = Service("worker", [sys.executable, "-c", "print('a line')"])
    monkeypatch.setattr(services, "environment", lambda service: dict(os.environ))
    for _ in range(2):
        services.start(service).wait()
    lines = service.log.read_text().splitlines()
    assert [line for line in lines if line == "a line"] == ["a line"] * 2
    assert [line[:18] for line in lines[::2]] == ["--- worker started"] * 2
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


def names_of(monkeypatch: pytest.MonkeyPatch, *ours: Service) -> None:
    """Let these be the services, with the environment of the test."""
    monkeypatch.setattr(services, "environment", lambda service: dict(os.environ))
    monkeypatch.setattr(services, "services", lambda: [*ours])


@pytest.mark.fault("S5")
@pytest.mark.parametrize("left", ["killed", "alive"])
def test_what_is_left_of_a_server_does_not_keep_its_port_from_the_next(left, folder, monkeypatch):
    """MLflow's own process starts the one that listens; a server that is alive was left by a killed keeper."""
    port = free_port()
    monkeypatch.setattr(services, "GRACE_S", 1)
    service = Service("mlflow", [sys.executable, "-c", LISTENS, str(port)], port)
    names_of(monkeypatch, service)
    before = services.start(service)
    until(lambda: "listens" in service.log.read_text())
    if left == "killed":
        before.kill()
        before.wait()
    try:
        assert services.is_taken(port)
        after = services.start(service)
        assert before.poll() is not None
        until(lambda: service.log.read_text().count("listens") == 2)
        assert after in services.processes()["mlflow"]
        assert len(services.processes()["mlflow"]) == 2
    finally:
        services.down()
    assert not services.is_taken(port)


def test_a_taken_port_is_named(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ServiceError, match=f"mlflow: port {port} is taken by .*; .*M3DIFF_MLFLOW_PORT={port + 1} make"
        ):
            services.start(Service("mlflow", ["true"], port))


ASKED = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *words: sys.exit("asked"))
if sys.argv[1:]:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=os.environ | {sys.argv[1]: "a run"})
print("began", flush=True)
time.sleep(60)
"""


@pytest.mark.fault("S5")
def test_one_keeper_runs_and_down_ends_it_the_worker_and_its_flows_and_a_worker_alone_is_replaced(monkeypatch, capsys):
    asked = [sys.executable, "-c", ASKED]
    keeper, worker = Service("keeper", asked), Service("worker", [*asked, services.FLOW_RUN])
    names_of(monkeypatch, keeper, worker)
    monkeypatch.setattr(services, "GRACE_S", 1)
    _, first = services.start(keeper), services.start(worker)
    with pytest.raises(ServiceError, match="the keeper is up already"):
        services.keep()
    (of_flow,) = until(lambda: services.processes()["flow"])
    second = services.start(worker)
    assert (first.is_running(), of_flow.is_running()) == (False, True), "a worker's end is none of its flows"
    assert services.processes()["worker"] == [second]
    until(lambda: keeper.log.read_text().count("began") + worker.log.read_text().count("began") == 3)
    services.down()
    assert capsys.readouterr().out == "keeper: ended\nworker: ended\nmlflow: not up\nprefect: not up\n"
    assert not any(services.processes().values())
    assert [service.log.read_text().count("asked") for service in (keeper, worker)] == [1, 1]


@pytest.mark.fault("W4")
@pytest.mark.parametrize(
    ("kind", "up", "words"),
    [
        ("CRASHED", {}, "prefect deployment run m3diff/full"),
        ("FAILED", {}, "row 7: no image Once the cause is gone: .venv/bin/prefect deployment run"),
        ("COMPLETED", {}, ""),
        ("COMPLETED", {"worker": []}, "worker is not up; `make up`, or the end of its log says why"),
        ("COMPLETED", {"prefect": []}, "prefect is not up; "),
    ],
)
def test_status_names_what_is_not_up_and_a_training_that_ended_badly(kind, up, words, monkeypatch, capsys):
    when = datetime.now(UTC).isoformat()
    run = {"name": "owl", "state_type": kind, "state_name": kind.title(), "end_time": when}
    run |= {"state": {"message": "row 7: no image\nmore"}}
    all_up = {name: [psutil.Process()] for name in ("keeper", "worker", "mlflow", "prefect")}
    monkeypatch.setattr(services, "ask", lambda path, body: [run])
    monkeypatch.setattr(services, "processes", lambda: all_up | up)
    monkeypatch.setattr(Service, "answers", lambda service: True)
    assert services.main("status") == bool(words)
    said = capsys.readouterr()
    assert words in said.err
    assert ("owl" in said.err) == (kind != "COMPLETED")
    assert ("last training: owl, " in said.out) == ("prefect" not in up)


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
services.Service.answers = lambda service: Path(sys.argv[2]).exists()
services.keep()
"""


@pytest.mark.fault("S5", "W4")
def test_the_keeper_starts_what_ended_and_waits_before_what_ends_again(folder, tmp_path):
    command = [sys.executable, "-c", KEEP, str(folder), str(tmp_path / "answers")]
    keeper = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.DEVNULL)

    def starts_of(name: str) -> int:
        log = folder / f"{name}.log"
        return log.read_text().count(f"--- {name} started ") if log.exists() else 0

    def process_of(name: str, starts: int) -> psutil.Process:
        until(lambda: starts_of(name) >= starts, 30)
        return until(lambda: services.processes()[name], 30)[0]

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
    lately, once = (datetime.now(UTC) - timedelta(seconds=ago) for ago in (10, services.SILENCE_S + 10))
    mine = services.WORKER
    for name, when, heard in (("another", lately, False), (mine, once, False), (mine, lately, True)):
        seen = {"name": name, "last_heartbeat_time": when.isoformat()}
        monkeypatch.setattr(services, "ask", lambda path, body, seen=seen: [seen])
        assert services.is_heard() == Service("worker", []).answers() == heard


@pytest.mark.fault("S5")
def test_a_unit_that_runs_the_keeper_is_installed_started_with_the_machine_and_ended(tmp_path):
    place, escape = tmp_path / "my checkout", "echo escaped@$3.service"
    path = machine(tmp_path / "bin", systemctl='echo "$*" >> ../asked', **{"systemd-escape": escape})
    shutil.copytree(REPOSITORY / "infra", place / "infra")
    for target in ("install-services", "uninstall-services"):
        command = ["make", "-f", str(REPOSITORY / "Makefile"), "-o", "install", target]
        given = os.environ | {"HOME": str(tmp_path), "PATH": f"{path}:{os.environ['PATH']}"}
        subprocess.run(command, cwd=place, env=given, check=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    unit = f"escaped@{place}.service"
    assert asked == [f"--user {words}" for words in ("daemon-reload", f"enable --now {unit}", f"disable --now {unit}")]
    (file,) = (tmp_path / ".config/systemd/user").iterdir()
    assert file.name == "m3diff@.service"
    lines = file.read_text().splitlines()
    (start,) = [line.removeprefix("ExecStart=").replace("$$", "$") for line in lines if line.startswith("ExecStart=")]
    (place / ".venv/bin").mkdir(parents=True)
    (place / ".venv/bin/python").symlink_to("/bin/echo")
    told = subprocess.run(
        f"{start.replace('exec', 'env; exec')}", shell=True, cwd=place, capture_output=True, text=True
    )
    assert {"infra/services.py keep", f"M3DIFF_SERVICE={place}/services/keeper"} <= {*told.stdout.splitlines()}
    wanted = {"Restart=on-failure", "KillMode=control-group", "NoNewPrivileges=yes", "StartLimitIntervalSec=0"}
    assert wanted | {"WorkingDirectory=%f", "OOMPolicy=continue"} <= {*lines}
    (stop,) = [line.partition("=")[2] for line in lines if line.startswith("TimeoutStopSec=")]
    assert int(stop) > services.GRACE_S, "a stage's grace would be cut short"


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
    assert [line[9:] for line in shown[:7]] == [*said[1:4], *said[5:9]]
    end = ["", *kept, "", f"make run: failed; all that was said: {log}"]
    assert shown[7:] == (end if code else [])


@pytest.mark.parametrize("warnings", [["the module changes nothing."], []])
def test_the_summary_says_scores_places_gate_and_warnings(tmp_path, warnings):
    scores = {"pairs": 480, "published_pairs": 3985, "CIDEr": 4.67036, "no_change_recall": 1}
    protocols = {"a/total": scores | {"intervals": {"CIDEr": {"low": 4.5, "high": 4.81}}}, "a/semantic": {"CIDEr": 9.9}}
    contents = {"metrics": {"protocols": protocols}, "report": {"warnings": warnings}}
    contents["headline"] = {"a/total": {"CIDEr": 467.04, "no_change_recall": 100}}
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    paths, store = SimpleNamespace(report=tmp_path, predictions=tmp_path, model=tmp_path), "store"
    of = {"register_": SimpleNamespace(tracking_uri=store)}
    made = Registration("registered", "m", 2, "7f3a")
    text = summary(SimpleNamespace(paths=paths, **of), made, "m version 2 refused: why")
    numbers = "  CIDEr                   467.0   450.0 to 481.0\n  no_change_recall        100.0\n"
    assert text.startswith("\nscores on a/total, 480 pairs of 3985 that papers score")
    warned = "\nwarning      training: the module changes nothing.\n" if warnings else "\n"
    model = "models:/m/2 registered (MLflow run 7f3a) in store\n"
    for line in (numbers, f"{tmp_path}/report.html\n", model, f"refused: why{warned}"):
        assert line in text
    assert "990.0" not in text, "one protocol of a dataset"


def test_a_pipeline_that_fails_registers_nothing_and_one_that_ends_is_summed_up(tmp_path, monkeypatch, capsys):
    (tmp_path / "params.yaml").write_text((REPOSITORY / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("m3diff.stages.register.stage.register", lambda params: SimpleNamespace(version=7))
    monkeypatch.setattr("m3diff.registry.promote.promote", lambda params, rescore, version: (rescore.__name__, version))
    monkeypatch.setattr(make_run, "summary", lambda params, made, decision: f"{made.version} is registered, {decision}")
    for code, told in ((3, False), (0, True)):
        monkeypatch.setattr(make_run, "DVC", saying("", code))
        assert make_run.main() == code
        assert ("7 is registered, ('rescore', 7)" in capsys.readouterr().out) == told

    def refuse(params: object) -> str:
        raise ConnectionError("no server")

    monkeypatch.setattr(make_run, "finish", refuse)
    assert make_run.main() == 1
    assert capsys.readouterr().err == "make run: no server\n"

"""Starting Ray or connecting to it, and the resources of its nodes."""

import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from m3diff import cluster as ray_cluster
from m3diff.records.errors import Fault
from m3diff.settings.compute import Compute
from tests.errors import raises
from tests.stages.train.toy import COMPUTE
from tests.toy import REPOSITORY

TOKEN = "RAY_AUTH_TOKEN"


def compute(**changes: Any) -> Compute:
    return Compute(**{**COMPUTE, "workers": 2, "scratch": Path("runs"), **changes})


@pytest.fixture
def init_arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the arguments of `ray.init`, and as `dashboard` the result of starting Ray's dashboard meanwhile.

    The arguments with which an address of the dashboard is recorded are returned as `record`.
    """
    from ray._private import services

    arguments: dict[str, Any] = {}

    def init(**options: Any) -> None:
        arguments.update(options, dashboard=services.start_api_server(False, False, "", "gcs"))

    def put(key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> None:
        arguments["record"] = {"key": key, "value": value, "overwrite": overwrite, "namespace": namespace}

    gcs_client = SimpleNamespace(internal_kv_put=put)
    monkeypatch.setattr(ray._raylet, "GcsClient", lambda **options: gcs_client)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_cluster, "require_head", lambda seconds: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return arguments


@pytest.mark.fault("P12", "S7")
@pytest.mark.parametrize(("cores", "num_cpus"), [(16, 16), (2, 6)], ids=["enough cores", "too few"])
def test_an_own_ray_has_the_cores_of_the_workers_and_no_network(cores, num_cpus, init_arguments, monkeypatch):
    monkeypatch.setattr(ray_cluster, "usable_cpus", lambda: cores)
    ray_cluster.start_ray(compute(cpus_per_worker=3))
    assert init_arguments["address"] == "local"
    assert init_arguments["num_cpus"] == num_cpus
    assert init_arguments["_node_ip_address"] == "127.0.0.1"


@pytest.mark.fault("P12", "S7")
def test_an_own_ray_starts_no_dashboard(init_arguments):
    from ray._private import services

    start_api_server = services.start_api_server
    ray_cluster.start_ray(compute())
    assert init_arguments["include_dashboard"] is False
    assert init_arguments["dashboard"] == (None, None)
    assert services.start_api_server is start_api_server


def test_what_workers_print_is_shown_and_what_ray_says_of_itself_only_as_a_warning(init_arguments):
    ray_cluster.start_ray(compute())
    assert init_arguments["log_to_driver"] is True
    assert init_arguments["logging_level"] == logging.WARNING


@pytest.fixture
def ray_logger() -> Iterator[logging.Logger]:
    """Return the logger above all of Ray's loggers, and restore its level after the test."""
    logger = logging.getLogger("ray")
    level = logger.level
    yield logger
    logger.setLevel(level)


def test_only_ray_s_loggers_are_limited_to_errors(init_arguments, ray_logger, caplog):
    """Ray applies the settings in this process and, pickled, in each worker."""
    ray_cluster.start_ray(compute())
    ray_logger.setLevel(logging.INFO)
    handlers = list(logging.root.handlers)
    pickle.loads(pickle.dumps(init_arguments["logging_config"]))._apply()
    assert ray_logger.level == logging.ERROR
    assert logging.root.handlers == handlers
    logging.getLogger("m3diff.stages.train.state").warning("a checkpoint is damaged")
    assert caplog.messages == ["a checkpoint is damaged"]


WARNS = """
import logging, ray
from m3diff.cluster import start_ray
from m3diff.runtime import prepare
from tests.test_ray_cluster import compute

def warn(place):
    for name in ("m3diff.stages.train.state", "ray.train"):
        logging.getLogger(name).warning("%s in %s", name, place)

prepare()
start_ray(compute())
ray.get(ray.remote(warn).remote("a worker"))
warn("this process")
ray.shutdown()
"""


@pytest.mark.slow(12)
def test_a_worker_s_warnings_are_shown_and_ray_s_are_not(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = subprocess.run([sys.executable, "-c", WARNS], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert "m3diff.stages.train.state in a worker" in output
    assert "m3diff.stages.train.state in this process" in output
    assert "ray.train in" not in output


def test_a_dead_address_is_recorded_where_ray_looks_for_its_dashboard(init_arguments):
    from ray._private import ray_constants

    ray_cluster.start_ray(compute())
    assert init_arguments["record"] == {
        "key": ray_constants.DASHBOARD_ADDRESS.encode(),
        "value": b"127.0.0.1:9",
        "overwrite": True,
        "namespace": ray_constants.KV_NAMESPACE_DASHBOARD,
    }


@pytest.mark.fault("P12", "S7")
def test_a_cluster_is_connected_to_as_it_is(init_arguments, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    ray_cluster.start_ray(compute())
    assert init_arguments["address"] == "ray://head:10001"
    assert "num_cpus" not in init_arguments


def test_a_cluster_that_does_not_answer_is_not_waited_for_long(init_arguments, monkeypatch):
    limits_s = {"RAY_gcs_server_port_wait_time_s": "1", "RAY_py_gcs_connect_timeout_s": "10"}
    for name in limits_s:  # set first, so that the value that the start leaves behind is removed after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    ray_cluster.start_ray(compute())
    assert {name: os.environ.get(name) for name in limits_s} == limits_s


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the token in the environment at each start of Ray."""
    values: list[str] = []
    monkeypatch.setattr(ray_cluster, "require_head", lambda seconds: None)
    monkeypatch.setattr(ray, "init", lambda **options: values.append(os.environ.get(TOKEN, "")))
    # set first, so that the token that a test leaves behind is removed after it
    monkeypatch.setenv(TOKEN, "")
    monkeypatch.delenv(TOKEN)
    monkeypatch.setenv("RAY_ADDRESS", "")
    return values


def test_an_own_ray_gets_one_new_token(tokens):
    """Without a token, Ray would write one to the user's home folder. It reads the token only once."""
    for _ in range(2):
        ray_cluster.start_ray(compute())
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 64


@pytest.mark.parametrize("address", ["", "head:6379"], ids=["own Ray", "cluster"])
def test_a_token_that_is_set_stays(address, tokens, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv(TOKEN, "mine")
    for _ in range(2):
        ray_cluster.start_ray(compute())
    assert tokens == ["mine", "mine"]


def test_a_cluster_without_a_token_gets_none(tokens, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    for _ in range(2):
        ray_cluster.start_ray(compute())
    assert tokens == ["", ""]


@pytest.mark.fault("P10")
def test_a_head_that_does_not_answer_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray would ask for most of an hour"))
    monkeypatch.setattr(ray_cluster, "HEAD_TIMEOUT_S", 0)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with raises(ray_cluster.NoRoomError, "cluster.address_not_answering", value="127.0.0.1:9"):
        ray_cluster.start_ray(compute())


@pytest.mark.fault("P11")
@pytest.mark.parametrize(
    ("address", "code", "fields"),
    [
        ("", "cluster.ray_does_not_start", {"logs": "/short/ray/session_latest/logs"}),
        ("head:1", "cluster.ray_does_not_connect", {"value": "head:1"}),
    ],
    ids=["own Ray", "cluster"],
)
def test_a_ray_that_does_not_start_is_an_error_of_one_line(address, code, fields, monkeypatch) -> None:
    def init(**options: Any) -> None:
        raise RuntimeError("no GCS\nlog")

    shutdowns = []
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: shutdowns.append("of Ray"))
    monkeypatch.setattr(ray_cluster, "require_head", lambda seconds: None)
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv("RAY_TMPDIR", "/short")
    with raises(ray_cluster.NoRoomError, code, cause="no GCS", **fields):
        ray_cluster.start_ray(compute())
    assert shutdowns == ["of Ray"], "the processes that had started have ended"


@pytest.mark.parametrize(
    ("variables", "folder"),
    [({"RAY_TMPDIR": "/a", "TMPDIR": "/b"}, "/a"), ({"RAY_TMPDIR": "", "TMPDIR": "/b"}, "/b"), ({}, "/tmp")],
    ids=["of Ray", "of all programs", "neither"],
)
def test_the_logs_of_ray_are_in_its_folder_for_temporary_files(variables, folder, monkeypatch):
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ray_cluster.ray_log_folder() == f"{folder}/ray/session_latest/logs"


def node(number: int, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "NodeManagerAddress": f"10.0.0.{number}", "Resources": resources}


@pytest.mark.parametrize(
    ("nodes", "changes", "want"),
    [
        ([node(1), node(2, CPU=1), node(3, CPU=1)], {}, 2),
        ([node(1), node(2, CPU=1), node(3, alive=False, CPU=1)], {}, 1),
        ([node(2, CPU=3.0), node(3, CPU=1)], {"cpus_per_worker": 2}, 1),
        ([node(2, CPU=8, GPU=1), node(3, CPU=8)], {"gpu": True}, 1),
    ],
)
def test_nodes_have_room_for_the_workers_that_each_can_hold(nodes, changes, want, monkeypatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    ray_cluster.wait_for_room(compute(workers=want, **changes), 0)
    with raises(ray_cluster.NoRoomError, "cluster.no_room", value=want, expected=want + 1):
        ray_cluster.wait_for_room(compute(workers=want + 1, **changes), 0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the current time, which only passes in `time.sleep`. After 71 s, a second node with one core joins."""
    now = [0.0]
    nodes = [node(1), node(2, CPU=1)]
    listings = iter(range(1000))  # so that a wait without sleep ends

    def list_nodes() -> list[dict[str, Any]]:
        next(listings)
        return nodes

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] == 71:
            nodes.append(node(3, CPU=1))

    monkeypatch.setattr(ray, "nodes", list_nodes)
    monkeypatch.setattr(ray_cluster.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray_cluster.time, "sleep", sleep)
    return now


def test_a_node_that_does_not_join_in_time_is_asked_for(clock, capsys):
    nodes = ["10.0.0.1 has 0 CPU", "10.0.0.2 has 1 CPU"]
    fields = {"value": 1, "expected": 2, "need": ["1 CPU"], "nodes": nodes}
    with raises(ray_cluster.NoRoomError, "cluster.no_room", **fields):
        ray_cluster.wait_for_room(compute(), 60)
    assert clock[0] == 60
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(Fault("cluster.no_room", **fields).problem)
    assert "60 s" in line


def test_a_node_that_joins_in_time_ends_the_wait(clock):
    ray_cluster.wait_for_room(compute(), 100)
    assert clock[0] == 71


IN_BACKGROUND = """
import os, subprocess, sys, time
from m3diff.cluster import separate_process_group
before = os.getpgrp()
with separate_process_group():
    child = subprocess.Popen(["sleep", "60"])
    while len(sys.argv) > 1 and os.getppid() == int(sys.argv[1]):
        time.sleep(0.01)
with open("ended", "w") as file:
    file.write(f"{os.getpgrp() == before} {os.getpgid(child.pid) == before}")
child.kill()
"""

# Ways a shell starts the process. Each value says whether the process is back in its group afterwards, and whether its
# child is in that group. The child of a leader, such as a command typed by hand, is; other children must not be, or a
# signal to the group would reach them. None: the group is gone, so there is nothing to check.
STARTS = {
    "nohup {} $$ > said 2>&1 &": None,
    "setsid {} $$ > said 2>&1 &": None,
    "{} $$ <&- > said 2>&1 &": None,
    "set -m; {} $$ > said 2>&1 &": None,
    "{} > said 2>&1; true": "True False",
    "exec {} > said 2>&1": "True True",
}


@pytest.mark.fault("W5")
def test_what_ray_starts_is_outside_the_group_and_outlives_the_script(tmp_path):
    """The script has no terminal and no separate session, as under cron, CI, ssh or `docker exec`."""
    (tmp_path / "serve.py").write_text(IN_BACKGROUND)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    folders = [tmp_path / str(number) for number in range(len(STARTS))]
    for folder, start in zip(folders, STARTS, strict=True):
        folder.mkdir()
        script = f"{start.format(f'{sys.executable} ../serve.py')}\nsleep 0.3"
        subprocess.run(["bash", "-c", script], cwd=folder, env=environment, process_group=0, check=True)
    deadline = time.monotonic() + 60
    for folder, (start, want) in zip(folders, STARTS.items(), strict=True):
        while not (folder / "ended").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (folder / "ended").exists(), (start, (folder / "said").read_text())
        assert want in (None, (folder / "ended").read_text()), start


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("answers_after", "is_found"), [(3, True), (9, False)], ids=["in time", "too late"])
def test_a_cluster_that_is_starting_is_waited_for_until_the_deadline(answers_after, is_found, monkeypatch):
    clock = Clock()
    attempts = iter(range(100))  # so that a wait without sleep ends

    def connect(address: tuple[str, int], timeout: float) -> SimpleNamespace:
        next(attempts)
        if clock.now < answers_after:
            raise ConnectionRefusedError("refused")
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    monkeypatch.setattr(ray_cluster, "time", clock)
    monkeypatch.setattr(ray_cluster.socket, "create_connection", connect)
    if is_found:
        ray_cluster.require_head(5)
        assert clock.now == answers_after
        return
    with raises(ray_cluster.NoRoomError, "cluster.address_not_answering", value="10.0.0.7:6379"):
        ray_cluster.require_head(5)
    assert clock.now == 5


@pytest.mark.parametrize(
    ("address", "connection"),
    [
        ("ray://head:10001", ("head", 10001)),
        ("10.0.0.7:6379", ("10.0.0.7", 6379)),
        ("[::1]:6379", ("::1", 6379)),
        ("auto", None),
        ("", None),
    ],
)
def test_the_head_is_asked_at_its_host_and_port_if_it_has_one(address, connection, monkeypatch):
    connections = []

    def connect(host_and_port: tuple[str, int], timeout: float) -> SimpleNamespace:
        connections.append(host_and_port)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray_cluster.socket, "create_connection", connect)
    ray_cluster.require_head(0)
    assert connections == ([connection] if connection else [])

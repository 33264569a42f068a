"""The cluster that Ray is asked for."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from m3diff import cluster as ray_cluster
from m3diff.settings.compute import Compute
from tests.stages.train.toy import COMPUTE
from tests.toy import REPOSITORY

TOKEN = "RAY_AUTH_TOKEN"


def compute(**changes: Any) -> Compute:
    return Compute(**{**COMPUTE, "workers": 2, "scratch": Path("runs"), **changes})


@pytest.mark.fault("P12", "S7")
@pytest.mark.parametrize(("cores", "want"), [(16, 16), (2, 6)])
def test_a_cluster_of_the_run_s_own_has_the_cores_that_are_asked_for_and_no_network(cores, want, monkeypatch):
    from ray._private import services

    asked: dict[str, Any] = {}
    before = services.start_api_server
    monkeypatch.setattr(ray._raylet, "GcsClient", lambda **given: SimpleNamespace(internal_kv_put=lambda *row: row))
    monkeypatch.setattr(
        ray, "init", lambda **given: asked.update(given, dashboard=services.start_api_server(False, False, "", "gcs"))
    )
    monkeypatch.setattr(ray_cluster, "usable_cpus", lambda: cores)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray_cluster.start_ray(compute(cpus_per_worker=3))
    assert (asked["address"], asked["num_cpus"], asked["_node_ip_address"]) == ("local", want, "127.0.0.1")
    assert (asked["include_dashboard"], asked["dashboard"]) == (False, (None, None))
    assert services.start_api_server is before
    asked.clear()
    monkeypatch.setattr(ray_cluster, "require_head", lambda seconds: None)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    ray_cluster.start_ray(compute())
    assert asked["address"] == "ray://head:10001"
    assert "num_cpus" not in asked


@pytest.mark.parametrize("address", ["", "head:6379"])
@pytest.mark.parametrize("given", ["", "mine"])
def test_a_cluster_of_the_run_s_own_has_its_own_token_and_a_team_s_the_one_that_is_set(address, given, monkeypatch):
    """Ray writes one into the user's home where it is given none."""
    monkeypatch.setattr(ray_cluster, "require_head", lambda seconds: None)
    seen: list[str] = []
    monkeypatch.setattr(ray, "init", lambda **given: seen.append(os.environ.get(TOKEN, "")))
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv(TOKEN, given)
    if not given:
        monkeypatch.delenv(TOKEN)
    for _ in range(2):
        ray_cluster.start_ray(compute())
    assert seen[0] == seen[1], "Ray has read the first one, for good"
    assert (seen[0] == given) if given or address else (len(seen[0]) == 64)


@pytest.mark.fault("P10")
def test_a_head_is_given_a_moment_and_then_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda **given: pytest.fail("Ray would ask for most of an hour"))
    monkeypatch.setattr(ray_cluster, "ANSWER_S", 1)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ray_cluster.NoRoomError, match="RAY_ADDRESS=127.0.0.1:9"):
        ray_cluster.start_ray(compute())


@pytest.mark.fault("P11")
@pytest.mark.parametrize(
    ("address", "remedy"), [("", "see .*/session_latest/logs$"), ("head:1", "RAY_ADDRESS=head:1; ")]
)
def test_a_ray_that_does_not_start_is_told_in_a_line_with_the_remedy(address, remedy, monkeypatch) -> None:
    def init(**given: Any) -> None:
        raise RuntimeError("no GCS\nlog")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_cluster, "require_head", lambda seconds: None)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ray_cluster.NoRoomError, match=f"Ray does not start: no GCS; {remedy}"):
        ray_cluster.start_ray(compute())


def node(last: int, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "NodeManagerAddress": f"10.0.0.{last}", "Resources": resources}


@pytest.mark.parametrize(
    ("nodes", "changes", "want"),
    [
        ([node(1), node(2, CPU=1), node(3, CPU=1)], {}, 2),
        ([node(1), node(2, CPU=1), node(3, alive=False, CPU=1)], {}, 1),
        ([node(2, CPU=3.0), node(3, CPU=1)], {"cpus_per_worker": 2}, 1),
        ([node(2, CPU=8, GPU=1), node(3, CPU=8)], {"gpu": True}, 1),
    ],
)
def test_nodes_have_room_for_the_workers_that_each_of_them_can_hold_whole(nodes, changes, want, monkeypatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    ray_cluster.wait_for_room(compute(workers=want, **changes), 0)
    with pytest.raises(ray_cluster.NoRoomError, match=f"room for {want} of {want + 1} workers"):
        ray_cluster.wait_for_room(compute(workers=want + 1, **changes), 0)


def test_a_node_that_joins_in_time_ends_the_wait_and_one_that_does_not_is_asked_for_in_words(monkeypatch, capsys):
    nodes, clock = [node(1), node(2, CPU=1)], [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        nodes.extend([node(3, CPU=1)] if clock[0] == 70 else [])

    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray_cluster.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray_cluster.time, "sleep", sleep)
    with pytest.raises(ray_cluster.NoRoomError, match="room for 1 of 2 workers: a worker needs 1 CPU; 10.0.0.1 has 0"):
        ray_cluster.wait_for_room(compute(), 60)
    assert clock[0] == 60
    assert capsys.readouterr().out.count("10.0.0.2 has 1 CPU; waiting 60 s for a node to join\n") == 1
    ray_cluster.wait_for_room(compute(), 60)
    assert clock[0] == 70


IN_BACKGROUND = """
import os, subprocess, sys, time
from m3diff.cluster import children_in_a_group_of_their_own
before = os.getpgrp()
with children_in_a_group_of_their_own():
    child = subprocess.Popen(["sleep", "60"])
    while len(sys.argv) > 1 and os.getppid() == int(sys.argv[1]):
        time.sleep(0.01)
with open("ended", "w") as file:
    file.write(f"{os.getpgrp() == before} {os.getpgid(child.pid) == before}")
child.kill()
"""
STARTS = {
    "nohup {} $$ > said 2>&1 &": None,
    "setsid {} $$ > said 2>&1 &": None,
    "{} $$ <&- > said 2>&1 &": None,
    "set -m; {} $$ > said 2>&1 &": None,
    "{} > said 2>&1; true": "True False",
    "exec {} > said 2>&1": "True True",
}
"""Ways a shell starts it, and whether it is back in its group, and the child in that: not where a signal to the group
would reach the child, but for a leader, as what a shell starts by hand."""


@pytest.mark.fault("W5")
def test_what_ray_starts_has_a_group_of_its_own_and_outlives_the_script_that_left_it(tmp_path):
    """No terminal, no session of its own: as by cron, CI, ssh or `docker exec`."""
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

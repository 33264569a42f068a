"""Which cluster Ray is asked for."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from components import ray_cluster
from components.compute import Compute
from tests.train.toy import COMPUTE


def compute(**changes: Any) -> Compute:
    return Compute(**{**COMPUTE, "workers": 2, "scratch": Path("runs"), **changes})


@pytest.mark.fault("S7")
@pytest.mark.parametrize(("cores", "want"), [(16, 16), (2, 6), (None, 6)])
def test_a_cluster_of_the_run_s_own_has_the_cores_that_are_asked_for_and_no_network(
    cores: int | None, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **given: asked.update(given))
    monkeypatch.setattr(ray_cluster.os, "cpu_count", lambda: cores)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray_cluster.start_ray(compute(cpus_per_worker=3))
    assert (asked["address"], asked["num_cpus"], asked["_node_ip_address"]) == ("local", want, "127.0.0.1")
    assert asked["include_dashboard"] is False
    asked.clear()
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    ray_cluster.start_ray(compute())
    assert asked["address"] == "ray://head:10001"
    assert "num_cpus" not in asked


GROUPS = """
import os, subprocess
from components.ray_cluster import children_in_a_group_of_their_own
before = os.getpgrp()
with children_in_a_group_of_their_own():
    child = subprocess.Popen(["sleep", "60"])
assert os.getpgrp() == before
print(os.getpgid(child.pid) == before)
child.kill()
"""


@pytest.mark.parametrize(("leads", "together"), [(False, "False"), (True, "True")])
def test_what_ray_starts_is_not_reached_by_a_signal_to_the_group_of_this_process(leads: bool, together: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", GROUPS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, process_group=0 if leads else None)
    assert ended.stdout.split() == [together], ended.stderr

"""Which cluster Ray is asked for."""

from pathlib import Path
from typing import Any

import pytest
import ray

from components import ray_cluster
from components.compute import Compute
from tests.train.toy import COMPUTE


def compute(**changes: Any) -> Compute:
    return Compute(**{**COMPUTE, "workers": 2, "scratch": Path("runs"), **changes})


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

"""What Ray is asked for, and what a worker does; the runs themselves are in test_killed_worker.py."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train
import ray.train.torch

from components.records import DataError
from components.train import loop, runtimes
from components.train.loop import Job
from tests.train.toy import recipe


def job(base: Path, run_dir: Path, **compute: Any) -> Job:
    made = recipe(base, workers=2, **compute)
    return Job(made.cfg, made.model, made.compute, run_dir / "mixture", run_dir / "out", run_dir, "")


@pytest.mark.parametrize(("gpu", "backend"), [(False, "gloo"), (True, "nccl")])
def test_ray_is_asked_for_the_workers_their_devices_and_restarts(
    gpu: bool, backend: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray.train.torch, "TorchTrainer", lambda worker, **given: asked.update(given, worker=worker))
    made = job(base, tmp_path, gpu=gpu, cpus_per_worker=3, max_failures=5)
    runtimes._trainer(made)
    assert asked["worker"] is runtimes._worker
    assert asked["train_loop_config"] == {"job": made}
    assert asked["torch_config"].backend == backend
    scaling, run = asked["scaling_config"], asked["run_config"]
    assert (scaling.num_workers, scaling.use_gpu) == (2, gpu)
    assert scaling.resources_per_worker == {"CPU": 3} | ({"GPU": 1} if gpu else {})
    assert (run.name, run.storage_path) == ("ray", str(tmp_path))
    assert (run.failure_config.max_failures, run.failure_config.controller_failure_limit) == (5, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_runs_the_loop_at_its_place_and_the_first_writes_the_figures(
    rank: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: 2)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(loop, "run_loop", lambda made, place: {"rank": place.rank, "ranks": place.ranks})
    runtimes._worker({"job": job(base, tmp_path)})
    written = tmp_path / "figures.json"
    assert written.is_file() == (rank == 0)
    assert rank or json.loads(written.read_text()) == {"rank": 0, "ranks": 2}


class Trainer:
    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault

    def fit(self) -> None:
        if self.fault:
            raise self.fault


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(runtimes, "start_ray", lambda compute: calls.append("start"))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    return calls


def test_a_run_on_ray_gives_the_figures_and_drops_ray_s_old_snapshot(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: list[str]
) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "figures.json").write_text('{"steps": 6}')
    monkeypatch.setattr(runtimes, "_trainer", lambda made: Trainer())
    assert runtimes.run_on_ray(job(base, tmp_path)) == {"steps": 6}
    assert not (tmp_path / "ray").exists()
    assert ended == ["start", "shutdown"]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    runtimes.run_on_ray(job(base, tmp_path))
    assert ended == ["start", "shutdown"], "a cluster that was there stays"


@pytest.mark.parametrize(
    ("raised", "seen"), [(DataError("a.png: changed"), DataError), (OSError("no"), ray.train.TrainingFailedError)]
)
def test_a_worker_s_data_error_is_the_run_s(
    raised: Exception,
    seen: type[Exception],
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ended: list[str],
) -> None:
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

    failed = ray.train.WorkerGroupError("worker failed", {1: UserExceptionWithTraceback(raised, "its traceback")})
    monkeypatch.setattr(runtimes, "_trainer", lambda made: Trainer(failed))
    with pytest.raises(seen, match="a.png: changed" if seen is DataError else None):
        runtimes.run_on_ray(job(base, tmp_path))
    assert ended == ["start", "shutdown"]

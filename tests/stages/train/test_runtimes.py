"""What Ray is asked for, and what a worker or the only process does; whole runs on Ray are in test_workers.py."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train
import ray.train.torch
import torch

from m3diff.cluster import NoRoomError
from m3diff.stages.train import loop, on_ray, runtimes
from m3diff.stages.train.attempts import with_retries
from m3diff.stages.train.job import Job
from m3diff.stages.train.runtimes import only_worker
from tests.stages.train.toy import job, recipe


@pytest.fixture
def work(base: Path, tmp_path: Path) -> Callable[..., Job]:
    return lambda **compute: job(recipe(base, workers=2, **compute), tmp_path / "mixture", tmp_path)


@pytest.mark.parametrize(("gpu", "backend"), [(False, "gloo"), (True, "nccl")])
def test_ray_is_asked_for_the_workers_and_their_devices_and_leaves_restarts_to_us(
    gpu: bool, backend: str, work: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(on_ray, "TorchTrainer", lambda worker, **given: asked.update(given, worker=worker))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    made = work(gpu=gpu, cpus_per_worker=3, max_failures=5)
    on_ray.make_trainer(made)
    assert (asked["worker"], asked["train_loop_config"]) == (on_ray._worker, {"job": made})
    scaling, run, group = asked["scaling_config"], asked["run_config"], asked["torch_config"]
    assert (scaling.num_workers, scaling.use_gpu) == (2, gpu)
    assert scaling.resources_per_worker == {"CPU": 3} | ({"GPU": 1} if gpu else {})
    assert (run.name, run.storage_path) == ("ray", str(tmp_path))
    assert (run.failure_config.max_failures, run.failure_config.controller_failure_limit) == (0, 2)
    grows = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    device = {"DS_ACCELERATOR": "cuda"} | grows if gpu else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    interface = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert run.worker_runtime_env == {"env_vars": device | interface}
    assert (group.backend, group.folder) == (backend, str(tmp_path / "ray"))
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    on_ray.make_trainer(made)
    assert asked["run_config"].worker_runtime_env == {"env_vars": device}, "workers of several machines"
    assert type(asked["torch_config"]) is ray.train.torch.TorchConfig
    assert asked["torch_config"].backend == backend


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_runs_the_loop_at_its_place_and_the_first_writes_the_figures(
    rank: int, work: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: 2)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(loop, "run_loop", lambda made, place: {"rank": place.rank, "ranks": place.ranks})
    on_ray._worker({"job": work()})
    written = tmp_path / "figures.json"
    assert written.is_file() == (rank == 0)
    assert rank or json.loads(written.read_text()) == {"rank": 0, "ranks": 2}


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Starts and ends of a Ray that is none."""
    calls: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(on_ray, "start_ray", lambda compute: calls.append("start"))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(on_ray, "wait_for_room", lambda compute, seconds: None)
    return calls


@pytest.mark.fault("27")
def test_a_run_on_ray_gives_the_figures_drops_ray_s_old_snapshot_and_leaves_no_ray_behind(
    work: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: list[str]
) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "figures.json").write_text('{"steps": 6}')
    monkeypatch.setattr(on_ray, "make_trainer", lambda made: SimpleNamespace(fit=lambda: None))
    assert on_ray.run_on_ray(work()) == {"steps": 6}
    assert not (tmp_path / "ray").exists()
    assert ended == ["start", "shutdown"]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    on_ray.run_on_ray(work())
    assert ended == ["start", "shutdown"], "a cluster that was there stays"
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def fit() -> None:
        raise ray.train.WorkerGroupError("worker failed", {1: OSError("no")})

    monkeypatch.setattr(on_ray, "make_trainer", lambda made: SimpleNamespace(fit=fit))
    with pytest.raises(ray.train.WorkerGroupError, match="worker failed"):
        on_ray.run_on_ray(work())
    assert ended == 2 * ["start", "shutdown"]


@pytest.mark.parametrize(("cluster", "seconds"), [("", 0), ("head:6379", 60)])
def test_nodes_without_room_end_the_run_before_ray_is_asked_and_a_cluster_gets_time_to_bring_one_back(
    cluster: str, seconds: int, work: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, ended: list[str]
) -> None:
    def refuse(compute: Any, seconds: float) -> None:
        ended.append(f"room for {compute.workers} within {seconds} s")
        raise NoRoomError("no room")

    monkeypatch.setenv("RAY_ADDRESS", cluster)
    monkeypatch.setattr(on_ray, "wait_for_room", refuse)
    with pytest.raises(NoRoomError):
        with_retries(on_ray.run_on_ray, work())
    assert ended == ["start", f"room for 2 within {seconds} s", "shutdown"], "it is not tried again at once"


LIGHT = """
import pickle, sys
from pathlib import Path
job = pickle.loads(Path(sys.argv[1]).read_bytes())
import m3diff.stages.train.runtimes
assert job.compute.workers == 2
heavy = {"torch", "deepspeed", "transformers", "peft", "ray"} & set(sys.modules)
assert not heavy, heavy
"""

ON_A_MACHINE_WITH_A_GPU = """
import os, pickle, sys
from pathlib import Path
import torch
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None  # a CUDA build asks the driver
there = os.path.exists
os.path.exists = lambda path: str(path) == "/proc/driver/nvidia/version" or there(path)
from m3diff.stages.train.stage import train
made, mixture, folder = map(Path, sys.argv[1:])
made = pickle.loads(made.read_bytes()).changed(scratch=folder / "runs")
train(made.cfg, made.model, made.compute, mixture, folder / "out")
from deepspeed.accelerator import get_accelerator
print("computed on", get_accelerator().device_name())
"""

TWO_GROUPS = """
import os
import torch.distributed as dist
from m3diff.stages.train.runtimes import only_worker
with only_worker("gloo"):
    first = dist.distributed_c10d._get_default_store()
    first.set("key", "first")
with only_worker("gloo"):
    del first
    store = dist.distributed_c10d._get_default_store()
    store.set("key", "second")
    dist.barrier()
    dist.barrier(group=dist.new_group([0]))
    assert store.get("key") == b"second"
"""


def in_a_process(code: str, *arguments: Path, cwd: Path | None = None) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("DS_ACCELERATOR", None)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_what_a_worker_is_sent_is_read_before_anything_heavy_is_imported(
    work: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "job").write_bytes(pickle.dumps(work()))
    in_a_process(LIGHT, tmp_path / "job")


@pytest.mark.slow(30)
def test_a_machine_s_gpu_is_left_alone_where_the_parameters_ask_for_none(
    mixture: Path, base: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe").write_bytes(pickle.dumps(recipe(base, epochs=0.3, max_failures=0)))
    assert "computed on cpu" in in_a_process(ON_A_MACHINE_WITH_A_GPU, tmp_path / "recipe", mixture, tmp_path)


@pytest.mark.slow(15)
def test_a_group_is_not_disturbed_by_one_before_that_is_collected_late(tmp_path: Path) -> None:
    in_a_process(TWO_GROUPS, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("gpu", "backend"), [(False, "gloo"), (True, "nccl")])
def test_deepspeed_is_told_before_the_loop_is_imported_and_this_process_talks_by_its_device_s_backend(
    gpu: bool, backend: str, work: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def tell(what: Any, **_: Any) -> None:
        told.append(what)
        raise InterruptedError

    with monkeypatch.context() as patch:
        for module in (runtimes, on_ray):
            patch.setattr(module, "choose_accelerator", tell)
        for begin in (runtimes.run_local, lambda made: on_ray._worker({"job": made})):
            with pytest.raises(InterruptedError):
                begin(work(gpu=gpu))
    monkeypatch.setattr(runtimes, "choose_accelerator", lambda gpu: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", tell)
    with pytest.raises(InterruptedError):
        runtimes.run_local(work(gpu=gpu))
    assert told == [gpu, gpu, backend]


def test_the_only_worker_leaves_the_environment_and_the_linear_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO 3 replaces the linear for the life of the process, and another order of sums rounds otherwise."""
    linear = torch.nn.functional.linear
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    seen = {}

    def run() -> None:
        with only_worker("gloo"):
            seen.update(rank=os.environ["RANK"], size=torch.distributed.get_world_size())
            seen.update(interface=os.environ["GLOO_SOCKET_IFNAME"])
            torch.nn.functional.linear = lambda *_: None  # type: ignore[assignment]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert torch.nn.functional.linear is linear
    assert seen == {"rank": "0", "size": 1, "interface": "lo"}
    assert (os.environ["RANK"], os.environ.get("WORLD_SIZE")) == ("3", None)
    assert not torch.distributed.is_initialized()

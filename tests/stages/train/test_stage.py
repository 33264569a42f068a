"""The stage around the loop: what names, locks and refuses a run; what Ray is asked for; what a worker does."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train
import ray.train.torch
import torch

from m3diff.cluster import NoRoomError
from m3diff.provenance import code
from m3diff.records.files import sha256_of_folder
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from m3diff.stages.train import loop, on_ray, stage
from m3diff.stages.train.engine import deepspeed_config
from m3diff.stages.train.job import Job, Runtime, only_worker
from m3diff.stages.train.stage import _only_trainer, run_key, train, with_retries
from tests.stages.train.test_alignment import ALIGN
from tests.stages.train.toy import Recipe, job, recipe
from tests.tiny import tiny_settings
from tests.toy import REPOSITORY


def key(made: Recipe, mixture: Path) -> str:
    return run_key(made.cfg, made.model, mixture, sha256_of_folder(made.cfg.base))


@pytest.mark.fault("27")
def test_what_decides_the_weights_names_a_run_and_no_path_or_test_sample(base, mixture, tmp_path, monkeypatch):
    made, moved = recipe(base), tmp_path / "moved"
    shutil.copytree(base, moved / "base")
    shutil.copytree(mixture, moved / "mixture")
    (moved / "mixture" / "note.txt").write_text("a note")
    (moved / "mixture" / "test" / "00000.parquet").write_bytes(b"other test samples")
    assert key(recipe(moved / "base"), moved / "mixture") == key(made, mixture)
    (moved / "base" / "config.json").write_text("{}")
    keys = {
        "as it is": key(made, mixture),
        "seed": key(made.changed(seed=4), mixture),
        "rate": key(made.changed(model=tiny_settings(vision=0.5)), mixture),
        "rank": key(made.changed(model=tiny_settings(rank=4)), mixture),
        "module": key(made.changed(model=tiny_settings(None)), mixture),
        "align": key(made.changed(model=replace(made.model, align=ALIGN)), mixture),
        "base": key(recipe(moved / "base"), mixture),
        "export": key(made.changed(export="best"), mixture),
    }
    for split in ("train", "val"):
        shutil.copytree(mixture, tmp_path / split)
        shutil.copy(mixture / "test" / "00000.parquet", tmp_path / split / split / "00000.parquet")
        keys[split] = key(made, tmp_path / split)
    monkeypatch.setattr(code, "digests", lambda module, named: {module.name: "another meaning"})
    keys["code"] = key(made, mixture)
    assert len(set(keys.values())) == len(keys), keys


@pytest.mark.fault("02")
def test_a_second_trainer_of_the_same_run_is_turned_away(tmp_path):
    held = "run.lock: another training of this run is alive"
    with _only_trainer(tmp_path / "run"), pytest.raises(BlockingIOError, match=held), _only_trainer(tmp_path / "run"):
        pass
    with _only_trainer(tmp_path / "run"):
        pass


COUNTS = {"rows_in": 23, "rows_out": 46, "steps": 6, "parameters_trainable": 30, "parameters_frozen": 5}
LOSSES = {"loss": 0.12346, "val_loss": 0.76543, "val_loss_by_dataset": {"toy": 0.76543}, "val_cider": None}
MODULE = {"module": {"module_update_ratio/2": 0.000123}, "warnings": ["the module changes nothing"]}
FIGURES: dict[str, Any] = {**COUNTS, "parameters": {"vision": 10, "llm": 20}, **LOSSES, "exported_step": 4, **MODULE}
SPEED = {"seconds": 2.0, "captions_per_s": 23.0, "waiting_share": 0.12345, "device": "cpu", "devices": 2}


@pytest.mark.parametrize(("workers", "runtime"), [(0, (stage, "run_local")), (2, (on_ray, "run_on_ray"))])
def test_the_stage_runs_the_loop_and_writes_its_report(workers, runtime, base, mixture, tmp_path, monkeypatch):
    jobs, followed, out = [], [], tmp_path / "out"

    @contextmanager
    def follow(key: str, curves: Path) -> Iterator[None]:
        yield
        assert curves.parent.is_dir(), "its end reads what is there"
        assert (out / "report.json").is_file()
        followed.append((key, curves))

    def loop(job: Any) -> dict[str, Any]:
        assert job.run_dir.is_dir()
        assert not followed
        jobs.append(job)
        return FIGURES | SPEED | {"device_hours": 4 / 3600}

    monkeypatch.setattr(*runtime, loop)
    made = recipe(base, workers=workers, micro_batch=2, scratch=tmp_path / "runs")
    with pytest.raises(ParamsError, match="compute.caption_val_pairs above 0"):
        train(made.changed(export="best").cfg, made.model, made.compute, mixture, out)
    assert not (tmp_path / "runs").exists()
    train(made.cfg, made.model, made.compute, mixture, out, follow)
    assert json.loads((out / "report.json").read_text()) == FIGURES | {"stage": "train", "alignment": {}}
    speed = json.loads((tmp_path / "runs" / "train_speed.json").read_text())
    assert speed == SPEED | {"waiting_share": 0.1235, "device_hours": 0.0011}
    (job,) = jobs
    assert job.cfg.base.is_absolute()
    assert (job.mixture, job.out, job.base_sha256) == (mixture, out, sha256_of_folder(base))
    assert job.run_dir == tmp_path / "runs" / "train" / run_key(job.cfg, job.model, mixture, job.base_sha256)
    assert followed == [(job.run_dir.name, job.run_dir / "curves.csv")]
    assert not job.run_dir.exists(), "nothing is left of a run that ended"


@pytest.fixture
def work(base: Path, tmp_path: Path) -> Callable[..., Job]:
    return lambda **compute: job(recipe(base, workers=2, **compute), tmp_path / "mixture", tmp_path)


@pytest.mark.parametrize(("gpu", "backend"), [(False, "gloo"), (True, "nccl")])
def test_ray_is_asked_for_workers_devices_and_no_restarts(gpu, backend, work, tmp_path, monkeypatch):
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
    assert (group.backend, group.backend_cls) == (backend, on_ray.OneMachineBackend)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    on_ray.make_trainer(made)
    assert asked["run_config"].worker_runtime_env == {"env_vars": device}, "workers of several machines"
    assert type(asked["torch_config"]) is ray.train.torch.TorchConfig
    assert asked["torch_config"].backend == backend


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_runs_the_loop_at_its_place_and_the_first_writes_the_figures(rank, work, tmp_path, monkeypatch):
    context = SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: 2)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)

    def training(made: Job, place: Runtime) -> SimpleNamespace:
        return SimpleNamespace(run=lambda: {"rank": place.rank, "ranks": place.ranks})

    monkeypatch.setattr(loop, "Training", training)
    joined: list[Runtime] = []
    monkeypatch.setattr(on_ray, "join", lambda made, place: joined.append(place))
    on_ray._worker({"job": work()})
    assert joined == [Runtime(rank, 2)]
    written = tmp_path / "figures.json"
    assert written.is_file() == (rank == 0)
    assert rank or json.loads(written.read_text()) == {"rank": 0, "ranks": 2}


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Starts and ends of a Ray that is none."""
    calls: list[str] = []
    monkeypatch.setattr(on_ray, "start_ray", lambda compute: calls.append("start"))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(on_ray, "wait_for_room", lambda compute, seconds: None)
    return calls


@pytest.mark.fault("27")
def test_a_run_on_ray_gives_the_figures_and_leaves_no_ray_behind(work, tmp_path, monkeypatch, ended):
    (tmp_path / "ray").mkdir()
    (tmp_path / "figures.json").write_text('{"steps": 6}')
    monkeypatch.setattr(on_ray, "make_trainer", lambda made: SimpleNamespace(fit=lambda: None))
    assert on_ray.run_on_ray(work()) == {"steps": 6}
    assert not (tmp_path / "ray").exists()
    assert ended == ["start", "shutdown"]

    def fit() -> None:
        raise ray.train.WorkerGroupError("worker failed", {1: OSError("no")})

    monkeypatch.setattr(on_ray, "make_trainer", lambda made: SimpleNamespace(fit=fit))
    with pytest.raises(ray.train.WorkerGroupError, match="worker failed"):
        on_ray.run_on_ray(work())
    assert ended == 2 * ["start", "shutdown"]


@pytest.mark.parametrize(("cluster", "seconds"), [("", 0), ("head:6379", 60)])
def test_nodes_without_room_end_the_run_after_the_time_of_a_cluster(cluster, seconds, work, monkeypatch, ended):
    def refuse(compute: Any, within: float) -> None:
        ended.append(f"room for {compute.workers} within {within} s")
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
import m3diff.stages.train.stage
assert job.compute.workers == 2
heavy = {"torch", "deepspeed", "transformers", "peft", "ray", "PIL"} & set(sys.modules)
assert not heavy, heavy
"""


def test_what_a_worker_is_sent_is_read_before_anything_heavy_is_imported(work, tmp_path):
    (tmp_path / "job").write_bytes(pickle.dumps(work()))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", LIGHT, str(tmp_path / "job")], env=environment, check=True, timeout=300)


def test_the_only_worker_leaves_the_linear_as_it_was(monkeypatch):
    """ZeRO 3 replaces the linear for the life of the process, and another order of sums rounds otherwise."""
    linear = torch.nn.functional.linear
    monkeypatch.setenv("RANK", "3")

    def run() -> None:
        with only_worker(False):
            assert (os.environ["RANK"], torch.distributed.get_world_size()) == ("0", 1)
            assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
            torch.nn.functional.linear = lambda *_: None  # type: ignore[assignment]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert torch.nn.functional.linear is linear
    assert not torch.distributed.is_initialized()


def test_a_profile_in_bf16_adds_gradients_up_in_fp32():
    for profile in ("paper", "paper-letter", "one-gpu", "small", "levir-cc", "blip2idc"):
        params = load_params(REPOSITORY / "profiles" / f"{profile}.yaml")
        config = deepspeed_config(params.train, params.compute)
        assert (config["bf16"], config["data_types"]) == ({"enabled": True}, {"grad_accum_dtype": "fp32"}), profile

"""The loop in the workers of Ray Train (`compute.workers`).

Ray starts the workers; `stage.with_retries` decides what follows where one dies, and checkpoints are the run's own, in
its folder.
"""

import json
import os
import shutil
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import ray.train
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend

from m3diff.cluster import JOIN_S, on_one_machine, per_worker, start_ray, wait_for_room
from m3diff.models.device import Device, environment
from m3diff.records.files import write_atomic
from m3diff.stages.train.job import (
    Job,
    Runtime,
    choose_accelerator,
    ended_when_superseded,
    loopback,
    require_newest,
    stop_on_sigterm,
)

# Limit of a collective operation: the others wait in one while the first worker writes or validates
COLLECTIVE = timedelta(minutes=30)


def run_on_ray(job: Job) -> dict[str, Any]:
    """Run the loop in `compute.workers` workers of Ray Train and return its figures.

    Raises:
        NoRoomError: the nodes cannot take the workers.
        ray.train.TrainingFailedError: a worker raised or died; its `worker_failures` say what each met.
    """
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # with it, every printed line comes twice
    shutil.rmtree(job.run_dir / "ray", ignore_errors=True)  # Ray's snapshot of a killed run may be half written
    trainer = make_trainer(job)
    start_ray(job.compute)
    try:
        wait_for_room(job.compute, 0 if on_one_machine() else JOIN_S)
        with stop_on_sigterm(job.run_dir):  # here: Ray takes the signal for itself when it starts
            trainer.fit()
    finally:
        ray.shutdown()
    return json.loads((job.run_dir / "figures.json").read_text())


def make_trainer(job: Job) -> TorchTrainer:
    """Return Ray's trainer of the job. Its process group meets over a file on one machine, else at a port."""
    compute, backend, alone = job.compute, Device(job.compute.gpu, job.cfg.precision).backend, on_one_machine()
    return TorchTrainer(
        _worker,
        train_loop_config={"job": job},
        torch_config=OneMachineConfig(backend) if alone else TorchConfig(backend),
        scaling_config=ScalingConfig(
            num_workers=compute.workers, use_gpu=compute.gpu, resources_per_worker=per_worker(compute)
        ),
        run_config=RunConfig(
            name="ray",
            storage_path=str(job.run_dir),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=2),  # type: ignore[call-arg]  # V2's
            worker_runtime_env={  # type: ignore[call-arg]  # V2's
                "env_vars": environment(compute.gpu) | (loopback() if alone else {})
            },
        ),
    )


def _worker(config: dict[str, Any]) -> None:
    job: Job = config["job"]
    choose_accelerator(job.compute.gpu)
    from m3diff.stages.train.loop import Training

    context = ray.train.get_context()
    runtime = Runtime(context.get_world_rank(), context.get_world_size())
    if not dist.is_initialized():
        join(job, runtime)
    with ended_when_superseded(job.run_dir, job.generation):
        figures = Training(job, runtime).run()
    if runtime.rank == 0:
        require_newest(job.run_dir, job.generation)
        write_atomic(job.run_dir / "figures.json", json.dumps(figures))


class OneMachineBackend(_TorchBackend):
    """Leaves the process group to the workers: Ray has them meet at a port, which torch opens on every interface."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Set the variables that tell each worker its place."""
        worker_group.execute(_set_torch_distributed_env_vars)


@dataclass
class OneMachineConfig(TorchConfig):
    """Ray's configuration of a process group, for workers that share a file system."""

    @property
    def backend_cls(self) -> type[OneMachineBackend]:
        return OneMachineBackend


def join(job: Job, runtime: Runtime) -> None:
    """Join, in a worker, the process group of an attempt on one machine. It meets over a file of its own."""
    store = dist.FileStore(str(job.run_dir / f"group-{job.generation}"), runtime.ranks)
    backend = Device(job.compute.gpu, job.cfg.precision).backend
    dist.init_process_group(backend, store=store, rank=runtime.rank, world_size=runtime.ranks, timeout=COLLECTIVE)

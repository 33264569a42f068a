"""Run the training loop in Ray Train workers (`compute.workers` above 0).

Ray only starts the workers. `stage.run_with_retries` decides what to do when a worker dies, and the run writes its own
checkpoints into its folder.
"""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import ray.train
import torch.distributed as dist
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend

from m3diff.cluster import JOIN_S, on_one_machine, start_ray, wait_for_room, worker_resources
from m3diff.models.device import Device, process_environment
from m3diff.records.files import write_atomic
from m3diff.runtime import prepare
from m3diff.stages.train.job import (
    Job,
    WorkerContext,
    choose_accelerator,
    end_when_superseded,
    loopback_environment,
    require_newest_attempt,
    stop_on_sigterm,
)

# Timeout of a collective operation. The other workers wait in such an operation while the first worker writes a
# checkpoint or validates.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def run_on_ray(job: Job) -> dict[str, Any]:
    """Run the training loop in `compute.workers` Ray Train workers and return its figures.

    Raises:
        NoRoomError: the nodes do not have enough resources for the workers.
        ray.train.TrainingFailedError: a worker raised an error or died; `worker_failures` holds each worker's error.
    """
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    # Ray's patch of `print` would print every line of a worker twice
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    # Ray's snapshot of a killed run may be incomplete
    shutil.rmtree(job.run_dir / "ray", ignore_errors=True)
    trainer = make_trainer(job)
    start_ray(job.compute)
    try:
        wait_for_room(job.compute, 0 if on_one_machine() else JOIN_S)
        # must come after Ray has started, because Ray installs its own handler for this signal
        with stop_on_sigterm(job.run_dir):
            if on_one_machine():
                start_coordinator()
            trainer.fit()
    finally:
        ray.shutdown()
    return json.loads((job.run_dir / "figures.json").read_text())


def start_coordinator() -> None:
    """Start the actor that Ray Train reports its workers to, and wait until it responds.

    Ray Train 2.60 starts the actor with its first report and waits five seconds for it. On a busy machine, the actor's
    imports take longer, and Ray prints a traceback (GetTimeoutError) although the training then succeeds.
    """
    coordinator = get_or_create_autoscaling_coordinator()
    with suppress(RayError):  # Ray Train tries again and reports the error itself
        ray.get(coordinator.__ray_ready__.remote(), timeout=JOIN_S)


def make_trainer(job: Job) -> TorchTrainer:
    """Return a Ray trainer for the job.

    Workers on one machine create their process group through a file. Workers on several machines create it through a
    port.
    """
    compute = job.compute
    backend = Device(compute.gpu, job.cfg.precision).backend
    torch_config = TorchConfig(backend)
    worker_variables = process_environment(compute.gpu)
    if on_one_machine():
        torch_config = OneMachineConfig(backend)
        worker_variables |= loopback_environment()
    run_config = RunConfig(
        name="ray",
        storage_path=str(job.run_dir),
        # mypy checks against the arguments of Ray Train V1, but these two belong to V2
        failure_config=FailureConfig(max_failures=0, controller_failure_limit=2),  # type: ignore[call-arg]
        worker_runtime_env={"env_vars": worker_variables},  # type: ignore[call-arg]
    )
    return TorchTrainer(
        _run_worker,
        train_loop_config={"job": job},
        torch_config=torch_config,
        scaling_config=ScalingConfig(
            num_workers=compute.workers, use_gpu=compute.gpu, resources_per_worker=worker_resources(compute)
        ),
        run_config=run_config,
    )


def _run_worker(config: dict[str, Any]) -> None:
    prepare()
    job: Job = config["job"]
    choose_accelerator(job.compute.gpu)
    from m3diff.stages.train.loop import Training

    context = ray.train.get_context()
    worker = WorkerContext(context.get_world_rank(), context.get_world_size())
    if not dist.is_initialized():
        join_process_group(job, worker)
    with end_when_superseded(job.run_dir, job.attempt):
        figures = Training(job, worker).run()
    if worker.rank == 0:
        require_newest_attempt(job.run_dir, job.attempt)
        write_atomic(job.run_dir / "figures.json", json.dumps(figures))


class OneMachineBackend(_TorchBackend):
    """A Ray backend that lets the workers create the process group themselves.

    Ray's default backend creates the group on a port that torch opens on every network interface.
    """

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Set the environment variables that give each worker its rank."""
        worker_group.execute(_set_torch_distributed_env_vars)


@dataclass
class OneMachineConfig(TorchConfig):
    """Ray's torch configuration for workers on one machine, which create their process group through a file."""

    @property
    def backend_cls(self) -> type[OneMachineBackend]:
        """The backend class that sets up the process group."""
        return OneMachineBackend


def join_process_group(job: Job, worker: WorkerContext) -> None:
    """Join the process group of this attempt, whose workers are all on one machine.

    The workers find each other through a file that only this attempt uses.
    """
    store = dist.FileStore(str(job.run_dir / f"group-{job.attempt}"), worker.ranks)
    backend = Device(job.compute.gpu, job.cfg.precision).backend
    dist.init_process_group(backend, store=store, rank=worker.rank, world_size=worker.ranks, timeout=COLLECTIVE_TIMEOUT)

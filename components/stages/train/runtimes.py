"""Where the loop runs: in this process (`compute.workers: 0`), or in Ray Train workers.

Ray starts the workers; what follows where one dies is decided in `retry.py`, and checkpoints are the run's own, in its
folder.
"""

import json
import os
import shutil
from typing import Any

from m3diff.cluster import JOIN_S, on_one_machine, per_worker, start_ray, wait_for_room
from m3diff.models.device import Device, environment
from m3diff.records.files import write_atomic
from m3diff.stages.train.accelerator import choose_accelerator, loopback, only_worker
from m3diff.stages.train.generation import ended_when_superseded, require_newest
from m3diff.stages.train.job import Job, Runtime
from m3diff.stages.train.stopping import stop_on_sigterm


def run_local(job: Job) -> dict[str, Any]:
    """The loop alone, as the only worker."""
    choose_accelerator(job.compute.gpu)  # before DeepSpeed is imported
    from m3diff.stages.train.loop import run_loop

    with only_worker(Device(job.compute.gpu, job.cfg.precision).backend), stop_on_sigterm(job.run_dir):
        return run_loop(job, Runtime())


def run_on_ray(job: Job) -> dict[str, Any]:
    """The loop in `compute.workers` workers of Ray Train.

    Raises:
        NoRoomError: the nodes cannot take the workers.
        ray.train.TrainingFailedError: a worker raised or died; its `worker_failures` say what each met.
    """
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "60")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # with it, every printed line comes twice
    import ray

    shutil.rmtree(job.run_dir / "ray", ignore_errors=True)  # Ray's snapshot of a killed run may be half written
    trainer = _trainer(job)
    own = not ray.is_initialized()
    if own:
        start_ray(job.compute)
    try:
        wait_for_room(job.compute, 0 if on_one_machine() else JOIN_S)
        with stop_on_sigterm(job.run_dir):  # here: Ray takes the signal for itself when it starts
            trainer.fit()
    finally:
        if own:
            ray.shutdown()
    return json.loads((job.run_dir / "figures.json").read_text())


def _trainer(job: Job) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    compute = job.compute
    there = environment(compute.gpu) | (loopback() if on_one_machine() else {})
    return TorchTrainer(
        _worker,
        train_loop_config={"job": job},
        torch_config=_process_group(job),
        scaling_config=ScalingConfig(
            num_workers=compute.workers,
            use_gpu=compute.gpu,
            resources_per_worker=per_worker(compute),
        ),
        run_config=RunConfig(
            name="ray",
            storage_path=str(job.run_dir),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=2),  # type: ignore[call-arg]  # V2's
            worker_runtime_env={"env_vars": there},  # type: ignore[call-arg]  # V2's
        ),
    )


def _process_group(job: Job) -> Any:
    """How the workers meet: over a file on one machine, else at a port of the first worker's."""
    from ray.train.torch import TorchConfig

    from m3diff.stages.train.process_group import OneMachineConfig

    backend = Device(job.compute.gpu, job.cfg.precision).backend
    if on_one_machine():
        return OneMachineConfig(backend, folder=str(job.run_dir / "ray"))
    return TorchConfig(backend)


def _worker(config: dict[str, Any]) -> None:
    job: Job = config["job"]
    choose_accelerator(job.compute.gpu)
    import ray.train

    from m3diff.stages.train.loop import run_loop

    context = ray.train.get_context()
    runtime = Runtime(context.get_world_rank(), context.get_world_size())
    with ended_when_superseded(job.run_dir, job.generation):
        figures = run_loop(job, runtime)
    if runtime.rank == 0:
        require_newest(job.run_dir, job.generation)
        write_atomic(job.run_dir / "figures.json", json.dumps(figures))

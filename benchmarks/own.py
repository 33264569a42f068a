"""The project's own training in the benchmark: the loop's step, with its loader, engine, clipping and optimizer."""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch.profiler import ProfilerActivity, profile
from transformers.utils import logging

from m3diff.models.device import Device
from m3diff.stages.train.job import Job, Runtime
from m3diff.stages.train.loop import Training
from m3diff.stages.train.runtimes import choose_accelerator, only_worker


def own_step(job: Job) -> Callable[[], float]:
    """A function that takes the loop's next step and gives its loss; `torch.distributed` must be up."""
    run = Training(job, Runtime())
    stream = run.loader.stream(run.schedule, 0, 0)
    taken = 0

    def step() -> float:
        nonlocal taken
        run.step(taken, next(stream))
        taken += 1
        return run.curve.last("loss")

    return step


def serve_own(pipe: Connection, job: Job) -> None:
    """Take as many steps as the pipe asks for, and answer with seconds and losses, until it asks for none; for the
    word "profile", a table of one step's operators."""
    device = Device(job.compute.gpu, job.cfg.precision)
    choose_accelerator(device.gpu)
    logging.disable_progress_bar()
    job.run_dir.mkdir(parents=True, exist_ok=True)
    with only_worker(device.backend):
        step = own_step(job)
        while asked := pipe.recv():
            pipe.send(operators(step) if asked == "profile" else timed(step, asked, device.gpu))


def timed(step: Callable[[], float], count: int, gpu: bool) -> tuple[float, list[float]]:
    started = time.perf_counter()
    losses = [step() for _ in range(count)]
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started, losses


def operators(step: Callable[[], float]) -> str:
    """Where one step's time goes, by operator."""
    gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as profiled:
        step()
    key = "self_cuda_time_total" if gpu else "self_cpu_time_total"
    return profiled.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=50)

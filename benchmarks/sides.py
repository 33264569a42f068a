"""The project's training against the stock way: each side in a process of its own, round after round by turns.

One side computes while the others wait, so a busy machine is busy for all. Each side first takes the steps whose losses
are compared, which warms it up as well.
"""

import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch.profiler import ProfilerActivity, profile
from transformers.utils import logging

from benchmarks.peer import serve_peer
from m3diff.models.device import Device
from m3diff.models.m3diff_settings import M3DiffSettings
from m3diff.models.settings import Delays
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.settings.load import load_params
from m3diff.stages.train.job import Job, Runtime
from m3diff.stages.train.loop import Training
from m3diff.stages.train.runtimes import choose_accelerator, only_worker

HERE = Path(__file__).parent
ROOT = HERE.parent
SAME_LOSS = 2e-4  # relative
REFERENCES = 5


@dataclass(frozen=True)
class Sizes:
    """Sizes of a comparison. `unpacked` captions and `packed` pairs at a time; the peer takes as many as the former."""

    pairs: int = 16
    unpacked: int = 80
    packed: int = 16
    compared_steps: int = 10
    rounds: int = 5
    round_s: float = 2.0


def write_mixture(folder: Path, pairs: int, side: int) -> Path:
    """The first pairs of MiniChange's training mixture (minichange.json), with images of noise, as `convert` writes."""
    rng = np.random.default_rng(0)
    rows = []
    for number, pair in enumerate(json.loads((HERE / "minichange.json").read_text())[:pairs]):
        images: dict[str, Any] = {}
        for when in ("before", "after"):
            file = folder / "images" / f"{number}_{when}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file)
            images |= {when: str(file), f"{when}_sha256": sha256(file.read_bytes()).digest()}
        name = f"minichange/{number}"
        ids = {"pair": name, "dataset": "minichange", "split": "train", "question": pair["question"]}
        for place, reference in enumerate(pair["references"][:REFERENCES]):
            rows.append({"id": f"{name}#{place}", "reference": reference} | ids | images)
    for split, content in (("train", rows), ("val", [])):
        (folder / split).mkdir()
        pq.write_table(pa.Table.from_pylist(content, schema=SAMPLE_SCHEMA), folder / split / "part.parquet")
    return folder


def embedded_job(folder: Path, captions: int | None, batch: tuple[int, int], threads: int) -> Job:
    """The embedded run's training of `batch` (global, micro) sequences of up to `captions` references, in one process,
    at constant rates."""
    params = load_params(ROOT / "params.yaml")
    cfg = params.train.model_copy(
        update={
            "base": ROOT / params.train.base,
            "max_captions_per_sequence": captions,
            "global_batch": batch[0],
            "warmup_share": 0.0,
            "epochs": 100_000,  # the end of the cosine is far away
        }
    )
    one_process = {"workers": 0, "cpus_per_worker": threads, "gpu": False, "zero_stage": 0, "micro_batch": batch[1]}
    compute = params.compute.model_copy(update=one_process | {"val_pairs": 0, "caption_val_pairs": 0})
    run_dir = folder / f"run_{captions or 'all'}"
    model = params.models[params.train.model]
    assert isinstance(model, M3DiffSettings)
    model = replace(model, delays=Delays())  # the stock Trainer has none
    return Job(cfg, model, compute, folder, run_dir / "out", run_dir, "")


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
    """Table of one step's time by operator."""
    gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as profiled:
        step()
    key = "self_cuda_time_total" if gpu else "self_cpu_time_total"
    return profiled.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=50)


@dataclass
class Side:
    """A process that trains. `seconds` of each round, of `steps` steps each."""

    name: str
    serve: Callable[..., None]
    micro_batch: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps: int = 0

    def start(self) -> None:
        context = multiprocessing.get_context("fork")  # what the command has imported is not imported again
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=self.serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, what: int | str) -> Any:
        """The answer to so many steps, or to a word.

        Raises:
            RuntimeError: the process has died; it has told why.
        """
        self.pipe.send(what)
        try:
            return self.pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"{self.name}: its process ended; see its traceback above") from error

    def warm_up(self, sizes: Sizes) -> None:
        """The steps whose losses are compared, then as many as show how many make a round."""
        self.losses = self.ask(sizes.compared_steps)[1]
        seconds = min(self.ask(1)[0] for _ in range(2))
        self.steps = math.ceil(sizes.round_s / seconds)

    def take_round(self) -> None:
        self.seconds.append(self.ask(self.steps)[0])

    def end(self) -> None:
        self.pipe.send(0)
        self.process.join()

    def figures(self, captions: int) -> dict[str, Any]:
        """Speed over the rounds: of the median round, the spread from slowest to quickest as a share of it."""
        median = statistics.median(self.seconds)
        rates = [captions * self.steps / seconds for seconds in self.seconds]
        return {
            "captions_per_s": captions * self.steps / median,
            "spread": (max(self.seconds) - min(self.seconds)) / median,
            "rounds": rates,
            "steps_per_round": self.steps,
            "micro_batch": self.micro_batch,
            "losses": self.losses,
        }


def embedded_sides(folder: Path, sizes: Sizes, threads: int, prepared: bool) -> list[Side]:
    """Peer, unpacked and packed on the embedded shapes; with `prepared` also the peer whose inputs are made before."""
    write_mixture(folder, sizes.pairs, side=72)
    captions = sizes.pairs * REFERENCES
    micro, micro_packed = min(sizes.unpacked, captions), min(sizes.packed, sizes.pairs)
    unpacked = embedded_job(folder, 1, (captions, micro), threads)
    packed = embedded_job(folder, None, (sizes.pairs, micro_packed), threads)
    sides = [
        Side("peer", partial(serve_peer, job=unpacked), micro),
        Side("unpacked", partial(serve_own, job=unpacked), micro),
        Side("packed", partial(serve_own, job=packed), micro_packed),
    ]
    return sides + [Side("peer_prepared", partial(serve_peer, job=unpacked, prepared=True), micro)] * prepared


def assert_same_losses(sides: list[Side]) -> None:
    """Every step of every side has the loss of the first side's."""
    first = sides[0]
    for side in sides[1:]:
        for step, (loss, expected) in enumerate(zip(side.losses, first.losses, strict=True), start=1):
            assert abs(loss / expected - 1) < SAME_LOSS, (
                f"step {step}: the loss of {side.name} is {loss}, of {first.name} {expected}; losses of all steps: "
                f"{side.losses} and {first.losses}"
            )


def compare(sides: list[Side], sizes: Sizes, profiled: bool = False) -> dict[str, Any]:
    """Figures of each side by its name. The losses of the first steps must be the same; with `profiled`, where the time
    of the project's own steps goes is printed."""
    for side in sides:
        side.start()
    try:
        for side in sides:
            side.warm_up(sizes)
        assert_same_losses(sides)
        for _ in range(sizes.rounds):
            for side in sides:
                side.take_round()
        for side in sides if profiled else []:
            if side.serve.func is serve_own:  # type: ignore[attr-defined]
                print(f"\n{side.name}, one step by operator\n{side.ask('profile')}")
    finally:
        for side in sides:
            if side.process.is_alive():
                side.end()
    return {side.name: side.figures(sizes.pairs * REFERENCES) for side in sides}


def print_comparison(figures: dict[str, Any]) -> None:
    print(f"{'':<16} {'captions/s':>10} {'x peer':>7} {'spread':>7} {'micro':>6}  losses of the first steps")
    for name, row in figures.items():
        ratio = row["captions_per_s"] / figures["peer"]["captions_per_s"]
        speed = f"{row['captions_per_s']:>10.1f} {ratio:>7.2f} {row['spread']:>7.0%} {row['micro_batch']:>6}"
        print(f"{name:<16} {speed}  {' '.join(f'{loss:.5f}' for loss in row['losses'])}")

"""The training loop, the same in a plain process and in a Ray worker. It names no family."""

import json
import math
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch

from m3diff.models import FAMILIES
from m3diff.models.attention import KERNELS, attention_of
from m3diff.models.checkpoint import CheckpointError, save_checkpoint, verify_manifest
from m3diff.models.device import Device
from m3diff.models.family import Family, PairProcessor, Settings, Term
from m3diff.models.tuning import parameter_counts, prepare, trainable_groups, unwrapped
from m3diff.records.errors import DataError
from m3diff.records.files import write_atomic
from m3diff.settings.compute import Compute
from m3diff.settings.section import ParamsError
from m3diff.stages.train.attempts import (
    STOP,
    DivergedError,
    StoppedError,
    full_disk_explained,
    require_newest,
    require_room,
)
from m3diff.stages.train.batches import Loader, MicroBatch, Schedule
from m3diff.stages.train.engine import (
    accumulation,
    build_engine,
    check_packing,
    rate_factor,
    sum_over_ranks,
    take_step,
    warmup_steps,
)
from m3diff.stages.train.job import CURVES, Job, Runtime
from m3diff.stages.train.params import Train
from m3diff.stages.train.progress import (
    Curve,
    columns,
    describe,
    module_warning,
    peak_flops,
    progress_line,
    update_ratios,
)
from m3diff.stages.train.samples import read_samples, read_training_samples
from m3diff.stages.train.state import (
    BEST,
    NEWEST,
    VALIDATION,
    Writer,
    checkpoint_to_export,
    checkpoints,
    latest_valid_checkpoint,
    load_state,
    read_validation,
    save_state,
    step_of,
    trained_names,
)
from m3diff.stages.train.validation import Validation

LOGGED_STEPS = 20
HOURS = "hours.json"
"""In the run's folder: what all attempts took up to the newest checkpoint."""


def run_loop(job: Job, runtime: Runtime) -> dict[str, Any]:
    """Train to the end and, on the first worker, write `out/checkpoint` and `out/curves.csv`; return the figures."""
    training = Training(job, runtime)
    with training.writer:
        return training.run()


def prepare_model(
    cfg: Train, settings: Settings, compute: Compute, family: Family, weights: Path | None = None
) -> tuple[Any, PairProcessor]:
    """Return the base, or the `weights` of the phase before, with LoRA adapters and, where it has none yet, a new
    module, from the seed; and its processor.

    Raises:
        DataError: the weights of the phase before are not whole.
        ParamsError: the base, the settings and `compute` cannot be together.
    """
    torch.manual_seed(cfg.seed)
    if weights is not None:
        try:
            verify_manifest(weights)
        except CheckpointError as error:
            fault = str(error).partition(";")[0]
            raise DataError(f"{fault}; run again, which writes the alignment's output anew") from error
    folder = weights or cfg.base
    dtype = Device(compute.gpu, cfg.precision).dtype
    try:
        model = family.load_base(folder, settings, dtype, KERNELS)
        adapted = prepare(model, family, settings)
        family.fuse(model, compute.activation_checkpointing)
    except ValueError as error:
        raise ParamsError(f"train: models.{cfg.model} on train.base {cfg.base}: {error}") from error
    return adapted.train(), family.load_processor(folder, model.config)


class Training:
    """A worker's part of a phase: model, engine, schedule, validation and curves, and the steps."""

    def __init__(self, job: Job, runtime: Runtime) -> None:
        cfg, compute = job.cfg, job.compute
        torch.set_num_threads(compute.cpus_per_worker)
        kernel = attention_of(compute.attention, compute.gpu, cfg.max_captions_per_sequence)
        self.job, self.runtime = job, runtime
        self.device = Device(compute.gpu, cfg.precision, kernel)
        self.family = FAMILIES[job.model.family]
        model, self.processor = prepare_model(cfg, job.model, compute, self.family, job.weights)
        self.groups = trainable_groups(model, self.family, job.model)
        self.parameters = parameter_counts(model, self.family)
        self.engine = build_engine(cfg, compute, model.to(self.device.torch), self.groups, runtime.ranks)
        self.trained = trained_names(self.engine.module, self.groups)
        samples = read_training_samples(job.mixture, job.run_dir, job.datasets)
        val = read_samples(job.mixture / "val", job.run_dir, job.datasets)
        self.schedule = Schedule(
            samples=samples,
            max_captions=cfg.max_captions_per_sequence,
            seed=cfg.seed,
            global_batch=cfg.global_batch,
            micro_batch=compute.micro_batch,
            epochs=cfg.epochs,
            ranks=runtime.ranks,
        )
        self.validation = Validation(val, self.processor, self.family, compute, cfg.seed, runtime, self.device)
        augment = partial(self.family.augment, job.model) if self.family.augment else None
        self.loader = Loader(samples, self.processor, compute.cpus_per_worker, self.device, augment)
        self.module = self.family.contribution.names(job.model) if self.family.contribution else ()
        self.curve = Curve(columns(self.family.parts, self.module, self.validation.datasets))
        self.writer = Writer(partial(require_newest, job.run_dir, job.generation))
        self.rates: dict[str, float] = {}
        self.seconds, self.waited, self.captions = 0.0, 0.0, 0  # of this attempt
        hours = job.run_dir / HOURS
        self.earlier: dict[str, float] = json.loads(hours.read_text()) if hours.is_file() else {}

    def run(self) -> dict[str, Any]:
        """Announce the run, take the steps that are left, export; return the figures."""
        job, runtime, schedule = self.job, self.runtime, self.schedule
        micro_batches = accumulation(job.cfg, job.compute, runtime.ranks)
        config = unwrapped(self.engine.module).config

        def flops(tokens: float, supervised: float) -> list[Term]:
            return [*self.family.flops(config, tokens, supervised, job.model)]

        flops_per_step, lines = describe(schedule, self.loader, micro_batches, flops, self.parameters)
        for line in lines:
            runtime.say(line)
        if runtime.rank == 0:  # it writes the checkpoints
            kept = NEWEST + (BEST if job.compute.caption_val_pairs else 0)
            require_room(job.run_dir, self.parameters["trainable"], kept, len(checkpoints(job.run_dir)))
        done = self.resume()
        if compared := check_packing(self.engine, schedule, self.loader, self.processor, self.device):
            runtime.say(compared)
        stream = self.loader.stream(schedule, runtime.rank, done)
        peak = peak_flops(torch.cuda.get_device_name() if job.compute.gpu else "", job.cfg.precision)
        started = time.monotonic()
        for step in range(done, schedule.steps):
            before = time.monotonic()
            batches = next(stream)
            self.waited += time.monotonic() - before
            self.step(step, batches)
            self.seconds = time.monotonic() - started
            self.log(step + 1, self.seconds / (step + 1 - done), flops_per_step, peak)
            self.end_if_asked(step + 1)
            if self.is_checkpoint(step + 1):
                self.validate(self.save(step + 1))
                for warning in self.warnings():
                    runtime.say(f"warning: {warning}")
        self.seconds = time.monotonic() - started
        return self.figures(self.export())

    def is_checkpoint(self, step: int) -> bool:
        """Return whether a checkpoint follows `step` done steps: every so many, and the last."""
        return step == self.schedule.steps or step % self.job.compute.checkpoint_every_steps == 0

    def resume(self) -> int:
        """Restore the newest valid checkpoint; return the number of steps done, 0 without one."""
        newest = latest_valid_checkpoint(self.job.run_dir) if self.runtime.rank == 0 else None
        folder = self.runtime.agree(newest)
        steps = self.schedule.steps
        if folder is None:
            self.runtime.say(f"no checkpoint of this run to go on from, so it starts at step 1 of {steps}")
            return 0
        done = load_state(self.engine, folder)
        self.curve.read(folder / CURVES)
        self.runtime.say(f"resumed after step {done} of {steps}")
        scores = self.runtime.agree(read_validation(folder))
        if scores is not None:
            self.curve.fill({name: value for name, value in scores.items() if name in self.curve.names})
        elif self.is_checkpoint(done):
            self.validate(folder)
        return done

    def step(self, step: int, batches: list[MicroBatch]) -> None:
        """Take step number `step` (from 0) and add its row to the curves.

        The module's contribution is measured in the first step, as the run finds it, and where a line is logged. It is
        taken over the whole global batch, of all workers, so that how a step is dealt changes no number; sequences that
        only fill up a batch count too. It belongs to the forward of its step, as the loss does.
        """
        cfg, schedule, measures = self.job.cfg, self.schedule, self.family.contribution
        rates = [group.lr * rate_factor(cfg, step, schedule.steps, group.delay) for group in self.groups]
        by_part = {f"lr_{part}": rate for group, rate in zip(self.groups, rates, strict=True) for part in group.parts}
        self.rates = {name: by_part[name] for name in self.curve.names if name in by_part}
        measured = measures if self.module and (step == 0 or self.is_logged(step + 1)) else None
        module: dict[str, float] = {}
        with measured.recorded(unwrapped(self.engine.module)) if measured else nullcontext([]) as recorded:
            loss, norm = take_step(self.engine, batches, self.processor, self.device, rates, self.runtime.ranks)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            with_rates = ", ".join(f"{name} {rate:.3g}" for name, rate in self.rates.items())
            raise DivergedError(
                f"step {step + 1}: the loss is {loss:.6g} and the gradient's norm {norm:.6g} with {with_rates}: "
                "training diverged; lower the model's rates or raise train.warmup_share"
            )
        if measured:
            sums = sum_over_ranks(torch.stack(recorded).double().sum(dim=0).cpu(), self.runtime.ranks)
            module = dict(zip(self.module, measured.figures(sums), strict=True))
        self.captions += schedule.captions(step, step + 1)
        epoch = round((step + 1) / schedule.steps_per_epoch, 4)
        self.curve.add({"step": step + 1, "epoch": epoch, "loss": loss, "grad_norm": norm, **self.rates, **module})

    def is_logged(self, step: int) -> bool:
        """Return whether a line is printed after `step` done steps: every so many, and the last."""
        return step % LOGGED_STEPS == 0 or step == self.schedule.steps

    def log(self, step: int, pace: float, flops: float, peak: float | None) -> None:
        """Print the line of `step` done steps, where it is due.

        Args:
            pace: seconds a step.
            flops: of one step.
            peak: FLOP/s of one device.
        """
        if not self.is_logged(step):
            return
        used = None if peak is None else flops / pace / (peak * self.runtime.ranks)
        values = {name: self.curve.last(name) for name in ("loss", "grad_norm")}
        updates = list(update_ratios(self.curve.latest(self.module)).values())
        speed = self.captions / self.seconds
        self.runtime.say(progress_line(step, self.schedule.steps, values, updates, self.rates, speed, pace, used))

    def end_if_asked(self, step: int) -> None:
        """Raise StoppedError, once the checkpoint after `step` steps is written, where the run was asked to end; all
        workers agree. A run that goes on from it validates it only where an undisturbed one would."""
        asked = self.runtime.rank == 0 and (self.job.run_dir / STOP).exists()
        if sum_over_ranks(torch.tensor(float(asked)), self.runtime.ranks):
            self.save(step)
            self.writer.finish()
            raise StoppedError(
                f"asked to end (SIGTERM) at step {step}, whose checkpoint is written: run again to go on from it"
            )

    def save(self, step: int) -> Path:
        """Have the checkpoint after `step` steps written, and after it what the run took; return its folder."""
        run_dir, rank = self.job.run_dir, self.runtime.rank
        folder = save_state(self.engine, self.trained, run_dir, step, rank, self.curve, self.writer)
        if rank == 0:
            self.writer.submit(write_atomic, run_dir / HOURS, json.dumps(self.spent()) + "\n")
        return folder

    def spent(self) -> dict[str, float]:
        """Return what all attempts took: seconds of steps and validation, those of them that waited for data, those of
        every worker's device, and captions seen, again after a resume too. What an attempt took after its last
        checkpoint is in none of them."""
        own = {
            "seconds": self.seconds,
            "waited": self.waited,
            "device_seconds": self.seconds * self.runtime.ranks,
            "captions": self.captions,
        }
        return {name: self.earlier.get(name, 0) + value for name, value in own.items()}

    def validate(self, folder: Path) -> None:
        """Score the state that `folder` holds; write the scores next to it and into the curves, in `run_dir` too.

        Every so many checkpoints, and the last, are captioned.
        """
        step, compute = step_of(folder), self.job.compute
        scores = self.validation.losses(self.engine)
        every = compute.checkpoint_every_steps * compute.caption_every_checkpoints
        if compute.caption_val_pairs and (step == self.schedule.steps or step % every == 0):
            scores |= self.validation.cider(self.engine)
        self.curve.fill(scores)
        if self.runtime.rank == 0:
            self.writer.submit(write_atomic, folder / VALIDATION, json.dumps(scores) + "\n")
            self.writer.submit(self.curve.copy().write, self.job.run_dir / CURVES)
        if scores:
            named = "".join(f"  {name} {value:.4f}" for name, value in scores.items())
            self.runtime.say(f"validation after step {step}{named}")

    def warnings(self) -> list[str]:
        """Return what is wrong with what trains, in sentences."""
        if not self.family.contribution:
            return []
        steps = self.schedule.steps
        warm = max(round(group.delay * steps) for group in self.groups) + warmup_steps(steps, self.job.cfg.warmup_share)
        found = module_warning(self.curve.latest(self.module), steps, warm, self.family.contribution.remedy)
        return [found] if found else []

    def export(self) -> int:
        """Write the checkpoint that `train.export` asks for; return the step that it is from. Every worker calls it."""
        job, rank = self.job, self.runtime.rank
        self.writer.finish()
        chosen = checkpoint_to_export(job.run_dir, job.cfg.export) if rank == 0 else None
        folder = self.runtime.agree(chosen)
        if folder is not None:
            load_state(self.engine, folder)
        partitioned = [p for p in self.engine.module.parameters() if hasattr(p, "ds_id")]
        with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
            if rank == 0:
                self.write_checkpoint(job.out / "checkpoint")
                self.curve.write(job.out / CURVES)
        return self.schedule.steps if folder is None else step_of(folder)

    def write_checkpoint(self, folder: Path) -> None:
        """Write the engine's weights, which are whole here."""
        job, model = self.job, self.engine.module
        require_newest(job.run_dir, job.generation)
        facts: dict[str, Any] = {"family": job.model.family, "base": job.cfg.base, "base_sha256": job.base_sha256}
        with full_disk_explained(folder, sum(parameter.nbytes for parameter in model.parameters())):
            save_checkpoint(model, self.processor, folder, **facts)

    def figures(self, exported: int) -> dict[str, Any]:
        """Return the fields of the report, and what the run took over all its attempts."""
        curve, took, steps, counts = self.curve, self.spent(), self.schedule.steps, self.parameters
        seconds, latest = max(took["seconds"], 1e-9), curve.latest(self.module)

        def known(column: str) -> float | None:
            value = curve.last(column)
            return None if math.isnan(value) else round(value, 5)

        return {
            "rows_in": len(self.schedule.samples),
            "rows_out": self.schedule.captions(0, steps),
            "steps": steps,
            "parameters_trainable": counts["trainable"],
            "parameters_frozen": counts["frozen"],
            "parameters": {part: n for part, n in counts.items() if part not in ("trainable", "frozen")},
            "loss": known("loss"),
            "val_loss": known("val_loss"),
            "val_loss_by_dataset": {name: known(f"val_loss_{name}") for name in self.validation.datasets},
            "val_cider": known("val_cider"),
            "exported_step": exported,
            "module": {name: latest[name] for name in self.module if latest},
            "warnings": self.warnings(),
            "seconds": took["seconds"],
            "captions_per_s": took["captions"] / seconds,
            "waiting_share": took["waited"] / seconds,
            "device": torch.cuda.get_device_name() if self.job.compute.gpu else "cpu",
            "devices": self.runtime.ranks,
            "device_hours": took["device_seconds"] / 3600,
        }

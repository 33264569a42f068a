"""The training loop: one function for a plain process and for a Ray worker. It names no family.

Each step takes one global batch. The loss is the sum over its supervised tokens divided by their number in the whole
global batch, over all micro-batches and workers, so that neither changes the gradient.
"""

import math
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import torch
from deepspeed import DeepSpeedEngine

from m3diff.models import FAMILIES
from m3diff.models.attention import KERNELS, attention_of
from m3diff.models.checkpoint import CheckpointError, save_checkpoint, verify_manifest
from m3diff.models.device import Device
from m3diff.models.family import Family, PairProcessor, Settings
from m3diff.models.tuning import TrainableGroup, parameter_counts, prepare, trainable_groups, unwrapped
from m3diff.records.errors import DataError
from m3diff.settings.compute import Compute
from m3diff.settings.section import ParamsError
from m3diff.stages.train.arithmetic import Work, describe, measure, mfu, peak_flops, progress_line
from m3diff.stages.train.batches import Loader, MicroBatch, Schedule
from m3diff.stages.train.check import check_packing
from m3diff.stages.train.contribution import ModuleContribution, update_ratios
from m3diff.stages.train.curve import Curve, columns
from m3diff.stages.train.disk import full_disk_explained, require_room
from m3diff.stages.train.engine import (
    SCHEDULES,
    accumulation,
    apply_step,
    build_engine,
    delayed_steps,
    set_learning_rates,
    warmup_steps,
)
from m3diff.stages.train.generation import require_newest
from m3diff.stages.train.hours import Spent, read_spent, write_spent
from m3diff.stages.train.job import CURVES, Job, Runtime
from m3diff.stages.train.loss import sum_over_ranks, token_loss
from m3diff.stages.train.params import Train
from m3diff.stages.train.retry import DivergedError
from m3diff.stages.train.samples import read_samples, read_training_samples
from m3diff.stages.train.state import (
    BEST,
    NEWEST,
    Writer,
    checkpoint_to_export,
    checkpoints,
    latest_valid_checkpoint,
    load_state,
    read_validation,
    save_state,
    step_of,
    trained_names,
    write_validation,
)
from m3diff.stages.train.stopping import StoppedError, is_asked_to_stop
from m3diff.stages.train.validation import Validation, named

LOGGED_STEPS = 20


@dataclass
class Run:
    """What the functions of the loop share."""

    job: Job
    runtime: Runtime
    family: Family
    engine: DeepSpeedEngine
    processor: PairProcessor
    groups: list[TrainableGroup]
    schedule: Schedule
    loader: Loader
    validation: Validation
    contribution: ModuleContribution
    curve: Curve
    parameters: dict[str, int]
    trained: frozenset[str]  # names in the engine's module
    device: Device
    writer: Writer
    seconds: float = 0.0
    waited: float = 0.0
    captions: int = 0  # of this process, for its speed
    rates: dict[str, float] = field(default_factory=dict)
    earlier: Spent = field(default_factory=Spent)  # by other attempts


def run_loop(job: Job, runtime: Runtime) -> dict[str, Any]:
    """Train to the end and, on the first worker, write `out/checkpoint` and `out/curves.csv`; returns the figures."""
    run = start(job, runtime)
    with run.writer:
        return to_the_end(run)


def to_the_end(run: Run) -> dict[str, Any]:
    """`run_loop` from where the run stands."""
    job, runtime = run.job, run.runtime
    work = announce(run)
    see_room(run)
    run.earlier = read_spent(job.run_dir)
    done = resume(run)
    check(run)
    stream = run.loader.stream(run.schedule, runtime.rank, done)
    peak = peak_flops(torch.cuda.get_device_name() if job.compute.gpu else "", job.cfg.precision)
    started = time.monotonic()
    for step in range(done, run.schedule.steps):
        before = time.monotonic()
        batches = next(stream)
        run.waited += time.monotonic() - before
        train_step(run, step, batches)
        run.seconds = time.monotonic() - started
        log_step(run, work, step + 1, step + 1 - done, peak)
        if is_stopped(run):
            end_with_checkpoint(run, step + 1)
        if is_checkpoint(step + 1, run.schedule.steps, job.compute.checkpoint_every_steps):
            validate(run, save(run, step + 1))
            warn(run)
    run.seconds = time.monotonic() - started
    exported = export(run)
    return figures(run, exported)


def start(job: Job, runtime: Runtime) -> Run:
    """Model, engine, schedule and what is validated."""
    cfg, compute = job.cfg, job.compute
    torch.set_num_threads(compute.cpus_per_worker)
    kernel = attention_of(compute.attention, compute.gpu, cfg.max_captions_per_sequence)
    device = Device(compute.gpu, cfg.precision, kernel)
    family = FAMILIES[job.model.family]
    model, processor = prepare_model(cfg, job.model, compute, family, job.weights)
    groups = trainable_groups(model, family, job.model)
    parameters = parameter_counts(model, family)
    engine = build_engine(cfg, compute, model.to(device.torch), groups, runtime.ranks)
    samples = read_training_samples(job.mixture, job.run_dir, job.datasets)
    val = read_samples(job.mixture / "val", job.run_dir, job.datasets)
    schedule = Schedule(
        samples=samples,
        max_captions=cfg.max_captions_per_sequence,
        seed=cfg.seed,
        global_batch=cfg.global_batch,
        micro_batch=compute.micro_batch,
        epochs=cfg.epochs,
        ranks=runtime.ranks,
    )
    place = (runtime.rank, runtime.ranks)
    validation = Validation(val, processor, family, compute, cfg.seed, place, device)
    augment = partial(family.augment, job.model) if family.augment else None
    loader = Loader(samples, processor, threads=compute.cpus_per_worker, device=device, augment=augment)
    contribution = ModuleContribution(family, job.model, runtime.ranks)
    curve = Curve(columns(family.parts, contribution.names, validation.datasets))
    return Run(
        job,
        runtime,
        family,
        engine,
        processor,
        groups,
        schedule,
        loader,
        validation,
        contribution,
        curve,
        parameters,
        trained_names(engine.module, groups),
        device,
        Writer(partial(require_newest, job.run_dir, job.generation)),
    )


def prepare_model(
    cfg: Train, settings: Settings, compute: Compute, family: Family, weights: Path | None = None
) -> tuple[Any, PairProcessor]:
    """The base, or the `weights` of the phase before, with LoRA adapters and, where it has none yet, a new module, from
    the seed; and its processor.

    Raises:
        DataError: the weights of the phase before are not whole.
        ParamsError: the base, the settings and `compute` cannot be together.
    """
    torch.manual_seed(cfg.seed)
    if weights is not None:
        see_weights(weights)
    folder = weights or cfg.base
    dtype = Device(compute.gpu, cfg.precision).dtype
    try:
        model = family.load_base(folder, settings, dtype, KERNELS)
        adapted = prepare(model, family, settings)
        family.fuse(model, compute.activation_checkpointing)
    except ValueError as error:
        raise ParamsError(f"train: models.{cfg.model} on train.base {cfg.base}: {error}") from error
    return adapted.train(), family.load_processor(folder, model.config)


def see_weights(folder: Path) -> None:
    """Raises DataError where the output of the phase before is damaged."""
    try:
        verify_manifest(folder)
    except CheckpointError as error:
        fault = str(error).partition(";")[0]
        raise DataError(f"{fault}; run again, which writes the alignment's output anew") from error


def announce(run: Run) -> Work:
    """Print what the run comes to."""
    job = run.job
    micro_batches = accumulation(job.cfg, job.compute, run.runtime.ranks)
    config = unwrapped(run.engine.module).config
    work = measure(run.schedule, run.loader, micro_batches, run.family, config, job.model)
    for line in describe(work, run.schedule, run.parameters):
        run.runtime.say(line)
    return work


def see_room(run: Run) -> None:
    """See that the disk has room for the checkpoints; raises NotWrittenError on the first worker, which writes them."""
    job = run.job
    if run.runtime.rank == 0:
        kept = NEWEST + (BEST if job.compute.caption_val_pairs else 0)
        require_room(job.run_dir, run.parameters["trainable"], kept, len(checkpoints(job.run_dir)))


def save(run: Run, step: int) -> Path:
    """The folder of the checkpoint after `step` steps, which is being written, and after it what the run took."""
    run_dir, rank = run.job.run_dir, run.runtime.rank
    folder = save_state(run.engine, run.trained, run_dir, step, rank, run.curve, run.writer)
    if rank == 0:
        run.writer.submit(write_spent, run_dir, spent(run))
    return folder


def spent(run: Run) -> Spent:
    """What the run took, with earlier attempts."""
    return run.earlier.plus(run.seconds, run.waited, run.runtime.ranks, run.captions)


def is_stopped(run: Run) -> bool:
    """Whether the run was asked to end; every worker gets the same answer."""
    asked = run.runtime.rank == 0 and is_asked_to_stop(run.job.run_dir)
    return bool(sum_over_ranks(torch.tensor(float(asked)), run.runtime.ranks))


def end_with_checkpoint(run: Run, step: int) -> NoReturn:
    """Raises StoppedError when the checkpoint after `step` steps is written. A run that goes on from it validates it
    only where an undisturbed one would."""
    save(run, step)
    run.writer.finish()
    raise StoppedError(
        f"asked to end (SIGTERM) at step {step}, whose checkpoint is written: run again to go on from it"
    )


def resume(run: Run) -> int:
    """Restore the newest valid checkpoint; the number of steps done, 0 without one."""
    newest = latest_valid_checkpoint(run.job.run_dir) if run.runtime.rank == 0 else None
    folder = run.runtime.agree(newest)
    if folder is None:
        run.runtime.say(f"no checkpoint of this run to go on from, so it starts at step 1 of {run.schedule.steps}")
        return 0
    done = load_state(run.engine, folder)
    run.curve.read(folder / CURVES)
    run.runtime.say(f"resumed after step {done} of {run.schedule.steps}")
    scores = run.runtime.agree(read_validation(folder))
    if scores is None:
        if is_checkpoint(done, run.schedule.steps, run.job.compute.checkpoint_every_steps):
            validate(run, folder)
    else:
        run.curve.fill({name: value for name, value in scores.items() if name in run.curve.names})
    return done


def check(run: Run) -> None:
    """See that packing leaves the loss as it is; raises PackingError."""
    said = check_packing(run.engine, run.schedule, run.loader, run.processor, run.device)
    if said:
        run.runtime.say(said)


def train_step(run: Run, step: int, batches: list[MicroBatch]) -> None:
    """Step number `step` (from 0) and its row in the curves."""
    cfg, schedule = run.job.cfg, run.schedule
    factor = SCHEDULES[cfg.schedule]
    rates = [group.lr * factor(step, schedule.steps, cfg.warmup_share, group.delay) for group in run.groups]
    set_learning_rates(run.engine, rates)
    of_parts = {f"lr_{part}": rate for group, rate in zip(run.groups, rates, strict=True) for part in group.parts}
    run.rates = {name: of_parts[name] for name in run.curve.names if name in of_parts}
    measured = run.contribution.measured(run.engine.module, is_measured(step + 1, schedule.steps))
    with measured as module:
        loss, norm = take_step(run.engine, batches, run.processor, run.device, run.runtime.ranks)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        told = ", ".join(f"{name} {rate:.3g}" for name, rate in run.rates.items())
        raise DivergedError(
            f"step {step + 1}: the loss is {loss:.6g} and the gradient's norm {norm:.6g} with {told}: training "
            "diverged; lower the model's rates or raise train.warmup_share"
        )
    run.captions += schedule.captions(step, step + 1)
    epoch = round((step + 1) / schedule.steps_per_epoch, 4)
    run.curve.add({"step": step + 1, "epoch": epoch, "loss": loss, "grad_norm": norm, **run.rates, **module()})


def take_step(
    engine: DeepSpeedEngine,
    batches: list[MicroBatch],
    processor: PairProcessor,
    device: Device,
    ranks: int,
) -> tuple[float, float]:
    """One optimizer step over a global batch: its mean loss per supervised token, and the gradient's norm."""
    tokens = sum_over_ranks(torch.tensor(float(sum(batch.supervised_tokens for batch in batches))), ranks)
    total, norm = torch.zeros((), device=device.torch), 0.0  # stays there: reading it would wait for the GPU
    for number, batch in enumerate(batches, start=1):
        loss = token_loss(engine, batch, processor, device)
        total += loss.detach()
        engine.backward(loss * (ranks * len(batches)) / float(tokens))  # DeepSpeed divides by both
        if number < len(batches):
            engine.step()
        else:
            norm = apply_step(engine)
    return float(sum_over_ranks(total.cpu(), ranks) / tokens), norm


def log_step(run: Run, work: Work, step: int, own_steps: int, peak: float | None) -> None:
    """A line every LOGGED_STEPS steps; `own_steps` were taken by this process."""
    steps = run.schedule.steps
    if not is_logged(step, steps):
        return
    pace = run.seconds / own_steps
    used = mfu(work, run.schedule.global_batch, pace, peak, run.runtime.ranks)
    values = {name: run.curve.last(name) for name in ("loss", "grad_norm")}
    updates = list(update_ratios(run.contribution.latest(run.curve)).values())
    run.runtime.say(progress_line(step, steps, values, updates, run.rates, run.captions / run.seconds, pace, used))


def is_logged(step: int, steps: int) -> bool:
    """Whether a line says what `step` done steps came to: every so many, and the last."""
    return step % LOGGED_STEPS == 0 or step == steps


def is_measured(step: int, steps: int) -> bool:
    """Whether the module's contribution is measured in the last of `step` steps: where it is logged, and as the run
    finds it, in the first."""
    return step == 1 or is_logged(step, steps)


def warn(run: Run) -> None:
    """Say at a checkpoint what is wrong with what trains."""
    for warning in warnings(run):
        run.runtime.say(f"warning: {warning}")


def warnings(run: Run) -> list[str]:
    steps = run.schedule.steps
    begun = max(delayed_steps(steps, group.delay) for group in run.groups)
    found = run.contribution.warning(run.curve, steps, begun + warmup_steps(steps, run.job.cfg.warmup_share))
    return [found] if found else []


def is_checkpoint(step: int, steps: int, every: int) -> bool:
    """Whether a checkpoint follows `step` done steps: every so many, and the last."""
    return step == steps or step % every == 0


def is_captioned(step: int, steps: int, compute: Compute) -> bool:
    """Whether the checkpoint after `step` is captioned: every so many checkpoints, and the last."""
    if not compute.caption_val_pairs:
        return False
    return step == steps or step % (compute.checkpoint_every_steps * compute.caption_every_checkpoints) == 0


def validate(run: Run, folder: Path) -> None:
    """Score the state that `folder` holds, and write the scores beside it and into the curves, which whoever follows
    the training finds in `run_dir`."""
    scores = run.validation.losses(run.engine)
    if is_captioned(step_of(folder), run.schedule.steps, run.job.compute):
        scores |= run.validation.cider(run.engine)
    run.curve.fill(scores)
    if run.runtime.rank == 0:
        run.writer.submit(write_validation, folder, scores)
        run.writer.submit(run.curve.copy().write, run.job.run_dir / CURVES)
    if scores:
        run.runtime.say(f"validation after step {step_of(folder)}{named(scores)}")


def export(run: Run) -> int:
    """Write the checkpoint that `train.export` asks for; the step that it is from. Every worker calls it."""
    job, rank = run.job, run.runtime.rank
    run.writer.finish()
    chosen = checkpoint_to_export(job.run_dir, job.cfg.export) if rank == 0 else None
    folder = run.runtime.agree(chosen)
    if folder is not None:
        load_state(run.engine, folder)
    partitioned = [p for p in run.engine.module.parameters() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
        if rank == 0:
            write_checkpoint(run)
            run.curve.write(job.out / CURVES)
    return run.schedule.steps if folder is None else step_of(folder)


def write_checkpoint(run: Run) -> None:
    """Write `out/checkpoint` from the engine's weights, which are whole here."""
    require_newest(run.job.run_dir, run.job.generation)
    job, model, folder = run.job, run.engine.module, run.job.out / "checkpoint"
    with full_disk_explained(folder, sum(parameter.nbytes for parameter in model.parameters())):
        save_checkpoint(
            model,
            run.processor,
            folder,
            family=job.model.family,
            base=job.cfg.base,
            base_sha256=job.base_sha256,
        )


def figures(run: Run, exported: int) -> dict[str, Any]:
    """What the report says, and what the run took over all its attempts."""
    curve, took = run.curve, spent(run)
    seconds = max(took.seconds, 1e-9)
    return {
        "samples": len(run.schedule.samples),
        "captions": run.schedule.captions(0, run.schedule.steps),
        "steps": run.schedule.steps,
        "parameters": run.parameters,
        "loss": curve.last("loss"),
        "val_loss": curve.last("val_loss"),
        "val_loss_by_dataset": {name: curve.last(f"val_loss_{name}") for name in run.validation.datasets},
        "val_cider": curve.last("val_cider"),
        "exported_step": exported,
        "module": run.contribution.latest(curve),
        "warnings": warnings(run),
        "seconds": took.seconds,
        "captions_per_s": took.captions / seconds,
        "waiting_share": took.waited / seconds,
        "device": torch.cuda.get_device_name() if run.job.compute.gpu else "cpu",
        "devices": run.runtime.ranks,
        "device_hours": took.device_seconds / 3600,
    }

"""The training loop, the same in a plain process and in a Ray worker. It names no family.

Validation at a checkpoint takes the loss of each dataset, and captions with their CIDEr. It touches no random state.
Its pairs are drawn from the whole validation split of each dataset, by the seed, so that a dataset's loss does not hang
on which dataset or scene comes first, and are dealt to the workers.
"""

import json
import math
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from m3diff.images.open import load_image
from m3diff.models import FAMILIES
from m3diff.models.checkpoint import save_checkpoint
from m3diff.models.device import Device
from m3diff.models.family import MODULE_UPDATE_RATIO, Family, Settings
from m3diff.models.fused import KERNELS, attention_of
from m3diff.models.generation import Captioner
from m3diff.models.processing import PairProcessor
from m3diff.models.tuning import meta_model, parameter_counts, prepare, trainable_groups, unwrapped
from m3diff.records.files import write_atomic
from m3diff.scoring.characters import spaced
from m3diff.settings.compute import Compute, gpu_of
from m3diff.settings.section import ParamsError
from m3diff.stages.train import batches, engine, state
from m3diff.stages.train.job import CURVES, STOP, Job, Runtime, StoppedError, require_newest
from m3diff.stages.train.packing import pack
from m3diff.stages.train.params import Train

LOGGED_STEPS = 20
# In the run's folder: what all attempts took up to the newest checkpoint: seconds of steps and validation, those of
# them that waited for data, those of every worker's device, and captions seen, again after a resume too
HOURS = "hours.json"

COUNTED = 2048  # sequences whose tokens are counted; their mean stands for a longer epoch

# Half the relative distance of neighbouring numbers in bf16: a feature in bf16 to which less is added stays the same.
# A module in use is far from it: the embedded one starts at 0.5 and ends there.
NOTHING = 2.0**-8

MAX_NEW_TOKENS, CAPTION_BATCH = 64, 32  # of validation


def prepare_model(
    cfg: Train, settings: Settings, compute: Compute, family: Family, weights: Path | None = None
) -> tuple[Any, PairProcessor]:
    """Return the base, or the `weights` of the phase before, with LoRA adapters and, where it has none yet, a new
    module, from the seed; and its processor.

    Raises:
        ParamsError: the base, the settings and `compute` cannot be together.
    """
    torch.manual_seed(cfg.seed)
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
        self.job, self.runtime, most = job, runtime, cfg.max_captions_per_sequence
        self.device = Device(compute.gpu, cfg.precision, attention_of(compute.attention, compute.gpu, most))
        self.family = FAMILIES[job.model.family]
        model, self.processor = prepare_model(cfg, job.model, compute, self.family, job.weights)
        self.groups = trainable_groups(model, self.family, job.model)
        self.parameters = parameter_counts(model, self.family)
        self.engine = engine.build_engine(cfg, compute, model.to(self.device.torch), self.groups)
        samples = batches.read_training_samples(job.mixture, job.datasets)
        self.schedule = batches.Schedule(
            samples, most, cfg.seed, cfg.global_batch, compute.micro_batch, cfg.epochs, runtime.ranks
        )
        val = batches.read_samples(job.mixture / "val", job.datasets)
        self.validation = Validation(job, val, runtime, self.processor, self.device)
        augment = partial(self.family.augment, job.model) if self.family.augment else None
        self.loader = batches.Loader(samples, self.processor, compute.cpus_per_worker, self.device, augment)
        self.module = self.family.contribution.names(job.model) if self.family.contribution else ()
        rates = [f"lr_{part}" for part in self.family.parts]
        losses = ["val_loss", *(f"val_loss_{dataset}" for dataset in self.validation.datasets)]
        self.curve = state.Curve(["step", "epoch", "loss", *rates, "grad_norm", *self.module, *losses, "val_cider"])
        self.rates: dict[str, float] = {}
        hours, none = job.run_dir / HOURS, dict.fromkeys(("seconds", "waited", "captions", "device_seconds"), 0.0)
        self.took: dict[str, float] = json.loads(hours.read_text()) if hours.is_file() else none

    def run(self) -> dict[str, Any]:
        """Announce the run, take the steps that are left and, on the first worker, write `out/checkpoint` and
        `out/curves.csv`; return the figures."""
        schedule = self.schedule
        flops = self.announce()
        done = self.resume()
        stream = self.loader.stream(schedule, self.runtime.rank, done)
        began = since = time.monotonic()
        for step in range(done, schedule.steps):
            before = time.monotonic()
            micro = next(stream)
            self.took["waited"] += time.monotonic() - before
            self.step(step, micro)
            since = self.spend(since)
            self.log(step + 1, (since - began) / (step + 1 - done), flops)
            self.end_if_asked(step + 1)
            if self.is_checkpoint(step + 1):
                self.validate(self.save(step + 1))
                if warning := self.warning():
                    self.runtime.say(f"warning: {warning}")
        self.spend(since)
        return self.figures(self.export())

    def announce(self) -> float:
        """Print what the run comes to; return the FLOPs of a step."""
        schedule, counts, accumulated = self.schedule, self.parameters, self.engine.gradient_accumulation_steps()
        model = meta_model(unwrapped(self.engine.module).config, self.family, self.job.model)
        sequences = schedule.epoch(0)
        packed = [pack([self.loader.pairs_of(rows)]) for rows in sequences[:COUNTED]]
        tokens, supervised = np.mean([(each.tokens, len(each.labels)) for each in packed], axis=0).tolist()
        flops = schedule.global_batch * sum(term.total for term in self.family.flops(model, tokens, supervised))
        trains = ", ".join(f"{part} {n:,}" for part, n in counts.items() if part not in ("trainable", "frozen") and n)
        for line in (
            f"{schedule.global_batch} sequences a step = {schedule.micro_batch} micro-batch x {accumulated} "
            f"accumulated x {schedule.ranks} worker(s)",
            f"{len(schedule.samples.pairs()):,} pairs, {len(schedule.samples):,} references in {len(sequences):,} "
            "sequences an epoch",
            f"about {tokens * len(sequences):,.0f} tokens an epoch ({tokens:.1f} a sequence, {supervised:.1f} of them "
            "supervised)",
            f"{schedule.epochs:g} epoch(s) x {schedule.steps_per_epoch:,} steps = {schedule.steps:,} steps",
            f"{counts['trainable']:,} parameters train ({trains}), {counts['frozen']:,} are frozen",
            f"{flops / 1e12:.3g} TFLOP a step",
        ):
            self.runtime.say(line)
        return flops

    def spend(self, since: float) -> float:
        """Count the time since then to what the run took; return the present time."""
        now = time.monotonic()
        self.took["seconds"] += now - since
        self.took["device_seconds"] += (now - since) * self.runtime.ranks
        return now

    def is_checkpoint(self, step: int) -> bool:
        """Return whether a checkpoint follows `step` done steps: every so many, and the last."""
        return step == self.schedule.steps or step % self.job.compute.checkpoint_every_steps == 0

    def resume(self) -> int:
        """Restore the newest valid checkpoint; return the number of steps done, 0 without one."""
        folder = self.runtime.agree(state.latest_valid_checkpoint(self.job.run_dir) if self.runtime.rank == 0 else None)
        steps = self.schedule.steps
        if folder is None:
            self.runtime.say(f"no checkpoint of this run to go on from, so it starts at step 1 of {steps}")
            return 0
        done = state.load_state(self.engine, folder)
        self.curve.read(folder / CURVES)
        self.runtime.say(f"resumed after step {done} of {steps}")
        scores = self.runtime.agree(state.read_validation(folder))
        if scores is not None:
            self.curve.fill({name: value for name, value in scores.items() if name in self.curve.names})
        elif self.is_checkpoint(done):
            self.validate(folder)
        return done

    def step(self, step: int, micro: list[batches.MicroBatch]) -> None:
        """Take step number `step` (from 0) and add its row to the curves.

        The module's contribution is measured in the first step, as the run finds it, and where a line is logged. It is
        taken over the whole global batch, of all workers, so that how a step is dealt changes no number; sequences that
        only fill up a batch count too. It belongs to the forward of its step, as the loss does.
        """
        cfg, schedule, measures = self.job.cfg, self.schedule, self.family.contribution
        rates = [group.lr * engine.rate_factor(cfg, step, schedule.steps, group.delay) for group in self.groups]
        by_part = {f"lr_{part}": rate for group, rate in zip(self.groups, rates, strict=True) for part in group.parts}
        self.rates = {name: by_part[name] for name in self.curve.names if name in by_part}
        measured = measures if self.module and (step == 0 or self.is_logged(step + 1)) else None
        module: dict[str, float] = {}
        with measured.recorded(unwrapped(self.engine.module)) if measured else nullcontext([]) as recorded:
            loss, norm = engine.take_step(self.engine, micro, self.processor, self.device, rates, self.runtime.ranks)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            with_rates = ", ".join(f"{name} {rate:.3g}" for name, rate in self.rates.items())
            raise ParamsError(
                f"step {step + 1}: the loss is {loss:.6g} and the gradient's norm {norm:.6g} with {with_rates}: "
                "training diverged; lower the model's rates or raise train.warmup_share"
            )
        if measured:
            sums = engine.sum_over_ranks(torch.stack(recorded).double().sum(dim=0).cpu(), self.runtime.ranks)
            module = dict(zip(self.module, measured.figures(sums), strict=True))
        self.took["captions"] += sum(len(rows) for rows in schedule.global_sequences(step))
        epoch = round((step + 1) / schedule.steps_per_epoch, 4)
        self.curve.add({"step": step + 1, "epoch": epoch, "loss": loss, "grad_norm": norm, **self.rates, **module})

    def is_logged(self, step: int) -> bool:
        """Return whether a line is printed after `step` done steps: every so many, and the last."""
        return step % LOGGED_STEPS == 0 or step == self.schedule.steps

    def log(self, step: int, pace: float, flops: float) -> None:
        """Print the line of `step` done steps, where it is due: `step 20/1810 (1.1%)  loss 1.2345  grad_norm 2.1000
        module_update_ratio 0.21  lr_vision 4.00e-05  85 captions/s  MFU 41%  ETA 0:11:20`, in one line.

        Args:
            pace: seconds a step.
            flops: of one step. Their share of the devices' peak is the model FLOPs utilisation.
        """
        if not self.is_logged(step):
            return
        curve, steps, gpu = self.curve, self.schedule.steps, self.job.compute.gpu
        peak = peak_flops(torch.cuda.get_device_name() if gpu else "", self.job.cfg.precision)
        ratios = update_ratios(curve.latest(self.module)).values()
        parts = [f"step {step}/{steps} ({step / steps:.1%})"]
        parts += [f"{name} {curve.last(name):.4f}" for name in ("loss", "grad_norm")]
        parts += [" ".join([MODULE_UPDATE_RATIO, *(f"{ratio:.2g}" for ratio in ratios)])] if ratios else []
        parts += [f"{name} {rate:.2e}" for name, rate in self.rates.items()]
        parts.append(f"{self.schedule.captions(step) / step / pace:.0f} captions/s")
        parts += [f"MFU {flops / pace / (peak * self.runtime.ranks):.0%}"] if peak else []
        parts.append(f"ETA {timedelta(seconds=round((steps - step) * pace))}")
        self.runtime.say("  ".join(parts))

    def end_if_asked(self, step: int) -> None:
        """Raise StoppedError, once the checkpoint after `step` steps is written, where the run was asked to end; all
        workers agree. A run that goes on from it validates it only where an undisturbed one would."""
        asked = self.runtime.rank == 0 and (self.job.run_dir / STOP).exists()
        if engine.sum_over_ranks(torch.tensor(float(asked)), self.runtime.ranks):
            self.save(step)
            raise StoppedError(
                f"asked to end (SIGTERM) at step {step}, whose checkpoint is written: run again to go on from it"
            )

    def writes(self) -> bool:
        """Return whether this worker writes, which is the first; raise SupersededError where a later attempt does."""
        if self.runtime.rank == 0:
            require_newest(self.job.run_dir, self.job.generation)
        return self.runtime.rank == 0

    def save(self, step: int) -> Path:
        """Write the checkpoint after `step` steps, and after it what the run took; return its folder."""
        run_dir = self.job.run_dir
        tensors = state.whole_state(self.engine, keep=self.runtime.rank == 0)
        if self.writes():
            state.write_state(run_dir, step, tensors, self.curve)
            write_atomic(run_dir / HOURS, json.dumps(self.took) + "\n")
        return state.folder_of(run_dir, step)

    def validate(self, folder: Path) -> None:
        """Score the state that `folder` holds; write the scores next to it and into the curves, in `run_dir` too.

        Every so many checkpoints, and the last, are captioned.
        """
        step, compute = state.step_of(folder), self.job.compute
        scores = self.validation.losses(self.engine)
        every = compute.checkpoint_every_steps * compute.caption_every_checkpoints
        if compute.caption_val_pairs and (step == self.schedule.steps or step % every == 0):
            scores |= self.validation.cider(self.engine)
        self.curve.fill(scores)
        if self.writes():
            write_atomic(folder / state.VALIDATION, json.dumps(scores) + "\n")
            self.curve.write(self.job.run_dir / CURVES)
        if scores:
            named = "".join(f"  {name} {value:.4f}" for name, value in scores.items())
            self.runtime.say(f"validation after step {step}{named}")

    def warning(self) -> str | None:
        """Return a warning where the module changes nothing after the last step of any part's warm-up."""
        latest, steps, contribution = self.curve.latest(self.module), self.schedule.steps, self.family.contribution
        ratios = update_ratios(latest)
        delay = max(round(group.delay * steps) for group in self.groups)
        warm = delay + engine.warmup_steps(steps, self.job.cfg.warmup_share)
        if not contribution or not ratios or max(ratios.values()) >= NOTHING or latest["step"] <= warm:
            return None
        found = ", ".join(f"{name} {value:.2g}" for name, value in ratios.items())
        return (
            f"the module changes nothing: at step {latest['step']:.0f} of {steps}, after the warm-up, each of its "
            f"updates is under {NOTHING:.2g} of the features that it changes ({found}), less than bf16 "
            f"resolves, so the model captions as its base would without the module. {contribution.remedy}"
        )

    def export(self) -> int:
        """Write the checkpoint that `train.export` asks for; return the step that it is from. Every worker calls it."""
        job, model, rank = self.job, self.engine.module, self.runtime.rank
        folder = self.runtime.agree(state.checkpoint_to_export(job.run_dir, job.cfg.export) if rank == 0 else None)
        if folder is not None:
            state.load_state(self.engine, folder)
        partitioned = [p for p in model.parameters() if hasattr(p, "ds_id")]
        with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
            if self.writes():
                base: dict[str, Any] = {"base": job.cfg.base, "base_sha256": job.base_sha256}
                save_checkpoint(model, self.processor, job.out / "checkpoint", family=job.model.family, **base)
                self.curve.write(job.out / CURVES)
        return self.schedule.steps if folder is None else state.step_of(folder)

    def figures(self, exported: int) -> dict[str, Any]:
        """Return the fields of the report, and what the run took over all its attempts."""
        curve, took, steps, counts = self.curve, self.took, self.schedule.steps, self.parameters
        seconds, latest = max(took["seconds"], 1e-9), curve.latest(self.module)

        def known(column: str) -> float | None:
            value = curve.last(column)
            return None if math.isnan(value) else round(value, 5)

        return {
            "rows_in": len(self.schedule.samples),
            "rows_out": self.schedule.captions(steps),
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
            "warnings": [warning] if (warning := self.warning()) else [],
            "seconds": took["seconds"],
            "captions_per_s": took["captions"] / seconds,
            "waiting_share": took["waited"] / seconds,
            "device": torch.cuda.get_device_name() if self.job.compute.gpu else "cpu",
            "devices": self.runtime.ranks,
            "device_hours": took["device_seconds"] / 3600,
        }


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of one device, None where it is not known. Kinds that differ in memory have one peak."""
    gpu = gpu_of(device_name)
    return gpu.bf16_tflops * 1e12 if gpu and precision == "bf16" else None


def update_ratios(values: Mapping[str, float]) -> dict[str, float]:
    """Return the sizes of the module's updates among named numbers."""
    return {name: value for name, value in values.items() if name.startswith(MODULE_UPDATE_RATIO)}


def sample_pairs(samples: batches.Samples, count: int, seed: int) -> dict[str, list[np.ndarray]]:
    """Return `count` pairs of each dataset (all where it has fewer), as row numbers in the split's order, by dataset.

    A smaller count is a part of a larger one, and a dataset's choice does not depend on the other datasets.
    """
    if not count:
        return {}
    by_dataset: dict[str, list[np.ndarray]] = {}
    for rows in samples.pairs():
        by_dataset.setdefault(samples.value("dataset", rows[0]), []).append(rows)
    chosen = {}
    for dataset, pairs in sorted(by_dataset.items()):
        order = np.random.default_rng([seed, zlib.crc32(dataset.encode())]).permutation(len(pairs))
        chosen[dataset] = [pairs[number] for number in sorted(order[:count])]
    return chosen


class Validation:
    """The validated pairs, chosen once: those of `datasets` with a loss, and those that are captioned.

    Methods take DeepSpeed's engine around the model.
    """

    def __init__(
        self, job: Job, samples: batches.Samples, runtime: Runtime, processor: PairProcessor, device: Device
    ) -> None:
        compute, seed = job.compute, job.cfg.seed
        self.samples, self.processor, self.device = samples, processor, device
        self.family, self.rank, self.ranks = FAMILIES[job.model.family], runtime.rank, runtime.ranks
        self.alike = compute.zero_stage == 3  # a forward brings weights together: every worker takes as many
        self.loader = batches.Loader(samples, processor, threads=compute.cpus_per_worker, device=device)
        chosen = sample_pairs(samples, compute.val_pairs, seed)
        self.datasets = list(chosen)
        dealt = self._dealt(list(chosen.values()), compute.micro_batch)
        self.batches = [(number, self.loader.read(batch)) for number, batch in dealt]
        self.captioned = list(sample_pairs(samples, compute.caption_val_pairs, seed).values())

    def _dealt(self, datasets: list[list[np.ndarray]], size: int) -> list[tuple[int, list[batches.Weighted]]]:
        """Return this worker's (number of the dataset, sequences); with weight 0 where others have a batch more."""
        dealt: list[tuple[int, list[batches.Weighted]]] = []
        for number, pairs in enumerate(datasets):
            dealt += [(number, [(rows, 1) for rows in pairs[at : at + size]]) for at in range(0, len(pairs), size)]
        while len(dealt) % self.ranks:
            number, first = dealt[0]
            dealt.append((number, [(rows, 0) for rows, _ in first]))
        return dealt[self.rank :: self.ranks]

    @torch.no_grad()
    def losses(self, model: Any) -> dict[str, float]:
        """Return val_loss, the mean per supervised token over all datasets, and val_loss_<dataset>; nothing without
        pairs."""
        if not self.datasets:
            return {}
        sums = torch.zeros(len(self.datasets), 2, dtype=torch.float64)
        model.eval()
        for number, batch in self.batches:
            whole = batches.complete(batch, self.device, self.processor.pad_id)
            loss = engine.token_loss(model, whole, self.processor, self.device)
            sums[number] += torch.tensor([float(loss), batch.supervised_tokens], dtype=torch.float64)
        model.train()
        total, tokens = engine.sum_over_ranks(sums, self.ranks).T.tolist()
        each = {f"val_loss_{name}": total[n] / tokens[n] for n, name in enumerate(self.datasets)}
        return {"val_loss": sum(total) / sum(tokens), **each}

    def cider(self, model: Any) -> dict[str, float]:
        """Return val_cider, the mean over the datasets of `cider` of greedy captions; nothing without pairs."""
        if not self.captioned:
            return {}
        captions = self._captions(model, [int(rows[0]) for pairs in self.captioned for rows in pairs])
        scores = []
        for pairs in self.captioned:
            references = [[self.samples.value("reference", row) for row in rows] for rows in pairs]
            scores.append(cider(references, [captions[int(rows[0])] for rows in pairs]))
        return {"val_cider": float(np.mean(scores))}

    def _captions(self, model: Any, pairs: list[int]) -> dict[int, str]:
        """Return captions by row number. A batch holds one question: no padding, so no pair changes another's."""
        mine = pairs if self.alike else pairs[self.rank :: self.ranks]
        by_question: dict[str, list[int]] = {}
        for row in mine:
            by_question.setdefault(self.samples.value("question", row), []).append(row)
        model.eval()
        captioner = Captioner(unwrapped(model.module), self.processor, self.family, MAX_NEW_TOKENS)
        captions: dict[int, str] = {}
        for question, rows in by_question.items():
            for at in range(0, len(rows), CAPTION_BATCH):
                batch = rows[at : at + CAPTION_BATCH]
                opened = [(load_image(*one), load_image(*other)) for one, other in map(self.samples.images, batch)]
                captions |= zip(batch, captioner.caption(opened, question), strict=True)
        model.train()
        if self.alike or self.ranks == 1:
            return captions
        parts: list[Any] = [None] * self.ranks
        dist.all_gather_object(parts, captions)
        return {row: caption for part in parts for row, caption in part.items()}


def cider(references: Sequence[Sequence[str]], predictions: Sequence[str]) -> float:
    """Return CIDEr-D of one corpus on lower-cased word tokens, without Java.

    It is not the reported CIDEr: that uses the PTB tokenizer, all references of a pair and the test split. It serves to
    compare checkpoints of one run.
    """
    from pycocoevalcap.cider.cider import Cider

    def words(text: str) -> str:
        # a script without spaces between words would make one token of a whole caption
        return " ".join(re.findall(r"\w+", spaced(text.lower())))

    gold = {number: [words(text) for text in texts] for number, texts in enumerate(references)}
    return float(Cider().compute_score(gold, {number: [words(text)] for number, text in enumerate(predictions)})[0])

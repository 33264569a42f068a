"""The training loop, used both in a single process and in Ray workers. It does not depend on the model family."""

import json
import math
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from torch import Tensor

from m3diff.models import FAMILIES
from m3diff.models.checkpoint import save_checkpoint
from m3diff.models.contract import PackedBatch, Processor, ScalesImages
from m3diff.models.device import Device
from m3diff.models.family import MODULE_UPDATE_RATIO, Family, Settings
from m3diff.models.fused import choose_attention, register_kernels
from m3diff.models.masks import pack
from m3diff.models.threads import use_threads
from m3diff.models.tuning import meta_model, parameter_counts, prepare_for_training, trainable_groups, unwrap_model
from m3diff.records.errors import Fault, cause_of, format_count
from m3diff.records.files import write_atomic
from m3diff.records.sample import PAIR
from m3diff.records.schemas import RETENTION
from m3diff.settings.compute import Compute, gpu_of
from m3diff.settings.section import ParamsError
from m3diff.stages.train import batches, engine, state
from m3diff.stages.train.image_figures import measure_images
from m3diff.stages.train.job import (
    CURVES_FILE,
    STOP_FILE,
    Job,
    StoppedError,
    WorkerContext,
    end_if_code_is_wrong,
    name_full_disk,
    require_newest_attempt,
)
from m3diff.stages.train.packing_check import compare_with_separate_passes
from m3diff.stages.train.params import Train
from m3diff.stages.train.sample_checks import check_samples
from m3diff.stages.train.validation import Validation

LOG_EVERY_STEPS = 20

# File in the run's folder with the `Usage` of all attempts up to the newest checkpoint
USAGE_FILE = "hours.json"

# Maximum number of sequences whose tokens are counted before the run. The tokens of an epoch are estimated from the
# mean of these sequences.
COUNTED_SEQUENCES = 2048

# The same number if the images of each sequence must be prepared, because its tokens depend on them. Their images are
# also measured for the log.
COUNTED_SEQUENCES_WITH_IMAGES = 64

# Number of sequences on which the packing is compared with separate passes
CHECKED_SEQUENCES = 2

# Number of images that a sample must have so that a part gets a gradient; 1 for other parts
IMAGES_FOR_GRADIENT = {"module": PAIR, "llm": 0}

# Updates smaller than this share of a bf16 feature do not change the feature: it is half the relative distance between
# neighbouring bf16 numbers. The updates of a trained module are far larger. In the embedded run, the ratio is 0.5 at
# the start and at the end.
NEGLIGIBLE_UPDATE_RATIO = 2.0**-8


@dataclass
class Usage:
    """The time that a run has taken, over all its attempts.

    Attributes:
        seconds: time spent on steps and validation.
        waited: part of `seconds` in which steps waited for their data.
        captions: number of references trained on. A reference that is trained on again after a resume counts again.
        device_seconds: sum of `seconds` over the devices of all workers.
    """

    seconds: float = 0.0
    waited: float = 0.0
    captions: float = 0.0
    device_seconds: float = 0.0

    @classmethod
    def read(cls, path: Path) -> "Usage":
        """Return the usage of earlier attempts, or zeros if no attempt has written a checkpoint."""
        return cls(**json.loads(path.read_text())) if path.is_file() else cls()

    def write(self, path: Path) -> None:
        """Write the usage atomically as JSON, so that a later attempt can `read` it."""
        write_atomic(path, json.dumps(asdict(self)) + "\n")


@dataclass(frozen=True)
class MeanLengths:
    """The mean length of the rows that the family's packing makes of sequences with the same number of images.

    Attributes:
        images: number of images of a sequence.
        share: share of these sequences in all sequences.
        tokens: all tokens of a row, including visual tokens.
        supervised_tokens: tokens of a row that count in the loss.
        rows: number of rows per sequence: 1 if its branches share their prompt.
    """

    images: int
    share: float
    tokens: float
    supervised_tokens: float
    rows: float = 1.0


def prepare_model(
    cfg: Train, settings: Settings, compute: Compute, family: Family, weights: Path | None = None
) -> tuple[Any, Processor]:
    """Return the model to train and its processor.

    The model gets new LoRA adapters. If the loaded folder does not contain the family's module, the layers that the
    family adds to the base, the model also gets a new module. Adapters and module are initialised from the seed.

    Args:
        weights: checkpoint of the previous phase, loaded instead of the base.

    Raises:
        ParamsError: the base is incompatible with the settings or `compute`, or a class of the family lacks a member.
    """
    torch.manual_seed(cfg.seed)
    folder = weights or cfg.base
    dtype = Device(compute.gpu, cfg.precision).dtype
    try:
        model = family.load_base(folder, settings, dtype, register_kernels())
        adapted_model = prepare_for_training(model, family, settings)
        family.fuse(model, compute.activation_checkpointing)
    except ValueError as error:
        raise ParamsError(
            "train.base_does_not_fit", key=f"models.{cfg.model}", base=cfg.base, cause=cause_of(error)
        ) from error
    # weights of a previous phase were saved with the processor of the run
    processor = family.load_processor(folder, model.config, None if weights else settings)
    family.check(settings.family, model, processor)
    return adapted_model.train(), processor


class Training:
    """Runs a phase of a training run on one worker. Holds its model, engine, schedule, validation and curves."""

    def __init__(self, job: Job, worker: WorkerContext) -> None:
        cfg = job.cfg
        compute = job.compute
        use_threads(compute.cpus_per_worker)
        self.job = job
        self.worker = worker
        attention = choose_attention(compute.attention, compute.gpu, cfg.max_captions_per_sequence)
        self.device = Device(compute.gpu, cfg.precision, attention)
        self.family = FAMILIES[job.model.family]

        model, self.processor = prepare_model(cfg, job.model, compute, self.family, job.weights)
        self.groups = trainable_groups(model, self.family, job.model)
        self.parameters = parameter_counts(model, self.family)

        training_samples = batches.read_training_samples(job.mixture, job.datasets)
        validation_samples = batches.read_samples(job.mixture / "val", job.datasets)
        self.schedule = batches.Schedule(
            samples=training_samples,
            max_captions=cfg.max_captions_per_sequence,
            seed=cfg.seed,
            global_batch=cfg.global_batch,
            micro_batch=compute.micro_batch,
            epochs=cfg.epochs,
            ranks=worker.ranks,
        )
        samples_by_split = {"train": training_samples, "val": validation_samples}
        for split, samples in samples_by_split.items():
            check_samples(
                samples, split, job.model.family, self.family.takes, self.processor, cfg.max_tokens, cfg.model
            )
        # Otherwise, predict would refuse these samples after the training
        for split in ("test", RETENTION):
            samples = batches.read_samples(job.mixture / split)
            check_samples(samples, split, job.model.family, self.family.takes, self.processor)
        # The validation split has the question of evaluation, and the training split may have several wordings of it
        self.question = batches.find_usual_question(validation_samples, training_samples)
        self.validation = Validation(job, validation_samples, worker, self.processor, self.device)
        self.packing = self.family.packing()
        augment = partial(self.family.augment, job.model) if self.family.augment else None
        self.loader = batches.Loader(
            training_samples, self.processor, self.packing, compute.cpus_per_worker, self.device, augment=augment
        )

        if self.family.checks_packing:
            self.check_packing(model.to(self.device.torch))
        self.engine = engine.build_engine(cfg, compute, model.to(self.device.torch), self.groups)
        contribution = self.family.contribution
        self.module_columns = contribution.names(job.model) if contribution else ()
        self.curve = state.Curve(self._curve_columns())
        self.rates: dict[str, float] = {}
        self.usage = Usage.read(job.run_dir / USAGE_FILE)

    def check_packing(self, model: Any) -> None:
        """Compare the packing with separate passes on sequences of several samples, before the weights are partitioned.

        Raises:
            ParamsError: the loss or the gradients differ by more than rounding explains.
        """
        first_sequences = self.schedule.epoch(0)[:COUNTED_SEQUENCES]
        # the sort is stable, so that the first sequences are taken of those with several samples
        sequences = sorted(first_sequences, key=lambda rows: batches.count_samples(rows) == 1)[:CHECKED_SEQUENCES]
        read = self.loader.read([(sequence, 1) for sequence in sequences])
        comparison = compare_with_separate_passes(model, read, self.packing, self.processor, self.family, self.device)
        self.worker.print_once(str(comparison))
        excesses = comparison.excesses()
        if not excesses:
            return
        error = ParamsError("train.packing_differs", differences=excesses)
        # the limits were measured in fp32 on a CPU
        if not self.device.gpu and self.device.precision == "fp32":
            raise error
        self.worker.print_once(f"warning: {error}")

    def _curve_columns(self) -> list[str]:
        columns = ["step", "epoch", "loss"]
        columns += [f"lr_{part}" for part in self.family.parts]
        columns += ["grad_norm", *self.module_columns, "val_loss"]
        columns += [f"val_loss_{dataset}" for dataset in self.validation.datasets]
        return [*columns, "val_cider", *self.validation.answer_scores]

    def run(self) -> dict[str, Any]:
        """Train from the newest checkpoint to the end of the schedule and return the figures of the run.

        The first worker writes `out/checkpoint` and `out/curves.csv`.
        """
        schedule = self.schedule
        lengths = self.measure_lengths()
        self.print_image_figures()
        flops_per_step = self.count_flops_per_step(lengths)
        self.print_size(lengths, flops_per_step)
        steps_before = self.resume()
        stream = self.loader.stream(schedule, self.worker.rank, steps_before)
        start = time.monotonic()
        previous_time = start
        for step in range(steps_before, schedule.steps):
            wait_start = time.monotonic()
            micro_batches = next(stream)
            self.usage.waited += time.monotonic() - wait_start
            self.train_step(step, micro_batches)
            previous_time = self.count_time(previous_time)

            steps_done = step + 1
            seconds_per_step = (previous_time - start) / (steps_done - steps_before)
            self.print_progress(steps_done, seconds_per_step, flops_per_step)
            self.stop_if_requested(steps_done)
            if self.needs_checkpoint(steps_done):
                checkpoint = self.save(steps_done)
                self.validate(checkpoint)
                warning = self.unused_module_warning()
                if warning:
                    self.worker.print_once(f"warning: {warning}")
        self.count_time(previous_time)
        exported_step = self.export()
        return self.report_figures(exported_step, flops_per_step)

    def trained_on(self) -> dict[str, Any]:
        """Return what the manifest of the checkpoint says about the training samples.

        `question` is the question that is asked by default, `own_questions` whether datasets brought questions of their
        own, `images` are the numbers of images of the image sets and couples, and `turns` is the largest number of
        turns.
        """
        samples = self.schedule.samples
        table = samples.table
        images = set(table["images"].list.len())
        if samples.couples_per_epoch:
            images.add(PAIR)
        return {
            "question": self.question,
            "own_questions": bool((table["record"] != table["image_set"]).any()),
            "images": sorted(images),
            "turns": 1 + max(table["history"].list.len()),
        }

    def measure_lengths(self) -> list[MeanLengths]:
        """Return the mean lengths of the first sequences of the first epoch, by number of images.

        These are COUNTED_SEQUENCES, or COUNTED_SEQUENCES_WITH_IMAGES if their lengths depend on their images.
        """
        counts_by_images: dict[int, list[tuple[int, int]]] = {}  # tokens and supervised tokens of each row
        sequences_by_images: Counter[int] = Counter()
        limit = COUNTED_SEQUENCES if self.family.takes.fixed_marks else COUNTED_SEQUENCES_WITH_IMAGES
        sequences = self.schedule.epoch(0)[:limit]
        for sequence in sequences:
            images = len(self.schedule.samples.images_of(sequence))
            sequences_by_images[images] += 1
            branches = self.loader.encode(sequence, self._marks_of_sequence(sequence))
            branches_by_row = [branches] if self.packing.shares_prompts else [[branch] for branch in branches]
            for row in branches_by_row:
                packed = pack([row])
                counts_by_images.setdefault(images, []).append((packed.tokens, len(packed.labels)))
        lengths = []
        for images, counts in sorted(counts_by_images.items()):
            tokens, supervised_tokens = np.mean(counts, axis=0).tolist()
            count = sequences_by_images[images]
            lengths.append(
                MeanLengths(
                    images=images,
                    share=count / len(sequences),
                    tokens=tokens,
                    supervised_tokens=supervised_tokens,
                    rows=len(counts) / count,
                )
            )
        return lengths

    def print_image_figures(self) -> None:
        """Print the image tokens of the first sequences, and how often their images are scaled down, if known."""
        if self.worker.rank or not isinstance(self.processor, ScalesImages):
            return
        sequences = self.schedule.epoch(0)[:COUNTED_SEQUENCES_WITH_IMAGES]
        figures = measure_images(self.schedule.samples, sequences, self.processor)
        if figures is not None:
            self.worker.print_once(str(figures))

    def _marks_of_sequence(self, sequence: batches.SampleRows) -> tuple[str, ...]:
        """Return the marks of the images of a sequence. The images are prepared only if the marks depend on them."""
        if self.family.takes.fixed_marks:
            return self.processor.marks(len(self.schedule.samples.images_of(sequence)))
        return self.loader.prepare_images(sequence, None).marks

    def count_flops_per_step(self, lengths: list[MeanLengths]) -> float | None:
        """Return the FLOPs of an optimizer step over a global batch of sequences with these lengths.

        None if the family cannot count them.
        """
        if self.family.count_flops is None:
            return None
        model = meta_model(unwrap_model(self.engine.module).config, self.family, self.job.model)
        flops_per_sequence = 0.0
        for length in lengths:
            terms = self.family.count_flops(model, self.family, length.tokens, length.supervised_tokens, length.images)
            flops_per_sequence += length.share * length.rows * sum(term.total for term in terms)
        return self.schedule.global_batch * flops_per_sequence

    def print_size(self, lengths: list[MeanLengths], flops_per_step: float | None) -> None:
        """Print the number of sequences, tokens, steps, parameters and FLOPs of the run."""
        schedule = self.schedule
        sequences = len(schedule.epoch(0))
        tokens = sum(length.share * length.rows * length.tokens for length in lengths)
        supervised_tokens = sum(length.share * length.rows * length.supervised_tokens for length in lengths)
        accumulation_steps = self.engine.gradient_accumulation_steps()
        counts = self.parameters
        has_only_pairs = self.trained_on()["images"] == [PAIR]
        image_set = "pair" if has_only_pairs else "image set"
        answer = "reference" if has_only_pairs else "sample"
        couples = schedule.samples.couples_per_epoch
        coupled = f" and {format_count(couples, 'couple')} of single images" if couples else ""
        trained_parts = ", ".join(f"{part} {counts[part]:,}" for part in self.family.parts if counts.get(part))
        lines = [
            f"{format_count(schedule.global_batch, 'sequence')} per step = micro-batches of {schedule.micro_batch} x "
            f"{format_count(accumulation_steps, 'accumulation step')} x {format_count(schedule.ranks, 'worker')}",
            f"{format_count(len(schedule.samples.image_sets()), image_set)} with "
            f"{format_count(len(schedule.samples), answer)}{coupled}, packed into "
            f"{format_count(sequences, 'sequence')} per epoch",
            f"about {format_count(round(tokens * sequences), 'token')} per epoch: {tokens:.1f} per "
            f"sequence, of which {supervised_tokens:.1f} are supervised",
            f"{format_count(schedule.epochs, 'epoch')} x {format_count(schedule.steps_per_epoch, 'step')} per epoch = "
            f"{format_count(schedule.steps, 'step')}",
            f"{counts['trainable']:,} trained parameters ({trained_parts}), {counts['frozen']:,} frozen parameters",
        ]
        if flops_per_step is not None:
            lines.append(f"{flops_per_step / 1e12:.3g} TFLOP per step")
        for line in lines:
            self.worker.print_once(line)

    def count_time(self, start: float) -> float:
        """Add the time since `start` (`time.monotonic`) to the run's usage and return the current time."""
        now = time.monotonic()
        self.usage.seconds += now - start
        self.usage.device_seconds += (now - start) * self.worker.ranks
        return now

    def needs_checkpoint(self, steps_done: int) -> bool:
        """Return whether to save a checkpoint: every `compute.checkpoint_every_steps` steps and after the last step."""
        return steps_done == self.schedule.steps or steps_done % self.job.compute.checkpoint_every_steps == 0

    def resume(self) -> int:
        """Restore the newest valid checkpoint and return the number of steps done so far, or 0 without a checkpoint."""
        folder = state.latest_valid_checkpoint(self.job.run_dir) if self.worker.rank == 0 else None
        folder = self.worker.broadcast(folder)
        steps = self.schedule.steps
        if folder is None:
            self.worker.print_once(f"this run has no checkpoint yet, so it starts at step 1 of {steps}")
            return 0
        steps_done = state.load_state(self.engine, folder)
        self.curve.read(folder / CURVES_FILE)
        self.worker.print_once(f"resumed after step {steps_done} of {steps}")
        scores = self.worker.broadcast(state.read_validation(folder))
        if scores is not None:
            self.curve.set_values({name: value for name, value in scores.items() if name in self.curve.names})
        elif self.needs_checkpoint(steps_done):
            # the run was killed after the checkpoint was written and before it was validated
            self.validate(folder)
        return steps_done

    def train_step(self, step: int, micro_batches: list[PackedBatch]) -> None:
        """Take optimizer step `step`, counted from 0, and add its row to the curves.

        In the first step and in every logged step, the forward pass also measures how much the family's module
        contributes. The measured sums are added up over all workers, so the result does not depend on how the global
        batch is split among them. Sequences that only pad an epoch's last batch are included.

        Raises:
            ParamsError: the loss or the gradient is not finite.
        """
        cfg = self.job.cfg
        schedule = self.schedule
        rates = [group.lr * engine.rate_factor(cfg, step, schedule.steps, group.delay) for group in self.groups]
        self.rates = self._rates_by_column(rates)
        measures_module = bool(self.module_columns) and (step == 0 or self.needs_progress_line(step + 1))
        contribution = self.family.contribution if measures_module else None
        recording: AbstractContextManager[list[Tensor]] = nullcontext([])
        if contribution:
            recording = contribution.record(unwrap_model(self.engine.module))
        with recording as module_sums:
            loss, grad_norm = engine.take_step(
                self.engine,
                micro_batches,
                self.packing,
                self.processor,
                self.device,
                rates,
                self.worker.ranks,
                before_update=None if step else self.check_gradients,
            )
        self._require_finite(step, loss, grad_norm)

        epoch = round((step + 1) / schedule.steps_per_epoch, 4)
        row: dict[str, float] = {
            "step": step + 1,
            "epoch": epoch,
            "loss": loss,
            "grad_norm": grad_norm,
            **self.rates,
        }
        if contribution:
            own_sums = torch.stack(module_sums).double().sum(dim=0).cpu()
            sums = engine.sum_over_ranks(own_sums, self.worker.ranks)
            row |= zip(self.module_columns, contribution.figures(sums), strict=True)
        self.curve.add(row)
        self.usage.captions += sum(map(batches.count_samples, schedule.global_sequences(step)))

    def check_gradients(self) -> None:
        """Print the gradient norm of each part in the first step, and check that each trained part has a gradient.

        Raises:
            ParamsError: a part that is trained has no gradient, although the step shows it images.
        """
        norms = engine.gradient_norms(self.engine, self.family)
        texts = [f"{part} {norms[part]:.3g}" for part in self.family.parts if part in norms]
        self.worker.print_once(f"gradient norms in the first step: {', '.join(texts)}")
        samples = self.schedule.samples
        images = max(len(samples.images_of(sequence)) for sequence in self.schedule.global_sequences(0))
        for part, norm in norms.items():
            needed_images = IMAGES_FOR_GRADIENT.get(part, 1)
            if norm == 0 and images >= needed_images:
                raise ParamsError(
                    "train.part_without_gradient", key=f"models.{self.job.cfg.model}.rates.{part}", part=part
                )

    def _rates_by_column(self, rates: list[float]) -> dict[str, float]:
        """Return the learning rate of each trained part of the model by its column in the curves (`lr_<part>`)."""
        rate_by_part: dict[str, float] = {}
        for group, rate in zip(self.groups, rates, strict=True):
            rate_by_part |= dict.fromkeys(group.parts, rate)
        return {f"lr_{part}": rate_by_part[part] for part in self.family.parts if part in rate_by_part}

    def _require_finite(self, step: int, loss: float, grad_norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        rates = [f"{name} {rate:.3g}" for name, rate in self.rates.items()]
        raise ParamsError("train.diverged", step=step + 1, loss=loss, grad_norm=grad_norm, rates=rates)

    def needs_progress_line(self, steps_done: int) -> bool:
        """Return whether to print a progress line: every LOG_EVERY_STEPS steps and after the last step."""
        return steps_done % LOG_EVERY_STEPS == 0 or steps_done == self.schedule.steps

    def print_progress(self, steps_done: int, seconds_per_step: float, flops_per_step: float | None) -> None:
        """Print a progress line if `needs_progress_line` is true for this step.

        An example is `step 20/1810 (1.1%) loss 1.2345 grad_norm 2.1000 module_update_ratio 0.21 lr_vision 4.00e-05 85
        captions/s MFU 41% ETA 0:11:20`. MFU is the model FLOPs utilisation, the achieved share of the devices' peak
        FLOP/s.
        """
        if not self.needs_progress_line(steps_done):
            return
        steps = self.schedule.steps
        fields = [f"step {steps_done}/{steps} ({steps_done / steps:.1%})"]
        for name in ("loss", "grad_norm"):
            fields.append(f"{name} {self.curve.last_value(name):.4f}")
        ratios = update_ratios(self.curve.last_values(self.module_columns))
        if ratios:
            ratio_texts = [f"{ratio:.2g}" for ratio in ratios.values()]
            fields.append(" ".join([MODULE_UPDATE_RATIO, *ratio_texts]))
        for name, rate in self.rates.items():
            fields.append(f"{name} {rate:.2e}")
        captions_per_step = self.schedule.captions(steps_done) / steps_done
        fields.append(f"{captions_per_step / seconds_per_step:.0f} captions/s")
        device_name = torch.cuda.get_device_name() if self.job.compute.gpu else ""
        peak = peak_flops(device_name, self.job.cfg.precision)
        if peak and flops_per_step is not None:
            fields.append(f"MFU {flops_per_step / seconds_per_step / (peak * self.worker.ranks):.0%}")
        seconds_left = round((steps - steps_done) * seconds_per_step)
        fields.append(f"ETA {timedelta(seconds=seconds_left)}")
        self.worker.print_once("  ".join(fields))

    def stop_if_requested(self, steps_done: int) -> None:
        """Save a checkpoint and raise StoppedError on all workers if the run was asked to end.

        The checkpoint is not validated here. A resumed run validates it only if an uninterrupted run would also have
        validated after this step.
        """
        sees_request = self.worker.rank == 0 and (self.job.run_dir / STOP_FILE).exists()
        is_requested = bool(engine.sum_over_ranks(torch.tensor(float(sees_request)), self.worker.ranks))
        if is_requested:
            self.save(steps_done)
            raise StoppedError("train.stopped", step=steps_done)

    def is_writer(self) -> bool:
        """Return whether this worker writes files. Only the first worker does.

        Raises:
            SupersededError: a later attempt has taken over this run.
        """
        if self.worker.rank == 0:
            require_newest_attempt(self.job.run_dir, self.job.attempt)
        return self.worker.rank == 0

    def save(self, steps_done: int) -> Path:
        """Write a checkpoint, then the run's usage, and return the checkpoint's folder."""
        run_dir = self.job.run_dir
        tensors = state.gather_state(self.engine, keep=self.worker.rank == 0)
        if self.is_writer():
            with name_full_disk(run_dir):
                state.write_state(run_dir, steps_done, tensors, self.curve)
                self.usage.write(run_dir / USAGE_FILE)
        return state.folder_of(run_dir, steps_done)

    def validate(self, folder: Path) -> None:
        """Validate the current model and write the scores into the checkpoint `folder` and the curves.

        `folder` must be the checkpoint of the model's current state. Captions are scored at every
        `compute.caption_every_checkpoints`-th checkpoint and at the last one.
        """
        step = state.step_of(folder)
        compute = self.job.compute
        scores = self.validation.losses(self.engine)
        caption_every_steps = compute.checkpoint_every_steps * compute.caption_every_checkpoints
        if compute.caption_val_pairs and (step == self.schedule.steps or step % caption_every_steps == 0):
            scores |= self.validation.score_answers(self.engine)
        self.curve.set_values(scores)
        if self.is_writer():
            with name_full_disk(self.job.run_dir):
                write_atomic(folder / state.VALIDATION_FILE, json.dumps(scores) + "\n")
                self.curve.write(self.job.run_dir / CURVES_FILE)
        if scores:
            score_texts = [f"{name} {value:.4f}" for name, value in scores.items()]
            self.worker.print_once("  ".join([f"validation after step {step}", *score_texts]))

    def unused_module_warning(self) -> Fault | None:
        """Return a warning if the module still has no effect after every part of the model has warmed up, else None."""
        contribution = self.family.contribution
        values = self.curve.last_values(self.module_columns)
        ratios = update_ratios(values)
        if not contribution or not ratios or max(ratios.values()) >= NEGLIGIBLE_UPDATE_RATIO:
            return None
        steps = self.schedule.steps
        longest_delay = max(round(group.delay * steps) for group in self.groups)
        if values["step"] <= longest_delay + engine.warmup_steps(steps, self.job.cfg.warmup_share):
            return None
        return Fault(
            "train.module_changes_nothing",
            step=round(values["step"]),
            steps=steps,
            limit=NEGLIGIBLE_UPDATE_RATIO,
            ratios=[f"{name} {value:.2g}" for name, value in ratios.items()],
            advice=contribution.remedy,
        )

    def export(self) -> int:
        """Write the output checkpoint, chosen by `train.export`, and return the number of steps it was trained for.

        Every worker must call this, because with ZeRO 3 each worker holds a part of the weights.

        Raises:
            ParamsError: the family's code cannot be saved, for example because a member is missing.
        """
        job = self.job
        model = self.engine.module
        folder = state.checkpoint_to_export(job.run_dir, job.cfg.export) if self.worker.rank == 0 else None
        folder = self.worker.broadcast(folder)
        if folder is not None:
            state.load_state(self.engine, folder)
        zero3_parameters = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
        with deepspeed.zero.GatheredParameters(zero3_parameters, enabled=bool(zero3_parameters)):
            if self.is_writer():
                with name_full_disk(job.out), end_if_code_is_wrong(job.model.family):
                    save_checkpoint(
                        model,
                        self.processor,
                        job.out / "checkpoint",
                        family=job.model.family,
                        base=job.cfg.base,
                        base_sha256=job.base_sha256,
                        trained_on=self.trained_on(),
                    )
                    self.curve.write(job.out / CURVES_FILE)
        return self.schedule.steps if folder is None else state.step_of(folder)

    def report_figures(self, exported_step: int, flops_per_step: float | None) -> dict[str, Any]:
        """Return the fields of `TrainReport` that the loop computes, and the speed over all attempts of the run."""
        usage = self.usage
        steps = self.schedule.steps
        counts = self.parameters
        parts = [name for name in counts if name not in ("trainable", "frozen")]
        seconds = max(usage.seconds, 1e-9)
        module_values = self.curve.last_values(self.module_columns)
        module_values.pop("step", None)
        captions = self.schedule.captions(steps)
        warning = self.unused_module_warning()
        return {
            "rows_in": len(self.schedule.samples),
            "rows_out": captions,
            "steps": steps,
            "parameters_trainable": counts["trainable"],
            "parameters_frozen": counts["frozen"],
            "parameters": {part: counts[part] for part in parts},
            "loss": self._rounded_value("loss"),
            "val_loss": self._rounded_value("val_loss"),
            "val_loss_by_dataset": {name: self._rounded_value(f"val_loss_{name}") for name in self.validation.datasets},
            "val_cider": self._rounded_value("val_cider"),
            "val_match": self._rounded_value("val_match"),
            "exported_step": exported_step,
            "module": module_values,
            "warnings": [str(warning)] if warning else [],
            "seconds": usage.seconds,
            "captions_per_s": usage.captions / seconds,
            "waiting_share": usage.waited / seconds,
            "device": torch.cuda.get_device_name() if self.job.compute.gpu else "cpu",
            "devices": self.worker.ranks,
            "device_hours": usage.device_seconds / 3600,
            # captions that are trained on again after a resume count again, because their seconds count again too
            "flops": None if flops_per_step is None else flops_per_step * steps * usage.captions / captions,
            "model_parameters": counts["trainable"] + counts["frozen"],
        }

    def _rounded_value(self, column: str) -> float | None:
        """Return the last value of a column of the curves, rounded for the report, or None if the column is empty."""
        value = self.curve.last_value(column)
        return None if math.isnan(value) else round(value, 5)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return a device's peak FLOP/s, or None if it is unknown. Peaks are known only for bf16.

    Variants of a GPU that differ only in memory have the same peak.
    """
    gpu = gpu_of(device_name)
    return gpu.bf16_tflops * 1e12 if gpu and precision == "bf16" else None


def update_ratios(values: Mapping[str, float]) -> dict[str, float]:
    """Return the figures whose names start with MODULE_UPDATE_RATIO: the relative sizes of the module's updates."""
    return {name: value for name, value in values.items() if name.startswith(MODULE_UPDATE_RATIO)}

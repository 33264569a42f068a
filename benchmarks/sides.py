"""Compare the project's training speed with a stock implementation (the peer).

The compared implementations are called sides. Each side runs in a separate process, and the sides take turns. While a
side computes, all other sides wait, so that load on the machine affects all sides equally. Each side first takes the
steps whose losses are compared. These steps also warm up the process.

The peer is transformers' Trainer with peft's adapters on LLaVA-OneVision, with the MDP module between encoder and
projector. It uses SDPA without checkpointing, one right-padded caption per sequence, and transformers' own loss. The
data, their order, the global batch, the trained tensors, the learning rates, gradient clipping and the normalisation of
the loss are the same as in the project.
"""

import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from hashlib import sha256
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import logging

from m3diff.models import FAMILIES
from m3diff.models.device import Device
from m3diff.models.m3diff import M3DiffSettings
from m3diff.models.m3diff_model import DifferentialPerception
from m3diff.models.settings import MDPConfig
from m3diff.models.tuning import prepare_for_training, trainable_groups
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.settings.load import load_params
from m3diff.stages.train.batches import Loader, Samples, Schedule, read_training_samples
from m3diff.stages.train.job import Job, WorkerContext, single_worker_group
from m3diff.stages.train.loop import Training

BENCHMARKS = Path(__file__).parent
ROOT = BENCHMARKS.parent
SAME_LOSS = 2e-4  # relative tolerance
REFERENCES = 5  # number of references per pair


@dataclass(frozen=True)
class Sizes:
    """The sizes of a comparison.

    Attributes:
        pairs: number of pairs per training step.
        unpacked: number of captions per micro-batch if each sequence has one caption, as for the peer.
        packed: number of pairs per micro-batch if each sequence has all captions of a pair.
        compared_steps: number of steps whose losses are compared.
        rounds: number of timed rounds for each side.
        round_s: minimum duration of a round in seconds.
    """

    pairs: int = 16
    unpacked: int = 80
    packed: int = 16
    compared_steps: int = 10
    rounds: int = 5
    round_s: float = 2.0


def write_mixture(folder: Path, pairs: int, side: int) -> Path:
    """Write the first pairs of minichange.json as a mixture in the format of `convert`, and return the folder.

    minichange.json contains part of MiniChange's training mixture. The images are noise.

    Args:
        side: side length of the images in pixels.
    """
    rng = np.random.default_rng(0)
    rows = []
    for number, pair in enumerate(json.loads((BENCHMARKS / "minichange.json").read_text())[:pairs]):
        images = []
        for image_name in ("before", "after"):
            file = folder / "images" / f"{number}_{image_name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file)
            images.append({"uri": str(file), "sha256": sha256(file.read_bytes()).digest()})
        name = f"minichange/{number}"
        ids = {"record": name, "image_set": name, "dataset": "minichange", "split": "train"}
        ids |= {"question": pair["question"], "history": []}
        for index, reference in enumerate(pair["references"][:REFERENCES]):
            rows.append({"id": f"{name}#{index}", "answer": reference, "images": images} | ids)
    for split, content in (("train", rows), ("val", [])):
        (folder / split).mkdir()
        pq.write_table(pa.Table.from_pylist(content, schema=SAMPLE_SCHEMA), folder / split / "part.parquet")
    return folder


def embedded_job(folder: Path, captions: int | None, global_batch: int, micro_batch: int, threads: int) -> Job:
    """Return the embedded run's training job for the mixture in `folder`, with one process and constant learning rates.

    Args:
        captions: maximum number of references per sequence. If None, a sequence has all references of a pair.
        global_batch: number of sequences per step.
        micro_batch: number of sequences per micro-batch.
    """
    params = load_params(ROOT / "params.yaml")
    cfg = params.train.model_copy(
        update={
            "base": ROOT / params.train.base,
            "max_captions_per_sequence": captions,
            "global_batch": global_batch,
            "warmup_share": 0.0,
            "epochs": 100_000,  # so many that the cosine schedule is nearly constant
        }
    )
    one_process = {"workers": 0, "cpus_per_worker": threads, "gpu": False, "zero_stage": 0}
    batches = {"micro_batch": micro_batch, "val_pairs": 0, "caption_val_pairs": 0}
    compute = params.compute.model_copy(update=one_process | batches)
    run_dir = folder / f"run_{captions or 'all'}"
    model = params.models[params.train.model]
    assert isinstance(model, M3DiffSettings)
    model = replace(model, delays={})  # the stock Trainer does not support delays
    return Job(cfg, model, compute, folder, run_dir / "out", run_dir, "")


def start_training(job: Job) -> Callable[[], float]:
    """Start the project's training loop. Return a function that takes a step and returns its loss.

    `torch.distributed` must be initialised.
    """
    run = Training(job, WorkerContext())
    stream = run.loader.stream(run.schedule, 0, 0)
    steps_done = 0

    def step() -> float:
        nonlocal steps_done
        run.train_step(steps_done, next(stream))
        steps_done += 1
        return run.curve.last_value("loss")

    return step


def serve_own(pipe: Connection, job: Job) -> None:
    """Train with the project's training loop in response to requests from the pipe.

    A request is a number of steps. After these steps, their total seconds and their losses are sent to the pipe. A
    request for 0 steps ends the function.
    """
    logging.disable_progress_bar()
    job.run_dir.mkdir(parents=True, exist_ok=True)
    with single_worker_group(job.compute.gpu):
        step = start_training(job)
        while step_count := pipe.recv():
            start = time.perf_counter()
            losses = [step() for _ in range(step_count)]
            if job.compute.gpu:
                torch.cuda.synchronize()
            pipe.send((time.perf_counter() - start, losses))


MAX_STEPS = 100_000


class StockModel(LlavaOnevisionModel):
    """transformers' LLaVA-OneVision model with the MDP module before the projector."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        mdp = config.module_config()
        self.mdp = DifferentialPerception(mdp, config.vision_config.hidden_size) if isinstance(mdp, MDPConfig) else None

    def get_image_features(self, pixel_values: Tensor, image_sizes: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return the visual tokens of B pairs of images. `pixel_values` has the shape [2 B, 3, H, W]."""
        states = self.vision_tower(pixel_values, output_hidden_states=True).hidden_states
        visual = states[self.config.vision_feature_layer]
        if self.mdp is not None:
            levels = [states[layer] for layer in self.mdp.cfg.vision_feature_layers]
            before_levels = [level[0::2] for level in levels]
            after_levels = [level[1::2] for level in levels]
            pair = self.mdp(before_levels, after_levels, visual[0::2], visual[1::2])
            visual = torch.stack(pair, dim=1).flatten(0, 1)
        features = self.multi_modal_projector(visual)
        tokens, _ = self.pack_image_features(features.split(1), image_sizes, image_newline=self.image_newline)
        return BaseModelOutputWithPooling(last_hidden_state=features, pooler_output=tokens)


class StockForConditionalGeneration(LlavaOnevisionForConditionalGeneration):
    """transformers' LLaVA-OneVision class with `StockModel` as its model."""

    def __init__(self, config: Any) -> None:
        super(LlavaOnevisionForConditionalGeneration, self).__init__(config)
        self.model = StockModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()


class StockDataset(torch.utils.data.Dataset):
    """The captions of the mixture, in the order of the project's training with one caption per sequence."""

    def __init__(self, samples: Samples, schedule: Schedule, loader: Loader, processor: Any) -> None:
        self.schedule = schedule
        self.loader = loader
        self.samples = samples
        self.processor = processor
        self.order = lru_cache(maxsize=4)(self._order)

    def _order(self, step: int) -> list[int]:
        """Return the rows of a step's captions."""
        sequences = self.schedule.global_sequences(step)
        return [int(row) for row in chain.from_iterable(sequences)]

    def __len__(self) -> int:
        return MAX_STEPS * self.schedule.global_batch

    def __getitem__(self, number: int) -> dict[str, Any]:
        step, index = divmod(number, self.schedule.global_batch)
        row = self.order(step)[index]
        prepared = self.loader.prepared(self.samples.images(row))
        (branch,) = self.loader.encode(np.array([row]), prepared.marks)
        ((start, end),) = branch.spans
        return {
            "input_ids": torch.tensor(branch.ids),
            "labels": torch.tensor([-100] * start + branch.ids[start:end]),
            "pixel_values": normalise(prepared.tensors["pixels"], self.processor.image_processor),
        }


def normalise(images: Tensor, image_processor: Any) -> Tensor:
    """Convert uint8 images [2, side, side, 3] to normalised floats [2, 3, side, side]."""
    mean = torch.tensor(image_processor.image_mean)[:, None, None]
    std = torch.tensor(image_processor.image_std)[:, None, None]
    return images.permute(0, 3, 1, 2).float().div_(255).sub_(mean).div_(std)


def pad_rows(rows: list[dict[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """Combine rows of a `StockDataset` into a right-padded batch."""
    input_ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=pad_id)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    pixels = torch.cat([row["pixel_values"] for row in rows])
    return {
        "input_ids": input_ids,
        "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
        "labels": pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100),
        "pixel_values": pixels,
        "image_sizes": torch.full((len(pixels), 2), pixels.shape[-1]),
        "batch_num_images": torch.full((len(rows),), 2),
    }


class PeerTrainer(Trainer):
    """transformers' Trainer that also stores the loss of each optimizer step in `losses`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []
        self.loss_of_step: Any = 0.0

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the forward and backward passes on a micro-batch, and add the loss to the loss of the step."""
        loss = super().training_step(*args, **kwargs)
        self.loss_of_step = self.loss_of_step + loss  # each loss is already divided by the tokens of the step
        return loss


class Rounds(TrainerCallback):
    """Callback that makes the Trainer wait for requests from the pipe. See `serve_own` for the requests."""

    def __init__(self, pipe: Connection, gpu: bool) -> None:
        self.pipe = pipe
        self.gpu = gpu
        self.trainer = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the first request."""
        self._await_request(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the loss of the step. After the last requested step, send the results and wait for the next request."""
        trainer: Any = self.trainer
        trainer.losses.append(float(trainer.loss_of_step))
        trainer.loss_of_step = 0.0
        if len(trainer.losses) == self.count:
            if self.gpu:
                torch.cuda.synchronize()
            self.pipe.send((time.perf_counter() - self.started, trainer.losses))
            trainer.losses = []
            self._await_request(control)

    def _await_request(self, control: Any) -> None:
        self.count = self.pipe.recv()
        control.should_training_stop = not self.count
        self.started = time.perf_counter()


def stock_model(job: Job) -> tuple[Any, Any]:
    """Return the stock model with adapters, and the processor. The initial weights are the same as in the project."""
    family = FAMILIES[job.model.family]
    gpu = job.compute.gpu
    dtype = torch.bfloat16 if job.cfg.precision == "bf16" else torch.float32
    torch.manual_seed(job.cfg.seed)
    own_model = family.load_base(job.cfg.base, job.model, dtype, "sdpa")
    state = torch.get_rng_state()
    model = StockForConditionalGeneration._from_config(own_model.config, dtype=dtype, attn_implementation="sdpa")
    model.load_state_dict(own_model.state_dict())
    torch.set_rng_state(state)  # so that the adapters get the same initial weights
    adapted = prepare_for_training(model, family, job.model).train()
    return adapted.to("cuda" if gpu else "cpu"), family.load_processor(job.cfg.base)


def make_trainer(job: Job, callbacks: list[TrainerCallback]) -> PeerTrainer:
    """Return the Trainer for a job with one caption per sequence.

    The Trainer uses the global batch and micro-batch sizes of the job, which are numbers of captions.
    """
    cfg = job.cfg
    compute = job.compute
    model, processor = stock_model(job)
    groups = trainable_groups(model, FAMILIES[job.model.family], job.model)
    parameter_groups = [{"params": group.parameters, "lr": group.lr} for group in groups]
    optimizer = torch.optim.AdamW(parameter_groups, betas=(0.9, 0.999), weight_decay=cfg.weight_decay, fused=True)
    samples = read_training_samples(job.mixture)
    schedule = Schedule(samples, 1, cfg.seed, cfg.global_batch, compute.micro_batch, MAX_STEPS)
    packing = FAMILIES[job.model.family].packing()
    loader = Loader(samples, processor, packing, threads=1, device=Device(compute.gpu, cfg.precision))
    arguments = TrainingArguments(
        output_dir=str(job.run_dir / "peer"),
        per_device_train_batch_size=compute.micro_batch,
        gradient_accumulation_steps=cfg.global_batch // compute.micro_batch,
        max_steps=MAX_STEPS,
        max_grad_norm=cfg.max_grad_norm or 0.0,
        bf16=cfg.precision == "bf16" and compute.gpu,
        use_cpu=not compute.gpu,
        dataloader_pin_memory=compute.gpu,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        seed=cfg.seed,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    return PeerTrainer(
        model=model,
        args=arguments,
        train_dataset=StockDataset(samples, schedule, loader, processor),
        data_collator=partial(pad_rows, pad_id=processor.pad_id),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        callbacks=callbacks,
    )


def serve_peer(pipe: Connection, job: Job) -> None:
    """Train with the stock Trainer in response to requests from the pipe. See `serve_own` for the requests."""
    torch.set_num_threads(job.compute.cpus_per_worker)
    rounds = Rounds(pipe, job.compute.gpu)
    logging.disable_progress_bar()
    trainer = make_trainer(job, [rounds])
    trainer.remove_callback(PrinterCallback)
    rounds.trainer = trainer
    trainer.train()


@dataclass
class Side:
    """A compared implementation: a training process that takes steps on request, and its measurements.

    Attributes:
        serve: the function that the process runs. The function's first argument is the process's end of the pipe.
        losses: losses of the compared steps.
        seconds: duration of each round in seconds.
        steps: number of steps per round.
    """

    name: str
    serve: Callable[..., None]
    micro_batch: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps: int = 0

    def start(self) -> None:
        """Start the process."""
        context = multiprocessing.get_context("fork")  # a forked process does not repeat the imports
        self.pipe, process_end = context.Pipe()
        self.process = context.Process(target=self.serve, args=(process_end,), daemon=True)
        self.process.start()
        process_end.close()

    def take_steps(self, steps: int) -> Any:
        """Make the process take steps. Return the total seconds and the loss of each step.

        Raises:
            RuntimeError: the process ended. It has printed its traceback to stderr.
        """
        self.pipe.send(steps)
        try:
            return self.pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"{self.name}: its process ended; see its traceback above") from error

    def warm_up(self, sizes: Sizes) -> None:
        """Take the steps whose losses are compared, then time two steps to choose the number of steps per round."""
        self.losses = self.take_steps(sizes.compared_steps)[1]
        seconds = min(self.take_steps(1)[0] for _ in range(2))
        self.steps = math.ceil(sizes.round_s / seconds)

    def take_round(self) -> None:
        """Take the steps of one timed round and add the duration to `seconds`."""
        self.seconds.append(self.take_steps(self.steps)[0])

    def end(self) -> None:
        """Stop the process and wait until it has ended."""
        self.pipe.send(0)
        self.process.join()

    def figures(self, captions: int) -> dict[str, Any]:
        """Return the speed in the median round, the speed in each round, the spread between rounds, and the losses.

        The spread is the difference between the longest and the shortest round, relative to the median.

        Args:
            captions: number of captions per step.
        """
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


def embedded_sides(folder: Path, sizes: Sizes, threads: int) -> list[Side]:
    """Return the three sides at embedded shapes: the peer, the project with unpacked, and with packed sequences."""
    write_mixture(folder, sizes.pairs, side=72)
    captions = sizes.pairs * REFERENCES
    micro = min(sizes.unpacked, captions)
    micro_packed = min(sizes.packed, sizes.pairs)
    unpacked = embedded_job(folder, 1, captions, micro, threads)
    packed = embedded_job(folder, None, sizes.pairs, micro_packed, threads)
    return [
        Side("peer", partial(serve_peer, job=unpacked), micro),
        Side("unpacked", partial(serve_own, job=unpacked), micro),
        Side("packed", partial(serve_own, job=packed), micro_packed),
    ]


def assert_same_losses(sides: list[Side]) -> None:
    """Check that all sides have the same loss in every compared step.

    Raises:
        AssertionError: a loss differs from the first side's loss by more than the tolerance.
    """
    reference = sides[0]
    for side in sides[1:]:
        for step, (loss, expected) in enumerate(zip(side.losses, reference.losses, strict=True), start=1):
            assert abs(loss / expected - 1) < SAME_LOSS, (
                f"step {step}: the loss of {side.name} is {loss}, of {reference.name} {expected}; losses of all steps: "
                f"{side.losses} and {reference.losses}"
            )


def compare(sides: list[Side], sizes: Sizes) -> dict[str, Any]:
    """Check that the first losses of all sides are equal, then time the sides in turn. Return their results by name."""
    for side in sides:
        side.start()
    try:
        for side in sides:
            side.warm_up(sizes)
        assert_same_losses(sides)
        for _ in range(sizes.rounds):
            for side in sides:
                side.take_round()
    finally:
        for side in sides:
            if side.process.is_alive():
                side.end()
    return {side.name: side.figures(sizes.pairs * REFERENCES) for side in sides}


def print_comparison(figures: dict[str, Any]) -> None:
    """Print a table with one line per side."""
    print(f"{'':<16} {'captions/s':>10} {'x peer':>7} {'spread':>7} {'micro':>6}  losses of the first steps")
    for name, row in figures.items():
        ratio = row["captions_per_s"] / figures["peer"]["captions_per_s"]
        speed = f"{row['captions_per_s']:>10.1f} {ratio:>7.2f} {row['spread']:>7.0%} {row['micro_batch']:>6}"
        print(f"{name:<16} {speed}  {' '.join(f'{loss:.5f}' for loss in row['losses'])}")

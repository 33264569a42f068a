"""The project's training against the stock way: each side in a process of its own, round after round by turns.

One side computes while the others wait, so a busy machine is busy for all. Each side first takes the steps whose losses
are compared, which warms it up as well.

The stock way is transformers' Trainer with peft's adapters: its LLaVA-OneVision with the MDP module between encoder and
projector, SDPA, no checkpointing, one caption a sequence, padded on the right, labels for transformers' own loss. Rows,
their order, the global batch, the trainable tensors, rates, clipping and the loss's normalisation are the project's.
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
from m3diff.models.settings import Delays, MDPConfig
from m3diff.models.tuning import prepare, trainable_groups
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.settings.load import load_params
from m3diff.stages.train.batches import Loader, Samples, Schedule, read_training_samples
from m3diff.stages.train.job import Job, Runtime, only_worker
from m3diff.stages.train.loop import Training

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
    """Take as many steps as the pipe asks for, and answer with seconds and losses, until it asks for none."""
    logging.disable_progress_bar()
    job.run_dir.mkdir(parents=True, exist_ok=True)
    with only_worker(job.compute.gpu):
        step = own_step(job)
        while asked := pipe.recv():
            started = time.perf_counter()
            losses = [step() for _ in range(asked)]
            if job.compute.gpu:
                torch.cuda.synchronize()
            pipe.send((time.perf_counter() - started, losses))


MAX_STEPS = 100_000


class StockModel(LlavaOnevisionModel):
    """transformers' LLaVA-OneVision; only the MDP module is put before its projector."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        mdp = config.module_config()
        self.mdp = DifferentialPerception(mdp, config.vision_config.hidden_size) if isinstance(mdp, MDPConfig) else None

    def get_image_features(self, pixel_values: Tensor, image_sizes: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        """Visual tokens of pairs of images, pixel_values [2 B, 3, H, W]."""
        states = self.vision_tower(pixel_values, output_hidden_states=True).hidden_states
        last = states[self.config.vision_feature_layer]
        if self.mdp is not None:
            levels = [states[layer] for layer in self.mdp.cfg.vision_feature_layers]
            pair = self.mdp([f[0::2] for f in levels], [f[1::2] for f in levels], last[0::2], last[1::2])
            last = torch.stack(pair, dim=1).flatten(0, 1)
        features = self.multi_modal_projector(last)
        tokens, _ = self.pack_image_features(features.split(1), image_sizes, image_newline=self.image_newline)
        return BaseModelOutputWithPooling(last_hidden_state=features, pooler_output=tokens)


class StockForConditionalGeneration(LlavaOnevisionForConditionalGeneration):
    def __init__(self, config: Any) -> None:
        super(LlavaOnevisionForConditionalGeneration, self).__init__(config)
        self.model = StockModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()


class Rows(torch.utils.data.Dataset):
    """The captions in the order in which the project's unpacked training takes them."""

    def __init__(self, samples: Samples, schedule: Schedule, loader: Loader, processor: Any) -> None:
        self.schedule, self.loader, self.samples, self.processor = schedule, loader, samples, processor
        self.order = lru_cache(maxsize=4)(self._order)

    def _order(self, step: int) -> list[int]:
        return [int(row) for sequence in self.schedule.global_sequences(step) for row in sequence]

    def __len__(self) -> int:
        return MAX_STEPS * self.schedule.global_batch

    def __getitem__(self, number: int) -> dict[str, Any]:
        step, place = divmod(number, self.schedule.global_batch)
        row = self.order(step)[place]
        prompt = self.processor.encode_prompt(self.samples.value("question", row))
        reference = self.processor.encode_reference(self.samples.value("reference", row))
        images = np.stack([self.loader.prepared(*file) for file in self.samples.images(row)])
        return {
            "input_ids": torch.tensor([*prompt, *reference]),
            "labels": torch.tensor([-100] * len(prompt) + list(reference)),
            "pixel_values": normalised(images, self.processor.image_processor),
        }


def normalised(images: np.ndarray, how: Any) -> Tensor:
    """uint8 [2, side, side, 3] to normalised [2, 3, side, side]."""
    mean, std = torch.tensor(how.image_mean)[:, None, None], torch.tensor(how.image_std)[:, None, None]
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div_(255).sub_(mean).div_(std)


def padded(rows: list[dict[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """Rows to a padded batch."""
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
    """transformers' Trainer, whose losses are kept: `losses` holds one per optimizer step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []
        self.loss_of_step: Any = 0.0

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.loss_of_step = self.loss_of_step + loss  # each is divided by the tokens of the whole step
        return loss


class Rounds(TrainerCallback):
    """Stops between steps until so many more are asked for; tells their seconds and losses."""

    def __init__(self, pipe: Connection, gpu: bool) -> None:
        self.pipe, self.gpu, self.trainer = pipe, gpu, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._next(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer: Any = self.trainer
        trainer.losses.append(float(trainer.loss_of_step))
        trainer.loss_of_step = 0.0
        if len(trainer.losses) == self.count:
            if self.gpu:
                torch.cuda.synchronize()
            self.pipe.send((time.perf_counter() - self.started, trainer.losses))
            trainer.losses = []
            self._next(control)

    def _next(self, control: Any) -> None:
        self.count = self.pipe.recv()
        control.should_training_stop = not self.count
        self.started = time.perf_counter()


def stock_model(job: Job) -> tuple[Any, Any]:
    """The stock model with adapters, its weights those that the project's training starts from; and its processor."""
    family, gpu = FAMILIES[job.model.family], job.compute.gpu
    dtype = torch.bfloat16 if job.cfg.precision == "bf16" else torch.float32
    torch.manual_seed(job.cfg.seed)
    ours = family.load_base(job.cfg.base, job.model, dtype, "sdpa")
    state = torch.get_rng_state()
    model = StockForConditionalGeneration._from_config(ours.config, dtype=dtype, attn_implementation="sdpa")
    model.load_state_dict(ours.state_dict())
    torch.set_rng_state(state)  # the adapters start from the same numbers
    adapted = prepare(model, family, job.model).train()
    return adapted.to("cuda" if gpu else "cpu"), family.load_processor(job.cfg.base)


def trainer_for(job: Job, callbacks: list[TrainerCallback]) -> PeerTrainer:
    """The Trainer of an unpacked job: `global_batch` captions a step, `micro_batch` at a time."""
    cfg, compute = job.cfg, job.compute
    model, processor = stock_model(job)
    groups = trainable_groups(model, FAMILIES[job.model.family], job.model)
    slots = [{"params": group.parameters, "lr": group.lr} for group in groups]
    optimizer = torch.optim.AdamW(slots, betas=(0.9, 0.999), weight_decay=cfg.weight_decay, fused=True)
    samples = read_training_samples(job.mixture)
    schedule = Schedule(samples, 1, cfg.seed, cfg.global_batch, compute.micro_batch, MAX_STEPS)
    loader = Loader(samples, processor, threads=1, device=Device(compute.gpu, cfg.precision))
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
        train_dataset=Rows(samples, schedule, loader, processor),
        data_collator=partial(padded, pad_id=processor.pad_id),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        callbacks=callbacks,
    )


def serve_peer(pipe: Connection, job: Job) -> None:
    """Take as many steps as the pipe asks for, and answer with seconds and losses, until it asks for none."""
    torch.set_num_threads(job.compute.cpus_per_worker)
    rounds = Rounds(pipe, job.compute.gpu)
    logging.disable_progress_bar()
    trainer = trainer_for(job, [rounds])
    trainer.remove_callback(PrinterCallback)
    rounds.trainer = trainer
    trainer.train()


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

    def ask(self, steps: int) -> Any:
        """The answer to so many steps.

        Raises:
            RuntimeError: the process has died; it has told why.
        """
        self.pipe.send(steps)
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


def embedded_sides(folder: Path, sizes: Sizes, threads: int) -> list[Side]:
    """Peer, unpacked and packed, on the embedded shapes."""
    write_mixture(folder, sizes.pairs, side=72)
    captions = sizes.pairs * REFERENCES
    micro, micro_packed = min(sizes.unpacked, captions), min(sizes.packed, sizes.pairs)
    unpacked = embedded_job(folder, 1, (captions, micro), threads)
    packed = embedded_job(folder, None, (sizes.pairs, micro_packed), threads)
    return [
        Side("peer", partial(serve_peer, job=unpacked), micro),
        Side("unpacked", partial(serve_own, job=unpacked), micro),
        Side("packed", partial(serve_own, job=packed), micro_packed),
    ]


def assert_same_losses(sides: list[Side]) -> None:
    """Every step of every side has the loss of the first side's."""
    first = sides[0]
    for side in sides[1:]:
        for step, (loss, expected) in enumerate(zip(side.losses, first.losses, strict=True), start=1):
            assert abs(loss / expected - 1) < SAME_LOSS, (
                f"step {step}: the loss of {side.name} is {loss}, of {first.name} {expected}; losses of all steps: "
                f"{side.losses} and {first.losses}"
            )


def compare(sides: list[Side], sizes: Sizes) -> dict[str, Any]:
    """Figures of each side by its name. The losses of the first steps must be the same."""
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
    print(f"{'':<16} {'captions/s':>10} {'x peer':>7} {'spread':>7} {'micro':>6}  losses of the first steps")
    for name, row in figures.items():
        ratio = row["captions_per_s"] / figures["peer"]["captions_per_s"]
        speed = f"{row['captions_per_s']:>10.1f} {ratio:>7.2f} {row['spread']:>7.0%} {row['micro_batch']:>6}"
        print(f"{name:<16} {speed}  {' '.join(f'{loss:.5f}' for loss in row['losses'])}")

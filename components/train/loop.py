"""The training loop: one function for a plain process and for a Ray worker.

Each step takes one global batch. The loss is the sum over its supervised tokens divided by their number in the whole
global batch, over all micro-batches and workers, so that neither changes the gradient.
"""

import csv
import io
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn
from torch.nn import functional as F

from components.models.m3diff.modeling import M3DiffForConditionalGeneration
from components.models.m3diff.processing import M3DiffProcessor
from components.models.m3diff.tuning import add_lora, parameter_counts, trainable_groups, unwrapped
from components.models.fused import attention_kernels, fused_attention, make_fused
from components.train.params import Train
from components.train.batches import Loader, MicroBatch, Samples, Schedule, read_samples
from components.train.engine import (
    build_engine,
    cosine_with_warmup,
    export,
    load_state,
    save_state,
    set_learning_rates,
)

CURVE_COLUMNS = ("step", "epoch", "loss", "lr", "lr_vision", "lr_mdp", "grad_norm", "val_loss")


class Runtime(Protocol):
    """Where the loop runs: its place among the workers, and where its checkpoints go."""

    rank: int
    ranks: int

    def newest(self) -> AbstractContextManager[Path | None]: ...

    def keep(self, folder: Path, metrics: dict[str, float]) -> None: ...

    def scratch(self) -> AbstractContextManager[Path]: ...


def token_loss(model: nn.Module, batch: MicroBatch, processor: M3DiffProcessor, device: torch.device) -> Tensor:
    """Summed cross-entropy over the micro-batch's weighted supervised tokens; logits on those positions alone."""
    packed = batch.packed
    with fused_attention():
        logits = model(
            input_ids=packed.input_ids.to(device),
            position_ids=packed.position_ids.to(device),
            attention_mask=packed.mask(device, flex=device.type == "cuda"),
            pixel_values=processor.image_processor.to_pixels(batch.squares).to(device),
            batch_num_images=[2] * len(packed.input_ids),
            logits_to_keep=packed.supervised.to(device),
            use_cache=False,
        ).logits
    losses = F.cross_entropy(logits.float(), packed.labels.to(device), reduction="none")
    return (losses * batch.weights.to(device)).sum()


def prepare_model(cfg: Train) -> tuple[nn.Module, M3DiffProcessor]:
    """The base with a new MDP module and LoRA adapters, from the seed, and its processor."""
    torch.manual_seed(cfg.seed)
    model = M3DiffForConditionalGeneration.from_pretrained(
        cfg.base,
        mdp=cfg.mdp,
        dtype=torch.bfloat16 if cfg.precision == "bf16" else torch.float32,
        attn_implementation=attention_kernels(cfg.gpu and cfg.packing != "unpacked"),
    )
    processor = M3DiffProcessor.from_pretrained(cfg.base)
    adapted = add_lora(model, cfg.lora_rank, cfg.lora_alpha)
    make_fused(model, cfg.checkpointing)
    return adapted.train(), processor


def run_loop(cfg: Train, mixture: Path, out: Path, runtime: Runtime) -> dict[str, float]:
    """Train to the end and, on rank 0, write `out/checkpoint` and `out/curves.csv`; returns the run's figures."""
    torch.set_num_threads(cfg.cpus_per_worker)
    device = torch.device("cuda", torch.cuda.current_device()) if cfg.gpu else torch.device("cpu")
    model, processor = prepare_model(cfg)
    groups = trainable_groups(unwrapped(model), cfg.lora_rank, cfg.lr, cfg.lr_vision, cfg.lr_mdp)
    engine = build_engine(cfg, model.to(device), groups, runtime.ranks)
    train, val = read_samples(mixture, "train"), read_samples(mixture, "val")
    schedule = Schedule(
        train, cfg.packing, cfg.pack_k, cfg.seed, cfg.global_batch, cfg.micro_batch, cfg.epochs, runtime.ranks
    )
    loader = Loader(train, processor, threads=cfg.cpus_per_worker)
    curve = Curve()
    with runtime.newest() as folder:
        done = load_state(engine, folder) if folder else 0
        if folder:
            curve.read(folder / "curves.csv")
            print(f"train: resumed after step {done} of {schedule.steps}", flush=True)
    validate = Validation(val, cfg, processor, device)
    waited, started, captions = 0.0, time.monotonic(), 0
    stream = loader.stream(schedule, runtime.rank, done)
    for step in range(done, schedule.steps):
        before = time.monotonic()
        batches = next(stream)
        waited += time.monotonic() - before
        factor = cosine_with_warmup(step, schedule.steps, cfg.warmup_share)
        set_learning_rates(engine, groups, factor)
        loss = take_step(engine, batches, processor, device, runtime.ranks)
        captions += sum(batch.captions for batch in batches)
        last = step + 1 == schedule.steps
        save = last or (step + 1) % cfg.checkpoint_every_steps == 0
        val_loss = validate(engine) if save else None
        rates = [rate and rate * factor for rate in (cfg.lr, cfg.lr_vision, cfg.lr_mdp)]
        epoch = round((step + 1) / schedule.steps_per_epoch, 4)
        curve.add(step + 1, epoch, loss, *rates, float(engine.get_global_grad_norm() or 0.0), val_loss)
        if runtime.rank == 0 and ((step + 1) % 20 == 0 or last):
            speed = captions * runtime.ranks / (time.monotonic() - started)
            tail = f"  val {val_loss:.4f}" if val_loss is not None else ""
            print(f"train: step {step + 1}/{schedule.steps}  loss {loss:.4f}  {speed:.0f} captions/s{tail}", flush=True)
        if save:
            keep_state(engine, runtime, step + 1, curve, {"loss": loss, "step": step + 1})
    seconds = time.monotonic() - started
    export(engine, processor, out / "checkpoint", cfg.base, runtime.rank)
    if runtime.rank == 0:
        curve.write(out / "curves.csv")
    return {
        **parameter_counts(engine.module),
        "steps": schedule.steps,
        "samples": len(train),
        "captions": captions * runtime.ranks,
        "seconds": seconds,
        "captions_per_s": captions * runtime.ranks / max(seconds, 1e-9),
        "waiting_share": waited / max(seconds, 1e-9),
        "loss": curve.last("loss"),
        "val_loss": curve.last("val_loss"),
    }


def take_step(
    engine: DeepSpeedEngine,
    batches: list[MicroBatch],
    processor: M3DiffProcessor,
    device: torch.device,
    ranks: int,
) -> float:
    """One optimizer step over a global batch; returns its mean loss per supervised token."""
    tokens = torch.tensor(float(sum(batch.supervised_tokens for batch in batches)))
    total = torch.zeros(())
    _sum_over_ranks(tokens, ranks)
    for batch in batches:
        loss = token_loss(engine, batch, processor, device)
        total += loss.detach().cpu()
        engine.backward(loss * (ranks * len(batches)) / tokens.to(device))  # DeepSpeed divides by both
        engine.step()
    _sum_over_ranks(total, ranks)
    mean = float(total / tokens)
    if not torch.isfinite(torch.tensor(mean)):
        raise FloatingPointError("the loss is not finite: training diverged; lower lr or raise warmup_share")
    return mean


def _sum_over_ranks(value: Tensor, ranks: int) -> None:
    if ranks > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        summed = value.to(device)
        dist.all_reduce(summed)
        value.copy_(summed)


def keep_state(engine: DeepSpeedEngine, runtime: Runtime, step: int, curve: "Curve", metrics: dict[str, float]) -> None:
    with runtime.scratch() as folder:
        save_state(engine, folder, step, runtime.rank)
        if runtime.rank == 0:
            curve.write(folder / "curves.csv")
        runtime.keep(folder, metrics)


class Validation:
    """The mean loss per supervised token over the first `val_pairs` pairs of the validation split."""

    def __init__(self, samples: Samples, cfg: Train, processor: M3DiffProcessor, device: torch.device) -> None:
        self.processor, self.device = processor, device
        loader = Loader(samples, processor, threads=cfg.cpus_per_worker)
        pairs = samples.pairs()[: cfg.val_pairs]
        groups = [pairs[at : at + cfg.micro_batch] for at in range(0, len(pairs), cfg.micro_batch)]
        self.batches = [loader.build([(rows, 1) for rows in group]) for group in groups]

    @torch.no_grad()
    def __call__(self, engine: DeepSpeedEngine) -> float | None:
        if not self.batches:
            return None
        engine.eval()
        total = sum(float(token_loss(engine, batch, self.processor, self.device)) for batch in self.batches)
        engine.train()
        return total / sum(batch.supervised_tokens for batch in self.batches)


class Curve:
    """The run's curves, a row per step; they travel with each checkpoint, so that a resumed run loses none."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def add(self, *values: float | None) -> None:
        self.rows.append(["" if value is None else f"{value:.6g}" for value in values])

    def last(self, column: str) -> float:
        at = CURVE_COLUMNS.index(column)
        return next((float(row[at]) for row in reversed(self.rows) if row[at]), float("nan"))

    def read(self, path: Path) -> None:
        with path.open(newline="") as file:
            self.rows = list(csv.reader(file))[1:]

    def write(self, path: Path) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([CURVE_COLUMNS, *self.rows])
        path.write_text(text.getvalue())

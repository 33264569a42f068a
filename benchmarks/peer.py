"""The stock way to train the same model, the benchmark's baseline: transformers' Trainer with peft's adapters.

transformers' LLaVA-OneVision with the MDP module between its encoder and its projector, SDPA, no checkpointing, one
caption a sequence, padded on the right, labels for transformers' own loss. Rows, their order, the global batch, the
trainable tensors, rates, clipping and the loss's normalisation are those of the project's training.
"""

import time
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
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
from m3diff.models.m3diff_model import DifferentialPerception
from m3diff.models.m3diff_settings import MDPConfig
from m3diff.models.tuning import prepare, trainable_groups
from m3diff.stages.train.batches import Loader, Schedule
from m3diff.stages.train.job import Job
from m3diff.stages.train.samples import Samples, read_training_samples

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
    """The captions in the order in which the project's unpacked training takes them. With `prepared`, tokens and pixels
    are made once and not in the step."""

    def __init__(self, samples: Samples, schedule: Schedule, loader: Loader, processor: Any, prepared: bool) -> None:
        self.schedule, self.loader, self.samples, self.processor = schedule, loader, samples, processor
        self.order = lru_cache(maxsize=4)(self._order)
        self.item = lru_cache(maxsize=None)(self._encoded) if prepared else self._encoded

    def _order(self, step: int) -> list[int]:
        return [int(row) for sequence in self.schedule.global_sequences(step) for row in sequence]

    def __len__(self) -> int:
        return MAX_STEPS * self.schedule.global_batch

    def __getitem__(self, number: int) -> dict[str, Any]:
        step, place = divmod(number, self.schedule.global_batch)
        return self.item(self.order(step)[place])

    def _encoded(self, row: int) -> dict[str, Any]:
        prompt = self.processor.encode_prompt(self.samples.question[row])
        reference = self.processor.encode_reference(self.samples.reference[row])
        images = np.stack([self.loader.prepared(*file) for file in self.samples.images(row)])
        return {
            "input_ids": torch.tensor([*prompt, *reference]),
            "labels": torch.tensor([-100] * len(prompt) + list(reference)),
            "pixel_values": self._pixels(images),
        }

    def _pixels(self, images: np.ndarray) -> Tensor:
        """uint8 [2, side, side, 3] to normalised [2, 3, side, side]."""
        ours = self.processor.image_processor
        mean, std = torch.tensor(ours.image_mean)[:, None, None], torch.tensor(ours.image_std)[:, None, None]
        return torch.from_numpy(images).permute(0, 3, 1, 2).float().div_(255).sub_(mean).div_(std)


@dataclass
class Collator:
    """Rows to a padded batch."""

    pad_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        input_ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=self.pad_id)
        labels = pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        pixels = torch.cat([row["pixel_values"] for row in rows])
        return {
            "input_ids": input_ids,
            "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
            "labels": labels,
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


def trainer_for(job: Job, prepared: bool, callbacks: list[TrainerCallback]) -> PeerTrainer:
    """The Trainer of an unpacked job: `global_batch` captions a step, `micro_batch` at a time."""
    cfg, compute = job.cfg, job.compute
    model, processor = stock_model(job)
    groups = trainable_groups(model, FAMILIES[job.model.family], job.model)
    slots = [{"params": group.parameters, "lr": group.lr} for group in groups]
    optimizer = torch.optim.AdamW(slots, betas=(0.9, 0.999), weight_decay=cfg.weight_decay, fused=True)
    samples = read_training_samples(job.mixture, job.run_dir)
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
        train_dataset=Rows(samples, schedule, loader, processor, prepared),
        data_collator=Collator(processor.pad_id),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        callbacks=callbacks,
    )


def serve_peer(pipe: Connection, job: Job, prepared: bool = False) -> None:
    """Take as many steps as the pipe asks for, and answer with seconds and losses, until it asks for none."""
    torch.set_num_threads(job.compute.cpus_per_worker)
    rounds = Rounds(pipe, job.compute.gpu)
    logging.disable_progress_bar()
    trainer = trainer_for(job, prepared, [rounds])
    trainer.remove_callback(PrinterCallback)
    rounds.trainer = trainer
    trainer.train()

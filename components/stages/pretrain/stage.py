"""pretrain: the tiny base, a LLaVA-OneVision or a BLIP-2 of transformers' own classes that can describe MiniChange
images.

The real recipes start from models that have seen images but no differences. So do the embedded ones: `curriculum.py`
says what a base learns, never a difference. Deterministic; run: `make base`, `make base FAMILY=blip2idc`.
"""

import csv
import io
import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from m3diff.datasets.minichange.levels import LEVELS
from m3diff.datasets.minichange.render import render
from m3diff.datasets.minichange.scene import Level, Scene
from m3diff.records.files import write_atomic
from m3diff.records.progress import progress
from m3diff.stages.pretrain.bases import Architecture, architecture_of
from m3diff.stages.pretrain.curriculum import Task, curriculum
from m3diff.stages.pretrain.optimizer import Optimizer
from m3diff.stages.pretrain.params import Pretrain
from m3diff.stages.pretrain.segmentation import Segmentation

LOG_EVERY = 200  # steps


def pretrain(cfg: Pretrain, out: Path) -> None:
    """Train the base and write it to `out`: a LLaVA-OneVision or BLIP-2 directory in Hugging Face layout, with the
    recipe and the log of the run that made it."""
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    of = architecture_of(cfg)
    bank = _render_bank(cfg, of)
    model = of.make_model()
    print(f"base: {sum(p.numel() for p in model.parameters()):,} parameters, {len(bank.scenes):,} scenes")
    logs = {}
    if cfg.segmentation_steps:
        logs["segmentation_log.csv"] = _learn_to_segment(of, model, bank, cfg)
    logs["training_log.csv"] = _learn(of, model, bank, cfg)
    of.write(model, out)
    for name, log in logs.items():
        write_atomic(out / name, log.text)
    write_atomic(out / "recipe.json", json.dumps(cfg.model_dump(mode="json"), indent=2) + "\n")


@dataclass(frozen=True)
class Bank:
    """Scenes, of the levels in turn, and their images. The last `held_out` of them do not train."""

    pixels: np.ndarray  # [scenes, side, side, 3] uint8, as `prepare_image` gives them
    scenes: list[Scene]
    levels: tuple[Level, ...]
    held_out: int

    @property
    def kept(self) -> int:
        """Return how many scenes train."""
        return len(self.scenes) - self.held_out

    def sample(self, rng: np.random.Generator, turn: int, count: int) -> np.ndarray:
        """Return numbers of `count` scenes that train, all of the level whose turn it is."""
        every = len(self.levels)
        level = turn % every
        return level + every * rng.choice(len(range(level, self.kept, every)), count, replace=False)

    def held_out_of(self, level: Level) -> np.ndarray:
        """Return numbers of the scenes of a level that do not train."""
        numbers = np.arange(self.kept, len(self.scenes))
        return numbers[numbers % len(self.levels) == self.levels.index(level)]


def _render_bank(cfg: Pretrain, of: Architecture) -> Bank:
    make = partial(_render_one, cfg, of)
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        made = pool.map(make, range(cfg.scenes), chunksize=250)
        bank = list(progress(made, "render", total=cfg.scenes, unit="scene"))
    return Bank(np.stack([pixels for pixels, _ in bank]), [scene for _, scene in bank], cfg.levels, cfg.held_out)


def _render_one(cfg: Pretrain, of: Architecture, number: int) -> tuple[np.ndarray, Scene]:
    """Return a scene, a fifth of them in the dark; a function of seed and number."""
    rng = np.random.default_rng([cfg.seed, number])
    level = LEVELS[cfg.levels[number % len(cfg.levels)]]
    scene = level.sample_scene(rng)
    if rng.random() < 0.2:
        scene = replace(scene, view=scene.view.dimmed(level.dark))
    return of.prepare_image(render(scene, cfg.image_px, rng)), scene


class Log:
    """The run as CSV, and on the screen: the mean loss of each task since the last row, and what is `right` of scenes
    that do not train, by level."""

    def __init__(self, tasks: Iterable[str], levels: tuple[Level, ...], right: str) -> None:
        self.text, self.start, self.images = "", time.monotonic(), 0
        self.levels, self.names = levels, list(dict.fromkeys(tasks))
        self.recent: dict[str, list[float]] = {name: [] for name in self.names}
        accuracies = [right] if len(levels) == 1 else [f"{right}: {level}" for level in levels]
        self._row("step", "images_seen", *(f"loss: {name}" for name in self.names), *accuracies, "seconds")

    def _row(self, *values: object) -> None:
        row = io.StringIO()
        csv.writer(row, lineterminator="\n").writerow(values)
        self.text += row.getvalue()
        print(*values, flush=True)

    def add(self, step: int, accuracies: list[float]) -> None:
        """Write a row and start the means anew."""
        losses = [round(float(np.mean(losses)), 4) if losses else "" for losses in self.recent.values()]
        self._row(step, self.images, *losses, *accuracies, round(time.monotonic() - self.start, 1))
        self.recent = {name: [] for name in self.names}


def _learn_to_segment(of: Architecture, model: torch.nn.Module, bank: Bank, cfg: Pretrain) -> Log:
    """The vision encoder alone (see `segmentation.py`)."""
    encoder = of.encoder(model)
    segmentation = Segmentation(encoder, cfg.width)
    rng = np.random.default_rng([cfg.seed, 1])
    log = Log(["segmentation"], cfg.levels, "held_out_kind_accuracy")

    def loss(chosen: np.ndarray, images: int) -> tuple[Tensor, float]:
        patches = of.patches(encoder, bank.pixels[chosen], images)
        return segmentation.loss(patches, [bank.scenes[number] for number in chosen], images)

    @torch.no_grad()
    def right(level: Level) -> float:
        return round(loss(bank.held_out_of(level), 1)[1], 4)

    def work(step: int) -> tuple[str, Tensor, int]:
        chosen = bank.sample(rng, step, cfg.images_per_batch)
        return "segmentation", loss(chosen, of.images_of_a_picture(step))[0], len(chosen)

    optimizer = Optimizer(segmentation, cfg, cfg.segmentation_steps)
    _run("segment", cfg.segmentation_steps, optimizer, log, work, right)
    return log


def _learn(of: Architecture, model: torch.nn.Module, bank: Bank, cfg: Pretrain) -> Log:
    """The first task alone, then one task a step, in turn. An encoder that can segment is frozen until the language
    model has learnt to read it."""
    rng = np.random.default_rng(cfg.seed)
    tasks = curriculum(cfg.levels, cfg.tasks)
    log = Log((task.name for task in tasks), cfg.levels, "held_out_scene_accuracy")

    def work(step: int) -> tuple[str, Tensor, int]:
        task = task_of(step, cfg.first_task_steps, tasks)
        of.encoder(model).requires_grad_(step > cfg.first_task_steps or not cfg.segmentation_steps)
        chosen = bank.sample(rng, step // len(tasks), cfg.images_per_batch)
        loss, _ = _loss(of, model, bank, chosen, task, rng)
        return task.name, loss, len(chosen) if task.images else 0

    right = partial(_held_out_accuracy, of, model, bank)
    _run("base", cfg.steps, Optimizer(model, cfg, cfg.steps), log, work, right)
    return log


def _run(
    name: str,
    steps: int,
    optimizer: Optimizer,
    log: Log,
    work: Callable[[int], tuple[str, Tensor, int]],
    right: Callable[[Level], float],
) -> None:
    """Take the steps. `work` gives of each step the task, the loss and the number of images; `right`, what is right of
    a level's scenes that do not train."""
    for step in progress(range(1, steps + 1), name, total=steps, unit="step"):
        task, loss, images = work(step)
        log.recent[task].append(optimizer(loss))
        log.images += images
        if step % LOG_EVERY == 0 or step == steps:
            log.add(step, [right(level) for level in log.levels])


def task_of(step: int, first_task_steps: int, tasks: tuple[Task, ...]) -> Task:
    """The task of a step, counted from 1."""
    return tasks[step % len(tasks) if step > first_task_steps else 0]


def _loss(
    of: Architecture, model: torch.nn.Module, bank: Bank, chosen: np.ndarray, task: Task, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Mean loss over the answers' tokens, and for each sample whether every token was right under teacher forcing."""
    groups = chosen.reshape(-1, task.images or 1)
    asked = [task.ask(rng, [bank.scenes[number] for number in group]) for group in groups]
    ids, supervised = _encode(of, asked, task.images)
    logits = of.logits(model, bank.pixels[chosen] if task.images else None, task.images, ids, supervised)
    labels = ids.roll(-1, dims=1)[supervised]
    right = torch.ones(len(groups), dtype=torch.bool)
    right[supervised.nonzero()[:, 0][logits.detach().argmax(-1) != labels]] = False
    return torch.nn.functional.cross_entropy(logits, labels), right


def _encode(of: Architecture, asked: list[tuple[str, str]], images: int) -> tuple[Tensor, Tensor]:
    """Token ids [samples, tokens] of questions and answers, padded on the right, and a mask of the places whose next
    token is the answer's."""
    prompts = [of.encode_prompt(question, images) for question, _ in asked]
    answers = [of.encode_reference(answer) for _, answer in asked]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(asked), length), of.pad_id)
    supervised = torch.zeros((len(asked), length), dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        supervised[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
    return ids, supervised


@torch.no_grad()
def _held_out_accuracy(of: Architecture, model: torch.nn.Module, bank: Bank, level: Level) -> float:
    """Share of a level's held-out scenes whose whole description is right, token by token, under teacher forcing."""
    chosen, (first, *_) = bank.held_out_of(level), curriculum((level,))
    _, right = _loss(of, model, bank, chosen, first, np.random.default_rng(0))
    return round(float(right.float().mean()), 4)

"""pretrain: the tiny base, a LLaVA-OneVision or a BLIP-2 of transformers' own classes that can describe MiniChange
images.

The real recipes start from models that have seen images but no differences. So do the embedded ones: they learn to
describe images, whole, place by place, or the things that are asked for. Two images of a task are always unrelated
(OneDiff's Coupled Sample Training, arXiv 2407.05645): the base is never shown a difference. Asking for a thing by its
looks teaches the way from looks to place and, where there is none, to "nothing"; without that way a short fine-tuning
run does not find the place of a change (see LOG.md).

Before them the vision encoder may learn to segment a scene, through a linear head that is dropped: each patch says, of
POINTS x POINTS points in it, what lies there, nothing, a mark or an object of which kind, colour, size and state. An
encoder that learns from descriptions alone gets as far in ten times as long (LOG.md); LLaVA-OneVision starts from an
encoder that can see, too.

Deterministic; run: `make base`, `make base FAMILY=blip2idc`.

torch orthogonalises every update of Muon in bf16. Where a processor has to emulate it, that takes 24 times as long as
in fp32 (54 and 2.3 ms for a matrix of 128 x 256 on an AMD EPYC), five sixths of a step of the tiny base. So it is
done in fp32 there.
"""

import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.optim import _muon as theirs
from transformers import Qwen2Tokenizer

from m3diff.datasets.minichange.language import describe_cells, describe_scene, describe_things, references
from m3diff.datasets.minichange.render import render
from m3diff.datasets.minichange.scene import (
    COLORS,
    KINDS,
    LEVELS,
    MARK_WIDTH,
    PLACES,
    STATES,
    WIDTHS,
    Level,
    Scene,
    pick,
    sample_types,
)
from m3diff.records.files import write_atomic
from m3diff.records.progress import progress
from m3diff.records.schemas import CHANGE_TYPES
from m3diff.stages.pretrain.bases import DESCRIBE, QUESTIONS, SPECIAL, Architecture, architecture_of
from m3diff.stages.pretrain.params import TASKS, Pretrain, TaskName

LOG_EVERY = 200  # steps
ASKED_FOR = 4  # things a question names


@dataclass(frozen=True)
class Task:
    """`images` scenes make one sample: a question and its answer."""

    name: TaskName
    images: int
    ask: Callable[[np.random.Generator, list[Scene]], tuple[str, str]]


def whole(rng: np.random.Generator, scenes: list[Scene]) -> tuple[str, str]:
    """Each image in reading order."""
    if len(scenes) == 1:
        return DESCRIBE[0], describe_scene(scenes[0])
    return DESCRIBE[1], "; ".join(f"image {k}: {describe_scene(s)}" for k, s in enumerate(scenes, start=1))


def side_by_side(rng: np.random.Generator, scenes: list[Scene]) -> tuple[str, str]:
    """Both images, place by place in any order."""
    first, second = (describe_cells(scene) for scene in scenes)
    cells = rng.permutation(sorted({*first, *second}))
    parts = [f"{PLACES[c]} {first.get(c, 'nothing')} then {second.get(c, 'nothing')}" for c in cells]
    return "Describe both images place by place.", ", ".join(parts)


def asked_for(rng: np.random.Generator, scenes: list[Scene]) -> tuple[str, str]:
    """Some things, named by looks that at most one thing of the images has: where each is, or that there is none."""
    things = [thing for scene in scenes for thing in describe_things(scene)]
    here = [(f"{PLACES[cell]} {text}", tuple(text.split()[1:4])) for cell, text in things]  # `a small red box ...`
    answers: dict[str, str] = {}
    while len(answers) < ASKED_FOR:
        asked = _question(rng, [looks for _, looks in here])
        fitting = [answer for answer, looks in here if set(asked.split()) <= set(looks)]
        if len(fitting) < 2 and (fitting or rng.random() < 0.5):
            answers[asked] = fitting[0] if fitting else "nothing"
    return f"Describe the {', the '.join(answers)}.", ", ".join(answers.values())


def _question(rng: np.random.Generator, here: list[tuple[str, ...]]) -> str:
    if rng.random() < 0.4:
        return f"{pick(rng, COLORS)} {pick(rng, KINDS)}" if rng.random() < 0.8 else "mark"
    looks = pick(rng, here)
    if len(looks) == 1:
        return looks[0]
    size, color, kind = looks
    return pick(rng, (kind, f"{color} {kind}", f"{size} {kind}", *2 * (f"{size} {color} {kind}",)))


def sentence(levels: tuple[Level, ...], rng: np.random.Generator, scenes: list[Scene]) -> tuple[str, str]:
    """A caption without any image, of one of the levels: fine-tuning leaves embeddings and head frozen, so the base
    must know the words, those of the questions, too."""
    level = levels[0] if len(levels) == 1 else pick(rng, levels)
    types = sample_types(rng, int(rng.integers(12)), multi_change_share=0.3)
    changes = LEVELS[level].sample_pair(rng, types)[3] if rng.random() < 0.85 else ()
    return str(pick(rng, QUESTIONS)), references(changes, 5)[int(rng.integers(5))]


def curriculum(levels: tuple[Level, ...], tasks: tuple[TaskName, ...] = TASKS) -> tuple[Task, ...]:
    """The tasks of these names in turn, one a step; what asks of two images comes twice."""
    every = (
        Task("image", 1, whole),
        Task("asked for in two", 2, asked_for),
        Task("side by side", 2, side_by_side),
        Task("asked for", 1, asked_for),
        Task("two images", 2, whole),
        Task("asked for in two", 2, asked_for),
        Task("side by side", 2, side_by_side),
        Task("sentence", 0, partial(sentence, levels)),
    )
    return tuple(task for task in every if task.name in tasks)


def train_tokenizer(seed: int, levels: tuple[Level, ...]) -> Qwen2Tokenizer:
    """A byte-level BPE of Qwen2's kind on MiniChange's sentences: its words are single tokens, all text has tokens.

    It is the same whichever tasks the base is taught.
    """
    tasks = curriculum(levels)
    rng = np.random.default_rng(seed)
    texts = ["system user assistant"] * 50
    texts += references((), 5) * 50
    for number in range(6_000):
        task, level = tasks[number % len(tasks)], LEVELS[levels[number // len(tasks) % len(levels)]]
        question, answer = task.ask(rng, [level.sample_scene(rng) for _ in range(task.images)])
        changes = level.sample_pair(rng, (CHANGE_TYPES[number % 12],))[3]
        texts += [f"{question} {answer}", references(changes, 5)[number % 5]]
    bpe = Tokenizer(models.BPE())
    stock: Any = Qwen2Tokenizer().backend_tokenizer
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = stock.normalizer, stock.pre_tokenizer, stock.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        min_frequency=20,
        special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    trained: dict[str, Any] = json.loads(bpe.to_str())["model"]
    merges: Any = [tuple(merge) for merge in trained["merges"]]
    return Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=merges,
        eos_token="<|im_end|>",
        additional_special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
    )


POINTS = 4  # a side of a patch
NONE = -1
SIZES = tuple(dict.fromkeys(size for widths in WIDTHS.values() for size in widths))
SHOWN = tuple((kind, state) for kind, states in STATES.items() for state in states)
MARK = 1 + len(KINDS)
# How many there are of what (0 is nothing, then KINDS, then a mark), of colours, of sizes and of states
CLASSES = (MARK + 1, len(COLORS), len(SIZES), len(SHOWN))


def segment(scene: Scene, rows: int, columns: int) -> np.ndarray:
    """Return what the frame shows at rows x columns points, an object as wide and as high as its size.

    Returns: [rows, columns, 4] int8, the classes of CLASSES, rows from the top; NONE where a class does not apply.
    """
    found = np.full((rows, columns, len(CLASSES)), NONE, dtype=np.int8)
    found[..., 0] = 0
    points = (np.arange(rows) + 0.5) / rows, (np.arange(columns) + 0.5) / columns
    for mark in scene.marks:
        found[_covered(scene, mark.center, MARK_WIDTH, points)] = (MARK, NONE, NONE, NONE)
    for thing in scene.things:
        state = SHOWN.index((thing.kind, thing.state)) if thing.kind in STATES else NONE
        classes = (1 + KINDS.index(thing.kind), COLORS.index(thing.color), SIZES.index(thing.size), state)
        found[_covered(scene, thing.center, WIDTHS[scene.level][thing.size], points)] = classes
    return found


def _covered(
    scene: Scene, center: tuple[float, float], width: float, points: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, ...]:
    (left, top), (right, bottom) = (
        scene.view.project((center[0] + half, center[1] + half)) for half in (-width / 2, width / 2)
    )
    down, across = points
    return np.ix_((down > top) & (down < bottom), (across > left) & (across < right))


class Segmentation(nn.Module):
    """The vision encoder, which trains along, and the head on its patches."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, POINTS * POINTS * sum(CLASSES))

    def loss(self, patches: Tensor, scenes: list[Scene], images: int) -> tuple[Tensor, float]:
        """The classes' mean losses added up, and the share of points on objects and marks whose kind is right. Each
        picture shows so many of the scenes, one below the other.

        Args:
            patches: [pictures, patches, width].
        """
        count = round(patches.shape[1] ** 0.5)  # patches a side
        cells, side = self.head(patches).view(len(patches), count, count, POINTS, POINTS, -1), count * POINTS
        logits = cells.permute(0, 1, 3, 2, 4, 5).reshape(len(patches), side, side, -1).split(CLASSES, -1)
        shown = np.stack([segment(scene, side // images, side) for scene in scenes])
        truth = torch.from_numpy(shown).long().view(-1, side, side, len(CLASSES))
        losses = [
            nn.functional.cross_entropy(each.flatten(0, 2), truth[..., k].flatten(), ignore_index=NONE)
            for k, each in enumerate(logits)
        ]
        kinds = truth[..., 0]
        right = (logits[0].argmax(-1) == kinds)[kinds > 0]
        return torch.stack(losses).sum(), float(right.float().mean())


def pretrain(cfg: Pretrain, out: Path) -> None:
    """Train the base and write it to `out`: a LLaVA-OneVision or BLIP-2 directory in Hugging Face layout, with the
    recipe and the log of the run that made it."""
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    of = architecture_of(cfg, None if cfg.blip2 else train_tokenizer(cfg.seed, cfg.levels))
    bank = render_bank(cfg, of)
    model = of.make_model()
    print(f"base: {sum(p.numel() for p in model.parameters()):,} parameters, {len(bank.scenes):,} scenes")
    segmentation = _learn_to_segment(of, model, bank, cfg) if cfg.segmentation_steps else ""
    training = _learn(of, model, bank, cfg)
    of.write(model, out)
    if segmentation:
        write_atomic(out / "segmentation_log.csv", segmentation)
    write_atomic(out / "training_log.csv", training)
    write_atomic(out / "recipe.json", json.dumps(cfg.model_dump(mode="json"), indent=2) + "\n")


@dataclass(frozen=True)
class Bank:
    """Scenes, of the levels in turn, and their images. The last `held_out` of them do not train."""

    pixels: np.ndarray  # [scenes, side, side, 3] uint8, as `prepare_image` gives them
    scenes: list[Scene]
    levels: tuple[Level, ...]
    held_out: int

    def sample(self, rng: np.random.Generator, turn: int, count: int) -> np.ndarray:
        """Return numbers of `count` scenes that train, all of the level whose turn it is."""
        every = len(self.levels)
        level = turn % every
        trains = range(level, len(self.scenes) - self.held_out, every)
        return level + every * rng.choice(len(trains), count, replace=False)

    def held_out_of(self, level: Level) -> np.ndarray:
        """Return numbers of the scenes of a level that do not train."""
        numbers = np.arange(len(self.scenes))[-self.held_out :]
        return numbers[numbers % len(self.levels) == self.levels.index(level)]


def render_bank(cfg: Pretrain, of: Architecture) -> Bank:
    """Draw the scenes, a fifth of them in the dark; each is a function of seed and number."""
    pixels, scenes = list[np.ndarray](), list[Scene]()
    for number in progress(range(cfg.scenes), "render", total=cfg.scenes, unit="scene"):
        rng = np.random.default_rng([cfg.seed, number])
        level = LEVELS[cfg.levels[number % len(cfg.levels)]]
        scene = level.sample_scene(rng)
        if rng.random() < 0.2:
            scene = replace(scene, view=replace(scene.view, brightness=level.dark))
        pixels.append(of.prepare_image(render(scene, cfg.image_px, rng)))
        scenes.append(scene)
    return Bank(np.stack(pixels), scenes, cfg.levels, cfg.held_out)


def orthogonalised(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return the Newton-Schulz iteration of torch's Muon, in the precision of `grad`, [rows, columns]."""
    a, b, c = coefficients
    wide = grad.T if grad.size(0) > grad.size(1) else grad
    found = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if grad.size(0) > grad.size(1) else found


if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
    theirs._zeropower_via_newtonschulz = orthogonalised  # type: ignore[assignment]  # its parameters' names


class Optimizer:
    """Muon for the matrices and AdamW for the rest, with warm-up, a plateau and cosine to the end. From nothing, Muon
    gets as far in half the steps (see LOG.md)."""

    def __init__(self, model: nn.Module, cfg: Pretrain, steps: int) -> None:
        self.model, self.steps = model, steps
        matrices: list[Tensor] = []  # of linear layers; the rest: embeddings, convolutions, norms and biases
        rest: list[Tensor] = []
        for name, p in model.named_parameters():
            (matrices if p.ndim == 2 and "embed" not in name else rest).append(p)
        decay, shape = cfg.weight_decay, partial(plateau, cfg.warmup_steps, steps)
        muon = torch.optim.Muon(matrices, lr=cfg.lr_matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(rest, lr=cfg.lr, betas=(0.9, 0.98), weight_decay=decay)
        self.optimizers = (muon, adamw)
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, shape) for optimizer in self.optimizers]

    def __call__(self, loss: Tensor) -> float:
        """Take one step; the loss as a number."""
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        return float(loss.detach())


def plateau(warmup: int, steps: int, step: int) -> float:
    """Return the factor of the learning rate: up to 1, there for half the run, then down a cosine to 0.01."""
    if step < warmup:
        return (step + 1) / warmup
    done = max(0.0, 2 * step / steps - 1)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _learn_to_segment(of: Architecture, model: nn.Module, bank: Bank, cfg: Pretrain) -> str:
    """Train the vision encoder alone (see the head of this file); return the log."""
    encoder = of.encoder(model)
    segmentation = Segmentation(encoder, cfg.width)
    rng, stacked = np.random.default_rng([cfg.seed, 1]), cfg.blip2 is not None and cfg.blip2.stacked

    def loss(chosen: np.ndarray, images: int) -> tuple[Tensor, float]:
        patches = of.patches(encoder, bank.pixels[chosen], images)
        return segmentation.loss(patches, [bank.scenes[number] for number in chosen], images)

    def work(step: int) -> tuple[str, Tensor, int]:
        chosen = bank.sample(rng, step, cfg.images_per_batch)
        images = 1 + step % 2 if stacked else 1  # pictures of one image and of two in turn
        return "segmentation", loss(chosen, images)[0], len(chosen)

    def right(level: Level) -> float:
        return loss(bank.held_out_of(level), 1)[1]

    optimizer = Optimizer(segmentation, cfg, cfg.segmentation_steps)
    return _run(optimizer, ["segmentation"], work, cfg.levels, "held_out_kind_accuracy", right)


def _learn(of: Architecture, model: nn.Module, bank: Bank, cfg: Pretrain) -> str:
    """Train on the first task alone, then on one task a step, in turn; return the log. An encoder that can segment is
    frozen until the language model has learnt to read it. The accuracy is the share of held-out scenes whose whole
    description is right, token by token, under teacher forcing."""
    rng = np.random.default_rng(cfg.seed)
    tasks = curriculum(cfg.levels, cfg.tasks)

    def work(step: int) -> tuple[str, Tensor, int]:
        alone = step <= cfg.first_task_steps
        task = tasks[0 if alone else step % len(tasks)]
        of.encoder(model).requires_grad_(not (alone and cfg.segmentation_steps))
        chosen = bank.sample(rng, step // len(tasks), cfg.images_per_batch)
        loss, _ = _loss(of, model, bank, chosen, task, rng)
        return task.name, loss, len(chosen) if task.images else 0

    def right(level: Level) -> float:
        chosen, (first, *_) = bank.held_out_of(level), curriculum((level,))
        return float(_loss(of, model, bank, chosen, first, np.random.default_rng(0))[1].float().mean())

    names = [task.name for task in tasks]
    return _run(Optimizer(model, cfg, cfg.steps), names, work, cfg.levels, "held_out_scene_accuracy", right)


def _run(
    optimizer: Optimizer,
    tasks: Iterable[str],
    work: Callable[[int], tuple[str, Tensor, int]],
    levels: tuple[Level, ...],
    accuracy: str,
    right: Callable[[Level], float],
) -> str:
    """Take the steps. Return the run as CSV, which is printed too: the mean loss of each task since the last row, and
    the share that is `right` of scenes that do not train, by level.

    Args:
        work: a step's task, loss and number of images.
    """
    text, began, seen = io.StringIO(), time.monotonic(), 0
    recent: dict[str, list[float]] = {task: [] for task in tasks}
    columns = [accuracy] if len(levels) == 1 else [f"{accuracy}: {level}" for level in levels]

    def row(*values: object) -> None:
        csv.writer(text, lineterminator="\n").writerow(values)
        print(*values, flush=True)

    row("step", "images_seen", *(f"loss: {task}" for task in recent), *columns, "seconds")
    for step in progress(range(1, optimizer.steps + 1), "base", total=optimizer.steps, unit="step"):
        task, loss, images = work(step)
        recent[task].append(optimizer(loss))
        seen += images
        if step % LOG_EVERY == 0 or step == optimizer.steps:
            losses = [round(float(np.mean(losses)), 4) if losses else "" for losses in recent.values()]
            with torch.no_grad():
                accuracies = [round(right(level), 4) for level in levels]
            row(step, seen, *losses, *accuracies, round(time.monotonic() - began, 1))
            recent = {task: [] for task in recent}
    return text.getvalue()


def _loss(
    of: Architecture, model: nn.Module, bank: Bank, chosen: np.ndarray, task: Task, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    groups = chosen.reshape(-1, task.images or 1)
    asked = [task.ask(rng, [bank.scenes[number] for number in group]) for group in groups]
    ids, supervised = _encode(of, asked, task.images)
    logits = of.logits(model, bank.pixels[chosen] if task.images else None, task.images, ids, supervised)
    labels = ids.roll(-1, dims=1)[supervised]
    right = torch.ones(len(groups), dtype=torch.bool)
    right[supervised.nonzero()[:, 0][logits.detach().argmax(-1) != labels]] = False
    return nn.functional.cross_entropy(logits, labels), right


def _encode(of: Architecture, asked: list[tuple[str, str]], images: int) -> tuple[Tensor, Tensor]:
    """Token ids [samples, tokens] of questions and answers, padded on the right, and a mask of the places whose next
    token is the answer's."""
    prompts = [of.encode_prompt(question, images) for question, _ in asked]
    answers = [of.processor.encode_reference(answer) for _, answer in asked]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(asked), length), of.processor.pad_id)
    supervised = torch.zeros((len(asked), length), dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        supervised[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
    return ids, supervised

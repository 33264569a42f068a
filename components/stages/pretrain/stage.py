"""pretrain: train the tiny base model, a LLaVA-OneVision or BLIP-2, to describe images of MiniChange.

The published recipes start from models that have seen images but no differences. The quick-start recipes of this
project (profiles `embedded*`) do the same. The base learns to describe a whole image, an image place by place, or the
objects that a question asks for. If a sample has two images, they are always unrelated (OneDiff's Coupled Sample
Training, arXiv 2407.05645), so the base never sees a difference. Questions that describe an object teach the base to
find the object's place, and to answer "nothing" if there is no such object. Without these questions, a short
fine-tuning does not learn to find the place of a change (LOG.md).

Before the base learns descriptions, its vision encoder can be trained to segment scenes with a linear head that is
discarded afterwards. For each of 4 x 4 points in a patch (`POINTS_PER_PATCH_SIDE`), the head predicts whether the point
shows nothing, an object (with its kind, colour, size and state), or a mark, which a removed object leaves behind. An
encoder that learns only from descriptions takes ten times as long (LOG.md). LLaVA-OneVision also started from a trained
vision encoder.

The result is deterministic. Run this stage with `make base` or `make base FAMILY=blip2idc`.

torch orthogonalizes each update of Muon in bf16. On a processor that emulates bf16, this takes 24 times as long as in
fp32 (54 instead of 2.3 ms for a 128 x 256 matrix on an AMD EPYC), which is five sixths of a training step. On such
processors, `orthogonalize` replaces torch's function.
"""

import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.optim import _muon as torch_muon
from transformers import Qwen2Tokenizer

from m3diff.datasets.minichange.language import references
from m3diff.datasets.minichange.questions import ask_for_images, ask_for_objects, ask_for_places
from m3diff.datasets.minichange.render import render
from m3diff.datasets.minichange.scene import (
    COLORS,
    KINDS,
    MARK_WIDTH,
    SAMPLERS,
    STATES,
    WIDTHS,
    Change,
    Level,
    Scene,
    pick,
    sample_types,
)
from m3diff.records.errors import format_count
from m3diff.records.files import write_atomic
from m3diff.records.progress import progress
from m3diff.records.schemas import CHANGE_TYPES
from m3diff.stages.pretrain.bases import (
    QUESTIONS,
    SPECIAL_TOKENS,
    Architecture,
    create_architecture,
)
from m3diff.stages.pretrain.params import TASKS, Pretrain, TaskName

LOG_EVERY_STEPS = 200


@dataclass(frozen=True)
class PretrainTask:
    """A type of question that the base learns to answer.

    Attributes:
        name: name of the task in the log.
        image_count: number of images per sample.
        ask: function that creates a question and its answer from the scenes of a sample.
    """

    name: TaskName
    image_count: int
    ask: Callable[[np.random.Generator, list[Scene]], tuple[str, str]]


def ask_without_images(levels: tuple[Level, ...], rng: np.random.Generator, scenes: list[Scene]) -> tuple[str, str]:
    """Return a fine-tuning question without images, and a caption of a random change as the answer.

    Fine-tuning freezes the embeddings and the head, so the base must learn the words of captions and questions.
    """
    level = levels[0] if len(levels) == 1 else pick(rng, levels)
    types = sample_types(rng, int(rng.integers(12)), multi_change_share=0.3)
    changes: tuple[Change, ...] = ()
    if rng.random() < 0.85:
        changes = SAMPLERS[level].sample_pair(rng, types).changes
    question = str(pick(rng, QUESTIONS))
    captions = references(changes, 5)
    return question, captions[int(rng.integers(5))]


def make_curriculum(levels: tuple[Level, ...], names: tuple[TaskName, ...] = TASKS) -> tuple[PretrainTask, ...]:
    """Return the tasks with these names, in the order in which training alternates between them.

    The tasks `asked for in two` and `side by side` occur twice, so they are trained twice as often.
    """
    tasks = (
        PretrainTask("image", 1, ask_for_images),
        PretrainTask("asked for in two", 2, ask_for_objects),
        PretrainTask("side by side", 2, ask_for_places),
        PretrainTask("asked for", 1, ask_for_objects),
        PretrainTask("two images", 2, ask_for_images),
        PretrainTask("asked for in two", 2, ask_for_objects),
        PretrainTask("side by side", 2, ask_for_places),
        PretrainTask("sentence", 0, partial(ask_without_images, levels)),
    )
    return tuple(task for task in tasks if task.name in names)


def train_tokenizer(seed: int, levels: tuple[Level, ...]) -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer in the style of Qwen2 on MiniChange's sentences.

    MiniChange's words become single tokens, and any other text can also be encoded. The tokenizer does not depend on
    the tasks that the base learns.
    """
    tasks = make_curriculum(levels)
    rng = np.random.default_rng(seed)
    texts = ["system user assistant"] * 50
    texts += references((), 5) * 50
    for number in range(6_000):
        task = tasks[number % len(tasks)]
        sampler = SAMPLERS[levels[number // len(tasks) % len(levels)]]
        scenes = [sampler.sample_scene(rng) for _ in range(task.image_count)]
        question, answer = task.ask(rng, scenes)
        texts.append(f"{question} {answer}")
        changes = sampler.sample_pair(rng, (CHANGE_TYPES[number % 12],)).changes
        texts.append(references(changes, 5)[number % 5])
    tokenizer = Tokenizer(models.BPE())
    qwen2_tokenizer: Any = Qwen2Tokenizer().backend_tokenizer
    tokenizer.normalizer = qwen2_tokenizer.normalizer
    tokenizer.pre_tokenizer = qwen2_tokenizer.pre_tokenizer
    tokenizer.decoder = qwen2_tokenizer.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        min_frequency=20,
        special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bpe: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    merges: Any = [tuple(merge) for merge in bpe["merges"]]
    return Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=merges,
        eos_token="<|im_end|>",
        additional_special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
    )


POINTS_PER_PATCH_SIDE = 4
NOT_APPLICABLE = -1
SIZES = tuple(dict.fromkeys(chain.from_iterable(WIDTHS.values())))
KIND_STATES = tuple((kind, state) for kind, states in STATES.items() for state in states)
MARK_CLASS = 1 + len(KINDS)
# Number of classes for the kind (0 is nothing, followed by KINDS and a mark), the colour, the size and the state
CLASS_COUNTS = (MARK_CLASS + 1, len(COLORS), len(SIZES), len(KIND_STATES))


def classify_points(scene: Scene, rows: int, columns: int) -> np.ndarray:
    """Return the classes at rows x columns points of a scene. An object covers a square of its size.

    Returns:
        The classes in the order of CLASS_COUNTS, [rows, columns, 4] int8, with rows from the top. Classes that do not
        apply, such as the colour of a mark, are NOT_APPLICABLE.
    """
    classes = np.full((rows, columns, len(CLASS_COUNTS)), NOT_APPLICABLE, dtype=np.int8)
    classes[..., 0] = 0
    row_centers = (np.arange(rows) + 0.5) / rows
    column_centers = (np.arange(columns) + 0.5) / columns
    for mark in scene.marks:
        points = _points_in_square(scene, mark.center, MARK_WIDTH, row_centers, column_centers)
        classes[points] = (MARK_CLASS, NOT_APPLICABLE, NOT_APPLICABLE, NOT_APPLICABLE)
    for thing in scene.things:
        width = WIDTHS[scene.level][thing.size]
        points = _points_in_square(scene, thing.center, width, row_centers, column_centers)
        kind = 1 + KINDS.index(thing.kind)
        color = COLORS.index(thing.color)
        size = SIZES.index(thing.size)
        state = KIND_STATES.index((thing.kind, thing.state)) if thing.kind in STATES else NOT_APPLICABLE
        classes[points] = (kind, color, size, state)
    return classes


def _points_in_square(
    scene: Scene, center: tuple[float, float], width: float, row_centers: np.ndarray, column_centers: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return the indices of the points inside a square around a center, as seen by the scene's camera."""
    left_edge, top_edge = scene.view.project((center[0] - width / 2, center[1] - width / 2))
    right_edge, bottom_edge = scene.view.project((center[0] + width / 2, center[1] + width / 2))
    is_row_covered = (row_centers > top_edge) & (row_centers < bottom_edge)
    is_column_covered = (column_centers > left_edge) & (column_centers < right_edge)
    return np.ix_(is_row_covered, is_column_covered)


class Segmentation(nn.Module):
    """The vision encoder and a linear head that classifies points in the encoder's patches."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, POINTS_PER_PATCH_SIDE**2 * sum(CLASS_COUNTS))

    def loss_and_accuracy(self, patches: Tensor, scenes: list[Scene], images_per_picture: int) -> tuple[Tensor, float]:
        """Return the loss, and the accuracy of the predicted kind at points on objects and marks.

        The loss is the sum of the mean losses for kind, colour, size and state.

        Args:
            patches: patch features, [pictures, patches, width].
            scenes: the scenes in the pictures.
            images_per_picture: number of scenes per picture, which are stacked from top to bottom.
        """
        patches_per_side = round(patches.shape[1] ** 0.5)
        points_per_side = patches_per_side * POINTS_PER_PATCH_SIDE

        # 1. predict the classes of all points: [pictures, rows, columns, classes] for kind, colour, size and state
        outputs = self.head(patches).view(
            len(patches), patches_per_side, patches_per_side, POINTS_PER_PATCH_SIDE, POINTS_PER_PATCH_SIDE, -1
        )
        outputs = outputs.permute(0, 1, 3, 2, 4, 5).reshape(len(patches), points_per_side, points_per_side, -1)
        logits = outputs.split(CLASS_COUNTS, -1)

        # 2. compute the true classes: [pictures, rows, columns, 4]
        rows_per_image = points_per_side // images_per_picture
        classes = np.stack([classify_points(scene, rows_per_image, points_per_side) for scene in scenes])
        targets = torch.from_numpy(classes).long().view(-1, points_per_side, points_per_side, len(CLASS_COUNTS))

        # 3. compare them
        losses = []
        for number, class_logits in enumerate(logits):
            target = targets[..., number].flatten()
            losses.append(nn.functional.cross_entropy(class_logits.flatten(0, 2), target, ignore_index=NOT_APPLICABLE))
        kinds = targets[..., 0]
        is_kind_right = (logits[0].argmax(-1) == kinds)[kinds > 0]
        return torch.stack(losses).sum(), float(is_kind_right.float().mean())


def pretrain(cfg: Pretrain, out: Path) -> None:
    """Train the base and save it to `out` as a LLaVA-OneVision or BLIP-2 in Hugging Face format.

    The parameters and the training logs are saved in the same folder.
    """
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    tokenizer = None if cfg.blip2 else train_tokenizer(cfg.seed, cfg.levels)
    architecture = create_architecture(cfg, tokenizer)
    bank = render_bank(cfg, architecture)
    model = architecture.make_model()
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    print(f"base: {format_count(parameter_count, 'parameter')}, {format_count(len(bank.scenes), 'scene')}")
    segmentation_log = ""
    if cfg.segmentation_steps:
        segmentation_log = _train_encoder_to_segment(architecture, model, bank, cfg)
    training_log = _train_model_to_describe(architecture, model, bank, cfg)
    architecture.save(model, out)
    if segmentation_log:
        write_atomic(out / "segmentation_log.csv", segmentation_log)
    write_atomic(out / "training_log.csv", training_log)
    write_atomic(out / "recipe.json", json.dumps(cfg.model_dump(mode="json"), indent=2) + "\n")


@dataclass(frozen=True)
class SceneBank:
    """Scenes and their images.

    Attributes:
        pixels: images as returned by `prepare_image`, [scenes, side, side, 3] uint8.
        scenes: the scenes, alternating between the levels.
        levels: levels of MiniChange.
        held_out: number of scenes at the end of `scenes` that are not used for training.
    """

    pixels: np.ndarray
    scenes: list[Scene]
    levels: tuple[Level, ...]
    held_out: int

    def sample_training_scenes(self, rng: np.random.Generator, turn: int, count: int) -> np.ndarray:
        """Return the indices of `count` random training scenes, all of the same level.

        Args:
            turn: number that selects the level. Consecutive turns go through the levels in order.
        """
        stride = len(self.levels)
        level_number = turn % stride
        training_scenes = range(level_number, len(self.scenes) - self.held_out, stride)
        return level_number + stride * rng.choice(len(training_scenes), count, replace=False)

    def held_out_scenes(self, level: Level) -> np.ndarray:
        """Return the indices of a level's scenes that are not used for training."""
        indices = np.arange(len(self.scenes))[-self.held_out :]
        return indices[indices % len(self.levels) == self.levels.index(level)]


def render_bank(cfg: Pretrain, architecture: Architecture) -> SceneBank:
    """Draw the scenes, about a fifth of them in the dark. Each scene depends only on the seed and its number."""
    pixels = list[np.ndarray]()
    scenes = list[Scene]()
    for number in progress(range(cfg.scenes), "render", total=cfg.scenes, unit="scene"):
        rng = np.random.default_rng([cfg.seed, number])
        sampler = SAMPLERS[cfg.levels[number % len(cfg.levels)]]
        scene = sampler.sample_scene(rng)
        if rng.random() < 0.2:
            scene = replace(scene, view=replace(scene.view, brightness=sampler.dark_brightness))
        pixels.append(architecture.prepare_image(render(scene, cfg.image_px, rng)))
        scenes.append(scene)
    return SceneBank(pixels=np.stack(pixels), scenes=scenes, levels=cfg.levels, held_out=cfg.held_out)


def orthogonalize(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Orthogonalize a matrix with the same Newton-Schulz iteration as torch's Muon, but in the precision of `grad`.

    Args:
        grad: the matrix, [rows, columns].
        coefficients: coefficients of the quintic polynomial that is iterated.
        steps: number of iterations.
        eps: minimum norm to divide by.
    """
    a, b, c = coefficients
    is_tall = grad.size(0) > grad.size(1)
    wide_grad = grad.T if is_tall else grad
    update = wide_grad / wide_grad.norm().clamp(min=eps)
    for _ in range(steps):
        gram = update @ update.T
        update = torch.addmm(update, torch.addmm(gram, gram, gram, beta=b, alpha=c), update, beta=a)
    return update.T if is_tall else update


def avoid_emulated_bf16() -> None:
    """Make torch's Muon orthogonalize in fp32 if this processor would emulate bf16 (see the top of this file).

    torch 2.13 does not have an argument for the precision. This can be removed when torch adds one.
    """
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if not has_bf16:
        torch_muon._zeropower_via_newtonschulz = orthogonalize  # type: ignore[assignment]  # parameter names differ


class PretrainOptimizer:
    """Optimizes matrices with Muon and all other parameters with AdamW.

    The learning rates have a warm-up, a plateau and a cosine decay.

    Starting from random weights, Muon needs half as many steps as AdamW (LOG.md).
    """

    def __init__(self, model: nn.Module, cfg: Pretrain, steps: int) -> None:
        avoid_emulated_bf16()
        self.model = model
        self.steps = steps
        matrices: list[Tensor] = []  # weights of linear layers
        other_parameters: list[Tensor] = []  # embeddings, convolutions, norms and biases
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                matrices.append(parameter)
            else:
                other_parameters.append(parameter)
        decay = cfg.weight_decay
        muon = torch.optim.Muon(matrices, lr=cfg.lr_matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(other_parameters, lr=cfg.lr, betas=(0.9, 0.98), weight_decay=decay)
        self.optimizers = (muon, adamw)
        factor_of_step = partial(learning_rate_factor, cfg.warmup_steps, steps)
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor_of_step) for optimizer in self.optimizers]

    def take_step(self, loss: Tensor) -> float:
        """Take one optimizer step and return the loss as a float."""
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        return float(loss.detach())


def learning_rate_factor(warmup_steps: int, steps: int, step: int) -> float:
    """Return the factor that scales the learning rate at `step` of `steps`, counted from 0.

    The factor rises to 1 during the warm-up, stays at 1 until the middle of the run, and then decays to 0.01 along a
    cosine.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_progress = max(0.0, 2 * step / steps - 1)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(decay_progress, 1.0)))


class BatchLoss(NamedTuple):
    """The loss of one optimizer step.

    Attributes:
        task: name of the task that the batch belongs to.
        loss: mean loss of the batch.
        image_count: number of images in the batch.
    """

    task: str
    loss: Tensor
    image_count: int


def _train_encoder_to_segment(architecture: Architecture, model: nn.Module, bank: SceneBank, cfg: Pretrain) -> str:
    """Train the vision encoder to segment scenes, without the rest of the model, and return the log as CSV."""
    encoder = architecture.vision_encoder(model)
    segmentation = Segmentation(encoder, cfg.width)
    rng = np.random.default_rng([cfg.seed, 1])
    is_stacked = cfg.blip2 is not None and cfg.blip2.stacked

    def loss_and_accuracy(indices: np.ndarray, images_per_picture: int) -> tuple[Tensor, float]:
        patches = architecture.encode_patches(encoder, bank.pixels[indices], images_per_picture)
        scenes = [bank.scenes[index] for index in indices]
        return segmentation.loss_and_accuracy(patches, scenes, images_per_picture)

    def batch_loss(step: int) -> BatchLoss:
        indices = bank.sample_training_scenes(rng, step, cfg.images_per_batch)
        # alternate between pictures of one and two images
        images_per_picture = 1 + step % 2 if is_stacked else 1
        loss, _ = loss_and_accuracy(indices, images_per_picture)
        return BatchLoss("segmentation", loss, len(indices))

    def held_out_accuracy(level: Level) -> float:
        _, accuracy = loss_and_accuracy(bank.held_out_scenes(level), 1)
        return accuracy

    optimizer = PretrainOptimizer(segmentation, cfg, cfg.segmentation_steps)
    return _train(optimizer, ["segmentation"], batch_loss, cfg.levels, "held_out_kind_accuracy", held_out_accuracy)


def _train_model_to_describe(architecture: Architecture, model: nn.Module, bank: SceneBank, cfg: Pretrain) -> str:
    """Train the model on the first task and then on all tasks, one per step in turn. Return the log as CSV.

    If the vision encoder has learnt to segment, it is frozen while only the first task is trained, so that the language
    model learns to read the encoder's features. The accuracy is the share of held-out scenes for which every token of
    the description is correct under teacher forcing.
    """
    rng = np.random.default_rng(cfg.seed)
    tasks = make_curriculum(cfg.levels, cfg.tasks)

    def batch_loss(step: int) -> BatchLoss:
        is_first_phase = step <= cfg.first_task_steps
        task = tasks[0] if is_first_phase else tasks[step % len(tasks)]
        is_encoder_frozen = is_first_phase and cfg.segmentation_steps > 0
        architecture.vision_encoder(model).requires_grad_(not is_encoder_frozen)
        indices = bank.sample_training_scenes(rng, step // len(tasks), cfg.images_per_batch)
        loss, _ = _loss_and_correctness(architecture, model, bank, indices, task, rng)
        image_count = len(indices) if task.image_count else 0
        return BatchLoss(task.name, loss, image_count)

    def held_out_accuracy(level: Level) -> float:
        description_task = make_curriculum((level,))[0]
        indices = bank.held_out_scenes(level)
        rng_of_task = np.random.default_rng(0)
        _, is_right = _loss_and_correctness(architecture, model, bank, indices, description_task, rng_of_task)
        return float(is_right.float().mean())

    optimizer = PretrainOptimizer(model, cfg, cfg.steps)
    names = [task.name for task in tasks]
    return _train(optimizer, names, batch_loss, cfg.levels, "held_out_scene_accuracy", held_out_accuracy)


def _train(
    optimizer: PretrainOptimizer,
    tasks: Iterable[str],
    batch_loss: Callable[[int], BatchLoss],
    levels: tuple[Level, ...],
    accuracy_name: str,
    held_out_accuracy: Callable[[Level], float],
) -> str:
    """Run all optimizer steps, print the log and return it as CSV.

    Each row contains the mean loss of each task since the previous row, and the accuracy on the held-out scenes of each
    level.

    Args:
        optimizer: the optimizer, which takes a step for a loss.
        tasks: names of the tasks. A name may occur twice.
        batch_loss: function that samples the batch of a step, counted from 1, and returns its loss.
        levels: levels of MiniChange.
        accuracy_name: name of the accuracy in the column names.
        held_out_accuracy: function that returns the accuracy on the held-out scenes of a level.
    """
    log = io.StringIO()
    start = time.monotonic()
    image_count = 0
    losses_by_task: dict[str, list[float]] = {task: [] for task in tasks}
    accuracy_columns = [accuracy_name] if len(levels) == 1 else [f"{accuracy_name}: {level}" for level in levels]
    loss_columns = [f"loss: {task}" for task in losses_by_task]

    def write_row(*values: object) -> None:
        csv.writer(log, lineterminator="\n").writerow(values)
        print(*values, flush=True)

    write_row("step", "images_seen", *loss_columns, *accuracy_columns, "seconds")
    for step in progress(range(1, optimizer.steps + 1), "base", total=optimizer.steps, unit="step"):
        batch = batch_loss(step)
        losses_by_task[batch.task].append(optimizer.take_step(batch.loss))
        image_count += batch.image_count
        if step % LOG_EVERY_STEPS == 0 or step == optimizer.steps:
            means = [round(float(np.mean(losses)), 4) if losses else "" for losses in losses_by_task.values()]
            with torch.no_grad():
                accuracies = [round(held_out_accuracy(level), 4) for level in levels]
            write_row(step, image_count, *means, *accuracies, round(time.monotonic() - start, 1))
            losses_by_task = {task: [] for task in losses_by_task}
    return log.getvalue()


def _loss_and_correctness(
    architecture: Architecture,
    model: nn.Module,
    bank: SceneBank,
    indices: np.ndarray,
    task: PretrainTask,
    rng: np.random.Generator,
) -> tuple[Tensor, Tensor]:
    """Return the loss of a task on scenes with these indices, and for each sample whether all tokens are correct."""
    # 1. create the samples
    samples = []
    for sample_indices in indices.reshape(-1, task.image_count or 1):
        scenes = [bank.scenes[index] for index in sample_indices]
        samples.append(task.ask(rng, scenes))
    ids, is_supervised = _encode_samples(architecture, samples, task.image_count)

    # 2. compute the loss
    pixels = bank.pixels[indices] if task.image_count else None
    logits = architecture.compute_logits(model, pixels, task.image_count, ids, is_supervised)
    labels = ids.roll(-1, dims=1)[is_supervised]
    loss = nn.functional.cross_entropy(logits, labels)

    # 3. find the samples with a wrong token
    sample_of_token = is_supervised.nonzero()[:, 0]
    is_wrong_token = logits.detach().argmax(-1) != labels
    is_right = torch.ones(len(samples), dtype=torch.bool)
    is_right[sample_of_token[is_wrong_token]] = False
    return loss, is_right


def _encode_samples(
    architecture: Architecture, samples: list[tuple[str, str]], image_count: int
) -> tuple[Tensor, Tensor]:
    """Return the token ids of questions and answers, padded on the right, and a mask, both [samples, tokens].

    The mask selects the positions whose next token belongs to the answer.
    """
    prompts = [architecture.encode_prompt(question, image_count) for question, _ in samples]
    answers = [architecture.processor.encode_answer(answer) for _, answer in samples]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(samples), length), architecture.processor.pad_id)
    is_supervised = torch.zeros((len(samples), length), dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor([*prompt, *answer])
        is_supervised[row, len(prompt) - 1 : end - 1] = True
    return ids, is_supervised

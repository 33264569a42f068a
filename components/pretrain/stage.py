"""Pre-train the tiny base: a LLaVA-OneVision of transformers' own classes that can describe MiniChange images.

The real recipe starts from LLaVA-OneVision, which has seen images but no differences. So does the embedded one:
`components/synthesize/tasks.py` says what the base is taught, never a difference. From scratch, deterministic; run:
`make base`.
"""

import csv
import io
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, Qwen2Tokenizer

from components.models.m3diff.processing import M3DiffImageProcessor, M3DiffProcessor
from components.progress import progress
from components.files import write_atomic
from components.records import CHANGE_TYPES
from components.datasets.minichange.change import sample_pair
from components.datasets.minichange.render import render
from components.datasets.minichange.language import captions
from components.pretrain.curriculum import CURRICULUM, Task
from components.datasets.minichange.scene import DARK, Scene, sample_scene

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} "
    "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}\n{{ part['text'] }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class BaseRecipe:
    """Sizes and schedule of the tiny base; 1.4 M parameters."""

    seed: int = 2407
    image_px: int = 128  # as MiniChange is drawn
    vision_px: int = 72
    patch_px: int = 24  # 9 patches, one to a place of the 3 x 3 grid
    width: int = 128
    vision_layers: int = 4
    text_layers: int = 4
    scenes: int = 48_000
    held_out: int = 512
    images_per_batch: int = 64
    steps: int = 6_000
    alone_steps: int = 800  # the first task alone; with all from the start, shapes are not learnt (LOG.md)
    lr_matrices: float = 2.5e-3
    lr: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    threads: int = 1  # two are a third faster, no more, and the sums then hang on the machine


def pretrain_base(out: Path, recipe: BaseRecipe | None = None) -> None:
    """Train the base from scratch and write it to `out`: a LLaVA-OneVision directory in Hugging Face layout, with the
    recipe and the log of the run that made it."""
    recipe = recipe or BaseRecipe()
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    processor = _processor(recipe)
    bank = _draw_bank(recipe, processor)
    model = LlavaOnevisionForConditionalGeneration._from_config(
        _configuration(recipe, processor), attn_implementation="sdpa"
    )
    print(f"base: {sum(p.numel() for p in model.parameters()):,} parameters, {len(bank.scenes):,} scenes drawn")
    log = Log()
    _learn(model, processor, bank, recipe, log)
    model.save_pretrained(out)
    processor.save_pretrained(out)
    write_atomic(out / "training_log.csv", log.text.getvalue())
    write_atomic(out / "recipe.json", json.dumps(recipe.__dict__, indent=2) + "\n")


def _processor(recipe: BaseRecipe) -> M3DiffProcessor:
    processor = M3DiffProcessor(
        M3DiffImageProcessor(size={"height": recipe.vision_px, "width": recipe.vision_px}),
        train_tokenizer(recipe.seed),
        num_image_tokens=(recipe.vision_px // recipe.patch_px) ** 2,
        chat_template=CHAT_TEMPLATE,
    )
    processor.tokenizer.chat_template = CHAT_TEMPLATE
    return processor


def train_tokenizer(seed: int) -> Qwen2Tokenizer:
    """A byte-level BPE of Qwen2's kind on MiniChange's sentences: its words are single tokens, any text can be told."""
    rng = np.random.default_rng(seed)
    texts = ["system user assistant"] * 50
    texts += captions((), 5) * 50
    for number in range(6_000):
        task = CURRICULUM[number % len(CURRICULUM)]
        question, answer = task.ask(rng, [sample_scene(rng) for _ in range(task.images)])
        changes = sample_pair(rng, (CHANGE_TYPES[number % 12],))[3]
        texts += [f"{question} {answer}", captions(changes, 5)[number % 5]]
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


def _configuration(recipe: BaseRecipe, processor: M3DiffProcessor) -> LlavaOnevisionConfig:
    token = processor.tokenizer.convert_tokens_to_ids
    width = recipe.width
    return LlavaOnevisionConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": recipe.vision_layers,
            "num_attention_heads": 4,
            "image_size": recipe.vision_px,
            "patch_size": recipe.patch_px,
            "vision_use_head": False,
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": len(processor.tokenizer),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": recipe.text_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": token("<|im_end|>"),
            "pad_token_id": token("<|endoftext|>"),
        },
        image_token_index=token("<image>"),
        video_token_index=token("<video>"),
        image_grid_pinpoints=[[recipe.vision_px, recipe.vision_px]],
        tie_word_embeddings=True,
    )


@dataclass(frozen=True)
class Bank:
    pixels: np.ndarray  # [scenes, side, side, 3] uint8
    scenes: list[Scene]


def _draw_bank(recipe: BaseRecipe, processor: M3DiffProcessor) -> Bank:
    draw = partial(_draw_one, recipe, processor.image_processor)
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        drawn = pool.map(draw, range(recipe.scenes), chunksize=250)
        bank = list(progress(drawn, "draw", total=recipe.scenes, unit="scene"))
    return Bank(np.stack([pixels for pixels, _ in bank]), [scene for _, scene in bank])


def _draw_one(recipe: BaseRecipe, image_processor: M3DiffImageProcessor, number: int) -> tuple[np.ndarray, Scene]:
    rng = np.random.default_rng([recipe.seed, number])
    scene = sample_scene(rng)
    if rng.random() < 0.2:
        scene = Scene(scene.things, scene.marks, scene.background, scene.view.dimmed(DARK))
    return image_processor.square(render(scene, recipe.image_px, rng)), scene


class Log:
    """The run as CSV, and on the screen: the mean loss of each task since the last row."""

    def __init__(self) -> None:
        self.text, self.start = io.StringIO(), time.monotonic()
        self.names = list(dict.fromkeys(task.name for task in CURRICULUM))
        self.recent: dict[str, list[float]] = {name: [] for name in self.names}
        self._row(
            "step", "images_seen", *(f"loss: {name}" for name in self.names), "held_out_scene_accuracy", "seconds"
        )

    def _row(self, *values: object) -> None:
        csv.writer(self.text, lineterminator="\n").writerow(values)
        print(*values, flush=True)

    def add(self, step: int, images: int, accuracy: float) -> None:
        losses = [round(float(np.mean(losses)), 4) if losses else "" for losses in self.recent.values()]
        self._row(step, images, *losses, accuracy, round(time.monotonic() - self.start, 1))
        self.recent = {name: [] for name in self.names}


Model = LlavaOnevisionForConditionalGeneration


def _learn(model: Model, processor: M3DiffProcessor, bank: Bank, recipe: BaseRecipe, log: Log) -> None:
    """The first task alone, then one task a step, in turn."""
    step_with = _optimizer(model, recipe)
    rng = np.random.default_rng(recipe.seed)
    kept, seen = len(bank.scenes) - recipe.held_out, 0
    for step in progress(range(1, recipe.steps + 1), "base", total=recipe.steps, unit="step"):
        task = CURRICULUM[step % len(CURRICULUM) if step > recipe.alone_steps else 0]
        chosen = rng.choice(kept, recipe.images_per_batch, replace=False)
        loss, _ = _loss(model, processor, bank, chosen, task, rng)
        log.recent[task.name].append(step_with(loss))
        seen += len(chosen) if task.images else 0
        if step % 200 == 0 or step == recipe.steps:
            log.add(step, seen, _held_out_accuracy(model, processor, bank, kept))


def _optimizer(model: Model, recipe: BaseRecipe) -> Callable[[Tensor], float]:
    """Muon for the matrices and AdamW for the rest, with warm-up, a plateau and cosine to the end; returns the function
    that takes one step and gives the loss. From nothing, Muon gets as far in half the steps (see LOG.md)."""
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, p in model.named_parameters():
        (matrices if p.ndim == 2 and "embed" not in name else rest).append(p)
    muon = torch.optim.Muon(
        matrices, lr=recipe.lr_matrices, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(rest, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)
    shape = partial(_plateau, recipe.warmup_steps, recipe.steps)
    optimizers = (muon, adamw)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, shape) for optimizer in optimizers]

    def step_with(loss: Tensor) -> float:
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        return float(loss.detach())

    return step_with


def _plateau(warmup: int, steps: int, step: int) -> float:
    """Factor of the learning rate: up to 1, there for half the run, then down a cosine to 0.01."""
    if step < warmup:
        return (step + 1) / warmup
    done = max(0.0, 2 * step / steps - 1)
    return 0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * min(done, 1.0)))


def _loss(
    model: Model,
    processor: M3DiffProcessor,
    bank: Bank,
    chosen: np.ndarray,
    task: Task,
    rng: np.random.Generator,
) -> tuple[Tensor, Tensor]:
    """Mean loss over the answers' tokens, and for each sample whether every token was right under teacher forcing."""
    groups = chosen.reshape(-1, task.images or 1)
    asked = [task.ask(rng, [bank.scenes[number] for number in group]) for group in groups]
    prompts = [processor.encode_prompt(question, task.images) for question, _ in asked]
    answers = [processor.encode_answer(answer) for _, answer in asked]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(groups), length), processor.tokenizer.pad_token_id)
    supervised = torch.zeros((len(groups), length), dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        supervised[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
    images: dict[str, object] = {}
    if task.images:
        images["pixel_values"] = processor.image_processor.to_pixels(bank.pixels[chosen])
        images["image_sizes"] = torch.full((len(chosen), 2), processor.image_processor.side)
        images["batch_num_images"] = [len(chosen)]  # the multi-image path: one crop an image
    logits = model(input_ids=ids, logits_to_keep=supervised, use_cache=False, **images).logits
    labels = ids.roll(-1, dims=1)[supervised]
    right = torch.ones(len(groups), dtype=torch.bool)
    right[supervised.nonzero()[:, 0][logits.detach().argmax(-1) != labels]] = False
    return torch.nn.functional.cross_entropy(logits, labels), right


@torch.no_grad()
def _held_out_accuracy(model: Model, processor: M3DiffProcessor, bank: Bank, kept: int) -> float:
    """Share of held-out scenes whose whole description is right, token by token, under teacher forcing."""
    chosen = np.arange(kept, len(bank.scenes))
    _, right = _loss(model, processor, bank, chosen, CURRICULUM[0], np.random.default_rng(0))
    return round(float(right.float().mean()), 4)

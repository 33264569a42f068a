"""Pre-train the tiny base: a LLaVA-OneVision of transformers' own classes that can describe MiniChange images.

The real recipe starts from LLaVA-OneVision, which has seen images but no differences. So does the embedded one: the
base learns to describe one image, object by object with places, and two unrelated images joined (OneDiff's Coupled
Sample Training, arXiv 2407.05645), never a difference. Then, as the real LLM knows English, it learns the benchmark's
sentences as text alone, with no image beside them: fine-tuning leaves embeddings and head frozen, so a word that the
base never met could never be said. From scratch, deterministic; run: `make base`.
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

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, Qwen2Tokenizer

from components.model.processing import M3DiffImageProcessor, M3DiffProcessor
from components.progress import progress
from components.records import CHANGE_TYPES, write_atomic
from components.synthesize.change import sample_pair
from components.synthesize.draw import render
from components.synthesize.language import captions, describe
from components.synthesize.scene import DARK, Scene, sample_scene
from components.synthesize.stage import choose_types

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
ONE_IMAGE, TWO_IMAGES, SENTENCE = "Describe the image.", "Describe both images.", "Write a sentence."
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
    tower_px: int = 72
    patch_px: int = 12  # 36 patches: four to a place of the 3 x 3 grid
    width: int = 128
    tower_layers: int = 5
    text_layers: int = 4
    scenes: int = 60_000
    held_out: int = 512
    images_per_batch: int = 64
    steps: int = 4_400
    lr: float = 2e-3
    warmup_steps: int = 200
    language_steps: int = 400  # every second one on text alone
    language_lr: float = 1e-3
    weight_decay: float = 0.05
    threads: int = 2


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
    print(f"base: {sum(p.numel() for p in model.parameters()):,} parameters, {len(bank.answers):,} scenes drawn")
    log = Log()
    _learn_images(model, processor, bank, recipe, log)
    _learn_language(model, processor, bank, recipe, log)
    model.save_pretrained(out)
    processor.save_pretrained(out)
    write_atomic(out / "training_log.csv", log.text.getvalue())
    write_atomic(out / "recipe.json", json.dumps(recipe.__dict__, indent=2) + "\n")


def _processor(recipe: BaseRecipe) -> M3DiffProcessor:
    processor = M3DiffProcessor(
        M3DiffImageProcessor(size={"height": recipe.tower_px, "width": recipe.tower_px}),
        train_tokenizer(recipe.seed),
        num_image_tokens=(recipe.tower_px // recipe.patch_px) ** 2,
        chat_template=CHAT_TEMPLATE,
    )
    processor.tokenizer.chat_template = CHAT_TEMPLATE
    return processor


def train_tokenizer(seed: int) -> Qwen2Tokenizer:
    """A byte-level BPE of Qwen2's kind on MiniChange's sentences: its words are single tokens, any text can be told."""
    rng = np.random.default_rng(seed)
    texts = [
        f"{ONE_IMAGE} {TWO_IMAGES} system user assistant image 1: ; image 2: What changed from the before to after"
    ] * 50
    texts += captions((), 5) * 50
    for number in range(6_000):
        before, _, _, changes = sample_pair(rng, (CHANGE_TYPES[number % 12],))
        texts += [describe(before), captions(changes, 5)[number % 5]]
    bpe = Tokenizer(models.BPE())
    stock = Qwen2Tokenizer()._tokenizer
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = stock.normalizer, stock.pre_tokenizer, stock.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        min_frequency=20,
        special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    trained = json.loads(bpe.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(merge) for merge in trained["merges"]],
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
            "num_hidden_layers": recipe.tower_layers,
            "num_attention_heads": 4,
            "image_size": recipe.tower_px,
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
        image_grid_pinpoints=[[recipe.tower_px, recipe.tower_px]],
        tie_word_embeddings=True,
    )


@dataclass(frozen=True)
class Bank:
    pixels: np.ndarray  # [scenes, side, side, 3] uint8
    answers: list[str]


def _draw_bank(recipe: BaseRecipe, processor: M3DiffProcessor) -> Bank:
    draw = partial(_draw_one, recipe, processor.image_processor)
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        drawn = pool.map(draw, range(recipe.scenes), chunksize=250)
        scenes = list(progress(drawn, "draw", total=recipe.scenes, unit="scene"))
    return Bank(np.stack([pixels for pixels, _ in scenes]), [answer for _, answer in scenes])


def _draw_one(recipe: BaseRecipe, image_processor: M3DiffImageProcessor, number: int) -> tuple[np.ndarray, str]:
    rng = np.random.default_rng([recipe.seed, number])
    scene = sample_scene(rng)
    if rng.random() < 0.2:
        scene = Scene(scene.things, scene.marks, scene.background, scene.view.dimmed(DARK))
    return image_processor.square(render(scene, recipe.image_px, rng)), describe(scene)


class Log:
    """The run as CSV, and on the screen."""

    def __init__(self) -> None:
        self.text, self.start = io.StringIO(), time.monotonic()
        self.recent: list[float] = []
        self._row("phase", "step", "images_seen", "loss", "held_out_scene_accuracy", "seconds")

    def _row(self, *values: object) -> None:
        csv.writer(self.text, lineterminator="\n").writerow(values)
        print(*values, flush=True)

    def add(self, phase: str, step: int, images: int, accuracy: float) -> None:
        loss, seconds = round(float(np.mean(self.recent)), 4), round(time.monotonic() - self.start, 1)
        self._row(phase, step, images, loss, accuracy, seconds)
        self.recent = []


Model = LlavaOnevisionForConditionalGeneration


def _learn_images(model: Model, processor: M3DiffProcessor, bank: Bank, recipe: BaseRecipe, log: Log) -> None:
    """Single and coupled batches in turn."""
    step_with = _optimizer(model, recipe, recipe.lr, recipe.steps)
    order = np.random.default_rng(recipe.seed)
    kept = len(bank.answers) - recipe.held_out
    for step in progress(range(1, recipe.steps + 1), "base: images", total=recipe.steps, unit="step"):
        chosen = order.choice(kept, recipe.images_per_batch, replace=False)
        loss, _ = _loss(model, processor, bank, chosen, images=1 + step % 2)
        log.recent.append(step_with(loss))
        if step % 200 == 0 or step == recipe.steps:
            seen = step * recipe.images_per_batch
            log.add("images", step, seen, _held_out_accuracy(model, processor, bank, kept))


def _learn_language(model: Model, processor: M3DiffProcessor, bank: Bank, recipe: BaseRecipe, log: Log) -> None:
    """Sentences without images and images in turn, so that neither is forgotten."""
    step_with = _optimizer(model, recipe, recipe.language_lr, recipe.language_steps)
    order = np.random.default_rng([recipe.seed, 1])
    kept = len(bank.answers) - recipe.held_out
    for step in progress(
        range(1, recipe.language_steps + 1), "base: language", total=recipe.language_steps, unit="step"
    ):
        chosen = order.choice(kept, recipe.images_per_batch, replace=False)
        if step % 2:
            step_with(_text_loss(model, processor, _sentences(order, recipe.images_per_batch)))
        else:
            log.recent.append(step_with(_loss(model, processor, bank, chosen, images=1 + step // 2 % 2)[0]))
        if step % 200 == 0:
            seen = (recipe.steps + step // 2) * recipe.images_per_batch
            log.add("language", step, seen, _held_out_accuracy(model, processor, bank, kept))


def _optimizer(model: Model, recipe: BaseRecipe, lr: float, steps: int) -> Callable[[Tensor], float]:
    """AdamW with warm-up and cosine; returns the function that takes one step and gives the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, partial(_cosine, min(recipe.warmup_steps, steps // 4), steps)
    )

    def step_with(loss: Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return float(loss.detach())

    return step_with


def _sentences(rng: np.random.Generator, count: int) -> list[str]:
    """Captions of scenes drawn for their words alone."""
    texts = []
    for _ in range(count):
        types = choose_types(rng, int(rng.integers(12)), multi_change_share=0.3)
        changes = sample_pair(rng, types)[3] if rng.random() < 0.85 else ()
        texts.append(captions(changes, 5)[int(rng.integers(5))])
    return texts


def _text_loss(model: Model, processor: M3DiffProcessor, texts: list[str]) -> Tensor:
    prompt = processor.encode_prompt(SENTENCE, images=0)
    rows = [[*prompt, *processor.encode_answer(text)] for text in texts]
    ids = torch.full((len(rows), max(map(len, rows))), model.config.text_config.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, len(prompt) : len(tokens)] = ids[row, len(prompt) : len(tokens)]
    return model(input_ids=ids, labels=labels, use_cache=False).loss


def _cosine(warmup: int, steps: int, step: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    return 0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * min(done, 1.0)))


def _loss(
    model: LlavaOnevisionForConditionalGeneration,
    processor: M3DiffProcessor,
    bank: Bank,
    chosen: np.ndarray,
    images: int,
) -> tuple[Tensor, Tensor]:
    """Mean loss over the answers' tokens, and for each sample whether every token was right under teacher forcing."""
    groups = chosen.reshape(-1, images)
    answers = [
        bank.answers[group[0]]
        if images == 1
        else "; ".join(f"image {k + 1}: {bank.answers[number]}" for k, number in enumerate(group))
        for group in groups
    ]
    prompt = processor.encode_prompt(ONE_IMAGE if images == 1 else TWO_IMAGES, images)
    targets = [processor.encode_answer(answer) for answer in answers]
    length = len(prompt) + max(map(len, targets))
    ids = torch.full((len(groups), length), model.config.text_config.pad_token_id)
    supervised = torch.zeros((len(groups), length), dtype=torch.bool)
    for row, target in enumerate(targets):
        ids[row, : len(prompt) + len(target)] = torch.tensor([*prompt, *target])
        supervised[row, len(prompt) - 1 : len(prompt) + len(target) - 1] = True
    pixels = processor.image_processor.normalize(bank.pixels[chosen])
    logits = model(
        input_ids=ids,
        pixel_values=pixels,
        image_sizes=torch.full((len(chosen), 2), processor.image_processor.side),
        batch_num_images=[len(chosen)],  # the multi-image path: one crop an image
        logits_to_keep=supervised,
        use_cache=False,
    ).logits
    labels = ids.roll(-1, dims=1)[supervised]
    right = torch.ones(len(groups), dtype=torch.bool)
    row_of = supervised.nonzero()[:, 0]
    right[row_of[logits.detach().argmax(-1) != labels]] = False
    return torch.nn.functional.cross_entropy(logits, labels), right


@torch.no_grad()
def _held_out_accuracy(
    model: LlavaOnevisionForConditionalGeneration, processor: M3DiffProcessor, bank: Bank, kept: int
) -> float:
    """Share of held-out scenes whose whole description is right, token by token, under teacher forcing."""
    chosen = np.arange(kept, len(bank.answers))
    _, right = _loss(model, processor, bank, chosen, images=1)
    return round(float(right.float().mean()), 4)

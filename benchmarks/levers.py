"""The gain of each lever: one model, trained in turn in every way of ABLATION on the same captions.

Every variant must give the same loss. Repetitions go round all variants in turn, so that a busy machine is busy for
all; medians count. Micro-batches are made before the step, as the loader's threads make them. The optimizer's time is
spread over the pairs of a training step (42 at 7B).

The tiny data are 64 pairs of MiniChange's training mixture, question and five references each (minichange.json); at 7B
the tokens are random, in the published mixture's numbers. Pixels are noise in both: no step's cost depends on them.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from m3diff.models.device import Device
from m3diff.models.fused import KERNELS, make_fused
from m3diff.models.m3diff import FAMILY as M3DIFF
from m3diff.models.m3diff import LARGE_BASE, M3DiffSettings
from m3diff.models.m3diff_model import M3DiffConfig, M3DiffForConditionalGeneration
from m3diff.models.processing import M3DiffImageProcessor
from m3diff.models.settings import Lora, Rates
from m3diff.models.tuning import meta_model, prepare, trainable_groups
from m3diff.stages.train.batches import MicroBatch, complete
from m3diff.stages.train.engine import token_loss
from m3diff.stages.train.loop import peak_flops
from m3diff.stages.train.packing import pack

SAME_LOSS = {"fp32": 1e-4, "bf16": 2e-2}  # relative
PAD = 0
TRAINED_BYTES, FROZEN_BYTES = 18, 2  # of a parameter: bf16 weight; fp32 master, two moments and gradient
HERE = Path(__file__).parent
BASE = HERE.parent / "data" / "00_base"

Branches = list[tuple[list[int], list[int]]]  # (prompt, reference) token ids of one pair's references


@dataclass(frozen=True)
class Variant:
    """A way to take a step.

    Attributes:
        stock: padded rectangles and labels to transformers' own loss, so logits on every position.
    """

    name: str
    packed: bool = False
    stock: bool = False
    mdp: bool = True
    activation_checkpointing: str = "none"
    fused: bool = True
    attention: str = "sdpa"


STOCK: dict[str, Any] = {"fused": False}
CHECKPOINTING = ("none", "selective", "full")

ABLATION = (
    Variant("stock, full checkpointing", stock=True, activation_checkpointing="full", **STOCK),
    Variant("stock", stock=True, **STOCK),
    Variant("stock without MDP", stock=True, mdp=False, **STOCK),
    Variant("+ logits where supervised", **STOCK),
    Variant("unpacked"),
    Variant("packed, all else stock", packed=True, **STOCK),
    Variant("packed", packed=True),
)
"""Lever by lever: end to end without padding and logits where supervised; fused adapters and layers, of which the last
works on supervised tokens alone."""

GPU_ROWS = (  # choices on a GPU: the attention kernel and what backward recomputes
    *(Variant(f"unpacked, {kept}", activation_checkpointing=kept) for kept in CHECKPOINTING[1:]),
    *(
        Variant(f"packed, {attention}, {kept}", packed=True, attention=attention, activation_checkpointing=kept)
        for attention in ("sdpa", "flex")
        for kept in CHECKPOINTING
    ),
)


@dataclass(frozen=True)
class Size:
    """A model's shapes and the data of one measured step.

    Attributes:
        groups: tokens of each pair, branch by branch.
        micro: sequences at a time, halved until they fit; by variant's recomputation and packing.
        step_pairs: pairs between two optimizer steps in training; its time is spread over them.
    """

    name: str
    config: M3DiffConfig
    lora_rank: int
    groups: list[Branches]
    micro: dict[str, int]
    step_pairs: int

    @property
    def settings(self) -> M3DiffSettings:
        """Parts that train with their rates: the paper's, alpha twice the rank."""
        rates = Rates(vision=2e-6, projector=1e-5, module=1e-5, llm=1e-5)
        return M3DiffSettings("m3diff", self.config.module_config(), Lora(self.lora_rank, 2 * self.lora_rank), rates)

    @property
    def captions(self) -> int:
        return sum(len(group) for group in self.groups)

    def owned(self, variant: Variant) -> list[list[tuple[int, Branches]]]:
        """The micro-batches: (number of the pair, its branches) of each sequence."""
        owned = [(number, group) for number, group in enumerate(self.groups)]
        if not variant.packed:
            owned = [(number, [branch]) for number, group in owned for branch in group]
        size = self.micro["packed" if variant.packed else variant.activation_checkpointing]
        return [owned[at : at + size] for at in range(0, len(owned), size)]

    def micro_batches(self, variant: Variant) -> Iterator[tuple[MicroBatch, list[int]]]:
        """Micro-batches of training, each with its sequences' numbers of tokens."""
        for part in self.owned(variant):
            packed = pack([group for _, group in part])
            images = torch.from_numpy(np.concatenate([self.images[number] for number, _ in part]))
            lengths = torch.bincount(packed.sequences).tolist()
            yield MicroBatch(packed, images, torch.ones(len(packed.labels))), lengths

    @cached_property
    def images(self) -> np.ndarray:
        """Noise: prepared images of each pair, uint8 [pairs, 2, side, side, 3]."""
        side = self.config.vision_config.image_size
        return np.random.default_rng(0).integers(0, 256, (len(self.groups), 2, side, side, 3), dtype=np.uint8)


def tiny(pairs: int = 16) -> Size:
    """The embedded base's shapes, the embedded run's batch and adapters, MiniChange's references."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    config = M3DiffConfig.on_base(str(BASE), None)
    last = config.vision_config.num_hidden_layers  # the only vision feature layer, as in the embedded run
    config.mdp = {"vision_feature_layers": [last], "layers": 2, "heads": 4}
    image = "<image>" * ((config.vision_config.image_size // config.vision_config.patch_size) ** 2 + 1)
    groups = []
    for pair in json.loads((HERE / "minichange.json").read_text())[:pairs]:
        content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": pair["question"]}]
        chat = [{"role": "user", "content": content}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt.replace("<image>", image), add_special_tokens=False)["input_ids"]
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        references = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in pair["references"]]
        groups.append([(ids, [*reference, end]) for reference in references])
    return Size("tiny", config, 32, groups, {"none": 40, "selective": 40, "full": 40, "packed": 16}, 16)


def seven_b(layers: int = 28, pairs: int = 6) -> Size:
    """The published 7B shapes, with so many of the LLM's layers: 1,460 visual and 29 prompt tokens, 6.17 captions a
    pair of 15 tokens each on average."""
    config, rng = M3DiffConfig.published(LARGE_BASE, {}), np.random.default_rng(0)
    config.text_config.num_hidden_layers = layers
    config.text_config.layer_types = config.text_config.layer_types[:layers]
    side = config.vision_config.image_size // config.vision_config.patch_size
    groups = []
    for number in range(pairs):
        words = rng.integers(0, 150_000, 28).tolist()
        prompt = [*words[:14], *[config.image_token_id] * (2 * (side**2 + 1)), *words[14:], 198]
        lengths = rng.permutation([9, 12, 14, 16, 18, 21, 15][: 7 if number % 6 == 5 else 6])
        groups.append([(prompt, rng.integers(0, 150_000, length).tolist()) for length in lengths])
    return Size("7B", config, 128, groups, {"none": 3, "selective": 6, "full": 6, "packed": 3}, 42)


class MasterAdamW:
    """AdamW on fp32 copies of what trains, written back after each step; on fp32 weights themselves."""

    def __init__(self, model: torch.nn.Module, settings: Any) -> None:
        groups = trainable_groups(model, M3DIFF, settings)
        self.weights = [p for group in groups for p in group.parameters]
        own = {id(p): p if p.dtype == torch.float32 else p.detach().float() for p in self.weights}
        self.masters = [own[id(p)] for p in self.weights]
        slots = [{"params": [own[id(p)] for p in group.parameters], "lr": group.lr} for group in groups]
        self.optimizer = torch.optim.AdamW(slots, weight_decay=0.0, fused=True)

    def clear(self) -> None:
        """Drop every gradient."""
        for tensor in (*self.weights, *self.masters):
            tensor.grad = None

    def step(self) -> None:
        """Add the gradients to the fp32 copies, clip, and write the new weights back."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            if master is not weight and weight.grad is not None:
                master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                if master is not weight:
                    weight.copy_(master)


@dataclass
class Bench:
    """The one model that every variant trains, and what it trains on."""

    size: Size
    gpu: bool
    precision: Any

    def __post_init__(self) -> None:
        self.device = Device(self.gpu, self.precision)
        torch.manual_seed(0)
        with self.device.torch:
            self.model = M3DiffForConditionalGeneration._from_config(
                self.size.config, dtype=self.device.dtype, attn_implementation=KERNELS
            )
            self.adapted = prepare(self.model, M3DIFF, self.size.settings).train()
            self.optimizer = MasterAdamW(self.adapted, self.size.settings)
        self.started = [weight.detach().cpu().clone() for weight in self.optimizer.weights]
        self.mdp = self.model.model.mdp
        side = self.size.config.vision_config.image_size
        self.to_pixels = M3DiffImageProcessor(size={"height": side, "width": side}).to_pixels
        self.processor: Any = SimpleNamespace(pad_id=PAD, image_inputs=self.image_inputs)
        self.tokens = sum(len(reference) for group in self.size.groups for _, reference in group)

    @torch.no_grad()
    def reset(self) -> None:
        """The weights of the start, so that losses can be compared."""
        optimizer = self.optimizer
        for weight, master, start in zip(optimizer.weights, optimizer.masters, self.started, strict=True):
            weight.copy_(start)
            master.copy_(start)

    def take(self, variant: Variant) -> None:
        """Make the model compute as the variant does."""
        self.device = Device(self.gpu, self.precision, variant.attention)  # type: ignore[arg-type]
        self.model.model.mdp = self.mdp if variant.mdp else None
        self.model.set_attn_implementation("sdpa" if variant.stock else KERNELS)
        make_fused(self.model, variant.activation_checkpointing, stock=not variant.fused)
        self.batches = [complete(batch, self.device, PAD) for batch, _ in self.size.micro_batches(variant)]

    def run(self, variant: Variant) -> float:
        """Forward and backward over every caption, as `take` prepared; the mean loss per supervised token."""
        total = torch.zeros((), device=self.device.torch)
        for owned, batch in zip(self.size.owned(variant), self.batches, strict=True):
            if variant.stock:
                loss = self.stock_loss(owned, batch)
            else:
                loss = token_loss(self.adapted, batch, self.processor, self.device)
            (loss / self.tokens).backward()
            total += loss.detach()
        return float(total) / self.tokens

    def image_inputs(self, prepared: Tensor) -> dict[str, Tensor]:
        """Inputs of the model as M3Diff's processor makes them."""
        return {"pixel_values": self.to_pixels(prepared), "batch_num_images": torch.full((len(prepared) // 2,), 2)}

    def stock_loss(self, owned: list[tuple[int, Branches]], batch: MicroBatch) -> Tensor:
        """Loss of one caption a row, padded on the right, labels that transformers' own loss shifts."""
        pairs = [branch for _, branches in owned for branch in branches]
        ids = [torch.tensor([*prompt, *reference]) for prompt, reference in pairs]
        labels = [torch.tensor([-100] * len(prompt) + list(reference)) for prompt, reference in pairs]
        mask = pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
        mean = self.adapted(
            input_ids=self.device.move(pad_sequence(ids, batch_first=True, padding_value=PAD)),
            attention_mask=self.device.move(mask),
            labels=self.device.move(pad_sequence(labels, batch_first=True, padding_value=-100)),
            use_cache=False,
            **self.image_inputs(self.device.move(batch.images)),
        ).loss
        return mean * len(batch.packed.labels)


@dataclass
class Measured:
    """Seconds of each repetition of a variant, and its peak memory on a GPU."""

    variant: Variant
    loss: float
    run_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    peak_gb: float | None = None

    def figures(self, size: Size, peak_tflops: float | None) -> dict[str, Any]:
        optimizer = statistics.median(self.optimizer_s) * len(size.groups) / size.step_pairs
        seconds = statistics.median(self.run_s) + optimizer
        batches = list(size.micro_batches(self.variant))
        lengths = [length for _, sequences in batches for length in sequences]
        rate = {"captions_per_s": size.captions / seconds, "sequences_per_s": len(lengths) / seconds}
        spread = (max(self.run_s) - min(self.run_s)) / statistics.median(self.run_s)
        figures = {"name": self.variant.name, **rate, "loss": self.loss, "spread": spread}
        figures["peak_gb"] = self.peak_gb
        if peak_tflops:
            figures["mfu"] = model_flops(size, self.variant) / seconds / (peak_tflops * 1e12)
        return figures | {"micro_batch": max(len(sequences) for _, sequences in batches)}


def warmed_up(bench: Bench, variant: Variant) -> Measured | str:
    """Run the variant once, with micro-batches halved until they fit; or that none fits."""
    key = "packed" if variant.packed else variant.activation_checkpointing
    while True:
        try:
            bench.take(variant)
            loss = bench.run(variant)
            return Measured(variant, loss)
        except torch.OutOfMemoryError:
            if bench.size.micro[key] == 1:
                return "does not fit"
            bench.size.micro[key] //= 2
        finally:
            bench.optimizer.clear()
        torch.cuda.empty_cache()


def measure(bench: Bench, variants: tuple[Variant, ...], repeats: int) -> tuple[list[Measured], dict[str, str]]:
    """Every variant in turn, `repeats` times round; the variants that could not run, with the reason."""
    bench.reset()
    started = {variant.name: warmed_up(bench, variant) for variant in variants}
    failed = {name: got for name, got in started.items() if isinstance(got, str)}
    measured = [got for got in started.values() if isinstance(got, Measured)]
    for repetition in range(-1, repeats):  # the first round makes the optimizer's state and is not counted
        for one in measured if repetition >= 0 else measured[:1]:
            bench.take(one.variant)
            times = timed_step(bench, one)
            if repetition >= 0:
                one.run_s.append(times[0])
                one.optimizer_s.append(times[1])
    return measured, failed


def measure_alone(bench: Bench, variant: Variant, repeats: int) -> tuple[list[Measured], dict[str, str]]:
    """The same of one variant by itself, whose kernels a GPU compiles: graphs of others would count against the
    compiler's limit. A compiler that fails is a reason not to have run, and costs no other variant."""
    torch.compiler.reset()
    try:
        return measure(bench, (variant,), repeats)
    except Exception as error:
        return [], {variant.name: f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    finally:
        torch.compiler.reset()
        bench.model.zero_grad(set_to_none=True)


def check_losses(measured: list[Measured], precision: str) -> None:
    """Every variant's loss is the first one's."""
    for one in measured:
        first = measured[0]
        off = abs(one.loss / first.loss - 1)  # without MDP too: a new module is zero-initialised, or nearly
        assert off < (SAME_LOSS[precision] if one.variant.mdp else 0.05), (
            f"{one.variant.name}: loss {one.loss}, of {first.variant.name} {first.loss}"
        )


def timed_step(bench: Bench, one: Measured) -> tuple[float, float]:
    if bench.gpu:
        torch.cuda.reset_peak_memory_stats()
    stamps = [_now(bench.gpu)]
    bench.run(one.variant)
    stamps.append(_now(bench.gpu))
    bench.optimizer.step()
    stamps.append(_now(bench.gpu))
    one.peak_gb = torch.cuda.max_memory_allocated() / 1e9 if bench.gpu else None
    return stamps[1] - stamps[0], stamps[2] - stamps[1]


def _now(gpu: bool) -> float:
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def static_gb(size: Size) -> float:
    """Weights, gradients and optimizer, of the model with its adapters."""
    with torch.device("meta"):
        model = M3DiffForConditionalGeneration(size.config)
        prepare(model, M3DIFF, size.settings)
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(count * (TRAINED_BYTES if trains else FROZEN_BYTES) for count, trains in counts) / 1e9


def planned_gb(size: Size, variant: Variant, precision: str) -> float | None:
    """The plan's GB of weights, gradients, optimizer and a micro-batch's activations; None where it has none."""
    if precision != "bf16" or variant.stock or not variant.fused:
        return None
    micro = max(len(lengths) for _, lengths in size.micro_batches(variant))
    return static_gb(size) + planned_activations_gb(size, variant, precision) * micro


def model_flops(size: Size, variant: Variant) -> float:
    """FLOPs of a forward and backward pass over every caption, without recomputation."""
    batches = list(size.micro_batches(variant))
    lengths = [length for _, sequences in batches for length in sequences]
    supervised = sum(len(batch.packed.labels) for batch, _ in batches) / len(lengths)
    terms = M3DIFF.flops(meta_model(size.config, M3DIFF, size.settings), sum(lengths) / len(lengths), supervised)
    return len(lengths) * sum(term.total for term in terms)


def planned_activations_gb(size: Size, variant: Variant, precision: str) -> float:
    """GB that the plan counts for backward of one packed pair, the size's first."""
    from m3diff.commands.plan.memory import count_activations

    batch, lengths = next(
        iter(Size("one", size.config, size.lora_rank, size.groups[:1], size.micro, 1).micro_batches(variant))
    )
    model = meta_model(size.config, M3DIFF, size.settings, precision)
    held = count_activations(
        model, M3DIFF, variant.activation_checkpointing, lengths[0], len(batch.packed.labels) // len(lengths)
    )
    return sum(held.values()) / 1e9


def chosen_variants(rows: Sequence[str] | None, gpu: bool, precision: str) -> tuple[Variant, ...]:
    """The rows of these names, in their order; all that the device chooses between without names.

    Raises:
        ValueError: a name is no row's.
    """
    every = {variant.name: variant for variant in ABLATION + GPU_ROWS}
    if rows is None:
        return ABLATION + (GPU_ROWS if gpu or precision == "bf16" else ())
    if unknown := [name for name in rows if name not in every]:
        raise ValueError(f"no row is called {unknown[0]!r}; rows: {'; '.join(every)}")
    return tuple(every[name] for name in rows)


def measured_levers(
    shapes: str,
    gpu: bool,
    precision: str,
    pairs: int,
    repeats: int | None,
    chip: str,
    variants: tuple[Variant, ...],
    tell: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """The figures of the levers as the result's keys; `tell` is given each row once it is measured.

    A GPU is nobody else's, so that its rows are measured one after another; on a CPU in turn.
    """
    size = tiny(pairs) if shapes == "tiny" else seven_b()
    layers = size.config.text_config.num_hidden_layers
    bench = Bench(size, gpu, precision)
    flops = peak_flops(chip, precision)
    measured, rows, failed = list[Measured](), list[dict[str, Any]](), dict[str, str]()
    for turn in [(variant,) for variant in variants] if gpu else [variants]:
        run = (bench, *turn) if gpu else (bench, turn)
        found, missing = (measure_alone if gpu else measure)(*run, repeats or (2 if gpu else 5))  # type: ignore[operator]
        more = [
            one.figures(size, flops / 1e12 if flops else None)
            | {"planned_gb": planned_gb(size, one.variant, precision)}
            for one in found
        ]
        for row in (*more, *({"name": name, "not_run": reason} for name, reason in missing.items())):
            tell(row | {"llm_layers": layers})
        measured, rows, failed = measured + found, rows + more, failed | missing
    check_losses(measured, precision)
    counts = {"pairs": len(size.groups), "captions": size.captions, "llm_layers": layers}
    return {"ablation": rows, "not_run": failed} | counts

"""Measure the speedup of each optimization by training one model on the same captions with every variant in ABLATION.

All variants must have the same loss. Each repetition goes through all variants, so that load on the machine affects
all variants equally, and medians are reported. Micro-batches are built before the timed step, since the loader's
threads build them in the background in real training. The optimizer's time is divided among the pairs of a real
training step (42 at 7B), and the pairs of the measured step get their share.

The tiny dataset has 64 pairs from MiniChange's training mixture (minichange.json). Each pair has a question and five
references. At 7B, the tokens are random, with the token counts of the published mixture. The pixels of all images are
noise, because the cost of a step does not depend on them.

A packed sequence contains all references of a pair after a single prompt. Each reference is a branch of the sequence.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from m3diff.models.contract import Branch, Prepared, TrainingSequence
from m3diff.models.device import Device
from m3diff.models.fused import make_fused, register_kernels
from m3diff.models.m3diff import FAMILY as M3DIFF
from m3diff.models.m3diff import LARGE_BASE, M3DiffSettings
from m3diff.models.m3diff_model import M3DiffConfig, M3DiffForConditionalGeneration
from m3diff.models.masks import MaskedRows, RowBatch, pack
from m3diff.models.processing import IMAGE, M3DiffImageProcessor, M3DiffProcessor
from m3diff.models.settings import Lora
from m3diff.models.tuning import meta_model, prepare_for_training, trainable_groups
from m3diff.stages.train.engine import token_loss
from m3diff.stages.train.loop import peak_flops

SAME_LOSS = {"fp32": 1e-4, "bf16": 2e-2}  # relative tolerance
PAD = 0
TRAINED_BYTES = 18  # bytes per trained parameter: a bf16 weight, and an fp32 master copy, two moments and a gradient
FROZEN_BYTES = 2  # bytes per frozen parameter: a bf16 weight
BENCHMARKS = Path(__file__).parent
BASE = BENCHMARKS.parent / "data" / "00_base"


@dataclass(frozen=True)
class Variant:
    """A combination of optimizations with which a training step is computed.

    Attributes:
        packed: whether all references of a pair share one sequence.
        stock: whether to use transformers' own loss on padded batches, with logits at every position.
        mdp: whether the model has the MDP module.
        fused: whether to use the fused adapters and layers.
        attention: the attention kernel for packed sequences.
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
"""Variants that differ in one optimization at a time. The optimizations are: concatenated sequences without padding,
logits only at supervised tokens, fused adapters and layers (the last layer runs only on supervised tokens), packing."""


def _packed_on_gpu(attention: str, checkpointing: str) -> Variant:
    name = f"packed, {attention}, {checkpointing}"
    return Variant(name, packed=True, attention=attention, activation_checkpointing=checkpointing)


# Variants for a GPU. They differ in the attention kernel and in the activations that the backward pass recomputes
GPU_ROWS = (
    Variant("unpacked, selective", activation_checkpointing="selective"),
    Variant("unpacked, full", activation_checkpointing="full"),
    *(_packed_on_gpu("sdpa", checkpointing) for checkpointing in CHECKPOINTING),
    *(_packed_on_gpu("flex", checkpointing) for checkpointing in CHECKPOINTING),
)


@dataclass(frozen=True)
class Size:
    """The shapes of a model and the data of one measured step.

    Attributes:
        groups: the branches of each pair, one for each reference.
        micro: number of sequences per micro-batch, which is halved until the micro-batch fits in memory. The key is
            `packed` for packed variants, otherwise the variant's kind of activation checkpointing.
        step_pairs: number of pairs per optimizer step in real training, among which the optimizer's time is divided.
    """

    name: str
    config: M3DiffConfig
    lora_rank: int
    groups: list[list[Branch]]
    micro: dict[str, int]
    step_pairs: int

    @property
    def settings(self) -> M3DiffSettings:
        """Training settings with the paper's learning rates and a LoRA alpha of twice the rank."""
        rates = {"vision": 2e-6, "projector": 1e-5, "module": 1e-5, "llm": 1e-5}
        return M3DiffSettings("m3diff", self.config.module_config(), Lora(self.lora_rank, 2 * self.lora_rank), rates)

    @property
    def captions(self) -> int:
        """Number of captions in the measured step."""
        return sum(len(group) for group in self.groups)

    def micro_batches(self, variant: Variant) -> list[list[TrainingSequence]]:
        """Divide the captions into micro-batches, which are lists of sequences."""
        sequences: list[TrainingSequence] = []
        for images, group in zip(self.images, self.groups, strict=True):
            if variant.packed:
                sequences.append(TrainingSequence(images, group))
            else:
                sequences += [TrainingSequence(images, [branch]) for branch in group]
        size = self.micro["packed" if variant.packed else variant.activation_checkpointing]
        return [sequences[start : start + size] for start in range(0, len(sequences), size)]

    def sequence_lengths(self, variant: Variant) -> list[list[int]]:
        """Return the lengths in tokens of the sequences of each micro-batch."""
        lengths: list[list[int]] = []
        for sequences in self.micro_batches(variant):
            packed = pack([sequence.branches for sequence in sequences])
            lengths.append(torch.bincount(packed.sequences).tolist())
        return lengths

    @cached_property
    def supervised_tokens(self) -> int:
        """Number of tokens of all captions."""
        return sum(answer_length(branch) for branch in chain.from_iterable(self.groups))

    @cached_property
    def images(self) -> list[Prepared]:
        """Prepared images of each pair, filled with noise."""
        side = self.config.vision_config.image_size
        shape = (len(self.groups), 2, side, side, 3)
        pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
        marks = (IMAGE * (self.config.image_tokens_of(2) // 2),) * 2
        return [Prepared({"pixels": pixels_of_pair}, marks) for pixels_of_pair in pixels]


def make_branch(prompt: list[int], answer: list[int]) -> Branch:
    """Return the branch of a prompt and its answer, both as token IDs."""
    return Branch([*prompt, *answer], [(len(prompt), len(prompt) + len(answer))])


def answer_length(branch: Branch) -> int:
    """Return the number of tokens of a branch's answers."""
    return sum(end - start for start, end in branch.spans)


def tiny(pairs: int = 16) -> Size:
    """Return the size of the embedded run: the shapes of its base and adapters, and pairs from MiniChange."""
    tokenizer = AutoTokenizer.from_pretrained(BASE, trust_remote_code=False)
    config = M3DiffConfig.from_folder(str(BASE), None)
    last_layer = config.vision_config.num_hidden_layers  # the only vision feature layer, as in the embedded run
    config.mdp = {"vision_feature_layers": [last_layer], "layers": 2, "heads": 4}
    image = "<image>" * ((config.vision_config.image_size // config.vision_config.patch_size) ** 2 + 1)
    groups = []
    for pair in json.loads((BENCHMARKS / "minichange.json").read_text())[:pairs]:
        content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": pair["question"]}]
        chat = [{"role": "user", "content": content}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt.replace("<image>", image), add_special_tokens=False)["input_ids"]
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        references = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in pair["references"]]
        groups.append([make_branch(ids, [*reference, end]) for reference in references])
    micro = {"none": 40, "selective": 40, "full": 40, "packed": 16}
    return Size(name="tiny", config=config, lora_rank=32, groups=groups, micro=micro, step_pairs=16)


def seven_b(layers: int = 28, pairs: int = 6) -> Size:
    """Return the size of the published 7B model with the given number of LLM layers, and pairs of random tokens.

    A pair has 1,460 visual tokens, 29 prompt tokens and an average of 6.17 captions with 15 tokens each.
    """
    config = M3DiffConfig.for_published_base(LARGE_BASE, {})
    rng = np.random.default_rng(0)
    config.text_config.num_hidden_layers = layers
    config.text_config.layer_types = config.text_config.layer_types[:layers]
    side = config.vision_config.image_size // config.vision_config.patch_size
    groups = []
    for number in range(pairs):
        words = rng.integers(0, 150_000, 28).tolist()
        prompt = [*words[:14], *[config.image_token_id] * (2 * (side**2 + 1)), *words[14:], 198]
        lengths = rng.permutation([9, 12, 14, 16, 18, 21, 15][: 7 if number % 6 == 5 else 6])
        groups.append([make_branch(prompt, rng.integers(0, 150_000, length).tolist()) for length in lengths])
    micro = {"none": 3, "selective": 6, "full": 6, "packed": 3}
    return Size(name="7B", config=config, lora_rank=128, groups=groups, micro=micro, step_pairs=42)


class MasterAdamW:
    """AdamW with fp32 master copies of the trained weights. Weights that are already in fp32 are not copied."""

    def __init__(self, model: torch.nn.Module, settings: Any) -> None:
        groups = trainable_groups(model, M3DIFF, settings)
        self.weights = list(chain.from_iterable(group.parameters for group in groups))
        masters = {}
        for weight in self.weights:
            masters[id(weight)] = weight if weight.dtype == torch.float32 else weight.detach().float()
        self.masters = [masters[id(weight)] for weight in self.weights]
        parameter_groups = []
        for group in groups:
            parameter_groups.append({"params": [masters[id(weight)] for weight in group.parameters], "lr": group.lr})
        self.optimizer = torch.optim.AdamW(parameter_groups, weight_decay=0.0, fused=True)

    def clear(self) -> None:
        """Delete all gradients."""
        for tensor in (*self.weights, *self.masters):
            tensor.grad = None

    def step(self) -> None:
        """Move the gradients to the fp32 copies, clip them, take a step, and write the new weights back."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            if master is not weight and weight.grad is not None:
                master.grad = weight.grad.float()
                weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                if master is not weight:
                    weight.copy_(master)


class PixelProcessor:
    """The part of M3Diff's processor that a training step uses. It needs no tokenizer, which the 7B model lacks here.

    Args:
        side: width and height of the model's images in pixels.
    """

    pad_id = PAD
    collate = M3DiffProcessor.collate
    image_inputs = M3DiffProcessor.image_inputs

    def __init__(self, side: int) -> None:
        self.image_processor = M3DiffImageProcessor(size={"height": side, "width": side})


@dataclass
class Bench:
    """The model and data that all variants share."""

    size: Size
    gpu: bool
    precision: Any

    def __post_init__(self) -> None:
        self.device = Device(self.gpu, self.precision)
        torch.manual_seed(0)
        with self.device.torch:
            self.model = M3DiffForConditionalGeneration._from_config(
                self.size.config, dtype=self.device.dtype, attn_implementation=register_kernels()
            )
            self.adapted = prepare_for_training(self.model, M3DIFF, self.size.settings).train()
            self.optimizer = MasterAdamW(self.adapted, self.size.settings)
        self.initial_weights = [weight.detach().cpu().clone() for weight in self.optimizer.weights]
        self.mdp = self.model.model.mdp
        self.processor: Any = PixelProcessor(self.size.config.vision_config.image_size)
        self.packing = MaskedRows()

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the initial weights, so that the losses of all variants can be compared."""
        optimizer = self.optimizer
        for weight, master, initial in zip(optimizer.weights, optimizer.masters, self.initial_weights, strict=True):
            weight.copy_(initial)
            master.copy_(initial)

    def use_variant(self, variant: Variant) -> None:
        """Configure the model for the variant and build its micro-batches."""
        self.device = Device(self.gpu, self.precision, variant.attention)  # type: ignore[arg-type]
        self.model.model.mdp = self.mdp if variant.mdp else None
        self.model.set_attn_implementation("sdpa" if variant.stock else register_kernels())
        make_fused(self.model, variant.activation_checkpointing, stock=not variant.fused)
        self.batches = [
            self.packing.batch(sequences, self.processor, self.device) for sequences in self.size.micro_batches(variant)
        ]

    def run(self, variant: Variant) -> float:
        """Run the forward and backward passes over all captions and return the mean loss per supervised token.

        `use_variant` must be called first.
        """
        total = torch.zeros((), device=self.device.torch)
        for sequences, batch in zip(self.size.micro_batches(variant), self.batches, strict=True):
            if variant.stock:
                loss = self.stock_loss(sequences, batch)
            else:
                loss = token_loss(self.adapted, batch, self.packing, self.processor, self.device)
            (loss / self.size.supervised_tokens).backward()
            total += loss.detach()
        return float(total) / self.size.supervised_tokens

    def stock_loss(self, sequences: list[TrainingSequence], batch: RowBatch) -> Tensor:
        """Return the summed loss of transformers' own loss function, with one right-padded caption per row."""
        captions = list(chain.from_iterable(sequence.branches for sequence in sequences))
        ids = [torch.tensor(caption.ids) for caption in captions]
        labels = []
        for caption, tokens in zip(captions, ids, strict=True):
            labels.append(torch.full_like(tokens, -100))
            for start, end in caption.spans:
                labels[-1][start:end] = tokens[start:end]
        mask = pad_sequence([torch.ones_like(tokens) for tokens in ids], batch_first=True)
        mean = self.adapted(
            input_ids=self.device.move(pad_sequence(ids, batch_first=True, padding_value=PAD)),
            attention_mask=self.device.move(mask),
            labels=self.device.move(pad_sequence(labels, batch_first=True, padding_value=-100)),
            use_cache=False,
            **self.processor.image_inputs(batch.images, self.device.torch),
        ).loss
        return mean * len(batch.labels)


@dataclass
class Measurement:
    """The measurements of a variant: loss, seconds of each repetition, and on a GPU the peak memory in GB."""

    variant: Variant
    loss: float
    run_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    peak_gb: float | None = None

    def figures(self, size: Size, peak_tflops: float | None) -> dict[str, Any]:
        """Return speeds, loss, spread, peak memory and micro-batch size, and the MFU if the device's peak is known.

        Args:
            peak_tflops: peak TFLOPS of the device, or None if they are not known.
        """
        optimizer = statistics.median(self.optimizer_s) * len(size.groups) / size.step_pairs
        seconds = statistics.median(self.run_s) + optimizer
        sequence_counts = [len(sequences) for sequences in size.micro_batches(self.variant)]
        rate = {"captions_per_s": size.captions / seconds, "sequences_per_s": sum(sequence_counts) / seconds}
        spread = (max(self.run_s) - min(self.run_s)) / statistics.median(self.run_s)
        figures = {"name": self.variant.name, **rate, "loss": self.loss, "spread": spread}
        figures["peak_gb"] = self.peak_gb
        if peak_tflops:
            figures["mfu"] = model_flops(size, self.variant) / seconds / (peak_tflops * 1e12)
        return figures | {"micro_batch": max(sequence_counts)}


def warm_up(bench: Bench, variant: Variant) -> Measurement | str:
    """Run the variant once without timing it. Halve its micro-batches until they fit in memory.

    Returns:
        A measurement that does not have durations yet. If not even one sequence fits in memory, the reason as text.
    """
    key = "packed" if variant.packed else variant.activation_checkpointing
    while True:
        try:
            bench.use_variant(variant)
            loss = bench.run(variant)
            return Measurement(variant, loss)
        except torch.OutOfMemoryError:
            if bench.size.micro[key] == 1:
                return "does not fit"
            bench.size.micro[key] //= 2
        finally:
            bench.optimizer.clear()
        torch.cuda.empty_cache()


def measure(bench: Bench, variants: tuple[Variant, ...], repeats: int) -> tuple[list[Measurement], dict[str, str]]:
    """Measure the variants in turn, `repeats` times each.

    Returns:
        The measurements, and a dictionary from the name of each variant that could not run to the reason.
    """
    bench.reset()
    measurements = []
    failures = {}
    for variant in variants:
        outcome = warm_up(bench, variant)
        if isinstance(outcome, Measurement):
            measurements.append(outcome)
        else:
            failures[variant.name] = outcome
    for measurement in measurements[:1]:  # this step is not counted, since it creates the optimizer's state
        bench.use_variant(measurement.variant)
        timed_step(bench, measurement)
    for _ in range(repeats):
        for measurement in measurements:
            bench.use_variant(measurement.variant)
            run_s, optimizer_s = timed_step(bench, measurement)
            measurement.run_s.append(run_s)
            measurement.optimizer_s.append(optimizer_s)
    return measurements, failures


def measure_alone(bench: Bench, variant: Variant, repeats: int) -> tuple[list[Measurement], dict[str, str]]:
    """Measure a single variant on a GPU, where its kernels are compiled. The result has the same form as for `measure`.

    If the variant fails, for example in the compiler, the error is returned as the reason why it could not run. Other
    variants are not affected.
    """
    # Otherwise, the compiled graphs of other variants would count towards the compiler's limit
    torch.compiler.reset()
    try:
        return measure(bench, (variant,), repeats)
    except Exception as error:
        return [], {variant.name: f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    finally:
        torch.compiler.reset()
        bench.model.zero_grad(set_to_none=True)


def check_losses(measurements: list[Measurement], precision: str) -> None:
    """Check that every variant has the same loss as the first one.

    Raises:
        AssertionError: a loss differs by more than the tolerance.
    """
    for measurement in measurements:
        reference = measurements[0]
        deviation = abs(measurement.loss / reference.loss - 1)
        # A new MDP module is initialised to zero or almost zero, so a model without the module has about the same loss
        tolerance = SAME_LOSS[precision] if measurement.variant.mdp else 0.05
        assert deviation < tolerance, (
            f"{measurement.variant.name}: loss {measurement.loss}, of {reference.variant.name} {reference.loss}"
        )


def timed_step(bench: Bench, measurement: Measurement) -> tuple[float, float]:
    """Take a training step and return the seconds of the forward and backward passes and of the optimizer.

    On a GPU, the peak memory of the step is stored in the measurement.
    """
    if bench.gpu:
        torch.cuda.reset_peak_memory_stats()
    stamps = [_now(bench.gpu)]
    bench.run(measurement.variant)
    stamps.append(_now(bench.gpu))
    bench.optimizer.step()
    stamps.append(_now(bench.gpu))
    measurement.peak_gb = torch.cuda.max_memory_allocated() / 1e9 if bench.gpu else None
    return stamps[1] - stamps[0], stamps[2] - stamps[1]


def _now(gpu: bool) -> float:
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def static_gb(size: Size) -> float:
    """Return the memory in GB that the weights, gradients and optimizer state of the model with adapters need."""
    with torch.device("meta"):
        model = M3DiffForConditionalGeneration(size.config)
        prepare_for_training(model, M3DIFF, size.settings)
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(count * (TRAINED_BYTES if trains else FROZEN_BYTES) for count, trains in counts) / 1e9


def planned_gb(size: Size, variant: Variant, precision: str) -> float | None:
    """Return the memory in GB that `m3diff plan` predicts for a training step with the variant.

    This includes weights, gradients, optimizer state and the activations of a micro-batch. The result is None if
    `m3diff plan` does not cover the variant.
    """
    if precision != "bf16" or variant.stock or not variant.fused:
        return None
    micro = max(len(sequences) for sequences in size.micro_batches(variant))
    return static_gb(size) + planned_activations_gb(size, variant, precision) * micro


def model_flops(size: Size, variant: Variant) -> float:
    """Return the FLOPs of the forward and backward passes over all captions, without recomputation."""
    lengths = list(chain.from_iterable(size.sequence_lengths(variant)))
    supervised = size.supervised_tokens / len(lengths)
    model = meta_model(size.config, M3DIFF, size.settings)
    terms = M3DIFF.count_flops(model, M3DIFF, sum(lengths) / len(lengths), supervised)
    return len(lengths) * sum(term.total for term in terms)


def planned_activations_gb(size: Size, variant: Variant, precision: str) -> float:
    """Return the memory in GB that `m3diff plan` predicts for the activations of the first pair's sequence."""
    from m3diff.commands.plan.memory import count_activations

    pair = Size("one", size.config, size.lora_rank, size.groups[:1], size.micro, 1)
    sequences = pair.micro_batches(variant)[0]
    lengths = pair.sequence_lengths(variant)[0]
    model = meta_model(size.config, M3DIFF, size.settings, precision)
    answer_tokens = sum(answer_length(branch) for sequence in sequences for branch in sequence.branches)
    supervised = answer_tokens // len(lengths)
    activations = count_activations(model, M3DIFF, variant.activation_checkpointing, lengths[0], supervised)
    return sum(activations.values()) / 1e9


def choose_variants(rows: Sequence[str] | None, gpu: bool, precision: str) -> tuple[Variant, ...]:
    """Return the variants with the names in `rows`, in this order. If `rows` is None, return all for the device.

    Raises:
        ValueError: there is no variant with one of the names.
    """
    variants = {variant.name: variant for variant in ABLATION + GPU_ROWS}
    if rows is None:
        return ABLATION + (GPU_ROWS if gpu or precision == "bf16" else ())
    if unknown := [name for name in rows if name not in variants]:
        raise ValueError(f"there is no row {unknown[0]!r}; rows: {'; '.join(variants)}")
    return tuple(variants[name] for name in rows)


def measure_levers(
    shapes: str,
    gpu: bool,
    precision: str,
    pairs: int,
    repeats: int | None,
    chip: str,
    variants: tuple[Variant, ...],
    report: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measure the variants and return the results.

    On a GPU, which is not shared with other programs, each variant is measured completely before the next. On a CPU,
    the variants take turns.

    Args:
        shapes: `tiny` or `7b`.
        pairs: number of pairs per step at tiny shapes.
        repeats: repetitions of each variant. If None, 2 on a GPU and 5 on a CPU.
        chip: torch's name for the device.
        report: function that is called with each row as soon as it is measured.
    """
    size = tiny(pairs) if shapes == "tiny" else seven_b()
    layers = size.config.text_config.num_hidden_layers
    bench = Bench(size, gpu, precision)
    flops = peak_flops(chip, precision)
    peak_tflops = flops / 1e12 if flops else None
    measurements: list[Measurement] = []
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}

    def record(turn_measurements: list[Measurement], turn_failures: dict[str, str]) -> None:
        for measurement in turn_measurements:
            planned = planned_gb(size, measurement.variant, precision)
            row = measurement.figures(size, peak_tflops) | {"planned_gb": planned}
            rows.append(row)
            report(row | {"llm_layers": layers})
        for name, reason in turn_failures.items():
            report({"name": name, "not_run": reason, "llm_layers": layers})
        measurements.extend(turn_measurements)
        failures.update(turn_failures)

    if gpu:
        for variant in variants:
            record(*measure_alone(bench, variant, repeats or 2))
    else:
        record(*measure(bench, variants, repeats or 5))
    check_losses(measurements, precision)
    counts = {"pairs": len(size.groups), "captions": size.captions, "llm_layers": layers}
    return {"ablation": rows, "not_run": failures} | counts

"""The plan in words, as `m3diff plan` prints it, and warnings before a training: too few steps, words that the base
does not know."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from m3diff.commands.plan.plan import RESERVE, TERA, Plan, read_columns, recomputed_flops
from m3diff.models.family import Settings
from m3diff.records.errors import readable
from m3diff.settings.compute import Compute
from m3diff.settings.gpus import GPUS, Gpu
from m3diff.stages.convert.paper_mixture import PAIRS, SAMPLES, SOURCES
from m3diff.stages.train.params import Train

EXA = 1e18
FEW_STEPS = 100
"""Of fewer optimizer steps a model learns little: the embedded run takes 1,097, the paper's 3,500."""

WORD = re.compile(r"[^\W\d_]+")
PIECES = 3
"""A word of so many tokens or more counts as spelled."""
TOO_MANY = 0.15  # share of the words; the embedded base spells 31 % of Spot-the-Diff's, and none of MiniChange's
EXAMPLES = 5


def print_plan(train: Train, compute: Compute, plan: Plan, gpu: Gpu | None, hfu: float) -> None:
    """Print the plan as tables; times are for a kind of GPU, at a share of its peak (hardware FLOPs utilisation,
    HFU)."""
    tables = (*_workload_lines(train, plan), *_cost_lines(compute, plan, gpu), *_time_lines(train, plan, gpu, hfu))
    print("\n".join(tables))


def _workload_lines(train: Train, plan: Plan) -> Iterator[str]:
    """Parameters; the pairs of each source, by split with the published pairs, the sums, and the paper's where the
    sources are its own; the sequences that are made of them."""
    load, most = plan.workload, train.max_captions_per_sequence
    yield f"parameters: {plan.base}"
    for name, count in plan.parameters.items():
        yield f"  {name:<28} {count / 1e6:>12,.2f} M"
    yield f"counted: {load.counted}"
    rows = [] if load.splits else [(name, *count, "") for name, count in load.sources.items()]
    for use in load.splits:
        estimated = "" if use.counted else "; references estimated"
        of = f" of {use.published:,} published pairs{estimated}"
        rows.append((f"{use.dataset} {use.split}", *use.used, of))
    if load.splits:
        of = f" of {sum(use.published for use in load.splits):,} published pairs"
        rows.append(("sum", load.pairs, load.references, of))
    for name, pairs, references, of in rows:
        yield f"  {name:<28} {pairs:>9,} pairs {references:>9,} references{of}"
    if load.splits and set(load.sources) == set(SOURCES):
        yield f"  {'the paper':<28} {f'{PAIRS // 1000}k':>9} pairs {f'{SAMPLES // 1000}k':>9} references"
    yield (
        f"workload: {load.pairs:,} pairs, {load.references:,} references, {load.references_per_pair:.2f} a pair; "
        f"{load.prompt_tokens:.1f} tokens a prompt, {load.reference_tokens:.1f} a reference"
    )
    yield (
        f"  max_captions_per_sequence {'all' if most is None else most}: {plan.sequences:,} sequences of "
        f"{plan.tokens:,.0f} tokens, {plan.branches:.2f} references each; {plan.steps:,} steps of {train.global_batch}"
    )


def _cost_lines(compute: Compute, plan: Plan, gpu: Gpu | None) -> Iterator[str]:
    """FLOPs of a sequence and of the run, and the memory of one GPU."""
    recomputation = compute.activation_checkpointing
    forward, total = sum(term.forward for term in plan.terms), sum(term.total for term in plan.terms)
    again = recomputed_flops(plan.terms, recomputation)
    yield f"FLOPs of one sequence, TFLOP   {'forward':>9} {'total':>9}"
    for term in plan.terms:
        yield f"  {term.name:<28} {term.forward / TERA:>9.3f} {term.total / TERA:>9.3f}"
    yield f"  {'sum of the model':<28} {forward / TERA:>9.2f} {total / TERA:>9.2f}"
    yield f"  {f'recomputation, {recomputation}':<28} {'':>9} {again / TERA:>9.2f}"
    yield (
        f"  per reference {(total + again) / plan.branches / TERA:.2f} TFLOP; "
        f"the run {plan.run_flops / EXA:.2f} EFLOP, {plan.model_flops / EXA:.2f} of them the model's"
    )
    counted = "the mean sequence" if plan.longest is None else f"the longest sequence, {plan.longest} reference(s)"
    yield f"memory of one GPU, GB; activations counted for {counted}"
    for name, size in plan.memory_gb.items():
        yield f"  {name:<28} {size:>9.1f}"
    for name, size in plan.activations_gb.items():
        yield f"    {name:<26} {size:>9.2f}"
    room = f" of {gpu.memory_gb * (1 - RESERVE):.1f}, {gpu.name} less {RESERVE:.0%}" if gpu else ""
    yield f"  {'sum':<28} {plan.memory_total_gb:>9.1f}{room}"


def _time_lines(train: Train, plan: Plan, gpu: Gpu | None, hfu: float) -> Iterator[str]:
    if gpu is None:
        yield f"time: name a kind of GPU by --gpu or compute.gpu_kind: {', '.join(GPUS)}"
        return
    if train.precision != "bf16":
        yield f"time: peaks are known for bf16, and train.precision is {train.precision}"
        return
    hours = plan.gpu_hours(gpu.bf16_tflops, hfu)
    speed = plan.workload.references * train.epochs / hours / 3600
    yield (
        f"time on {gpu.name} ({gpu.bf16_tflops:g} TFLOP/s dense bf16) at {hfu:.0%} HFU, which is {plan.mfu(hfu):.1%} "
        "MFU (without recomputation):"
    )
    yield f"  {_took(hours, plan.gpus)} on {plan.gpus} GPU(s), {speed:.1f} captions/s a GPU"
    if plan.test_pairs:
        minutes = plan.caption_minutes(gpu.bf16_tflops, hfu, plan.test_pairs)
        yield (
            f"captions of {plan.test_pairs:,} test pairs: {plan.caption_flops / TERA:.1f} TFLOP a pair to read, "
            f"{minutes:.1f} GPU-minutes, {minutes / plan.gpus:.1f} min on {plan.gpus} GPU(s); decoding and the control "
            "come on top"
        )


def alignment_lines(
    train: Train, settings: Settings, plan: Plan | None, uncounted: str, gpu: Gpu | None, hfu: float
) -> list[str]:
    """The alignment before the fine-tuning and its cost, or why that is not known; nothing without one."""
    if settings.align is None:
        return []
    align = settings.align
    rates = ", ".join(f"{part} {rate:g}" for part, rate in align.rates.items() if rate is not None)
    what = (
        f"before it an alignment: {align.epochs:g} epoch(s) of {', '.join(align.datasets)}, "
        f"{align.global_batch} sequences a step ({rates})"
    )
    if plan is None:
        return [what, f"  not counted: {uncounted}"]
    load = plan.workload
    took = ""
    if gpu and train.precision == "bf16":  # no other peak is known
        took = f", {_took(plan.gpu_hours(gpu.bf16_tflops, hfu), plan.gpus)} on {plan.gpus} GPU(s)"
    return [
        what,
        f"  {load.pairs:,} pairs, {load.references:,} references, {plan.steps:,} steps; "
        f"{plan.run_flops / EXA:.2f} EFLOP{took}; memory of one GPU {plan.memory_total_gb:.1f} GB",
    ]


def short_run(train: Train, plan: Plan) -> str | None:
    """A warning where the run takes too few steps to learn from."""
    if plan.steps >= FEW_STEPS:
        return None
    epochs = math.ceil(train.epochs * 3 * FEW_STEPS / plan.steps)
    return (
        f"the run takes {plan.steps} optimizer step(s), in which a model learns little; a small collection wants more "
        f"epochs: train.epochs {epochs} is about {3 * FEW_STEPS} steps"
    )


def _took(hours: float, gpus: int) -> str:
    """`26.1 GPU-hours, 3.3 h`; of a short run in minutes."""
    if hours >= 0.1:
        return f"{hours:.1f} GPU-hours, {hours / gpus:.1f} h"
    return f"{60 * hours:.2f} GPU-minutes, {60 * hours / gpus:.2f} min"


class Words(NamedTuple):
    """Counts of the references' words by how the base's tokenizer takes them, each as often as it occurs.

    A tokenizer spells from pieces what its model has hardly seen.
    """

    vocabulary: int  # tokens
    words: int
    spelled: int
    examples: tuple[str, ...]  # the most frequent that are spelled

    @property
    def share(self) -> float:
        return self.spelled / self.words if self.words else 0.0

    def warning(self) -> str | None:
        """The trouble with training on them; None where the base knows the words."""
        if self.share <= TOO_MANY:
            return None
        told = ", ".join(self.examples)
        return (
            f"the base does not know {self.share:.0%} of the words of the references ({told}): its vocabulary of "
            f"{self.vocabulary:,} tokens spells them from {PIECES} pieces or more. Fine-tuning teaches no language: "
            "name in train.base one that was pre-trained on such text (`m3diff profile small`, `one-gpu`, `paper` do)"
        )


def count_words(base: Path, mixture: Path) -> Words | None:
    """Count over the training samples; None where there are none, or the base has no `tokenizer.json`."""
    from tokenizers import Tokenizer

    shards = sorted((mixture / "train").glob("*.parquet"))
    if not shards or not (base / "tokenizer.json").is_file():
        return None
    with readable(base / "tokenizer.json", "fetch it again"):
        tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    counts: Counter[str] = Counter()
    references = read_columns(shards, "reference")["reference"]
    for reference, times in references.value_counts().iter_rows():
        for word in WORD.findall(reference):
            counts[word] += times
    found = [
        word  # within a sentence, so with the space before it
        for word, _ in counts.most_common()
        if len(tokenizer.encode(f" {word}", add_special_tokens=False).tokens) >= PIECES
    ]
    return Words(
        vocabulary=tokenizer.get_vocab_size(),
        words=counts.total(),
        spelled=sum(counts[word] for word in found),
        examples=tuple(found[:EXAMPLES]),
    )

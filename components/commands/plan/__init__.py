"""The cost of a training run before it starts: parameters, tokens, FLOPs, memory and hours (`m3diff plan`).

An epoch is counted from the run's mixture, where it is there, else from the published counts of its datasets.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import torch

from m3diff.commands.plan.memory import count_activations
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, SplitCount
from m3diff.models import FAMILIES
from m3diff.models.family import Family, Settings
from m3diff.models.flops import ADAPTERS, Term
from m3diff.models.processing import PairProcessor
from m3diff.models.tuning import meta_model
from m3diff.records.errors import readable
from m3diff.settings.compute import GPUS, Compute, Gpu
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params
from m3diff.stages.convert.params import Convert, Source
from m3diff.stages.convert.stage import SAMPLES, training_counts
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.train.job import of_alignment
from m3diff.stages.train.params import Train

GIGA, TERA, EXA = 1e9, 1e12, 1e18
OPTIMIZER_BYTES, GRADIENT_BYTES = 12, 4  # of a trained parameter: fp32 master and AdamW's two moments; fp32 gradient
RESERVE = 0.08  # of the GPU: context, workspaces, fragmentation
LENGTHS = 20_000  # distinct texts of a mixture whose tokens are counted; evenly spread ones represent more

# Estimates without a tokenizer: chat template and question without images (but a family that asks none); a reference
# with its end
PROMPT_TOKENS, REFERENCE_TOKENS = 29.0, 15.0


class Use(NamedTuple):
    """The share of a dataset, or of one of its splits, in an epoch. A pair that is used twice counts twice.

    Attributes:
        split: the dataset's own, which `train_on` names; empty for a mixture, whose samples do not tell it.
        published: its pairs as published; those without a word do not train.
        counted: whether its references were counted; else they are estimated.
    """

    dataset: str
    pairs: int
    references: int
    split: str = ""
    published: int = 0
    counted: bool = True


@dataclass(frozen=True)
class Workload:
    """The pairs and references of an epoch.

    Attributes:
        counted: the source of the counts, in words.
        prompt_tokens: chat template and question, without the images; mean over pairs.
        reference_tokens: mean over references, each with its end token.
        sizes: number of pairs by their number of references; empty where only sums are known.
    """

    counted: str
    uses: Sequence[Use]
    prompt_tokens: float
    reference_tokens: float
    sizes: Mapping[int, int]

    @property
    def sources(self) -> dict[str, tuple[int, int]]:
        """Return (pairs, references) by dataset."""
        found: dict[str, tuple[int, int]] = {}
        for use in self.uses:
            pairs, references = found.get(use.dataset, (0, 0))
            found[use.dataset] = pairs + use.pairs, references + use.references
        return found

    @property
    def pairs(self) -> int:
        return sum(use.pairs for use in self.uses)

    @property
    def references(self) -> int:
        return sum(use.references for use in self.uses)

    def longest(self, max_captions: int | None) -> int | None:
        """Return the references of the longest sequence; None where only sums are known."""
        return min(max(self.sizes), max_captions or max(self.sizes)) if self.sizes else None

    def sequences(self, max_captions: int | None) -> int:
        """Return the number of sequences with at most so many references of one pair (None: all).

        A mixture is counted pair by pair, so the last sequence of a pair may hold fewer. Of published counts only the
        sums are known, and every sequence is taken to be full.
        """
        if max_captions is None:
            return self.pairs
        if self.sizes:
            return sum(count * math.ceil(size / max_captions) for size, count in self.sizes.items())
        each = [(references, references / pairs) for pairs, references in self.sources.values()]
        return round(sum(references / min(max_captions, mean) for references, mean in each))


@dataclass(frozen=True)
class Plan:
    """The figures of a run.

    Attributes:
        train: the section that it is for; of an alignment, its own.
        base: the origin of the shapes, in words.
        parameters: parameters by group; the frozen ones of a part have "(frozen)" in the group's name.
        terms: FLOPs of one sequence, without recomputation.
        branches: references of a sequence, mean.
        tokens: of a sequence, mean.
        longest: references of the longest sequence, which the memory is for; None where only sums are known, and it is
            for a mean one.
        sequences: of an epoch.
        steps: of the run.
        run_flops: of the run, with what is recomputed; frozen weights cost 2 of 3, as their gradient is not computed.
        memory_gb: on one GPU, by what it is for.
        activations_gb: that part of it, for a micro-batch, by where it arises.
        caption_flops: of a pair's images and prompt, by the merged model; the images are encoded once. Not counted are
            decoding, which is bound by memory, and the saliency map, under 1 % more.
    """

    train: Train
    base: str
    workload: Workload
    parameters: Mapping[str, int]
    terms: Sequence[Term]
    branches: float
    tokens: float
    longest: int | None
    sequences: int
    steps: int
    run_flops: float
    memory_gb: Mapping[str, float]
    activations_gb: Mapping[str, float]
    caption_flops: float
    gpus: int

    @property
    def memory_total_gb(self) -> float:
        return sum(self.memory_gb.values())

    def gpu_hours(self, peak_tflops: float, hfu: float) -> float:
        """Hours of one GPU that computes, recomputation counted, at a share of its peak (hardware FLOPs utilisation,
        HFU)."""
        return self.run_flops / (peak_tflops * TERA * hfu) / 3600


class Run(NamedTuple):
    """The sections of the parameters that decide the cost of a run.

    Attributes:
        settings: of the model family, the entry of the section `models` that `train.model` names.
        entries: the datasets of the run, whose published counts count where `mixture/train` is not there.
    """

    train: Train
    settings: Settings
    compute: Compute
    entries: Mapping[str, DatasetEntry]
    convert: Convert
    mixture: Path

    @classmethod
    def of(cls, params: Params) -> "Run":
        train, mixture = params.train, params.paths.mixture
        return cls(train, params.models[train.model], params.compute, params.ingest.datasets, params.convert, mixture)


def make_plan(run: Run, left_out: Sequence[str] = ()) -> Plan:
    """Count what the fine-tuning will read, compute and hold; of an alignment before it `plan_alignment` does.

    Args:
        left_out: datasets that do not count; of a model with an alignment, those that it takes.

    Raises:
        ParamsError: there is no mixture, and a dataset has no published counts.
    """
    train, settings, compute, entries, convert, mixture = run
    family = FAMILIES[settings.family]
    config, is_here = family.planned_config(train.base, settings), (train.base / "config.json").is_file()
    processor = family.load_processor(train.base, config) if is_here else None
    others = settings.align.datasets if settings.align else left_out
    load = find_workload(mixture, entries, convert, processor, config.image_tokens, others)
    if processor is None and family.prompt_tokens is not None:
        load = replace(load, prompt_tokens=family.prompt_tokens)
    sequences = load.sequences(train.max_captions_per_sequence)
    branches, prompt = load.references / sequences, config.image_tokens + load.prompt_tokens
    tokens = prompt + branches * load.reference_tokens
    model = meta_model(config, family, settings, train.precision)
    terms, reading = family.flops(model, tokens, branches * load.reference_tokens), family.flops(model, prompt, 1)
    longest = load.longest(train.max_captions_per_sequence)
    supervised = (longest or branches) * load.reference_tokens
    last = math.ceil(supervised)
    kept = count_activations(model, family, compute.activation_checkpointing, math.ceil(prompt) + last, last)
    activations = {name: compute.micro_batch * size / GIGA for name, size in kept.items()}
    parameters = parameters_of(model, family)
    in_all, total = train.epochs * sequences, sum(term.total for term in terms)
    name = config.name_or_path
    fetch = f" (`hf download {name} --local-dir {train.base}`)" if "/" in name else ""
    return Plan(
        train=train,
        base=str(train.base) if is_here else f"published shapes of {name}, {train.base} is not here{fetch}",
        workload=load,
        parameters=parameters,
        terms=terms,
        branches=branches,
        tokens=tokens,
        longest=longest,
        sequences=sequences,
        steps=math.ceil(train.epochs * math.ceil(sequences / train.global_batch)),  # as the loop counts them
        run_flops=in_all * (total + recomputed_flops(terms, compute.activation_checkpointing)),
        memory_gb=static_memory(train, compute, parameters) | {"activations": sum(activations.values())},
        activations_gb=activations,
        caption_flops=sum(term.forward for term in reading if term.name != ADAPTERS),
        gpus=max(1, compute.workers),
    )


def plan_alignment(run: Run) -> Plan | None:
    """Return the plan of the phase before the fine-tuning, on its own datasets; None for a model without one, and where
    its datasets cannot be counted, which is printed."""
    if run.settings.align is None:
        return None
    phase, aligned = of_alignment(run.train, run.settings)
    others = [name for name in run.entries if name not in run.settings.align.datasets]
    try:
        return make_plan(run._replace(train=phase, settings=aligned), others)
    except ParamsError as error:
        print(f"the alignment is not counted: {error}")
        return None


def parameters_of(model: Any, family: Family) -> dict[str, int]:
    """Parameters by part, those that train and those that are frozen."""
    groups = {group: 0 for part in family.parts for group in (part, f"{part} (frozen)")}
    for name, parameter in model.named_parameters():
        part = family.part_of(name)
        groups[part if parameter.requires_grad else f"{part} (frozen)"] += parameter.numel()
    return {group: count for group, count in groups.items() if count}


def recomputed_flops(terms: Sequence[Term], activation_checkpointing: str) -> float:
    """FLOPs of one sequence's forward that backward runs again; the norms and products of `selective` count as none."""
    return sum(term.recomputed for term in terms) if activation_checkpointing == "full" else 0.0


def static_memory(train: Train, compute: Compute, parameters: Mapping[str, int]) -> dict[str, float]:
    """GB on one GPU: ZeRO 1 shares out master weights and moments (12 bytes), 2 gradients too, 3 weights too."""
    ranks = max(1, compute.workers)
    total = sum(parameters.values())
    trained = sum(count for group, count in parameters.items() if not group.endswith("(frozen)"))
    width = 2 if train.precision == "bf16" else 4
    return {
        "weights": width * total / (ranks if compute.zero_stage >= 3 else 1) / GIGA,
        "gradients": GRADIENT_BYTES * trained / (ranks if compute.zero_stage >= 2 else 1) / GIGA,
        "optimizer": OPTIMIZER_BYTES * trained / (ranks if compute.zero_stage >= 1 else 1) / GIGA,
    }


def check_memory(run: Run) -> None:
    """Refuse a run that its GPUs cannot hold, before anything is loaded. Takes seconds; nothing without `compute.gpu`.

    The memory of one GPU is that of the smallest that torch finds here, else of `compute.gpu_kind`. Where neither is
    known nothing is refused.

    Raises:
        ParamsError: names what is needed, what there is and what to lower.
    """
    kind = GPUS.get(run.compute.gpu_kind or "")
    if run.compute.gpu and (room := found_memory_gb() or (kind and kind.memory_gb)):
        for plan in filter(None, (plan_alignment(run), make_plan(run))):
            check_fits(run.compute, plan, room)


def found_memory_gb() -> float | None:
    """Memory of the smallest GPU of this machine, None where torch finds none."""
    sizes = [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())]
    return min(sizes) / GIGA if sizes else None


def check_fits(compute: Compute, plan: Plan, memory_gb: float) -> None:
    """Raise ParamsError where the plan needs more than a GPU has; it names both, and what to lower."""
    room = memory_gb * (1 - RESERVE)
    if plan.memory_total_gb <= room:
        return
    parts = ", ".join(f"{name} {size:.1f}" for name, size in plan.memory_gb.items())
    raise ParamsError(
        f"compute: needs {plan.memory_total_gb:.1f} GB a GPU ({parts}) but {memory_gb:.4g} GB hold {room:.1f}; lower "
        f"compute.micro_batch (now {compute.micro_batch}) or train.max_captions_per_sequence, raise compute.zero_stage "
        f"(now {compute.zero_stage}) on several GPUs, set compute.activation_checkpointing to full (now "
        f"{compute.activation_checkpointing}) or take larger GPUs"
    )


def find_workload(
    mixture: Path,
    entries: Mapping[str, DatasetEntry],
    convert: Convert,
    processor: PairProcessor | None,
    image_tokens: int,
    left_out: Sequence[str] = (),
) -> Workload:
    """The run's mixture where it is there, else the published counts.

    The mixture of another run, with datasets that this one has not, is not counted.

    Args:
        left_out: datasets whose samples another phase takes.
    """
    entries = {name: entry for name, entry in entries.items() if name not in left_out}
    if not any((mixture / "train").glob("*.parquet")):
        return published_workload(entries, convert)
    found = counted_workload(mixture / "train", processor, image_tokens, left_out)
    if foreign := found.sources.keys() - {name for name, entry in entries.items() if entry.train_on}:
        load = published_workload(entries, convert)
        return replace(load, counted=f"{load.counted}; {mixture} is of another run ({', '.join(sorted(foreign))})")
    return found


def counted_workload(
    folder: Path, processor: PairProcessor | None, image_tokens: int, left_out: Sequence[str] = ()
) -> Workload:
    """The training split of the mixture without some datasets; token lengths by the processor's tokenizer, where there
    is one."""
    shards = []
    for shard in sorted(folder.glob("*.parquet")):
        with readable(shard):
            shards.append(pl.read_parquet(shard, columns=["pair", "dataset", "question", "reference"]))
    use = pl.col("pair").rle_id().alias("use")  # the samples of a pair are neighbours
    samples = pl.concat(shards).with_columns(use)
    samples = samples.filter(~pl.col("dataset").is_in(list(left_out)))
    if samples.is_empty():
        without = f" but of {', '.join(left_out)}" if left_out else ""
        raise ParamsError(f"plan: {folder} has no samples{without}; run `dvc repro convert` again")
    pairs = samples.group_by("use").agg(pl.len().alias("size"), pl.col("dataset").first(), pl.col("question").first())
    by_dataset = pairs.group_by("dataset").agg(pl.len(), pl.col("size").sum()).sort("dataset")
    prompt, reference = PROMPT_TOKENS, REFERENCE_TOKENS
    if processor is not None:
        prompt = _mean_length(pairs["question"], processor.encode_prompt) - image_tokens
        reference = _mean_length(samples["reference"], processor.encode_reference)
    return Workload(
        counted=f"{folder}, {'lengths by its tokenizer' if processor else 'lengths estimated'}",
        uses=[Use(*row) for row in by_dataset.iter_rows()],
        prompt_tokens=prompt,
        reference_tokens=reference,
        sizes=dict(pairs["size"].value_counts().sort("size").iter_rows()),
    )


def _mean_length(texts: Any, encode: Any) -> float:
    counts = texts.value_counts().sort(texts.name)
    spread = counts.gather_every(math.ceil(len(counts) / LENGTHS)).rows()
    lengths = [(len(encode(text)), count) for text, count in spread]
    return sum(length * count for length, count in lengths) / sum(count for _, count in lengths)


def published_workload(entries: Mapping[str, DatasetEntry], convert: Convert) -> Workload:
    """The published counts of the datasets, with convert's weights and caps, less what convert leaves out: references
    without a word, repeats where they were counted, and pairs of which nothing is left.

    What validate will remove (leaks, faults) and `no_change_share` leave out is not known before, so it is counted.

    Where some of the datasets have no published counts, the others are counted, and the text names the others.

    Raises:
        ParamsError: no dataset that trains has published counts, or none trains; names it and the remedy.
    """
    specs = {name: DATASETS[entry.reader] for name, entry in entries.items() if entry.train_on}
    unknown = [name for name, spec in specs.items() if spec.part(name) is None]
    if unknown and len(unknown) == len(specs):
        raise ParamsError(
            f"plan: {', '.join(unknown)}: no published counts, and no mixture yet; run `dvc repro convert` first"
        )
    without = f"; without {', '.join(unknown)}, of which none are published" if unknown else ""
    uses, tokens = list[Use](), 0.0
    for name, spec in specs.items():
        if name in unknown:
            continue
        counts: dict[str, SplitCount] = {split: getattr(spec.part(name), split) for split in entries[name].train_on}
        with_words = [count.pairs - count.wordless for count in counts.values()]
        references = [_references(spec, count) for count in counts.values()]
        source, each = convert.sources.get(name, Source()), sum(references) / sum(with_words)
        most = convert.most_references(source) or each
        cap = math.inf if source.max_pairs is None else source.max_pairs
        chosen = min(sum(with_words) * min(1.0, source.weight), cap) * max(1.0, source.weight)
        used = round(chosen * (min(each, most) if source.samples == "each" else 1))
        shares = zip(
            counts.items(),
            _shares(with_words, round(chosen)),
            _shares(references if source.samples == "each" else with_words, used),
            strict=True,
        )
        for (split, count), pairs, share in shares if used else ():
            uses.append(Use(name, pairs, share, split, count.pairs, counted=count.references is not None))
        tokens += used * REFERENCE_TOKENS * (each if source.samples == "joined" else 1)
    if not uses:
        raise ParamsError(f"plan: none of {', '.join(entries)} trains; see ingest.datasets and convert.sources")
    return Workload(
        counted=f"published counts of the datasets, lengths estimated{without}",
        uses=uses,
        prompt_tokens=PROMPT_TOKENS,
        reference_tokens=tokens / sum(use.references for use in uses),
        sizes={},
    )


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """`total` in parts as the weights are, each rounded at its end."""
    ends = [round(total * end / sum(weights)) for end in accumulate(weights)]
    return [end - start for start, end in pairwise([0, *ends])]


def _references(spec: DatasetSpec, count: SplitCount) -> float:
    """References that convert keeps: counted, or by the share of the papers' sum, or estimated: what the other sources
    leave of the paper's mixture."""
    if count.references is not None:
        return count.references - count.empty - count.repeated
    if spec.references is not None:
        return count.pairs * spec.references / sum(sum(part.pairs().values()) for part in spec.published)
    counts = [each["train_val"] for each in training_counts().values()]
    known = sum(references for _, references in counts if references is not None)
    return count.pairs * ((SAMPLES - known) / sum(pairs for pairs, references in counts if references is None))


def print_plan(plan: Plan, compute: Compute, gpu: Gpu | None, hfu: float) -> None:
    """Print the plan as tables; times are for a kind of GPU, at a share of its peak (hardware FLOPs utilisation,
    HFU)."""
    print("\n".join((*_workload_lines(plan), *_cost_lines(plan, compute, gpu, hfu))))


def _workload_lines(plan: Plan) -> Iterator[str]:
    load, most = plan.workload, plan.train.max_captions_per_sequence
    yield f"parameters: {plan.base}"
    yield from (f"  {name:<28} {count / 1e6:>12,.2f} M" for name, count in plan.parameters.items())
    yield f"counted: {load.counted}"
    published = sum(use.published for use in load.uses)
    for use in (*load.uses, Use("sum", load.pairs, load.references, published=published)):
        of = f" of {use.published:,} published pairs" if use.published else ""
        of += "" if use.counted else "; references estimated"
        yield f"  {f'{use.dataset} {use.split}':<28} {use.pairs:>9,} pairs {use.references:>9,} references{of}"
    yield f"  {load.prompt_tokens:.1f} tokens a prompt, {load.reference_tokens:.1f} a reference"
    yield (
        f"  max_captions_per_sequence {'all' if most is None else most}: {plan.sequences:,} sequences of "
        f"{plan.tokens:,.0f} tokens, {plan.branches:.2f} references each; {plan.steps:,} steps of "
        f"{plan.train.global_batch}"
    )


def _cost_lines(plan: Plan, compute: Compute, gpu: Gpu | None, hfu: float) -> Iterator[str]:
    recomputation = compute.activation_checkpointing
    forward, total = sum(term.forward for term in plan.terms), sum(term.total for term in plan.terms)
    again = recomputed_flops(plan.terms, recomputation)
    yield f"FLOPs of one sequence, TFLOP   {'forward':>9} {'total':>9}"
    for term in plan.terms:
        yield f"  {term.name:<28} {term.forward / TERA:>9.3f} {term.total / TERA:>9.3f}"
    yield f"  {'sum of the model':<28} {forward / TERA:>9.2f} {total / TERA:>9.2f}"
    yield f"  {f'recomputation, {recomputation}':<28} {'':>9} {again / TERA:>9.2f}"
    yield f"  the run {plan.run_flops / EXA:.2f} EFLOP; a pair to caption {plan.caption_flops / TERA:.1f} TFLOP to read"
    counted = "the mean sequence" if plan.longest is None else f"the longest sequence, {plan.longest} reference(s)"
    yield f"memory of one GPU, GB; activations counted for {counted}"
    yield from (f"  {name:<28} {size:>9.1f}" for name, size in plan.memory_gb.items())
    yield from (f"    {name:<26} {size:>9.2f}" for name, size in plan.activations_gb.items())
    room = f" of {gpu.memory_gb * (1 - RESERVE):.1f}, {gpu.name} less {RESERVE:.0%}" if gpu else ""
    yield f"  {'sum':<28} {plan.memory_total_gb:>9.1f}{room}"
    if gpu is None:
        yield f"time: name a kind of GPU by --gpu or compute.gpu_kind: {', '.join(GPUS)}"
    elif plan.train.precision != "bf16":
        yield f"time: peaks are known for bf16, and train.precision is {plan.train.precision}"
    else:
        hours = plan.gpu_hours(gpu.bf16_tflops, hfu)
        speed = plan.workload.references * plan.train.epochs / hours / 3600
        yield f"time on {gpu.name} ({gpu.bf16_tflops:g} TFLOP/s dense bf16) at {hfu:.0%} HFU:"
        yield f"  {hours:.4g} GPU-hours, {hours / plan.gpus:.4g} h on {plan.gpus} GPU(s), {speed:.1f} captions/s a GPU"

"""The cost of a training run before it starts: parameters, tokens, FLOPs, memory and hours (`m3diff plan`).

An epoch is counted from the run's mixture, where it is there, else from the published counts of its datasets.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, SplitCount
from m3diff.models import FAMILIES
from m3diff.models.family import ADAPTERS, Family, Settings, Term
from m3diff.records.errors import readable
from m3diff.settings.compute import Compute
from m3diff.settings.gpus import GPUS
from m3diff.settings.section import ParamsError
from m3diff.stages.convert.paper_mixture import SAMPLES, training_counts
from m3diff.stages.convert.params import Convert, Source
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.train.job import of_alignment
from m3diff.stages.train.params import Train

if TYPE_CHECKING:
    import polars as pl

    from m3diff.models.processing import PairProcessor

GIGA, TERA = 1e9, 1e12
OPTIMIZER_BYTES, GRADIENT_BYTES = 12, 4  # of a trained parameter: fp32 master and AdamW's two moments; fp32 gradient
RESERVE = 0.08  # of the GPU: context, workspaces, fragmentation
LENGTHS = 20_000
"""Distinct texts of a mixture whose tokens are counted; evenly spread ones represent more."""

PROMPT_TOKENS, REFERENCE_TOKENS = 29.0, 15.0
"""Estimates where no tokenizer is at hand: chat template and question without images, but of a family that asks none; a
reference with its end."""


class DoesNotFit(ParamsError):
    """The run needs more memory than its GPUs have."""


class SourceCount(NamedTuple):
    """The share of a dataset in an epoch. A pair that is used twice counts twice."""

    pairs: int
    references: int


@dataclass(frozen=True)
class SplitUse:
    """The share of a dataset's split in an epoch.

    Attributes:
        split: the dataset's own, which `train_on` names.
        published: its pairs as published; those without a word do not train.
        counted: whether its references were counted; else they are estimated.
    """

    dataset: str
    split: str
    published: int
    used: SourceCount
    counted: bool


@dataclass(frozen=True)
class Workload:
    """The pairs and references of an epoch.

    Attributes:
        counted: the source of the counts, in words.
        sources: by dataset.
        prompt_tokens: chat template and question, without the images; mean over pairs.
        reference_tokens: mean over references, each with its end token.
        sizes: number of pairs by their number of references; empty where only sums are known.
        splits: `sources` by split; empty for a mixture, whose training samples do not tell it.
    """

    counted: str
    sources: Mapping[str, SourceCount]
    prompt_tokens: float
    reference_tokens: float
    sizes: Mapping[int, int]
    splits: Sequence[SplitUse] = ()

    @property
    def pairs(self) -> int:
        return sum(source.pairs for source in self.sources.values())

    @property
    def references(self) -> int:
        return sum(source.references for source in self.sources.values())

    @property
    def references_per_pair(self) -> float:
        return self.references / self.pairs

    def longest(self, max_captions: int | None) -> int | None:
        """References of the longest sequence; None where only sums are known."""
        if not self.sizes:
            return None
        return min(max(self.sizes), max_captions or max(self.sizes))

    def sequences(self, max_captions: int | None) -> int:
        """Sequences with at most so many references of one pair (None: all).

        A mixture is counted pair by pair, so the last sequence of a pair may hold fewer. Of published counts only the
        sums are known, and every sequence is taken to be full.
        """
        if max_captions is None:
            return self.pairs
        if self.sizes:
            return sum(count * math.ceil(size / max_captions) for size, count in self.sizes.items())
        each = [(source.references, source.references / source.pairs) for source in self.sources.values()]
        return round(sum(references / min(max_captions, mean) for references, mean in each))


@dataclass(frozen=True)
class Plan:
    """The figures of a run.

    Attributes:
        base: the origin of the shapes, in words.
        parameters: parameters by group; the frozen ones of a part have "(frozen)" in the group's name.
        terms: FLOPs of one sequence, without recomputation.
        branches: references of a sequence, mean.
        tokens: of a sequence, mean.
        longest: references of the longest sequence, which the memory is for; None where only sums are known, and it is
            for a mean one.
        sequences: of an epoch.
        steps: of the run.
        model_flops: of the run, without recomputation; frozen weights cost 2 of 3, as their gradient is not computed.
        run_flops: with what is recomputed.
        memory_gb: on one GPU, by what it is for.
        activations_gb: that part of it, for a micro-batch, by where it arises.
        test_pairs: pairs to caption; None where their number is not known.
        caption_flops: of a pair's images and prompt, by the merged model; the images are encoded once. Not counted are
            decoding, which is bound by memory, and the saliency map, under 1 % more.
    """

    base: str
    workload: Workload
    parameters: Mapping[str, int]
    terms: Sequence[Term]
    branches: float
    tokens: float
    longest: int | None
    sequences: int
    steps: int
    model_flops: float
    run_flops: float
    memory_gb: Mapping[str, float]
    activations_gb: Mapping[str, float]
    test_pairs: int | None
    caption_flops: float
    gpus: int

    @property
    def memory_total_gb(self) -> float:
        return sum(self.memory_gb.values())

    def gpu_hours(self, peak_tflops: float, hfu: float) -> float:
        """Hours of one GPU that computes, recomputation counted, at a share of its peak (hardware FLOPs utilisation,
        HFU)."""
        return self.run_flops / (peak_tflops * TERA * hfu) / 3600

    def caption_minutes(self, peak_tflops: float, hfu: float, pairs: int) -> float:
        """Minutes in which one GPU reads so many pairs of images with their prompts."""
        return pairs * self.caption_flops / (peak_tflops * TERA * hfu) / 60

    def mfu(self, hfu: float) -> float:
        """The share of the peak that the model's own FLOPs then come to (model FLOPs utilisation)."""
        return hfu * self.model_flops / self.run_flops


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


def make_plan(run: Run, left_out: Sequence[str] = ()) -> Plan:
    """Count what the fine-tuning will read, compute and hold; of an alignment before it `plan_alignment` does.

    Args:
        left_out: datasets that do not count; of a model with an alignment, those that it takes.

    Raises:
        ParamsError: there is no mixture, and a dataset has no published counts.
    """
    from m3diff.commands.plan.memory import count_activations

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
    terms = family.flops(config, tokens, branches * load.reference_tokens, settings)
    longest = load.longest(train.max_captions_per_sequence)
    supervised = (longest or branches) * load.reference_tokens
    model = meta_model(config, family, settings, train.precision)
    last = math.ceil(supervised)
    kept = count_activations(model, family, compute.activation_checkpointing, math.ceil(prompt) + last, last)
    activations = {name: compute.micro_batch * size / GIGA for name, size in kept.items()}
    parameters = parameters_of(model, family)
    in_all, total = train.epochs * sequences, sum(term.total for term in terms)
    name = config.name_or_path
    fetch = f" (`hf download {name} --local-dir {train.base}`)" if "/" in name else ""
    return Plan(
        base=str(train.base) if is_here else f"published shapes of {name}, {train.base} is not here{fetch}",
        workload=load,
        parameters=parameters,
        terms=terms,
        branches=branches,
        tokens=tokens,
        longest=longest,
        sequences=sequences,
        steps=math.ceil(train.epochs * math.ceil(sequences / train.global_batch)),  # as the loop counts them
        model_flops=in_all * total,
        run_flops=in_all * (total + recomputed_flops(terms, compute.activation_checkpointing)),
        memory_gb=static_memory(train, compute, parameters) | {"activations": sum(activations.values())},
        activations_gb=activations,
        test_pairs=count_test_pairs(mixture, entries),
        caption_flops=sum(term.forward for term in family.flops(config, prompt, 1, settings) if term.name != ADAPTERS),
        gpus=max(1, compute.workers),
    )


def plan_alignment(run: Run) -> tuple[Plan | None, str]:
    """The plan of the phase before the fine-tuning, on its own datasets, or why it has none: they cannot be counted."""
    if run.settings.align is None:
        return None, "the model has no alignment"
    phase, aligned = of_alignment(run.train, run.settings)
    others = [name for name in run.entries if name not in run.settings.align.datasets]
    try:
        return make_plan(run._replace(train=phase, settings=aligned), others), ""
    except ParamsError as error:
        return None, str(error).removeprefix("plan: ")


def meta_model(config: Any, family: Family, settings: Settings, precision: str) -> Any:
    """The model as it trains, without storage and without peft's wrapper."""
    import torch

    from m3diff.models.tuning import prepare

    with torch.device("meta"):
        model = family.build(config)
        prepare(model, family, settings)
    return model.to(torch.bfloat16 if precision == "bf16" else torch.float32)


def parameters_of(model: Any, family: Family) -> dict[str, int]:
    """Parameters by part, those that train and those that are frozen."""
    groups = {group: 0 for part in family.parts for group in (part, f"{part} (frozen)")}
    for name, parameter in model.named_parameters():
        part = family.part_of(name)
        groups[part if parameter.requires_grad else f"{part} (frozen)"] += parameter.numel()
    return {group: count for group, count in groups.items() if count}


def recomputed_flops(terms: Sequence[Term], activation_checkpointing: str) -> float:
    """FLOPs of one sequence's forward that backward runs again; the norms and products of `selective` count as none."""
    return sum(term.forward for term in terms if term.recomputed and activation_checkpointing == "full")


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
        DoesNotFit: names what is needed, what there is and what to lower.
    """
    kind = GPUS.get(run.compute.gpu_kind or "")
    if run.compute.gpu and (room := found_memory_gb() or (kind and kind.memory_gb)):
        before, _ = plan_alignment(run)
        for plan in filter(None, (before, make_plan(run))):
            check_fits(run.compute, plan, room)


def found_memory_gb() -> float | None:
    """Memory of the smallest GPU of this machine, None where torch finds none."""
    import torch

    sizes = [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())]
    return min(sizes) / GIGA if sizes else None


def check_fits(compute: Compute, plan: Plan, memory_gb: float) -> None:
    """Raises DoesNotFit, naming what is needed, what there is and what to lower; nothing that has no effect."""
    room = memory_gb * (1 - RESERVE)
    if plan.memory_total_gb <= room:
        return
    way = compute.activation_checkpointing
    stronger = {"none": "selective or full", "selective": "full"}.get(way)
    remedies = {
        f"lower compute.micro_batch (now {compute.micro_batch})": compute.micro_batch > 1,
        f"raise compute.zero_stage (now {compute.zero_stage})": compute.zero_stage < 3 and plan.gpus > 1,
        f"set compute.activation_checkpointing to {stronger} (now {way})": stronger is not None,
        "lower train.max_captions_per_sequence": plan.branches > 1,
        "take larger GPUs": True,
    }
    parts = ", ".join(f"{name} {size:.1f}" for name, size in plan.memory_gb.items())
    raise DoesNotFit(
        f"compute: needs {plan.memory_total_gb:.1f} GB a GPU ({parts}) but {memory_gb:.4g} GB hold {room:.1f}; "
        + " or ".join(remedy for remedy, helps in remedies.items() if helps)
    )


def find_workload(
    mixture: Path,
    entries: Mapping[str, DatasetEntry],
    convert: Convert,
    processor: "PairProcessor | None",
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


def count_test_pairs(mixture: Path, entries: Mapping[str, DatasetEntry]) -> int | None:
    """Pairs to caption: the run's mixture's, counted, else the published ones; None where neither is known."""
    if files := sorted((mixture / "test").glob("*.parquet")):
        samples = read_columns(files, "pair", "dataset")
        if set(samples["dataset"].unique()) <= entries.keys():
            return samples["pair"].n_unique()
    parts = [DATASETS[entry.reader].part(name) for name, entry in entries.items()]
    return None if None in parts else sum(part.test.pairs for part in parts if part is not None)


def read_columns(shards: Sequence[Path], *columns: str) -> "pl.DataFrame":
    """These columns of the mixture's files, in their order. Raises DataError for a file that cannot be read."""
    import polars as pl

    parts = []
    for shard in shards:
        with readable(shard):
            parts.append(pl.read_parquet(shard, columns=list(columns)))
    return pl.concat(parts)


def counted_workload(
    folder: Path, processor: "PairProcessor | None", image_tokens: int, left_out: Sequence[str] = ()
) -> Workload:
    """The training split of the mixture without some datasets; token lengths by the processor's tokenizer, where there
    is one."""
    import polars as pl

    samples = read_columns(sorted(folder.glob("*.parquet")), "pair", "dataset", "question", "reference")
    samples = samples.with_columns(pl.col("pair").rle_id().alias("use"))  # the samples of a pair are neighbours
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
        sources={name: SourceCount(count, references) for name, count, references in by_dataset.iter_rows()},
        prompt_tokens=prompt,
        reference_tokens=reference,
        sizes=dict(pairs["size"].value_counts().sort("size").iter_rows()),
    )


def _mean_length(texts: Any, encode: Any) -> float:
    """Mean number of tokens, of at most LENGTHS distinct texts, evenly spread over them in alphabetical order."""
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
    training = {name: DATASETS[entry.reader] for name, entry in entries.items() if entry.train_on}
    unknown = [name for name, spec in training.items() if spec.part(name) is None]
    if unknown and len(unknown) == len(training):
        raise ParamsError(
            f"plan: {', '.join(unknown)}: no published counts, and no mixture yet; run `dvc repro convert` first"
        )
    training = {name: spec for name, spec in training.items() if name not in unknown}
    without = f"; without {', '.join(unknown)}, of which none are published" if unknown else ""
    sources, splits, tokens = {}, list[SplitUse](), 0.0
    for name, spec in training.items():
        counts: dict[str, SplitCount] = {split: getattr(spec.part(name), split) for split in entries[name].train_on}
        with_words = [count.pairs - count.wordless for count in counts.values()]
        references = [_references(spec, count) for count in counts.values()]
        pairs, each = sum(with_words), sum(references) / sum(with_words)
        source = convert.sources.get(name, Source())
        most = convert.most_references(source)
        chosen = min(pairs * min(1.0, source.weight), math.inf if source.max_pairs is None else source.max_pairs)
        uses = chosen * max(1.0, source.weight)
        used = SourceCount(round(uses), round(uses * (min(each, most or each) if source.samples == "each" else 1)))
        if used.references:
            sources[name] = used
            shares = zip(_shares(with_words, used.pairs), _shares(references, used.references), strict=True)
            splits += [
                SplitUse(name, split, count.pairs, SourceCount(*share), counted=count.references is not None)
                for (split, count), share in zip(counts.items(), shares, strict=True)
            ]
            tokens += used.references * REFERENCE_TOKENS * (each if source.samples == "joined" else 1)
    if not sources:
        raise ParamsError(f"plan: none of {', '.join(entries)} trains; see ingest.datasets and convert.sources")
    return Workload(
        counted=f"published counts of the datasets, lengths estimated{without}",
        sources=sources,
        prompt_tokens=PROMPT_TOKENS,
        reference_tokens=tokens / sum(source.references for source in sources.values()),
        sizes={},
        splits=splits,
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
    if spec.table is not None and spec.table.references is not None:
        return count.pairs * spec.table.references / spec.table.pairs
    counts = [each["train_val"] for each in training_counts().values()]
    known = sum(references for _, references in counts if references is not None)
    return count.pairs * ((SAMPLES - known) / sum(pairs for pairs, references in counts if references is None))

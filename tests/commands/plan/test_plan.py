"""The planner on a model, a mixture and profiles counted by hand: arithmetic, words, refusals."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from m3diff.commands import plan as planner
from m3diff.commands.plan import Plan, Run, Workload, check_memory, make_plan, print_plan
from m3diff.models import FAMILIES
from m3diff.models.family import Family
from m3diff.models.flops import Term
from m3diff.models.settings import Align, Lora
from m3diff.settings.compute import GPUS, Compute, Gpu
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from m3diff.stages.convert.params import Convert
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.train.params import Train
from tests.scoring import bench
from tests.toy import REPOSITORY

WIDTH, IMAGE_TOKENS = 4, 10


@dataclass(frozen=True)
class ToySettings:
    family: str = "toy"
    module: None = None
    align: Align | None = None
    delays: Mapping[str, float] = field(default_factory=dict)
    lora: Lora = Lora(rank=2, alpha=4)
    rates: Mapping[str, float | None] = field(default_factory=lambda: {"vision": 1e-3, "projector": None, "llm": 1e-3})


class ToyModel(torch.nn.Module):
    """vision: 4 x 4 weights and 4 biases, of which a norm of 8 is never run; projector: 4 x 8; llm: a linear of 8 x 6
    that has adapters, and an embedding of 50 x 8.

    What backward needs: the sigmoid of 4 numbers for each place of the images and, where that is kept, of 8 for each;
    the two inputs of the adapter, 8 and 2 numbers a token; the softmax, 6 numbers in fp32 a supervised token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.vision = torch.nn.Linear(4, 4)
        self.vision_norm = torch.nn.LayerNorm(4)
        self.projector = torch.nn.Linear(4, 8, bias=False)
        self.llm = torch.nn.ModuleDict({"up": torch.nn.Linear(8, 6, bias=False), "embed": torch.nn.Embedding(50, 8)})
        self.config = ToyConfig()

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.llm["up"]

    def blank_images(self, config: object, device: str) -> dict[str, torch.Tensor]:
        return {"pixels": torch.zeros(1, IMAGE_TOKENS, WIDTH, device=device)}

    def forward(self, input_ids, pixels, logits_to_keep, **others) -> SimpleNamespace:
        images = self.projector(self.vision(pixels.to(self.projector.weight.dtype)).sigmoid())
        tokens = torch.cat([images, self.llm["embed"](input_ids)[:, images.shape[1] :]], dim=1)
        return SimpleNamespace(logits=self.llm["up"](tokens[logits_to_keep]))


@dataclass
class ToyConfig:
    name_or_path: str = "the toy"
    image_tokens: int = IMAGE_TOKENS


class WordProcessor:
    """A token for each word; the prompt has the images, the words and one token more, a reference its end."""

    def encode_prompt(self, question: str) -> tuple[int, ...]:
        return (0,) * (IMAGE_TOKENS + len(question.split()) + 1)

    def encode_reference(self, text: str) -> list[int]:
        return [0] * (len(text.split()) + 1)


class ToyFamily(Family):
    def build(self, config: object) -> torch.nn.Module:
        return ToyModel()

    def load_processor(self, folder: Path, config: object = None) -> WordProcessor:
        return WordProcessor()

    def planned_config(self, base: Path, settings: object) -> "ToyConfig":
        return ToyConfig()

    def fuse(self, model: torch.nn.Module, activation_checkpointing: str) -> None: ...

    def flops(self, model: torch.nn.Module, tokens: float, supervised: float) -> list[Term]:
        return [
            Term("linears", 100 * tokens, 100 * tokens, recomputed=100 * tokens),
            Term("LoRA", 20, 40, recomputed=20),
            Term("head", 7 * supervised, 7 * supervised),
        ]


TOY = ToyFamily(
    settings=ToySettings,
    parts={"vision": ("vision",), "projector": ("projector.",), "llm": ("llm.",)},
    lora_targets={"llm": r"llm\.up"},
    frozen=("vision_norm.",),
    classes=None,
    faults=lambda settings, base: [],
)


@pytest.fixture
def toy_family(monkeypatch: pytest.MonkeyPatch) -> Family:
    monkeypatch.setitem(FAMILIES.data, "toy", TOY)
    return TOY


TRAIN = {"model": "toy", "base": "no_base", "seed": 1, "max_captions_per_sequence": 1, "global_batch": 4, "epochs": 1}
TRAIN |= {"warmup_share": 0, "schedule": "cosine", "weight_decay": 0, "max_grad_norm": 1, "precision": "bf16"}
CONVERT = {"seed": 1, "questions": "questions.yaml", "references_per_pair": 12, "no_change_share": 1, "sources": {}}


def train_section(**changes: object) -> Train:
    return Train.model_validate(TRAIN | {"export": "last"} | changes)


def compute_section(**changes: object) -> Compute:
    fields = {"workers": 4, "gpu": True, "gpu_kind": "H100-80GB", "micro_batch": 3, "zero_stage": 0}
    return bench.compute(**fields | {"activation_checkpointing": "none"} | changes)


def convert_section(**changes: object) -> Convert:
    return Convert.model_validate(CONVERT | changes)


PAPER = {"omnidiff_real": "omnidiff", "omnidiff_render": "omnidiff"}
PAPER |= {name: name for name in ("spot_the_diff", "iedit", "birds_to_words", "clevr_change", "clevr_dc")}
ROWS = [  # (pair, dataset, question, reference); a/1 is used twice, not in a row
    ("a/1", "a", "what changed", "the box moved"),
    ("a/1", "a", "what changed", "it moved"),
    ("a/1", "a", "what changed", "moved"),
    ("b/1", "b", "what is different here", "nothing"),
    ("a/1", "a", "what changed", "the box moved"),
    ("b/2", "b", "what changed", "the red box became blue"),
    ("b/2", "b", "what changed", "nothing"),
]


def write_mixture(folder: Path, rows: list[tuple[str, str, str, str]] = ROWS, shards: int = 2) -> Path:
    (folder / "train").mkdir(parents=True)
    size = -(-len(rows) // shards)
    for shard in range(shards):
        columns = [list(column) for column in zip(*rows[shard * size : (shard + 1) * size], strict=True)]
        table = pa.table(columns, names=["pair", "dataset", "question", "reference"])
        pq.write_table(table, folder / f"train/{shard:05d}.parquet")
    return folder


def entries(*readers: str, **changes: object) -> dict[str, DatasetEntry]:
    """Datasets of the run by name, or `name=reader`; `changes` of each."""
    named = dict(reader.split("=") if "=" in reader else (reader, reader) for reader in readers)
    return {name: DatasetEntry.model_validate({"reader": of, "root": "data"} | changes) for name, of in named.items()}


GB, TERA = 1e9, 1e12
TRAINED, FROZEN = 20 + 28, 8 + 32 + 448
"""Vision encoder and adapters (2 x (8 + 6)); the norm never run, the frozen projector, the LLM below its adapters."""
GPU = Gpu("A-40GB", 40, 2)


@pytest.fixture
def run(toy_family, tmp_path):
    """Runs of the toy family on the mixture of seven references: (compute, settings and train fields) -> Run."""
    mixture = write_mixture(tmp_path / "mixture")

    def make(compute: dict | None = None, settings: Any = None, mixture: Path = mixture, **train: Any) -> Run:
        cfg = train_section(**{"base": tmp_path / "no_base"} | train)
        sections = cfg, settings or ToySettings(), compute_section(**compute or {})
        return Run(*sections, entries("a=pairs", "b=pairs"), convert_section(), mixture)

    return make


@pytest.fixture
def plan(run):
    return lambda *given, **named: make_plan(run(*given, **named))


def test_parameters_are_those_that_train_and_those_that_are_frozen_by_part(plan):
    frozen = {"vision (frozen)": 8, "projector (frozen)": 32, "llm (frozen)": 48 + 400}
    assert plan().parameters == {"vision": 20, "llm": 28} | frozen
    whole = ToySettings(lora=Lora(0, 1), rates={"vision": None, "projector": 1e-3, "llm": 1e-3})
    assert plan(settings=whole).parameters == {"vision (frozen)": 28, "projector": 32, "llm": 48, "llm (frozen)": 400}


@pytest.mark.parametrize(
    ("most", "sequences", "branches", "tokens", "steps"),
    [(1, 7, 1.0, 54.0, 2), (2, 5, 1.4, 60.0, 2), (3, 4, 1.75, 65.25, 1), (None, 4, 1.75, 65.25, 1)],
)
def test_every_packing_is_counted(plan, most, sequences, branches, tokens, steps):
    made = plan(max_captions_per_sequence=most)
    assert (made.sequences, made.steps) == (sequences, steps)
    assert made.branches == pytest.approx(branches)
    assert made.tokens == pytest.approx(tokens)  # 10 of the images, 29 of the prompt, 15 of each reference
    assert [term.forward for term in made.terms] == pytest.approx([100 * tokens, 10 * 2, 7 * 15 * branches])


@pytest.mark.parametrize(
    ("epochs", "global_batch", "steps"), [(1, 7, 1), (1, 6, 2), (2.5, 4, 5), (0.5, 4, 1), (0.6, 4, 2)]
)
def test_steps_are_those_of_the_loop_whose_last_batch_of_an_epoch_is_smaller(plan, epochs, global_batch, steps):
    assert plan(epochs=epochs, global_batch=global_batch).steps == steps


def test_a_base_that_is_there_counts_by_its_tokenizer(plan, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    made = plan(base=tmp_path / "base")
    assert made.tokens == pytest.approx(10 + 14 / 4 + 23 / 7)
    assert made.base == str(tmp_path / "base")


def test_the_run_takes_the_flops_of_its_sequences_and_full_recomputation_runs_the_marked_terms_again(plan):
    sequence = 2 * 5400 + 3 * 20 + 2 * 105
    for epochs, way, again in ((3, "none", 0), (1, "selective", 0), (1, "full", 5400 + 20)):
        made = plan({"activation_checkpointing": way}, epochs=epochs)
        assert made.run_flops == epochs * 7 * (sequence + again)


@pytest.mark.parametrize(
    ("stage", "workers", "precision", "weights", "gradients", "optimizer"),
    [(0, 4, "bf16", 2, 4, 12), (1, 4, "bf16", 2, 4, 3), (2, 4, "bf16", 2, 1, 3)]
    + [(3, 4, "bf16", 0.5, 1, 3), (3, 0, "bf16", 2, 4, 12), (0, 4, "fp32", 4, 4, 12)],
)
def test_bytes_of_a_parameter_on_one_gpu(plan, stage, workers, precision, weights, gradients, optimizer):
    made = plan({"zero_stage": stage, "workers": workers}, precision=precision)
    assert made.gpus == max(1, workers)
    assert made.memory_gb["weights"] * GB == pytest.approx(weights * (TRAINED + FROZEN))
    assert made.memory_gb["gradients"] * GB == pytest.approx(gradients * TRAINED)
    assert made.memory_gb["optimizer"] * GB == pytest.approx(optimizer * TRAINED)


def test_activations_are_those_of_the_longest_sequence_for_each_of_a_micro_batch(plan, run, tmp_path):
    made = plan({"micro_batch": 5}, max_captions_per_sequence=None, precision="fp32")
    assert made.longest == 3
    supervised = 3 * 15
    places = 10 * 4 * 4  # of the images, under the sigmoid
    chosen = supervised * (8 * 4 + 8)  # what the head reads, and its index
    wanted = {"between parts": places + chosen, "llm": supervised * 2 * 4, "logits": 3 * supervised * 6 * 4}
    assert {name: size * GB / 5 for name, size in made.activations_gb.items()} == pytest.approx(wanted)
    assert made.memory_gb["activations"] == pytest.approx(sum(made.activations_gb.values()))
    assert plan({"micro_batch": 1}, max_captions_per_sequence=2).longest == 2
    published = run({"micro_batch": 1}, mixture=tmp_path, max_captions_per_sequence=None)
    made = make_plan(published._replace(entries=entries("birds_to_words")))
    assert made.longest is None, "of published counts the memory is for the mean sequence"
    assert made.activations_gb["llm"] * GB == pytest.approx(math.ceil(15 * 12_867 / 2_685) * 2 * 2)


def test_what_does_not_fit_is_refused_with_what_there_is_and_what_to_lower(plan):
    made = replace(plan(), memory_gb={"weights": 60.0, "activations": 14.0})
    planner.check_fits(compute_section(), made, 74 / (1 - planner.RESERVE) + 0.01)
    with pytest.raises(ParamsError) as refused:
        planner.check_fits(compute_section(), made, 80)
    said = str(refused.value)
    assert said.startswith("compute: needs 74.0 GB a GPU (weights 60.0, activations 14.0) but 80 GB hold 73.6; lower ")
    for remedy in ("micro_batch (now 3)", "max_captions", "zero_stage (now 0)", "full (now none)", "larger GPUs"):
        assert remedy in said


@pytest.mark.parametrize(
    ("found", "compute", "told"),
    [
        (2e-6, {}, "but 2e-06 GB hold"),
        (80.0, {"gpu_kind": "A10-24GB", "micro_batch": 10**8}, "but 80 GB hold"),
        (None, {"gpu_kind": "A10-24GB", "micro_batch": 10**8}, "but 24 GB hold 22.1; lower compute.micro_batch"),
        (1e-6, {"gpu": False}, None),
        (None, {"gpu_kind": None, "micro_batch": 10**8}, None),
    ],
)
def test_a_run_is_checked_against_the_memory_that_is_found_else_of_the_kind(run, monkeypatch, found, compute, told):
    monkeypatch.setattr("m3diff.commands.plan.found_memory_gb", lambda: found)
    if told is None:
        check_memory(run(compute))
        return
    with pytest.raises(ParamsError, match=told):
        check_memory(run(compute))


def test_the_memory_found_is_that_of_the_smallest_gpu(monkeypatch):
    sizes = [80_000_000_000, 24_000_000_000]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(sizes))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda n: SimpleNamespace(total_memory=sizes[n]))
    assert planner.found_memory_gb() == 24
    sizes.clear()
    assert planner.found_memory_gb() is None


def test_the_plan_is_printed_as_counted(plan, capsys):
    made = replace(plan(max_captions_per_sequence=None, epochs=2), run_flops=3e18, memory_gb={"weights": 3.8})
    print_plan(made, compute_section(), Gpu("A-40GB", 40, 100), hfu=0.25)
    said = capsys.readouterr().out
    for words in ("2 pairs         3 references", "29.0 tokens a prompt, 15.0 a reference", "the run 3.00 EFLOP"):
        assert words in said
    assert "all: 4 sequences of 65 tokens, 1.75 references each; 2 steps of 4" in said
    assert "  sum                                3.8 of 36.8, A-40GB less 8%" in said
    assert "  33.33 GPU-hours, 8.333 h on 4 GPU(s)" in said
    print_plan(plan(precision="fp32"), compute_section(), GPU, hfu=0.5)
    assert "\ntime: peaks are known for bf16, and train.precision is fp32" in capsys.readouterr().out
    print_plan(made, compute_section(), None, hfu=0.5)
    assert "\ntime: name a kind of GPU" in capsys.readouterr().out


ALIGN = Align(("b",), epochs=3.0, global_batch=2, rates={"vision": None, "projector": 1e-3, "llm": None})
ALIGNED = ToySettings(align=ALIGN)


def test_each_phase_is_counted_on_its_own_datasets_with_its_own_rates_batches_and_epochs(run, tmp_path, capsys):
    made, before = make_plan(run(settings=ALIGNED)), planner.plan_alignment(run(settings=ALIGNED))
    assert (set(made.workload.sources), set(before.workload.sources)) == ({"a"}, {"b"})
    assert before.parameters == {"vision (frozen)": 28, "projector": 32, "llm (frozen)": 448}
    assert before.sequences == before.workload.references == 3
    assert (before.steps, before.train.epochs, before.train.global_batch) == (6, 3, 2)  # 3 epochs of 2 steps
    assert before.run_flops == 3 * 3 * sum(term.total for term in before.terms)
    assert (made.parameters["llm"], made.steps) == (28, 1)
    assert (set(make_plan(run()).workload.sources), planner.plan_alignment(run())) == ({"a", "b"}, None)
    other = write_mixture(tmp_path / "other", [("a/1", "a", "what", "one")], shards=1)
    assert make_plan(run(settings=ALIGNED, mixture=other)).workload.references == 1
    assert planner.plan_alignment(run(settings=ALIGNED, mixture=other)) is None
    assert f"not counted: plan: {other}/train has no samples but of a" in capsys.readouterr().out


def test_an_alignment_that_does_not_fit_is_refused_before_anything_is_loaded(run, monkeypatch):
    rates = {"vision": 1e-3, "projector": 1e-3, "llm": 1e-3}  # more trains than in the fine-tuning
    wide = run(settings=ToySettings(align=replace(ALIGN, rates=rates)))
    before, made = planner.plan_alignment(wide).memory_total_gb, make_plan(wide).memory_total_gb
    assert made < before
    between = (before + made) / 2 / (1 - planner.RESERVE)
    monkeypatch.setattr(planner, "found_memory_gb", lambda: between)
    with pytest.raises(ParamsError, match="GB hold"):
        check_memory(wide)


TOTALS = {  # TFLOP of one sequence of 1,504 tokens, forward and backward
    "llm": 39.15,
    "llm attention": 1.36,
    "LoRA": 2.91,
    "vision": 3.47,
    "vision attention": 0.38,
    "projector": 0.15,
    "module": 1.65,
    "module attention": 0.47,
}


def plan_of(name: str) -> Plan:
    params = load_params(REPOSITORY / "profiles" / f"{name}.yaml")
    settings, compute = params.models[params.train.model], params.compute
    made = make_plan(Run(params.train, settings, compute, params.ingest.datasets, params.convert, Path("none")))
    planner.check_fits(compute, made, GPUS[compute.gpu_kind].memory_gb)
    return made


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: plan_of(name) for name in ("paper", "one-gpu")}


def total(plan: Plan) -> float:
    return sum(term.total for term in plan.terms) / TERA


def millions(plan: Plan) -> dict[str, float]:
    return {name: count / 1e6 for name, count in plan.parameters.items()}


def test_the_papers_sequence_parameters_and_steps_are_those_counted_by_hand_and_its_epoch_88_hours(plans):
    paper, peak = plans["paper"], GPUS["A100-40GB"].bf16_tflops
    found = {term.name: term.total / TERA for term in paper.terms}
    assert {name: found[name] for name in TOTALS} == pytest.approx(TOTALS, rel=0.02)
    assert total(paper) == pytest.approx(49.6, rel=0.01)
    assert paper.tokens == 1_504
    assert paper.gpu_hours(peak, 0.45) == pytest.approx(88.1, rel=0.01)  # the paper's 26 h on 8 GPUs
    wanted = {"llm": 323, "llm (frozen)": 6_525 + 1_090, "vision": 398, "module": 60}
    assert {name: millions(paper)[name] for name in wanted} == pytest.approx(wanted, rel=0.02)
    assert (paper.workload.pairs, paper.gpus) == (145_336, 8)
    assert paper.steps == pytest.approx(3_500, abs=2)


def test_packing_takes_the_epoch_of_one_gpu_from_44_to_7_6_exaflop_and_both_fit_their_gpus(plans):
    paper, one_gpu = plans["paper"], plans["one-gpu"]
    assert paper.sequences * total(paper) / 1e6 == pytest.approx(44.5, rel=0.05)
    assert one_gpu.run_flops / 1e18 == pytest.approx(7.6, rel=0.05)
    assert total(one_gpu) == pytest.approx(52.2, rel=0.01)
    assert one_gpu.tokens == pytest.approx(1_582, rel=0.01)
    assert one_gpu.gpu_hours(989, 0.45) == pytest.approx(4.7, rel=0.05)
    assert one_gpu.caption_flops / TERA == pytest.approx(21.9, rel=0.01)
    assert paper.memory_total_gb == pytest.approx(31.9, abs=0.6)
    assert one_gpu.memory_total_gb == pytest.approx(58.2, abs=2.3)


BOTH = ("train", "val")


def counted(folder: Path, processor: Any = None, **mixture: Any) -> Workload:
    return planner.counted_workload(write_mixture(folder, **mixture) / "train", processor, IMAGE_TOKENS)


def published(*readers: str, cfg: Any = None, **changes: Any) -> Workload:
    return planner.published_workload(entries(*readers, **changes), cfg or convert_section())


def test_a_mixture_is_counted_by_source_and_each_use_of_a_pair_counts(tmp_path):
    load = counted(tmp_path / "one")
    assert load.uses == [planner.Use("a", pairs=2, references=4), planner.Use("b", pairs=2, references=3)]
    assert (load.pairs, load.references) == (4, 7)
    assert load.sizes == {1: 2, 2: 1, 3: 1}
    assert (load.prompt_tokens, load.reference_tokens) == (29, 15)
    assert load.counted == f"{tmp_path / 'one/train'}, lengths estimated"
    assert {most: load.sequences(most) for most in (1, 2, 3, 9, None)} == {1: 7, 2: 5, 3: 4, 9: 4, None: 4}
    rows = [("a/1", "a", "what", "one"), ("a/1", "a", "what", "two")]
    assert counted(tmp_path / "two", rows=rows).sizes == {2: 1}, "a pair whose samples lie in two shards is one pair"


def test_lengths_are_those_of_the_tokenizer_prompts_by_pair_and_references_each(tmp_path):
    load = counted(tmp_path, WordProcessor())
    assert load.prompt_tokens == (3 + 5 + 3 + 3) / 4  # words and one more, without the images
    assert load.reference_tokens == (4 + 3 + 2 + 2 + 4 + 6 + 2) / 7
    assert load.counted == f"{tmp_path / 'train'}, lengths by its tokenizer"


@pytest.mark.parametrize(("most", "sequences"), [(1, 70), (2, 10 + 30), (4, 10 + 15), (9, 20), (None, 20)])
def test_sequences_of_published_sums_are_full_source_by_source(most, sequences):
    uses = [planner.Use("one", 10, 10), planner.Use("six", 4, 34), planner.Use("six", 6, 26)]
    assert Workload("", uses, 29, 15, {}).sequences(most) == sequences


def test_only_the_splits_that_train_are_counted_and_what_no_one_counted_is_what_the_papers_other_sources_leave():
    assert published("iedit").sources == {"iedit": (3_061, 3_061)}
    assert published("iedit", train_on=BOTH).sources == {"iedit": (3_444, 4_206)}
    each = (896_000 - (7_806 + 6_222 + 20_927 + 4_210 + 14_446 + 444_300)) / 43_200
    assert published("clevr_dc").sources["clevr_dc"] == (40_800, round(40_800 * each))


@pytest.mark.parametrize(
    ("source", "most", "pairs", "references"),
    [
        ({}, None, 2_685, 12_867),
        ({}, 2, 2_685, 5_370),
        ({"samples": "one"}, 12, 2_685, 2_685),
        ({"samples": "joined"}, 2, 2_685, 2_685),
        ({"weight": 0.5}, 12, 1_342, 6_434),
        ({"weight": 2}, 12, 5_370, 25_734),
        ({"max_pairs": 1_000, "weight": 0.5}, 12, 1_000, 4_792),
        ({"max_pairs": 1_000, "weight": 3}, 1, 3_000, 3_000),
        ({"max_pairs": 9_000}, 12, 2_685, 12_867),
    ],
)
def test_weights_and_caps_of_convert_apply_to_published_counts(source, most, pairs, references):
    cfg = convert_section(sources={"birds_to_words": source}, references_per_pair=most)
    assert published("birds_to_words", cfg=cfg).sources == {"birds_to_words": (pairs, references)}


def test_joined_references_are_as_long_as_all_of_a_pair_and_a_cap_is_shared_out_over_splits_to_the_unit():
    both = published("birds_to_words", "iedit", cfg=convert_section(sources={"birds_to_words": {"samples": "joined"}}))
    joined, single = 2_685 * 15 * 12_867 / 2_685, 3_061 * 15
    assert both.reference_tokens == pytest.approx((joined + single) / (2_685 + 3_061))
    cfg = convert_section(references_per_pair=None, sources={"birds_to_words": {"max_pairs": 999}})
    load = published("birds_to_words", cfg=cfg, train_on=BOTH)
    assert [use.pairs for use in load.uses] == [891, 108]  # of 2,685 and 325
    assert load.references == round(999 * 14_417 / 3_010)


def test_datasets_without_published_counts_are_named_and_with_none_other_the_remedy_too():
    assert published("iedit").counted == "published counts of the datasets, lengths estimated"
    load = published("mine=pairs", "iedit", "minichange")
    assert load.counted.endswith("; without mine, minichange, of which none are published")
    assert load.sources.keys() == {"iedit"}
    with pytest.raises(ParamsError, match="plan: mine, minichange: no published .*run `dvc repro convert` first"):
        published("mine=pairs", "minichange")
    untrained = entries("iedit") | entries("mine=pairs", "birds_to_words", train_on=())
    assert planner.published_workload(untrained, convert_section()).sources.keys() == {"iedit"}
    with pytest.raises(ParamsError, match="none of iedit, mine, birds_to_words trains"):
        planner.published_workload(untrained, convert_section(sources={"iedit": {"weight": 0}}))


def test_the_run_s_own_mixture_is_counted_where_it_is_there_and_the_published_counts_where_not(tmp_path):
    def find(run: Any, folder: Path = tmp_path / "mixture", *left_out: str) -> Workload:
        return planner.find_workload(folder, run, convert_section(), None, IMAGE_TOKENS, left_out)

    (tmp_path / "empty/train").mkdir(parents=True)
    for folder in (tmp_path / "none", tmp_path / "empty"):
        assert find(entries("iedit"), folder).sources.keys() == {"iedit"}
    mixture = write_mixture(tmp_path / "mixture")
    whole = find(entries("a=pairs", "b=pairs", "c=pairs"))
    assert whole.references == 7
    rest = find(entries("a=pairs", "b=pairs"), mixture, "b")
    assert (rest.sources, rest.counted) == ({"a": whole.sources["a"]}, whole.counted), "b is of another phase"
    assert find(entries("iedit", "b=pairs"), tmp_path / "none", "b").sources.keys() == {"iedit"}
    load = find(entries("iedit"))
    assert load.sources == {"iedit": (3_061, 3_061)}
    assert load.counted.endswith(f"lengths estimated; {mixture} is of another run (a, b)")
    load = find(entries("iedit", "a=pairs") | entries("b=pairs", train_on=()))
    assert load.sources.keys() == {"iedit"}
    assert "; without a, of which none are published; " in load.counted
    with pytest.raises(ParamsError, match="plan: a: no published counts"):
        find(entries("a=pairs"))

"""A toy family, its runs and mixtures, whose costs are counted by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from m3diff.commands.plan import Run, make_plan
from m3diff.models import FAMILIES
from m3diff.models.family import Family
from m3diff.models.flops import Term
from m3diff.models.settings import Align, Lora
from m3diff.records.sample import Turn
from m3diff.records.schemas import COUPLE_QUESTION, COUPLED_SAMPLE_SCHEMA, SAMPLE_SCHEMA
from m3diff.settings.compute import Compute, Gpu
from m3diff.stages.convert.params import Convert
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.train.params import Train
from tests.scoring import bench

WIDTH = 4
IMAGE_TOKENS = 10


@dataclass(frozen=True)
class ToySettings:
    family: str = "toy"
    module: None = None
    align: Align | None = None
    delays: Mapping[str, float] = field(default_factory=dict)
    lora: Lora = Lora(rank=2, alpha=4)
    rates: Mapping[str, float | None] = field(default_factory=lambda: {"vision": 1e-3, "projector": None, "llm": 1e-3})


class ToyModel(torch.nn.Module):
    """A model whose parameters and activations can be counted by hand.

    vision: 4 x 4 weights, 4 biases, and a norm of 8 that is never run. projector: 4 x 8. llm: a linear of 8 x 6 with
    adapters, and an embedding of 50 x 8.

    Backward needs the sigmoid, 4 numbers for each place of the images and 8 if that is kept; the two inputs of the
    adapter, 8 and 2 numbers a token; and the softmax, 6 numbers in fp32 a supervised token.
    """

    def __init__(self, config: "ToyConfig") -> None:
        super().__init__()
        self.vision = torch.nn.Linear(4, 4)
        self.vision_norm = torch.nn.LayerNorm(4)
        self.projector = torch.nn.Linear(4, 8, bias=False)
        self.llm = torch.nn.ModuleDict({"up": torch.nn.Linear(8, 6, bias=False), "embed": torch.nn.Embedding(50, 8)})
        self.config = config

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.llm["up"]

    def blank_images(self, config: object, device: str, images: int = 2) -> dict[str, torch.Tensor]:
        return {"pixels": torch.zeros(1, IMAGE_TOKENS, WIDTH, device=device)}

    def forward(self, input_ids, pixels, logits_to_keep, **options) -> SimpleNamespace:
        images = self.projector(self.vision(pixels.to(self.projector.weight.dtype)).sigmoid())
        tokens = torch.cat([images, self.llm["embed"](input_ids)[:, images.shape[1] :]], dim=1)
        return SimpleNamespace(logits=self.llm["up"](tokens[logits_to_keep]))


ALIGN = Align(("b",), epochs=3.0, global_batch=2, rates={"vision": None, "projector": 1e-3, "llm": None})


def image_tokens_of(images: int) -> int:
    """Return the number of image tokens. A single image has half of the tokens of a pair."""
    return IMAGE_TOKENS * images // 2


@dataclass
class ToyConfig:
    name_or_path: str = "the toy"
    image_token_index: int = 3

    @classmethod
    def from_folder(cls, folder: str, module: None) -> "ToyConfig":
        return cls()

    @classmethod
    def for_published_base(cls, name: str, module: None) -> "ToyConfig":
        return cls()

    def image_tokens_of(self, images: int) -> int:
        return image_tokens_of(images)


ToyModel.config_class = ToyConfig  # type: ignore[attr-defined]


class WordProcessor:
    """Makes a token of each word. A prompt also has the images and one more token, a reference its end."""

    @classmethod
    def of_folder(cls, folder: str, config: ToyConfig) -> "WordProcessor":
        return cls()

    def marks(self, images: int) -> tuple[str, ...]:
        return (IMAGE_TOKENS // 2 * "<image>",) * images

    def encode_prompt(self, turns: Sequence[Turn], marks: Sequence[str]) -> tuple[int, ...]:
        (turn,) = turns
        return (0,) * ("".join(marks).count("<image>") + len(turn.question.split()) + 1)

    def encode_answer(self, text: str) -> list[int]:
        return [0] * (len(text.split()) + 1)


def count_toy_flops(
    model: torch.nn.Module, family: Family, tokens: float, supervised: float, images: int = 2
) -> list[Term]:
    return [
        *([Term("vision", 50 * images, 50 * images)] if images != 2 else []),
        Term("linears", 100 * tokens, 100 * tokens, recomputed=100 * tokens),
        Term("LoRA", 20, 40, recomputed=20),
        Term("head", 7 * supervised, 7 * supervised),
    ]


TOY = Family(
    settings=ToySettings,  # type: ignore[arg-type]
    parts={"vision": ("vision",), "projector": ("projector.",), "llm": ("llm.",)},
    lora_targets={"llm": r"llm\.up"},
    unused_parameters=("vision_norm.",),
    classes=lambda: (ToyModel, WordProcessor),  # type: ignore[arg-type,return-value]
    faults=lambda settings, base: [],
    fuse=lambda model, activation_checkpointing: None,
    count_flops=count_toy_flops,
)


@pytest.fixture
def toy_family(monkeypatch: pytest.MonkeyPatch) -> Family:
    monkeypatch.setitem(FAMILIES.data, "toy", TOY)
    return TOY


TRAIN = {"model": "toy", "base": "no_base", "seed": 1, "max_captions_per_sequence": 1, "global_batch": 4, "epochs": 1}
TRAIN |= {"warmup_share": 0, "schedule": "cosine", "weight_decay": 0, "max_grad_norm": 1, "precision": "bf16"}
CONVERT = {"seed": 1, "questions": "questions.yaml", "references_per_question": 12, "no_change_share": 1, "sources": {}}


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


def write_mixture(folder: Path, rows: Sequence[tuple[str, str, str, str]] = ROWS, shards: int = 2) -> Path:
    """Write captions of pairs, given as (pair, dataset, question, reference)."""
    names = ("image_set", "dataset", "question", "answer")
    return write_samples(folder, [dict(zip(names, row, strict=True)) for row in rows], shards)


def write_samples(folder: Path, rows: Sequence[Mapping[str, Any]], shards: int = 1) -> Path:
    """Write samples. By default, they are captions of pairs. `images` is the number of images."""
    samples = []
    for row in rows:
        images = [{"uri": "a.png", "sha256": b""}] * row.get("images", 2)
        samples.append({"record": row["image_set"], "history": [], **row, "images": images})
    schema = COUPLED_SAMPLE_SCHEMA if any(COUPLE_QUESTION in row for row in rows) else SAMPLE_SCHEMA
    (folder / "train").mkdir(parents=True)
    size = -(-len(samples) // shards)
    for shard in range(shards):
        table = pa.Table.from_pylist(samples[shard * size : (shard + 1) * size], schema)
        pq.write_table(table, folder / f"train/{shard:05d}.parquet")
    return folder


def entries(*readers: str, **changes: object) -> dict[str, DatasetEntry]:
    """Return datasets of the run with these changes, by reader or `name=reader`."""
    entries_by_name = {}
    for reader in readers:
        name, _, reader_name = reader.partition("=")
        fields = {"reader": reader_name or name, "root": "data"} | changes
        entries_by_name[name] = DatasetEntry.model_validate(fields)
    return entries_by_name


GB = 1e9
TERA = 1e12
TRAINED = 20 + 28  # parameters of the vision encoder and of the adapters, 2 x (8 + 6)
FROZEN = 8 + 32 + 448  # of the norm that is never run, the frozen projector, and the LLM below its adapters
GPU = Gpu("A-40GB", 40, 2)


@pytest.fixture
def run(toy_family, tmp_path):
    """Makes runs of the toy family on the mixture of seven references."""
    mixture = write_mixture(tmp_path / "mixture")

    def make(compute: dict | None = None, settings: Any = None, mixture: Path = mixture, **train: Any) -> Run:
        return Run(
            train=train_section(**{"base": tmp_path / "no_base"} | train),
            settings=settings or ToySettings(),
            compute=compute_section(**compute or {}),
            entries=entries("a=pairs", "b=pairs"),
            convert=convert_section(),
            mixture=mixture,
        )

    return make


@pytest.fixture
def plan(run):
    """Makes plans of such runs."""
    return lambda *arguments, **options: make_plan(run(*arguments, **options))

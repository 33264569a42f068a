"""A model family whose every number can be counted by hand, sections, and a mixture written by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from m3diff.models import FAMILIES
from m3diff.models.family import Family
from m3diff.models.flops import Term
from m3diff.models.settings import Align, Lora
from m3diff.settings.compute import Compute
from m3diff.stages.convert.params import Convert
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.train.params import Train
from tests.scoring import bench

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
    """A family whose model is no transformers model."""

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

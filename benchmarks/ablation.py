"""Variants that the training benchmark compares, and the two sizes of model with their data.

The tiny data are 64 pairs of MiniChange's training mixture, question and five references each (minichange.json); at 7B
the tokens are random, in the published mixture's numbers. Pixels are noise in both: no step's cost depends on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoTokenizer

from m3diff.models.m3diff import LARGE_BASE
from m3diff.models.m3diff_model import M3DiffConfig
from m3diff.models.m3diff_settings import M3DiffSettings
from m3diff.models.settings import Lora, Rates
from m3diff.stages.train.packing import pack

if TYPE_CHECKING:
    from m3diff.stages.train.batches import MicroBatch

HERE = Path(__file__).parent
BASE = HERE.parent / "data" / "00_base"

Branches = list[tuple[list[int], list[int]]]
"""(prompt, reference) token ids of one pair's references."""


@dataclass(frozen=True)
class Variant:
    """A way to take a step.

    Attributes:
        stock: padded rectangles and labels to transformers' own loss, so logits on every position.
        fused, adapters: as `make_fused` takes them.
    """

    name: str
    packed: bool = False
    stock: bool = False
    mdp: bool = True
    activation_checkpointing: str = "none"
    fused: bool = True
    adapters: str = "auto"
    attention: str = "sdpa"


STOCK: dict[str, Any] = {"fused": False, "adapters": "peft"}
CHECKPOINTING = ("none", "selective", "full")

ABLATION = (
    Variant("stock, full checkpointing", stock=True, activation_checkpointing="full", **STOCK),
    Variant("stock", stock=True, **STOCK),
    Variant("stock without MDP", stock=True, mdp=False, **STOCK),
    Variant("+ logits where supervised", **STOCK),
    Variant("+ adapters", fused=False),
    Variant("unpacked: + layers", adapters="peft"),
    Variant("unpacked"),
    Variant("packed, all else stock", packed=True, **STOCK),
    Variant("packed, adapters", packed=True, fused=False),
    Variant("packed", packed=True),
)
"""Lever by lever: end to end without padding and logits where supervised; adapters in fewer passes; fused layers, of
which the last works on supervised tokens alone; both."""

GPU_ROWS = (
    *(Variant(f"unpacked, {kept}", activation_checkpointing=kept) for kept in CHECKPOINTING[1:]),
    *(
        Variant(f"packed, {attention}, {kept}", packed=True, attention=attention, activation_checkpointing=kept)
        for attention in ("sdpa", "flex")
        for kept in CHECKPOINTING
    ),
)
"""Choices on a GPU: the attention kernel and what backward recomputes."""


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
        from m3diff.stages.train.batches import MicroBatch

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

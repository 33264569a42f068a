"""What the training benchmark compares: the variants, and the two sizes of model with their data.

The tiny data are 64 pairs of MiniChange's training mixture, question and five references each (minichange.json); at 7B
the tokens are random, in the published mixture's numbers. Pixels are noise in both: no step's cost depends on them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from components.models.family import Lora
from components.models.m3diff.configuration import M3DiffConfig, seven_b_config
from components.models.m3diff.settings import M3DiffSettings, Rates
from components.train.packing import Packed, pack

HERE = Path(__file__).parent
BASE = HERE.parent / "data" / "00_base"

Branches = list[tuple[list[int], list[int]]]
"""(prompt, reference) token ids of one pair's references."""


@dataclass(frozen=True)
class Variant:
    """One way to take a step. `stock`: labels to transformers' own loss, so logits on every position."""

    name: str
    packed: bool = False
    stock: bool = False
    mdp: bool = True
    activation_checkpointing: str = "none"
    fused: bool = True
    lora: bool = True
    flex: bool = False
    compiled: bool = False


ABLATION = (
    Variant("baseline", stock=True, activation_checkpointing="full", fused=False, lora=False),
    Variant("baseline without MDP", stock=True, mdp=False, activation_checkpointing="full", fused=False, lora=False),
    Variant("+ logits where supervised", activation_checkpointing="full", fused=False, lora=False),
    Variant("+ no checkpointing", fused=False, lora=False),
    Variant("+ adapters by addmm", fused=False),
    Variant("unpacked: + fused norm, SwiGLU"),
    Variant("unpacked, selective", activation_checkpointing="selective"),
    Variant("packed, all else stock", packed=True, activation_checkpointing="full", fused=False, lora=False),
    Variant("packed", packed=True),
    Variant("packed, selective", packed=True, activation_checkpointing="selective"),
)
GPU_ONLY = (
    Variant("packed, FlexAttention", packed=True, flex=True),
    Variant("packed, FlexAttention, selective", packed=True, flex=True, activation_checkpointing="selective"),
    Variant("unpacked, compiled layers", compiled=True),
    Variant("packed, compiled layers", packed=True, compiled=True),
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
        """What trains and at which rate: the paper's, alpha twice the rank."""
        rates = Rates(vision=2e-6, projector=1e-5, module=1e-5, llm=1e-5)
        return M3DiffSettings("m3diff", self.config.mdp_config(), Lora(self.lora_rank, 2 * self.lora_rank), rates)

    @property
    def captions(self) -> int:
        return sum(len(group) for group in self.groups)

    def micro_batches(self, variant: Variant) -> Iterator[tuple[Packed, list[int]]]:
        """Packed tokens and, for each sequence, the number of its pair."""
        owned = [(number, group) for number, group in enumerate(self.groups)]
        if not variant.packed:
            owned = [(number, [branch]) for number, group in owned for branch in group]
        size = self.micro["packed" if variant.packed else variant.activation_checkpointing]
        for at in range(0, len(owned), size):
            part = owned[at : at + size]
            yield pack([group for _, group in part], pad_id=0), [number for number, _ in part]


def tiny(pairs: int = 16) -> Size:
    """The embedded base's shapes, the embedded run's batch and adapters, MiniChange's references."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    config = M3DiffConfig.on_base(str(BASE), mdp=None)
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
    # each kind at its quickest on 2 cores: of 8, 16, 40, 80 sequences unpacked (baseline 99, 122, 132, 123 captions/s),
    # of 4, 8, 16 packed, whose lengths differ more (342, 375, 308)
    return Size("tiny", config, 32, groups, {"none": 40, "selective": 40, "full": 40, "packed": 8}, 16)


def seven_b(pairs: int = 6) -> Size:
    """The published 7B shapes: 1,460 visual and 29 prompt tokens, 6.17 captions a pair of 15 tokens each on average."""
    config, rng = seven_b_config(), np.random.default_rng(0)
    side = config.vision_config.image_size // config.vision_config.patch_size
    groups = []
    for number in range(pairs):
        words = rng.integers(0, 150_000, 28).tolist()
        prompt = [*words[:14], *[config.image_token_id] * (2 * (side**2 + 1)), *words[14:], 198]
        lengths = rng.permutation([9, 12, 14, 16, 18, 21, 15][: 7 if number % 6 == 5 else 6])
        groups.append([(prompt, rng.integers(0, 150_000, length).tolist()) for length in lengths])
    return Size("7B", config, 128, groups, {"none": 3, "selective": 6, "full": 6, "packed": 3}, 42)


def noise(size: Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Pixels of each pair, [pairs, 2, 3, side, side]."""
    side = size.config.vision_config.image_size
    return torch.randn(len(size.groups), 2, 3, side, side, generator=torch.Generator().manual_seed(0)).to(device, dtype)

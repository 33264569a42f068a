"""A small MiniChange dataset, entries of the section `augment`, fake editors and writers, and tiny models."""

import json
import string
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import TypeAdapter

from m3diff.datasets.minichange import generate
from m3diff.datasets.minichange.scene import MiniChange
from m3diff.settings.compute import Compute
from m3diff.stages.augment.params import AnySyntheticDataset
from m3diff.stages.augment.stage import Original
from m3diff.stages.augment.writers import WriterOutput
from tests.scoring import bench
from tests.toy import REPOSITORY

BASE = REPOSITORY / "data" / "00_base"
SCENES = 40
SETTINGS = {"seed": 5, "scenes": {"train": 24, "val": 4, "test": 12}, "image_px": 64, "references": 2}
SETTINGS |= {"multi_change_share": 0.2, "oversample_types": []}
GRAMMAR = {"kind": "grammar"}
KINDS: dict[str, dict[str, Any]] = {
    "edits": {"editor": {"kind": "drawn"}, "writer": GRAMMAR, "edits": 2, "paraphrases": {"val": 1, "test": 4}},
    "neighbours": {"features": {"kind": "encoder", "model": BASE}, "writer": GRAMMAR, "candidates": 4, "references": 2},
    "coupled_samples": {},
}
KINDS["neighbours"] |= {"band": (0.75, 0.985), "max_text_similarity": 0.99}


def draw(root: Path, **changes: Any) -> Path:
    generate(MiniChange.model_validate(SETTINGS | {"root": root} | changes))
    return root


def entry(kind: str, source: Path, root: Path, /, **changes: Any) -> Any:
    """Return a validated entry of the section `augment`."""
    values = {"kind": kind, "source": {"reader": "minichange", "root": source}, "root": root, "seed": 3}
    return TypeAdapter(AnySyntheticDataset).validate_python(values | KINDS[kind] | changes)


def edits_entry(source: Path, root: Path, /, **changes: Any) -> Any:
    return entry("edits", source, root, **changes)


def compute(scratch: Path) -> Compute:
    return bench.compute(scratch=scratch)


class ToyEditor:
    """Paints an image in a colour that depends on the seed, or in the colour `paint`.

    It refuses instructions that contain `refuses`, and returns the original for instructions that contain `same`.
    """

    identity = "toy"

    def __init__(self, refuses: str = "never", same: str = "never", paint: int | None = None) -> None:
        self.refuses = refuses
        self.same = same
        self.paint = paint
        self.calls: list[tuple[str, str, int]] = []

    def edit(self, image: Path, instruction: str, seed: int) -> Image.Image | None:
        self.calls.append((image.name, instruction, seed))
        if self.refuses in instruction:
            return None
        if self.same in instruction:
            return Image.open(image).convert("RGB")
        paint = seed if self.paint is None else self.paint
        return Image.new("RGB", (8, 8), (paint & 255, paint >> 8 & 255, paint >> 16 & 255))


class ToyWriter:
    """Writes numbered texts. For facts that contain `short`, it writes one text fewer than requested."""

    identity = "toy"

    def __init__(self, short: str = "never") -> None:
        self.short = short
        self.calls = []

    def write(self, task, facts, n) -> list[WriterOutput]:
        self.calls += [(task, dict(entry), n) for entry in facts]
        return [self.numbered_texts(task, entry, n) for entry in facts]

    def numbered_texts(self, task, facts, n) -> WriterOutput:
        is_short = any(self.short in text for text in facts.values())
        count = n - 1 if is_short else n
        texts = [f"{task} {number}: {' / '.join(facts.values())}" for number in range(count)]
        return WriterOutput(tuple(texts), Counter({"refused": 1} if is_short else {}))


class ToyFeatures:
    """Returns directions in a plane. The name of an image is its angle in degrees."""

    identity = "toy"

    def features(self, images: list[Path]) -> np.ndarray:
        angles = np.deg2rad([float(image.stem) for image in images])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def original(folder: Path, name: str, text: str, split: Any = "train", caption: str | None = None) -> Original:
    image = folder / f"{name}.png"
    if not image.exists():
        Image.new("RGB", (8, 8), (len(name), 255, 255)).save(image)
    return Original(name, split, f"scene {name}", image, f"digest of {name}", text, ["color"], caption)


def captioned_image(number: float, caption: str, split: Any = "train", scene: str | None = None) -> Original:
    return Original(f"n{number}", split, scene or f"s{number}", Path(f"{number}.png"), f"d{number}", caption)


SIDES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = SIDES | {"image_size": 32, "patch_size": 8}
TEXT = SIDES | {"vocab_size": 64, "max_position_embeddings": 77}


def clip(folder: Path) -> Path:
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=12)).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def siglip(folder: Path) -> Path:
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

    torch.manual_seed(0)
    SiglipModel(SiglipConfig(text_config=TEXT, vision_config=VISION)).save_pretrained(folder)
    SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def instruct_pix2pix(folder: Path) -> Path:
    """Write a pipeline with tiny random parts (160 kB) and without a safety checker."""
    from diffusers import AutoencoderKL, EulerAncestralDiscreteScheduler, UNet2DConditionModel
    from diffusers import StableDiffusionInstructPix2PixPipeline as Pipeline
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    blocks = {"block_out_channels": (4, 8), "layers_per_block": 1, "norm_num_groups": 2}
    ups = ("CrossAttnUpBlock2D", "UpBlock2D")
    downs = ("DownBlock2D", "CrossAttnDownBlock2D")
    sizes = {"sample_size": 8, "in_channels": 8, "out_channels": 4, "cross_attention_dim": 8, "attention_head_dim": 2}
    unet = UNet2DConditionModel(down_block_types=downs, up_block_types=ups, **sizes, **blocks)
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    text = TEXT | {"hidden_size": 8, "intermediate_size": 8, "eos_token_id": 1, "bos_token_id": 0}
    Pipeline(
        vae=AutoencoderKL(**kinds, latent_channels=4, **blocks),
        text_encoder=CLIPTextModel(CLIPTextConfig(**text)),
        tokenizer=tokenizer(folder.parent / "tokenizer"),
        unet=unet,
        scheduler=EulerAncestralDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder


def tokenizer(folder: Path) -> object:
    """Write a tokenizer of CLIP whose tokens are single letters."""
    from transformers import CLIPTokenizer

    folder.mkdir()
    ends = ("<|startoftext|>", "<|endoftext|>")
    pieces = [*ends, *string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "bos_token": ends[0]}
    config |= dict.fromkeys(("eos_token", "unk_token", "pad_token"), ends[1])
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return CLIPTokenizer.from_pretrained(str(folder))

"""A captioner that says something else of every pair: its word, the question and the colours of both images.

As a program it is `m3diff serve` whose replicas hold this captioner: `python -m tests.serving.toy [OPTIONS OF m3diff]`.
The variable TOY_CONSTANTS gives constants of m3diff.serving other values.
A toy's folder holds `word.txt`; it takes COMPUTE_S a batch, so that others gather meanwhile.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from m3diff.models.generation import QUESTION
from m3diff.records.errors import DataError
from m3diff.registry.model_source import Source
from m3diff.serving import batcher
from m3diff.serving.batcher import Replica

COMPUTE_S = 0.04
CONSTANTS = "TOY_CONSTANTS"
SIDE, CELLS = 16, 4
SPECIAL = ("<image>", "<|im_end|>")


class ToyProcessor:
    tokenizer = SimpleNamespace(all_special_tokens=SPECIAL[1:], get_added_vocab=lambda: {SPECIAL[0]: 1})

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.NEAREST))

    def encode_prompt(self, question: str) -> tuple[int, ...]:
        return tuple(range(len(question)))

    def encode_reference(self, text: str) -> list[int]:
        return list(range(1 + len(text.split())))


class ToyCaptioner:
    processor = ToyProcessor()
    family = SimpleNamespace(reads_question=True)
    max_new_tokens = 64

    def __init__(self, word: str) -> None:
        self.word = word

    def answer(
        self, images: list[np.ndarray], question: str = QUESTION, saliency: bool = False
    ) -> tuple[list[str], np.ndarray | None]:
        time.sleep(COMPUTE_S)
        if question == "Break down?":
            raise RuntimeError("the secret place /var/model is on fire")
        pairs = list(zip(images[::2], images[1::2], strict=True))
        texts = [said(self.word, question, colour(before), colour(after)) for before, after in pairs]
        grids = np.full((len(pairs), CELLS, CELLS), 0.5 / (CELLS**2 - 1), np.float16)
        grids[:, 1, 1] = 0.5
        return texts, grids if saliency else None


def colour(pixels: np.ndarray) -> str:
    return "/".join(str(value) for value in pixels[SIDE // 2, SIDE // 2])


def said(word: str, question: str, before: str, after: str) -> str:
    return f"{word}: {before} became {after} ({question})"


def plain(red: int, green: int, blue: int = 0, size: tuple[int, int] = (32, 24)) -> Image.Image:
    return Image.new("RGB", size, (red, green, blue))


def write_toy(folder: Path, word: str) -> Path:
    """A folder that is taken for a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "word.txt").write_text(word)
    (folder / "manifest.json").write_text(json.dumps({"files": {}, "word": word}))
    return folder


def load_toy(source: Source) -> Any:
    word = (source.folder / "word.txt").read_text()
    if word == "broken":
        raise ValueError("model.safetensors: sha256 differs")
    if word == "cut off":
        raise DataError("model.safetensors: cut off; fetch the folder again")
    return ToyCaptioner(word)


class ToyReplica(Replica):
    def __init__(self, *arguments: Any) -> None:
        batcher.load = load_toy
        super().__init__(*arguments)


if __name__ == "__main__":
    from m3diff.__main__ import main
    from tests.serving.toy import ToyReplica as Importable  # of a module by its name, which a replica can import

    for name, value in json.loads(os.environ.get(CONSTANTS, "{}")).items():
        module, _, constant = name.partition(".")
        setattr(importlib.import_module(f"m3diff.serving.{module}"), constant, value)
    batcher.Replica = Importable  # type: ignore[misc]
    sys.exit(main())

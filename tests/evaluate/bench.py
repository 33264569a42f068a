"""A benchmark of six pairs with a grammar of three patterns, as objects and as files on disk."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from components.evaluate.grammar import Grammar
from components.evaluate.pairs import Pair
from components.evaluate.params import Evaluate
from components.records import RECORD_SCHEMA

GRAMMAR = {
    "clause_separator": ", and ",
    "no_change": ["nothing changed", "no change was made"],
    "clauses": [
        {"type": "color", "pattern": r"the (?P<object>\w+ \w+) (?P<place>at the \w+) (?:turned|became) \w+"},
        {"type": "removal", "pattern": r"the (?P<object>\w+ \w+) (?P<place>at the \w+) (?:was removed|is gone)"},
        {"type": "illumination", "pattern": r"the lamp went out"},
    ],
}

RECORDS: list[tuple[str, list[str], list[str]]] = [
    ("0", ["color"], ["the red cube at the left turned blue", "the red cube at the left became blue"]),
    ("1", ["removal"], ["the green ball at the top was removed", "the green ball at the top is gone"]),
    ("2", ["illumination"], ["the lamp went out"]),
    (
        "3",
        ["color", "removal"],
        ["the red ball at the top turned green, and the blue cube at the left was removed"],
    ),
    ("4", ["none"], ["nothing changed", "no change was made"]),
    ("5", ["none"], ["nothing changed", "no change was made"]),
]

CAPTIONS = {
    "toy/0": "the red cube at the left became blue",  # all right
    "toy/1": "the green ball at the left was removed",  # wrong place
    "toy/2": "nothing changed",  # missed
    "toy/3": "the red ball at the top turned green, and the lamp went out",  # one of two
    "toy/4": "nothing changed",  # rightly
    "toy/5": "the red cube at the left turned blue",  # false alarm
}


def grammar() -> Grammar:
    clauses = [(clause["type"], clause["pattern"]) for clause in GRAMMAR["clauses"]]
    return Grammar(GRAMMAR["clause_separator"], GRAMMAR["no_change"], clauses)


def pair(caption: str, references: list[str], change_types: list[str], name: str = "0", folder: Path = Path()) -> Pair:
    images = (folder / f"{name}_before.png", folder / f"{name}_after.png")
    return Pair(f"toy/{name}", "toy", *images, references, change_types, caption, shuffled=None)


def pairs(folder: Path = Path()) -> list[Pair]:
    return [pair(CAPTIONS[f"toy/{name}"], texts, types, name, folder) for name, types, texts in RECORDS]


def write(root: Path) -> tuple[Path, Path, Path]:
    """Records, captions and curves with their images; returns the folders clean, captions, model."""
    clean, captions, model = (root / name for name in ("clean", "captions", "model"))
    for folder in (clean, captions, model):
        folder.mkdir(parents=True)
    rows = [record(root, name, types, texts) for name, types, texts in RECORDS]
    train = record(root, "6", ["color"], ["the red cube at the left turned blue"]) | {"split": "train"}
    pq.write_table(pa.Table.from_pylist([*rows, train], schema=RECORD_SCHEMA), clean / "records.parquet")
    write_json(root / "grammar.json", GRAMMAR)
    write_json(captions / "predictions.json", said(CAPTIONS))
    shifted = dict(zip(CAPTIONS, [*list(CAPTIONS.values())[1:], "nothing changed"], strict=True))
    write_json(captions / "predictions_shuffled.json", said(shifted))
    maps = np.random.default_rng(0).random((len(CAPTIONS), 4, 4)).astype(np.float16)
    np.savez(captions / "saliency.npz", ids=np.array(list(CAPTIONS)), maps=maps)
    lines = [f"{step},0.1,{3 / step},0.001,0.0003,1.0,{2 / step if step % 5 == 0 else ''}" for step in range(1, 21)]
    (model / "curves.csv").write_text("\n".join(["step,epoch,loss,lr,lr_vision,grad_norm,val_loss", *lines]) + "\n")
    return clean, captions, model


def record(root: Path, name: str, change_types: list[str], references: list[str]) -> dict[str, Any]:
    images = {side: str(draw(root / f"{name}_{side}.png", int(name))) for side in ("before", "after")}
    known = {"id": f"toy/{name}", "dataset": "toy", "split": "test", "scene": f"toy/{name}", "source": "bench.py"}
    return known | images | {"captions": references, "change_types": change_types}


def draw(path: Path, shade: int) -> Path:
    Image.new("RGB", (24, 16), (40 * shade, 90, 120)).save(path)
    return path


def said(captions: dict[str, str]) -> list[dict[str, str]]:
    return [{"image_id": i, "caption": caption} for i, caption in captions.items()]


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def config(root: Path, **changes: Any) -> Evaluate:
    known = {"grammar": root / "grammar.json", "spice_dir": None, "gallery": 6}
    return Evaluate(**(known | {"scorer_timeout_s": 120} | changes))


def fake_java(folder: Path, when: str, then: str) -> str:
    """A PATH whose `java` runs the shell line `then` if its arguments hold `when`, and the real Java otherwise."""
    folder.mkdir()
    script = folder / "java"
    script.write_text(f'#!/bin/sh\ncase "$*" in *{when}*) {then};; esac\nexec {shutil.which("java")} "$@"\n')
    script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"

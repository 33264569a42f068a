"""What `make compare` measures of one model, in a process of its own, which says it in its last line."""

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from components.evaluate.metrics.pixel_threshold import roc_auc
from components.images import load_image
from components.models.generation import QUESTION, Captioner, load_captioner
from components.params import load_params
from components.records import NO_CHANGE
from components.train.stage import train

PARAMS = Path("params.yaml")
STEPS, CAPTIONS, BATCH = 60, 96, 48
"""Of a training and of a captioning that are timed; pairs that are captioned at once."""


def main(asked: str, *arguments: str) -> str:
    torch.set_num_threads(1)
    if asked == "step":
        return f"{step_seconds(json.loads(arguments[0]), Path(arguments[1])):.4f}"
    return json.dumps(of_captions(Path(arguments[0]), arguments[1:]))


def step_seconds(changes: Mapping[str, Any], folder: Path) -> float:
    """Seconds of a training step with these changes of params.yaml: of STEPS of them, without start and end."""
    params = load_params(PARAMS)
    base = Path(changes.get("train.base", params.train.base))
    settings = params.models[changes["train.model"]]
    how = {"workers": 0, "val_pairs": 0, "caption_val_pairs": 0, "checkpoint_every_steps": 10**6, "scratch": folder}
    compute = params.compute.model_copy(update=how)
    cfg = params.train.model_copy(update={"base": base, "epochs": epochs_of(STEPS, params.paths.mixture, params.train)})
    report = train(cfg, settings, compute, params.paths.mixture, folder / "out")
    seconds: float = json.loads((folder / "train_speed.json").read_text())["seconds"]
    return seconds / report.steps


def epochs_of(steps: int, mixture: Path, cfg: Any) -> float:
    """Epochs that are so many steps."""
    pairs = sum(len(pq.read_table(file, columns=["pair"])["pair"].unique()) for file in train_files(mixture))
    return steps / -(-pairs // cfg.global_batch)


def train_files(mixture: Path) -> list[Path]:
    return sorted((mixture / "train").glob("*.parquet"))


def of_captions(checkpoint: Path, datasets: Sequence[str]) -> dict[str, Any]:
    """Captions a second, and of each of the datasets the area under the ROC curve of the probability that nothing
    changed."""
    params = load_params(PARAMS)
    captioner = load_captioner(checkpoint, params.predict.max_new_tokens)
    records = pq.read_table(params.paths.clean / "records.parquet").to_pylist()
    test = [row for row in records if row["split"] == "test"]
    started = time.monotonic()
    images = [pixels(captioner, row) for row in test[:CAPTIONS]]
    for at in range(0, CAPTIONS, BATCH):
        captioner.answer([image for pair in images[at : at + BATCH] for image in pair], QUESTION)
    speed = min(CAPTIONS, len(test)) / (time.monotonic() - started)
    shares = no_change_shares(captioner, [row for row in records if row["split"] == "train"])
    areas = {name: area(captioner, [row for row in test if row["dataset"] == name], shares) for name in datasets}
    return {"captions_per_s": speed, "no_change_auc": areas}


def pixels(captioner: Captioner, row: Mapping[str, Any]) -> list[np.ndarray]:
    return [captioner.processor.prepare_image(load_image(Path(row[side]))) for side in ("before", "after")]


def no_change_shares(captioner: Captioner, rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """By first token, the share of the training references that begin with it which say that nothing changed."""
    counts: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    for row in rows:
        firsts = (captioner.processor.encode_reference(text)[0] for text in row["references"])
        counts[row["change_types"] == [NO_CHANGE]].update(firsts)
    return {token: n / (n + counts[False][token]) for token, n in counts[True].items()}


@torch.inference_mode()
def area(captioner: Captioner, rows: Sequence[Mapping[str, Any]], shares: Mapping[int, float]) -> float | None:
    """Of the probability that the caption begins as one that says that nothing changed; None where no pair is without
    a change, all are, or no reference that trained says so."""
    unchanged = [row["change_types"] == [NO_CHANGE] for row in rows]
    if len(set(unchanged)) < 2 or not shares:
        return None
    tokens, weights = list(shares), torch.tensor(list(shares.values()))
    said: list[float] = []
    for at in range(0, len(rows), BATCH):
        chosen = rows[at : at + BATCH]
        images = torch.from_numpy(np.stack([image for row in chosen for image in pixels(captioner, row)]))
        inputs = captioner.processor.prompt_inputs([QUESTION] * len(chosen)) | captioner.processor.image_inputs(images)
        logits = captioner.model(**inputs, use_cache=False).logits[:, -1]
        said += (logits.softmax(-1)[:, tokens] @ weights).tolist()
    of = {state: [1 - p for p, one in zip(said, unchanged, strict=True) if one is state] for state in (True, False)}
    return roc_auc(of[False], of[True])


if __name__ == "__main__":
    print(main(*sys.argv[1:]))

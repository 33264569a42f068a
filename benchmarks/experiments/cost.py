"""The cost of a trained variant on this machine: steps and captions, timed in processes of their own on one thread."""

import csv
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.experiments.runs import PARAMS, copy, read
from m3diff.images.open import load_image
from m3diff.models.generation import QUESTION, Captioner, load_captioner
from m3diff.records.schemas import NO_CHANGE
from m3diff.scoring.metrics.pixel_threshold import roc_auc
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params, Paths
from m3diff.stages.train.stage import train

STEPS, CAPTIONS, BATCH = 60, 96, 48  # timed steps and captions; pairs that are captioned at once


def learning_curve(experiment: str, paths: Paths) -> list[dict[str, Any]]:
    """Rows of curves.csv: every tenth step, the last, and those with a validation or a measurement of the module.
    Training loss as a running mean with a weight of 0.03 for each step, val_loss, and the module's columns."""
    rows = list(csv.DictReader(io.StringIO(read(experiment, paths.model / "curves.csv").decode())))
    found: list[dict[str, Any]] = []
    mean = float(rows[0]["loss"])
    for row in rows:
        mean += 0.03 * (float(row["loss"]) - mean)
        extra = {key: float(value) for key, value in row.items() if value and key.startswith(("val_loss", "module_"))}
        step = int(row["step"])
        if step % 10 == 0 or row is rows[-1] or extra:
            found.append({"step": step, "loss": round(mean, 4)} | extra)
    return found


def measure(experiment: str, changes: Mapping[str, Any], protocols: Sequence[str], params: Params) -> dict[str, Any]:
    """Trained parameters, FLOPs of a caption, captions/s, seconds a step, ROC area of "no change" by protocol."""
    datasets = {protocol: protocol.partition("/")[0] for protocol in protocols}
    report = json.loads(read(experiment, params.paths.model / "report.json"))
    with tempfile.TemporaryDirectory() as folder:
        copy(experiment, params.paths.model / "checkpoint", Path(folder) / "checkpoint")
        told = json.loads(in_a_process(["captions", f"{folder}/checkpoint", *dict.fromkeys(datasets.values())]))
        step_s = float(in_a_process(["step", json.dumps(dict(changes)), folder]))
    return {
        "parameters": report["parameters_trainable"],
        "caption_gflop": caption_flops(changes, params) / 1e9,
        "captions_per_s": told["captions_per_s"],
        "step_s": step_s,
        "no_change_auc": {protocol: told["no_change_auc"][dataset] for protocol, dataset in datasets.items()},
    }


def in_a_process(arguments: Sequence[str]) -> str:
    """The last line that this module prints in a process of its own, on one thread."""
    command = [sys.executable, "-m", "benchmarks.experiments.cost", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def changed(changes: Mapping[str, Any], params: Params) -> tuple[Any, Any]:
    """The sections `train` and of the model, of a variant that changes model and base alone."""
    base = Path(changes.get("train.base", params.train.base))
    return params.train.model_copy(update={"base": base}), params.models[changes.get("train.model", params.train.model)]


def caption_flops(changes: Mapping[str, Any], params: Params) -> float:
    """FLOPs of a pair's images and prompt, as `m3diff plan` counts them."""
    from m3diff.commands.plan import Run, make_plan

    datasets, mixture = params.ingest.datasets, params.paths.mixture
    run = Run(*changed(changes, params), params.compute, datasets, params.convert, mixture)
    return make_plan(run).caption_flops


def main(asked: str, *arguments: str) -> str:
    torch.set_num_threads(1)
    if asked == "step":
        return f"{step_seconds(json.loads(arguments[0]), Path(arguments[1])):.4f}"
    return json.dumps(of_captions(Path(arguments[0]), arguments[1:]))


def step_seconds(changes: Mapping[str, Any], folder: Path) -> float:
    """Seconds of a training step with these changes of params.yaml: of STEPS of them, without start and end."""
    params = load_params(PARAMS)
    cfg, settings = changed(changes, params)
    how = {"workers": 0, "val_pairs": 0, "caption_val_pairs": 0, "checkpoint_every_steps": 10**6, "scratch": folder}
    compute = params.compute.model_copy(update=how)
    pairs = len(pq.read_table(params.paths.mixture / "train", columns=["pair"])["pair"].unique())
    cfg = cfg.model_copy(update={"epochs": STEPS / -(-pairs // cfg.global_batch)})
    report = train(cfg, settings, compute, params.paths.mixture, folder / "out")
    seconds: float = json.loads((folder / "train_speed.json").read_text())["seconds"]
    return seconds / report.steps


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
    """ROC area of the probability that the caption begins as one that says that nothing changed; None where no pair is
    without a change, all are, or no reference that trained says so."""
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

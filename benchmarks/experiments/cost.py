"""Measure the cost of a trained variant of an experiment.

Training steps and captions are timed in fresh processes with one thread.
"""

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from benchmarks.experiments.runs import PARAMS, copy, read
from m3diff.images.open import load_image
from m3diff.models.contract import Prepared
from m3diff.models.generation import QUESTION, Captioner, load_captioner
from m3diff.models.processing import pad_prompts
from m3diff.records.sample import Turn
from m3diff.records.schemas import NO_CHANGE
from m3diff.records.tables import read_table
from m3diff.scoring.metrics.pixel_threshold import roc_auc
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params, Paths
from m3diff.stages.train.stage import train

STEPS = 60  # number of timed training steps
CAPTIONS = 96  # number of timed captions
BATCH = 48  # number of pairs per batch


def learning_curve(experiment: str, paths: Paths) -> list[dict[str, Any]]:
    """Return selected points of curves.csv: every tenth step, the last step, and steps with extra measurements.

    Each point has the step and the exponential moving average of the training loss (with weight 0.03). The extra
    measurements of a step are the validation loss and the columns about the module, the part of the model that compares
    the two images.
    """
    rows = list(csv.DictReader(io.StringIO(read(experiment, paths.model / "curves.csv").decode())))
    points: list[dict[str, Any]] = []
    mean_loss = float(rows[0]["loss"])
    for row in rows:
        mean_loss += 0.03 * (float(row["loss"]) - mean_loss)
        extra = {key: float(value) for key, value in row.items() if value and key.startswith(("val_loss", "module_"))}
        step = int(row["step"])
        if step % 10 == 0 or row is rows[-1] or extra:
            points.append({"step": step, "loss": round(mean_loss, 4)} | extra)
    return points


def measure(experiment: str, changes: Mapping[str, Any], protocols: Sequence[str], params: Params) -> dict[str, Any]:
    """Measure the cost of a variant.

    Returns:
        The number of trained parameters, GFLOP per caption, captions per second, seconds per training step, and for
        each protocol the area under the ROC curve of "no change" (see `no_change_area`).
    """
    datasets = {protocol: protocol.partition("/")[0] for protocol in protocols}
    report = json.loads(read(experiment, params.paths.model / "report.json"))
    with tempfile.TemporaryDirectory() as folder:
        copy(experiment, params.paths.model / "checkpoint", Path(folder) / "checkpoint")
        arguments = ["captions", f"{folder}/checkpoint", *dict.fromkeys(datasets.values())]
        captioning = json.loads(run_in_process(arguments))
        step_s = float(run_in_process(["step", json.dumps(dict(changes)), folder]))
    return {
        "parameters": report["parameters_trainable"],
        "caption_gflop": caption_flops(changes, params) / 1e9,
        "captions_per_s": captioning["captions_per_s"],
        "step_s": step_s,
        "no_change_auc": {protocol: captioning["no_change_auc"][name] for protocol, name in datasets.items()},
    }


def run_in_process(arguments: Sequence[str]) -> str:
    """Run this module in a fresh process with one thread. Return the process's last line of output."""
    command = [sys.executable, "-m", "benchmarks.experiments.cost", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.returncode == 0, process.stderr
    return process.stdout.strip().splitlines()[-1]


def changed_sections(changes: Mapping[str, Any], params: Params) -> tuple[Any, Any]:
    """Return the section `train` and the model's section with a variant's changes.

    Only changes of the model and of the base are applied.
    """
    base = Path(changes.get("train.base", params.train.base))
    model = changes.get("train.model", params.train.model)
    return params.train.model_copy(update={"base": base}), params.models[model]


def caption_flops(changes: Mapping[str, Any], params: Params) -> float:
    """Return the FLOPs for a pair's images and prompt, as computed by `m3diff plan`."""
    from m3diff.commands.plan import Run, make_plan

    train_section, settings = changed_sections(changes, params)
    run = replace(Run.from_params(params), train=train_section, settings=settings)
    return make_plan(run).caption_flops


def main(measurement: str, *arguments: str) -> str:
    """Run a measurement and return the result as text.

    Args:
        measurement: `step` or `captions`.
        arguments: changes (JSON) and a folder for `step`, or a checkpoint and dataset names for `captions`.
    """
    torch.set_num_threads(1)
    if measurement == "step":
        return f"{step_seconds(json.loads(arguments[0]), Path(arguments[1])):.4f}"
    return json.dumps(measure_captions(Path(arguments[0]), arguments[1:]))


def step_seconds(changes: Mapping[str, Any], folder: Path) -> float:
    """Return the seconds per training step with these changes to params.yaml.

    The time before the first step and after the last step is not counted.
    """
    params = load_params(PARAMS)
    cfg, settings = changed_sections(changes, params)
    steps_only = {"workers": 0, "val_pairs": 0, "caption_val_pairs": 0, "checkpoint_every_steps": 10**6}
    compute = params.compute.model_copy(update=steps_only | {"scratch": folder})
    pairs = len(pq.read_table(params.paths.mixture / "train", columns=["record"])["record"].unique())
    cfg = cfg.model_copy(update={"epochs": STEPS / -(-pairs // cfg.global_batch)})
    report = train(cfg, settings, compute, params.paths.mixture, folder / "out")
    seconds: float = json.loads((folder / "train_speed.json").read_text())["seconds"]
    return seconds / report.steps


def measure_captions(checkpoint: Path, datasets: Sequence[str]) -> dict[str, Any]:
    """Return the captions per second and, for each dataset, the result of `no_change_area`."""
    params = load_params(PARAMS)
    captioner = load_captioner(checkpoint, params.predict.max_new_tokens)
    records = read_table(params.paths.clean / "records").to_pylist()
    test_rows = [row for row in records if row["split"] == "test"]
    start_time = time.monotonic()
    pairs = [prepared_pair(captioner, row) for row in test_rows[:CAPTIONS]]
    for start in range(0, CAPTIONS, BATCH):
        batch = pairs[start : start + BATCH]
        captioner.answer(batch, [(Turn(QUESTION),)] * len(batch))
    speed = min(CAPTIONS, len(test_rows)) / (time.monotonic() - start_time)
    shares = no_change_shares(captioner, [row for row in records if row["split"] == "train"])
    areas = {}
    for name in datasets:
        dataset_rows = [row for row in test_rows if row["dataset"] == name]
        areas[name] = no_change_area(captioner, dataset_rows, shares)
    return {"captions_per_s": speed, "no_change_auc": areas}


def prepared_pair(captioner: Captioner, row: Mapping[str, Any]) -> Prepared:
    """Return the before-image and the after-image of a record, prepared by the model's processor."""
    return captioner.processor.prepare(load_image(image["uri"]) for image in row["images"])


def no_change_shares(captioner: Captioner, rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return a share for each token with which a training reference of an unchanged pair begins.

    The share is the number of references of unchanged pairs that begin with the token, divided by the number of all
    references that begin with it.

    Args:
        rows: records of training pairs.
    """
    unchanged: Counter[int] = Counter()  # number of references of unchanged pairs by their first token
    changed: Counter[int] = Counter()  # the same for changed pairs
    for row in rows:
        first_tokens = [captioner.processor.encode_answer(text)[0] for text in row["references"]]
        counter = unchanged if row["change_types"] == [NO_CHANGE] else changed
        counter.update(first_tokens)
    return {token: count / (count + changed[token]) for token, count in unchanged.items()}


@torch.inference_mode()
def no_change_area(
    captioner: Captioner, rows: Sequence[Mapping[str, Any]], shares: Mapping[int, float]
) -> float | None:
    """Return the area under the ROC curve for detecting unchanged pairs by the first token of the caption.

    The score of a pair is the probability that its caption begins like a reference of an unchanged pair: the sum of the
    probabilities of the first tokens, each multiplied by the token's share. The result is None if all pairs are
    changed, if all pairs are unchanged, or if `shares` is empty.

    Args:
        rows: records of test pairs.
        shares: the result of `no_change_shares`.
    """
    is_unchanged = [row["change_types"] == [NO_CHANGE] for row in rows]
    if len(set(is_unchanged)) < 2 or not shares:
        return None
    tokens = list(shares)
    weights = torch.tensor(list(shares.values()))
    no_change: list[float] = []
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        prepared = [prepared_pair(captioner, row) for row in batch]
        prompts = [captioner.processor.encode_prompt((Turn(QUESTION),), pair.marks) for pair in prepared]
        inputs = pad_prompts(prompts, captioner.processor.pad_id)
        inputs |= captioner.processor.image_inputs(captioner.processor.collate(prepared), captioner.model.device)
        logits = captioner.model(**inputs, use_cache=False).logits[:, -1]
        no_change += (logits.softmax(-1)[:, tokens] @ weights).tolist()
    change_scores: dict[bool, list[float]] = {True: [], False: []}
    for probability, unchanged in zip(no_change, is_unchanged, strict=True):
        change_scores[unchanged].append(1 - probability)
    return roc_auc(change_scores[False], change_scores[True])


if __name__ == "__main__":
    print(main(*sys.argv[1:]))

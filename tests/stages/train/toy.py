"""A mixture and training parameters so small that a run takes a second."""

import csv
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from m3diff.models.m3diff import M3DiffSettings
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.settings.compute import Compute
from m3diff.stages.train.job import Job, WorkerContext
from m3diff.stages.train.params import Train
from m3diff.stages.train.stage import TrainReport, train
from tests.tiny import noise_image, tiny_base, tiny_settings

REFERENCES = ("the red ball moved", "the ball is gone", "a small blue star appeared at the left", "nothing changed")
SPLITS = {"train": {"toy": 10}, "val": {"toy": 3, "second": 2}, "test": {"toy": 3}}


def write_mixture(folder: Path, splits: Mapping[str, Mapping[str, int]] = SPLITS) -> Path:
    """Write a mixture of noise images, with one to four references a pair; `splits` is split -> dataset -> pairs."""
    for split, datasets in splits.items():
        rows = []
        for name, count in datasets.items():
            for number in range(count):
                rows += pair_rows(folder, split, name, number)
        (folder / split).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows, SAMPLE_SCHEMA), folder / split / "00000.parquet")
    return folder


def pair_rows(folder: Path, split: str, dataset: str, number: int) -> list[dict[str, Any]]:
    """Draw the images of a pair and return its samples."""
    before, after = (folder / "images" / f"{split}_{dataset}_{number}_{side}.png" for side in ("a", "b"))
    before.parent.mkdir(parents=True, exist_ok=True)
    seed = 100 * number + (7 if dataset == "second" else 0)
    noise_image(seed).save(before)
    noise_image(seed + 1).save(after)
    pair = f"{dataset}/{split}{number}"
    row = {
        "record": pair,
        "image_set": pair,
        "history": [],
        "dataset": dataset,
        "split": split,
        "question": "What changed?",
        "images": [
            {"uri": str(image), "sha256": hashlib.sha256(image.read_bytes()).digest()} for image in (before, after)
        ],
    }
    texts = REFERENCES[: 1 + number % 4]
    return [row | {"id": f"{pair}#{k}", "answer": text} for k, text in enumerate(texts)]


TRAIN: dict[str, Any] = {
    "model": "tiny",
    "seed": 3,
    "max_captions_per_sequence": None,
    "max_tokens": None,
    "global_batch": 4,
    "epochs": 2,
    "warmup_share": 0.1,
    "schedule": "cosine",
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "precision": "fp32",
    "export": "last",
}
COMPUTE: dict[str, Any] = {
    "workers": 0,
    "cpus_per_worker": 1,
    "gpu": False,
    "attention": "auto",
    "gpu_kind": None,
    "micro_batch": 4,
    "zero_stage": 0,
    "activation_checkpointing": "none",
    "checkpoint_every_steps": 2,
    "max_failures": 2,
    "val_pairs": 2,
    "caption_val_pairs": 0,
    "caption_every_checkpoints": 2,
    "spice_dir": None,
    "scorer_timeout_s": 60,
}


@dataclass(frozen=True)
class Recipe:
    """The sections of the parameters that a run takes."""

    cfg: Train
    model: M3DiffSettings
    compute: Compute

    def changed(self, **changes: Any) -> "Recipe":
        """Return the recipe with other values of `model` or of fields of `train` and `compute`."""
        model = changes.pop("model", self.model)
        train_changes = {name: value for name, value in changes.items() if name in TRAIN}
        compute_changes = {name: value for name, value in changes.items() if name in {"scratch", *COMPUTE}}
        assert len(train_changes) + len(compute_changes) == len(changes), f"no such parameters among {sorted(changes)}"
        compute = Compute(**{**self.compute.model_dump(), **compute_changes})
        return Recipe(Train(**{**self.cfg.model_dump(), **train_changes}), model, compute)


def recipe(base: Path, **changes: Any) -> Recipe:
    base = base if base.exists() else tiny_base(base)
    start = Recipe(Train(base=base, **TRAIN), tiny_settings(), Compute(scratch=base.parent / "runs", **COMPUTE))
    return start.changed(**changes)


def job(run_recipe: Recipe, mixture: Path, folder: Path, **fields: Any) -> Job:
    """Return the job of a run whose folder and output are `folder`."""
    return Job(run_recipe.cfg, run_recipe.model, run_recipe.compute, mixture, folder, folder, "", **fields)


def started(run_recipe: Recipe, mixture: Path, folder: Path, **fields: Any) -> Any:
    """Return the loop of a run in this process, before its first step."""
    from m3diff.stages.train.loop import Training

    return Training(job(run_recipe, mixture, folder, **fields), WorkerContext())


def built(training: Any, step: int) -> list[Any]:
    """Return the micro-batches of a step, without augmentation."""
    return [training.loader.build(batch) for batch in training.schedule.micro_batches(step, 0)]


def take(training: Any, *steps: int) -> None:
    """Take optimizer steps, counted from 0."""
    for step in steps:
        training.train_step(step, built(training, step))


@dataclass(frozen=True)
class Trained:
    """The outputs of a run."""

    report: TrainReport
    weights: dict[str, torch.Tensor]
    curve: list[dict[str, str]]
    followed: list[dict[str, str]]  # rows of the curves that the follower found at the end
    folder: Path

    def column(self, name: str) -> list[float | None]:
        return [float(row[name]) if row[name] else None for row in self.curve]


def run(run_recipe: Recipe, mixture: Path, folder: Path) -> Trained:
    """Run the stage with all outputs and scratch files in `folder`."""
    run_recipe = run_recipe.changed(scratch=folder / "runs")
    followed_rows: list[dict[str, str]] = []

    @contextmanager
    def follow(key: str, file: Path) -> Iterator[None]:
        yield
        followed_rows.extend(read_curve(file.parent))

    report = train(run_recipe.cfg, run_recipe.model, run_recipe.compute, mixture, folder / "out", follow)
    weights = load_file(folder / "out" / "checkpoint" / "model.safetensors")
    return Trained(report, weights, read_curve(folder / "out"), followed_rows, folder)


def run_dir_of(folder: Path) -> Path:
    """Return the folder of the only run that began in `folder`."""
    (run_dir,) = (path for path in (folder / "runs" / "train").iterdir() if path.is_dir())
    return run_dir


def read_curve(out: Path) -> list[dict[str, str]]:
    with (out / "curves.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float) -> None:
    """Assert that tensors are equal. The error lists each tensor that differs, and by how much."""
    assert actual.keys() == expected.keys()
    odd = {}
    for name, weight in expected.items():
        if atol and name.endswith("k_proj.bias"):
            continue  # shifts all scores of a query alike: its gradient is rounding alone, which Adam makes large
        difference = (actual[name] - weight).abs()
        if not bool((difference <= atol).all()):
            odd[name] = f"{int((difference > atol).sum())} of {weight.numel()}, by {float(difference.max()):.3g}"
    assert not odd, f"{len(odd)} of {len(expected)} tensors differ by more than {atol}: {odd}"


def assert_same_run(actual: Trained, expected: Trained, curve: bool = True) -> None:
    """Assert that two runs are equal to the bit, curves and report included."""
    assert_same(actual.weights, expected.weights, atol=0)
    if curve:
        assert actual.curve == expected.curve
        assert actual.report == expected.report


class Interrupted(BaseException):
    """An interrupt, like one from the keyboard. It is not a failure, so it is not retried."""


@contextmanager
def interrupting(saved: int) -> Iterator[None]:
    """Stop a run in the block after `saved` checkpoints, before the last of them is validated. 0 never stops it."""
    from m3diff.stages.train.loop import Training

    original = Training.validate
    validated_folders = []

    def validate(training: Any, folder: Path) -> None:
        validated_folders.append(folder)
        if len(validated_folders) == saved:
            raise Interrupted
        original(training, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "validate", validate)
        yield


def interrupted(run_recipe: Recipe, mixture: Path, folder: Path, saved: int) -> None:
    with interrupting(saved), pytest.raises(Interrupted):
        run(run_recipe, mixture, folder)


class Workspace(NamedTuple):
    """The files of a training: a mixture, a base, and the test's folder for outputs."""

    mixture: Path
    base: Path
    folder: Path

    def recipe(self, **changes: Any) -> Recipe:
        return recipe(self.base, **changes)

    def run(self, run_recipe: Recipe | None = None, part: str = "", **changes: Any) -> Trained:
        return run(run_recipe or self.recipe(**changes), self.mixture, self.folder / part)

    def interrupted(self, run_recipe: Recipe, saved: int, part: str = "") -> None:
        interrupted(run_recipe, self.mixture, self.folder / part, saved)

    def started(self, steps: int = 0, **changes: Any) -> Any:
        """Return the loop in this process after its first steps."""
        training = started(self.recipe(**changes), self.mixture, self.folder)
        take(training, *range(steps))
        return training

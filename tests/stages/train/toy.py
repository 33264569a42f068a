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
from m3diff.stages.train.job import Job, Runtime
from m3diff.stages.train.params import Train
from m3diff.stages.train.stage import TrainReport, train
from tests.tiny import noise_image, tiny_base, tiny_settings

REFERENCES = ("the red ball moved", "the ball is gone", "a small blue star appeared at the left", "nothing changed")
SPLITS = {"train": {"toy": 10}, "val": {"toy": 3, "second": 2}, "test": {"toy": 3}}


def write_mixture(folder: Path, splits: Mapping[str, Mapping[str, int]] = SPLITS) -> Path:
    """Pairs of noise with one to four references each; `splits` is split -> dataset -> pairs."""
    for split, datasets in splits.items():
        pairs = [(name, n) for name, count in datasets.items() for n in range(count)]
        rows = [row for name, n in pairs for row in pair_rows(folder, split, name, n)]
        (folder / split).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows, SAMPLE_SCHEMA), folder / split / "00000.parquet")
    return folder


def pair_rows(folder: Path, split: str, dataset: str, number: int) -> list[dict[str, Any]]:
    """A pair's samples, its images drawn."""
    images = [folder / "images" / f"{split}_{dataset}_{number}_{side}.png" for side in ("a", "b")]
    images[0].parent.mkdir(parents=True, exist_ok=True)
    for k, image in enumerate(images):
        noise_image(100 * number + k + (7 if dataset == "second" else 0)).save(image)
    digests = [hashlib.sha256(image.read_bytes()).digest() for image in images]
    pair = f"{dataset}/{split}{number}"
    row = {"pair": pair, "dataset": dataset, "split": split, "question": "What changed?"}
    row |= dict(zip(("before", "after", "before_sha256", "after_sha256"), [*map(str, images), *digests], strict=True))
    texts = REFERENCES[: 1 + number % 4]
    return [row | {"id": f"{pair}#{k}", "reference": text} for k, text in enumerate(texts)]


TRAIN: dict[str, Any] = {"model": "tiny", "seed": 3, "max_captions_per_sequence": None, "global_batch": 4, "epochs": 2}
TRAIN |= {"warmup_share": 0.1, "schedule": "cosine", "weight_decay": 0.01, "max_grad_norm": 1.0}
TRAIN |= {"precision": "fp32", "export": "last"}
COMPUTE: dict[str, Any] = {"workers": 0, "cpus_per_worker": 1, "gpu": False, "attention": "auto", "gpu_kind": None}
COMPUTE |= {"micro_batch": 4, "zero_stage": 0, "activation_checkpointing": "none", "checkpoint_every_steps": 2}
COMPUTE |= {"max_failures": 2, "val_pairs": 2, "caption_val_pairs": 0, "caption_every_checkpoints": 2}
COMPUTE |= {"spice_dir": None, "scorer_timeout_s": 60}


@dataclass(frozen=True)
class Recipe:
    """The sections that a run takes. `changed` gives another of it, by the names of the sections' fields."""

    cfg: Train
    model: M3DiffSettings
    compute: Compute

    def changed(self, **changes: Any) -> "Recipe":
        model = changes.pop("model", self.model)
        ours = {name: value for name, value in changes.items() if name in TRAIN}
        how = {name: value for name, value in changes.items() if name in {"scratch", *COMPUTE}}
        assert len(ours) + len(how) == len(changes), f"no such parameters among {sorted(changes)}"
        compute = Compute(**{**self.compute.model_dump(), **how})
        return Recipe(Train(**{**self.cfg.model_dump(), **ours}), model, compute)


def recipe(base: Path, **changes: Any) -> Recipe:
    base = base if base.exists() else tiny_base(base)
    start = Recipe(Train(base=base, **TRAIN), tiny_settings(), Compute(scratch=base.parent / "runs", **COMPUTE))
    return start.changed(**changes)


def job(made: Recipe, mixture: Path, folder: Path, **fields: Any) -> Job:
    """The work of a run in `folder`, which gets its output too."""
    return Job(made.cfg, made.model, made.compute, mixture, folder, folder, "", **fields)


def started(made: Recipe, mixture: Path, folder: Path, **fields: Any) -> Any:
    """The loop of a run in `folder` before its first step, in this process."""
    from m3diff.stages.train.loop import Training

    return Training(job(made, mixture, folder, **fields), Runtime())


def built(training: Any, step: int) -> list[Any]:
    """The micro-batches of a step, without augmentation."""
    return [training.loader.build(batch) for batch in training.schedule.micro_batches(step, 0)]


def take(training: Any, *steps: int) -> None:
    for step in steps:
        training.step(step, built(training, step))


@dataclass(frozen=True)
class Trained:
    """The outputs of a run."""

    report: TrainReport
    weights: dict[str, torch.Tensor]
    curve: list[dict[str, str]]
    followed: list[dict[str, str]]  # the curves that whoever follows found at the end
    folder: Path

    def column(self, name: str) -> list[float | None]:
        return [float(row[name]) if row[name] else None for row in self.curve]


def run(made: Recipe, mixture: Path, folder: Path) -> Trained:
    """Train in `folder`, with its scratch there."""
    made = made.changed(scratch=folder / "runs")
    found: list[dict[str, str]] = []

    @contextmanager
    def follow(key: str, file: Path) -> Iterator[None]:
        yield
        found.extend(read_curve(file.parent))

    report = train(made.cfg, made.model, made.compute, mixture, folder / "out", follow)
    weights = load_file(folder / "out" / "checkpoint" / "model.safetensors")
    return Trained(report, weights, read_curve(folder / "out"), found, folder)


def run_dir_of(folder: Path) -> Path:
    """The folder of the only run that was begun in `folder`."""
    (found,) = (path for path in (folder / "runs" / "train").iterdir() if path.is_dir())
    return found


def read_curve(out: Path) -> list[dict[str, str]]:
    with (out / "curves.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], atol: float) -> None:
    """Every tensor that differs is named, with how many of its numbers do and by how much at most."""
    assert got.keys() == want.keys()
    odd = {}
    for name, weight in want.items():
        if atol and name.endswith("k_proj.bias"):
            continue  # shifts all scores of a query alike: its gradient is rounding alone, which Adam makes large
        difference = (got[name] - weight).abs()
        if not bool((difference <= atol).all()):
            odd[name] = f"{int((difference > atol).sum())} of {weight.numel()}, by {float(difference.max()):.3g}"
    assert not odd, f"{len(odd)} of {len(want)} tensors differ by more than {atol}: {odd}"


def assert_same_run(got: Trained, want: Trained, curve: bool = True) -> None:
    """Equal to the bit, with its curves and report."""
    assert_same(got.weights, want.weights, atol=0)
    assert not curve or (got.curve, got.report) == (want.curve, want.report)


class Interrupted(BaseException):
    """An interrupt as from the keyboard: no failure, so nothing is tried again."""


@contextmanager
def interrupting(saved: int) -> Iterator[None]:
    """Within, a run stops after so many checkpoints, the last of them saved and not yet validated; 0: it does not."""
    from m3diff.stages.train.loop import Training

    original, seen = Training.validate, []

    def validate(training: Any, folder: Path) -> None:
        seen.append(folder)
        if len(seen) == saved:
            raise Interrupted
        original(training, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "validate", validate)
        yield


def interrupted(made: Recipe, mixture: Path, folder: Path, saved: int) -> None:
    with interrupting(saved), pytest.raises(Interrupted):
        run(made, mixture, folder)


class Place(NamedTuple):
    """A place to train in: mixture, base, and a folder of a test's own."""

    mixture: Path
    base: Path
    folder: Path

    def recipe(self, **changes: Any) -> Recipe:
        return recipe(self.base, **changes)

    def run(self, made: Recipe | None = None, part: str = "", **changes: Any) -> Trained:
        return run(made or self.recipe(**changes), self.mixture, self.folder / part)

    def interrupted(self, made: Recipe, saved: int, part: str = "") -> None:
        interrupted(made, self.mixture, self.folder / part, saved)

    def started(self, steps: int = 0, **changes: Any) -> Any:
        """The loop after its first steps, in this process."""
        training = started(self.recipe(**changes), self.mixture, self.folder)
        take(training, *range(steps))
        return training

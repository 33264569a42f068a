"""What a run trained on, by its reports, and the epochs in which other pairs take as many optimizer steps."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from components.params import Params, Paths, load_params
from components.train.phase import DatasetFilter
from infra.experiments import copy, read, remove, run_experiment

PARAMS = Path("params.yaml")


class Budget(NamedTuple):
    """What an experiment trained on; of the alignment before it 0 where it has none."""

    pairs: int  # of the fine-tuning, each once
    epochs: float
    steps: int  # of the optimizer, in the fine-tuning
    captions: int  # that these trained on, each as often as it came
    alignment_pairs: int
    alignment_steps: int


def budget_of(experiment: str, paths: Paths) -> Budget:
    """By the parameters and reports of an experiment that was run."""
    params = yaml.safe_load(read(experiment, PARAMS))
    trained = json.loads(read(experiment, paths.model / "report.json"))
    mixed = json.loads(read(experiment, paths.mixture / "report.json"))["datasets"]
    align = params["models"][params["train"]["model"]].get("align")
    pairs = {name: counts["pairs"]["train"] for name, counts in mixed.items()}
    aligned = sum(pairs[name] for name in (align["datasets"] if align else ()))
    return Budget(
        pairs=sum(pairs.values()) - aligned,
        epochs=params["train"]["epochs"],
        steps=trained["steps"],
        captions=trained["rows_out"],
        alignment_pairs=aligned,
        alignment_steps=int(trained["alignment"].get("steps", 0)),
    )


def epochs_for(steps: int, name: str, changes: Mapping[str, Any], given: Sequence[Path], paths: Paths) -> float:
    """Epochs in which a run with these changes takes so many optimizer steps.

    Its data are made by an experiment of this name, which is not kept; the run then finds them in DVC's run cache.

    Args:
        changes, given: as in `run_experiment`.

    Raises:
        CalledProcessError: a stage up to convert failed.
    """
    run_experiment(name, changes, given, ["convert"])
    per_epoch = steps_per_epoch(name, paths)
    remove(name)
    return round((steps - 0.5) / per_epoch, 6)  # the loop rounds up: half a step less is safe from rounding here


def steps_per_epoch(experiment: str, paths: Paths) -> int:
    """As the training loop counts them, on the experiment's mixture."""
    from components.train.batches import Schedule
    from components.train.samples import read_training_samples

    with tempfile.TemporaryDirectory() as folder:
        params = params_of(experiment, Path(folder))
        copy(experiment, paths.mixture / "train", Path(folder) / "train")
        align = params.models[params.train.model].align
        chosen = DatasetFilter(align.datasets if align else ())
        samples = read_training_samples(Path(folder), Path(folder), chosen)
        train = params.train
        schedule = Schedule(samples, train.max_captions_per_sequence, train.seed, train.global_batch, 1, train.epochs)
        return schedule.steps_per_epoch


def params_of(experiment: str, folder: Path) -> Params:
    """The experiment's parameters; `folder` is for a copy of their file."""
    (folder / PARAMS).write_bytes(read(experiment, PARAMS))
    return load_params(folder / PARAMS)

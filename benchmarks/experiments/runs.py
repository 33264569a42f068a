"""Run the variants of an experiment with `dvc exp run`, read their outputs, and score their models on new scenes.

The new scenes were never used for tuning. Scores on these scenes are compared with targets. A stage that has already
run with the same data, parameters and code is restored from DVC's cache.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from m3diff.records.errors import ParamsError
from m3diff.settings.load import complete_values, load_params
from m3diff.settings.section import Section
from m3diff.settings.tree import Paths
from m3diff.stages.train.job import DatasetFilter

PARAMS = Path("params.yaml")


def run_experiment(
    name: str, changes: Mapping[str, Any], folders: Sequence[Path] = (), targets: Sequence[str] = ()
) -> None:
    """Run the pipeline as a named DVC experiment, replacing an earlier experiment with the same name.

    Args:
        changes: changes to params.yaml, such as `{"train.seed": 3}`. A plus sign before a key adds the key.
        folders: folders in this checkout that are ignored by git but needed by the experiment.
        targets: stages to run, along with the stages they depend on. If empty, all stages run.

    Raises:
        CalledProcessError: the run failed.
    """
    settings = [setting(key, value) for key, value in changes.items()]
    print(f"dvc exp run --name {name} {' '.join([*settings, *targets])}", flush=True)
    options = []
    for folder in folders:
        options += ["--copy-paths", str(folder)]
    for change in settings:
        options += ["-S", change]
    remove(name)
    dvc("exp", "run", "--temp", "--name", name, *options, *targets)


def remove(name: str) -> None:
    """Remove the DVC experiment if it exists. The outputs of its stages are kept in DVC's run cache."""
    dvc("exp", "remove", "--quiet", name, check=False)


def setting(key: str, value: Any) -> str:
    """Return a change to params.yaml in the format of `dvc exp run -S`. Strings are not quoted."""
    return f"{key}={value if isinstance(value, str) else hydra_text(value)}"


def hydra_text(value: Any) -> str:
    """Return a value in the syntax of Hydra's overrides, which is JSON with unquoted keys."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {hydra_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(hydra_text, value))}]"
    return json.dumps(value, ensure_ascii=False)


def dvc(*arguments: str, check: bool = True) -> None:
    """Run a DVC command. If `check` is False, hide the command's output and ignore failures."""
    out = None if check else subprocess.DEVNULL
    subprocess.run([sys.executable, "-m", "dvc", *arguments], check=check, stdout=out, stderr=out)


def read(experiment: str, path: Path) -> bytes:
    """Return the content of a file in the DVC experiment, from git or from DVC's cache."""
    from dvc.api import DVCFileSystem

    with DVCFileSystem(rev=experiment).open(path.as_posix(), "rb") as file:
        return file.read()


def copy(experiment: str, path: Path, to: Path) -> None:
    """Copy a folder from the DVC experiment to `to`, replacing an existing folder."""
    from dvc.api import DVCFileSystem

    shutil.rmtree(to, ignore_errors=True)
    to.parent.mkdir(parents=True, exist_ok=True)
    DVCFileSystem(rev=experiment).get(path.as_posix(), str(to), recursive=True)


class Budget(NamedTuple):
    """The amount of data and the number of steps in a training run.

    A training run consists of fine-tuning and, for some variants, an alignment phase before it.

    Attributes:
        pairs: number of different pairs used for fine-tuning.
        steps: number of optimizer steps in fine-tuning.
        captions: number of captions used for training, including repetitions.
        alignment_pairs: number of different pairs used for alignment, or 0 without alignment.
        alignment_steps: number of optimizer steps in alignment, or 0 without alignment.
    """

    pairs: int
    epochs: float
    steps: int
    captions: int
    alignment_pairs: int
    alignment_steps: int


def budget_of(experiment: str, paths: Paths) -> Budget:
    """Return the budget of a finished experiment, read from its parameters and reports."""
    params = yaml.safe_load(read(experiment, PARAMS))
    training_report = json.loads(read(experiment, paths.model / "report.json"))
    datasets = json.loads(read(experiment, paths.mixture / "report.json"))["datasets"]
    align = params["models"][params["train"]["model"]].get("align")
    pairs = {name: counts["pairs"]["train"] for name, counts in datasets.items()}
    alignment_datasets = align["datasets"] if align else ()
    alignment_pairs = sum(pairs[name] for name in alignment_datasets)
    return Budget(
        pairs=sum(pairs.values()) - alignment_pairs,
        epochs=params["train"]["epochs"],
        steps=training_report["steps"],
        captions=training_report["rows_out"],
        alignment_pairs=alignment_pairs,
        alignment_steps=int(training_report["alignment"].get("steps", 0)),
    )


def epochs_for(steps: int, name: str, changes: Mapping[str, Any], folders: Sequence[Path], paths: Paths) -> float:
    """Return the number of epochs after which a run with these changes has taken `steps` optimizer steps.

    To count the steps per epoch, the data is prepared in a DVC experiment, which is removed afterwards. The later run
    restores the data from DVC's run cache.

    Args:
        name: name of this DVC experiment.
        folders: see `run_experiment`.

    Raises:
        CalledProcessError: `convert` or an earlier stage failed.
    """
    run_experiment(name, changes, folders, ["convert"])
    per_epoch = steps_per_epoch(name, paths)
    remove(name)
    # The training loop rounds up, so subtracting half a step gives the same number of steps despite rounding errors
    return round((steps - 0.5) / per_epoch, 6)


def steps_per_epoch(experiment: str, paths: Paths) -> int:
    """Return the number of optimizer steps per epoch on the mixture of a DVC experiment.

    The steps are counted in the same way as in the training loop.
    """
    from m3diff.stages.train.batches import Schedule, read_training_samples

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / PARAMS).write_bytes(read(experiment, PARAMS))
        params = load_params(folder / PARAMS)
        copy(experiment, paths.mixture / "train", folder / "train")
        align = params.models[params.train.model].align
        samples = read_training_samples(folder, DatasetFilter(align.datasets if align else ()))
        train = params.train
        schedule = Schedule(samples, train.max_captions_per_sequence, train.seed, train.global_batch, 1, train.epochs)
        return schedule.steps_per_epoch


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean, the sample standard deviation (None for a single seed) and the list of one value per seed."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "sd": sd, "values": list(values)}


class Targets(Section):
    """Targets for scores on new scenes. The mean over the seeds is compared. See `score_of` for the names of scores."""

    profile: Path
    """Parameter file with which the new scenes are drawn, captioned and scored."""

    at_least: dict[str, dict[str, float]] = {}
    """Minimum mean by protocol and score."""

    at_most: dict[str, dict[str, float]] = {}
    """Maximum mean by protocol and score."""


def check_targets(cfg: Targets, models: Mapping[int, str], paths: Paths) -> list[dict[str, Any]]:
    """Score the models on new scenes and compare the means over the seeds with the targets.

    Args:
        models: a mapping from each seed to the name of the DVC experiment that trained the model.

    Returns:
        A row for each target: the mean, standard deviation and values over the seeds, and whether the mean reaches the
        target.

    Raises:
        CalledProcessError: a stage failed.
        ParamsError: a score does not exist or was not computed.
    """
    make_scenes(cfg.profile)
    scores = [caption(cfg.profile, seed, experiment, paths) for seed, experiment in models.items()]
    return list(compare(cfg, scores))


def make_scenes(profile: Path) -> None:
    """Draw the new scenes and run the stages ingest, validate and convert on them."""
    for name in load_params(profile).synthesize:
        run_stage("new scenes", profile, "synthesize", name)
        run_stage("new scenes", profile, "ingest", name)
    for stage in ("validate", "convert"):
        run_stage("new scenes", profile, stage)


def caption(profile: Path, seed: int, experiment: str, paths: Paths) -> dict[str, Any]:
    """Caption the new scenes with the model of one seed. Return the scores by protocol, as in metrics.json."""
    folder = load_params(profile).paths.mixture.parent / str(seed)
    copy(experiment, paths.model / "checkpoint", folder / "model" / "checkpoint")
    file = write_params(profile, folder, seed)
    for stage in ("predict", "evaluate"):
        run_stage(f"seed {seed}", file, stage)
    scores_by_protocol: dict[str, Any] = json.loads((folder / "report" / "metrics.json").read_text())["protocols"]
    return scores_by_protocol


def write_params(profile: Path, folder: Path, seed: int) -> Path:
    """Write a parameter file for captioning with the model in `folder`, and return its path.

    All outputs go to `folder`.
    """
    values = complete_values(profile)
    values["train"]["seed"] = seed
    values["paths"] |= {name: str(folder / name) for name in ("model", "predictions", "report")}
    values["compute"]["scratch"] = str(folder / "scratch")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return folder / "params.yaml"


def run_stage(title: str, file: Path, *stage: str) -> None:
    """Print the name of a stage and run it with a parameter file."""
    print(f"{title}: {' '.join(stage)}", flush=True)
    subprocess.run([sys.executable, "-m", "m3diff", "--params", str(file), *stage], check=True)


def compare(cfg: Targets, runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Compare the mean scores over the seeds with the targets, and yield a row for each target.

    Args:
        runs: for each seed, the scores by protocol.
    """
    for bound, targets in (("at_least", cfg.at_least), ("at_most", cfg.at_most)):
        for protocol, scores in targets.items():
            for score, target in scores.items():
                summary = over_seeds([score_of(run[protocol], score) for run in runs])
                is_reached = summary["mean"] >= target if bound == "at_least" else summary["mean"] <= target
                yield {"protocol": protocol, "score": score, bound: target, **summary, "reached": is_reached}


def score_of(scores: Mapping[str, Any], name: str) -> float:
    """Return the score with this name.

    Args:
        scores: all scores of a protocol.
        name: the name of a score, `by_type/*/<score>` for the lowest value of a score over the change types, or
            `<score>/<score>` for the ratio of two scores.

    Raises:
        ParamsError: no score has this name, or the score was not computed.
    """
    if name.startswith("by_type/*/"):
        type_score = name.removeprefix("by_type/*/")
        values = [row[type_score] for row in scores["by_type"].values() if row.get(type_score) is not None]
        if not values:
            raise ParamsError("experiments.no_type_has_score", key=name)
        return float(min(values))
    numerator, _, denominator = name.partition("/")
    for score in filter(None, (numerator, denominator)):
        if scores.get(score) is None:
            cause = scores.get("absent", {}).get(score)
            if cause is None:
                raise ParamsError("experiments.unknown_score", key=score)
            raise ParamsError("experiments.absent_score", key=score, cause=cause)
    return float(scores[numerator] / scores[denominator] if denominator else scores[numerator])

"""Runs of an experiment: `dvc exp run` in a folder of its own, what its files say, and the scores of its models on new
scenes, which nothing was tuned on, next to their targets.

A stage that ran before with the same data, parameters and code is restored from DVC's cache.
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

from m3diff.settings.load import load_params, resolve
from m3diff.settings.section import ParamsError, Section
from m3diff.settings.tree import Paths
from m3diff.stages.train.job import DatasetFilter

PARAMS = Path("params.yaml")


def run(name: str, changes: Mapping[str, Any], folders: Sequence[Path] = (), targets: Sequence[str] = ()) -> None:
    """Run the pipeline with these changes of params.yaml; an experiment of this name is replaced.

    Args:
        changes: values by their keys, `{"train.seed": 3}`; a plus before a key adds it.
        folders: those of this checkout that git ignores and the experiment reads.
        targets: stages that are run, with what they need; none: all.

    Raises:
        CalledProcessError: it failed.
    """
    settings = [setting(key, value) for key, value in changes.items()]
    print(f"dvc exp run --name {name} {' '.join([*settings, *targets])}", flush=True)
    chosen = [part for each in settings for part in ("-S", each)]
    copied = [part for folder in folders for part in ("--copy-paths", str(folder))]
    remove(name)
    dvc("exp", "run", "--temp", "--name", name, *copied, *chosen, *targets)


def remove(name: str) -> None:
    """Forget the experiment where there is one; its stages stay in the run cache."""
    dvc("exp", "remove", "--quiet", name, check=False)


def setting(key: str, value: Any) -> str:
    """A change of params.yaml as `dvc exp run -S` takes it; a text is written as it is."""
    return f"{key}={value if isinstance(value, str) else in_hydra(value)}"


def in_hydra(value: Any) -> str:
    """A value in the grammar of Hydra's overrides: JSON, but with unquoted keys."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {in_hydra(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_hydra, value))}]"
    return json.dumps(value, ensure_ascii=False)


def dvc(*arguments: str, check: bool = True) -> None:
    out = None if check else subprocess.DEVNULL
    subprocess.run([sys.executable, "-m", "dvc", *arguments], check=check, stdout=out, stderr=out)


def read(experiment: str, path: Path) -> bytes:
    """A file of the experiment, whether git or DVC holds it."""
    from dvc.api import DVCFileSystem

    with DVCFileSystem(rev=experiment).open(path.as_posix(), "rb") as file:
        return file.read()


def copy(experiment: str, path: Path, to: Path) -> None:
    """Copy a folder of the experiment; it replaces what is at `to`."""
    from dvc.api import DVCFileSystem

    shutil.rmtree(to, ignore_errors=True)
    to.parent.mkdir(parents=True, exist_ok=True)
    DVCFileSystem(rev=experiment).get(path.as_posix(), str(to), recursive=True)


class Budget(NamedTuple):
    """Amounts that a run trained on; 0 for the alignment where it has none."""

    pairs: int  # of the fine-tuning, each once
    epochs: float
    steps: int  # of the optimizer, in the fine-tuning
    captions: int  # trained on, repetitions counted
    alignment_pairs: int
    alignment_steps: int


def budget_of(experiment: str, paths: Paths) -> Budget:
    """From the parameters and reports of an experiment that was run."""
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


def epochs_for(steps: int, name: str, changes: Mapping[str, Any], folders: Sequence[Path], paths: Paths) -> float:
    """Epochs in which a run with these changes takes so many optimizer steps.

    An experiment of this name makes its data and is removed; the run then finds them in DVC's run cache.

    Raises:
        CalledProcessError: a stage up to convert failed.
    """
    run(name, changes, folders, ["convert"])
    per_epoch = steps_per_epoch(name, paths)
    remove(name)
    return round((steps - 0.5) / per_epoch, 6)  # the loop rounds up: half a step less is safe from rounding here


def steps_per_epoch(experiment: str, paths: Paths) -> int:
    """Steps of an epoch as the training loop counts them, on the experiment's mixture."""
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
    """Mean, sample standard deviation (None for one seed) and each seed's value of a score."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "sd": sd, "values": list(values)}


class Targets(Section):
    """Targets of scores by protocol, for the means over the seeds; `score_of` explains the names of scores."""

    profile: Path  # of the scenes
    at_least: dict[str, dict[str, float]] = {}
    at_most: dict[str, dict[str, float]] = {}


def reached(cfg: Targets, models: Mapping[int, str], paths: Paths) -> list[dict[str, Any]]:
    """For each target the mean, deviation and values over the seeds, and whether the mean reaches it.

    Args:
        models: experiment of DVC by seed.

    Raises:
        CalledProcessError: a stage failed.
        ParamsError: a score is absent.
    """
    draw(cfg.profile)
    return list(compare(cfg, [caption(cfg.profile, seed, one, paths) for seed, one in models.items()]))


def draw(profile: Path) -> None:
    """Draw, read and check the scenes."""
    for name in load_params(profile).synthesize:
        run_stage("new scenes", profile, "synthesize", name)
        run_stage("new scenes", profile, "ingest", name)
    for stage in ("validate", "convert"):
        run_stage("new scenes", profile, stage)


def caption(profile: Path, seed: int, experiment: str, paths: Paths) -> dict[str, Any]:
    """The protocols of metrics.json of this seed's model on the new scenes."""
    folder = load_params(profile).paths.mixture.parent / str(seed)
    copy(experiment, paths.model / "checkpoint", folder / "model" / "checkpoint")
    file = write_params(profile, folder, seed)
    for stage in ("predict", "evaluate"):
        run_stage(f"seed {seed}", file, stage)
    found: dict[str, Any] = json.loads((folder / "report" / "metrics.json").read_text())["protocols"]
    return found


def write_params(profile: Path, folder: Path, seed: int) -> Path:
    """The parameters that caption and score the model in this folder, all outputs in it."""
    values = resolve(profile)
    values["train"]["seed"] = seed
    values["paths"] |= {name: str(folder / name) for name in ("model", "predictions", "report")}
    values["compute"]["scratch"] = str(folder / "scratch")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return folder / "params.yaml"


def run_stage(whose: str, file: Path, *stage: str) -> None:
    print(f"{whose}: {' '.join(stage)}", flush=True)
    subprocess.run([sys.executable, "-m", "m3diff", "--params", str(file), *stage], check=True)


def compare(cfg: Targets, runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row a target; `runs` are the scores of each seed by protocol."""
    for bound, wanted in (("at_least", cfg.at_least), ("at_most", cfg.at_most)):
        for protocol, scores in wanted.items():
            for score, target in scores.items():
                found = over_seeds([score_of(run[protocol], score) for run in runs])
                hit = found["mean"] >= target if bound == "at_least" else found["mean"] <= target
                yield {"protocol": protocol, "score": score, bound: target, **found, "reached": hit}


def score_of(scores: Mapping[str, Any], name: str) -> float:
    """A score of a protocol by its name: plain, `by_type/*/<score>` (the worst type's), or a ratio of two.

    Raises:
        ParamsError: there is none of this name, or it is absent.
    """
    if name.startswith("by_type/*/"):
        own = name.removeprefix("by_type/*/")
        found = [of[own] for of in scores["by_type"].values() if of.get(own) is not None]
        if not found:
            raise ParamsError(f"{name}: no type of change has this score")
        return float(min(found))
    part, _, whole = name.partition("/")
    for score in filter(None, (part, whole)):
        if scores.get(score) is None:
            raise ParamsError(f"{score}: {scores.get('absent', {}).get(score, 'no score of evaluate has this name')}")
    return float(scores[part] / scores[whole] if whole else scores[part])

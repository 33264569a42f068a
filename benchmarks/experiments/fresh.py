"""The scores of a variant's models on new scenes, which nothing was tuned on, next to their targets."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.experiments.runs import copy, over_seeds
from m3diff.settings.load import load_params
from m3diff.settings.profiles import resolve
from m3diff.settings.section import ParamsError, Section
from m3diff.settings.tree import Paths


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
    values, _ = resolve(profile)
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

"""What the embedded recipe reaches on fresh scenes: `make targets` -> benchmarks/results/targets.json.

The models of `make seeds N=3` caption the scenes of infra/fresh.yaml, on which nothing was tuned. Each score of
infra/targets.yaml is given beside its target, also where it is missed.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from components.code import ROOT, key_of
from components.files import write_atomic
from components.params import Params, ParamsError, load_params
from components.profiles import resolve
from components.section import Section
from infra.seeds import MODELS, over_seeds

TARGETS = Path(__file__).with_suffix(".yaml")
RESULTS = Path("benchmarks/results/targets.json")
STAGES = ("synthesize", "ingest", "validate", "convert")  # that make the scenes and their samples


class Targets(Section):
    """The file of targets; scores by protocol."""

    profile: Path
    at_least: dict[str, dict[str, float]]
    at_most: dict[str, dict[str, float]]


def main(file: Path = TARGETS, out: Path = RESULTS) -> int:
    try:
        targets = Targets.model_validate(yaml.safe_load(file.read_text()))
        models = trained_models(MODELS)
        draw(targets.profile)
        scored = {seed: caption(targets.profile, seed, model) for seed, model in models.items()}
        rows = list(compare(targets, list(scored.values())))
    except (ParamsError, OSError) as error:
        print(f"make targets: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"make targets: `{' '.join(error.cmd[1:])}` ended with {error.returncode}", file=sys.stderr)
        return error.returncode
    print("\n".join(table(rows, list(scored))))
    facts = {"command": "make targets", "seeds": list(scored), "scores": rows}
    write_atomic(out, json.dumps(facts, indent=1) + "\n")
    print(f"written to {out}")
    return 0


def trained_models(folder: Path) -> dict[int, Path]:
    """Where `make seeds` left its models, by seed.

    Raises:
        FileNotFoundError: it left none.
    """
    found = {int(each.parent.name): each for each in sorted(folder.glob("*/model"))}
    if not found:
        raise FileNotFoundError(f"{folder}: no trained model; run `make seeds N=3` first")
    return found


def draw(profile: Path) -> None:
    """Draw, read and check the scenes, where this code has not done it yet with these parameters."""
    params = load_params(profile)
    key, drawn = drawing_key(params), params.paths.mixture.parent / "drawn.txt"
    if drawn.is_file() and drawn.read_text() == key:
        return
    drawn.unlink(missing_ok=True)
    for name in params.synthesize:
        run_stage("fresh scenes", profile, "synthesize", name)
        run_stage("fresh scenes", profile, "ingest", name)
    for stage in ("validate", "convert"):
        run_stage("fresh scenes", profile, stage)
    write_atomic(drawn, key)


def drawing_key(params: Params) -> str:
    """Names what decides the scenes and the samples made of them: parameters and code."""
    sections = {"synthesize", "ingest", "validate_", "convert", "paths"}
    facts = params.model_dump(mode="json", include=sections)
    return " ".join(key_of(facts, ROOT / "components" / stage / "stage.py") for stage in STAGES)


def caption(profile: Path, seed: int, model: Path) -> dict[str, Any]:
    """The protocols of metrics.json of this seed's model on the fresh scenes."""
    folder = load_params(profile).paths.mixture.parent / str(seed)
    file = write_params(profile, folder, seed, model)
    for stage in ("predict", "evaluate"):
        run_stage(f"seed {seed}", file, stage)
    found: dict[str, Any] = json.loads((folder / "report" / "metrics.json").read_text())["protocols"]
    return found


def write_params(source: Path, folder: Path, seed: int, model: Path) -> Path:
    """The parameters by which a model of a seed is captioned and scored, whole: what comes of it goes to `folder`."""
    values, _ = resolve(source)
    values["train"]["seed"] = seed
    values["paths"] |= {name: str(folder / name) for name in ("predictions", "report")} | {"model": str(model)}
    values["compute"]["scratch"] = str(folder / "scratch")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return folder / "params.yaml"


def run_stage(whose: str, file: Path, *stage: str) -> None:
    """Run a stage, and its dataset where it has one, with a file of parameters; `whose` is said before."""
    print(f"{whose}: {' '.join(stage)}", flush=True)
    subprocess.run([sys.executable, "-m", "components", "--params", str(file), *stage], check=True)


def compare(targets: Targets, runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row a target: protocol, score, its target, mean, standard deviation and values over the seeds, and whether the
    mean reaches it."""
    for bound, wanted in (("at_least", targets.at_least), ("at_most", targets.at_most)):
        for protocol, scores in wanted.items():
            for score, target in scores.items():
                found = over_seeds([value_of(run[protocol], score) for run in runs])
                reached = found["mean"] >= target if bound == "at_least" else found["mean"] <= target
                yield {"protocol": protocol, "score": score, bound: target, **found, "reached": reached}


def value_of(scores: Mapping[str, Any], name: str) -> float:
    """A score of a protocol by its name: plain, `by_type/*/<score>` the worst of the types, or a ratio of two.

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


def table(rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> Iterator[str]:
    yield f"fresh scenes, {len(seeds)} seeds: {', '.join(map(str, seeds))}"
    for row in rows:
        bound = "at_least" if "at_least" in row else "at_most"
        spread = "" if row["sd"] is None else f" (sd {row['sd']:.3f})"
        yield (
            f"  {row['protocol']:<18} {row['score']:<26} {row['mean']:.3f}{spread}  "
            f"{bound.replace('_', ' ')} {row[bound]:.2f}: {'reached' if row['reached'] else 'not reached'}"
        )


if __name__ == "__main__":
    sys.exit(main())

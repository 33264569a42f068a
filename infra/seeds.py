"""The same training from several seeds: `make seeds N=3` -> benchmarks/results/seeds.json.

An interval over pairs says what other test pairs would change; this says what another seed does. Each seed is an
experiment of DVC in a folder of its own, so data/ stays as it is, and a seed that was trained before is restored. The
models are copied to runs/seeds/<seed>, for `make targets`.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from components.files import write_atomic
from components.params import ParamsError, Paths, load_params
from infra.experiments import copy, read, run_experiment

COUNTS = ("pairs", "published_pairs")
RESULTS = Path("benchmarks/results/seeds.json")
PARAMS, MODELS = Path("params.yaml"), Path("runs/seeds")
PACKAGES = ("torch", "transformers", "peft", "numpy")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("count", type=int, help="seeds: that of the parameters and those that follow it; 2 or more")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the scores of all")
    args = parser.parse_args(argv)
    if args.count < 2:
        parser.error(f"count: of {args.count} seed there is no standard deviation; give 2 or more")
    try:
        params = load_params(PARAMS)
        seeds = list(range(params.train.seed, params.train.seed + args.count))
        found = {seed: run_seed(seed, params.paths) for seed in seeds}
    except (ParamsError, OSError) as error:
        print(f"make seeds: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"make seeds: `{' '.join(error.cmd)}` ended with {error.returncode}", file=sys.stderr)
        return error.returncode
    scores = spread(found)
    print("\n".join(table(scores, seeds)))
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": f"make seeds N={args.count}",
        "model": params.train.model,
        "versions": {"python": sys.version.split()[0], **{package: version(package) for package in PACKAGES}},
        "seeds": seeds,
    }
    write_atomic(args.out, json.dumps(facts | {"protocols": scores}, indent=1) + "\n")
    print(f"written to {args.out}")
    return 0


def run_seed(seed: int, paths: Paths) -> dict[str, Any]:
    """Train, caption and score with this seed, and keep its model; the protocols of its metrics.json.

    Raises:
        CalledProcessError: the experiment failed.
    """
    name = f"seed-{seed}"
    run_experiment(name, {"train.seed": seed})
    copy(name, paths.model / "checkpoint", MODELS / str(seed) / "model" / "checkpoint")
    found: dict[str, Any] = json.loads(read(name, paths.report / "metrics.json"))["protocols"]
    return found


def spread(found: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Mean, sample standard deviation and each seed's value, by protocol and score; those that every seed has."""
    runs = list(found.values())
    return {
        protocol: {
            "pairs": whole["pairs"],
            "scores": {
                score: over_seeds(values)
                for score in whole
                if score not in COUNTS and (values := known([run[protocol].get(score) for run in runs]))
            },
        }
        for protocol, whole in runs[0].items()
    }


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample standard deviation (None of one seed) and each seed's value of a score."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "sd": sd, "values": list(values)}


def known(values: Sequence[Any]) -> list[float]:
    """The values where all are numbers, else none."""
    return [float(value) for value in values] if all(isinstance(value, int | float) for value in values) else []


def table(scores: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> Iterator[str]:
    yield f"{len(seeds)} seeds: {', '.join(map(str, seeds))}"
    for protocol, of in scores.items():
        yield f"{protocol}, {of['pairs']} pairs: mean, standard deviation, each seed's"
        for score, found in of["scores"].items():
            each = "  ".join(f"{value:.4f}" for value in found["values"])
            yield f"  {score:<24} {found['mean']:8.4f}  {found['sd']:7.4f}   {each}"


if __name__ == "__main__":
    sys.exit(main())

"""The same training from several seeds: `make seeds N=3` -> benchmarks/results/seeds.json.

An interval over pairs says what other test pairs would change; this says what another seed does. Every run takes the
mixture that lies in data/ and writes into a folder of its own, runs/seeds/<seed>, so data/ stays as it is. A seed that
was trained on the same samples with the same parameters and code is not trained again.
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

import yaml

from components.files import sha256_of_folder, write_atomic
from components.params import ParamsError, load_params
from components.profiles import resolve
from components.train.stage import run_key

COUNTS = ("pairs", "published_pairs")
RESULTS = Path("benchmarks/results/seeds.json")
PACKAGES = ("torch", "transformers", "peft", "numpy")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("count", type=int, help="seeds: that of the parameters and those that follow it; 2 or more")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="parameter file or profile")
    parser.add_argument("--folder", type=Path, default=Path("runs/seeds"), help="where the runs are written")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the scores of all")
    args = parser.parse_args(argv)
    if args.count < 2:
        parser.error(f"count: of {args.count} seed there is no standard deviation; give 2 or more")
    try:
        params = load_params(args.params)
        seeds = list(range(params.train.seed, params.train.seed + args.count))
        found = {seed: run_seed(args.params, args.folder / str(seed), seed) for seed in seeds}
    except (ParamsError, OSError) as error:
        print(f"make seeds: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"make seeds: `{' '.join(error.cmd[1:])}` ended with {error.returncode}", file=sys.stderr)
        return error.returncode
    scores = spread(found)
    print("\n".join(table(scores, seeds)))
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": f"make seeds N={args.count}",
        "params": str(args.params),
        "model": params.train.model,
        "samples_sha256": sha256_of_folder(params.paths.mixture / "train"),
        "versions": {"python": sys.version.split()[0], **{package: version(package) for package in PACKAGES}},
        "seeds": seeds,
    }
    write_atomic(args.out, json.dumps(facts | {"protocols": scores}, indent=1) + "\n")
    print(f"written to {args.out}")
    return 0


def run_seed(source: Path, folder: Path, seed: int) -> dict[str, Any]:
    """Train, caption and score with this seed; the protocols of its metrics.json.

    Raises:
        CalledProcessError: a stage failed.
    """
    file = write_params(source, folder, seed)
    params = load_params(file)
    paths, trained = params.paths, folder / "trained.txt"
    key = run_key(params.train, params.models[params.train.model], paths.mixture, sha256_of_folder(params.train.base))
    if not (trained.is_file() and trained.read_text() == key):
        trained.unlink(missing_ok=True)
        run_stage(f"seed {seed}", file, "train")
        trained.write_text(key)
    run_stage(f"seed {seed}", file, "predict")
    run_stage(f"seed {seed}", file, "evaluate")
    return json.loads((paths.report / "metrics.json").read_text())["protocols"]


def run_stage(whose: str, file: Path, *stage: str) -> None:
    """Run a stage, and its dataset where it has one, with a file of parameters; `whose` is said before."""
    print(f"{whose}: {' '.join(stage)}", flush=True)
    subprocess.run([sys.executable, "-m", "components", "--params", str(file), *stage], check=True)


def write_params(source: Path, folder: Path, seed: int, model: Path | None = None) -> Path:
    """The parameters of one seed's run, whole: what train, predict and evaluate write goes to `folder`; with `model`,
    that one is captioned and scored."""
    values, _ = resolve(source)
    values["train"]["seed"] = seed
    values["paths"] |= {name: str(folder / name) for name in ("model", "predictions", "report")}
    if model is not None:
        values["paths"]["model"] = str(model)
    values["compute"]["scratch"] = str(folder / "scratch")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return folder / "params.yaml"


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

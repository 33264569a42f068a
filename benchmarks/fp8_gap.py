"""What FP8 does to the loss: the loop's own training of the embedded base on MiniChange's references, in fp32, bf16 and
bf16 with train.fp8, from the same weights over the same batches. On a CPU FP8 is computed by the same operator.

`python benchmarks/fp8_gap.py` -> benchmarks/results/fp8_gap.json. Says nothing of speed, and a base of a million
parameters says little of a 7B model: `--base` names another.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.own import own_step  # noqa: E402
from benchmarks.sides import embedded_job, write_mixture  # noqa: E402
from components.models.device import Device  # noqa: E402
from components.train.accelerator import choose_accelerator, only_worker  # noqa: E402
from components.train.job import Job  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "fp8_gap.json"
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bf16 + fp8": {"precision": "bf16", "fp8": True},
}
LAST = 20


def losses(job: Job, steps: int) -> list[float]:
    """The loss of each of the run's first steps, at constant rates."""
    job.run_dir.mkdir(parents=True, exist_ok=True)
    with only_worker(Device(job.compute.gpu, job.cfg.precision).backend):
        step = own_step(job)
        return [step() for _ in range(steps)]


def changed(job: Job, seed: int, gpu: bool, precision: str, fp8: bool = False) -> Job:
    """The job with another seed, which decides the order and the new module's weights, and in another precision."""
    cfg = job.cfg.model_copy(update={"seed": seed, "precision": precision, "fp8": fp8})
    return replace(job, cfg=cfg, compute=job.compute.model_copy(update={"gpu": gpu}))


def gap(found: list[float], wanted: list[float]) -> float:
    """The relative difference of two runs' means."""
    return statistics.mean(found) / statistics.mean(wanted) - 1


def measured(job: Job, steps: int, seeds: int, gpu: bool) -> dict[str, Any]:
    """Every way's losses by seed and their gaps to bf16's: at the first step, over all steps and over the last ones;
    printed."""
    runs = {name: [losses(changed(job, n, gpu, **way), steps) for n in range(seeds)] for name, way in WAYS.items()}
    parts = {"first step": slice(1), "all steps": slice(None), f"last {LAST}": slice(-LAST, None)}
    rows = {
        name: {
            "losses": got,
            "to_bf16": {
                part: [gap(one[at], other[at]) for one, other in zip(got, runs["bf16"], strict=True)]
                for part, at in parts.items()
            },
        }
        for name, got in runs.items()
    }
    print(f"{seeds} seeds, {steps} steps: mean loss, and its relative difference to bf16 of each seed")
    for part, at in parts.items():
        for name, row in rows.items():
            loss = statistics.mean(statistics.mean(one[at]) for one in row["losses"])
            print(f"{part:<12} {name:<12} {loss:>8.4f}  {' '.join(f'{one:>+7.2%}' for one in row['to_bf16'][part])}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=32, help="of the mixture, five captions each")
    parser.add_argument("--batch", type=int, default=4, help="pairs a step")
    parser.add_argument("--base", type=Path, help="folder of the base; the embedded one where none is named")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    choose_accelerator(args.device == "cuda")
    with tempfile.TemporaryDirectory() as folder:
        mixture = write_mixture(Path(folder), args.pairs, side=72)
        job = embedded_job(mixture, None, (args.batch, args.batch), torch.get_num_threads())
        if args.base:
            job = replace(job, cfg=job.cfg.model_copy(update={"base": args.base}))
        rows = measured(job, args.steps, args.seeds, args.device == "cuda")
    command = f"python benchmarks/fp8_gap.py {' '.join(sys.argv[1:])}".strip()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"command": command} | rows, indent=2) + "\n")
    print(f"-> {args.out}")


if __name__ == "__main__":
    main()

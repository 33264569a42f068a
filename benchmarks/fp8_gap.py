"""What FP8 does to the loss: the loop's own training of the embedded base on MiniChange's references, in fp32, bf16 and
bf16 with compute.fp8, from the same weights over the same batches. On a CPU FP8 is computed by the same operator.

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
    with only_worker(job.run_dir, Device(job.compute.gpu, job.cfg.precision).backend):
        step = own_step(job)
        return [step() for _ in range(steps)]


def changed(job: Job, gpu: bool, precision: str, fp8: bool = False) -> Job:
    """The job in another precision."""
    compute = job.compute.model_copy(update={"gpu": gpu, "fp8": fp8})
    return replace(job, cfg=job.cfg.model_copy(update={"precision": precision}), compute=compute)


def gaps(found: list[float], wanted: list[float]) -> dict[str, float]:
    """Relative differences of two runs' losses: at the first step, of the means over the last ones, and the largest of
    any step's."""
    start, *_ = each = [loss / want - 1 for loss, want in zip(found, wanted, strict=True)]
    end = statistics.mean(found[-LAST:]) / statistics.mean(wanted[-LAST:]) - 1
    return {"start": start, "end": end, "largest": max(each, key=abs)}


def measured(job: Job, steps: int, gpu: bool) -> dict[str, Any]:
    """Every way's losses and, against bf16, its gaps; printed."""
    found = {name: losses(changed(job, gpu, **way), steps) for name, way in WAYS.items()}
    rows = {name: {"losses": got, "to_bf16": gaps(got, found["bf16"])} for name, got in found.items()}
    print(f"{'':<12} {'first loss':>10} {f'last {LAST}':>10}   to bf16: {'start':>8} {'end':>8} {'largest':>8}")
    for name, row in rows.items():
        gap = " ".join(f"{row['to_bf16'][key]:>+8.2%}" for key in ("start", "end", "largest"))
        print(f"{name:<12} {row['losses'][0]:>10.4f} {statistics.mean(row['losses'][-LAST:]):>10.4f} {'':>11}{gap}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=150)
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
        rows = measured(job, args.steps, args.device == "cuda")
    command = f"python benchmarks/fp8_gap.py {' '.join(sys.argv[1:])}".strip()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"command": command, "steps": args.steps} | rows, indent=2) + "\n")
    print(f"-> {args.out}")


if __name__ == "__main__":
    main()

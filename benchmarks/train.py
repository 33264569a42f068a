"""Training speed, `make bench-train` -> benchmarks/results/train.json.

On a CPU: the project's step beside transformers' Trainer with peft (benchmarks/sides.py) on the embedded shapes, round
by round, then what each lever brings. On a GPU: what each lever brings at 7B shapes with random weights, beside what
the plan counts. The same lines run in both places: `--device cpu --shapes tiny --precision bf16` takes all that a GPU
would take. Each row is a line of JSON beside the result as soon as it is measured.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import machine, write  # noqa: E402
from m3diff.models.device import environment  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "train.json"


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """The project's step beside transformers' Trainer, on the embedded shapes; printed."""
    from benchmarks.sides import Sizes, compare, embedded_sides, print_comparison

    sizes = Sizes(pairs=args.pairs, rounds=args.repeats or 5, compared_steps=args.steps, round_s=args.round_s)
    with tempfile.TemporaryDirectory() as folder:
        figures = compare(embedded_sides(Path(folder), sizes, args.threads), sizes)
    print_comparison(figures)
    return figures


def ablation(args: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    """The figures of each lever; printed."""
    from benchmarks.levers import chosen_variants, measured_levers

    gpu, lines = args.device == "cuda", args.out.with_suffix(".jsonl")
    try:
        variants = chosen_variants(args.rows, gpu, args.precision)
    except ValueError as error:
        sys.exit(f"--rows: {error}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines.write_text("")

    def tell(row: dict[str, Any]) -> None:
        with lines.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(", ".join(f"{key} {value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()))

    return measured_levers(args.shapes, gpu, args.precision, args.pairs, args.repeats, facts["device"], variants, tell)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", choices=["7b", "tiny"], default="7b" if gpu else "tiny")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16" if gpu else "fp32")
    parser.add_argument("--pairs", type=int, default=16, help="of a step on the embedded shapes, five captions each")
    parser.add_argument("--repeats", type=int, help="rounds; 5 on a CPU, 2 on a GPU")
    parser.add_argument("--steps", type=int, default=10, help="whose losses are compared")
    parser.add_argument("--round-s", type=float, default=2.0, help="seconds of a round")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="these rows of the levers alone; all by default")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    os.environ.update(environment(args.device == "cuda"))  # before DeepSpeed is imported
    facts = machine(args.device)
    print(f"{facts['device']}, {args.shapes} shapes, {args.precision}; load {facts['load_before']}", flush=True)
    sides = compared(args) if args.device == "cpu" and args.precision == "fp32" and not args.rows else {}
    command = f"python benchmarks/train.py {' '.join(sys.argv[1:])}".strip()
    ratios = {name: row["captions_per_s"] / sides["peer"]["captions_per_s"] for name, row in sides.items()}
    told = {"shapes": args.shapes, "precision": args.precision, **facts, "command": command}
    result = ablation(args, facts) | sides | {"ratios": ratios} | told
    write(result, args.out)


if __name__ == "__main__":
    main()

"""Measure training speed: `make bench-train` -> benchmarks/results/train.json.

On a CPU, the benchmark compares the project's training step with transformers' Trainer and peft (benchmarks/sides.py)
at the embedded shapes, and then measures the speedup of each optimization. On a GPU, it measures each optimization at
7B shapes with random weights, and compares the memory with the prediction of `m3diff plan`. The same code runs on both
devices: `--device cpu --shapes tiny --precision bf16` runs everything that would run on a GPU. A row is the result for
one combination of optimizations. It is written as a line of JSON to a second file next to the result as soon as it is
measured. With `--rows`, the other rows of both files are kept if they were measured under the same conditions.
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe_machine, write_results  # noqa: E402
from m3diff.models.device import process_environment  # noqa: E402
from m3diff.runtime import prepare  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "train.json"


def compare_sides(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the speed of the project's training step with transformers' Trainer. Print and return the results."""
    from benchmarks.sides import Sizes, compare, embedded_sides, print_comparison

    sizes = Sizes(pairs=args.pairs, rounds=args.repeats or 5, compared_steps=args.steps, round_s=args.round_s)
    with tempfile.TemporaryDirectory() as folder:
        figures = compare(embedded_sides(Path(folder), sizes, args.threads), sizes)
    print_comparison(figures)
    return figures


def conditions(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """Return the conditions of the measurement, which must be the same for all rows of a file."""
    facts: dict[str, Any] = {"device": device, "shapes": args.shapes, "precision": args.precision}
    if args.shapes == "tiny":
        facts["pairs"] = args.pairs
    return facts


def check_conditions(earlier: dict[str, Any], current: dict[str, Any], file: Path) -> None:
    """Exit with an error if the earlier results in a file were measured under different conditions."""
    for name, value in current.items():
        if earlier.get(name) != value:
            sys.exit(
                f"--rows: the rows in {file} were measured with {name} {earlier.get(name)!r}, not {value!r}; write to "
                "another file (--out), or leave out --rows to measure all rows again"
            )


def read_earlier_result(args: argparse.Namespace, current: dict[str, Any]) -> dict[str, Any]:
    """Return the earlier result that `--rows` extends, or an empty dictionary if there is none."""
    if not args.rows or not args.out.is_file():
        return {}
    earlier = json.loads(args.out.read_text("utf-8"))
    check_conditions(earlier, current, args.out)
    return earlier


def read_earlier_rows(args: argparse.Namespace, current: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the earlier rows that `--rows` keeps. Incomplete lines are skipped."""
    file = args.out.with_suffix(".jsonl")
    if not args.rows or not file.is_file():
        return []
    rows = []
    for line in file.read_text("utf-8").splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    kept_rows = [row for row in rows if row["name"] not in args.rows]
    for row in kept_rows:
        check_conditions(row, current, file)
    return kept_rows


def merge_results(earlier: dict[str, Any], result: dict[str, Any], command: str) -> dict[str, Any]:
    """Return the earlier result with the new rows added, or the new result if there is no earlier one.

    A new row replaces an earlier row of the same name. Each added row records the command that measured it.
    """
    if not earlier:
        return result
    rows = [row | {"command": command} for row in result["ablation"]]
    new_rows = {row["name"]: row for row in rows}
    new_names = {*new_rows, *result["not_run"]}
    ablation = []
    for row in earlier["ablation"]:
        if row["name"] not in result["not_run"]:
            ablation.append(new_rows.pop(row["name"], row))
    ablation += new_rows.values()
    not_run = {name: reason for name, reason in earlier["not_run"].items() if name not in new_names}
    return earlier | {"ablation": ablation, "not_run": not_run | result["not_run"]}


def measure_ablation(args: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    """Measure the speedup of each optimization and return the results. Each row is printed and written immediately."""
    from benchmarks.levers import choose_variants, measure_levers

    gpu = args.device == "cuda"
    lines = args.out.with_suffix(".jsonl")
    current = conditions(args, facts["device"])
    try:
        variants = choose_variants(args.rows, gpu, args.precision)
    except ValueError as error:
        sys.exit(f"--rows: {error}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    earlier_rows = read_earlier_rows(args, current)
    lines.write_text("".join(json.dumps(row) + "\n" for row in earlier_rows))

    def report(row: dict[str, Any]) -> None:
        with lines.open("a") as file:
            file.write(json.dumps(row | current) + "\n")
        cells = [f"{key} {value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()]
        print(", ".join(cells))

    return measure_levers(args.shapes, gpu, args.precision, args.pairs, args.repeats, facts["device"], variants, report)


def main() -> None:
    """Run the comparison (only on a CPU) and the measurement of each optimization, and write the results."""
    prepare()
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", choices=["7b", "tiny"], default="7b" if gpu else "tiny")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16" if gpu else "fp32")
    parser.add_argument(
        "--pairs", type=int, default=16, help="pairs per step at embedded shapes, of five captions each"
    )
    parser.add_argument("--repeats", type=int, help="rounds; 5 on a CPU, 2 on a GPU")
    parser.add_argument("--steps", type=int, default=10, help="steps whose losses are compared")
    parser.add_argument("--round-s", type=float, default=2.0, help="seconds of a round")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="measure only these rows; default: all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    os.environ.update(process_environment(args.device == "cuda"))  # before DeepSpeed is imported
    facts = describe_machine(args.device)
    earlier = read_earlier_result(args, conditions(args, facts["device"]))
    print(f"{facts['device']}, {args.shapes} shapes, {args.precision}; load {facts['load_before']}", flush=True)
    sides = compare_sides(args) if args.device == "cpu" and args.precision == "fp32" and not args.rows else {}
    command = f"python benchmarks/train.py {' '.join(sys.argv[1:])}".strip()
    ratios = {name: row["captions_per_s"] / sides["peer"]["captions_per_s"] for name, row in sides.items()}
    circumstances = {"shapes": args.shapes, "precision": args.precision, **facts, "command": command}
    result = measure_ablation(args, facts) | sides | {"ratios": ratios} | circumstances
    write_results(merge_results(earlier, result, command), args.out)


if __name__ == "__main__":
    main()

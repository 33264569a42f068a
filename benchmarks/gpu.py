"""Run the GPU benchmarks in slices, an hour in total: `make bench-gpu BUDGET=480` -> benchmarks/results/gpu.jsonl.

A row is one measurement: a test in tests/gpu, the speedup of an optimization at 7B shapes, or a setting that matters
only on a GPU (the priority of SDPA's kernels, the growth of the memory allocator). Each row runs in a separate process
with a time limit, and its result is written as a line of JSON when the process ends. A slice takes BUDGET seconds and
continues with the rows that are missing from the file. If the end of a slice interrupts a row, the row starts again in
the next slice, unless it already had a whole slice. To measure a row again, remove its line from the file.
`--device cpu` runs the rows at a small scale.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from m3diff.models.device import process_environment  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "gpu.jsonl"
TAIL = 2000  # number of characters stored from the end of a row's output


@dataclass(frozen=True)
class Row:
    """A measurement that runs in a separate process.

    Attributes:
        command: arguments of the Python interpreter. `{out}` is replaced by the path of the result file.
        limit_s: seconds after which the process is killed.
        environment: additional environment variables.
    """

    name: str
    command: str
    limit_s: int
    environment: dict[str, str] = field(default_factory=dict)


def make_rows(device: str) -> list[Row]:
    """Return all rows, starting with those that take the least time."""
    if device == "cuda":
        options = "--device cuda --shapes 7b"
        text = (ROOT / "tests" / "gpu" / "test_gpu.py").read_text()
        tests = [f"::{name}" for name in re.findall(r"^def (test_\w+)", text, re.M)]
    else:
        options = f"--device {device} --shapes tiny --threads 1 --pairs 2"
        tests = [""]  # all tests in one row, which skips them
    rows = [Row(f"tests/gpu {test}", f"-m pytest -q -m gpu tests/gpu/test_gpu.py{test}", 100) for test in tests]

    def train_row(name: str, **variables: str) -> Row:
        title = ", ".join([name, *(f"{variable}={value}" for variable, value in variables.items())])
        command = f"benchmarks/train.py {options} --repeats 1 --rows {shlex.quote(name)} --out {{out}}"
        return Row(name=f"train: {title}", command=command, limit_s=240, environment=variables)

    rows.append(train_row("packed, flex, none"))
    rows.append(train_row("packed, flex, selective"))
    rows.append(train_row("packed, flex, none", PYTORCH_ALLOC_CONF="expandable_segments:False"))
    for is_deprioritized in ("0", "1"):
        rows.append(train_row("packed, sdpa, none", TORCH_CUDNN_SDPA_DEPRIORITIZED=is_deprioritized))
        rows.append(train_row("unpacked", TORCH_CUDNN_SDPA_DEPRIORITIZED=is_deprioritized))
    rows.append(train_row("unpacked, full"))
    return rows


def run_missing_rows(rows: list[Row], results: Path, budget_s: float, device: str) -> int:
    """Run the rows that are missing from `results` for at most `budget_s` seconds. Return how many are missing."""
    end = time.monotonic() + budget_s
    results.parent.mkdir(parents=True, exist_ok=True)
    finished = finished_rows(results)
    missing_rows = [row for row in rows if row.name not in finished]
    for number, row in enumerate(missing_rows):
        remaining_s = end - time.monotonic()
        # The first row of a slice is recorded even if it is cut off. Otherwise, a row that takes longer than a slice
        # would be started again in every slice
        had_whole_slice = number == 0
        result = None if remaining_s < 1 else run_row(row, min(row.limit_s, remaining_s), device)
        is_cut_off = result is not None and result["rc"] == signal.SIGKILL and remaining_s < row.limit_s
        if result is None or (is_cut_off and not had_whole_slice):
            missing_count = len(missing_rows) - number
            print(f"{missing_count} of {len(rows)} rows are missing: run again for the next slice", flush=True)
            return missing_count
        with results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{row.name}: exit {result['rc']} after {result['seconds']} s", flush=True)
    print(f"-> {results}")
    return 0


def finished_rows(results: Path) -> set[str]:
    """Return the names of the rows in `results`. If the last line of the file is incomplete, remove it."""
    lines = results.read_text().splitlines(keepends=True) if results.exists() else []
    complete_lines = [line for line in lines if line.endswith("\n")]
    if len(complete_lines) < len(lines):
        results.write_text("".join(complete_lines))
    return {json.loads(line)["name"] for line in complete_lines}


def run_row(row: Row, limit_s: float, device: str) -> dict[str, Any]:
    """Run a row in a new process group, and kill the group if the row exceeds the time limit.

    Returns:
        A dictionary with the keys `name`, `rc` (the exit status, or 9 if the time limit was exceeded), `seconds`,
        `figures` and `rows` (the content of the two result files), `printed` (the end of the output) and `environment`
        (the row's additional variables).
    """
    variables = os.environ | process_environment(device == "cuda") | {"PYTHONPATH": str(ROOT)} | row.environment
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "printed").open("w+") as printed:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-Wignore", *(part.format(out=out) for part in shlex.split(row.command))]
        start = time.monotonic()
        process = subprocess.Popen(
            command, env=variables, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed.seek(0)
        rows_file = out.with_suffix(".jsonl")
        rows = [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
        return {
            "name": row.name,
            "rc": abs(process.returncode),
            "seconds": round(time.monotonic() - start, 1),
            "figures": json.loads(out.read_text()) if out.exists() else None,
            "rows": rows,
            "printed": printed.read()[-TAIL:],
            "environment": row.environment,
        }


def main() -> None:
    """Run the selected rows that are not in the results yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=480, help="seconds of this slice")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", default="", help="regular expression of the rows to run; all by default")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = [row for row in make_rows(args.device) if re.search(args.rows, row.name)]
    run_missing_rows(rows, args.out, args.budget, args.device)


if __name__ == "__main__":
    main()

"""The first hour on a GPU, `make bench-gpu BUDGET=480` -> benchmarks/results/gpu.jsonl.

A ladder of rows in order: tests/gpu by name; what the levers bring at 7B shapes, and what only a GPU can decide: the
order of SDPA's kernels, how the allocator grows. Each row is a process of its own with a limit of its own, and a line
of JSON as soon as it ends. A slice of BUDGET seconds goes on behind the last line. What the slice's end cuts off is
begun again by the next, unless it had the whole slice. Remove a line, and its row is taken again. `--device cpu`
climbs in small.
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

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from m3diff.models.device import environment  # noqa: E402

RESULTS = HERE / "results" / "gpu.jsonl"
TAIL = 2000  # characters of what a row printed last


@dataclass(frozen=True)
class Row:
    """A process of the series: its command behind the interpreter, {out} the file for its figures; its seconds."""

    name: str
    command: str
    limit_s: int
    environment: dict[str, str] = field(default_factory=dict)


def ladder(device: str) -> list[Row]:
    """The rows, the cheapest answers first."""
    small = f" --device {device} --shapes {'7b' if device == 'cuda' else 'tiny'}"
    threads = "" if device == "cuda" else " --threads 1 --pairs 2"
    tests = (HERE.parent / "tests" / "gpu" / "test_gpu.py").read_text()
    names = [f"::{name}" for name in re.findall(r"^def (test_\w+)", tests, re.M)] if device == "cuda" else [""]
    rows = [Row(f"tests/gpu {name}", f"-m pytest -q -m gpu tests/gpu/test_gpu.py{name}", 100) for name in names]

    def lever(name: str, **there: str) -> Row:
        told = ", ".join([name, *(f"{variable}={value}" for variable, value in there.items())])
        command = f"benchmarks/train.py{small}{threads} --repeats 1 --rows {shlex.quote(name)} --out {{out}}"
        return Row(f"train: {told}", command, 240, there)

    rows += [lever(f"packed, flex, {how}") for how in ("none", "selective")]
    rows += [lever("packed, flex, none", PYTORCH_ALLOC_CONF="expandable_segments:False")]
    for first in ("0", "1"):
        rows += [lever(name, TORCH_CUDNN_SDPA_DEPRIORITIZED=first) for name in ("packed, sdpa, none", "unpacked")]
    rows += [lever("unpacked, full")]
    return rows


def climb(rows: list[Row], results: Path, budget_s: float, device: str) -> int:
    """Take the rows that `results` lacks until the budget is used up; how many are left."""
    ends = time.monotonic() + budget_s
    results.parent.mkdir(parents=True, exist_ok=True)
    known = done(results)
    todo = [row for row in rows if row.name not in known]
    for number, row in enumerate(todo):
        left = ends - time.monotonic()
        whole = number == 0  # a row that no slice has time for would be begun for ever
        found = None if left < 1 else taken(row, min(row.limit_s, left), device)
        if found is None or (found["rc"] == signal.SIGKILL and left < row.limit_s and not whole):
            print(f"{len(todo) - number} of {len(rows)} rows are left: run again for the next slice", flush=True)
            return len(todo) - number
        with results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{row.name}: exit {found['rc']} after {found['seconds']} s", flush=True)
    print(f"-> {results}")
    return 0


def done(results: Path) -> set[str]:
    """The names of the rows that stand there; a line that a kill has torn is cut off."""
    lines = results.read_text().splitlines(keepends=True) if results.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < len(lines):
        results.write_text("".join(whole))
    return {json.loads(line)["name"] for line in whole}


def taken(row: Row, limit_s: float, device: str) -> dict[str, Any]:
    """The result of a row: exit status (9 where its time was up), seconds, the figures that it wrote, what it printed
    last. Nothing that it started outlives it."""
    there = os.environ | environment(device == "cuda") | {"PYTHONPATH": str(HERE.parent)} | row.environment
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "printed").open("w+") as printed:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-Wignore", *(part.format(out=out) for part in shlex.split(row.command))]
        started = time.monotonic()
        process = subprocess.Popen(
            command, env=there, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True, cwd=HERE.parent
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
        lines = out.with_suffix(".jsonl")
        return {
            "name": row.name,
            "rc": abs(process.returncode),
            "seconds": round(time.monotonic() - started, 1),
            "figures": json.loads(out.read_text()) if out.exists() else None,
            "rows": [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else [],
            "printed": printed.read()[-TAIL:],
            "environment": row.environment,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=480, help="seconds of this slice")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", default="", help="those whose name has this regular expression; all by default")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = [row for row in ladder(args.device) if re.search(args.rows, row.name)]
    climb(rows, args.out, args.budget, args.device)


if __name__ == "__main__":
    main()

"""Validate and convert at 896k samples, on the real path: `make bench-data` -> benchmarks/results/data.json.

For each size a mixture is written (benchmarks/synthetic_mixture.py) and ingested. Then one fresh process runs the
command line's `validate` and `convert` (cold: interpreter, imports and all), and again (warm). The outputs of every run
must be the same bytes. Peak memory is that of the process and its workers together.
"""

import argparse
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import yaml

RESULTS = Path(__file__).parent / "results" / "data.json"
SIZES = (100_000, 300_000, 896_000)
WARM_RUNS = 3
TARGETS = {"cold_s": 15, "warm_s": 6, "peak_rss_mb": 1500}


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from benchmarks.machine import machine, write
    from benchmarks.synthetic_mixture import write_synthetic_mixture

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="samples of each mixture")
    parser.add_argument("--runs", type=int, default=WARM_RUNS, help="warm ones of each size")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    facts = machine()
    print(f"{facts['device']}; load before the start {facts['load_before']:.1f}")
    print(f"{'samples':>9} {'pairs':>8} {'cold s':>7} {'warm s':>7} {'peak MB':>8} {'warm us/sample':>15}")
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            params = write_synthetic_mixture(Path(folder) / str(size), size)
            measured.append(measure(params, args.runs))
            one = measured[-1]
            each = 1e6 * one["warm_s"] / one["rows"]
            print(
                f"{one['rows']:9,} {one['pairs']:8,} {one['cold_s']:7.1f} {one['warm_s']:7.1f} "
                f"{one['peak_rss_mb']:8,.0f} {each:15.2f}",
                flush=True,
            )
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    write({"date": date, **facts, **measured[-1], "sizes": measured, "targets": TARGETS}, args.out)


def measure(params: Path, runs: int) -> dict[str, Any]:
    """Cold and warm seconds of validate + convert on one mixture, its rows, and the peak of memory in MB."""
    from m3diff.__main__ import main as m3diff

    for name in yaml.safe_load(params.read_text("utf-8"))["ingest"]["datasets"]:
        assert m3diff(["--params", str(params), "ingest", name]) == 0
    found = measured_run(params, runs)
    assert len(set(found["digests"])) == 1, "the same input gave different bytes"
    report = json.loads((params.parent / "04_mixture/report.json").read_text("utf-8"))
    return {
        "rows": report["rows_out"],
        "pairs": report["rows_in"],
        "cold_s": round(found["cold_s"], 2),
        "warm_s": round(statistics.median(found["warm_s"]), 2),
        "warm_validate_s": round(statistics.median(found["validate_s"]), 2),
        "warm_runs_s": [round(seconds, 2) for seconds in found["warm_s"]],
        "peak_rss_mb": round(max(found["peak_rss_mb"], found["own_peak_mb"])),
    }


def measured_run(params: Path, runs: int) -> dict[str, Any]:
    """The figures of `run` in a fresh process, and the peak of memory of it and its workers."""
    peak, done = [0.0], threading.Event()
    started = time.time()
    command = [sys.executable, __file__, "run", str(params), str(started), str(runs)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    watch = threading.Thread(target=_watch, args=(process.pid, peak, done))
    watch.start()
    output, _ = process.communicate()
    done.set()
    watch.join()
    assert process.returncode == 0, f"failed: {' '.join(command)}"
    return json.loads(output.splitlines()[-1]) | {"peak_rss_mb": peak[0] / 1e6}


def _watch(pid: int, peak: list[float], done: threading.Event) -> None:
    """Ten times a second the memory of the process and its descendants, in bytes; shared pages count for each of them.
    A look takes a millisecond from what is measured; `run` adds the process's own exact peak."""
    process = psutil.Process(pid)
    while not done.wait(0.1):
        try:
            family = [process, *process.children(recursive=True)]
            peak[0] = max(peak[0], sum(one.memory_info().rss for one in family))
        except psutil.NoSuchProcess:
            continue


def run(params: Path, started: float, runs: str) -> dict[str, Any]:
    """In a fresh process: the command line's validate and convert, once cold and then warm."""
    from m3diff.__main__ import main as m3diff

    def both() -> float:
        assert m3diff(["--params", str(params), "validate"]) == 0
        between = time.time()
        assert m3diff(["--params", str(params), "convert"]) == 0
        return between

    both()
    cold = time.time() - started
    digests, warm, validate = [_digest(params.parent)], [], []
    for _ in range(int(runs)):
        before = time.time()
        validate.append(both() - before)
        warm.append(time.time() - before)
        digests.append(_digest(params.parent))
    own_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"cold_s": cold, "warm_s": warm, "validate_s": validate, "digests": digests, "own_peak_mb": own_mb}


def _digest(root: Path) -> str:
    """Over every file of both stages' outputs: name and bytes."""
    total = hashlib.sha256()
    for path in sorted(path for stage in ("03_clean", "04_mixture") for path in (root / stage).rglob("*")):
        if path.is_file():
            total.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return total.hexdigest()


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        sys.path.insert(0, str(Path(__file__).parent.parent))
        print(json.dumps(run(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4])))
    else:
        main()

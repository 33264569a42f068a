"""Validate and convert at 896k samples, on the real path: `make bench-data` -> benchmarks/results/data.json.

For each size a mixture is written (benchmarks/synthetic_mixture.py) and ingested. Then one fresh process runs the
command line's `validate` and `convert` (cold: interpreter, imports and all), and again (warm). The outputs of every run
must be the same bytes. Peak memory is that of the process and its workers together. The anchor is the usual way, a
row-wise `datasets.map` in one process over the clean references; it converts only (no checks), and must give the same
samples.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import shutil
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
FIELDS = ("dataset", "split", "before", "after", "before_sha256", "after_sha256")
TARGETS = {"cold_s": 15, "warm_s": 6, "peak_rss_mb": 1500}


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from benchmarks.synthetic_mixture import write_synthetic_mixture

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="samples of each mixture")
    parser.add_argument("--runs", type=int, default=WARM_RUNS, help="warm ones of each size")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{_machine()}; load before the start {load:.1f}")
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
        anchor = _child("anchor", params)
    print(f"anchor, row-wise datasets.map of {anchor['rows']:,} rows in one process: {anchor['anchor_s']:.1f} s")
    print(f"  against validate + convert, warm: {anchor['anchor_s'] / measured[-1]['warm_s']:.0f} times as long")
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": _machine(),
        "load_before": round(load, 2),
        **measured[-1],
        "anchor_s": round(anchor["anchor_s"], 2),
        "anchor_rows": anchor["rows"],
        "anchor": "row-wise datasets.map in one process, conversion only, all rows, same samples",
        "sizes": measured,
        "targets": TARGETS,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(f"written to {args.out}")


def measure(params: Path, runs: int) -> dict[str, Any]:
    """Cold and warm seconds of validate + convert on one mixture, its rows, and the peak of memory in MB."""
    from m3diff.__main__ import main as m3diff

    for name in yaml.safe_load(params.read_text("utf-8"))["ingest"]["datasets"]:
        assert m3diff(["--params", str(params), "ingest", name]) == 0
    found = _child("run", params, str(runs))
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


def _child(task: str, params: Path, *given: str) -> dict[str, Any]:
    """Run this file's `task` in a fresh process; what it prints last, and the peak of memory of it and its workers."""
    peak, done = [0.0], threading.Event()
    started = time.time()
    command = [sys.executable, __file__, task, str(params), str(started), *given]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    watch = threading.Thread(target=_watch, args=(process.pid, peak, done))
    watch.start()
    output, _ = process.communicate()
    done.set()
    watch.join()
    assert process.returncode == 0, f"{task} failed; run: {' '.join(command)}"
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


def anchor(params: Path, started: float) -> dict[str, Any]:
    """The same conversion with `datasets.map`, a reference at a time; timed from the map to the written Parquet."""
    import polars as pl
    from datasets import Dataset, disable_caching

    disable_caching()
    clean, folder = params.parent / "03_clean/records.parquet", params.parent / "anchor"
    folder.mkdir()
    rows = pl.read_parquet(clean).with_columns(number=pl.int_ranges(pl.col("references").list.len()))
    rows.explode("references", "number").write_parquet(folder / "references.parquet")
    data = Dataset.from_parquet(str(folder / "references.parquet"), cache_dir=str(folder / "cache"))
    sample, before = _row_wise(params), time.time()
    mapped = data.map(sample, remove_columns=data.column_names)
    mapped.to_parquet(str(folder / "samples.parquet"))
    seconds = time.time() - before
    ours = pl.read_parquet(params.parent / "04_mixture/*/*.parquet").sort("id")
    theirs = pl.read_parquet(folder / "samples.parquet").select(ours.columns).sort("id")
    assert ours.equals(theirs), "the anchor gave other samples"
    shutil.rmtree(folder)
    return {"anchor_s": seconds, "rows": theirs.height}


def _row_wise(params: Path) -> Any:
    """A function from one reference's row to its sample, as `m3diff.stages.convert` defines it."""
    from m3diff.datasets import DATASETS

    values = yaml.safe_load(params.read_text("utf-8"))
    convert, datasets = values["convert"], values["ingest"]["datasets"]
    tasks = yaml.safe_load(Path(convert["questions"]).read_text("utf-8"))
    questions = {name: tasks[DATASETS[entry["reader"]].task] for name, entry in datasets.items()}
    seed, mask = str(convert["seed"]).encode(), 2**64 - 1

    def sample(row: dict[str, Any]) -> dict[str, Any]:
        z = int.from_bytes(hashlib.blake2b(row["id"].encode(), digest_size=8, key=seed).digest(), "little")
        z = (z + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        asked = questions[row["dataset"]]
        return {
            "id": f"{row['id']}#{row['number']}",
            "pair": row["id"],
            **{field: row[field] for field in FIELDS},
            "question": asked[(z ^ (z >> 31)) % len(asked)],
            "reference": row["references"],
        }

    return sample


def _digest(root: Path) -> str:
    """Over every file of both stages' outputs: name and bytes."""
    total = hashlib.sha256()
    for path in sorted(path for stage in ("03_clean", "04_mixture") for path in (root / stage).rglob("*")):
        if path.is_file():
            total.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return total.hexdigest()


def _machine() -> str:
    model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    memory = psutil.virtual_memory().total / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{model.split(':')[1].strip()}, {cores} cores, {memory:.0f} GiB, Python {platform.python_version()}"


if __name__ == "__main__":
    task = {"run": run, "anchor": anchor}.get(sys.argv[1] if len(sys.argv) > 1 else "")
    if task is None:
        main()
    else:
        sys.path.insert(0, str(Path(__file__).parent.parent))
        print(json.dumps(task(Path(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])))

"""The cost of a flow run besides its stages, beside a dataset of many tracked images -> benchmarks/results/flow.json

The stages write in no time (`tests/toy.py`); git, DVC, Prefect, MLflow and the gate are real. Four runs: the first, one
with another parameter of training, one with another file among the data, and one with nothing to do. The overhead is
the time from the command to its end, less that of the tasks that are stages.

    python benchmarks/flow.py --images 290000
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests import toy
from tests.faults.kills import one_dataset
from tests.faults.machine import prefect_server

RESULTS = Path(__file__).parent / "results" / "flow.json"
MINE = Path("data/01_raw/mine")
PER_FOLDER = 1000
OTHERS = ("preflight", "push", "register", "promote")
"""Tasks that are no stages."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=290_000)
    parser.add_argument("--runs", type=int, default=4, help="the first so many of the four")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--keep", type=Path, help="work here, and leave it")
    asked = parser.parse_args()
    place = asked.keep or Path(tempfile.mkdtemp(prefix="m3diff-flow-"))
    try:
        result = measure(place, asked.images, asked.runs)
    finally:
        if not asked.keep:
            shutil.rmtree(place, ignore_errors=True)
    asked.out.write_text(json.dumps(result, indent=2) + "\n")


def measure(place: Path, images: int, runs: int) -> dict[str, Any]:
    root = place / "project"
    if not root.exists():
        build(root, images)
    made: dict[str, Any] = {"images": images, "cores": os.cpu_count(), "runs": {}}
    with prefect_server(place / "prefect") as environment:
        for name, overrides, before in RUNS[:runs]:
            if before:
                before(root)
            made["runs"][name] = run(root, environment, overrides)
            print(name, json.dumps(made["runs"][name], indent=2), flush=True)
    return made


def build(root: Path, images: int) -> None:
    """The toy with a second dataset, of so many images, that DVC tracks."""
    one_dataset(root)
    toy.write_dataset(root / MINE, toy.SPLITS)
    for number in range(images):
        folder = root / MINE / "images" / f"{number // PER_FOLDER:03d}"
        if number % PER_FOLDER == 0:
            folder.mkdir(parents=True)
        (folder / f"{number:06d}.png").write_bytes(number.to_bytes(4, "big") * 20)
    values = yaml.safe_load((root / "params.yaml").read_text())
    values["ingest"]["datasets"]["mine"] = {"reader": "pairs", "root": str(MINE)}
    (root / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    toy.run(root, "dvc", "remote", "add", "-q", "--default", "shelf", str(root.parent / "remote"))
    toy.run(root, "dvc", "config", "cache.type", "hardlink")
    toy.run(root, "dvc", "add", "-q", str(MINE))
    toy.commit(root, f"{images} images")


def another_image(root: Path) -> None:
    (root / MINE / "images" / "one_more.png").write_bytes(b"one more")
    toy.run(root, "dvc", "add", "-q", str(MINE))
    toy.commit(root, "one image more")


RUNS: tuple[tuple[str, tuple[str, ...], Callable[[Path], None] | None], ...] = (
    ("the first", (), None),
    ("another parameter of training", ("train.epochs=3",), None),
    ("another image", (), another_image),
    ("nothing to do", (), None),
)
"""Name, overrides of parameters, and what is done before."""


def run(root: Path, environment: dict[str, str], overrides: tuple[str, ...]) -> dict[str, Any]:
    """A flow run from the shell: seconds of the whole, of each task, and of what is no stage."""
    import subprocess

    code = f"from flows.full import full; print(full(overrides={list(overrides)!r}, return_state=True).type)"
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=environment | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    wall = time.monotonic() - started
    assert done.returncode == 0, done.stderr[-4000:]
    assert "COMPLETED" in done.stdout, done.stderr[-4000:]
    tasks = tasks_of_last_run(environment["PREFECT_API_URL"])
    stages = sum(seconds for name, (_, seconds) in tasks.items() if name not in OTHERS)
    return {"wall_s": round(wall, 1), "overhead_s": round(wall - stages, 1), "tasks": tasks}


def tasks_of_last_run(url: str) -> dict[str, tuple[str, float]]:
    """State and seconds of each task of the newest flow run."""
    (newest,) = httpx.post(f"{url}/flow_runs/filter", json={"sort": "START_TIME_DESC", "limit": 1}).json()
    ours = {"flow_runs": {"id": {"any_": [newest["id"]]}}}
    found = httpx.post(f"{url}/task_runs/filter", json=ours).json()
    return {run["name"]: (run["state_name"], round(run["total_run_time"], 1)) for run in found}


if __name__ == "__main__":
    main()

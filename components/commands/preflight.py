"""Checks of a machine before hours are spent: room, memory, GPUs, Java, SPICE, MLflow."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from mlflow.exceptions import MlflowException

from m3diff.cluster import NoRoomError, require_head
from m3diff.records.errors import DataError
from m3diff.records.machine import free_memory
from m3diff.registry import tracking
from m3diff.registry.decisions import decisions
from m3diff.registry.promote import champion_lost
from m3diff.registry.versions import CHAMPION, alias_of
from m3diff.scoring.metrics import choose_metrics, needs_java
from m3diff.scoring.metrics.java import JavaMissing, ScorerFailed, require_java
from m3diff.scoring.metrics.spice import try_spice
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params

GIB = 2**30
LEAST_FREE = 1 * GIB  # what the small stages, logs and the report take
TRAINED_COPIES = 4  # of the base's size on a CPU: weights, gradients and AdamW's two moments in fp32
NVIDIA_TIMEOUT_S = 60


class NotReadyError(ParamsError):
    """The machine or a server lacks what the run needs; every lack at once, each with its remedy."""


def preflight(params: Params) -> None:
    """See that this machine can run the pipeline.

    Raises:
        NotReadyError: it cannot.
    """
    faults = [*disk(params), *memory(params), *gpus(params), *cluster(params), *java(params), *server(params)]
    if faults:
        raise NotReadyError("\n  ".join(["this run cannot start here:", *faults]))


def disk(params: Params) -> Iterator[str]:
    """Room where the run writes for checkpoints in flight, of which a new one and three older exist at once."""
    base = size_of(params.train.base)
    needs = {params.compute.scratch: LEAST_FREE + 4 * base, params.paths.model: LEAST_FREE + base}
    for place, needed in needs.items():
        there = next(folder for folder in (place.resolve(), *place.resolve().parents) if folder.exists())
        free = shutil.disk_usage(there).free
        if free < needed:
            yield f"{place}: {free / GIB:.1f} GiB free, {needed / GIB:.1f} needed; make room or set compute.scratch"


def memory(params: Params) -> Iterator[str]:
    """The base in the machine's memory, for each worker; trained there where there is no GPU."""
    if os.environ.get("RAY_ADDRESS"):
        return  # the workers are on other machines
    copies = 1 if params.compute.gpu else TRAINED_COPIES
    needed = size_of(params.train.base) * copies * max(params.compute.workers, 1)
    free = free_memory(psutil.virtual_memory().available)
    if free < needed:
        yield (
            f"memory: {free / GIB:.1f} GiB are free, about {needed / GIB:.1f} needed by {params.compute.workers} "
            "worker(s); lower compute.workers or end other programs"
        )


def gpus(params: Params) -> Iterator[str]:
    """A GPU for each worker, by the driver's own list."""
    if not params.compute.gpu or os.environ.get("RAY_ADDRESS"):
        return
    asked, found = max(params.compute.workers, 1), 0
    with suppress(OSError, subprocess.TimeoutExpired):  # no driver, or one that does not answer
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_TIMEOUT_S)
        found = sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0
    if found < asked:
        yield f"compute.gpu: {asked} GPU(s) asked for, {found} found by nvidia-smi -L; lower compute.workers"


def cluster(params: Params) -> Iterator[str]:
    try:
        if params.compute.workers:
            require_head(0)
    except NoRoomError as error:
        yield str(error)


def java(params: Params) -> Iterator[str]:
    """A Java that starts, where a metric needs one, and a SPICE that scores where its jars are named."""
    metrics, folder = choose_metrics(params.evaluate.metrics), params.compute.spice_dir
    if not needs_java(metrics):
        return
    try:
        require_java()
        if folder is not None and "SPICE" in metrics:
            try_spice(folder, params.compute.scorer_timeout_s)
    except JavaMissing as missing:
        yield f"evaluate.metrics: {', '.join(name for name in metrics if metrics[name].java)} need Java; {missing}"
    except ScorerFailed as failure:
        yield f"compute.spice_dir: no SPICE from {folder}: {failure}; or write null, and SPICE is absent"


def server(params: Params) -> Iterator[str]:
    """MLflow, and what somebody deleted there that register or the gate would miss hours later."""
    cfg = params.register_
    try:
        store = tracking.resolve(cfg.tracking_uri)
        tracking.check_alive(store)
        if store.startswith(tracking.SQLITE) and not Path(store.removeprefix(tracking.SQLITE)).is_file():
            return  # nothing was registered yet
        with tracking.connected(cfg.tracking_uri) as client:
            try:
                tracking.known_experiment(client, cfg.experiment)
            except DataError as deleted:
                yield str(deleted)
            if alias_of(client, cfg.model_name, CHAMPION) is None:
                yield from filter(None, [champion_lost(client, decisions(), cfg.model_name)])
    except (DataError, MlflowException, OSError) as error:
        yield f"register.tracking_uri: {error}"


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; 0 where there is none."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

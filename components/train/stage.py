"""Fine-tune M3Diff: Ray Train around the loop of `loop.py`, or the loop alone in this process (`train.workers: 0`).

A run is named by the hash of what determines it (data, parameters, code, base), so a killed run resumes from its newest
whole checkpoint and nothing else ever does. Run: `m3diff train`.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.models.m3diff.tuning import CheckpointError, verify_manifest
from components.train.params import Train
from components.files import write_atomic
from components.reports import StageReport

logger = logging.getLogger(__name__)

STATE = "state"
CODE = (Path(__file__).parent, Path(__file__).parent.parent / "model")


class TrainReport(StageReport):
    """Counts and final losses of a training run. `rows_in` are training samples, `rows_out` samples seen."""

    steps: int
    parameters_trainable: int
    parameters_frozen: int
    loss: float
    val_loss: float


class RunLockedError(BlockingIOError):
    """A second process trains the same run; try again when it has ended."""


def train(cfg: Train, mixture: Path, out: Path, scratch: Path) -> TrainReport:
    """Train on `mixture` and write `out`: checkpoint/, curves.csv, report.json.

    Raises:
        RunLockedError: the same run is being trained elsewhere.
        DataError: the mixture holds no training sample.
    """
    cfg = cfg.model_copy(update={"base": cfg.base.resolve()})
    mixture, out, scratch = mixture.resolve(), out.resolve(), scratch.resolve()
    key = run_key(cfg, mixture)
    run_dir = scratch / "train" / key
    run_dir.mkdir(parents=True, exist_ok=True)
    with _only_trainer(run_dir):
        resume = latest_valid_checkpoint(run_dir)
        run = _run_here if cfg.workers == 0 else _run_on_ray
        figures = run(cfg, mixture, out, run_dir, resume)
        report = TrainReport(
            stage="train",
            rows_in=int(figures["samples"]),
            rows_out=int(figures["captions"]),
            steps=int(figures["steps"]),
            parameters_trainable=int(figures["trainable"]),
            parameters_frozen=int(figures["frozen"]),
            loss=round(figures["loss"], 5),
            val_loss=round(figures["val_loss"], 5),
        ).write(out / "report.json")
        speed = {name: round(figures[name], 4) for name in ("seconds", "captions_per_s", "waiting_share")}
        (scratch / "train_speed.json").write_text(json.dumps(speed) + "\n")
        print(f"train: {report.steps} steps in {figures['seconds']:.0f} s, {speed['captions_per_s']:.0f} captions/s")
    shutil.rmtree(run_dir)
    return report


def run_key(cfg: Train, mixture: Path) -> str:
    """Names a run: the hash of its parameters, data, code and base."""
    digest = hashlib.sha256(cfg.model_dump_json().encode())
    files = [*(mixture / "samples").glob("*.parquet"), *cfg.base.glob("*")]
    files += [path for folder in CODE for path in folder.rglob("*.py")]
    for path in sorted(file for file in files if file.is_file()):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


@contextmanager
def _only_trainer(run_dir: Path) -> Iterator[None]:
    with (run_dir.parent / f"{run_dir.name}.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise RunLockedError(
                f"{lock.name}: another training of this run is alive ({lock.read().strip()})"
            ) from error
        lock.truncate(0)
        lock.write(f"pid {os.getpid()}")
        lock.flush()
        yield


def latest_valid_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint folder whose manifest verifies; one that does not is removed, and a warning names it."""
    whole: dict[int, Path] = {}
    for folder in sorted(path.parent for path in run_dir.rglob(STATE) if path.is_dir()):
        try:
            whole[int(verify_manifest(folder / STATE)["step"])] = folder
        except (CheckpointError, json.JSONDecodeError) as error:
            logger.warning("train: checkpoint %s is not whole and is passed over: %s", folder, error)
            shutil.rmtree(folder)
    return whole[max(whole)] if whole else None


class Here:
    """The loop's runtime in a plain process: one rank, checkpoints in the run's folder."""

    rank, ranks = 0, 1

    def __init__(self, run_dir: Path, resume: Path | None) -> None:
        self.run_dir, self.resume = run_dir, resume

    @contextmanager
    def newest(self) -> Iterator[Path | None]:
        yield self.resume

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(dir=self.run_dir, prefix="writing-"))
        yield folder
        shutil.rmtree(folder, ignore_errors=True)

    def keep(self, folder: Path, metrics: dict[str, float]) -> None:
        older = sorted(self.run_dir.glob("step-*"))
        folder.rename(self.run_dir / f"step-{int(metrics['step']):08d}")
        for path in older[:-1]:
            shutil.rmtree(path)


def _run_here(cfg: Train, mixture: Path, out: Path, run_dir: Path, resume: Path | None) -> dict[str, float]:
    import torch.distributed as dist

    from components.train.engine import end_distributed
    from components.train.loop import run_loop

    store = run_dir / "store"
    store.unlink(missing_ok=True)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl" if cfg.gpu else "gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        return run_loop(cfg, mixture, out, Here(run_dir, resume))
    finally:
        end_distributed()


class RayWorker:
    """The loop's runtime in a Ray Train worker."""

    def __init__(self, resume: Path | None) -> None:
        import ray.train

        self.resume = resume
        context = ray.train.get_context()
        self.rank, self.ranks = context.get_world_rank(), context.get_world_size()

    @contextmanager
    def newest(self) -> Iterator[Path | None]:
        import ray.train

        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            yield self.resume
            return
        with checkpoint.as_directory() as folder:
            yield Path(folder)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)

    def keep(self, folder: Path, metrics: dict[str, float]) -> None:
        import ray.train

        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def _worker(job: dict) -> None:
    from components.train.loop import run_loop

    runtime = RayWorker(job["resume"])
    figures = run_loop(job["cfg"], job["mixture"], job["out"], runtime)
    if runtime.rank == 0:
        write_atomic(job["figures"], json.dumps(figures))


def _run_on_ray(cfg: Train, mixture: Path, out: Path, run_dir: Path, resume: Path | None) -> dict[str, float]:
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "60")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # with it, every printed line comes twice
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    figures = run_dir / "figures.json"
    resume = _keep_aside(resume, run_dir)
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"cfg": cfg, "mixture": mixture, "out": out, "figures": figures, "resume": resume},
        torch_config=TorchConfig(backend="nccl" if cfg.gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=cfg.workers,
            use_gpu=cfg.gpu,
            resources_per_worker={"CPU": cfg.cpus_per_worker} | ({"GPU": 1} if cfg.gpu else {}),
        ),
        run_config=RunConfig(
            name="ray",
            storage_path=str(run_dir),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=cfg.max_failures, controller_failure_limit=2),  # type: ignore[call-arg]  # V2's
        ),
    )
    own = not ray.is_initialized()
    if own:
        cluster = os.environ.get("RAY_ADDRESS")  # without one, a cluster of this run's own, deaf to the network
        cores = max(os.cpu_count() or 1, cfg.workers * cfg.cpus_per_worker)  # fewer than asked for: slower, not refused
        here = {"address": "local", "num_cpus": cores, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(
            **({"address": cluster} if cluster else here),
            log_to_driver=True,
            logging_level=logging.WARNING,
            logging_config=ray.LoggingConfig(log_level="ERROR"),  # its cleaners warn of what is no fault
        )
    try:
        trainer.fit()
    finally:
        if own:
            ray.shutdown()
    return json.loads(figures.read_text())


def _keep_aside(resume: Path | None, run_dir: Path) -> Path | None:
    """Each start is a new run for Ray: its own snapshot of a killed run may be half written. The checkpoint stays."""
    kept = run_dir / "resume"
    if resume is not None and resume != kept:
        shutil.rmtree(kept, ignore_errors=True)
        resume.rename(kept)
    shutil.rmtree(run_dir / "ray", ignore_errors=True)
    return None if resume is None else kept

"""The stage around the loop: names, locks and refusals of runs, requests to Ray, and Ray workers."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train
import ray.train.torch
import torch
from ray._common.utils import env_bool
from ray.train.constants import RAY_CHDIR_TO_TRIAL_DIR
from ray.train.v2._internal.constants import ENABLE_PRINT_PATCH_ENV_VAR

from m3diff.cluster import NoRoomError
from m3diff.provenance import code
from m3diff.records.errors import DataError
from m3diff.records.files import sha256_of_folder
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from m3diff.stages.train import loop, on_ray, stage
from m3diff.stages.train.engine import deepspeed_config
from m3diff.stages.train.job import Job, StoppedError, WorkerContext, single_worker_group
from m3diff.stages.train.stage import (
    RunInProgressError,
    _run_lock,
    run_key,
    run_with_retries,
    settings_in_report,
    train,
)
from tests.errors import Message, raises
from tests.stages.train.test_alignment import ALIGN
from tests.stages.train.toy import Recipe, job, recipe, run_dir_of
from tests.tiny import tiny_settings
from tests.toy import REPOSITORY


def key(run_recipe: Recipe, mixture: Path) -> str:
    return run_key(run_recipe.cfg, run_recipe.model, mixture, sha256_of_folder(run_recipe.cfg.base))


@pytest.mark.fault("27")
def test_no_path_and_no_test_sample_names_a_run(base, mixture, tmp_path):
    shutil.copytree(base, tmp_path / "base")
    shutil.copytree(mixture, tmp_path / "mixture")
    (tmp_path / "mixture" / "note.txt").write_text("a note")
    (tmp_path / "mixture" / "test" / "00000.parquet").write_bytes(b"other test samples")
    assert key(recipe(tmp_path / "base"), tmp_path / "mixture") == key(recipe(base), mixture)


@pytest.mark.fault("27")
def test_everything_that_decides_the_weights_names_a_run(base, mixture, tmp_path, monkeypatch):
    run_recipe = recipe(base)
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text("{}")
    keys = {
        "as it is": key(run_recipe, mixture),
        "seed": key(run_recipe.changed(seed=4), mixture),
        "rate": key(run_recipe.changed(model=tiny_settings(vision=0.5)), mixture),
        "rank": key(run_recipe.changed(model=tiny_settings(rank=4)), mixture),
        "module": key(run_recipe.changed(model=tiny_settings(None)), mixture),
        "align": key(run_recipe.changed(model=replace(run_recipe.model, align=ALIGN)), mixture),
        "base": key(recipe(tmp_path / "base"), mixture),
        "export": key(run_recipe.changed(export="best"), mixture),
    }
    for split in ("train", "val"):
        shutil.copytree(mixture, tmp_path / split)
        shutil.copy(mixture / "test" / "00000.parquet", tmp_path / split / split / "00000.parquet")
        keys[split] = key(run_recipe, tmp_path / split)
    monkeypatch.setattr(code, "digest_code", lambda module, names: {module.name: "another meaning"})
    keys["code"] = key(run_recipe, mixture)
    assert len(set(keys.values())) == len(keys), keys


@pytest.mark.fault("02")
def test_a_second_trainer_of_the_same_run_is_turned_away(tmp_path):
    refused = raises(RunInProgressError, "train.run_in_progress", path=str(tmp_path / "run.lock"))
    with _run_lock(tmp_path / "run"), refused, _run_lock(tmp_path / "run"):
        pass
    with _run_lock(tmp_path / "run"):
        pass


COUNTS = {"rows_in": 23, "rows_out": 46, "steps": 6, "parameters_trainable": 30, "parameters_frozen": 5}
LOSSES = {
    "loss": 0.12346,
    "val_loss": 0.76543,
    "val_loss_by_dataset": {"toy": 0.76543},
    "val_cider": None,
    "val_match": None,
}
MODULE = {"module": {"module_update_ratio/2": 0.000123}, "warnings": ["the module changes nothing"]}
FIGURES: dict[str, Any] = {**COUNTS, "parameters": {"vision": 10, "llm": 20}, **LOSSES, "exported_step": 4, **MODULE}
SPEED = {"seconds": 2.0, "captions_per_s": 23.0, "waiting_share": 0.12345, "device": "cpu", "devices": 2}
SPEED |= {"flops": 8e6, "model_parameters": 35}


@dataclass
class StageRun:
    """A stage whose loop only returns figures, with the calls of the loop and of the follower of its curves."""

    run_recipe: Recipe
    out: Path
    scratch: Path
    mixture: Path
    jobs: list[Job] = field(default_factory=list)
    followed: list[tuple[str, Path]] = field(default_factory=list)

    def loop(self, job: Job) -> dict[str, Any]:
        assert job.run_dir.is_dir()
        assert not self.followed
        self.jobs.append(job)
        return FIGURES | SPEED | {"device_hours": 4 / 3600}

    @contextmanager
    def follow(self, key: str, curves: Path) -> Iterator[None]:
        yield
        assert curves.parent.is_dir(), "the follower reads the curves at the end"
        assert (self.out / "report.json").is_file()
        self.followed.append((key, curves))


@pytest.fixture(params=[0, 2], ids=["in this process", "on Ray"])
def stage_run(request: Any, base: Path, mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageRun:
    monkeypatch.chdir(base.parent)
    run_recipe = recipe(Path(base.name), workers=request.param, micro_batch=2, scratch=tmp_path / "runs")
    run = StageRun(run_recipe, tmp_path / "out", tmp_path / "runs", mixture)
    if request.param:
        monkeypatch.setattr(on_ray, "run_on_ray", run.loop)
    else:
        monkeypatch.setattr(stage, "run_local", run.loop)
    train(run_recipe.cfg, run_recipe.model, run_recipe.compute, mixture, run.out, run.follow, ["few steps"])
    return run


def test_the_best_checkpoint_is_not_exported_without_captions(base, mixture, tmp_path):
    run_recipe = recipe(base, export="best", scratch=tmp_path / "runs")
    with raises(ParamsError, "train.best_without_captions", key="train.export"):
        train(run_recipe.cfg, run_recipe.model, run_recipe.compute, mixture, tmp_path / "out")
    assert not (tmp_path / "runs").exists()


def test_a_base_whose_tokenizer_is_damaged_is_refused_before_the_run_begins(base, mixture, tmp_path):
    damaged_base = shutil.copytree(base, tmp_path / "base")
    (damaged_base / "tokenizer.json").write_text("{}")
    run_recipe = recipe(damaged_base, scratch=tmp_path / "runs")
    with raises(DataError, "files.unreadable", path=damaged_base / "tokenizer.json"):
        train(run_recipe.cfg, run_recipe.model, run_recipe.compute, mixture, tmp_path / "out")
    assert not (tmp_path / "runs").exists()


def test_a_run_that_was_asked_to_end_ends_with_its_code_and_stays_to_be_resumed(
    base, mixture, tmp_path, monkeypatch, capsys
):
    def stop(job: Job) -> dict[str, Any]:
        raise StoppedError("train.stopped", step=3)

    monkeypatch.setattr(stage, "run_local", stop)
    run_recipe = recipe(base, scratch=tmp_path / "runs")
    with pytest.raises(SystemExit) as ended:
        train(run_recipe.cfg, run_recipe.model, run_recipe.compute, mixture, tmp_path / "out")
    assert ended.value.code == 143
    assert Message("train.stopped", step=3).in_text(capsys.readouterr().out)
    assert run_dir_of(tmp_path).is_dir()
    assert not (tmp_path / "out" / "report.json").exists()


def test_the_report_has_the_figures_of_the_loop_and_the_warnings_from_before(stage_run):
    report = json.loads((stage_run.out / "report.json").read_text())
    report.pop("settings")
    warnings = ["few steps", "the module changes nothing"]
    assert report == FIGURES | {"stage": "train", "alignment": {}, "warnings": warnings}


def test_the_report_has_the_settings_that_decided_the_weights(stage_run):
    settings = json.loads((stage_run.out / "report.json").read_text())["settings"]
    assert settings["base"] == str(stage_run.run_recipe.cfg.base)
    assert settings["family"] == stage_run.run_recipe.model.family
    rates = stage_run.run_recipe.model.rates
    assert settings["rates"] == {part: rate for part, rate in rates.items() if rate}
    assert settings["rates"]["vision"] > 0
    assert settings["lora"]["rank"] == stage_run.run_recipe.model.lora.rank


def test_the_report_has_no_rate_of_a_part_that_does_not_train(base):
    run_recipe = recipe(base, model=tiny_settings(vision=None), seed=5)
    settings = settings_in_report(run_recipe.cfg, run_recipe.model)
    assert settings["rates"].keys() == {"projector", "module", "llm"}
    assert settings["seed"] == 5


def test_the_speed_of_a_training_is_written_for_the_plan(stage_run):
    speed = json.loads((stage_run.scratch / "train_speed.json").read_text())
    assert speed == SPEED | {"waiting_share": 0.1235, "device_hours": 0.0011}


def test_the_loop_gets_a_job_with_whole_paths_and_the_folder_of_its_run(stage_run, base):
    (job,) = stage_run.jobs
    assert job.cfg.base.is_absolute()
    assert job.mixture == stage_run.mixture
    assert job.out == stage_run.out
    assert job.base_sha256 == sha256_of_folder(base)
    run_name = run_key(job.cfg, job.model, stage_run.mixture, job.base_sha256)
    assert job.run_dir == stage_run.scratch / "train" / run_name


def test_a_run_that_ended_was_followed_and_leaves_nothing(stage_run):
    (job,) = stage_run.jobs
    assert stage_run.followed == [(job.run_dir.name, job.run_dir / "curves.csv")]
    assert not job.run_dir.exists()


@pytest.fixture
def work(base: Path, tmp_path: Path) -> Callable[..., Job]:
    return lambda **compute: job(recipe(base, workers=2, **compute), tmp_path / "mixture", tmp_path)


@pytest.fixture
def trainer_arguments(work: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return the arguments of Ray's trainer for a job with changes of `compute`."""

    def arguments_of(**compute: Any) -> dict[str, Any]:
        monkeypatch.setattr(on_ray, "TorchTrainer", lambda worker, **options: {"worker": worker, **options})
        return on_ray.make_trainer(work(**compute))  # type: ignore[return-value]

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return arguments_of


GPU = pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])


def test_the_workers_of_ray_get_the_job(trainer_arguments, work):
    arguments = trainer_arguments(cpus_per_worker=3)
    assert arguments["worker"] == on_ray._run_worker
    assert arguments["train_loop_config"] == {"job": work(cpus_per_worker=3)}


@GPU
def test_each_worker_of_ray_has_its_cores_and_its_gpu(gpu, trainer_arguments):
    scaling = trainer_arguments(gpu=gpu, cpus_per_worker=3)["scaling_config"]
    assert scaling.num_workers == 2
    assert scaling.use_gpu == gpu
    assert scaling.resources_per_worker == {"CPU": 3} | ({"GPU": 1} if gpu else {})


def test_ray_restarts_no_worker_and_writes_into_the_folder_of_the_run(trainer_arguments, tmp_path):
    run = trainer_arguments(max_failures=5)["run_config"]
    assert run.name == "ray"
    assert run.storage_path == str(tmp_path)
    assert run.failure_config.max_failures == 0
    assert run.failure_config.controller_failure_limit == 2


def device_variables(gpu: bool) -> dict[str, str]:
    if gpu:
        return {"DS_ACCELERATOR": "cuda", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


@GPU
def test_workers_on_one_machine_keep_to_its_loopback_interface(gpu, trainer_arguments):
    arguments = trainer_arguments(gpu=gpu)
    interface = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert arguments["run_config"].worker_runtime_env == {"env_vars": device_variables(gpu) | interface}
    assert arguments["torch_config"].backend == ("nccl" if gpu else "gloo")
    assert arguments["torch_config"].backend_cls == on_ray.OneMachineBackend


@GPU
def test_workers_of_a_cluster_meet_as_ray_has_them(gpu, trainer_arguments, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    arguments = trainer_arguments(gpu=gpu)
    assert arguments["run_config"].worker_runtime_env == {"env_vars": device_variables(gpu)}
    assert type(arguments["torch_config"]) is ray.train.torch.TorchConfig
    assert arguments["torch_config"].backend == ("nccl" if gpu else "gloo")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_runs_the_loop_at_its_place_and_the_first_writes_the_figures(rank, work, tmp_path, monkeypatch):
    context = SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: 2)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)

    def training(run_recipe: Job, worker: WorkerContext) -> SimpleNamespace:
        return SimpleNamespace(run=lambda: {"rank": worker.rank, "ranks": worker.ranks})

    monkeypatch.setattr(loop, "Training", training)
    joined: list[WorkerContext] = []
    monkeypatch.setattr(on_ray, "join_process_group", lambda run_recipe, worker: joined.append(worker))
    on_ray._run_worker({"job": work()})
    assert joined == [WorkerContext(rank, 2)]
    written = tmp_path / "figures.json"
    assert written.is_file() == (rank == 0)
    assert rank or json.loads(written.read_text()) == {"rank": 0, "ranks": 2}


def test_workers_on_one_machine_meet_through_a_file_of_their_attempt(work, tmp_path):
    on_ray.join_process_group(replace(work(), attempt=3), WorkerContext(0, 1))
    try:
        assert torch.distributed.get_world_size() == 1
        assert torch.distributed.get_rank() == 0
        assert torch.distributed.get_backend() == "gloo"
        assert [path.name for path in tmp_path.glob("group-*")] == ["group-3"]
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the starts and stops of a replacement for Ray on one machine."""
    calls: list[str] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(on_ray, "start_coordinator", lambda: calls.append("coordinator"))
    monkeypatch.setattr(on_ray, "start_ray", lambda compute: calls.append("start"))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(on_ray, "wait_for_room", lambda compute, seconds: None)
    return calls


@pytest.mark.parametrize("variable", [ENABLE_PRINT_PATCH_ENV_VAR, RAY_CHDIR_TO_TRIAL_DIR])
@pytest.mark.parametrize("chosen", [None, "1"], ids=["ours", "the user's choice"])
def test_ray_prints_no_line_twice_and_changes_no_folder_unless_the_user_wants_it(
    variable, chosen, work, tmp_path, monkeypatch, ended
):
    monkeypatch.setenv(variable, "")
    monkeypatch.delenv(variable)
    if chosen:
        monkeypatch.setenv(variable, chosen)
    (tmp_path / "figures.json").write_text("{}")
    values = []
    trainer = SimpleNamespace(fit=lambda: values.append(env_bool(variable, True)))
    monkeypatch.setattr(on_ray, "make_trainer", lambda run_recipe: trainer)
    on_ray.run_on_ray(work())
    assert values == [chosen is not None]


@pytest.mark.fault("27")
def test_a_run_on_ray_gives_the_figures_and_leaves_no_ray_behind(work, tmp_path, monkeypatch, ended):
    (tmp_path / "ray").mkdir()
    (tmp_path / "figures.json").write_text('{"steps": 6}')
    monkeypatch.setattr(on_ray, "make_trainer", lambda run_recipe: SimpleNamespace(fit=lambda: None))
    assert on_ray.run_on_ray(work()) == {"steps": 6}
    assert not (tmp_path / "ray").exists()
    assert ended == ["start", "coordinator", "shutdown"]

    def fit() -> None:
        raise ray.train.WorkerGroupError("worker failed", {1: OSError("no")})

    monkeypatch.setattr(on_ray, "make_trainer", lambda run_recipe: SimpleNamespace(fit=fit))
    with pytest.raises(ray.train.WorkerGroupError, match="worker failed"):
        on_ray.run_on_ray(work())
    assert ended == 2 * ["start", "coordinator", "shutdown"]


def test_a_cluster_is_left_to_start_its_own_coordinator(work, tmp_path, monkeypatch, ended):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    (tmp_path / "figures.json").write_text("{}")
    monkeypatch.setattr(on_ray, "make_trainer", lambda run_recipe: SimpleNamespace(fit=lambda: ended.append("fit")))
    on_ray.run_on_ray(work())
    assert ended == ["start", "fit", "shutdown"]


@pytest.mark.parametrize(("cluster", "seconds"), [("", 0), ("head:6379", 60)])
def test_nodes_without_room_end_the_run_after_the_time_of_a_cluster(cluster, seconds, work, monkeypatch, ended):
    def refuse(compute: Any, within: float) -> None:
        ended.append(f"room for {compute.workers} within {within} s")
        raise NoRoomError("cluster.no_room", value=0, expected=2, need=["1 CPU"], nodes=[])

    monkeypatch.setenv("RAY_ADDRESS", cluster)
    monkeypatch.setattr(on_ray, "wait_for_room", refuse)
    with pytest.raises(NoRoomError):
        run_with_retries(on_ray.run_on_ray, work())
    assert ended == ["start", f"room for 2 within {seconds} s", "shutdown"], "it is not tried again at once"


LIGHT = """
import pickle, sys
from pathlib import Path
job = pickle.loads(Path(sys.argv[1]).read_bytes())
import m3diff.stages.train.stage
assert job.compute.workers == 2
heavy = {"torch", "deepspeed", "transformers", "peft", "ray", "PIL"} & set(sys.modules)
assert not heavy, heavy
"""


def test_what_a_worker_is_sent_is_read_before_anything_heavy_is_imported(work, tmp_path):
    (tmp_path / "job").write_bytes(pickle.dumps(work()))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", LIGHT, str(tmp_path / "job")], env=environment, check=True, timeout=300)


def test_the_only_worker_leaves_the_linear_as_it_was(monkeypatch):
    """ZeRO 3 replaces torch's `linear` for the whole process, with a version that rounds differently."""
    linear = torch.nn.functional.linear
    monkeypatch.setattr("deepspeed.comm.comm.cdb", None)  # as in a process that has not initialised DeepSpeed yet
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run() -> None:
        with single_worker_group(False):
            assert os.environ["RANK"] == "0"
            assert torch.distributed.get_world_size() == 1
            assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
            torch.nn.functional.linear = lambda *_: None  # type: ignore[assignment]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert torch.nn.functional.linear is linear
    assert os.environ["RANK"] == "3"
    assert "WORLD_SIZE" not in os.environ
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("profile", ["paper", "paper-letter", "one-gpu", "small", "levir-cc", "blip2idc"])
def test_a_profile_in_bf16_adds_gradients_up_in_fp32(profile):
    params = load_params(REPOSITORY / "profiles" / f"{profile}.yaml")
    config = deepspeed_config(params.train, params.compute)
    assert config["bf16"] == {"enabled": True}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}

"""MLflow's store and a training's run in it; a version's data: its chain, its way back from remotes; what goes."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run

from flows.workspace import workspace
from m3diff.__main__ import main
from m3diff.provenance.dvc import Lock, add_worktree, current_stages, dvc_hash, listing, object_file
from m3diff.provenance.git import find_commit, require_own_repository
from m3diff.records.errors import DataError
from m3diff.registry import lineage as chain_of
from m3diff.registry import tracking
from m3diff.registry.lineage import lineage, of_stored
from m3diff.registry.tracking import (
    Description,
    TrackingUnavailableError,
    completed,
    connected,
    followed,
    weights_sha256,
)
from m3diff.registry.versions import reasons
from m3diff.settings.load import load_params
from tests import toy
from tests.registry.conftest import Team
from tests.servers import free_port, until
from tests.toy import REPOSITORY

URI, LOCAL = "sqlite:///services/mlflow/mlflow.db", "sqlite:///mlflow.db"


@pytest.fixture
def store(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty store, current directory."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def own_settings(monkeypatch):
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


def test_what_is_logged_keeps_to_mlflows_names_and_batches_and_no_point_is_logged_twice(store, monkeypatch):
    """MLflow takes 100 parameters or 1000 points in a request, and a parameter once."""
    curves, metrics = store / "curves.csv", store / "metrics.json"
    head, steps = "step,epoch,loss,module_score/17,val_cider\n", range(2, 1302)
    later = "".join(f"{step},{step / 2},{1 / step},,{'0.7' if step == 9 else ''}\n" for step in steps)
    odd = {"by_type": {"less + more (50 %)": {"CIDEr": 2.5}}}
    scores = {"CIDEr": 1.5, "SPICE": None, "intervals": {"CIDEr": {"low": 1}}}
    metrics.write_text(json.dumps({"rows_out": 3, "note": "n", "protocols": {"d/p": scores | odd}}))
    real, largest = MlflowClient.log_batch, {"params": 0, "metrics": 0}

    def log_batch(client: MlflowClient, run_id: str, **entries: list) -> None:
        ((kind, found),) = entries.items()
        largest[kind] = max(largest[kind], len(found))
        real(client, run_id, **entries)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    with connected(LOCAL) as client:
        run = client.create_run(tracking.experiment_id(client, "m3diff")).info.run_id
        client.log_param(run, "a.known", "as it was")
        many = {str(number): number for number in range(250)}
        tracking.log_params(client, run, {"a": {"known": 1, "list": [2, {"d": None}], "empty": {}} | many})
        for text in ("1,0.5,2.5,0.1,\n", *[f"1,0.5,2.5,0.1,\n{later}"] * 2):
            curves.write_text(head + text)
            tracking.log_curves(client, run, curves)
        tracking.log_scores(client, run, metrics, 99)
        data = client.get_run(run).data
        history = {name: client.get_metric_history(run, name) for name in data.metrics}
    points = {(name, point.step): point.value for name, found in history.items() for point in found}
    params = {"a.known": "as it was", "a.list.0": "2", "a.list.1.d": "None"}
    assert data.params == params | {f"a.{number}": str(number) for number in many.values()}
    assert points == {
        **{("train/epoch", step): step / 2 for step in range(1, 1302)},
        **{("train/loss", step): 1 / step for step in steps},
        **{("train/loss", 1): 2.5, ("train/module_score/17", 1): 0.1, ("train/val_cider", 9): 0.7},
        **{("rows_out", 0): 3.0, ("d/p/CIDEr", 0): 1.5, ("d/p/intervals/CIDEr/low", 0): 1.0},
        **{("d/p/by_type/less _ more _50 __/CIDEr", 0): 2.5},
    }
    assert sum(map(len, history.values())) == len(points)
    assert abs(history["train/loss"][0].timestamp / 1000 - time.time()) < 600
    assert largest == {"params": 100, "metrics": 1000}


def test_a_sqlite_store_is_the_project_s_also_where_dvc_runs_an_experiment_in_a_copy(tmp_path, monkeypatch):
    for folder in (".dvc/tmp/exps/standalone/tmpabc", ".dvc/tmp/exps/tmpabc", "."):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        assert tracking.resolve(URI) == f"sqlite:///{tmp_path}/services/mlflow/mlflow.db"
        assert tracking.resolve("sqlite:////elsewhere/mlflow.db") == "sqlite:////elsewhere/mlflow.db"
        assert (Path("services").exists(), (tmp_path / "services" / "mlflow").is_dir()) == (folder == ".", True)
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"tracking_uri sqlite:///a/b.db: .* -e '\.\[train\]'\); else name a server"):
        tracking.resolve("sqlite:///a/b.db")
    assert not (tmp_path / "a").exists()
    assert tracking.resolve("http://127.0.0.1:5000") == "http://127.0.0.1:5000"


def test_a_store_has_its_artifacts_beside_it_or_where_a_server_says_and_one_that_is_gone_is_named(store, monkeypatch):
    with connected(LOCAL) as client:
        assert mlflow.get_tracking_uri() == f"sqlite:///{store}/mlflow.db"
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"
        assert os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] == "false"
        made = tracking.experiment_id(client, "m3diff")
        assert client.get_experiment(made).artifact_location == (store / "artifacts" / "m3diff").as_uri()
        assert tracking.experiment_id(client, "m3diff") == made
        sys.path = ["code of a model", *sys.path]  # as MLflow does where it loads one
    assert "code of a model" not in sys.path
    (store / "damaged.db").write_text("no database")
    with pytest.raises(
        DataError, match=r"/damaged.db: cannot be read \(.*not a database\); if it is damaged, put back"
    ):
        connected("sqlite:///damaged.db").__enter__()
    uri = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TrackingUnavailableError, match=rf"MLflow at {uri} does not answer.*make up.*nothing was lost"):
        connected(uri).__enter__()
    with pytest.raises(KeyError), connected(LOCAL):
        raise KeyError("a bug")
    checks = iter([lambda: None, lambda: (_ for _ in ()).throw(TrackingUnavailableError("gone"))])
    monkeypatch.setattr(tracking, "check_alive", lambda uri: list(next(checks)() or ()))
    with pytest.raises(TrackingUnavailableError, match="gone"), connected(uri):
        raise KeyError("what mlflow raises when a connection breaks")
    created = []
    served = SimpleNamespace(get_experiment_by_name=lambda name: None, create_experiment=lambda *a: created.append(a))
    tracking.experiment_id(served, "m3diff")
    assert created == [("m3diff",)]


@pytest.mark.slow(15)
def test_two_processes_at_once_find_a_new_store_whole(tmp_path):
    program = "import sys; from m3diff.registry.tracking import connected; connected(sys.argv[1]).__enter__()"
    command = [sys.executable, "-c", program, f"sqlite:///{tmp_path}/new/mlflow.db"]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        _, err = process.communicate()
        assert process.returncode == 0, err


@pytest.mark.fault("P14")
@pytest.mark.parametrize("how", ["copied", "moved"])
def test_a_store_that_came_with_its_checkout_has_its_artifacts_here(how, empty_store, tmp_path, monkeypatch, capsys):
    first, there = tmp_path / "first", tmp_path / "there & 50%"
    (first / "services/mlflow").mkdir(parents=True)
    shutil.copy(empty_store, first / "services/mlflow/mlflow.db")
    monkeypatch.chdir(first)
    with connected(URI) as client:
        run = client.create_run(tracking.experiment_id(client, "m3diff"))
        elsewhere = client.create_experiment("team", artifact_location=(tmp_path / "shared/artifacts").as_uri())
    kept = first / "services/mlflow/artifacts/m3diff" / run.info.run_id / "artifacts"
    assert run.info.artifact_uri == kept.as_uri()
    kept.mkdir(parents=True)
    (kept / "scores.json").write_text("1.1")
    assert capsys.readouterr().err == ""
    (shutil.copytree(first, there) if how == "copied" else first.rename(there))
    monkeypatch.chdir(there)
    with connected(URI) as client:
        assert capsys.readouterr().err.count("\n") == 1
        client.log_text(run.info.run_id, "1.9", "scores.json")
        assert client.get_experiment(elsewhere).artifact_location == (tmp_path / "shared/artifacts").as_uri()
        assert client.get_experiment_by_name("m3diff").artifact_location.startswith(there.as_uri())
    assert {file.read_text() for file in (there / "services").rglob("scores.json")} == {"1.9"}
    if how == "copied":
        assert {file.read_text() for file in (first / "services").rglob("scores.json")} == {"1.1"}
    with connected(URI):
        assert "came from" not in capsys.readouterr().err


PARAMS = {"train": {"seed": 7, "epochs": 2.5}, "models": {"m3diff": {"lora": {"rank": 8}}}}
FIRST, SECOND = "step,loss,val_loss\n1,2.5,\n2,1.5,1.75\n", "3,1.25,\n"
WHOLE = [(1, 2.5), (2, 1.5), (3, 1.25)]


class Training:
    """A training that ended, and what its store holds of it."""

    def __init__(self, root: Path) -> None:
        self.model, self.curves, self.metrics = root / "model", root / "curves.csv", root / "metrics.json"
        self.client = MlflowClient(f"sqlite:///{root}/mlflow.db")
        self.metrics.write_text(json.dumps({"protocols": {"toy/all": {"CIDEr": 1.25}}}))
        self.write("a")

    def write(self, weights: str) -> None:
        (self.model / "checkpoint").mkdir(parents=True, exist_ok=True)
        manifest = {"files": {"model.safetensors": weights, "config.json": "same"}}
        (self.model / "checkpoint" / "manifest.json").write_text(json.dumps(manifest))
        (self.model / "curves.csv").write_text(FIRST + SECOND)

    def followed(self, work: Callable[[], object] = bool, key: str = "key", uri: str = LOCAL) -> None:
        with followed(Description(uri, "m3diff", "m3diff", PARAMS, 32), self.model, key, self.curves):
            work()

    def completed(self, max_new_tokens: int = 32, uri: str = LOCAL) -> None:
        completed(Description(uri, "m3diff", "m3diff", PARAMS, max_new_tokens), self.model, self.metrics)

    def runs(self) -> list[Run]:
        experiment = self.client.get_experiment_by_name("m3diff")
        return list(self.client.search_runs([experiment.experiment_id])) if experiment else []

    @property
    def run(self) -> Run:
        (run,) = self.runs()
        return run

    def points(self, name: str) -> list[tuple[int, float]]:
        history = self.client.get_metric_history(self.run.info.run_id, f"train/{name}")
        return [(point.step, point.value) for point in history]


@pytest.fixture
def training(store, monkeypatch) -> Training:
    monkeypatch.setattr(tracking, "EVERY_S", 0.05)
    return Training(store)


def test_curves_are_in_the_run_after_a_checkpoint_and_the_rest_when_it_ends(training):
    def work() -> None:
        until(training.runs)
        training.curves.write_text(FIRST)
        until(lambda: training.points("val_loss") == [(2, 1.75)])
        assert training.points("loss") == WHOLE[:2]
        assert training.run.info.status == "RUNNING"

    training.followed(work)
    run = training.run
    assert (run.info.status, training.points("loss"), training.points("val_loss")) == ("FINISHED", WHOLE, [(2, 1.75)])
    assert run.data.params == {"train.seed": "7", "train.epochs": "2.5", "models.m3diff.lora.rank": "8"}
    assert run.data.tags["weights.sha256"] == weights_sha256(training.model / "checkpoint" / "manifest.json")
    training.followed(key="other")
    assert len(training.runs()) == 2, "another training"


@pytest.mark.parametrize(("how", "status"), [(SystemExit(143), "KILLED"), (ValueError("no"), "FAILED")])
def test_a_run_that_was_ended_goes_on_as_the_same_run_and_logs_no_point_twice(how, status, training):
    def work() -> None:
        training.curves.write_text(FIRST)
        raise how

    with pytest.raises(type(how)):
        training.followed(work)
    assert (training.run.info.status, training.points("loss")) == (status, WHOLE[:2])
    assert "weights.sha256" not in training.run.data.tags
    training.followed()
    assert (training.run.info.status, training.points("loss")) == ("FINISHED", WHOLE)


def test_the_scores_go_to_the_run_of_the_training_and_of_another_length_limit_to_another(training, monkeypatch):
    training.followed()
    assert training.run.info.run_name.startswith("m3diff 20")
    for _ in range(2):
        training.completed()
    assert (training.run.data.metrics["toy/all/CIDEr"], training.run.info.status) == (1.25, "FINISHED")
    training.completed(max_new_tokens=8)
    assert sorted(run.data.tags["predict.max_new_tokens"] for run in training.runs()) == ["32", "8"]
    training.write("b")
    monkeypatch.setenv("DVC_EXP_NAME", "lower-rate")
    monkeypatch.setenv("M3DIFF_FLOW_RUN", "4711")
    training.completed()
    assert len(training.runs()) == 3, "other weights"
    (named,) = [run for run in training.runs() if run.info.run_name == "lower-rate"]
    assert named.data.tags["prefect.flow_run"] == "4711"


def test_a_store_that_does_not_answer_hinders_no_training_and_is_caught_up_with(training, capsys):
    gone = f"http://127.0.0.1:{free_port()}"
    training.followed(lambda: time.sleep(0.3), uri=gone)
    training.completed(uri=gone)
    *warnings, curves, scores = capsys.readouterr().out.splitlines()
    assert len(warnings) == 1, "at the beginning, at each checkpoint and at the end"
    assert curves.startswith("train: MLflow does not take the curves now (MLflow at")
    assert scores.startswith("evaluate: MLflow does not take the scores now")
    training.completed()
    assert (training.points("loss"), training.run.data.metrics["toy/all/CIDEr"]) == (WHOLE, 1.25)


CHECKPOINT, PREDICTIONS = "data/05_model/checkpoint", "data/06_predictions/predictions.json"


@pytest.fixture
def project(team: Team, monkeypatch: pytest.MonkeyPatch) -> Team:
    monkeypatch.chdir(team.project)
    return team


def faults() -> list[tuple[str, str, str]]:
    checks = lineage(load_params().register_, "1")
    return [(check.outcome, check.what, str(check.where)) for check in checks if check.outcome != "ok"]


@pytest.fixture
def change() -> Iterator[Callable[..., None]]:
    """Write a file anew, or take it away; it is put back at the end."""
    with ExitStack() as stack:

        def put_back(path: Path, mode: int, content: bytes) -> None:
            path.unlink(missing_ok=True)
            path.write_bytes(content)
            path.chmod(mode)

        def change(path: Path, text: str | None = None) -> None:
            stack.callback(put_back, path, path.stat().st_mode, path.read_bytes())
            path.unlink()
            if text is not None:
                path.write_text(text)

        yield change


def test_the_chain_goes_from_raw_data_to_the_commit_and_holds(project, capsys):
    assert main(["lineage", "challenger"]) == 0
    lines = capsys.readouterr().out.splitlines()
    links = [line[9:21].strip() for line in lines]
    ends = ["checkpoint", "stored model", "weights", "predictions", "metrics", "dvc.lock", "commit"]
    assert list(dict.fromkeys(links)) == ["raw data", "records", "mixture", "base", "model code", *ends]
    assert all(line.startswith("ok ") for line in lines)
    recorded = Lock().hashes(Path(CHECKPOINT))["train outs"]
    assert recorded[:12] in next(line for line in lines if "checkpoint" in line)
    lock = Lock()
    ran = list(lock.stages)
    lock.stages |= {"ingest@taken_out": {}, "no_stage": {}}
    assert current_stages("HEAD", lock) == ran
    with pytest.raises(DataError, match=r"not in this clone, nor in its remotes \(origin\)"):
        find_commit("0" * 40)


@pytest.mark.fault("09")
def test_another_content_in_the_cache_the_remote_or_mlflow_is_named(project, change):
    hash_ = Lock().hashes(Path(PREDICTIONS))["predict outs"]
    cached = object_file(project.project / ".dvc/cache", hash_)
    change(cached, "damaged")
    assert faults() == [("differs", "predictions", PREDICTIONS)]
    change(cached)
    change(object_file(project.remote, hash_))
    assert faults() == [("missing", "predictions", PREDICTIONS)]
    (word,) = (project.database.parent / "artifacts").rglob("word.txt")
    for text in ("another", None):
        change(word, text)
        assert faults() == [("differs", "stored model", "models:/m3diff/1"), ("missing", "predictions", PREDICTIONS)]


@pytest.mark.parametrize(
    ("tag", "value", "outcome", "what"),
    [
        ("dvc.checkpoint", "0" * 32, "differs", "checkpoint"),
        ("dvc.data", "0" * 32, "differs", "mixture"),
        ("dvc.raw.minichange", "0" * 32, "differs", "raw data"),
        ("dvc.raw.gone", "0" * 32, "missing", "raw data"),
        ("dvc.base", "0" * 32, "differs", "base"),
        ("base.sha256", "0" * 64, "differs", "base"),
        ("dvc.code", "0" * 32, "differs", "model code"),
        ("dvc.metrics", "0" * 32, "differs", "metrics"),
        ("weights.sha256", "0" * 64, "differs", "weights"),
        ("dvc.lock.sha256", "0" * 64, "differs", "dvc.lock"),
        ("git.dirty", "true", "differs", "commit"),
        ("git.commit", "0" * 40, "missing", "commit"),
    ],
)
def test_a_tag_that_says_something_else_is_named(project, monkeypatch, tag, value, outcome, what):
    """Of the version as MLflow gives it."""
    real = chain_of.find_version

    def find_version(*asked: object) -> SimpleNamespace:
        found = real(*asked)
        return SimpleNamespace(name="m3diff", version="1", tags=found.tags | {tag: value})

    monkeypatch.setattr(chain_of, "find_version", find_version)
    assert (outcome, what) in [(found, link) for found, link, _ in faults()]
    assert main(["lineage", "1"]) == 3


@pytest.mark.parametrize("outcome", ["ok", "differs", "missing"])
def test_a_version_that_keeps_adapters_alone_is_compared_with_its_tag(outcome, tmp_path, monkeypatch):
    adapters, cache, whole = tmp_path / "adapters", tmp_path / "cache", "c" * 32 + ".dir"
    adapters.mkdir()
    (adapters / "tuned.safetensors").write_text("tuned")
    manifest = object_file(cache, "a" * 32)
    for file, content in (
        (manifest, {"base_sha256": "b", "files": {"model.safetensors": "w"}}),
        (object_file(cache, whole), [{"md5": "a" * 32, "relpath": "manifest.json"}]),
    ):
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(content))
    tags = {"dvc.checkpoint": whole, "weights.sha256": weights_sha256(manifest), "base.sha256": "b"}
    tags["dvc.adapters"] = "0" * 32 if outcome == "differs" else dvc_hash(adapters)
    kept = adapters if outcome != "missing" else tmp_path / "gone"
    monkeypatch.setattr(chain_of, "download_checkpoint", lambda version, into: Path(kept).resolve(strict=True))
    version = SimpleNamespace(name="m3diff", version="1", tags=tags)
    found = {check.what: check.outcome for check in of_stored(version, cache)}
    assert found == {"stored model": outcome, "weights": "ok", "base": "ok"}


# A fresh clone and the remotes alone give a version's data, parameters and checkpoint back

PARTS = ("data/01_raw/minichange", "data/02_records/minichange", "data/04_mixture/test", CHECKPOINT)


@pytest.fixture
def clone(team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a cache of its own; it knows of no run's branch yet."""
    toy.run(tmp_path, "git", "clone", "--quiet", "--single-branch", str(team.origin), "clone")
    monkeypatch.chdir(tmp_path / "clone")
    return tmp_path / "clone"


@pytest.mark.fault("S1", "T17")
@pytest.mark.slow(25)
def test_a_version_comes_back_in_a_fresh_clone_with_the_same_hashes_past_dvcs_own_hooks(team, clone, tmp_path, capsys):
    notes = {check.what: check.note for check in lineage(load_params().register_, "1")}
    assert notes["checkpoint"] == "in the remote"
    assert faults() == [], "without a cache its manifest cannot be read, but nothing is wrong"
    assert toy.run(clone, "git", "worktree", "list").count("\n") == 1
    toy.run(clone, "dvc", "install")
    out = tmp_path / "out"
    for _ in range(2):  # and again where a person removed the folder
        shutil.rmtree(out, ignore_errors=True)
        capsys.readouterr()
        assert main(["restore", "1", "--into", "../out"]) == 0
    assert [dvc_hash(out / part) for part in PARTS] == [dvc_hash(team.project / part) for part in PARTS]
    for file in ("params.yaml", "dvc.lock", "data/07_report/metrics.json"):
        assert (out / file).read_bytes() == (team.project / file).read_bytes()
    assert toy.status(out) == {}
    said = capsys.readouterr().out
    assert f"restored to {out}" in said
    for line in ("checkpoint   data/05_model/checkpoint", "parameters   train", "dvc.lock     dvc.lock"):
        assert f"ok       {line}" in said
    assert "missing" not in said


@pytest.mark.fault("09")
@pytest.mark.slow(15)
def test_a_branch_needs_no_mlflow_and_of_a_remote_that_lost_a_file_the_rest_is_restored(team, clone, tmp_path, capsys):
    params = yaml.safe_load(Path("params.yaml").read_text())
    params["register"]["tracking_uri"] = "http://127.0.0.1:9"
    Path("params.yaml").write_text(yaml.safe_dump(params))
    broken = Path(shutil.copytree(team.remote, tmp_path / "remote"))
    toy.run(clone, "dvc", "remote", "modify", "--local", "store", "url", str(broken))
    lost = object_file(broken, dvc_hash(team.project / CHECKPOINT / "word.txt"))
    lost.chmod(0o644)
    lost.unlink()
    assert main(["restore", "runs/first", "--into", str(tmp_path / "remote")]) == 3
    assert "exists; name another with --into" in capsys.readouterr().err
    assert main(["restore", "runs/first", "--into", str(tmp_path / "lost")]) == 3
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.split()[1:3] == ["data", CHECKPOINT]]
    assert line.split()[0] in ("missing", "differs")
    assert "NOT restored, see above" in said
    assert "ok       data         data/04_mixture/train" in said


def of_version(team: Team, number: int) -> tuple[Path, set[Path], str]:
    """The files of a version in MLflow and in DVC's cache, and its run."""
    version = team.client.get_model_version("m3diff", str(number))
    model = team.client.get_logged_model(version.source.removeprefix("models:/"))
    cache = team.project / ".dvc/cache"
    cached = {object_file(cache, hash_) for hash_ in listing(cache, version.tags["dvc.checkpoint"]).values()}
    return Path(model.artifact_location.removeprefix("file://")), cached, version.run_id


@pytest.mark.slow(100)
def test_old_versions_go_with_all_that_is_theirs_alone(trained_once, empty_store, tmp_path, monkeypatch, capsys):
    """Three versions of three branches: the first is the champion, the last the challenger."""
    three = Team(tmp_path, trained_once, empty_store)
    for name, seed in (("first", None), ("second", 1), ("third", 2)):
        three.run(name, seed)
    client = three.client
    client.set_registered_model_alias("m3diff", "champion", "1")
    monkeypatch.chdir(three.project)

    def left() -> tuple[list[int], set[str]]:
        versions = sorted(int(version.version) for version in client.search_model_versions("name = 'm3diff'"))
        branches = toy.run(three.project, "git", "for-each-ref", "--format=%(refname)").split()
        return versions, {name for name in branches if "runs/" in name}

    (stored, cached, _), (stored_too, cached_too, run) = of_version(three, 1), of_version(three, 2)
    places = ("heads", "remotes/origin")
    everywhere = {f"refs/{at}/runs/{name}" for at in places for name in ("first", "second", "third")}
    for arguments, code in ((["--dry-run"], 0), ([], 2), (["--dry-run", "--yes"], 0)):
        assert main(["prune", "--keep", "1", *arguments]) == code
        said = capsys.readouterr().out
        for line in ("keep    version 3: challenger", "keep    version 1: champion", "remove  version 2\n"):
            assert line in said
        assert "remove  branch heads/runs/second" in said
        assert "data    dvc gc --workspace --all-commits" in said
        assert "frees   0 GB" not in said
        assert (left(), stored_too.is_dir()) == (([1, 2, 3], everywhere), True)

    assert main(["prune", "--keep", "1", "--yes"]) == 0
    assert left() == ([1, 3], {name for name in everywhere if "second" not in name})
    assert "second" not in toy.run(three.project, "git", "ls-remote", "origin")
    assert (stored.is_dir(), stored_too.is_dir()) == (True, False)
    assert all(file.is_file() for file in cached)
    assert not any(file.is_file() for file in cached_too - cached)
    data = client.get_run(run).data
    assert (data.tags["pruned"], bool(data.metrics)) == ("true", True)
    for number in ("1", "3"):
        assert [str(check) for check in lineage(load_params().register_, number) if check.outcome != "ok"] == []
    assert main(["prune", "--keep", "1"]) == 0, "nothing is left to remove"


def test_what_a_kept_versions_training_began_with_stays_and_so_does_what_that_began_with():
    began = {5: ("e", "d"), 4: ("d", "c"), 3: ("c", "a"), 2: ("b", "x"), 1: ("a", "x")}
    tags = {number: {"dvc.checkpoint": checkpoint, "dvc.base": base} for number, (checkpoint, base) in began.items()}
    there: Any = [SimpleNamespace(version=str(number), tags=found) for number, found in tags.items()]
    assert reasons(there, {4: ["champion", "previous"]}, 1) == {
        5: "one of the newest",
        4: "champion, previous",
        3: "version 4 was trained from it",
        1: "version 3 was trained from it",
    }
    assert list(reasons(there, {}, 0)) == []


# A project that is no repository of its own is refused before anything is begun, with what to type


def sh(script: str, folder: Path) -> str:
    person = "-c user.name=a -c user.email=a@localhost -c protocol.file.allow=always"
    script = f'git() {{ command git {person} "$@"; }}\n{script}'
    done = subprocess.run(["bash", "-ec", script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A repository of one file."""
    (tmp_path / "base").mkdir()
    sh("git init -q; echo a > params.yaml; git add -A; git commit -qm one", tmp_path / "base")
    return tmp_path / "base"


ADD = "git add -A; git commit -qm two"
ODD = {
    "mono/a/b": f"git init -q mono; cd mono; mkdir -p a/b; echo a > a/b/c; {ADD}",
    "super/m3": "git init -q super; cd super; git submodule --quiet add ../base m3; git commit -qm two",
}
"""Where the project is: in a folder of a larger repository, in a submodule; and what makes it."""


@pytest.mark.fault("P13")
@pytest.mark.parametrize("at", ODD)
def test_a_run_is_refused_before_it_begins_and_the_remedy_works_as_printed(at, base, tmp_path, monkeypatch):
    sh(ODD[at], tmp_path)
    place = tmp_path / at
    monkeypatch.chdir(place)
    with pytest.raises(DataError) as refused, workspace("one", None, [], False):
        pytest.fail("began")
    assert not (place / "runs").exists()
    (line,) = str(refused.value).splitlines()
    (remedy,) = re.findall(r"`(git [^`]*)`", line)
    top = sh("git rev-parse --show-toplevel", place).strip()
    sh(remedy.replace("FOLDER", str(tmp_path / "new")), Path(top))
    monkeypatch.chdir(tmp_path / "new")
    assert Path(".git").is_dir()
    with pytest.raises(Exception) as met, workspace("one", "HEAD", [], False):
        pytest.fail("no project of DVC")
    assert not isinstance(met.value, DataError) or "repository" not in str(met.value)


@pytest.mark.fault("P13")
@pytest.mark.parametrize(
    ("make", "said"),
    [("rm -rf .git; git init -q --object-format=sha256", "sha256"), ("git branch runs", "git branch -m runs OTHER")],
)
def test_a_repository_in_which_no_run_could_begin_is_refused(make, said, base, monkeypatch):
    monkeypatch.chdir(base)
    sh("git branch runs/one", base)
    require_own_repository()
    sh("git branch -D runs/one; " + make, base)
    with pytest.raises(DataError, match=said):
        require_own_repository()


@pytest.mark.fault("P9")
def test_a_run_s_worktree_has_the_bytes_of_the_commit_whatever_autocrlf_says(base, tmp_path, monkeypatch):
    (tmp_path / "settings").write_text("[core]\n\tautocrlf = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "settings"))
    monkeypatch.chdir(base)
    shutil.copytree(REPOSITORY / ".dvc", base / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp", "config.local"))
    sh("git add -A; git commit -qm dvc", base)
    add_worktree("HEAD", tmp_path / "mü ller")
    assert (tmp_path / "mü ller" / "params.yaml").read_bytes() == b"a\n"
    assert str(base / ".dvc/cache") in (tmp_path / "mü ller/.dvc/config.local").read_text(encoding="utf-8")

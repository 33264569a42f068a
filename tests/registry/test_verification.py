"""The lineage of a version is verified link by link, and a version is restored in a fresh clone."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from m3diff.__main__ import main
from m3diff.provenance.dvc import Lock, current_stages, dvc_hash, object_file, read_lock, run_dvc
from m3diff.provenance.git import find_commit
from m3diff.records.errors import DataError
from m3diff.registry import verification
from m3diff.registry.restore import check_restored, restore
from m3diff.registry.tracking import weights_sha256
from m3diff.registry.verification import (
    LineageCheck,
    all_ok,
    check_stored_model,
    compare_hashes,
    verify_lineage,
)
from m3diff.settings.load import load_params
from tests import toy
from tests.errors import Message, raises
from tests.registry.conftest import Team

CHECKPOINT = "data/05_model/checkpoint"
PREDICTIONS = "data/06_predictions/predictions.json"


@pytest.fixture
def project(team: Team, monkeypatch: pytest.MonkeyPatch) -> Team:
    monkeypatch.chdir(team.project)
    return team


def faults() -> list[tuple[str, str, str]]:
    """Return the outcome, part and location of each link of version 1 that is not ok."""
    checks = verify_lineage(load_params().register_, "1")
    return [(check.outcome, check.part, str(check.location)) for check in checks if check.outcome != "ok"]


@pytest.fixture
def replace_file() -> Iterator[Callable[..., None]]:
    """Replace a file, or remove it if there is no text. It is restored at the end."""
    with ExitStack() as stack:

        def restore_file(path: Path, mode: int, content: bytes) -> None:
            path.unlink(missing_ok=True)
            path.write_bytes(content)
            path.chmod(mode)

        def replace_file(path: Path, text: str | None = None) -> None:
            stack.callback(restore_file, path, path.stat().st_mode, path.read_bytes())
            path.unlink()
            if text is not None:
                path.write_text(text)

        yield replace_file


# The chain


def test_the_chain_goes_from_raw_data_to_the_commit_and_holds(project, capsys):
    assert main(["lineage", "challenger"]) == 0
    lines = capsys.readouterr().out.splitlines()
    parts = [line[9:21].strip() for line in lines]
    last_parts = ["checkpoint", "stored model", "weights", "predictions", "metrics", "dvc.lock", "commit"]
    assert list(dict.fromkeys(parts)) == ["raw data", "records", "mixture", "base", "model code", *last_parts]
    assert all(line.startswith("ok ") for line in lines)


def test_a_line_of_the_chain_has_the_hash_in_dvc_lock(project, capsys):
    main(["lineage", "challenger"])
    recorded_hash = Lock().hashes(Path(CHECKPOINT))["train outs"]
    line = next(line for line in capsys.readouterr().out.splitlines() if "checkpoint" in line)
    assert recorded_hash[:12] in line


def test_stages_that_left_dvc_yaml_are_not_current(project):
    lock = Lock()
    stages = list(lock.stages)
    lock.stages |= {"ingest@taken_out": {}, "no_stage": {}}
    assert current_stages("HEAD", lock) == stages


def test_a_commit_that_no_remote_has_is_refused(project):
    with raises(DataError, "git.commit_not_in_remotes", value="0" * 40, remotes=["origin"]):
        find_commit("0" * 40)


def test_a_commit_without_a_lock_file_lacks_it_in_the_chain(project, monkeypatch):
    monkeypatch.setattr(verification, "read_from_commit", lambda commit, path: None)
    (fault,) = faults()
    assert fault[:2] == ("missing", "dvc.lock")


@pytest.fixture
def prediction_hash(project: Team) -> str:
    return Lock().hashes(Path(PREDICTIONS))["predict outs"]


@pytest.mark.fault("09")
def test_damage_in_the_cache_is_found(project, prediction_hash, replace_file):
    replace_file(object_file(project.project / ".dvc/cache", prediction_hash), "damaged")
    assert faults() == [("differs", "predictions", PREDICTIONS)]


@pytest.mark.fault("09")
def test_content_that_is_neither_in_the_cache_nor_in_the_remote_is_missing(project, prediction_hash, replace_file):
    replace_file(object_file(project.project / ".dvc/cache", prediction_hash))
    replace_file(object_file(project.remote, prediction_hash))
    assert faults() == [("missing", "predictions", PREDICTIONS)]


@pytest.mark.fault("09")
@pytest.mark.parametrize("text", ["another", None], ids=["changed", "removed"])
def test_a_changed_file_of_the_stored_model_is_found(text, project, replace_file):
    (file,) = (project.database.parent / "artifacts").rglob("word.txt")
    replace_file(file, text)
    assert faults() == [("differs", "stored model", "models:/m3diff/1")]


@pytest.mark.parametrize(
    ("tag", "value", "outcome", "part"),
    [
        ("dvc.checkpoint", "0" * 32, "differs", "checkpoint"),
        pytest.param("dvc.data", "0" * 32, "differs", "mixture", marks=pytest.mark.slow(2)),
        pytest.param("dvc.raw.minichange", "0" * 32, "differs", "raw data", marks=pytest.mark.slow(2)),
        ("dvc.raw.gone", "0" * 32, "missing", "raw data"),
        pytest.param("dvc.base", "0" * 32, "differs", "base", marks=pytest.mark.slow(2)),
        pytest.param("base.sha256", "0" * 64, "differs", "base", marks=pytest.mark.slow(2)),
        pytest.param("dvc.code", "0" * 32, "differs", "model code", marks=pytest.mark.slow(2)),
        pytest.param("dvc.metrics", "0" * 32, "differs", "metrics", marks=pytest.mark.slow(2)),
        ("weights.sha256", "0" * 64, "differs", "weights"),
        pytest.param("dvc.lock.sha256", "0" * 64, "differs", "dvc.lock", marks=pytest.mark.slow(2)),
        ("git.dirty", "true", "differs", "commit"),
        ("git.commit", "0" * 40, "missing", "commit"),
    ],
)
def test_a_tag_that_does_not_match_the_content_is_found(project, monkeypatch, tag, value, outcome, part):
    find_version = verification.find_version

    def find_version_with_other_tag(*arguments: Any) -> SimpleNamespace:
        version = find_version(*arguments)
        return SimpleNamespace(name="m3diff", version="1", tags=version.tags | {tag: value})

    monkeypatch.setattr(verification, "find_version", find_version_with_other_tag)
    assert (outcome, part) in [fault[:2] for fault in faults()]
    assert main(["lineage", "1"]) == 3


@pytest.mark.parametrize(
    ("expected", "actual", "outcome", "shown_hash"),
    [
        ("1" * 32, "1" * 32, "ok", "1" * 32),
        ("1" * 32, "2" * 32, "differs", "1" * 32),
        ("1" * 32, None, "missing", "1" * 32),
        (None, "2" * 32, "missing", "2" * 32),
        (None, None, "missing", ""),
    ],
    ids=["equal", "different", "no content", "no tag", "neither"],
)
def test_content_is_ok_only_if_it_has_the_hash_of_the_version(expected, actual, outcome, shown_hash):
    check = compare_hashes("mixture", "a", expected, actual)
    assert check.outcome == outcome
    assert check.hash == shown_hash
    assert all_ok([check]) == (outcome == "ok")


@pytest.mark.parametrize("outcome", ["ok", "differs", "missing"])
def test_a_version_that_keeps_adapters_alone_is_compared_with_its_tag(outcome, tmp_path, monkeypatch):
    adapters = tmp_path / "adapters"
    cache = tmp_path / "cache"
    checkpoint_hash = "c" * 32 + ".dir"
    adapters.mkdir()
    (adapters / "tuned.safetensors").write_text("tuned")
    manifest = object_file(cache, "a" * 32)
    for file, content in (
        (manifest, {"base_sha256": "b", "files": {"model.safetensors": "w"}}),
        (object_file(cache, checkpoint_hash), [{"md5": "a" * 32, "relpath": "manifest.json"}]),
    ):
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(content))
    tags = {"dvc.checkpoint": checkpoint_hash, "weights.sha256": weights_sha256(manifest), "base.sha256": "b"}
    tags["dvc.adapters"] = "0" * 32 if outcome == "differs" else dvc_hash(adapters)
    stored_folder = adapters if outcome != "missing" else tmp_path / "gone"
    monkeypatch.setattr(
        verification, "download_checkpoint", lambda version, into: Path(stored_folder).resolve(strict=True)
    )
    version: Any = SimpleNamespace(name="m3diff", version="1", tags=tags)
    outcomes = {check.part: check.outcome for check in check_stored_model(version, cache)}
    assert outcomes == {"stored model": outcome, "weights": "ok", "base": "ok"}


# Restore in a fresh clone, from the remotes alone

PATHS = ("data/01_raw/minichange", "data/02_records/minichange", "data/04_mixture/test", CHECKPOINT)


@pytest.fixture
def clone(team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a clone with an empty cache and without the branches of runs. It is the current directory."""
    toy.run(tmp_path, "git", "clone", "--quiet", "--single-branch", str(team.origin), "clone")
    monkeypatch.chdir(tmp_path / "clone")
    return tmp_path / "clone"


@pytest.mark.fault("S1")
def test_the_lineage_holds_in_a_clone_without_a_cache(clone):
    notes = {check.part: check.note for check in verify_lineage(load_params().register_, "1")}
    assert notes["checkpoint"] == "in the remote"
    assert faults() == [], "without a cache the manifest cannot be read, which is no fault"
    assert toy.run(clone, "git", "worktree", "list").count("\n") == 1


@pytest.mark.fault("S1", "T17")
@pytest.mark.slow(25)
def test_a_version_is_restored_in_a_fresh_clone_despite_dvc_s_hooks(team, clone, tmp_path, capsys):
    toy.run(clone, "dvc", "install")
    folder = tmp_path / "out"
    for _ in range(2):  # and again after a person removed the folder
        shutil.rmtree(folder, ignore_errors=True)
        capsys.readouterr()
        assert main(["restore", "1", "--into", "../out"]) == 0
    assert [dvc_hash(folder / path) for path in PATHS] == [dvc_hash(team.project / path) for path in PATHS]
    for file in ("params.yaml", "dvc.lock", "data/07_report/metrics.json"):
        assert (folder / file).read_bytes() == (team.project / file).read_bytes()
    assert toy.status(folder) == {}
    printed = capsys.readouterr().out
    assert f"restored to {folder}" in printed
    for line in ("checkpoint   data/05_model/checkpoint", "parameters   train", "dvc.lock     dvc.lock"):
        assert f"ok       {line}" in printed
    assert "missing" not in printed


@pytest.mark.fault("09")
def test_a_folder_that_exists_is_not_overwritten_by_restore(clone, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    assert main(["restore", "runs/first", "--into", str(tmp_path / "mine")]) == 3
    assert Message("registry.restore_folder_exists", path=tmp_path / "mine").in_text(capsys.readouterr().err)


@pytest.mark.fault("09")
@pytest.mark.slow(15)
def test_a_branch_is_restored_without_mlflow_and_despite_a_lost_file(team, clone, tmp_path, capsys):
    params = yaml.safe_load(Path("params.yaml").read_text())
    params["register"]["tracking_uri"] = "http://127.0.0.1:9"
    Path("params.yaml").write_text(yaml.safe_dump(params))
    broken_remote = Path(shutil.copytree(team.remote, tmp_path / "remote"))
    toy.run(clone, "dvc", "remote", "modify", "--local", "store", "url", str(broken_remote))
    lost_file = object_file(broken_remote, dvc_hash(team.project / CHECKPOINT / "word.txt"))
    lost_file.chmod(0o644)
    lost_file.unlink()
    assert main(["restore", "runs/first", "--into", str(tmp_path / "restored")]) == 3
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.split()[1:3] == ["data", CHECKPOINT]]
    assert line.split()[0] in ("missing", "differs")
    assert "NOT restored, see above" in printed
    assert "ok       data         data/04_mixture/train" in printed


def test_a_missing_path_of_a_restored_version_has_dvc_s_error_as_its_note(team, clone, tmp_path, monkeypatch):
    error = DataError("dvc.command_failed", command="dvc fetch --quiet", folder=tmp_path, cause="no such remote")
    tags = team.client.get_model_version("m3diff", "1").tags

    def fail_to_fetch(folder: Path, command: str, *arguments: str) -> str:
        if command == "fetch":
            raise error
        return "" if command == "checkout" else run_dvc(folder, command, *arguments)

    def find_missing(folder: Path, commit: str, lock: Lock, tags_of_version: dict[str, str]) -> Iterator[LineageCheck]:
        assert commit == tags["git.commit"]
        assert tags_of_version == tags
        yield LineageCheck("data", "a", "1" * 32, "ok")
        yield LineageCheck("data", "b", "1" * 32, "missing")

    monkeypatch.setattr("m3diff.provenance.dvc.run_dvc", fail_to_fetch)
    monkeypatch.setattr("m3diff.registry.restore.check_restored", find_missing)
    folder, restored = restore(load_params().register_, "1", None)
    assert folder == clone.with_name("clone-1")
    assert toy.run(folder, "git", "rev-parse", "HEAD").strip() == tags["git.commit"]
    assert {check.location: check.note for check in restored} == {"a": "", "b": str(error)}


CHECKED_TAGS = {("dvc.lock", "dvc.lock"), ("model code", "code/predict.json"), ("checkpoint", CHECKPOINT)}


@pytest.fixture
def restored_parts(project: Team) -> Callable[..., dict[tuple[str, str], str]]:
    """Check the project as if it had been restored. Return the outcomes that are not ok, by part and location."""
    tags = project.client.get_model_version("m3diff", "1").tags
    commit = tags["git.commit"]

    def check(lock: Lock | None = None, **changed_tags: str) -> dict[tuple[str, str], str]:
        changes = {tag.replace("__", "."): value for tag, value in changed_tags.items()}
        checks = list(check_restored(project.project, commit, lock or read_lock(commit), tags | changes))
        checked_parts = {(check.part, str(check.location)) for check in checks}
        assert checked_parts >= {("data", PREDICTIONS), ("parameters", "train"), *CHECKED_TAGS}
        return {(check.part, str(check.location)): check.outcome for check in checks if check.outcome != "ok"}

    return check


def test_a_restored_version_is_compared_with_its_tags(restored_parts):
    assert restored_parts() == {}
    other_hash = "0" * 32
    different_parts = restored_parts(dvc__code=other_hash, dvc__lock__sha256=other_hash, dvc__checkpoint=other_hash)
    assert different_parts == dict.fromkeys(CHECKED_TAGS, "differs")


def test_restored_data_and_parameters_are_compared_with_the_lock(restored_parts, project):
    lock = Lock()
    lock.stages["train"]["params"]["params.yaml"]["train"] = {"seed": "another"}
    (output,) = [output for output in lock.stages["predict"]["outs"] if output["path"] == PREDICTIONS]
    output["md5"] = "0" * 32
    assert restored_parts(lock) == {("data", PREDICTIONS): "differs", ("parameters", "train"): "differs"}

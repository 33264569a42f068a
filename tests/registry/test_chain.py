"""The chain behind a version: every link is there, and a fault in any of them is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest

from m3diff.__main__ import main
from m3diff.provenance.dvc import Lock, dvc_hash, md5
from m3diff.registry import restore as chain_of
from m3diff.registry.lineage import weights_sha256
from m3diff.registry.restore import compared, lineage, of_stored, sound
from m3diff.settings.load import load_params
from tests import toy
from tests.registry.team import Team


@pytest.fixture
def project(team: Team, monkeypatch: pytest.MonkeyPatch) -> Team:
    monkeypatch.chdir(team.project)
    return team


def chain(version: str = "1") -> list:
    return lineage(load_params().register_, version)


def faults(version: str = "1") -> list[tuple[str, str, str]]:
    return [(check.outcome, check.what, check.where) for check in chain(version) if check.outcome != "ok"]


def test_the_chain_goes_from_raw_data_to_the_commit_and_holds(project, capsys):
    assert main(["lineage", "challenger"]) == 0
    lines = capsys.readouterr().out.splitlines()
    links = [line[9:21].strip() for line in lines]
    assert list(dict.fromkeys(links)) == [
        "raw data", "records", "mixture", "base", "model code", "checkpoint", "stored model", "weights", "predictions",
        "metrics", "dvc.lock", "commit",
    ]  # fmt: skip
    assert all(line.startswith("ok ") for line in lines)
    recorded = Lock().hashes(Path("data/05_model/checkpoint"))["train outs"]
    assert recorded[:12] in next(line for line in lines if "checkpoint" in line)


@pytest.mark.slow(12)
def test_what_only_the_remote_has_is_found_there(project, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(project.clone(tmp_path))
    said = [check for check in chain() if check.what == "checkpoint"]
    assert [(check.outcome, check.note) for check in said] == [("ok", "in the remote")]
    assert faults() == [], "without a cache its manifest cannot be read, but nothing is wrong"
    assert toy.run(Path.cwd(), "git", "worktree", "list").count("\n") == 1


def cut(path: Path) -> Callable[[], None]:
    """Take a file away and give back what puts it there again."""
    mode, content = path.stat().st_mode, path.read_bytes()
    path.unlink()

    def back() -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        path.chmod(mode)

    return back


def in_cache(path: str, of: Team) -> Path:
    hash_ = next(iter(Lock(of.project / "dvc.lock").hashes(Path(path)).values()))
    return of.project / ".dvc/cache/files/md5" / hash_[:2] / hash_[2:]


@pytest.mark.fault("09")
def test_a_damaged_object_of_the_cache_is_named(project):
    place = in_cache("data/06_predictions/predictions.json", project)
    back = cut(place)
    try:
        place.write_text("damaged")
        assert faults() == [("differs", "predictions", "data/06_predictions/predictions.json")]
    finally:
        back()


def test_what_neither_cache_nor_remote_has_is_missing(project):
    place = in_cache("data/06_predictions/predictions.json", project)
    put_back = [cut(place), cut(project.remote / "files/md5" / place.parent.name / place.name)]
    try:
        assert faults() == [("missing", "predictions", "data/06_predictions/predictions.json")]
    finally:
        for back in put_back:
            back()


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
def test_a_tag_that_says_something_else_is_named(project, tag, value, outcome, what):
    client = project.client
    before = client.get_model_version("m3diff", "1").tags.get(tag)
    client.set_model_version_tag("m3diff", "1", tag, value)
    try:
        assert (outcome, what) in [(found, link) for found, link, _ in faults()]
        assert main(["lineage", "1"]) == 3
    finally:
        if before is None:
            client.delete_model_version_tag("m3diff", "1", tag)
        else:
            client.set_model_version_tag("m3diff", "1", tag, before)


def test_another_checkpoint_in_mlflow_than_in_dvc_is_named(project):
    mlflow.set_tracking_uri(project.uri)
    (word,) = (project.database.parent / "artifacts").rglob("word.txt")
    back = cut(word)
    try:
        word.write_text("another")
        assert faults() == [("differs", "stored model", "models:/m3diff/1")]
        word.unlink()
        assert faults() == [("differs", "stored model", "models:/m3diff/1")]
    finally:
        back()


@pytest.mark.parametrize("tag", ["right", "wrong"])
def test_a_version_that_keeps_adapters_alone_is_compared_with_those_of_the_checkpoint(tmp_path, tag, monkeypatch):
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "adapters" / "lora").mkdir(parents=True)
    for name in ("model.safetensors", "adapters/tuned.safetensors", "adapters/lora/adapter.safetensors"):
        (checkpoint / name).write_text(name)
    (checkpoint / "manifest.json").write_text(json.dumps({"base_sha256": "b", "files": {"model.safetensors": "w"}}))
    files = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if path.is_file()}
    cache = tmp_path / "cache"
    entries = [{"md5": md5(files[name]), "relpath": name} for name in sorted(files)]
    for entry in entries:
        place = cache / "files/md5" / entry["md5"][:2] / entry["md5"][2:]
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(files[entry["relpath"]], place)
    whole = dvc_hash(checkpoint)
    place = cache / "files/md5" / whole[:2] / whole[2:]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(entries))
    named = dvc_hash(checkpoint / "adapters") if tag == "right" else "0" * 32
    tags = {"dvc.adapters": named, "weights.sha256": weights_sha256(checkpoint / "manifest.json"), "base.sha256": "b"}
    version = SimpleNamespace(name="m3diff", version="1", tags=tags)
    monkeypatch.setattr(chain_of, "download_checkpoint", lambda version, into: checkpoint / "adapters")
    found = {check.what: check.outcome for check in of_stored(version, cache, whole)}
    outcome = "ok" if tag == "right" else "differs"
    assert found == {"stored model": outcome, "adapters": outcome, "weights": "ok", "base": "ok"}


def test_two_hashes_agree_differ_or_are_missing():
    assert sound([compared("x", "y", "a", "a")])
    assert [compared("x", "y", *pair).outcome for pair in (("a", "b"), ("a", None), (None, "a"), (None, None))] == [
        "differs", "missing", "missing", "missing",
    ]  # fmt: skip


def test_a_version_without_raw_data_says_so(project):
    client = project.client
    tags = {tag: value for tag, value in client.get_model_version("m3diff", "1").tags.items() if "dvc.raw." in tag}
    for tag in tags:
        client.delete_model_version_tag("m3diff", "1", tag)
    try:
        assert faults() == [("missing", "raw data", "of each dataset")]
    finally:
        for tag, value in tags.items():
            client.set_model_version_tag("m3diff", "1", tag, value)

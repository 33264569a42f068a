"""The chain behind a version: every link is there, a fault in any of them is named, and it comes back from remotes."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from m3diff.__main__ import main
from m3diff.provenance.dvc import Lock, dvc_hash, md5, object_file
from m3diff.registry import restore as chain_of
from m3diff.registry.lineage import weights_sha256
from m3diff.registry.restore import compared, lineage, of_stored, sound
from m3diff.settings.load import load_params
from tests import toy
from tests.registry.conftest import Team

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
    assert list(dict.fromkeys(links)) == [
        "raw data", "records", "mixture", "base", "model code", "checkpoint", "stored model", "weights", "predictions",
        "metrics", "dvc.lock", "commit",
    ]  # fmt: skip
    assert all(line.startswith("ok ") for line in lines)
    recorded = Lock().hashes(Path(CHECKPOINT))["train outs"]
    assert recorded[:12] in next(line for line in lines if "checkpoint" in line)


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
        ("dvc.raw.", None, "missing", "raw data"),
    ],
)
def test_a_tag_that_says_something_else_or_is_not_there_is_named(project, monkeypatch, tag, value, outcome, what):
    """Of the version as MLflow gives it."""
    real = chain_of.find_version

    def find_version(*asked: object) -> SimpleNamespace:
        found = real(*asked)
        tags = {name: kept for name, kept in found.tags.items() if value or not name.startswith(tag)}
        return SimpleNamespace(name="m3diff", version="1", tags=tags | ({tag: value} if value else {}))

    monkeypatch.setattr(chain_of, "find_version", find_version)
    assert (outcome, what) in [(found, link) for found, link, _ in faults()]
    assert main(["lineage", "1"]) == 3


@pytest.mark.parametrize("tag", ["right", "wrong"])
def test_a_version_that_keeps_adapters_alone_is_compared_with_those_of_the_checkpoint(tmp_path, tag, monkeypatch):
    checkpoint, cache = tmp_path / "checkpoint", tmp_path / "cache"
    (checkpoint / "adapters" / "lora").mkdir(parents=True)
    for name in ("model.safetensors", "adapters/tuned.safetensors", "adapters/lora/adapter.safetensors"):
        (checkpoint / name).write_text(name)
    (checkpoint / "manifest.json").write_text(json.dumps({"base_sha256": "b", "files": {"model.safetensors": "w"}}))
    files = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if path.is_file()}
    entries = [{"md5": md5(files[name]), "relpath": name} for name in sorted(files)]
    whole = dvc_hash(checkpoint)
    contents = {md5(path): path.read_text() for path in files.values()} | {whole: json.dumps(entries)}
    for hash_, content in contents.items():
        object_file(cache, hash_).parent.mkdir(parents=True, exist_ok=True)
        object_file(cache, hash_).write_text(content)
    named = dvc_hash(checkpoint / "adapters") if tag == "right" else "0" * 32
    tags = {"dvc.adapters": named, "weights.sha256": weights_sha256(checkpoint / "manifest.json"), "base.sha256": "b"}
    version = SimpleNamespace(name="m3diff", version="1", tags=tags)
    monkeypatch.setattr(chain_of, "download_checkpoint", lambda version, into: checkpoint / "adapters")
    found = {check.what: check.outcome for check in of_stored(version, cache, whole)}
    outcome = "ok" if tag == "right" else "differs"
    assert found == {"stored model": outcome, "adapters": outcome, "weights": "ok", "base": "ok"}


def test_two_hashes_agree_differ_or_are_missing():
    assert sound([compared("x", "y", "a", "a")])
    pairs = {("a", "b"): "differs", ("a", None): "missing", (None, "a"): "missing", (None, None): "missing"}
    assert {pair: compared("x", "y", *pair).outcome for pair in pairs} == pairs


# A fresh clone and the remotes alone give a version's data, parameters and checkpoint back

PARTS = ("data/01_raw/minichange", "data/02_records/minichange", "data/04_mixture/test", CHECKPOINT)


@pytest.fixture
def clone(team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    clone = team.clone(tmp_path)
    monkeypatch.chdir(clone)
    assert not (clone / CHECKPOINT).exists()
    return clone


@pytest.mark.fault("S1", "T17")
@pytest.mark.slow(25)
def test_a_version_comes_back_in_a_fresh_clone_with_the_same_hashes_past_dvcs_own_hooks(team, clone, tmp_path, capsys):
    assert [check.note for check in lineage(load_params().register_, "1") if check.what == "checkpoint"] == [
        "in the remote"
    ]
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
    assert main(["restore", "runs/first", "--into", str(tmp_path / "lost")]) == 3
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.split()[1:3] == ["data", CHECKPOINT]]
    assert line.split()[0] in ("missing", "differs")
    assert "NOT restored, see above" in said
    assert "ok       data         data/04_mixture/train" in said


def test_what_is_not_there_or_is_there_already_is_refused_in_words(project, tmp_path, capsys):
    for arguments, message in (
        (["restore", "7"], "model 'm3diff' has no version '7'; there are [1]"),
        (["restore", "runs/none"], "commit runs/none: not in this clone, nor has origin"),
        (["restore", "challenger", "--into", str(tmp_path)], "exists; name another with --into"),
    ):
        assert main(arguments) == 3
        assert message in capsys.readouterr().err

"""A fresh clone and the remotes alone give a version's data, parameters and checkpoint back."""

import shutil
from pathlib import Path

import pytest
import yaml

from m3diff.__main__ import main
from m3diff.provenance.dvc import dvc_hash
from tests import toy
from tests.registry.team import Team

PARTS = ("data/01_raw/minichange", "data/02_records/minichange", "data/04_mixture/test", "data/05_model/checkpoint")


pytestmark = pytest.mark.slow(15)


@pytest.fixture
def clone(team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    clone = team.clone(tmp_path)
    monkeypatch.chdir(clone)
    assert not (clone / "data/05_model/checkpoint").exists()
    return clone


@pytest.mark.fault("S1")
def test_a_version_comes_back_in_a_fresh_clone_with_the_same_hashes(team, clone, tmp_path, capsys):
    assert main(["restore", "1", "--into", "../out"]) == 0
    out = tmp_path / "out"
    for part in PARTS:
        assert dvc_hash(out / part) == dvc_hash(team.project / part)
    for file in ("params.yaml", "dvc.lock", "data/07_report/metrics.json"):
        assert (out / file).read_bytes() == (team.project / file).read_bytes()
    assert toy.status(out) == {}
    said = capsys.readouterr().out
    assert f"restored to {out}" in said
    for line in ("checkpoint   data/05_model/checkpoint", "parameters   train", "dvc.lock     dvc.lock"):
        assert f"ok       {line}" in said
    assert "missing" not in said


@pytest.mark.fault("T17")
def test_it_comes_back_past_dvcs_own_hooks_and_again_where_a_person_removed_the_folder(team, clone, tmp_path, capsys):
    toy.run(clone, "dvc", "install")
    out = tmp_path / "out"
    for _ in range(2):
        assert main(["restore", "1", "--into", str(out)]) == 0, capsys.readouterr().err
        assert dvc_hash(out / PARTS[-1]) == dvc_hash(team.project / PARTS[-1])
        shutil.rmtree(out)


def test_an_alias_names_a_version_and_a_branch_needs_no_mlflow(team, clone, tmp_path, capsys):
    assert main(["restore", "challenger", "--into", str(tmp_path / "a")]) == 0
    params = yaml.safe_load(Path("params.yaml").read_text())
    params["register"]["tracking_uri"] = "http://127.0.0.1:9"
    Path("params.yaml").write_text(yaml.safe_dump(params))
    assert main(["restore", "runs/first", "--into", str(tmp_path / "b")]) == 0
    for part in PARTS:
        assert dvc_hash(tmp_path / "a" / part) == dvc_hash(tmp_path / "b" / part)
    capsys.readouterr()


@pytest.mark.fault("09")
def test_a_remote_that_lost_a_file_or_holds_another_restores_the_rest_and_says_so(team, clone, tmp_path, capsys):
    broken = tmp_path / "remote"
    shutil.copytree(team.remote, broken)
    toy.run(clone, "dvc", "remote", "modify", "--local", "store", "url", str(broken))
    word = dvc_hash(team.project / "data/05_model/checkpoint/word.txt")
    object_ = broken / "files" / "md5" / word[:2] / word[2:]
    object_.chmod(0o644)
    object_.unlink()
    assert main(["restore", "1", "--into", str(tmp_path / "lost")]) == 3
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.split()[1:3] == ["data", "data/05_model/checkpoint"]]
    assert line.split()[0] in ("missing", "differs")
    assert "NOT restored, see above" in said
    assert "ok       data         data/04_mixture/train" in said


def test_what_is_not_there_or_is_there_already_is_refused_in_words(team, clone, tmp_path, capsys):
    for arguments, message in (
        (["restore", "7"], "model 'm3diff' has no version '7'; there are [1]"),
        (["restore", "runs/none"], "commit runs/none: not in this clone, nor has origin"),
        (["restore", "1", "--into", str(tmp_path)], "exists; name another with --into"),
    ):
        assert main(arguments) == 3
        assert message in capsys.readouterr().err

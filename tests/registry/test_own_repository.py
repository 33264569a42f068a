"""A project that is no repository of its own is named before anything is begun, with what to type."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flows.workspace import workspace
from m3diff.provenance.dvc import add_worktree
from m3diff.records.errors import DataError
from tests.toy import REPOSITORY


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
    "mono/m 3": f"git init -q mono; cp -r base 'mono/m 3'; cd mono; rm -rf 'm 3/.git'; {ADD}",
    "mono/a/b": f"git init -q mono; cd mono; mkdir -p a/b; echo a > a/b/c; {ADD}",
    "super/m3": "git init -q super; cd super; git submodule --quiet add ../base m3; git commit -qm two",
    "sha256": f"git init -q --object-format=sha256 sha256; cd sha256; echo a > a; {ADD}",
    "base": "cd base; git branch runs",
}
"""Where the project is: in a folder of a larger repository, in a submodule, in one of sha256, with a branch in the way;
and what makes it."""


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
    if at == "sha256":  # it is said to begin anew
        return
    top = sh("git rev-parse --show-toplevel", place).strip()
    sh(remedy.replace("FOLDER", str(tmp_path / "new")).replace("OTHER", "older"), Path(top))
    monkeypatch.chdir(place if at == "base" else tmp_path / "new")
    assert Path(".git").is_dir()
    with pytest.raises(Exception) as met, workspace("one", "HEAD", [], False):
        pytest.fail("no project of DVC")
    assert not isinstance(met.value, DataError) or "repository" not in str(met.value)


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

"""A project that is no repository of its own is named before anything is begun, with what to type."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flows.workspace import workspace
from m3diff.records.errors import DataError
from tests.toy import REPOSITORY


def sh(script: str, folder: Path) -> str:
    person = "-c user.name=a -c user.email=a@localhost -c protocol.file.allow=always"
    script = f'git() {{ command git {person} "$@"; }}\n{script}'
    done = subprocess.run(["bash", "-ec", script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def made(folder: Path, script: str) -> Path:
    """A repository of one file, and what a script makes around it."""
    (folder / "base").mkdir(parents=True)
    sh("git init -q; echo a > params.yaml; git add -A; git commit -qm one", folder / "base")
    sh(script, folder)
    return folder


ADD = "git add -A; git commit -qm two"
MONO = f"git init -q mono; cp -r base 'mono/m 3'; cd mono; rm -rf 'm 3/.git'; {ADD}"
SUPER = "git init -q super; cd super; git submodule --quiet add ../base m3; git commit -qm two"
ODD = {
    "a folder of a larger one": (
        f"git init -q mono; cp -r base 'mono/m 3'; cd mono; rm -rf 'm 3/.git'; {ADD}",
        "mono/m 3",
    ),
    "two folders down": (f"git init -q mono; cd mono; mkdir -p a/b; echo a > a/b/c; {ADD}", "mono/a/b"),
    "a submodule": (
        "git init -q super; cd super; git submodule --quiet add ../base m3; git commit -qm two",
        "super/m3",
    ),
    "of sha256": (f"git init -q --object-format=sha256 other; cd other; echo a > a; {ADD}", "other"),
    "with a branch in the way": ("cd base; git branch runs", "base"),
}


@pytest.mark.fault("P13")
@pytest.mark.parametrize(("script", "at"), ODD.values(), ids=ODD)
def test_a_run_is_refused_before_it_begins(script, at, tmp_path, monkeypatch):
    place = made(tmp_path, script) / at
    monkeypatch.chdir(place)
    with pytest.raises(DataError) as refused, workspace("one", None, [], False):
        pytest.fail("began")
    assert not (place / "runs").exists()
    (line,) = str(refused.value).splitlines()
    (remedy,) = re.findall(r"`(git [^`]*)`", line)
    top = sh("git rev-parse --show-toplevel", place).strip()
    if at == "other":
        return
    sh(remedy.replace("FOLDER", str(tmp_path / "new")).replace("OTHER", "older"), Path(top))
    remedied = place if at == "base" else tmp_path / "new"
    assert (remedied / ".git").is_dir()
    monkeypatch.chdir(remedied)
    with pytest.raises(Exception) as met, workspace("one", "HEAD", [], False):
        pytest.fail("no project of DVC")
    assert not isinstance(met.value, DataError) or "repository" not in str(met.value), "the remedy works as printed"


@pytest.mark.fault("P9")
def test_a_run_s_worktree_has_the_bytes_of_the_commit_whatever_autocrlf_says(tmp_path, monkeypatch):
    place = made(tmp_path, "cp -r base other") / "other"
    (tmp_path / "settings").write_text("[core]\n\tautocrlf = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "settings"))
    monkeypatch.chdir(place)
    from m3diff.provenance.dvc import add_worktree

    shutil.copytree(REPOSITORY / ".dvc", place / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp", "config.local"))
    sh("git add -A; git commit -qm dvc", place)
    add_worktree("HEAD", tmp_path / "mü ller")
    assert (tmp_path / "mü ller" / "params.yaml").read_bytes() == b"a\n"
    assert str(place / ".dvc/cache") in (tmp_path / "mü ller/.dvc/config.local").read_text(encoding="utf-8")

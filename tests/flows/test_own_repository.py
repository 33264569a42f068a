"""A project without its own repository is refused at the start, with the command that creates one."""

import subprocess
from pathlib import Path

import pytest

from flows.workspace import workspace
from m3diff.records.errors import CodedError, DataError
from tests.errors import raises


def sh(script: str, folder: Path) -> str:
    """Run a script in a folder and return its output. git may clone from folders."""
    person = "-c user.name=a -c user.email=a@localhost -c protocol.file.allow=always"
    script = f'git() {{ command git {person} "$@"; }}\n{script}'
    done = subprocess.run(["bash", "-ec", script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a repository with one file."""
    (tmp_path / "base").mkdir()
    sh("git init -q; echo a > params.yaml; git add -A; git commit -qm one", tmp_path / "base")
    return tmp_path / "base"


COMMIT_ALL = "git add -A; git commit -qm two"

# A folder of a larger repository and a submodule, with the script that makes each and the code of its refusal
PROJECTS = {
    "mono/a/b": (f"git init -q mono; cd mono; mkdir -p a/b; echo a > a/b/c; {COMMIT_ALL}", "git.larger_repository"),
    "super/m3": (
        "git init -q super; cd super; git submodule --quiet add ../base m3; git commit -qm two",
        "git.submodule",
    ),
}


@pytest.mark.fault("P13")
@pytest.mark.parametrize(
    ("folder", "script", "code"), [(folder, *project) for folder, project in PROJECTS.items()], ids=PROJECTS
)
def test_a_run_in_a_part_of_another_repository_is_refused_with_a_remedy_that_works(
    folder, script, code, base, tmp_path, monkeypatch
):
    sh(script, tmp_path)
    project = tmp_path / folder
    monkeypatch.chdir(project)
    with raises(DataError, code, path=project) as refused, workspace("one", None, [], False):
        pytest.fail("began")
    assert not (project / "runs").exists()
    remedy = refused.value.fields["command"]
    assert remedy in str(refused.value)
    top = sh("git rev-parse --show-toplevel", project).strip()
    sh(remedy.replace("FOLDER", str(tmp_path / "new")), Path(top))
    monkeypatch.chdir(tmp_path / "new")
    assert Path(".git").is_dir()
    with pytest.raises(Exception) as other_repository, workspace("one", "HEAD", [], False):
        pytest.fail("no project of DVC")
    assert not isinstance(other_repository.value, CodedError) or not other_repository.value.code.startswith("git.")

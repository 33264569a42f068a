"""A git repository with one commit, for tests that read from it."""

from pathlib import Path

import pytest

from m3diff.provenance.git import git


def commit_files(files: dict[str, str]) -> str:
    """Write files below the current directory, commit them, and return the commit."""
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    git("add", "--all")
    git("commit", "--quiet", "--allow-empty", "--message", "files")
    return git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with one commit, which is the current directory."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    git("init", "--quiet", "--initial-branch=main")
    commit_files({"params.yaml": "a\n", "part/params.yaml": "b\n"})
    return folder

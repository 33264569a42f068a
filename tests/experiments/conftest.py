from pathlib import Path

import pytest

from tests import toy


@pytest.fixture
def toy_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy project with every stage run and committed, as the current folder; git knows who commits."""
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "toy")
        monkeypatch.setenv(f"{name}_EMAIL", "toy@localhost")
    root = toy.build(tmp_path / "toy")
    toy.run(root, "dvc", "repro", "-q")
    toy.commit(root, "run")
    monkeypatch.chdir(root)
    return root

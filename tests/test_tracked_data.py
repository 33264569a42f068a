"""A dataset tracked by DVC, as infra/data.md says: what one changed image moves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

IMAGES = 500


@pytest.mark.slow
def test_one_changed_image_of_500_moves_one_image_and_the_folders_list(tmp_path):
    project, remote = tmp_path / "project", tmp_path / "remote"
    project.mkdir()

    def run(*command: str) -> str:
        places = {"DVC_SITE_CACHE_DIR": str(tmp_path / "site"), "DVC_GLOBAL_CONFIG_DIR": str(tmp_path / "global")}
        done = subprocess.run(command, cwd=project, env=os.environ | places, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def dvc(*words: str) -> str:
        return run(sys.executable, "-m", "dvc", *words)

    def stored() -> set[Path]:
        return {path for path in remote.rglob("*") if path.is_file()}

    run("git", "init", "-q")
    dvc("init", "-q")
    dvc("remote", "add", "-q", "-d", "local", str(remote))
    folder = project / "data/real"
    folder.mkdir(parents=True)
    for number in range(IMAGES):
        (folder / f"{number}.png").write_bytes(number.to_bytes(2, "big") * 200)
    dvc("add", "-q", "data/real")
    dvc("push", "-q")
    first = stored()
    assert len(first) == IMAGES + 1
    changed = folder / "7.png"
    changed.unlink()
    changed.write_bytes(b"another picture")
    dvc("add", "-q", "data/real")
    dvc("push", "-q")
    moved = stored() - first
    assert sorted(path.suffix for path in moved) == ["", ".dir"]
    assert [path.read_bytes() for path in moved if not path.suffix] == [b"another picture"]
    assert first < stored()

"""`bin/m3diff` works from a fresh clone, from any folder, with nothing activated."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.toy import REPOSITORY

INSTALL = """install:
	@echo installing
	@mkdir -p .venv/bin
	@cp stand-in .venv/bin/m3diff
	@touch .venv/.ready
"""
STAND_IN = """#!/bin/sh
pwd
printf '<%s>\\n' "$@"
exit 3
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    clone = tmp_path / "a clone"
    clone.mkdir()
    (clone / "bin").mkdir()
    shutil.copy(REPOSITORY / "bin" / "m3diff", clone / "bin")
    (clone / "Makefile").write_text(INSTALL)
    (clone / "stand-in").write_text(STAND_IN)
    (clone / "stand-in").chmod(0o755)
    return clone


@pytest.mark.parametrize("by_link", [False, True])
def test_it_installs_once_and_passes_arguments_folder_and_exit_code_on(clone: Path, tmp_path: Path, by_link: bool):
    there, launcher = tmp_path / "elsewhere", clone / "bin" / "m3diff"
    there.mkdir()
    if by_link:
        (tmp_path / "link").symlink_to(launcher)
        launcher = tmp_path / "link"
    environment = {"PATH": os.environ["PATH"]}
    for said in ("installing", ""):
        done = subprocess.run(
            [launcher, "caption", "a b.png", ""], cwd=there, env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (3, f"{there}\n<caption>\n<a b.png>\n<>\n")
        assert done.stderr.strip() == said

"""`make install` names what is missing before anything is installed; `bin/m3diff` works from a fresh clone."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.toy import REPOSITORY

TOOLS = {"java": "Java 17", "git": "git", "g++": "a C++ compiler"}


def machine(folder: Path, **programs: str) -> str:
    """A PATH on which nothing stands but these shell scripts."""
    folder.mkdir()
    for name, script in programs.items():
        program = folder / name.replace("gxx", "g++")
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    return str(folder)


def check_system(path: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": path}
    command = [sys.executable, str(REPOSITORY / "infra" / "check_system.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


JAVA = """echo 'openjdk version "17.0.15" 2025-04-15' >&2"""


@pytest.mark.parametrize(
    ("java", "words"),
    [
        (JAVA, []),
        ("exit 1", ["needs Java 17", "does not answer", "apt install openjdk-17-jre-headless"]),
        (JAVA.replace("17.0.15", "11.0.2"), ["needs Java 17", "found Java 11", "apt install openjdk-17-jre-headless"]),
    ],
)
def test_a_machine_that_has_everything_passes_and_a_java_that_is_broken_or_too_old_is_named(tmp_path, java, words):
    done = check_system(machine(tmp_path / "bin", java=java, git="", gxx=""))
    assert (done.returncode, done.stdout, bool(done.stderr)) == (bool(words), "", bool(words))
    assert [word for word in words if word not in done.stderr] == []


@pytest.mark.fault("P5")
@pytest.mark.parametrize(
    ("folder", "remedy"),
    [*((name, "move the checkout") for name in ("a:b", "$x", "US$")), ("no links", "git config core.symlinks true")],
)
def test_a_checkout_that_cannot_run_where_it_is_is_named(folder, remedy, tmp_path, monkeypatch):
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    if folder == "no links":
        Path("m3diff").write_text("components")
    done = check_system(machine(tmp_path / "bin", java=JAVA, git="", gxx=""))
    assert (done.returncode, remedy in done.stderr) == (1, True)
    assert folder == "no links" or str(tmp_path / folder) in done.stderr


def test_everything_that_is_missing_is_named_at_once(tmp_path):
    done = check_system(machine(tmp_path / "bin"))
    assert done.returncode == 1
    assert [name for name in TOOLS.values() if f"needs {name}" not in done.stderr] == []
    assert done.stderr.count("apt install") == len(TOOLS)


def test_make_run_without_java_ends_before_anything_is_installed(tmp_path):
    checkout = tmp_path / "checkout"
    (checkout / "infra").mkdir(parents=True)
    for file in ("Makefile", "pyproject.toml", "constraints.txt", "infra/check_system.py"):
        shutil.copy(REPOSITORY / file, checkout / file)
    path = machine(tmp_path / "bin", git="", gxx="")
    for tool in ("make", "bash", "grep", "sh"):
        (Path(path) / tool).symlink_to(shutil.which(tool) or tool)
    command = ["make", "run", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=checkout, env={"PATH": path}, capture_output=True, text=True)
    assert done.returncode != 0
    assert "needs Java 17" in done.stderr
    assert not (checkout / ".venv").exists()
    assert "install" not in re.sub("apt install|brew install", "", done.stdout)


# bin/m3diff


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

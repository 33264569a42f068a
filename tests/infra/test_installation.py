"""The checks of `make install`, and `bin/m3diff`, which calls it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.infra.toy import machine
from tests.toy import REPOSITORY


def checked(path: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": path}
    command = [sys.executable, str(REPOSITORY / "infra" / "check_system.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


JAVA = """echo 'openjdk version "17.0.15" 2025-04-15' >&2"""


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({"java": JAVA, "git": "", "gxx": ""}, []),
        ({"java": "exit 1", "git": "", "gxx": ""}, ["needs Java 17", "does not work", "apt install openjdk-17"]),
        ({"java": JAVA.replace("17.0.15", "11.0.2"), "git": "", "gxx": ""}, ["needs Java 17", "found Java 11"]),
        ({}, [f"needs {name}" for name in ("Java 17", "git", "a C++ compiler")]),
    ],
)
def test_what_a_machine_lacks_is_named_with_its_remedy(tmp_path, tools, words):
    done = checked(machine(tmp_path / "bin", **tools))
    assert done.returncode == bool(words)
    assert done.stdout == ""
    assert bool(done.stderr) == bool(words)
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
    done = checked(machine(tmp_path / "bin", java=JAVA, git="", gxx=""))
    assert done.returncode == 1
    assert remedy in done.stderr
    assert folder == "no links" or str(tmp_path / folder) in done.stderr


def test_bin_m3diff_installs_once_and_passes_arguments_folder_and_exit_code_on(tmp_path):
    (tmp_path / "a clone/bin").mkdir(parents=True)
    shutil.copy(REPOSITORY / "bin" / "m3diff", tmp_path / "a clone/bin")
    makes = (
        "install:\n\t@echo installing\n\t@mkdir -p .venv/bin\n\t@cp stand-in .venv/bin/m3diff\n\t@touch .venv/.ready\n"
    )
    (tmp_path / "a clone/Makefile").write_text(makes)
    (tmp_path / "a clone/stand-in").write_text("#!/bin/sh\npwd\nprintf '<%s>\\n' \"$@\"\nexit 3\n")
    (tmp_path / "a clone/stand-in").chmod(0o755)
    (tmp_path / "link").symlink_to("a clone/bin/m3diff")
    (tmp_path / "elsewhere").mkdir()
    options: Any = {"cwd": tmp_path / "elsewhere", "env": {"PATH": os.environ["PATH"]}, "capture_output": True}
    for expected_error in ("installing", ""):
        done = subprocess.run([tmp_path / "link", "caption", "a b.png", ""], text=True, **options)
        assert done.returncode == 3
        assert done.stdout == f"{tmp_path}/elsewhere\n<caption>\n<a b.png>\n<>\n"
        assert done.stderr.strip() == expected_error

"""Test that a run makes no call to another machine. A guard in each Python process watches its sockets."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from m3diff.runtime import PRIVACY
from tests import toy
from tests.toy import REPOSITORY

# Variables that keep a tool quiet, which the processes under the guard do not inherit
QUIETING_VARIABLES = {*PRIVACY, "CI", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"}


class Guard:
    """Run processes with a guard that refuses and records calls to other machines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        shutil.copy(REPOSITORY / "tests" / "socket_guard.py", folder / "sitecustomize.py")
        self.environment = {name: value for name, value in os.environ.items() if name not in QUIETING_VARIABLES}
        self.environment["SOCKET_GUARD"] = str(folder)
        # A folder of PYTHONPATH is where Python looks for sitecustomize.py
        self.environment["PYTHONPATH"] = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)

    def run(self, root: Path, *command: str, code: int = 0) -> str:
        """Run Python in a folder and return what it printed to stderr."""
        arguments = [sys.executable, *command]
        done = subprocess.run(arguments, cwd=root, env=self.environment, capture_output=True, text=True)
        assert done.returncode == code, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stderr

    def attempts(self) -> list[str]:
        """Return the calls to other machines."""
        return self._lines("attempts")

    def has_watched(self, words: str) -> bool:
        """Return whether the guard watched a process whose command line contains these words."""
        return any(words in command_line for command_line in self._lines("loaded"))

    def _lines(self, file: str) -> list[str]:
        path = self.folder / file
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    return Guard(tmp_path / "guard")


CALLS = {
    "a connection": "socket.create_connection(('192.0.2.1', 80), timeout=5)",
    "a datagram": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 80))",
    "a name": "socket.getaddrinfo('example.org', 80)",
    "a request": "import urllib.request; urllib.request.urlopen('http://example.org')",
    "an event loop": "import asyncio; asyncio.run(asyncio.open_connection('192.0.2.1', 80))",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_guard_records_and_refuses_a_call_to_another_machine(call, guard, tmp_path):
    assert "socket guard: " in guard.run(tmp_path, "-c", f"import socket; {call}", code=1)
    assert len(guard.attempts()) == 1


@pytest.mark.slow(28)
def test_the_pipeline_register_and_promote_make_no_calls(guard, tmp_path):
    root = toy.build(tmp_path / "toy")
    shutil.copy(REPOSITORY / ".dvc" / "config", root / ".dvc" / "config")
    toy.commit(root, "the project's own settings of DVC")
    for command in ("dvc repro", "m3diff register", "m3diff promote"):
        guard.run(root, "-m", *command.split())
    time.sleep(3)  # DVC would ask for a newer version, and report, from a process that outlives it
    assert guard.attempts() == []
    for words in ("-m dvc repro", "toy.py train", "toy.py evaluate", "-m m3diff register", "-m m3diff promote"):
        assert guard.has_watched(words), f"{words} was not under the guard"
    assert (root / "services" / "mlflow" / "mlflow.db").exists()


@pytest.mark.slow(40)
def test_the_real_stages_up_to_the_checks_of_great_expectations_make_no_calls(guard, tmp_path):
    settings = {"seed": 1, "scenes": {"train": 12, "val": 4, "test": 4}, "image_px": 128, "references": 2}
    settings |= {"domain": "standard", "multi_change_share": 0.1, "oversample_types": [], "root": str(tmp_path / "raw")}
    names = ("base", "records", "clean", "mixture", "model", "predictions", "report")
    profile = {
        "extends": str(REPOSITORY / "profiles" / "embedded"),
        "paths": {name: str(tmp_path / "data" / name) for name in names},
        "synthesize": {"minichange": settings},
        "ingest": {"datasets": {"minichange": {"reader": "minichange", "root": str(tmp_path / "raw")}}},
        "convert": {"questions": str(REPOSITORY / "profiles" / "questions.yaml")},
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(profile))
    for stage in (["synthesize", "minichange"], ["ingest"], ["validate"], ["convert"]):
        guard.run(tmp_path, "-m", "m3diff", "--params", "small.yaml", *stage)
        assert guard.has_watched(" ".join(stage))
    assert guard.attempts() == []


@pytest.mark.fault("30")
def test_a_user_without_home_and_name_gets_both():
    variables = ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    code = (
        "import pwd\n"
        "def nobody(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = nobody\n"
        "import getpass, os, pathlib\n"
        "from m3diff.runtime import prepare\n"
        "prepare()\n"
        "print(getpass.getuser() == f'uid-{os.getuid()}', pathlib.Path.home().is_dir())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"], done.stderr

"""A project to run commands in, and recorders in place of the functions that commands call."""

import functools
import importlib
import inspect
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m3diff.records import installation
from tests.toy import REPOSITORY


class Result(SimpleNamespace):
    """What a recorded function returns. Printed, it is one line."""

    def __str__(self) -> str:
        return "the stage's result"


class Recorder:
    """Replaces functions of a module by functions that record their arguments by name.

    Attributes:
        calls: the name of each function that was called, with its arguments.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str, **results: Any) -> None:
        """
        Args:
            results: what each function returns, or the exception that it raises.
        """
        self.calls: list[tuple[str, dict[str, Any]]] = []
        for name, result in results.items():
            function = getattr(importlib.import_module(module), name)
            monkeypatch.setattr(f"{module}.{name}", self._recording(function, result))

    def _recording(self, function: Any, result: Any) -> Any:
        @functools.wraps(function)
        def record(*arguments: Any, **options: Any) -> Any:
            # binding fails for arguments that the real function does not take
            bound = inspect.signature(function).bind(*arguments, **options).arguments
            self.calls.append((function.__name__, dict(bound)))
            if isinstance(result, BaseException):
                raise result
            return result

        return record


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the embedded profile, its base's configuration and its raw folder; the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "profiles", "profiles")
    shutil.copy(REPOSITORY / "params.yaml", "params.yaml")
    Path("data/00_base").mkdir(parents=True)
    shutil.copy(REPOSITORY / "data/00_base/config.json", "data/00_base")
    Path("data/01_raw/minichange").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without parameters and profiles; the current folder."""
    folder = tmp_path / "outside"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def wheel_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The profiles of an installed wheel, whose code this process then runs."""
    profiles = tmp_path / "installed" / "_profiles"
    profiles.mkdir(parents=True)
    shutil.copy(REPOSITORY / "profiles" / "embedded.yaml", profiles)
    monkeypatch.setattr(installation, "PROFILES", profiles)
    return profiles

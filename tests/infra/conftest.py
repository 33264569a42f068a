"""The folder of the services in every test of infra/."""

import os
from pathlib import Path

import pytest

from infra import variables

PREFIXES = ("M3DIFF_", "PREFECT_", "MLFLOW_")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder services/ of a checkout, which is the current folder. No variable of the tools is set, and no package
    of a team is looked for."""
    services_folder = tmp_path / "services"
    services_folder.mkdir()
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # what is read into it ends with the test
    monkeypatch.setattr(variables, "PACKAGES", ())
    return services_folder

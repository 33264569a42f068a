"""Helpers for the tests of infra/: tokens, environments and fake services."""

import os
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from packaging.utils import canonicalize_name

from infra import processes, services, status, variables
from infra.environment import environment
from infra.mlflow_login import write_password
from infra.processes import Service
from tests.toy import REPOSITORY

INFRA = REPOSITORY / "infra"
TOKENS = {"PREFECT_SERVER_API_AUTH_STRING": "m3diff:" + "a" * 16, "MLFLOW_AUTH_ADMIN_PASSWORD": "b" * 16}
CAUSE = "DataError: row 7: no image"  # of a failed training


def environment_of(service: Service) -> dict[str, str]:
    return environment(service.name, service.token)


def make_worker_password() -> None:
    """Write the password of the worker's MLflow user, as the keeper does after MLflow has started."""
    file = variables.worker_password_file()
    file.parent.mkdir(exist_ok=True)
    write_password(file, "w" * 16)


def names_of(monkeypatch: pytest.MonkeyPatch, *own_services: Service) -> None:
    """Replace the services by these, which get the environment of the test."""
    monkeypatch.setattr(processes, "environment", lambda service, token: dict(os.environ))
    monkeypatch.setattr(services, "services", lambda: [*own_services])


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str, not_up: str = "") -> None:
    """Make all services except one appear to be up, and make a training in the state `kind` the last one."""
    message = f"{status.PREFECT_ERROR_PREFIX}{CAUSE}\nmore"
    run = {"id": "7f3a", "name": "owl", "state_type": kind, "state_name": kind.title(), "state": {"message": message}}
    run["end_time"] = datetime.now(UTC).isoformat()
    up = {name: [psutil.Process()] for name in ("keeper", "worker", "mlflow", "prefect")}
    monkeypatch.setattr(status, "ask_prefect", lambda path, body: [run])
    monkeypatch.setattr(status, "ask_mlflow", lambda path, **question: None)
    for module in (services, status):
        monkeypatch.setattr(module, "running_processes", lambda: up | ({not_up: []} if not_up else {}))
    monkeypatch.setattr(Service, "answers", lambda service: True)


def machine(folder: Path, **programs: str) -> str:
    """Return a PATH that contains only these shell scripts."""
    folder.mkdir()
    for name, script in programs.items():
        program = folder / name.replace("gxx", "g++")
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    return str(folder)


def constrained() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().split()
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}

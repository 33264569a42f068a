"""`m3diff serve` as a process of its own, with Ray, a registry and toys for models."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from mlflow.tracking import MlflowClient

from tests.servers import free_port
from tests.serving.toy import CONSTANTS, write_toy
from tests.toy import REPOSITORY

PATIENCE_S = 180


class Running:
    """A server that answers; `root` is its current directory."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path, root: Path) -> None:
        self.process, self.port, self.log, self.root = process, port, log, root
        self.address = f"http://127.0.0.1:{port}"

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.said:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.1)

    def family(self) -> list[psutil.Process]:
        mine = psutil.Process(self.process.pid)
        return [mine, *mine.children(recursive=True)]

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(sign)
        return self.process.wait(PATIENCE_S)

    def metric(self, line: str) -> float:
        (found,) = [row for row in httpx.get(f"{self.address}/metrics").text.splitlines() if row.startswith(f"{line} ")]
        return float(found.rpartition(" ")[2])


def write_registry(root: Path, *words: str) -> MlflowClient:
    """A registry whose versions 1, 2, ... are toys of these words; the first is champion."""
    uri = f"sqlite:///{root}/mlflow.db"
    client = MlflowClient(uri, registry_uri=uri)
    client.create_registered_model("m3diff")
    for word in words:
        write_toy(root / "versions" / word / "artifacts" / "checkpoint", word)
        client.create_model_version("m3diff", (root / "versions" / word).as_uri())
    client.set_registered_model_alias("m3diff", "champion", "1")
    return client


def command(root: Path, *options: str, toy: bool = True, port: int | None = None, **changes: Any) -> list[str]:
    """The command line; `changes` are of the section `serve`."""
    values = yaml.safe_load((REPOSITORY / "profiles" / "embedded.yaml").read_text())
    values["serve"] |= changes
    values["register"]["tracking_uri"] = f"sqlite:///{root}/mlflow.db"
    values["train"]["base"] = str(REPOSITORY / values["train"]["base"])
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    module = "tests.serving.toy" if toy else "m3diff"
    return [sys.executable, "-m", module, "serve", "--port", str(port or free_port()), *options]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"} | more


@contextmanager
def running(
    root: Path,
    *options: str,
    toy: bool = True,
    constants: Mapping[str, float] | None = None,
    there: Mapping[str, str] = {},  # noqa: B006
    **changes: Any,
) -> Iterator[Running]:
    """A server that is ready; it is ended with all its processes.

    Args:
        constants: other values of a toy's constants, by module and name: `request.UPLOAD_S`.
        there: further variables of its environment.
    """
    line, log = command(root, *options, toy=toy, **changes), root / "serve.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            line,
            cwd=root,
            env=environment(**{CONSTANTS: json.dumps(constants or {})} | there),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Running(process, int(line[line.index("--port") + 1]), log, root)
    try:
        server.wait_for(" answers with ")
        yield server
    finally:
        if process.poll() is None:
            family = server.family()
            server.stop()
            for left in psutil.wait_procs(family, 20)[1]:
                left.kill()

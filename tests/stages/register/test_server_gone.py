"""A real MLflow server that is killed while a version is being registered, and comes back."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from mlflow.tracking import MlflowClient

from m3diff.registry.tracking import TrackingUnavailableError
from m3diff.settings.load import load_params
from m3diff.stages.register import stage
from tests.toy import change


class Server:
    """An MLflow server over the project's store."""

    def __init__(self, root: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri, self.store = f"http://127.0.0.1:{self.port}", root / "services" / "mlflow"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.store}/mlflow.db", "--no-serve-artifacts"]
        command += ["--default-artifact-root", (self.store / "artifacts").as_uri()]
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.store / "log").open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
                return
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline, (self.store / "log").read_text()
                time.sleep(0.5)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def server(trained: Path) -> Iterator[Server]:
    server = Server(trained)
    change(trained, "register", tracking_uri=server.uri)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        mlflow.set_tracking_uri("")


@pytest.mark.fault("19")
@pytest.mark.slow
def test_a_server_killed_in_the_middle_leaves_one_run_and_one_version_when_register_runs_again(server, monkeypatch):
    log_model = stage.log_model

    def killed_before_the_model(*arguments: object) -> str:
        server.kill()
        return log_model(*arguments)

    with monkeypatch.context() as cut:
        cut.setattr(stage, "log_model", killed_before_the_model)
        with pytest.raises(TrackingUnavailableError, match="run `m3diff register` again: nothing was lost"):
            stage.register(load_params())
    server.start()
    assert stage.register(load_params()).outcome == "registered"
    client = MlflowClient(server.uri)
    (version,) = client.search_model_versions("name = 'm3diff'")
    (run,) = client.search_runs([client.get_experiment_by_name("m3diff").experiment_id])
    assert version.run_id == run.info.run_id
    assert run.info.status == "FINISHED"
    assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 3

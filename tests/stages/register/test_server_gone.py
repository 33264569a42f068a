"""A real MLflow server that goes away while a version is being registered, and comes back."""

import os
import sys
from contextlib import ExitStack, suppress

import mlflow
import pytest
from mlflow.tracking import MlflowClient

from m3diff.registry.tracking import TrackingUnavailableError, check_alive
from m3diff.settings.load import load_params
from m3diff.stages.register import stage
from tests.servers import free_port, started
from tests.toy import change


@pytest.mark.fault("19")
@pytest.mark.slow
def test_a_server_that_ends_in_the_middle_leaves_one_run_and_one_version_when_register_runs_again(trained, monkeypatch):
    port, kept = free_port(), trained / "services" / "mlflow"
    uri = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{kept}/mlflow.db", "--no-serve-artifacts"]
    command += ["--default-artifact-root", (kept / "artifacts").as_uri()]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    log_model = stage.log_model

    def answers() -> bool:
        with suppress(TrackingUnavailableError):
            check_alive(uri)
            return True
        return False

    change(trained, "register", tracking_uri=uri)
    with ExitStack() as first, monkeypatch.context() as cut:
        first.enter_context(started(command, kept / "log", answers, env=environment))
        cut.setattr(stage, "log_model", lambda *given: (first.close(), log_model(*given))[1])
        with pytest.raises(TrackingUnavailableError, match="run `m3diff register` again: nothing was lost"):
            stage.register(load_params())
    with started(command, kept / "log", answers, env=environment):
        assert stage.register(load_params()).outcome == "registered"
        client = MlflowClient(uri)
        (version,) = client.search_model_versions("name = 'm3diff'")
        (run,) = client.search_runs([client.get_experiment_by_name("m3diff").experiment_id])
        assert (version.run_id, run.info.status) == (run.info.run_id, "FINISHED")
        assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 3
    mlflow.set_tracking_uri("")

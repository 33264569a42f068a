"""prefect.yaml, against Prefect's own model and against the flows that it names."""

import importlib
import subprocess
import sys

import pytest
import yaml
from prefect.cli.deploy._models import PrefectYamlModel

from infra import services
from tests.toy import REPOSITORY

DEPLOYMENTS = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]


def test_prefect_accepts_the_file():
    made = PrefectYamlModel.model_validate(yaml.safe_load((REPOSITORY / "prefect.yaml").read_text()))
    assert [deployment.name for deployment in made.deployments] == ["full", "retrain", "watch"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_each_deployment_is_reached_as_m3diff_in_the_pool_that_services_makes(deployment):
    module, _, function = deployment["entrypoint"].rpartition(".")
    flow = getattr(importlib.import_module(module), function)
    assert flow.name == "m3diff"
    assert deployment["work_pool"]["name"] == services.POOL
    assert set(deployment.get("parameters", {})) <= set(flow.parameters.properties)


def test_a_flow_loaded_as_prefect_does_finds_dvc_itself_and_not_the_module_of_its_name_beside_it():
    code = (
        "from prefect.flows import load_flow_from_entrypoint as load\n"
        f"for entrypoint in {[deployment['entrypoint'] for deployment in DEPLOYMENTS]}: assert load(entrypoint).name\n"
        "from flows import dvc\n"
        "with dvc.repository() as repo: print(repo.root_dir)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout.strip() == str(REPOSITORY), done.stderr


@pytest.mark.fault("22", "m6")
def test_retraining_is_one_at_a_time_and_other_runs_go_side_by_side():
    limits = {deployment["name"]: deployment.get("concurrency_limit") for deployment in DEPLOYMENTS}
    one = {"limit": 1, "collision_strategy": "ENQUEUE"}
    assert limits == {"full": None, "retrain": one, "watch": one | {"collision_strategy": "CANCEL_NEW"}}


def test_a_worker_takes_two_runs_at_once_or_as_many_as_it_is_told(monkeypatch):
    monkeypatch.delenv("M3DIFF_FLOWS", raising=False)
    assert services.services()[-1].command[-2:] == ["--limit", "2"]
    monkeypatch.setenv("M3DIFF_FLOWS", "7")
    assert services.services()[-1].command[-2:] == ["--limit", "7"]
    for wrong in ("0", "many", "-1", ""):
        monkeypatch.setenv("M3DIFF_FLOWS", wrong)
        with pytest.raises(services.ServiceError, match=f"M3DIFF_FLOWS={wrong}: give a number"):
            services.services()


@pytest.mark.fault("29")
def test_retrain_and_watch_have_schedules_with_names_of_their_own_in_utc():
    (nightly,), (looks,) = DEPLOYMENTS[1]["schedules"], DEPLOYMENTS[2]["schedules"]
    assert len({nightly["slug"], looks["slug"], ""}) == 3
    assert nightly["timezone"] == looks["timezone"] == "UTC"
    assert (len(nightly["cron"].split()), looks["interval"], looks["active"]) == (5, 900, True)

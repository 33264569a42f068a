"""prefect.yaml, against Prefect's own model and the flows that it names; and what a person changed on Prefect's page
stays when the deployments are made known again."""

import importlib
import subprocess
import sys
from typing import Any

import pytest
import yaml
from prefect.cli.deploy._models import PrefectYamlModel

from infra import services
from tests.servers import ask_prefect, prefect_server
from tests.toy import REPOSITORY

PREFECT_YAML = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())
DEPLOYMENTS = {entry["name"]: entry for entry in PREFECT_YAML["deployments"]}


@pytest.mark.fault("22", "m6", "29")
def test_prefect_accepts_the_file_whose_flows_are_one_at_a_time_where_they_must_with_schedules_in_utc():
    made = PrefectYamlModel.model_validate(PREFECT_YAML)
    assert [deployment.name for deployment in made.deployments] == ["full", "retrain", "watch"]
    for entry in DEPLOYMENTS.values():
        module, _, function = entry["entrypoint"].rpartition(".")
        flow = getattr(importlib.import_module(module), function)
        assert (flow.name, entry["work_pool"]["name"]) == ("m3diff", services.POOL)
        assert set(entry.get("parameters", {})) <= set(flow.parameters.properties)
    one = {"limit": 1, "collision_strategy": "ENQUEUE"}
    limits = {name: entry.get("concurrency_limit") for name, entry in DEPLOYMENTS.items()}
    assert limits == {"full": None, "retrain": one, "watch": one | {"collision_strategy": "CANCEL_NEW"}}
    (nightly,), (looks,) = DEPLOYMENTS["retrain"]["schedules"], DEPLOYMENTS["watch"]["schedules"]
    assert len({nightly["slug"], looks["slug"], ""}) == 3
    assert nightly["timezone"] == looks["timezone"] == "UTC"
    assert (len(nightly["cron"].split()), looks["interval"], looks["active"]) == (5, 900, True)


@pytest.mark.slow(10)
def test_a_flow_loaded_as_prefect_does_finds_dvc_itself_and_not_the_module_of_its_name_beside_it():
    code = (
        "from prefect.flows import load_flow_from_entrypoint as load\n"
        f"for entrypoint in {[entry['entrypoint'] for entry in DEPLOYMENTS.values()]}: assert load(entrypoint).name\n"
        "from flows import dvc\n"
        "with dvc.repository() as repo: print(repo.root_dir)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout.strip() == str(REPOSITORY), done.stderr


NIGHTLY = {"cron": "30 4 * * *", "timezone": "UTC"}


@pytest.mark.fault("W3")
@pytest.mark.slow(120)
def test_what_a_person_changed_stays_and_is_said_and_what_prefect_yaml_changes_arrives(project, tmp_path):
    with prefect_server(tmp_path / "prefect") as environment:

        def ask(method: str, path: str, body: Any = None) -> Any:
            return ask_prefect(environment["PREFECT_API_URL"], method, path, body)

        def deploy() -> str:
            """Deploy as the keeper does; what it says."""
            command = [sys.executable, str(REPOSITORY / "infra" / "services.py"), "deploy"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        def seen() -> list[Any]:
            """The settings that a person can change, of everything that is made known."""
            found = []
            for name in DEPLOYMENTS:
                entry = ask("GET", f"/deployments/name/m3diff/{name}")
                rules = [
                    [one[key] for key in ("active", "schedule", "parameters", "slug")] for one in entry["schedules"]
                ]
                for rule in rules:
                    rule[1].pop("anchor_date", None)
                limit = (entry["global_concurrency_limit"] or {}).get("limit")
                found.append((name, entry["paused"], limit, entry["concurrency_options"], rules))
            pool, queue = ask("GET", "/work_pools/m3diff"), ask("GET", "/work_pools/m3diff/queues/default")
            switched = [(one["name"], one["enabled"]) for one in ask("POST", "/automations/filter", {})]
            return [*found, pool["is_paused"], pool["concurrency_limit"], queue["is_paused"], switched]

        assert "stays" not in deploy() + deploy(), "nobody changed anything"
        (project / "services" / "entries.json").unlink()  # as after an upgrade from a version that kept no record
        full, retrain, watch = (ask("GET", f"/deployments/name/m3diff/{name}") for name in DEPLOYMENTS)
        ask("PATCH", f"/deployments/{watch['id']}", {"paused": True})
        ask("DELETE", f"/deployments/{watch['id']}/schedules/{watch['schedules'][0]['id']}")
        ask("PATCH", f"/deployments/{full['id']}", {"concurrency_limit": 1})
        mine = {"active": True, "schedule": NIGHTLY, "slug": "mine"}
        ask("POST", f"/deployments/{full['id']}/schedules", [mine])
        ask("PATCH", f"/deployments/{retrain['id']}", {"concurrency_limit": 3})
        other = {"active": False, "schedule": NIGHTLY, "parameters": {"warm_start": True}}
        ask("PATCH", f"/deployments/{retrain['id']}/schedules/{retrain['schedules'][0]['id']}", other)
        ask("PATCH", "/work_pools/m3diff", {"is_paused": True, "concurrency_limit": 1})
        ask("PATCH", "/work_pools/m3diff/queues/default", {"is_paused": True})
        (automation,) = ask("POST", "/automations/filter", {})
        ask("PATCH", f"/automations/{automation['id']}", {"enabled": False})
        before = seen()
        old = {key: automation[key] for key in ("trigger", "actions", "enabled", "description")}
        ask("POST", "/automations/", old | {"name": "start crashed runs of m3diff again"})
        for _ in range(2):
            said = deploy()
            assert seen() == before, "what an old automation did, the worker does now"
            for words in ("m3diff/retrain", "m3diff/watch", "work pool m3diff"):
                assert f"{words} stays as Prefect's page has it: " in said
        assert "command" not in ask("GET", "/work_pools/m3diff")["base_job_template"]["job_configuration"]

        file = project / "prefect.yaml"
        file.write_text(
            file.read_text().replace("{limit: 1, collision_strategy: ENQ", "{limit: 2, collision_strategy: ENQ")
        )
        deploy()
        now = ask("GET", "/deployments/name/m3diff/retrain")
        assert (now["global_concurrency_limit"]["limit"], now["schedules"][0]["active"]) == (2, True)
        assert seen()[2] == before[2], "of another deployment, whose entry is as it was"

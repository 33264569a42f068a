"""Deploy the project to Prefect's server: the work pool, an automation, the deployments of prefect.yaml. Changes that a
person made on Prefect's page since the last time stay, unless the deployment's entry in prefect.yaml changed too."""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from m3diff.records.files import write_atomic

POOL = FLOW = "m3diff"
RECORD = Path("services/entries.json")
"""The entries of prefect.yaml as they were deployed last."""
OF_OLD = "start crashed runs of m3diff again"  # flows/worker.py does, which knows whether the process is gone
SETTINGS = ("paused", "concurrency_options", "concurrency_limit")
SCHEDULE = ("active", "schedule", "parameters", "max_scheduled_runs", "slug")


def deploy() -> None:
    """Make pool, automation and deployments known to the server at PREFECT_API_URL."""
    from prefect.client.orchestration import get_client

    entries = {entry["name"]: entry for entry in yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]}
    last = json.loads(RECORD.read_text()) if RECORD.is_file() else entries
    with get_client(sync_client=True) as client:
        prepare_pool(client)
        automation = end_silent_runs()
        if not client.read_automations_by_name(automation.name):
            automation.create()
        for old in client.read_automations_by_name(OF_OLD):
            client.delete_automation(old.id)
        asked = {"flows": {"name": {"any_": [FLOW]}}}
        before = client.request("POST", "/deployments/filter", json=asked).raise_for_status().json()
        command = [f"{Path(sys.executable).parent}/prefect", "--no-prompt", "deploy", "--all"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for deployment in before:
            if last.get(deployment["name"]) == entries.get(deployment["name"]):
                put_back(client, deployment)
    write_atomic(RECORD, json.dumps(entries, indent=1))


def put_back(client: Any, deployment: dict[str, Any]) -> None:
    """Set what a person can change on Prefect's page to what it was before."""
    place, limit = f"/deployments/{deployment['id']}", (deployment["global_concurrency_limit"] or {}).get("limit")
    kept = {name: deployment[name] for name in SETTINGS} | {"concurrency_limit": limit}
    client.request("PATCH", place, json=kept)
    for schedule in client.request("GET", f"{place}/schedules").json():
        client.request("DELETE", f"{place}/schedules/{schedule['id']}")
    schedules = [{name: schedule[name] for name in SCHEDULE} for schedule in deployment["schedules"]]
    client.request("POST", f"{place}/schedules", json=schedules)
    paused = [f"{schedule['slug']} paused" for schedule in schedules if not schedule["active"]]
    for what in (["paused"] if deployment["paused"] else []) + paused:
        print(f"m3diff/{deployment['name']} stays as Prefect's page has it: {what}")


def prepare_pool(client: Any) -> None:
    """The work pool, whose jobs take nothing from who asks for a flow run (a command, say)."""
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectNotFound

    template = {
        "job_configuration": {"env": {"DO_NOT_TRACK": "true", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}},
        "variables": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    try:
        client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
    if client.read_work_pool(POOL).is_paused:
        print(f"work pool {POOL} stays as Prefect's page has it: paused")


def end_silent_runs() -> Any:
    """The automation that ends a run whose machine died, which would keep its place for ever. `flows/worker.py` starts
    it again."""
    from prefect.automations import Automation
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import EventTrigger, Posture
    from prefect.events.schemas.events import ResourceSpecification

    ended = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    silent = EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.heartbeat", *ended},
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=90),
    )
    end = ChangeFlowRunState(name=None, state=StateType.CRASHED, force=False, message="no heartbeat for 90 s")
    return Automation(name="end runs without a heartbeat", trigger=silent, actions=[end])

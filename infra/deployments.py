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
        before = settings(client)
        command = [f"{Path(sys.executable).parent}/prefect", "--no-prompt", "deploy", "--all"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for name, (id_, ours) in settings(client).items():
            _, theirs = before.get(name, (id_, ours))
            changed = [what for what in ours if ours[what] != theirs[what]]
            if not changed or last.get(name) != entries.get(name):
                continue
            client.request(
                "PATCH", f"/deployments/{id_}", json={what: theirs[what] for what in ours if what != "schedules"}
            )
            for schedule in client.request("GET", f"/deployments/{id_}/schedules").json():
                client.request("DELETE", f"/deployments/{id_}/schedules/{schedule['id']}")
            client.request("POST", f"/deployments/{id_}/schedules", json=theirs["schedules"])
            print(f"m3diff/{name} stays as Prefect's page has it: {', '.join(changed)}")
    write_atomic(RECORD, json.dumps(entries, indent=1))


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
    pool = client.read_work_pool(POOL)
    for what, there in (("paused", pool.is_paused), (f"limit {pool.concurrency_limit}", pool.concurrency_limit)):
        if there:
            print(f"work pool {POOL} stays as Prefect's page has it: {what}")


def settings(client: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Each deployment of ours by name: its id, and what a person can change of it on Prefect's page."""
    found = {}
    asked = {"flows": {"name": {"any_": [FLOW]}}}
    for deployment in client.request("POST", "/deployments/filter", json=asked).raise_for_status().json():
        schedules = [{name: schedule[name] for name in SCHEDULE} for schedule in deployment["schedules"]]
        for schedule in schedules:
            schedule["schedule"].pop("anchor_date", None)  # of an interval, new at each time
        found[deployment["name"]] = (
            deployment["id"],
            {
                "paused": deployment["paused"],
                "concurrency_limit": (deployment["global_concurrency_limit"] or {}).get("limit"),
                "concurrency_options": deployment["concurrency_options"],
                "schedules": sorted(schedules, key=lambda schedule: schedule["slug"] or ""),
            },
        )
    return found


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

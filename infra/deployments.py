"""Deploy the project to Prefect's server: the work pool, an automation, the deployments of prefect.yaml. Changes that a
person made on Prefect's page since the last time stay, and are printed."""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from m3diff.records.files import write_atomic

POOL = FLOW = "m3diff"
RECORD = Path("services/deployed.json")
"""The settings of the deployments as prefect.yaml had them last. What differs from these, a person changed."""
OF_OLD = "start crashed runs of m3diff again"  # flows/worker.py does, which knows whether the process is gone

Settings = dict[str, dict[str, Any]]
"""Of each deployment: `paused`, `concurrency_limit`, `concurrency_options`, and its schedules as `schedule SLUG`."""


def deploy() -> None:
    """Make pool, automation and deployments known to the server at PREFECT_API_URL."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        prepare_pool(client)
        automation = end_silent_runs()
        if not client.read_automations_by_name(automation.name):
            automation.create()
        for old in client.read_automations_by_name(OF_OLD):
            client.delete_automation(old.id)
        before = {name: settings for name, (_, settings) in read(client).items()}
        command = [f"{Path(sys.executable).parent}/prefect", "--no-prompt", "deploy", "--all"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        last: Settings = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
        for name, (deployment, ours) in read(client).items():
            if name in before:
                keep_changes(client, name, deployment, before[name], ours, last.get(name, {}))
            last[name] = ours
        write_atomic(RECORD, json.dumps(last, indent=1))


def prepare_pool(client: Any) -> None:
    """The work pool, whose jobs take nothing from who asks for a flow run (a command, say)."""
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectNotFound

    template = {
        "job_configuration": {"env": {"DO_NOT_TRACK": "true", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}},
        "variables": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    try:
        pool = client.read_work_pool(POOL)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
        return
    client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))
    for what, there in (("paused", pool.is_paused), (f"limit {pool.concurrency_limit}", pool.concurrency_limit)):
        if there:
            print(f"work pool {POOL} stays as Prefect's page has it: {what}")


def read(client: Any) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Each deployment of ours by name, as the server tells of it, and its settings."""
    found = {}
    asked = {"flows": {"name": {"any_": [FLOW]}}}
    for deployment in client.request("POST", "/deployments/filter", json=asked).raise_for_status().json():
        limit = deployment["global_concurrency_limit"] or {}
        settings = {
            "paused": deployment["paused"],
            "concurrency_limit": limit.get("limit"),
            "concurrency_options": deployment["concurrency_options"],
        }
        for schedule in deployment["schedules"]:
            kept = {name: schedule[name] for name in ("active", "schedule", "parameters", "max_scheduled_runs", "slug")}
            kept["schedule"].pop("anchor_date", None)  # of an interval, new at each time
            settings[f"schedule {schedule['slug'] or schedule['id']}"] = kept
        found[deployment["name"]] = deployment, settings
    return found


def keep_changes(client: Any, name: str, deployment: dict[str, Any], *settings: dict[str, Any]) -> None:
    """Put back what a person changed.

    Args:
        settings: before this deploy, now by prefect.yaml, and by prefect.yaml the last time. What was before neither as
            now nor as the last time, a person changed.
    """
    before, ours, last = settings
    ids = {f"schedule {schedule['slug'] or schedule['id']}": schedule["id"] for schedule in deployment["schedules"]}
    for what in sorted(before.keys() | ours.keys()):
        value = before.get(what)
        if value in (ours.get(what), last.get(what)) or not (what in before or what in last):
            continue
        path, body, method = f"/deployments/{deployment['id']}", {what: value}, "PATCH"
        if what.startswith("schedule "):
            path, body = f"{path}/schedules/{ids.get(what, '')}".rstrip("/"), value
            method = "POST" if what not in ids else "DELETE" if value is None else "PATCH"
        client.request(method, path, json=[body] if method == "POST" else body)
        print(
            f"m3diff/{name}: {what} stays as Prefect's page has it: {said(value)}; prefect.yaml: {said(ours.get(what))}"
        )


def said(value: Any) -> str:
    """`paused, cron 0 2 * * *`, or the value itself."""
    if not isinstance(value, dict) or "schedule" not in value:
        return "removed" if value is None else json.dumps(value)
    of = value["schedule"]
    rule = next(f"{kind} {of[kind]}" for kind in ("cron", "interval", "rrule") if of.get(kind))
    more = f", {json.dumps(value['parameters'])}" if value["parameters"] else ""
    return f"{'active' if value['active'] else 'paused'}, {rule}{more}"


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

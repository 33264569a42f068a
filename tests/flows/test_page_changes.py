"""What a person changed on Prefect's page stays when the deployments are made known again, and is said."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.machine import prefect_server
from tests.toy import REPOSITORY


class Page:
    """Prefect's server, as its page asks it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment, self.api = environment, environment["PREFECT_API_URL"]

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = httpx.request(method, self.api + path, json=body, timeout=60)
        for _ in range(20):
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:  # SQLite is busy
                break
            answer = httpx.request(method, self.api + path, json=body, timeout=60)
        return answer.raise_for_status().json() if answer.content else None

    def deployment(self, name: str) -> dict[str, Any]:
        return self.ask("GET", f"/deployments/name/m3diff/{name}")

    def change(self, name: str, body: dict[str, Any]) -> None:
        self.ask("PATCH", f"/deployments/{self.deployment(name)['id']}", body)

    def change_schedule(self, name: str, body: dict[str, Any] | None) -> None:
        """The only one; None: take it away."""
        found = self.deployment(name)
        path = f"/deployments/{found['id']}/schedules/{found['schedules'][0]['id']}"
        self.ask("PATCH" if body else "DELETE", path, body)

    def add_schedule(self, name: str, body: dict[str, Any]) -> None:
        self.ask("POST", f"/deployments/{self.deployment(name)['id']}/schedules", [body])

    def limit(self, name: str) -> int | None:
        return (self.deployment(name)["global_concurrency_limit"] or {}).get("limit")

    def rules(self, name: str) -> list[tuple[bool, Any, Any]]:
        """Of each schedule whether it is active, its rule, its parameters."""
        found = self.deployment(name)["schedules"]
        rules = [(one["schedule"].get("cron") or one["schedule"].get("interval"), one) for one in found]
        return sorted((one["active"], rule, one["parameters"]) for rule, one in rules)

    def deploy(self) -> str:
        """What `make up` and the worker's unit do; what it says."""
        command = [sys.executable, str(REPOSITORY / "infra" / "services.py"), "deploy"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


NIGHTLY = {"cron": "30 4 * * *", "timezone": "UTC"}
CHANGES: dict[str, tuple[Callable[[Page], Any], Callable[[Page], Any], str]] = {
    "a paused deployment": (
        lambda page: page.change("watch", {"paused": True}),
        lambda page: page.deployment("watch")["paused"],
        "m3diff/watch: paused ",
    ),
    "a limit": (
        lambda page: page.change("full", {"concurrency_limit": 1}),
        lambda page: page.limit("full") == 1,
        "m3diff/full: concurrency_limit ",
    ),
    "another limit": (
        lambda page: page.change("retrain", {"concurrency_limit": 3}),
        lambda page: page.limit("retrain") == 3,
        "m3diff/retrain: concurrency_limit ",
    ),
    "a paused schedule with another rule and parameters": (
        lambda page: page.change_schedule(
            "retrain", {"active": False, "schedule": NIGHTLY, "parameters": {"warm_start": True}}
        ),
        lambda page: (False, "30 4 * * *", {"warm_start": True}) in page.rules("retrain"),
        "m3diff/retrain: schedule nightly stays as Prefect's page has it: paused, cron 30 4 * * *",
    ),
    "a schedule that is taken away": (
        lambda page: page.change_schedule("watch", None),
        lambda page: page.rules("watch") == [],
        "m3diff/watch: schedule every-quarter-hour stays as Prefect's page has it: removed",
    ),
    "a schedule more": (
        lambda page: page.add_schedule("full", {"active": True, "schedule": NIGHTLY, "slug": "mine"}),
        lambda page: page.rules("full") == [(True, "30 4 * * *", {})],
        "",
    ),
    "a pool that is paused and limited": (
        lambda page: page.ask("PATCH", "/work_pools/m3diff", {"is_paused": True, "concurrency_limit": 1}),
        lambda page: page.ask("GET", "/work_pools/m3diff")["is_paused"],
        "work pool m3diff stays as Prefect's page has it: limit 1",
    ),
    "a queue that is paused": (
        lambda page: page.ask("PATCH", "/work_pools/m3diff/queues/default", {"is_paused": True}),
        lambda page: page.ask("GET", "/work_pools/m3diff/queues/default")["is_paused"],
        "",
    ),
    "an automation that is switched off": (
        lambda page: [
            page.ask("PATCH", f"/automations/{one['id']}", {"enabled": False})
            for one in page.ask("POST", "/automations/filter", {})
        ],
        lambda page: not any(one["enabled"] for one in page.ask("POST", "/automations/filter", {})),
        "",
    ),
}


@pytest.mark.fault("W3")
@pytest.mark.slow(120)
def test_what_a_person_changed_stays_and_is_said_and_what_prefect_yaml_changes_arrives(
    project: Path, tmp_path: Path
) -> None:
    with prefect_server(tmp_path / "prefect") as environment:
        page = Page(environment)
        assert "stays" not in page.deploy()
        assert "stays" not in page.deploy(), "nobody changed anything"
        for change, _, _ in CHANGES.values():
            change(page)
        for _ in range(2):
            said = page.deploy()
            assert {name: bool(stays(page)) for name, (_, stays, _) in CHANGES.items()} == dict.fromkeys(CHANGES, True)
            assert [words for *_, words in CHANGES.values() if words not in said] == []
        assert page.ask("GET", "/work_pools/m3diff")["concurrency_limit"] == 1
        assert "command" not in page.ask("GET", "/work_pools/m3diff")["base_job_template"]["job_configuration"]

        page.change("watch", {"paused": False})
        page.change("retrain", {"concurrency_limit": 1})
        file = project / "prefect.yaml"
        file.write_text(
            file.read_text().replace("limit: 1, collision_strategy: ENQUEUE", "limit: 2, collision_strategy: ENQUEUE")
        )
        said = page.deploy()
        assert (page.deployment("watch")["paused"], page.limit("retrain")) == (False, 2)
        assert "watch: paused" not in said
        assert "retrain: concurrency_limit" not in said


@pytest.mark.slow(60)
def test_the_first_time_that_settings_are_kept_what_is_there_stays(project: Path, tmp_path: Path) -> None:
    """As after an upgrade from a version that kept no record; what an old automation did, the worker does now."""
    with prefect_server(tmp_path / "prefect") as environment:
        page = Page(environment)
        page.deploy()
        (project / "services" / "deployed.json").unlink()
        page.change("watch", {"paused": True})
        (automation,) = page.ask("POST", "/automations/filter", {})
        old = {key: automation[key] for key in ("trigger", "actions", "enabled", "description")}
        page.ask("POST", "/automations/", old | {"name": "start crashed runs of m3diff again"})
        assert "m3diff/watch: paused stays" in page.deploy()
        assert page.deployment("watch")["paused"]
        assert [one["name"] for one in page.ask("POST", "/automations/filter", {})] == [automation["name"]]

"""No page of a server that `make up` starts asks for anything that is not on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser import Watch, chromium
from tests.flows.test_services import Machine

PREFECT = (
    "",
    "dashboard",
    "runs",
    "flows",
    "deployments",
    "work-pools",
    "blocks",
    "variables",
    "automations",
    "events",
    "artifacts",
    "concurrency-limits",
    "settings",
)
MLFLOW = ("", "#/experiments", "#/models", "#/models/m3diff", "#/models/m3diff/versions/1", "#/settings")
QUIET_MS = 1500


@pytest.fixture
def machine(project: Path) -> Iterator[Machine]:
    machine = Machine(project)
    started = machine.make("up")
    assert started.returncode == 0, started.stdout + started.stderr
    machine.run_deployment("m3diff/full", "first")
    yield machine
    machine.make("down")


def asked_elsewhere(browser: Browser, address: str) -> list[str]:
    """What a page asks of other machines, until it is quiet."""
    page = browser.new_page()
    watch = Watch(page)
    page.goto(address)
    page.wait_for_load_state("load")
    page.wait_for_timeout(QUIET_MS)
    assert page.inner_text("body").strip(), f"{address}: an empty page"
    page.close()
    return watch.left


@pytest.mark.slow(90)
def test_no_page_of_the_servers_asks_a_host_that_is_not_this_machine(machine):
    prefect, mlflow = (f"http://127.0.0.1:{port}/" for port in (machine.prefect, machine.mlflow))
    (run,) = machine.ask("flow_runs", {"flow_runs": {"name": {"any_": ["first"]}}})
    (report,) = machine.ask("artifacts", {"artifacts": {"key": {"any_": ["run-report"]}}})
    ours = (f"runs/flow-run/{run['id']}", f"artifacts/artifact/{report['id']}")
    pages = [prefect + path for path in (*PREFECT, *ours)] + [mlflow + path for path in MLFLOW]
    with chromium() as browser:
        asked = {page: asked_elsewhere(browser, page) for page in pages}
    assert {page: requests for page, requests in asked.items() if requests} == {}

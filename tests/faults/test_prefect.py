"""Prefect's server is killed while a stage runs: the stage ends well, and the next run takes what it made."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests import toy
from tests.servers import free_port
from tests.toy import store

FLOW = "from flows.full import full; full(ref='HEAD', overrides=['evaluate.gallery=7'])"
SLOW = """def evaluate(params, paths):
    import os, time
    folder = Path(os.environ["TOY_MARKS"])
    (folder / "began").touch()
    while not (folder / "go").exists():
        time.sleep(0.1)
    old(params, paths)
    with (folder / "ended").open("a") as file:
        file.write("once ")


def old("""


class Prefect:
    """A server of Prefect, and flows that are run against it."""

    def __init__(self, root: Path, home: Path) -> None:
        self.root, self.port = root, free_port()
        self.environment = os.environ | {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": f"http://127.0.0.1:{self.port}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_CLIENT_MAX_RETRIES": "1",
            "TOY_MARKS": str(home),
        }
        home.mkdir()

    def start(self) -> None:
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        with (Path(self.environment["PREFECT_HOME"]) / "server.log").open("a") as log:
            self.server = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 300
        while True:
            try:
                httpx.get(f"{self.environment['PREFECT_API_URL']}/health", timeout=2).raise_for_status()
                return
            except httpx.HTTPError:
                assert time.monotonic() < deadline, "the server did not come up"
                time.sleep(0.5)

    def kill(self) -> None:
        if self.server.poll() is None:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()

    def flow(self) -> subprocess.Popen:
        log = (Path(self.environment["PREFECT_HOME"]) / "flow.log").open("a")
        return subprocess.Popen(
            [sys.executable, "-c", FLOW], cwd=self.root, env=self.environment, stdout=log, stderr=log
        )


@pytest.mark.fault("20", "32")
@pytest.mark.slow(150)
def test_a_server_of_prefect_that_is_killed_costs_no_stage(project, tmp_path):
    text = (project / "toy.py").read_text()
    (project / "toy.py").write_text(text.replace("def evaluate(", SLOW, 1))
    toy.commit(project, "a slow stage")
    marks = tmp_path / "prefect"
    prefect = Prefect(project, marks)
    prefect.start()
    try:
        flow = prefect.flow()
        deadline = time.monotonic() + 300
        while not (marks / "began").exists():
            assert flow.poll() is None, (marks / "flow.log").read_text()[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        prefect.kill()
        time.sleep(5)
        (marks / "go").touch()
        flow.wait(timeout=400)
        assert (marks / "ended").read_text() == "once "
        prefect.start()
        assert prefect.flow().wait(timeout=400) == 0, (marks / "flow.log").read_text()[-4000:]
    finally:
        prefect.kill()
    assert (marks / "ended").read_text() == "once ", "the stage ran a second time"
    assert len(store(project).search_model_versions("name = 'm3diff'")) == 1

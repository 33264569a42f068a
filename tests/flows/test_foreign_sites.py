"""Every server refuses requests from pages of other sites, as browsers send them, and listens only where it should."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows import GUARD
from tests.servers import Machine, free_port, services_of, started
from tests.toy import REPOSITORY, change

FOREIGN_HEADERS = {
    "another site": {"Origin": "http://evil.example"},
    "another site on the port": {"Origin": "https://evil.example:{port}"},
    "another server of this machine": {"Origin": "http://127.0.0.1:1"},
    "a name that begins as ours": {"Origin": "http://127.0.0.1.evil.example:{port}"},
    "no site": {"Origin": "null"},
    "an empty origin": {"Origin": ""},
    "a broken origin": {"Origin": "http://[::1"},
    "a login in the origin": {"Origin": "http://127.0.0.1:{port}@evil.example"},
    "a rebound name": {"Host": "evil.example:{port}"},
    "a rebound name and its own page": {"Host": "evil.example:{port}", "Origin": "http://evil.example:{port}"},
    "a rebound name like a private address": {"Host": "10.evil.example:{port}"},
    "a rebound name that begins as ours": {"Host": "localhost.evil.example:{port}"},
    "an address of the network": {"Host": "192.168.1.7:{port}"},
    "an address that means all": {"Host": "0.0.0.0:{port}"},
    "an empty host": {"Host": ""},
    "a host with a path": {"Host": "127.0.0.1:{port}/@evil.example"},
    "our page from another's name": {"Host": "evil.example:{port}", "Origin": "http://127.0.0.1:{port}"},
}
ALLOWED_HEADERS: dict[str, dict[str, str]] = {
    "a program": {},
    "by name": {"Host": "localhost:{port}"},
    "by the other address": {"Host": "[::1]:{port}"},
    "another loopback address": {"Host": "127.0.0.2:{port}"},
    "a tunnel from another port": {"Host": "localhost:9999", "Origin": "http://localhost:9999"},
    "its page": {"Origin": "http://127.0.0.1:{port}"},
    "its page by name": {"Host": "localhost:{port}", "Origin": "http://localhost:{port}"},
    "its page by name, the API by address": {"Origin": "http://localhost:{port}"},
    "in capitals": {"Host": "LOCALHOST:{port}"},
}
UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
UPGRADE |= {"Sec-WebSocket-Key": "A" * 22 + "=="}
JSON = {"Content-Type": "application/json"}


class RawResponse:
    """The response to a request that has only these headers and the headers that HTTP requires."""

    def __init__(self, port: int, method: str, path: str, body: Any = None, **headers: str) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        content = b"" if body is None else json.dumps(body).encode()
        all_headers = {"Host": f"127.0.0.1:{port}", "Content-Length": str(len(content))} | headers
        for name, value in all_headers.items():
            connection.putheader(name, value.format(port=port))
        connection.endheaders(content)
        response = connection.getresponse()
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.text = "" if self.status == 101 else response.read().decode(errors="replace")
        connection.close()


ECHO = """
async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"access-control-allow-origin", b"*")]})
        await send({"type": "http.response.body", "body": b"answered"})
    elif scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close"})
"""


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Yield the port of a small application that runs under uvicorn with the guard of the servers."""
    folder = tmp_path_factory.mktemp("echo")
    port = free_port()
    (folder / "echo.py").write_text(ECHO)
    command = [sys.executable, "-m", "uvicorn", "echo:app", "--port", str(port), "--lifespan", "off"]
    environment = os.environ | {"UVICORN_HTTP": GUARD, "PYTHONPATH": str(REPOSITORY)}
    with started(
        command, folder / "log", lambda: response_status(port, "GET", "/") is not None, cwd=folder, env=environment
    ):
        yield port


def response_status(port: int, *words: str, **headers: str) -> int | None:
    """Return the status of a response, or None if there is none, for example because the server does not use HTTP/1."""
    try:
        return RawResponse(port, *words, **headers).status
    except (HTTPException, OSError):
        return None


@pytest.mark.parametrize("headers", FOREIGN_HEADERS.values(), ids=FOREIGN_HEADERS)
def test_what_is_foreign_is_refused_by_any_method_and_as_a_web_socket(headers, echo):
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        answer = RawResponse(echo, method, "/", **headers)
        assert answer.status == 403, method
        assert answer.headers.get("access-control-allow-origin") is None, method
    assert RawResponse(echo, "GET", "/", **UPGRADE | headers).status == 403


@pytest.mark.parametrize("headers", ALLOWED_HEADERS.values(), ids=ALLOWED_HEADERS)
def test_programs_of_this_machine_and_the_servers_own_page_are_answered(headers, echo):
    assert RawResponse(echo, "POST", "/", **headers).text == "answered"
    assert RawResponse(echo, "GET", "/", **UPGRADE | headers).status == 101


def test_two_hosts_or_none_are_refused(echo):
    for head in ("Host: 127.0.0.1\r\nHost: evil.example\r\n", ""):
        with psutil.socket.create_connection(("127.0.0.1", echo)) as plain:
            plain.sendall(f"POST / HTTP/1.{'1' if head else '0'}\r\n{head}Content-Length: 0\r\n\r\n".encode())
            assert plain.recv(100).split()[1] in (b"400", b"403")


@pytest.fixture(scope="module")
def machine(built_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Run the servers and the worker of `make up` in their own folder."""
    root = tmp_path_factory.mktemp("machine") / "toy"
    shutil.copytree(built_once, root, symlinks=True)
    with services_of(root) as machine:
        yield machine


HARMFUL_VARIABLES: list[dict[str, Any]] = [{"command": "touch harm"}, {"env": {"LD_PRELOAD": "/tmp/harm.so"}}]
HARMFUL_VARIABLES += [{"working_dir": "/tmp"}, {"image": "harm"}]
REQUESTS: list[tuple[str, str, str, Any]] = [
    ("prefect", "GET", "/", None),
    ("prefect", "GET", "/no/such/route", None),
    ("prefect", "OPTIONS", "/api/deployments/{id}/create_flow_run", None),
    ("prefect", "POST", "/api/deployments/{id}/create_flow_run", {"job_variables": HARMFUL_VARIABLES[0]}),
    ("prefect", "PATCH", "/api/deployments/{id}", {"paused": True}),
    ("prefect", "DELETE", "/api/deployments/{id}", None),
    ("mlflow", "GET", "/model-versions/get-artifact?path=model&name=m3diff&version=1", None),
    ("mlflow", "POST", "/graphql", {"query": "{ __typename }"}),
    ("mlflow", "POST", "/ajax-api/2.0/mlflow/experiments/create", {"name": "harm"}),
    ("mlflow", "OPTIONS", "/api/2.0/mlflow/experiments/create", None),
]
"""Requests with which a page could run a command on the worker, or get the information that it needs for that."""


def read_state(machine: Machine) -> list[Any]:
    """Return the state that the requests of a page would change."""
    search = RawResponse(machine.mlflow, "GET", "/api/2.0/mlflow/experiments/search?max_results=100")
    return [
        {item["name"]: item["paused"] for item in machine.ask("/deployments/filter", {})},
        [run["name"] for run in machine.ask("/flow_runs/filter", {"flow_runs": {"tags": {"is_null_": True}}})],
        [experiment["name"] for experiment in json.loads(search.text)["experiments"]],
    ]


@pytest.mark.slow(27)
def test_a_foreign_page_is_refused_on_every_route_and_jobs_take_no_variables(machine):
    state_before = read_state(machine)
    full = machine.ask("/deployments/name/m3diff/full")["id"]
    for headers in FOREIGN_HEADERS.values():
        for server, method, path, body in REQUESTS:
            for content_type in (
                "application/json",
                "text/plain",
            ):  # a browser sends text/plain without a preflight request
                request_headers = {"Content-Type": content_type} | headers
                answer = RawResponse(
                    getattr(machine, server), method, path.replace("{id}", full), body, **request_headers
                )
                assert answer.status == 403, (method, path, content_type, headers)
                assert "access-control-allow-origin" not in answer.headers
    for path in ("/api/events/in", "/api/events/out", "/api/logs/out"):
        assert response_status(machine.prefect, "GET", path, **UPGRADE | FOREIGN_HEADERS["another site"]) == 403, path
    assert read_state(machine) == state_before

    for name, headers in ALLOWED_HEADERS.items():
        assert response_status(machine.prefect, "GET", "/api/work_pools/m3diff", **headers) == 200, name
        if name not in ("another loopback address", "in capitals"):  # MLflow's own list does not contain them
            assert response_status(machine.mlflow, "GET", "/", **headers) == 200, name
    allowed_response_headers = RawResponse(
        machine.prefect, "GET", "/api/health", Origin="http://localhost:{port}"
    ).headers
    assert allowed_response_headers["access-control-allow-origin"] == f"http://localhost:{machine.prefect}"
    for variables in HARMFUL_VARIABLES:
        path = f"/api/deployments/{full}/create_flow_run"
        response = RawResponse(machine.prefect, "POST", path, {"job_variables": variables}, **JSON)
        assert response.status == 422, response.text
        assert next(iter(variables)) in response.text, response.text
    assert machine.make("status").returncode == 0, "the worker sends no heartbeats"


TEMPORARY = """
import sys
from prefect.client.orchestration import get_client
from flows.prepared_flow import flow

@flow(name="ask")
def ask():
    with get_client(sync_client=True) as client:
        print("asked", client.api_url.port, flush=True)
        sys.stdin.readline()

ask()
"""


@pytest.mark.slow(30)
def test_the_server_that_prefect_starts_for_a_flow_without_one_refuses_them_too(tmp_path):
    prefect_variables = {
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_API_URL": "",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    }
    prefect_variables["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = (
        "300"  # 20 s are too short beside other tests
    )
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # Without the guard that a flow in this process may have set
    inherited = {name: value for name, value in os.environ.items() if name != "UVICORN_HTTP"}
    flow = subprocess.Popen(
        [sys.executable, "-c", TEMPORARY], cwd=REPOSITORY, env=inherited | prefect_variables, **pipes
    )
    assert flow.stdout is not None
    port = int(next(line for line in iter(flow.stdout.readline, "") if line.startswith("asked")).split()[1])
    for headers in FOREIGN_HEADERS.values():
        for method, path in (("GET", "/api/health"), ("POST", "/api/flow_runs/filter"), ("POST", "/api/flow_runs/")):
            assert RawResponse(port, method, path, {}, **headers).status == 403, (path, headers)
    assert RawResponse(port, "POST", "/api/flow_runs/filter", {}, **JSON).status == 200
    flow.communicate("\n")
    assert flow.returncode == 0


def listening_ports(own_row: str, root: psutil.Process, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield each port on which a process or its descendants listen, with the port's row in SECURITY.md.

    Each port must be bound to an address that only this machine can reach.

    Args:
        own_row: the row of the process itself.
        names: the rows of the table.
    """
    for process in [root, *root.children(recursive=True)]:
        try:
            command_words = [process.name(), *(Path(word).name for word in process.cmdline()[:4] if word[:1] != "-")]
            addresses = [
                connection.laddr
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
        except psutil.Error:  # it has ended
            continue
        row = (
            own_row
            if process == root
            else next((name for name in names if any(name in word for word in command_words)), own_row)
        )
        for address in addresses:
            assert row in names, f"{command_words} listens at {address}, which SECURITY.md does not list"
            assert address.ip.removeprefix("::ffff:") in ("127.0.0.1", "::1"), f"{command_words} listens at {address}"
            yield row, address.port


@pytest.mark.slow(120)
def test_the_ports_that_listen_are_those_of_the_table_and_ask_what_it_says(machine, tmp_path):
    from tests.faults import small
    from tests.serving.toy import running, write_registry

    text = (REPOSITORY / "SECURITY.md").read_text().partition("\n## Ports\n")[2].partition("\n## ")[0]
    rows = [re.split(r" *\| *", line.strip("| ")) for line in text.splitlines() if line.startswith("| `")]
    assert all(reached == "this machine" for _, _, reached, _ in rows)
    requirements = {name.strip("`"): requirement for name, _, _, requirement in rows}
    write_registry(tmp_path, "one")
    folder = tmp_path / "train"
    home = tmp_path / "train" / "home"
    home.mkdir(parents=True)
    small.write_params(folder)
    change(folder, "compute", workers=2)
    change(folder, "train", epochs=32)  # on a busy machine, some of Ray's processes listen only after ten seconds
    options: Any = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(REPOSITORY), "HOME": str(home)}}
    for stage in small.STAGE_COMMANDS[:4]:
        subprocess.run([sys.executable, "-m", "m3diff", *stage], check=True, **options)
    with running(tmp_path) as server:
        processes = [(name, machine.process(name)) for name in ("prefect", "mlflow", "worker")]
        ports = {port for name, process in processes for port in listening_ports(name, process, requirements)}
        for name, port in listening_ports("m3diff", psutil.Process(server.process.pid), requirements):
            ports.add(("m3diff serve" if port == server.port else name, port))
        training_ports = set()
        log = (folder / "log").open("w")
        training = subprocess.Popen([sys.executable, "-m", "m3diff", "train"], stdout=log, stderr=log, **options)
        while training.poll() is None:
            with suppress(psutil.NoSuchProcess):
                training_ports |= set(listening_ports("m3diff", psutil.Process(training.pid), requirements))
            time.sleep(0.2)
        assert training.returncode == 0, (folder / "log").read_text()[-3000:]
        assert {name for name, _ in ports | training_ports} == set(requirements)
        assert {("prefect", machine.prefect), ("mlflow", machine.mlflow), ("m3diff serve", server.port)} <= ports
        for name, port in ports:
            statuses = {response_status(port, method, "/", Host="evil.example") for method in ("GET", "POST")}
            first_word = re.split("[ ;]", requirements[name])[0]
            allowed_statuses = {"Host": {403}, "Ray's": {401, None}, "the": {None}, "nothing": {200, 405}}[first_word]
            if "counters" in requirements[name]:
                allowed_statuses |= {200, 405}
            assert statuses <= allowed_statuses, (name, port, statuses)
    assert [path for path in home.rglob("*") if path.is_file()] == []

"""Test the server as people start it: in a separate process, with a registry and clients over HTTP.

Some tests use replicas on a Ray cluster, compare the memory with docs/serving.md, or run `mlflow models serve`.
"""

import asyncio
import io
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import mlflow
import psutil
import pytest
import uvicorn
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from m3diff.__main__ import main
from m3diff.cluster import NoRoomError
from m3diff.models.device import process_environment
from m3diff.models.generation import load_captioner
from m3diff.records.errors import Fault
from m3diff.serving import batcher, limits
from m3diff.serving import server as server_module
from m3diff.serving.batcher import deployer, replica_options
from m3diff.serving.limits import COPIES
from m3diff.serving.limits import UPLOAD_S as UPLOAD_LIMIT_S
from m3diff.serving.model_card import ModelCard
from m3diff.serving.server import listening_socket, run, serve, stop_on_signals, take_token, url_of
from m3diff.settings.section import ParamsError
from m3diff.stages.register.stage import MODEL_SIGNATURE, copy_code
from tests.errors import Message, raises
from tests.servers import free_port, started, until
from tests.serving import toy
from tests.serving.toy import PARAMS, Running, chat, environment, form, plain, png, running, write_registry
from tests.stages.train.cluster import cluster
from tests.tiers import slow_except
from tests.tiny import noise_image, tiny_base, tiny_checkpoint
from tests.toy import REPOSITORY

PATIENCE_S = 400  # time limit for an answer if no time limit is tested. A busy machine is slow

UPLOAD_S = 3
TOKEN = "0123456789abcdef0123"
BEFORE = png(plain(10, 20))
AFTER = png(plain(30, 40))
CONSTANTS = {"server.POLL_S": 0.5, "limits.UPLOAD_S": UPLOAD_S, "batcher.BATCH_WAIT_S": 0.02}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("served")
    write_registry(root, "one", "two")
    with running(root, max_request_mb=1, answer_s=PATIENCE_S, constants=CONSTANTS) as server:
        yield server


def ask(server: Running, number: int) -> tuple[int, str]:
    """Send a pair that depends on the number. Return the status and the caption."""
    before = png(plain(number % 256, 1))
    after = png(plain(number % 256, 2))
    answer = httpx.post(f"{server.address}/caption", **form(before, after), timeout=PATIENCE_S)
    return answer.status_code, answer.json().get("caption", "")


@pytest.mark.slow(120)
def test_a_dead_replica_loses_few_requests_and_the_cluster_outlives_the_server(tmp_path, monkeypatch):
    client = write_registry(tmp_path, "one", "two")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))  # every node needs the toy, since any node may run a replica
    with cluster() as hosts:
        hosts.add(3, cpus=2)
        options = {"replicas": 2, "answer_s": PATIENCE_S, "variables": hosts.of_a_driver, "constants": CONSTANTS}
        with running(tmp_path, **options) as server, ThreadPoolExecutor(4) as clients:
            nodes = [psutil.Process(node.pid).children(recursive=True) for node in hosts.nodes.values()]
            replica = next(process for node in nodes for process in node if "ServeReplica" in process.name())
            requests = [clients.submit(ask, server, number) for number in range(200)]
            until(lambda: sum(request.done() for request in requests) > 20)
            replica.kill()
            statuses = Counter(request.result()[0] for request in requests)
            assert statuses.keys() <= {200, 500}
            assert statuses[500] <= 4, (
                f"more requests were lost than the dead replica can have had: {server.output[-2000:]}"
            )
            client.set_registered_model_alias("m3diff", "champion", "2")
            server.wait_for("now answers with m3diff/2")
            assert [ask(server, number)[1][:3] for number in range(4)] == ["two"] * 4
        with running(tmp_path, **options) as server:
            assert ask(server, 1)[1][:3] == "two"


@pytest.mark.slow
def test_one_process_listens_on_this_machine_alone(server):
    (process,) = server.family()
    connections = process.net_connections("inet")
    addresses = [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN]
    assert addresses == [("127.0.0.1", server.port)]


@pytest.mark.slow
def test_openais_client_is_answered(server):
    client = openai_client(server)
    messages = chat(BEFORE, AFTER, "What is new?")["messages"]
    answer = client.chat.completions.create(model="m3diff", messages=messages)
    assert answer.choices[0].message.content.endswith(toy.toy_caption("", "What is new?", "10/20/0", "30/40/0"))
    assert [model.id for model in client.models.list()] == [answer.model]


@pytest.mark.slow
def test_a_refusal_is_an_error_of_openais_client(server):
    import openai

    messages = chat(BEFORE, AFTER, "What is new?")["messages"]
    messages[0]["content"].append(messages[0]["content"][-1])
    with pytest.raises(openai.UnprocessableEntityError, match="at most 2 images"):
        openai_client(server).chat.completions.create(model="m3diff", messages=messages)


@pytest.mark.slow
def test_a_client_that_sends_too_much_reads_the_refusal(server):
    answer = httpx.post(f"{server.address}/v1/chat/completions", content=bytes(5_000_000), timeout=PATIENCE_S)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "too_large"


def openai_client(server: Running) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def until_closed(port: int, *parts: bytes) -> tuple[bytes, float]:
    """Send parts of a request. Return the server's answer and the seconds until it closes the connection."""
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.2)
        answer = b""
        while received := connection.recv(65536):
            answer += received
    return answer, time.monotonic() - start


@pytest.mark.slow
def test_a_connection_that_is_silent_or_stops_in_the_middle_is_closed(server):
    head = b"POST /caption HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    get = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    content_headers = b"Content-Type: application/json\r\nContent-Length: 900\r\n\r\n"
    starts_by_request = {
        (): b"",
        (head,): b"",
        (get, head): b"HTTP/1.1 200",
        (head + content_headers, b"only this"): b"HTTP/1.1 408",
    }
    with ThreadPoolExecutor() as clients:
        results = list(clients.map(lambda parts: until_closed(server.port, *parts), starts_by_request))
    for (answer, seconds), start in zip(results, starts_by_request.values(), strict=True):
        assert answer.startswith(start)
        assert UPLOAD_S - 1 < seconds < UPLOAD_S + 4
    assert httpx.get(f"{server.address}/readyz").status_code == 200


@pytest.mark.slow(13)
@pytest.mark.parametrize(
    ("number", "send"), [(signal.SIGTERM, os.kill), (signal.SIGHUP, os.kill), (signal.SIGINT, os.killpg)], ids=str
)
def test_after_a_signal_requests_in_progress_are_answered_and_all_processes_end(number, send, tmp_path):
    write_registry(tmp_path, "one")
    slow = {"batcher.BATCH_WAIT_S": 3}
    with running(tmp_path, constants=slow, answer_s=PATIENCE_S) as server, ThreadPoolExecutor() as clients:
        family = server.family()
        answer = clients.submit(httpx.post, f"{server.address}/caption", **form(BEFORE, AFTER), timeout=PATIENCE_S)
        while not server.metric("m3diff_queue_length"):
            time.sleep(0.1)
        send(server.process.pid, number)
        assert server.process.wait(60) == 0, server.output
        assert answer.result().status_code == 200
        assert psutil.wait_procs(family, 20)[1] == []
        assert "Traceback" not in server.output


SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.fixture
def harmless_signals() -> Iterator[None]:
    """Let signals that nobody waits for do nothing, so that they do not end the tests."""
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


async def is_stopped_by(number: signal.Signals) -> bool:
    stop_event = stop_on_signals()
    os.kill(os.getpid(), number)
    await asyncio.sleep(0.01)
    return stop_event.is_set()


@pytest.mark.parametrize("number", SIGNALS, ids=str)
def test_each_signal_that_ends_a_process_stops_the_server(number, harmless_signals):
    assert asyncio.run(is_stopped_by(number))


def test_the_end_of_the_terminal_does_not_stop_a_server_under_nohup(harmless_signals):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert not asyncio.run(is_stopped_by(signal.SIGHUP))
    assert asyncio.run(is_stopped_by(signal.SIGTERM))


ANSWER_S = 0.3
POST = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 4\r\n\r\n"


async def answer_slowly(scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """Read the body, wait, and answer with it, as an ASGI application."""
    message = await receive()
    await asyncio.sleep(ANSWER_S)
    headers = [(b"content-length", str(len(message["body"])).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": message["body"]})


@asynccontextmanager
async def served(closed_models: list[str]) -> AsyncIterator[int]:
    """Run a server in this process that answers slowly. Yield its port, and end it with a signal."""

    async def close() -> None:
        closed_models.append("closed")

    with listening_socket("127.0.0.1", 0) as listener:
        models: Any = SimpleNamespace(close=close)
        running_server = asyncio.create_task(run(answer_slowly, listener, 10, models, asyncio.Event().wait))
        yield int(url_of(listener).rpartition(":")[2])
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running_server, 4)


async def exchange(port: int, request: bytes) -> bytes:
    """Send bytes, and return what the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    received = await asyncio.wait_for(reader.read(), 4)
    writer.close()
    return received


def test_a_connection_is_closed_if_no_whole_head_arrives_in_time(monkeypatch, harmless_signals):
    """The answer to a head that arrived in time may take longer."""
    monkeypatch.setattr(limits, "UPLOAD_S", 0.8 * ANSWER_S)

    async def main() -> list[bytes]:
        async with served([]) as port:
            return await asyncio.gather(*(exchange(port, request) for request in (b"", POST[:20], POST + b"body")))

    silent, cut, answer = asyncio.run(main())
    assert silent == b""
    assert cut == b""
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"body")


def test_an_answer_does_not_name_the_program_of_the_server(harmless_signals, monkeypatch):
    monkeypatch.setitem(globals(), "ANSWER_S", 0)

    async def main() -> bytes:
        async with served([]) as port:
            return await exchange(port, POST + b"body")

    head = asyncio.run(main()).partition(b"\r\n\r\n")[0].lower()
    assert b"content-length: 4" in head
    assert b"server:" not in head


def test_after_a_signal_a_request_in_progress_is_answered_and_the_models_end(harmless_signals):
    closed_models: list[str] = []

    async def main() -> bytes:
        async with served(closed_models) as port:
            answer = asyncio.create_task(exchange(port, POST + b"last"))
            await asyncio.sleep(ANSWER_S / 2)
        return await answer

    assert asyncio.run(main()).endswith(b"last")
    assert closed_models == ["closed"]


class FakeRegistry:
    """A registry whose alias points to a version, and which counts how often a server looks for its version.

    Attributes:
        version: the version that the alias points to.
        looks: number of times that the alias was looked up.
        models: the models of the server, when it runs.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders = {1: toy.write_toy(folder / "one", "one"), 2: toy.write_toy(folder / "two", "two")}
        self.version = 1
        self.looks = 0
        self.models: Any = None
        monkeypatch.delenv("M3DIFF_SERVE_TOKEN", raising=False)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(batcher, "load", toy.load_toy)
        monkeypatch.setattr(batcher, "Replica", toy.Local)
        monkeypatch.setattr(server_module, "POLL_S", 0.01)
        monkeypatch.setattr(server_module, "find", self.find)
        monkeypatch.setattr(server_module, "resolve_version", self.resolve_version)
        monkeypatch.setattr(server_module, "build_model_card", self.describe)

    def find(self, tracking_uri: str, model_name: str, model: str, base: Path, max_new_tokens: int) -> Any:
        assert tracking_uri == PARAMS.register_.tracking_uri
        assert model_name == PARAMS.register_.model_name
        return toy.source(self.folders[self.version], self.version)

    def resolve_version(self, tracking_uri: str, model_name: str, model: str) -> str:
        self.looks += 1
        assert tracking_uri == PARAMS.register_.tracking_uri
        assert model == "champion"
        return f"{model_name}/{self.version}"

    def describe(self, params: Any, source: Any) -> ModelCard:
        return ModelCard(source.name, notes=(f"a note on {source.name}",))

    async def until_version(self, number: int) -> None:
        async with asyncio.timeout(4):
            while self.models.current is None or self.models.current.facts.name != f"m3diff/{number}":
                await asyncio.sleep(0.002)
        await asyncio.sleep(0.03)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    return FakeRegistry(tmp_path, monkeypatch)


def serve_meanwhile(model: str, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, *versions: int) -> str:
    """Serve a model while its alias moves to these versions, and return the server's URL."""
    urls = []

    async def keep_until_last(_: Any, listener: Any, answer_s: float, models: Any, keep_model_current: Any) -> None:
        urls.append(url_of(listener))
        registry.models = models
        keeping = asyncio.create_task(keep_model_current())
        for registry.version in versions:
            await registry.until_version(registry.version)
        assert not keeping.done()
        keeping.cancel()
        deployment = models.current.deployment
        await models.close()
        assert deployment.removed

    monkeypatch.setattr(server_module, "run", keep_until_last)
    serve(PARAMS, model, Path("base"), "127.0.0.1", 0)
    return urls[0]


def test_a_server_of_an_alias_answers_with_each_version_that_it_points_to(registry, monkeypatch, capsys):
    url = serve_meanwhile("champion", registry, monkeypatch, 1, 2)
    assert capsys.readouterr().out.splitlines() == [
        f"m3diff serve: {url} answers with m3diff/1",
        "m3diff serve: a note on m3diff/1",
        "m3diff serve: now answers with m3diff/2",
        "m3diff serve: a note on m3diff/2",
    ]
    assert registry.models.current is None


@pytest.mark.parametrize("model", ["1", "."], ids=["a version", "a folder"])
def test_a_server_of_one_version_looks_for_no_other(model, registry, monkeypatch, capsys):
    serve_meanwhile(model, registry, monkeypatch, 1)
    assert " answers with m3diff/1" in capsys.readouterr().out
    assert registry.looks == 0


PRINT_LINES = """
import sys
from m3diff.serving.server import print_line
print_line("one")
sys.stdin.read()
print_line("two")
print_line("three", sys.stderr)
sys.exit(3)
"""


@pytest.mark.fault("W5")
def test_shutdown_waits_for_an_upload_and_the_longest_answer(monkeypatch):
    limits_s = []

    class StoppedServer:
        def __init__(self, config: uvicorn.Config) -> None:
            limits_s.append(config.timeout_graceful_shutdown)

        async def _serve(self, sockets: list[Any]) -> None: ...

    async def do_nothing() -> None: ...

    monkeypatch.setattr(uvicorn, "Server", StoppedServer)
    asyncio.run(run(None, None, 7.5, SimpleNamespace(close=do_nothing), do_nothing))
    assert UPLOAD_LIMIT_S + 7.5 <= limits_s[0] <= UPLOAD_LIMIT_S + 8.5


def test_a_server_keeps_running_when_its_output_is_closed():
    """As in `m3diff serve 2>&1 | head -1`."""
    line = [sys.executable, "-c", PRINT_LINES]
    pipe = subprocess.PIPE
    process = subprocess.Popen(line, env=environment(), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
    assert process.stdout.readline() == b"m3diff serve: one\n"
    process.stdout.close()
    process.stdin.close()
    assert process.wait(30) == 3


def damaged(root: Any) -> list[str]:
    folder = tiny_checkpoint(tiny_base(root / "base"), root / "checkpoint")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    return ["--model", str(folder)]


def unknown(root: Any) -> list[str]:
    write_registry(root, "one")
    return ["--model", "nowhere"]


REFUSED_STARTS: dict[str, tuple[Callable[[Any], list[str]], str, int, Message | str]] = {
    "open without a token": (
        lambda root: ["--host", "0.0.0.0"],
        "",
        2,
        Message("serving.no_token", host="0.0.0.0", variable="M3DIFF_SERVE_TOKEN"),
    ),
    "a short token": (
        lambda root: ["--host", "127.0.0.1"],
        "short",
        2,
        Message("serving.short_token", variable="M3DIFF_SERVE_TOKEN", value=5, limit=16),
    ),
    "no such version": (unknown, TOKEN, 3, "'nowhere'"),
    "a damaged checkpoint": (damaged, "", 3, "/checkpoint/model.safetensors: "),
    "a used port": (lambda root: [], "", 2, "Address already in use"),
}


@pytest.mark.parametrize("name", slow_except(REFUSED_STARTS, "a short token", "a damaged checkpoint"))
def test_a_server_that_cannot_start_prints_the_reason_in_one_line(name, tmp_path, monkeypatch, capsys):
    options, token, code, words = REFUSED_STARTS[name]
    monkeypatch.setenv("M3DIFF_SERVE_TOKEN", token) if token else monkeypatch.delenv("M3DIFF_SERVE_TOKEN", False)
    with socket.create_server(("127.0.0.1", 0)) as used_socket:
        port = used_socket.getsockname()[1] if name == "a used port" else None
        command = toy.command(tmp_path, *options(tmp_path), toy=False, port=port)
        arguments = command[command.index("serve") :]
        assert main(["--params", str(tmp_path / "params.yaml"), *arguments]) == code
    printed = capsys.readouterr().err.splitlines()[-1]
    assert words.in_text(printed) if isinstance(words, Message) else words in printed


def test_a_token_is_taken_out_of_the_environment_which_replicas_inherit(monkeypatch):
    monkeypatch.setenv("M3DIFF_SERVE_TOKEN", TOKEN)
    assert take_token("0.0.0.0") == TOKEN
    assert "M3DIFF_SERVE_TOKEN" not in os.environ


def test_a_server_of_this_machine_alone_needs_no_token(monkeypatch):
    monkeypatch.delenv("M3DIFF_SERVE_TOKEN", raising=False)
    assert take_token("127.0.0.1") is None
    with raises(ParamsError, "serving.no_token", host="0.0.0.0", variable="M3DIFF_SERVE_TOKEN"):
        take_token("0.0.0.0")


def test_a_token_has_16_characters_or_more(monkeypatch):
    monkeypatch.setenv("M3DIFF_SERVE_TOKEN", TOKEN[:16])
    assert take_token("127.0.0.1") == TOKEN[:16]
    monkeypatch.setenv("M3DIFF_SERVE_TOKEN", TOKEN[:15])
    with raises(ParamsError, "serving.short_token", variable="M3DIFF_SERVE_TOKEN", value=15, limit=16):
        take_token("127.0.0.1")


def test_a_used_port_is_refused_and_the_next_one_is_suggested():
    with listening_socket("127.0.0.1", 0) as used_socket:
        port = used_socket.getsockname()[1]
        with raises(ParamsError, "serving.address_not_free", host="127.0.0.1", port=port, expected=port % 65535 + 1):
            listening_socket("127.0.0.1", port)


def test_the_url_of_an_ipv6_address_has_brackets():
    listener: Any = SimpleNamespace(getsockname=lambda: ("::1", 8000, 0, 0))
    assert url_of(listener) == "http://[::1]:8000"


def test_several_replicas_without_a_cluster_are_refused(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cfg = PARAMS.serve.model_copy(update={"replicas": 2})
    refused = raises(ParamsError, "serving.replicas_without_cluster", key="serve.replicas", value=2)
    with refused, deployer(cfg, PARAMS.compute):
        pass


def test_replicas_on_a_cluster_that_does_not_answer_are_refused(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    monkeypatch.setattr("m3diff.cluster.HEAD_TIMEOUT_S", 1)
    monkeypatch.setattr("ray.serve.start", lambda **options: pytest.fail("Ray would ask for most of an hour"))
    cfg = PARAMS.serve.model_copy(update={"replicas": 2})
    with pytest.raises(NoRoomError, match="RAY_ADDRESS=127.0.0.1:9"), deployer(cfg, PARAMS.compute):
        pass


@pytest.mark.parametrize("gpu", [False, True], ids=["CPU", "GPU"])
def test_a_replica_reserves_what_the_setting_says(gpu):
    options = replica_options(PARAMS.compute.model_copy(update={"gpu": gpu}))
    assert options["num_gpus"] == (0.5 if gpu else 0)
    assert options["runtime_env"]["env_vars"] == process_environment(gpu)


@pytest.mark.parametrize(("gpu", "gpus_in_cluster"), [(False, 0), (False, 4), (True, 4)])
def test_replicas_start_if_the_cluster_has_what_they_need(gpu, gpus_in_cluster, fake_cluster):
    deployments = fake_cluster(gpus_in_cluster)
    with deployer(PARAMS.serve, PARAMS.compute.model_copy(update={"gpu": gpu})) as deploy:
        deploy(toy.source(Path("checkpoint")))
    (options,) = deployments
    assert options["ray_actor_options"]["num_gpus"] == (0.5 if gpu else 0)


def test_replicas_have_the_number_and_the_limits_of_the_settings(fake_cluster):
    deployments = fake_cluster(0)
    cfg = PARAMS.serve.model_copy(update={"replicas": 3, "max_queue": 17, "answer_s": 9.5})
    with deployer(cfg, PARAMS.compute) as deploy:
        deploy(toy.source(Path("checkpoint")))
    (options,) = deployments
    assert options["num_replicas"] == 3
    assert options["max_ongoing_requests"] == 17
    assert options["graceful_shutdown_timeout_s"] == 9.5


def test_a_model_that_does_not_start_on_a_cluster_is_deleted_there(fake_cluster, monkeypatch):
    names: dict[str, list[str]] = {"run": [], "delete": []}

    def fail(application: Any, name: str, route_prefix: None) -> None:
        names["run"].append(name)
        raise RuntimeError("no node has room")

    fake_cluster(0)
    monkeypatch.setattr("ray.serve.run", fail)
    monkeypatch.setattr("ray.serve.delete", names["delete"].append)
    started = deployer(PARAMS.serve, PARAMS.compute)
    with started as deploy, pytest.raises(RuntimeError, match="no node has room"):
        deploy(toy.source(Path("checkpoint")))
    assert names["delete"] == names["run"] != []


def test_a_model_on_a_cluster_is_deleted_when_it_is_removed(fake_cluster, monkeypatch):
    deleted_names: list[str] = []
    fake_cluster(0)
    monkeypatch.setattr("ray.serve.delete", deleted_names.append)
    with deployer(PARAMS.serve, PARAMS.compute) as deploy:
        deployment: Any = deploy(toy.source(Path("checkpoint")))
        other_deployment: Any = deploy(toy.source(Path("checkpoint")))
        asyncio.run(deployment.remove())
    assert deleted_names == [deployment.name]
    assert deployment.name != other_deployment.name


def test_a_cluster_without_the_required_gpu_is_refused(fake_cluster):
    deployments = fake_cluster(0)
    refused = raises(NoRoomError, "serving.no_gpu_in_cluster", key="compute.gpu")
    with refused, deployer(PARAMS.serve, PARAMS.compute.model_copy(update={"gpu": True})):
        pass
    assert deployments == []


@pytest.fixture
def fake_cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[dict[str, Any]]]:
    """Return a function that simulates a cluster with this number of GPUs, and returns the options of deployments."""
    import ray
    import ray.serve

    def connect(gpus: int) -> list[dict[str, Any]]:
        deployments: list[dict[str, Any]] = []

        class Deployment:
            def options(self, **options: Any) -> "Deployment":
                deployments.append(options)
                return self

            def bind(self, *arguments: Any) -> None:
                pass

        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
        monkeypatch.setattr("m3diff.serving.batcher.start_ray", lambda compute: None)
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0} | ({"GPU": float(gpus)} if gpus else {}))
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        monkeypatch.setattr(ray.serve, "start", lambda **options: None)
        monkeypatch.setattr(ray.serve, "deployment", lambda replica: Deployment())
        monkeypatch.setattr(ray.serve, "run", lambda application, **options: None)
        return deployments

    return connect


SERVE = PARAMS.serve.model_copy(update={"max_image_mpx": 10, "answer_s": PATIENCE_S})


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("served")
    write_registry(root, "one")
    constants = {"limits.UPLOAD_S": PATIENCE_S}
    with running(root, constants=constants, max_image_mpx=SERVE.max_image_mpx, answer_s=PATIENCE_S) as server:
        for _ in range(4):
            httpx.post(f"{server.address}/caption", **form(png(plain(1, 2)), png(plain(3, 4))), timeout=PATIENCE_S)
        yield server


def used_memory(processes: list[psutil.Process]) -> int:
    """Return the memory of the processes in bytes. Shared pages are counted in proportion."""
    rollups = [Path(f"/proc/{process.pid}/smaps_rollup").read_text() for process in processes]
    return sum(1024 * int(rollup.partition("\nPss:")[2].split()[0]) for rollup in rollups)


@contextmanager
def limit_growth(server: Running, name: str, limit: float) -> Iterator[None]:
    """Check that the server's memory grows by at most 1.1 times the limit (in bytes) within the block."""
    family = server.family()
    growth = 0
    end_event = threading.Event()
    assert len(family) == 1, "the model is in the server's own process"
    idle_memory = used_memory(family)

    def watch() -> None:
        nonlocal growth
        while not end_event.wait(0.02):
            growth = max(growth, used_memory(family) - idle_memory)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        end_event.set()
        watcher.join()
    print(f"{name}: {growth / 1e6:,.0f} MB above idle, {limit / 1e6:,.0f} allowed")
    assert growth <= 1.1 * limit


def text_bomb() -> bytes:
    """Return a small PNG with 63 MB of compressed text."""
    file = io.BytesIO()
    info = PngInfo()
    for number in range(63):
        info.add_text(f"k{number}", "x" * 1_000_000, zip=True)
    Image.new("L", (9, 9)).save(file, "PNG", pnginfo=info)
    return file.getvalue()


def body(text: bytes) -> dict[str, object]:
    return {"content": text, "headers": {"content-type": "application/json"}}


SMALL = png(plain(1, 2))
HOSTILE: dict[str, dict[str, object]] = {
    "a thin line": form(png(Image.new("1", (1, 30_000))), SMALL),
    "texts": form(text_bomb(), SMALL),
    "lists": body(b'{"before": [' + b"[]," * 6_000_000 + b"0]}"),
    "numbers": body(b'{"before": [' + b"0," * 9_000_000 + b"0]}"),
    "blanks": body(b'{"before": "' + b"AA " * 6_000_000 + b'", "after": ""}'),
    "wide letters": body(b'{"before": "' + "\U0001f600".encode() * 4_000_000 + b'"}'),
    "a long name": body(b'{"before": "", "after": "", "' + b"a" * 19_000_000 + b'": 1}'),
}


@pytest.mark.slow(40)
def test_no_request_takes_more_than_its_share_of_the_stated_memory(limited):
    for name, request in HOSTILE.items():
        with limit_growth(limited, name, COPIES * SERVE.max_request_mb * 1e6):
            answer = httpx.post(f"{limited.address}/caption", timeout=PATIENCE_S, **request)  # type: ignore[arg-type]
        assert answer.status_code == (200 if name == "texts" else 422)
        assert len(answer.content) < 2_000


def register(root: Path, checkpoint: Path) -> str:
    uri = f"sqlite:///{root}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    client = mlflow.MlflowClient()
    client.create_experiment("m3diff", (root / "artifacts").as_uri())
    mlflow.set_experiment("m3diff")
    with mlflow.start_run():
        logged = mlflow.pyfunc.log_model(
            name="m3diff",
            python_model=str(REPOSITORY / "components" / "stages" / "register" / "pyfunc.py"),
            artifacts={"checkpoint": str(checkpoint)},
            model_config={"max_new_tokens": 64},
            code_paths=[str(copy_code(root / "code"))],
            signature=MODEL_SIGNATURE,
            pip_requirements=["torch"],
        )
    version = mlflow.register_model(logged.model_uri, "m3diff", tags={"predict.max_new_tokens": "64"})
    client.set_registered_model_alias("m3diff", "champion", version.version)
    return uri


def test_the_code_of_a_version_contains_the_wording_of_its_errors(tmp_path):
    package = copy_code(tmp_path)
    script = 'import m3diff.records.errors as e; print(e.__file__); print(e.Fault("images.video", path="a.png"))'
    command = [sys.executable, "-P", "-c", script]
    printed = subprocess.run(command, env=environment(PYTHONPATH=str(tmp_path)), capture_output=True, text=True)
    assert printed.stdout.splitlines() == [
        str(package / "records" / "errors.py"),
        str(Fault("images.video", path="a.png")),
    ]


def is_answered(address: str) -> bool:
    try:
        return httpx.get(f"{address}/ping").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow(30)
def test_a_registered_version_gives_the_same_captions_by_both_servers(tmp_path, monkeypatch):
    """A server that caches the features of images must pass this test (docs/serving.md): A with B, then A with C."""
    monkeypatch.setattr("tests.servers.PATIENCE_S", 240)
    folder = tiny_checkpoint(tiny_base(tmp_path / "base"), tmp_path / "checkpoint")
    images = [noise_image(number) for number in range(6)]
    pairs = list(itertools.permutations(images, 2))
    captioner = load_captioner(folder, 64)
    captions = [captioner.caption([pair])[0] for pair in pairs]
    assert len(set(captions)) > 1
    original_uri = mlflow.get_tracking_uri()
    try:
        uri = register(tmp_path, folder)
    finally:
        mlflow.set_tracking_uri(original_uri)
    with running(tmp_path, toy=False, answer_s=300) as server:
        with httpx.Client(base_url=server.address, timeout=300) as client:
            for (before, after), caption in zip(pairs, captions, strict=True):
                answer = client.post("/caption", **form(png(before), png(after), overlay="true")).json()
                assert answer["caption"] == caption
                assert answer["model"] == "m3diff/1"
                assert answer["overlay"].keys() == {"before", "after"}
            refused = client.post("/caption", **form(png(images[0]), png(images[1]), question="a <image>"))
        assert refused.status_code == 422
        assert refused.json()["error"] == "special_token"
    port = free_port()
    line = [str(Path(sys.executable).with_name("mlflow")), "models", "serve", "-m", "models:/m3diff@champion"]
    line += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    variables = environment(
        MLFLOW_TRACKING_URI=uri, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    address = f"http://127.0.0.1:{port}"
    with started(line, tmp_path / "mlflow.log", lambda: is_answered(address), cwd=tmp_path, env=variables):
        rows = [{side: toy.base64_of(png(image)) for side, image in zip(("before", "after"), pairs[0], strict=True)}]
        answer = httpx.post(f"{address}/invocations", json={"dataframe_records": rows}, timeout=60)
    assert answer.json() == {"predictions": captions[:1]}, (tmp_path / "mlflow.log").read_text()

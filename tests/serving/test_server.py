"""The server as people start it: its own process, a registry, clients over HTTP; on a cluster, Ray's replicas, too; the
memory that it takes, held against docs/serving.md; a version as register logs it, by `mlflow models serve`, too."""

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import mlflow
import psutil
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from m3diff.__main__ import main
from m3diff.cluster import NoRoomError
from m3diff.models.generation import load_captioner
from m3diff.records.errors import Fault
from m3diff.serving.batcher import deployer
from m3diff.serving.limits import COPIES
from m3diff.settings.section import ParamsError
from m3diff.stages.register.stage import SIGNATURE, copy_code
from tests.errors import Message, raises
from tests.servers import free_port, started, until
from tests.serving import toy
from tests.serving.toy import PARAMS, Running, chat, environment, form, plain, png, running, write_registry
from tests.stages.train.cluster import cluster
from tests.tiny import noise_image, tiny_base, tiny_checkpoint
from tests.toy import REPOSITORY

PATIENCE_S = 400
"""For an answer where no limit of time is tested: a loaded machine is slow."""

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
    before, after = (png(plain(number % 256, place)) for place in (1, 2))
    answer = httpx.post(f"{server.address}/caption", **form(before, after), timeout=PATIENCE_S)
    return answer.status_code, answer.json().get("caption", "")


@pytest.mark.slow(120)
def test_replicas_on_a_cluster_survive_a_dead_one_and_the_cluster_the_server(tmp_path, monkeypatch):
    client = write_registry(tmp_path, "one", "two")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))  # the toy's, on every node: a replica may be on the head, too
    with cluster() as hosts:
        hosts.add(3, cpus=2)
        options = {"replicas": 2, "answer_s": PATIENCE_S, "there": hosts.of_a_driver, "constants": CONSTANTS}
        with running(tmp_path, **options) as server, ThreadPoolExecutor(4) as clients:
            nodes = [psutil.Process(node.pid).children(recursive=True) for node in hosts.nodes.values()]
            replica = next(process for node in nodes for process in node if "ServeReplica" in process.name())
            asking = [clients.submit(ask, server, number) for number in range(200)]
            until(lambda: sum(one.done() for one in asking) > 20)
            replica.kill()
            statuses = Counter(one.result()[0] for one in asking)
            assert statuses.keys() <= {200, 500}
            assert statuses[500] <= 4, (
                f"more were lost than the dead one could have been asked: {server.output[-2000:]}"
            )
            client.set_registered_model_alias("m3diff", "champion", "2")
            server.wait_for("answers now with m3diff/2")
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
    messages[0]["content"].pop()
    with pytest.raises(openai.UnprocessableEntityError, match="exactly 2 images"):
        openai_client(server).chat.completions.create(model="m3diff", messages=messages)


@pytest.mark.slow
def test_a_client_that_sends_too_much_reads_the_refusal(server):
    answer = httpx.post(f"{server.address}/v1/chat/completions", content=bytes(5_000_000), timeout=PATIENCE_S)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "too_large"


def openai_client(server: Running) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def until_closed(port: int, *sent: bytes) -> tuple[bytes, float]:
    """The server's answer on a connection that sends this and then nothing, and after how many seconds it closes."""
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        for part in sent:
            connection.sendall(part)
            time.sleep(0.2)
        heard = b""
        while part := connection.recv(65536):
            heard += part
    return heard, time.monotonic() - start


@pytest.mark.slow
def test_a_connection_that_says_nothing_or_stops_in_the_middle_is_closed(server):
    head = b"POST /caption HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    get = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    typed = b"Content-Type: application/json\r\nContent-Length: 900\r\n\r\n"
    sent = ((), (head,), (get, head), (head + typed, b"only this"))
    with ThreadPoolExecutor() as at_once:
        closed = list(at_once.map(lambda parts: until_closed(server.port, *parts), sent))
    for (heard, seconds), wanted in zip(closed, (b"", b"", b"HTTP/1.1 200", b"HTTP/1.1 408"), strict=True):
        assert heard.startswith(wanted)
        assert UPLOAD_S - 1 < seconds < UPLOAD_S + 4
    assert httpx.get(f"{server.address}/readyz").status_code == 200


@pytest.mark.slow(50)
@pytest.mark.parametrize(
    ("sign", "to"), [(signal.SIGTERM, os.kill), (signal.SIGHUP, os.kill), (signal.SIGINT, os.killpg)], ids=str
)
def test_at_a_signal_what_was_asked_is_answered_and_nothing_is_left_behind(sign, to, tmp_path):
    write_registry(tmp_path, "one")
    slow = {"batcher.BATCH_WAIT_S": 3}
    with running(tmp_path, constants=slow, answer_s=PATIENCE_S) as server, ThreadPoolExecutor() as at:
        family = server.family()
        answer = at.submit(httpx.post, f"{server.address}/caption", **form(BEFORE, AFTER), timeout=PATIENCE_S)
        while not server.metric("m3diff_queue_length"):
            time.sleep(0.1)
        to(server.process.pid, sign)
        assert server.process.wait(60) == 0, server.output
        assert answer.result().status_code == 200
        assert psutil.wait_procs(family, 20)[1] == []
        assert "Traceback" not in server.output


SAYS = """
import sys
from m3diff.serving.server import print_line
print_line("one")
sys.stdin.read()
print_line("two")
print_line("three", sys.stderr)
sys.exit(3)
"""


@pytest.mark.fault("W5")
def test_a_server_whose_output_nobody_reads_any_more_goes_on():
    """`m3diff serve 2>&1 | head -1`."""
    line = [sys.executable, "-c", SAYS]
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


CANNOT: dict[str, tuple[Callable[[Any], list[str]], str, int, Message | str]] = {
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
    "a taken port": (lambda root: [], "", 2, "Address already in use"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_served_is_said_at_once_in_one_line(name, tmp_path, monkeypatch, capsys):
    options, token, code, words = CANNOT[name]
    monkeypatch.setenv("M3DIFF_SERVE_TOKEN", token) if token else monkeypatch.delenv("M3DIFF_SERVE_TOKEN", False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if name == "a taken port" else None
        given = toy.command(tmp_path, *options(tmp_path), toy=False, port=port)
        assert main(["--params", str(tmp_path / "params.yaml"), *given[given.index("serve") :]]) == code
    printed = capsys.readouterr().err.splitlines()[-1]
    assert words.in_text(printed) if isinstance(words, Message) else words in printed


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


def taken(processes: list[psutil.Process]) -> int:
    rollups = [Path(f"/proc/{process.pid}/smaps_rollup").read_text() for process in processes]
    return sum(1024 * int(rollup.partition("\nPss:")[2].split()[0]) for rollup in rollups)


@contextmanager
def peak(server: Running, name: str, allowed: float) -> Iterator[None]:
    """Within, the server grows by no more than a tenth over what is allowed."""
    family = server.family()
    found = 0
    ended = threading.Event()
    assert len(family) == 1, "the model is in the server's own process"
    idle = taken(family)

    def watch() -> None:
        nonlocal found
        while not ended.wait(0.02):
            found = max(found, taken(family) - idle)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()
    print(f"{name}: {found / 1e6:,.0f} MB above idle, {allowed / 1e6:,.0f} allowed")
    assert found <= 1.1 * allowed


def text_bomb() -> bytes:
    held = io.BytesIO()
    info = PngInfo()
    for number in range(63):
        info.add_text(f"k{number}", "x" * 1_000_000, zip=True)
    Image.new("L", (9, 9)).save(held, "PNG", pnginfo=info)
    return held.getvalue()


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
def test_whatever_a_request_holds_it_keeps_to_its_share_of_the_stated_memory(limited):
    for name, request in HOSTILE.items():
        with peak(limited, name, COPIES * SERVE.max_request_mb * 1e6):
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
            signature=SIGNATURE,
            pip_requirements=["torch"],
        )
    version = mlflow.register_model(logged.model_uri, "m3diff", tags={"predict.max_new_tokens": "64"})
    client.set_registered_model_alias("m3diff", "champion", version.version)
    return uri


def test_the_code_of_a_version_has_the_wording_of_its_errors(tmp_path):
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


@pytest.mark.slow(110)
def test_a_registered_version_gives_the_same_captions_by_both_servers(tmp_path, monkeypatch):
    """A server that caches an image's features must pass this (docs/serving.md): A with B, then A with C."""
    monkeypatch.setattr("tests.servers.PATIENCE_S", 240)
    folder = tiny_checkpoint(tiny_base(tmp_path / "base"), tmp_path / "checkpoint")
    images = [noise_image(number) for number in range(6)]
    pairs = [(one, other) for one in images for other in images if one is not other]
    captioner = load_captioner(folder, 64)
    want = [captioner.caption([pair])[0] for pair in pairs]
    assert len(set(want)) > 1
    before_uri = mlflow.get_tracking_uri()
    try:
        uri = register(tmp_path, folder)
    finally:
        mlflow.set_tracking_uri(before_uri)
    with running(tmp_path, toy=False, answer_s=300) as server:
        with httpx.Client(base_url=server.address, timeout=300) as client:
            for (one, other), caption in zip(pairs, want, strict=True):
                answer = client.post("/caption", **form(png(one), png(other), overlay="true")).json()
                assert answer["caption"] == caption
                assert answer["model"] == "m3diff/1"
                assert answer["overlay"].keys() == {"before", "after"}
            refused = client.post("/caption", **form(png(images[0]), png(images[1]), question="a <image>"))
        assert refused.status_code == 422
        assert refused.json()["error"] == "special_token"
    port = free_port()
    line = [str(Path(sys.executable).with_name("mlflow")), "models", "serve", "-m", "models:/m3diff@champion"]
    line += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    given = environment(MLFLOW_TRACKING_URI=uri, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    address = f"http://127.0.0.1:{port}"
    with started(line, tmp_path / "mlflow.log", lambda: is_answered(address), cwd=tmp_path, env=given):
        rows = [{side: toy.base64_of(png(image)) for side, image in zip(("before", "after"), pairs[0], strict=True)}]
        answer = httpx.post(f"{address}/invocations", json={"dataframe_records": rows}, timeout=60)
    assert answer.json() == {"predictions": want[:1]}, (tmp_path / "mlflow.log").read_text()

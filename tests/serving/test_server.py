"""The server as people start it: its own process, Ray's replicas, a registry, clients over HTTP."""

import asyncio
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from m3diff.models.generation import QUESTION, load_captioner
from tests.serving.local import chat, form, png
from tests.serving.process import Running, command, environment, running, write_registry
from tests.serving.toy import plain, said
from tests.tiny import noise_image, tiny_base, tiny_checkpoint

REQUESTS, AT_ONCE = 200, 16
PATIENCE_S = 300
"""For an answer where no limit of time is tested: a loaded machine is slow."""

UPLOAD_S = 3
TOKEN = "0123456789abcdef0123"
BEFORE, AFTER = png(plain(10, 20)), png(plain(30, 40))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("served")
    write_registry(root, "one", "two")
    constants = {"server.POLL_S": 0.5, "http.UPLOAD_S": UPLOAD_S, "batcher.BATCH_WAIT_S": 0.02}
    with running(root, max_request_mb=1, answer_s=PATIENCE_S, constants=constants) as server:
        yield server


def asked(number: int) -> tuple[bytes, bytes, str]:
    """A pair of colours that is no other number's, and what a toy says of it after its word."""
    one, other = (number, 1, 0), (number, 2, 0)
    words = ["/".join(map(str, colour)) for colour in (one, other)]
    return png(plain(*one)), png(plain(*other)), said("", QUESTION, *words)


async def ask_all(
    address: str, count: int, at_once: int, between: float = 0
) -> list[tuple[int, httpx.Response, float, str]]:
    """(number, answer, seconds, what is wanted after the word) of so many requests, in three forms at random."""
    places, found = asyncio.Semaphore(at_once), []
    rng = random.Random(7)
    async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_S) as client:

        async def ask(number: int, as_chat: bool) -> None:
            before, after, want = asked(number)
            async with places:
                start = time.monotonic()
                if as_chat:
                    answer = await client.post("/v1/chat/completions", json=chat(before, after))
                else:
                    answer = await client.post("/caption", **form(before, after))
                found.append((number, answer, time.monotonic() - start, want))
                await asyncio.sleep(between)

        await asyncio.gather(*(ask(number, rng.random() < 0.5) for number in range(count)))
    return found


def caption_of(answer: httpx.Response) -> str:
    body = answer.json()
    return body["choices"][0]["message"]["content"] if "choices" in body else body["caption"]


@pytest.mark.slow(40)
def test_two_hundred_requests_sixteen_at_a_time_share_batches_and_each_has_its_own_answer(server):
    found = asyncio.run(ask_all(server.address, REQUESTS, AT_ONCE))
    assert [answer.status_code for _, answer, *_ in found] == [200] * REQUESTS
    assert {number: caption_of(answer) for number, answer, *_ in found} == {
        number: f"one{want}" for number, _, _, want in found
    }
    alone, count = (server.metric(line) for line in ('m3diff_batch_pairs_bucket{le="1.0"}', "m3diff_batch_pairs_count"))
    assert alone < count == REQUESTS
    seconds = [seconds for *_, seconds, _ in found]
    cuts = statistics.quantiles(seconds, n=20)
    mean = server.metric("m3diff_batch_pairs_sum") / count
    print(f"p50 {cuts[9] * 1000:.0f} ms, p95 {cuts[18] * 1000:.0f} ms; a request's batch has {mean:.1f} pairs (mean)")


@pytest.mark.slow
def test_every_port_of_the_server_and_of_ray_listens_on_this_machine_alone(server):
    listens = {
        (process.name(), connection.laddr.ip, connection.laddr.port)
        for process in server.family()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert ("127.0.0.1", server.port) in {(address, port) for _, address, port in listens}
    others = {entry for entry in listens if entry[1] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")}
    assert others == set()


@pytest.mark.slow
def test_openais_client_is_answered_and_its_errors_have_its_types(server):
    import openai

    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    messages = chat(BEFORE, AFTER, "What is new?")["messages"]
    answer = client.chat.completions.create(model="m3diff", messages=messages)
    assert answer.choices[0].message.content.endswith(said("", "What is new?", "10/20/0", "30/40/0"))
    assert answer.model.startswith("m3diff/")
    assert [model.id for model in client.models.list()] == [answer.model]
    messages[0]["content"].pop()
    with pytest.raises(openai.UnprocessableEntityError, match="exactly 2 images"):
        client.chat.completions.create(model="m3diff", messages=messages)


@pytest.mark.slow
def test_who_sends_too_much_reads_why(server):
    answer = httpx.post(f"{server.address}/caption", content=bytes(5_000_000), timeout=30)
    assert (answer.status_code, answer.json()["error"]) == (413, "too_large")


def until_closed(port: int, *sent: bytes) -> tuple[bytes, float]:
    """What the server says on a connection that sends this and then nothing, and after how many seconds it closes."""
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
    for sent in ((), (head,), (b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", head)):
        heard, seconds = until_closed(server.port, *sent)
        assert heard.startswith(b"HTTP/1.1 200" if len(sent) == 2 else b"")
        assert seconds < UPLOAD_S + 4
    heard, seconds = until_closed(server.port, head + b"Content-Length: 900\r\n\r\n", b"only this")
    assert heard.startswith(b"HTTP/1.1 408")
    assert UPLOAD_S - 1 < seconds < UPLOAD_S + 2
    assert httpx.get(f"{server.address}/readyz").status_code == 200


@pytest.mark.slow
def test_a_taken_port_is_said_before_a_model_is_loaded(server):
    line = command(server.root, toy=False, port=server.port)
    done = subprocess.run(line, cwd=server.root, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"serve: cannot listen on 127.0.0.1 port {server.port} (Address already in use); end the" in done.stderr


@pytest.mark.slow(60)
def test_the_alias_moves_while_requests_run_none_is_lost_and_each_answer_names_who_gave_it(server):
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{server.root}/mlflow.db"
    client = MlflowClient(uri, registry_uri=uri)
    found: list[Any] = []
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            found.extend(asyncio.run(ask_all(server.address, 20, 4, between=0.02)))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        client.set_registered_model_alias("m3diff", "champion", "2")
        server.wait_for("answers now with m3diff/2")
        time.sleep(1)
    finally:
        stop.set()
        asking.join()
    assert {answer.status_code for _, answer, *_ in found} == {200}
    words = {"m3diff/1": "one", "m3diff/2": "two"}
    for _, answer, _, want in found:
        version = answer.headers["x-model-version"]
        assert answer.json()["model"] == version
        assert caption_of(answer) == words[version] + want
    assert {answer.headers["x-model-version"] for _, answer, *_ in found} == words.keys()
    print(f"{len(found)} answers, none lost")


@pytest.mark.slow(50)
@pytest.mark.parametrize(
    ("sign", "to"), [(signal.SIGTERM, os.kill), (signal.SIGHUP, os.kill), (signal.SIGINT, os.killpg)]
)
def test_at_a_signal_what_was_asked_is_answered_and_nothing_is_left_behind(sign, to, tmp_path):
    """SIGINT reaches Ray's processes too, as Ctrl-C in a shell does."""
    write_registry(tmp_path, "one")
    with running(tmp_path, constants={"batcher.BATCH_WAIT_S": 3}, answer_s=PATIENCE_S) as server:
        family = server.family()
        answers: list[int] = []

        def ask() -> None:
            answer = httpx.post(f"{server.address}/caption", **form(BEFORE, AFTER), timeout=PATIENCE_S)
            answers.append(answer.status_code)

        asking = threading.Thread(target=ask)
        asking.start()
        while not server.metric("m3diff_queue_length"):
            time.sleep(0.1)
        to(server.process.pid, sign)
        assert server.process.wait(60) == 0, server.said
        asking.join()
        assert answers == [200]
        assert psutil.wait_procs(family, 20)[1] == []
        assert "Traceback" not in server.said


SAYS = """
import sys
from m3diff.serving.server import say
say("one")
sys.stdin.read()
say("two")
say("three", sys.stderr)
sys.exit(3)
"""


@pytest.mark.fault("W5")
def test_a_server_whose_output_nobody_reads_any_more_goes_on():
    """`m3diff serve 2>&1 | head -1`."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", SAYS], env=environment(), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT
    )
    assert process.stdout.readline() == b"m3diff serve: one\n"
    process.stdout.close()
    process.stdin.close()
    assert process.wait(30) == 3


@pytest.mark.slow(60)
def test_a_trained_model_answers_as_it_does_alone_and_an_image_with_another_partner_as_from_a_fresh_server(tmp_path):
    """What a server must pass that caches an image's features (docs/serving.md): A with B, then A with C."""
    folder = tiny_checkpoint(tiny_base(tmp_path / "base"), tmp_path / "checkpoint")
    images = [noise_image(number) for number in range(6)]
    pairs = [(one, other) for one in images for other in images if one is not other]
    captioner = load_captioner(folder, 64)
    want = [captioner.caption([pair])[0] for pair in pairs]
    assert len(set(want)) > 1
    with running(tmp_path, "--model", str(folder), toy=False, answer_s=PATIENCE_S) as server:
        for (one, other), caption in zip(pairs, want, strict=True):
            answer = httpx.post(
                f"{server.address}/caption", **form(png(one), png(other), overlay="true"), timeout=PATIENCE_S
            )
            assert answer.json()["caption"] == caption
            assert answer.json()["overlay"].keys() == {"before", "after"}
        name = answer.json()["model"]
        assert name.startswith("m3diff/sha256-")
        answer = httpx.post(f"{server.address}/caption", **form(BEFORE, AFTER, question="a <image>"), timeout=60)
        assert (answer.status_code, answer.json()["error"]) == (422, "special_token")


@pytest.mark.slow
def test_a_damaged_checkpoint_ends_the_server_with_one_line(tmp_path):
    folder = tiny_checkpoint(tiny_base(tmp_path / "base"), tmp_path / "checkpoint")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    options = ("--model", str(folder))
    done = subprocess.run(
        command(tmp_path, *options, toy=False), cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"m3diff serve: {folder}/model.safetensors: a Git LFS pointer")
    assert "git lfs pull" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "token", "words"),
    [
        (
            ("--host", "0.0.0.0"),
            None,
            "serve: --host 0.0.0.0 lets other machines in, and there is no token; set M3DIFF_S",
        ),
        (("--host", "127.0.0.1"), "short", "serve: M3DIFF_SERVE_TOKEN has 5 characters; 16 at least"),
        (("--model", "nowhere"), TOKEN, "model 'm3diff' has no version 'nowhere'; there are [1]; name one of these"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(options, token, words, tmp_path):
    if "--model" in options:
        write_registry(tmp_path, "one")
    given = environment(**({"M3DIFF_SERVE_TOKEN": token} if token else {}))
    done = subprocess.run(
        command(tmp_path, *options, toy=False), cwd=tmp_path, env=given, capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (2, 3)
    assert words in done.stderr
    assert "Traceback" not in done.stderr

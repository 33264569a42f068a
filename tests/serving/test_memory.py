"""The memory that requests take in all processes of the server, held against what docs/serving.md states."""

import asyncio
import io
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from m3diff.serving.app import COPIES
from m3diff.serving.batcher import DECODERS
from tests.serving.toy import PARAMS, Running, form, plain, png, running, write_registry

BYTES_PER_PIXEL = 30
PATIENCE_S = 400
"""For a request and for its answer: memory alone is judged here, however slow the machine is."""

SERVE = PARAMS.serve.model_copy(update={"max_image_mpx": 10, "answer_s": PATIENCE_S})
SIDE = int((SERVE.max_image_mpx * 1e6) ** 0.5)
REQUESTS = SERVE.max_queue * SERVE.max_request_mb * 1e6
IMAGES = SERVE.replicas * DECODERS * SERVE.max_image_mpx * 1e6 * BYTES_PER_PIXEL


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("served")
    write_registry(root, "one")
    constants = {"request.UPLOAD_S": PATIENCE_S}
    with running(root, constants=constants, max_image_mpx=SERVE.max_image_mpx, answer_s=PATIENCE_S) as server:
        for _ in range(4):
            httpx.post(f"{server.address}/caption", **form(png(plain(1, 2)), png(plain(3, 4))), timeout=PATIENCE_S)
        yield server


def taken(processes: list[psutil.Process]) -> int:
    """Bytes of these processes, shared ones once."""
    rollups = [Path(f"/proc/{process.pid}/smaps_rollup").read_text() for process in processes]
    return sum(1024 * int(rollup.partition("\nPss:")[2].split()[0]) for rollup in rollups)


@contextmanager
def peak(server: Running, name: str, allowed: float) -> Iterator[None]:
    """Within, the server grows by no more than a tenth over what is allowed."""
    family, found, ended = server.family(), 0, threading.Event()
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


def noise(megabytes: float) -> bytes:
    side = int((megabytes * 1e6 / 3) ** 0.5)
    held = io.BytesIO()
    pixels = np.random.default_rng(7).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(held, "PNG", compress_level=0)
    return held.getvalue()


async def statuses(server: Running, count: int, **request: object) -> Counter[int]:
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=server.address, timeout=2 * PATIENCE_S, limits=limits) as client:
        answers = await asyncio.gather(*(client.post("/caption", **request) for _ in range(count)))  # type: ignore[arg-type]
    assert all(answer.headers["retry-after"] for answer in answers if answer.status_code == 503)
    return Counter(answer.status_code for answer in answers)


@pytest.mark.slow(60)
def test_as_many_large_requests_at_once_as_the_queue_holds_keep_to_the_stated_memory(server):
    image = noise(9.7)
    with peak(server, "large requests", REQUESTS):
        got = asyncio.run(statuses(server, SERVE.max_queue, **form(image, image)))
    assert got.keys() <= {200, 503}
    assert got[200] >= SERVE.max_queue // 4
    assert httpx.post(f"{server.address}/caption", **form(image, image), timeout=PATIENCE_S).status_code == 200


@pytest.mark.slow(60)
@pytest.mark.parametrize("kind", ["WEBP", "JPEG2000"])
def test_images_of_the_largest_size_keep_to_the_stated_memory(server, kind):
    """In the formats whose decoding takes the most."""
    grey, held = Image.linear_gradient("L").resize((SIDE, SIDE)), io.BytesIO()
    Image.merge("RGBA", [grey, grey, grey.rotate(90), grey]).save(held, kind, lossless=True, method=0)
    with peak(server, kind, IMAGES):
        got = asyncio.run(statuses(server, 4, **form(held.getvalue(), held.getvalue(), overlay="true")))
    assert got == {200: 4}


def text_bomb() -> bytes:
    """A PNG whose texts unpack to sixty times its bytes."""
    held, info = io.BytesIO(), PngInfo()
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
def test_whatever_a_request_holds_it_keeps_to_its_share_of_the_stated_memory(server):
    for name, request in HOSTILE.items():
        with peak(server, name, COPIES * SERVE.max_request_mb * 1e6):
            answer = httpx.post(f"{server.address}/caption", timeout=PATIENCE_S, **request)  # type: ignore[arg-type]
        assert answer.status_code == (200 if name == "texts" else 422)
        assert len(answer.content) < 2_000

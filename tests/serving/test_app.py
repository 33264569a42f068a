"""The routes without Ray: what is answered, and what is refused with which status and in which words."""

import asyncio
import base64
import io
import json
import struct
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from prometheus_client import generate_latest

from m3diff.models import FAMILIES
from m3diff.models.generation import QUESTION
from m3diff.serving import http
from m3diff.serving.batcher import OVERLAY_PX
from m3diff.serving.server import follow
from tests.serving.local import PARAMS, Service, base64_of, chat, form, png, source
from tests.serving.toy import COMPUTE_S, ToyCaptioner, plain, said, write_toy
from tests.test_images import COMPRESSIONS, DAMAGES, KINDS, SEEN, damaged, tiff
from tests.tiny import noise_image

TOKEN = "0123456789abcdef0123"
BEFORE, AFTER = png(plain(10, 20)), png(plain(30, 40))
CHAT = "/v1/chat/completions"
Talk = Callable[[Service, httpx.AsyncClient], Awaitable[None]]


@pytest.fixture
def talk(tmp_path: Path) -> Callable[..., None]:
    """Runs a conversation with a server that holds the toy `one`."""
    folder = write_toy(tmp_path / "one", "one")

    def run(conversation: Talk, ready: bool = True, **changes: Any) -> None:
        async def main() -> None:
            service = Service(**changes)
            if ready:
                await service.models.switch(source(folder))
            async with service.client() as client:
                await conversation(service, client)

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


def colours(number: int) -> tuple[int, int, int]:
    return number % 256, number // 256, 7


def pair(number: int) -> tuple[bytes, bytes, str]:
    """Images of colours that no other number has, and what the toy says of them."""
    one, other = colours(2 * number), colours(2 * number + 1)
    words = ["/".join(map(str, colour)) for colour in (one, other)]
    return png(plain(*one)), png(plain(*other)), said("one", QUESTION, *words)


def bomb(width: int, height: int) -> bytes:
    """A PNG file of few bytes whose header says that it is huge."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(999))) + chunk(b"IEND", b"")
    )


def test_a_form_json_and_a_chat_of_one_pair_have_one_answer_which_names_its_version(talk):
    want = said("one", "Is it red?", "10/20/0", "30/40/0")

    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        body = {"before": base64_of(BEFORE), "after": base64_of(AFTER), "question": "Is it red?"}
        for answer in (
            await client.post("/caption", **form(BEFORE, AFTER, question="Is it red?")),
            await client.post("/caption", json=body),
        ):
            assert answer.json() == {"caption": want, "model": "m3diff/1"}
            assert answer.headers["x-model-version"] == "m3diff/1"
        answer = await client.post(CHAT, json=chat(BEFORE, AFTER, "Is it red?", temperature=0, max_tokens=64))
        assert answer.headers["x-model-version"] == answer.json()["model"] == "m3diff/1"
        (choice,) = answer.json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (want, "stop")
        counts = answer.json()["usage"]
        assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]

    talk(conversation)


def test_without_a_question_it_is_asked_what_changed_and_before_comes_first(talk):
    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        for one, other, words in ((BEFORE, AFTER, ("10/20/0", "30/40/0")), (AFTER, BEFORE, ("30/40/0", "10/20/0"))):
            want = said("one", QUESTION, *words)
            assert (await client.post("/caption", **form(one, other))).json()["caption"] == want
            answer = (await client.post(CHAT, json=chat(one, other))).json()
            assert answer["choices"][0]["message"]["content"] == want

    talk(conversation)


def test_many_at_once_share_batches_and_each_has_its_own_answer(talk):
    count = 40

    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        pairs = [pair(number) for number in range(count)]
        overlays = [{"overlay": "true"} if number % 3 == 0 else {} for number in range(count)]
        asked = zip(pairs, overlays, strict=True)
        asking = (client.post("/caption", **form(one, other, **more)) for (one, other, _), more in asked)
        answers = await asyncio.gather(*asking)
        assert [answer.json()["caption"] for answer in answers] == [want for *_, want in pairs]
        assert [("overlay" in answer.json()) for answer in answers] == [bool(more) for more in overlays]
        assert (
            f'm3diff_batch_pairs_bucket{{le="1.0"}} {count}.0' not in generate_latest(service.metrics.registry).decode()
        )

    talk(conversation, batch_pairs=8)


def test_the_overlay_is_each_image_with_outlines_and_never_huge(talk):
    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        large = png(plain(200, 200, 200, (3000, 1500)))
        found = (await client.post("/caption", **form(BEFORE, large, overlay="true"))).json()["overlay"]
        before, after = (Image.open(io.BytesIO(base64.b64decode(found[side]))) for side in ("before", "after"))
        assert (before.size, after.size) == ((32, 24), (OVERLAY_PX, OVERLAY_PX // 2))
        assert len(after.getcolors() or ()) > 1, "a plain image has no second colour but its outlines"
        assert after.getpixel((2, 2)) == (200, 200, 200)

    talk(conversation)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no image": (form(b"GIF or not", AFTER), "not_an_image", "before: 10 bytes, is of no known image format"),
    "nothing": (form(BEFORE, b""), "not_an_image", "after: 0 bytes"),
    "a cut image": (form(BEFORE, AFTER[: len(AFTER) // 2]), "not_an_image", "cannot be read as an image"),
    "PostScript": (
        form(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", AFTER),
        "not_an_image",
        "is of no known image format",
    ),
    "a bomb": (
        form(bomb(9000, 9000), AFTER),
        "too_many_pixels",
        "9000x9000 pixels, 81,000,000 padded to a square; at most 40 million",
    ),
    "a line of a bit a pixel": (
        form(png(Image.new("1", (1, 30_000))), AFTER),
        "too_many_pixels",
        "before: has 1x30000 pixels, 900,000,000 padded to a square; at most 40 million",
    ),
    "a tile larger than its picture": (
        form(tiff(SEEN.astype("uint8"), tile=[30_000]), AFTER),
        "too_many_pixels",
        "has tiles of 900,000,000 pixels",
    ),
    "too many values": (
        {"content": b"[" + b"{}," * 9_999 + b"{}]", "headers": {"content-type": "application/json"}},
        "not_json",
        "at most 10,000 values",
    ),
    "a bomb that Pillow refuses": (form(BEFORE, bomb(60000, 60000)), "too_many_pixels", "after: "),
    "one image": ({"files": {"before": ("a.png", BEFORE)}}, "wrong_images", "after: not there; two files"),
    "a text for an image": (
        {"files": {"before": ("a.png", BEFORE)}, "data": {"after": "/etc/passwd"}},
        "wrong_images",
        "after: a text",
    ),
    "a field too many": (form(BEFORE, AFTER, colour="red"), "unknown_field", "colour: an unknown field; before, after"),
    "an odd overlay": (form(BEFORE, AFTER, overlay="yes"), "invalid_field", "overlay: yes; true or false"),
    "an empty question": (form(BEFORE, AFTER, question="  "), "empty_question", "question: an empty text"),
    "a long question": (form(BEFORE, AFTER, question="x" * 501), "question_too_long", "501 characters; at most 500"),
    "an image's place": (form(BEFORE, AFTER, question="a <image> b"), "special_token", "'<image>'; plain text"),
    "the end of a turn": (form(BEFORE, AFTER, question="<|im_end|>"), "special_token", "question: '<|im_end|>'"),
    "JSON that is none": (
        {"content": b"{", "headers": {"content-type": "application/json"}},
        "not_json",
        "no JSON",
    ),
    "nested JSON": (
        {"content": b"[" * 100_000, "headers": {"content-type": "application/json"}},
        "not_json",
        "no JSON",
    ),
    "half a character": (
        {
            "content": json.dumps({"before": "", "after": "", "question": "\ud800"}).encode(),
            "headers": {"content-type": "application/json"},
        },
        "not_json",
        "unexpected end of hex escape",
    ),
    "an address": (
        {"json": {"before": "http://127.0.0.1/a.png", "after": base64_of(AFTER)}},
        "not_bytes",
        "before: an address, http://127.0.0.1/a.png; base64; no address is fetched",
    ),
    "no base64": ({"json": {"before": "ä", "after": base64_of(AFTER)}}, "not_base64", "before: ä"),
    "a field too many in JSON": (
        {"json": {"before": "", "after": "", "colour": 1}},
        "unknown_field",
        "colour: an unknown field; known here: before, after, question, overlay",
    ),
    "another type": (
        {"content": b"x", "headers": {"content-type": "text/plain"}},
        "wrong_type",
        "Content-Type 'text/p",
    ),
    "a form without parts": (
        {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=y"}},
        "",
        "",
    ),
    "a form without a boundary": (
        {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
        "not_a_form",
        "a multipart form",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_question_about_two_images_is_refused_with_what_was_found_the_limit_and_the_remedy(name, talk):
    request, code, words = REFUSED[name]

    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        answer = await client.post("/caption", **request)
        assert answer.status_code == 422, answer.text
        found = answer.json()
        assert code in found["error"]
        assert words in f"{found['field']}: {found['found']}; {found['limit']}; {found['remedy']}"
        assert found["limit"]
        assert found["remedy"]
        assert service.server.under_way == 0

    talk(conversation)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*KINDS, *COMPRESSIONS])
def test_a_damaged_image_of_any_format_is_refused_or_read_and_no_fault_of_the_server(kind, talk):
    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        answers = await asyncio.gather(*(client.post("/caption", **form(data, AFTER)) for data in damaged(kind)))
        assert {answer.status_code for answer in answers} <= {200, 422}

    talk(conversation, max_queue=DAMAGES)


def test_a_question_to_a_model_that_reads_none_is_refused_and_without_one_it_answers(talk, monkeypatch):
    monkeypatch.setattr(ToyCaptioner, "family", FAMILIES["blip2idc"])

    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        asked = [
            ("/caption", form(BEFORE, AFTER, question="Is a cup gone?")),
            (CHAT, {"json": parts(TEXT, IMAGE, IMAGE)}),
        ]
        for route, request in asked:
            answer = await client.post(route, **request)
            assert answer.status_code == 422
            assert "question_not_read" in answer.text
            assert "this model says of every pair what changed" in answer.text
            assert "leave it out" in answer.text
        for route, request in (("/caption", form(BEFORE, AFTER)), (CHAT, {"json": parts(IMAGE, IMAGE)})):
            assert (await client.post(route, **request)).status_code == 200

    talk(conversation)


def parts(*given: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m3diff", "messages": [{"role": "user", "content": list(given)}]} | more


IMAGE, OTHER = chat(BEFORE, AFTER)["messages"][0]["content"]
TEXT = {"type": "text", "text": "What?"}
FROM = "messages.0.content: before"


def at(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def beside(role: str) -> dict[str, Any]:
    """A chat whose first message is another's than the user's."""
    return {"model": "m3diff", "messages": [{"role": role, "content": "Be brief."}, *parts(IMAGE, IMAGE)["messages"]]}


REFUSED_CHATS: dict[str, tuple[dict[str, Any], str, str]] = {
    "one image": (parts(TEXT, IMAGE), "wrong_images", "1 image(s); exactly 2 images"),
    "three images": (parts(IMAGE, IMAGE, IMAGE), "wrong_images", "3 image(s)"),
    "two texts": (parts(TEXT, IMAGE, IMAGE, TEXT), "wrong_texts", "2 texts"),
    "an address": (parts(at("https://example.com/a.png"), IMAGE), "not_bytes", f"{FROM}: an address, https://ex"),
    "a file's address": (parts(at("file:///etc/passwd"), IMAGE), "not_bytes", f"{FROM}: an address, file:///etc"),
    "a path": (parts(at("/etc/passwd"), IMAGE), "not_bytes", f"{FROM}: /etc/passwd"),
    "two messages": (
        parts(IMAGE) | {"messages": parts(IMAGE)["messages"] * 2},
        "wrong_messages",
        "messages: 2 messages of the user; one",
    ),
    "a system's message": (
        beside("system"),
        "wrong_messages",
        "messages.0.role: a message of the role 'system'; the user's",
    ),
    "a system's message of parts": (
        {"model": "m3diff", "messages": [{"role": "system", "content": [TEXT]}]},
        "wrong_messages",
        "messages.0.role: a message of the role 'system'",
    ),
    "a developer's message": (
        beside("developer"),
        "wrong_messages",
        "messages.0.role: a message of the role 'developer'",
    ),
    "an earlier answer": (beside("assistant"), "wrong_messages", "messages.0.role: a message of the role 'assistant'"),
    "no message": ({"model": "m3diff", "messages": []}, "missing_field", "messages"),
    "a message that is none": ({"model": "m3diff", "messages": ["What?"]}, "wrong_messages", "messages: 0 messages"),
    "no role": ({"model": "m3diff", "messages": [{"content": [IMAGE, IMAGE]}]}, "missing_field", "messages.0.role"),
    "a field of the chat": (
        parts(IMAGE, IMAGE, colour=1),
        "unknown_field",
        "colour: an unknown field; known here: model",
    ),
    "a field of a message": (
        {"model": "m3diff", "messages": [{"role": "user", "content": [IMAGE, IMAGE], "weight": 1}]},
        "unknown_field",
        "known here: role, name, content; leave",
    ),
    "a field of a text": (parts(TEXT | {"lang": "en"}, IMAGE, IMAGE), "unknown_field", "known here: type, text; leave"),
    "a field of an image": (
        parts(IMAGE | {"uuid": "a"}, IMAGE),
        "unknown_field",
        "known here: type, image_url; leave",
    ),
    "a field of an address": (
        parts({"type": "image_url", "image_url": IMAGE["image_url"] | {"min_pixels": 9}}, IMAGE),
        "unknown_field",
        "known here: url, detail; leave",
    ),
    "text alone": ({"model": "m3diff", "messages": [{"role": "user", "content": "What?"}]}, "invalid_field", "content"),
    "a stream": (parts(IMAGE, IMAGE, stream=True), "invalid_field", "stream: "),
    "some temperature": (parts(IMAGE, IMAGE, temperature=0.7), "invalid_field", "temperature: 0.7"),
    "a tool": (parts(IMAGE, IMAGE, tools=[{"type": "function"}]), "unknown_field", "tools: an unknown field"),
    "JSON": (parts(IMAGE, IMAGE, response_format={"type": "json_object"}), "unknown_field", "response_format"),
    "where to stop": (parts(IMAGE, IMAGE, stop=["."]), "unknown_field", "stop: an unknown field"),
    "few tokens": (parts(IMAGE, IMAGE, max_tokens=3), "invalid_field", "max_tokens: 3; 64 or more"),
    "a special token": (parts({"type": "text", "text": "<image>"}, IMAGE, IMAGE), "special_token", "'<image>'"),
}


@pytest.mark.parametrize("name", REFUSED_CHATS)
def test_a_chat_that_is_no_question_about_two_images_is_refused_in_openais_shape(name, talk):
    request, code, words = REFUSED_CHATS[name]

    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        answer = await client.post(CHAT, json=request)
        assert answer.status_code == 422, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == (code, "invalid_request_error")
        assert words in error["message"]

    talk(conversation)


def wrapped(part: dict[str, Any], end: str) -> dict[str, Any]:
    """An image whose base64 has lines."""
    url = part["image_url"]["url"]
    return at(url[:60] + end + url[60:] + end)


NOTHING_ELSE: dict[str, dict[str, Any]] = {
    "nulls": parts(IMAGE, OTHER, stop=None, tools=None, response_format=None, n=None, colour=None),
    "nothing in lists": parts(IMAGE, OTHER, stop=[], tools=[], logit_bias={}, metadata={}),
    "defaults of OpenAI": parts(
        IMAGE, OTHER, response_format={"type": "text"}, tool_choice="none", store=False, logprobs=False, n=1
    ),
    "defaults of vLLM": parts(IMAGE, OTHER, top_k=-1, min_p=0.0, repetition_penalty=1.0, skip_special_tokens=True),
    "a detail of null": parts(
        at(IMAGE["image_url"]["url"]) | {"image_url": IMAGE["image_url"] | {"detail": None}}, OTHER
    ),
    "a name": {"model": "m3diff", "messages": [{"role": "user", "name": "ann", "content": [IMAGE, OTHER]}]},
    "an empty system message": {
        "model": "m3diff",
        "messages": [{"role": "system", "content": ""}, *parts(IMAGE, OTHER)["messages"]],
    },
    "lines": parts(wrapped(IMAGE, "\n"), wrapped(OTHER, "\r\n")),
}


@pytest.mark.parametrize("name", NOTHING_ELSE)
def test_what_changes_nothing_is_answered_as_if_it_were_not_there(name, talk):
    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        answer = await client.post(CHAT, json=NOTHING_ELSE[name])
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == said("one", QUESTION, "10/20/0", "30/40/0")

    talk(conversation)


def test_another_model_is_not_found_and_the_versions_own_name_is(talk):
    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        answer = await client.post(CHAT, json=chat(BEFORE, AFTER, model="gpt-4o"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.post(CHAT, json=chat(BEFORE, AFTER, model="m3diff/1"))).status_code == 200
        assert [entry["id"] for entry in (await client.get("/v1/models")).json()["data"]] == ["m3diff/1"]

    talk(conversation)


@pytest.mark.parametrize("announced", [True, False])
def test_a_request_of_too_many_bytes_is_refused_whether_it_says_so_or_not(announced, talk):
    async def parts() -> Any:
        for _ in range(30):
            yield bytes(100_000)

    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        answer = await client.post("/caption", content=bytes(3_000_000) if announced else parts())
        assert answer.status_code == 413
        assert answer.json()["limit"] == "at most 1 MB a request (serve.max_request_mb)"
        answer = await client.post(CHAT, content=bytes(3_000_000))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")

    talk(conversation, max_request_mb=1)


def test_a_client_that_sends_too_slowly_is_refused_and_leaves_its_place(talk, monkeypatch):
    monkeypatch.setattr(http, "UPLOAD_S", 0.3)

    async def slowly() -> Any:
        for _ in range(50):
            yield b"x"
            await asyncio.sleep(0.05)

    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        start = time.monotonic()
        answer = await client.post("/caption", content=slowly())
        assert (answer.status_code, answer.json()["error"]) == (408, "slow_client")
        assert answer.headers["connection"] == "close"
        assert time.monotonic() - start < 1.5
        assert service.server.under_way == 0

    talk(conversation)


def test_a_full_queue_refuses_at_once_says_when_to_come_again_and_loses_nobody(talk):
    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        answers = await asyncio.gather(*(client.post("/caption", **form(BEFORE, AFTER)) for _ in range(12)))
        statuses = [answer.status_code for answer in answers]
        assert (statuses.count(200), statuses.count(429)) == (3, 9)
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["limit"] == "at most 3 at a time (serve.max_queue)"
        assert (await client.post("/caption", **form(BEFORE, AFTER))).status_code == 200

    talk(conversation, max_queue=3)


def test_requests_that_need_more_memory_than_is_left_are_told_to_come_again_before_they_are_read(talk):
    large = png(noise_image(1, (500, 500)))  # 0.75 MB, of which a quarter of the limit is one

    async def chunked() -> Any:
        yield json.dumps({"before": base64_of(BEFORE), "after": base64_of(AFTER)}).encode()

    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        answers = await asyncio.gather(*(client.post("/caption", **form(large, BEFORE)) for _ in range(6)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 503, 503, 503, 503]
        refused = next(answer for answer in answers if answer.status_code == 503)
        assert refused.headers["retry-after"]
        assert refused.json()["error"] == "memory_full"
        assert "max_queue x serve.max_request_mb" in refused.json()["limit"]
        small = [client.post("/caption", **form(BEFORE, AFTER)) for _ in range(6)]
        assert {answer.status_code for answer in await asyncio.gather(*small)} == {200}
        headers = {"content-type": "application/json"}
        unsized = [client.post("/caption", content=chunked(), headers=headers) for _ in range(4)]
        answers = await asyncio.gather(*unsized)
        assert sorted(answer.status_code for answer in answers) == [200, 503, 503, 503], "they may be of any size"
        assert service.server.held == 0

    talk(conversation, max_queue=7, max_request_mb=1)


def test_a_request_of_the_largest_size_is_answered_whatever_the_queue_is(talk):
    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        large = png(noise_image(1, (500, 500)))
        assert (await client.post("/caption", **form(large, BEFORE))).status_code == 200

    talk(conversation, max_queue=1, max_request_mb=1)


def test_an_answer_that_takes_too_long_is_given_up(talk):
    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        answer = await client.post("/caption", **form(BEFORE, AFTER))
        assert (answer.status_code, answer.json()["error"]) == (503, "timed_out")
        assert "retry-after" in answer.headers
        await asyncio.sleep(0.01)
        assert service.server.under_way == service.models.current.under_way == 0

    talk(conversation, answer_s=COMPUTE_S / 4)


def test_before_a_model_is_there_the_server_says_so(talk):
    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        assert (await client.get("/healthz")).status_code == 200
        for answer in (
            await client.get("/readyz"),
            await client.get("/v1/models"),
            await client.post("/caption", **form(BEFORE, AFTER)),
        ):
            assert answer.status_code == 503
            assert "retry-after" in answer.headers

    talk(conversation, ready=False)


def test_a_token_is_needed_for_all_but_the_probes(talk):
    routes = ("/", "/metrics", "/v1/models", "/examples", "/examples/0/before", "/docs", "/caption", CHAT)

    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        for route in routes:
            for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": TOKEN}):
                method = "POST" if route in ("/caption", CHAT) else "GET"
                answer = await client.request(method, route, headers=headers)
                assert answer.status_code == 401, route
                assert answer.headers["www-authenticate"] == "Bearer"
        for route in ("/healthz", "/readyz"):
            assert (await client.get(route)).status_code == 200
        right = {"Authorization": f"Bearer {TOKEN}", "Host": "captions.example.com"}
        assert (await client.post("/caption", **form(BEFORE, AFTER), headers=right)).status_code == 200
        assert (await client.get("/metrics", headers=right)).status_code == 200

    talk(conversation, token=TOKEN)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example.com"}, 403),
        ({"Host": "127.0.0.1.example.com:8000"}, 403),
        ({"Origin": "https://evil.example.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:8000"}, 200),
        ({"Host": "localhost:8000"}, 200),
    ],
)
def test_without_a_token_a_page_of_another_site_is_not_let_in(headers, status, talk):
    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        assert (await client.post("/caption", **form(BEFORE, AFTER), headers=headers)).status_code == status

    talk(conversation)


def test_what_breaks_inside_is_told_without_what_is_on_this_machine(talk):
    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        answer = await client.post("/caption", **form(BEFORE, AFTER, question="Break down?"))
        assert answer.status_code == 500
        assert answer.json()["error"] == "failed"
        assert "/var/model" not in answer.text
        assert (await client.post("/caption", **form(BEFORE, AFTER))).status_code == 200

    talk(conversation)


def test_an_unknown_route_and_another_method_are_said(talk):
    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        assert (await client.get("/nothing")).json()["found"] == "GET /nothing"
        assert (await client.get("/caption")).status_code == 405
        assert (await client.get("/v1/nothing")).json()["error"]["code"] == "no_such_route"
        assert (await client.get("/examples/0/before")).status_code == 404

    talk(conversation)


def test_the_metrics_count_requests_by_status_their_seconds_and_the_version(talk):
    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        await client.post("/caption", **form(BEFORE, AFTER))
        await client.post("/caption", **form(BEFORE, b""))
        await client.get("/some/path/of/a/client")
        text = (await client.get("/metrics")).text
        for line in (
            'm3diff_requests_total{route="/caption",status="200"} 1.0',
            'm3diff_requests_total{route="/caption",status="422"} 1.0',
            'm3diff_requests_total{route="other",status="404"} 1.0',
            'm3diff_request_seconds_count{route="/caption"} 2.0',
            "m3diff_batch_pairs_count 1.0",
            "m3diff_queue_length 0.0",
            'm3diff_model{version="m3diff/1"} 1.0',
        ):
            assert line in text.splitlines()

    talk(conversation)


def test_a_version_takes_over_while_requests_run_and_none_is_lost(tmp_path, talk):
    other = write_toy(tmp_path / "other", "other")

    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        async def ask(number: int) -> dict[str, Any]:
            await asyncio.sleep(number * COMPUTE_S / 4)
            answer = await client.post("/caption", **form(BEFORE, AFTER))
            assert answer.headers["x-model-version"] == answer.json()["model"]
            return answer.json()

        asking = asyncio.gather(*(ask(number) for number in range(40)))
        await asyncio.sleep(4 * COMPUTE_S)
        await service.models.switch(source(other, 2))
        answers = await asking
        assert {(answer["model"], answer["caption"].partition(":")[0]) for answer in answers} == {
            ("m3diff/1", "one"),
            ("m3diff/2", "other"),
        }
        await service.models.close()
        assert [local.removed for local in service.made] == [True, True]

    talk(conversation)


def test_the_alias_is_followed_and_a_version_that_cannot_be_loaded_leaves_the_one_before(tmp_path, talk, capsys):
    names = {2: "broken", 3: "cut off", 4: "third"}
    folders = {number: write_toy(tmp_path / word, word) for number, word in names.items()}
    alias = [1]

    async def conversation(service: Service, client: httpx.AsyncClient) -> None:
        def find() -> Any:
            return source(folders[alias[0]], alias[0])

        following = asyncio.create_task(follow(service.models, lambda: f"m3diff/{alias[0]}", find, 0.02))
        for number, want in ((2, "m3diff/1"), (3, "m3diff/1"), (4, "m3diff/4")):
            alias[0] = number
            await asyncio.sleep(0.3)
            assert (await client.post("/caption", **form(BEFORE, AFTER))).json()["model"] == want
        following.cancel()
        said = capsys.readouterr()
        for told in ("model.safetensors: sha256 differs", "model.safetensors: cut off; fetch"):
            assert said.err.count(f"goes on with m3diff/1; the next version could not be had: {told}") == 1
        assert said.out == "m3diff serve: answers now with m3diff/4\n"
        assert {each.removed for each in service.made[:-1]} == {True}, "no damaged one is left in memory"

    talk(conversation)


def test_the_limits_of_the_parameters_are_those_of_the_server():
    assert PARAMS.serve.max_image_mpx == 40, "the messages above name it"

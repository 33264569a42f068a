"""The routes without a process: answers, and each refusal with its status and words."""

import asyncio
import base64
import io
import json
import struct
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from m3diff.models import FAMILIES
from m3diff.models.generation import QUESTION
from m3diff.serving import app
from m3diff.serving.batcher import OVERLAY_PX
from m3diff.serving.server import follow
from tests.serving import toy
from tests.serving.toy import COMPUTE_S, Service, at, base64_of, chat, form, plain, png, said, source
from tests.test_images import DAMAGES, damaged
from tests.tiny import noise_image

TOKEN = "0123456789abcdef0123"
BEFORE, AFTER = png(plain(10, 20)), png(plain(30, 40))
PAIR, CAPTION, CHAT = form(BEFORE, AFTER), "/caption", "/v1/chat/completions"
Serve = Callable[..., Service]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    folder, made = toy.write_toy(tmp_path / "one", "one"), []

    def make(ready: bool = True, **changes: Any) -> Service:
        made.append(Service(**changes))
        if ready:
            made[-1].run(made[-1].models.switch(source(folder)))
        return made[-1]

    yield make
    for service in made:
        assert service.server.under_way == service.server.held == 0, "a request left its place or its memory taken"
        service.runner.close()


def content(answer: httpx.Response) -> str:
    return answer.json()["choices"][0]["message"]["content"]


def test_a_form_json_and_a_chat_of_one_pair_have_one_answer_which_names_its_version(serve):
    service, want = serve(), said("one", "Is it red?", "10/20/0", "30/40/0")
    body = {"before": base64_of(BEFORE), "after": base64_of(AFTER), "question": "Is it red?"}
    for request in (form(BEFORE, AFTER, question="Is it red?"), {"json": body}):
        answer = service.post(CAPTION, **request)
        assert answer.json() == {"caption": want, "model": "m3diff/1"}
        assert answer.headers["x-model-version"] == "m3diff/1"
    for model in ("m3diff", "m3diff/1"):
        answer = service.post(CHAT, json=chat(BEFORE, AFTER, "Is it red?", temperature=0, max_tokens=64, model=model))
        assert answer.headers["x-model-version"] == answer.json()["model"] == "m3diff/1"
    (choice,), counts = answer.json()["choices"], answer.json()["usage"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (want, "stop")
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
    for one, other, words in ((BEFORE, AFTER, ("10/20/0", "30/40/0")), (AFTER, BEFORE, ("30/40/0", "10/20/0"))):
        want = said("one", QUESTION, *words)  # without a question, and before comes first
        assert service.post(CAPTION, **form(one, other)).json()["caption"] == want
        assert content(service.post(CHAT, json=chat(one, other))) == want


def test_many_at_once_share_batches_and_each_has_its_own_answer(serve):
    service, requests, wanted = serve(batch_pairs=8), [], []
    for number in range(40):
        colours = [(each % 256, each // 256, 7) for each in (2 * number, 2 * number + 1)]
        overlay = {"overlay": "true"} if number % 3 == 0 else {}
        requests.append(form(*(png(plain(*colour)) for colour in colours), **overlay))
        wanted.append((said("one", QUESTION, *("/".join(map(str, colour)) for colour in colours)), bool(overlay)))
    answers = [answer.json() for answer in service.post_at_once(CAPTION, requests)]
    assert [(answer["caption"], "overlay" in answer) for answer in answers] == wanted
    large = png(plain(200, 200, 200, (3000, 1500)))
    found = service.post(CAPTION, **form(BEFORE, large, overlay="true")).json()["overlay"]
    before, after = (Image.open(io.BytesIO(base64.b64decode(found[side]))) for side in ("before", "after"))
    assert (before.size, after.size) == ((32, 24), (OVERLAY_PX, OVERLAY_PX // 2))
    assert len(after.getcolors() or ()) > 1, "a plain image has no second colour but its outlines"
    assert after.getpixel((2, 2)) == (200, 200, 200)
    metrics = service.get("/metrics").text
    assert 'm3diff_batch_pairs_bucket{le="1.0"} 41.0' not in metrics, "no pair shared a batch"
    assert 'm3diff_batch_pairs_bucket{le="8.0"} 41.0' in metrics, "a batch had more than batch_pairs"


def bomb(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(999))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def typed(body: bytes | AsyncIterator[bytes], kind: str = "application/json") -> dict[str, Any]:
    return {"content": body, "headers": {"content-type": kind}}


def as_json(**body: Any) -> dict[str, Any]:
    return {"json": {"before": BASE64, "after": BASE64} | body}


def parts(*given: Any, **more: Any) -> dict[str, Any]:
    return messages({"role": "user", "content": list(given)}, **more)


def messages(*given: Any, **more: Any) -> dict[str, Any]:
    return {"json": {"model": "m3diff", "messages": list(given)} | more}


FORM, BASE64 = "multipart/form-data", base64_of(AFTER)
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
IMAGE, OTHER = chat(BEFORE, AFTER)["messages"][0]["content"]
URL, TEXT, USER = IMAGE["image_url"]["url"], {"type": "text", "text": "What?"}, {"role": "user", "content": [IMAGE] * 2}
WHERE = "messages.0.content: before: "
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no image": (form(b"GIF or not", AFTER), "not_an_image", "before: 10 bytes, is text, not an image"),
    "nothing": (form(BEFORE, b""), "not_an_image", "after: 0 bytes"),
    "PostScript": (form(EPS, AFTER), "not_an_image", "is of no known image format"),
    "a bomb": (form(bomb(9000, 9000), AFTER), "too_many_pixels", "9000x9000 pixels, 81,000,000 padded to a square; at"),
    "a line": (form(png(Image.new("1", (1, 30_000))), AFTER), "too_many_pixels", "before: has 1x30000 pixels"),
    "a bomb that Pillow refuses": (form(BEFORE, bomb(60000, 60000)), "not_an_image", "exceeds limit"),
    "too many values": (typed(b"[" + b"{}," * 9_999 + b"{}]"), "not_json", "at most 10,000 values"),
    "one image": ({"files": {"before": ("a.png", BEFORE)}}, "missing_field", "after: nothing"),
    "a path": ({"files": {"before": BEFORE}, "data": {"after": "/etc/passwd"}}, "not_an_image", "after: 11 bytes"),
    "a field too many": (form(BEFORE, AFTER, colour="red"), "unknown_field", "colour: red"),
    "a side twice": ({"files": [("before", BEFORE), ("before", BEFORE)]}, "missing_field", "after: nothing"),
    "an odd overlay": (form(BEFORE, AFTER, overlay="maybe"), "invalid_field", "overlay: maybe; "),
    "an empty question": (form(BEFORE, AFTER, question="  "), "empty_question", "question: 2 characters; a question"),
    "a long question": (form(BEFORE, AFTER, question="x" * 501), "question_too_long", "501 characters; at most 500"),
    "an image's place": (form(BEFORE, AFTER, question="a <image> b"), "special_token", "'<image>'; plain text"),
    "the end of a turn": (form(BEFORE, AFTER, question="<|im_end|>"), "special_token", "question: '<|im_end|>'"),
    "JSON that is none": (typed(b"{"), "not_json", "Invalid JSON"),
    "nested JSON": (typed(b"[" * 100_000), "not_json", "JSON"),
    "an address": (as_json(before="http://[::1]/a"), "not_base64", "before: http://[::1]/a"),
    "a field in JSON": (as_json(colour=1), "unknown_field", "colour: 1"),
    "another type": (typed(b"x", "text/plain"), "wrong_type", "Content-Type 'text/p"),
    "a form without a boundary": (typed(b"x", FORM), "not_a_form", "a multipart form"),
    "chat: one image": (parts(TEXT, IMAGE), "wrong_parts", "1 image(s), 1 text(s); one message with"),
    "chat: two texts": (parts(TEXT, IMAGE, IMAGE, TEXT), "wrong_parts", "2 image(s), 2 text(s); one"),
    "chat: an address": (parts(at("https://a.com/a.png"), IMAGE), "not_base64", f"{WHERE}https://a.com/a.png"),
    "chat: a file's": (parts(at("file:///etc/passwd"), IMAGE), "not_base64", f"{WHERE}file:///etc/passwd"),
    "chat: two messages": (
        messages({**USER, "content": [IMAGE]}, {**USER, "content": [OTHER]}),
        "wrong_parts",
        "2 message(s)",
    ),
    "chat: a system's": (messages({**USER, "role": "system"}, USER), "invalid_field", "messages.0.role: system"),
    "chat: no message": (messages(), "wrong_parts", "messages: 0 message(s)"),
    "chat: a stream": (parts(IMAGE, IMAGE, stream=True), "invalid_field", "stream: True"),
    "chat: a special token": (parts(TEXT | {"text": "<image>"}, IMAGE, IMAGE), "special_token", "'<image>'"),
}
"""Request, its code and place."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_question_about_two_images_is_refused_with_what_was_found_the_limit_and_the_remedy(name, serve):
    request, code, words = REFUSED[name]
    answer = serve().post(CHAT if name.startswith("chat: ") else CAPTION, **request)
    assert answer.status_code == 422, answer.text
    found = answer.json()
    if name.startswith("chat: "):  # OpenAI's shape
        error = found["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", code)
        assert words in error["message"]
    else:
        assert code in found["error"]
        assert words in f"{found['field']}: {found['found']}; {found['limit']}; {found['remedy']}"
        assert "" not in (found["limit"], found["remedy"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["JPEG2000", "PNG", "tiff_lzw"])
def test_a_damaged_image_is_refused_or_read_and_no_fault_of_the_server(kind, serve):
    answers = serve(max_queue=DAMAGES).post_at_once(CAPTION, [form(data, AFTER) for data in damaged(kind)])
    assert {answer.status_code for answer in answers} <= {200, 422}


LINES = [at(url[:60] + end + url[60:] + end) for url, end in ((URL, "\n"), (OTHER["image_url"]["url"], "\r\n"))]


def test_what_changes_nothing_is_answered_as_if_it_were_not_there(serve):
    service = serve()
    for request in (
        parts(IMAGE, OTHER, n=1, stream=False, stop=None, tools=[], temperature=0.7, max_tokens=3),
        messages({"role": "user", "name": "ann", "content": [at(URL, detail=None), OTHER]}),
        parts(*LINES),
    ):
        answer = service.post(CHAT, **request)
        assert answer.status_code == 200, answer.text
        assert content(answer) == said("one", QUESTION, "10/20/0", "30/40/0")


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {}}}
REFUSED_OPTIONS = [
    ("response_format", {"type": "json_object"}),
    ("response_format", JSON_SCHEMA),
    ("response_format", {"type": "grammar", "grammar": "a"}),
    ("response_format", "json"),
    ("response_format", {}),
    ("logprobs", True),
    ("logprobs", 2),
    ("top_logprobs", 5),
    ("tools", [TOOL]),
    ("tool_choice", "required"),
    ("tool_choice", TOOL),
    ("functions", [TOOL["function"]]),
    ("function_call", {"name": "find"}),
    ("stop", "became"),
    ("stop", ["\n"]),
    ("stop_token_ids", [7]),
    ("logit_bias", {"50256": -100}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "alloy", "format": "wav"}),
    ("web_search_options", {}),
    ("guided_json", {"type": "object"}),
    ("guided_choice", ["yes", "no"]),
    ("structured_outputs", {"regex": "a+"}),
    ("prompt_logprobs", 0),
    ("echo", True),
    ("documents", [{"text": "a"}]),
    ("allowed_token_ids", [7]),
    ("bad_words", ["lamp"]),
    ("custom_logit_processor", "{}"),
    ("ebnf", 'root ::= "yes"'),
    ("logits_processors", ["a.b"]),
    ("lora_path", "another"),
    ("n_probs", 3),
    ("return_token_ids", True),
    ("stop_regex", "a+"),
    ("structural_tag", "{}"),
    ("n", 2),
    ("stream", True),
]


@pytest.mark.parametrize(("name", "value"), REFUSED_OPTIONS, ids=lambda part: json.dumps(part)[:40])
def test_an_option_that_asks_for_another_answer_than_a_caption_is_refused(name, value, serve):
    answer = serve().post(CHAT, **parts(IMAGE, OTHER, **{name: value}))
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == name
    assert error["code"] == "invalid_field"
    assert error["message"].startswith(f"{name}: ")


HARMLESS_OPTIONS: dict[str, dict[str, Any]] = {
    "nulls": dict.fromkeys(
        ["response_format", "logprobs", "top_logprobs", "tools", "tool_choice", "functions", "function_call", "stop"]
        + ["logit_bias", "modalities", "audio", "web_search_options", "n", "stream", "max_tokens", "prediction"]
    ),
    "empty": {"tools": [], "functions": [], "stop": [], "logit_bias": {}, "stop_token_ids": [], "modalities": []},
    "defaults": {"logprobs": False, "top_logprobs": 0, "n": 1, "stream": False, "tool_choice": "auto", "echo": False},
    "text": {"response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "none", "stop": [""]},
    "sampling": {"temperature": 1.3, "top_p": 0.9, "top_k": 20, "seed": 7, "repetition_penalty": 1.05, "min_p": 0},
    "penalties": {"presence_penalty": 0, "frequency_penalty": 0.5},
    "length": {"max_tokens": 2, "max_completion_tokens": 2, "ignore_eos": True, "min_tokens": 0},
    "bookkeeping": {
        "user": "ann",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "",
    },
    "hints": {
        "reasoning_effort": "low",
        "parallel_tool_calls": True,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "prediction": {"prediction": {"type": "content", "content": "a"}, "stream_options": {"include_usage": True}},
    "unknown": {"an_option_of_another_server": [1, 2]},
}


@pytest.mark.parametrize("options", HARMLESS_OPTIONS.values(), ids=HARMLESS_OPTIONS)
def test_what_clients_send_by_default_changes_no_caption(options, serve):
    answer = serve().post(CHAT, **parts(IMAGE, OTHER, **options))
    assert answer.status_code == 200, answer.text
    assert content(answer) == said("one", QUESTION, "10/20/0", "30/40/0")


@pytest.mark.parametrize("name", ["m3diff", "m3diff/1", "m3diff%2F1"])
def test_a_model_is_described_by_the_version_and_by_the_registered_name(name, serve):
    answer = serve().get(f"/v1/models/{name}")
    assert answer.status_code == 200
    named = name.replace("%2F", "/")
    assert answer.json() == {"id": named, "object": "model", "created": 0, "owned_by": "m3diff"}
    assert answer.headers["x-model-version"] == "m3diff/1"


@pytest.mark.parametrize("name", ["gpt-4o", "m3diff/2", "M3DIFF", "m3diff/1/", "%00", "x" * 3000])
def test_a_model_that_is_not_served_is_not_found_in_openais_form(name, serve):
    answer = serve().get(f"/v1/models/{name}")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] in ("model_not_found", "no_such_route")
    assert error["type"] == "invalid_request_error"


def test_before_a_model_is_loaded_none_is_described(serve):
    service = serve(ready=False)
    assert service.get("/v1/models/m3diff").status_code == 503
    assert service.get("/v1/models/m3diff", headers={"Host": "evil.example.com"}).status_code == 403
    assert serve(token=TOKEN).get("/v1/models/m3diff").status_code == 401


def test_a_slash_after_the_list_of_models_is_the_list(serve):
    service = serve()
    assert service.get("/v1/models/").json() == service.get("/v1/models").json()


def test_a_question_to_a_model_that_reads_none_is_refused_and_without_one_it_answers(serve, monkeypatch):
    monkeypatch.setattr(toy.ToyCaptioner, "family", FAMILIES["blip2idc"])
    service = serve()
    for route, request in ((CAPTION, form(BEFORE, AFTER, question="Is it gone?")), (CHAT, parts(TEXT, IMAGE, IMAGE))):
        answer = service.post(route, **request)
        assert answer.status_code == 422
        assert "question_not_read" in answer.text
    for route, request in ((CAPTION, PAIR), (CHAT, parts(IMAGE, IMAGE))):
        assert service.post(route, **request).status_code == 200


def test_what_is_not_there_is_not_found_and_without_a_model_the_server_says_so(serve):
    service = serve()
    answer = service.post(CHAT, json=chat(BEFORE, AFTER, model="gpt-4o"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert [entry["id"] for entry in service.get("/v1/models").json()["data"]] == ["m3diff/1"]
    assert service.get("/nothing").json()["found"] == "GET /nothing"
    refused = service.get(CAPTION)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert service.get("/v1/nothing").json()["error"]["code"] == "no_such_route"
    service = serve(ready=False)
    assert service.get("/healthz").status_code == 200
    for answer in (service.get("/readyz"), service.get("/v1/models"), service.post(CAPTION, **PAIR)):
        assert answer.status_code == 503
        assert "retry-after" in answer.headers


async def sent(part: bytes, count: int, pause_s: float = 0) -> AsyncIterator[bytes]:
    """A body of no announced length."""
    for _ in range(count):
        yield part
        await asyncio.sleep(pause_s)


def test_a_request_of_too_many_bytes_or_that_comes_too_slowly_is_refused_and_leaves_its_place(serve, monkeypatch):
    service = serve(max_request_mb=1)
    for body in (bytes(3_000_000), sent(bytes(100_000), 30)):
        answer = service.post(CAPTION, **typed(body))
        assert (answer.status_code, answer.json()["limit"]) == (413, "at most 1 MB a request (serve.max_request_mb)")
    answer = service.post(CHAT, content=bytes(3_000_000))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    monkeypatch.setattr(app, "UPLOAD_S", 0.3)
    start = time.monotonic()
    answer = service.post(CAPTION, **typed(sent(b"x", 50, 0.05)))
    assert (answer.status_code, answer.json()["error"]) == (408, "slow_client")
    assert answer.headers["connection"] == "close"
    assert time.monotonic() - start < 2, "it waited for the client's end"


def test_a_full_queue_refuses_at_once_says_when_to_come_again_and_loses_nobody(serve):
    service = serve(max_queue=3)
    answers = service.post_at_once(CAPTION, [PAIR] * 12)
    refused = [answer for answer in answers if answer.status_code == 429]
    assert (len(refused), [answer.status_code for answer in answers].count(200)) == (9, 3)
    assert refused[0].headers["retry-after"] == "1"
    assert refused[0].json()["limit"] == "at most 3 at a time (serve.max_queue)"
    assert service.post(CAPTION, **PAIR).status_code == 200


def test_requests_that_need_more_memory_than_is_left_are_told_to_come_again_before_they_are_read(serve):
    large = png(noise_image(1, (500, 500)))  # 0.75 MB, of which a quarter of the limit is one
    service = serve(max_queue=7, max_request_mb=1)
    answers = sorted(service.post_at_once(CAPTION, [form(large, BEFORE)] * 6), key=lambda answer: answer.status_code)
    assert [answer.status_code for answer in answers] == [200, 200, 503, 503, 503, 503]
    assert answers[-1].headers["retry-after"]
    assert answers[-1].json()["error"] == "memory_full"
    assert "max_queue x serve.max_request_mb" in answers[-1].json()["limit"]
    assert {answer.status_code for answer in service.post_at_once(CAPTION, [PAIR] * 6)} == {200}
    body = json.dumps({"before": base64_of(BEFORE), "after": base64_of(AFTER)}).encode()
    answers = service.post_at_once(CAPTION, [typed(sent(body, 1)) for _ in range(4)])
    assert sorted(answer.status_code for answer in answers) == [200, 503, 503, 503], "they may be of any size"
    one = serve(max_queue=1, max_request_mb=1)
    assert one.post(CAPTION, **form(large, BEFORE)).status_code == 200, "the largest is answered whatever the queue is"


def test_an_answer_that_takes_too_long_is_given_up_and_no_longer_computed(serve, monkeypatch):
    service, captioned, answer = serve(answer_s=COMPUTE_S / 4, batch_pairs=1), [], toy.ToyCaptioner.answer

    def counted(*given: Any) -> Any:
        captioned.append(1)
        return answer(*given)

    monkeypatch.setattr(toy.ToyCaptioner, "answer", counted)
    for late in service.post_at_once(CAPTION, [PAIR] * 8):
        assert (late.status_code, late.json()["error"]) == (503, "timed_out")
        assert "retry-after" in late.headers
    service.run(asyncio.sleep(10 * COMPUTE_S))
    assert service.models.current.under_way == 0
    assert len(captioned) < 8, "pairs whose clients are gone were captioned"
    service.server.limits = service.cfg.model_copy(update={"answer_s": 60})
    assert service.post(CAPTION, **PAIR).status_code == 200, "the model goes on"


def test_a_token_is_needed_for_all_but_the_probes(serve):
    service = serve(token=TOKEN)
    for route in ("/", "/metrics", "/v1/models", "/docs", CAPTION, CHAT):
        for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": TOKEN}):
            answer = (service.post if route in (CAPTION, CHAT) else service.get)(route, headers=headers)
            assert answer.status_code == 401, route
            assert answer.headers["www-authenticate"] == "Bearer"
    assert {service.get(route).status_code for route in ("/healthz", "/readyz")} == {200}
    right = {"Authorization": f"Bearer {TOKEN}", "Host": "captions.example.com"}
    assert service.post(CAPTION, **PAIR, headers=right).status_code == 200
    assert service.get("/metrics", headers=right).status_code == 200


def test_without_a_token_a_page_of_another_site_is_not_let_in(serve):
    service = serve()
    foreign = {"Host": ("evil.example.com", "127.0.0.1.example.com:80"), "Origin": ("https://evil.example.com", "null")}
    own = {"Host": ("localhost:8000",), "Origin": ("http://127.0.0.1:8000",)}
    for sites, status in ((foreign, 403), (own, 200)):
        for header, site in [(header, site) for header, given in sites.items() for site in given]:
            assert service.post(CAPTION, **PAIR, headers={header: site}).status_code == status, site


def test_what_breaks_inside_fails_its_own_batch_alone_tells_nothing_of_this_machine_and_all_is_counted(serve):
    """The batch of a dead worker: each of its requests is answered, and so is the next."""
    service = serve()
    for answer in service.post_at_once(CAPTION, [form(BEFORE, AFTER, question="Break down?")] * 3):
        assert (answer.status_code, answer.json()["error"]) == (500, "failed")
        assert "/var/model" not in answer.text
    for request, status in ((PAIR, 200), (form(BEFORE, b""), 422)):
        assert service.post(CAPTION, **request).status_code == status
    service.get("/some/path/of/a/client")
    lines = service.get("/metrics").text.splitlines()
    for line in (
        'm3diff_requests_total{route="/caption",status="500"} 3.0',
        'm3diff_requests_total{route="/caption",status="200"} 1.0',
        'm3diff_requests_total{route="/caption",status="422"} 1.0',
        'm3diff_requests_total{route="other",status="404"} 1.0',
        'm3diff_request_seconds_count{route="/caption"} 5.0',
        "m3diff_batch_pairs_count 1.0",
        "m3diff_queue_length 0.0",
        'm3diff_model{version="m3diff/1"} 1.0',
    ):
        assert line in lines


def test_a_version_takes_over_while_requests_run_and_none_is_lost(tmp_path, serve):
    service = serve()

    async def ask(number: int) -> dict[str, Any]:
        await asyncio.sleep(number * COMPUTE_S / 4)
        answer = await service.ask("POST", CAPTION, **PAIR)
        assert answer.headers["x-model-version"] == answer.json()["model"]
        return answer.json()

    async def main() -> list[dict[str, Any]]:
        asking = asyncio.gather(*(ask(number) for number in range(40)))
        await asyncio.sleep(4 * COMPUTE_S)
        await service.models.switch(source(toy.write_toy(tmp_path / "other", "other"), 2))
        answers = await asking
        await asyncio.gather(*service.models.removing)
        return answers

    found = {(answer["model"], answer["caption"].partition(":")[0]) for answer in service.run(main())}
    assert found == {("m3diff/1", "one"), ("m3diff/2", "other")}
    assert [local.removed for local in service.made] == [True, False]


def test_the_alias_is_followed_and_a_version_that_cannot_be_loaded_leaves_the_one_before(tmp_path, serve, capsys):
    service, alias = serve(), [1]
    folders = {n: toy.write_toy(tmp_path / word, word) for n, word in {2: "broken", 3: "cut off", 4: "third"}.items()}

    async def main() -> None:
        def find() -> Any:
            return source(folders[alias[0]], alias[0])

        following = asyncio.create_task(follow(service.models, lambda: f"m3diff/{alias[0]}", find, 0.02))
        for number, want in ((2, "m3diff/1"), (3, "m3diff/1"), (4, "m3diff/4")):
            alias[0] = number
            await asyncio.sleep(0.3)
            assert (await service.ask("POST", CAPTION, **PAIR)).json()["model"] == want
        following.cancel()

    service.run(main())
    printed = capsys.readouterr()
    for told in ("model.safetensors: sha256 differs", "model.safetensors: cut off; fetch"):
        assert printed.err.count(f"goes on with m3diff/1; the next version could not be had: {told}") == 1
    assert printed.out == "m3diff serve: answers now with m3diff/4\n"
    assert {each.removed for each in service.made[:-1]} == {True}, "no damaged one is left in memory"

"""Test the routes in this process: the answers, and each refusal with its status and text."""

import asyncio
import base64
import io
import json
import struct
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from PIL import Image
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from m3diff.models import FAMILIES
from m3diff.models.generation import QUESTION
from m3diff.models.sample_limits import TrainedOn
from m3diff.serving import batcher, limits
from m3diff.serving.batcher import OVERLAY_PX, RayDeployment
from m3diff.serving.model_card import ModelCard, TrainingData
from m3diff.serving.questions import NOTE, UNKNOWN_QUESTION_NOTE
from m3diff.serving.refusals import RequestRefusedError, respond
from m3diff.serving.server import follow_alias
from tests.serving import toy
from tests.serving.toy import COMPUTE_S, Service, base64_of, chat, form, image_part, plain, png, source, toy_caption
from tests.test_images import DAMAGES, PICTURE, damaged, tiff
from tests.tiny import noise_image

TOKEN = "0123456789abcdef0123"
BEFORE = png(plain(10, 20))
AFTER = png(plain(30, 40))
PAIR = form(BEFORE, AFTER)
CAPTION = "/caption"
CHAT = "/v1/chat/completions"
Serve = Callable[..., Service]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    folder = toy.write_toy(tmp_path / "one", "one")
    services = []

    def make_service(is_ready: bool = True, **changes: Any) -> Service:
        service = Service(**changes)
        services.append(service)
        if is_ready:
            service.run(service.models.switch(source(folder)))
        return service

    yield make_service
    for service in services:
        assert service.server.capacity.requests == 0, "a request did not free its place in the queue"
        assert service.server.capacity.reserved_bytes == 0, "a request did not free its memory"
        service.runner.close()


def content(answer: httpx.Response) -> str:
    return answer.json()["choices"][0]["message"]["content"]


CAPTION_REQUESTS = {
    "form": form(BEFORE, AFTER, question="Is it red?"),
    "JSON": {"json": {"before": base64_of(BEFORE), "after": base64_of(AFTER), "question": "Is it red?"}},
}


@pytest.mark.parametrize("request_", CAPTION_REQUESTS.values(), ids=CAPTION_REQUESTS)
def test_a_form_and_json_are_answered_with_the_caption_and_its_version(request_, serve):
    answer = serve().post(CAPTION, **request_)
    caption = toy_caption("one", "Is it red?", "10/20/0", "30/40/0")
    assert answer.json() == {"caption": caption, "model": "m3diff/1", "note": NOTE}
    assert answer.headers["x-model-version"] == "m3diff/1"


@pytest.mark.parametrize("model", ["m3diff", "m3diff/1"])
def test_a_chat_is_answered_with_the_caption_and_its_version(model, serve):
    request = chat(BEFORE, AFTER, "Is it red?", temperature=0, max_tokens=64, model=model)
    answer = serve().post(CHAT, json=request)
    assert answer.headers["x-model-version"] == "m3diff/1"
    assert answer.json()["model"] == "m3diff/1"
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"] == toy_caption("one", "Is it red?", "10/20/0", "30/40/0")
    assert choice["index"] == 0
    assert choice["finish_reason"] == "stop"


def test_the_usage_of_a_chat_adds_up(serve):
    usage = serve().post(CHAT, json=chat(BEFORE, AFTER)).json()["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize(
    ("before", "after", "colours"),
    [(BEFORE, AFTER, ("10/20/0", "30/40/0")), (AFTER, BEFORE, ("30/40/0", "10/20/0"))],
    ids=["in order", "exchanged"],
)
def test_the_image_before_comes_first_and_the_question_has_a_default(before, after, colours, serve):
    service = serve()
    caption = toy_caption("one", QUESTION, *colours)
    assert service.post(CAPTION, **form(before, after)).json()["caption"] == caption
    assert content(service.post(CHAT, json=chat(before, after))) == caption


def test_many_requests_share_batches_and_each_gets_its_own_answer(serve):
    service = serve(batch_pairs=8)
    requests = []
    captions = []
    overlays = []
    for number in range(40):
        before, after = ((value % 256, value // 256, 7) for value in (2 * number, 2 * number + 1))
        has_overlay = number % 3 == 0
        requests.append(form(png(plain(*before)), png(plain(*after)), **({"overlay": "true"} if has_overlay else {})))
        captions.append(toy_caption("one", QUESTION, "/".join(map(str, before)), "/".join(map(str, after))))
        overlays.append(has_overlay)
    answers = [answer.json() for answer in service.post_at_once(CAPTION, requests)]
    assert [answer["caption"] for answer in answers] == captions
    assert ["overlay" in answer for answer in answers] == overlays
    metrics = service.get("/metrics").text
    assert 'm3diff_batch_pairs_bucket{le="1.0"} 40.0' not in metrics, "no pair shared a batch"
    assert 'm3diff_batch_pairs_bucket{le="8.0"} 40.0' in metrics, "a batch had more than batch_pairs"


def test_overlays_are_large_enough_to_be_seen_and_show_outlines(serve):
    large = png(plain(200, 200, 200, (3000, 1500)))
    overlay = serve().post(CAPTION, **form(BEFORE, large, overlay="true")).json()["overlay"]
    before, after = (Image.open(io.BytesIO(base64.b64decode(overlay[side]))) for side in ("before", "after"))
    assert before.size == (22 * 32, 22 * 24)
    assert after.size == (OVERLAY_PX, OVERLAY_PX // 2)
    assert len(after.getcolors() or ()) > 1, "a plain image has no second colour but its outlines"
    assert after.getpixel((2, 2)) == (200, 200, 200)


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


def parts(*content: Any, **options: Any) -> dict[str, Any]:
    """Return a chat request with one user message."""
    return messages({"role": "user", "content": list(content)}, **options)


def messages(*chat_messages: Any, **options: Any) -> dict[str, Any]:
    """Return a chat request."""
    return {"json": {"model": "m3diff", "messages": list(chat_messages)} | options}


FORM = "multipart/form-data"
BASE64 = base64_of(AFTER)
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
LARGE_TILES = tiff(PICTURE.astype("uint8"), tile=[20_000])
IMAGE, SECOND_IMAGE = chat(BEFORE, AFTER)["messages"][0]["content"]
URL = IMAGE["image_url"]["url"]
TEXT = {"type": "text", "text": "What?"}
USER = {"role": "user", "content": [IMAGE] * 2}
WHERE = "messages.0.content: before: "
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no image": (form(b"GIF or not", AFTER), "not_an_image", "before: 10 bytes, is text, not an image"),
    "nothing": (form(BEFORE, b""), "not_an_image", "after: 0 bytes"),
    "PostScript": (form(EPS, AFTER), "not_an_image", "is of no known image format"),
    "a bomb": (form(bomb(9000, 9000), AFTER), "too_many_pixels", "9000x9000 pixels, 81,000,000 padded to a square; at"),
    "a line": (form(png(Image.new("1", (1, 30_000))), AFTER), "too_many_pixels", "before: has 1x30000 pixels"),
    "large tiles": (
        form(tiff(PICTURE.astype("uint8"), tile=[20_000]), AFTER),
        "too_many_pixels",
        "before: has tiles of 400,000,000 pixels; at most",
    ),
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
    "chat: three images": (parts(TEXT, IMAGE, IMAGE, IMAGE), "wrong_parts", "3 images, 1 text; messages of"),
    "chat: two texts": (
        parts(TEXT, IMAGE, IMAGE, TEXT),
        "wrong_parts",
        "2 images, 2 texts: messages.0 has 2 texts",
    ),
    "chat: an address": (parts(image_part("https://a.com/a.png"), IMAGE), "not_base64", f"{WHERE}https://a.com/a.png"),
    "chat: a file's": (parts(image_part("file:///etc/passwd"), IMAGE), "not_base64", f"{WHERE}file:///etc/passwd"),
    "chat: two messages": (
        messages({**USER, "content": [IMAGE]}, {**USER, "content": [SECOND_IMAGE]}),
        "wrong_parts",
        "2 messages",
    ),
    "chat: a system's": (messages({**USER, "role": "system"}, USER), "invalid_field", "messages.0.role: system"),
    "chat: no message": (messages(), "wrong_parts", "messages: 0 messages"),
    "chat: a stream": (parts(IMAGE, IMAGE, stream=True), "invalid_field", "stream: True"),
    "chat: a special token": (parts(TEXT | {"text": "<image>"}, IMAGE, IMAGE), "special_token", "'<image>'"),
}
"""By name: a request, the code of its refusal, and a part of its text."""

REFUSED_CHATS = {name: case for name, case in REFUSED.items() if name.startswith("chat: ")}
REFUSED_PAIRS = {name: case for name, case in REFUSED.items() if name not in REFUSED_CHATS}


@pytest.mark.parametrize(("request_", "code", "words"), REFUSED_PAIRS.values(), ids=REFUSED_PAIRS)
def test_an_invalid_request_is_refused_with_finding_limit_and_remedy(request_, code, words, serve):
    answer = serve().post(CAPTION, **request_)
    assert answer.status_code == 422, answer.text
    refusal = answer.json()
    assert code in refusal["error"]
    assert words in f"{refusal['field']}: {refusal['found']}; {refusal['limit']}; {refusal['remedy']}"
    assert refusal["limit"] != ""
    assert refusal["remedy"] != ""


@pytest.mark.parametrize(("request_", "code", "words"), REFUSED_CHATS.values(), ids=REFUSED_CHATS)
def test_an_invalid_chat_is_refused_in_openais_format(request_, code, words, serve):
    answer = serve().post(CHAT, **request_)
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code
    assert words in error["message"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["JPEG2000", "PNG", "tiff_lzw"])
def test_a_damaged_image_is_refused_or_read_and_breaks_nothing(kind, serve):
    answers = serve(max_queue=DAMAGES).post_at_once(CAPTION, [form(data, AFTER) for data in damaged(kind)])
    assert {answer.status_code for answer in answers} <= {200, 422}


LINES = [
    image_part(url[:60] + end + url[60:] + end)
    for url, end in ((URL, "\n"), (SECOND_IMAGE["image_url"]["url"], "\r\n"))
]


HARMLESS_CHATS = {
    "options": parts(IMAGE, SECOND_IMAGE, n=1, stream=False, stop=None, tools=[], temperature=0.7, max_tokens=3),
    "names and details": messages(
        {"role": "user", "name": "ann", "content": [image_part(URL, detail=None), SECOND_IMAGE]}
    ),
    "base64 in lines": parts(*LINES),
}


@pytest.mark.parametrize("request_", HARMLESS_CHATS.values(), ids=HARMLESS_CHATS)
def test_chat_options_that_do_not_change_the_caption_are_accepted(request_, serve):
    answer = serve().post(CHAT, **request_)
    assert answer.status_code == 200, answer.text
    assert content(answer) == toy_caption("one", QUESTION, "10/20/0", "30/40/0")


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
def test_an_option_that_asks_for_anything_but_a_caption_is_refused(name, value, serve):
    answer = serve().post(CHAT, **parts(IMAGE, SECOND_IMAGE, **{name: value}))
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
def test_the_default_options_of_clients_change_no_caption(options, serve):
    answer = serve().post(CHAT, **parts(IMAGE, SECOND_IMAGE, **options))
    assert answer.status_code == 200, answer.text
    assert content(answer) == toy_caption("one", QUESTION, "10/20/0", "30/40/0")


@pytest.mark.parametrize("name", ["m3diff", "m3diff/1", "m3diff%2F1"])
def test_a_model_is_described_by_the_version_and_by_the_registered_name(name, serve):
    answer = serve().get(f"/v1/models/{name}")
    assert answer.status_code == 200
    decoded_name = name.replace("%2F", "/")
    assert answer.json() == {"id": decoded_name, "object": "model", "created": 0, "owned_by": "m3diff"}
    assert answer.headers["x-model-version"] == "m3diff/1"


@pytest.mark.parametrize("name", ["gpt-4o", "m3diff/2", "M3DIFF", "m3diff/1/", "%00", "x" * 3000])
def test_a_model_that_is_not_served_is_not_found_in_openais_form(name, serve):
    answer = serve().get(f"/v1/models/{name}")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] in ("model_not_found", "no_such_route")
    assert error["type"] == "invalid_request_error"


def test_the_refusal_of_an_unknown_model_suggests_the_registered_name(serve):
    error = serve().get("/v1/models/gpt-4o").json()["error"]
    assert error["param"] == "model"
    assert error["message"].endswith("; ask for m3diff")


def test_no_model_is_described_before_one_is_loaded(serve):
    service = serve(is_ready=False)
    assert service.get("/v1/models/m3diff").status_code == 503
    assert service.get("/v1/models/m3diff", headers={"Host": "evil.example.com"}).status_code == 403
    assert serve(token=TOKEN).get("/v1/models/m3diff").status_code == 401


def test_a_slash_after_the_list_of_models_is_the_list(serve):
    service = serve()
    assert service.get("/v1/models/").json() == service.get("/v1/models").json()


@pytest.mark.parametrize(
    ("route", "request_"),
    [(CAPTION, form(BEFORE, AFTER, question="Is it gone?")), (CHAT, parts(TEXT, IMAGE, IMAGE))],
    ids=["form", "chat"],
)
def test_a_question_to_a_model_that_reads_no_questions_is_refused(route, request_, serve, monkeypatch):
    monkeypatch.setattr(toy.ToyCaptioner, "family", FAMILIES["blip2idc"])
    answer = serve().post(route, **request_)
    assert answer.status_code == 422
    assert "question_not_read" in answer.text


@pytest.mark.parametrize(("route", "request_"), [(CAPTION, PAIR), (CHAT, parts(IMAGE, IMAGE))], ids=["form", "chat"])
def test_a_model_that_reads_no_question_answers_without_one(route, request_, serve, monkeypatch):
    monkeypatch.setattr(toy.ToyCaptioner, "family", FAMILIES["blip2idc"])
    assert serve().post(route, **request_).status_code == 200


QUESTION_REQUESTS = {
    "form": lambda question: (CAPTION, form(BEFORE, AFTER, question=question)),
    "JSON": lambda question: (CAPTION, as_json(question=question)),
    "chat": lambda question: (CHAT, {"json": chat(BEFORE, AFTER, question)}),
}


@pytest.mark.parametrize("kind", QUESTION_REQUESTS)
@pytest.mark.parametrize(("question", "note"), [("Is a cup gone?", NOTE), ("What has changed?", None)])
def test_a_question_that_asks_something_else_is_noted_in_the_answer(kind, question, note, serve):
    route, request = QUESTION_REQUESTS[kind](question)
    assert serve().post(route, **request).json().get("note") == note


@pytest.mark.parametrize(
    ("route", "request_"), [(CAPTION, form(BEFORE, AFTER)), (CHAT, parts(IMAGE, SECOND_IMAGE))], ids=str
)
def test_an_answer_without_a_question_has_no_note(route, request_, serve):
    assert "note" not in serve().post(route, **request_).json()


@pytest.mark.parametrize(
    ("route", "request_"), [(CAPTION, form(BEFORE, AFTER)), (CHAT, parts(IMAGE, SECOND_IMAGE))], ids=str
)
def test_a_request_without_a_question_asks_the_question_of_the_training(route, request_, serve, monkeypatch):
    monkeypatch.setattr(toy.ToyCaptioner, "question", "How many are new?")
    monkeypatch.setattr(toy.ToyCaptioner, "trained_on", TrainedOn("How many are new?"))
    answer = serve().post(route, **request_)
    assert "(How many are new?)" in answer.text
    assert "note" not in answer.json()
    assert serve().get("/model").json()["question"] == "How many are new?"


def test_an_answer_of_a_model_whose_question_is_unknown_has_a_note(serve, monkeypatch):
    monkeypatch.setattr(toy.ToyCaptioner, "trained_on", TrainedOn())
    assert serve().post(CAPTION, **PAIR).json()["note"] == UNKNOWN_QUESTION_NOTE
    monkeypatch.setattr(toy.ToyCaptioner, "family", FAMILIES["blip2idc"])
    assert "note" not in serve().post(CAPTION, **PAIR).json(), "the model reads no question"


def test_the_card_of_the_current_model_is_served(serve):
    data = TrainingData(dataset="minichange", is_drawn=True, pairs=2564)
    card = {"family": "m3diff", "date": "2026-11-28", "trained_on": (data,)}
    served_card = serve(card=card).get("/model").json()
    abilities = {"reads_question": True, "question": QUESTION, "images": [2], "turns": 1, "outlines": True}
    assert served_card == ModelCard("m3diff/1", **card).as_dict() | abilities
    assert served_card["version"] == "1"
    assert served_card["knows_photographs"] is False


def test_a_model_answers_while_its_card_is_still_looked_up(serve, monkeypatch, tmp_path):
    service = serve(is_ready=False)
    is_looked_up = threading.Event()

    def describe(source: Any) -> ModelCard:
        is_looked_up.wait(60)
        return ModelCard(source.name, family="m3diff")

    monkeypatch.setattr(service.models, "describe", describe)
    service.run(service.models.switch(source(toy.write_toy(tmp_path, "one"))))
    assert service.post(CAPTION, **PAIR).status_code == 200
    is_looked_up.set()
    assert service.get("/model").json()["family"] == "m3diff"


def test_there_are_no_card_and_no_examples_before_a_model_is_loaded(serve):
    service = serve(is_ready=False)
    assert service.get("/model").status_code == 503
    assert service.get("/examples").json() == []


def test_a_model_that_reads_no_question_says_so_in_its_card(serve, monkeypatch):
    monkeypatch.setattr(toy.ToyCaptioner, "family", FAMILIES["blip2idc"])
    assert serve().get("/model").json()["reads_question"] is False


def test_a_chat_with_another_model_is_not_found(serve):
    answer = serve().post(CHAT, json=chat(BEFORE, AFTER, model="gpt-4o"))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_the_list_of_models_has_the_current_version(serve):
    assert [entry["id"] for entry in serve().get("/v1/models").json()["data"]] == ["m3diff/1"]


@pytest.mark.parametrize("path", ["/nothing", "/examples/no-key/before", "/v1caption"])
def test_an_unknown_route_is_named_and_said_not_to_exist(path, serve):
    answer = serve().get(path)
    assert answer.status_code == 404
    assert answer.json()["error"] == "no_such_route"
    assert answer.json()["found"] == f"GET {path}: there is no such route"


@pytest.mark.parametrize("path", ["/", "/model", "/v1/models", "/nothing"])
def test_no_browser_keeps_an_answer_or_shows_it_on_a_page_of_another_site(path, serve):
    headers = serve().get(path).headers
    assert headers["cache-control"] == "no-store"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_an_unknown_route_of_openais_api_is_refused_in_its_form(serve):
    answer = serve().post("/v1/caption", **PAIR)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "no_such_route"
    assert answer.json()["error"]["message"].startswith("POST /v1/caption: there is no such route; ")


def test_the_path_of_an_unknown_route_is_cut(serve):
    body = serve().get("/" + "x" * 5000).json()
    assert body["found"] == f"GET /{'x' * 99}: there is no such route"


def test_another_method_is_refused_with_the_one_that_is_allowed(serve):
    answer = serve().get(CAPTION)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["found"] == "GET /caption: this path has no such method"
    assert answer.json()["limit"] == "the methods of this path: POST"


def test_a_server_without_a_model_is_healthy_and_not_ready(serve):
    service = serve(is_ready=False)
    assert service.get("/healthz").status_code == 200
    for answer in (service.get("/readyz"), service.get("/v1/models"), service.post(CAPTION, **PAIR)):
        assert answer.status_code == 503
        assert "retry-after" in answer.headers


def test_a_request_before_the_model_is_loaded_is_told_what_happens_and_how_to_wait(serve):
    service = serve(is_ready=False)
    body = service.post(CAPTION, **PAIR).json()
    assert body["error"] == "not_ready"
    assert body["field"] is None
    assert "is still loading" in body["found"]
    assert "GET /readyz" in body["remedy"]
    assert "Retry-After" in body["remedy"]
    error = service.get("/v1/models").json()["error"]
    assert error["code"] == "not_ready"
    assert error["message"] == f"{body['found']}; {body['limit']}; {body['remedy']}"


async def sent(part: bytes, count: int, pause_s: float = 0) -> AsyncIterator[bytes]:
    """Yield the parts of a body whose length is not announced."""
    for _ in range(count):
        yield part
        await asyncio.sleep(pause_s)


def test_a_request_of_too_many_bytes_is_refused(serve):
    service = serve(max_request_mb=1)
    for body in (bytes(3_000_000), sent(bytes(100_000), 30)):
        answer = service.post(CAPTION, **typed(body))
        assert answer.status_code == 413
        assert answer.json()["limit"] == "at most 1 MB a request (serve.max_request_mb)"


def test_the_rest_of_a_request_of_too_many_bytes_is_read_up_to_a_limit(serve, monkeypatch):
    monkeypatch.setattr(limits, "DISCARDED_BYTES", 500_000)
    sent_parts = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent_parts
        async for part in sent(bytes(100_000), 30):
            sent_parts += 1
            yield part

    assert serve(max_request_mb=1).post(CAPTION, **typed(body())).status_code == 413
    assert sent_parts == 16, "11 parts until the limit is exceeded, and 5 that are discarded"


def test_a_chat_of_too_many_bytes_is_refused_in_openais_form(serve):
    answer = serve(max_request_mb=1).post(CHAT, content=bytes(3_000_000))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "too_large"


def test_a_request_that_arrives_too_slowly_is_refused_in_time(serve, monkeypatch):
    service = serve(max_request_mb=1)
    monkeypatch.setattr(limits, "UPLOAD_S", 0.3)
    start = time.monotonic()
    answer = service.post(CAPTION, **typed(sent(b"x", 50, 0.05)))
    assert answer.status_code == 408
    assert answer.json()["error"] == "slow_client"
    assert answer.headers["connection"] == "close"
    assert time.monotonic() - start < 2, "it waited for the client's end"


def test_a_full_queue_refuses_at_once_and_loses_no_other_request(serve):
    service = serve(max_queue=3)
    answers = service.post_at_once(CAPTION, [PAIR] * 12)
    refusals = [answer for answer in answers if answer.status_code == 429]
    assert len(refusals) == 9
    assert [answer.status_code for answer in answers].count(200) == 3
    assert refusals[0].headers["retry-after"] == "1"
    assert refusals[0].json()["limit"] == "at most 3 at a time (serve.max_queue)"
    assert service.post(CAPTION, **PAIR).status_code == 200


def test_the_length_of_the_queue_counts_a_request_in_progress(serve):
    service = serve()

    async def metrics_meanwhile() -> httpx.Response:
        upload = limits.Upload(lambda: asyncio.sleep(0, {}), Headers(), service.cfg)
        with service.server.capacity.reserve(upload):
            return await service.ask("GET", "/metrics")

    assert "m3diff_queue_length 1.0" in service.run(metrics_meanwhile()).text.splitlines()


def large_image() -> bytes:
    """Return an image of 0.75 MB. The copies of a request with it take 3 MB; seven requests of 1 MB may take 7 MB."""
    return png(noise_image(1, (500, 500)))


def test_requests_that_need_more_memory_than_is_free_are_refused_unread(serve):
    service = serve(max_queue=7, max_request_mb=1)
    requests = [form(large_image(), BEFORE)] * 6
    answers = sorted(service.post_at_once(CAPTION, requests), key=lambda answer: answer.status_code)
    assert [answer.status_code for answer in answers] == [200, 200, 503, 503, 503, 503]
    assert answers[-1].headers["retry-after"]
    assert answers[-1].json()["error"] == "memory_full"
    assert "max_queue x serve.max_request_mb" in answers[-1].json()["limit"]


def test_small_requests_need_little_memory(serve):
    service = serve(max_queue=7, max_request_mb=1)
    assert {answer.status_code for answer in service.post_at_once(CAPTION, [PAIR] * 6)} == {200}


def test_requests_of_no_announced_size_need_the_memory_of_the_largest(serve):
    service = serve(max_queue=7, max_request_mb=1)
    body = json.dumps({"before": base64_of(BEFORE), "after": base64_of(AFTER)}).encode()
    answers = service.post_at_once(CAPTION, [typed(sent(body, 1)) for _ in range(4)])
    assert sorted(answer.status_code for answer in answers) == [200, 503, 503, 503]


def test_the_largest_request_is_answered_however_short_the_queue_is(serve):
    service = serve(max_queue=1, max_request_mb=1)
    assert service.post(CAPTION, **form(large_image(), BEFORE)).status_code == 200


def test_a_request_that_takes_all_memory_is_accepted_and_a_byte_more_is_refused():
    cfg = toy.PARAMS.serve.model_copy(update={"max_queue": limits.COPIES})
    capacity = limits.Capacity(cfg, batcher.Metrics())

    def upload(size: int) -> Any:
        return SimpleNamespace(expected_bytes=size, max_bytes=1000)

    async def reserve_twice() -> None:
        with capacity.reserve(upload(1000)):
            assert capacity.reserved_bytes == limits.COPIES * 1000
            with pytest.raises(RequestRefusedError), capacity.reserve(upload(1)):
                pass
        assert capacity.reserved_bytes == 0

    asyncio.run(reserve_twice())


def test_an_answer_that_takes_too_long_is_cancelled(serve, monkeypatch):
    service = serve(answer_s=COMPUTE_S / 4, batch_pairs=1)
    captioned = []
    answer = toy.ToyCaptioner.answer

    def count_and_answer(*arguments: Any) -> Any:
        captioned.append(1)
        return answer(*arguments)

    monkeypatch.setattr(toy.ToyCaptioner, "answer", count_and_answer)
    for refusal in service.post_at_once(CAPTION, [PAIR] * 8):
        assert refusal.status_code == 503
        assert refusal.json()["error"] == "timed_out"
        assert "retry-after" in refusal.headers
    service.run(asyncio.sleep(10 * COMPUTE_S))
    assert service.models.current.requests == 0
    assert len(captioned) < 8, "pairs whose clients are gone were captioned"
    service.server.settings = service.cfg.model_copy(update={"answer_s": 60})
    assert service.post(CAPTION, **PAIR).status_code == 200, "the model goes on"


class EndlessResponse:
    """The response of a replica on a cluster that never answers."""

    is_cancelled = False

    def __await__(self) -> Any:
        return asyncio.Event().wait().__await__()

    def cancel(self) -> None:
        self.is_cancelled = True


def test_a_question_to_a_cluster_is_cancelled_if_nobody_waits_for_it_any_more():
    response = EndlessResponse()
    deployment = RayDeployment.__new__(RayDeployment)
    deployment.handle = SimpleNamespace(ask=SimpleNamespace(remote=lambda request: response))
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(deployment.ask(None), 0.01))
    assert response.is_cancelled


OTHER_TOKENS = {
    "no token": {},
    "another token": {"Authorization": f"Bearer {TOKEN}x"},
    "no scheme": {"Authorization": TOKEN},
}


@pytest.mark.parametrize("headers", OTHER_TOKENS.values(), ids=OTHER_TOKENS)
@pytest.mark.parametrize("route", ["/", "/metrics", "/v1/models", "/docs", CAPTION, CHAT])
def test_a_route_is_refused_without_the_token(route, headers, serve):
    service = serve(token=TOKEN)
    answer = (service.post if route in (CAPTION, CHAT) else service.get)(route, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("route", ["/healthz", "/readyz"])
def test_probes_need_no_token(route, serve):
    assert serve(token=TOKEN).get(route).status_code == 200


def test_with_the_token_a_request_by_any_name_is_answered(serve):
    service = serve(token=TOKEN)
    headers = {"Authorization": f"Bearer {TOKEN}", "Host": "captions.example.com"}
    assert service.post(CAPTION, **PAIR, headers=headers).status_code == 200
    assert service.get("/metrics", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("Host", "evil.example.com", 403),
        ("Host", "127.0.0.1.example.com:80", 403),
        ("Origin", "https://evil.example.com", 403),
        ("Origin", "null", 403),
        ("Origin", "chrome-extension://127.0.0.1:8000", 403),
        ("Origin", "http://localhost:8000", 403),
        ("Host", "localhost:8000", 200),
        ("Origin", "http://127.0.0.1:8000", 200),
    ],
)
def test_without_a_token_a_page_of_another_site_is_refused(header, value, status, serve):
    assert serve().post(CAPTION, **PAIR, headers={header: value}).status_code == status


def break_down(service: Service) -> list[httpx.Response]:
    """Send three requests that share a batch in which the model fails."""
    return service.post_at_once(CAPTION, [form(BEFORE, AFTER, question="Break down?")] * 3)


def test_an_internal_error_fails_only_its_batch_and_names_no_files(serve):
    service = serve()
    for answer in break_down(service):
        assert answer.status_code == 500
        assert answer.json()["error"] == "failed"
        assert "/var/model" not in answer.text
    assert service.post(CAPTION, **PAIR).status_code == 200, "the next batch is captioned"


def test_every_answer_is_counted(serve):
    service = serve()
    break_down(service)
    assert service.post(CAPTION, **PAIR).status_code == 200
    assert service.post(CAPTION, **form(BEFORE, b"")).status_code == 422
    service.get("/some/path/of/a/client")
    service.get("/v1/models/m3diff/1")
    service.get("/examples/unknown/before")
    service.post("/examples/unknown/before")
    lines = service.get("/metrics").text.splitlines()
    for line in (
        'm3diff_requests_total{route="/caption",status="500"} 3.0',
        'm3diff_requests_total{route="/caption",status="200"} 1.0',
        'm3diff_requests_total{route="/caption",status="422"} 1.0',
        'm3diff_requests_total{route="other",status="404"} 1.0',
        'm3diff_requests_total{route="/v1/models/{name}",status="200"} 1.0',
        'm3diff_requests_total{route="/examples/{key}/{side}",status="404"} 1.0',
        'm3diff_requests_total{route="/examples/{key}/{side}",status="405"} 1.0',
        'm3diff_request_seconds_count{route="/caption"} 5.0',
        'm3diff_request_seconds_bucket{le="60.0",route="/caption"} 5.0',
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

    models_and_words = {(answer["model"], answer["caption"].partition(":")[0]) for answer in service.run(main())}
    assert models_and_words == {("m3diff/1", "one"), ("m3diff/2", "other")}
    assert [replica.removed for replica in service.replicas] == [True, False]


def test_the_alias_is_followed_past_versions_that_cannot_be_loaded(tmp_path, serve, capsys):
    service = serve()
    alias = [1]
    folders = {n: toy.write_toy(tmp_path / word, word) for n, word in {2: "broken", 3: "cut off", 4: "third"}.items()}

    async def main() -> None:
        def find() -> Any:
            return source(folders[alias[0]], alias[0])

        following = asyncio.create_task(follow_alias(service.models, lambda: f"m3diff/{alias[0]}", find, 0.02))
        for number, want in ((2, "m3diff/1"), (3, "m3diff/1"), (4, "m3diff/4")):
            alias[0] = number
            await asyncio.sleep(0.3)
            assert (await service.ask("POST", CAPTION, **PAIR)).json()["model"] == want
        following.cancel()

    service.run(main())
    printed = capsys.readouterr()
    for cause in ("model.safetensors: sha256 differs", "model.safetensors: cut off; fetch"):
        assert printed.err.count(f"keeps answering with m3diff/1; cannot load the next version: {cause}") == 1
    assert printed.out == "m3diff serve: now answers with m3diff/4\n"
    assert service.models.metrics.poll_failures._value.get() >= 2
    assert {replica.removed for replica in service.replicas[:-1]} == {True}, "no damaged one is left in memory"


@pytest.mark.parametrize(
    ("status", "error_type"),
    [
        (401, "authentication_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_an_error_of_the_openai_api_has_the_type_of_its_status(status, error_type):
    error = RequestRefusedError(status, "a_code", "what was found", "what is allowed", "what to do")
    assert json.loads(error.response(CHAT).body)["error"]["type"] == error_type


def test_a_client_that_has_gone_is_no_error_of_the_server():
    request = Request({"type": "http", "method": "POST", "path": CAPTION, "headers": []})
    assert asyncio.run(respond(request, ClientDisconnect())).status_code == 499


def test_the_metrics_name_the_version_that_answers_and_count_the_switches(tmp_path, serve):
    service = serve()
    service.run(service.models.switch(source(toy.write_toy(tmp_path / "other", "other"), 2)))
    lines = service.get("/metrics").text.splitlines()
    assert [line for line in lines if line.startswith("m3diff_model{")] == ['m3diff_model{version="m3diff/2"} 1.0']
    assert "m3diff_model_switches_total 2.0" in lines

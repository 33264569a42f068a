"""Test the client of chat endpoints with a server on 127.0.0.1: it loses no answer and asks no question twice."""

import base64
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo
from pydantic import ValidationError

from m3diff.endpoint import client
from m3diff.endpoint.answers import (
    UNKNOWN_SERVER,
    AnswerStore,
    EndpointAnswer,
    OtherServerError,
    StoredAnswer,
    count_answers_by_server,
    describe_cache,
    other_server_error,
)
from m3diff.endpoint.client import REUSE_OPTION, Endpoint, describe_question
from m3diff.endpoint.questions import EndpointQuestion, data_url
from m3diff.endpoint.servers import ServerIdentity, read_server
from m3diff.endpoint.silence import SilenceWatch
from m3diff.endpoint.transport import EndpointError, RedirectError, http_client, redirect_error, redirect_target
from m3diff.endpoint.url import normalised_url
from m3diff.images.open import load_image
from m3diff.records.errors import Fault
from m3diff.records.sample import Turn
from m3diff.scoring.metrics.judge import JudgeSettings
from m3diff.settings.section import ParamsError, faults_of_validation_error
from m3diff.stages.augment.params import EndpointWriterSettings
from tests.chat import CUT_BODY, Server, chat_server
from tests.chat import Fault as ServerFault
from tests.errors import raises
from tests.tiny import noise_image

YES = ("text", "yes")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("A_KEY", "secret")
    with chat_server() as server:
        yield server


def endpoint(server: Server, folder: Path, **changes: Any) -> Endpoint:
    store = folder / "answers.jsonl"
    arguments = {"url": server.url, "model": "m", "key_variable": "A_KEY", "timeout_s": 20, "store": store}
    return Endpoint(**(arguments | changes))


def ask(server: Server, folder: Path, *texts: str, **changes: Any) -> list[EndpointAnswer]:
    return endpoint(server, folder, **changes).ask([EndpointQuestion(text) for text in texts], "test")


def picture(path: Path, color: str = "red") -> Path:
    Image.new("RGB", (4, 4), color).save(path)
    return path


WRITER = partial(EndpointWriterSettings, kind="endpoint", model="m")
JUDGE = partial(JudgeSettings, model="m")


def fault_of_value(error: ValidationError) -> Fault:
    """Return the fault of the only value that a section refused."""
    (details,) = error.errors()
    return details["ctx"]["error"].fault


SECTIONS = {"writer": WRITER, "judge": JUDGE}


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "https://api.example.org/v1", "http://[::1]:8000/v1"])
def test_a_section_takes_the_url_of_a_server(section, url):
    assert section(url=url).url == url


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
@pytest.mark.parametrize("url", ["https://me:sk-123@host/v1", "https://host/v1?key=sk-123", "https://host/v1#sk-123"])
def test_a_url_with_a_key_or_a_user_is_refused_and_not_repeated(section, url):
    with pytest.raises(ValidationError) as refused:
        section(url=url)
    assert fault_of_value(refused.value) == Fault("endpoint.url_with_key")
    (fault,) = faults_of_validation_error(refused.value, {}, EndpointWriterSettings)
    assert fault.fields["key"] == "url"
    assert "sk-123" not in repr(fault)
    assert "sk-123" not in str(fault)


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
@pytest.mark.parametrize(
    "url", ["ftp://host/v1", "host/v1", "http:///v1", "http://host:port/v1", "http://host/ v1", "http://[::1/v1"]
)
def test_a_url_of_no_server_is_refused(section, url):
    with pytest.raises(ValidationError) as refused:
        section(url=url)
    assert fault_of_value(refused.value) == Fault("endpoint.not_a_url", value=url)


@pytest.mark.parametrize("is_remote", [False, True])
def test_requests_to_this_machine_do_not_use_a_proxy(is_remote, server, tmp_path, monkeypatch):
    """A request to the same URL uses the proxy if the URL counts as another machine's."""
    for name in ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    if is_remote:
        monkeypatch.setattr("m3diff.endpoint.url.THIS_MACHINE", ())
    with chat_server("by the proxy") as proxy:
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))
        assert ask(server, tmp_path, "a?") == [("text", "by the proxy" if is_remote else "yes")]
        assert len(proxy.requests) == is_remote


def test_answers_come_in_the_order_of_the_questions_whatever_comes_first(server, tmp_path):
    server.replies = {f"question {number}": [f"answer {number}"] for number in range(9, -1, -1)}
    server.delay = 0.05
    answers = ask(server, tmp_path, *(f"question {number}" for number in range(10)))
    assert [answer.text for answer in answers] == [f"answer {number}" for number in range(10)]
    assert server.max_concurrent > 1
    assert server.keys == {"Bearer secret"}
    assert {(body["model"], body["temperature"]) for body in server.requests} == {("m", 0)}
    assert "secret" not in (tmp_path / "answers.jsonl").read_text()


def save_photograph(path: Path, size: tuple[int, int] = (96, 64), mode: str = "RGB", **options: Any) -> Path:
    exif = Image.Exif()
    text = PngInfo()
    exif[0x010F] = "A camera"
    exif[0x0112] = 6
    exif.get_ifd(0x8825).update({1: "N", 2: (52.0, 31.0, 12.0)})
    text.add_text("place", "at home")
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes() if mode == "RGB" else None
    image = noise_image(3, (6, 4)).resize(size).convert(mode)
    image.save(path, exif=exif, icc_profile=profile, comment="at home", pnginfo=text, **options)
    path.write_bytes(path.read_bytes() + b"a film")
    return path


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("a.jpg", "jpeg", {"size": (960, 640), "quality": 85}),
        ("a.png", "png", {}),
        ("see_through.png", "png", {"mode": "RGBA"}),
        ("grey.jpg", "png", {"mode": "L"}),
        ("cmyk.jpg", "png", {"mode": "CMYK"}),
    ],
)
def test_an_image_is_sent_as_the_projects_models_see_it_without_metadata(name, kind, options, tmp_path):
    path = save_photograph(tmp_path / name, **options)
    original = load_image(path)
    (head, _, text) = data_url(path).partition(";base64,")
    data = base64.b64decode(text)
    image = Image.open(io.BytesIO(data))
    assert head == f"data:image/{kind}"
    assert image.size == original.size
    assert image.mode == "RGB"
    assert original.height > original.width, "upright"
    difference = np.abs(np.asarray(image, dtype=int) - np.asarray(original, dtype=int))
    assert difference.mean() < (1 if kind == "jpeg" else 1e-9)
    assert not any(word in data for word in (b"A camera", b"at home", b"Exif", b"eXIf", b"ICC", b"iCCP", b"a film"))
    assert kind == "png" or len(data) < 1.1 * path.stat().st_size


def test_a_question_is_asked_once_in_one_run_and_in_the_next(server, tmp_path):
    answers = ask(server, tmp_path, "a?", "b?", "a?")
    assert sorted(server.texts) == ["a?", "b?"]
    assert ask(server, tmp_path, "b?", "a?", "c?")[:2] == [answers[1], answers[0]]
    assert sorted(server.texts) == ["a?", "b?", "c?"]


def test_the_key_of_an_answer_covers_the_whole_question_and_the_model(server, tmp_path):
    image = picture(tmp_path / "0.png", "red")
    same_image = picture(tmp_path / "1.png", "red")
    other_image = picture(tmp_path / "2.png", "blue")
    facts = {"text": "a?", "images": (image,)}
    first_key = endpoint(server, tmp_path).key(EndpointQuestion(**facts))
    for same_endpoint in (endpoint(server, tmp_path, url=f"{server.url}/"), endpoint(server, tmp_path, timeout_s=1)):
        assert same_endpoint.key(EndpointQuestion(**facts | {"images": (same_image,)})) == first_key
    changes = [{"text": "b?"}, {"system": "else"}, {"seed": 1}, {"n": 1}, {"images": (other_image,)}, {"images": ()}]
    changes += [{"history": (Turn("b?", "no"),)}, {"history": (Turn("b?", "yes"),)}]
    keys = [endpoint(server, tmp_path).key(EndpointQuestion(**facts | change)) for change in changes]
    keys += [
        endpoint(server, tmp_path, **change).key(EndpointQuestion(**facts))
        for change in ({"model": "o"}, {"max_tokens": 7})
    ]
    assert len({first_key, *keys}) == 11
    assert endpoint(server, tmp_path, max_tokens=7).ask([EndpointQuestion("a?")], "test") == [YES]
    assert server.requests[-1]["max_tokens"] == 7


def test_a_request_has_a_seed_and_a_limit_only_if_they_are_set(server, tmp_path):
    """Some servers reject null for a number."""
    ask(server, tmp_path, "a?")
    endpoint(server, tmp_path, max_tokens=7).ask([EndpointQuestion("b?", seed=0)], "test")
    plain_request, full_request = server.requests
    assert plain_request.keys() == {"model", "messages", "temperature"}
    assert full_request["seed"] == 0
    assert full_request["max_tokens"] == 7


def test_the_key_of_a_question_without_history_is_that_of_earlier_versions(server, tmp_path):
    facts = {"model": "m", "system": "", "question": "a?", "images": [], "seed": None, "n": 0, "max_tokens": None}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    assert endpoint(server, tmp_path, model="m").key(EndpointQuestion("a?")) == key


def test_the_turns_before_a_question_are_earlier_messages_and_the_images_come_first(server, tmp_path):
    images = (picture(tmp_path / "0.png", "red"), picture(tmp_path / "1.png", "blue"))
    history = (Turn("Is it red?", "Yes."), Turn("Why \ud83d?", "No \ud83d."))
    endpoint(server, tmp_path).ask([EndpointQuestion("a?", images, "Be brief.", history=history)], "test")
    system, question_1, answer_1, question_2, answer_2, question_3 = server.requests[0]["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert [part["type"] for part in question_1["content"]] == ["image_url", "image_url", "text"]
    assert [part["image_url"]["url"] for part in question_1["content"][:2]] == [data_url(image) for image in images]
    assert question_1["content"][2]["text"] == "Is it red?"
    assert answer_1 == {"role": "assistant", "content": "Yes."}
    assert question_2 == {"role": "user", "content": "Why ??"}
    assert answer_2 == {"role": "assistant", "content": "No ?."}
    assert question_3 == {"role": "user", "content": "a?"}


def test_a_temporary_rejection_is_retried_after_the_time_that_the_server_sets(server, tmp_path):
    server.retry_after = "0.4"
    server.replies = {"a?": [429, 503, "done"]}
    assert ask(server, tmp_path, "a?") == [("text", "done")]
    assert len(server.requests) == 3
    assert min(later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)) >= 0.4


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ({"content": None, "refusal": "I cannot"}, ("refused", "I cannot")),
        ({"content": "", "finish_reason": "content_filter"}, ("refused", "")),
        ((400, {"error": {"message": "not this", "code": "content_filter"}}), ("refused", None)),
        ({"content": None}, ("empty", "")),
        (" \n", ("empty", " \n")),
        (None, ("empty", "")),
        ({"content": None, "reasoning_content": "thought"}, ("empty", "thought")),
        ({"content": None, "reasoning": "thought"}, ("empty", "thought")),
        (
            {"content": [{"type": "text", "text": "The cup"}, {"type": "text", "text": " went."}]},
            ("text", "The cup went."),
        ),
        ({"content": '["half', "finish_reason": "length"}, ("cut", '["half')),
        ("<think>\nIs it [the] cup?\n</think>\n\nThe cup went.", ("text", "The cup went.")),
        ("Is it the cup?\n</think>\n\nThe cup went.", ("text", "The cup went.")),
        ("<think>\n\n</think>\n\n", ("empty", "")),
        ("<think>\nIs it the cup?", ("empty", "")),
        ({"content": "<think>\nIs it", "finish_reason": "length"}, ("cut", "")),
        ("They think the cup < 3 went.", ("text", "They think the cup < 3 went.")),
    ],
)
def test_refusals_empty_and_truncated_answers_are_told_apart_and_are_answers(reply, answer, server, tmp_path):
    server.replies = {"a?": [reply]}
    (stored,) = ask(server, tmp_path, "a?")
    assert stored.kind == answer[0]
    assert answer[1] in (None, stored.text)
    assert ask(server, tmp_path, "a?") == [stored]
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "error", "code"),
    [
        (401, ParamsError, "endpoint.refused"),
        (404, ParamsError, "endpoint.refused"),
        (500, EndpointError, "endpoint.failed"),
        (CUT_BODY, EndpointError, "endpoint.failed"),
        (b'"a page"', ParamsError, "endpoint.no_chat_completion"),
        ((200, {"detail": "Not Found"}), ParamsError, "endpoint.no_chat_completion"),
        ((200, {"error": {"message": "rate limited", "code": 429}}), EndpointError, "endpoint.error_reply"),
    ],
)
def test_a_reply_without_an_answer_ends_the_run_and_earlier_answers_stay(reply, error, code, server, tmp_path):
    ask(server, tmp_path, "a?")
    server.replies = {"b?": [reply]}
    with raises(error, code) as ended:
        ask(server, tmp_path, "a?", "b?")
    if code in ("endpoint.refused", "endpoint.failed"):
        assert ended.value.fields["url"] == server.url
        assert ended.value.fields["model"] == "m"
        assert ended.value.fields["names"] == ["'b?'"]
    if code == "endpoint.error_reply":
        assert "rate limited" in ended.value.fields["cause"]
    server.replies = {}
    assert ask(server, tmp_path, "a?", "b?") == [YES] * 2
    assert server.texts.count("a?") == 1


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 503])
def test_a_question_that_may_be_answered_later_is_no_error_of_the_user(status, server, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "RETRIES", 0)
    server.default = status
    with raises(EndpointError, "endpoint.failed", url=server.url, names=["'a?'"]):
        ask(server, tmp_path, "a?")


def test_a_form_that_the_server_always_rejects_is_the_users_error(server, tmp_path, monkeypatch):
    """A run of one question ends after it. A run of many questions ends before all of them are sent."""
    monkeypatch.setattr(client, "WINDOW", 8)
    server.replies = {"?": [(400, {"error": {"message": "no such field"}})]}
    with raises(ParamsError, "endpoint.refused", names=["'a?'"]) as refused:
        ask(server, tmp_path, "a?")
    assert "no such field" in refused.value.fields["cause"]
    with raises(ParamsError, "endpoint.refused"):
        ask(server, tmp_path, *(f"{number}?" for number in range(200)))
    assert len(server.requests) <= 1 + 8
    assert not (tmp_path / "answers.jsonl").exists()


@pytest.mark.parametrize(("slow_question", "status"), [("a?", 400), ("b?", 413), ("b?", 422)])
def test_a_single_rejected_question_is_refused_and_does_not_end_the_run(slow_question, status, server, tmp_path):
    server.replies = {"b?": [(status, {"error": {"message": "too long"}})]}
    server.delays = {slow_question: 0.2}
    answer, refusal = ask(server, tmp_path, "a?", "b?")
    assert answer == YES
    assert refusal.kind == "refused"
    assert "too long" in refusal.text
    assert ask(server, tmp_path, "b?", "a?") == [refusal, answer]
    assert len(server.requests) == 2
    server.replies["c?"] = [status]
    assert ask(server, tmp_path, "a?", "c?")[1].kind == "refused", "the other was answered in an earlier run"


def test_the_question_of_a_torn_line_is_asked_again_and_other_lines_stay(server, tmp_path):
    ask(server, tmp_path, "a?", "b?")
    store = tmp_path / "answers.jsonl"
    torn_text = json.loads(store.read_bytes().splitlines()[-1])["question"]
    store.write_bytes(store.read_bytes()[:-9])
    for _ in range(2):
        assert ask(server, tmp_path, "a?", "b?", "c?") == [YES] * 3
        assert sorted(server.texts) == sorted(["a?", "b?", torn_text, "c?"])


NO_ANSWERS = ["5", "[]", "null", '"a"', '{"key": "a"}', '{"key": "a", "kind": "text", "answer": null}']
NO_ANSWERS += ['{"key": [1], "kind": "text", "answer": "b"}', '{"key": "a", "kind": "other", "answer": "b"}']


def test_a_line_without_an_answer_is_skipped(tmp_path):
    store = tmp_path / "answers.jsonl"
    AnswerStore(store).store_answer("k", {}, EndpointAnswer("text", "yes"))
    store.write_text("\n".join([*NO_ANSWERS, store.read_text()]))
    assert AnswerStore(store).last_answers == {"k": YES}


class StoppedWatch(SilenceWatch):
    """A watch that ends the run at the second question."""

    begun_questions = 0

    def begin_question(self) -> bool:
        with self.condition:
            self.begun_questions += 1
            self.is_stopped = self.begun_questions > 1
            return super().begin_question()


def test_a_question_that_was_not_asked_counts_as_no_answer(server, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "SilenceWatch", StoppedWatch)
    server.default = 400
    with raises(ParamsError, "endpoint.refused", url=server.url):
        ask(server, tmp_path, "a?", "b?")
    assert not (tmp_path / "answers.jsonl").exists()


def test_the_last_answer_of_several_servers_is_the_last_in_the_file(tmp_path):
    path = tmp_path / "answers.jsonl"
    first_server = ServerIdentity("http://first/v1")
    second_server = ServerIdentity("http://second/v1")
    for server, text in ((first_server, "one"), (second_server, "two"), (first_server, "three")):
        AnswerStore(path).store_answer("k", {}, EndpointAnswer("text", text), server)
    store = AnswerStore(path)
    assert store.last_answers == {"k": ("text", "three")}
    assert [stored.server for stored in store.answers_to("k")] == [second_server, first_server]


def test_only_the_question_of_a_revoked_answer_is_asked_again(server, tmp_path):
    model = endpoint(server, tmp_path)
    questions = [EndpointQuestion("a?"), EndpointQuestion("b?")]
    server.replies = {"a?": ["first", "second"]}
    assert model.ask(questions, "test") == [("text", "first"), YES]
    model.forget(questions[:1])
    assert len(AnswerStore(model.answers.path).last_answers) == 1, "the file is updated, too"
    assert model.ask(questions, "test") == [("text", "second"), YES]
    assert ask(server, tmp_path, "a?", "b?") == [("text", "second"), YES]
    assert sorted(server.texts) == ["a?", "a?", "b?"]


def ask_many(url: str, folder: Path) -> None:
    ask(Server("", url=url), folder, *(f"question {number}." for number in range(60)))


@pytest.mark.slow
def test_after_a_kill_only_questions_without_a_stored_answer_are_asked(server, tmp_path):
    server.delay = 0.05
    asking = multiprocessing.get_context("spawn").Process(target=ask_many, args=(server.url, tmp_path))
    asking.start()
    while len(server.requests) < 20:
        time.sleep(0.01)
    os.kill(asking.pid, signal.SIGKILL)
    asking.join()
    time.sleep(0.2)
    stored_questions = {entry["question"] for entry in entries_of(tmp_path)}
    assert 8 <= len(stored_questions) < 60
    server.delay = 0
    ask_many(server.url, tmp_path)
    times = Counter(server.texts)
    assert len(times) == 60
    assert {times[text] for text in stored_questions} == {1}
    assert sum(times.values()) <= 60 + 8, "only questions in flight may be asked twice"


# Which server an answer belongs to


def models(name: str = "m", **fields: Any) -> dict[str, Any]:
    """Return the reply to `GET /v1/models`, with the model between two others."""
    entries = [{"id": "other", "root": "/else"}, {"id": name, "object": "model", **fields}, {"id": "last"}]
    return {"object": "list", "data": entries}


def entries_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def remove_fields(folder: Path, *names: str) -> None:
    """Rewrite the store as an earlier version of the module wrote it."""
    lines = [{name: value for name, value in entry.items() if name not in names} for entry in entries_of(folder)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_answer_is_stored_with_its_server_and_the_time(server, tmp_path):
    server.models = models(root="/weights/a", max_model_len=4096, created=17)
    ask(server, tmp_path, "a?")
    (entry,) = entries_of(tmp_path)
    assert entry["server"] == {"url": server.url, "id": "m", "root": "/weights/a", "max_model_len": 4096}
    assert datetime.now(UTC) - datetime.fromisoformat(entry["date"]) < timedelta(minutes=1)


@pytest.mark.parametrize(
    "listing",
    [
        404,
        501,
        503,
        200,
        b"<html>",
        b"[1]",
        {"data": None},
        {"data": []},
        {"data": [1, 2]},
        models("x"),
        ServerFault.HANG,
    ],
    ids=["404", "501", "503", "empty object", "page", "array", "null", "empty list", "numbers", "unlisted", "hang"],
)
def test_a_server_without_a_list_of_models_is_identified_by_its_url(listing, server, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "RETRIES", 0)
    monkeypatch.setattr(client, "IDENTIFY_S", 0.3)
    server.models = listing
    ask(server, tmp_path, "a?")
    assert entries_of(tmp_path)[0]["server"] == {"url": server.url, "id": None, "root": None, "max_model_len": None}
    assert ask(server, tmp_path, "a?", "b?") == [YES] * 2


def test_a_single_entry_of_another_name_describes_the_server(server, tmp_path):
    """m3diff's server lists the version, but a client may use the name of the registered model."""
    server.models = {"data": [{"id": "m3diff/1"}]}
    ask(server, tmp_path, "a?", model="m3diff")
    server.models = {"data": [{"id": "m3diff/2"}]}
    with raises(OtherServerError, "endpoint.other_server"):
        ask(server, tmp_path, "a?", "b?", model="m3diff")


def test_a_run_with_only_cached_answers_needs_no_server(server, tmp_path, capsys):
    server.models = models(root="/weights/a")
    ask(server, tmp_path, "a?", "b?")
    capsys.readouterr()
    server.listed = 0
    server.models = models(root="/weights/b")
    assert ask(server, tmp_path, "a?", "b?") == [YES] * 2
    assert server.listed == 0
    printed = capsys.readouterr().out
    assert "2 of 2 answers are from the cache" in printed
    assert "/weights/a" in printed
    assert datetime.now(UTC).date().isoformat() in printed


def test_cached_answers_are_used_if_the_server_for_new_ones_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "RETRIES", 0)
    with chat_server() as server:
        answers = ask(server, tmp_path, "a?")
    assert ask(server, tmp_path, "a?", reuse=False) == answers
    with raises(EndpointError, "endpoint.no_list_of_models", url=server.url):
        ask(server, tmp_path, "a?", "b?")


OTHER_URLS = {
    "another port": "http://127.0.0.1:9/v1",
    "https": "https://127.0.0.1:8000/v1",
    "another path": "http://127.0.0.1:8000/proxy/v1",
    "another host": "http://192.168.0.7:8000/v1",
    "a longer host": "http://localhost.example.org:8000/v1",
    "capitals in the path": "http://127.0.0.1:8000/V1",
}
SAME_URLS = {
    "slash": ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/"),
    "localhost": ("http://127.0.0.1:8000/v1", "http://localhost:8000/v1"),
    "IPv6": ("http://127.0.0.1:8000/v1", "http://[::1]:8000/v1"),
    "long IPv6": ("http://127.0.0.1:8000/v1", "http://[0:0:0:0:0:0:0:1]:8000/v1"),
    "host's case": ("http://a.example.org/v1", "HTTP://A.Example.org/v1"),
    "root of the names": ("http://a.example.org/v1", "http://a.example.org./v1"),
    "port of http": ("http://a.example.org/v1", "http://a.example.org:80/v1"),
    "port of https": ("https://a.example.org/v1", "https://a.example.org:443/v1"),
    "user and key": ("https://a.example.org/v1", "https://me:sk-1@a.example.org/v1?key=sk-1#sk-1"),
}


@pytest.mark.parametrize(("url", "spelling"), SAME_URLS.values(), ids=SAME_URLS)
def test_two_spellings_of_one_url_are_one_server(url, spelling):
    assert normalised_url(spelling) == normalised_url(url) == url


@pytest.mark.parametrize("url", OTHER_URLS.values(), ids=OTHER_URLS)
def test_another_url_is_another_server(url):
    assert normalised_url(url) != normalised_url("http://127.0.0.1:8000/v1")


@pytest.mark.parametrize("new", [(), ("c?",)], ids=["all answers there", "one missing"])
@pytest.mark.parametrize("earlier", ["another URL", "an earlier version"])
def test_answers_from_other_servers_are_refused_before_a_request(earlier, new, server, tmp_path):
    with chat_server("of the first") as first_server:
        ask(first_server if earlier == "another URL" else server, tmp_path, "a?", "b?")
    if earlier == "an earlier version":
        remove_fields(tmp_path, "server", "date")
    server.requests.clear()
    server.listed = 0
    earlier_server = ServerIdentity(first_server.url) if earlier == "another URL" else None
    expected = {"path": tmp_path / "answers.jsonl", "answers": 2, "questions": 2 + len(new)}
    expected["servers"] = {earlier_server: 2}
    with raises(OtherServerError, "endpoint.other_server", **expected, option=REUSE_OPTION) as refused:
        ask(server, tmp_path, "a?", "b?", *new)
    (origin,) = refused.value.fields["origins"]
    assert origin == Fault("endpoint.origin", answers=2, server=earlier_server or UNKNOWN_SERVER)
    assert server.requests == []
    assert server.listed == 0


def test_only_the_most_common_of_many_servers_are_named():
    servers = Counter({ServerIdentity(f"http://{name}/v1"): 9 - rank for rank, name in enumerate("abcde")})
    requested_server = Fault("endpoint.requested_server", server="http://f/v1", model="m")
    error = other_server_error(Path("answers.jsonl"), servers, requested_server, 40, REUSE_OPTION)
    *origins, further = error.fields["origins"]
    assert [origin.fields["server"].url for origin in origins] == ["http://a/v1", "http://b/v1", "http://c/v1"]
    assert further == Fault("endpoint.further_origins", servers=2)
    assert error.fields["answers"] == 9 + 8 + 7 + 6 + 5


def test_errors_of_an_endpoint_survive_pickle():
    requested_server = Fault("endpoint.requested_server", server="http://f/v1", model="m")
    errors = [
        EndpointError("endpoint.failed", url="http://f/v1", model="m", cause="reset", names=["a.png"]),
        other_server_error(Path("answers.jsonl"), Counter({None: 2}), requested_server, 3, REUSE_OPTION),
        redirect_error("http://f/v1", 307, None),
    ]
    for error in errors:
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert copy.fault == error.fault


def test_the_user_may_use_answers_of_another_server(server, tmp_path, capsys):
    with chat_server("of the first") as first_server:
        ask(first_server, tmp_path, "a?")
    remove_fields(tmp_path, "date")
    model = endpoint(server, tmp_path, reuse=True)
    assert model.ask([EndpointQuestion("a?")], "test") == [("text", "of the first")]
    assert server.requests == []
    assert model.ask([EndpointQuestion("a?"), EndpointQuestion("b?")], "test") == [("text", "of the first"), YES]
    assert server.texts == ["b?"]
    assert [(source.url, source.answers, source.cached) for source in model.sources] == [
        (first_server.url, 1, 1),
        (server.url, 1, 0),
    ]
    assert "1 of 2 answers are from the cache" in capsys.readouterr().out


def test_the_user_may_ask_again_and_each_server_keeps_its_answers(server, tmp_path):
    with chat_server("of the first") as first_server:
        ask(first_server, tmp_path, "a?")
        assert ask(server, tmp_path, "a?", reuse=False) == [YES]
        assert ask(server, tmp_path, "a?") == [YES]
        assert ask(first_server, tmp_path, "a?") == [("text", "of the first")]
        assert len(first_server.requests) == len(server.requests) == 1


@pytest.mark.parametrize(
    ("new_questions", "root"),
    [(("a?", "b?"), "/weights/b"), (("b?",), "/weights/a")],
    ids=["all asked again", "one asked again"],
)
def test_cached_answers_are_of_the_last_model_that_answered_all(new_questions, root, server, tmp_path):
    server.reply = lambda text: server.models["data"][1]["root"]
    server.models = models(root="/weights/a")
    ask(server, tmp_path, "a?", "b?")
    server.models = models(root="/weights/b")
    ask(server, tmp_path, *new_questions, reuse=False)
    server.requests.clear()
    assert ask(server, tmp_path, "a?", "b?") == [("text", root)] * 2
    assert server.requests == []


CHANGES = {
    "root": models(root="/weights/b", max_model_len=9),
    "length": models(root="/weights/a", max_model_len=8),
    "no root": models(max_model_len=9),
    "no list": 404,
    "another name": {"data": [{"id": "n"}]},
}


@pytest.mark.parametrize("listing", CHANGES.values(), ids=CHANGES)
def test_another_model_at_the_url_is_noticed_when_a_question_must_be_sent(listing, server, tmp_path):
    server.models = models(root="/weights/a", max_model_len=9)
    ask(server, tmp_path, "a?")
    server.models = listing
    with raises(OtherServerError, "endpoint.other_server") as refused:
        ask(server, tmp_path, "a?", "b?")
    assert {identity.root for identity in refused.value.fields["servers"]} == {"/weights/a"}
    assert server.texts == ["a?"]
    assert ask(server, tmp_path, "a?", "b?", reuse=False) == [YES] * 2
    assert sorted(server.texts) == ["a?", "a?", "b?"]


def test_another_model_beside_it_in_the_list_changes_nothing(server, tmp_path):
    server.models = models(root="/weights/a")
    ask(server, tmp_path, "a?")
    server.models = {"data": [*models(root="/weights/a", created=9)["data"], {"id": "adapter", "root": "/c"}]}
    assert ask(server, tmp_path, "a?", "b?") == [YES] * 2
    assert server.texts == ["a?", "b?"]


def test_answers_of_two_models_at_one_url_are_not_mixed(server, tmp_path):
    """A run is continued after a restart of the server. The next run finds all answers in the cache."""
    server.models = models(root="/weights/a")
    ask(server, tmp_path, "a?")
    server.models = models(root="/weights/b")
    ask(server, tmp_path, "b?")
    with raises(OtherServerError, "endpoint.other_server") as refused:
        ask(server, tmp_path, "a?", "b?")
    assert {identity.root for identity in refused.value.fields["servers"]} == {"/weights/a"}
    assert ask(server, tmp_path, "a?", "b?", reuse=True) == [YES] * 2


def test_two_calls_of_one_run_do_not_mix_two_models(server, tmp_path):
    """A writer asks once per split. The answers for the first split are cached, and those for the second are not."""
    server.models = models(root="/weights/a")
    ask(server, tmp_path, "a?")
    server.models = models(root="/weights/b")
    model = endpoint(server, tmp_path)
    model.ask([EndpointQuestion("a?")], "test")
    with raises(OtherServerError, "endpoint.other_server"):
        model.ask([EndpointQuestion("b?")], "test")
    assert server.texts == ["a?"]


@pytest.mark.parametrize(
    "kind", [None, {"content": None, "refusal": "no"}, {"content": "a", "finish_reason": "length"}]
)
def test_an_answer_without_a_text_belongs_to_its_server_too(kind, server, tmp_path):
    with chat_server(kind) as first_server:
        ask(first_server, tmp_path, "a?")
    with raises(OtherServerError, "endpoint.other_server"):
        ask(server, tmp_path, "a?")
    assert ask(server, tmp_path, "a?", reuse=False) == [YES]


def test_a_revoked_answer_does_not_affect_those_of_other_servers(server, tmp_path):
    with chat_server("of the first") as first_server:
        ask(first_server, tmp_path, "a?")
        model = endpoint(server, tmp_path, reuse=False)
        model.ask([EndpointQuestion("a?")], "test")
        model.forget([EndpointQuestion("a?")])
        assert ask(first_server, tmp_path, "a?") == [("text", "of the first")]
        assert len(first_server.requests) == 1


@pytest.mark.parametrize("reuse", [None, False, True])
def test_a_change_of_weights_during_a_run_is_noticed(reuse, server, tmp_path):
    server.models = models(root="/weights/a")

    def reply(text: str) -> str:
        if len(server.requests) == 10:
            server.models = models(root="/weights/b")
        return server.models["data"][1]["root"]

    server.reply = reply
    questions = [f"{number}?" for number in range(20)]
    asking = endpoint(server, tmp_path, reuse=reuse)
    if reuse:
        asking.ask([EndpointQuestion(text) for text in questions], "test")
        assert [(source.url, source.answers) for source in asking.sources] == [(None, 20)]
    else:
        with raises(OtherServerError, "endpoint.other_server", servers={None: 20}) as refused:
            asking.ask([EndpointQuestion(text) for text in questions], "test")
        requested_server = refused.value.fields["requested_server"]
        assert requested_server.code == "endpoint.changed_server"
        assert requested_server.fields["server"].root == "/weights/b"
        assert requested_server.fields["earlier_server"].root == "/weights/a"
    with raises(OtherServerError, "endpoint.other_server"):  # the next run does not take them for those of either model
        ask(server, tmp_path, *questions)
    assert {answer.text for answer in ask(server, tmp_path, *questions, reuse=False)} == {"/weights/b"}


def test_answers_before_a_failure_belong_to_no_server_if_the_weights_changed(server, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "RETRIES", 0)
    server.models = models(root="/weights/a")

    def reply(text: str) -> Any:
        server.models = models(root="/weights/b")
        return 500 if text == "b?" else "yes"

    server.reply = reply
    with raises(OtherServerError, "endpoint.other_server"):
        ask(server, tmp_path, "a?", "b?")
    stored = AnswerStore(tmp_path / "answers.jsonl")
    assert {answer.server for key in stored.answers_by_key for answer in stored.answers_to(key)} == {None}


def test_answers_stay_if_the_server_stops_after_them(server, tmp_path):
    server.models = models(root="/weights/a")

    def reply(text: str) -> str:
        server.models = ServerFault.RESET
        return "yes"

    server.reply = reply
    assert ask(server, tmp_path, "a?") == [YES]
    assert entries_of(tmp_path)[0]["server"]["root"] == "/weights/a"


REDIRECTS: dict[str, dict[str, tuple[int, str]]] = {
    **{f"a question, {status}, to the same server": {"POST": (status, "same")} for status in (301, 302, 303, 307, 308)},
    **{f"a question, {status}, to another server": {"POST": (status, "other")} for status in (307, 308)},
    "the list of models, to the same server": {"GET": (307, "same")},
    "the list of models, to another server": {"GET": (301, "other")},
    "both": {"GET": (307, "other"), "POST": (307, "other")},
    "to another scheme": {"POST": (307, "ftp://host/v1")},
    "to no URL": {"POST": (307, "http://host:port/v1")},
    "to a host that is none": {"POST": (307, "http://[::bad")},
    "to a file": {"POST": (307, "file:///etc/passwd")},
}
# Targets that no endpoint can have
NOT_PROPOSED = ("to another scheme", "to no URL", "to a host that is none", "to a file")


@pytest.mark.parametrize("case", REDIRECTS)
def test_no_redirect_is_followed_and_the_error_names_its_target(case, server, tmp_path):
    with chat_server("of the other") as other_server:
        urls = {"same": f"{server.url}/again", "other": other_server.url}
        server.redirects = {method: (status, urls.get(to, to)) for method, (status, to) in REDIRECTS[case].items()}
        status, target = next(iter(server.redirects.values()))
        code = "endpoint.redirect_to_no_endpoint" if case in NOT_PROPOSED else "endpoint.redirect"
        with raises(RedirectError, code, url=server.url, status=status) as refused:
            endpoint(server, tmp_path).ask([EndpointQuestion("a?", (picture(tmp_path / "a.png"),))], "test")
        assert other_server.requests == []
        assert other_server.listed == 0
    assert target in refused.value.target
    assert refused.value.fields.get("expected", target) == target
    assert AnswerStore(tmp_path / "answers.jsonl").last_answers == {}
    assert len(server.requests) <= 1, "it is not asked again"
    assert server.listed <= 1, "the list of models is not asked for again"


def test_a_target_is_shown_without_a_user_a_key_and_a_query():
    headers = {"location": "https://me:sk-123@host/v1/chat/completions?key=sk-123"}
    target = redirect_target("http://127.0.0.1:8000/v1/chat/completions", headers)
    assert target == "https://host/v1/chat/completions"


def test_a_control_character_of_a_target_is_escaped():
    target = redirect_target("http://127.0.0.1:8000/v1/chat/completions", {"location": "/v1\x1b[31m"})
    assert target is not None
    assert target.isprintable()
    assert "x1b" in target


@pytest.mark.parametrize("status", [300, 307])
def test_a_redirect_without_a_target_is_refused_too(status, server, tmp_path):
    server.default = status
    with raises(RedirectError, "endpoint.redirect_without_target", status=status, target=None):
        ask(server, tmp_path, "a?")


def test_the_cause_of_a_lost_connection_is_named(server, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "RETRIES", 0)
    with raises(EndpointError, "endpoint.no_list_of_models", url="http://127.0.0.1:9/v1") as lost:
        ask(server, tmp_path, "a?", url="http://127.0.0.1:9/v1")
    assert "refused" in lost.value.fields["cause"]


def test_a_line_of_deeply_nested_lists_is_skipped(tmp_path):
    store = tmp_path / "answers.jsonl"
    line = json.dumps({"key": "k", "kind": "text", "answer": "yes"})
    store.write_text(f"{'[' * 100_000}\n{line}\n")
    assert AnswerStore(store).last_answers == {"k": YES}


def test_a_revocation_of_an_earlier_version_revokes_every_answer(server, tmp_path):
    ask(server, tmp_path, "a?")
    (entry,) = entries_of(tmp_path)
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write(json.dumps({"key": entry["key"], "kind": "forgotten", "answer": ""}) + "\n")
    assert AnswerStore(tmp_path / "answers.jsonl").last_answers == {}


def test_a_store_is_shared_by_models_and_each_has_its_own_answers(server, tmp_path):
    server.models = models(root="/weights/a")
    ask(server, tmp_path, "a?")
    with chat_server("of the other") as other_server:
        assert ask(other_server, tmp_path, "a?", model="o") == [("text", "of the other")]
    assert ask(server, tmp_path, "a?") == [YES]


@pytest.mark.parametrize("value", [5, "http://a", {"url": 5}, {"id": "m"}, [], None])
def test_a_server_that_cannot_be_read_is_not_recorded(value):
    assert read_server(value) is None


@pytest.mark.parametrize("length", [True, "9", 9.5, None])
def test_a_fact_of_a_server_with_another_type_is_left_out(length):
    entry = {"url": "http://a/v1", "id": "m", "root": 5, "max_model_len": length}
    assert read_server(entry) == ServerIdentity("http://a/v1", "m")


def test_answers_are_counted_by_server_with_the_dates_of_the_cached_ones(tmp_path):
    server = ServerIdentity("http://a/v1", "m", "/weights/a", 9)
    days = ["2026-01-03", "2026-01-05", "2026-01-01"]
    stored_answers = [StoredAnswer(EndpointAnswer("text", "yes"), server, f"{day}T10:00:00+00:00") for day in days]
    stored_answers.append(StoredAnswer(EndpointAnswer("text", "no")))
    known_source, unknown_source = count_answers_by_server(stored_answers, [True, False, True, True])
    facts = {"id": "m", "root": "/weights/a", "max_model_len": 9}
    dates = {"cached_from": "2026-01-01T10:00:00+00:00", "cached_until": "2026-01-03T10:00:00+00:00"}
    assert known_source.model_dump() == {"url": "http://a/v1", **facts, "answers": 3, "cached": 2, **dates}
    assert unknown_source.model_dump() == dict.fromkeys([*known_source.model_dump()]) | {"answers": 1, "cached": 1}
    line = describe_cache([known_source, unknown_source], tmp_path)
    assert all(word in line for word in ("2026-01-01", "2026-01-03", "/weights/a", UNKNOWN_SERVER, str(tmp_path)))
    assert "2026-01-05" not in line


def test_a_question_is_named_by_its_images_or_by_the_beginning_of_its_text():
    images = (Path("a.png"), Path("b.png"))
    assert describe_question(EndpointQuestion("What has changed?", images)) == ["a.png", "b.png"]
    assert describe_question(EndpointQuestion("?" * 100)) == [repr("?" * 60)]


# A server that does not answer in time


def two_images(folder: Path, count: int) -> list[EndpointQuestion]:
    images = (picture(folder / "one.png"), picture(folder / "two.png", "blue"))
    return [EndpointQuestion(f"question {number}.", images) for number in range(count)]


def begin_question_after_a_silent_one(watch: SilenceWatch, begun_questions: list[bool]) -> threading.Thread:
    """Begin two questions, end one without an answer, and begin a third in a thread, which records whether it began."""
    thread = threading.Thread(target=lambda: begun_questions.append(watch.begin_question()), daemon=True)
    assert [watch.begin_question() for _ in range(2)] == [True, True]
    watch.end_question(is_answered=False)
    thread.start()
    return thread


def test_a_question_waits_while_another_is_silent_until_an_answer_arrives():
    watch = SilenceWatch(lambda: None)
    begun_questions: list[bool] = []
    thread = begin_question_after_a_silent_one(watch, begun_questions)
    thread.join(0.05)
    assert begun_questions == []
    watch.end_question(is_answered=True)
    thread.join(10)
    assert begun_questions == [True]


def test_a_waiting_question_is_not_asked_after_the_end_of_the_run():
    watch = SilenceWatch(lambda: None)
    begun_questions: list[bool] = []
    thread = begin_question_after_a_silent_one(watch, begun_questions)
    watch.stop()
    thread.join(10)
    assert begun_questions == [False]


def test_only_the_first_silence_of_a_run_is_reported():
    reports: list[str] = []
    watch = SilenceWatch(lambda: reports.append("silence"))
    for _ in range(3):
        watch.record_silence()
    assert reports == ["silence"]


@pytest.mark.parametrize(
    "fault", [ServerFault.HANG, ServerFault.HEADERS_ONLY, ServerFault.TRICKLE], ids=lambda fault: fault.name
)
def test_a_server_that_hangs_on_two_images_ends_the_run_after_a_few_questions(fault, server, tmp_path, capsys):
    server.default = fault
    start = time.monotonic()
    expected = {"questions": 8, "images": 2, "limit": 0.5, "attempts": 2}
    with raises(EndpointError, "endpoint.silent_on_images", **expected):
        endpoint(server, tmp_path, timeout_s=0.5).ask(two_images(tmp_path, 40), "test")
    assert time.monotonic() - start < 30, "it is 1 s on an idle machine"
    assert len(server.requests) == 16, "each of the first eight twice"
    assert "0.5 s" in capsys.readouterr().err


def test_a_server_that_hangs_on_a_single_question_ends_the_run(server, tmp_path):
    server.default = ServerFault.HANG
    with raises(EndpointError, "endpoint.silent", questions=1, limit=0.3):
        ask(server, tmp_path, "a?", timeout_s=0.3)
    assert len(server.requests) == 2
    assert not (tmp_path / "answers.jsonl").exists()


def test_a_slow_server_answers_some_questions_and_the_others_are_counted(server, tmp_path):
    server.replies = {f"question {number}.": [ServerFault.HANG] for number in range(0, 40, 8)}
    with raises(EndpointError, "endpoint.slow_on_images", answers=35, questions=5):
        endpoint(server, tmp_path, timeout_s=0.4).ask(two_images(tmp_path, 40), "test")
    assert len(entries_of(tmp_path)) == 35
    server.replies = {}
    assert endpoint(server, tmp_path).ask(two_images(tmp_path, 40), "test") == [YES] * 40
    assert len(server.requests) == 35 + 2 * 5 + 5


def test_an_answer_at_the_second_attempt_counts(server, tmp_path):
    server.replies = {"a?": [ServerFault.HANG, "late"]}
    assert ask(server, tmp_path, "a?", timeout_s=0.4) == [("text", "late")]
    assert len(server.requests) == 2


def test_a_server_that_hangs_after_some_answers_ends_the_run(server, tmp_path):
    server.replies = {f"question {number}.": ["yes"] for number in range(20)}
    server.default = ServerFault.HANG
    with raises(EndpointError, "endpoint.silent_on_images", answers=20, images=2):
        endpoint(server, tmp_path, timeout_s=0.4).ask(two_images(tmp_path, 90), "test")
    assert len(entries_of(tmp_path)) == 20
    assert len(server.requests) <= 20 + 2 * 16


def test_a_reset_connection_ends_the_run_like_a_refused_one(server, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "RETRIES", 1)
    server.default = ServerFault.RESET
    with raises(EndpointError, "endpoint.failed") as reset:
        ask(server, tmp_path, "a?")
    assert "APIConnectionError" in reset.value.fields["cause"]
    assert len(server.requests) == 2
    with raises(EndpointError, "endpoint.no_list_of_models"):
        ask(Server("", url="http://127.0.0.1:9/v1"), tmp_path, "a?")


class RecordedStream(httpx2.SyncByteStream):
    """The body of a reply, which records whether it was closed, and with it the connection."""

    is_closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield b" "

    def close(self) -> None:
        self.is_closed = True


def test_the_connection_of_a_reply_that_takes_too_long_is_closed(monkeypatch):
    body = RecordedStream()
    monkeypatch.setattr(httpx2.HTTPTransport, "handle_request", lambda *_: httpx2.Response(200, stream=body))
    with http_client(trust_env=False) as limited_client, pytest.raises(openai.APITimeoutError):
        limited_client.get("http://127.0.0.1:9/v1", timeout=-1)
    assert body.is_closed


def test_a_server_that_accepts_no_connection_in_time_cannot_be_reached(monkeypatch):
    """It is not a server that hangs, so the question is not the cause."""

    def time_out(*_: object) -> None:
        raise httpx2.ConnectTimeout("no connection in 10 s")

    monkeypatch.setattr(httpx2.HTTPTransport, "handle_request", time_out)
    with http_client(trust_env=False) as limited_client, pytest.raises(httpx2.ConnectError):
        limited_client.get("http://127.0.0.1:9/v1", timeout=1)


def test_a_question_that_the_server_does_not_implement_is_sent_once(server, tmp_path):
    server.default = 501
    with raises(EndpointError, "endpoint.failed", names=["'a?'"]):
        ask(server, tmp_path, "a?")
    assert len(server.requests) == 1


def test_a_slow_reply_within_the_limit_is_an_answer(server, tmp_path):
    server.delay = 0.5
    assert ask(server, tmp_path, *(f"{number}?" for number in range(20)), timeout_s=3) == [YES] * 20

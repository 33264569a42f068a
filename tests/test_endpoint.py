"""The client of chat endpoints against a server on 127.0.0.1: nothing is lost, nothing is asked twice."""

import base64
import io
import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo
from pydantic import ValidationError

from m3diff import endpoint as module
from m3diff.endpoint import Answer, Answers, Endpoint, Question, data_url
from m3diff.images.open import load_image
from m3diff.scoring.metrics.judge import JudgeSettings
from m3diff.settings.section import ParamsError, explain
from m3diff.stages.augment.params import Remote
from tests.chat import CUT_BODY, Server, chat_server
from tests.tiny import noise_image

YES = ("text", "yes")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("A_KEY", "secret")
    with chat_server() as known:
        yield known


def endpoint(server: Server, folder: Path, **changes: Any) -> Endpoint:
    store = folder / "answers.jsonl"
    known = {"url": server.url, "model": "m", "key_variable": "A_KEY", "timeout_s": 20, "store": store}
    return Endpoint(**(known | changes))


def ask(server: Server, folder: Path, *texts: str, **changes: Any) -> list[Answer]:
    return endpoint(server, folder, **changes).ask([Question(text) for text in texts], "test")


def picture(path: Path, color: str = "red") -> Path:
    Image.new("RGB", (4, 4), color).save(path)
    return path


BY_WRITER, BY_JUDGE = partial(Remote, kind="endpoint", model="m"), partial(JudgeSettings, model="m")


@pytest.mark.parametrize(
    "take", [lambda url: BY_WRITER(url=url), lambda url: BY_JUDGE(url=url)], ids=["writer", "judge"]
)
def test_a_url_with_a_key_or_a_user_or_of_no_server_is_refused_by_one_rule_wherever_it_stands(take):
    for url in ("http://127.0.0.1:8000/v1", "https://api.example.org/v1", "http://[::1]:8000/v1"):
        take(url)
    for url in ("https://me:sk-123@host/v1", "https://host/v1?key=sk-123", "https://host/v1#sk-123"):
        with pytest.raises(ValidationError) as refused:
            take(url)
        (told,) = explain(refused.value, {}, Remote)
        assert told.startswith("url: expected a URL without a key or a user, found one with '@'")
        assert "sk-123" not in told
    for url in ("ftp://host/v1", "host/v1", "http:///v1", "http://host:port/v1", "http://host/ v1", "http://[::1/v1"):
        with pytest.raises(ValueError, match="expected http://... or https://..., up to and with /v1, found"):
            take(url)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_proxy_of_the_environment_gets_nothing_that_stays_on_this_machine(elsewhere, server, tmp_path, monkeypatch):
    """The same URL as if it were another machine's goes through the proxy, as everywhere."""
    for name in ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    if elsewhere:
        monkeypatch.setattr(module, "THIS_MACHINE", ())
    with chat_server("by the proxy") as proxy:
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))
        assert ask(server, tmp_path, "a?") == [("text", "by the proxy" if elsewhere else "yes")]
        assert len(proxy.asked) == elsewhere


def test_answers_come_in_the_order_of_the_questions_whatever_comes_first(server, tmp_path):
    server.replies = {f"question {number}": [f"answer {number}"] for number in range(9, -1, -1)}
    server.delay = 0.05
    found = ask(server, tmp_path, *(f"question {number}" for number in range(10)))
    assert [answer.text for answer in found] == [f"answer {number}" for number in range(10)]
    assert server.at_once > 1
    assert server.keys == {"Bearer secret"}
    assert {(body["model"], body["temperature"]) for body in server.asked} == {("m", 0)}
    assert "secret" not in (tmp_path / "answers.jsonl").read_text()


def smooth(path: Path, size: tuple[int, int] = (96, 64), mode: str = "RGB", **options: Any) -> Path:
    exif, text = Image.Exif(), PngInfo()
    exif[0x010F], exif[0x0112] = "A camera", 6
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
def test_an_image_is_sent_as_the_projects_models_see_it_without_what_the_camera_wrote(name, kind, options, tmp_path):
    path = smooth(tmp_path / name, **options)
    seen, (head, _, text) = load_image(path), data_url(path).partition(";base64,")
    data = base64.b64decode(text)
    image = Image.open(io.BytesIO(data))
    assert (head, image.size, image.mode) == (f"data:image/{kind}", seen.size, "RGB")
    assert seen.height > seen.width, "upright"
    difference = np.abs(np.asarray(image, dtype=int) - np.asarray(seen, dtype=int))
    assert difference.mean() < (1 if kind == "jpeg" else 1e-9)
    assert not any(word in data for word in (b"A camera", b"at home", b"Exif", b"eXIf", b"ICC", b"iCCP", b"a film"))
    assert kind == "png" or len(data) < 1.1 * path.stat().st_size


def test_a_question_is_asked_once_in_one_run_and_in_the_next(server, tmp_path):
    first = ask(server, tmp_path, "a?", "b?", "a?")
    assert sorted(server.texts) == ["a?", "b?"]
    assert ask(server, tmp_path, "b?", "a?", "c?")[:2] == [first[1], first[0]]
    assert sorted(server.texts) == ["a?", "b?", "c?"]


def test_an_answer_is_of_all_that_its_question_says_and_of_the_model_and_nothing_else(server, tmp_path):
    one, same, other = (picture(tmp_path / f"{n}.png", color) for n, color in enumerate(("red", "red", "blue")))
    facts = {"text": "a?", "images": (one,)}
    first = endpoint(server, tmp_path).key(Question(**facts))
    for same_place in (endpoint(server, tmp_path, url=f"{server.url}/"), endpoint(server, tmp_path, timeout_s=1)):
        assert same_place.key(Question(**facts | {"images": (same,)})) == first
    changes = [{"text": "b?"}, {"system": "else"}, {"seed": 1}, {"n": 1}, {"images": (other,)}, {"images": ()}]
    keys = [endpoint(server, tmp_path).key(Question(**facts | change)) for change in changes]
    keys += [
        endpoint(server, tmp_path, **change).key(Question(**facts)) for change in ({"model": "o"}, {"max_tokens": 7})
    ]
    assert len({first, *keys}) == 9
    assert endpoint(server, tmp_path, max_tokens=7).ask([Question("a?")], "test") == [YES]
    assert server.asked[-1]["max_tokens"] == 7


def test_a_server_that_puts_off_is_asked_again_after_the_time_it_names(server, tmp_path):
    server.retry_after = "0.4"
    server.replies = {"a?": [429, 503, "done"]}
    assert ask(server, tmp_path, "a?") == [("text", "done")]
    assert len(server.asked) == 3
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
    (found,) = ask(server, tmp_path, "a?")
    assert found.kind == answer[0]
    assert answer[1] in (None, found.text)
    assert ask(server, tmp_path, "a?") == [found]
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("reply", "error", "told"),
    [
        (401, ParamsError, r"/v1, model 'm': .*; asked about 'b\?'$"),
        (404, ParamsError, r"/v1, model 'm': .*; asked about 'b\?'$"),
        (500, ConnectionError, "InternalServerError"),
        (CUT_BODY, ConnectionError, r"asked about 'b\?'$"),
        (b'"a page"', ParamsError, "url ends in /v1"),
        ((200, {"detail": "Not Found"}), ParamsError, "url ends in /v1"),
        ((200, {"error": {"message": "rate limited", "code": 429}}), ConnectionError, "in place of .*rate limited"),
    ],
)
def test_what_is_no_answer_ends_the_run_and_what_was_answered_stays(reply, error, told, server, tmp_path):
    ask(server, tmp_path, "a?")
    server.replies = {"b?": [reply]}
    with pytest.raises(error, match=told):
        ask(server, tmp_path, "a?", "b?")
    server.replies = {}
    assert ask(server, tmp_path, "a?", "b?") == [YES] * 2
    assert server.texts.count("a?") == 1


def test_a_form_that_the_server_takes_of_no_question_is_the_users(server, tmp_path, monkeypatch):
    """It ends at the first of one question, and of many before all of them are asked."""
    monkeypatch.setattr(module, "WINDOW", 16)
    server.replies = {"?": [(400, {"error": {"message": "no such field"}})]}
    with pytest.raises(ParamsError, match=r"Error code: 400 .*no such field.*; asked about 'a\?'$"):
        ask(server, tmp_path, "a?")
    with pytest.raises(ParamsError, match="no such field"):
        ask(server, tmp_path, *(f"{number}?" for number in range(200)))
    assert len(server.asked) <= 1 + 16
    assert not (tmp_path / "answers.jsonl").exists()


@pytest.mark.parametrize(("first", "status"), [("a?", 400), ("b?", 413), ("b?", 422)])
def test_a_question_that_alone_is_not_taken_is_refused_by_the_server_and_ends_no_run(first, status, server, tmp_path):
    server.replies = {"b?": [(status, {"error": {"message": "too long"}})]}
    server.delays = {first: 0.2}
    taken, refused = ask(server, tmp_path, "a?", "b?")
    assert (taken, refused.kind, "too long" in refused.text) == (YES, "refused", True)
    assert ask(server, tmp_path, "b?", "a?") == [refused, taken]
    assert len(server.asked) == 2
    server.replies["c?"] = [status]
    assert ask(server, tmp_path, "a?", "c?")[1].kind == "refused", "the other was answered in an earlier run"


def test_a_line_that_a_kill_has_torn_is_asked_for_again_and_harms_no_other(server, tmp_path):
    ask(server, tmp_path, "a?", "b?")
    store = tmp_path / "answers.jsonl"
    torn_text = json.loads(store.read_bytes().splitlines()[-1])["question"]
    store.write_bytes(store.read_bytes()[:-9])
    for _ in range(2):
        assert ask(server, tmp_path, "a?", "b?", "c?") == [YES] * 3
        assert sorted(server.texts) == sorted(["a?", "b?", torn_text, "c?"])


NO_ANSWERS = ["5", "[]", "null", '"a"', '{"key": "a"}', '{"key": "a", "kind": "text", "answer": null}']
NO_ANSWERS += ['{"key": [1], "kind": "text", "answer": "b"}', '{"key": "a", "kind": "other", "answer": "b"}']


def test_a_line_that_is_no_answer_is_read_as_none(tmp_path):
    store = tmp_path / "answers.jsonl"
    Answers(store).keep("k", {}, Answer("text", "yes"))
    store.write_text("\n".join([*NO_ANSWERS, store.read_text()]))
    assert Answers(store).known == {"k": YES}


def test_an_answer_that_is_forgotten_is_asked_for_again_and_no_other(server, tmp_path):
    one, questions = endpoint(server, tmp_path), [Question("a?"), Question("b?")]
    server.replies = {"a?": ["first", "second"]}
    assert one.ask(questions, "test") == [("text", "first"), YES]
    one.forget(questions[:1])
    assert len(Answers(one.answers.path).known) == 1, "by the file, too"
    assert one.ask(questions, "test") == [("text", "second"), YES]
    assert ask(server, tmp_path, "a?", "b?") == [("text", "second"), YES]
    assert sorted(server.texts) == ["a?", "a?", "b?"]


def ask_many(url: str, folder: Path) -> None:
    ask(Server("", url=url), folder, *(f"question {number}." for number in range(60)))


@pytest.mark.slow
def test_after_a_kill_in_the_middle_only_what_has_no_answer_on_the_disk_is_asked(server, tmp_path):
    server.delay = 0.05
    asking = multiprocessing.get_context("spawn").Process(target=ask_many, args=(server.url, tmp_path))
    asking.start()
    while len(server.asked) < 20:
        time.sleep(0.01)
    os.kill(asking.pid, signal.SIGKILL)
    asking.join()
    time.sleep(0.2)
    kept = {json.loads(line)["question"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()}
    assert 8 <= len(kept) < 60
    server.delay = 0
    ask_many(server.url, tmp_path)
    times = Counter(server.texts)
    assert len(times) == 60
    assert {times[text] for text in kept} == {1}
    assert sum(times.values()) <= 60 + 8, "at most those that were on their way are asked twice"

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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo
from pydantic import ValidationError

from m3diff import endpoint as module
from m3diff.endpoint import Answer, Answers, Endpoint, Question, data_url, endpoint_url, is_plain_png
from m3diff.images.open import ImageError, load_image
from m3diff.scoring.metrics.judge import JudgeSettings
from m3diff.settings.explain import explain
from m3diff.settings.section import ParamsError
from m3diff.stages.augment.params import Remote
from tests.chat import CUT_BODY, Server, chat_server
from tests.test_images import png
from tests.tiny import noise_image

YES = ("text", "yes")
each_not_taken = pytest.mark.parametrize("status", [400, 413, 422])


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
    "take",
    [endpoint_url, lambda url: BY_WRITER(url=url), lambda url: BY_JUDGE(url=url)],
    ids=["plain", "writer", "judge"],
)
def test_a_url_with_a_key_or_a_user_or_of_no_server_is_refused_by_one_rule_wherever_it_stands(take):
    for url in ("http://127.0.0.1:8000/v1", "https://api.example.org/v1", "http://[::1]:8000/v1"):
        take(url)
    for url in ("https://me:sk-123@host/v1", "https://host/v1?key=sk-123", "https://host/v1#sk-123"):
        with pytest.raises(ValueError, match="without a key or a user") as refused:
            take(url)
        if isinstance(refused.value, ValidationError):
            (told,) = explain(refused.value, {}, Remote)
            assert told.startswith("url: expected a URL without a key or a user, found one with '@'")
        else:
            told = str(refused.value)
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


def test_images_are_sent_before_the_text_in_their_order_plain_ones_byte_by_byte(server, tmp_path):
    images = picture(tmp_path / "a.png"), picture(tmp_path / "b.jpg", "blue")
    endpoint(server, tmp_path).ask([Question("what changed?", images, system="be brief", seed=5)], "test")
    (body,) = server.asked
    system, user = body["messages"]
    assert system == {"role": "system", "content": "be brief"}
    *urls, text = [part.get("text") or part["image_url"]["url"].split(",") for part in user["content"]]
    assert text == "what changed?"
    assert [url[0] for url in urls] == ["data:image/png;base64", "data:image/jpeg;base64"]
    assert [base64.b64decode(url[1]) for url in urls] == [image.read_bytes() for image in images]
    assert (body["seed"], "max_tokens" in body) == (5, False)


def sent(path: Path) -> tuple[str, bytes, Image.Image]:
    """What of an image is sent: its type, its bytes, and the picture in them as any server reads it."""
    kind, _, text = data_url(path).partition(";base64,")
    data = base64.b64decode(text)
    return kind.removeprefix("data:image/"), data, Image.open(io.BytesIO(data))


def taken(orientation: int) -> Image.Exif:
    """What a camera writes."""
    exif = Image.Exif()
    exif[0x010F], exif[0x0112] = "A camera", orientation
    exif.get_ifd(0x8825).update({1: "N", 2: (52.0, 31.0, 12.0)})
    return exif


def smooth(size: tuple[int, int] = (96, 64), mode: str = "RGB") -> Image.Image:
    return noise_image(3, (6, 4)).resize(size).convert(mode)


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_photograph_is_sent_upright_and_without_what_the_camera_wrote_at_its_own_size(orientation, tmp_path):
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    facts = {"exif": taken(orientation), "comment": "at home", "icc_profile": profile}
    smooth((960, 640)).save(tmp_path / "a.jpg", quality=85, **facts)
    kind, data, image = sent(tmp_path / "a.jpg")
    seen = load_image(tmp_path / "a.jpg")
    assert seen.size == ((960, 640) if orientation == 1 else (640, 960))
    assert (kind, image.size, image.mode) == ("jpeg", seen.size, "RGB")
    assert [name for name, _ in image.applist] == ["APP0"]
    assert not any(word in data for word in (b"A camera", b"at home", b"Exif", b"ICC"))
    assert np.abs(np.asarray(image, dtype=int) - np.asarray(seen, dtype=int)).mean() < 1
    assert len(data) < 1.1 * (tmp_path / "a.jpg").stat().st_size


TEXT = PngInfo()
TEXT.add_text("place", "at home")
DEEP = [row.tobytes() for row in (np.arange(48, dtype=np.uint16).reshape(4, 4, 3) * 1000).astype(">u2")]
OTHERS: dict[str, Any] = {
    "text.png": lambda path: smooth().save(path, pnginfo=TEXT),
    "exif.png": lambda path: smooth().save(path, exif=taken(6)),
    "tail.png": lambda path: (smooth().save(path), path.write_bytes(path.read_bytes() + b"at home")),
    "16_bits.png": lambda path: path.write_bytes(png(16, 2, DEEP)),
    "grey.png": lambda path: smooth(mode="L").save(path),
    "palette.png": lambda path: smooth(mode="P").save(path),
    "see_through.png": lambda path: smooth(mode="RGBA").save(path),
    "grey.jpg": lambda path: smooth(mode="L").save(path),
    "cmyk.jpg": lambda path: smooth(mode="CMYK").save(path),
    "a.bmp": lambda path: smooth().save(path),
    "a.gif": lambda path: smooth().save(path, save_all=True, append_images=[smooth().rotate(180)]),
    "a.webp": lambda path: smooth().save(path, exif=taken(3)),
}
"""Images that are no plain RGB of 8 bits, or hold more than their picture."""


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_plain_picture_is_sent_as_png_just_as_the_projects_models_see_it(name, tmp_path):
    OTHERS[name](tmp_path / name)
    kind, data, image = sent(tmp_path / name)
    assert (kind, image.mode) == ("png", "RGB")
    np.testing.assert_array_equal(np.asarray(image), np.asarray(load_image(tmp_path / name)))
    assert is_plain_png(data)
    assert b"home" not in data


def test_a_jpeg_with_something_behind_its_end_is_sent_without_it_and_a_file_that_is_no_image_not_at_all(tmp_path):
    smooth().save(tmp_path / "a.jpg")
    plain = (tmp_path / "a.jpg").read_bytes()
    assert sent(tmp_path / "a.jpg")[1] == plain
    (tmp_path / "a.jpg").write_bytes(plain + b"a film")
    kind, data, _ = sent(tmp_path / "a.jpg")
    assert (kind, b"a film" in data) == ("jpeg", False)
    for data in (b"no image", b"", (picture(tmp_path / "b.png").read_bytes())[:50]):
        (tmp_path / "a.png").write_bytes(data)
        with pytest.raises(ImageError, match=r"a\.png: cannot be read as an image"):
            data_url(tmp_path / "a.png")


def test_of_many_questions_a_window_alone_waits(tmp_path, monkeypatch):
    """Half a million that wait at once took 1.3 GB."""
    waiting: list[Any] = []
    most: list[int] = []

    class Pool(ThreadPoolExecutor):
        def submit(self, *work: Any) -> Any:
            waiting[:] = [each for each in waiting if not each.done()] + [super().submit(*work)]
            most.append(len(waiting))
            return waiting[-1]

    monkeypatch.setattr(module, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(Endpoint, "_answer", lambda self, client, question: Answer("text", question.text))
    texts = [f"question {number}" for number in range(500)]
    assert ask(Server("", url="http://127.0.0.1:9/v1"), tmp_path, *texts) == [("text", text) for text in texts]
    assert module.CONCURRENT <= max(most) <= module.WINDOW < 100


def test_half_a_character_in_a_question_is_asked_as_a_question_mark(server, tmp_path):
    for _ in range(2):
        texts = [Question("the cup \ud83d went", system="say \udc00")]
        assert endpoint(server, tmp_path).ask(texts, "test") == [YES]
    (body,) = server.asked
    assert [part["content"] for part in body["messages"]] == ["say ?", "the cup ? went"]


def test_a_question_is_asked_once_in_one_run_and_in_the_next(server, tmp_path):
    first = ask(server, tmp_path, "a?", "b?", "a?")
    assert sorted(server.texts) == ["a?", "b?"]
    assert ask(server, tmp_path, "b?", "a?", "c?")[:2] == [first[1], first[0]]
    assert sorted(server.texts) == ["a?", "b?", "c?"]


@pytest.mark.parametrize(
    ("of_question", "of_endpoint", "asked"),
    [
        ({"text": "b?"}, {}, 2),
        ({"system": "else"}, {}, 2),
        ({"seed": 1}, {}, 2),
        ({"n": 1}, {}, 2),
        ({"images": ("other.png",)}, {}, 2),
        ({"images": ()}, {}, 2),
        ({}, {"model": "other"}, 2),
        ({}, {"max_tokens": 7}, 2),
        ({}, {"url": "/"}, 1),  # where a model is served decides nothing
        ({"images": ("same.png",)}, {}, 1),  # nor where an image is
    ],
    ids=str,
)
def test_an_answer_is_of_all_that_its_question_says_and_nothing_else(of_question, of_endpoint, asked, server, tmp_path):
    for name, color in (("one", "red"), ("same", "red"), ("other", "blue")):
        picture(tmp_path / f"{name}.png", color)
    known = {"text": "a?", "images": ("one.png",)}
    for values, changes in ((known, {}), (known | of_question, of_endpoint)):
        question = Question(**(values | {"images": tuple(tmp_path / name for name in values["images"])}))
        changes = {"url": server.url + changes["url"]} if "url" in changes else changes
        endpoint(server, tmp_path, **changes).ask([question], "test")
    assert len(server.asked) == asked
    assert server.asked[-1].get("max_tokens") == of_endpoint.get("max_tokens")


def test_a_server_that_puts_off_is_asked_again_after_the_time_it_names_and_so_is_a_reply_cut_on_its_way(
    server, tmp_path
):
    server.retry_after = "0.4"
    server.replies = {"a?": [429, 503, "done"], "b?": [CUT_BODY, CUT_BODY, "whole"]}
    assert ask(server, tmp_path, "a?") == [("text", "done")]
    assert len(server.asked) == 3
    assert min(later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)) >= 0.4
    assert ask(server, tmp_path, "b?", "c?") == [("text", "whole"), YES]
    assert len(server.asked) == 7


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
def test_refusals_empty_and_truncated_answers_are_told_apart_without_thoughts_and_are_answers(
    reply, answer, server, tmp_path
):
    server.replies = {"a?": [reply]}
    (found,) = ask(server, tmp_path, "a?")
    assert found.kind == answer[0]
    assert answer[1] in (None, found.text)
    assert ask(server, tmp_path, "a?") == [found]
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("reply", "error", "told"),
    [
        *(
            (status, ParamsError, r"/v1, model 'm': .*; asked about 'b\?'$")
            for status in (401, 402, 403, 404, 405, 451)
        ),
        (500, ConnectionError, "InternalServerError"),
        (b'"a page"', ParamsError, "url ends in /v1"),
        ((200, {"detail": "Not Found"}), ParamsError, "url ends in /v1"),
        ((200, {"error": {"message": "rate limited", "code": 429}}), ConnectionError, "in place of .*rate limited"),
    ],
)
def test_what_is_no_answer_ends_the_run_and_what_was_answered_stays(reply, error, told, server, tmp_path):
    """A wrong key, model or address is the user's; where every try fails, one may try again."""
    ask(server, tmp_path, "a?")
    server.replies = {"b?": [reply]}
    with pytest.raises(error, match=told):
        ask(server, tmp_path, "a?", "b?")
    server.replies = {}
    assert ask(server, tmp_path, "a?", "b?") == [YES] * 2
    assert server.texts.count("a?") == 1


@pytest.mark.slow(15)
def test_where_nothing_listens_one_may_try_again(server, tmp_path):
    with pytest.raises(ConnectionError, match="http://127.0.0.1:9/v1, model 'm'"):
        ask(server, tmp_path, "a?", url="http://127.0.0.1:9/v1", timeout_s=1)


@each_not_taken
def test_a_form_that_the_server_takes_of_no_question_is_the_users(status, server, tmp_path):
    """It ends at the first of one question, and of many before all of them are asked."""
    server.replies = {"?": [(status, {"error": {"message": "no such field"}})]}
    with pytest.raises(ParamsError, match=rf"Error code: {status} .*no such field.*; asked about 'a\?'$"):
        ask(server, tmp_path, "a?")
    with pytest.raises(ParamsError, match="no such field"):
        ask(server, tmp_path, *(f"{number}?" for number in range(200)))
    assert len(server.asked) < 1 + 2 * module.WINDOW
    assert not (tmp_path / "answers.jsonl").exists()


@each_not_taken
@pytest.mark.parametrize("first", ["a?", "b?"])
def test_a_question_that_alone_is_not_taken_is_refused_by_the_server_and_ends_no_run(first, status, server, tmp_path):
    """Whichever is answered first: the other of a second in this run, or a third in an earlier one."""
    server.replies = {"b?": [(status, {"error": {"message": "too long"}})]}
    server.delays = {first: 0.2}
    taken, refused = ask(server, tmp_path, "a?", "b?")
    assert (taken, refused.kind, "too long" in refused.text) == (YES, "refused", True)
    assert ask(server, tmp_path, "b?", "a?") == [refused, taken]
    assert len(server.asked) == 2
    server.replies["c?"] = [status]
    assert ask(server, tmp_path, "c?")[0].kind == "refused"


def test_an_answer_to_a_question_of_another_form_does_not_make_a_wrong_one_right(server, tmp_path):
    ask(server, tmp_path, "a?")
    server.replies = {"?": [400]}
    for changes in ({"max_tokens": 10**6}, {"model": "other"}):
        with pytest.raises(ParamsError, match="BadRequestError"):
            ask(server, tmp_path, "a?", **changes)
    images = picture(tmp_path / "one.png"), picture(tmp_path / "two.png")
    with pytest.raises(ParamsError, match="asked about .*one.png, .*two.png"):
        endpoint(server, tmp_path).ask([Question("a?", images)], "test")


def test_a_line_that_a_kill_has_torn_is_asked_for_again_and_harms_no_other(server, tmp_path):
    ask(server, tmp_path, "a?", "b?")
    store = tmp_path / "answers.jsonl"
    torn_text = json.loads(store.read_bytes().splitlines()[-1])["question"]
    store.write_bytes(store.read_bytes()[:-9])
    for _ in range(2):
        assert ask(server, tmp_path, "a?", "b?", "c?") == [YES] * 3
        assert sorted(server.texts) == sorted(["a?", "b?", torn_text, "c?"])


@pytest.mark.parametrize(
    "line",
    ["5", "[]", "null", '"a"', '{"key": "a"}', '{"key": "a", "kind": "text", "answer": null}']
    + ['{"key": [1], "kind": "text", "answer": "b"}', '{"key": "a", "kind": "other", "answer": "b"}'],
)
def test_a_line_that_is_no_answer_is_read_as_none(line, server, tmp_path):
    ask(server, tmp_path, "a?")
    store = tmp_path / "answers.jsonl"
    store.write_text(f"{line}\n{store.read_text()}")
    assert ask(server, tmp_path, "a?", "b?") == [YES] * 2
    assert server.texts == ["a?", "b?"]
    assert len(Answers(store).known) == 2


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

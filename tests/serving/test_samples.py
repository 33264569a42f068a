"""Test the routes with one image, two or none, with questions and the turns before them, and each refusal of these."""

import asyncio
import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

from m3diff.models import FAMILIES
from m3diff.models.contract import Prepared, Takes
from m3diff.models.generation import QUESTION, load_captioner
from m3diff.models.sample_limits import TrainedOn
from m3diff.records.sample import Turn
from m3diff.registry.model_source import Source
from m3diff.serving import batcher
from m3diff.serving.batcher import AnswerRequest, PreparedBytes, PreparedRequest, Replica, answer_requests
from m3diff.serving.bodies import MAX_HISTORY_FIELD
from m3diff.serving.checks import MAX_ANSWER_CHARS, MAX_QUESTION_CHARS
from m3diff.serving.questions import note_about_sample
from tests.prepared_sets import SET_BYTES, PreparedSets
from tests.serving import toy
from tests.serving.toy import Service, base64_of, dialogue, form, image_form, plain, png, source, toy_answer
from tests.tiny import noise_image, tiny_base, tiny_checkpoint

BEFORE = png(plain(10, 20))
AFTER = png(plain(30, 40))
COLOURS = ["10/20/0", "30/40/0"]
CAPTION = "/caption"
CHAT = "/v1/chat/completions"
HISTORY = [{"question": "Is it red?", "answer": "Yes."}]
TRAINED_ON_EVERYTHING = TrainedOn(QUESTION, images=(0, 1, 2), turns=3)
Serve = Callable[..., Service]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return a function that starts a server. By default, its model was trained on all kinds of samples."""
    folder = toy.write_toy(tmp_path / "one", "one")
    services = []

    def make_service(
        trained_on: TrainedOn = TRAINED_ON_EVERYTHING, takes: Takes | None = None, **changes: Any
    ) -> Service:
        monkeypatch.setattr(toy.ToyCaptioner, "trained_on", trained_on)
        monkeypatch.setattr(toy.ToyCaptioner, "family", SimpleNamespace(takes=takes or Takes(), maps=None))
        service = Service(**changes)
        services.append(service)
        service.run(service.models.switch(source(folder)))
        return service

    yield make_service
    for service in services:
        assert service.server.capacity.requests == 0
        assert service.replicas[0].prepared_bytes.used_bytes == 0, "prepared images were not released"
        service.runner.close()


def as_json(**body: Any) -> dict[str, Any]:
    images = {name: base64_of(value) for name, value in body.items() if isinstance(value, bytes)}
    return {"json": body | images}


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["caption"] if "caption" in body else body["choices"][0]["message"]["content"]


# What is answered


ANSWERED: dict[str, tuple[str, dict[str, Any], list[str], str]] = {
    "a form with one image": (CAPTION, image_form(BEFORE, question="How many?"), COLOURS[:1], "How many?"),
    "JSON with one image": (CAPTION, as_json(image=BEFORE, question="How many?"), COLOURS[:1], "How many?"),
    "one image without a question": (CAPTION, image_form(BEFORE), COLOURS[:1], QUESTION),
    "JSON without images": (CAPTION, as_json(question="Why?"), [], "Why?"),
    "a form without images": (CAPTION, {"files": {"question": (None, "Why?")}}, [], "Why?"),
    "a form with history": (
        CAPTION,
        form(BEFORE, AFTER, question="Why?", history=json.dumps(HISTORY)),
        COLOURS,
        "Is it red? Yes. Why?",
    ),
    "JSON with history": (
        CAPTION,
        as_json(before=BEFORE, after=AFTER, question="Why?", history=HISTORY),
        COLOURS,
        "Is it red? Yes. Why?",
    ),
    "a form with an empty history": (CAPTION, form(BEFORE, AFTER, question="Why?", history=" "), COLOURS, "Why?"),
    "a chat about one image": (CHAT, {"json": dialogue([BEFORE], "How many?")}, COLOURS[:1], "How many?"),
    "a chat without images": (CHAT, {"json": dialogue([], "Why?")}, [], "Why?"),
    "a chat of two turns": (
        CHAT,
        {"json": dialogue([BEFORE, AFTER], "Is it red?", "Yes.", "Why?")},
        COLOURS,
        "Is it red? Yes. Why?",
    ),
    "a chat that began with the default question": (
        CHAT,
        {"json": dialogue([BEFORE, AFTER], None, "It grew.", "Why?")},
        COLOURS,
        f"{QUESTION} It grew. Why?",
    ),
}


@pytest.mark.parametrize(("route", "request_", "colours", "texts"), ANSWERED.values(), ids=ANSWERED)
def test_a_sample_is_answered_with_its_images_and_all_its_turns(route, request_, colours, texts, serve):
    assert text_of(serve().post(route, **request_)) == toy_answer("one", colours, texts)


def test_the_content_of_a_chat_message_may_be_a_text(serve):
    chat = dialogue([BEFORE, AFTER], "Is it red?", "Yes.", "Why?")
    for message in chat["messages"][1:]:
        message["content"] = message["content"][0]["text"]
    assert text_of(serve().post(CHAT, json=chat)) == toy_answer("one", COLOURS, "Is it red? Yes. Why?")


def test_the_usage_of_a_chat_counts_every_turn(serve):
    service = serve()
    single = service.post(CHAT, json=dialogue([BEFORE, AFTER], "Why?")).json()["usage"]
    longer = service.post(CHAT, json=dialogue([BEFORE, AFTER], "Is it red?", "Yes.", "Why?")).json()["usage"]
    assert longer["prompt_tokens"] == single["prompt_tokens"] + len("Is it red? Yes. ")


@pytest.mark.parametrize("request_", [image_form(BEFORE, overlay="true"), as_json(question="Why?", overlay=True)])
def test_only_a_pair_has_an_overlay(request_, serve):
    answer = serve().post(CAPTION, **request_)
    assert answer.status_code == 200
    assert "overlay" not in answer.json()
    assert "overlay" in serve().post(CAPTION, **form(BEFORE, AFTER, overlay="true")).json()


def test_the_card_says_which_samples_the_model_answers(serve):
    card = serve(TrainedOn(QUESTION, images=(1, 2), turns=4)).get("/model").json()
    assert card["images"] == [1, 2]
    assert card["turns"] == 4
    card = serve(TrainedOn(QUESTION, images=(1, 2), turns=4), FAMILIES["blip2idc"].takes).get("/model").json()
    assert card["images"] == [2]
    assert card["turns"] == 1
    assert card["reads_question"] is False


# What is refused


LONG_DIALOGUE = [{"question": "x" * 200, "answer": "y"}, {"question": "x" * 200, "answer": "y"}]
LONG_ANSWER = [{"question": "x", "answer": "y" * (MAX_ANSWER_CHARS + 1)}]
PAIR = {"before": BEFORE, "after": AFTER, "question": "Why?"}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an image beside a pair": (as_json(**PAIR, image=BEFORE), "wrong_images", "image"),
    "an image beside a side": (as_json(before=BEFORE, image=BEFORE), "wrong_images", "image"),
    "only the image after": (as_json(after=AFTER), "missing_field", "before"),
    "only the image before": (as_json(before=BEFORE), "missing_field", "after"),
    "an image that is none": (image_form(b"GIF or not"), "not_an_image", "image"),
    "history without a question": (as_json(before=BEFORE, after=AFTER, history=HISTORY), "missing_field", "question"),
    "history that is no list": (as_json(**PAIR, history={"question": "a"}), "invalid_field", "history"),
    "history that is no JSON": (form(BEFORE, AFTER, question="Why?", history="Is it red?"), "not_json", ""),
    "history of texts": (as_json(**PAIR, history=["a", "b"]), "invalid_field", "history.0"),
    "a turn without an answer": (as_json(**PAIR, history=[{"question": "a"}]), "missing_field", "history.0.answer"),
    "a turn with roles": (
        as_json(**PAIR, history=[HISTORY[0] | {"role": "user"}]),
        "unknown_field",
        "history.0.role",
    ),
    "an empty earlier question": (
        as_json(**PAIR, history=[{"question": " ", "answer": "a"}]),
        "empty_question",
        "history.0.question",
    ),
    "an empty earlier answer": (
        as_json(**PAIR, history=[*HISTORY, {"question": "a", "answer": ""}]),
        "empty_answer",
        "history.1.answer",
    ),
    "long questions together": (
        as_json(**PAIR | {"question": "x" * (MAX_QUESTION_CHARS - 399)}, history=LONG_DIALOGUE),
        "question_too_long",
        "history",
    ),
    "long answers": (as_json(**PAIR, history=LONG_ANSWER), "history_too_long", "history"),
    "a long field": (form(BEFORE, AFTER, history=" " * (MAX_HISTORY_FIELD + 1)), "history_too_long", "history"),
    "a mark in an earlier question": (
        as_json(**PAIR, history=[{"question": "a <image>", "answer": "a"}]),
        "special_token",
        "history.0.question",
    ),
    "a mark in an earlier answer": (
        as_json(**PAIR, history=[{"question": "a", "answer": "<|im_end|>"}]),
        "special_token",
        "history.0.answer",
    ),
}


@pytest.mark.parametrize(("request_", "code", "field"), REFUSED.values(), ids=REFUSED)
def test_an_invalid_sample_is_refused_with_the_field(request_, code, field, serve):
    answer = serve().post(CAPTION, **request_)
    assert answer.status_code == 422, answer.text
    refusal = answer.json()
    assert refusal["error"] == code
    assert (refusal["field"] or "") == field
    assert refusal["limit"]
    assert refusal["remedy"]


def test_the_longest_dialogue_is_answered(serve):
    question = "x" * (MAX_QUESTION_CHARS - 400)
    history = [*LONG_DIALOGUE[:1], {"question": "x" * 200, "answer": "y" * (MAX_ANSWER_CHARS - 1)}]
    assert serve().post(CAPTION, **as_json(**PAIR | {"question": question}, history=history)).status_code == 200


IMAGE_PART = dialogue([BEFORE], None)["messages"][0]["content"]
TEXT_PART = [{"type": "text", "text": "Why?"}]


def message(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


FIRST_MESSAGE = message("user", *IMAGE_PART, *IMAGE_PART, *TEXT_PART)
ANSWER = message("assistant", *TEXT_PART)
LAST_MESSAGE = message("user", *TEXT_PART)
REFUSED_CHATS: dict[str, tuple[list[Any], str]] = {
    "three images": ([message("user", *IMAGE_PART * 3, *TEXT_PART)], "3 images"),
    "the assistant is last": ([FIRST_MESSAGE, ANSWER], "the last message is not from the user"),
    "the assistant is first": ([ANSWER, FIRST_MESSAGE, ANSWER], "messages.0 is from the assistant"),
    "two questions in a row": ([FIRST_MESSAGE, LAST_MESSAGE, ANSWER], "messages.1 is from the user"),
    "two answers in a row": ([FIRST_MESSAGE, ANSWER, ANSWER, LAST_MESSAGE], "messages.2 is from the assistant"),
    "an image in a later message": (
        [message("user", *IMAGE_PART, *TEXT_PART), ANSWER, message("user", *IMAGE_PART, *TEXT_PART)],
        "messages.2 has 1 image",
    ),
    "an image of the assistant": (
        [FIRST_MESSAGE, message("assistant", *IMAGE_PART, *TEXT_PART), LAST_MESSAGE],
        "messages.1 has 1 image",
    ),
    "an answer without a text": ([FIRST_MESSAGE, message("assistant"), LAST_MESSAGE], "messages.1 has 0 texts"),
    "an empty answer": (
        [FIRST_MESSAGE, message("assistant", {"type": "text", "text": ""}), LAST_MESSAGE],
        "messages.1 has an empty",
    ),
    "a later question without a text": ([FIRST_MESSAGE, ANSWER, message("user")], "messages.2 has 0 texts"),
    "no message": ([], "0 messages, 0 images, 0 texts"),
}


@pytest.mark.parametrize(("messages", "finding"), REFUSED_CHATS.values(), ids=REFUSED_CHATS)
def test_messages_that_are_no_dialogue_are_refused(messages, finding, serve):
    answer = serve().post(CHAT, json={"model": "m3diff", "messages": messages})
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert error["code"] == "wrong_parts"
    assert error["param"] == "messages"
    assert finding in error["message"]
    assert "at most 2 images, all in the first message" in error["message"]
    assert "`image_url`" in error["message"]


@pytest.mark.parametrize("role", ["system", "tool", "developer"])
def test_a_message_of_another_role_is_refused(role, serve):
    answer = serve().post(CHAT, json={"model": "m3diff", "messages": [message(role, *TEXT_PART), FIRST_MESSAGE]})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == "messages.0.role"


PAIRS_ONLY = TrainedOn(QUESTION)
BLIP2IDC = FAMILIES["blip2idc"].takes
UNANSWERABLE: dict[str, tuple[TrainedOn, Takes, dict[str, Any], str, str]] = {
    "one image, trained on pairs": (PAIRS_ONLY, Takes(), as_json(image=BEFORE), "images_not_trained", "2 images: "),
    "no image, trained on pairs": (PAIRS_ONLY, Takes(), as_json(question="a"), "images_not_trained", "2 images: "),
    "a pair, trained on single images": (
        TrainedOn(QUESTION, images=(1,)),
        Takes(),
        as_json(before=BEFORE, after=AFTER),
        "images_not_trained",
        "1 image: ",
    ),
    "no image, trained on one and two": (
        TrainedOn(QUESTION, images=(1, 2)),
        Takes(),
        as_json(question="a"),
        "images_not_trained",
        "1 or 2 images: ",
    ),
    "one image, a family of pairs": (PAIRS_ONLY, BLIP2IDC, as_json(image=BEFORE), "images_not_taken", "2 images: "),
    "history, trained on one turn": (
        PAIRS_ONLY,
        Takes(),
        as_json(**PAIR, history=HISTORY),
        "history_not_trained",
        "trained on single questions",
    ),
    "history, a family without turns": (
        TRAINED_ON_EVERYTHING,
        Takes(turns=False),
        as_json(**PAIR, history=HISTORY),
        "history_not_read",
        "does not read earlier turns",
    ),
    "a question, a family without questions": (
        PAIRS_ONLY,
        BLIP2IDC,
        as_json(**PAIR),
        "question_not_read",
        "none: this model",
    ),
}


@pytest.mark.parametrize(("trained_on", "takes", "request_", "code", "limit"), UNANSWERABLE.values(), ids=UNANSWERABLE)
def test_a_sample_that_the_model_was_not_trained_on_is_refused(trained_on, takes, request_, code, limit, serve):
    answer = serve(trained_on, takes).post(CAPTION, **request_)
    assert answer.status_code == 422, answer.text
    refusal = answer.json()
    assert refusal["error"] == code
    assert limit in refusal["limit"]
    assert refusal["remedy"]


@pytest.mark.parametrize(
    ("chat", "code"),
    [
        (dialogue([BEFORE], "Why?"), "images_not_trained"),
        (dialogue([BEFORE, AFTER], "Is it red?", "Yes.", "Why?"), "history_not_trained"),
    ],
    ids=["one image", "two turns"],
)
def test_a_chat_that_the_model_was_not_trained_on_is_refused_in_openais_format(chat, code, serve):
    answer = serve(PAIRS_ONLY).post(CHAT, json=chat)
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == code


# Notes


def test_a_dialogue_longer_than_any_of_the_training_is_answered_with_a_note(serve):
    service = serve(TrainedOn("Why?", turns=2))
    trained = service.post(CAPTION, **as_json(**PAIR, history=HISTORY))
    assert "note" not in trained.json()
    longer = service.post(CAPTION, **as_json(**PAIR, history=HISTORY * 2))
    assert longer.json()["note"] == note_about_sample(Takes(), TrainedOn("Why?", turns=2), "Why?", 3)
    assert "at most 2 turns" in longer.json()["note"]


@pytest.mark.parametrize(
    ("takes", "question", "turns", "words"),
    [
        (Takes(), "Why?", 1, "'How many?'"),
        (Takes(), "Why?", 2, None),
        (Takes(), "Why?", 3, "at most 2 turns"),
        (Takes(), None, 1, None),
        (BLIP2IDC, None, 1, None),
    ],
)
def test_a_note_is_about_the_first_question_or_about_too_many_turns(takes, question, turns, words):
    note = note_about_sample(takes, TrainedOn("How many?", turns=2), question, turns)
    assert note is None if words is None else words in note


# Batches and memory


class RecordingCaptioner:
    """A captioner that records the samples of each call: the number of images, the prompts and the overlay."""

    def __init__(self) -> None:
        self.toy = toy.ToyCaptioner("one")
        self.processor = self.toy.processor
        self.encode_prompt = self.toy.encode_prompt
        self.calls: list[tuple[list[str], bool]] = []

    def answer(self, prepared: list[Prepared], dialogues: list[Any], saliency: bool) -> Any:
        texts = [
            f"{len(images.marks)} {toy.texts_of(turns)}" for images, turns in zip(prepared, dialogues, strict=True)
        ]
        self.calls.append((texts, saliency))
        return self.toy.answer(prepared, dialogues, saliency)


def prepared_request(images: int, question: str, overlay: bool = False) -> PreparedRequest:
    pictures = [plain(images, number) for number in range(images)]
    return PreparedRequest(
        turns=(Turn(question),),
        images=toy.prepare_toy(pictures),
        overlay_images=(pictures[0], pictures[1]) if overlay else None,
    )


def test_a_batch_is_grouped_by_images_length_of_the_prompt_and_overlay():
    captioner = RecordingCaptioner()
    requests = [
        prepared_request(2, "aa?"),
        prepared_request(1, "bbb?"),  # as long as the first with its images, but it has one image
        prepared_request(2, "cc?"),
        prepared_request(2, "dd?", overlay=True),
        prepared_request(2, "eeeeee?"),
        prepared_request(0, "ff?"),
    ]
    answers = answer_requests(captioner, requests)  # type: ignore[arg-type]
    assert captioner.calls == [
        (["2 aa?", "2 cc?"], False),
        (["1 bbb?"], False),
        (["2 dd?"], True),
        (["2 eeeeee?"], False),
        (["0 ff?"], False),
    ]
    assert [answer.text.rpartition("(")[2] for answer in answers] == [
        "aa?)",
        "bbb?)",
        "cc?)",
        "dd?)",
        "eeeeee?)",
        "ff?)",
    ]
    assert [answer.saliency_map is not None for answer in answers] == [False, False, False, True, False, False]
    assert [answer.prompt_tokens for answer in answers] == [5, 5, 5, 5, 9, 3]
    assert {answer.batch_requests for answer in answers} == {6}


def test_many_different_samples_at_once_each_get_their_own_answer(serve):
    service = serve(batch_pairs=8)
    requests = []
    expected = []
    for number in range(30):
        colour = f"{number}/1/0"
        question = "Why" + "?" * (number % 4)
        if number % 3 == 0:
            requests.append(form(png(plain(number, 1)), AFTER, question=question))
            expected.append(toy_answer("one", [colour, "30/40/0"], question))
        elif number % 3 == 1:
            requests.append(image_form(png(plain(number, 1)), question=question))
            expected.append(toy_answer("one", [colour], question))
        else:
            requests.append(as_json(question=f"{number} {question}"))
            expected.append(toy_answer("one", [], f"{number} {question}"))
    assert [text_of(answer) for answer in service.post_at_once(CAPTION, requests)] == expected


def test_the_size_of_a_prepared_request_includes_its_images_for_the_overlay():
    pixels = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    images = (Image.new("RGB", (10, 20)), Image.new("RGB", (5, 2)))
    assert PreparedRequest((), Prepared({"pixels": pixels}, ("a", "b")), images).nbytes == 96 + 600 + 30
    assert PreparedRequest((), Prepared({"pixels": pixels}, ("a", "b")), None).nbytes == 96


def test_there_is_room_while_fewer_bytes_than_the_limit_are_used():
    prepared_bytes = PreparedBytes(100)
    assert prepared_bytes.has_room.is_set()
    prepared_bytes.change(99)
    assert prepared_bytes.has_room.is_set()
    prepared_bytes.change(1)
    assert not prepared_bytes.has_room.is_set()
    prepared_bytes.change(-1)
    assert prepared_bytes.has_room.is_set()


@pytest.fixture
def prepared_sets(monkeypatch: pytest.MonkeyPatch) -> PreparedSets:
    """Count the prepared image sets that exist. The limit is three of them."""
    sets = PreparedSets()
    monkeypatch.setattr(toy, "prepare_toy", sets.prepare)
    monkeypatch.setattr(batcher, "MAX_PREPARED_BYTES", 3 * SET_BYTES)
    return sets


MOST_BYTES = (3 + batcher.DECODERS) * SET_BYTES


def break_answer(captioner: Any, prepared: Any, dialogues: Any, saliency: bool) -> Any:
    raise RuntimeError("broken")


def answer_nothing(captioner: Any, prepared: list[Prepared], dialogues: Any, saliency: bool) -> Any:
    return [""] * len(prepared), None


@pytest.mark.parametrize(("answer", "status"), [(answer_nothing, 200), (break_answer, 500)], ids=["good", "broken"])
def test_prepared_images_that_wait_take_no_more_than_the_limit(answer, status, serve, prepared_sets, monkeypatch):
    monkeypatch.setattr(toy.ToyCaptioner, "answer", answer)
    service = serve(batch_pairs=1)
    answers = service.post_at_once(CAPTION, [image_form(BEFORE)] * 20)
    assert [answer.status_code for answer in answers] == [status] * 20
    assert prepared_sets.peak_bytes <= MOST_BYTES


def test_a_server_that_waits_for_requests_holds_no_prepared_images(serve, prepared_sets, monkeypatch):
    monkeypatch.setattr(toy.ToyCaptioner, "answer", answer_nothing)
    service = serve(batch_pairs=4)
    answers = service.post_at_once(CAPTION, [image_form(BEFORE)] * 4)
    assert [answer.status_code for answer in answers] == [200] * 4
    service.run(asyncio.sleep(0.05))  # the worker waits for the next request
    assert prepared_sets.held_bytes == 0


def test_an_image_set_above_the_limit_is_answered(serve, prepared_sets, monkeypatch):
    monkeypatch.setattr(batcher, "MAX_PREPARED_BYTES", 1)
    monkeypatch.setattr(toy.ToyCaptioner, "answer", answer_nothing)
    answers = serve().post_at_once(CAPTION, [image_form(BEFORE)] * 5)
    assert [answer.status_code for answer in answers] == [200] * 5


def test_the_model_computes_in_its_threads_and_images_are_prepared_in_one(tmp_path, monkeypatch):
    monkeypatch.setattr(batcher, "load", toy.load_toy)
    replica = Replica(source(toy.write_toy(tmp_path / "toy", "one")), 8, 0.05, threads=3)
    try:
        assert replica.decoders.submit(torch.get_num_threads).result() == 1
        assert replica.computer.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(1)  # as in every test


def test_images_of_cancelled_requests_make_room_again(serve, prepared_sets, monkeypatch):
    is_free = threading.Event()

    def answer_when_free(captioner: Any, prepared: list[Prepared], dialogues: Any, saliency: bool) -> Any:
        is_free.wait(60)
        return [""] * len(prepared), None

    monkeypatch.setattr(toy.ToyCaptioner, "answer", answer_when_free)
    service = serve(batch_pairs=1, answer_s=0.3)
    answers = service.post_at_once(CAPTION, [image_form(BEFORE)] * 12)
    assert {answer.status_code for answer in answers} == {503}
    assert prepared_sets.peak_bytes <= MOST_BYTES
    is_free.set()
    service.server.settings = service.cfg.model_copy(update={"answer_s": 60})
    assert service.post(CAPTION, **image_form(BEFORE)).status_code == 200
    service.run(asyncio.sleep(0.05))


def test_an_image_that_cannot_be_decoded_leaves_room(serve, prepared_sets):
    file = io.BytesIO()
    plain(1, 2, size=(500, 500)).save(file, "PNG")
    service = serve()
    answer = service.post(CAPTION, **image_form(file.getvalue()[:-40]))
    assert answer.status_code == 422
    assert answer.json()["error"] == "not_an_image"


# A real model


def test_a_replica_answers_about_one_image_or_two_with_the_turns_before_the_question(tmp_path):
    checkpoint = tiny_checkpoint(tiny_base(tmp_path / "base", seed=4), tmp_path / "checkpoint")
    pictures = [noise_image(number) for number in range(2)]
    turns = (Turn("What changed?", "the cup is gone"), Turn("Why?"))
    samples = [(pictures, turns), (pictures, turns[1:]), (pictures[:1], turns[1:]), ([], turns[1:])]
    captioner = load_captioner(checkpoint, 8)
    expected = []
    for images, dialogue_turns in samples:
        (text,), _ = captioner.answer([captioner.processor.prepare(images)], [dialogue_turns])
        expected.append(text)
    assert len(set(expected)) == 4, "equal answers would not show their order"

    async def answer_all() -> list[Any]:
        replica = Replica(Source("m3diff/1", checkpoint, 8, None), 8, 0.05, 1)
        requests = []
        for images, (*history, last_turn) in samples:
            requests.append(AnswerRequest(tuple(map(png, images)), last_turn.question, tuple(history), overlay=True))
        answers = await asyncio.gather(*(replica.ask(request) for request in requests))
        await replica.remove()
        return answers

    answers = asyncio.run(answer_all())
    assert [answer.text for answer in answers] == expected
    assert [answer.overlay is not None for answer in answers] == [True, True, False, False]
    prompts = [
        captioner.encode_prompt(dialogue_turns, captioner.processor.marks(len(images)))
        for images, dialogue_turns in samples
    ]
    assert [answer.prompt_tokens for answer in answers] == [len(prompt) for prompt in prompts]

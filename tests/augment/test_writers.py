"""Writers: what an endpoint and a local model say becomes texts, and all else is counted by its reason."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.augment.language_model import read_texts, usable
from components.augment.load import load_writer
from components.augment.local_model import LocalModel
from components.augment.params import Grammar, Local, Remote
from components.augment.parts import Writer
from components.endpoint import Answer, Question
from components.models.device import Device
from components.section import ParamsError
from tests.augment.tiny import causal_lm, clip
from tests.chat import CUT_BODY, Server, chat_server

CPU = Device(gpu=False, precision="fp32")


@pytest.fixture
def server() -> Iterator[Server]:
    with chat_server('["one", "two"]') as known:
        yield known


def remote(server: Server, folder: Path, **changes: Any) -> Writer:
    cfg = Remote(**({"kind": "endpoint", "url": server.url, "model": "m"} | changes))
    return load_writer(cfg, 3, folder / "answers.jsonl", CPU)


GOOD, REFUSED = '["Put a cat there", "Place a cat there"]', "I'm just an AI, it is not within my abilities"
BAD: dict[str, tuple[list[Any], dict[str, int]]] = {
    "refused in words": ([REFUSED], {"refused": 1}),
    "refused by the server": ([{"content": None, "refusal": "no"}], {"refused": 1}),
    "empty": ([""], {"empty": 1}),
    "cut": ([{"content": '["Put a c', "finish_reason": "length"}], {"cut": 1}),
    "cut JSON": (['["Put a cat", "Pla'], {"unreadable": 1}),
    "another form": (['{"texts": 3}'], {"unreadable": 1}),
    "a list of others": (["[1, 2]"], {"unreadable": 1}),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_gives_no_text_is_counted_and_is_not_asked_for_again(kind: str, server: Server, tmp_path: Path):
    replies, dropped = BAD[kind]
    server.replies = {"add a cat": replies}
    facts = [{"text": "add a cat"}, {"text": "add a dog"}]
    bad, good = remote(server, tmp_path).write("paraphrase", facts, 2)
    assert (bad.texts, bad.dropped) == ((), Counter(dropped))
    assert (good.texts, good.dropped) == (("one", "two"), Counter())
    assert remote(server, tmp_path).write("paraphrase", facts, 2) == [bad, good]
    assert len(server.asked) == 2


def test_what_is_put_off_or_cut_on_its_way_is_not_lost(server: Server, tmp_path: Path):
    server.replies = {"add a cat": [429, CUT_BODY, 503, GOOD]}
    (written,) = remote(server, tmp_path).write("paraphrase", [{"text": "add a cat"}], 2)
    assert written.texts == ("Put a cat there", "Place a cat there")


def test_the_facts_of_each_task_and_how_many_are_asked_for_are_in_the_question(server: Server, tmp_path: Path):
    writer = remote(server, tmp_path)
    writer.write("difference", [{"first": "a {cup}", "second": "two men"}], 7)
    writer.write("paraphrase", [{"text": "add a cat", "first": "a sofa"}], 4)
    assert "FIRST IMAGE: a {cup}\nSECOND IMAGE: two men\n" in server.texts[0]
    assert " 7 " in server.texts[0]
    assert "INSTRUCTION: add a cat\n" in server.texts[1]
    assert {body["seed"] for body in server.asked} == {3}
    assert all(body["messages"][0]["role"] == "system" for body in server.asked)


@pytest.mark.parametrize(
    ("said", "n", "texts"),
    [
        ('["a", "b"]', 2, ["a", "b"]),
        ('Sure! ```json\n["a"]\n```', 2, ["a"]),
        ("1. Put it there\n2) Or here\n", 2, ["Put it there", "Or here"]),
        ('Here:\n- "a b"\n* c', 2, ["a b", "c"]),
        ("1. Add a [red] hat\n2. Add a hat", 2, ["Add a [red] hat", "Add a hat"]),
        ("Sure [as asked]:\n1. a\n2. b", 2, ["a", "b"]),
        ('Here [2]:\n```json\n["a", "b [c]"]\n```\nAll are neutral [as asked].', 2, ["a", "b [c]"]),
        ('{"variations": ["a", "b"]}', 2, ["a", "b"]),
        ("Put it there.", 1, ["Put it there."]),
        ("Put a [red] hat there.", 1, ["Put a [red] hat there."]),
        ("Put it there.", 2, None),
        ("a\nb", 1, None),
        ("I cannot do that", 1, None),
        ('["a", ', 2, None),
        ('["a", ', 1, None),
        ('{"text": "a"}', 1, None),
        ("[1, 2]", 1, None),
        ("[]", 2, None),
        ("[" * 3000, 2, None),
    ],
)
def test_texts_are_read_from_a_list_in_json_or_lines(said: str, n: int, texts: list[str] | None):
    assert read_texts(said, n) == texts


def test_of_the_texts_of_an_answer_empty_repeated_refusing_and_surplus_ones_are_dropped():
    said = '["Add a cat!", "put  a\\ncat", "", "Put a cat.", "Sorry, no", "place a cat", "a cat, please"]'
    written = usable(Answer("text", said), 2, "add a cat")
    assert written.texts == ("put a cat", "place a cat")
    assert written.dropped == {"repeated": 2, "empty": 1, "refused": 1, "more than asked for": 1}


def test_half_a_character_in_an_answer_is_written_as_a_question_mark(server: Server, tmp_path: Path):
    server.replies = {"add a cat": ['["put a cat \\ud83d there"]']}
    (written,) = remote(server, tmp_path).write("paraphrase", [{"text": "add a cat"}], 1)
    assert written.texts == ("put a cat ? there",)


def test_a_refused_key_is_the_users(server: Server, tmp_path: Path):
    server.replies = {"add": [401]}
    with pytest.raises(ParamsError, match="AuthenticationError"):
        remote(server, tmp_path).write("paraphrase", [{"text": "add a cat"}], 2)


def test_minichanges_grammar_writes_as_many_as_asked_for_and_nothing_else():
    writer = load_writer(Grammar(kind="grammar"), 3, Path("nowhere"), CPU)
    two, none = writer.write("paraphrase", [{"text": "the lamp went out"}, {"text": "switch it off"}], 2)
    assert two.texts == ("the lamp went out between the images", "the lamp went out and the light changed")
    assert none.texts == ()
    first = {"first": "at the top a small red ball", "second": "at the top a small blue ball"}
    (told,) = writer.write("difference", [first], 2)
    assert told.texts == (
        "at the top the small red ball turned blue",
        "at the top the small red ball turned blue in color",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return causal_lm(tmp_path_factory.mktemp("lm") / "model")


def local(folder: Path, store: Path, **changes: Any) -> LocalModel:
    cfg = Local(**({"kind": "local", "model": folder, "max_tokens": 8} | changes))
    return LocalModel(cfg, store / "answers.jsonl", CPU)


def test_a_local_model_answers_the_same_again_and_its_answers_are_kept(folder: Path, tmp_path: Path):
    questions = [Question("the red ball", system="say it"), Question("the lamp", system="say it")]
    found = local(folder, tmp_path).ask(questions, "test")
    assert len(found) == 2
    assert {answer.kind for answer in found} <= {"text", "cut", "empty"}
    again = local(folder, tmp_path)
    assert again.ask(questions, "test") == found
    assert again.model is None, "nothing was asked, so nothing was loaded"
    assert local(folder, tmp_path / "else").ask(questions[::-1], "test") == found[::-1]


def test_a_local_models_answers_come_in_the_order_of_the_questions(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(LocalModel, "_answer", lambda self, question: Answer("text", question.text))
    for texts in (["a", "b"], ["c", "b", "a", "c"]):
        found = local(folder, tmp_path).ask([Question(text) for text in texts], "test")
        assert [answer.text for answer in found] == texts


def test_what_a_local_model_thinks_aloud_is_not_its_answer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = local(folder, tmp_path)
    asked._load()
    monkeypatch.setattr(asked.tokenizer, "decode", lambda *_, **__: '<think>\n["x"]?</think>\n\n["a", "b"]')
    monkeypatch.setattr(asked, "_ends", lambda: set(range(10**6)))
    assert asked.ask([Question("the red ball")], "test") == [("text", '["a", "b"]')]


def test_an_answer_that_reaches_the_limit_of_tokens_is_cut(folder: Path, tmp_path: Path):
    (answer,) = local(folder, tmp_path, max_tokens=1).ask([Question("the red ball")], "test")
    assert answer.kind == "cut"


def test_a_local_writer_is_known_by_its_weights(folder: Path, tmp_path: Path):
    cfg = Local(kind="local", model=folder)
    writer = load_writer(cfg, 3, tmp_path / "answers.jsonl", CPU)
    assert len(writer.identity) == 64
    with pytest.raises(ParamsError, match=f"has the sha256 {writer.identity}, the parameters say {'0' * 64}"):
        local(folder, tmp_path, sha256="0" * 64)
    local(folder, tmp_path, sha256=writer.identity)
    with pytest.raises(ParamsError, match=r"holds no config\.json"):
        local(tmp_path, tmp_path)


def test_a_folder_of_another_model_or_without_safetensors_is_no_writer(tmp_path: Path):
    pickled = causal_lm(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    for folder in (clip(tmp_path / "clip"), pickled):
        with pytest.raises(ParamsError, match=rf"^{folder}: is no causal language model .*; save it anew"):
            local(folder, tmp_path).ask([Question("the red ball")], "test")

"""Writers: what an endpoint says becomes texts, and all else is counted by its reason."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from m3diff.endpoint import Answer
from m3diff.stages.augment.params import Grammar, Remote
from m3diff.stages.augment.writers import Writer, load_writer, read_texts, usable
from tests.chat import Server, chat_server


@pytest.fixture
def server() -> Iterator[Server]:
    with chat_server('["one", "two"]') as known:
        yield known


def remote(server: Server, folder: Path, **changes: Any) -> Writer:
    cfg = Remote(**({"kind": "endpoint", "url": server.url, "model": "m"} | changes))
    return load_writer(cfg, 3, folder / "answers.jsonl")


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


def test_minichanges_grammar_writes_as_many_as_asked_for_and_nothing_else():
    writer = load_writer(Grammar(kind="grammar"), 3, Path("nowhere"))
    two, none = writer.write("paraphrase", [{"text": "the lamp went out"}, {"text": "switch it off"}], 2)
    assert two.texts == ("the lamp went out between the images", "the lamp went out and the light changed")
    assert none.texts == ()
    first = {"first": "at the top a small red ball", "second": "at the top a small blue ball"}
    (told,) = writer.write("difference", [first], 2)
    assert told.texts == (
        "at the top the small red ball turned blue",
        "at the top the small red ball turned blue in color",
    )

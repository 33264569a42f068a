"""Captions that were probably not written by a person are counted by kind. Ordinary captions are not counted."""

from dataclasses import replace
from typing import get_args

import polars as pl
import pytest

from m3diff.datasets import pairs
from m3diff.datasets.odd_captions import ODD_KINDS
from m3diff.datasets.placeholders import is_placeholder
from m3diff.datasets.spec import Row
from m3diff.records.errors import DataError
from m3diff.scoring.marks import DATA_MARKS, SUSPECT, find_mark
from m3diff.stages.ingest.captions import find_odd_captions
from tests.datasets.test_filters import write_table
from tests.errors import raises
from tests.layouts import run_ingest

ODD = {
    "refusals": [
        "I'm sorry, I can't help with that.", "I’m sorry, but I cannot see the images.", "As an AI language model, I",
        "As an AI, I cannot compare images.", "I apologize, but no image was shown", "I am unable to view images",
        "Sorry, I can't tell what changed.", "I cannot assist with this request.", "No images were provided.",
        "I do not have access to the images.", "Please provide both images.", "Lo siento, no puedo", "抱歉，我无法",
        "Unfortunately, I can't see any images here.", "It looks like you haven't uploaded the images yet.",
        "My apologies, I cannot determine the change.", "Unable to process image.", "Error: rate limit exceeded",
        "Request timed out.", "Internal server error", "죄송하지만 도와드릴 수 없습니다.", "Error code: 429",
    ],
    "roles": [
        "USER: what changed? ASSISTANT: a car left", "Assistant: the lamp is gone", "assistant\nthe lamp is gone",
        "### Response: the lamp is gone", "What changed between the images? the lamp is gone", "Human: the lamp left",
        "Describe the difference between the two images. The lamp is gone", "You are a helpful assistant.",
        "What changed?", "What is the difference between the two images?", "Q: what changed? A: the lamp is gone",
    ],
    "chat": [
        "Sure! Here is the caption: a tree appeared.", "Certainly! The lamp is gone.", "Caption: the lamp is gone",
        "Here's a description of the changes: the lamp left", "Answer: the lamp is gone", "Okay, here it is",
        "the lamp is gone. Let me know if you need more", "Based on the provided images, the lamp is gone",
        "Here are the differences: the lamp", "Of course! The lamp is gone.", "the lamp left. I hope this helps!",
        "Sure — here is the change: a car left", "The caption is: a car left", "当然！灯不见了",
        "Based on the images provided, a car left",
    ],
    "tokens": [
        "<|im_start|>the lamp is gone", "the lamp is gone</s>", "[INST] the lamp [/INST]", "<image>\nthe lamp is gone",
        "<think>hm</think> the lamp is gone", "the lamp [PAD] [PAD]", "the lamp ##s gone", "▁the lamp", "<<SYS>> lamp",
    ],
    "literals": ['the {"caption": "the lamp is gone"', '["the lamp is gone", "a car left'],
    "markup": [
        "```the lamp is gone```", "**The lamp** is gone", "a man &amp; a dog",
        "the lamp &amp is gone", "it&#39;s",
    ],
    "encoding": [
        "the cafÃ© is gone", "it\u00e2\u20ac\u2122s gone", "a caf\ufffd left", "the cafÃƒÂ© left", "it\x92s gone",
        "Ã–sterreich is gone", "voilÃ\xa0 the lamp", "20Â°C on the sign", "\u00f0\u0178\u02dc\u20ac left",
        "caf√© is gone",
        "Ð»Ð°Ð¼Ð¿Ð° left", "РџСЂРёРІРµС‚", "锟斤拷 left", "the ï¿½ left", "å\x8f°ç\x81¯ left",
        "auto zmizelo, pÅ™ibyl keÅ™", "zniknÄ™Å‚a lampa", "Ï„Î¿ Î±Ï…Ï„Î¿ÎºÎ¯Î½Î·Ï„Î¿", "à¤ªà¥‡à¤¡à¤¼",
        "à¸•à¹‰à¸™à¹„à¸¡à¹‰",
        "ë‚˜ë¬´ê°€", "das GebГ¤ude", "das Geb├ñude", "das Geb‰ude", "gr÷er", "ìàøèíà óåõàëà", "Ê÷²»¼ûÁË",
    ],
    "escapes": [
        "a tree\\nappeared", "a caf\\u00e9 left", "a\\tb", "caf\\xe9", "the \\\"lamp\\\" left", "\x1b[31mthe lamp",
        "caf=C3=A9 is gone", "caf%C3%A9 is gone", "the%20lamp",
    ],
}  # fmt: skip
ORDINARY = [
    "the sign says 'SURE'", "a sorry looking dog left", "the sign now says \"I'm sorry\"", "sorry sign was removed",
    "I cannot see any difference", "there are no differences", "a user 's phone is gone", "the assistant coach left",
    "the text: hello", "the screen says Caption: on", "AT&T logo removed", "« CAFÉ » is gone", "the word É» is gone",
    "«MAÇÃ» is gone", "naïve café Köln, Ångström", "лампа исчезла", "Сцена: лампа исчезла", "两张图片的区别",
    "台灯不见了",
    "the clock shows 10:30", "- the lamp is gone\n- a car left", "1. the lamp is gone", "it says [EXIT]",
    "A <-> B swapped",
    "the Canon EOS is gone", "a PAD was added", "what was a door is now a wall", "here is a new car", "# 3 player left",
    "Change: the lamp is gone", "(left) it is gone", "a placeholder text was replaced by a name", "a string of lights",
    "the caption is missing from the poster", "add text", "write a caption under the photo of the man", "100 % & more",
    "the 2 < 3 sign became 3 > 2", "surely the lamp moved", "the lamp (\"big one\") left", "C++ & C#", "ok sign is on",
    "چراغ می\u200cرود", "Ã is the letter on the sign", "the man’s hat is gone",
    "jäääär on läinud, töööö", "NESCAFÉ® sign is gone", "NEJVÝŠ POLOŽENÝ", "POKÉ™ card",
    "l’été à Noël, « ça » a été ôté",
    "the car—left", "the car…left", "2×½ became 3÷4", "ÖPNV-Schild fehlt", "MÜLL ist weg: 5 m²",
    "the error sign is gone",
    "an error page: 404 became a form", "unfortunately parked car left", "is the car gone?", "where was the red car?",
    "the rate limit sign", "a discount of 20% is 30% now", "x=C3 became x=C4", "знак «СРОЧНО» убран", "NO CAPTION sign",
    "the text is not found on the wall any more", "a dummy was added", "the XXX sign left",
]  # fmt: skip
PLACEHOLDERS = [
    "Placeholder for visual caption.", "placeholder", "[insert caption here]", "<caption>", "{caption}", "TODO",
    "TODO: write this", "lorem ipsum dolor sit amet", "string", "Your caption here", "caption goes here",
    "sample caption", "This is a placeholder", "To be added", "description missing",
    "No caption available", "no caption provided", "caption unavailable", "description not available",
    "insert text here",
    "${caption}", "%s", "xxx", "dummy", "asdf",
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in ODD.items() for text in texts])
def test_a_caption_that_no_person_wrote_has_its_kind(kind, text):
    assert find_mark(text) == kind
    assert pl.Series([text]).str.contains(SUSPECT).all(), "the fast search passes it over"


@pytest.mark.parametrize("text", ORDINARY)
def test_a_caption_of_a_person_has_no_mark(text):
    assert find_mark(text) is None
    assert not is_placeholder(text)


@pytest.mark.parametrize("text", PLACEHOLDERS)
def test_a_placeholder_says_nothing(text):
    assert is_placeholder(text)


def test_every_kind_can_be_confirmed_and_has_a_remedy():
    assert {*DATA_MARKS, "repeats"} == {*ODD_KINDS}
    assert {*ODD_KINDS} <= {*get_args(pairs.Confirmable)}


def as_rows(texts: list[str], types: tuple[str, ...] = (), split: str = "train") -> list[Row]:
    return [
        Row(
            name=str(number),
            split=split,
            scene=None,
            images=("a", "b"),
            references=[text],
            change_types=[*types],
            source=f"row {number}",
        )
        for number, text in enumerate(texts)
    ]


def test_captions_are_counted_by_kind_and_the_first_of_test_is_shown():
    rows = as_rows(["it fell", "Caption: it fell", "I'm sorry, no"]) + as_rows(["Answer: it fell"], split="test")
    chat, refusals = sorted(find_odd_captions(rows), key=lambda odd: odd.kind)
    assert chat.kind == "chat"
    assert chat.count == 2
    assert chat.test_count == 1
    assert chat.total == 4
    assert chat.example == "Answer: it fell"
    assert refusals.kind == "refusals"
    assert refusals.count == 1
    assert refusals.source == "row 2"


VARIED = [f"the lamp {number} is gone" for number in range(12)]
REPEATS = {
    "half of the pairs": (["there is a difference"] * 12 + VARIED, 12),
    "every pair": (["something changed"] * 16, 16),
    "most pairs, with one other text": (["the lamp is gone"] * 10 + ["a car left"] * 8, 10),
    "one text in several spellings": (
        ["Something changed.", "something  changed", "SOMETHING changed!"] * 4 + VARIED,
        12,
    ),
    "one text in spellings of two pairs each": (
        ["Something changed.", "something  changed", "SOMETHING changed!"] * 2 + VARIED,
        6,
    ),
    "one text in spellings of one pair each": (
        ["Something changed.", "something  changed", "SOMETHING changed!", "Something changed"]
        + ["something changed", "something changed!", *VARIED],
        0,
    ),
    "white space alone": ([" "] * 12 + VARIED, 0),
    "two fifths": (["the scene differs"] * 8 + VARIED, 8),
    "each of two texts on exactly half of the pairs": (["the lamp is gone", "a car left"] * 8, 8),
    "a fifth": (["the lamp is gone"] * 8 + [f"the car {number} left" for number in range(32)], 8),
    "three times the mean": (["the lamp is gone"] * 9 + VARIED[:6] * 2, 9),
    "a few of many": (["the lamp is gone"] * 8 + VARIED * 4, 0),
    "a small set": (["the lamp is gone"] * 15, 0),
    "no change": (["there is no difference"] * 12 + VARIED, 0),
    "nothing has changed": (["the two scenes seem identical"] * 30 + VARIED, 0),
    "a small vocabulary": ([f"the {thing} is gone" for thing in ("lamp", "car", "tree", "box")] * 10, 0),
}


@pytest.mark.parametrize(("texts", "count"), REPEATS.values(), ids=REPEATS)
def test_one_caption_on_a_large_share_of_the_pairs_is_counted(texts, count):
    assert [odd.count for odd in find_odd_captions(as_rows(texts)) if odd.kind == "repeats"] == [count] * bool(count)


def test_pairs_without_a_change_may_repeat_their_caption():
    assert find_odd_captions(as_rows(["the scene is calm"] * 30, ("none",)) + as_rows(VARIED)) == []


def test_what_is_no_text_is_passed_over():
    mixed_row, row_of_one_text, row_of_none = as_rows(["a", "b", "c"])
    rows = [replace(mixed_row, references=[7, None, "half \ud83d", "Caption: x"])]
    rows += [replace(row_of_one_text, references="Caption: x"), replace(row_of_none, references=None)]
    (odd_captions,) = find_odd_captions(rows)
    assert odd_captions.kind == "chat"
    assert odd_captions.count == 1


def test_pairs_without_a_caption_are_left_out_with_a_count_and_the_first(tmp_path, capsys):
    root = write_table(tmp_path / "own", 4, captions=lambda n: "n/a" if n in (1, 2) else f"it fell {n}")
    run_ingest(root, "pairs", "own", no_caption=["n/a"])
    assert "2 pairs without a caption are left out; the first is pairs.csv, line 3" in capsys.readouterr().out


def test_a_dataset_whose_pairs_have_no_caption_is_refused(tmp_path):
    root = write_table(tmp_path / "own", 3, captions=lambda n: "n/a")
    with raises(DataError, "ingest.no_captioned_pair", dataset="own", path=root):
        run_ingest(root, "pairs", "own", no_caption=["n/a"])


def test_a_test_split_asks_and_a_training_split_is_counted(tmp_path, capsys):
    text = "I'm sorry, I can't help with that."
    train = write_table(tmp_path / "train", 3, captions=lambda n: text if n == 0 else f"it fell {n}")
    run_ingest(train, "pairs", "own")
    assert "1 of 3 captions" in capsys.readouterr().out
    test = write_table(tmp_path / "test", 3, captions=lambda n: text if n == 2 else f"it fell {n}")
    with raises(DataError, "ingest.captions_in_doubt", dataset="own", path=test) as error:
        run_ingest(test, "pairs", "own")
    (question,) = error.value.fields["questions"]
    assert "pairs.csv, line 4" in question
    assert "confirmed: [refusals]" in question
    report = run_ingest(test, "pairs", "own", confirmed=["refusals"])
    assert report.pairs == {"train": 1, "val": 1, "test": 1}

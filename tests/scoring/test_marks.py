"""Marks in captions: what is one, what is none, and what the quick tests before slow patterns may not miss."""

import random
import time
from ast import literal_eval

import numpy as np
import polars as pl
import pytest

from m3diff.datasets.minichange import CHANGE_TYPES, SAMPLERS, references, sample_types
from m3diff.scoring.marks import (
    DATA_MARKS,
    PATTERNS,
    REPETITION,
    SUSPECT,
    find_candidates,
    find_mark,
    may_repeat,
    note_marks,
)

TEXTS = [
    "the lamp on the table is gone",
    "a red car has parked near the door",
    "the man in the blue shirt left",
    "a tree was cut down in the garden",
    "the sign over the shop is now green",
    "two boxes were moved to the left",
]

MARKS = {
    "special tokens or tags": [
        "{}<|im_end|>", "{}<|endoftext|>", "<s> {}</s>", "{} <pad> <pad>", "[CLS] {} [SEP] [PAD]", "<start> {} <end>",
        "{} <EOS>", "the <unk> {}", "startseq {} endseq", "{}<｜end▁of▁sentence｜>", "{}<end_of_turn>", "{}<0x0A>",
        "{} EOS", "<image>\n{}", "{}<br>", "[TOOL_CALLS] {}", "<answer>{}</answer>", "<think>hm</think>{}",
        "<a href='x'>{}</a>", "<img/>{}",
    ],
    "subword marks of a tokenizer": ["{} ##ing", "▁{}", "the Ġlamp {}", "{}Ċ", "{} ⁇", "{} \ufffd"],
    "a role name or a prompt": [
        "USER: What has changed? ASSISTANT: {}", "assistant\n{}", "Question: What changed? Answer: {}",
        "### Response: {}", "What has changed between the two images? {}", "{}\nHuman: and now", "Thought: {}",
        "Describe the difference between the two images. {}", "You are a helpful assistant. {}",
    ],
    "JSON or another literal": [
        '{{"caption": "{}"}}', "{{'caption': '{}'}}", '[{{"generated_text": "{}"}}]', '{{"caption": "{}', "b'{}'",
        "('{}',)", "tensor([101, 2003])",
    ],
    "Markdown, LaTeX or HTML": [
        "```json\n{}\n```", "**{}**", "- {}", "• {}", "1. {}", "# {}", "\\boxed{{{}}}", "{} &amp; more",
    ],
    "control characters or escape sequences": ["\x1b[31m{}", "\u200b{}", "{}\x07", "{}\\n", "{}\\u2019"],
    "a chat model's words to its user": [
        "Sure! Here is the caption: {}", "Certainly! {}", "Here's a one-sentence description: {}",
        "Based on the provided images, {}", "{} Let me know if you need more.", "Caption: {}", "Final Answer: {}",
    ],
    "a refusal": [
        "I'm sorry, I cannot see the images.", "As an AI language model, I {}", "I am unable to view images",
        "Please provide the images.", "I can't view {}", "I apologize, but {}",
    ],
    REPETITION: [
        "{0} {0} {0} {0} {0}", "the the the the the {}", "{}" + " and the" * 5, "{} !!!!!!!!!!!!!!!!"
    ],
    "a placeholder": ["nan", "None", "[]", "N/A", "null", "-", "...", "undefined", "!!!!"],
    "letters of another script": ["两张图片的区别 {}", "лампа {}"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "variant"), [(kind, variant) for kind in MARKS for variant in MARKS[kind]])
def test_a_mark_in_every_caption_is_counted_and_one_caption_is_shown(kind: str, variant: str):
    marked = [variant.format(text) for text in TEXTS]
    (note,) = [note for note in note_marks(marked) if note.startswith(f"6 of 6 captions contain {kind}, such as ")]
    shown = literal_eval(note.partition("such as ")[2].rpartition("; ")[0])
    assert shown in marked[0]


@pytest.mark.parametrize("kind", MARKS)
def test_one_marked_reference_is_enough_for_a_note(kind: str):
    captions = [*TEXTS, MARKS[kind][0].format(TEXTS[0])]
    (note,) = [note for note in note_marks(captions, "references") if kind in note]
    assert note.startswith("1 of 7 references ")


@pytest.mark.parametrize("text", ["\n", " ", "!", ". ", "a ", "* a ", "`a ", "<a ", "a: ", "| ", "{a: ", "what image "])
def test_a_long_caption_takes_no_time(text: str):
    begin = time.process_time()
    note_marks([text * 30_000, text * 30_000 + "x"])
    assert time.process_time() - begin < 4


ORDINARY = [
    "the man 's red car -lrb- left -rrb- is gone", "there isn 't a dog , is there ?", "the 2 < 3 sign became 3 > 2",
    'the sign says "open" now', "the unk logo moved", "A man's coat is red; the woman's is blue.", "it reads A not 2",
    "animal1 is larger than animal2 .", "I cannot see any difference", "no change", "the user 's phone is gone",
    "in the after image, the assistant of the magician left", "Model airplane with stripes", "is there a cat?", "none",
    "add a c++ logo & a #1 badge (small)", "café naïve Köln", "very very long hair", "remove the dog. add a cat.",
    "the screen shows an error", "the text: hello", "person #2 left", "the 1. floor is lit", "`` open '' is on",
]  # fmt: skip


def test_ordinary_captions_have_no_note():
    assert note_marks((ORDINARY + TEXTS) * 3) == []


def test_captions_of_minichange_have_no_note():
    captions = references((), 5) * 10
    for sampler in SAMPLERS.values():
        for number in range(400):
            rng = np.random.default_rng([7, number])
            changes = sampler.sample_pair(rng, sample_types(rng, number, 0.3, CHANGE_TYPES)).changes
            captions += references(changes, 3)
    assert len(captions) > 2_000
    assert note_marks(captions) == []


# Parts of marked captions; joined at random, many hold a mark of some kind and many hold none
PARTS = (
    "<|im_end|>", "<eos>", "<｜end｜>", "[INST]", "endseq", "EOS", "##ing", "▁the", "Ġ", "ASSISTANT:", "Question: ",
    "assistant ", "### Answer:", "what is it?", "Describe the", "helpful assistant", '{"caption": "', "b'",
    "tensor(", "```", "**bold", "# Title", "- item", "1. item", "\\frac{", "&amp;", "\x00", "\u200b", "\\n",
    "Sure!", "okay, here", "hope this helps", "let me know", "here is a caption:", "Based on the two provided",
    "Caption: ", "I'm sorry", "I’m sorry", "apologise", "as an AI", "I cannot view", "no images were provided",
    "please upload", "lo siento", "抱歉", "nan", "N/A", "...", "д", "красный", "the red cube", "moved", "it", "!",
    "?", ":", "\n", "  ", "\t", "\u2003", "\x1c", "ſorry", "İ", "a_b", "\ud800",
)  # fmt: skip


@pytest.mark.parametrize("kind", PATTERNS)
def test_the_fast_search_passes_over_no_marked_caption(kind):
    draws = random.Random(kind)
    captions = ["".join(draws.choices(PARTS, k=draws.randint(1, 4))) for _ in range(4000)]
    captions += [" ".join(draws.choices(PARTS, k=draws.randint(1, 6))) for _ in range(4000)]
    marked = [caption for caption in captions if PATTERNS[kind].search(caption)]
    assert kind == REPETITION or len(marked) > 40
    searched = set(find_candidates(kind, captions))
    assert [caption for caption in marked if caption not in searched] == []


@pytest.mark.parametrize(
    ("kind", "caption"),
    [("special tokens or tags", "<img src=x>"), ("a role name or a prompt", "### the answer is: gone")],
)
def test_the_fast_search_finds_a_mark_with_spaces(kind: str, caption: str):
    assert PATTERNS[kind].search(caption)
    assert find_candidates(kind, [caption]) == [caption]


def test_the_fast_search_leaves_out_what_people_write():
    captions = [f"the {color} cube, which is behind the ball, moved to the left" for color in ("red", "blue", "green")]
    assert [find_candidates(kind, captions) for kind in PATTERNS] == [[]] * len(PATTERNS)


def test_a_note_counts_every_copy_of_a_marked_caption():
    captions = ["<|im_end|> gone", "the cube is gone", "<|im_end|> gone"]
    (note,) = note_marks(captions)
    assert note.startswith("2 of 3 captions ")
    assert "'<|im_end|> gone'" in note


@pytest.mark.parametrize("seed", range(20))
def test_every_caption_with_a_repetition_passes_the_quick_look(seed):
    rng = random.Random(seed)
    pattern = PATTERNS[REPETITION]
    repeated = 0
    for _ in range(300):
        phrase = " ".join(
            rng.choice(("a", "A", "b", "aa", "\u03a3", "\u03c3", "\u017f", "1", "!")) for _ in range(rng.randint(1, 3))
        )
        copies = rng.choice((" ", "\n", "", "  ")).join([phrase, phrase.swapcase()] * rng.randint(1, 6))
        caption = f"the ball {copies} is gone"
        if pattern.search(caption):
            repeated += 1
            assert may_repeat(caption), caption
    assert repeated > 10


def test_a_caption_without_a_repetition_is_not_searched():
    assert not may_repeat("the red cube that is behind the ball moved to the left of the cone")


# Captions of datasets, with line ends and spaces as people paste them
DATASET_CAPTIONS = {
    "refusals": "As an AI  language\nmodel, I see no car",
    "roles": "USER: what changed?  ASSISTANT: a car left",
    "chat": "the lamp is gone. Let  me know if\nyou need more",
    "tokens": "the lamp is gone </s>",
    "literals": 'the {"caption": "the lamp is gone"',
    "markup": "**The lamp** is gone",
    "encoding": "voilÃ\xa0 the lamp",
    "escapes": "the lamp\x1cis gone",
}


@pytest.mark.parametrize("kind", DATA_MARKS)
def test_a_mark_in_a_dataset_s_caption_has_its_kind_however_it_is_spaced(kind: str):
    caption = DATASET_CAPTIONS[kind]
    assert find_mark(caption) == kind
    assert pl.Series([caption]).str.contains(SUSPECT).all(), "the fast search passes it over"


@pytest.mark.parametrize("caption", ["There were two, but no images\nwere attached", "As an\nAI I see no lamp"])
def test_a_phrase_may_be_broken_by_a_line_end(caption: str):
    assert find_mark(caption) is not None
    assert len(note_marks([caption])) == 1


def test_in_a_dataset_a_heading_of_changes_is_ordinary_and_one_of_an_output_is_not():
    assert find_mark("Changes: the lamp is gone") is None
    assert find_mark("Output: the lamp is gone") == "chat"
    assert find_mark("Caption: the lamp is gone") == "chat"


@pytest.mark.parametrize("caption", [*TEXTS, *ORDINARY, "a caf\u00e9\u00a0sign left", "the man\u2019s hat"])
def test_an_ordinary_caption_of_a_dataset_has_no_mark(caption: str):
    assert find_mark(caption) is None

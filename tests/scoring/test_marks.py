"""Captions as tokenizers, tuners and chat models really leave them: counted and shown, scored as they are."""

import time

import numpy as np
import pytest

from m3diff.datasets.minichange.generate import CHANGE_TYPES, LEVELS, references, sample_types
from m3diff.scoring.marks import notes_of_marks

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
        "{}<|im_end|>", "{}<|eot_id|>", "{}<|endoftext|>", "<s> {}</s>", "{} <pad> <pad>", "[CLS] {} [SEP] [PAD]",
        "<start> {} <end>", "{} <EOS>", "the <unk> {}", "unk unk {}", "startseq {} endseq", "[start] {} [end]",
        "{}<｜end▁of▁sentence｜>", "{}<end_of_turn>", "<|begin_of_box|>{}<|end_of_box|>", "{}<|im_", "{}</w>",
        "{}<0x0A>", "{} <NULL> <NULL>", "< s > {} < / s >", "{} EOS", "<image>\n{}", "<image><image> {}", "{}<br>",
        "<tool_call>{}</tool_call>", "[TOOL_CALLS] {}", "<box>(1,2),(3,4)</box>{}", "<answer>{}</answer>", "<p>{}</p>",
    ],
    "marks of subwords": ["{} ##ing", "▁{}", "the Ġlamp {}", "{}Ċ", "the la@@ mp {}", "{} ⁇", "{} \ufffd"],
    "a role or a prompt": [
        "USER: What has changed? ASSISTANT: {}", "assistant\n{}", "Question: What changed? Answer: {}",
        "### Response: {}", "What has changed between the two images? {}", "{}\nHuman: and now",
        "Describe the difference between the two images. {}",
        "You are a helpful assistant. {}",
    ],
    "reasoning": ["<think>hm</think>{}", "<think> hm, the first", "hm</think> {}", "Thought: {}"],
    "JSON or another literal": [
        '{{"caption": "{}"}}', "{{'caption': '{}'}}", '[{{"generated_text": "{}"}}]', '{{"caption": "{}', "b'{}'",
        "('{}',)", "CompletionOutput(index=0, text='{}')", "tensor([101, 2003])", "{{{}}}",
    ],
    "Markdown, LaTeX or HTML": [
        "```json\n{}\n```", "**{}**", "- {}", "• {}", "1. {}", "# {}", "\\boxed{{{}}}", "$\\text{{{}}}$",
        "{} &amp; more", "`{}`",
    ],
    "control characters or escape sequences": ["\x1b[31m{}", "[31m{}[0m", "\u200b{}", "{}\x07", "{}\\n", "{}\\u2019"],
    "a label": ["Caption: {}", "Final Answer: {}", "**Difference:** {}", "The answer is: {}", "Change: {}"],
    "words of a chat model to its user": [
        "Sure! Here is the caption: {}", "Certainly! {}", "Here's a one-sentence description: {}",
        "Based on the provided images, {}", "Let me look. {}", "{} Let me know if you need more.",
    ],
    "a refusal": [
        "I'm sorry, I cannot see the images.", "As an AI language model, I {}", "I am unable to view images",
        "Please provide the images.", "No images were provided", "I apologize, but {}",
    ],
    "an error message": ["Error: CUDA out of memory", "Traceback (most recent call last):"],
    "a placeholder": ["nan", "None", "[]", "N/A", "null", "-", "...", "undefined", "!!!!"],
    "a phrase over and over": ["{0} {0} {0} {0} {0}", "the the the the the {}", "{}" + " and the" * 5],
    "a character over and over": ["{} !!!!!!!!!!!!!!!!"],
    "letters of another script": ["两张图片的区别 {}", "лампа {}"],
}  # fmt: skip


@pytest.mark.parametrize("kind", MARKS)
def test_marks_are_counted_and_one_is_shown(kind: str):
    for variant in MARKS[kind]:
        marked = [variant.format(text) for text in TEXTS]
        (note,) = [note for note in notes_of_marks(marked) if note.startswith(f"6 of 6 captions hold {kind}, such as ")]
        assert repr(marked[0])[1:20] in note, variant
    captions = [*TEXTS, MARKS[kind][0].format(TEXTS[0])]
    (note,) = [note for note in notes_of_marks(captions, "references") if kind in note]
    assert note.startswith("1 of 7 references ")


@pytest.mark.parametrize("text", ["\n", " ", "!", ". ", "a ", "* a ", "`a ", "<a ", "a: ", "| ", "{a: ", "what image "])
def test_a_long_caption_takes_no_time(text: str):
    begin = time.process_time()
    notes_of_marks([text * 30_000, text * 30_000 + "x"])
    assert time.process_time() - begin < 4


ORDINARY = [
    "the man 's red car -lrb- left -rrb- is gone", "there isn 't a dog , is there ?", "the 2 < 3 sign became 3 > 2",
    'the sign says "open" now', "the unk logo moved", "A man's coat is red; the woman's is blue.", "it reads A not 2",
    "animal1 is larger than animal2 .", "I cannot see any difference", "no change", "the user 's phone is gone",
    "in the after image, the assistant of the magician left", "Model airplane with stripes", "is there a cat?", "none",
    "add a c++ logo & a #1 badge (small)", "café naïve Köln", "very very long hair", "remove the dog. add a cat.",
    "the screen shows an error", "the text: hello", "person #2 left", "the 1. floor is lit", "`` open '' is on",
]  # fmt: skip


def test_ordinary_captions_and_those_of_minichange_have_no_note():
    many = (ORDINARY + TEXTS) * 3
    assert notes_of_marks(many) == []
    captions = []
    for level, number in ((level, number) for level in LEVELS for number in range(400)):
        rng = np.random.default_rng([7, number])
        changes = LEVELS[level].sample_pair(rng, sample_types(rng, number, 0.3, CHANGE_TYPES))[3]
        captions.append(references(changes, 3))
    captions += [references((), 5)] * 10
    texts = [text for found in captions for text in found]
    assert len(texts) > 2_000
    assert notes_of_marks(texts) == []

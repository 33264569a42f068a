"""The test pairs, the protocols that score them, groups, published figures, and marks of models in captions."""

import hashlib
import json
import time
from ast import literal_eval
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.datasets import DATASETS
from m3diff.datasets.minichange import CHANGE_TYPES, LEVELS, references, sample_types
from m3diff.datasets.spec import Protocol
from m3diff.records.errors import DataError
from m3diff.records.schemas import RECORD_SCHEMA
from m3diff.scoring.marks import notes_of_marks
from m3diff.scoring.pairs import (
    ALL,
    apply,
    group_pairs,
    load_pairs,
    load_specs,
    protocols_of,
    published_of,
    published_rows,
    select,
)
from tests.scoring import bench

GOOD = bench.as_file(bench.PREDICTIONS)
PAIRS = bench.pairs()
PAIRS_SPEC = DATASETS["pairs"]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    folders = bench.write(tmp_path)
    return folders.clean, folders.predictions


def test_pairs_come_with_prediction_images_and_every_reference_in_the_order_of_the_records(folders, tmp_path):
    pairs, test_pairs = load_pairs(*folders)
    assert ([pair.id for pair in pairs], test_pairs) == (list(bench.PREDICTIONS), 6)
    assert [pair.prediction for pair in pairs] == list(bench.PREDICTIONS.values())
    assert [(pair.references, pair.change_types) for pair in pairs] == [(r, types) for _, types, r in bench.RECORDS]
    assert {pair.dataset for pair in pairs} == {"toy"}
    assert pairs[0].shuffled_prediction == bench.PREDICTIONS["toy/1"]
    assert (pairs[3].before, pairs[3].after) == (tmp_path / "3_before.png", tmp_path / "3_after.png")
    assert pairs[3].before_sha256 == hashlib.sha256(pairs[3].before.read_bytes()).digest() != pairs[3].after_sha256


@pytest.mark.fault("17")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (json.dumps(GOOD)[:100], "cannot be read .*; run `m3diff predict` again"),
        ("{}", "expected a list"),
        ('["a"]', "row 0: expected"),
        (json.dumps([*GOOD, {"image_id": "toy/0"}]), "row 6: expected"),
        (json.dumps([*GOOD, {"image_id": 7, "caption": "x"}]), "row 6: expected"),
        (json.dumps([*GOOD, GOOD[2]]), "captioned more than once: toy/2"),
        (json.dumps([*GOOD, *bench.as_file({f"else/{n}": "x" for n in range(8)})]), "else/0, .*, else/4 and 3 more"),
        (json.dumps(GOOD[:-2]), "no prediction for toy/4, toy/5; run `m3diff predict` again"),
        (None, "cannot be read .*No such file.*; run `m3diff predict`"),
    ],
)
def test_a_bad_file_of_predictions_is_refused_by_name_and_id(content, said: str, folders: tuple[Path, Path]):
    path = folders[1] / "predictions.json"
    path.unlink() if content is None else path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=said) as refused:
        load_pairs(*folders)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(("name", "told"), [("", "rows_out"), ("_shuffled", "control"), ("_reversed", "reversed")])
def test_fewer_predictions_are_taken_where_predict_says_that_it_made_so_many(name, told, folders):
    file = folders[1] / f"predictions{name}.json"
    (folders[1] / "predictions_shuffled.json").unlink()
    bench.write_json(file, GOOD[2:])
    with pytest.raises(DataError, match=rf"{file.name}: no prediction for toy/0, toy/1"):
        load_pairs(*folders)
    bench.write_json(folders[1] / "report.json", {"rows_out": 6, told: 4})
    pairs, test_pairs = load_pairs(*folders)
    assert test_pairs == 6
    captions = {
        "": [pair.prediction for pair in pairs],
        "_shuffled": [pair.shuffled_prediction for pair in pairs],
        "_reversed": [pair.reversed_prediction for pair in pairs],
    }
    assert captions[name] == ([] if name == "" else [None, None]) + [row["caption"] for row in GOOD[2:]]
    bench.write_json(file, GOOD[3:])  # one is lost after predict
    with pytest.raises(DataError, match=rf"{file.name}: no prediction for toy/0, toy/1, toy/2"):
        load_pairs(*folders)


@pytest.mark.fault("17")
def test_odd_records_and_captions_are_read_and_controls_are_optional(folders: tuple[Path, Path]):
    (folders[1] / "predictions.json").write_text(json.dumps(GOOD).replace("nothing changed", "a \\ud800 cube"))
    bench.write_json(folders[1] / "predictions_shuffled.json", [])
    bench.write_json(folders[1] / "report.json", {"rows_in": 6, "rows_out": 6, "control": 0})
    path = folders[0] / "records.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[1] |= {"references": [], "change_types": None}
    pq.write_table(pa.Table.from_pylist(rows, schema=RECORD_SCHEMA), path)
    pairs = load_pairs(*folders)[0]
    assert {(pair.shuffled_prediction, pair.reversed_prediction) for pair in pairs} == {(None, None)}
    assert (pairs[1].references, pairs[1].change_types, pairs[1].changes) == ([""], [], [])
    assert pairs[4].prediction == "a ? cube"
    pq.write_table(pq.read_table(path).slice(6), path)
    with pytest.raises(DataError, match="no record of the split 'test'"):
        load_pairs(*folders)


def test_pairs_are_grouped_by_change_type_and_number_of_changes_and_length():
    groups = {
        "change": ["toy/0", "toy/1", "toy/2", "toy/3"],
        "multi_change": ["toy/3"],
        "distractors": ["toy/4", "toy/5"],
        "by_type/color": ["toy/0"],
        "by_type/illumination": ["toy/2"],
        "by_type/removal": ["toy/1"],
        "by_changes/1": ["toy/0", "toy/1", "toy/2"],
        "by_changes/2": ["toy/3"],
        "by_length/1-9": ["toy/0", "toy/1", "toy/2"],
        "by_length/10-19": ["toy/3"],
    }
    assert group_pairs(PAIRS) == groups
    assert list(group_pairs(PAIRS)) == list(group_pairs(PAIRS[::-1])) == list(groups)
    for some in (PAIRS[:3], [PAIRS[3], *PAIRS[4:]]):  # where they do not tell pairs apart
        assert not [name for name in group_pairs(some) if name.startswith(("by_changes", "by_length"))]
    assert group_pairs([bench.pair("x", ["y"], [])]) == {"change": [], "multi_change": [], "distractors": []}
    mixed = bench.pair("x", ["y"], ["color", "none"])  # a distractor's only type is none
    assert (mixed.is_distractor, mixed.changes) == (False, ["color", "none"])
    types = ["color", "removal", "size", "pose"]
    pairs = [bench.pair("x", ["word " * n], types[:k], str(n)) for n, k in ((45, 3), (25, 1), (5, 4), (12, 2))]
    numbers = [f"by_changes/{k}" for k in (1, 2, 3, 4)]
    lengths = [f"by_length/{name}" for name in ("1-9", "10-19", "20-39", "40 or more")]
    assert list(group_pairs(pairs))[-8:] == numbers + lengths


LENGTHS = {(1,): "1-9", (9, 10): "1-9", (9, 11): "10-19", (19,): "10-19", (20, 0): "20-39", (39,): "20-39"}


@pytest.mark.parametrize(("words", "name"), (LENGTHS | {(40, 60): "40 or more", (0,): "1-9"}).items())
def test_a_pairs_length_is_the_mean_of_its_references_with_words(words: tuple[int, ...], name: str):
    pair = bench.pair("x", [" ".join(["word"] * count) for count in words], [], "a")
    others = [bench.pair("x", [text], [], other) for other, text in (("b", "one"), ("c", "word " * 50))]
    found = {group: ids for group, ids in group_pairs([pair, *others]).items() if group.startswith("by_length")}
    assert [group for group, ids in found.items() if "toy/a" in ids] == [f"by_length/{name}"]


def test_each_dataset_is_scored_by_itself_in_its_protocols_order():
    pairs = [PAIRS[0], replace(PAIRS[1], id="more/1", dataset="more"), PAIRS[2]]
    protocols = (Protocol("total", n=None), Protocol("first", n=1, ids="0"), Protocol("none", n=3, ids="[34]"))
    specs = {"toy": replace(PAIRS_SPEC, protocols=protocols), "more": PAIRS_SPEC, "empty": PAIRS_SPEC}
    found = select(pairs, specs)
    wanted = {"toy/total": ["toy/0", "toy/2"], "toy/first": ["toy/0"], "more/test": ["more/1"]}
    assert {one.name: [pair.id for pair in one.pairs] for one in found} == wanted
    assert (found[0].groups[ALL], found[0].groups["by_type/illumination"]) == (["toy/0", "toy/2"], ["toy/2"])


@pytest.mark.parametrize(
    ("protocol", "ids"),
    [
        (Protocol("even", n=3, ids="[024]"), ["toy/0", "toy/2", "toy/4"]),
        (Protocol("color", n=1, change_types=("color",)), ["toy/0"]),
        (Protocol("both", n=3, change_types=("removal", "color")), ["toy/0", "toy/1", "toy/3"]),
    ],
)
def test_a_protocol_takes_the_ids_that_it_names_whole_and_pairs_that_changed_in_its_ways_alone(protocol, ids):
    others = [bench.pair("x", ["y"], [], "20"), bench.pair("x", ["y"], [], "x")]  # nobody knows what changed
    assert [pair.id for pair in apply(protocol, [*PAIRS, *others])] == ids


@pytest.mark.parametrize(
    ("rules", "references", "captions"),
    [
        ({"references": "joined", "max_words": 3}, ["a b. c"], ["one two three", "four five six", "seven eight nine"]),
        ({"max_words": 1}, ["a", "c"], ["one", "four", "seven"]),
        ({"references": "joined"}, ["a b. c d"], ["one two three", "four five six", "seven eight nine"]),
        ({}, ["a b", "c d"], ["one  two three", "four five six", "seven eight nine"]),
    ],
)
def test_joined_references_are_one_text_and_every_text_is_cut_after_so_many_words(rules, references, captions):
    pair = bench.pair("one  two three", ["a b", "c d"], [])
    pair = replace(pair, shuffled_prediction="four five six", reversed_prediction="seven eight nine")
    (found,) = apply(Protocol("p", n=1, **rules), [pair])
    assert found.references == references
    assert [found.prediction, found.shuffled_prediction, found.reversed_prediction] == captions


def test_the_protocols_of_a_part_are_those_of_the_dataset_of_its_name():
    spec, change = DATASETS["omnidiff"], DATASETS["clevr_change"]
    assert {one.part for one in protocols_of("omnidiff_real", spec)} == {"omnidiff_real"}
    assert protocols_of("mine", spec) == (Protocol("test", n=None),)
    assert protocols_of("mine", change) == change.protocols


def test_the_reader_that_ingest_reports_says_which_dataset_it_is(tmp_path: Path):
    pairs = [PAIRS[0], replace(PAIRS[1], dataset="mine"), PAIRS[2]]
    for content in (None, "{}", '{"reader": "nothing"}'):
        if content is not None:
            (tmp_path / "toy.json").write_text(content)
        with pytest.raises(DataError, match=r"toy.json: .*licence of 'toy'.*known: .*clevr_change.*; run `m3diff in"):
            load_specs(tmp_path, pairs)
    for name, reader in {"toy": "pairs", "mine": "iedit"}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"reader": reader}))
    assert list(load_specs(tmp_path, pairs).items()) == [("toy", DATASETS["pairs"]), ("mine", DATASETS["iedit"])]


def test_a_protocol_stands_beside_the_figures_of_its_own_pairs_alone():
    by_type = {one.change_types[0]: one for one in DATASETS["clevr_change"].protocols if len(one.change_types) == 1}
    ours = {kind: published_of("clevr_change", one, False)[-1].scores["CIDEr"] for kind, one in by_type.items()}
    assert ours == {"color": 152.31, "material": 137.0, "add": 135.6, "drop": 133.1, "move": 99.8}
    whole, both = Protocol("total", n=7970), Protocol("semantic", n=None, change_types=("color", "move"))
    assert published_of("clevr_change", whole, True) == published_rows("clevr_change") != []
    assert published_of("clevr_change", whole, False) == published_of("clevr_change", both, False) == []
    assert published_of("spot_the_diff", by_type["color"], False) == []
    assert [row.method for row in published_rows("clevr_change") if row.chosen_on_test] == ["CLIP4IDC"]


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
    "marks of subwords": ["{} ##ing", "▁{}", "the Ġlamp {}", "{}Ċ", "{} ⁇", "{} \ufffd"],
    "a role or a prompt": [
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
    "words of a chat model to its user": [
        "Sure! Here is the caption: {}", "Certainly! {}", "Here's a one-sentence description: {}",
        "Based on the provided images, {}", "{} Let me know if you need more.", "Caption: {}", "Final Answer: {}",
    ],
    "a refusal": [
        "I'm sorry, I cannot see the images.", "As an AI language model, I {}", "I am unable to view images",
        "Please provide the images.", "I can't view {}", "I apologize, but {}",
    ],
    "a phrase over and over": [
        "{0} {0} {0} {0} {0}", "the the the the the {}", "{}" + " and the" * 5, "{} !!!!!!!!!!!!!!!!"
    ],
    "a placeholder": ["nan", "None", "[]", "N/A", "null", "-", "...", "undefined", "!!!!"],
    "letters of another script": ["两张图片的区别 {}", "лампа {}"],
}  # fmt: skip


@pytest.mark.parametrize("kind", MARKS)
def test_marks_are_counted_and_one_is_shown(kind: str):
    for variant in MARKS[kind]:
        marked = [variant.format(text) for text in TEXTS]
        (note,) = [note for note in notes_of_marks(marked) if note.startswith(f"6 of 6 captions hold {kind}, such as ")]
        shown = literal_eval(note.partition("such as ")[2].removesuffix("; scored unchanged"))
        assert shown in marked[0], variant
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

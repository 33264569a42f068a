"""Protocols, and the groups of pairs that have scores."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Protocol
from m3diff.records.errors import DataError
from m3diff.scoring.pairs import ALL_PAIRS, EvalPair
from m3diff.scoring.protocols import (
    ProtocolPairs,
    apply_protocol,
    find_text_ids,
    group_pairs,
    list_protocols,
    load_specs,
    note_scripts,
    select_protocols,
)
from tests.errors import raises
from tests.scoring import bench

PAIRS = bench.pairs()
PAIRS_SPEC = DATASETS["pairs"]
GROUPS = {
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


def test_pairs_are_grouped_by_change_type_number_of_changes_and_length():
    assert group_pairs(PAIRS) == GROUPS


@pytest.mark.parametrize("pairs", [PAIRS, PAIRS[::-1]], ids=["in order", "reversed"])
def test_groups_have_one_order_whatever_the_order_of_pairs(pairs):
    assert list(group_pairs(pairs)) == list(GROUPS)


@pytest.mark.parametrize("pairs", [PAIRS[:3], PAIRS[3:]], ids=["one change each", "one pair with changes"])
def test_groups_by_number_and_length_are_left_out_if_they_hold_all_pairs(pairs):
    assert not [name for name in group_pairs(pairs) if name.startswith(("by_changes", "by_length"))]


def test_a_pair_whose_change_is_not_known_is_in_no_group():
    assert group_pairs([bench.pair("x", ["y"], [])]) == {"change": [], "multi_change": [], "distractors": []}


def test_a_pair_with_a_change_type_beside_none_is_no_distractor():
    pair = bench.pair("x", ["y"], ["color", "none"])
    assert not pair.is_distractor
    assert pair.changes == ["color", "none"]


def test_groups_by_number_and_length_ascend():
    types = ["color", "removal", "size", "pose"]
    words_and_changes = [(45, 3), (25, 1), (5, 4), (12, 2)]
    pairs = [bench.pair("x", ["word " * words], types[:changes], str(words)) for words, changes in words_and_changes]
    by_changes = [f"by_changes/{changes}" for changes in (1, 2, 3, 4)]
    by_length = [f"by_length/{name}" for name in ("1-9", "10-19", "20-39", "40 or more")]
    assert list(group_pairs(pairs))[-8:] == by_changes + by_length


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((0,), "1-9"),
        ((1,), "1-9"),
        ((9, 10), "1-9"),
        ((9, 11), "10-19"),
        ((19,), "10-19"),
        ((20, 0), "20-39"),
        ((39,), "20-39"),
        ((40, 60), "40 or more"),
    ],
)
def test_a_pairs_length_is_the_mean_of_its_references_with_words(words: tuple[int, ...], name: str):
    pair = bench.pair("x", [" ".join(["word"] * count) for count in words], [], "a")
    short_pair = bench.pair("x", ["one"], [], "b")
    long_pair = bench.pair("x", ["word " * 50], [], "c")
    groups = group_pairs([pair, short_pair, long_pair])
    assert [group for group, ids in groups.items() if group.startswith("by_length") and "toy/a" in ids] == [
        f"by_length/{name}"
    ]


def test_each_dataset_is_scored_by_itself_in_its_protocols_order():
    pairs = [PAIRS[0], replace(PAIRS[1], id="more/1", dataset="more"), PAIRS[2]]
    protocols = (
        Protocol("total", published_pairs=None),
        Protocol("first", published_pairs=1, ids="0"),
        Protocol("none", published_pairs=3, ids="[34]"),
    )
    specs = {"toy": replace(PAIRS_SPEC, protocols=protocols), "more": PAIRS_SPEC, "empty": PAIRS_SPEC}
    selected = select_protocols(pairs, specs)
    assert {protocol.name: [pair.id for pair in protocol.pairs] for protocol in selected} == {
        "toy/total": ["toy/0", "toy/2"],
        "toy/first": ["toy/0"],
        "more/test": ["more/1"],
    }
    assert selected[0].groups[ALL_PAIRS] == ["toy/0", "toy/2"]
    assert selected[0].groups["by_type/illumination"] == ["toy/2"]


@pytest.mark.parametrize(
    ("protocol", "ids"),
    [
        (Protocol("even", published_pairs=3, ids="[024]"), ["toy/0", "toy/2", "toy/4"]),
        (Protocol("color", published_pairs=1, change_types=("color",)), ["toy/0"]),
        (Protocol("both", published_pairs=3, change_types=("removal", "color")), ["toy/0", "toy/1", "toy/3"]),
    ],
    ids=["by whole ids", "by one type", "by two types"],
)
def test_a_protocol_takes_pairs_by_whole_ids_and_by_their_change_types(protocol, ids):
    unknown_pairs = [bench.pair("x", ["y"], [], "20"), bench.pair("x", ["y"], [], "x")]  # nobody knows what changed
    assert [pair.id for pair in apply_protocol(protocol, [*PAIRS, *unknown_pairs])] == ids


@pytest.mark.parametrize(
    ("rules", "references", "captions"),
    [
        ({"references": "joined", "max_words": 3}, ["a b. c"], ["one two three", "four five six", "seven eight nine"]),
        ({"max_words": 1}, ["a", "c"], ["one", "four", "seven"]),
        ({"references": "joined"}, ["a b. c d"], ["one two three", "four five six", "seven eight nine"]),
        ({}, ["a b", "c d"], ["one  two three", "four five six", "seven eight nine"]),
    ],
    ids=["joined and cut", "cut", "joined", "as they are"],
)
def test_references_are_joined_and_every_text_is_cut_by_the_protocol(rules, references, captions):
    pair = bench.pair("one  two three", ["a b", "c d"], [])
    pair = replace(pair, shuffled_prediction="four five six", reversed_prediction="seven eight nine")
    (scored_pair,) = apply_protocol(Protocol("p", published_pairs=1, **rules), [pair])
    assert scored_pair.references == references
    predictions = [scored_pair.prediction, scored_pair.shuffled_prediction, scored_pair.reversed_prediction]
    assert predictions == captions


def test_a_part_of_a_dataset_has_the_protocols_of_its_name():
    protocols = list_protocols("omnidiff_real", DATASETS["omnidiff"])
    assert {protocol.part for protocol in protocols} == {"omnidiff_real"}


def test_a_dataset_without_protocols_has_one_of_all_pairs():
    assert list_protocols("mine", DATASETS["omnidiff"]) == (Protocol("test", published_pairs=None),)


def test_a_dataset_of_another_name_has_the_protocols_of_its_reader():
    assert list_protocols("mine", DATASETS["clevr_change"]) == DATASETS["clevr_change"].protocols


@pytest.mark.parametrize(
    ("content", "reader"),
    [(None, ""), ("{}", None), ('{"reader": "nothing"}', "nothing")],
    ids=["no report", "no reader", "unknown"],
)
def test_a_dataset_without_a_known_reader_is_refused(content: str | None, reader: str | None, tmp_path: Path):
    if content is not None:
        (tmp_path / "toy.json").write_text(content)
    expected = {"value": reader, "dataset": "toy", "names": list(DATASETS)}
    with raises(DataError, "scoring.reader_unknown", path=tmp_path / "toy.json", **expected):
        load_specs(tmp_path, PAIRS)


def test_the_reader_in_ingests_report_says_which_dataset_it_is(tmp_path: Path):
    pairs = [PAIRS[0], replace(PAIRS[1], dataset="mine"), PAIRS[2]]
    for name, reader in {"toy": "pairs", "mine": "iedit"}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"reader": reader}))
    assert list(load_specs(tmp_path, pairs).items()) == [("toy", DATASETS["pairs"]), ("mine", DATASETS["iedit"])]


@pytest.mark.parametrize(
    "content", [b"", b'{"reader": "pairs"', b"[]", b"\xff\xfe"], ids=["empty", "truncated", "a list", "not text"]
)
def test_a_malformed_report_of_ingest_is_refused(content: bytes, tmp_path: Path):
    (tmp_path / "toy.json").write_bytes(content)
    with raises(DataError, "files.unreadable_stage_output", path=tmp_path / "toy.json", writer="ingest"):
        load_specs(tmp_path, PAIRS)


def test_a_reader_that_is_no_name_is_refused(tmp_path: Path):
    (tmp_path / "toy.json").write_text('{"reader": ["pairs"]}')
    with raises(DataError, "scoring.reader_unknown", path=tmp_path / "toy.json", value=["pairs"]):
        load_specs(tmp_path, PAIRS)


def make_question(number: int, *references: str, kind: str | None = None, question: str | None = "?") -> EvalPair:
    return replace(bench.pair("", list(references), [], name=str(number)), question=question, kind=kind)


@pytest.mark.parametrize(
    ("answers", "are_texts"),
    [
        ((["no change"], ["the red cube became dark blue"]), True),
        ((["no"], ["a cube fell"], ["yes it did", ""]), False),
        ((["新增了一栋"],), True),
        ((["新增"],), False),
        (([""],), False),
    ],
    ids=["four words on average", "shorter", "characters count as words", "few characters", "no words"],
)
def test_answers_of_a_kind_are_texts_if_they_have_four_words_on_average(answers, are_texts):
    pairs = [make_question(number, *references) for number, references in enumerate(answers)]
    pairs += [make_question(8, "yes", kind="other"), make_question(9, "gone", question=None)]
    text_ids = {pair.id for pair in pairs[: len(answers)]} if are_texts else set()
    assert find_text_ids(pairs) == text_ids | {"toy/9"}


def test_some_pairs_of_a_protocol_are_in_its_groups():
    pairs = [
        make_question(0, "yes", kind="a/b"),
        make_question(1, "one two three four five", kind="c"),
        make_question(2, "x", question=None),
    ]
    protocol = ProtocolPairs("toy", Protocol("test", published_pairs=None), pairs)
    selected = {records: protocol.select(records) for records in ("questions", "captions", "texts")}
    assert {records: [pair.id for pair in selection.pairs] for records, selection in selected.items()} == {
        "questions": ["toy/0", "toy/1"],
        "captions": ["toy/2"],
        "texts": ["toy/1", "toy/2"],
    }
    assert protocol.groups["by_kind/a/b"] == ["toy/0"]
    assert selected["texts"].groups["by_kind/a/b"] == []
    assert selected["texts"].groups["by_kind/c"] == ["toy/1"]
    assert selected["texts"].groups[ALL_PAIRS] == ["toy/1", "toy/2"]
    assert selected["captions"].select("captions") is selected["captions"]
    only_captions = replace(protocol, pairs=pairs[2:])
    assert only_captions.select("texts") is only_captions
    assert not any(group.startswith("by_kind") for group in only_captions.groups)


def test_short_answers_are_in_no_group_by_length_and_do_not_count_as_a_script():
    texts = [make_question(n, "ein Haus wurde gebaut " * n, question=None) for n in (1, 4)]
    answers = [make_question(n, "新增", kind="short") for n in range(5, 9)]
    protocol = ProtocolPairs("toy", Protocol("test", published_pairs=None), [*texts, *answers])
    assert protocol.groups["by_length/1-9"] == ["toy/1"]
    assert protocol.groups["by_length/10-19"] == ["toy/4"]
    assert protocol.script_counts.texts == 2
    assert not protocol.counts_characters


@pytest.mark.parametrize(
    ("chinese", "english", "beginnings"),
    [
        (1, 0, ["toy/test: 1 of 1 reference has no spaces between words ("]),
        (1, 9, ["toy/test: 1 of 10 references have no spaces between words ("]),
        (2, 19, ["toy/test: 2 of 21 references have no spaces between words. This is less than 10%"]),
        (0, 9, []),
    ],
    ids=["all", "a tenth", "fewer", "none"],
)
def test_references_without_spaces_are_counted_in_a_note(chinese, english, beginnings):
    texts = ["新增了一栋"] * chinese + ["a house is new"] * english
    pairs = [make_question(number, text, question=None) for number, text in enumerate(texts)]
    protocol = ProtocolPairs("toy", Protocol("test", published_pairs=None), pairs)
    notes = note_scripts(protocol)
    assert len(notes) == len(beginnings)
    assert all(note.startswith(beginning) for note, beginning in zip(notes, beginnings, strict=True)), notes

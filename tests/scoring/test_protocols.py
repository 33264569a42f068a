import json
from dataclasses import replace
from pathlib import Path

import pytest

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Protocol
from m3diff.records.errors import DataError
from m3diff.scoring.metrics.metric import ALL
from m3diff.scoring.protocols import ProtocolPairs, apply, group_pairs, load_specs, protocols_of, select
from tests.scoring import bench

PAIRS = bench.pairs()
PAIRS_SPEC = DATASETS["pairs"]


def names(pairs: list) -> list[str]:
    return [pair.id for pair in pairs]


def test_pairs_are_grouped_by_change_type_and_number_of_changes():
    assert group_pairs(PAIRS) == {
        "change": ["toy/0", "toy/1", "toy/2", "toy/3"],
        "distractors": ["toy/4", "toy/5"],
        "multi_change": ["toy/3"],
        "by_type/color": ["toy/0"],
        "by_type/illumination": ["toy/2"],
        "by_type/removal": ["toy/1"],
        "by_changes/1": ["toy/0", "toy/1", "toy/2"],
        "by_changes/2": ["toy/3"],
        "by_length/1-9": ["toy/0", "toy/1", "toy/2"],
        "by_length/10-19": ["toy/3"],
    }


def test_groups_by_number_and_length_are_there_only_where_they_tell_pairs_apart():
    assert {name for name in group_pairs(PAIRS[:3]) if name.startswith(("by_changes", "by_length"))} == set()
    assert {
        name for name in group_pairs([PAIRS[3], *PAIRS[4:]]) if name.startswith(("by_changes", "by_length"))
    } == set()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((1,), "1-9"),
        ((9, 10), "1-9"),
        ((9, 11), "10-19"),
        ((19,), "10-19"),
        ((20, 0), "20-39"),
        ((39,), "20-39"),
        ((40, 60), "40 or more"),
        ((0,), "1-9"),
    ],
)
def test_a_pairs_length_is_the_mean_of_its_references_with_words(words: tuple[int, ...], name: str):
    pair = bench.pair("x", [" ".join(["word"] * count) for count in words], [], "a")
    others = [bench.pair("x", [text], [], other) for other, text in (("b", "one"), ("c", "word " * 50))]
    found = {group: ids for group, ids in group_pairs([pair, *others]).items() if group.startswith("by_length")}
    assert "toy/a" in found[f"by_length/{name}"]
    assert sum(ids.count("toy/a") for ids in found.values()) == 1


def test_lengths_stand_in_order_of_length_and_numbers_of_changes_by_number():
    types = ["color", "removal", "size", "pose"]
    pairs = [bench.pair("x", ["word " * n], types[:k], str(n)) for n, k in ((45, 3), (25, 1), (5, 4), (12, 2))]
    assert [name for name in group_pairs(pairs) if name.startswith("by_length")] == [
        "by_length/1-9",
        "by_length/10-19",
        "by_length/20-39",
        "by_length/40 or more",
    ]
    assert [name for name in group_pairs(pairs) if name.startswith("by_changes")] == [
        f"by_changes/{k}" for k in (1, 2, 3, 4)
    ]


def test_groups_stand_in_a_fixed_order_whatever_the_order_of_the_pairs():
    assert list(group_pairs(PAIRS)) == list(group_pairs(PAIRS[::-1]))
    assert list(group_pairs(PAIRS))[:3] == ["change", "multi_change", "distractors"]


def test_pairs_of_unknown_type_are_neither_changes_nor_distractors():
    assert group_pairs([bench.pair("x", ["y"], [])]) == {"change": [], "multi_change": [], "distractors": []}


def test_each_dataset_is_scored_by_itself_in_its_protocols_order():
    pairs = [PAIRS[0], replace(PAIRS[1], id="more/1", dataset="more"), PAIRS[2]]
    two = replace(PAIRS_SPEC, protocols=(Protocol("total", n=None), Protocol("first", n=1, ids="0")))
    found = select(pairs, {"toy": two, "more": PAIRS_SPEC, "empty": PAIRS_SPEC})
    assert {one.name: names(one.pairs) for one in found} == {
        "toy/total": ["toy/0", "toy/2"],
        "toy/first": ["toy/0"],
        "more/test": ["more/1"],
    }
    assert found[0].groups[ALL] == ["toy/0", "toy/2"]
    assert found[0].groups["by_type/illumination"] == ["toy/2"]
    assert list(found[0].groups)[0] == ALL


def test_a_protocol_without_a_pair_is_not_scored():
    one = replace(PAIRS_SPEC, protocols=(Protocol("even", n=3, ids="[024]"),))
    assert select([bench.pair("x", ["y"], [], "20")], {"toy": one}) == []


def test_a_protocol_takes_the_ids_that_it_names_whole():
    even = Protocol("even", n=3, ids="[024]")
    assert names(apply(even, PAIRS)) == ["toy/0", "toy/2", "toy/4"]


def test_a_protocol_by_type_takes_pairs_that_changed_in_that_way_alone():
    assert names(apply(Protocol("color", n=1, change_types=("color",)), PAIRS)) == ["toy/0"]
    both = Protocol("both", n=3, change_types=("removal", "color"))
    assert names(apply(both, PAIRS)) == ["toy/0", "toy/1", "toy/3"]
    assert apply(both, [bench.pair("x", ["y"], [])]) == []  # nobody knows what changed


def test_joined_references_are_one_text_and_every_text_is_cut_after_so_many_words():
    pair = replace(
        bench.pair("one  two three", ["a b", "c d"], []),
        shuffled_prediction="four five six",
        reversed_prediction="seven eight nine",
    )
    (found,) = apply(Protocol("joined", n=1, references="joined", max_words=3), [pair])
    assert found.references == ["a b. c"]
    assert (found.prediction, found.shuffled_prediction) == ("one two three", "four five six")
    (found,) = apply(Protocol("cut", n=1, max_words=1), [pair])
    assert (found.references, found.prediction, found.shuffled_prediction) == (["a", "c"], "one", "four")
    assert found.reversed_prediction == "seven"
    (found,) = apply(Protocol("joined", n=1, references="joined"), [pair])
    assert (found.references, found.prediction) == (["a b. c d"], "one two three")
    assert apply(Protocol("total", n=1), [pair]) == [pair]


def test_the_protocols_of_a_part_are_those_of_the_dataset_of_its_name():
    spec = DATASETS["omnidiff"]
    parts = {protocol.part for protocol in spec.protocols}
    for part in parts:
        assert {protocol.part for protocol in protocols_of(str(part), spec)} == {part}
    assert protocols_of("mine", spec) == (Protocol("test", n=None),)
    change = DATASETS["clevr_change"]
    assert protocols_of("mine", change) == change.protocols
    on_val = replace(change, protocols=(replace(change.protocols[1], split="val"),))
    assert protocols_of("mine", on_val) == (Protocol("test", n=None),)


def test_a_protocol_is_named_by_dataset_and_protocol():
    assert ProtocolPairs("toy", Protocol("even", n=3), []).name == "toy/even"


def test_the_reader_that_ingest_reports_says_which_dataset_it_is(tmp_path: Path):
    for name, reader in {"toy": "pairs", "mine": "iedit"}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"reader": reader}))
    assert load_specs(tmp_path, ["toy", "mine"]) == {"toy": DATASETS["pairs"], "mine": DATASETS["iedit"]}


def test_without_ingests_report_the_licence_is_unknown_and_the_run_refused(tmp_path: Path):
    with pytest.raises(
        DataError, match="toy.json: no such file, so the licence of 'toy' is unknown; run `m3diff ingest`"
    ):
        load_specs(tmp_path, ["toy"])


@pytest.mark.parametrize("content", ["{}", '{"reader": "nothing"}'])
def test_an_unknown_reader_is_named_with_those_known(content: str, tmp_path: Path):
    (tmp_path / "toy.json").write_text(content)
    with pytest.raises(
        DataError, match=r"toy.json: reader .* is unknown; known: .*clevr_change.*; run `m3diff ingest`"
    ):
        load_specs(tmp_path, ["toy"])
